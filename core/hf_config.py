"""A Hugging Face `config.json` as a `ModelSpec`.

Invariants
* An architecture that is not in `FAMILIES` is refused, naming it and the known ones: a guess would give wrong numbers.
* A missing field falls back only to what Hugging Face's own configuration class uses; else it is a ModelError.
* Both spellings are read: `torch_dtype`/`rope_theta` (transformers 4) and `dtype`/`rope_parameters` (transformers 5).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from twinfer.core.dtypes import BYTES, canonical_dtype
from twinfer.core.errors import ConfigError, ModelError
from twinfer.core.hf_rope import read_rope
from twinfer.core.spec import MLASpec, ModelSpec, MoESpec

FAMILIES = {
    "llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM",
    "gemma2": "Gemma2ForCausalLM", "gemma3_text": "Gemma3ForCausalLM", "phi3": "Phi3ForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM", "deepseek_v3": "DeepseekV3ForCausalLM", "gpt_oss": "GptOssForCausalLM",
}  # fmt: skip
"""model_type -> architecture class, as in config.json."""

TEXT_HALVES = {"Gemma3ForConditionalGeneration": "gemma3_text"}
"""Architectures of text and images whose text half is one of the families; it lies under `text_config`."""

TEXT_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 131_072,
}  # fmt: skip
"""Shapes that Gemma 3's `text_config` may leave out."""

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
    "gpt_oss": {"sliding_window": 128, "head_dim": 64, "rms_norm_eps": 1e-5},
}  # fmt: skip
"""What Hugging Face's configuration class of a family assumes where config.json says nothing (null is something)."""

MOST_LAYERS = 10_000


class _Config:
    """Typed reads of a config; a value that is missing or of the wrong kind becomes one ModelError."""

    def __init__(self, values: Mapping[str, Any], name: str) -> None:
        self.values, self.name = values, name

    def get(self, key: str, default: Any = None) -> Any:
        value = self.values.get(key)
        return default if value is None else value

    def count(self, key: str, default: int | None = None, least: int = 0) -> int:
        value = self.get(key, default)
        if value is None:
            raise ModelError(f"{self.name}: config.json lacks {key!r}; give the whole config.json of the model")
        if isinstance(value, bool) or not isinstance(value, int):
            raise ModelError(f"{self.name}: config.json has {key}={value!r}, which should be a whole number")
        if value < least:
            raise ModelError(f"{self.name}: config.json has {key}={value}, which should be at least {least}")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise ModelError(f"{self.name}: config.json has {key}={value!r}, which should be a number from 0")
        return float(value)

    def cap(self, key: str) -> float | None:
        """A positive number, or None where there is none."""
        value = self.get(key)
        if value is not None and self.number(key, 0.0) == 0:
            raise ModelError(f"{self.name}: config.json has {key}={value!r}, which should be positive or null")
        return None if value is None else float(value)

    def ids(self, key: str) -> tuple[int, ...]:
        """Token ids: one, a list of them, or none."""
        given = self.get(key, [])
        found = given if isinstance(given, list) else [given]
        if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in found):
            raise ModelError(f"{self.name}: config.json has {key}={given!r}, which should be token ids")
        return tuple(found)

    def must_be(self, key: str, value: Any, *known: Any) -> None:
        if value not in known:
            names = " or ".join(repr(v) for v in known if v is not None)
            raise ModelError(
                f"{self.name}: config.json has {key}={value!r}, which is not supported; it must be {names}"
            )


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
    raise ModelError(f"{name}: architecture {', '.join(map(str, architectures))} is not known; known: {known}")


def spec_from_hf(config: Mapping[str, Any], name: str) -> ModelSpec:
    """Shapes of the model that `config` (the content of a config.json) describes.

    Raises ModelError for an unknown architecture, a missing field or a weight format that cannot be counted.
    """
    config = _text_half(config, name)
    family = family_of(config, name)
    try:
        return _read(_Config({**DEFAULTS.get(family, {}), **config}, name), family)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ModelError(f"{name}: config.json cannot be understood ({error!r})") from None


