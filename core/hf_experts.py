"""The experts that a Hugging Face `config.json` describes, family by family.

Invariants
* Routing that is not described here is a ModelError, never a guess.
"""

from __future__ import annotations

from twinfer.core.hf_fields import Fields
from twinfer.core.hf_layers import Layers
from twinfer.core.model_parts import MoESpec

QWEN = ("qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5_moe_text")
BIASED = ("deepseek_v3", "deepseek_v32", "glm4_moe", "glm_moe_dsa")
"""Experts scored by a sigmoid, balanced by a bias (DeepSeek-V3, arXiv:2412.19437)."""


def read_experts(c: Fields, family: str, layers: Layers) -> MoESpec | None:
    """The experts of a model of `family`, None where it has none."""
    if family in ("mixtral", "gpt_oss"):
        return MoESpec(
            num_experts=c.count("num_local_experts"),
            top_k=c.count("num_experts_per_tok"),
            intermediate_size=c.count("intermediate_size"),
            bias=family == "gpt_oss",
        )
    if family in QWEN:
        return _qwen(c, family, layers.count)
    if family in BIASED and c.get("n_routed_experts"):
        return _balanced(c, family, layers.count)
    if family == "deepseek_v2" and c.get("n_routed_experts"):
        return _deepseek_v2(c, layers.count)
    if family == "llama4_text":
        return _llama4(c, layers.count)
    if family == "minimax_m2":
        c.must_be("scoring_func", c.get("scoring_func"), None, "sigmoid")
        return MoESpec(
            num_experts=c.count("num_local_experts", c.get("num_experts")),
            top_k=c.count("num_experts_per_tok"),
            intermediate_size=c.count("intermediate_size", least=1),
            num_shared=1 if c.get("shared_intermediate_size") else 0,
            shared_intermediate_size=c.count("shared_intermediate_size", 0),
            score_bias=c.flag("use_routing_bias", True),
            scoring="sigmoid",
        )
    if family == "granitemoehybrid" and c.count("num_local_experts", 0):
        return MoESpec(
            num_experts=c.count("num_local_experts"),
            top_k=c.count("num_experts_per_tok"),
            intermediate_size=c.count("intermediate_size", least=1),
            num_shared=1,
            shared_intermediate_size=c.count("shared_intermediate_size", 1024, least=1),
        )
    if family == "jamba" and layers.experts:
        return MoESpec(
            num_experts=c.count("num_experts", 16),
            top_k=c.count("num_experts_per_tok", 2),
            intermediate_size=c.count("intermediate_size", least=1),
            dense_layers=tuple(i for i in range(layers.count) if i not in layers.experts),
            renormalize=False,
        )
    if family == "nemotron_h" and layers.experts:
        return _nemotron(c, layers)
    return None


def _qwen(c: Fields, family: str, num_layers: int) -> MoESpec:
    step, dense = c.count("decoder_sparse_step", 1), c.get("mlp_only_layers", [])
    shared = 0 if family == "qwen3_moe" else c.count("shared_expert_intermediate_size", 0)
    return MoESpec(
        num_experts=c.count("num_experts", c.get("num_local_experts")),  # the name in transformers 5
        top_k=c.count("num_experts_per_tok"),
        intermediate_size=c.count("moe_intermediate_size", least=1),
        num_shared=1 if shared else 0,
        shared_intermediate_size=shared,
        shared_gate=shared > 0,
        dense_layers=tuple(i for i in range(num_layers) if i in dense or (i + 1) % step),
        renormalize=c.flag("norm_topk_prob", family not in ("qwen2_moe", "qwen3_moe")),
    )


def _balanced(c: Fields, family: str, num_layers: int) -> MoESpec:
    glm = family.startswith("glm")
    first, every = c.count("first_k_dense_replace", 1 if family == "glm4_moe" else 3), c.count("moe_layer_freq", 1)
    c.must_be("scoring_func", c.get("scoring_func"), None, "sigmoid")
    c.must_be("topk_method", c.get("topk_method"), None, "noaux_tc")
    types = c.kinds("mlp_layer_types", num_layers) if family == "glm_moe_dsa" else None
    dense = [i for i in range(first, num_layers) if i % every]
    if types is not None:
        first, dense = 0, [i for i, kind in enumerate(types) if kind == "dense"]
    groups = c.count("n_group", 1 if glm else 8)
    return MoESpec(
        num_experts=c.count("n_routed_experts"),
        top_k=c.count("num_experts_per_tok"),
        intermediate_size=c.count("moe_intermediate_size", least=1),
        num_shared=c.count("n_shared_experts", 0),
        first_dense_layers=first,
        dense_layers=tuple(dense),
        score_bias=True,
        float32_router=True,
        scoring="sigmoid",
        renormalize=c.flag("norm_topk_prob", True),
        num_groups=groups,
        top_groups=c.count("topk_group", 1 if glm else 4) if groups > 1 else 1,
        group_score_top=2,
        scale=c.number("routed_scaling_factor", 1.0 if family == "glm4_moe" else 2.5),
    )


def _deepseek_v2(c: Fields, num_layers: int) -> MoESpec:
    first, every = c.count("first_k_dense_replace", 0), c.count("moe_layer_freq", 1)
    method = c.get("topk_method")
    c.must_be("scoring_func", c.get("scoring_func"), None, "softmax")
    c.must_be("topk_method", method, None, "greedy", "group_limited_greedy")
    c.must_be("norm_topk_prob", c.get("norm_topk_prob"), None, False)
    groups = c.count("n_group") if method == "group_limited_greedy" else 1
    return MoESpec(
        num_experts=c.count("n_routed_experts"),
        top_k=c.count("num_experts_per_tok"),
        intermediate_size=c.count("moe_intermediate_size", least=1),
        num_shared=c.count("n_shared_experts", 0),
        first_dense_layers=first,
        dense_layers=tuple(i for i in range(first, num_layers) if i % every),
        float32_router=True,
        renormalize=False,
        num_groups=groups,
        top_groups=c.count("topk_group") if groups > 1 else 1,
        scale=c.number("routed_scaling_factor", 1.0),
    )


def _llama4(c: Fields, num_layers: int) -> MoESpec:
    step = c.count("interleave_moe_layer_step", 1, least=1)
    sparse = c.get("moe_layers") or list(range(step - 1, num_layers, step))
    return MoESpec(
        num_experts=c.count("num_local_experts", 16),
        top_k=c.count("num_experts_per_tok", 1),
        intermediate_size=c.count("intermediate_size", 8192, least=1),
        num_shared=1,
        dense_layers=tuple(i for i in range(num_layers) if i not in sparse),
        scoring="sigmoid",
        renormalize=False,
    )


def _nemotron(c: Fields, layers: Layers) -> MoESpec:
    assert layers.experts is not None
    return MoESpec(
        num_experts=c.count("n_routed_experts"),
        top_k=c.count("num_experts_per_tok"),
        intermediate_size=c.count("moe_intermediate_size", least=1),
        num_shared=c.count("n_shared_experts", 1),
        shared_intermediate_size=c.count("moe_shared_expert_intermediate_size", 0),
        dense_layers=tuple(i for i in range(layers.count) if i not in (*layers.experts, *layers.bare)),
        latent_size=c.count("moe_latent_size", 0),
        score_bias=True,
        scoring="sigmoid",
        renormalize=c.flag("norm_topk_prob", True),
        num_groups=c.count("n_group", 1),
        top_groups=c.count("topk_group", 1),
        scale=c.number("routed_scaling_factor", 1.0),
    )
