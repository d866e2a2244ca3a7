"""One pass over a scheduler's proposals: turns wants into rows, within limits and memory.

Invariants
* Lists that the scheduler may be iterating (`running`, `waiting`) change only after it is done.
* A sequence gets at most one row a step; a sequence preempted in this pass is not admitted in it.
* The first admission that memory refuses closes admission for this step, so a small request never
  starves a large one that is ahead of it. Gates do not close it.
* Blocks of a sequence with rows in outstanding steps are never taken from it.
* Where steps go through a pipeline, a sequence whose token is on its way gets no row; chunks of a prompt may follow
  each other.
* With sliding windows a row of several tokens is cut to the blocks that nobody holds (at least one token is asked
  for): as it commits, blocks come back. So whatever fits alone token by token fits in chunks, too, and no chunk
  preempts anyone for room that its own window is about to leave.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

from twinfer.core.admission import way_in
from twinfer.core.guard import FAULTS, fault, unusable, whole
from twinfer.core.plan import HOLE, Copy, FromStep, Grant, Move, Need, Row, Swap, Token
from twinfer.core.policy import Defer, Shortage, View, Want
from twinfer.core.request import Sequence, Status

if TYPE_CHECKING:
    from twinfer.core.core import Core
    from twinfer.core.flock import Flock

_RUNNING, _WAITING = Status.RUNNING, Status.WAITING
_NONE, _BEAM = Need.NONE, Need.BEAM
_T = TypeVar("_T")
Tokens = Seq[Token] | Seq[int]


class Planner:
    """Collects the rows, grants, copies, swap-ins and moves of one step."""

    def __init__(self, core: Core, now: float, flock: Flock | None = None) -> None:
        self.core = core
        self.ledger = core.ledger
        self.now = now
        self.step = core.num_steps
        # Members of a flock have their rows already: they need no more than to be counted.
        self.running = core.running if flock is None else flock.young
        self.members: Mapping[str, object] = {} if flock is None else flock.members.all
        counted = 0 if flock is None else flock.num_rows
        self.max_rows = core.limits.max_rows - counted
        self.budget = core.limits.max_num_batched_tokens - counted
        self.staged = core.limits.num_stages > 1
        self.rows: list[Row] = []
        self.grants: list[Grant] = []
        self.copies: list[Copy] = []
        self.moves: list[Move] = []
        self.swap_ins: list[Swap] = []
        self.emptied: list[int] = []  # host blocks that are free once this step is launched
        self.defer: float | None = None
        self.preempted_any = False
        self.admitted: list[Sequence] = []
        self._num_admitted_rows = 0
        self._preempted: list[Sequence] = []
        self._closed = False
        self._refused: tuple[Sequence, str] | None = None
        self.shut: tuple[Sequence, int | None] | None = None  # who closed admission, see `_close`
        self._view: View | None = None

    def run(self) -> None:
        core = self.core
        self._send()
        if core.running or core.waiting:
            view = self._view = core.view(self.now, lambda: self._closed, self.running)
            sequences, rows, max_rows = core.sequences, self.rows, self.max_rows
            for want in self._ask("propose", lambda: core.scheduler.propose(view)):
                if not isinstance(want, Want):
                    self._not_a_want(want)
                    continue
                if self.budget <= 0 or len(rows) >= max_rows:
                    break
                seq, num_tokens, partial = want
                if type(num_tokens) is not int or type(seq) is not Sequence:
                    self._refuse_odd(want)
                if sequences.get(seq.id) is not seq or num_tokens < 1:  # ended, never of this core, or nothing asked
                    continue
                if seq.status is _RUNNING:
                    self._continue(seq, num_tokens, partial)
                elif seq.status is _WAITING and not self._closed and seq not in self._preempted:
                    self._admit(seq, want)
            self._view = None  # it leads back here: a cycle for the collector of garbage in every step
        self._settle()

    def _refuse_odd(self, want: Want) -> None:
        if not (isinstance(want.num_tokens, int) and isinstance(want.seq, Sequence)):
            raise unusable(
                "scheduler", self.core.scheduler, "propose", want, "a Want of a Sequence of the view and a whole number"
            )

    def _not_a_want(self, proposed: object) -> None:
        if not isinstance(proposed, Defer) or not isinstance(proposed.until, int | float):
            wanted = "Want(sequence, num_tokens) or Defer(until) with a time in s"
            raise unusable("scheduler", self.core.scheduler, "propose", proposed, wanted)
        if proposed.until > self.now:
            self.defer = proposed.until if self.defer is None else min(self.defer, proposed.until)

    def _continue(self, seq: Sequence, asked: int, partial: bool) -> None:
        """A row for a running sequence, unless it has one already or nothing to feed."""
        inflight, awaiting, drafts = seq.inflight, seq.awaiting, seq.drafts
        # With drafts out, how far the cache is valid is known only when the step is done.
        if inflight and (drafts or seq.last_step == self.step):
            return
        if awaiting and self.staged:  # its token is in another stage
            return
        start = seq.computed + inflight
        known = seq.prompt_len + len(seq.output)
        total = known + len(awaiting) if awaiting else known
        remaining = (total if total < seq.limit else seq.limit - 1) - start
        if remaining == 1 and known == total and not drafts and start >= seq.prompt_len:
            # The next token of an answer: all that decoding is, and most of what a core does.
            if start < self.ledger.tables[seq.id].open or self._grow(seq, start, total):
                self._row(seq, start, (seq.output[-1],), 0, seq.need, 1)
            return
        if remaining < 1:
            return
        if asked > remaining:
            asked = remaining
        n = asked if asked < self.budget else self.budget
        if n < asked and not partial:
            self._refuse(seq, self._budget_reason(seq, remaining))
            return
        self._feed(seq, n, start, known, total)

    # --- rows -----------------------------------------------------------------------------------

    def _feed(self, seq: Sequence, n: int, start: int, known: int, total: int) -> bool:
        """A row of `n` known tokens from position `start` (and drafts that fit) for a running sequence.

        known: tokens whose ids are known; total: those and the samples that outstanding steps will give.
        """
        drafts: tuple[int, ...] = ()
        if seq.drafts and start + n == total and not seq.awaiting:
            drafts = seq.drafts[: max(0, min(self.budget - n, seq.limit - total - 1))]
        if n > 1 and self.ledger.sliding:
            # Blocks that the window leaves behind come back at commit: better a shorter row than someone's blocks.
            n = max(1, min(n, self.ledger.reach(seq, start) - start))
            drafts = drafts if start + n == total else ()
        if drafts and not self._fits(seq, start, start + n + len(drafts)):
            drafts = ()  # guesses are not worth anyone's blocks
        if not drafts and not self._grow(seq, start, start + n):
            return False
        end = start + n
        tokens: Tokens
        if end > known:
            waited = [FromStep(s, seq.id) for s in seq.awaiting]
            tokens = [*seq.tokens(start, known), *waited[max(0, start - known) : end - known]]
        else:
            tokens = seq.tokens(start, end)
        need = Need.NONE
        if end == total:
            need = seq.need
            if drafts:
                need = Need.DRAFTS
                tokens = [*tokens, *drafts]
        self._row(seq, start, tokens, len(drafts), need, n + len(drafts))
        return True

    def _row(self, seq: Sequence, start: int, tokens: Tokens, draft: int, need: Need, fed: int) -> None:
        step = self.step
        if need is not _NONE and need is not _BEAM:  # a selection of beams gives the next token, not the row
            seq.awaiting.append(step)
        self.rows.append(Row(seq.id, start, tokens, draft, need, seq.seed))
        seq.inflight += fed
        seq.last_step = step
        self.budget -= fed

    # --- memory ---------------------------------------------------------------------------------

    def _fits(self, seq: Sequence, start: int, stop: int) -> bool:
        """Blocks for positions `start` to `stop` if they can be had without taking them from anyone."""
        return self._grown(self.ledger.grow(seq, start, stop)) == 0

    def _grow(self, seq: Sequence, start: int, stop: int) -> bool:
        """Blocks for positions `start` to `stop`, if need be of others; False when there are none."""
        lacking = self._grown(self.ledger.grow(seq, start, stop))
        if not lacking:
            return True
        if not self._make_room(seq, lacking):
            return False
        lacking = self._grown(self.ledger.grow(seq, start, stop))
        assert not lacking
        return True

    def _grown(self, grown: tuple[list[Grant], list[Copy]] | int) -> int:
        """Takes note of what the ledger gave; the blocks that it lacks."""
        if isinstance(grown, int):
            return grown
        self.grants += grown[0]
        self.copies += grown[1]
        return 0

    def _make_room(self, seq: Sequence, lacking: int) -> bool:
        """Preempt what the policy names until `seq` can grow; False when it cannot (or gave way itself)."""
        pool = self.ledger.pool
        target = pool.available + lacking
        assert self._view is not None
        view, shortage = self._view, Shortage(seq, lacking)
        for victim in self._ask("victims", lambda: self.core.scheduler.victims(view, shortage)):
            if not isinstance(victim, Sequence):
                raise unusable("scheduler", self.core.scheduler, "victims", victim, "a Sequence of the view")
            if self.core.sequences.get(victim.id) is not victim:
                continue
            if victim.status is not _RUNNING or victim.inflight:
                continue
            self.core.preempt(victim)
            self._preempted.append(victim)
            if victim is seq:
                return False
            if pool.available >= target:
                return True
        size = self.ledger.block_size
        self._refuse(
            seq,
            f"the sequence has grown to {seq.known} tokens and needs {lacking} more KV block(s) of {size} tokens, "
            f"but all {pool.num_blocks} are taken; raise num_kv_blocks (or KV memory) or lower max_tokens",
        )
        return False

    def _claims(self) -> int:
        """Blocks that admitted sequences still need for tokens they already have."""
        core, claims = self.core, 0
        still = []
        for seq in core.filling:
            if seq.id in self.ledger.tables and seq.id not in self.members:
                missing = self.ledger.missing(seq, seq.known)
                if missing:
                    claims += missing
                    still.append(seq)
        core.filling = still
        return claims

    def _admit(self, seq: Sequence, want: Want) -> None:
        """Let a waiting sequence in and feed its first tokens, or close admission for this step."""
        core, ledger = self.core, self.ledger
        if seq.kv_load is not None and min(seq.kv_load.num_tokens, seq.known - 1) < 1:
            seq.kv_load = None  # nothing to load: compute it
        if seq.beams is not None and seq.id in seq.beams.answers:
            return  # waits for the other beams of its request
        loading = seq.kv_load is not None
        rows = len(core.running) - len(self._preempted) + self._num_admitted_rows
        if not loading and rows >= core.limits.max_num_seqs:
            self._close(seq, None)
            return
        others = bool(core.running or self.admitted)
        way = way_in(core, seq, self.swap_ins, others)
        if way is None:
            return
        spare = self._claims() + (whole("kv_cache", ledger.cache, "headroom", 0, core.limits) if others else 0)
        if way.need > way.room - spare:
            self._close(seq, way.num_hits)
            self._refuse(seq, self._memory_reason(seq, way.need))
            return
        asked = min(want.num_tokens, seq.known - way.tokens)
        if asked > self.budget and not want.partial and not loading:
            self._close(seq, way.num_hits)
            self._refuse(seq, self._budget_reason(seq, seq.known - way.tokens))
            return
        seq.computed = ledger.admit(seq, way.hits) if way.leader is None else ledger.fork(seq, way.leader)
        seq.num_cached = seq.computed
        if seq.num_hit is None and not loading:  # else it is known when the transfer has ended
            seq.num_hit = seq.computed
        seq.status = _RUNNING
        core.admitted(seq)
        self.admitted.append(seq)
        core.filling.append(seq)
        table = ledger.tables[seq.id]
        num_shared = len(table.blocks)
        if seq.host is not None:
            self._swap_in(seq)
        if loading:
            self._load(seq)
        else:
            self._first_row(seq, min(asked, self.budget), [tuple(blocks) for blocks in table.groups], num_shared)

    def _first_row(self, seq: Sequence, n: int, held: list[tuple[int, ...]], num_shared: int) -> None:
        """Feed `n` tokens of a sequence that was just let in; the executor is told of the blocks it came with, too.

        held: these blocks of each group.  num_shared: so many of them others may read.
        """
        self._num_admitted_rows += 1
        at = len(self.grants)
        if not self._feed(seq, n, seq.computed, seq.known, seq.known):
            raise AssertionError("admission promised room")  # pragma: no cover
        if held[0]:
            fresh = {grant.group: grant.blocks for grant in self.grants[at:]}
            self.grants[at:] = [
                Grant(seq.id, group, blocks + fresh.get(group, ()), num_shared) for group, blocks in enumerate(held)
            ]

    def _close(self, seq: Sequence, hits: int | None) -> None:
        """Admit nobody in this step, because of `seq`: for want of rows (None), or of memory or budget though it hit
        `hits` blocks.
        """
        self._closed = True
        self.shut = (seq, hits)

    def _swap_in(self, seq: Sequence) -> None:
        """Bring back from host memory what the prefix cache did not have."""
        host, start = seq.host, seq.computed
        assert host is not None
        if start >= host.num_tokens:  # all of it was still in the cache
            self.core.host.forget(seq)
            return
        self.ledger.restore(seq, host.num_tokens)
        table, held = self.ledger.tables[seq.id], start // self.ledger.block_size
        for group, (blocks, copies) in enumerate(zip(table.groups, host.blocks, strict=True)):
            first = max(held, table.first[group])
            if copies[first:]:
                self.swap_ins.append(Swap(seq.id, group, tuple(blocks[first : len(copies)]), copies[first:]))
            self.emptied.extend(block for block in copies if block != HOLE)
        seq.host = None
        seq.computed = host.num_tokens

    # --- transfers ------------------------------------------------------------------------------

    def _load(self, seq: Sequence) -> None:
        assert seq.kv_load is not None
        tokens = min(seq.kv_load.num_tokens, seq.known - 1)
        lacking = self._grown(self.ledger.grow(seq, tokens, tokens))
        assert not lacking
        self.moves.append(Move(seq.id, "load", seq.kv_load.handle, self._all_blocks(seq), tokens))
        seq.status = Status.LOADING
        self.core.transfers[seq.id] = "load"

    def _send(self) -> None:
        core = self.core
        for seq in core.sends:
            assert seq.request.kv_to is not None
            self.moves.append(Move(seq.id, "send", seq.request.kv_to, self._all_blocks(seq), seq.computed))
            core.transfers[seq.id] = "send"
        core.sends = []

    def _all_blocks(self, seq: Sequence) -> tuple[int, ...]:
        return tuple(block for blocks in self.ledger.tables[seq.id].groups for block in blocks)

    # --- end ------------------------------------------------------------------------------------

    def _ask(self, method: str, call: Callable[[], Iterable[_T]]) -> Iterator[_T]:
        """What the scheduler answers; what it raises becomes a PluginError that names it."""
        try:  # what the planner raises between two answers does not come through here
            answers = iter(call())
            # A policy may name anything any number of times, but not for ever.
            yield from islice(answers, 4 * len(self.core.sequences) + 64)
            for _ in answers:
                raise RuntimeError("it answers without end; name each sequence once")
        except FAULTS as error:
            raise fault("scheduler", self.core.scheduler, method, error) from error

    def _settle(self) -> None:
        core = self.core
        self.preempted_any = bool(self._preempted)
        for seq in self.admitted:
            core.unqueue(seq)
        if self._preempted:
            core.running = [s for s in core.running if s.status is _RUNNING]
        core.running += [s for s in self.admitted if s.status is _RUNNING]
        for seq in self._preempted:
            core.enqueue(seq)

    def _refuse(self, seq: Sequence, why: str) -> None:
        if self._refused is None:
            self._refused = (seq, why)

    def _memory_reason(self, seq: Sequence, need: int) -> str:
        return (
            f"{seq.known} tokens need {need} free KV block(s) of {self.ledger.block_size} tokens, but only "
            f"{self.ledger.pool.available} of {self.ledger.pool.num_blocks} can be had; raise num_kv_blocks (or KV memory)"
        )

    def _budget_reason(self, seq: Sequence, remaining: int) -> str:
        return (
            f"{remaining} tokens must be fed in one step, but max_num_batched_tokens is "
            f"{self.core.limits.max_num_batched_tokens}; raise it or turn chunked prefill on"
        )

    def stuck(self) -> tuple[Sequence, str]:
        """The head request and why nothing could be planned (for the progress law)."""
        if self._refused is not None:
            return self._refused
        core = self.core
        name = getattr(core.scheduler, "name", type(core.scheduler).__name__)
        why = f"scheduler {name!r} proposed nothing although work is runnable; use another scheduler"
        for seq in core.running:
            return seq, why
        return core.waiting[0][2], why
