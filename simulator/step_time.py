"""How long one step takes: the sum of its ops, found fast.

Thousands of steps differ only in how many tokens of context their rows have. The cost of a step is
found exactly (`exact`) only for steps on a grid of mean context lengths, and between two grid points by
linear interpolation; attention is linear in context length, so this loses nothing but rounding.

    step -> groups of rows that feed equally many tokens -> (count, total keys) each
            largest group: mean keys between grid points lo and hi; the others: as they are

Invariants
* A step's cost depends on the multiset of its rows, not on their order.
* `ops` sum to `seconds`, and sigmas add up: errors of op times are taken as fully correlated.
* Where steps overlap, the CPU works on the next step while the device computes this one: only what the CPU takes longer
  than the device counts, so a step lasts as long as the longer of the two.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from twinfer.core.plan import Need, StepPlan
from twinfer.core.work import Op, RowShape, StepShape, copied_slots, swapped_slots
from twinfer.simulator.op_time import OpTimeChain, host_op

OpsOf = Callable[[StepShape], Sequence[Op]]
_EXACT = 64  # mean contexts below this are all grid points
_PER_OCTAVE = 32  # grid points per doubling above it


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of one step with their standard deviation; `ops`: seconds by op name."""

    seconds: float
    sigma: float
    ops: Mapping[str, float]


class StepTimer:
    """Times the steps of one model on one device.

    ops_of: the ops of a step (techniques already applied).  windows: sliding windows of the model's
    layers; rows on different sides of a window are kept in different groups.
    overlap: whether the CPU's part of a step is done beside the device's.
    """

    def __init__(self, ops_of: OpsOf, chain: OpTimeChain, windows: Sequence[int] = (), overlap: bool = False) -> None:
        self._ops_of = ops_of
        self._chain = chain
        self._windows = sorted(set(windows))
        self._overlap = overlap
        self._known: dict[tuple[object, ...], StepCost] = {}

    def exact(self, shape: StepShape) -> StepCost:
        """Cost of a step, op by op."""
        ops: dict[str, float] = {}
        sigma = 0.0
        for op in self._ops_of(shape):
            answer = self._chain.time(op)
            ops[op.name] = ops.get(op.name, 0.0) + answer.seconds * op.count
            sigma += answer.sigma * op.count
        host = self._chain.time(host_op(shape))
        waited = max(0.0, host.seconds - math.fsum(ops.values())) if self._overlap else host.seconds
        ops["host"] = waited
        if waited:
            sigma += host.sigma
        return StepCost(math.fsum(ops.values()), sigma, ops)

    def cost(self, plan: StepPlan) -> StepCost:
        """Cost of `plan`; a few tens of microseconds once similar steps have been seen."""
        counts: dict[tuple[int, int], int] = {}
        totals: dict[tuple[int, int], int] = {}
        windows = self._windows
        logits = 0
        for row in plan.rows:
            queries = len(row.tokens)
            keys = row.start + queries
            group = (queries, bisect_left(windows, keys) if windows else 0)
            if group in counts:
                counts[group] += 1
                totals[group] += keys
            else:
                counts[group] = 1
                totals[group] = keys
            need = row.need
            if need is Need.LAST or need is Need.BEAM:
                logits += 1
            elif need is not Need.NONE:
                logits += queries if need is Need.ALL else row.draft + 1
        swapped = swapped_slots(plan) if plan.swap_outs or plan.swap_ins else 0
        moved = (copied_slots(plan) if plan.copies else 0, swapped)
        main = max(counts, key=lambda g: (counts[g], -g[0], g[1]), default=None)
        if main is None:
            return self._at((), (), logits, moved)
        rest: tuple[tuple[int, int, int], ...] = ()
        if len(counts) > 1:
            rest = tuple(sorted((g[0], counts[g], totals[g]) for g in counts if g != main))
        count = counts[main]
        mean = totals[main] / count
        low = _grid_below(mean)
        high = _grid_above(low)
        low = max(low, main[0])  # a context holds at least the tokens that are fed
        below = self._at((main[0], count, low * count), rest, logits, moved)
        if low == mean:
            return below
        above = self._at((main[0], count, high * count), rest, logits, moved)
        return _between(below, above, (mean - low) / (high - low))

    def _at(
        self, main: tuple[int, ...], rest: tuple[tuple[int, int, int], ...], logits: int, moved: tuple[int, int]
    ) -> StepCost:  # fmt: skip
        key = (main, rest, logits, moved)
        known = self._known.get(key)
        if known is None:
            rows: list[RowShape] = []
            for queries, count, total in (*((main,) if main else ()), *rest):
                keys, more = divmod(total, count)
                rows += [RowShape(queries, keys + 1)] * more + [RowShape(queries, keys)] * (count - more)
            known = self._known[key] = self.exact(StepShape(tuple(rows), logits, *moved))
        return known


def _grid_below(mean: float) -> int:
    """Largest grid point not above `mean`."""
    whole = int(mean)
    if whole < _EXACT:
        return whole
    width = 1 << (whole.bit_length() - 1 - _PER_OCTAVE.bit_length() + 1)
    return whole // width * width


def _grid_above(low: int) -> int:
    """The grid point after `low`."""
    if low < _EXACT:
        return low + 1
    return low + (1 << (low.bit_length() - 1 - _PER_OCTAVE.bit_length() + 1))


def _between(a: StepCost, b: StepCost, x: float) -> StepCost:
    """Linear interpolation: `a` at x = 0, `b` at x = 1. Both list the same ops."""
    if a.ops.keys() != b.ops.keys():  # an op that appears only from some length on
        return a if x < 0.5 else b
    other = b.ops
    ops = {name: s + (other[name] - s) * x for name, s in a.ops.items()}  # equal ends stay equal
    return StepCost(a.seconds + (b.seconds - a.seconds) * x, a.sigma + (b.sigma - a.sigma) * x, ops)
