"""A GGUF file as a `ModelSpec`, from its header alone.

Invariants
* The header is turned into the fields of a Hugging Face config and read by `spec_from_hf`: one reader of architectures.
* Quantized weights are described as they run here, dequantized; what is stored is kept in `ModelSpec.extra`.
* Metadata that is missing or of the wrong kind is a ModelError.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from math import log
from pathlib import Path
from typing import Any

from twinfer.core.errors import ModelError
from twinfer.core.gguf_header import GGUFHeader, Length, read_gguf_header
from twinfer.core.hf_config import spec_from_hf
from twinfer.core.spec import ModelSpec

GGUF_FAMILIES = {
    "llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM", "gemma2": "Gemma2ForCausalLM", "gemma3": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM", "deepseek2": "DeepseekV2ForCausalLM", "gpt-oss": "GptOssForCausalLM",
    "qwen2moe": "Qwen2MoeForCausalLM", "qwen3next": "Qwen3NextForCausalLM", "glm4moe": "Glm4MoeForCausalLM",
    "minimax-m2": "MiniMaxM2ForCausalLM",
}  # fmt: skip
"""general.architecture -> architecture class ("llama" also covers Mistral and, with experts, Mixtral; "deepseek2" V3)."""


def spec_from_gguf(path: str | Path) -> ModelSpec:
    """The spec of a GGUF file, from its header alone.

    Quantized weights are described as they run here, dequantized to `dtype`; what is stored is in
    `extra["stored_bits"]` (average bits per weight), `extra["stored_types"]`, and values per type in
    `extra["stored_linears"]` (block linears) and `extra["stored_others"]` (embeddings, head, norms).
    """
    header = read_gguf_header(path)
    name = Path(path).stem
    try:
        config = _hf_config_of_gguf(header, name)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ModelError(f"{path}: metadata of the GGUF file cannot be understood ({error!r})") from None
    spec = _with_biases(spec_from_hf(config, name), header)
    values = sum(t.num_values for t in header.tensors.values())
    types = sorted({t.type for t in header.tensors.values()})
    stored = sum(t.nbytes for t in header.tensors.values()) * 8 / values if values else 0.0
    extra = {"stored_bits": stored, "stored_types": types, "stored_values": values}
    for key, linear in (("stored_linears", True), ("stored_others", False)):
        counts = Counter[str]()
        for tensor in header.tensors.values():
            if (tensor.name.startswith("blk.") and len(tensor.shape) > 1) == linear:
                counts[tensor.type] += tensor.num_values
        extra[key] = dict(sorted(counts.items()))
    return replace(spec, extra=extra)


def _with_biases(spec: ModelSpec, header: GGUFHeader) -> ModelSpec:
    """Biases are where the file has them: no key of the header tells."""
    if not any(name.startswith("blk.0.") for name in header.tensors):
        return spec  # a vocabulary alone

    def has(*parts: str) -> bool:
        return any(f"blk.0.{part}.bias" in header.tensors for part in parts)

    return replace(
        spec,
        attention_bias=has("attn_q", "attn_k", "attn_v", "attn_qkv"),
        attention_out_bias=has("attn_output"),
        mlp_bias=has("ffn_gate", "ffn_up", "ffn_down"),
    )


def _hf_config_of_gguf(header: GGUFHeader, name: str) -> dict[str, Any]:
    meta = header.metadata
    arch = meta.get("general.architecture")
    if arch not in GGUF_FAMILIES:
        raise ModelError(f"{name}: GGUF architecture {arch!r} is not known; known: {', '.join(GGUF_FAMILIES)}")

    def key(suffix: str, default: Any = None) -> Any:
        return meta.get(f"{arch}.{suffix}", default)

    def number(suffix: str, default: float) -> float:
        """The header holds float32: round to what was meant (1e-05, not 9.99999974e-06)."""
        return float(f"{key(suffix, default):.7g}")

    def count(suffix: str, default: Any = None) -> Any:
        """One value for all layers; some writers store it once per layer."""
        value = key(suffix, default)
        if isinstance(value, list) and len(set(value)) == 1:
            return value[0]
        if isinstance(value, list | Length):
            raise ModelError(f"{name}: layers of different shapes are not supported ({arch}.{suffix} is a list)")
        return value

    layers, heads, hidden = key("block_count"), count("attention.head_count"), key("embedding_length")
    head_dim = count("attention.key_length", hidden // heads)
    if arch != "deepseek2" and count("attention.value_length", head_dim) != head_dim:
        raise ModelError(f"{name}: values of another width than keys are not supported")
    embedding = header.tensors.get("token_embd.weight")
    tokens = meta.get("tokenizer.ggml.tokens", ())
    vocab = embedding.shape[0] if embedding else tokens.num_entries if isinstance(tokens, Length) else len(tokens)
    float_types = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    stored = {t.type for t in header.tensors.values() if len(t.shape) > 1}
    config: dict[str, Any] = {
        "architectures": [GGUF_FAMILIES[arch]],
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "intermediate_size": count("feed_forward_length"),
        "vocab_size": vocab,
        "max_position_embeddings": key("context_length"),
        "rope_theta": number("rope.freq_base", 10000.0),
        "partial_rotary_factor": 1.0 if arch == "deepseek2" else count("rope.dimension_count", head_dim) / head_dim,
        "rms_norm_eps": number("attention.layer_norm_rms_epsilon", 1e-6),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "sliding_window": key("attention.sliding_window") or None,  # 0 is written for none
        "eos_token_id": meta.get("tokenizer.ggml.eos_token_id"),
        "bos_token_id": meta.get("tokenizer.ggml.bos_token_id"),
        # quantized formats do not say what they were trained in; bfloat16 keeps the range of every scale
        "torch_dtype": float_types[stored.pop()] if len(stored) == 1 and stored <= set(float_types) else "bfloat16",
    }
    if arch in ("gemma2", "gemma3"):
        config["hidden_activation"] = "gelu_pytorch_tanh"
        # llama.cpp keeps no scale: head_dim, except for the largest model of each family
        large = {"gemma2": 46, "gemma3": 62}[arch] == layers
        config["query_pre_attn_scalar"] = hidden // heads if large else head_dim
        config["attn_logit_softcapping"] = key("attn_logit_softcapping", 50.0 if arch == "gemma2" else None)
        config["final_logit_softcapping"] = key("final_logit_softcapping", 30.0 if arch == "gemma2" else None)
        config["rope_local_base_freq"] = number("rope.freq_base_swa", 10000.0)
    pattern = key("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        config["layer_types"] = ["sliding_attention" if slides else "full_attention" for slides in pattern]
    elif pattern is not None:
        config["sliding_window_pattern"] = pattern
    if arch == "deepseek2":
        config |= _deepseek(header, key, number)
    elif key("expert_count"):
        config |= _experts(arch, header, key, number)
    if arch == "qwen3next":
        config |= _gated_delta(key)
    scaling = _rope_scaling(header, key)
    if scaling:
        config["rope_scaling"] = scaling
    return config


def _experts(arch: str, header: GGUFHeader, key: Callable[..., Any], number: Callable[..., float]) -> dict[str, Any]:
    """Experts under the names that each family's config.json has."""
    routed, width = key("expert_count"), key("expert_feed_forward_length")
    found: dict[str, Any] = {"num_experts_per_tok": key("expert_used_count")}
    if arch == "llama":
        return found | {"architectures": ["MixtralForCausalLM"], "num_local_experts": routed}
    if arch == "gpt-oss":
        return found | {"num_local_experts": routed, "intermediate_size": width or key("feed_forward_length")}
    if arch == "minimax-m2":
        rotary = key("rope.dimension_count")
        return found | {"num_local_experts": routed, "intermediate_size": width, "rotary_dim": rotary}
    if arch == "glm4moe":
        further = key("nextn_predict_layers", 0)  # counted among the blocks
        return found | {
            "num_hidden_layers": key("block_count") - further, "num_nextn_predict_layers": further,
            "n_routed_experts": routed, "n_shared_experts": key("expert_shared_count", 0),
            "moe_intermediate_size": width, "first_k_dense_replace": key("leading_dense_block_count", 0),
            "routed_scaling_factor": number("expert_weights_scale", 1.0),
            "norm_topk_prob": bool(key("expert_weights_norm", True)),
            "use_qk_norm": any("attn_q_norm" in name for name in header.tensors),
        }  # fmt: skip
    found |= {"num_experts": routed, "moe_intermediate_size": width}
    if arch in ("qwen2moe", "qwen3next"):
        found["shared_expert_intermediate_size"] = key("expert_shared_feed_forward_length", 0)
    found["norm_topk_prob"] = arch != "qwen2moe"  # no key says so; every published model has it
    return found


