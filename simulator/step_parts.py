"""What steps are put together from (`step_time.py`): parts with seconds and sigma, and the grid of contexts between which
attention is interpolated.

Invariants
* Seconds by op sum to the seconds of a part; sigmas add up, as errors of op times are fully correlated.
* Grid points are every context below `_EXACT`, and `_PER_OCTAVE` a doubling above.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from twinfer.core.work import Op, RowShape, StepShape, repeated

Group = tuple[int, int, int]
"""Rows that feed equally many tokens: (tokens of each, rows, keys of all together)."""

_EXACT = 64  # mean contexts below this are all grid points
_PER_OCTAVE = 32  # grid points per doubling above it


@dataclass(slots=True)
class StepCost:
    """Seconds of one step with their standard deviation; `ops`: seconds by op name.

    stages: seconds in each part of a pipeline, in their order; empty where steps do not overlap (`pipeline.py`).
    """

    seconds: float
    sigma: float
    ops: Mapping[str, float]
    stages: tuple[float, ...] = ()


class Part(NamedTuple):
    """Some ops of a step: seconds and sigma of all launches, and seconds by name."""

    seconds: float
    sigma: float
    ops: Mapping[str, float]


NOTHING = Part(0.0, 0.0, {})


class ByRows(NamedTuple):
    """The part by rows of a step: `x` of the way from one grid point to the next."""

    seconds: float
    sigma: float
    below: Part
    above: Part
    x: float


NO_ROWS = ByRows(0.0, 0.0, NOTHING, NOTHING, 0.0)


class Line(NamedTuple):
    """The part by rows of `count` rows of one token, while their mean context lies between two grid points: seconds are
    `base + slope * keys` of all rows' KV tokens, sigma likewise.
    """

    base: float
    slope: float
    sigma_base: float
    sigma_slope: float
    below: Part
    above: Part
    high: int  # the upper grid point


@dataclass(slots=True)
class DecodeCost:
    """Steps in which the same sequences feed one token each. seconds: of each.  sigmas: their sums, as pieces
    (steps, sigma of the first, growth from step to step).
    """

    seconds: list[float]
    sigmas: list[tuple[int, float, float]]

    def sigma(self, steps: int) -> float:
        """Sum over the first `steps` steps."""
        total = 0.0
        for count, first, growth in self.sigmas:
            if steps <= 0:
                break
            count = min(count, steps)
            total += count * first + growth * (count * (count - 1) / 2)
            steps -= count
        return total


def shape_of(rows: Iterable[tuple[int, int]], logits: int, copied: int = 0, swapped: int = 0) -> StepShape:
    return StepShape(tuple(RowShape(queries, max(queries, keys)) for queries, keys in rows), logits, copied, swapped)


def spread(rows: int, tokens: int, logits: int) -> StepShape:
    """Some step of so many rows, tokens and logits."""
    return StepShape((RowShape(tokens - rows + 1, tokens), *[RowShape(1, 1)] * (rows - 1)), logits)


def changed(a: Mapping[tuple[str, int], Op], b: Mapping[tuple[str, int], Op]) -> set[tuple[str, int]]:
    return {key for key in (*a, *b) if a.get(key) != b.get(key)}


def rows_of(groups: Iterable[Group]) -> tuple[RowShape, ...]:
    """The rows of groups, with the keys of each spread evenly."""
    counts: dict[RowShape, int] = {}
    for queries, count, total in groups:
        keys, more = divmod(total, count)
        if more:
            counts[RowShape(queries, keys + 1)] = more
        counts[RowShape(queries, keys)] = count - more
    return repeated(counts)


def place(queries: int, count: int, total: int) -> tuple[int, int, float]:
    """Grid points around the mean keys of a group, and where it lies between them (from 0, at the lower, to 1)."""
    mean = total / count
    low = grid_below(mean)
    high = grid_above(low)
    low = max(low, queries)  # a context holds at least the tokens that are fed
    return low, high, (mean - low) / (high - low)


def grid_below(mean: float) -> int:
    """Largest grid point not above `mean`."""
    whole = int(mean)
    if whole < _EXACT:
        return whole
    width = 1 << (whole.bit_length() - 1 - _PER_OCTAVE.bit_length() + 1)
    return whole // width * width


def grid_above(low: int) -> int:
    """The grid point after `low`."""
    if low < _EXACT:
        return low + 1
    return low + (1 << (low.bit_length() - 1 - _PER_OCTAVE.bit_length() + 1))


def sum_of(parts: Iterable[Part]) -> tuple[float, float]:
    seconds = sigma = 0.0
    for part in parts:
        seconds += part.seconds
        sigma += part.sigma
    return seconds, sigma


def seconds_by_op(parts: Iterable[Part], by_rows: ByRows) -> dict[str, float]:
    """Seconds by name, of parts and of what lies between two."""
    ops: dict[str, float] = {}
    for part in parts:
        for name, seconds in part.ops.items():
            ops[name] = ops.get(name, 0.0) + seconds
    _, _, below, above, x = by_rows
    for name in {**below.ops, **above.ops}:
        low, high = below.ops.get(name, 0.0), above.ops.get(name, 0.0)
        ops[name] = ops.get(name, 0.0) + low + (high - low) * x
    return ops
