"""What is kept of a trial: its outcome, the sums it is made of, and the watch that ends a hopeless one.

Invariants
* Whatever is not served counts against the promises (`core/goal.py`) and as `failed`.
* The watch ends a run only when a promise is broken for certain, even one 25 % weaker.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from twinfer.core.goal import Goal, kept, most_late, statistic_of, values_of
from twinfer.core.plan import PlanStats
from twinfer.core.records import RequestRecord, RunRecord, StepRecord
from twinfer.core.work import RowShape, StepShape
from twinfer.simulator.energy import StepParts, power_watts, step_parts
from twinfer.simulator.plan_steps import steps_of
from twinfer.simulator.run import World

REPORTED = ("ttft.p50", "ttft.p95", "ttft.p99", "tpot.p50", "tpot.p95", "tpot.p99", "e2e.p95")
PATIENCE = 1.25  # how much weaker a promise may get (sensitivity) before an early end would hide the answer
BACKLOG = 0.1
"""Share of the requests that may still be to be answered when the last one comes: with more, traffic was too short against the
time that a request stays (Little's law), or comes faster than it is served."""
FULL = 0.95  # share of the KV pool from which on it counts as full


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a trial found. Times in s; shares in [0, 1]; None where it was not served or is not known.

    problem: why the design cannot work at all.  seed: which draw of the traffic.  values: statistics by dotted name.  hopeless: the goal that was
    broken so early that the run was ended.  attained: share of requests that kept every limit.
    good_tokens: output tokens per s of those.  busy: share of the time that steps ran.  sigma: relative error of
    step times.  backlog: share of the requests that were still to be answered when the last one (of sessions: the last
    session) came; 0 in a closed loop.  *_full: share of the time in which requests waited and that was at its limit.
    parts: where the time of the mean step goes, by what bounds it; queue_parts: of steps while requests waited.
    """

    problem: str = ""
    seed: int = 0
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
    backlog: float = 0.0
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

    @property
    def settled(self) -> bool:
        """Whether it says how the fleet fares in the long run."""
        return self.backlog <= BACKLOG

    def margin(self, goals: Sequence[Goal]) -> float:
        """The tightest promise as value / limit; inf when one was not served."""
        ratios = [math.inf if (v := self.values.get(g.name)) is None else v / g.limit for g in goals]
        return max(ratios, default=0.0)


class Watch:
    """Asked before each step whether a promise is already broken for certain; counts over all replicas of a trial.

    Only TTFT: what waits and is late needs not end to be known.
    """

    def __init__(self, goals: Sequence[Goal], num: int) -> None:
        self._goals = [g.scaled(PATIENCE) for g in goals if g.metric == "ttft" and g.statistic != "mean"]
        self._named = {g.scaled(PATIENCE).name: g for g in goals}
        self._most = [most_late(g, num) for g in self._goals]
        self._late = [0] * len(self._goals)
        self._seen: dict[str, list[int]] = {}  # by record: how many of its requests are judged
        self._next: dict[str, float] = {}  # by record: when there is something to judge again
        self.broken: Goal | None = None

    def __call__(self, record: RunRecord, now: float) -> bool:
        """Look at the replica of `record`, whose requests stand in the order of their arrival."""
        if now < self._next.get(record.id, 0.0):
            return False
        requests = record.requests
        seen = self._seen.setdefault(record.id, [0] * len(self._goals))
        for i, goal in enumerate(self._goals):
            at = seen[i]
            while at < len(requests) and requests[at].arrival + goal.limit < now:
                ttft = requests[at].ttft
                self._late[i] += ttft is None or ttft > goal.limit
                at += 1
            seen[i] = at
            if self._late[i] >= self._most[i]:
                self.broken = self._named[goal.name]
                return True
        if seen and max(seen) < len(requests):  # those that are yet to come arrive later still
            self._next[record.id] = min(requests[at].arrival + g.limit for at, g in zip(seen, self._goals, strict=True))
        return False


class TrialTally:
    """Sums over the replicas of a trial. most_rows: that one rank may run at once."""

    def __init__(self, most_rows: int) -> None:
        self.most_rows = most_rows
        self.requests: list[RequestRecord] = []
        self.every, self.queued = Sums(), Sums()
        self.preemptions = 0
        self.seconds = self.waiting = self.kv_full = self.rows_full = self.kv_peak = 0.0
        self.end = 0.0
        self.sigma = 0.0

    def add(self, record: RunRecord, sigma: float) -> None:
        """A replica's requests, and its steps where the record has them."""
        self.requests += record.requests
        self.sigma = max(self.sigma, sigma)
        for step in record.steps:
            self.step(step.seconds, step, step.num_rows, step.num_decode_rows, step.num_tokens, step.num_context_tokens)
        self.preemptions += sum(r.num_preemptions for r in record.requests)
        self.end = max([self.end, *(r.last_token for r in record.requests if r.last_token is not None)])

    def step(
        self, seconds: float, stats: PlanStats | StepRecord, num_rows: int, decodes: int, tokens: int, context: int
    ) -> None:  # fmt: skip
        self.every.add(1, num_rows, decodes, tokens, context)
        self.seconds += seconds
        held, total = stats.held_blocks, stats.total_blocks or math.inf  # without a pool nothing is ever full
        self.kv_peak = max(self.kv_peak, held / total)
        if stats.waiting:
            self.queued.add(1, num_rows, decodes, tokens, context)
            self.waiting += seconds
            self.kv_full += seconds * (held >= FULL * total)
            self.rows_full += seconds * (stats.running >= self.most_rows)

    def run(self, times: Sequence[float], stats: PlanStats, count: int, keys: int, taken: Sequence[int]) -> None:
        """Steps that began and ended at `times`, each with a token more of `count` sequences.

        stats: of the first; whether requests wait is as when the run was planned.  keys: KV tokens that the rows of the
        first attend to.  taken: steps before which one more block was taken.
        """
        steps, seconds = len(times) - 1, times[-1] - times[0]
        fed = steps * count
        context = steps * keys + count * (steps * (steps - 1) // 2)
        self.every.add(steps, fed, fed, fed, context)
        self.seconds += seconds
        held, total = stats.held_blocks, stats.total_blocks or math.inf
        self.kv_peak = max(self.kv_peak, (held + len(taken)) / total)
        if stats.waiting:
            self.queued.add(steps, fed, fed, fed, context)
            self.waiting += seconds
            self.rows_full += seconds * (stats.running >= self.most_rows)
            missing = FULL * total - held  # blocks, until the pool counts as full
            if missing <= 0:
                self.kv_full += seconds
            elif missing <= len(taken):
                self.kv_full += times[-1] - times[sorted(taken)[math.ceil(missing) - 1]]

    def outcome(
        self, world: World, goals: Sequence[Goal], replicas: int, broken: Goal | None, last_start: float
    ) -> Outcome:
        """The sums as an outcome; `replicas` were simulated. last_start: when the last request or session came, in s."""
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
        at_once = world.setup.config.dp * world.setup.config.pp  # steps of a replica
        busy = min(1.0, self.seconds * per_second / (replicas * at_once))
        served = [r for r in self.requests if r.num_output_tokens]
        late = sum(r.last_token is None or r.last_token > last_start for r in self.requests)
        return Outcome(
            values=values, hopeless="" if broken is None else str(broken), num_requests=len(self.requests),
            failed=len(failed), failed_why=failed[0].detail if failed else "",
            attained=len(good) / len(self.requests) if self.requests else 0.0,
            requests_per_second=(len(self.requests) - len(unserved)) * per_second,
            tokens_per_second=sum(r.num_output_tokens for r in served) * per_second,
            good_tokens=sum(r.num_output_tokens for r in good) * per_second,
            busy=busy, sigma=self.sigma, backlog=late / max(1, len(self.requests)), preemptions=self.preemptions,
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

    def add(self, steps: int, num_rows: int, decodes: int, tokens: int, context: int) -> None:
        self.steps += steps
        self.rows += num_rows
        self.decodes += decodes
        self.tokens += tokens
        self.context += context

    def parts(self, world: World) -> StepParts | None:
        """The mean step, taken apart; FLOPs and bytes are linear in its rows, so its sums are the run's."""
        if not self.steps:
            return None
        steps = steps_of(world)
        context = max(1, round(self.context / max(1, self.rows)))
        if steps.guesses:  # rows that check guesses are not counted apart from prompts: all are taken for such
            decodes, prefills = max(1, round(self.rows / self.steps)), 1
            tokens = max(0, round(self.tokens / self.steps) - decodes * (1 + steps.guesses))
        else:
            decodes, prefills = round(self.decodes / self.steps), self.rows - self.decodes
            tokens = round((self.tokens - self.decodes) / self.steps)
        rows = (steps.row(context),) * decodes
        if tokens and prefills:
            rows += (RowShape(tokens, max(tokens, context)),)
        if not rows:
            return None
        shape = StepShape(rows, max(1, decodes * (1 + steps.guesses)))
        return step_parts(world.ops_of(shape), shape, world.chain, steps.drafting(shape))


def _shares(parts: StepParts | None) -> dict[str, float]:
    if parts is None or not parts.seconds:
        return {}
    return {name: getattr(parts, name) / parts.seconds for name in ("compute", "memory", "network", "host")}


__all__ = ["BACKLOG", "PATIENCE", "Outcome", "TrialTally", "Watch"]