def _gated_delta(key: Callable[..., Any]) -> dict[str, Any]:
    """Linear attention of Qwen3-Next, in the terms that GGUF has for state-space models."""
    heads = key("ssm.time_step_rank")
    return {
        "linear_num_key_heads": key("ssm.group_count"), "linear_num_value_heads": heads,
        "linear_key_head_dim": key("ssm.state_size"), "linear_value_head_dim": key("ssm.inner_size") // heads,
        "linear_conv_kernel_dim": key("ssm.conv_kernel"),
        "full_attention_interval": key("full_attention_interval", 4),
    }  # fmt: skip


def _deepseek(header: GGUFHeader, key: Callable[..., Any], number: Callable[..., float]) -> dict[str, Any]:
    """DeepSeek-V2 and V3: one architecture in GGUF, told apart by how experts are scored."""
    rope = key("rope.dimension_count")
    sigmoid = key("expert_gating_func") == 2 or any(".exp_probs_b." in name for name in header.tensors)
    groups = key("expert_group_count", 1)
    grouped = "group_limited_greedy" if groups > 1 else "greedy"
    return {
        "architectures": ["DeepseekV3ForCausalLM" if sigmoid else "DeepseekV2ForCausalLM"],
        "num_key_value_heads": key("attention.head_count"),  # 1 is written for the one latent
        "q_lora_rank": key("attention.q_lora_rank"),
        "kv_lora_rank": key("attention.kv_lora_rank"),
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": key("attention.key_length_mla", key("attention.key_length")) - rope,
        "v_head_dim": key("attention.value_length_mla", key("attention.value_length")),
        "first_k_dense_replace": key("leading_dense_block_count", 0),
        "n_routed_experts": key("expert_count"),
        "n_shared_experts": key("expert_shared_count", 0),
        "num_experts_per_tok": key("expert_used_count"),
        "moe_intermediate_size": key("expert_feed_forward_length"),
        "routed_scaling_factor": number("expert_weights_scale", 1.0),
        "norm_topk_prob": bool(key("expert_weights_norm", False)),
        "topk_method": "noaux_tc" if sigmoid else grouped,
        "n_group": groups,
        "topk_group": key("expert_group_used_count", 1),
    }


