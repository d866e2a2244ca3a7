"""GGUF files of the families with experts and latent attention: specs and logits, written as llama.cpp's converter does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from logits_oracle import TOLERANCE, TinyModel, difference, prompts, run

from twinfer.core.gguf_spec import spec_from_gguf
from twinfer.core.registry import Registry
from twinfer.core.runtime.families import load_model
from twinfer.core.runtime.linear import dense
from twinfer.core.runtime.stored_blocks import StoredBlocks, dense_of
from twinfer.core.runtime.weights import open_weights
from twinfer.core.spec import ModelSpec

NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_a_proj": "attn_q_a", "self_attn.q_a_layernorm": "attn_q_a_norm", "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa", "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp", "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
}  # fmt: skip
MLA = dict(
    num_key_value_heads=6, kv_lora_rank=16, q_lora_rank=20, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10,
    n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=24, n_shared_experts=2, first_k_dense_replace=1,
)  # fmt: skip
YARN = dict(
    rope_type="yarn", factor=8.0, original_max_position_embeddings=32, rope_theta=10000.0, beta_fast=8.0, beta_slow=1.0,
    mscale=0.707, mscale_all_dim=0.707,
)  # fmt: skip
GROUPS = dict(n_group=4, topk_group=2)
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", "llama", dict(num_local_experts=4, num_experts_per_tok=2)),
    "qwen3moe": (
        "Qwen3Moe",
        "qwen3moe",
        dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=24, head_dim=16, norm_topk_prob=True),
    ),
    "v2-lite-yarn": ("DeepseekV2", "deepseek2", MLA | dict(q_lora_rank=None, rope_parameters=YARN)),
    "v2-groups": (
        "DeepseekV2",
        "deepseek2",
        MLA | GROUPS | dict(topk_method="group_limited_greedy", routed_scaling_factor=3.0),
    ),
    "v3": ("DeepseekV3", "deepseek2", MLA | GROUPS),
}


def write_gguf(path: Path, tiny: TinyModel, architecture: str, split: bool, kind: str = "F32") -> None:
    """The checkpoint; split: the up-projection of latents in two tensors, as since April 2025.  kind: of projections."""
    spec = tiny.spec
    moe, mla = spec.moe, spec.mla
    assert moe is not None
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(spec.num_layers)
    writer.add_context_length(256)
    writer.add_embedding_length(spec.hidden_size)
    writer.add_feed_forward_length(spec.intermediate_size)
    writer.add_head_count(spec.num_heads)
    writer.add_head_count_kv(1 if mla else spec.num_kv_heads)
    writer.add_layer_norm_rms_eps(spec.norm_eps)
    writer.add_rope_freq_base(spec.rope_theta)
    writer.add_token_list([f"t{i}" for i in range(spec.vocab_size)])
    writer.add_eos_token_id(1)
    writer.add_bos_token_id(0)
    writer.add_expert_count(moe.num_experts)
    writer.add_expert_used_count(moe.top_k)
    if architecture != "llama":
        writer.add_expert_feed_forward_length(moe.intermediate_size)
    if mla is None:
        writer.add_key_length(spec.head_dim)
        writer.add_value_length(spec.head_dim)
    else:
        writer.add_rope_dimension_count(mla.qk_rope_head_dim)
        writer.add_kv_lora_rank(mla.kv_lora_rank)
        if mla.q_lora_rank:
            writer.add_q_lora_rank(mla.q_lora_rank)
        if split:
            writer.add_key_length(mla.latent_dim)
            writer.add_value_length(mla.kv_lora_rank)
            writer.add_key_length_mla(spec.head_dim)
            writer.add_value_length_mla(mla.v_head_dim)
        else:
            writer.add_key_length(spec.head_dim)
            writer.add_value_length(mla.v_head_dim)
        writer.add_leading_dense_block_count(moe.first_dense_layers)
        writer.add_expert_shared_count(moe.num_shared)
        writer.add_expert_weights_scale(moe.scale)
        writer.add_expert_weights_norm(moe.renormalize)
        writer.add_expert_gating_func(
            gguf.ExpertGatingFuncType.SIGMOID if moe.score_bias else gguf.ExpertGatingFuncType.SOFTMAX
        )
        if moe.num_groups > 1:
            writer.add_uint32(f"{architecture}.expert_group_count", moe.num_groups)
            writer.add_uint32(f"{architecture}.expert_group_used_count", moe.top_groups)
    if spec.rope_scaling:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(spec.rope_scaling["factor"])
        writer.add_rope_scaling_orig_ctx_len(spec.rope_scaling["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(spec.rope_scaling["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(spec.rope_scaling["beta_slow"])
        writer.add_rope_scaling_yarn_log_mul(0.1 * spec.rope_scaling["mscale_all_dim"])
    for name, value in stored(tiny, architecture, split):
        if kind == "F32" or value.ndim == 1 or name.startswith(("token_embd", "output")) or "gate_inp" in name:
            writer.add_tensor(name, np.ascontiguousarray(value))
        else:
            number = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(value), number), raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def stored(tiny: TinyModel, architecture: str, split: bool) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    spec, source = tiny.spec, open_weights(tiny.folder)
    assert spec.moe is not None
    for name in source.names():
        value = source.get(name).numpy()
        part, _, kind = name.rpartition(".")
        if part in NAMES:
            yield f"{NAMES[part]}.{kind}", value
            continue
        _, _, layer, part = part.split(".", 3)
        block = f"blk.{layer}"
        if part.startswith("mlp.experts."):
            _, _, e, projection = part.split(".")
            if e == "0":
                names = [
                    f"model.layers.{layer}.mlp.experts.{i}.{projection}.weight" for i in range(spec.moe.num_experts)
                ]
                stack = f"{block}.ffn_{projection.removesuffix('_proj')}_exps.weight"
                yield stack, torch.stack([source.get(n) for n in names]).numpy()
        elif kind == "e_score_correction_bias":
            yield f"{block}.exp_probs_b.bias", value
        elif part == "self_attn.kv_b_proj" and split:
            assert spec.mla is not None
            by_head = value.reshape(spec.num_heads, -1, spec.mla.kv_lora_rank)
            yield f"{block}.attn_k_b.weight", by_head[:, : spec.mla.qk_nope_head_dim].swapaxes(1, 2)
            yield f"{block}.attn_v_b.weight", by_head[:, spec.mla.qk_nope_head_dim :]
        else:
            yield f"{block}.{NAMES[part]}.{kind}", interleaved(value, part, architecture, spec)


def interleaved(value: np.ndarray[Any, Any], part: str, architecture: str, spec: ModelSpec) -> np.ndarray[Any, Any]:
    if architecture != "llama" or part not in ("self_attn.q_proj", "self_attn.k_proj"):
        return value
    heads = spec.num_heads if part == "self_attn.q_proj" else spec.num_kv_heads
    return value.reshape(heads, 2, spec.head_dim // 2, -1).swapaxes(1, 2).reshape(value.shape)


@pytest.mark.parametrize(("case", "split"), [(case, True) for case in CASES] + [("v3", False)])
def test_spec_and_logits_equal_the_checkpoint(case: str, split: bool, tmp_path: Path) -> None:
    architecture, name, changes = CASES[case]
    tiny = TinyModel(tmp_path, architecture, changes)
    path = tmp_path / "m.gguf"
    write_gguf(path, tiny, name, split)
    found = spec_from_gguf(path)
    assert found == replace(tiny.spec, name=found.name)
    source = open_weights(path)
    for tensor in open_weights(tiny.folder).names():
        assert source.shape(tensor) == tuple(source.get(tensor).shape)
    tiny.model = load_model(found, path, Registry(entry_points=False))
    for sequence, got in zip(prompts(23, 9), run(tiny, prompts(23, 9), [[14, 8, 1], [9]], "shuffled"), strict=True):
        assert difference(got, tiny.expected(sequence)) <= TOLERANCE


def test_quantized_experts_and_one_tensor_per_expert(tmp_path: Path) -> None:
    """Each expert is cut out of the stack block by block; old files name every expert."""
    experts = np.random.default_rng(1).standard_normal((3, 4, 64)).astype(np.float32)
    kind = gguf.GGMLQuantizationType.Q8_0
    blocks = gguf.quants.quantize(experts, kind)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_head_count(1)
    writer.add_tensor("blk.0.ffn_gate_exps.weight", blocks, raw_dtype=kind)
    for e in range(3):
        writer.add_tensor(f"blk.0.ffn_down.{e}.weight", experts[e])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    source = open_weights(tmp_path / "m.gguf")
    whole = torch.from_numpy(gguf.quants.dequantize(blocks, kind))
    for e in range(3):
        assert torch.equal(source.get(f"model.layers.0.mlp.experts.{e}.gate_proj.weight"), whole[e])
        assert torch.equal(source.get(f"model.layers.0.mlp.experts.{e}.down_proj.weight"), torch.from_numpy(experts[e]))


@pytest.mark.parametrize("mode", ["absorbed", "naive"])
def test_linears_take_the_blocks_of_the_file(mode: str, tmp_path: Path) -> None:
    """Experts are cut out of stacks and rotary rows reordered as blocks: the values are those of the floats."""
    changes = MLA | GROUPS | dict(
        hidden_size=64, num_attention_heads=4, num_key_value_heads=4, kv_lora_rank=32, q_lora_rank=32,
        qk_nope_head_dim=32, qk_rope_head_dim=8, v_head_dim=16, moe_intermediate_size=32, intermediate_size=96,
    )  # fmt: skip
    tiny = TinyModel(tmp_path, "DeepseekV3", changes)
    path, registry = tmp_path / "m.gguf", Registry(entry_points=False)
    write_gguf(path, tiny, "deepseek2", split=mode == "absorbed", kind="Q8_0")
    spec = spec_from_gguf(path)
    spec = replace(spec, mla=replace(spec.mla, absorbed=mode == "absorbed"))
    tiny.spec, sequence = spec, prompts(17)[0]
    asked: set[str] = set()

    def linear(name: str, weight: Any, bias: torch.Tensor | None) -> Any:
        if isinstance(weight, StoredBlocks):
            asked.add(name.split(".", 3)[-1])
        return dense(name, dense_of(weight), bias)

    linear.takes_blocks = True  # type: ignore[attr-defined]
    got = []
    for factory in (None, linear):
        tiny.model = load_model(spec, path, registry, dtype=torch.float32, linear=factory)
        got.append(run(tiny, [sequence], [[11, 5, 1]], "shuffled")[0])
    assert difference(got[0], got[1]) <= TOLERANCE
    projections = {
        "q_down_proj",
        "q_up_proj",
        "kv_down_proj",
        "o_proj",
        "experts.7.gate_up_proj",
        "experts.0.down_proj",
    }
    assert asked >= projections | {"shared_experts.down_proj", "gate_up_proj"}
    assert ("kv_up_proj" in asked) == (mode == "naive")
