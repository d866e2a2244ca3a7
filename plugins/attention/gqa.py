"""Grouped-query attention: groups of query heads share a KV head."""

from __future__ import annotations

from pydantic import Field

from twinfer.core import technique
from twinfer.core.errors import ConfigError
from twinfer.core.spec import ModelSpec
from twinfer.plugins.attention.softmax import SoftmaxAttention, check_divides

USUAL_KV_HEADS = 8  # Llama 2 70B, Llama 3, Mistral, Qwen2.5: one KV head per rank of an 8-GPU machine


class GQA(SoftmaxAttention):
    name = "gqa"
    summary = "Grouped-query attention: a few KV heads, each shared by a group of query heads"
    reference = "Ainslie et al. 2023, arXiv:2305.13245"

    class Options(technique.Options):
        num_kv_heads: int | None = Field(
            default=None,
            ge=1,
            description="KV heads; None keeps the checkpoint's, or 8 for a model that is not grouped",
        )

    def num_kv_heads(self, model: ModelSpec) -> int:
        wanted: int | None = self.options.num_kv_heads
        if wanted is not None:
            return check_divides("--attention gqa:num_kv_heads", wanted, model)
        if model.variant == "gqa":
            return model.num_kv_heads
        if model.num_heads > USUAL_KV_HEADS and model.num_heads % USUAL_KV_HEADS == 0:
            return USUAL_KV_HEADS
        raise ConfigError(
            "--attention", "gqa", f"{model.name} has {model.num_heads} query heads and no usual number of groups",
            "give gqa:num_kv_heads=N",
        )  # fmt: skip
