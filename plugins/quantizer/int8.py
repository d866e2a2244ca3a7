"""INT8 weights with a scale per output channel, and activations with a scale per token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydantic import Field

from twinfer.core.work import Op
from twinfer.plugins.quantizer.what_if import (
    KVOption,
    WhatIf,
    grouped_bits,
    quantized_inputs,
    with_kv,
    with_weights,
)

if TYPE_CHECKING:
    from twinfer.core.spec import ModelSpec
    from twinfer.core.work import StepShape


class Int8(WhatIf):
    name = "int8"
    summary = "8-bit integer weights and activations (W8A8), or weights only"
    reference = "Xiao et al.: SmoothQuant (arXiv:2211.10438)"

    class Options(KVOption):
        activations: bool = Field(default=True, description="compute in INT8 too; false stores weights only")

    options: Options

    def adapt_model(self, model: ModelSpec) -> ModelSpec:
        bits = grouped_bits(8, model.hidden_size, False, model.hidden_size)
        return with_kv(with_weights(model, bits, "int8" if self.options.activations else ""), self.options.kv)

    def adapt_ops(self, ops: Sequence[Op], model: ModelSpec, shape: StepShape) -> Sequence[Op]:
        return quantized_inputs(ops, "int8", model.dtype) if self.options.activations else ops
