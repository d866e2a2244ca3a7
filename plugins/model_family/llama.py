"""The Llama family: Llama, Mistral, Qwen2, Qwen3 (dense), Phi-3. The model itself is
`core/runtime/families/llama.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from twinfer.core.spec import ModelSpec
from twinfer.core.technique import Needs, Technique
from twinfer.plugins.model_family.limits import reasons_against

if TYPE_CHECKING:
    from twinfer.core.runtime.families import DecoderModel
    from twinfer.core.runtime.linear import LinearFactory
    from twinfer.core.runtime.parallel import Parallel
    from twinfer.core.runtime.weights import Loader, Packed


class LlamaFamily(Technique):
    name = "llama"
    summary = "Llama, Mistral, Qwen2, dense Qwen3 and Phi-3 decoders (RMSNorm, rotary positions, gated MLP)"
    reference = "Touvron et al. 2023, arXiv:2302.13971"
    families: ClassVar[tuple[str, ...]] = ("llama", "mistral", "qwen2", "qwen3", "phi3")

    @classmethod
    def serves(cls, model: ModelSpec) -> bool:
        return model.family in cls.families

    @classmethod
    def why_not(cls, needs: Needs) -> list[str]:
        model = needs.model
        if model is None:
            return []
        reasons = reasons_against(model)
        if model.moe is not None and model.moe.bias:
            reasons.append("experts with biases are not implemented")
        if model.mla is None and model.v_dim != model.head_dim:
            reasons.append("value heads of another width than query heads are not implemented")
        if model.norm_plus_one or model.norms_per_layer != 2:
            reasons.append("Gemma's norms are not implemented")
        if model.rope_local_theta is not None:
            reasons.append("a second rotary base for sliding layers is not implemented")
        return reasons

    @classmethod
    def expected_tensors(cls, model: ModelSpec) -> dict[str, tuple[int, ...]]:
        from twinfer.core.runtime.families.llama import expected_tensors

        return expected_tensors(model)

    @classmethod
    def packed_tensors(cls, model: ModelSpec) -> Packed:
        """Phi-3 stores q, k, v and gate, up as one tensor each."""
        if model.family != "phi3":
            return {}
        q, kv, width = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim, model.intermediate_size
        return {
            "self_attn.qkv_proj": {"self_attn.q_proj": q, "self_attn.k_proj": kv, "self_attn.v_proj": kv},
            "mlp.gate_up_proj": {"mlp.gate_proj": width, "mlp.up_proj": width},
        }

    def build(
        self, model: ModelSpec, load: Loader, linear: LinearFactory, parallel: Parallel | None = None
    ) -> DecoderModel:
        from twinfer.core.runtime.families.decoder import RankLoader
        from twinfer.core.runtime.families.llama import Llama
        from twinfer.core.runtime.parallel import ALONE

        return Llama(RankLoader(model, load, linear, parallel or ALONE))
