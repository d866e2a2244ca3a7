"""FP8 (E4M3) weights, and activations where the device has FP8 units."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from twinfer.core.work import Op
from twinfer.plugins.quantizer.what_if import (
    FIXED_SCALE_FLOPS,
    TOKEN_SCALE_FLOPS,
    KVOption,
    WhatIf,
    quantized_inputs,
    with_kv,
    with_weights,
)

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
        scales: Literal["tensor", "channel", "block"] = Field(
            default="tensor", description="one scale a tensor, a float32 per output channel, or one per 128 x 128"
        )
        activation_scales: Literal["dynamic", "static"] = Field(
            default="dynamic", description="found for every token as it comes, or fixed by a calibration before"
        )

    options: Options

    def adapt_model(self, model: ModelSpec) -> ModelSpec:
        scales = {"tensor": 0.0, "channel": 32 / model.hidden_size, "block": 32 / BLOCK**2}[self.options.scales]
        return with_kv(
            with_weights(model, 8 + scales, "fp8" if self.options.activations else ""), self.options.kv
        )  # fmt: skip

    def adapt_ops(self, ops: Sequence[Op], model: ModelSpec, shape: StepShape) -> Sequence[Op]:
        if not self.options.activations:
            return ops
        flops = FIXED_SCALE_FLOPS if self.options.activation_scales == "static" else TOKEN_SCALE_FLOPS
        return quantized_inputs(ops, "fp8", model.dtype, flops)
