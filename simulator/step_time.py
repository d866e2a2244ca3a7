"""How long one step takes: the sum of its ops, found fast.

Thousands of steps differ only in how many tokens of context their rows have, so a step is put together from parts that
were found exactly (`exact`) and are kept:

    by tokens     what depends on the number of tokens alone (nearly all matrix products, norms, ...)
    by logits     what depends on the number of logits alone (LM head, sampling)
    by counts     what depends on both, or on the number of rows
    host          what the CPU does
    by rows       attention: of rows that all feed equally many tokens, between two grid points of their mean context by
                  linear interpolation; of others as they are, but with the keys of a group spread evenly

Which op belongs to which part is found by trying: ops of steps that differ in one respect only are compared. Attention is
linear in context length, so interpolation loses nothing but rounding.

Invariants
* A step's cost depends on the multiset of its rows, not on their order, nor on what was asked before.
* `ops` sum to `seconds`, and sigmas add up: errors of op times are taken as fully correlated.
* `decode` gives exactly, to the last bit, what `cost` gives for each of its steps.
* What is kept is bounded: it is forgotten when there is too much of it.
* Where steps overlap, the CPU works on the next step while the device computes this one: only what the CPU takes longer
  than the device counts, so a step lasts as long as the longer of the two.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from twinfer.core.op_time import host_op_of
from twinfer.core.plan import Need, StepPlan
from twinfer.core.work import Op, RowShape, StepShape, copied_slots, swapped_slots
from twinfer.simulator.op_time import OpTimeChain, host_op
from twinfer.simulator.step_parts import (
    NO_ROWS,
    NOTHING,
    ByRows,
    DecodeCost,
    Group,
    Line,
    Part,
    StepCost,
    changed,
    grid_above,
    grid_below,
    place,
    rows_of,
    seconds_by_op,
    shape_of,
    spread,
    sum_of,
)

if TYPE_CHECKING:
    from twinfer.simulator.encoding import Encoding
    from twinfer.simulator.speculate import Speculation

OpsOf = Callable[[StepShape], Sequence[Op]]
_KEPT = 1 << 17  # parts
_FEW = 128  # totals of keys between two grid points up to which the decode steps of all are kept
_FAR = 1 << 20  # more tokens than a step has


class StepTimer:
    """Times the steps of one model on one device.

    ops_of: the ops of a step (techniques already applied).  windows: sliding windows of the model's
    layers; rows on different sides of a window are kept in different groups.
    overlap: whether the CPU's part of a step is done beside the device's.  host: whether it counts at all.
    """

    def __init__(
        self, ops_of: OpsOf, chain: OpTimeChain, windows: Sequence[int] = (), overlap: bool = False,
        host: bool = True,
    ) -> None:  # fmt: skip
        self._ops_of = ops_of
        self._chain = chain
        self._windows = sorted(set(windows))
        self._overlap = overlap
        self._with_host = host
        self.speculation: Speculation | None = None  # set where steps check guesses
        self.encoding: Encoding | None = None  # set where requests have images
        self._kinds: dict[tuple[str, int], str] = {}
        self._present: frozenset[str] | None = None  # values of `_kinds`, once they are known
        self._spares = False  # `StepShape.rows_only` leaves out nothing that belongs to rows
        self._known: dict[tuple[object, ...], Part] = {}
        self._rows: dict[Group, Part] = {}
        self._lines: dict[tuple[int, int], Line] = {}  # by rows and lower grid point
        self._steps: dict[tuple[int, int], list[float]] = {}  # seconds of decode steps by total, beside `_lines`
        self._fixed: dict[int, tuple[float, float]] = {}  # of decode steps: seconds and sigma of all but attention

    @property
    def windows(self) -> Sequence[int]:
        return self._windows

    def ops(self, shape: StepShape) -> Sequence[Op]:
        """What a step launches, without the host's part."""
        return self._ops_of(shape)

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

    def cost(self, plan: StepPlan, with_ops: bool = True) -> StepCost:
        """Cost of `plan`; a few microseconds once similar steps have been seen."""
        counts: dict[tuple[int, int], int] = {}
        totals: dict[tuple[int, int], int] = {}
        windows = self._windows
        logits = tokens = 0
        if plan.decoding is not None and plan.decoding.count:
            assert not windows
            logits = tokens = counts[1, 0] = plan.decoding.count
            totals[1, 0] = plan.decoding.keys
        for row in plan.rows:
            queries = len(row.tokens)
            keys = row.start + queries
            tokens += queries
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
        num_rows = sum(counts.values())
        parts = self._by_counts(tokens, logits, num_rows, moved)
        host = self._host(num_rows, tokens, logits)
        if len(counts) == 1:
            ((queries, _), count), *_ = counts.items()
            by_rows = self._by_rows(queries, count, sum(totals.values()))
        elif counts:
            groups = sorted((queries, counts[queries, side], totals[queries, side]) for queries, side in counts)
            part = self._timed("rows", StepShape(rows_of(groups), 1, rows_only=self._spares))
            by_rows = ByRows(part.seconds, part.sigma, part, part, 0.0)
        else:
            by_rows = NO_ROWS
        return self._whole(parts, host, by_rows, with_ops)

    def decode(self, count: int, keys: int, steps: int) -> DecodeCost:
        """Cost of `steps` steps in which `count` sequences feed a token each; `keys`: their KV tokens after the first."""
        assert not self._windows
        host = self._host(count, count, count)
        if count not in self._fixed:
            parts = self._by_counts(count, count, count, (0, 0))
            self._fixed[count] = sum_of(parts if self._overlap else (*parts, host))
        fixed, sigma = self._fixed[count]
        seconds: list[float] = []
        sigmas: list[tuple[int, float, float]] = []
        mean = keys // count  # one more in each step, whatever is left over
        lines, low = self._lines, grid_below(mean)
        while steps:
            line = lines.get((count, low)) or self._line(count, low)
            base, slope, first, growth, _, _, high = line
            here = min(steps, high - mean)  # before the next interval
            end = keys + here * count
            if (high - low) * count <= _FEW:  # few rows come by here again and again
                begin = low * count
                known = self._steps.get((count, low))
                if known is None:
                    totals = range(begin, high * count)
                    known = self._steps[count, low] = [fixed + (base + slope * total) for total in totals]
                found = known[keys - begin : end - begin : count]
            else:
                found = [fixed + (base + slope * total) for total in range(keys, end, count)]
            first, growth = sigma + (first + growth * keys), growth * count
            if self._overlap and min(found[0], found[-1]) < host.seconds:  # the CPU takes longer than the device
                for device in found:
                    waits = device < host.seconds
                    seconds.append(host.seconds if waits else device)
                    sigmas.append((1, first + host.sigma if waits else first, 0.0))
                    first += growth
            else:
                seconds += found
                sigmas.append((here, first, growth))
            keys, mean, low, steps = end, high, high, steps - here
        return DecodeCost(seconds, sigmas)

    def decode_costs(self, count: int, keys: int, steps: int, with_ops: bool) -> list[StepCost]:
        """As `decode`, step by step."""
        parts, host = self._by_counts(count, count, count, (0, 0)), self._host(count, count, count)
        return [
            self._whole(parts, host, self._by_rows(1, count, total), with_ops)
            for total in range(keys, keys + steps * count, count)
        ]

    def _whole(self, parts: tuple[Part, ...], host: Part, by_rows: ByRows, with_ops: bool) -> StepCost:
        """A step of `parts`, of the CPU's part and of that by rows."""
        if not self._overlap:
            seconds, sigma = sum_of((*parts, host))
            seconds += by_rows.seconds
        else:
            fixed, sigma = sum_of(parts)
            device = fixed + by_rows.seconds
            seconds = max(device, host.seconds)
            waited = max(0.0, host.seconds - device)
            host = Part(waited, host.sigma if waited else 0.0, {"host": waited})
            sigma += host.sigma
        return StepCost(seconds, sigma + by_rows.sigma, seconds_by_op((*parts, host), by_rows) if with_ops else {})

    # --- parts ----------------------------------------------------------------------------------

    def _by_counts(self, tokens: int, logits: int, rows: int, moved: tuple[int, int]) -> tuple[Part, ...]:
        """All that does not depend on which row has how many tokens and keys."""
        if not tokens:
            return ()
        if self._present is None:
            self._sort_ops()
            assert self._present is not None
        known = self._known
        parts: tuple[Part, ...] = (
            known.get(("tokens", tokens)) or self._part("tokens", tokens, StepShape((RowShape(tokens, tokens),), 1)),
            known.get(("logits", logits)) or self._part("logits", logits, StepShape((RowShape(1, 1),), logits)),
        )
        if "counts" in self._present:
            key = (tokens, logits, rows)
            parts += (known.get(("counts", key)) or self._part("counts", key, spread(rows, tokens, logits)),)
        if moved != (0, 0):
            one = StepShape((RowShape(1, 1),), 1, *moved)
            parts += (known.get(("moved", moved)) or self._part("moved", moved, one),)
        return parts

    def _part(self, kind: str, key: object, shape: StepShape) -> Part:
        part = self._timed(kind, shape)
        self._keep((kind, key), part)
        return part

    def _host(self, rows: int, tokens: int, logits: int) -> Part:
        """What the CPU does for a step."""
        if not self._with_host:
            return NOTHING
        key = ("host", rows, tokens, logits)
        known = self._known.get(key)
        if known is None:
            answer = self._chain.ask(host_op_of(rows, tokens, logits))
            known = Part(answer.seconds, answer.sigma, {"host": answer.seconds})
            self._keep(key, known)
        return known

    def _at(self, queries: int, count: int, keys: int) -> Part:
        """The part by rows of `count` rows of `queries` tokens with `keys` keys each."""
        known = self._rows.get((queries, count, keys))
        if known is None:
            if len(self._rows) >= _KEPT:
                self._rows.clear()
            known = self._timed("rows", StepShape((RowShape(queries, keys),) * count, 1, rows_only=self._spares))
            self._rows[queries, count, keys] = known
        return known

    def _by_rows(self, queries: int, count: int, total: int) -> ByRows:
        """The part by rows of `count` rows of `queries` tokens with `total` keys all together."""
        low, high, x = place(queries, count, total)
        if queries == 1:
            line = self._lines.get((count, low)) or self._line(count, low)
            base, slope, sigma_base, sigma_slope, below, above, _ = line
            return ByRows(base + slope * total, sigma_base + sigma_slope * total, below, above, x)
        below = self._at(queries, count, low)
        above = self._at(queries, count, high) if x else below
        seconds = below.seconds + (above.seconds - below.seconds) * x
        return ByRows(seconds, below.sigma + (above.sigma - below.sigma) * x, below, above, x)

    def _line(self, count: int, low: int) -> Line:
        """From grid point `low` to the next."""
        high = grid_above(low)
        below, above, width = self._at(1, count, low), self._at(1, count, high), (high - low) * count
        slope, sigma_slope = (above.seconds - below.seconds) / width, (above.sigma - below.sigma) / width
        if len(self._lines) >= _KEPT:
            self._lines.clear()
            self._steps.clear()
        line = self._lines[count, low] = Line(
            below.seconds - slope * low * count, slope, below.sigma - sigma_slope * low * count, sigma_slope, below, above, high
        )  # fmt: skip
        return line

    def _keep(self, key: tuple[object, ...], part: Part) -> None:
        if len(self._known) >= _KEPT:
            self._known.clear()
        self._known[key] = part

    def _timed(self, kind: str, shape: StepShape) -> Part:
        """The ops of `shape` that belong to `kind`."""
        if self._present is None:
            self._sort_ops()
            assert self._present is not None
        ops: dict[str, float] = {}
        sigma = 0.0
        if kind != "rows" and kind not in self._present:
            return NOTHING
        for op in self._of_kind(kind, shape).values():
            answer = self._chain.ask(op)
            ops[op.name] = ops.get(op.name, 0.0) + answer.seconds * op.count
            sigma += answer.sigma * op.count
        return Part(math.fsum(ops.values()), sigma, ops)

    def _sort_ops(self) -> None:
        """Find out the part that each op belongs to, by name and which of that name it is."""
        far = 4 * max((*self._windows, 1024))
        rows = ((40, 40), (8, 3), (1, far), (1, 7))  # tokens 50, as in all that follow
        others = (((47, far), (1, 1), (1, 9), (1, 2 * far)), ((20, 20), (20, 20), (5, 5), (5, far)))
        base = self._named(rows, 5)
        by_rows = {key for other in others for key in changed(base, self._named(other, 5))}
        by_logits = changed(base, self._named(rows, 3)) - by_rows
        by_number = changed(base, self._named(((50, 50),), 5)) - by_rows
        by_tokens = changed(base, self._named(((90, 90), *rows[1:]), 5)) - by_rows
        moved = {key for slots in ((32, 0), (0, 32)) for key in changed(base, self._named(rows, 5, *slots))}
        kinds = self._kinds
        for key in (*base, *moved):
            if key in by_rows:
                kinds[key] = "rows"
            elif key in moved:
                kinds[key] = "moved"
            elif key in by_number or (key in by_logits and key in by_tokens):
                kinds[key] = "counts"
            else:
                kinds[key] = "logits" if key in by_logits else "tokens"
        self._present = frozenset(kinds.values())
        # Also where a technique adds ops to small or to large steps alone.
        shapes = [shape_of(each, 1) for each in (rows, *others, ((1, 1),), ((1, far),) * 3, ((_FAR, _FAR), (1, 9)))]
        self._spares = all(
            self._of_kind("rows", shape) == self._of_kind("rows", replace(shape, rows_only=True)) for shape in shapes
        )

    def _named(self, rows: Iterable[tuple[int, int]], logits: int, *moved: int) -> dict[tuple[str, int], Op]:
        return self._placed(shape_of(rows, logits, *moved))

    def _placed(self, shape: StepShape) -> dict[tuple[str, int], Op]:
        """The ops of `shape` by name and which of that name they are."""
        seen: dict[str, int] = {}
        found = {}
        for op in self._ops_of(shape):
            place = seen.get(op.name, 0)
            seen[op.name] = place + 1
            found[op.name, place] = op
        return found

    def _of_kind(self, kind: str, shape: StepShape) -> dict[tuple[str, int], Op]:
        """Those that belong to `kind`; what turns up for the first time may depend on anything, as rows do."""
        kinds = self._kinds
        return {key: op for key, op in self._placed(shape).items() if kinds.get(key, "rows") == kind}
