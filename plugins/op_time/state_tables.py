"""Linear attention from measured kernel tables: gated delta nets and Mamba-2.

    context      the convolution over a prompt; the chunked scan               by heads and rows over length
    generation   one step of the convolution; one step of the recurrence       by heads over rows

Invariants
* Sizes are those of one rank; a kernel is told by the op that it does, not by its name.
* Prompts of unequal length take what as many equal ones take.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from twinfer.core.work import Op, StateShape
from twinfer.plugins.op_time.expert_tables import Read
from twinfer.plugins.op_time.kernel_tables import Answer, KernelTable, Shape, median_rows

if TYPE_CHECKING:
    from twinfer.core.device import DeviceSpec

_LAUNCH = 4e-6
_KERNELS = {
    ("linear_conv", "context"): ("causal_conv1d_fn",),
    ("linear_conv", "generation"): ("causal_conv1d_update",),
    ("linear_attention", "context"): ("chunk_gated_delta_rule", "mamba_chunk_scan"),
    ("linear_attention", "generation"): ("fused_", "selective_state_update"),
}
_COLUMNS = {
    "gated_delta_net": ("gdn_perf", ["num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim"]),
    "mamba2": ("mamba2_perf", ["n_groups", "nheads", "d_state", "head_dim"]),
}
"""Table, and its columns of key heads, value heads, key and value width."""


class StateTables:
    """Tables of one system under one stack."""

    def __init__(self, read: Read, stack: str) -> None:
        self._read, self._stack = read, stack
        self._tables: dict[tuple[str, str, str], KernelTable | None] = {}

    def time(self, op: Op, device: DeviceSpec) -> Answer | None:
        s = op.of
        if not isinstance(s, StateShape) or op.name not in ("linear_conv", "linear_attention"):
            return None
        sizes = (float(s.key_heads), float(s.value_heads), float(s.key_dim), float(s.value_dim))
        decode = sum(row.queries == 1 for row in op.rows)
        prompts = [row.queries for row in op.rows if row.queries > 1]
        parts = []
        for kind, shape, point in (
            ("generation", sizes, float(decode)),
            ("context", (*sizes, float(len(prompts))), sum(prompts) / max(1, len(prompts))),
        ):
            if point:
                table = self.table(s.kind, op.name, kind, device)
                answer = table.time(shape, point) if table is not None else None
                if answer is None:
                    return None
                parts.append(answer)
        if not parts:
            return None
        most = max(parts, key=lambda p: p.seconds)
        return Answer(sum(p.seconds for p in parts), max(p.spread for p in parts), most.source, most.detail)

    def table(self, kind: str, op: str, phase: str, device: DeviceSpec) -> KernelTable | None:
        """Shapes (key heads, value heads, key width, value width[, rows]) over rows (decode) or length."""
        key = (kind, op, phase)
        if key not in self._tables:
            rows = self._points(kind, op, phase)
            self._tables[key] = KernelTable(rows, state_bound(op, phase, device)) if rows else None
        return self._tables[key]

    def _points(self, kind: str, op: str, phase: str) -> dict[tuple[Shape, float], float]:
        if kind not in _COLUMNS:
            return {}
        name, sizes = _COLUMNS[kind]
        columns = ["kernel_source", "phase", "batch_size", "seq_len", "latency", *sizes]
        found: Mapping[str, list[Any]] = self._read("linear_attention", name, self._stack, columns) or {}
        keys: list[tuple[Shape, float]] = []
        seconds: list[float] = []
        for source, when, batch, length, ms, *of in zip(*(found.get(c, ()) for c in columns), strict=True):
            if when == phase and str(source).startswith(_KERNELS[op, phase]):
                shape = tuple(float(x) for x in of)
                keys.append((shape, float(batch)) if phase == "generation" else ((*shape, float(batch)), float(length)))
                seconds.append(ms * 1e-3)
        return median_rows(keys, seconds)


def state_bound(op: str, phase: str, device: DeviceSpec) -> Callable[[Shape, float], float]:
    """Least seconds: states read and written once a row, inputs and outputs once a token, the scan's products."""
    bandwidth = device.memory_bandwidth
    peak = device.peak_flops.get("bfloat16") or max(device.peak_flops.values())

    def bound(shape: Shape, point: float) -> float:
        keys, values, key_dim, value_dim, *batch = shape
        rows, tokens = (batch[0], batch[0] * point) if batch else (point, point)
        channels = 2 * keys * key_dim + values * value_dim
        if op == "linear_conv":
            return _LAUNCH + (2 * tokens * channels * 2 + rows * channels * 6) / (0.8 * bandwidth)
        state = values * key_dim * value_dim
        moved = 2 * rows * state * 4 + tokens * (channels + values * value_dim) * 2
        flops = 7 * tokens * state if phase == "context" else 0.0
        return _LAUNCH + math.hypot(moved / (0.7 * bandwidth), flops / (0.15 * peak))

    return bound


__all__ = ["StateTables", "state_bound"]
