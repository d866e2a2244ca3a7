"""INT4 weights in groups by plain rounding, computing in 16 bits or, with narrow activations, in 8."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from twinfer.core.work import Op
from twinfer.plugins.quantizer.what_if import KVOption, WhatIf, grouped_bits, quantized_inputs, with_kv, with_weights

if TYPE_CHECKING:
    from twinfer.core.spec import ModelSpec
    from twinfer.core.work import StepShape


class Int4(WhatIf):
    name = "int4"
    summary = "4-bit weights with a scale per group; the arithmetic stays in 16 bits, so only weight reads shrink"
    reference = (
        "Dettmers, Zettlemoyer: k-bit Inference Scaling Laws (arXiv:2212.09720); W4A8: QServe (arXiv:2405.04532)"
    )

    class Options(KVOption):
        group_size: int = Field(default=128, ge=16, le=4096, description="weights of one input row that share a scale")
        zero_point: bool = Field(default=False, description="asymmetric: a 4-bit zero point per group too")
        activations: Literal["", "int8", "fp8"] = Field(
            default="", description="also narrow activations to 8 bits and compute in them (W4A8); empty leaves them"
        )

    options: Options

    def adapt_model(self, model: ModelSpec) -> ModelSpec:
        bits = grouped_bits(4, self.options.group_size, self.options.zero_point, model.hidden_size)
        return with_kv(with_weights(model, bits, self.options.activations), self.options.kv)

    def adapt_ops(self, ops: Sequence[Op], model: ModelSpec, shape: StepShape) -> Sequence[Op]:
        narrow = self.options.activations
        return quantized_inputs(ops, narrow, model.dtype) if narrow else ops
