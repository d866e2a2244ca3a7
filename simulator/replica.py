"""One replica of a fleet: its ranks under their drivers, life after life, and what a router sees of it.

    piece -> the rank with the fewest open requests -> Core          one rank, unless the layout has several (`--dp`)

Invariants
* Each rank is an engine of its own, with its queue, pool and prefix cache. Ranks that share experts take their steps
  together (`pipeline.Lockstep`), others know nothing of each other. They start, fail and stop together.
* A piece is a request as one replica sees it: a whole one, its prefill, its decoding, or what was left after a failure.
  Its id is unique in the fleet; `pieces` holds those that have not ended here.
* Counts for routers change when a piece comes or goes, never per step; what is exact is read from the Core when asked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import simpy

from twinfer.core.events import Abort, Finished, Output, Submit, TransferDone, TransferFailed
from twinfer.core.fleet import Pool
from twinfer.core.plan import StepPlan
from twinfer.core.recorder import Recorder
from twinfer.core.request import Request
from twinfer.core.request import Sequence as Sample
from twinfer.simulator.pipeline import Lockstep, StagedTimer
from twinfer.simulator.rank import Rank
from twinfer.simulator.run import ShouldStop, World

if TYPE_CHECKING:
    from twinfer.simulator.prefix_index import PrefixIndex

OnOutputs = Callable[["Replica", Sequence[Output], float], None]
OnLaunch = Callable[["Replica", StepPlan, float], None]


class Piece:
    """A request as one replica sees it, the `job` it is part of, and the `rank` that has it."""

    __slots__ = ("job", "left", "rank", "request")

    def __init__(self, job: Any, request: Request) -> None:
        self.job = job
        self.request = request
        self.rank: Rank | None = None
        self.left = request.params.num_samples  # samples that have not ended


class Replica:
    """A `ReplicaView` (`core/routing.py`), and all the fleet does with one replica.

    state: "off", "starting", "serving", "draining" (takes no new requests) or "failed".
    """

    def __init__(
        self,
        env: simpy.Environment,
        index: int,
        pool: Pool,
        world: World,
        recorder: Callable[[], Recorder],
        *,
        scale: float = 1.0,
        hook: Any = None,
        skip: bool = True,
        should_stop: ShouldStop | None = None,
        on_outputs: OnOutputs,
        on_launch: OnLaunch | None = None,
        watch: bool = False,
        history: PrefixIndex | None = None,
    ) -> None:
        self._env = env
        self._hook, self._skip = hook, skip
        self._history = history
        self._on_outputs = on_outputs
        self.index = index
        self.pool = pool
        self.world = world
        self.watch = watch
        self.ranks = [Rank(env, i, world, recorder(), scale) for i in range(world.setup.config.dp)]
        for rank in self.ranks:
            rank.executor.should_stop = should_stop
            rank.executor.watch = watch
            if on_launch is not None:
                rank.executor.on_launch = lambda plan, seconds: on_launch(self, plan, seconds)
        self.state = "off"
        self.pieces: dict[str, Piece] = {}
        self.num_requests = 0
        self.num_tokens = 0
        self.last_pick = -1
        self.num_failures = 0
        self.alive_s = 0.0  # seconds of earlier lives
        self._since: float | None = None  # it is paid for since then
        self._line: Lockstep | None = None
        self._homes: dict[str, Rank] = {}  # of all pieces of this life, where there are several ranks

    # --- lives ----------------------------------------------------------------------------------

    def rent(self) -> None:
        """From now on it costs money, though it may not serve yet."""
        if self._since is None:
            self._since = self._env.now

    def start(self) -> None:
        """Empty engines begin to run."""
        self.rent()
        self.state = "serving"
        self._homes = {}
        for rank in self.ranks:
            rank.renew()
        timer = self.world.timer
        if len(self.ranks) > 1 and isinstance(timer, StagedTimer) and timer.shares_experts:
            executors = [rank.executor for rank in self.ranks]
            self._line = Lockstep(self._env, timer, executors, self.world.setup.limits.max_outstanding)
        for rank in self.ranks:
            rank.start(self._emit, self._hook, self._skip, self._line)

    def stop(self) -> None:
        """It has nothing left to do and goes."""
        self.state = "off"
        for rank in self.ranks:
            rank.inbox.close()
        if self._since is not None:
            self.alive_s += self._env.now - self._since
            self._since = None

    def fail(self) -> None:
        """It breaks at this moment: steps in progress are lost, nothing more is told."""
        if self._line is not None:
            self._line.broken = True
        for rank in self.ranks:
            rank.inbox.fail()

    @property
    def ended(self) -> simpy.Event | None:
        """Happens when all ranks have ended; None when none ever ran."""
        running = [rank.process for rank in self.ranks if rank.process is not None]
        if len(running) == 1:
            return running[0]
        return simpy.AllOf(self._env, running) if running else None

    def rented_s(self) -> float:
        """Seconds that it has been paid for, until now."""
        return self.alive_s + (0.0 if self._since is None else self._env.now - self._since)

    def _emit(self, outputs: Sequence[Output], now: float) -> None:
        self._on_outputs(self, outputs, now)

    # --- what it has done -----------------------------------------------------------------------

    @property
    def num_steps(self) -> int:
        """Of this life."""
        return sum(rank.core.num_steps for rank in self.ranks)

    @property
    def busy_s(self) -> float:
        """Seconds that its ranks computed, on average (before scaling)."""
        return sum(rank.executor.busy for rank in self.ranks) / len(self.ranks)

    # --- work -----------------------------------------------------------------------------------

    def take(self, piece: Piece, number: int) -> None:
        """Hand a piece to an engine. number: of this pick, counted over the fleet."""
        request = piece.request
        rank = piece.rank = self._least_loaded()
        if len(self.ranks) > 1:
            self._homes[request.id] = rank
        self.pieces[request.id] = piece
        self.num_requests += 1
        self.num_tokens += len(request.prompt)
        self.last_pick = rank.last_pick = number
        rank.num_requests += 1
        rank.inbox.put(Submit(request))

    def tell(self, event: Abort | TransferDone | TransferFailed) -> None:
        """Hand an event of one of its pieces, or of a sample of one, to its engine."""
        name = event.request_id if isinstance(event, Abort) else event.seq
        self._home(name).inbox.put(event)

    def _home(self, name: str) -> Rank:
        if len(self.ranks) == 1:
            return self.ranks[0]
        return self._homes.get(name) or self._homes[name.rpartition("/")[0]]

    def _least_loaded(self) -> Rank:
        return min(self.ranks, key=lambda rank: (rank.num_requests, rank.last_pick, rank.index))

    def release(self, piece_id: str) -> Piece | None:
        """The piece has ended here (or is taken away); None when it had before."""
        piece = self.pieces.pop(piece_id, None)
        if piece is not None:
            assert piece.rank is not None
            piece.rank.num_requests -= 1
            self.num_requests -= 1
            self.num_tokens -= len(piece.request.prompt)
        return piece

    def lose(self, now: float, why: str) -> list[tuple[Piece, int]]:
        """After a failure: every open piece with the tokens that its first sample has told, oldest first."""
        lost = []
        for piece_id in list(self.pieces):
            piece = self.release(piece_id)
            assert piece is not None and piece.rank is not None
            samples = piece.rank.core.requests.get(piece_id, [])
            told = len(samples[0].output) if samples else 0
            for seq in samples:
                piece.rank.recorder.output(
                    Finished(
                        piece_id, seq.index, "abort", why, num_output_tokens=told, num_cached_tokens=seq.num_cached,
                        num_hit_tokens=seq.num_hit or 0,
                    ),
                    now,
                )  # fmt: skip
            lost.append((piece, told))
        return lost

    # --- what routers see -----------------------------------------------------------------------

    @property
    def num_blocks(self) -> int:
        return sum(rank.core.limits.num_blocks for rank in self.ranks)

    @property
    def free_blocks(self) -> int:
        for rank in self.ranks:
            rank.inbox.settle()
        return sum(rank.core.ledger.pool.available for rank in self.ranks)

    @property
    def block_size(self) -> int:
        return self.ranks[0].core.ledger.block_size

    def routed_tokens(self, request: Request) -> int:
        return 0 if self._history is None else self._history.depths(request).get(self.index, 0)

    def cached_tokens(self, request: Request) -> int:
        """On the rank that would get it."""
        rank = self._least_loaded()
        rank.inbox.settle()
        ledger = rank.core.ledger
        return ledger.hits(Sample(request, 0, 0, 0, 0)).length * ledger.block_size


__all__ = ["Piece", "Replica"]
