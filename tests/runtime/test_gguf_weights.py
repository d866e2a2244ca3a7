"""GGUF checkpoints against the gguf package and against transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from twinfer.core.catalog import spec_from_gguf
from twinfer.core.errors import ModelError
from twinfer.core.plan import Need
from twinfer.core.registry import Registry
from twinfer.core.runtime.attention_torch import attention_of
from twinfer.core.runtime.batch import PackedRow, pack
from twinfer.core.runtime.families import load_model
from twinfer.core.runtime.families.llama import expected_tensors
from twinfer.core.runtime.gguf_weights import GGUFWeights
from twinfer.core.runtime.kv_storage import KVStorage
from twinfer.core.runtime.profile import silent
from twinfer.core.runtime.weights import check_tensors

HEADS, KV_HEADS, DIM = 4, 2, 16
HIDDEN, FFN, VOCAB, LAYERS = 64, 96, 64, 2


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Hugging Face rows (halves) to the order of architecture llama (pairs), written out row by row."""
    out = np.empty_like(weight)
    for head in range(heads):
        for pair in range(DIM // 2):
            for half in range(2):
                out[head * DIM + 2 * pair + half] = weight[head * DIM + half * DIM // 2 + pair]
    return out


def random_tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for i in range(LAYERS):
        p = f"model.layers.{i}."
        shapes |= {
            f"{p}input_layernorm.weight": (HIDDEN,),
            f"{p}self_attn.q_proj.weight": (HEADS * DIM, HIDDEN),
            f"{p}self_attn.k_proj.weight": (KV_HEADS * DIM, HIDDEN),
            f"{p}self_attn.v_proj.weight": (KV_HEADS * DIM, HIDDEN),
            f"{p}self_attn.o_proj.weight": (HIDDEN, HEADS * DIM),
            f"{p}post_attention_layernorm.weight": (HIDDEN,),
            f"{p}mlp.gate_proj.weight": (FFN, HIDDEN),
            f"{p}mlp.up_proj.weight": (FFN, HIDDEN),
            f"{p}mlp.down_proj.weight": (HIDDEN, FFN),
        }
    return {name: (rng.standard_normal(shape) * 0.3).astype(np.float32) for name, shape in shapes.items()}


GGUF_NAMES = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def write_gguf(path: Path, tensors: dict[str, np.ndarray], architecture: str, quantize: str | None = None) -> None:
    """A GGUF file as a converter writes it."""
    import gguf
    from gguf.quants import quantize as quantized

    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCAB)
    writer.add_token_list([f"t{i}" for i in range(VOCAB)])
    for name, value in tensors.items():
        stored = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}.get(name)
        if stored is None:
            _, _, layer, part = name.split(".", 3)
            stored = f"blk.{layer}.{GGUF_NAMES[part.removesuffix('.weight')]}.weight"
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            value = interleaved(value, HEADS if "q_proj" in name else KV_HEADS)
        if quantize is not None and value.ndim == 2:
            kind = gguf.GGMLQuantizationType[quantize]
            writer.add_tensor(stored, quantized(value, kind), raw_dtype=kind)
        else:
            writer.add_tensor(stored, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_names_shapes_and_rotary_order_come_back(tmp_path: Path, architecture: str) -> None:
    tensors = random_tensors()
    write_gguf(tmp_path / "m.gguf", tensors, architecture)
    source = GGUFWeights(tmp_path / "m.gguf")
    assert set(source.names()) == set(tensors)
    for name, value in tensors.items():
        assert source.shape(name) == value.shape
        assert np.array_equal(source.get(name).numpy(), value), name


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_block_types_equal_the_gguf_package(tmp_path: Path, kind: str) -> None:
    import gguf
    from gguf.quants import dequantize, quantize

    tensors = random_tensors()
    write_gguf(tmp_path / "m.gguf", tensors, "qwen2", kind)
    source = GGUFWeights(tmp_path / "m.gguf")
    for name, value in tensors.items():
        expected = value
        if value.ndim == 2:
            expected = dequantize(quantize(value, gguf.GGMLQuantizationType[kind]), gguf.GGMLQuantizationType[kind])
        assert np.array_equal(source.get(name).numpy(), expected), name


def test_gemma_norms_lose_their_one(tmp_path: Path) -> None:
    tensors = random_tensors()
    stored = {name: value + 1 if name.endswith("norm.weight") else value for name, value in tensors.items()}
    write_gguf(tmp_path / "m.gguf", stored, "gemma2")
    source = GGUFWeights(tmp_path / "m.gguf")
    # in gemma files ffn_norm is the norm before the MLP, which has another name in its Hugging Face layout
    renamed = {name.replace("post_attention_layernorm", "pre_feedforward_layernorm"): v for name, v in tensors.items()}
    assert set(source.names()) == set(renamed)
    for name, value in renamed.items():
        assert np.allclose(source.get(name).numpy(), value, atol=1e-6), name


def test_rope_factors_divide_the_frequencies(tmp_path: Path) -> None:
    """A llama-3 file stores its rope scaling as divisors of the frequencies."""
    from twinfer.core.runtime.rope import rope_frequencies

    write_gguf(tmp_path / "m.gguf", random_tensors(), "llama")
    spec = spec_from_gguf(tmp_path / "m.gguf")
    factors = torch.tensor([1.0, 2.0, 4.0, 8.0, 8.0, 8.0, 8.0, 8.0])
    assert torch.equal(rope_frequencies(spec, factors), rope_frequencies(spec) / factors)


@pytest.mark.parametrize("keep", [0, 3, 40, 400, 20_000])
def test_truncated_files_are_refused(tmp_path: Path, keep: int) -> None:
    write_gguf(tmp_path / "m.gguf", random_tensors(), "llama", "Q8_0")
    whole = (tmp_path / "m.gguf").read_bytes()
    assert keep < len(whole)
    (tmp_path / "cut.gguf").write_bytes(whole[:keep])
    with pytest.raises(ModelError, match=r"cut\.gguf"):
        GGUFWeights(tmp_path / "cut.gguf")


def test_garbage_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(np.random.default_rng(0).bytes(4096))
    with pytest.raises(ModelError, match="not a GGUF file"):
        GGUFWeights(path)
    path.write_bytes(b"GGUF" + np.random.default_rng(0).bytes(4096))
    with pytest.raises(ModelError):
        GGUFWeights(path)


def test_non_finite_values_are_refused(tmp_path: Path) -> None:
    tensors = random_tensors()
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = np.nan
    write_gguf(tmp_path / "m.gguf", tensors, "llama")
    source = GGUFWeights(tmp_path / "m.gguf")
    with pytest.raises(ModelError, match=r"blk\.1\.ffn_up\.weight holds values that are not finite"):
        source.get("model.layers.1.mlp.up_proj.weight")


def test_missing_head_counts_are_named(tmp_path: Path) -> None:
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"llama.attention.head_count=None"):
        GGUFWeights(tmp_path / "m.gguf")


