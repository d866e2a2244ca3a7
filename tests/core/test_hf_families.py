"""Hybrid, sparse, seeing and quantized models as their config.json describes them: layers, states, formats, refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from twinfer.core.catalog import SPEC_DIR, resolve_spec, spec_from_hf
from twinfer.core.errors import ModelError
from twinfer.core.hf_families import FAMILIES, REFUSED
from twinfer.core.model_parts import LinearAttentionSpec, SparseIndexSpec
from twinfer.core.registry import Registry
from twinfer.core.spec import ModelSpec
from twinfer.core.technique import Needs


def small(**changes: Any) -> dict[str, Any]:
    base = dict(
        architectures=["LlamaForCausalLM"], num_hidden_layers=4, hidden_size=64, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, intermediate_size=80, vocab_size=99, max_position_embeddings=512,
        torch_dtype="bfloat16",
    )  # fmt: skip
    return base | changes


# --- layers -----------------------------------------------------------------------------------------


def test_linear_layers_hold_a_state_and_no_tokens() -> None:
    spec = resolve_spec("qwen3-next-80b")
    assert (spec.num_attention_layers, spec.num_linear_layers) == (12, 36)
    assert [i for i in range(8) if spec.is_attention(i)] == [3, 7]
    assert spec.kv_bytes_per_token() == 12 * 2 * 2 * 256 * 2
    state = 32 * 128 * 128 * 4  # heads x key x value, float32
    conv = 3 * (2 * 16 * 128 + 32 * 128) * 2  # three past inputs of queries, keys and values, bfloat16
    assert spec.state_bytes_per_seq() == 36 * (state + conv)
    assert spec.state_bytes_per_seq(tp=4) == spec.state_bytes_per_seq() / 4
    assert resolve_spec("llama-3-8b").state_bytes_per_seq() == 0


def test_nemotron_lists_mixers_and_mlps() -> None:
    spec = spec_from_hf(
        small(
            architectures=["NemotronHForCausalLM"], hybrid_override_pattern="M-MM*E*-ME", mamba_num_heads=4,
            mamba_head_dim=8, n_groups=2, ssm_state_size=16, n_routed_experts=8, num_experts_per_tok=2,
            moe_intermediate_size=24, moe_shared_expert_intermediate_size=40,
        ),
        "m",
    )  # fmt: skip
    assert spec.layer_kinds == ("linear", "linear", "linear", "attention", "attention", "linear")
    assert spec.bare_layers == (1, 2) and [i for i in range(6) if spec.is_moe(i)] == [3, 5]
    assert (spec.num_dense_layers, spec.num_norms) == (2, 10 + 1)
    assert spec.mlp_params(1) == 0 and spec.mlp_params(0) == 2 * 64 * 80
    words = spec_from_hf(
        small(architectures=["NemotronHForCausalLM"], layers_block_type=["mamba", "mlp", "attention", "mlp"]), "m"
    )
    assert words.layer_kinds == ("linear", "attention") and words.num_dense_layers == 2


def test_chunks_of_llama_4_are_windows() -> None:
    scout = resolve_spec("llama-4-scout")
    assert scout.layer_windows[:8] == (8192, 8192, 8192, None) * 2
    assert scout.num_moe_layers == 48 and resolve_spec("llama-4-maverick").num_moe_layers == 24


def test_a_sparse_index_has_keys_of_its_own() -> None:
    spec = resolve_spec("deepseek-v3.2")
    v3 = resolve_spec("deepseek-v3")
    assert spec.kv_bytes_per_token() - v3.kv_bytes_per_token() == 61 * (128 + 4)
    assert spec.num_params() - v3.num_params() == 61 * (1536 * 64 * 128 + 7168 * 128 + 2 * 128 + 7168 * 64)
    half = replace(spec, sparse_index=replace(spec.sparse_index, layers=30))
    assert half.index_bytes_per_token == 30 * 132


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(layer_kinds=("attention",)), "1 layer_kinds for 2 layers"),
        (dict(layer_kinds=("linear", "mamba")), "layer_kinds are 'attention', 'linear' and 'both'"),
        (dict(layer_kinds=("linear", "attention")), "need linear_attention"),
        (dict(layer_kinds=("linear", "linear")), "without any layer of attention"),
    ],
)
def test_layer_kinds_are_checked(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        ModelSpec(
            name="m", family="x", num_layers=2, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16,
            intermediate_size=80, vocab_size=99, max_context=64, **changes,
        )  # fmt: skip


def test_parts_check_themselves() -> None:
    with pytest.raises(ModelError, match="'rwkv' is not known"):
        LinearAttentionSpec(kind="rwkv", key_heads=1, value_heads=1, key_dim=8, value_dim=8, conv_width=4)
    with pytest.raises(ModelError, match="key_heads=3 does not divide value_heads=4"):
        LinearAttentionSpec(kind="mamba2", key_heads=3, value_heads=4, key_dim=8, value_dim=8, conv_width=4)
    with pytest.raises(ModelError, match=r"compression=0\.5"):
        replace(resolve_spec("qwen2.5-vl-7b").vision, compression=0.5)
    assert SparseIndexSpec(heads=2, dim=64, top_k=8, layers=1).bytes_per_token == 68


# --- images -----------------------------------------------------------------------------------------


def test_an_image_is_a_prefix_of_tokens() -> None:
    gemma, qwen = resolve_spec("gemma-3-27b").vision, resolve_spec("qwen2.5-vl-7b").vision
    assert gemma is not None and qwen is not None
    assert gemma.prefix_tokens == gemma.tokens_of(100, 5000) == 256, "one size for all"
    assert qwen.tokens_of(1024, 1024) == qwen.prefix_tokens == 37 * 37, "a token per 28 x 28 pixels"
    assert qwen.tokens_of(1920, 1080) == 69 * 39
    assert replace(qwen, compression=4.0).prefix_tokens == round(37 * 37 / 4)
    assert gemma.usual == (1, 64 * 64, 256)


def test_internvl_names_its_language_model_inside() -> None:
    """InternVL3-8B: a Qwen2.5-7B with another vocabulary behind InternViT-300M; 7,944,373,760 weights on the hub."""
    text = json.loads((SPEC_DIR / "qwen2.5-7b.json").read_text()) | {"vocab_size": 151674}
    eyes = dict(
        hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=16, image_size=448,
        patch_size=14,
    )  # fmt: skip
    config = dict(architectures=["InternVLChatModel"], downsample_ratio=0.5, llm_config=text, vision_config=eyes)
    spec = spec_from_hf(config, "m")
    assert (spec.family, spec.num_params()) == ("qwen2", 7_944_373_760)
    assert spec.vision is not None and spec.vision.prefix_tokens == 256


def test_the_engine_loads_no_encoder(tmp_path: Path) -> None:
    from twinfer.core.config import EngineConfig
    from twinfer.core.device import load_device
    from twinfer.core.provision import provision

    eyes = dict(
        hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=4
    )
    config = dict(
        architectures=["Gemma3ForConditionalGeneration"], text_config=small(), vision_config=eyes, mm_tokens_per_image=4
    )
    spec = spec_from_hf(config, "m")
    assert spec.vision is not None
    for world, sees in (("engine", False), ("simulator", True)):
        setup = provision(
            EngineConfig(model="m", num_kv_blocks=8, max_model_len=64), spec, Registry(entry_points=False),
            load_device("cpu"), world=world,
        )  # fmt: skip
        assert (setup.model.vision is not None) == sees and ("vision" in setup.reasons) == (not sees)


# --- formats of checkpoints -------------------------------------------------------------------------

MIXTRAL = small(architectures=["MixtralForCausalLM"], num_local_experts=8, num_experts_per_tok=2)
NVFP4 = {"num_bits": 4, "type": "float", "group_size": 16}
INT4 = {"num_bits": 4, "type": "int", "group_size": 32, "symmetric": True}
FP8 = {"num_bits": 8, "type": "float"}
ATTENTION = 64 * 64 + 2 * 64 * 32 + 64 * 64
EXPERTS = 8 * 3 * 64 * 80
ROUTER = 8 * 64


def stored(q: dict[str, Any], **changes: Any) -> ModelSpec:
    return spec_from_hf(MIXTRAL | {"quantization_config": q} | changes, "m")


def test_experts_of_another_format_are_told_apart() -> None:
    group = {"weights": INT4, "input_activations": None, "targets": ["Linear"]}
    q = {"quant_method": "compressed-tensors", "config_groups": {"g": group}, "ignore": ["lm_head", "re:.*self_attn.*"]}
    spec = stored(q)
    assert spec.expert_bits == 4.5 and spec.linear_bits == pytest.approx(16)
    assert spec.weight_bits == pytest.approx(
        (EXPERTS * 4.5 + (ATTENTION + ROUTER) * 16) / (EXPERTS + ATTENTION + ROUTER)
    )
    assert (spec.linear_dtype, spec.expert_dtype) == ("", ""), "weights alone"
    assert spec.extra["stored_as"] == "compressed-tensors"


@pytest.mark.parametrize("prefix", ["model.", "language_model.model.", "model.language_model."])
def test_modules_left_wide_are_found_under_any_prefix(prefix: str) -> None:
    wide = [f"{prefix}layers.{i}.self_attn*" for i in range(4)]
    group = {"weights": NVFP4, "input_activations": NVFP4, "targets": ["Linear"]}
    spec = stored({"quant_method": "modelopt", "quant_algo": "NVFP4", "config_groups": {"g": group}, "ignore": wide})
    assert (spec.expert_bits, spec.expert_dtype, spec.linear_dtype) == (4.5, "fp4", "")
    half = stored({"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": wide[:2]})
    assert half.linear_bits == pytest.approx(
        (2 * ATTENTION * (16 + 4.5) + 4 * ROUTER * 16) / (4 * (ATTENTION + ROUTER))
    )


def test_groups_name_their_targets() -> None:
    groups = {
        "a": {
            "weights": FP8,
            "input_activations": FP8,
            "targets": [f"model.layers.{i}.self_attn.o_proj" for i in range(4)],
        },
        "b": {
            "weights": NVFP4,
            "input_activations": NVFP4,
            "targets": [f"model.layers.{i}.mlp.experts" for i in range(4)],
        },
    }
    spec = stored({"quant_method": "modelopt", "config_groups": groups})
    rest = ATTENTION - 64 * 64
    assert spec.expert_bits == 4.5
    assert spec.linear_bits == pytest.approx((64 * 64 * 8 + (rest + ROUTER) * 16) / (ATTENTION + ROUTER))


def test_fp8_leaves_out_the_modules_that_are_named() -> None:
    plain = stored({"quant_method": "fp8", "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate"]})
    assert (plain.weight_bits, plain.expert_bits, plain.linear_dtype) == (8.0, None, "fp8"), "routers are wide anyway"
    wide = [f"model.layers.{i}.self_attn" for i in range(4)]
    spec = stored({"quant_method": "fp8", "modules_to_not_convert": wide})
    assert (spec.expert_bits, spec.expert_dtype) == (8.0, "fp8") and spec.linear_bits == pytest.approx(16)


def test_kv_format_of_a_checkpoint_holds_until_another_is_asked_for() -> None:
    for q in (
        {
            "quant_algo": "FP8",
            "kv_cache_scheme": "FP8",
            "config_groups": {"g": {"weights": FP8, "input_activations": FP8}},
        },
        {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"},
    ):
        spec = stored(q)
        assert (spec.weight_bits, spec.linear_dtype, spec.kv_dtype) == (pytest.approx(8, rel=0.01), "fp8", "fp8")
        assert spec.expert_bits in (None, 8.0)
        assert spec.with_dtypes("float16").kv_dtype == "fp8"


def test_a_side_file_says_how_weights_are_stored(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(small()))
    plain = resolve_spec(tmp_path)
    side = {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(side))
    spec = resolve_spec(tmp_path)
    assert plain.weight_bits is None and spec.weight_bits == pytest.approx(8, rel=0.01) and spec.kv_dtype == "fp8"


def test_sizes_of_published_checkpoints() -> None:
    """Bytes of the safetensors files, as the hub lists them."""
    assert resolve_spec("gpt-oss-120b").weight_bytes() == pytest.approx(65.2e9, rel=0.01)
    assert resolve_spec("deepseek-v3").weight_bytes() == pytest.approx(672e9, rel=0.01)


@pytest.mark.parametrize(
    ("q", "words"),
    [
        ({"quant_method": "modelopt", "quant_algo": "W2A2"}, "quant_algo 'W2A2' is not known"),
        ({"quant_method": "hqq"}, "'hqq' are not known"),
    ],
)
def test_unknown_formats_are_refused(q: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        stored(q)


def test_quantized_weights_were_never_float32() -> None:
    config = {k: v for k, v in MIXTRAL.items() if k != "torch_dtype"}
    assert spec_from_hf(config, "m").dtype == "float32"
    assert spec_from_hf(config | {"quantization_config": {"quant_method": "fp8"}}, "m").dtype == "bfloat16"


# --- refusals ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", REFUSED)
def test_what_would_come_out_wrong_is_refused_with_the_reason(architecture: str) -> None:
    with pytest.raises(ModelError) as caught:
        spec_from_hf(small(architectures=[architecture]), "m")
    assert REFUSED[architecture] in str(caught.value) and "\n" not in str(caught.value)
    assert architecture not in FAMILIES.values()


@pytest.mark.parametrize(
    ("architecture", "changes", "words"),
    [
        ("Qwen3NextForCausalLM", dict(layer_types=["linear_attention"] * 3), "3 layer_types for 4 layers"),
        ("Qwen3NextForCausalLM", dict(layer_types=["rwkv"] * 4), "layer_types rwkv"),
        ("NemotronHForCausalLM", dict(hybrid_override_pattern="M-X"), "block 'X' is not known"),
        ("NemotronHForCausalLM", dict(hybrid_override_pattern="-M*"), "without a mixer before it"),
        ("NemotronHForCausalLM", {}, "lacks 'hybrid_override_pattern'"),
        ("MiniMaxM2ForCausalLM", dict(scoring_func="softmax"), "it must be 'sigmoid'"),
        ("Qwen3VLForConditionalGeneration", {}, "lacks 'text_config'"),
    ],
)
def test_damaged_files(architecture: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        spec_from_hf(small(architectures=[architecture], **changes), "m")


@pytest.mark.parametrize(
    "name", ["qwen3-next-80b", "nemotron-3-nano-30b", "llama-4-scout", "qwen3-vl-8b", "deepseek-v3.2"]
)
def test_the_engine_runs_none_of_them(name: str) -> None:
    model = resolve_spec(name)
    families = [item.cls for item in Registry(entry_points=False).all("model_family") if item.cls.serves(model)]
    assert all(family.why_not(Needs(model=model)) for family in families)
