"""4-bit floats with a scale per small block: NVFP4 and MXFP4.

A device without FP4 units computes them in 16 bits; say `activations=false` for it, as its kernels leave activations
wide.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from twinfer.core.errors import ConfigError
from twinfer.core.work import Op
from twinfer.plugins.quantizer.what_if import KVOption, WhatIf, quantized_inputs, with_experts, with_kv, with_weights

if TYPE_CHECKING:
    from twinfer.core.spec import ModelSpec
    from twinfer.core.work import StepShape

NVFP4_BITS = 4 + 8 / 16  # an FP8 scale per 16 values, and one float32 per tensor
MXFP4_BITS = 4 + 8 / 32  # a power of two per 32 values


class NVFP4(WhatIf):
    name = "nvfp4"
    summary = "4-bit float weights and activations with an FP8 scale per 16 values: Blackwell's fastest format"
    reference = "NVIDIA: Pretraining Large Language Models with NVFP4 (arXiv:2509.25149)"

    class Options(KVOption):
        activations: bool = Field(default=True, description="compute in FP4 too; false stores weights only")
        experts_only: bool = Field(default=False, description="only routed experts; a model must have them")

    options: Options

    def adapt_model(self, model: ModelSpec) -> ModelSpec:
        computes = "fp4" if self.options.activations else ""
        return with_kv(_narrowed(model, NVFP4_BITS, computes, self.options.experts_only, self.name), self.options.kv)

    def adapt_ops(self, ops: Sequence[Op], model: ModelSpec, shape: StepShape) -> Sequence[Op]:
        return quantized_inputs(ops, "fp4", model.dtype) if self.options.activations else ops


class MXFP4(WhatIf):
    name = "mxfp4"
    summary = "4-bit float weights with a power of two per 32 values, as GPT-OSS stores its experts"
    reference = "Open Compute Project: Microscaling Formats (MX) v1.0; Rouhani et al. (arXiv:2310.10537)"

    class Options(KVOption):
        activations: Literal["", "fp8", "fp4"] = Field(
            default="", description="also narrow activations and compute in that format; empty leaves them"
        )
        experts_only: bool = Field(default=False, description="only routed experts; a model must have them")

    options: Options

    def adapt_model(self, model: ModelSpec) -> ModelSpec:
        narrow = _narrowed(model, MXFP4_BITS, self.options.activations, self.options.experts_only, self.name)
        return with_kv(narrow, self.options.kv)

    def adapt_ops(self, ops: Sequence[Op], model: ModelSpec, shape: StepShape) -> Sequence[Op]:
        narrow = self.options.activations
        return quantized_inputs(ops, narrow, model.dtype) if narrow else ops


def _narrowed(model: ModelSpec, bits: float, computes: str, experts_only: bool, name: str) -> ModelSpec:
    if not experts_only:
        return with_weights(model, bits, computes)
    if model.moe is None:
        raise ConfigError(f"--quant {name}:experts_only", True, f"{model.name} has no experts", "leave it out")
    return with_experts(model, bits, computes)
