"""Measured kernel times as curves that can answer for shapes nobody measured.

    known shape, point between two points:  the utilisation is interpolated in log2 of the axis
    last number of the shape between two measured ones (tables with `lerp`):  likewise, then along the axis
    shape that was not measured:            the utilisation of its nearest shapes at the same point (inverse square
                                            distance in log2 of the shape), then time = bound / utilisation

Utilisation is `bound / measured time`, where the bound is a smooth roofline with a launch overhead: what is left
after the bound varies slowly, so both rules are accurate where the times themselves span four decades.

Invariants
* A measured point is answered as it stands.
* Beyond the measured range the utilisation of the last point holds, and the answer says so.
* Spreads are what the table itself shows: some of its points, and of its shapes, are asked as if they were unknown.
* No pandas, no per-row objects: a table of 100,000 rows loads in well under a second.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from twinfer.core.device import DeviceSpec

Item = TypeVar("Item")
Shape = tuple[float, ...]
Bound = Callable[[Shape, float], float]
"""(shape, point on the axis) to the least seconds it can take."""

NEAREST = 4
SPREAD = 0.04  # of a point between two measured ones: median error of leave-one-out is 3 % (bench/fidelity.py)
FAR_SPREAD = 0.06  # more per unit of log2 distance to the nearest measured shape
SAMPLED_SHAPES, SAMPLED_POINTS = 24, 5  # of a table, to see how far its own points are off when they are left out
LEAST_ERRORS = 12
Z80 = 1.2816  # half width of the middle 80 % of a normal, in standard deviations
BEYOND_SPREAD = 0.10  # more per octave beyond the measured range


@dataclass(frozen=True, slots=True)
class Answer:
    """seconds, their relative standard deviation, and the rule that gave them."""

    seconds: float
    spread: float
    source: str
    detail: str


@dataclass(slots=True)
class Curve:
    """Utilisation of one shape over its axis (tokens, keys, bytes), in ascending order."""

    points: list[float]
    seconds: list[float]
    log_points: list[float] = field(default_factory=list)
    log_use: list[float] = field(default_factory=list)

    def use_at(self, point: float) -> tuple[float, float, bool]:
        """log2 of the utilisation at `point`, octaves beyond the measured range, and whether it was measured."""
        at = bisect_left(self.points, point)
        if at < len(self.points) and self.points[at] == point:
            return self.log_use[at], 0.0, True
        if at == 0:
            return self.log_use[0], math.log2(self.points[0] / point), False
        if at == len(self.points):
            return self.log_use[-1], math.log2(point / self.points[-1]), False
        low, high = self.log_points[at - 1], self.log_points[at]
        share = (math.log2(point) - low) / (high - low)
        return self.log_use[at - 1] + (self.log_use[at] - self.log_use[at - 1]) * share, 0.0, False


class KernelTable:
    """Curves by shape. `rows`: (shape, point) to seconds.

    lerp: shapes that differ only in their last number are a grid, and what lies between two of them is interpolated.
    slow: neighbours whose utilisation is that many octaves below the second best are left out: something else ran beside
    them when they were measured, or the stack found no good kernel.
    """

    def __init__(
        self,
        rows: Mapping[tuple[Shape, float], float],
        bound: Bound,
        weights: Sequence[float] = (),
        *,
        lerp: bool = False,
        slow: float = math.inf,
    ) -> None:
        self.bound = bound
        self.slow = slow
        self.weights = tuple(weights)
        by_shape: dict[Shape, list[tuple[float, float]]] = {}
        for (shape, point), seconds in rows.items():
            if seconds > 0 and point > 0:
                by_shape.setdefault(shape, []).append((point, seconds))
        self.curves = {shape: self._curve(shape, sorted(points)) for shape, points in by_shape.items()}
        self._places = {shape: self._place(shape) for shape in self.curves}
        self._near: dict[Shape, list[tuple[float, Shape]]] = {}
        self._wider: float | None = None
        self._inside: float | None = None
        self._grid: dict[Shape, list[float]] = {}
        for shape in sorted(self.curves) if lerp else ():
            self._grid.setdefault(shape[:-1], []).append(shape[-1])

    def _curve(self, shape: Shape, points: list[tuple[float, float]]) -> Curve:
        at = [p for p, _ in points]
        seconds = [s for _, s in points]
        return Curve(
            at, seconds, [math.log2(p) for p in at],
            [math.log2(self.bound(shape, p) / s) for p, s in points],
        )  # fmt: skip

    def _place(self, shape: Shape) -> Shape:
        weights = self.weights or (1.0,) * len(shape)
        return tuple(math.log2(max(x, 1e-9)) * w for x, w in zip(shape, weights, strict=True))

    def near(self, shape: Shape, leave_out: bool = False) -> list[tuple[float, Shape]]:
        """(distance, shape) of the nearest measured shapes, nearest first."""
        known = None if leave_out else self._near.get(shape)
        if known is None:
            place = self._place(shape)
            distances = [(math.dist(place, other), key) for key, other in self._places.items()]
            known = sorted(d for d in distances if not (leave_out and d[1] == shape))[:NEAREST]
            if not leave_out:
                self._near[shape] = known
        return known

    def time(self, shape: Shape, point: float, *, leave_out: bool = False) -> Answer | None:
        """Seconds of `shape` at `point`; None for an empty table.

        leave_out: answer as if `shape` had not been measured (for leave-one-out tests).
        """
        if not self.curves:
            return None
        bound = self.bound(shape, point)
        own = None if leave_out else self.curves.get(shape)
        if own is not None:
            use, beyond, exact = own.use_at(point)
            if exact:
                return Answer(own.seconds[bisect_left(own.points, point)], SPREAD / 2, "measured", "this very point")
            rule = "interpolated" if not beyond else "extrapolated"
            detail = f"{2**use:.0%} of the bound" + (f", {beyond:.1f} octaves beyond the table" if beyond else "")
            return Answer(bound / 2**use, self.spread_between() + BEYOND_SPREAD * beyond, rule, detail)
        answer = self._other(shape, point, bound, leave_out)
        return replace(answer, spread=self._width() * answer.spread)

    def spread_between(self) -> float:
        """Relative standard deviation between measured points: 80 % of this table's own inner points, each read off its
        two neighbours, lie within 1.28 of it."""
        if self._inside is None:
            errors = []
            for _, curve in _every(sorted(self.curves.items()), SAMPLED_SHAPES):
                at, use = curve.log_points, curve.log_use
                for i in range(1, len(at) - 1):
                    share = (at[i] - at[i - 1]) / (at[i + 1] - at[i - 1])
                    errors.append(abs(2 ** (use[i] - use[i - 1] - (use[i + 1] - use[i - 1]) * share) - 1))
            self._inside = _deviation(errors, SPREAD)
        return self._inside

    def _width(self) -> float:
        """What the spread of shapes that were not measured is multiplied by, so that 80 % of this table's own shapes, each
        asked as if it were unknown, lie within their bands."""
        if self._wider is None:
            errors = []
            for shape, curve in _every(sorted(self.curves.items()), SAMPLED_SHAPES) if len(self.curves) > 8 else ():
                for point, seconds in _every(list(zip(curve.points, curve.seconds, strict=True)), SAMPLED_POINTS):
                    answer = self._other(shape, point, self.bound(shape, point), True)
                    errors.append(abs(answer.seconds / seconds - 1) / answer.spread)
            self._wider = _deviation(errors, 1.0)
        return self._wider

    def _other(self, shape: Shape, point: float, bound: float, leave_out: bool) -> Answer:
        """Seconds of a shape from others."""
        between = self._between(shape, point, bound, leave_out)
        if between is not None:
            return between
        total = weight_sum = 0.0
        beyond = 0.0
        near = self.near(shape, leave_out)
        found = [(*self.curves[other].use_at(point)[:2], distance) for distance, other in near]
        least = sorted(use for use, _, _ in found)[-2] - self.slow if len(found) > 2 else -math.inf
        for use, octaves, distance in found:
            if use < least:
                continue
            weight = 1.0 / max(distance, 1e-6) ** 2
            total, weight_sum = total + weight * use, weight_sum + weight
            beyond = max(beyond, octaves)
        use = total / weight_sum
        nearest = near[0]
        spread = SPREAD + FAR_SPREAD * nearest[0] + BEYOND_SPREAD * beyond
        words = ", ".join(f"{x:g}" for x in nearest[1])
        return Answer(bound / 2**use, spread, "transferred", f"{2**use:.0%} of the bound, as of ({words})")

    def _between(self, shape: Shape, point: float, bound: float, leave_out: bool) -> Answer | None:
        """The answer from shapes that differ only in the last number; None where there are none on both sides."""
        grid = self._grid.get(shape[:-1], [])
        at = bisect_left(grid, shape[-1])
        above = at + (leave_out and at < len(grid) and grid[at] == shape[-1])
        if at == 0 or above >= len(grid):
            return None
        low, high = grid[at - 1], grid[above]
        share = math.log2(shape[-1] / low) / math.log2(high / low)
        (a, beyond_a, _), (b, beyond_b, _) = (self.curves[(*shape[:-1], x)].use_at(point) for x in (low, high))
        use = a + (b - a) * share
        beyond = beyond_a + (beyond_b - beyond_a) * share
        words = f"{2**use:.0%} of the bound, between those of {low:g} and {high:g}"
        return Answer(bound / 2**use, SPREAD + BEYOND_SPREAD * beyond, "interpolated", words)


def _every(items: Sequence[Item], most: int) -> Sequence[Item]:
    """At most about `most` of the items, evenly spaced."""
    return items[:: max(1, len(items) // most)]


def _deviation(errors: list[float], otherwise: float) -> float:
    """Standard deviation within whose 80 % band 80 % of the errors lie; `otherwise` for too few of them."""
    if len(errors) < LEAST_ERRORS:
        return otherwise
    return max(sorted(errors)[int(0.8 * (len(errors) - 1))] / Z80, 0.25 * otherwise)


def median_rows(keys: Sequence[tuple[Shape, float]], seconds: Sequence[float]) -> dict[tuple[Shape, float], float]:
    """Repeated measurements of one point as their median."""
    found: dict[tuple[Shape, float], list[float]] = {}
    for key, value in zip(keys, seconds, strict=True):
        found.setdefault(key, []).append(value)
    return {key: sorted(values)[len(values) // 2] for key, values in found.items()}


def peak_of(device: DeviceSpec, dtype: str) -> float:
    """FLOP/s of the device in a dtype of the tables."""
    peaks = device.peak_flops
    return peaks.get("fp8" if dtype.startswith("fp8") else "bfloat16") or peaks.get("float16") or max(peaks.values())


__all__ = ["Answer", "Bound", "Curve", "KernelTable", "Shape", "median_rows", "peak_of"]
