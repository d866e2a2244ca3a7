"""GGUF headers: what is read from them, and that no bytes whatever get anything else than a header or a ModelError."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twinfer.core.catalog import resolve_spec, spec_from_gguf
from twinfer.core.errors import ModelError
from twinfer.core.gguf_header import TYPES, read_gguf_header

gguf = pytest.importorskip("gguf")
np = pytest.importorskip("numpy")


def make(path: Path, arch: str, meta: dict[str, object], tensors: dict[str, tuple[int, ...]]) -> Path:
    """A GGUF file as the reference writer makes it; tensors are float16 zeros."""
    writer = gguf.GGUFWriter(str(path), arch)
    for key, value in meta.items():
        full = key if "." in key and key.split(".")[0] in ("tokenizer", "general") else f"{arch}.{key}"
        if isinstance(value, list):
            writer.add_array(full, value)
        elif isinstance(value, int):
            writer.add_uint32(full, value)
        elif isinstance(value, float):
            writer.add_float32(full, value)
        else:
            writer.add_string(full, value)
    for name, shape in tensors.items():
        writer.add_tensor(name, np.zeros(shape, np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


META: dict[str, object] = {
    "block_count": 2, "embedding_length": 64, "attention.head_count": 4, "attention.head_count_kv": 2,
    "feed_forward_length": 128, "context_length": 512, "rope.freq_base": 500000.0,
    "attention.layer_norm_rms_epsilon": 1e-5, "tokenizer.ggml.eos_token_id": 7, "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.tokens": [f"t{i}" for i in range(100)],
}  # fmt: skip
TENSORS = {"token_embd.weight": (100, 64), "output.weight": (100, 64), "output_norm.weight": (64,)}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("gguf") / "small.gguf", "llama", META, TENSORS)


def test_types_agree_with_the_reference_package() -> None:
    for number, (name, values, nbytes) in TYPES.items():
        kind = gguf.GGMLQuantizationType(number)
        assert (kind.name, gguf.GGML_QUANT_SIZES[kind]) == (name, (values, nbytes))


def test_long_arrays_on_request(smollm2_gguf: Path) -> None:
    tokens = read_gguf_header(smollm2_gguf, kept_array=10**6).metadata["tokenizer.ggml.tokens"]
    assert len(tokens) == 49152 and tokens[2] == "<|im_end|>"


def test_spec_of_a_small_llama(small: Path) -> None:
    model = spec_from_gguf(small)
    assert (model.name, model.family, model.num_kv_heads, model.head_dim) == ("small", "llama", 2, 16)
    assert (model.vocab_size, model.rope_theta, model.norm_eps) == (100, 500000.0, 1e-5)
    assert (model.eos_token_ids, model.bos_token_id, model.tie_embeddings) == ((7,), 1, False)
    assert model.dtype == "float16", "the type of its matrices"
    assert resolve_spec(small) == model


@pytest.mark.parametrize(
    ("arch", "extra", "tensors", "expected"),
    [
        ("llama", {"expert_count": 8, "expert_used_count": 2}, {}, {"family": "mixtral"}),
        ("qwen2", {}, {}, {"family": "qwen2", "attention_bias": True}),
        ("qwen3", {"attention.key_length": 32}, {}, {"family": "qwen3", "qk_norm": True, "head_dim": 32}),
        ("qwen3moe", {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 32}, {}, {"family": "qwen3_moe"}),
        ("gemma2", {"attention.sliding_window": 4, "attention.key_length": 16}, {},
         {"layer_windows": (4, None), "attn_softcap": 50.0, "query_scale": 0.25, "norms_per_layer": 4}),
        ("gemma3", {"attention.sliding_window": 4}, {}, {"family": "gemma3_text", "layer_windows": (4, 4), "rope_local_theta": 1e4}),
        ("phi3", {"attention.sliding_window": 4}, {}, {"family": "phi3", "layer_windows": (4, 4)}),
        ("gpt-oss", {"attention.sliding_window": 4, "expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 32}, {},
         {"family": "gpt_oss", "attention_sinks": True, "layer_windows": (4, None), "num_moe_layers": 2}),
        ("qwen2moe", {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 32,
                      "expert_shared_feed_forward_length": 48}, {}, {"family": "qwen2_moe", "num_moe_layers": 2}),
        ("glm4moe", {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 32, "block_count": 4,
                     "expert_shared_count": 1, "leading_dense_block_count": 1, "nextn_predict_layers": 1,
                     "rope.dimension_count": 8}, {"blk.0.attn_q_norm.weight": (16,)},
         {"family": "glm4_moe", "num_layers": 3, "num_moe_layers": 2, "qk_norm": True, "partial_rotary": 0.5}),
        ("minimax-m2", {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 32,
                        "rope.dimension_count": 8}, {}, {"family": "minimax_m2", "wide_qk_norm": True, "partial_rotary": 0.5}),
        ("qwen3next", {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 32, "block_count": 4,
                       "expert_shared_feed_forward_length": 48, "rope.dimension_count": 4, "ssm.conv_kernel": 4,
                       "ssm.inner_size": 48, "ssm.state_size": 8, "ssm.time_step_rank": 4, "ssm.group_count": 2}, {},
         {"family": "qwen3_next", "num_linear_layers": 3, "attention_gate": True}),
        ("llama", {}, {"rope_freqs.weight": (8,)}, {"rope_scaling": {"rope_type": "gguf_factors", "tensor": "rope_freqs.weight"}}),
        ("llama", {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {},
         {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    ],
)  # fmt: skip
def test_architectures(
    arch: str,
    extra: dict[str, object],
    tensors: dict[str, tuple[int, ...]],
    expected: dict[str, object],
    tmp_path: Path,
) -> None:
    model = spec_from_gguf(make(tmp_path / "m.gguf", arch, META | extra, TENSORS | tensors))
    assert {key: getattr(model, key) for key in expected} == expected


def test_states_are_read(tmp_path: Path) -> None:
    meta = META | {
        "block_count": 4, "expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 32,
        "rope.dimension_count": 4, "ssm.conv_kernel": 4, "ssm.inner_size": 48, "ssm.state_size": 8,
        "ssm.time_step_rank": 4, "ssm.group_count": 2,
    }  # fmt: skip
    spec = spec_from_gguf(make(tmp_path / "m.gguf", "qwen3next", meta, TENSORS))
    assert spec.state_bytes_per_seq() == 3 * (4 * 8 * 12 * 4 + 3 * (2 * 2 * 8 + 48) * 2)


def test_experts_are_read(tmp_path: Path) -> None:
    meta = META | {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 32}
    moe = spec_from_gguf(make(tmp_path / "m.gguf", "qwen3moe", meta, TENSORS)).moe
    assert moe is not None and (moe.num_experts, moe.top_k, moe.intermediate_size) == (8, 2, 32)


def test_missing_output_matrix_means_tied(tmp_path: Path) -> None:
    path = make(tmp_path / "m.gguf", "llama", META, {"token_embd.weight": (100, 64)})
    assert spec_from_gguf(path).tie_embeddings


@pytest.mark.parametrize(
    ("arch", "change", "words"),
    [
        ("mamba", {}, "GGUF architecture 'mamba' is not known; known: llama"),
        ("llama", {"embedding_length": None}, "cannot be understood"),
        ("llama", {"block_count": None}, "num_hidden_layers"),
        ("llama", {"attention.head_count": 0}, "cannot be understood"),
        ("llama", {"attention.head_count_kv": [1, 2]}, "layers of different shapes"),
        ("llama", {"embedding_length": "wide"}, "cannot be understood"),
        ("llama", {"rope.freq_base": "high"}, "cannot be understood"),
    ],
)  # fmt: skip
def test_header_that_makes_no_model(arch: str, change: dict[str, object], words: str, tmp_path: Path) -> None:
    meta = {key: value for key, value in (META | change).items() if value is not None}
    path = make(tmp_path / "m.gguf", arch, meta, TENSORS)
    with pytest.raises(ModelError) as caught:
        resolve_spec(path)
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "content", [b"", b"GGU", b"GGUF", b"PK\x03\x04 zip", b"GGUF" + bytes(20), b"GGUF\x01\0\0\0" + bytes(16)]
)
def test_no_gguf_at_all(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=r"bad\.gguf: "):
        resolve_spec(path)


def test_huge_counts_do_not_allocate(tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(b"GGUF\x03\0\0\0" + b"\xff" * 16 + bytes(64))
    with pytest.raises(ModelError, match="damaged"):
        read_gguf_header(path)


def test_missing_data_is_noticed(small: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(small.read_bytes()[:-200])
    with pytest.raises(ModelError, match=r"truncated GGUF file .*ends at byte"):
        resolve_spec(path)


def test_folder_instead_of_a_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be read"):
        read_gguf_header(tmp_path)


@settings(max_examples=150)
@given(st.data())
def test_cut_anywhere(small: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    content = small.read_bytes()
    path = tmp_path_factory.getbasetemp() / "cut.gguf"
    path.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    with pytest.raises(ModelError):
        resolve_spec(path)


@settings(max_examples=300)
@given(st.data())
def test_any_damage_gives_a_spec_or_a_model_error(
    small: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    content = bytearray(small.read_bytes())
    header = content.index(b"output_norm.weight") + 60
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, header))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(content)
    try:
        resolve_spec(path).num_params()
    except ModelError as error:
        assert "\n" not in str(error)
