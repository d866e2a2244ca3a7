"""Which architectures of Hugging Face configs are known, what each assumes, and which are refused and why.

Invariants
* An architecture that is not in `FAMILIES` is refused, naming it and the known ones: a guess would give wrong numbers.
* Of a model that sees, the language model is read here and the encoder by `core/hf_vision.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from twinfer.core.errors import ModelError

FAMILIES = {
    "llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM",
    "gemma2": "Gemma2ForCausalLM", "gemma3_text": "Gemma3ForCausalLM", "phi3": "Phi3ForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM", "deepseek_v3": "DeepseekV3ForCausalLM", "gpt_oss": "GptOssForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM", "qwen3_next": "Qwen3NextForCausalLM", "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM", "llama4_text": "Llama4ForCausalLM", "glm4_moe": "Glm4MoeForCausalLM",
    "glm_moe_dsa": "GlmMoeDsaForCausalLM", "deepseek_v32": "DeepseekV32ForCausalLM",
    "minimax_m2": "MiniMaxM2ForCausalLM", "nemotron_h": "NemotronHForCausalLM", "mimo": "MiMoForCausalLM",
    "jamba": "JambaForCausalLM", "falcon_h1": "FalconH1ForCausalLM", "granite": "GraniteForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM", "smollm3": "SmolLM3ForCausalLM", "olmo2": "Olmo2ForCausalLM",
    "olmo3": "Olmo3ForCausalLM", "gemma": "GemmaForCausalLM", "glm4": "Glm4ForCausalLM", "seed_oss": "SeedOssForCausalLM",
    "ernie4_5": "Ernie4_5ForCausalLM",
}  # fmt: skip
"""model_type -> architecture class, as in config.json."""

TEXT_HALVES = {
    "Gemma3ForConditionalGeneration": "gemma3_text", "Llama4ForConditionalGeneration": "llama4_text",
    "Qwen2VLForConditionalGeneration": "qwen2", "Qwen2_5_VLForConditionalGeneration": "qwen2", "Qwen3VLForConditionalGeneration": "qwen3",
    "Qwen3VLMoeForConditionalGeneration": "qwen3_moe", "Qwen3_5ForConditionalGeneration": "qwen3_5_text",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe_text", "KimiK25ForConditionalGeneration": "deepseek_v3",
    "KimiVLForConditionalGeneration": "deepseek_v3", "Mistral3ForConditionalGeneration": "",
    "LlavaForConditionalGeneration": "", "LlavaNextForConditionalGeneration": "",
    "InternVLForConditionalGeneration": "", "InternVLChatModel": "",
}  # fmt: skip
"""Architectures of text and images -> family of the language model, which lies under `text_config` or `llm_config`;
"" for the one that is named there."""

TEXT_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {
        "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "max_position_embeddings": 2048,
    },
    "mistral": {
        "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131_072,
    },
    "gemma3_text": {
        "vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
        "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 131_072,
    },
}  # fmt: skip
"""Shapes that a `text_config` may leave out."""

DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "gemma2": {
        "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256,
        "sliding_window": 4096, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
    },
    "gemma3_text": {
        "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
    },
    "mistral": {"sliding_window": 4096},
    "mixtral": {"rms_norm_eps": 1e-5},
    "phi3": {"rms_norm_eps": 1e-5},
    "qwen2": {"sliding_window": 4096, "max_window_layers": 28},
    "qwen3": {"sliding_window": 4096, "max_window_layers": 28, "head_dim": 128},
    "qwen3_moe": {"sliding_window": 4096},
    "gpt_oss": {"sliding_window": 128, "head_dim": 64, "rms_norm_eps": 1e-5, "attention_bias": True},
    "qwen3_next": {"head_dim": 256, "partial_rotary_factor": 0.25},
    "qwen3_5_text": {"head_dim": 256, "partial_rotary_factor": 0.25},
    "qwen3_5_moe_text": {"head_dim": 256, "partial_rotary_factor": 0.25},
    "llama4_text": {"head_dim": 128, "rms_norm_eps": 1e-5, "attention_chunk_size": 8192},
    "glm4_moe": {"rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5},
    "glm_moe_dsa": {"rms_norm_eps": 1e-5},
    "nemotron_h": {"hidden_act": "relu2"},
    "falcon_h1": {"rms_norm_eps": 1e-5},
    "granitemoehybrid": {"num_key_value_heads": 8},
    "smollm3": {"tie_word_embeddings": True},
    "olmo2": {"rms_norm_eps": 1e-5},
    "olmo3": {"rms_norm_eps": 1e-5, "sliding_window": 4096},
    "gemma": {"head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True},
    "glm4": {"head_dim": 128, "attention_bias": True, "partial_rotary_factor": 0.5},
    "seed_oss": {"head_dim": 128, "attention_bias": True, "attention_out_bias": False},
    "ernie4_5": {"head_dim": 128, "rms_norm_eps": 1e-5, "tie_word_embeddings": True},
}  # fmt: skip
"""What Hugging Face's configuration class of a family assumes where config.json says nothing (null is something)."""

