"""What number formats would do to memory and work, before their real kernels exist.

Invariants
* Only block linears and the KV cache change; embeddings, head and norms stay as they are.
* Scales (and zero points) are counted with the weights they belong to.
* The engine is refused with a reason; the simulator may use everything here.
* Work that a format adds is an op of its own: `quantize_input` (activations narrowed), `dequantize` (weights widened
  to 16 bits before a product of many rows), `reorder_input` (activations put in the order of the weights).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from twinfer.core.dtypes import dtype_bytes
from twinfer.core.technique import Needs, Options, Technique
from twinfer.core.work import Op

if TYPE_CHECKING:
    from twinfer.core.spec import ModelSpec

SCALE_BITS = 16  # scales are stored in float16
KV_GROUP = 32  # values that share a scale in 4-bit KV, as in GGUF's Q4_0
FP4_KV_GROUP = 16  # values that share an FP8 scale in NVFP4
TOKEN_SCALE_FLOPS = 4.0  # per element: largest absolute value, then scale and round
FIXED_SCALE_FLOPS = 2.0  # per element: scale and round
DEQUANTIZE_FLOPS = 2.0  # per weight: subtract the zero point, scale
WIDE_GEMMS = ("lm_head", "router")
"""Products whose weights stay in the activations' dtype, whatever the format of the block linears."""

KVFormat = Literal["", "fp8", "int8", "int4", "fp4"]


class KVOption(Options):
    """kv: also store the KV cache in this format; empty leaves it alone."""

    kv: KVFormat = Field(default="", description="format of the KV cache, empty to leave it alone")


class WhatIf(Technique):
    """Base of analytic formats."""

    @classmethod
    def why_not(cls, needs: Needs) -> list[str]:
        if needs.world != "engine":
            return []
        return [
            f"{cls.name} has no real implementation yet; the simulator can use it "
            f"(`twinfer simulate --quant {cls.name}`, `twinfer memory --quant {cls.name}`)"
        ]


def with_weights(model: ModelSpec, bits: float, linear_dtype: str = "") -> ModelSpec:
    """Block linears stored in `bits` per weight, computing in `linear_dtype` ("" for the activations' dtype)."""
    return replace(model, weight_bits=bits, linear_dtype=linear_dtype, expert_bits=None, expert_dtype="")


def with_experts(model: ModelSpec, bits: float, expert_dtype: str = "") -> ModelSpec:
    """Routed experts stored in `bits` per weight, computing in `expert_dtype`; the other linears as they are.

    A model without experts is returned as it is.
    """
    if model.moe is None:
        return model
    routed = model.num_moe_layers * model.moe.num_experts * model.expert_params()
    whole, others = model.block_params(), model.linear_bits
    average = (routed * bits + (whole - routed) * others) / whole
    same = expert_dtype == model.linear_dtype
    return replace(
        model, weight_bits=average, expert_bits=bits, expert_dtype="" if same else expert_dtype or model.dtype
    )


def with_kv(model: ModelSpec, kv: str, group: int = 0, zero_point: bool = False) -> ModelSpec:
    """The KV cache in `kv`: fp8 with one scale per tensor, int8 with one per token and head, int4 with one per 32 values,
    fp4 (NVFP4) with an FP8 scale per 16.

    group: values of a vector that share a scale instead, 0 for those defaults.  zero_point: an offset of the same size
    beside every scale.
    """
    if not kv:
        return model
    width = max(model.kv_shape()[1:])
    size = group or {"fp8": 0, "int8": width, "int4": KV_GROUP, "fp4": FP4_KV_GROUP}[kv]
    scales = -(-width // size) if size else 0
    one = (8 if kv == "fp4" else SCALE_BITS) / 8 * (2 if zero_point else 1)
    return replace(model, kv_dtype=kv, kv_scale_bytes=scales * one)


def grouped_bits(bits: int, group_size: int, zero_point: bool, width: int) -> float:
    """Stored bits per weight with a scale (and a zero point of `bits`) per group along an input of `width`."""
    groups = -(-width // group_size)
    return bits + (SCALE_BITS + (bits if zero_point else 0)) * groups / width


def quantized_inputs(ops: Sequence[Op], dtype: str, act_dtype: str, flops: float = TOKEN_SCALE_FLOPS) -> list[Op]:
    """`ops` with inputs of the linears that compute in `dtype` narrowed first, by one elementwise op each.

    flops: per element; a scale per token needs a pass for the largest value, a fixed one does not.
    """
    found: list[Op] = []
    wide, narrow = dtype_bytes(act_dtype), dtype_bytes(dtype)
    for op in ops:
        if op.kind in ("gemm", "grouped_gemm") and op.dtype == dtype:
            m, k = op.shape[0], op.shape[2]
            size = m * k
            found.append(
                Op(
                    "quantize_input",
                    "elementwise",
                    flops * size,
                    size * wide,
                    size * narrow,
                    dtype,
                    op.count,
                    (m, k),
                )
            )
            op = replace(op, bytes_read=op.bytes_read - size * (wide - narrow))
        found.append(op)
    return found


def dequantized_weights(ops: Sequence[Op], model: ModelSpec, rows: int) -> list[Op]:
    """`ops` with weights of block linears widened to the activations' dtype first, by one op each, where a product has
    at least `rows` rows: the stored weights are read once, the wide ones written and read."""
    found: list[Op] = []
    wide = dtype_bytes(model.dtype)
    for op in ops:
        weights = _weights(op)
        if weights and op.shape[0] >= rows:
            stored = weights * (model.routed_bits if op.name == "experts" else model.linear_bits) / 8
            found.append(
                Op("dequantize", "elementwise", DEQUANTIZE_FLOPS * weights, stored, weights * wide, model.dtype, op.count,
                   (op.shape[1], op.shape[2]))
            )  # fmt: skip
            op = replace(op, bytes_read=op.bytes_read - stored + weights * wide)
        found.append(op)
    return found


def reordered_inputs(ops: Sequence[Op], model: ModelSpec) -> list[Op]:
    """`ops` with the inputs of block linears gathered into another order first."""
    return [new for op in ops for new in _reordered(op, dtype_bytes(model.dtype), model.dtype)]


def _reordered(op: Op, size: float, dtype: str) -> Iterator[Op]:
    if _weights(op):
        m, k = op.shape[0], op.shape[2]
        yield Op("reorder_input", "gather", 0.0, m * k * size, m * k * size, dtype, op.count, (m, k))
    yield op


def _weights(op: Op) -> int:
    """Weights that a product of a block linear reads, 0 for any other op."""
    if op.kind not in ("gemm", "grouped_gemm") or op.name in WIDE_GEMMS:
        return 0
    groups = op.shape[3] if len(op.shape) > 3 else 1
    return int(op.shape[1] * op.shape[2] * groups)
