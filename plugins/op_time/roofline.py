"""Analytic op times: peaks of the device file, bent by efficiency curves where the file has them.

    gemm, experts  t = t0 + ((F / (ec * peak))^p + (bytes / (em * BW))^p)^(1/p)
    attention    t = t0 + prefill pairs at an efficiency that grows with context
                        + decode keys at an efficiency that grows with the bytes of KV
    elementwise  t = t0 + bytes / (em * BW)
    comm         t = t0 + what a rank sends / (em * link), within nodes and between them (`wires.py`)
    scan         t = t0 + max(FLOPs / (ec * peak), bytes / (em * BW))
    host_copy    t = bytes / (em * host link); on a CPU it is elementwise
    host         t = const + per row

Curves come from `efficiency` of the device file (names: `Curves`). Without them every efficiency is 1
and every overhead 0: a lower bound on time, labelled `upper bound` (of speed).

Invariants
* Every answer says whether it is `analytic` (curves known) or an `upper bound`.
* Monotone: more FLOPs or bytes never take less time, as long as the efficiency tables are monotone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from twinfer.core import technique
from twinfer.core.dtypes import dtype_bytes
from twinfer.core.errors import ConfigError
from twinfer.core.mistakes import first_mistake
from twinfer.core.op_time import OpTime
from twinfer.core.technique import Technique
from twinfer.core.work import MoEShape, Op, counted, visible_pairs
from twinfer.plugins.op_time.wires import network_hops, wire_seconds

if TYPE_CHECKING:
    from twinfer.core.device import DeviceSpec

# Hardware without FP8 or INT8 units widens the operands and computes in 16 bit.
_FALLBACK = {"float16": "bfloat16", "bfloat16": "float16", "fp8_e5m2": "fp8", "fp8": "bfloat16", "int8": "bfloat16"}


class GemmCurve(BaseModel):
    """Constants of the gemm formula for one dtype."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    overhead: float = Field(ge=0, le=60, description="s per launch")
    compute: float = Field(gt=0, le=1, description="share of peak FLOP/s at large m")
    memory: float = Field(gt=0, le=1, description="share of memory bandwidth at m = 1")
    power: float = Field(ge=1, description="sharpness of the knee; inf is a plain roofline")


def _rising(points: tuple[tuple[float, float], ...]) -> tuple[tuple[float, float], ...]:
    if any(a[0] >= b[0] for a, b in itertools.pairwise(points)):
        raise ValueError("has points whose x do not rise")
    return points


_Positive = Annotated[float, Field(gt=0)]
Points = Annotated[tuple[tuple[_Positive, Annotated[float, Field(gt=0, le=1)]], ...], AfterValidator(_rising)]


