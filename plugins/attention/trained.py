"""A model as if it had been trained with another attention variant: the question before there is such a checkpoint.

`mha`, `gqa`, `mqa` and `mla` convert the weights that are there and refuse what cannot be converted, in engine and
simulator alike. This one asks about shapes alone, so it takes any model and only the simulator has it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from pydantic import Field

from twinfer.core import technique
from twinfer.core.errors import ConfigError
from twinfer.core.spec import MLASpec, ModelSpec
from twinfer.core.technique import Needs, Technique
from twinfer.plugins.attention.gqa import USUAL_KV_HEADS


class Trained(Technique):
    name = "trained"
    summary = "The model as if trained with another variant (mha, gqa, mqa, mla): a question to the simulator"
    reference = "Ainslie et al. 2023, arXiv:2305.13245; DeepSeek-AI 2024, arXiv:2405.04434"

    class Options(technique.Options):
        variant: Literal["mha", "gqa", "mqa", "mla"] = Field(default="gqa", description="attention it is trained with")
        num_kv_heads: int | None = Field(default=None, ge=1, description="KV heads of gqa; None is 8")
        kv_lora_rank: int = Field(default=512, ge=1, description="values of the latent of mla")
        rope_dim: int = Field(default=64, ge=2, description="values beside the latent that are turned by position")

    options: Options

    @classmethod
    def why_not(cls, needs: Needs) -> list[str]:
        if needs.world != "engine":
            return []
        return [
            "trained asks about a checkpoint that does not exist; the simulator can answer "
            "(`twinfer simulate --attention trained`), the engine converts weights with mha, gqa, mqa or mla"
        ]

    def adapt_model(self, model: ModelSpec) -> ModelSpec:
        if self.options.variant == "mla":
            return self._latent(model)
        if model.mla is not None:  # heads as wide as the expanded ones
            model = replace(model, mla=None, num_kv_heads=model.num_heads, sparse_index=None)
        return replace(model, num_kv_heads=self._kv_heads(model), attention=self.name)

    def _kv_heads(self, model: ModelSpec) -> int:
        if self.options.variant == "mha":
            return model.num_heads
        if self.options.variant == "mqa":
            return 1
        heads: int = self.options.num_kv_heads or min(USUAL_KV_HEADS, model.num_heads)
        if model.num_heads % heads:
            fits = [n for n in range(1, model.num_heads + 1) if model.num_heads % n == 0]
            raise ConfigError(
                "--attention trained:num_kv_heads", heads, f"does not divide the {model.num_heads} query heads of "
                f"{model.name}", f"use one of {', '.join(map(str, fits))}",
            )  # fmt: skip
        return heads

    def _latent(self, model: ModelSpec) -> ModelSpec:
        old, rope = model.mla, self.options.rope_dim
        nope = old.qk_nope_head_dim if old else model.head_dim
        mla = MLASpec(
            kv_lora_rank=self.options.kv_lora_rank, q_lora_rank=old.q_lora_rank if old else None, qk_nope_head_dim=nope,
            qk_rope_head_dim=rope, v_head_dim=model.v_dim,
        )  # fmt: skip
        return replace(
            model, attention=self.name, mla=mla, num_kv_heads=model.num_heads, head_dim=nope + rope,
            value_dim=model.v_dim, qk_norm=False, layer_windows=(), attention_sinks=False, attn_softcap=None,
            attention_gate=False, attention_bias=False, partial_rotary=1.0,
        )  # fmt: skip
