"""The blocks of a GGUF file, multiplied as they are stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from twinfer.core.dtypes import dtype_bits
from twinfer.core.technique import Needs, Technique
from twinfer.core.work import Op
from twinfer.plugins.quantizer.served import engine_reasons
from twinfer.plugins.quantizer.what_if import quantized_inputs

if TYPE_CHECKING:
    import torch

    from twinfer.core.runtime.linear import LinearFactory
    from twinfer.core.spec import ModelSpec
    from twinfer.core.work import StepShape

HELD_BITS = {
    "Q4_0": 4.5, "Q4_1": 5.0, "Q8_0": 8.5, "Q4_K": 6.0, "Q5_0": 10.0, "Q5_1": 10.0, "Q5_K": 10.0, "Q6_K": 10.0,
}  # fmt: skip
"""Bits per weight, scales included, of the types that the kernels take (`kernels/native/gemm_blocks.cpp`)."""


class GGUF(Technique):
    name = "gguf"
    summary = "The blocks of a GGUF file as they are, multiplied in int8: activations are rounded per block of 32"
    reference = "GGUF block formats (ggml-common.h)"

    @classmethod
    def why_not(cls, needs: Needs) -> list[str]:
        reasons = engine_reasons(cls.name, needs)
        if needs.model is not None and not _stored(needs.model, "stored_linears"):
            reasons.append("gguf runs the blocks of a GGUF file, and this model is none; give a .gguf file")
        return reasons

    def adapt_model(self, model: ModelSpec) -> ModelSpec:
        linears = _stored(model, "stored_linears")
        return replace(
            model,
            weight_bits=_bits(linears, model.dtype),
            other_weight_bits=_bits(_stored(model, "stored_others"), model.dtype),
            linear_dtype="int8" if any(kind in HELD_BITS for kind in linears) else "",
            expert_bits=None,
            expert_dtype="",
        )

    def adapt_ops(self, ops: Sequence[Op], model: ModelSpec, shape: StepShape) -> Sequence[Op]:
        return quantized_inputs(ops, "int8", model.dtype) if model.linear_dtype == "int8" else ops

    def linear(self, model: ModelSpec, device: torch.device) -> LinearFactory:
        """Packs the file's blocks; other types run as float32."""
        from twinfer.core.runtime.quantized_linear import GGUFLinears

        return GGUFLinears()


def _stored(model: ModelSpec, key: str) -> Mapping[str, int]:
    found = model.extra.get(key)
    return found if isinstance(found, Mapping) else {}


def _bits(values: Mapping[str, int], dtype: str) -> float:
    """Average bits of what the engine holds: types without a kernel as `dtype`."""
    total = sum(values.values())
    wide = float(dtype_bits(dtype))
    if not total:
        return wide
    return sum(HELD_BITS.get(kind, wide) * count for kind, count in values.items()) / total
