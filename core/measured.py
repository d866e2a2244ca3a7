"""What a machine's measurement hands to the fit: timings of repeated runs, and what they were taken on.

Written by `core.runtime.measure` (torch), read by `simulator.calibrate` (no torch), so both sides of the
wall share only this.

Invariants
* Seconds are medians over repeats that were interleaved with all other timings of the run: what a step usually
  takes. What rarer disturbances add on average shows in `runs`, whose steps count as they came.
* `spread` is the relative standard deviation of that median, not of one repeat.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from twinfer.core.work import StepShape


def remedy(threads: int) -> str:
    """What helps where a machine is too busy to be measured, `threads` being the engine's."""
    fewer = f", or set OMP_NUM_THREADS={max(1, threads // 2)}: threads wait for one whose core another program has"
    return "close other programs" + (fewer if threads > 1 else "")


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
        middle = quantile(ordered, 0.5)
        if middle <= 0 or n == 1:
            return cls(middle, 0.1, n)  # one repeat says nothing about itself: 10 % is assumed
        if n == 2:
            return cls(middle, max(0.03, (ordered[1] - ordered[0]) / (ordered[1] + ordered[0])), n)
        # quartiles of a normal are 1.349 standard deviations apart; a median is 1.2533 times as uncertain as a mean
        deviation = (quantile(ordered, 0.75) - quantile(ordered, 0.25)) / 1.349
        return cls(middle, min(0.5, 1.2533 * deviation / middle / math.sqrt(n)), n)


def quantile(ordered: Sequence[float], q: float) -> float:
    """Linear-interpolation quantile of sorted values."""
    rank = (len(ordered) - 1) * q
    low = int(rank)
    return ordered[low] + (ordered[min(low + 1, len(ordered) - 1)] - ordered[low]) * (rank - low)


@dataclass(frozen=True, slots=True)
class StepTiming:
    """One step run by the engine's executor: the whole of it, and each op by name (all launches).

    first: s of its very first two runs in a row, where the engine recorded its pass in the second one.
    """

    shape: StepShape
    total: Timing
    ops: dict[str, Timing]
    first: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class GemmTiming:
    """One launch of x[m, k] @ w[n, k].T on weights that are not in the cache."""

    n: int
    k: int
    m: int
    timing: Timing


@dataclass(frozen=True, slots=True)
class ServedStep:
    """A step of a served run. gap: s since the end of the step before, None for the first; ops: s by op name."""

    shape: StepShape
    seconds: float
    gap: float | None
    ops: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ServedRun:
    """A short run of the whole engine, loop and recorder included, as they came: nothing is left out.

    pace: what the repeated small step took around the run over what it took in the whole measurement.
    """

    label: str
    steps: tuple[ServedStep, ...]
    pace: float = 1.0


@dataclass(slots=True)
class Measured:
    """All timings of one model in one format on one machine.

    quantizer: as chosen, with its options, "" for none.  kv_dtype: "" for that of the activations.
    drift: relative standard deviation of the machine's speed over the measurement, by a step that was repeated
    throughout.  jitter: the same of one step against its neighbours in time.  records: small passes are recorded and
    repeated as one call (`core/runtime/replay.py`).
    """

    model: str
    dtype: str
    quantizer: str = ""
    kv_dtype: str = ""
    steps: list[StepTiming] = field(default_factory=list)
    gemms: list[GemmTiming] = field(default_factory=list)
    runs: list[ServedRun] = field(default_factory=list)
    copy_bandwidth: float = 0.0  # B/s, read plus written, of one large copy
    drift: float = 0.0
    jitter: float = 0.0
    records: bool = True
    fingerprint: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0  # that the measurement took
