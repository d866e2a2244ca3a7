"""Steps on their way: through the stages of a pipeline, and through ranks that share experts.

    plan -> host -> stage 0 -> link -> stage 1 -> link -> ... -> stage pp - 1 -> tokens are known

Each of these works on one step at a time, in the order of the plans, while the others work on other steps:

    begin of step k in part i = max(end of step k in part i - 1, end of step k - 1 in part i)

So with as many steps on their way as there are stages, and stages alike, a step comes out every stage time; a step
alone takes the sum of all parts; and where there are fewer requests than stages, stages stand idle. Whose token is on its
way is in no other step (`Limits.num_stages`).

Data-parallel ranks that share experts meet in every sparse layer (`Lockstep`): they take a step together, each with its
own plan; who has none takes part with one made-up token. A stage then lasts as long as its slowest rank takes without
experts, and what the experts take for the tokens of all.

Invariants
* Steps come out in the order in which they went in; no part works on two at once.
* The parts of a step (`StepCost.stages`) sum to its `seconds`, its `ops` too. Waiting for a part is in neither.
* A link works beside the stages that it connects.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

import simpy

from twinfer.core.executor import Executor
from twinfer.core.layer_ops import Stage
from twinfer.core.parallel_ops import experts_of, own_ops, sent_ahead, stages_of
from twinfer.core.plan import StepPlan, StepResult
from twinfer.core.work import Op, StepShape, num_logits
from twinfer.simulator.step_parts import Part, StepCost
from twinfer.simulator.step_time import OpsOf, StepTimer

if TYPE_CHECKING:
    from twinfer.core.layout import Layout
    from twinfer.core.spec import ModelSpec
    from twinfer.simulator.op_time import OpTimeChain

Adapt = Callable[[Sequence[Op], StepShape], Sequence[Op]]
Done = Callable[[StepResult, float], None]
_KEPT = 1 << 15
_LAST = 2  # SimPy priority of what happens after everything else of a moment


def pass_through(free: list[float], now: float, parts: Sequence[float]) -> tuple[float, float]:
    """Send a step through `parts` (s in each): when it begins and ends. free: when each part has done all earlier steps."""
    free += [now] * (len(parts) - len(free))
    at = begin = max(now, free[0])
    for i, seconds in enumerate(parts):
        at = free[i] = max(at, free[i]) + seconds
    return begin, at


class Line:
    """The way of one engine's plans; `done(result, begin)` is called when one has come out."""

    def __init__(self, env: simpy.Environment) -> None:
        self._env = env
        self._free: list[float] = []

    def launch(self, executor: Executor, plan: StepPlan, done: Done) -> None:
        result = executor.execute(plan)
        self._carry(result, lambda begin: done(result, begin))

    def _carry(self, result: StepResult, done: Callable[[float], None]) -> None:
        begin, end = pass_through(self._free, self._env.now, result.stages or (result.seconds,))
        timer = self._env.timeout(end - self._env.now)
        assert timer.callbacks is not None
        timer.callbacks.append(lambda _: done(begin))


class Charged(Protocol):
    """An executor whose steps take what somebody else has worked out."""

    def charge(self, plan: StepPlan, cost: StepCost) -> StepResult: ...


