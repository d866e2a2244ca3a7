"""A Hugging Face `config.json` as a `ModelSpec`.

Invariants
* An architecture that is not known is refused (`core/hf_families.py`): a guess would give wrong numbers.
* A missing field falls back only to what Hugging Face's own configuration class uses; else it is a ModelError.
* Both spellings are read: `torch_dtype`/`rope_theta` (transformers 4) and `dtype`/`rope_parameters` (transformers 5).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from twinfer.core.dtypes import BYTES, canonical_dtype
from twinfer.core.errors import ConfigError, ModelError
from twinfer.core.hf_experts import read_experts
from twinfer.core.hf_families import DEFAULTS, FAMILIES, family_of, text_half
from twinfer.core.hf_fields import Fields
from twinfer.core.hf_layers import Layers, read_layers
from twinfer.core.hf_rope import read_rope
from twinfer.core.hf_stored import with_stored_format
from twinfer.core.hf_vision import read_vision
from twinfer.core.model_parts import MLASpec
from twinfer.core.spec import ModelSpec

__all__ = ["FAMILIES", "family_of", "spec_from_hf"]

MOST_LAYERS = 10_000
GEMMA = ("gemma2", "gemma3_text")
LATENT = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa")
QWEN2_BIAS = ("qwen2", "qwen2_moe", "mimo")
"""Biases on q, k and v, none on the projection back."""
NO_OUT_BIAS = (*QWEN2_BIAS, "glm4", "glm4_moe")
QK_NORM = (
    "qwen3", "qwen3_moe", "gemma3_text", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "minimax_m2", "olmo2", "olmo3",
)  # fmt: skip
OUTPUT_GATE = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
PARTIAL = ("phi3", "glm4", "glm4_moe", "minimax_m2", *OUTPUT_GATE)
"""Families that turn part of each head by position."""


def spec_from_hf(config: Mapping[str, Any], name: str) -> ModelSpec:
    """Shapes of the model that `config` (the content of a config.json) describes.

    Raises ModelError for an unknown architecture, a missing field or a weight format that cannot be counted.
    """
    text = text_half(config, name)
    family = family_of(text, name)
    fields = Fields({**DEFAULTS.get(family, {}), **text}, name)
    try:
        spec = _read(fields, family)
        if text is not config:
            whole = ", ".join(map(str, config.get("architectures") or ()))
            spec = replace(spec, vision=read_vision(config, spec), extra={**spec.extra, "part_of": whole})
        return with_stored_format(spec, fields)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ModelError(f"{name}: config.json cannot be understood ({error!r})") from None


def _read(c: Fields, family: str) -> ModelSpec:
    layers = read_layers(c, family)
    num_layers = layers.count
    hidden, heads = c.count("hidden_size"), c.count("num_attention_heads")
    if num_layers > MOST_LAYERS:
        raise ModelError(f"{c.name}: num_hidden_layers={num_layers} is not plausible; the file is damaged")
    rope = read_rope(c.values, family, c.name, c.count("max_position_embeddings"))
    partial = rope.partial
    if family == "minimax_m2" and c.get("rotary_dim"):
        partial = c.count("rotary_dim") / c.count("head_dim", hidden // max(heads, 1))
    if partial != 1.0 and family not in PARTIAL:
        raise ModelError(f"{c.name}: partial_rotary_factor={partial} is not known for {FAMILIES[family]}")
    if family == "ernie4_5":
        c.must_be("use_bias", c.get("use_bias"), None, False)
    c.must_be("use_bidirectional_attention", c.get("use_bidirectional_attention"), None, False)
    gemma = family in GEMMA
    bias = c.flag("attention_bias", False)
    query_scalar = c.get("query_pre_attn_scalar") if gemma else None
    mla = _mla(c) if family in LATENT else None
    dtype = _dtype(c)
    return ModelSpec(
        name=c.name,
        family=family,
        num_layers=num_layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=c.count("num_key_value_heads", heads),
        head_dim=mla.qk_nope_head_dim + mla.qk_rope_head_dim if mla else _head_dim(c, hidden, heads),
        value_dim=mla.v_head_dim if mla else 0,
        intermediate_size=_width(c, family),
        vocab_size=c.count("vocab_size"),
        max_context=rope.max_context,
        tie_embeddings=c.flag("tie_word_embeddings", gemma),
        attention_bias=family in QWEN2_BIAS or bias,
        attention_out_bias=c.flag("attention_out_bias") if family == "seed_oss" else bias and family not in NO_OUT_BIAS,
        mlp_bias=c.flag("mlp_bias", False),
        gated_mlp=family != "nemotron_h",
        qk_norm=family in QK_NORM or (family == "glm4_moe" and c.flag("use_qk_norm", False)),
        wide_qk_norm=family in ("minimax_m2", "olmo2", "olmo3"),
        hidden_act=str(c.get("hidden_activation") or c.get("mlp_hidden_act") or c.get("hidden_act") or "silu"),
        norm_eps=c.number("layer_norm_epsilon" if family == "nemotron_h" else "rms_norm_eps", 1e-6),
        rope_theta=rope.theta,
        rope_local_theta=rope.local_theta if family == "gemma3_text" else None,
        rope_scaling=rope.scaling,
        partial_rotary=partial if family in PARTIAL else 1.0,
        layer_windows=_windows(c, family, layers),
        attn_softcap=c.cap("attn_logit_softcapping"),
        logit_softcap=c.cap("final_logit_softcapping"),
        query_scale=_mla_query_scale(mla, rope.scaling) if mla else query_scalar and float(query_scalar) ** -0.5,
        attention_sinks=family == "gpt_oss",
        embed_scale=hidden**0.5 if gemma or family == "gemma" else 1.0,
        norms_per_layer=4 if gemma or family == "glm4" else 2,
        norm_plus_one=gemma or family == "gemma" or family in OUTPUT_GATE,
        moe=read_experts(c, family, layers),
        mla=mla,
        linear_attention=layers.linear,
        layer_kinds=layers.kinds,
        bare_layers=layers.bare,
        attention_gate=family in OUTPUT_GATE and c.flag("attn_output_gate", True),
        sparse_index=layers.index,
        dtype=dtype,
        kv_dtype=dtype,
        eos_token_ids=c.ids("eos_token_id"),
        bos_token_id=c.get("bos_token_id"),
        extra=_extra(c),
    )


def _head_dim(c: Fields, hidden: int, heads: int) -> int:
    return c.count("head_dim", c.get("attention_head_dim", hidden // max(heads, 1)))


def _width(c: Fields, family: str) -> int:
    """Columns of a dense MLP; models whose layers are all experts may leave it out."""
    if family == "llama4_text":
        return c.count("intermediate_size_mlp", 16384, least=1)
    if family == "granitemoehybrid":  # what all tokens pass through; experts have `intermediate_size`
        return c.count("shared_intermediate_size", 1024, least=1)
    default = c.get("moe_intermediate_size") if family == "qwen3_5_moe_text" else None
    return c.count("intermediate_size", default, least=1)


def _extra(c: Fields) -> dict[str, Any]:
    """What only a loader of weights needs to know."""
    extra: dict[str, Any] = {}
    if c.get("num_nextn_predict_layers"):
        extra["num_nextn_predict_layers"] = c.count("num_nextn_predict_layers")
    return extra


def _dtype(c: Fields) -> str:
    unsaid = "bfloat16" if c.get("quantization_config") else "float32"  # nobody quantizes what was trained wide
    given = str(c.get("dtype") or c.get("torch_dtype") or unsaid)
    known = [name for name, size in BYTES.items() if size >= 2]
    try:
        dtype = canonical_dtype(given)
    except ConfigError:
        dtype = ""
    if dtype not in known:
        raise ModelError(f"{c.name}: config.json has dtype {given!r}; known: {', '.join(known)}")
    return dtype


def _windows(c: Fields, family: str, layers: Layers) -> tuple[int | None, ...]:
    if family == "llama4_text":
        return layers.windows
    window, num_layers = c.get("sliding_window"), layers.count
    if window is None or (family.startswith(("qwen", "mimo", "smollm3")) and not c.flag("use_sliding_window")):
        return ()
    types = c.kinds("layer_types", num_layers)
    if types is not None:
        slides = [t == "sliding_attention" for t in types]
    elif family == "olmo3":
        slides = [(i + 1) % 4 != 0 for i in range(num_layers)]
    elif family in ("gemma2", "gpt_oss"):
        slides = [i % 2 == 0 for i in range(num_layers)]
    elif family == "gemma3_text":
        pattern = c.count("sliding_window_pattern", 6)
        slides = [(i + 1) % pattern != 0 for i in range(num_layers)]
    elif family in ("qwen2", "qwen3", "qwen2_moe", "mimo"):
        slides = [i >= c.count("max_window_layers") for i in range(num_layers)]
    else:
        slides = [True] * num_layers
    if not any(slides):
        return ()
    size = c.count("sliding_window")
    if size < 1:
        raise ModelError(f"{c.name}: sliding_window={size} should be at least 1; the file is damaged")
    return tuple(size if s else None for s in slides)


def _mla(c: Fields) -> MLASpec:
    return MLASpec(
        kv_lora_rank=c.count("kv_lora_rank", least=1),
        q_lora_rank=None if c.get("q_lora_rank") is None else c.count("q_lora_rank", least=1),
        qk_nope_head_dim=c.count("qk_nope_head_dim"),
        qk_rope_head_dim=c.count("qk_rope_head_dim"),
        v_head_dim=c.count("v_head_dim", least=1),
        interleaved=c.flag("rope_interleave", True),
    )


def _mla_query_scale(mla: MLASpec, scaling: Mapping[str, Any] | None) -> float | None:
    """Scale of the queries when a stretched context raises the temperature of the softmax (yarn, arXiv:2309.00071)."""
    strength = float((scaling or {}).get("mscale_all_dim") or 0.0)
    factor = float((scaling or {}).get("factor", 1.0))
    if not strength or factor <= 1.0:
        return None
    mscale = 0.1 * strength * math.log(factor) + 1.0
    return float((mla.qk_nope_head_dim + mla.qk_rope_head_dim) ** -0.5 * mscale**2)
