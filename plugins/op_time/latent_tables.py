"""Latent attention (MLA) from measured kernel tables.

    kernels    attention alone, by (heads, rows of the step) over length or context            sglang, trtllm
    modules    the whole block with its projections, as one; less what the projections take     vllm

A module's time less its products' times (of the same stack's table, at the same shapes) is what is left for attention
and the small kernels around it, so that the ops of a block add up to the measured block.

Invariants
* Both projections down are one product, as stacks have it: `kv_down_proj` is what it takes beyond `q_down_proj`.
* Measured were the sizes of DeepSeek-V3; other sizes are answered at the utilisation of the nearest number of heads.
* Rows run expanded or absorbed as in `latent_ops`; a chunk takes what a whole prompt of as many pairs takes.
* Several kinds of rows in one launch: their times above the launch overhead add up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from twinfer.core.work import LatentShape, Op, RowShape, visible_pairs
from twinfer.plugins.op_time.expert_tables import Read
from twinfer.plugins.op_time.kernel_tables import Answer, KernelTable, Shape, median_rows

if TYPE_CHECKING:
    from twinfer.core.device import DeviceSpec

_LAUNCH = 8e-6
_LEAST_SHARE = 0.1  # of a module that attention takes at least, where the products alone seem to take all of it
_COLUMNS = ["kv_cache_dtype", "num_heads", "batch_size", "isl", "step", "latency"]
DEEPSEEK_V3 = LatentShape(7168, 128, 1536, 512, 128, 64, 128, "bfloat16")
"""Sizes that were measured."""

ProductTime = Callable[[int, int, int, str, "DeviceSpec"], float | None]
"""(m, n, k, dtype, device) to seconds of a product, None where the stack has no table."""


class LatentTables:
    """Tables of one system under one stack."""

    def __init__(self, read: Read, stack: str, product: ProductTime) -> None:
        self._read, self._stack, self._product = read, stack, product
        self._tables: dict[tuple[str, str, str], KernelTable | None] = {}

    def time(self, op: Op, device: DeviceSpec, fp8: str = "fp8") -> Answer | None:
        """Time of one launch of latent attention over all rows of a step."""
        s = op.of
        if not isinstance(s, LatentShape):
            return None
        linear = fp8 if s.linear_dtype == "fp8" else "bfloat16"
        if op.name == "kv_down_proj":
            return self._beside_query(op.shape[0], s, linear, device)
        if op.kind != "attention" or op.shape[4]:
            return None
        kv = "fp8" if op.kv_dtype == "fp8" else "bfloat16"
        decode = [row for row in op.rows for _ in range(row.queries) if absorbed(row, s)]
        prompts = [row for row in op.rows if not absorbed(row, s)]
        parts = []
        for kind, rows in (("generation", decode), ("context", prompts)):
            if rows:
                answer = self._part(kind, rows, s, kv, linear, device)
                if answer is None:
                    return None
                parts.append(answer)
        if not parts:
            return None
        seconds = max(sum(p.seconds for p in parts) - _LAUNCH * (len(parts) - 1), max(p.seconds for p in parts))
        most = max(parts, key=lambda p: p.seconds)
        return Answer(seconds, max(p.spread for p in parts), most.source, most.detail)

    def _beside_query(self, m: int, s: LatentShape, linear: str, device: DeviceSpec) -> Answer | None:
        """The projection to the latent, which stacks put into one product with the one of the query."""
        both = self._product(m, s.q_rank + s.kv_rank + s.rope, s.hidden, linear, device)
        query = self._product(m, s.q_rank, s.hidden, linear, device) if s.q_rank else 0.0
        if both is None or query is None:
            return None
        words = f"{both * 1e6:.1f} us with the query's projection, which takes {query * 1e6:.1f}" if query else "alone"
        return Answer(max(both - query, 0.0), 0.1, "transferred", words)

    def _part(
        self, kind: str, rows: Sequence[RowShape], s: LatentShape, kv: str, linear: str, device: DeviceSpec
    ) -> Answer | None:
        table = self.table(kind, kv, linear, device)
        if table is None:
            return None
        n = float(len(rows))
        if kind == "generation":
            point, whole = sum(row.keys for row in rows) / n, True
        else:
            pairs = sum(visible_pairs(row.queries, row.keys) for row in rows) / n
            point = (math.sqrt(8 * pairs + 1) - 1) / 2
            whole = all(row.queries == row.keys == rows[0].keys for row in rows)
        answer = table.time((float(s.heads), n), max(1.0, point))
        if answer is None:
            return None
        words, spread = answer.detail, answer.spread
        if not whole:
            words, spread = f"{words}, as {n:g} prompt(s) of {point:.0f}", spread + 0.05
        scale = latent_bound(kind, kv, device, s)((s.heads, n), point) / table.bound((s.heads, n), point)
        if scale != 1.0:
            words, spread = f"{words}; sizes of DeepSeek-V3 scaled by {scale:.2f}", spread + 0.1
        return Answer(answer.seconds * scale, spread, answer.source if whole and scale == 1.0 else "transferred", words)

    def table(self, kind: str, kv: str, linear: str, device: DeviceSpec) -> KernelTable | None:
        """Attention alone: shapes (heads, rows) over length (`context`) or context (`generation`)."""
        key = (kind, kv, linear)
        if key not in self._tables:
            rows = self.kernels(kind, kv)
            for other in (
                linear,
                "bfloat16",
                "fp8_block",
            ):  # the attention in a block is the same whatever its products
                rows = rows or self._without_products(kind, kv, other, device)
            self._tables[key] = KernelTable(rows, latent_bound(kind, kv, device)) if rows else None
        return self._tables[key]

    def kernels(self, kind: str, kv: str) -> dict[tuple[Shape, float], float]:
        """Measured attention kernels: (heads, rows), length or context to seconds."""
        return self._points("mla", f"{kind}_mla_perf", kind, kv, "")

    def modules(self, kind: str, kv: str, linear: str) -> dict[tuple[Shape, float], float]:
        """Measured blocks with their projections in `linear`."""
        return self._points("mla", f"mla_{kind}_module_perf", kind, kv, linear)

    def _points(self, family: str, name: str, kind: str, kv: str, linear: str) -> dict[tuple[Shape, float], float]:
        columns = [*_COLUMNS, "gemm_type"] if linear else _COLUMNS
        found = self._read(family, name, self._stack, columns)
        keys, seconds = [], []
        for stored, heads, batch, length, step, ms, *of in zip(
            *((found or {}).get(c, ()) for c in columns), strict=True
        ):
            if stored != kv or (linear and of[0] != linear) or (kind == "context" and step):
                continue
            keys.append(((float(heads), float(batch)), float(length if kind == "context" else length + step)))
            seconds.append(ms * 1e-3)
        return median_rows(keys, seconds)

    def _without_products(
        self, kind: str, kv: str, linear: str, device: DeviceSpec
    ) -> dict[tuple[Shape, float], float]:
        rest = {}
        for (shape, point), seconds in self.modules(kind, kv, linear).items():
            heads, n = shape
            m = int(n * point) if kind == "context" else int(n)
            times = [self._product(m, *nk, linear, device) for nk in projections(int(heads))]
            if any(t is None for t in times):
                return {}
            rest[shape, point] = max(seconds - sum(t for t in times if t), _LEAST_SHARE * seconds)
        return rest


def absorbed(row: RowShape, s: LatentShape) -> bool:
    """Whether a row attends in the latent space; each of its queries is then a row of the measured kernel."""
    pairs, up = visible_pairs(row.queries, row.keys), s.kv_rank * (s.nope + s.v)
    return pairs * (2 * s.kv_rank + s.rope) + row.queries * up <= pairs * (s.nope + s.rope + s.v) + row.keys * up


def projections(heads: int, s: LatentShape = DEEPSEEK_V3) -> list[tuple[int, int]]:
    """(n, k) of the products of a block: those that the ops of a step list as linears (both projections down are one
    product), and `kv_up_proj`."""
    return [
        (s.q_rank + s.kv_rank + s.rope, s.hidden), (heads * (s.nope + s.rope), s.q_rank),
        (heads * (s.nope + s.v), s.kv_rank), (s.hidden, heads * s.v),
    ]  # fmt: skip


def latent_bound(
    kind: str, kv: str, device: DeviceSpec, s: LatentShape = DEEPSEEK_V3
) -> Callable[[Sequence[float], float], float]:
    """Least seconds of attention over `n` prompts of `x` tokens (expanded), or of n queries over `x` keys (absorbed)."""
    peaks, bandwidth = device.peak_flops, device.memory_bandwidth
    peak = peaks.get("bfloat16") or peaks.get("float16") or max(peaks.values())
    width = 1.0 if kv == "fp8" else 2.0

    def context(shape: Sequence[float], x: float) -> float:
        heads, n = shape
        flops = n * x * (x + 1) * heads * (s.nope + s.rope + s.v)
        moved = n * x * heads * 2 * (2 * (s.nope + s.rope) + 2 * s.v)
        return _LAUNCH + math.hypot(flops / (0.6 * peak), moved / (0.8 * bandwidth))

    def generation(shape: Sequence[float], x: float) -> float:
        heads, n = shape
        moved = n * x * (s.kv_rank + s.rope) * width + n * heads * 2 * (2 * s.kv_rank + s.rope)
        flops = 2 * n * x * heads * (2 * s.kv_rank + s.rope)
        return _LAUNCH + math.hypot(flops / (0.6 * peak), moved / (0.8 * bandwidth))

    return context if kind == "context" else generation


def module_bound(
    kind: str, kv: str, linear: str, device: DeviceSpec, s: LatentShape = DEEPSEEK_V3
) -> Callable[[Sequence[float], float], float]:
    """Least seconds of a block with its projections."""
    attention = latent_bound(kind, kv, device, s)
    peaks, bandwidth = device.peak_flops, device.memory_bandwidth
    base = peaks.get("bfloat16") or max(peaks.values())
    peak, width = (peaks.get("fp8", base), 1.0) if linear.startswith("fp8") else (base, 2.0)

    def bound(shape: Sequence[float], x: float) -> float:
        heads, n = shape
        m = n * x if kind == "context" else n
        weights = sum(a * b for a, b in projections(int(heads), s))
        products = math.hypot(2 * m * weights / (0.7 * peak), weights * width / (0.8 * bandwidth))
        return attention(shape, x) + products + 5 * 4e-6

    return bound


__all__ = ["DEEPSEEK_V3", "LatentTables", "latent_bound", "module_bound", "projections"]
