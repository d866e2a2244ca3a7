"""A GGUF file as a `ModelSpec`, from its header alone.

Invariants
* The header is turned into the fields of a Hugging Face config and read by `spec_from_hf`: one reader of architectures.
* Quantized weights are described as they run here, dequantized; what is stored is kept in `ModelSpec.extra`.
* Metadata that is missing or of the wrong kind is a ModelError.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from twinfer.core.errors import ModelError
from twinfer.core.gguf_header import GGUFHeader, Length, read_gguf_header
from twinfer.core.hf_config import spec_from_hf
from twinfer.core.spec import ModelSpec

GGUF_FAMILIES = {
    "llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM", "gemma2": "Gemma2ForCausalLM", "gemma3": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
}  # fmt: skip
"""general.architecture -> architecture class ("llama" also covers Mistral and, with experts, Mixtral)."""


def spec_from_gguf(path: str | Path) -> ModelSpec:
    """The spec of a GGUF file, from its header alone.

    Quantized weights are described as they run here, dequantized to `dtype`; what is stored is in
    `extra["stored_bits"]` (average bits per weight) and `extra["stored_types"]`.
    """
    header = read_gguf_header(path)
    name = Path(path).stem
    try:
        config = _hf_config_of_gguf(header, name)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ModelError(f"{path}: metadata of the GGUF file cannot be understood ({error!r})") from None
    spec = spec_from_hf(config, name)
    values = sum(t.num_values for t in header.tensors.values())
    types = sorted({t.type for t in header.tensors.values()})
    stored = sum(t.nbytes for t in header.tensors.values()) * 8 / values if values else 0.0
    return replace(spec, extra={"stored_bits": stored, "stored_types": types, "stored_values": values})


def _hf_config_of_gguf(header: GGUFHeader, name: str) -> dict[str, Any]:
    meta = header.metadata
    arch = meta.get("general.architecture")
    if arch not in GGUF_FAMILIES:
        raise ModelError(f"{name}: GGUF architecture {arch!r} is not known; known: {', '.join(GGUF_FAMILIES)}")

    def key(suffix: str, default: Any = None) -> Any:
        return meta.get(f"{arch}.{suffix}", default)

    heads, hidden = key("attention.head_count"), key("embedding_length")
    kv_heads = key("attention.head_count_kv", heads)
    if isinstance(kv_heads, list | Length) or isinstance(key("feed_forward_length"), list | Length):
        raise ModelError(f"{name}: layers of different shapes are not supported (per-layer lists in the GGUF header)")
    embedding = header.tensors.get("token_embd.weight")
    tokens = meta.get("tokenizer.ggml.tokens", ())
    vocab = embedding.shape[0] if embedding else tokens.num_entries if isinstance(tokens, Length) else len(tokens)
    float_types = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    stored = {t.type for t in header.tensors.values() if len(t.shape) > 1}
    config: dict[str, Any] = {
        "architectures": [GGUF_FAMILIES[arch]],
        "num_hidden_layers": key("block_count"),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": key("attention.key_length", hidden // heads),
        "intermediate_size": key("feed_forward_length"),
        "vocab_size": vocab,
        "max_position_embeddings": key("context_length"),
        # the header holds float32: round to what was meant (1e-05, not 9.99999974e-06)
        "rope_theta": float(f"{key('rope.freq_base', 10000.0):.7g}"),
        "rms_norm_eps": float(f"{key('attention.layer_norm_rms_epsilon', 1e-6):.7g}"),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "sliding_window": key("attention.sliding_window"),
        "eos_token_id": meta.get("tokenizer.ggml.eos_token_id"),
        "bos_token_id": meta.get("tokenizer.ggml.bos_token_id"),
        # quantized formats do not say what they were trained in; bfloat16 keeps the range of every scale
        "torch_dtype": float_types[stored.pop()] if len(stored) == 1 and stored <= set(float_types) else "bfloat16",
    }
    if arch in ("gemma2", "gemma3"):
        config["hidden_activation"] = "gelu_pytorch_tanh"
        # llama.cpp keeps no scale: head_dim, except for the largest model of each family
        large = {"gemma2": 46, "gemma3": 62}[arch] == key("block_count")
        config["query_pre_attn_scalar"] = hidden // heads if large else config["head_dim"]
    if arch == "gemma2":
        config["attn_logit_softcapping"] = key("attn_logit_softcapping", 50.0)
        config["final_logit_softcapping"] = key("final_logit_softcapping", 30.0)
    if key("expert_count"):
        config["num_experts_per_tok"] = key("expert_used_count")
        if arch == "llama":
            config |= {"architectures": ["MixtralForCausalLM"], "num_local_experts": key("expert_count")}
        else:
            config |= {"num_experts": key("expert_count"), "moe_intermediate_size": key("expert_feed_forward_length")}
    if key("rope.scaling.type") not in (None, "none"):
        config["rope_scaling"] = {
            "rope_type": key("rope.scaling.type"),
            "factor": key("rope.scaling.factor", 1.0),
            "original_max_position_embeddings": key("rope.scaling.original_context_length"),
        }
    elif "rope_freqs.weight" in header.tensors:
        config["rope_scaling"] = {"rope_type": "gguf_factors", "tensor": "rope_freqs.weight"}
    if arch == "phi3" and "rope_factors_long.weight" in header.tensors:
        config["rope_scaling"] = {"rope_type": "longrope", "tensor": "rope_factors_long.weight"}
    return config
