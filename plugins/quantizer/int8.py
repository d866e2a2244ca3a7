"""INT8 weights with a scale per output channel, and activations with a scale per token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from pydantic import Field

from twinfer.core.dtypes import dtype_bits
from twinfer.core.errors import ConfigError
from twinfer.core.technique import Needs
from twinfer.core.work import Op
from twinfer.plugins.quantizer.served import engine_reasons
from twinfer.plugins.quantizer.what_if import (
    KVOption,
    WhatIf,
    grouped_bits,
    quantized_inputs,
    with_kv,
    with_weights,
)

if TYPE_CHECKING:
    import torch

    from twinfer.core.runtime.linear import LinearFactory
    from twinfer.core.spec import ModelSpec
    from twinfer.core.work import StepShape


class Int8(WhatIf):
    name = "int8"
    summary = "8-bit integer weights and activations (W8A8), or weights only"
    reference = "Xiao et al.: SmoothQuant (arXiv:2211.10438)"

    class Options(KVOption):
        activations: bool = Field(default=True, description="compute in INT8 too; false stores weights only")
        head: bool = Field(default=False, description="also the LM head (and the token table where they are one)")

    options: Options

    def adapt_model(self, model: ModelSpec) -> ModelSpec:
        bits = grouped_bits(8, model.hidden_size, False, model.hidden_size)
        if self.options.head:
            others, head = model.other_params(), model.vocab_size * model.hidden_size
            wide = dtype_bits(model.dtype)
            model = replace(model, other_weight_bits=(bits * head + wide * (others - head)) / others)
        return with_kv(with_weights(model, bits, "int8" if self.options.activations else ""), self.options.kv)

    @classmethod
    def why_not(cls, needs: Needs) -> list[str]:
        return engine_reasons(cls.name, needs)

    def linear(self, model: ModelSpec, device: torch.device) -> LinearFactory:
        """Packs the block linears. ConfigError for weights alone: its kernels compute in int8."""
        from twinfer.core.runtime.quantized_linear import Int8Linears

        if not self.options.activations:
            raise ConfigError(
                "--quant int8:activations", False, "the engine multiplies int8 weights by int8 activations only",
                "leave it out, or simulate it",
            )  # fmt: skip
        return Int8Linears(self.options.head)

    def adapt_ops(self, ops: Sequence[Op], model: ModelSpec, shape: StepShape) -> Sequence[Op]:
        return quantized_inputs(ops, "int8", model.dtype) if self.options.activations else ops
