"""Op times from tables measured on the machine itself (`twinfer calibrate`).

    gemm         (n, k) measured: linear between the measured m
                 other (n, k):    utilisation of the two nearest measured shapes, at the same m
    attention    non-negative sum of what its rows cost (`ATTENTION_TERMS`)
    elementwise  linear between the measured sizes, by op name
    host         per step + per row + per token + per logit, in the step and between steps

Invariants
* Tables of the model's own format come first (`for_model`), then those of the nearest; a time that was measured in
  another format says so and has a larger sigma.
* Products are answered only in formats that were measured; otherwise the next model is asked.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from twinfer.core.errors import ConfigError
from twinfer.core.mistakes import first_mistake
from twinfer.core.op_time import OpTime
from twinfer.core.technique import Technique
from twinfer.core.work import Op, visible_pairs
from twinfer.plugins.op_time.calibration import (
    MIN_DRIFT,
    VERSION,
    Calibration,
    Curve,
    Fit,
    Format,
    GemmTable,
    Tables,
    weight_bits,
)

if TYPE_CHECKING:
    from twinfer.core.device import DeviceSpec
    from twinfer.core.spec import ModelSpec

RECORDED = 32
"""Tokens of a step up to which its kernels run as one recorded call (`core/runtime/replay.py`)."""
SHORT = 8
"""Queries of a row up to which attention cuts its keys, not its queries (`kernels/native/attention.cpp`)."""
ATTENTION_TERMS = (
    "call", "written", "short_row", "short_pair", "short_key", "lone_call", "lone_key", "long_row", "long_token",
    "long_pair", "long_key",
)  # fmt: skip
HOST_TERMS = ("step", "written", "small", "row", "token", "logit")
_OTHER_FORMAT = 0.15  # relative error of a time that was measured beside other linears, or on another KV dtype
_SIMILAR_BITS = 1.35  # ratio of stored bits up to which products are transferred


class Calibrated(Technique):
    name = "calibrated"
    summary = "op times interpolated in tables measured on this machine by `twinfer calibrate`"
    reference = "utilisation transfer: AIConfigurator (arXiv:2601.06288)"

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self._format: Format | None = None

    def for_model(self, model: ModelSpec) -> Calibrated:
        """This model of op times, asking tables of the format of `model` first."""
        found = Calibrated(self.options)
        found._format = Format.of(model)
        return found

    def time(self, op: Op, device: DeviceSpec) -> OpTime | None:
        known = lookup_of(device, self._format) if device.calibration else None
        return None if known is None else known.time(op, device.kind)


class Lookup:
    """A `Calibration` arranged for the ops of one format (None: of any, in the order of the file)."""

    def __init__(self, calibration: Calibration, of: Format | None = None) -> None:
        self.calibration = calibration
        self.tables = sorted(calibration.tables, key=lambda t: t.format.far(of)) if of else list(calibration.tables)
        self.exact = of is None or any(t.format == of for t in self.tables)
        self._kv = of.kv if of else None
        self._gemm: dict[tuple[str, float, int, int], tuple[GemmTable, Tables]] = {}
        for tables in self.tables:
            for gemm in tables.gemm:
                self._gemm.setdefault((gemm.dtype, gemm.bits, gemm.n, gemm.k), (gemm, tables))
        self._best: dict[tuple[str, float], tuple[float, float]] = {}

    def time(self, op: Op, kind: str = "cpu") -> OpTime | None:
        """`kind`: of the device; host copies of a CPU are elementwise."""
        if not self.tables:
            return None
        first = self.tables[0]
        if op.name in first.inside:
            return OpTime(0.0, 0.0, "measured", "its time is in that of the ops around it")
        if op.kind == "gemm":
            return self._grouped(op) if len(op.shape) > 3 else self._product(op)
        if op.kind == "attention":
            return self._attention(op)
        if op.kind in ("elementwise", "gather") or (op.kind == "host_copy" and kind == "cpu"):
            return self._elementwise(op)
        if op.kind == "host":
            return self._host(op)
        return None

    # --- products -----------------------------------------------------------------------------------

    def _product(self, op: Op) -> OpTime | None:
        m, n, k = op.shape
        bits = weight_bits(op)
        found = self._gemm.get((op.dtype, bits, n, k))
        if found is None:
            return self._transferred(m, n, k, op.dtype, bits)
        table, tables = found
        seconds, source = on_curve(table.m, table.seconds, m)
        # 3 %: interpolation between neighbouring m, seen on held-out m
        spread = table.spread if source == "measured" else math.hypot(table.spread, 0.03)
        if source == "extrapolated":
            spread = math.hypot(spread, 0.1)
        return _answer(tables, seconds, spread, source, f"[{m}, {k}] x [{k}, {n}] {bits:g}-bit {op.dtype}")

    def _transferred(self, m: int, n: int, k: int, dtype: str, bits: float) -> OpTime | None:
        """Utilisation of the nearest two measured shapes (distance in log2 n, log2 k), inverse-distance weighted."""
        alike = [
            (table, tables)
            for table, tables in self._gemm.values()
            if table.dtype == dtype and max(table.bits, bits) <= _SIMILAR_BITS * min(table.bits, bits)
        ]
        if not alike:
            return None

        def distance(t: GemmTable) -> float:
            return math.hypot(math.log2(n / t.n), math.log2(k / t.k), 4 * math.log2(max(bits, 1e-9) / t.bits))

        near = sorted(alike, key=lambda t: (distance(t[0]), t[0].n, t[0].k))[:2]
        weights = [1 / max(distance(t), 1e-6) for t, _ in near]
        use = sum(
            w * self._ideal(t, m, t.n, t.k, t.bits) / on_curve(t.m, t.seconds, m)[0]
            for w, (t, _) in zip(weights, near, strict=True)
        ) / sum(weights)
        table, tables = near[0]
        seconds = self._ideal(table, m, n, k, bits) / use
        spread = math.hypot(table.spread, 0.08 + 0.05 * min(distance(table), 4))
        names = " and ".join(f"({t.n}, {t.k})" for t, _ in near)
        return _answer(tables, seconds, spread, "transferred", f"utilisation {use:.0%} of the nearest shapes {names}")

    def _ideal(self, like: GemmTable, m: int, n: int, k: int, bits: float) -> float:
        """Seconds at the best FLOP/s and B/s that were measured in the format of `like`."""
        key = (like.dtype, like.bits)
        if key not in self._best:
            points = [
                (2 * t.n * t.k * x / s, t.moved(x, t.n, t.k) / s)
                for t, _ in self._gemm.values()
                if (t.dtype, t.bits) == key
                for x, s in zip(t.m, t.seconds, strict=True)
            ]
            self._best[key] = max(p[0] for p in points), max(p[1] for p in points)
        peak, bandwidth = self._best[key]
        moved = like.moved(m, n, k) + n * k * (bits - like.bits) / 8
        return max(2 * m * n * k / peak, moved / bandwidth)

    def _grouped(self, op: Op) -> OpTime | None:
        m, n, k = op.shape[:3]
        curve = self.tables[0].curves.get(grouped_name(op))
        if curve is None:
            return None
        seconds, source = on_curve(curve.x, curve.seconds, m)
        spread = math.hypot(curve.spread, 0.05 if source != "extrapolated" else 0.15)
        return _answer(self.tables[0], seconds, spread, source, f"{m} rows over groups of [{k}] x [{k}, {n}]")

    # --- everything else ----------------------------------------------------------------------------

    def _attention(self, op: Op) -> OpTime | None:
        fits = [t for t in self.tables if t.attention is not None and t.format.dtype == op.dtype]
        if not fits or not op.rows:
            return None
        same = next((t for t in fits if self._kv in (None, t.format.kv)), None)
        tables = same or fits[0]
        assert tables.attention is not None
        seconds, spread = dot(tables.attention.terms, attention_features(op)), tables.attention.spread
        detail = f"{len(op.rows)} rows; {tables.attention.num_points} measured points"
        if same is None:
            return _answer(
                tables,
                seconds,
                math.hypot(spread, 2 * _OTHER_FORMAT),
                "transferred",
                f"{detail} on KV in {tables.format.kv}",
            )
        return _answer(tables, seconds, spread, "fitted", detail)

    def _elementwise(self, op: Op) -> OpTime | None:
        for tables in self.tables:
            curve = tables.curves.get(op.name)
            if curve is not None and op.dtype in (tables.format.dtype, "float32"):
                seconds, source = on_curve(curve.x, curve.seconds, op.bytes)
                return self._beside(tables, seconds, curve.spread, source, f"{op.bytes / 1e6:.2f} MB")
        if not self.calibration.copy_bandwidth:
            return None
        seconds = op.bytes / self.calibration.copy_bandwidth
        detail = f"{op.bytes / 1e6:.2f} MB at the bandwidth of a copy"
        return _answer(self.tables[0], seconds, 0.3, "transferred", detail)

    def _host(self, op: Op) -> OpTime | None:
        tables = self.tables[0]
        if tables.host is None:
            return None
        features = host_features(*op.shape)
        seconds, spread = dot(tables.host.terms, features), tables.host.spread
        if tables.around is not None:
            seconds += dot(tables.around.terms, features)
        rows, tokens, logits = op.shape
        return self._beside(tables, seconds, spread, "fitted", f"{rows} rows, {tokens} tokens, {logits} logits")

    def _beside(self, tables: Tables, seconds: float, spread: float, source: str, detail: str) -> OpTime:
        """An answer that depends a little on the linears it was measured beside."""
        if self.exact:
            return _answer(tables, seconds, spread, source, detail)
        return _answer(
            tables, seconds, math.hypot(spread, _OTHER_FORMAT), "transferred", f"{detail}, beside {tables.format}"
        )  # fmt: skip


def _answer(tables: Tables, seconds: float, spread: float, source: str, detail: str) -> OpTime:
    seconds *= tables.level
    drift = max(MIN_DRIFT, tables.drift)
    return OpTime(seconds, math.hypot(spread, drift, tables.level_spread) * seconds, source, detail)


def attention_features(op: Op) -> dict[str, float]:
    """What one attention launch does, by `ATTENTION_TERMS`.

    Rows of up to SHORT queries are cut by keys and joined, longer ones go through blocks of queries that each read all
    keys before them. A lone short row cannot keep every thread busy (`lone_*`). `written`: the launch is not part of a
    recorded call. Pairs of query and key, and keys, are scaled by heads * head size in 1000s, so that a fit of one model
    serves another.
    """
    pairs = short_pairs = short_keys = long_pairs = long_keys = tokens = long_tokens = short = 0
    for queries, keys in op.rows:
        seen = visible_pairs(queries, keys)
        pairs += seen
        tokens += queries
        if queries <= SHORT:
            short += 1
            short_pairs += seen
            short_keys += keys
        else:
            long_tokens += queries
            long_pairs += seen
            long_keys += keys
    width = op.flops / pairs / 4000 if pairs else 0.0  # 4 FLOPs per pair, head and dimension
    lone = short == 1 == len(op.rows)
    return {
        "call": 1.0,
        "written": float(tokens > RECORDED),
        "short_row": float(short),
        "short_pair": width * short_pairs,
        "short_key": width * short_keys,
        "lone_call": float(lone),
        "lone_key": width * short_keys if lone else 0.0,
        "long_row": float(len(op.rows) - short),
        "long_token": width * long_tokens,
        "long_pair": width * long_pairs,
        "long_key": width * long_keys,
    }


def host_features(rows: float, tokens: float, logits: float) -> dict[str, float]:
    """What the host does for a step, by `HOST_TERMS`. `small`: a step that would be recorded were it not the only one of
    its shape, as prompts are; what calling its kernels one by one takes counts here."""
    return {
        "step": 1.0,
        "written": float(tokens > RECORDED),
        "small": float(rows < tokens <= RECORDED),
        "row": float(rows),
        "token": float(tokens),
        "logit": float(logits),
    }


def grouped_name(op: Op) -> str:
    """Name of the curve of a grouped product: its shapes are not those of another model."""
    return f"{op.name} {op.shape[1]}x{op.shape[2]}"


def dot(terms: Mapping[str, float], features: Mapping[str, float]) -> float:
    return sum(weight * features[name] for name, weight in terms.items())


def on_curve(xs: Sequence[float], seconds: Sequence[float], x: float) -> tuple[float, str]:
    """Seconds at `x`, linear between measured points, proportional above and flat below them."""
    i = bisect_left(xs, x)
    if i < len(xs) and xs[i] == x:
        return seconds[i], "measured"
    if i == 0:
        return seconds[0], "extrapolated"
    if i == len(xs):
        return seconds[-1] * x / xs[-1], "extrapolated"
    share = (x - xs[i - 1]) / (xs[i] - xs[i - 1])
    return seconds[i - 1] * (1 - share) + seconds[i] * share, "interpolated"


# --- device files ---------------------------------------------------------------------------------


def calibration_of(device: DeviceSpec) -> Calibration | None:
    """The device's calibration, None when it has none or one of an older version; ConfigError when it is malformed."""
    given = getattr(device, "calibration", None)
    if not given or is_outdated(device):
        return None
    cached = _read.get(id(given))
    if cached is not None and cached[0] is given:
        return cached[1]
    try:
        calibration = Calibration.model_validate(given)
    except ValidationError as error:
        wrong = first_mistake(error)
        raise ConfigError(
            "--device", device.name, f"its file has calibration.{wrong.told}, which {wrong.problem}",
            "repair that, or run `twinfer calibrate` again",
        ) from None  # fmt: skip
    for tables in calibration.tables:
        for fit, known in ((tables.attention, ATTENTION_TERMS), (tables.host, HOST_TERMS), (tables.around, HOST_TERMS)):
            if fit is not None and (odd := [term for term in fit.terms if term not in known]):
                raise ConfigError(
                    "--device", device.name, f"its file has a calibration with the term {odd[0]!r}, which is not known",
                    "run `twinfer calibrate` again",
                )  # fmt: skip
    _read[id(given)] = (given, calibration)
    return calibration


