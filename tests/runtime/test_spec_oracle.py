"""Specs, GGUF headers and ops against independent readers: transformers' models (without memory), gguf, torch's counter."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import gguf
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from twinfer.core.catalog import hf_config_of, resolve_spec, spec_from_hf, spec_names
from twinfer.core.errors import ModelError
from twinfer.core.gguf_header import Length, read_gguf_header
from twinfer.core.hf_config import FAMILIES
from twinfer.core.work import StepShape, step_ops, total


def hf_config(name: str) -> PreTrainedConfig:
    config = copy.deepcopy(dict(hf_config_of(name) or {}))
    for ours in ("twinfer", "quantization_config"):
        config.pop(ours, None)
    return AutoConfig.for_model(**config)


@pytest.mark.parametrize("name", spec_names())
def test_parameters_and_layer_pattern(name: str) -> None:
    config = hf_config(name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    spec = resolve_spec(name)
    # DeepSeek-V3's correction of router scores is a buffer there, a weight of the checkpoint here
    in_buffers = spec.moe.num_experts * (spec.num_layers - 3) if spec.moe and spec.moe.score_bias else 0
    assert sum(p.numel() for p in model.parameters()) + in_buffers == spec.num_params()
    types = getattr(config, "layer_types", None)
    if types:
        assert [t == "sliding_attention" for t in types] == [spec.window(i) is not None for i in range(len(types))]


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
        (dict(quantization_config={"quant_method": "bitsandbytes"}), "stored as 'bitsandbytes' are not known"),
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
