"""Specs, GGUF headers and ops against independent readers: transformers' models (without memory), gguf, torch's counter."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import gguf
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig

from twinfer.core.catalog import hf_config_of, resolve_spec, spec_from_hf, spec_names
from twinfer.core.errors import ModelError
from twinfer.core.gguf_header import Length, read_gguf_header
from twinfer.core.hf_config import FAMILIES
from twinfer.core.work import StepShape, step_ops, total


def hf_config(name: str) -> PreTrainedConfig:
    config = copy.deepcopy(dict(hf_config_of(name) or {}))
    for ours in ("twinfer", "quantization_config"):
        config.pop(ours, None)
    config["model_type"] = {"kimi_k2": "deepseek_v3"}.get(config["model_type"], config["model_type"])
    return AutoConfig.for_model(**config)


def weights_of(config: PreTrainedConfig) -> int:
    """Weights of transformers' own model of `config`, which takes no memory."""
    sees = hasattr(config, "vision_config")
    with torch.device("meta"):
        model = (AutoModelForImageTextToText if sees else AutoModelForCausalLM).from_config(config)
    model.tie_weights()
    # corrections of router scores are buffers there, weights of the checkpoint here
    corrections = sum(b.numel() for name, b in model.named_buffers() if name.endswith("e_score_correction_bias"))
    return sum(p.numel() for p in model.parameters()) + corrections


@pytest.mark.parametrize("name", spec_names())
def test_parameters_and_layer_pattern(name: str) -> None:
    config, spec = hf_config(name), resolve_spec(name)
    assert weights_of(config) == spec.num_params()
    types = getattr(config.get_text_config(), "layer_types", None)
    if types and spec.family != "nemotron_h":  # lists mixers and MLPs one by one
        windowed = ("sliding_attention", "chunked_attention")
        assert [t in windowed for t in types] == [spec.window(i) is not None for i in range(len(types))]
        assert [t != "linear_attention" for t in types] == [spec.is_attention(i) for i in range(len(types))]


@pytest.mark.parametrize("name", spec_names())
def test_config_as_transformers_writes_it_gives_the_same_spec(name: str) -> None:
    """transformers 5 renames fields (`dtype`, `rope_parameters`, `num_local_experts`)."""
    plain = {k: v for k, v in (hf_config_of(name) or {}).items() if k not in ("twinfer", "quantization_config")}
    assert spec_from_hf(hf_config(name).to_dict(), name) == spec_from_hf(plain, name)


SHAPES = (
    "architectures", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "max_position_embeddings",
)  # fmt: skip


@pytest.mark.parametrize("family", ["llama", "mistral", "mixtral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3"])
def test_what_a_configuration_leaves_out_is_what_transformers_assumes(family: str) -> None:
    """Only shapes are given, once to transformers' configuration class and once to us."""
    sizes = dict(zip(SHAPES[1:], (99, 64, 80, 32, 4, 2, 128), strict=True))
    options = {"use_sliding_window": True} if family.startswith("qwen") else {}
    written = AutoConfig.for_model(family, **sizes, **options).to_dict()
    given = {"architectures": [FAMILIES[family]], **sizes, **options}
    if family == "mixtral":
        given |= {"num_local_experts": 8, "num_experts_per_tok": 2}
    whole, ours = spec_from_hf(written | {"architectures": [FAMILIES[family]]}, "m"), spec_from_hf(given, "m")
    dtypes = {name: getattr(ours, name) for name in ("dtype", "kv_dtype", "bos_token_id", "eos_token_ids")}
    assert ours == replace(whole, **dtypes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(torch_dtype="int8"), "dtype 'int8'; known: float64, float32"),
        (dict(torch_dtype="float8_e4m3fn"), "dtype 'float8_e4m3fn'"),
        (dict(torch_dtype="float13"), "dtype 'float13'"),
        (dict(partial_rotary_factor=0.5), "partial_rotary_factor=0.5 is not known for LlamaForCausalLM"),
        (dict(use_bidirectional_attention=True), "use_bidirectional_attention=True, which is not supported"),
        (dict(quantization_config={"quant_method": "quanto"}), "stored as 'quanto' are not known"),
        (dict(quantization_config={"quant_method": "bitsandbytes"}), "neither load_in_8bit nor load_in_4bit"),
    ],
)
def test_oddities_are_refused(changes: dict[str, object], words: str) -> None:
    sizes = dict(zip(SHAPES[1:], (99, 64, 80, 2, 4, 2, 128), strict=True))
    with pytest.raises(ModelError, match=words):
        spec_from_hf({"architectures": ["LlamaForCausalLM"], **sizes, **changes}, "m")


def test_header_agrees_with_the_reference_reader(smollm2_gguf: Path) -> None:
    ours, reference = read_gguf_header(smollm2_gguf), gguf.GGUFReader(smollm2_gguf)
    assert list(ours.tensors) == [t.name for t in reference.tensors]
    for tensor in reference.tensors:
        info = ours.tensors[tensor.name]
        assert info.shape == tuple(int(n) for n in reversed(tensor.shape))
        assert (info.type, info.nbytes, info.offset) == (tensor.tensor_type.name, tensor.n_bytes, tensor.data_offset)
    fields = {name for name in reference.fields if not name.startswith("GGUF.")}
    assert set(ours.metadata) == fields
    assert ours.metadata["tokenizer.ggml.tokens"] == Length(49152)
    for name in ("llama.block_count", "general.architecture", "llama.rope.freq_base", "tokenizer.ggml.add_bos_token"):
        assert ours.metadata[name] == reference.fields[name].contents()


