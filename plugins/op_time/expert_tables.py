"""Routed experts from measured kernel tables: one launch of permute, both products, activation and weighted sum.

    table    one per dtype of the experts, distribution of tokens over them and stack
    shape    (hidden, one expert's width on a rank, experts per token, experts, expert-parallel ranks)
    axis     tokens of all ranks; what was measured is the busiest of the ranks

Invariants
* Widths that tensor-parallel ranks share count as the width that is left: the kernel cannot tell.
* `skew` picks the distribution: 0 the balanced one, else the nearest measured power law.
* The activation between the products is part of the measured time: its op takes nothing here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from twinfer.core.expert_load import rank_load
from twinfer.core.work import MoEShape, Op
from twinfer.plugins.op_time.kernel_tables import Answer, KernelTable, Shape, median_rows

if TYPE_CHECKING:
    from twinfer.core.device import DeviceSpec

Read = Callable[[str, str, str, list[str]], Mapping[str, list[Any]] | None]
"""(family, table, stack, columns) to the columns, None where the system has no such table."""

_LAUNCH = 14e-6  # s: routing, permutation, two products, activation and sum
_TILE = 16  # rows that a product computes at least per expert
SLOW = 0.8  # octaves: whole shapes of some tables took four times as long as all their neighbours
MANY_SHAPES = 50  # below that, neighbours are too far apart to tell a slow one
_COLUMNS = [
    "moe_dtype", "num_tokens", "hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size",
    "distribution", "kernel_source", "latency",
]  # fmt: skip
_BITS = {
    "bfloat16": 16.0, "fp8": 8.0, "fp8_block": 8.0 + 32 / 16384, "w4a16_mxfp4": 4.25, "int4_wo": 4.125, "nvfp4": 4.5,
    "w4afp8": 4.125,
}  # fmt: skip


_ALIKE = {
    "fp8": ("fp8_block",), "fp8_block": ("fp8",), "int4_wo": ("w4a16_mxfp4",), "w4a16_mxfp4": ("int4_wo",),
    "nvfp4": ("w4a16_mxfp4", "int4_wo"),
}  # fmt: skip
"""Formats with as many bits, which stand in for one that was not measured."""
_ALIKE_SPREAD = 0.15


class ExpertTables:
    """Tables of one system under one stack."""

    def __init__(self, read: Read, stack: str) -> None:
        self._read, self._stack = read, stack
        self._rows: dict[tuple[str, str], dict[tuple[Shape, float], float]] | None = None
        self._tables: dict[tuple[str, str], KernelTable | None] = {}

    def time(self, op: Op, device: DeviceSpec, fp8: str = "fp8") -> Answer | None:
        """Time of the op `experts`; its activation is part of it."""
        s = op.of
        if not isinstance(s, MoEShape) or op.kind not in ("gemm", "elementwise"):
            return None
        asked = format_of(s.dtype, s.bits, fp8)
        for kind in (asked, *_ALIKE.get(asked, ())):
            table = self._nearest(kind, s, device)
            if table is not None:
                break
        else:
            return None
        if op.kind == "elementwise":
            return Answer(0.0, 0.0, "measured", "part of the measured experts")
        answer = table.time(shape_of(s), s.tokens)
        if answer is None or kind == asked:
            return answer
        return replace(
            answer,
            spread=answer.spread + _ALIKE_SPREAD,
            source="transferred",
            detail=f"{answer.detail}; {kind} for {asked}",
        )

    def _nearest(self, kind: str, s: MoEShape, device: DeviceSpec) -> KernelTable | None:
        """Table of a format, with the distribution of tokens nearest to that of `s`."""
        if not s.gated and self.laws(f"{kind}, ungated"):
            kind = f"{kind}, ungated"
        law = self.law(kind, s.skew)
        return self.table(kind, law, device) if law else None

    def laws(self, kind: str) -> list[str]:
        """Measured distributions of a dtype."""
        return sorted(law for name, law in self.rows() if name == kind)

    def law(self, kind: str, skew: float) -> str | None:
        """The measured distribution nearest to `skew`."""
        return min(self.laws(kind), key=lambda law: abs(skew_of(law) - skew), default=None)

    def rows(self) -> dict[tuple[str, str], dict[tuple[Shape, float], float]]:
        """(dtype, distribution) to (shape, tokens) to seconds."""
        if self._rows is None:
            found = self._read("moe", "moe_perf", self._stack, _COLUMNS)
            groups: dict[tuple[str, str], tuple[list[tuple[Shape, float]], list[float]]] = {}
            for kind, tokens, hidden, inter, k, experts, tp, ep, law, source, ms in zip(
                *((found or {}).get(c, ()) for c in _COLUMNS), strict=True
            ):
                if "min_latency" in str(source):  # another kernel for a few tokens, off by default
                    continue
                kind = f"{kind}, ungated" if "nongated" in str(source) else kind
                keys, seconds = groups.setdefault((kind, law), ([], []))
                keys.append(((float(hidden), inter / tp, float(k), float(experts), float(ep)), float(tokens)))
                seconds.append(ms * 1e-3)
            self._rows = {group: median_rows(*both) for group, both in groups.items()}
        return self._rows

    def table(self, kind: str, law: str, device: DeviceSpec) -> KernelTable | None:
        if (kind, law) not in self._tables:
            rows = self.rows().get((kind, law))
            slow = SLOW if len({shape for shape, _ in rows or ()}) > MANY_SHAPES else math.inf
            self._tables[kind, law] = KernelTable(rows, expert_bound(kind, law, device), slow=slow) if rows else None
        return self._tables[kind, law]


def expert_bound(kind: str, law: str, device: DeviceSpec) -> Callable[[Shape, float], float]:
    """Least seconds of the busiest rank: products over whole tiles, weights of the touched experts read once."""
    skew = skew_of(law)
    gated, kind = "ungated" not in kind, kind.split(",")[0]
    bits = _BITS.get(kind, 16.0)
    matrices = 3 if gated else 2
    peaks = device.peak_flops
    base = peaks.get("bfloat16") or peaks.get("float16") or max(peaks.values())
    peak = peaks.get("fp8", base) if kind.startswith("fp8") else base
    width = 1.0 if kind.startswith("fp8") else 2.0

    def bound(shape: Shape, tokens: float) -> float:
        hidden, inter, top_k, experts, ranks = shape
        pairs, touched = load_of(int(experts), int(top_k), round(tokens), int(ranks), skew)
        each = max(1.0, pairs / touched)
        rows = touched * math.ceil(each / _TILE) * _TILE
        compute = 2 * matrices * rows * hidden * inter / (0.7 * peak)
        moved = touched * matrices * hidden * inter * bits / 8 + pairs * (2 * hidden + 3 * inter) * width
        return _LAUNCH + math.hypot(compute, moved / (0.85 * device.memory_bandwidth))

    return bound


def load_of(experts: int, top_k: int, tokens: int, ranks: int, skew: float) -> tuple[float, float]:
    """(pairs, experts touched) of the measured rank; the balanced distribution deals tokens out like cards."""
    if skew:
        pairs, touched = rank_load(experts, top_k, tokens, ranks, skew)
        return max(pairs, 1e-3), max(touched, 1e-3)
    pairs = tokens * top_k / ranks
    return pairs, min(experts / ranks, pairs)


def shape_of(s: MoEShape) -> Shape:
    return float(s.hidden), s.inter / s.tp, float(s.top_k), float(s.num_experts), float(s.ep)


def skew_of(law: str) -> float:
    """Exponent in the name of a distribution: 1.2 of `power_law_1.2`, 0 of `balanced`."""
    tail = law.removeprefix("power_law_").split("_")[0]
    try:
        return float(tail)
    except ValueError:
        return 0.0


def format_of(dtype: str, bits: float, fp8: str) -> str:
    """Name of the package for experts of `bits` per weight that compute in `dtype`."""
    if dtype == "fp8":
        return fp8 if bits >= 6 else "w4afp8"
    if bits >= 12:
        return "bfloat16"
    if bits >= 6:
        return "int8_wo"
    return "w4a16_mxfp4" if 4.2 < bits < 4.3 else "int4_wo"


__all__ = ["ExpertTables", "Read", "expert_bound", "format_of", "load_of", "shape_of", "skew_of"]