class Lockstep(Line):
    """The way of the plans of all `executors`, one a rank, that share experts; at most `depth` steps are on it.

    What ranks plan at the same moment goes together; a rank that plans later waits for the next step.
    """

    def __init__(self, env: simpy.Environment, timer: StagedTimer, executors: Sequence[Charged], depth: int) -> None:
        super().__init__(env)
        self._timer, self._executors, self._depth = timer, executors, depth
        self._plans: list[deque[tuple[StepPlan, Done]]] = [deque() for _ in executors]
        self._on_way = 0
        self._rung = False
        self.broken = False  # the ranks are gone: nothing more is launched

    def launch(self, executor: Executor, plan: StepPlan, done: Done) -> None:
        rank = [id(other) for other in self._executors].index(id(executor))
        self._plans[rank].append((plan, done))
        self._ring()

    def _ring(self) -> None:
        """Look for plans once everyone has done what this moment asks for."""
        if self._rung:
            return
        self._rung = True
        event = simpy.Event(self._env)
        event._ok, event._value = True, None  # triggered, as `Event.succeed` does, but last
        assert event.callbacks is not None
        event.callbacks.append(lambda _: self._go())
        self._env.schedule(event, priority=_LAST)

    def _go(self) -> None:
        self._rung = False
        if self.broken or self._on_way >= self._depth:
            return
        going = [(rank, *plans.popleft()) for rank, plans in enumerate(self._plans) if plans]
        if not going:
            return
        costs = self._timer.together([plan for _, plan, _ in going], len(self._plans) - len(going))
        results = [self._executors[rank].charge(plan, cost) for (rank, plan, _), cost in zip(going, costs, strict=True)]
        self._on_way += 1

        def ended(begin: float) -> None:
            self._on_way -= 1
            for (_, _, done), result in zip(going, results, strict=True):
                done(result, begin)
            self._ring()

        self._carry(results[0], ended)
        self._ring()


class Experts:
    """What the routed experts of a stage take: seconds by (most tokens of a rank, tokens of all ranks)."""

    def __init__(self, stage: Stage, adapt: Adapt, chain: OpTimeChain) -> None:
        self._stage, self._adapt, self._chain = stage, adapt, chain
        self._known: dict[tuple[int, int], Part] = {}

    def part(self, most: int, total: int) -> Part:
        known = self._known.get((most, total))
        if known is None:
            if len(self._known) >= _KEPT:
                self._known.clear()
            ops: dict[str, float] = {}
            sigma = 0.0
            for op in self._adapt(experts_of(self._stage, most, total), StepShape.prefill(most)):
                answer = self._chain.ask(op)
                ops[op.name] = ops.get(op.name, 0.0) + answer.seconds * op.count
                sigma += answer.sigma * op.count
            known = self._known[most, total] = Part(math.fsum(ops.values()), sigma, ops)
        return known


class TimedStage(NamedTuple):
    """own: times what a rank does by itself.  experts: what it does together with the others, if it does."""

    own: StepTimer
    experts: Experts | None


class StagedTimer(StepTimer):
    """Times steps that go through several stages, or over several ranks that share experts.

    send: seconds and sigma of handing the hidden state of so many tokens to the next stage.  The others as for `StepTimer`:
    `ops_of` gives the ops of a step in a full pipeline, on the fullest rank.
    """

    def __init__(
        self, stages: Sequence[TimedStage], send: Callable[[int], tuple[float, float]], ops_of: OpsOf,
        chain: OpTimeChain, windows: Sequence[int], overlap: bool,
    ) -> None:  # fmt: skip
        super().__init__(ops_of, chain, windows, overlap)
        self._stages, self._send = stages, send
        self.shares_experts = any(stage.experts is not None for stage in stages)

    def cost(self, plan: StepPlan, with_ops: bool = True) -> StepCost:
        """Cost of `plan` on its way alone, other ranks having nothing to do."""
        return self.together((plan,), 0, with_ops)[0]

    def together(self, plans: Sequence[StepPlan], idle: int, with_ops: bool = True) -> list[StepCost]:
        """Costs of a step that ranks take together, with one of `plans` each; `idle` others have none.

        They differ in `ops` alone: `rank_wait` is what a rank waits for slower ones.
        """
        tokens = [plan.num_tokens for plan in plans]
        most, total = max(tokens), sum(tokens) + idle
        host = max((self._host(len(p.rows), p.num_tokens, num_logits(p)) for p in plans), key=_seconds)
        parts, sigma = [host.seconds], host.sigma
        waits = [0.0] * len(plans)
        ops: list[dict[str, float]] = [{} for _ in plans]
        known: dict[int, tuple[list[StepCost], StepCost]] = {}
        for stage in self._stages:
            if len(parts) > 1:
                seconds, spread = self._send(most)
                parts.append(seconds)
                sigma += spread
            if id(stage) not in known:
                costs = [stage.own.cost(plan, with_ops) for plan in plans]
                known[id(stage)] = costs, max(costs, key=_seconds)
            costs, slowest = known[id(stage)]
            shared = stage.experts.part(most, total) if stage.experts is not None and most else None
            parts.append(slowest.seconds + (shared.seconds if shared else 0.0))
            sigma += slowest.sigma + (shared.sigma if shared else 0.0)
            for i, cost in enumerate(costs):
                waits[i] += slowest.seconds - cost.seconds
                if with_ops:
                    _add(ops[i], cost.ops)
                    _add(ops[i], shared.ops if shared else {})
        if len(self._stages) == 1:  # one step at a time: the CPU works before it, or beside it
            device, waited = parts[1], host.seconds
            if self._overlap:
                waited = max(0.0, host.seconds - device)
                sigma -= 0.0 if waited else host.sigma
            seconds, parts = device + waited, []
        else:
            seconds, waited = math.fsum(parts), host.seconds
        if with_ops:
            sent = math.fsum(parts[2::2])
            for i, found in enumerate(ops):
                found["host"] = waited
                if sent:
                    found["hand_over"] = sent
                if waits[i]:
                    found["rank_wait"] = waits[i]
        return [StepCost(seconds, sigma, found, tuple(parts)) for found in ops]