REFUSED = {
    "MllamaForConditionalGeneration": "images enter through layers of cross-attention, not as a prefix of tokens",
    "Gemma4ForConditionalGeneration": "its global layers have other heads than its local ones, with keys as values",
    "DeciLMForCausalLM": "its layers are of different widths, and some have no attention",
    "DeepseekV4ForCausalLM": "its layers keep compressed tokens, each at a ratio of its own",
    "MiMoV2FlashForCausalLM": "its sliding layers have other KV heads than its full ones",
    "MiniMaxM3ForCausalLM": "it attends to blocks that an index of its own kind picks",
    "MiniMaxM3SparseForConditionalGeneration": "it attends to blocks that an index of its own kind picks",
    "KimiK3ForConditionalGeneration": "Kimi delta attention and residuals across layers are not described",
    "KimiLinearForCausalLM": "Kimi delta attention is not described",
    "Step3p7FlashForCausalLM": "its file leaves out the heads of its sliding layers",
}
"""Architectures that people ask for, and why their numbers would be wrong."""


def family_of(config: Mapping[str, Any], name: str) -> str:
    """The key of `FAMILIES` that a config belongs to; ModelError when there is none."""
    known = ", ".join(FAMILIES.values())
    architectures = config.get("architectures") or []
    model_type = config.get("model_type")
    if not isinstance(architectures, list) or not (architectures or model_type):
        raise ModelError(f"{name}: config.json names neither 'architectures' nor 'model_type'; known: {known}")
    if not architectures:
        if model_type in FAMILIES:
            return str(model_type)
        raise ModelError(f"{name}: model_type {model_type!r} is not known; known: {', '.join(FAMILIES)}")
    for family, architecture in FAMILIES.items():
        if architecture in architectures:
            return family
    for architecture in architectures:
        if architecture in REFUSED:
            raise ModelError(f"{name}: {architecture} is not supported: {REFUSED[architecture]}; known: {known}")
    raise ModelError(f"{name}: architecture {', '.join(map(str, architectures))} is not known; known: {known}")


def text_half(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The configuration of the language model in one of text and images; any other as it is."""
    architectures = config.get("architectures")
    found = [a for a in architectures if a in TEXT_HALVES] if isinstance(architectures, list) else []
    if not found:
        return config
    family = TEXT_HALVES[found[0]]
    text = config.get("text_config") or config.get("llm_config")
    if text is None and "hidden_size" in config and "vision_config" in config:
        text = {k: v for k, v in config.items() if k != "vision_config"}  # older files have the text at the top
    if not isinstance(text, Mapping):
        raise ModelError(f"{name}: config.json of a {found[0]} lacks 'text_config'; give the whole file")
    outer = ("dtype", "torch_dtype", "eos_token_id", "bos_token_id", "tie_word_embeddings", "quantization_config")
    shared = {key: config[key] for key in outer if config.get(key) is not None}
    if family:
        shared["architectures"] = [FAMILIES[family]]
    return {**TEXT_DEFAULTS.get(family or str(text.get("model_type")), {}), **text, **shared}


__all__ = ["DEFAULTS", "FAMILIES", "REFUSED", "TEXT_DEFAULTS", "TEXT_HALVES", "family_of", "text_half"]
