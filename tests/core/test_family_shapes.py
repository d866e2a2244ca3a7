"""Families of config.json beyond `published_configs.json`: totals of transformers' classes and of model cards, closed forms.

`SMALL` are made-up sizes whose weights were counted with transformers 5.24 on the meta device (score biases, which are
buffers there, added); `CARDS` are shapes of published models with the total of their card, in billions.
"""

from __future__ import annotations

from typing import Any

import pytest

from twinfer.core.catalog import spec_from_hf
from twinfer.core.errors import ModelError


def config(architecture: str, shape: tuple[int, ...] = (512, 1024, 8, 8, 2, 1000), **more: Any) -> dict[str, Any]:
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    plain = dict(zip((*names, "vocab_size"), shape, strict=True))
    return {
        "architectures": [architecture],
        "max_position_embeddings": 4096,
        "torch_dtype": "bfloat16",
        **plain,
        **more,
    }


MAMBA = {"mamba_n_heads": 16, "mamba_d_head": 64, "mamba_d_state": 16, "mamba_n_groups": 1}
KINDS = ["mamba"] * 4 + ["attention"] + ["mamba"] * 3
LATENT = {
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "num_key_value_heads": 8,
}
ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 64}
GROUPS = {"n_group": 4, "topk_group": 2}
SMALL: dict[str, tuple[dict[str, Any], int]] = {
    "LlamaForCausalLM": ({}, 18_858_496),
    "LlamaForCausalLM biases": (
        {"head_dim": 32, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}, 15_752_704,
    ),
    "MistralForCausalLM": ({"head_dim": 96}, 21_479_936),
    "MixtralForCausalLM": ({"num_local_experts": 4, "num_experts_per_tok": 2}, 56_623_616),
    "Qwen2ForCausalLM": ({"tie_word_embeddings": True}, 18_352_640),
    "Qwen2MoeForCausalLM": (
        {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "decoder_sparse_step": 2,
         "shared_expert_intermediate_size": 256, "mlp_only_layers": [3]}, 18_875_392,
    ),
    "Qwen3ForCausalLM": ({}, 24_103_424),
    "Qwen3MoeForCausalLM": (
        {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "head_dim": 64, "mlp_only_layers": [0]},
        18_888_192,
    ),
    "Qwen3NextForCausalLM": (
        {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "head_dim": 64,
         "shared_expert_intermediate_size": 128, "linear_num_key_heads": 4, "linear_num_value_heads": 8,
         "linear_key_head_dim": 32, "linear_value_head_dim": 32}, 20_268_064,
    ),
    "Gemma2ForCausalLM": ({"head_dim": 64}, 18_354_688),
    "Gemma3ForCausalLM": ({"head_dim": 64, "sliding_window": 512}, 18_355_712),
    "Phi3ForCausalLM": ({}, 18_858_496),
    "DeepseekV2ForCausalLM": (LATENT | ROUTED | {"first_k_dense_replace": 1, "topk_method": "greedy"}, 12_039_168),
    "DeepseekV3ForCausalLM": (
        LATENT | ROUTED | GROUPS | {"q_lora_rank": 96, "first_k_dense_replace": 2}, 11_839_232 + 6 * 8,
    ),
    "GptOssForCausalLM": ({"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 64}, 56_715_872),
    "JambaForCausalLM": (
        {"num_experts": 4, "num_experts_per_tok": 2, "attn_layer_period": 4, "attn_layer_offset": 2}, 43_977_600,
    ),
    "FalconH1ForCausalLM": (MAMBA | {"mamba_d_ssm": 512, "mamba_d_head": 32}, 25_368_704),
    "Glm4MoeForCausalLM": (
        ROUTED | {"first_k_dense_replace": 1, "attention_bias": True, "use_qk_norm": True, "head_dim": 64},
        14_077_440 + 7 * 8,
    ),
    "MiniMaxM2ForCausalLM": (
        {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 64, "rotary_dim": 32, "scoring_func": "sigmoid"},
        106_976_768 + 8 * 8,
    ),
    "NemotronHForCausalLM": (
        {"hybrid_override_pattern": "M-M*M-M*", "mamba_num_heads": 8, "mamba_head_dim": 64, "n_groups": 2,
         "ssm_state_size": 16, "head_dim": 64}, 7_743_328,
    ),
    "GraniteForCausalLM": ({}, 18_858_496),
    "GraniteMoeHybridForCausalLM": (MAMBA | {"layer_types": KINDS, "shared_intermediate_size": 1024}, 25_497_520),
    "GraniteMoeHybridForCausalLM experts": (
        MAMBA | {"layer_types": KINDS, "shared_intermediate_size": 512, "num_local_experts": 6, "num_experts_per_tok": 2},
        94_728_112,
    ),
    "SmolLM3ForCausalLM": ({}, 18_346_496),
    "Olmo2ForCausalLM": ({}, 18_863_616),
    "Olmo3ForCausalLM": ({"sliding_window": 1024}, 18_863_616),
    "GemmaForCausalLM": ({"head_dim": 64}, 18_346_496),
    "Glm4ForCausalLM": ({"head_dim": 64}, 18_872_832),
    "SeedOssForCausalLM": ({"head_dim": 64}, 18_864_640),
    "Ernie4_5ForCausalLM": ({"head_dim": 64}, 18_346_496),
}  # fmt: skip


@pytest.mark.parametrize("name", SMALL)
def test_weights_of_every_family_are_those_of_transformers(name: str) -> None:
    changes, params = SMALL[name]
    assert spec_from_hf(config(name.split()[0], **changes), "m").num_params() == params


GRANITE_4 = (["mamba"] * 5 + ["attention"] + ["mamba"] * 4) * 4
CARDS: dict[str, tuple[dict[str, Any], float, float]] = {
    "granite-3.3-8b": (
        config("GraniteForCausalLM", (4096, 12800, 40, 32, 8, 49159), tie_word_embeddings=True), 8.17, 40 * 2 * 8 * 128 * 2,
    ),
    "SmolLM3-3B": (config("SmolLM3ForCausalLM", (2048, 11008, 36, 16, 4, 128256)), 3.08, 36 * 2 * 4 * 128 * 2),
    "OLMo-2-7B": (config("Olmo2ForCausalLM", (4096, 11008, 32, 32, 32, 100352)), 7.30, 32 * 2 * 32 * 128 * 2),
    "OLMo-2-32B": (config("Olmo2ForCausalLM", (5120, 27648, 64, 40, 8, 100352)), 32.2, 64 * 2 * 8 * 128 * 2),
    "gemma-7b": (config("GemmaForCausalLM", (3072, 24576, 28, 16, 16, 256000)), 8.54, 28 * 2 * 16 * 256 * 2),
    "GLM-4-9B-0414": (config("Glm4ForCausalLM", (4096, 13696, 40, 32, 2, 151552)), 9.40, 40 * 2 * 2 * 128 * 2),
    "Seed-OSS-36B": (config("SeedOssForCausalLM", (5120, 27648, 64, 80, 8, 155136)), 36.15, 64 * 2 * 8 * 128 * 2),
    "granite-4.0-h-small": (
        config(
            "GraniteMoeHybridForCausalLM", (4096, 768, 40, 32, 8, 100352), layer_types=GRANITE_4, num_local_experts=72,
            num_experts_per_tok=10, shared_intermediate_size=1536, mamba_n_heads=128, mamba_d_head=64, mamba_d_state=128,
            mamba_n_groups=1, tie_word_embeddings=True,
        ), 32.2, 4 * 2 * 8 * 128 * 2,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CARDS)
def test_totals_and_kv_of_published_models(name: str) -> None:
    given, billions, kv = CARDS[name]
    spec = spec_from_hf(given, name)
    assert round(spec.num_params() / 1e9, 2 if billions != 32.2 else 1) == billions
    assert spec.kv_bytes_per_token() == kv


def test_granite_4_holds_a_state_in_its_other_layers() -> None:
    spec = spec_from_hf(CARDS["granite-4.0-h-small"][0], "m")
    conv = 3 * (128 * 64 + 2 * 128) * 2  # three past inputs of values, B and C, bfloat16
    assert spec.state_bytes_per_seq() == 36 * (128 * 64 * 128 * 4 + conv)
    assert spec.num_params(active=True) / 1e9 == pytest.approx(9, abs=0.3)


def test_windows_of_olmo_3_leave_every_fourth_layer_whole() -> None:
    spec = spec_from_hf(config("Olmo3ForCausalLM"), "m")
    assert spec.layer_windows == (4096, 4096, 4096, None) * 2
    listed = ["full_attention", "sliding_attention"] * 4
    assert spec_from_hf(config("Olmo3ForCausalLM", layer_types=listed), "m").layer_windows == (None, 4096) * 4


@pytest.mark.parametrize(
    ("stored", "bits", "computes"),
    [
        ({"quant_method": "fbgemm_fp8"}, 8.0, "fp8"), ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 8.0, "int8"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4.5, ""),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_use_double_quant": True}, 4.127, ""),
        ({"quant_method": "auto-round", "bits": 4, "group_size": 128}, 4.156, ""),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, 8.0, ""),
        ({"quant_method": "awq", "bits": 4, "group_size": 64}, 4.3125, ""),
    ],
)  # fmt: skip
def test_formats_of_checkpoints(stored: dict[str, Any], bits: float, computes: str) -> None:
    spec = spec_from_hf(config("LlamaForCausalLM", quantization_config=stored), "m")
    assert spec.weight_bits == pytest.approx(bits, abs=1e-3) and spec.linear_dtype == computes


def test_modules_left_wide_are_counted_wide() -> None:
    wide = [f"model.layers.{i}.mlp.down_proj" for i in range(8)]
    spec = spec_from_hf(
        config("LlamaForCausalLM", quantization_config={"quant_method": "fbgemm_fp8", "modules_to_not_convert": wide}),
        "m",
    )
    down, block = 8 * 512 * 1024, spec.block_params()
    assert spec.weight_bits == pytest.approx((8 * (block - down) + 16 * down) / block)


@pytest.mark.parametrize(
    ("architecture", "changes", "field"),
    [
        ("GraniteMoeHybridForCausalLM", MAMBA, "layer_types"),
        ("GraniteMoeHybridForCausalLM", MAMBA | {"layer_types": ["rwkv"] * 8}, "rwkv"),
        ("GraniteMoeHybridForCausalLM", MAMBA | {"layer_types": KINDS[:3]}, "3 layer_types for 8 layers"),
        ("Ernie4_5ForCausalLM", {"use_bias": True}, "use_bias"),
        ("LlamaForCausalLM", {"num_hidden_layers": None}, "num_hidden_layers"),
        ("LlamaForCausalLM", {"vocab_size": "many"}, "vocab_size"),
        ("LlamaForCausalLM", {"num_key_value_heads": 3}, "num_kv_heads=3"),
        ("LlamaForCausalLM", {"quantization_config": {"quant_method": "bitsandbytes"}}, "load_in_8bit"),
        ("LlamaForCausalLM", {"quantization_config": {"quant_method": "quark"}}, "quark"),
        ("Qwen3ForCausalLM", {"layer_types": ["full_attention"] * 3, "use_sliding_window": True}, "layer_types"),
        ("OPTForCausalLM", {}, "OPTForCausalLM is not known"),
    ],
)  # fmt: skip
def test_what_is_not_known_is_refused_by_its_field(architecture: str, changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ModelError) as caught:
        spec_from_hf(config(architecture, **changes), "m")
    assert field in str(caught.value) and "\n" not in str(caught.value)
