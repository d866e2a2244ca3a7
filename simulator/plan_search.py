"""The search itself, as generators: they yield trials, are sent outcomes, and never simulate, time or print.

On one device type, where cost is the number of devices:

    assess every design     memory, techniques, empty server, roofline bound
    screen                  cheapest first; the first gets its smallest fleet by galloping and bisection, each later one
                            is first tried with the most replicas that are no dearer than the best so far
    confirm                 the best of those that were screened, smallest fleet on the whole fleet and all traffic
    finish                  goodput at the SLO by bisection over the rate (of a closed loop, over its clients) and the 80 % band,
                            with some replicas of the fleet (of the answer, with all), in several draws of the traffic

Assumption: more replicas never break a promise that fewer keep, and what is harder (more traffic, slower steps, less bandwidth,
a tighter promise) never mends one. So the fewest replicas as things are is a bound on those that a harder case needs.

Invariants
* What a search asks for depends on what it was told alone, so it takes the same path with any number of processes,
  and a stopped one can be resumed by answering from a file.
* Only a fleet whose `fleet` trial kept every promise is an answer, and the best of all only if its `proof` did.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from twinfer.core.goal import Goal
from twinfer.simulator.plan_designs import Design
from twinfer.simulator.plan_edge import Search, load_factor, smallest
from twinfer.simulator.plan_space import Question
from twinfer.simulator.plan_trial import ASSESS, FLEET, REPLICA, SCREEN, Outcome, Trial


class Scope(Protocol):
    """What of the traffic a trial sees (`plan_trial.Evaluator`)."""

    @property
    def most_load(self) -> float:
        """Times the traffic that can be asked about."""
        ...

    def level(self, level: str, replicas: int) -> str:
        """The level to ask at: `fleet` where there is no difference."""
        ...

    def looks(self, level: str, design: Design, replicas: int) -> int:
        """Seeds that a trial at a level is asked with."""
        ...

    def share(self, level: str, replicas: int) -> float:
        """How many times the replicas of a trial at a level a fleet is."""
        ...

    def snapped(self, load: float) -> float:
        """The nearest load that can be simulated."""
        ...


Z80 = 1.2816  # half width of the middle 80 % of a normal, in standard deviations
FINALISTS = 2  # screened designs of a device that are confirmed
MOST_LOAD = 16.0  # times the traffic, up to which a promise that breaks is looked for
CLOSE = 1.03  # ratio of the loads between which the goodput is left


@dataclass(slots=True)
class Screened:
    """A design and the smallest fleet of it that passed, with its outcome. fewest: a bound on any such fleet.

    draws: outcomes of all draws of the traffic; `outcome` is the one nearest to a limit.
    """

    design: Design
    replicas: int
    outcome: Outcome
    fewest: int
    draws: list[Outcome] = field(default_factory=list)

    def rank(self, goals: Sequence[Goal]) -> tuple[float, float, int]:
        """Cheaper first, then with the larger margin."""
        return (self.replicas * self.design.num_devices, self.outcome.margin(goals), self.design.index)


@dataclass(slots=True, kw_only=True)
class Found:
    """What a search found on one device: the cheapest fleet that keeps the promises, or why there is none.

    outcome: of the draw of the traffic that comes nearest to a limit; draws: of all.
    verdicts: for every design, by key, why it is not the answer ("" for the answer).  loads: how many times the traffic
    the fleet carries, draw by draw; load: the least of them, with the outcome there and just above (at_load, breaks).
    share: how many times the replicas of `at_load` the fleet is.
    slow, fast: at the ends of the 80 % band, draw by draw.
    screened: designs that passed the first look, best first.
    """

    device: str
    design: Design | None = None
    replicas: int = 0
    outcome: Outcome | None = None
    verdicts: dict[str, str] = field(default_factory=dict)
    draws: list[Outcome] = field(default_factory=list)
    load: float = 1.0
    loads: list[float] = field(default_factory=list)
    breaks: Outcome | None = None
    at_load: Outcome | None = None
    share: float = 1.0
    slow: list[Outcome] = field(default_factory=list)
    fast: list[Outcome] = field(default_factory=list)
    screened: list[Screened] = field(default_factory=list)

    @property
    def num_devices(self) -> int:
        return self.replicas * self.design.num_devices if self.design is not None else 0


def screen_device(device: str, designs: Sequence[Design], question: Question, scope: Scope) -> Search[Found]:
    """Every design of `device` assessed and screened; `found.screened` are those that may keep the promises."""
    found = Found(device=device, verdicts=dict.fromkeys((d.key for d in designs), ""))
    found.screened = yield from _screen(found, designs, question, scope)
    return found


def confirm_device(found: Found, question: Question, scope: Scope) -> Search[Found]:
    """The cheapest confirmed fleet among what was screened.

    A fleet that is there already is not good enough: more replicas of its design are needed.
    """
    for candidate in found.screened:
        if candidate.design is found.design:
            candidate.fewest = found.replicas + 1
            candidate.replicas = max(candidate.replicas, candidate.fewest)
    found.design, found.outcome, found.load, found.loads = None, None, 1.0, []
    yield from _confirm(found, found.screened, question, scope)
    return found


def _screen(found: Found, designs: Sequence[Design], question: Question, scope: Scope) -> Search[list[Screened]]:
    goals, most = question.goals, question.max_replicas
    assessed = yield [Trial(design=d.index, replicas=1, level=ASSESS) for d in designs]
    alive: list[tuple[Design, Outcome]] = []
    for design, bound in zip(designs, assessed, strict=True):
        if bound.problem:
            found.verdicts[design.key] = bound.problem
        elif bound.fewest > most:
            found.verdicts[design.key] = f"needs {bound.fewest} replicas at least, more than the {most} allowed"
        else:
            alive.append((design, bound))
    alive.sort(key=lambda pair: (pair[1].likely * pair[0].num_devices, pair[0].index))
    kept: list[Screened] = []
    best: int | None = None
    for design, bound in alive:
        cap = most if best is None else min(most, best // design.num_devices)
        if bound.fewest > cap:
            found.verdicts[design.key] = _dearer(bound.fewest, design, best)
            continue
        seen = _Asked(design, question, scope, SCREEN)
        start = bound.likely if best is None else cap
        n = yield from smallest(bound.fewest, cap, start, seen.keeps)
        if n is None:
            found.verdicts[design.key] = seen.why(cap)
            continue
        kept.append(Screened(design, n, seen.outcomes[n], bound.fewest))
        best = n * design.num_devices if best is None else min(best, n * design.num_devices)
    return sorted(kept, key=lambda s: s.rank(goals))


def _confirm(found: Found, screened: Sequence[Screened], question: Question, scope: Scope) -> Search[None]:
    goals = question.goals
    best: Screened | None = None
    for place, candidate in enumerate(screened):
        design = candidate.design
        if best is not None and place >= FINALISTS:
            found.verdicts[design.key] = "screened behind the designs that were confirmed"
            continue
        cap = question.max_replicas
        if best is not None:
            cap = min(cap, best.replicas * best.design.num_devices // design.num_devices)
        if candidate.fewest > cap:
            found.verdicts[design.key] = _dearer(candidate.fewest, design, cap * design.num_devices)
            continue
        seen = _Asked(design, question, scope, FLEET)
        start = candidate.replicas if best is None else cap
        n = yield from smallest(candidate.fewest, cap, start, seen.keeps, seen.near)
        if n is None:
            found.verdicts[design.key] = seen.why(cap)
            continue
        confirmed = Screened(design, n, seen.outcomes[n], candidate.fewest, seen.draws[n])
        if best is None or confirmed.rank(goals) < best.rank(goals):
            if best is not None:
                found.verdicts[best.design.key] = (
                    f"{_count(best)} keep the promises; {design.key} is cheaper or has more room"
                )
            best = confirmed
        else:
            found.verdicts[design.key] = (
                f"{_count(confirmed)} keep the promises; {best.design.key} is cheaper or has more room"
            )
    if best is not None:
        found.design, found.replicas, found.outcome = best.design, best.replicas, best.outcome
        found.draws = best.draws


def finish_device(found: Found, question: Question, scope: Scope, whole: bool = False) -> Search[Found]:
    """Goodput and band of the fleet of `found`, by some of its replicas, or by all when it is looked at as a `whole`."""
    design, n = found.design, found.replicas
    assert design is not None and found.outcome is not None
    width = 1 + Z80 * found.outcome.sigma
    view = scope.level(FLEET if whole else REPLICA, n)
    found.share = scope.share(view, n)
    seeds = range(scope.looks(view, design, n))
    ends = yield [
        Trial(design=design.index, replicas=n, level=view, steps=s, seed=seed)
        for s in (width, 1 / width)
        for seed in seeds
    ]
    found.slow, found.fast = ends[: len(seeds)], ends[len(seeds) :]
    first_break = _beyond(0, found.outcome, question.goals)
    loads, start, least = [], 1 if first_break is None else math.floor(first_break), math.inf
    for seed in seeds:
        top = math.floor(math.log(min(MOST_LOAD, scope.most_load), CLOSE))
        look = _Loaded(design, n, view, seed, question.goals, scope)
        first = yield from smallest(1, top, start, look.breaks, look.near)
        steps = top if first is None else first - 1  # at 0 it carries what it was confirmed with
        load = look.load(steps) if steps else 1.0
        loads.append(load)
        if load < least:
            least, found.load = load, load
            found.breaks = None if first is None else look.outcomes[first]
            found.at_load = look.outcomes.get(steps)
        start = max(1, steps)
    found.loads = loads
    return found


def _beyond(k: float, outcome: Outcome, goals: Sequence[Goal]) -> float | None:
    """Where about, in ratios `CLOSE` of the load, a promise breaks whose outcome at `k` is this."""
    factor = load_factor(outcome, goals)
    return None if factor is None else k + math.log(factor, CLOSE)


class _Loaded:
    """Trials of one look at one fleet, at `CLOSE` to the power of k times the traffic."""

    def __init__(
        self, design: Design, replicas: int, level: str, seed: int, goals: Sequence[Goal], scope: Scope
    ) -> None:  # fmt: skip
        self._design, self._replicas, self._level, self._seed = design.index, replicas, level, seed
        self._goals, self._scope = goals, scope
        self.outcomes: dict[int, Outcome] = {}

    def load(self, k: int) -> float:
        return round(self._scope.snapped(CLOSE**k), 6)

    def breaks(self, k: int) -> Search[bool]:
        (outcome,) = yield [
            Trial(design=self._design, replicas=self._replicas, level=self._level, load=self.load(k), seed=self._seed)
        ]
        self.outcomes[k] = outcome
        return not outcome.keeps(self._goals)

    def near(self, k: int) -> float | None:
        return _beyond(k, self.outcomes[k], self._goals)


def drawn(trial: Trial, seeds: int, goals: Sequence[Goal]) -> Search[list[Outcome]]:
    """Outcomes of `trial` in every draw of the traffic, the one nearest to a limit first; the first alone when it fails."""
    (first,) = yield [trial]
    if seeds == 1 or not first.keeps(goals):
        return [first]
    more = yield [replace(trial, seed=seed) for seed in range(1, seeds)]
    more = [replace(outcome, seed=seed) for seed, outcome in enumerate(more, 1)]
    return sorted([first, *more], key=lambda o: (o.keeps(goals), -o.margin(goals)))


def needed(
    found: Found, question: Question, goals: Sequence[Goal], scope: Scope, *,
    load: float = 1.0, steps: float = 1.0, bandwidth: float = 1.0, easier: bool = False,
) -> Search[int | None]:  # fmt: skip
    """Replicas of the design of `found` that keep `goals` when something is different; None when none of the allowed fleets
    does. easier: a difference that helps; by others it needs no fewer than without them."""
    design, n = found.design, found.replicas
    assert design is not None and found.outcome is not None
    outcomes: dict[int, Outcome] = {}

    def keeps(n: int) -> Search[bool]:
        trial = Trial(
            design=design.index, replicas=n, level=FLEET, load=scope.snapped(load), steps=steps, bandwidth=bandwidth
        )
        told = yield from drawn(trial, scope.looks(FLEET, design, n), goals)
        outcomes[n] = told[0]
        return told[0].keeps(goals)

    def near(n: int) -> float | None:
        factor = load_factor(outcomes[n], goals)
        return None if factor is None else n / factor

    factor = load_factor(found.outcome, goals) or 1.0
    low, high = (1, n) if easier else (n, question.max_replicas)
    return (yield from smallest(low, high, round(n * load * steps / bandwidth / factor), keeps, near))


class _Asked:
    """The trials of one design at one level."""

    def __init__(self, design: Design, question: Question, scope: Scope, name: str) -> None:
        self.design, self.question, self.scope, self.name = design, question, scope, name
        self.outcomes: dict[int, Outcome] = {}
        self.draws: dict[int, list[Outcome]] = {}

    def keeps(self, n: int) -> Search[bool]:
        level, goals = self.scope.level(self.name, n), self.question.goals
        trial = Trial(design=self.design.index, replicas=n, level=level)
        self.draws[n] = yield from drawn(trial, self.scope.looks(level, self.design, n), goals)
        self.outcomes[n] = self.draws[n][0]
        return self.outcomes[n].keeps(goals)

    def near(self, n: int) -> float | None:
        factor = load_factor(self.outcomes[n], self.question.goals)
        return None if factor is None else n / factor

    def why(self, n: int) -> str:
        """Why `n` replicas are not enough."""
        outcome = self.outcomes.get(n)
        return "" if outcome is None else why_not(outcome, self.question.goals, n)


def why_not(outcome: Outcome, goals: Sequence[Goal], replicas: int) -> str:
    """In words, why `replicas` with this outcome are no answer; "" when they are one."""
    if outcome.problem:
        return outcome.problem
    if outcome.failed:
        return f"{outcome.failed} of {outcome.num_requests} requests cannot be served: {outcome.failed_why}"
    words = missed(outcome, goals)
    return f"with {replicas} replica{'' if replicas == 1 else 's'} {words}" if words else ""


def missed(outcome: Outcome, goals: Sequence[Goal]) -> str:
    """The promises that an outcome breaks, in words; "" when it keeps all."""
    words = []
    for goal in outcome.broken(goals):
        value = outcome.values.get(goal.name)
        early = outcome.hopeless.startswith(goal.name + "<")
        words.append(
            f"{goal.name} is {'far above' if value is None or early else time_of(value) + ', above'} {time_of(goal.limit, 6)}"
        )
    return " and ".join(words)


def time_of(seconds: float, digits: int = 3) -> str:
    """With so many digits, in ms below a second."""
    short = f"{seconds * 1e3:.{digits}g}"
    return f"{short} ms" if float(short) < 1000 else f"{seconds:.{digits}g} s"


def _dearer(fewest: int, design: Design, best: int | None) -> str:
    return f"needs {fewest * design.num_devices} devices at least, another design keeps the promises with {best}"


def _count(screened: Screened) -> str:
    return f"{screened.replicas * screened.design.num_devices} devices"


__all__ = [
    "Found",
    "Scope",
    "Search",
    "confirm_device",
    "drawn",
    "finish_device",
    "missed",
    "needed",
    "screen_device",
    "smallest",
    "time_of",
    "why_not",
]
