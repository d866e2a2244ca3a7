"""FP8 (E4M3) weights, and activations where the device has FP8 units."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from twinfer.core.work import Op
from twinfer.plugins.quantizer.what_if import KVOption, WhatIf, quantized_inputs, with_kv, with_weights

if TYPE_CHECKING:
    from twinfer.core.spec import ModelSpec
    from twinfer.core.work import StepShape

BLOCK = 128  # DeepSeek-V3 (arXiv:2412.19437): one float32 scale per 128 x 128 weights


class FP8(WhatIf):
    name = "fp8"
    summary = "8-bit float weights and activations: half the weight bytes, twice the peak on Hopper and later"
    reference = "Micikevicius et al.: FP8 Formats for Deep Learning (arXiv:2209.05433)"

    class Options(KVOption):
        activations: bool = Field(default=True, description="compute in FP8 too; false stores weights only")
        scales: Literal["tensor", "block"] = Field(default="tensor", description="one scale a tensor, or per 128 x 128")

    options: Options

    def adapt_model(self, model: ModelSpec) -> ModelSpec:
        bits = 8 + (32 / BLOCK**2 if self.options.scales == "block" else 0.0)
        return with_kv(with_weights(model, bits, "fp8" if self.options.activations else ""), self.options.kv)

    def adapt_ops(self, ops: Sequence[Op], model: ModelSpec, shape: StepShape) -> Sequence[Op]:
        return quantized_inputs(ops, "fp8", model.dtype) if self.options.activations else ops
