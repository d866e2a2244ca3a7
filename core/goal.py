"""What a service promises (SLOs), and whether requests kept it.

    ttft.p95<=1   tpot.p95<=50ms   e2e.p99<=20   itl.mean<=0.03

Definitions
* A statistic is taken over all requests that have the metric; a request that was not served (rejected, aborted,
  unfinished) counts as infinitely late in every metric, so that a fleet cannot win by turning requests away.
* Attainment: the share of all requests that kept every limit, whatever percentile was promised
  (DistServe, OSDI 2024, arXiv:2401.09670).
* Goodput: requests (or output tokens) per second of those requests; at the SLO: the largest rate at which the
  promise itself, percentile and all, is kept.

Invariants
* A goal never depends on the order of requests; equal requests give equal answers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from twinfer.core.errors import ConfigError
from twinfer.core.records import RequestRecord, percentile

METRICS = ("ttft", "tpot", "itl", "e2e")
_FORM = re.compile(r"\s*(\w+)\s*\.\s*(mean|p\d+(?:\.\d+)?)\s*(<=?)\s*([0-9.eE+-]+)\s*(s|ms|us)?\s*", re.ASCII)
_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, None: 1.0}
_FIX = "write METRIC.STATISTIC<=SECONDS, e.g. ttft.p95<=1 or tpot.p95<=50ms"


@dataclass(frozen=True, slots=True)
class Goal:
    """One SLO: `statistic` (mean, or p50, p99.9 ...) of `metric` is at most `limit` seconds."""

    metric: str
    statistic: str
    limit: float

    @property
    def name(self) -> str:
        return f"{self.metric}.{self.statistic}"

    @property
    def share(self) -> float:
        """Share of requests that must keep the limit; 0.5 for a mean."""
        return 0.5 if self.statistic == "mean" else float(self.statistic[1:]) / 100

    def met(self, value: float | None) -> bool:
        """Whether `value`, the statistic in s (None: not served), keeps the promise."""
        return value is not None and value <= self.limit

    def scaled(self, factor: float) -> Goal:
        return Goal(self.metric, self.statistic, self.limit * factor)

    def __str__(self) -> str:
        return f"{self.name}<={self.limit:g}"


def parse_goal(text: str, option: str = "--slo") -> Goal:
    """`ttft.p95<=1`: metric, statistic and seconds (or with the unit s, ms or us). Raises ConfigError."""
    found = _FORM.fullmatch(text)
    if found is None:
        raise ConfigError(option, text, "is no promise that can be kept", _FIX)
    metric, statistic, sign, number, unit = found.groups()
    if sign == "<":
        raise ConfigError(option, text, "a value at its limit keeps the promise, too", "write <=")
    if metric not in METRICS:
        raise ConfigError(option, text, f"no such metric {metric!r}", f"use one of {', '.join(METRICS)}")
    try:
        limit = float(number) * _UNITS[unit]
    except ValueError:
        raise ConfigError(option, text, f"{number!r} is not a number", _FIX) from None
    if not 0 < limit < math.inf:
        raise ConfigError(option, text, "a limit must be above 0 s and finite", _FIX)
    if statistic != "mean":
        rank = float(statistic[1:])
        if not 0 < rank <= 100:
            raise ConfigError(option, text, f"there is no percentile {statistic[1:]}", "use p1 to p100, or mean")
        statistic = f"p{rank:g}"
    return Goal(metric, statistic, limit)


def parse_goals(texts: Iterable[str], option: str = "--slo") -> tuple[Goal, ...]:
    """One goal for each text; no goal at all, or the same one twice, is a ConfigError."""
    goals: list[Goal] = []
    for text in texts:
        goal = parse_goal(text, option)
        if any(goal.name == other.name for other in goals):
            raise ConfigError(option, text, f"{goal.name} was promised before", "give each statistic once")
        goals.append(goal)
    if not goals:
        raise ConfigError(option, None, "without a promise every fleet will do", _FIX)
    return tuple(goals)


def values_of(requests: Iterable[RequestRecord], metric: str) -> list[float]:
    """`metric` of every request in s, in order; inf where it was not served, nothing where it does not apply.

    TPOT and ITL do not apply to answers of one token.
    """
    found: list[float] = []
    for request in requests:
        if request.reason not in ("stop", "length"):
            found.append(math.inf)
        elif metric == "itl":
            found.extend(request.itl)
        else:
            value: float | None = getattr(request, metric)
            if value is not None:
                found.append(value)
    return found


def statistic_of(values: Sequence[float], statistic: str) -> float | None:
    """`mean` or `pN` (linear interpolation) of `values`; None when it is infinite. Raises ValueError for no values."""
    if not values:
        raise ValueError("statistic of nothing")
    if statistic == "mean":
        value = sum(values) / len(values)
    else:
        ordered = sorted(values)
        rank = float(statistic[1:])
        last = ordered[min(len(ordered) - 1, math.ceil((len(ordered) - 1) * rank / 100))]
        value = last if math.isinf(last) else percentile(ordered, rank)  # inf - inf is not a number
    return None if math.isinf(value) else value


def kept(request: RequestRecord, goals: Iterable[Goal]) -> bool:
    """Whether `request` was served within every limit (for ITL: the mean gap of its tokens)."""
    if request.reason not in ("stop", "length"):
        return False
    for goal in goals:
        if goal.metric == "itl":
            value = sum(request.itl) / len(request.itl) if request.itl else None
        else:
            value = getattr(request, goal.metric)
        if value is not None and value > goal.limit:
            return False
    return True


def most_late(goal: Goal, num: int) -> int:
    """Values above the limit, of `num`, from which on the percentile `goal` is missed for certain; num + 1 for a mean."""
    if goal.statistic == "mean" or not num:
        return num + 1
    return num - math.floor((num - 1) * float(goal.statistic[1:]) / 100)


__all__ = ["METRICS", "Goal", "kept", "most_late", "parse_goal", "parse_goals", "statistic_of", "values_of"]
