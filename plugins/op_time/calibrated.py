"""Op times from tables measured on the machine itself (`twinfer calibrate`).

    gemm         (n, k) measured: linear between the measured m
                 other (n, k):    utilisation of the two nearest measured shapes, at the same m
    attention    non-negative sum of what its rows cost (`ATTENTION_TERMS`)
    elementwise  per launch + per byte, by op name
    host         per step + per row + per token + per logit

Invariants
* Answers only for the dtypes and kinds that were measured; otherwise the next model is asked.
* `source` says which rule gave the number; a transferred or extrapolated time has a larger sigma.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, ValidationError

from twinfer.core.errors import ConfigError
from twinfer.core.op_time import OpTime
from twinfer.core.technique import Technique
from twinfer.core.work import Op, dtype_bytes, visible_pairs

if TYPE_CHECKING:
    from twinfer.core.device import DeviceSpec

ATTENTION_TERMS = (
    "call", "mixed", "prefill_row", "prefill_token", "prefill_pair", "prefill_square", "prefill_key",
    "lone_call", "lone_key", "decode_call", "decode_row", "decode_key", "decode_far_key",
)  # fmt: skip
_NEAR_KEYS = 4000.0  # scaled keys (7000 of SmolLM2-135M, 21 MB in float32) that stay in a core's caches
HOST_TERMS = ("step", "row", "token", "logit")


class GemmTable(BaseModel):
    """Measured seconds of x[m, k] @ w[n, k].T by m; `spread`: relative standard deviation of the medians."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    dtype: str
    n: int
    k: int
    m: tuple[int, ...]
    seconds: tuple[float, ...]
    spread: float


class Fit(BaseModel):
    """A non-negative linear fit; `spread`: relative standard deviation of its residuals."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    terms: dict[str, float]
    spread: float
    num_points: int = 0


class Calibration(BaseModel):
    """What was measured on one machine: the `calibration` part of a device file.

    attention: by dtype; terms are seconds per unit of `attention_features`.
    elementwise: by `dtype/op name`; seconds per launch and per byte.  copy_bandwidth: B/s, for other ops.
    host: seconds of a step that are in no op.  drift: relative standard deviation of the machine's speed
    over the measurement.  fingerprint: what the numbers hold for.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    version: int = 1
    created: str = ""
    models: tuple[str, ...] = ()
    gemm: tuple[GemmTable, ...] = ()
    attention: dict[str, Fit] = {}
    elementwise: dict[str, Fit] = {}
    copy_bandwidth: float = 0.0
    host: Fit | None = None
    drift: float = 0.0
    fingerprint: dict[str, Any] = {}


class Calibrated(Technique):
    name = "calibrated"
    summary = "op times interpolated in tables measured on this machine by `twinfer calibrate`"
    reference = "utilisation transfer: AIConfigurator (arXiv:2601.06288)"

    def time(self, op: Op, device: DeviceSpec) -> OpTime | None:
        tables = tables_of(device)
        if tables is None:
            return None
        if op.kind == "gemm":
            return tables.gemm(op)
        if op.kind == "attention":
            return tables.attention(op)
        if op.kind in ("elementwise", "gather") or (op.kind == "host_copy" and device.kind == "cpu"):
            return tables.elementwise(op)
        if op.kind == "host":
            return tables.host(op)
        return None


