"""Attention from measured kernel tables, where keys and values are as wide (latent attention: `latent_tables.py`).

    table    one per head width, window and KV format, of prompts and of decode rows
    shape    (query heads, KV heads, rows in the launch)
    axis     prompts: the length of each; decode rows: the context of each

Invariants
* Several rows in one launch: their times above the launch overhead add up, the overhead counts once.
* Where KV is in FP8, stacks compute in it when they can: such rows are taken where there are any.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from twinfer.core.work import Op, RowShape, visible_pairs
from twinfer.plugins.op_time.expert_tables import Read
from twinfer.plugins.op_time.kernel_tables import Answer, KernelTable, Shape, median_rows, peak_of

if TYPE_CHECKING:
    from twinfer.core.device import DeviceSpec

KV_DTYPES = {"bfloat16": "bfloat16", "float16": "bfloat16", "fp8": "fp8"}
_LAUNCH = 8e-6  # s: launch overhead within the bounds below


class AttentionTables:
    """Tables of one system under one stack."""

    def __init__(self, read: Read, stack: str) -> None:
        self._read, self._stack = read, stack
        self._tables: dict[tuple[str, int, int, str], KernelTable | None] = {}

    def time(self, op: Op, device: DeviceSpec) -> Answer | None:
        """Time of the op `attention` over all its rows."""
        heads, kv_heads, head_dim, _, window = op.shape
        kv_dtype = KV_DTYPES.get(op.kv_dtype or op.dtype)
        if kv_dtype is None:
            return None
        decode = [row.keys for row in op.rows if row.queries == 1]
        prefill = [row for row in op.rows if row.queries > 1]
        parts: list[Answer] = []
        if decode:
            table = self.decode(device, head_dim, window, kv_dtype)
            answer = table and table.time((heads, kv_heads, len(decode)), max(1.0, sum(decode) / len(decode)))
            if not answer:
                return None
            parts.append(answer)
        if prefill:
            table = self.prefill(device, head_dim, window, kv_dtype)
            if table is None:
                return None
            parts.append(_prompts(table, heads, kv_heads, prefill))
        floor = _LAUNCH * (len(parts) - 1)
        seconds = max(sum(p.seconds for p in parts) - floor, max(p.seconds for p in parts))
        most = max(parts, key=lambda p: p.seconds)
        return Answer(seconds, max(p.spread for p in parts), most.source, most.detail)

    def prefill(self, device: DeviceSpec, head_dim: int, window: int, kv_dtype: str) -> KernelTable | None:
        """Shapes (query heads, KV heads, prompts) over the length of each prompt."""
        return self._table("context", device, head_dim, window, kv_dtype)

    def decode(self, device: DeviceSpec, head_dim: int, window: int, kv_dtype: str) -> KernelTable | None:
        """Shapes (query heads, KV heads, batch) over the context."""
        return self._table("generation", device, head_dim, window, kv_dtype)

    def _table(self, kind: str, device: DeviceSpec, head_dim: int, window: int, kv_dtype: str) -> KernelTable | None:
        def make() -> KernelTable | None:
            axis = "isl" if kind == "context" else "step"
            columns = [
                "batch_size", axis, "num_heads", "num_key_value_heads", "head_dim", "window_size", "kv_cache_dtype",
                "attn_dtype", "latency",
            ]  # fmt: skip
            rows = self._read("attention", f"{kind}_attention_perf", self._stack, columns)
            if rows is None:
                return None
            found: dict[bool, list[tuple[tuple[Shape, float], float]]] = {False: [], True: []}
            for batch, x, heads, kv_heads, dim, wide, kv, computed, ms in zip(*(rows[c] for c in columns), strict=True):
                if dim == head_dim and wide == window and KV_DTYPES.get(kv) == kv_dtype:
                    key = ((heads, kv_heads, batch), x if kind == "context" else x + 1)
                    found[computed == kv_dtype == "fp8"].append((key, ms * 1e-3))
            points = found[True] or found[False]  # where KV is in FP8, stacks compute in it when they can
            if not points:
                return None
            bound = attention_bound(kind, device, head_dim, window, 1.0 if kv_dtype == "fp8" else 2.0)
            return KernelTable(median_rows([key for key, _ in points], [s for _, s in points]), bound, lerp=True)

        key = (kind, head_dim, window, kv_dtype)
        if key not in self._tables:
            self._tables[key] = make()
        return self._tables[key]


def attention_bound(
    kind: str, device: DeviceSpec, head_dim: int, window: int, kv_width: float
) -> Callable[[Shape, float], float]:
    """Least seconds of `batch` rows: prompts of `x` tokens, or one query each over `x` keys."""
    peak, bandwidth = peak_of(device, "bfloat16"), device.memory_bandwidth

    def context(shape: Shape, x: float) -> float:
        heads, kv_heads, batch = shape
        inside = min(x, window) if window else x
        pairs = inside * (inside + 1) / 2 + (x - inside) * inside
        size = batch * x * (4 * heads * head_dim + 2 * kv_width * kv_heads * head_dim)
        return _LAUNCH + max(4 * batch * heads * head_dim * pairs / (0.6 * peak), size / (0.8 * bandwidth))

    def generation(shape: Shape, x: float) -> float:
        heads, kv_heads, batch = shape
        keys = batch * (min(x, window) if window else x)
        size = keys * 2 * kv_heads * head_dim * kv_width
        return _LAUNCH + max(size / (0.85 * bandwidth), 4 * keys * heads * head_dim / (0.4 * peak))

    return context if kind == "context" else generation


def _prompts(table: KernelTable, heads: int, kv_heads: int, rows: Sequence[RowShape]) -> Answer:
    """Prompts, or chunks of prompts, in one launch: as long as equal prompts, as many, with as many pairs in all."""
    pairs = sum(visible_pairs(row.queries, row.keys) for row in rows) / len(rows)
    length = max(1.0, (math.sqrt(8 * pairs + 1) - 1) / 2)
    answer = table.time((heads, kv_heads, len(rows)), length)
    assert answer is not None
    if all(row.queries == row.keys == rows[0].keys for row in rows):
        return answer
    words = f"{answer.detail}, as {len(rows)} prompt(s) of {length:.0f}"
    return Answer(answer.seconds, answer.spread + 0.05, "transferred", words)


__all__ = ["AttentionTables", "attention_bound"]
