"""One replica of a fleet: a Core under its own driver process, life after life, and what a router sees of it.

Invariants
* The engine is the one of `simulate`: same Core, same loop, same executor; a fleet only feeds its inbox.
* A piece is a request as one replica sees it: a whole one, its prefill, its decoding, or what was left after a failure.
  Its id is unique in the fleet; `pieces` holds those that have not ended here.
* Counts for routers change when a piece comes or goes, never per step; what is exact is read from the Core when asked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import simpy

from twinfer.core.events import Finished, Output, Submit
from twinfer.core.fleet import Pool
from twinfer.core.plan import StepPlan, StepResult
from twinfer.core.recorder import Recorder
from twinfer.core.request import Request
from twinfer.core.request import Sequence as Sample
from twinfer.simulator.driver import SimInbox, engine
from twinfer.simulator.run import ShouldStop, StoppableExecutor, World

if TYPE_CHECKING:
    from twinfer.simulator.prefix_index import PrefixIndex

OnOutputs = Callable[["Replica", Sequence[Output], float], None]
OnLaunch = Callable[["Replica", StepPlan, float], None]


class Piece:
    """A request as one replica sees it, and the `job` it is part of."""

    __slots__ = ("job", "left", "request")

    def __init__(self, job: Any, request: Request) -> None:
        self.job = job
        self.request = request
        self.left = request.params.num_samples  # samples that have not ended


class ReplicaExecutor(StoppableExecutor):
    """Tells the fleet of plans that move KV; `watch` makes it tell of every plan."""

    on_launch: Callable[[StepPlan, float], None] | None = None
    watch = False

    def execute(self, plan: StepPlan) -> StepResult:
        result = super().execute(plan)
        if (plan.moves or self.watch) and self.on_launch is not None:
            self.on_launch(plan, result.seconds)
        return result


class Replica:
    """A `ReplicaView` (`core/routing.py`), and all the fleet does with one engine.

    state: "off", "starting", "serving", "draining" (takes no new requests) or "failed".
    """

    def __init__(
        self,
        env: simpy.Environment,
        index: int,
        pool: Pool,
        world: World,
        recorder: Recorder,
        *,
        scale: float = 1.0,
        hook: Any = None,
        skip: bool = True,
        should_stop: ShouldStop | None = None,
        on_outputs: OnOutputs,
        on_launch: OnLaunch | None = None,
        history: PrefixIndex | None = None,
    ) -> None:
        self._env = env
        self._hook, self._skip = hook, skip
        self._history = history
        self._on_outputs = on_outputs
        self.index = index
        self.pool = pool
        self.world = world
        self.recorder = recorder
        self.executor = ReplicaExecutor(world.timer, scale, recorder.keep_ops and recorder.detail == "steps")
        self.executor.should_stop = should_stop
        if on_launch is not None:
            self.executor.on_launch = lambda plan, seconds: on_launch(self, plan, seconds)
        self.state = "off"
        self.pieces: dict[str, Piece] = {}
        self.num_requests = 0
        self.num_tokens = 0
        self.last_pick = -1
        self.num_failures = 0
        self.alive_s = 0.0  # seconds of earlier lives
        self._since: float | None = None  # it is paid for since then
        self.core = world.setup.build_core()
        self.inbox = SimInbox(env)
        self.process: simpy.Event | None = None

    # --- lives ----------------------------------------------------------------------------------

    def rent(self) -> None:
        """From now on it costs money, though it may not serve yet."""
        if self._since is None:
            self._since = self._env.now

    def start(self) -> None:
        """An empty engine begins to run."""
        if self.process is not None or self.inbox.closed:
            self.core = self.world.setup.build_core()
            self.inbox = SimInbox(self._env)
        self.rent()
        self.state = "serving"
        self.process = self._env.process(
            engine(self._env, self.core, self.executor, self.inbox, self.recorder, self._emit, self._hook, self._skip)
        )

    def stop(self) -> None:
        """It has nothing left to do and goes."""
        self.state = "off"
        self.inbox.close()
        if self._since is not None:
            self.alive_s += self._env.now - self._since
            self._since = None

    def rented_s(self) -> float:
        """Seconds that it has been paid for, until now."""
        return self.alive_s + (0.0 if self._since is None else self._env.now - self._since)

    def _emit(self, outputs: Sequence[Output], now: float) -> None:
        self._on_outputs(self, outputs, now)

    # --- work -----------------------------------------------------------------------------------

    def take(self, piece: Piece, number: int) -> None:
        """Hand a piece to the engine. number: of this pick, counted over the fleet."""
        request = piece.request
        self.pieces[request.id] = piece
        self.num_requests += 1
        self.num_tokens += len(request.prompt)
        self.last_pick = number
        self.inbox.put(Submit(request))

    def release(self, piece_id: str) -> Piece | None:
        """The piece has ended here (or is taken away); None when it had before."""
        piece = self.pieces.pop(piece_id, None)
        if piece is not None:
            self.num_requests -= 1
            self.num_tokens -= len(piece.request.prompt)
        return piece

    def lose(self, now: float, why: str) -> list[tuple[Piece, int]]:
        """After a failure: every open piece with the tokens that its first sample has told, oldest first."""
        lost = []
        for piece_id in list(self.pieces):
            piece = self.release(piece_id)
            assert piece is not None
            samples = self.core.requests.get(piece_id, [])
            told = len(samples[0].output) if samples else 0
            for seq in samples:
                self.recorder.output(
                    Finished(
                        piece_id, seq.index, "abort", why, num_output_tokens=told, num_cached_tokens=seq.num_cached
                    ),
                    now,
                )
            lost.append((piece, told))
        return lost

    # --- what routers see -----------------------------------------------------------------------

    @property
    def num_blocks(self) -> int:
        return self.core.limits.num_blocks

    @property
    def free_blocks(self) -> int:
        self.inbox.settle()
        return self.core.ledger.pool.available

    @property
    def block_size(self) -> int:
        return self.core.ledger.block_size

    def routed_tokens(self, request: Request) -> int:
        return 0 if self._history is None else self._history.depths(request).get(self.index, 0)

    def cached_tokens(self, request: Request) -> int:
        self.inbox.settle()
        ledger = self.core.ledger
        return ledger.hits(Sample(request, 0, 0, 0, 0)).length * ledger.block_size


__all__ = ["Piece", "Replica"]
