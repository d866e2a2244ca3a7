"""Every dense family that GGUF defines: the spec read from a header, and logits against transformers.

The files are written here the way llama.cpp's converter lays them out: interleaved q and k (llama), norms as 1 + w
(gemma), joined projections (phi3), rope factors as tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from logits_oracle import TOLERANCE, TinyModel, difference, prompts, run

from twinfer.core.errors import ModelError
from twinfer.core.gguf_spec import spec_from_gguf
from twinfer.core.registry import Registry
from twinfer.core.runtime.families import load_model
from twinfer.core.runtime.rope import rope_frequencies
from twinfer.core.spec import ModelSpec

NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.qkv_proj": "attn_qkv", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.gate_up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
GEMMA = {
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip
SHORT, LONG = [1.0, 1.1, 1.3, 1.7], [1.5, 2.0, 5.0, 9.0]
LLAMA3 = dict(
    rope_type="llama3", rope_theta=10000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=32,
)  # fmt: skip
YARN = dict(
    rope_type="yarn", rope_theta=10000.0, factor=8.0, original_max_position_embeddings=32, beta_fast=8.0, beta_slow=1.0
)
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("Llama", "llama", {}),
    "llama-biases-tied": ("Llama", "llama", dict(attention_bias=True, mlp_bias=True, tie_word_embeddings=True)),
    "llama3": ("Llama", "llama", dict(rope_parameters=LLAMA3)),
    "llama-yarn": (
        "Llama", "llama", dict(rope_parameters=YARN),
    ),
    "qwen2": ("Qwen2", "qwen2", {}),
    "qwen3": ("Qwen3", "qwen3", dict(head_dim=16)),
    "gemma2": ("Gemma2", "gemma2", dict(head_dim=12, query_pre_attn_scalar=12, sliding_window=7)),
    "gemma3": (
        "Gemma3", "gemma3",
        dict(
            head_dim=12, query_pre_attn_scalar=12, sliding_window=7, num_hidden_layers=7,
            rope_parameters=dict(
                full_attention=dict(rope_type="linear", factor=8.0, rope_theta=1e6),
                sliding_attention=dict(rope_type="default", rope_theta=1e4),
            ),
        ),
    ),
    "phi3": ("Phi3", "phi3", dict(sliding_window=9)),
    "phi3-longrope": (
        "Phi3", "phi3",
        dict(
            original_max_position_embeddings=64,
            rope_parameters=dict(rope_type="longrope", short_factor=SHORT, long_factor=LONG, rope_theta=10000.0),
        ),
    ),
}  # fmt: skip


def write_gguf(path: Path, model: TinyModel, architecture: str) -> None:
    """The checkpoint of `model` as a float32 GGUF file."""
    import gguf

    spec, rope = model.spec, model.spec.rope_scaling or {}
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(spec.num_layers)
    writer.add_context_length(spec.max_context)
    writer.add_embedding_length(spec.hidden_size)
    writer.add_feed_forward_length(spec.intermediate_size)
    writer.add_head_count(spec.num_heads)
    writer.add_head_count_kv([spec.num_kv_heads] * spec.num_layers)  # as some converters do
    writer.add_key_length(spec.head_dim)
    writer.add_value_length(spec.head_dim)
    writer.add_layer_norm_rms_eps(spec.norm_eps)
    writer.add_rope_freq_base(spec.rope_theta)
    writer.add_rope_dimension_count(int(spec.head_dim * spec.partial_rotary))
    writer.add_vocab_size(spec.vocab_size)
    writer.add_token_list([f"t{i}" for i in range(spec.vocab_size)])
    writer.add_eos_token_id(1)
    writer.add_bos_token_id(0)
    if spec.layer_windows:
        writer.add_sliding_window(next(w for w in spec.layer_windows if w))
    if spec.attn_softcap:
        writer.add_attn_logit_softcapping(spec.attn_softcap)
    if spec.logit_softcap:
        writer.add_final_logit_softcapping(spec.logit_softcap)
    if rope.get("rope_type") in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
    if rope.get("rope_type") == "llama3":
        plain = rope_frequencies(replace(spec, rope_scaling=None))
        writer.add_tensor("rope_freqs.weight", (plain / rope_frequencies(spec)).numpy())
    if rope.get("rope_type") == "longrope":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_tensor("rope_factors_long.weight", np.array(rope["long_factor"], dtype=np.float32))
        writer.add_tensor("rope_factors_short.weight", np.array(rope["short_factor"], dtype=np.float32))
    for name, tensor in model.reference.state_dict().items():
        if name == "lm_head.weight" and spec.tie_embeddings:
            continue
        writer.add_tensor(stored_name(name, architecture), stored_value(name, tensor, architecture, spec))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def stored_name(name: str, architecture: str) -> str:
    names = NAMES | (GEMMA if architecture.startswith("gemma") else {})
    part, _, kind = name.rpartition(".")
    if part in names:
        return f"{names[part]}.{kind}"
    _, _, layer, part = part.split(".", 3)
    return f"blk.{layer}.{names[part]}.{kind}"


def stored_value(name: str, tensor: torch.Tensor, architecture: str, spec: ModelSpec) -> np.ndarray[Any, Any]:
    value = tensor.numpy()
    if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
        heads = spec.num_heads if "q_proj" in name else spec.num_kv_heads
        halves = value.reshape(heads, 2, spec.head_dim // 2, *value.shape[1:])
        return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(value.shape))
    return value + 1 if architecture.startswith("gemma") and name.endswith("norm.weight") else value


@pytest.fixture(scope="session")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[TinyModel, Path]]:
    """`(case) -> (the model in transformers, its GGUF file)`, each made once."""
    made: dict[str, tuple[TinyModel, Path]] = {}

    def get(case: str) -> tuple[TinyModel, Path]:
        if case not in made:
            folder = tmp_path_factory.mktemp(case)
            architecture, name, changes = CASES[case]
            model = TinyModel(folder, architecture, changes)
            write_gguf(folder / "m.gguf", model, name)
            made[case] = model, folder / "m.gguf"
        return made[case]

    return get


@pytest.mark.parametrize("case", CASES)
def test_header_gives_the_spec_of_the_configuration(stored: Callable[[str], tuple[TinyModel, Path]], case: str) -> None:
    model, path = stored(case)
    found = spec_from_gguf(path)
    given = replace(model.spec, name=found.name)
    if case in ("llama3", "phi3-longrope"):  # their factors are tensors
        assert found.rope_scaling is not None
        given = replace(given, rope_scaling=found.rope_scaling)
    assert found == given


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(stored: Callable[[str], tuple[TinyModel, Path]], case: str) -> None:
    model, path = stored(case)
    served = TinyModel.__new__(TinyModel)
    served.spec = spec_from_gguf(path)
    served.model = load_model(served.spec, path, Registry(entry_points=False))
    sequences = prompts(70, 11) if "longrope" in case else prompts(33, 11)
    for sequence, got in zip(
        sequences, run(served, sequences, [[20, 1, len(sequences[0]) - 21], [11]], "shuffled"), strict=True
    ):
        if "longrope" in case and len(sequence) < 64:
            continue  # the long factors serve all of a context that reaches beyond the trained one
        assert difference(got, model.expected(sequence)) <= TOLERANCE


def test_layers_of_different_shapes_are_refused(tmp_path: Path) -> None:
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_block_count(2)
    writer.add_embedding_length(8)
    writer.add_head_count([2, 4])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"different shapes are not supported \(llama.attention.head_count"):
        spec_from_gguf(tmp_path / "m.gguf")