class Tables:
    """A `Calibration` arranged for look-up."""

    def __init__(self, calibration: Calibration) -> None:
        self.calibration = calibration
        self._gemm: dict[tuple[str, int, int], GemmTable] = {}
        for table in calibration.gemm:
            self._gemm[table.dtype, table.n, table.k] = table
        self._peak: dict[str, float] = {}
        self._bandwidth: dict[str, float] = {}
        for dtype in {t.dtype for t in calibration.gemm}:
            same = [t for t in calibration.gemm if t.dtype == dtype]
            self._peak[dtype] = max(2 * t.n * t.k * m / s for t in same for m, s in zip(t.m, t.seconds, strict=True))
            self._bandwidth[dtype] = max(
                gemm_bytes(m, t.n, t.k, dtype) / s for t in same for m, s in zip(t.m, t.seconds, strict=True)
            )

    def gemm(self, op: Op) -> OpTime | None:
        if len(op.shape) != 3 or op.dtype not in self._peak:
            return None
        m, n, k = op.shape
        table = self._gemm.get((op.dtype, n, k))
        if table is not None:
            seconds, source = on_table(table, m)
            # 3 %: interpolation between neighbouring m, seen on held-out m
            spread = table.spread if source == "measured" else math.hypot(table.spread, 0.03)
            if source == "extrapolated":
                spread = math.hypot(spread, 0.1)
            return self._answer(seconds, spread, source, f"[{m}, {k}] x [{k}, {n}] {op.dtype}")
        return self._transferred(m, n, k, op.dtype)

    def _transferred(self, m: int, n: int, k: int, dtype: str) -> OpTime:
        """Utilisation of the nearest two measured shapes (distance in log2 n, log2 k), inverse-distance weighted."""

        def distance(t: GemmTable) -> float:
            return math.hypot(math.log2(n / t.n), math.log2(k / t.k))

        near = sorted((t for t in self._gemm.values() if t.dtype == dtype), key=lambda t: (distance(t), t.n, t.k))[:2]
        weights = [1 / max(distance(t), 1e-6) for t in near]
        use = sum(
            w * self._ideal(m, t.n, t.k, dtype) / on_table(t, m)[0] for w, t in zip(weights, near, strict=True)
        ) / sum(weights)
        seconds = self._ideal(m, n, k, dtype) / use
        far = distance(near[0])
        spread = math.hypot(near[0].spread, 0.08 + 0.05 * min(far, 4))
        names = " and ".join(f"({t.n}, {t.k})" for t in near)
        return self._answer(seconds, spread, "transferred", f"utilisation {use:.0%} of the nearest shapes {names}")

    def _ideal(self, m: int, n: int, k: int, dtype: str) -> float:
        return max(2 * m * n * k / self._peak[dtype], gemm_bytes(m, n, k, dtype) / self._bandwidth[dtype])

    def attention(self, op: Op) -> OpTime | None:
        fit = self.calibration.attention.get(op.dtype)
        if fit is None or not op.rows:
            return None
        seconds = dot(fit.terms, attention_features(op))
        return self._answer(seconds, fit.spread, "fitted", f"{len(op.rows)} rows; {fit.num_points} measured points")

    def elementwise(self, op: Op) -> OpTime | None:
        c = self.calibration
        fit = c.elementwise.get(f"{op.dtype}/{op.name}")
        if fit is not None:
            seconds = dot(fit.terms, {"launch": 1.0, "byte": op.bytes})
            return self._answer(seconds, fit.spread, "fitted", f"{op.bytes / 1e6:.2f} MB; {fit.num_points} points")
        if not c.copy_bandwidth:
            return None
        seconds = op.bytes / c.copy_bandwidth
        return self._answer(seconds, 0.3, "transferred", f"{op.bytes / 1e6:.2f} MB at the bandwidth of a copy")

    def host(self, op: Op) -> OpTime | None:
        fit = self.calibration.host
        if fit is None:
            return None
        rows, tokens, logits = op.shape
        features = dict(zip(HOST_TERMS, (1.0, rows, tokens, logits), strict=True))
        seconds = dot(fit.terms, features)
        return self._answer(seconds, fit.spread, "fitted", f"{rows} rows, {tokens} tokens, {logits} logits")

    def _answer(self, seconds: float, spread: float, source: str, detail: str) -> OpTime:
        return OpTime(seconds, math.hypot(spread, self.calibration.drift) * seconds, source, detail)


def attention_features(op: Op) -> dict[str, float]:
    """What one attention launch does, by `ATTENTION_TERMS`.

    Decode rows feed one token; a lone one is read in place, several are gathered first, and many keys do
    not stay in the caches between gathering and use (`decode_far_key`). `mixed` is 1 when there is more than one part to put together (each
    prefill row is a part, all decode rows are one). Pairs, squares (queries times keys, masked pairs included) and keys are
    scaled by heads * head size in 1000s, so that a fit of one model serves another.
    """
    pairs = sum(visible_pairs(r.queries, r.keys) for r in op.rows)
    width = op.flops / pairs / 4000 if pairs else 0.0  # 4 FLOPs per pair, head and dimension
    prefill = [r for r in op.rows if r.queries > 1]
    decode = [r.keys for r in op.rows if r.queries == 1]
    lone = len(decode) == 1
    keys = width * sum(decode)
    return {
        "call": 1.0,
        "mixed": float(len(prefill) + bool(decode) > 1),
        "prefill_row": float(len(prefill)),
        "prefill_token": width * sum(r.queries for r in prefill),
        "prefill_pair": width * sum(visible_pairs(r.queries, r.keys) for r in prefill),
        "prefill_square": width * sum(r.queries * r.keys for r in prefill),
        "prefill_key": width * sum(r.keys for r in prefill),
        "lone_call": float(lone),
        "lone_key": keys if lone else 0.0,
        "decode_call": float(len(decode) > 1),
        "decode_row": 0.0 if lone else float(len(decode)),
        "decode_key": 0.0 if lone else keys,
        "decode_far_key": 0.0 if lone else max(0.0, keys - _NEAR_KEYS),
    }


def dot(terms: dict[str, float], features: dict[str, float]) -> float:
    return sum(weight * features[name] for name, weight in terms.items())


def gemm_bytes(m: int, n: int, k: int, dtype: str) -> float:
    return (m * k + k * n + m * n) * dtype_bytes(dtype)


def on_table(table: GemmTable, m: int) -> tuple[float, str]:
    """Seconds at `m`, linear between measured m, proportional above and flat below them."""
    ms: Sequence[int] = table.m
    i = bisect_left(ms, m)
    if i < len(ms) and ms[i] == m:
        return table.seconds[i], "measured"
    if i == 0:
        return table.seconds[0], "extrapolated"
    if i == len(ms):
        return table.seconds[-1] * m / ms[-1], "extrapolated"
    x = (m - ms[i - 1]) / (ms[i] - ms[i - 1])
    return table.seconds[i - 1] * (1 - x) + table.seconds[i] * x, "interpolated"


def tables_of(device: DeviceSpec) -> Tables | None:
    """The device's calibration, None when it has none; ConfigError when it is malformed."""
    given = getattr(device, "calibration", None)
    if not given:
        return None
    cached = _tables.get(id(given))
    if cached is not None and cached[0] is given:
        return cached[1]
    try:
        tables = Tables(Calibration.model_validate(given))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigError(
            "--device", device.name, f"calibration.{where}: {first['msg'].lower()}", "run `twinfer calibrate` again"
        ) from None
    _tables[id(given)] = (given, tables)
    return tables


_tables: dict[int, tuple[Any, Tables]] = {}
