"""One look at one fleet: what is simulated, and what is kept of it.

    assess     bounds of a design, nothing is simulated
    screen     one replica of n, on the busiest part of the traffic, every n-th request of it
    replica    one replica of n, on all of the traffic, every n-th request of it
    fleet      all n replicas, on all of the traffic, requests dealt out in turn

Dealing in turn (round robin) makes replicas independent of each other: the fleet is exactly its replicas, one by one.

Invariants
* An outcome depends on its trial and the question alone: not on the process, on other trials or on the clock.
* A run that has already broken a promise for certain, even one 25 % weaker, is ended early and says so.
* Whatever is not served counts against the promises (`core/goal.py`) and as `failed`.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from twinfer.core.catalog import resolve_spec
from twinfer.core.errors import TwinferError
from twinfer.core.goal import Goal, kept, most_late, statistic_of, values_of
from twinfer.core.op_time import OpTime
from twinfer.core.records import RequestRecord, RunRecord, StepRecord
from twinfer.core.registry import Registry, default_registry
from twinfer.core.request import Request
from twinfer.core.work import Op, RowShape, StepShape
from twinfer.core.workload import generate
from twinfer.simulator.energy import StepParts, power_watts, step_parts
from twinfer.simulator.op_time import OpTimeChain
from twinfer.simulator.plan_bound import bound_of, demand_of
from twinfer.simulator.plan_space import Design, Question, check_question, designs_of, devices_of_question
from twinfer.simulator.run import World, prepare, run_world

ASSESS, SCREEN, REPLICA, FLEET = "assess", "screen", "replica", "fleet"
REPORTED = ("ttft.p50", "ttft.p95", "ttft.p99", "tpot.p50", "tpot.p95", "tpot.p99", "e2e.p95")
PATIENCE = 1.25  # how much weaker a promise may get (sensitivity) before an early end would hide the answer
KEPT_WORLDS = 12  # designs whose op times a process remembers
FULL = 0.95  # share of the KV pool from which on it counts as full

ShouldStop = Callable[[], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """`replicas` of the design number `design`, looked at by `level`.

    load: how many times the traffic.  steps: how many times as long all steps take.  bandwidth: share of the
    device's memory bandwidth.
    """

    design: int
    replicas: int
    level: str
    load: float = 1.0
    steps: float = 1.0
    bandwidth: float = 1.0

    @property
    def key(self) -> str:
        more = "".join(f" {n}={v:.6g}" for n in ("load", "steps", "bandwidth") if (v := getattr(self, n)) != 1)
        return f"{self.design:05d} {self.level} x{self.replicas}{more}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a trial found. Times in s; shares in [0, 1]; None where it was not served or is not known.

    problem: why the design cannot work at all.  values: statistics by dotted name.  hopeless: the goal that was
    broken so early that the run was ended.  attained: share of requests that kept every limit.
    good_tokens: output tokens per s of those.  busy: share of the time that steps ran.  sigma: relative error of
    step times.  *_full: share of the time in which requests waited and that was at its limit.
    parts: where the time of the mean step goes, by what bounds it; queue_parts: of steps while requests waited.
    """

    problem: str = ""
    fewest: int = 1
    likely: int = 1
    values: Mapping[str, float | None] = field(default_factory=dict)
    hopeless: str = ""
    num_requests: int = 0
    failed: int = 0
    failed_why: str = ""
    attained: float = 0.0
    requests_per_second: float = 0.0
    tokens_per_second: float = 0.0
    good_tokens: float = 0.0
    busy: float = 0.0
    sigma: float = 0.0
    preemptions: int = 0
    kv_full: float = 0.0
    rows_full: float = 0.0
    waiting: float = 0.0
    kv_peak: float = 0.0
    parts: Mapping[str, float] = field(default_factory=dict)
    queue_parts: Mapping[str, float] = field(default_factory=dict)
    watts: float | None = None

    def plain(self) -> dict[str, Any]:
        """JSON data of what is not at its default."""
        default = Outcome()
        return {f.name: v for f in fields(self) if (v := getattr(self, f.name)) != getattr(default, f.name)}

    def broken(self, goals: Sequence[Goal]) -> list[Goal]:
        """The promises that are not kept."""
        return [g for g in goals if g.name == self.hopeless.partition("<")[0] or not g.met(self.values.get(g.name))]

    def keeps(self, goals: Sequence[Goal]) -> bool:
        """Every promise is kept and every request was served."""
        return not self.problem and not self.failed and not self.hopeless and not self.broken(goals)

    def margin(self, goals: Sequence[Goal]) -> float:
        """The tightest promise as value / limit; inf when one was not served."""
        ratios = [math.inf if (v := self.values.get(g.name)) is None else v / g.limit for g in goals]
        return max(ratios, default=0.0)