def _text_half(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The configuration of the language model in one of text and images; any other as it is."""
    architectures = config.get("architectures")
    found = [a for a in architectures if a in TEXT_HALVES] if isinstance(architectures, list) else []
    if not found:
        return config
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        raise ModelError(f"{name}: config.json of a {found[0]} lacks 'text_config'; give the whole file")
    outer = ("dtype", "torch_dtype", "eos_token_id", "bos_token_id", "tie_word_embeddings", "quantization_config")
    shared = {key: config[key] for key in outer if config.get(key) is not None}
    return {**TEXT_DEFAULTS, **text, **shared, "architectures": [FAMILIES[TEXT_HALVES[found[0]]]]}


def _read(c: _Config, family: str) -> ModelSpec:
    num_layers, hidden, heads = (c.count(k) for k in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
    if num_layers > MOST_LAYERS:
        raise ModelError(f"{c.name}: num_hidden_layers={num_layers} is not plausible; the file is damaged")
    rope = read_rope(c.values, family, c.name, c.count("max_position_embeddings"))
    if rope.partial != 1.0 and family != "phi3":
        raise ModelError(f"{c.name}: partial_rotary_factor={rope.partial} is not known for {FAMILIES[family]}")
    c.must_be("use_bidirectional_attention", c.get("use_bidirectional_attention"), None, False)
    gemma = family in ("gemma2", "gemma3_text")
    qwen2_bias = family == "qwen2"
    bias = bool(c.get("attention_bias", False))
    query_scalar = c.get("query_pre_attn_scalar") if gemma else None
    mla = _mla(c) if family in ("deepseek_v2", "deepseek_v3") else None
    dtype = _dtype(c)
    moe = _moe(c, family, num_layers)
    block_bits, linear_dtype = _stored_format(c, moe)
    return ModelSpec(
        name=c.name,
        family=family,
        num_layers=num_layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=c.count("num_key_value_heads", heads),
        head_dim=mla.qk_nope_head_dim + mla.qk_rope_head_dim if mla else c.count("head_dim", hidden // max(heads, 1)),
        value_dim=mla.v_head_dim if mla else 0,
        intermediate_size=c.count("intermediate_size", least=1),
        vocab_size=c.count("vocab_size"),
        max_context=rope.max_context,
        tie_embeddings=bool(c.get("tie_word_embeddings", gemma)),
        attention_bias=qwen2_bias or bias,
        attention_out_bias=bias and not qwen2_bias,
        mlp_bias=bool(c.get("mlp_bias", False)),
        qk_norm=family in ("qwen3", "qwen3_moe", "gemma3_text"),
        hidden_act=str(c.get("hidden_activation") or c.get("hidden_act") or "silu"),
        norm_eps=c.number("rms_norm_eps", 1e-6),
        rope_theta=rope.theta,
        rope_local_theta=rope.local_theta if family == "gemma3_text" else None,
        rope_scaling=rope.scaling,
        partial_rotary=rope.partial if family == "phi3" else 1.0,
        layer_windows=_windows(c, family, num_layers),
        attn_softcap=c.cap("attn_logit_softcapping"),
        logit_softcap=c.cap("final_logit_softcapping"),
        query_scale=_mla_query_scale(mla, rope.scaling) if mla else query_scalar and float(query_scalar) ** -0.5,
        attention_sinks=family == "gpt_oss",
        embed_scale=hidden**0.5 if gemma else 1.0,
        norms_per_layer=4 if gemma else 2,
        norm_plus_one=gemma,
        moe=moe,
        mla=mla,
        dtype=dtype,
        kv_dtype=dtype,
        weight_bits=block_bits,
        linear_dtype=linear_dtype,
        eos_token_ids=c.ids("eos_token_id"),
        bos_token_id=c.get("bos_token_id"),
        extra=_extra(c, block_bits is not None),
    )


def _extra(c: _Config, quantized: bool) -> dict[str, Any]:
    """What only a loader of weights needs to know."""
    extra = {}
    if quantized:
        extra["stored_as"] = c.get("quantization_config")["quant_method"]
    if c.get("num_nextn_predict_layers"):
        extra["num_nextn_predict_layers"] = c.count("num_nextn_predict_layers")
    return extra


def _dtype(c: _Config) -> str:
    given = str(c.get("dtype") or c.get("torch_dtype") or "float32")
    known = [name for name, size in BYTES.items() if size >= 2]
    try:
        dtype = canonical_dtype(given)
    except ConfigError:
        dtype = ""
    if dtype not in known:
        raise ModelError(f"{c.name}: config.json has dtype {given!r}; known: {', '.join(known)}")
    return dtype


def _windows(c: _Config, family: str, num_layers: int) -> tuple[int | None, ...]:
    window = c.get("sliding_window")
    if window is None or (family.startswith("qwen") and not c.get("use_sliding_window", False)):
        return ()
    types = c.get("layer_types")
    if types is not None:
        if len(types) != num_layers:
            raise ModelError(f"{c.name}: config.json has {len(types)} layer_types for {num_layers} layers")
        slides = [t == "sliding_attention" for t in types]
    elif family in ("gemma2", "gpt_oss"):
        slides = [i % 2 == 0 for i in range(num_layers)]
    elif family == "gemma3_text":
        pattern = c.count("sliding_window_pattern", 6)
        slides = [(i + 1) % pattern != 0 for i in range(num_layers)]
    elif family in ("qwen2", "qwen3"):
        slides = [i >= c.count("max_window_layers") for i in range(num_layers)]
    else:
        slides = [True] * num_layers
    if not any(slides):
        return ()
    size = c.count("sliding_window")
    if size < 1:
        raise ModelError(f"{c.name}: sliding_window={size} should be at least 1; the file is damaged")
    return tuple(size if s else None for s in slides)


def _mla(c: _Config) -> MLASpec:
    return MLASpec(
        kv_lora_rank=c.count("kv_lora_rank", least=1),
        q_lora_rank=None if c.get("q_lora_rank") is None else c.count("q_lora_rank", least=1),
        qk_nope_head_dim=c.count("qk_nope_head_dim"),
        qk_rope_head_dim=c.count("qk_rope_head_dim"),
        v_head_dim=c.count("v_head_dim", least=1),
        interleaved=bool(c.get("rope_interleave", True)),
    )


def _mla_query_scale(mla: MLASpec, scaling: Mapping[str, Any] | None) -> float | None:
    """Scale of the queries when a stretched context raises the temperature of the softmax (yarn, arXiv:2309.00071)."""
    strength = float((scaling or {}).get("mscale_all_dim") or 0.0)
    factor = float((scaling or {}).get("factor", 1.0))
    if not strength or factor <= 1.0:
        return None
    mscale = 0.1 * strength * math.log(factor) + 1.0
    return float((mla.qk_nope_head_dim + mla.qk_rope_head_dim) ** -0.5 * mscale**2)


def _moe(c: _Config, family: str, num_layers: int) -> MoESpec | None:
    if family in ("mixtral", "gpt_oss"):
        return MoESpec(
            num_experts=c.count("num_local_experts"),
            top_k=c.count("num_experts_per_tok"),
            intermediate_size=c.count("intermediate_size"),
            bias=family == "gpt_oss",
        )
    if family == "qwen3_moe":
        step, dense = c.count("decoder_sparse_step", 1), c.get("mlp_only_layers", [])
        return MoESpec(
            num_experts=c.count("num_experts", c.get("num_local_experts")),  # the name in transformers 5
            top_k=c.count("num_experts_per_tok"),
            intermediate_size=c.count("moe_intermediate_size", least=1),
            dense_layers=tuple(i for i in range(num_layers) if i in dense or (i + 1) % step),
            renormalize=bool(c.get("norm_topk_prob", False)),
        )
    if family in ("deepseek_v2", "deepseek_v3") and c.get("n_routed_experts"):
        return _deepseek_moe(c, family == "deepseek_v3", num_layers)
    return None


def _deepseek_moe(c: _Config, v3: bool, num_layers: int) -> MoESpec:
    first, every = c.count("first_k_dense_replace", 3 if v3 else 0), c.count("moe_layer_freq", 1)
    scoring, method = c.get("scoring_func"), c.get("topk_method")
    if v3:
        c.must_be("scoring_func", scoring, None, "sigmoid")
        c.must_be("topk_method", method, None, "noaux_tc")
    else:
        c.must_be("scoring_func", scoring, None, "softmax")
        c.must_be("topk_method", method, None, "greedy", "group_limited_greedy")
        c.must_be("norm_topk_prob", c.get("norm_topk_prob"), None, False)
    groups = c.count("n_group", 8 if v3 else None) if v3 or method == "group_limited_greedy" else 1
    return MoESpec(
        num_experts=c.count("n_routed_experts"),
        top_k=c.count("num_experts_per_tok"),
        intermediate_size=c.count("moe_intermediate_size", least=1),
        num_shared=c.count("n_shared_experts", 0),
        first_dense_layers=first,
        dense_layers=tuple(i for i in range(first, num_layers) if i % every),
        score_bias=v3,
        float32_router=True,
        scoring="sigmoid" if v3 else "softmax",
        renormalize=v3 and bool(c.get("norm_topk_prob", True)),
        num_groups=groups,
        top_groups=c.count("topk_group", 4 if v3 else None) if groups > 1 else 1,
        group_score_top=2 if v3 else 1,
        scale=c.number("routed_scaling_factor", 2.5 if v3 else 1.0),
    )


def _stored_format(c: _Config, moe: MoESpec | None) -> tuple[float | None, str]:
    """(bits per block weight with scales, what the linears compute in) of a quantized checkpoint."""
    q = c.get("quantization_config")
    if q is None:
        return None, ""
    method = q.get("quant_method") if isinstance(q, Mapping) else None
    if method == "fp8":
        block = q.get("weight_block_size")
        return (8 + 32 / (block[0] * block[1]) if block else 8.0), "fp8"
    if method in ("gptq", "awq"):
        bits, group = int(q.get("bits", 4)), int(q.get("group_size", 128))
        # one fp16 scale and one packed zero point per group; group -1 is one group per output channel
        return bits + ((16 + bits) / group if group > 0 else 0.0), ""
    if method == "mxfp4" and moe is not None:
        return _experts_in_mxfp4(c, moe), ""
    raise ModelError(f"{c.name}: weights stored as {method!r} are not known; known: fp8, gptq, awq, mxfp4 (experts)")


def _experts_in_mxfp4(c: _Config, moe: MoESpec) -> float:
    """Average bits of the block weights when expert matrices are MXFP4 (17 bytes per 32) and the rest 16 bit."""
    hidden, heads = c.count("hidden_size"), c.count("num_attention_heads")
    head_dim, kv_heads = c.count("head_dim", hidden // heads), c.count("num_key_value_heads", heads)
    experts = moe.num_experts * 3 * hidden * moe.intermediate_size
    attention = 2 * hidden * head_dim * (heads + kv_heads)
    rest = attention + moe.num_experts * (hidden + 1 + 2 * moe.intermediate_size + hidden)
    return (experts * 8 * BYTES["mxfp4"] + rest * 16) / (experts + rest)
