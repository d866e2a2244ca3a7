"""DeepSeek-V2 and V3: the Llama decoder with latent attention and, after the first layers, routed and shared experts.

The blocks are `core/runtime/families/latent_attention.py` and `core/runtime/families/moe.py`.
"""

from __future__ import annotations

from twinfer.core.spec import ModelSpec
from twinfer.plugins.model_family.llama import LlamaFamily


class DeepSeekV2Family(LlamaFamily):
    name = "deepseek_v2"
    summary = "DeepSeek-V2 decoders: latent attention (MLA), shared experts, softmax routing within the best groups"
    reference = "DeepSeek-AI 2024, arXiv:2405.04434"
    families = ("deepseek_v2",)


class DeepSeekV3Family(LlamaFamily):
    name = "deepseek_v3"
    summary = "DeepSeek-V3 and R1 decoders: latent attention (MLA), sigmoid routing balanced by a bias per expert"
    reference = "DeepSeek-AI 2024, arXiv:2412.19437"
    families = ("deepseek_v3",)

    @classmethod
    def unused_tensor(cls, model: ModelSpec, name: str) -> bool:
        """Layers past the last predict further tokens; they are for speculation and training."""
        extra = int(model.extra.get("num_nextn_predict_layers", 0))
        return any(name.startswith(f"model.layers.{model.num_layers + i}.") for i in range(extra))