def _rope_scaling(header: GGUFHeader, key: Callable[..., Any]) -> dict[str, Any]:
    """The scaling in Hugging Face's terms; factors that lie in tensors are named as such."""
    kind, original = key("rope.scaling.type"), key("rope.scaling.original_context_length")
    factor, attention = key("rope.scaling.factor"), key("rope.scaling.attn_factor")
    if "rope_factors_long.weight" in header.tensors:
        pairs = header.tensors["rope_factors_long.weight"].num_values
        unit = [1.0] * pairs  # the tensors are what counts (`runtime/rope.py`)
        found: dict[str, Any] = {"rope_type": "longrope", "short_factor": unit, "long_factor": unit}
        return found | _given(original_max_position_embeddings=original, attention_factor=attention)
    if "rope_freqs.weight" in header.tensors:
        return {"rope_type": "gguf_factors", "tensor": "rope_freqs.weight"}
    if kind in (None, "none"):
        return {}
    found = {"rope_type": kind} | _given(factor=factor, original_max_position_embeddings=original)
    if kind == "yarn":
        found |= _given(
            beta_fast=key("rope.scaling.yarn_beta_fast"), beta_slow=key("rope.scaling.yarn_beta_slow"),
            attention_factor=attention and factor and attention * (0.1 * log(factor) + 1.0),
        )  # fmt: skip
        strength = key("rope.scaling.yarn_log_multiplier")
        if strength is not None:  # only of the softmax: published models turn cos and sin by the plain factor
            found |= {"mscale": float(f"{10 * strength:.6g}"), "mscale_all_dim": float(f"{10 * strength:.6g}")}
    return found


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