class Evaluator:
    """Answers trials of one question in one process; remembers the op times of the last designs."""

    def __init__(self, question: Question, registry: Registry | None = None) -> None:
        self.question = question
        self.registry = registry or default_registry()
        check_question(question, self.registry)
        self.devices = devices_of_question(question, self.registry)
        self.designs = designs_of(question)
        self.requests = requests_of(question, self.registry)
        self.demand = demand_of(self.requests)
        self.whole = busiest(self.requests, question.confirm)
        self._worlds: OrderedDict[tuple[int, float], World] = OrderedDict()

    def level(self, level: str, replicas: int) -> str:
        """`level`, or `fleet` where the traffic is so little that a closer look costs no more."""
        return FLEET if level != ASSESS and len(self.requests) <= self.question.screen else level

    def answer(self, trial: Trial, should_stop: ShouldStop | None = None) -> Outcome | None:
        """The outcome of `trial`; None when `should_stop` said so."""
        design = self.designs[trial.design]
        if design.config is None:
            return Outcome(problem=design.problem)
        try:
            world = self._world(design, trial.bandwidth)
            if trial.level == ASSESS:
                bound = bound_of(world, self.demand, self.question.goals, self._peak_rate())
                return Outcome(fewest=bound.fewest, likely=bound.likely, problem=bound.problem)
            return self._simulate(world, trial, should_stop)
        except TwinferError as error:  # what does not fit, or techniques that refuse each other
            return Outcome(problem=str(error))

    def _world(self, design: Design, bandwidth: float) -> World:
        key = (design.index, bandwidth)
        world = self._worlds.pop(key, None)
        if world is None:
            assert design.config is not None
            slower = None if bandwidth == 1 else lambda chain: SlowMemory(chain, bandwidth)
            world = prepare(
                design.config, self.question.workload, self.registry, self.devices[design.device],
                requests=self.requests, wrap=slower,
            )  # fmt: skip
        self._worlds[key] = world
        while len(self._worlds) > KEPT_WORLDS:
            self._worlds.popitem(last=False)
        return world

    def _peak_rate(self) -> float:
        part = busiest(self.requests, max(self.question.screen, len(self.requests) // 8))
        return demand_of(part).rate if part[-1].arrival > part[0].arrival else self.demand.rate

    def _simulate(self, world: World, trial: Trial, should_stop: ShouldStop | None) -> Outcome | None:
        requests = self.whole
        if trial.level == SCREEN:
            requests = busiest(requests, self.question.screen * trial.replicas)
        shares = trial.replicas if trial.level == FLEET else 1
        dealt = [retimed(requests[i :: trial.replicas], trial.load, requests[0].arrival) for i in range(shares)]
        watch = Watch(self.question.goals, sum(map(len, dealt)))
        tally = Tally()
        for part in dealt:
            if not part:
                continue
            watch.begin()
            record, sigma = run_world(
                replace(world, requests=part), trial.steps, lambda done, total, info: None, should_stop, False, watch
            )
            tally.add(record, sigma)
            if not record.complete and not watch.broken:
                return None
            if watch.broken:
                break
        return tally.outcome(world, self.question.goals, shares, watch.broken)


class SlowMemory(OpTimeChain):
    """A chain on a device with less memory bandwidth: what memory bounds takes longer, the rest stays."""

    def __init__(self, chain: OpTimeChain, share: float) -> None:
        super().__init__(chain.models, chain.device)
        self.share = share

    def time(self, op: Op) -> OpTime:
        answer = super().time(op)
        if op.kind in ("host", "comm", "host_copy"):
            return answer
        peak = self.device.peak_flops.get(op.dtype) or max(self.device.peak_flops.values())
        if op.bytes / self.device.memory_bandwidth < op.flops / peak:
            return answer
        return OpTime(answer.seconds / self.share, answer.sigma / self.share, answer.source, answer.detail)


class Watch:
    """Asked before each step whether a promise is already broken for certain; counts over all replicas of a trial.

    Only TTFT: what waits and is late needs not end to be known.
    """

    def __init__(self, goals: Sequence[Goal], num: int) -> None:
        self._goals = [g.scaled(PATIENCE) for g in goals if g.metric == "ttft" and g.statistic != "mean"]
        self._named = {g.scaled(PATIENCE).name: g for g in goals}
        self._most = [most_late(g, num) for g in self._goals]
        self._late = [0] * len(self._goals)
        self._seen = [0] * len(self._goals)
        self.broken: Goal | None = None

    def begin(self) -> None:
        """A new replica starts, its record is empty."""
        self._seen = [0] * len(self._goals)

    def __call__(self, record: RunRecord, now: float) -> bool:
        requests = record.requests
        for i, goal in enumerate(self._goals):
            at = self._seen[i]
            while at < len(requests) and requests[at].arrival + goal.limit < now:
                ttft = requests[at].ttft
                self._late[i] += ttft is None or ttft > goal.limit
                at += 1
            self._seen[i] = at
            if self._late[i] >= self._most[i]:
                self.broken = self._named[goal.name]
                return True
        return False


class Tally:
    """Sums over the replicas of a trial."""

    def __init__(self) -> None:
        self.requests: list[RequestRecord] = []
        self.every, self.queued = Sums(), Sums()
        self.preemptions = 0
        self.seconds = self.waiting = self.kv_full = self.rows_full = self.kv_peak = 0.0
        self.end = 0.0
        self.sigma = 0.0

    def add(self, record: RunRecord, sigma: float) -> None:
        self.requests += record.requests
        self.sigma = max(self.sigma, sigma)
        most = int(record.config["max_num_seqs"])
        for step in record.steps:
            self._step(step, most)
        self.preemptions += sum(r.num_preemptions for r in record.requests)
        self.end = max([self.end, *(r.last_token for r in record.requests if r.last_token is not None)])

    def _step(self, step: StepRecord, most: int) -> None:
        self.every.add(step)
        self.seconds += step.seconds
        filled = step.held_blocks / step.total_blocks if step.total_blocks else 0.0
        self.kv_peak = max(self.kv_peak, filled)
        if step.waiting:
            self.queued.add(step)
            self.waiting += step.seconds
            self.kv_full += step.seconds * (filled >= FULL)
            self.rows_full += step.seconds * (step.running >= most)

    def outcome(self, world: World, goals: Sequence[Goal], replicas: int, broken: Goal | None) -> Outcome:
        """The sums as an outcome; `replicas` were simulated."""
        unserved = [r for r in self.requests if r.reason not in ("stop", "length")]
        failed = [r for r in unserved if r.reason is not None]
        good = [r for r in self.requests if kept(r, goals)]
        values: dict[str, float | None] = {}
        for name in dict.fromkeys((*(g.name for g in goals), *REPORTED)):
            metric, _, statistic = name.partition(".")
            found = values_of(self.requests, metric)
            if found:
                values[name] = statistic_of(found, statistic)
        end, parts, waits = self.end, self.every.parts(world), self.queued.parts(world)
        per_second = 1 / end if end > 0 else 0.0
        busy = min(1.0, self.seconds * per_second / replicas)
        served = [r for r in self.requests if r.num_output_tokens]
        return Outcome(
            values=values, hopeless="" if broken is None else str(broken), num_requests=len(self.requests),
            failed=len(failed), failed_why=failed[0].detail if failed else "",
            attained=len(good) / len(self.requests) if self.requests else 0.0,
            requests_per_second=(len(self.requests) - len(unserved)) * per_second,
            tokens_per_second=sum(r.num_output_tokens for r in served) * per_second,
            good_tokens=sum(r.num_output_tokens for r in good) * per_second,
            busy=busy, sigma=self.sigma, preemptions=self.preemptions,
            kv_full=self._share(self.kv_full), rows_full=self._share(self.rows_full), waiting=self._share(self.waiting),
            kv_peak=self.kv_peak,
            parts=_shares(parts), queue_parts=_shares(waits),
            watts=None if parts is None else power_watts(world.device, parts.used.scaled(busy)),
        )  # fmt: skip

    def _share(self, seconds: float) -> float:
        return seconds / self.seconds if self.seconds else 0.0


class Sums:
    """Rows and tokens over some steps, of which the mean step is made."""

    def __init__(self) -> None:
        self.steps = self.rows = self.decodes = self.tokens = self.context = 0

    def add(self, step: StepRecord) -> None:
        self.steps += 1
        self.rows += step.num_rows
        self.decodes += step.num_decode_rows
        self.tokens += step.num_tokens
        self.context += step.num_context_tokens

    def parts(self, world: World) -> StepParts | None:
        """The mean step, taken apart; FLOPs and bytes are linear in its rows, so its sums are the run's."""
        if not self.steps:
            return None
        decodes, prefills = round(self.decodes / self.steps), self.rows - self.decodes
        tokens = round((self.tokens - self.decodes) / self.steps)
        context = max(1, round(self.context / max(1, self.rows)))
        rows = (RowShape(1, context),) * decodes
        if tokens and prefills:
            rows += (RowShape(tokens, max(tokens, context)),)
        if not rows:
            return None
        shape = StepShape(rows, max(1, decodes))
        return step_parts(world.ops_of(shape), shape, world.chain)


def _shares(parts: StepParts | None) -> dict[str, float]:
    if parts is None or not parts.seconds:
        return {}
    return {name: getattr(parts, name) / parts.seconds for name in ("compute", "memory", "network", "host")}


# --- traffic ----------------------------------------------------------------------------------------


def requests_of(question: Question, registry: Registry) -> list[Request]:
    """All requests of the question's traffic, sorted by arrival."""
    spec = resolve_spec(question.model)
    context = int(question.base.get("max_model_len") or spec.max_context)
    return generate(question.workload, spec.vocab_size, context, registry=registry)


def busiest(requests: Sequence[Request], num: int) -> Sequence[Request]:
    """The `num` requests in a row that ask for the most tokens per second; all when there are no more."""
    if len(requests) <= num:
        return requests
    sizes = [len(r.prompt) + (r.params.max_tokens or 1) for r in requests]
    inside = sum(sizes[:num])
    best, where = -1.0, 0
    for first in range(len(requests) - num + 1):
        span = requests[first + num - 1].arrival - requests[first].arrival
        rate = inside / max(span, 1e-9)
        if rate > best:
            best, where = rate, first
        if first + num < len(requests):
            inside += sizes[first + num] - sizes[first]
    return requests[where : where + num]


def retimed(requests: Sequence[Request], load: float, origin: float) -> list[Request]:
    """`requests` from `origin` on, arriving `load` times as fast."""
    if load == 1 and not origin:
        return list(requests)
    return [replace(r, arrival=(r.arrival - origin) / load) for r in requests]


def outcome_of(plain: Mapping[str, Any]) -> Outcome:
    """The outcome that `Outcome.plain` described. Raises TypeError for unknown fields."""
    return Outcome(**plain)


def trial_of(plain: Mapping[str, Any]) -> Trial:
    return Trial(**plain)


def plain_trial(trial: Trial) -> dict[str, Any]:
    return asdict(trial)


__all__ = [
    "ASSESS", "FLEET", "REPLICA", "SCREEN", "Evaluator", "Outcome", "Trial", "busiest", "outcome_of", "plain_trial",
    "requests_of", "retimed", "trial_of",
]  # fmt: skip
