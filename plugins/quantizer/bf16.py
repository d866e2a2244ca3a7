"""bfloat16 weights under float32 activations."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from twinfer.core.dtypes import dtype_bits
from twinfer.core.technique import Needs, Technique
from twinfer.plugins.quantizer.served import engine_reasons

if TYPE_CHECKING:
    import torch

    from twinfer.core.runtime.linear import LinearFactory
    from twinfer.core.spec import ModelSpec


class BF16(Technique):
    name = "bf16"
    summary = "Weights rounded to bfloat16, products computed in float32: half the bytes of every step"
    reference = "Kalamkar et al.: A Study of BFLOAT16 for Deep Learning Training (arXiv:1905.12322)"

    @classmethod
    def why_not(cls, needs: Needs) -> list[str]:
        return engine_reasons(cls.name, needs)

    def adapt_model(self, model: ModelSpec) -> ModelSpec:
        others = model.other_params()
        head = model.vocab_size * model.hidden_size  # the rest is norms and, untied, an embedding that is only read
        bits = (16.0 * head + dtype_bits(model.dtype) * (others - head)) / others
        return replace(model, weight_bits=16.0, other_weight_bits=bits, expert_bits=None, expert_dtype="")

    def linear(self, model: ModelSpec, device: torch.device) -> LinearFactory:
        """Packs every linear and the head."""
        from twinfer.core.runtime.quantized_linear import BF16Linears

        return BF16Linears()
