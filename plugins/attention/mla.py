"""Multi-head latent attention: what all heads read of a token is kept as one short latent vector."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from twinfer.core import technique
from twinfer.core.spec import ModelSpec
from twinfer.core.technique import Needs, Technique
from twinfer.plugins.attention.softmax import engine_dtype_reasons

if TYPE_CHECKING:
    from twinfer.core.runtime.attention_latent import LatentAttention
    from twinfer.core.runtime.attention_torch import TorchAttention


class MLA(Technique):
    name = "mla"
    summary = "Multi-head latent attention: caches one latent per token instead of KV heads (DeepSeek)"
    reference = "DeepSeek-AI 2024, arXiv:2405.04434"

    class Options(technique.Options):
        mode: Literal["absorbed", "naive"] = Field(
            default="absorbed",
            description="what the cache holds: the latent (absorbed), or the keys and values of every head (naive)",
        )

    @classmethod
    def why_not(cls, needs: Needs) -> list[str]:
        reasons = engine_dtype_reasons(needs)
        model = needs.model
        if model is not None and model.mla is None:
            reasons.append(
                f"{model.name} has {model.variant} weights and converting them to latents is not implemented"
            )
        return reasons

    def adapt_model(self, model: ModelSpec) -> ModelSpec:
        assert model.mla is not None
        return replace(model, attention=self.name, mla=replace(model.mla, absorbed=self.options.mode == "absorbed"))

    def build(self, model: ModelSpec) -> LatentAttention | TorchAttention:
        """The torch implementation for `model` (as adapted)."""
        from twinfer.core.runtime.attention_latent import LatentAttention
        from twinfer.core.runtime.attention_torch import attention_of

        assert model.mla is not None
        return LatentAttention.of(model) if model.mla.absorbed else attention_of(model)
