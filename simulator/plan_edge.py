"""Where promises begin to hold, or to break: the smallest number that passes a test, found with few tests.

    from a start on in growing steps until both sides are known, then by halves; after a test that tells how near a promise is
    to its limit, straight to where the limit would be met

Invariants
* The answer depends on what passes alone, not on the start or on hints.
* Hints are believed `HINTS` times: then the number of tests is logarithmic, whatever they say.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from typing import TypeAlias, TypeVar

from twinfer.core.goal import Goal
from twinfer.simulator.plan_trial import Outcome, Trial

T = TypeVar("T")
Search: TypeAlias = Generator[list[Trial], list[Outcome], T]

HINTS = 4
STEEPNESS = 2.0
"""Near its limit the value of a promise grows about with this power of the load of a replica: less and it would say nothing,
much more and a queue is far beyond its limit."""


def smallest(
    low: int, high: int, start: int, test: Callable[[int], Search[bool]], near: Callable[[int], float | None] | None = None
) -> Search[int | None]:  # fmt: skip
    """The smallest n in [low, high] that passes `test`, looked for around `start`; None when even `high` fails.

    Assumes that what passes goes on passing for every larger n.  near(n): after the test of n, where about the answer lies,
    between two numbers; None when that is not known.
    """
    if low > high:
        return None
    bad, good, step, hints = low - 1, high + 1, 1, HINTS
    n = min(max(start, low), high)
    while True:
        passed = yield from test(n)
        bad, good = (bad, n) if passed else (n, good)
        if good - bad == 1:
            return good if good <= high else None
        hint = near(n) if near is not None and hints else None
        if hint is not None:
            n, hints = math.floor(hint), hints - 1
        elif bad >= low and good <= high:
            n = (good + bad) // 2
        else:
            n += -step if passed else step
            step *= 2
        n = min(max(n, bad + 1), good - 1)


def load_factor(outcome: Outcome, goals: Sequence[Goal]) -> float | None:
    """How many times the load of a replica would about bring the tightest promise to its limit; None when nobody knows."""
    margin = outcome.margin(goals)
    if outcome.problem or outcome.failed or outcome.hopeless or not 0 < margin < math.inf:
        return None
    return float(margin ** (-1 / STEEPNESS))


__all__ = ["Search", "load_factor", "smallest"]