@pytest.mark.model
def test_smollm2_weights_and_logits_equal_transformers(smollm2_gguf: Path) -> None:
    """Weights equal gguf's own dequantization in Hugging Face layout; logits equal transformers with those weights."""
    from gguf import GGUFReader
    from gguf.quants import dequantize
    from transformers import LlamaConfig, LlamaForCausalLM

    spec = spec_from_gguf(smollm2_gguf)
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.tie_embeddings) == (30, 9, 3, True)
    source = GGUFWeights(smollm2_gguf)
    check_tensors(source, expected_tensors(spec), "llama")

    reference: dict[str, torch.Tensor] = {}
    for tensor in GGUFReader(smollm2_gguf).tensors:
        value = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32))
        if ".attn_q." in tensor.name or ".attn_k." in tensor.name:
            heads = spec.num_heads if ".attn_q." in tensor.name else spec.num_kv_heads
            value = value.reshape(heads, spec.head_dim // 2, 2, -1).swapaxes(1, 2).reshape(value.shape)
        reference[tensor.name] = value
    stored_names = {source._name(name): name for name in reference}
    for name in source.names():
        assert torch.equal(source.get(name), reference[stored_names[name]]), name

    config = LlamaConfig(
        vocab_size=spec.vocab_size, hidden_size=spec.hidden_size, intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers, num_attention_heads=spec.num_heads, num_key_value_heads=spec.num_kv_heads,
        max_position_embeddings=spec.max_context, rms_norm_eps=spec.norm_eps, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": spec.rope_theta},
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    state = {name: reference[stored] for name, stored in stored_names.items()}
    model.load_state_dict(state | {"lm_head.weight": state["model.embed_tokens.weight"]}, assign=True)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its buffers are not in a state dict

    ours = load_model(replace(spec, dtype="float32"), smollm2_gguf, Registry(entry_points=False))
    tokens = [(i * 7919 + 13) % spec.vocab_size for i in range(40)]
    kv = KVStorage(spec.num_layers, 4, 16, spec.num_kv_heads, spec.head_dim)
    table = kv.new_table()
    table.append([2, 0, 3])
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits[0]
        outs = []
        for start, stop in ((0, 23), (23, 39), (39, 40)):
            batch = pack([PackedRow(tokens[start:stop], start, Need.ALL, table)])
            step = attention_of(spec).step(batch, kv)
            outs.append(ours.forward(batch.tokens, batch.positions, step, batch.logits_index, silent))
    assert (torch.cat(outs) - expected).abs().max() <= 1e-3  # logits reach 20; relative 5e-5
    assert torch.equal(torch.cat(outs).argmax(-1), expected.argmax(-1))