def _seconds(cost: StepCost | Part) -> float:
    return cost.seconds


def _add(sums: dict[str, float], ops: Mapping[str, float]) -> None:
    for name, seconds in ops.items():
        sums[name] = sums.get(name, 0.0) + seconds


def timer_of(
    model: ModelSpec, layout: Layout, adapt: Adapt, ops_of: OpsOf, chain: OpTimeChain, windows: Sequence[int],
    overlap: bool,
) -> StepTimer:  # fmt: skip
    """What times the steps of one rank of a replica of `model`, laid out as `layout`.

    adapt: what techniques make of ops.  ops_of: the ops of a step of the replica.  overlap: as for `StepTimer`.
    """
    shares = layout.dp > 1 and model.moe is not None and model.num_moe_layers > 0
    if layout.pp == 1 and not shares:
        return StepTimer(ops_of, chain, windows, overlap)
    made: list[tuple[Stage, TimedStage]] = []
    stages: list[TimedStage] = []
    for stage in stages_of(model, layout):
        inner = stage.first > 0 and stage.last < model.num_layers
        like = replace(stage, first=1, last=1) if inner else stage  # layers alike take as long wherever they are
        timed = next((timed for other, timed in made if other == like), None)
        if timed is None:
            experts = Experts(stage, adapt, chain) if shares and stage.experts is not None else None
            timed = TimedStage(_timer_of_stage(stage, shares, adapt, chain, windows), experts)
            made.append((like, timed))
        stages.append(timed)
    sends: dict[int, tuple[float, float]] = {}

    def send(tokens: int) -> tuple[float, float]:
        if tokens not in sends:
            answer = chain.ask(sent_ahead(model, tokens, layout, 1)) if tokens else None
            sends[tokens] = (answer.seconds, answer.sigma) if answer is not None else (0.0, 0.0)
        return sends[tokens]

    return StagedTimer(stages, send, ops_of, chain, windows, overlap)


def _timer_of_stage(
    stage: Stage, shares: bool, adapt: Adapt, chain: OpTimeChain, windows: Sequence[int]
) -> StepTimer:  # fmt: skip
    def ops(shape: StepShape) -> Sequence[Op]:
        return adapt(own_ops(stage, shape, not shares), shape)

    return StepTimer(ops, chain, windows, host=False)


__all__ = ["Experts", "Line", "Lockstep", "StagedTimer", "TimedStage", "pass_through", "timer_of"]