@pytest.mark.parametrize("length", [1, 24])
def test_flops_of_a_forward_pass(tiny_llama_dir: Path, length: int) -> None:
    """Eager attention computes the masked half of the products too; ours is the half that a mask leaves."""
    model = AutoModelForCausalLM.from_pretrained(tiny_llama_dir, attn_implementation="eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, length, dtype=torch.long), use_cache=False)
    counts = {str(op): n for op, n in counter.get_flop_counts()["Global"].items()}
    spec = resolve_spec(tiny_llama_dir)
    assert set(counts) == {"aten.mm", "aten.bmm"}
    ops = step_ops(spec, StepShape(StepShape.prefill(length).rows, num_logits=length))
    assert total([op for op in ops if op.kind == "gemm"], "flops") == counts["aten.mm"]
    ours = total([op for op in ops if op.kind == "attention"], "flops")
    assert ours / counts["aten.bmm"] == pytest.approx((length + 1) / (2 * length))


TINY = dict(
    vocab_size=99, hidden_size=64, intermediate_size=80, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=128,
)  # fmt: skip
EXPERTS = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=24)
DELTA = dict(
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=12,
    linear_conv_kernel_dim=4, layer_types=["linear_attention", "full_attention"] * 2,
)  # fmt: skip
LATENT = dict(
    q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=12, n_routed_experts=8,
    num_experts_per_tok=2, moe_intermediate_size=24, n_shared_experts=1, n_group=1, topk_group=1, index_topk=16,
    index_n_heads=2, index_head_dim=16, num_key_value_heads=4,
)  # fmt: skip
QWEN_EYES = dict(
    depth=2, hidden_size=32, intermediate_size=40, num_heads=2, out_hidden_size=64, patch_size=4,
    spatial_merge_size=2, temporal_patch_size=2, num_position_embeddings=16, deepstack_visual_indexes=[0],
)  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "architecture", "changes"),
    [
        ("qwen2_moe", "Qwen2MoeForCausalLM", EXPERTS | dict(shared_expert_intermediate_size=40, mlp_only_layers=[0])),
        ("qwen3_next", "Qwen3NextForCausalLM", EXPERTS | DELTA | dict(shared_expert_intermediate_size=40)),
        ("qwen3_5_text", "Qwen3_5ForCausalLM", DELTA),
        ("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", EXPERTS | DELTA | dict(shared_expert_intermediate_size=40)),
        ("minimax_m2", "MiniMaxM2ForCausalLM", dict(num_local_experts=8, num_experts_per_tok=2)),
        ("glm4_moe", "Glm4MoeForCausalLM", dict(
            n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=24, first_k_dense_replace=2,
            attention_bias=True, use_qk_norm=True, n_shared_experts=2)),
        ("glm_moe_dsa", "GlmMoeDsaForCausalLM", LATENT | dict(first_k_dense_replace=1)),
        ("deepseek_v32", "DeepseekV32ForCausalLM", LATENT | dict(first_k_dense_replace=1)),
        ("nemotron_h", "NemotronHForCausalLM", dict(
            hybrid_override_pattern="M-MM*E*-ME", mamba_num_heads=4, mamba_head_dim=8, n_groups=2, ssm_state_size=16,
            n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=24, moe_latent_size=32,
            moe_shared_expert_intermediate_size=40)),
        ("jamba", "JambaForCausalLM", dict(
            head_dim=..., attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1,
            num_experts=8, num_experts_per_tok=2, mamba_d_state=8, mamba_dt_rank=6)),
        ("falcon_h1", "FalconH1ForCausalLM", dict(
            mamba_d_ssm=96, mamba_n_heads=8, mamba_n_groups=2, mamba_d_state=16, mamba_rms_norm=False)),
        ("falcon_h1", "FalconH1ForCausalLM", dict(
            mamba_d_ssm=96, mamba_n_heads=8, mamba_n_groups=1, mamba_d_state=16, mamba_rms_norm=True)),
        ("llama4_text", "Llama4ForCausalLM", dict(
            num_local_experts=4, intermediate_size_mlp=96, interleave_moe_layer_step=2)),
    ],
)  # fmt: skip
def test_weights_of_families_that_are_only_simulated(kind: str, architecture: str, changes: dict[str, object]) -> None:
    sizes = {key: value for key, value in (TINY | changes).items() if value is not ...}
    config = AutoConfig.for_model(kind, **sizes)
    spec = spec_from_hf({**config.to_dict(), "architectures": [architecture]}, "m")
    assert spec.num_params() == weights_of(config)


@pytest.mark.parametrize(
    ("kind", "architecture", "text", "eyes", "outer"),
    [
        ("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", {}, QWEN_EYES, {}),
        ("qwen3_vl", "Qwen3VLForConditionalGeneration", {}, QWEN_EYES, {}),
        ("qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration", EXPERTS, QWEN_EYES, {}),
        ("qwen3_5", "Qwen3_5ForConditionalGeneration", DELTA, QWEN_EYES, {}),
        ("gemma3", "Gemma3ForConditionalGeneration", dict(model_type="gemma3_text"), dict(
            hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=4,
            vision_use_head=False), dict(mm_tokens_per_image=4)),
        ("llama4", "Llama4ForConditionalGeneration", dict(num_local_experts=4, intermediate_size_mlp=96), dict(
            hidden_size=32, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=4,
            projector_input_dim=24, projector_output_dim=24, vision_output_dim=24), {}),
    ],
)  # fmt: skip
def test_weights_of_models_that_see(
    kind: str, architecture: str, text: dict[str, object], eyes: dict[str, object], outer: dict[str, object]
) -> None:
    config = AutoConfig.for_model(kind, text_config=TINY | text, vision_config=eyes, **outer)
    spec = spec_from_hf({**config.to_dict(), "architectures": [architecture]}, "m")
    assert spec.vision is not None and spec.num_params() == weights_of(config)
