"""What number formats would do to memory and work, before their real kernels exist.

Invariants
* Only block linears and the KV cache change; embeddings, head and norms stay as they are.
* Scales (and zero points) are counted with the weights they belong to.
* The engine is refused with a reason; the simulator may use everything here.
"""

from __future__ import annotations

from collections.abc import Sequence
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

KVFormat = Literal["", "fp8", "int8", "int4"]


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
    return replace(model, weight_bits=bits, linear_dtype=linear_dtype)


def with_kv(model: ModelSpec, kv: str) -> ModelSpec:
    """The KV cache in `kv`: fp8 with one scale per tensor, int8 with one per token and head, int4 with one per 32 values."""
    if not kv:
        return model
    width = max(model.kv_shape()[1:])
    scales = {"fp8": 0, "int8": 1, "int4": -(-width // KV_GROUP)}[kv]
    return replace(model, kv_dtype=kv, kv_scale_bytes=scales * SCALE_BITS / 8)


def grouped_bits(bits: int, group_size: int, zero_point: bool, width: int) -> float:
    """Stored bits per weight with a scale (and a zero point of `bits`) per group along an input of `width`."""
    groups = -(-width // group_size)
    return bits + (SCALE_BITS + (bits if zero_point else 0)) * groups / width


def quantized_inputs(ops: Sequence[Op], dtype: str, act_dtype: str) -> list[Op]:
    """`ops` with inputs of the linears that compute in `dtype` narrowed first, by one elementwise op each."""
    found: list[Op] = []
    wide, narrow = dtype_bytes(act_dtype), dtype_bytes(dtype)
    for op in ops:
        if op.kind == "gemm" and op.dtype == dtype:
            m, k = op.shape[0], op.shape[2]
            size = m * k
            # one pass for the largest absolute value, one to scale and round
            found.append(
                Op("quantize_input", "elementwise", 4.0 * size, size * wide, size * narrow, act_dtype, op.count, (m, k))
            )
            op = replace(op, bytes_read=op.bytes_read - size * (wide - narrow))
        found.append(op)
    return found
