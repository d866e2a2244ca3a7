"""From what a search found to what a buyer reads: rows, the Pareto front, what comes next, one sentence.

    next limit    of the load just above the goodput: which promise breaks first, and what its requests wait for
        the KV pool is full while requests wait      memory: KV capacity
        all rows are taken while requests wait       max_num_seqs
        else what most of the mean step's time is    compute | memory bandwidth | interconnect | host
        (of the steps in which requests waited, where a queue is what breaks it)

Invariants
* Every number says which outcome it is of; what is not known is None, never 0.
* Fleets without a price are never ranked among those with one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from twinfer.core.device import DeviceSpec
from twinfer.core.errors import rounded
from twinfer.core.goal import Goal
from twinfer.simulator.energy import joules_per_token
from twinfer.simulator.plan_bound import Demand
from twinfer.simulator.plan_designs import Design, label_of
from twinfer.simulator.plan_search import Found, time_of
from twinfer.simulator.plan_space import Question
from twinfer.simulator.plan_tally import BACKLOG
from twinfer.simulator.plan_trial import Outcome

UNKNOWN = "not searched: stopped"
"""The next limit of a fleet whose goodput was still being looked for."""
SLOW_END = "end of the 80 % band"
"""In the words of a change (`plan_changes.py`): all steps as slow as that."""
CROWDED = 0.3  # share of the time with requests waiting at a limit, from which on that limit is the reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """One confirmed fleet, of one device type. Money in US$, times in s, `band` of the middle 80 %.

    Cost and rates are means over all of the traffic; times, `busy`, watts and joules_per_token are of its busiest part.
    cost_per_million: per million output tokens of requests that kept every limit.  goodput: largest rate in
    requests per s at which the promises are kept in every draw (goodput_spread: the least and the most of them); clients:
    of a closed loop, as many as it then serves.  next_limit: what breaks above it.  command: what simulates the fleet.
    values: of the draw of the traffic that comes nearest to a limit, spread: of all `seeds` draws, band: with all steps
    faster and slower, least and most of all draws.  backlog: the most of all draws (`plan_tally.BACKLOG`).
    """

    device: str
    label: str
    design: str
    config: Mapping[str, Any]
    replicas: int
    num_devices: int
    price_per_hour: float | None
    price_source: str
    cost_per_hour: float | None
    cost_per_million: float | None
    goodput: float
    goodput_spread: tuple[float, float]
    clients: int | None
    headroom: float
    values: Mapping[str, float | None]
    spread: Mapping[str, tuple[float | None, float | None]]
    seeds: int
    band: Mapping[str, tuple[float | None, float | None]]
    band_keeps: bool
    attained: float
    busy: float
    requests_per_second: float
    tokens_per_second: float
    watts: float | None
    joules_per_token: float | None
    next_limit: str
    backlog: float = 0.0
    command: str = ""
    on_front: bool = False

    def plain(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


@dataclass(slots=True, kw_only=True)
class Answer:
    """fleets: cheapest first, those without a price last.  none: device -> why no fleet of it is proposed.

    changed: what the answer becomes when something is different, in words and numbers.  cheaper: fleets that cost less
    than the answer, and the limit that each meets (`plan_neighbours.py`).
    """

    sentence: str
    fleets: list[Fleet]
    none: Mapping[str, str]
    changed: list[dict[str, Any]] = field(default_factory=list)
    cheaper: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def plain(self) -> dict[str, Any]:
        return {
            "sentence": self.sentence, "fleets": [f.plain() for f in self.fleets], "none": dict(self.none),
            "changed": self.changed, "cheaper": self.cheaper, "notes": self.notes,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Pace:
    """What a fleet serves on average over all of the traffic, of which it may have seen the busiest part alone."""

    requests_per_second: float
    tokens_per_second: float
    good_tokens: float

    @classmethod
    def of(cls, outcome: Outcome, all_of_it: Demand, part: Demand) -> Pace:
        """all_of_it: the traffic as given.  part: what of it an outcome is of, at least."""
        requests, tokens = outcome.requests_per_second, outcome.tokens_per_second
        if part.num == all_of_it.num or not tokens:
            return cls(requests, tokens, outcome.good_tokens)
        mean = all_of_it.rate * all_of_it.output
        return cls(all_of_it.rate, mean, mean * outcome.good_tokens / tokens)


def fleet_of(found: Found, question: Question, device: DeviceSpec, demand: Demand, part: Demand) -> Fleet:
    """The fleet of `found`, which must have one. demand: of all the traffic; part: of what it was confirmed with."""
    design, outcome = found.design, found.outcome
    assert design is not None and outcome is not None and design.config is not None
    price = device.price_per_hour
    cost = None if price is None else price * found.num_devices
    draws = found.draws or [outcome]
    spread = {n: _ends([d.values.get(n) for d in draws]) for n in outcome.values}
    band = {
        n: (
            _ends([spread[n][0], *(_value(o, n) for o in found.fast)])[0],
            _ends([spread[n][1], *(_value(o, n) for o in found.slow)])[1],
        )
        for n in outcome.values
    }
    pace = Pace.of(outcome, demand, part)
    goodputs = [demand.rate * load for load in (found.loads or [found.load])]
    clients = None
    if question.workload.concurrency is not None:
        clients = max(1, round(question.workload.concurrency * found.load))
        served = found.at_load or outcome
        goodputs = [served.requests_per_second * (found.share if found.at_load is not None else 1.0)]
    return Fleet(
        device=design.device, label=label_of(design, found.replicas), design=design.key,
        config=design.config.model_dump(mode="json"), replicas=found.replicas, num_devices=found.num_devices,
        price_per_hour=price, price_source=device.price_source, cost_per_hour=cost,
        cost_per_million=None if cost is None or not pace.good_tokens else cost / 3600 / pace.good_tokens * 1e6,
        goodput=min(goodputs), goodput_spread=(min(goodputs), max(goodputs)), clients=clients, headroom=found.load - 1,
        values=dict(outcome.values), spread=spread, seeds=len(draws), band=band,
        band_keeps=bool(found.slow) and all(o.keeps(question.goals) for o in found.slow), attained=outcome.attained,
        busy=outcome.busy, requests_per_second=pace.requests_per_second, tokens_per_second=pace.tokens_per_second,
        watts=None if outcome.watts is None else outcome.watts * found.num_devices,
        joules_per_token=joules_per_token(outcome.watts, found.num_devices, outcome.tokens_per_second),
        next_limit=next_limit(found.breaks, question.goals, design, found.load) if found.loads else UNKNOWN,
        backlog=max(draw.backlog for draw in draws),
    )  # fmt: skip


def _ends(values: Sequence[float | None]) -> tuple[float | None, float | None]:
    """Least and most; None, which is what is not served or known, is beyond all that is."""
    known = [v for v in values if v is not None]
    return (min(known, default=None), None if len(known) < len(values) else max(known, default=None))


def _value(outcome: Outcome | None, name: str) -> float | None:
    return None if outcome is None or outcome.hopeless else outcome.values.get(name)


def next_limit(breaks: Outcome | None, goals: Sequence[Goal], design: Design, load: float = 1.0) -> str:
    """What stops a fleet whose outcome just above its goodput is `breaks`."""
    if breaks is None:
        return f"none up to {rounded(load)} times the traffic"
    if breaks.failed:
        return f"memory: requests cannot be served ({breaks.failed_why})"
    broken = breaks.broken(goals)
    if not broken:
        return "none"
    goal = max(broken, key=lambda g: float("inf") if (v := breaks.values.get(g.name)) is None else v / g.limit)
    name = f"{goal.metric.upper()} {goal.statistic}"
    config = design.config
    assert config is not None
    if goal.metric in ("ttft", "e2e") and breaks.kv_full >= CROWDED:
        return f"{name}: KV capacity, requests wait for blocks"
    if goal.metric in ("ttft", "e2e") and breaks.rows_full >= CROWDED:
        return f"{name}: rows, all {config.max_num_seqs} are taken (--max-num-seqs)"
    words = {
        "compute": "compute, prompts compete for steps" if goal.metric in ("ttft", "e2e") else "compute of the prompt chunks in a step",
        "memory": "memory bandwidth, weights and KV are read in every step",
        "network": "the interconnect, collectives of every layer",
        "host": "the host, its part of every step",
        "": "the length of a step",
    }  # fmt: skip
    waits = goal.metric in ("ttft", "e2e") and breaks.queue_parts
    parts = breaks.queue_parts if waits else breaks.parts
    largest = max(parts, key=lambda part: parts[part], default="")
    queue = "queueing on " if goal.metric in ("ttft", "e2e") else ""
    return f"{name}: {queue}{words[largest]}"


def front_of(fleets: Sequence[Fleet], goals: Sequence[Goal]) -> set[int]:
    """Positions of the fleets that no other beats in cost, goodput and every promise at once; priced ones only."""

    def point(fleet: Fleet) -> tuple[float, ...]:
        values = [float("inf") if (v := fleet.values.get(g.name)) is None else v for g in goals]
        return (fleet.cost_per_hour or 0.0, -fleet.goodput, *values)

    priced = [i for i, fleet in enumerate(fleets) if fleet.cost_per_hour is not None]
    points = {i: point(fleets[i]) for i in priced}
    return {
        i for i in priced
        if not any(points[j] != points[i] and all(a <= b for a, b in zip(points[j], points[i], strict=True)) for j in priced)
    }  # fmt: skip


def price_rank(fleet: Fleet) -> tuple[bool, float]:
    """Cheaper first; fleets without a price behind those that have one, by number of devices."""
    return (fleet.cost_per_hour is None, fleet.cost_per_hour or fleet.num_devices)


def ranked(fleets: Iterable[Fleet]) -> list[Fleet]:
    """As `price_rank`; among equals the one with the most room first."""
    return sorted(fleets, key=lambda f: (price_rank(f), -f.headroom, f.device))


def sentence_of(
    fleets: Sequence[Fleet], question: Question, rate: float, complete: bool, changed: Sequence[Mapping[str, Any]] = ()
) -> str:
    """The answer in one sentence: the cheapest fleet by its middle prediction, the cheapest that is safe beside it, the
    promises and the next limit of the first. changed: as in `Answer`."""
    if not fleets:
        if not complete:
            return "The search was stopped before a fleet was confirmed."
        return f"No fleet of up to {question.max_replicas} replicas keeps the promises on any device searched."
    best = fleets[0]
    clients = question.workload.concurrency
    traffic = f"{rounded(rate)} requests/s" if clients is None else f"{clients} clients"
    asked = question.workload.rate
    if clients is None and asked is not None and math.isfinite(asked) and question.workload.trace is None:
        traffic += f" (as drawn, {asked:g} were asked)" if rounded(asked) != rounded(rate) else ""
    start = "The cheapest fleet" if best.cost_per_hour is not None else "The smallest fleet (none has a price)"
    stopped = "" if complete else " of those searched before the stop"
    kept = [f"{g.name} {_time(best.values.get(g.name))} (promised {_time(g.limit)})" for g in question.goals]
    if best.cost_per_million is not None:
        kept.append(f"US$ {best.cost_per_million:.2f} per million output tokens in time")
    burst = ""
    if best.backlog > BACKLOG:
        burst = (
            f"; this holds for a burst: {best.backlog:.0%} of the requests were still to be answered when the last one came, "
            "and traffic that goes on at this rate may need more"
        )
    return (
        f"{start}{stopped} for {question.model} at {traffic} is {best.label}{_priced(best.cost_per_hour)}{_safe(fleets, question.goals, changed)} "
        f"{', '.join(kept)}; {_limit(best, 'traffic' if clients is None else 'clients')}{burst}."
    )


def _priced(cost: float | None) -> str:
    return "" if cost is None else f", US$ {cost:.2f} an hour"


def _safe(fleets: Sequence[Fleet], goals: Sequence[Goal], changed: Sequence[Mapping[str, Any]]) -> str:
    """What to take where the slow end of the band counts, if the first fleet does not keep its promises there."""
    ends = [(g, fleets[0].band[g.name][1]) for g in goals if g.name in fleets[0].band]
    if all(high is not None and high <= g.limit for g, high in ends):
        return ":"
    more = [row for row in changed if SLOW_END in row["case"] and (row["replicas"] or 0) > fleets[0].replicas]
    safe = [(row["cost_per_hour"], f"{row['replicas']} replicas of it") for row in more]
    safe += [(fleet.cost_per_hour, fleet.label) for fleet in fleets if fleet.band_keeps]
    if not safe:
        return ", by its middle prediction (no fleet here keeps the promises at the slow end of its 80 % band):"
    cost, name = min(safe, key=lambda choice: math.inf if choice[0] is None else choice[0])
    return (
        f", by its middle prediction, or {name}{_priced(cost)}, to keep the promises at the slow end of its 80 % band "
        "too; the first has"
    )


def _limit(best: Fleet, unit: str) -> str:
    if best.next_limit == UNKNOWN:
        return "how much more it could serve was not searched"
    if best.next_limit.startswith("none"):
        return f"no limit is met up to {1 + best.headroom:.3g} times the {unit}"
    above = f"{best.headroom:+.0%} {unit}" if best.headroom >= 0.005 else f"the very next bit of {unit}"
    return f"the next limit, at {above}, is {best.next_limit}"


def _time(seconds: float | None) -> str:
    return "not served" if seconds is None else time_of(seconds)


__all__ = ["Answer", "Fleet", "Pace", "fleet_of", "front_of", "next_limit", "price_rank", "ranked", "sentence_of"]
