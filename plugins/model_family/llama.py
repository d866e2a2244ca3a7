"""The Llama family: Llama, Mistral, Qwen2, Qwen3 (dense). The model itself is `core/runtime/families/llama.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twinfer.core.spec import ModelSpec
from twinfer.core.technique import Needs, Technique

if TYPE_CHECKING:
    from twinfer.core.runtime.families import DecoderModel
    from twinfer.core.runtime.linear import LinearFactory
    from twinfer.core.runtime.parallel import Parallel
    from twinfer.core.runtime.weights import Loader

ROPE_KINDS = ("default", "linear", "llama3")
ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh")


class LlamaFamily(Technique):
    name = "llama"
    summary = "Llama, Mistral, Qwen2 and dense Qwen3 decoders (RMSNorm, rotary positions, gated MLP)"
    reference = "Touvron et al. 2023, arXiv:2302.13971"
    families = ("llama", "mistral", "qwen2", "qwen3")

    @classmethod
    def serves(cls, model: ModelSpec) -> bool:
        return model.family in cls.families

    @classmethod
    def why_not(cls, needs: Needs) -> list[str]:
        model = needs.model
        if model is None:
            return []
        reasons = []
        if "checkpoint_kv_heads" in model.extra:
            reasons.append(
                f"--attention {model.attention} asks for {model.num_kv_heads} KV heads, its weights have "
                f"{model.extra['checkpoint_kv_heads']} and converting them is not implemented; leave num_kv_heads out"
            )
        if model.moe is not None:
            reasons.append("mixture-of-experts layers are not implemented")
        if model.mla is not None:
            reasons.append("latent attention (MLA) is not implemented")
        if not model.gated_mlp:
            reasons.append("an MLP without gate is not implemented")
        if model.norm_plus_one or model.norms_per_layer != 2:
            reasons.append("Gemma's norms are not implemented")
        if model.rope_local_theta is not None:
            reasons.append("a second rotary base for sliding layers is not implemented")
        if model.attention_sinks:
            reasons.append("attention sinks are not implemented")
        if model.v_dim != model.head_dim:
            reasons.append("value heads of another width than query heads are not implemented")
        scaling = model.rope_scaling or {}
        kind = scaling.get("rope_type") or scaling.get("type") or "default"
        if kind not in ROPE_KINDS:
            reasons.append(f"rope scaling {kind!r} is not implemented (known: {', '.join(ROPE_KINDS)})")
        if model.hidden_act not in ACTIVATIONS:
            reasons.append(f"activation {model.hidden_act!r} is not implemented (known: {', '.join(ACTIVATIONS)})")
        return reasons

    @classmethod
    def expected_tensors(cls, model: ModelSpec) -> dict[str, tuple[int, ...]]:
        from twinfer.core.runtime.families.llama import expected_tensors

        return expected_tensors(model)

    def build(
        self, model: ModelSpec, load: Loader, linear: LinearFactory, parallel: Parallel | None = None
    ) -> DecoderModel:
        from twinfer.core.runtime.families.decoder import RankLoader
        from twinfer.core.runtime.families.llama import Llama
        from twinfer.core.runtime.parallel import ALONE

        return Llama(RankLoader(model, load, linear, parallel or ALONE))