class Curves(BaseModel):
    """The `efficiency` part of a device file: where this device stays below its peaks.

    Tables are (x, efficiency) points, interpolated in log2(x) and flat beyond their ends.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    gemm: dict[str, GemmCurve] = Field(default_factory=dict)
    experts: dict[str, GemmCurve] = Field(default_factory=dict)  # routing to weighted sum; of `gemm` where absent
    attention_overhead: float = Field(default=0.0, ge=0, le=60)
    attention_compute: Points = ()  # (context in tokens, share of peak FLOP/s)
    attention_memory: Points = ()  # (KV bytes per launch, share of bandwidth)
    elementwise_overhead: float = Field(default=0.0, ge=0, le=60)
    elementwise_memory: float = Field(default=1.0, gt=0, le=1)
    comm_overhead: float = Field(default=0.0, ge=0, le=60)
    comm_link: float = Field(default=1.0, gt=0, le=1)
    comm_network: float = Field(default=0.85, gt=0, le=1)
    scan_compute: float = Field(default=1.0, gt=0, le=1)
    host_link: float = Field(default=1.0, gt=0, le=1)
    host_step: float = Field(default=0.0, ge=0, le=60)
    host_row: float = Field(default=0.0, ge=0, le=60)
    sigma: float = Field(default=0.15, ge=0, le=1, description="relative standard deviation of op times")


class Roofline(Technique):
    name = "roofline"
    summary = "analytic op times from the device's peaks and efficiency curves"
    reference = "Williams, Waterman, Patterson: Roofline, CACM 52(4), 2009"

    class Options(technique.Options):
        unknown_sigma: float = Field(
            default=0.5, ge=0, le=1, description="relative error assumed for devices without efficiency curves"
        )

    def time(self, op: Op, device: DeviceSpec) -> OpTime | None:
        curves = curves_of(device)
        known = curves is not None
        curves = curves or Curves(comm_network=1.0)
        parts = self._parts(op, device, curves)
        if parts is None:
            return None
        seconds, detail = parts
        sigma = (curves.sigma if known else self.options.unknown_sigma) * seconds
        return OpTime(seconds, sigma, "analytic" if known else "upper bound", detail)

    def _parts(self, op: Op, device: DeviceSpec, curves: Curves) -> tuple[float, str] | None:
        bandwidth = device.memory_bandwidth
        if op.kind == "host":
            rows = op.shape[0]
            seconds = curves.host_step + curves.host_row * rows
            return seconds, f"{curves.host_step * 1e6:.0f} us a step + {curves.host_row * 1e6:.1f} us x {rows} rows"
        if op.kind == "gemm":
            grouped = isinstance(op.of, MoEShape)
            curve = pick(curves.experts, op.dtype) if grouped else None
            curve = curve or gemm_curve(curves, device, op.dtype)
            peak = peak_flops(device, op.dtype)
            if curve is None:
                seconds = max(op.flops / peak, op.bytes / bandwidth)
                return seconds, _bound(op, peak, bandwidth)
            compute = op.flops / (curve.compute * peak)
            memory = op.bytes / (curve.memory * bandwidth)
            return curve.overhead + _soft_max(compute, memory, curve.power), _bound(op, peak, bandwidth)
        if op.kind == "attention":
            return attention_seconds(op, device, curves)
        if op.kind == "comm":
            busy, words = wire_seconds(op, device, curves.comm_link, curves.comm_network)
            waits = network_hops(op, device) * (device.network_latency or 0.0)
            return curves.comm_overhead + waits + busy, words
        if op.kind == "scan":
            memory = op.bytes / (curves.elementwise_memory * bandwidth)
            compute = op.flops / (curves.scan_compute * peak_flops(device, op.dtype))
            return curves.elementwise_overhead + max(
                memory, compute
            ), f"{op.flops / 1e9:.2f} GFLOP, {op.bytes / 1e6:.2f} MB"
        if op.kind == "host_copy" and device.kind != "cpu":
            link = device.host_link_bandwidth
            if not link:
                raise ConfigError(
                    "--device", device.name, f"{op.name} moves {op.comm_bytes:.0f} bytes to or from host memory, "
                    "but how fast is not known", "use --preemption recompute, or a device file with host_link_bandwidth",
                )  # fmt: skip
            return op.comm_bytes / (curves.host_link * link), f"{op.comm_bytes / 1e6:.2f} MB over {link / 1e9:.0f} GB/s"
        if isinstance(op.of, MoEShape) and pick(curves.experts, op.of.dtype) is not None:
            return 0.0, "part of the experts' curve"
        seconds = curves.elementwise_overhead + op.bytes / (curves.elementwise_memory * bandwidth)
        return seconds, f"{op.bytes / 1e6:.2f} MB over {bandwidth / 1e9:.0f} GB/s"


def attention_seconds(op: Op, device: DeviceSpec, curves: Curves) -> tuple[float, str]:
    """Attention over a mixed batch: decode rows are limited by KV reads, the others by pairs."""
    peak, bandwidth = peak_flops(device, op.dtype), device.memory_bandwidth
    pairs = keys = decode_keys = more_queries = 0
    prompts = []
    for (queries, total), rows in sorted(counted(op.rows).items()):
        keys += rows * total
        if queries == 1:
            decode_keys += rows * total
        else:
            seen = visible_pairs(queries, total)
            pairs += rows * seen
            more_queries += rows * (queries - 1)
            prompts.append((rows, queries, total, seen))
    pairs += decode_keys
    if not pairs:
        return curves.attention_overhead, "no rows"
    flops_a_pair = op.flops / pairs
    seconds = curves.attention_overhead
    words = []
    if decode_keys:
        size = op.bytes * decode_keys / keys
        reading, share = _kv_read(curves, bandwidth, size)
        seconds += max(reading, flops_a_pair * decode_keys / peak)
        words.append(f"{size / 1e6:.1f} MB of KV at {share:.0%} of {bandwidth / 1e9:.0f} GB/s")
    for rows, queries, total, seen in prompts:
        share = on_curve(curves.attention_compute, math.sqrt(2 * seen))
        seconds += rows * flops_a_pair * seen / (share * peak)
        if len(words) < 3:
            words.append(f"{rows} x {queries} queries on {total} keys at {share:.0%} of peak")
    if prompts:  # few queries, as where guesses are checked, read the KV that one would
        more = more_queries * op.shape[0] * (op.shape[2] + op.shape[3]) * dtype_bytes(op.dtype)
        reading, _ = _kv_read(curves, bandwidth, max(0.0, op.bytes - more))
        seconds = max(seconds, curves.attention_overhead + reading)
    return seconds, "; ".join(words)


def _kv_read(curves: Curves, bandwidth: float, size: float) -> tuple[float, float]:
    """(seconds to read `size` bytes of KV, efficiency): where that grows faster than the size, seconds of the point below."""
    share, seconds = on_curve(curves.attention_memory, size), 0.0
    for x, y in curves.attention_memory:
        if x < size:
            seconds = max(seconds, x / y)
    return max(seconds, size / share) / bandwidth, share


def curves_of(device: DeviceSpec) -> Curves | None:
    """The curves of the device file, None when it has none; ConfigError when they are malformed."""
    given: Mapping[str, Any] | None = getattr(device, "efficiency", None)
    if not given:
        return None
    key = id(given)
    cached = _curves.get(key)
    if cached is not None and cached[0] is given:
        return cached[1]
    try:
        curves = Curves.model_validate(given)
    except ValidationError as error:
        wrong = first_mistake(error)
        raise ConfigError(
            "--device", device.name, f"its file has efficiency.{wrong.told}, which {wrong.problem}", wrong.fix
        ) from None
    _curves[key] = (given, curves)
    return curves


_curves: dict[int, tuple[Mapping[str, Any], Curves]] = {}


def on_curve(points: Sequence[tuple[float, float]], x: float) -> float:
    """Efficiency at `x`, interpolated in log2(x); 1 for an empty table."""
    if not points:
        return 1.0
    if x <= points[0][0]:
        return points[0][1]
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if x <= x1:
            return y0 + (y1 - y0) * math.log2(x / x0) / math.log2(x1 / x0)
    return points[-1][1]


def peak_flops(device: DeviceSpec, dtype: str) -> float:
    """Peak FLOP/s for `dtype`, or for the format its kernels compute in."""
    peaks = device.peak_flops
    found = pick(peaks, dtype)
    if found is None:
        found = peaks.get("bfloat16") or peaks.get("float16") or max(peaks.values())
    return float(found)


def gemm_curve(curves: Curves, device: DeviceSpec, dtype: str) -> GemmCurve | None:
    """Constants of products in `dtype`: of FP4 without any of its own those of FP8, or of 16 bits where a device has no
    FP4 units and computes in them. FP8 without units of its own is computed in 16 bits, too."""
    if dtype == "fp8" and dtype not in device.peak_flops:
        dtype = "bfloat16"
    found: GemmCurve | None = pick(curves.gemm, dtype)
    if found is None and dtype == "fp4":
        found = pick(curves.gemm, "fp8" if dtype in device.peak_flops else "bfloat16")
    return found


def pick(table: Mapping[str, Any], dtype: str) -> Any:
    """Entry of `dtype` or of the format that runs at the same rate, else None."""
    if dtype in table:
        return table[dtype]
    return table.get(_FALLBACK.get(dtype, ""))


def _soft_max(a: float, b: float, power: float) -> float:
    top = max(a, b)
    if top <= 0 or math.isinf(power):
        return top
    return top * (1 + (min(a, b) / top) ** power) ** (1 / power)


def _bound(op: Op, peak: float, bandwidth: float) -> str:
    side = "compute" if op.flops / peak > op.bytes / bandwidth else "memory"
    return f"{side}-bound: {op.flops / 1e9:.2f} GFLOP, {op.bytes / 1e6:.2f} MB"
