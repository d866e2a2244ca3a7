"""Sequences that only decode, advanced together: what lets a simulated core take many steps as one.

    running  =  young: fed row by row, by plans        (prompts, chunks, samples that share a prompt, beams, drafts)
              + members of the flock: one token each in every step, known by counts (`flock_members.py`)

Between two events a member only counts up: its tokens are constants (a simulated executor draws no others), so all that
a step changes of it is told by one clock. A member is looked at when it ends and when anything happens that needs it as it
is; so a step costs what changes in it, not what runs in it.

    clock: steps that are done        + outstanding plans (none, or one where steps overlap) = clock of the next plan

Invariants
* Whatever can be seen of the core is what it would be after as many single steps: plans, blocks held, used and cached,
  admissions, preemptions, ends, in the same order. Only names of blocks differ.
* Members are settled (`computed`, `output` and blocks brought up to the clock) before anyone but this module, the
  planner or `Core._submit` looks at the core: see `dissolve`.
* Each member is counted in each outstanding plan, up to that of its last token.
* The scheduler promised it (`policy.Steady`); memory suffices for every step of a run, else the core plans by itself and
  preempts as usual.
* With sliding windows, or members that outnumber a limit there is no flock.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from heapq import heappop
from typing import TYPE_CHECKING, NamedTuple

from twinfer.core.events import Blocked, Idle, StepDone
from twinfer.core.flock_members import Entry, Key, Member, Members, Order
from twinfer.core.guard import Blaming, unusable
from twinfer.core.plan import Decoding, Need, PlanStats, Row, RowResult, StepPlan, StepResult
from twinfer.core.planner import Planner
from twinfer.core.policy import Scheduler, Steady
from twinfer.core.request import Sequence, Status

if TYPE_CHECKING:
    from twinfer.core.core import Core

LEAST, MOST, AHEAD = 32, 4096, 4
"""Steps that a run may have: `AHEAD` times those that were taken of the latest ones, as their times are worked out beforehand
and what comes may cut it short.
"""
_RUNNING = Status.RUNNING


class Run(NamedTuple):
    """Steps in which the members feed a token each and nothing else happens.

    step: number of the first; clock: of its plan.  most: there are no more before a member ends or memory runs out.
    count: members.  keys: their KV tokens after the first step.  forget: sequences that have ended, for the executor.
    waiting: in the queue.  head: True when an arrival that does not come first in the queue changes nothing, because who is
    first cannot be admitted; closed: when no arrival does.
    """

    step: int
    clock: int
    most: int
    count: int  # type: ignore[assignment]  # not tuple.count, which nobody asks of it
    keys: int
    forget: tuple[str, ...]
    waiting: int
    head: bool
    closed: bool


class Stretch(NamedTuple):
    """Steps of a run that have been taken. stats: from the step of that index on (0 is the first), those of its plan.

    taken: steps, counted from the last of `stats`, before which one more block was taken that `stats` do not tell of.
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
        self.members = Members(core, token)
        self.young: list[Sequence] = []
        self.num_rows = 0  # of members in the plan that is being made
        self.lag = core.limits.max_outstanding - 1
        """Steps that a plan is ahead of the steps that are done."""
        self._token = RowResult(tokens=(token,))
        self._fresh: dict[int, set[str]] = {}  # admitted by each outstanding plan
        self._sampling: set[str] = set()  # were young and got a token in the latest step
        self._steady: Steady | None = None
        self._typical = float(LEAST)  # steps taken of a run, lately
        self._planned: list[PlanStats] = []  # of steps of the run that are planned and not taken
        self._first = 0  # clock of the first of them

    @staticmethod
    def serves(core: Core) -> bool:
        """Whether a flock can ever be of use to `core`."""
        ledger, limits = core.ledger, core.limits
        return (
            len(ledger.windows) == 1 and not ledger.sliding and limits.max_outstanding <= 2 and limits.num_stages == 1
            and promise_of(core.scheduler) and Members.serves(ledger, limits.max_model_len)
        )  # fmt: skip

    # --- planning -------------------------------------------------------------------------------

    def next_step(self, now: float) -> StepPlan | Run | Idle | Blocked:
        """The next plan, or the next steps as one; fewer plans than `max_outstanding` may be outstanding, and no run."""
        core, members = self.core, self.members
        core.tidy()
        if not self._gather(now):
            return self._asked(now)
        clock = members.clock + len(core.outstanding)
        members.supply(clock)
        self.num_rows, keys = members.feeding(clock)
        count = self.num_rows
        assert self._steady is not None
        closed, head = self._steady.closed, False
        most = members.first_end - clock if count == len(members.all) else 1  # an end of one that has its last row
        news = core.sends or core.preempted or core.forks or core.host.swap_outs  # that a plan must carry
        if self.young or news or (core.waiting and not closed):
            planner = Planner(core, now, self)
            if not closed:
                planner.run()
            self.young += [seq for seq in planner.admitted if seq.status is _RUNNING]
            if planner.rows or planner.moves or news:
                self._fresh[core.num_steps] = {seq.id for seq in planner.admitted}
                return core.launch(planner, Decoding(count, keys + count), members.unseen)
            if core.waiting or self.young:
                head = self._stays_shut(planner)
                most = most if head else 1
        if not count:
            return Blocked(tuple(core.outstanding), tuple(core.transfers))
        stats = core.stats(members.unseen)
        forget, core.forget = tuple(core.forget), []
        if len(core.outstanding) < self.lag:
            return self._launch(count, keys + count, stats, forget)
        self._planned, self._first = [stats], clock
        most = min(most, MOST, max(LEAST, round(AHEAD * self._typical)))
        return Run(
            core.num_steps, clock, members.affordable(clock, most), count, keys + count, forget,
            len(core.waiting), head, closed,
        )  # fmt: skip

    def _launch(self, count: int, keys: int, stats: PlanStats, forget: tuple[str, ...] = ()) -> StepPlan:
        """A plan without rows but those of members is out from now on."""
        core = self.core
        plan = StepPlan(core.num_steps, (), forget=forget, stats=stats, decoding=Decoding(count, keys))
        core.num_steps += 1
        core.outstanding[plan.step] = plan
        return plan

    def _asked(self, now: float) -> StepPlan | Idle | Blocked:
        """What the core plans by itself."""
        core = self.core
        before = core.num_admitted
        plan = core.next_step(now)
        if self.lag and isinstance(plan, StepPlan):
            find = core.sequences
            self._fresh[plan.step] = {row.seq for row in plan.rows if find[row.seq].admission >= before}
        return plan

    def _gather(self, now: float) -> bool:
        """Take in all that decode; False when the core must plan by itself."""
        core = self.core
        if not self.members.all:
            self.young = list(core.running)
            if not any(self._decodes(seq) for seq in self.young):
                return False
            with Blaming("scheduler", core.scheduler, "steady"):
                self._steady = core.scheduler.steady(core.view(now, lambda: False))  # type: ignore[attr-defined]
            if not isinstance(self._steady, Steady | None):
                raise unusable("scheduler", core.scheduler, "steady", self._steady, "a Steady, or None")
            if self._steady is None or (self._steady.closed and not all(map(self._decodes, self.young))):
                return False
        elif self.young:
            if any(seq.beams is not None for seq in self.young):
                self.refresh()  # beams fork when a step ends
            else:
                self.young = [seq for seq in self.young if seq.status is _RUNNING]
        if self.young:
            joining = [seq for seq in self.young if self._decodes(seq)]
            if joining:
                self.young = [seq for seq in self.young if seq not in joining]
                for seq in joining:
                    self.members.join(seq, self._key(seq))
                for step in core.outstanding:
                    self._count_in(step, {seq.id for seq in joining})
        assert self._steady is not None
        if self._steady.closed and (self.young or core.transfers or core.sends):
            return self.dissolve()
        return self._has_room() or self.dissolve()

    def _count_in(self, step: int, joining: set[str]) -> None:
        """In the plan of `step`, which is outstanding, rows of `joining` are counted from now on."""
        plan = self.core.outstanding[step]
        gone = [row for row in plan.rows if row.seq in joining]
        count, keys = plan.decoding or (0, 0)
        counted = Decoding(count + len(gone), keys + sum(row.stop for row in gone))
        rows = tuple([row for row in plan.rows if row.seq not in joining])
        self.core.outstanding[step] = replace(plan, rows=rows, decoding=counted)

    def _decodes(self, seq: Sequence) -> bool:
        ahead = len(self.core.outstanding)
        return (
            seq.computed >= seq.prompt_len and seq.computed + 1 == seq.prompt_len + len(seq.output) < seq.limit - ahead
            and seq.inflight == ahead == len(seq.awaiting) and not seq.drafts and seq.beams is None
            and seq.status is _RUNNING and seq.id in self._sampling and seq.request.params.num_samples == 1 and not seq.stop_ids
            and not seq.request.params.stop and self.members.takes(seq, ahead)
        )  # fmt: skip

    def _key(self, seq: Sequence) -> Key:
        rank = self._steady.rank if self._steady is not None else None
        if rank is None:
            return (), seq.admission
        with Blaming("scheduler", self.core.scheduler, "the rank of steady"):
            return tuple(rank(seq)), seq.admission

    def _has_room(self) -> bool:
        """Whether all rows fit into the next step, without a preemption and without a row cut short that is not last."""
        core, young, members = self.core, self.young, self.members
        limits, ledger, count = core.limits, core.ledger, len(members.all)
        if count + len(young) > limits.max_num_seqs or count > limits.max_num_batched_tokens:
            return False
        need = members.need(members.clock + len(core.outstanding))
        if young:
            # At most: the blocks of all tokens that are known, one of copy-on-write, one for a token that is drafted, one
            # for a token that is still to come.
            need += sum([ledger.missing(seq, seq.known + len(seq.drafts)) + 2 + self.lag for seq in young])
            tokens = sum([seq.remaining + len(seq.drafts) for seq in young])
            if count + tokens > limits.max_num_batched_tokens:
                last = max(member.key for member in members.all.values())
                if any(self._key(seq) < last for seq in young):
                    return False
        return need <= ledger.pool.available

    def _stays_shut(self, planner: Planner) -> bool:
        """Whether who is first in the queue cannot be admitted before a member ends.

        Memory only gets scarcer while members grow, but what they publish might be hit: by their next blocks (each
        has at most one that it holds already), if they stand no deeper in the prefix tree than the hit ends.
        """
        core, members = self.core, self.members
        if self.young or planner.shut is None or core.waiting[0][2] is not planner.shut[0]:
            return False
        hits = planner.shut[1]
        if hits is None or not core.ledger.cache.shares_prefixes:
            return True
        return all(members.published(member) > hits for member in members.all.values())

    # --- taking steps ---------------------------------------------------------------------------

    def take(self, run: Run, steps: int, each: bool = True) -> tuple[Stretch, list[Member]]:
        """Take `steps` of `run`; what was taken, and the members that have ended with its last (see `end`).

        Those that are planned by then are still steps of it.  each: the stretch tells the blocks of every step, not only how
        many were taken when.
        """
        core, members, lag = self.core, self.members, self.lag
        first = members.clock
        last = first + steps
        self.plan_next(run)
        stats = list(enumerate(self._planned[:steps]))
        taken: Seq[int] = ()
        if each or members.any_watched(last):
            for clock in range(first + 1, last):
                if members.is_due(clock) or members.takers(clock + lag):
                    members.go_to(clock)
                    members.supply(clock + lag)
                    if clock + lag < last:
                        stats.append((clock + lag - first, core.stats(members.unseen, run.waiting)))
        else:
            taken = members.supply_at_once(first + 1 + lag, last)
            taken = [at + 1 for at in taken]
        del self._planned[:steps]
        self._first = last
        if lag and not self._planned:
            members.clock = last - 1
            self.plan_next(run)
        stretch = Stretch(core.num_steps, steps, run.count, run.keys + run.count * (first - run.clock), stats, taken)
        core.num_steps += steps
        self._sampling = set()
        self._typical += (steps - self._typical) / 8
        return stretch, members.go_to(last)

    def plan_next(self, run: Run) -> None:
        """All steps of `run` that are planned by now are: what happens from now on is no part of their plans."""
        members, planned = self.members, self._planned
        while self._first + len(planned) <= members.clock + self.lag:
            members.supply(self._first + len(planned))
            planned.append(self.core.stats(members.unseen, run.waiting))

    def end(self, ended: list[Member]) -> None:
        """These have ended with the step that was taken last."""
        for member in ended:
            self._finish(member)

    def _finish(self, member: Member) -> None:
        self.members.tell_of(member)
        self.core.finish(member.seq, "length", self.core.why_long(member.seq))

    def step_done(self, plan: StepPlan, result: StepResult) -> None:
        """A plan of `next_step` has run: its rows, and a token for each member."""
        core, members = self.core, self.members
        fresh = self._fresh.pop(plan.step, _NOBODY)
        whole = core.outstanding[plan.step]
        if whole is not plan:  # members were counted in, or spelled out
            given = dict(zip([row.seq for row in plan.rows], result.rows, strict=True))
            rows = tuple([given.get(row.seq, self._token) for row in whole.rows])
            plan, result = whole, StepResult(rows, result.seconds, result.sigma, result.ops)
        self._sampling = {row.seq for row in plan.rows if row.need is not Need.NONE}
        if not members.all:
            core.receive(StepDone(plan.step, result), 0.0)
            return
        del core.outstanding[plan.step]
        if not plan.rows:
            self.end(members.go_to(members.clock + 1))
        else:
            # Rows publish blocks and end in the order of the rows that single steps would have had.
            todo: list[Entry] = list(zip(self._orders(plan, fresh), plan.rows, result.rows, strict=True))
            members.go_on(members.clock + 1, todo)
            while todo:
                members.turn, what, res = heappop(todo)
                if isinstance(what, Member):
                    if members.has_ended(what):
                        self._finish(what)
                    continue
                seq = core.sequences.get(what.seq)
                if seq is None:  # a beam that has ended with another row
                    core.late.pop(what.seq, None)
                elif seq.status is _RUNNING:
                    if seq.last_step == plan.step:
                        seq.last_step = None
                    core.row_done(seq, what, res, plan.step)
            members.turn = None
        core.ledger.pool.step_ended(plan.step)

    def _orders(self, plan: StepPlan, fresh: set[str]) -> list[Order]:
        """Where the rows of `plan` stand among those of all running sequences: what was admitted comes last."""
        find = self.core.sequences
        return [
            (1, ((), place)) if row.seq in fresh or row.seq not in find else (0, self._key(find[row.seq]))
            for place, row in enumerate(plan.rows)
        ]

    # --- back to single steps -------------------------------------------------------------------

    def refresh(self) -> None:
        """Something else than an arrival or the end of a step has happened to the core: look at `running` again."""
        self.young = [seq for seq in self.core.running if seq.id not in self.members.all]

    def dissolve(self) -> bool:
        """All members are sequences of the core as if there had never been a flock, and their rows stand in the plans that are
        outstanding. False, for `return dissolve()`."""
        core = self.core
        if self.members.all:
            members = self.members.disband()
            for ahead, (step, plan) in enumerate(core.outstanding.items()):
                core.outstanding[step] = self._spelled_out(plan, ahead, members)
            self.young = []
        return False

    def _spelled_out(self, plan: StepPlan, ahead: int, members: list[Member]) -> StepPlan:
        """`plan` with rows for those that were members, which is the next to be done, or one behind it."""
        todo: list[Entry] = list(
            zip(self._orders(plan, self._fresh.get(plan.step, _NOBODY)), plan.rows, plan.rows, strict=True)
        )
        for member in members:
            seq = member.seq
            if member.ends <= self.members.clock + ahead:
                continue
            row = Row(seq.id, seq.computed + ahead, (seq.output[-1],), 0, seq.need, seq.seed)
            todo.append(((0, member.key), row, row))
            seq.awaiting.append(plan.step)
            seq.inflight += 1
            seq.last_step = plan.step
        todo.sort(key=_by_order)
        return StepPlan(
            plan.step, tuple([row for _, row, _ in todo]), plan.grants, plan.copies, plan.moves, plan.forget, plan.preempted,
            plan.stats, plan.extras, plan.forks, plan.swap_outs, plan.swap_ins,
        )  # fmt: skip

    def single(self, run: Run) -> StepPlan:
        """The first step of `run` that is planned (`plan_next`) as a plan of its own, which is then outstanding."""
        keys = run.keys + run.count * (self._first - run.clock)
        self._first += 1
        return self._launch(run.count, keys, self._planned.pop(0))


def _by_order(entry: Entry) -> Order:
    return entry[0]


_NOBODY: set[str] = set()

__all__ = ["Flock", "Member", "Run", "Stretch", "promise_of"]
