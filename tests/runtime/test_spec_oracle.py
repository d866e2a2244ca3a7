"""Specs, GGUF headers and ops against independent readers: transformers' models (without memory), gguf, torch's counter."""

from __future__ import annotations

import copy
from pathlib import Path

import gguf
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from twinfer.core.catalog import hf_config_of, resolve_spec, spec_from_hf, spec_names
from twinfer.core.gguf_header import Length, read_gguf_header
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
