"""What a machine's measurement hands to the fit: timings of repeated runs, and what they were taken on.

Written by `core.runtime.measure` (torch), read by `simulator.calibrate` (no torch), so both sides of the
wall share only this.

Invariants
* Seconds are lower quartiles over repeats that were interleaved with all other timings of the run:
  on a shared machine disturbances only ever add time, and one can make a step ten times slower.
* `spread` is the relative standard deviation of that quartile, not of one repeat.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from twinfer.core.work import StepShape


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one run, their relative standard deviation, and how many repeats they stand for."""

    seconds: float
    spread: float
    repeats: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Timing:
        """Of at least one sample, in s."""
        ordered = sorted(samples)
        n = len(ordered)
        low = quantile(ordered, 0.25)
        if low <= 0 or n < 3:
            return cls(low, 0.1, n)  # too few repeats to tell: 10 % is assumed
        # minimum to median is 2.3 standard deviations of the undisturbed half for the usual 5-10 repeats
        return cls(low, min(0.5, (quantile(ordered, 0.5) - ordered[0]) / low / math.sqrt(n)), n)


def quantile(ordered: Sequence[float], q: float) -> float:
    """Linear-interpolation quantile of sorted values."""
    rank = (len(ordered) - 1) * q
    low = int(rank)
    return ordered[low] + (ordered[min(low + 1, len(ordered) - 1)] - ordered[low]) * (rank - low)


@dataclass(frozen=True, slots=True)
class StepTiming:
    """One step run by the engine's executor: the whole of it, and each op by name (all launches)."""

    shape: StepShape
    total: Timing
    ops: dict[str, Timing]


@dataclass(frozen=True, slots=True)
class GemmTiming:
    """One launch of x[m, k] @ w[n, k].T on weights that are not in the cache."""

    n: int
    k: int
    m: int
    timing: Timing


@dataclass(frozen=True, slots=True)
class LoopTiming:
    """Seconds per step that the loop around an executor takes (core, recorder) with `rows` decode rows."""

    rows: int
    timing: Timing


@dataclass(slots=True)
class Measured:
    """All timings of one model in one dtype on one machine."""

    model: str
    dtype: str
    steps: list[StepTiming] = field(default_factory=list)
    gemms: list[GemmTiming] = field(default_factory=list)
    loops: list[LoopTiming] = field(default_factory=list)
    copy_bandwidth: float = 0.0  # B/s, read plus written, of one large copy
    drift: float = 0.0  # relative standard deviation of the machine's speed between rounds
    fingerprint: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0  # that the measurement took