def is_outdated(device: DeviceSpec) -> bool:
    """Whether the device's tables are of a version that is not read any more."""
    version = (getattr(device, "calibration", None) or {}).get("version", VERSION)
    return type(version) is int and version < VERSION


def lookup_of(device: DeviceSpec, of: Format | None = None) -> Lookup | None:
    """The device's tables for models of one format; None when it has none."""
    calibration = calibration_of(device)
    if calibration is None:
        return None
    key = (id(calibration), of)
    cached = _lookups.get(key)
    if cached is None or cached[0] is not calibration:
        cached = _lookups[key] = (calibration, Lookup(calibration, of))
    return cached[1]


_read: dict[int, tuple[Any, Calibration]] = {}
_lookups: dict[tuple[int, Format | None], tuple[Calibration, Lookup]] = {}


def coverage(device: DeviceSpec, model: ModelSpec) -> str:
    """What the tables say of this model's format, in words; empty for a device without any."""
    if is_outdated(device):
        return "measured by an older version, not used: run `twinfer calibrate` again"
    calibration = calibration_of(device)
    if calibration is None:
        return ""
    of = Format.of(model)
    corrected = calibration.correction(model)
    words = [f"corrected by {corrected.source}"] if corrected else []
    if calibration.tables and not any(t.format == of for t in calibration.tables):
        words.append(f"{of} was not calibrated: products are transferred or analytic")
    return "; ".join(words)


def jitter_of(device: DeviceSpec, model: ModelSpec) -> float:
    """Relative standard deviation of one step of this model against its neighbours in time; 0 where not measured."""
    found = lookup_of(device, Format.of(model))
    return found.tables[0].jitter if found is not None and found.tables else 0.0


def recording_of(device: DeviceSpec, model: ModelSpec) -> tuple[float, float] | None:
    """Seconds that the first and the second step of a shape take longer; None where passes are not recorded."""
    found = lookup_of(device, Format.of(model))
    if found is None or not found.tables or not found.tables[0].recorded:
        return None
    first = found.tables[0]
    return first.written * first.level, first.recorded * first.level


__all__ = [
    "ATTENTION_TERMS", "HOST_TERMS", "Calibrated", "Calibration", "Curve", "Fit", "Format", "GemmTable", "Lookup",
    "Tables", "attention_features", "calibration_of", "coverage", "dot", "grouped_name", "host_features", "is_outdated",
    "jitter_of", "lookup_of", "on_curve", "recording_of",
]  # fmt: skip
