"""Sequences that only decode, advanced together: what lets a simulated core take many steps as one.

    running  =  young: fed row by row, by plans        (prompts, chunks, samples that share a prompt, beams, drafts)
              + members of the flock: one token each in every step, known by counts

Between two events a member only counts up: its tokens are constants (a simulated executor draws no others), so all that
a step changes of it is told by one clock. A member is looked at when it fills a block, when it ends, and when anything
happens that needs it as it is; so a step costs what changes in it, not what runs in it.

    position of a member = its `computed` when it was last looked at + clock - since

Invariants
* Whatever can be seen of the core is what it would be after as many single steps: plans, blocks held, used and cached,
  admissions, preemptions, ends, in the same order. Only names of blocks differ.
* Members are settled (`computed`, `output` and blocks brought up to the clock) before anyone but this module, the
  planner or `Core._submit` looks at the core: see `dissolve`.
* The scheduler promised it (`policy.Steady`); memory suffices for every step of a run, else the core plans by itself and
  preempts as usual.
* With sliding windows, steps that overlap, or members that outnumber a limit there is no flock.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Any, NamedTuple

from twinfer.core.events import Blocked, Decoded, Idle, StepDone
from twinfer.core.plan import Decoding, PlanStats, Row, RowResult, StepPlan, StepResult
from twinfer.core.planner import Planner
from twinfer.core.policy import Scheduler, Steady
from twinfer.core.request import Sequence, Status

if TYPE_CHECKING:
    from twinfer.core.blocks import Chain
    from twinfer.core.core import Core
    from twinfer.core.ledger import Table

LEAST, MOST = 32, 512
"""Steps that a run may have: twice those of the one before, whose times were worked out and which may have been cut short."""
Key = tuple[tuple[int, ...], int]
Order = tuple[int, Key]
_RUNNING = Status.RUNNING


class Member:
    """A sequence in the flock: `computed` and `output` are those of clock `since`; the last one told of, of `told`.

    phase: of a quiet member, clocks modulo the block size at which it takes a block; -1 of others.
    """

    __slots__ = ("ends", "key", "phase", "seq", "since", "table", "told")

    def __init__(self, seq: Sequence, key: Key, clock: int, table: Table) -> None:
        self.seq = seq
        self.key = key
        self.table = table
        self.phase = -1
        self.since = self.told = clock
        self.ends = clock + seq.limit - seq.known


class Run(NamedTuple):
    """Steps in which the members feed a token each and nothing else happens.

    step: number of the first.  most: there are no more before a member ends or memory runs out.  count: members.
    keys: their KV tokens after the first step.  forget: sequences that have ended, for the executor.  waiting: in the queue.  head: True when an arrival that does not come first in the queue
    changes nothing, because who is first cannot be admitted; closed: when no arrival does.
    """

    step: int
    most: int
    count: int  # type: ignore[assignment]  # not tuple.count, which nobody asks of it
    keys: int
    forget: tuple[str, ...]
    waiting: int
    head: bool
    closed: bool


class Stretch(NamedTuple):
    """Steps of a run that have been taken. stats: from the step of that index on (0 is the first), those of its plan.

    taken: steps before which one more block was taken that `stats` do not tell of.
    """

    step: int
    steps: int
    count: int  # type: ignore[assignment]  # not tuple.count, which nobody asks of it
    keys: int
    stats: list[tuple[int, PlanStats]]
    taken: Seq[int] = ()


def promise_of(scheduler: Scheduler) -> bool:
    """Whether `scheduler` has a `steady` that belongs to its `propose`: one that was inherited past it is not believed."""
    for cls in type(scheduler).__mro__:
        if "propose" in vars(cls) or "steady" in vars(cls):
            return "steady" in vars(cls) and "propose" in vars(cls)
    return False


class Flock:
    """Plans for `core` in place of `Core.next_step`, which it asks whenever there is nothing to be gained.

    token: what the executor samples, always.
    """

    def __init__(self, core: Core, token: int = 0) -> None:
        self.core = core
        self.token = token
        self.members: dict[str, Member] = {}
        self.young: list[Sequence] = []
        self._fresh: set[str] = set()  # admitted by the outstanding plan
        self.clock = 0
        self._steady: Steady | None = None
        self._from = 0  # sum of computed - since
        self._since = 0  # sum of since
        self._ends: list[tuple[int, Key, Member]] = []
        self._due: list[tuple[int, Key, Member]] = []  # when a member that is not quiet fills a block
        self._full: list[Member] = []  # not quiet, need a block before the next step
        self._supplied = -1  # clock of the latest step for which quiet members have their blocks
        self._todo: list[tuple[Order, Any, Any]] = []  # of the step that is being done: rows and members still to come
        self._at: Order | None = None  # whose turn it is in it
        self._longest = LEAST  # steps of the next run
        self._next: PlanStats | None = None  # of the next step of a run, if it has begun
        core.ledger.chained = True
        core.ledger.pool.on_unfold = self._expose
        size, blocks_for = core.ledger.block_size, core.ledger.blocks_for
        self._size = size
        self._paged = blocks_for(size) == 1 and blocks_for(size + 1) == 2 and blocks_for(9 * size + 1) == 10
        self._shares = core.ledger.cache.shares_prefixes
        self._quiet: list[dict[str, Member]] = [{} for _ in range(size if self._paged else 1)]

    @staticmethod
    def serves(core: Core) -> bool:
        """Whether a flock can ever be of use to `core`."""
        ledger = core.ledger
        return (
            len(ledger.windows) == 1 and not ledger.sliding and core.limits.max_outstanding == 1
            and promise_of(core.scheduler)
        )  # fmt: skip

    @property
    def keys(self) -> int:
        """KV tokens of all members."""
        return self._from + len(self.members) * self.clock

    @property
    def unseen(self) -> int:
        """Committed tokens of members that the pool does not know of yet."""
        return len(self.members) * self.clock - self._since

    # --- planning -------------------------------------------------------------------------------

    def next_step(self, now: float) -> StepPlan | Run | Idle | Blocked:
        """The next plan, or the next steps as one; nothing may be outstanding."""
        core = self.core
        core.tidy()
        if not self._gather(now):
            return core.next_step(now)
        self._take_blocks()
        assert self._steady is not None
        closed, head, most = self._steady.closed, False, self._ends[0][0] - self.clock
        count = len(self.members)
        news = core.sends or core.preempted or core.forks or core.host.swap_outs  # that a plan must carry
        if self.young or news or (core.waiting and not closed):
            planner = Planner(core, now, self)
            if not closed:
                planner.run()
            self.young += [seq for seq in planner.admitted if seq.status is _RUNNING]
            self._fresh = {seq.id for seq in planner.admitted}
            if planner.rows or planner.moves or news:
                return core.launch(planner, Decoding(count, self.keys + count), self.unseen)
            if core.waiting or self.young:
                head = self._stays_shut(planner)
                most = most if head else 1
        forget, core.forget = tuple(core.forget), []
        return Run(
            core.num_steps, self._affordable(min(most, self._longest)), count, self.keys + count, forget, len(core.waiting), head,
            closed,
        )  # fmt: skip

    def _gather(self, now: float) -> bool:
        """Take in all that decode; False when the core must plan by itself."""
        core = self.core
        if self.members:
            if not self.young:
                pass
            elif any(seq.beams is not None for seq in self.young):
                self.refresh()  # beams fork when a step ends
            else:
                self.young = [seq for seq in self.young if seq.status is _RUNNING]
        else:
            self.young = list(core.running)
            if not any(self._decodes(seq) for seq in self.young):
                return False
            self._steady = core.scheduler.steady(core.view(now, lambda: False))  # type: ignore[attr-defined]
            if self._steady is None or (self._steady.closed and not all(map(self._decodes, self.young))):
                return False
        if self.young:
            joining = [seq for seq in self.young if self._decodes(seq)]
            if joining:
                self.young = [seq for seq in self.young if seq not in joining]
                for seq in joining:
                    self._join(seq)
        assert self._steady is not None
        if self._steady.closed and (self.young or core.transfers or core.sends):
            return self.dissolve()
        return self._has_room() or self.dissolve()

    def _decodes(self, seq: Sequence) -> bool:
        return (
            seq.computed >= seq.prompt_len and seq.computed + 1 == seq.prompt_len + len(seq.output) < seq.limit
            and not seq.drafts and seq.beams is None and seq.status is _RUNNING
            and seq.request.params.num_samples == 1 and not seq.stop_ids and not seq.request.params.stop
        )  # fmt: skip

    def _key(self, seq: Sequence) -> Key:
        rank = self._steady.rank if self._steady is not None else None
        return (() if rank is None else rank(seq), seq.admission)

    def _join(self, seq: Sequence) -> None:
        member = Member(seq, self._key(seq), self.clock, self.core.ledger.tables[seq.id])
        self.members[seq.id] = member
        self._from += seq.computed - self.clock
        self._since += self.clock
        heappush(self._ends, (member.ends, member.key, member))
        self._look_out(member)

    def _look_out(self, member: Member, hidden: bool = True) -> None:
        """See to it that `member`, which is as of `since`, is looked at when its last block is full, or only at its end.

        hidden: nobody looks for what it publishes.
        """
        seq, table, size = member.seq, member.table, self._size
        whole = len(table.blocks) * size
        hidden = hidden and (table.chain is not None or not (self._shares and seq.request.cache_prefix))
        if hidden and self._paged and table.open == whole and seq.computed <= whole < seq.computed + size:
            member.phase = (member.since - seq.computed) % size
            self._quiet[member.phase][seq.id] = member
        elif seq.computed >= table.open:
            self._full.append(member)
        else:
            full = member.since + size - seq.computed % size
            if full < member.ends:
                heappush(self._due, (full, member.key, member))

    def _has_room(self) -> bool:
        """Whether all rows fit into the next step, without a preemption and without a row cut short that is not last."""
        core, young, count = self.core, self.young, len(self.members)
        limits, ledger = core.limits, core.ledger
        if count + len(young) > limits.max_num_seqs or count > limits.max_num_batched_tokens:
            return False
        need = sum([self._lacks(member) for member in self._full]) if self._full else 0
        if self._supplied != self.clock:
            need += len(self._takers(self.clock))
        if young:
            # At most: the blocks of all tokens that are known, one of copy-on-write, one for a token that is drafted.
            need += sum(ledger.missing(seq, seq.known + len(seq.drafts)) + 2 for seq in young)
            tokens = sum(seq.remaining + len(seq.drafts) for seq in young)
            if count + tokens > limits.max_num_batched_tokens:
                last = max(member.key for member in self.members.values())
                if any(self._key(seq) < last for seq in young):
                    return False
        return need <= ledger.pool.available

    def _lacks(self, member: Member) -> int:
        ledger, seq = self.core.ledger, member.seq
        return ledger.blocks_for(seq.computed + 1) - len(ledger.tables[seq.id].blocks)

    def _takers(self, clock: int) -> dict[str, Member]:
        """Quiet members that take a block before the step after `clock`."""
        return self._quiet[clock % len(self._quiet)]

    def _take_blocks(self) -> None:
        """Blocks for the next step; there are enough."""
        ledger = self.core.ledger
        if self._supplied != self.clock:
            if takers := self._takers(self.clock):
                ledger.pool.set_aside(len(takers))
            self._supplied = self.clock
        if not self._full:
            return
        self._full.sort(key=_by_key)
        for member in self._full:
            seq = member.seq
            grown = ledger.grow(seq, seq.computed, seq.computed + 1)
            assert not isinstance(grown, int), "a run was planned beyond the memory there is"
            self._look_out(member)
        self._full.clear()

    def _affordable(self, most: int) -> int:
        """Of the next `most` steps those for which there are blocks; those of the first have been taken."""
        ledger = self.core.ledger
        room, size = ledger.pool.available, ledger.block_size
        if len(self.members) * (most // size + 1) <= room and self._paged:
            return most
        # Step by step on copies: who fills a block before step `most` takes one at the next.
        heap = [(due, m.ends, self._grows_at(m)) for due, _, m in self._due]
        heap.sort()
        for clock in range(self.clock + 1, self.clock + most):
            room -= len(self._takers(clock))
            while heap and heap[0][0] == clock:
                due, ends, (computed, held) = heappop(heap)
                entries = ledger.blocks_for(computed + 1)
                room -= max(0, entries - held)
                if due + size < ends:
                    heappush(heap, (due + size, ends, (computed + size, max(entries, held))))
            if room < 0:
                return clock - self.clock
        return most

    def _grows_at(self, member: Member) -> tuple[int, int]:
        """Tokens in KV when its last block is full, and the blocks it has."""
        size, seq = self.core.ledger.block_size, member.seq
        return (seq.computed // size + 1) * size, len(self.core.ledger.tables[seq.id].blocks)

    def _stays_shut(self, planner: Planner) -> bool:
        """Whether who is first in the queue cannot be admitted before a member ends.

        Memory only gets scarcer while members grow, but what they publish might be hit: by their next blocks (each
        has at most one that it holds already), if they stand no deeper in the prefix tree than the hit ends.
        """
        core = self.core
        if self.young or planner.shut is None or core.waiting[0][2] is not planner.shut[0]:
            return False
        hits = planner.shut[1]
        if hits is None or not core.ledger.cache.shares_prefixes:
            return True
        return all(self._published(member) > hits for member in self.members.values())

    def _published(self, member: Member) -> int:
        """Leading blocks that `member` has published, as of now."""
        table, seq = member.table, member.seq
        if member.phase < 0 or table.chain is None:
            return table.published
        return (seq.computed + self.clock - member.since) // self._size

    # --- taking steps ---------------------------------------------------------------------------

    def take(self, run: Run, steps: int, each: bool = True) -> tuple[Stretch, list[Member]]:
        """Take `steps` of `run`; what was taken, and the members that have ended with its last (see `end`).

        each: the stretch tells the blocks of every step, not only how many were taken when.
        """
        core = self.core
        first = self.clock
        last = first + steps
        self.plan_next(run)
        assert self._next is not None
        stats = [(0, self._next)]
        self._next = None
        taken: Seq[int] = ()
        if each or (self._due and self._due[0][0] < last):
            for clock in range(first + 1, last):
                if self._is_due(clock) or self._takers(clock):
                    self._settle_due(clock)
                    self._take_blocks()
                    stats.append((clock - first, core.stats(self.unseen, run.waiting)))
        else:
            taken = self._take_at_once(first, last)
        stretch = Stretch(core.num_steps, steps, run.count, self._from + run.count * (first + 1), stats, taken)
        core.num_steps += steps
        self._longest = min(MOST, max(LEAST, 2 * steps))
        return stretch, self._settle_due(last)

    def _take_at_once(self, first: int, last: int) -> Seq[int]:
        """Blocks for all steps from `first` to `last` but the first, where only quiet members take any; steps of the stretch,
        one per block."""
        taken: list[int] = []
        quiet, cycle, steps = self._quiet, len(self._quiet), last - first
        for at in range(1, min(steps, 1 + cycle)):
            takers = quiet[(first + at) % cycle]
            if takers:
                taken += [*range(at, steps, cycle)] * len(takers)
        self.core.ledger.pool.set_aside(len(taken))
        self._supplied = last - 1
        return taken

    def plan_next(self, run: Run) -> None:
        """The next step of `run` has begun: what happens from now on is no part of its plan."""
        if self._next is None:
            self._take_blocks()
            self._next = self.core.stats(self.unseen, run.waiting)

    def end(self, members: list[Member]) -> None:
        """These have ended with the step that was taken last."""
        for member in members:
            self._finish(member)

    def step_done(self, plan: StepPlan, result: StepResult) -> None:
        """A plan of `next_step` has run: its rows, and a token for each member."""
        core = self.core
        if plan.decoding is None or not plan.rows:
            core.receive(StepDone(plan.step, result), 0.0)
            if plan.decoding is not None:
                self.end(self._settle_due(self.clock + 1))
            return
        # Rows publish blocks and end in the order of the rows that single steps would have had.
        del core.outstanding[plan.step]
        self.clock += 1
        todo = self._todo = list(zip(self._row_keys(plan), plan.rows, result.rows, strict=True))
        todo += self._pop_due()
        heapify(todo)
        while todo:
            self._at, what, res = heappop(todo)
            if isinstance(what, Member):
                self._settle(what)
                if self._after(what):
                    self._finish(what)
                continue
            seq = core.sequences.get(what.seq)
            if seq is None:  # a beam that has ended with another row
                core.late.pop(what.seq, None)
            elif seq.status is _RUNNING:
                seq.last_step = None
                core.row_done(seq, what, res, plan.step)
        self._at = None
        core.ledger.pool.step_ended(plan.step)

    def _row_keys(self, plan: StepPlan) -> list[Order]:
        """Where the rows of `plan` would stand among those of all running sequences: what was admitted comes last."""
        find = self.core.sequences
        return [
            (1, ((), place)) if row.seq in self._fresh else (0, self._key(find[row.seq]))
            for place, row in enumerate(plan.rows)
        ]

    def _is_due(self, clock: int) -> bool:
        """Whether a member must be looked at when `clock` steps are done; none was due before."""
        return self._ends[0][0] == clock or (bool(self._due) and self._due[0][0] == clock)

    def _settle_due(self, clock: int) -> list[Member]:
        """Go on to `clock`, and look at the members that are due there; those that have ended."""
        self.clock = clock
        ended: list[Member] = []
        if not self._is_due(clock):
            return ended
        todo = self._todo = self._pop_due()
        heapify(todo)
        while todo:
            self._at, member, _ = heappop(todo)
            self._settle(member)
            if self._after(member):
                ended.append(member)
        self._at = None
        return ended

    def _pop_due(self) -> list[tuple[Order, Any, Any]]:
        """Members that are due now, as entries of `_todo`."""
        found: list[tuple[Order, Any, Any]] = []
        for heap in (self._due, self._ends):
            while heap and heap[0][0] == self.clock:
                _, key, member = heappop(heap)
                found.append(((0, key), member, None))
        return found

    def _settle(self, member: Member, clock: int | None = None) -> None:
        """Bring `member` up to the clock, or to an earlier one."""
        clock = self.clock if clock is None else clock
        count, seq, ledger = clock - member.since, member.seq, self.core.ledger
        computed = seq.computed + count
        if member.phase >= 0:
            table, size = member.table, self._size
            more = -(-computed // size) + (clock <= self._supplied and not computed % size) - len(table.blocks)
            if more > 0:
                ledger.take_aside(table, more)
        if not count:
            return
        seq.output += (self.token,) * count
        if member.phase >= 0:
            ledger.fill_up(member.table, seq.computed, computed)
        else:
            ledger.commit(seq, seq.computed, computed)
        seq.computed = computed
        member.since = clock
        self._since += count

    def _after(self, member: Member) -> bool:
        """What comes after a member was due: True when it has ended."""
        if member.ends == self.clock:
            self._leave(member)
            return True
        self._look_out(member)
        return False

    def _expose(self, chain: Chain) -> None:
        """Somebody looks for blocks where a quiet member has its own: from now on each is published when it is full."""
        member = self.members.get(chain.seq.id)
        if member is None or member.phase < 0 or member.table.chain is not chain:
            return
        del self._quiet[member.phase][member.seq.id]
        later = self._at is not None and (0, member.key) > self._at  # its token of this step is still to come
        self._settle(member, self.clock - later)
        member.phase = -1
        full = member.since + self._size - member.seq.computed % self._size
        if later and full == self.clock:
            heappush(self._todo, ((0, member.key), member, None))
        elif not (later and member.ends == self.clock):
            self._look_out(member, hidden=False)

    def _leave(self, member: Member) -> None:
        del self.members[member.seq.id]
        if member.phase >= 0:
            del self._quiet[member.phase][member.seq.id]
        self._from -= member.seq.computed - member.since
        self._since -= member.since

    def _finish(self, member: Member) -> None:
        self._tell(member)
        self.core.finish(member.seq, "length", self.core.why_long(member.seq))

    def _tell(self, member: Member) -> None:
        seq, count = member.seq, self.clock - member.told
        if count:
            self.core.tell(Decoded(seq.request.id, seq.index, (self.token,) * count))
            member.told = self.clock

    # --- back to single steps -------------------------------------------------------------------

    def refresh(self) -> None:
        """Something else than an arrival or the end of a step has happened to the core: look at `running` again."""
        self.young = [seq for seq in self.core.running if seq.id not in self.members]

    def tell(self) -> None:
        """Tell of all tokens so far."""
        for member in self.members.values():
            self._settle(member)
            self._tell(member)

    def dissolve(self) -> bool:
        """All members are sequences of the core as if there had never been a flock. False, for `return dissolve()`."""
        if self.members:
            self.tell()
            assert not self.core.ledger.pool.aside
            for member in self.members.values():
                if member.phase >= 0:
                    del self._quiet[member.phase][member.seq.id]
            self.members = {}
            self._supplied = -1
            self._due, self._ends, self._full = [], [], []
            self._from = self._since = 0
            self.young = []
        return False

    def single(self, run: Run) -> StepPlan:
        """The next step of `run` as a plan of its own, which is then outstanding."""
        core = self.core
        self.plan_next(run)
        count = len(self.members)
        assert self._next is not None
        plan = StepPlan(core.num_steps, (), stats=self._next, decoding=Decoding(count, self.keys + count))
        self._next = None
        core.num_steps += 1
        core.outstanding[plan.step] = plan
        return plan

    def spell_out(self, plan: StepPlan, result: StepResult) -> tuple[StepPlan, StepResult]:
        """An outstanding plan of this flock with rows for its members, which it dissolves; and their results."""
        if plan.decoding is None:
            return plan, result
        members, keys = list(self.members.values()), self._row_keys(plan)
        sampled = RowResult(tokens=(self.token,))
        self.dissolve()
        todo = list(zip(keys, plan.rows, result.rows, strict=True))
        for member in members:
            seq = member.seq
            row = Row(seq.id, seq.computed, (seq.output[-1],), 0, seq.need, seq.seed)
            todo.append(((0, member.key), row, sampled))
            seq.awaiting.append(plan.step)
            seq.inflight += 1
            seq.last_step = plan.step
        todo.sort(key=_by_order)
        whole = StepPlan(
            plan.step, tuple(row for _, row, _ in todo), plan.grants, plan.copies, plan.moves, plan.forget, plan.preempted, plan.stats,
            plan.extras, plan.forks, plan.swap_outs, plan.swap_ins,
        )  # fmt: skip
        self.core.outstanding[plan.step] = whole
        return whole, StepResult(tuple(res for _, _, res in todo), result.seconds, result.sigma, result.ops)


def _by_key(member: Member) -> Key:
    return member.key


def _by_order(item: tuple[Order, Any, Any]) -> Order:
    return item[0]


__all__ = ["Flock", "Member", "Run", "Stretch", "promise_of"]
