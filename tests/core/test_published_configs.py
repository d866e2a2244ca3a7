"""57 published config.json files (`published_configs.json`): read right, or refused in words.

The files are those that aiconfigurator-core 0.12.0 (Apache-2.0) carries in `model_configs/`, without fields that describe
no shape. Totals are what model cards or the hub state, to the digits they give: a total must agree to 1 % or to half of
the last digit.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from twinfer.core.catalog import spec_from_hf
from twinfer.core.errors import ModelError
from twinfer.core.spec import ModelSpec
from twinfer.core.work import StepShape, step_ops, total

CONFIGS = json.loads(Path(__file__).with_name("published_configs.json").read_text())

PUBLISHED = {
    "MiniMaxAI/MiniMax-M2.5": "229", "MiniMaxAI/MiniMax-M2.7": "229", "Qwen/Qwen3-0.6B": "0.6", "Qwen/Qwen3-1.7B": "1.7",
    "Qwen/Qwen3-235B-A22B": "235", "Qwen/Qwen3-30B-A3B": "30.5", "Qwen/Qwen3-32B-FP8-Static-PerTensor": "32.8",
    "Qwen/Qwen3-32B": "32.8", "Qwen/Qwen3-8B": "8.2", "Qwen/Qwen3-Coder-480B-A35B-Instruct": "480",
    "Qwen/Qwen3-VL-235B-A22B-Instruct": "236", "Qwen/Qwen3-VL-2B-Instruct": "2.13",
    "Qwen/Qwen3-VL-30B-A3B-Instruct": "31.1", "Qwen/Qwen3-VL-32B-Instruct": "33.4",
    "Qwen/Qwen3-VL-32B-Thinking": "33.4", "Qwen/Qwen3-VL-4B-Instruct": "4.44", "Qwen/Qwen3-VL-8B-Instruct": "8.77",
    "Qwen/Qwen3.5-122B-A10B": "122", "Qwen/Qwen3.5-27B": "27", "Qwen/Qwen3.5-35B-A3B": "35",
    "Qwen/Qwen3.5-397B-A17B": "397", "deepseek-ai/DeepSeek-R1": "671", "deepseek-ai/DeepSeek-V3": "671",
    "deepseek-ai/DeepSeek-V3.2": "671", "meta-llama/Llama-4-Maverick-17B-128E-Instruct": "401.6",
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": "108.6", "meta-llama/Meta-Llama-3.1-405B": "405.9",
    "meta-llama/Meta-Llama-3.1-70B": "70.6", "meta-llama/Meta-Llama-3.1-8B": "8.03",
    "mistralai/Mixtral-8x22B-v0.1": "140.6", "mistralai/Mixtral-8x7B-v0.1": "46.7",
    "moonshotai/Kimi-K2-Instruct": "1026", "moonshotai/Kimi-K2.5": "1026", "nvidia/Kimi-K2.6-NVFP4": "1026",
    "nvidia/GLM-5.1-NVFP4": "744", "nvidia/MiniMax-M2.5-NVFP4": "229", "nvidia/Nemotron-H-56B-Base-8K": "56",
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": "31.6", "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-FP8": "120",
    "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16": "550",
    "nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-NVFP4": "31.6", "nvidia/Qwen3.5-122B-A10B-NVFP4": "122",
    "openai/gpt-oss-120b": "116.8", "openai/gpt-oss-20b": "20.9", "zai-org/GLM-5": "744", "zai-org/GLM-5.1": "744",
    "zai-org/GLM-5.2": "744", "zai-org/GLM-5.3": "744",
}  # fmt: skip
"""Billions of weights, without layers that predict further tokens. Llama 4 here lacks its image encoder (0.9 B)."""

REFUSED = {
    "MiniMaxAI/MiniMax-M3": "picks", "XiaomiMiMo/MiMo-V2-Flash": "other KV heads",
    "deepseek-ai/DeepSeek-V4-Flash": "compressed tokens", "google/gemma-4-26B-A4B": "keys as values",
    "moonshotai/Kimi-K3": "Kimi delta attention", "nvidia/Gemma-4-31B-IT-NVFP4": "keys as values",
    "nvidia/Llama-3_3-Nemotron-Super-49B-v1": "different widths", "stepfun-ai/Step-3.7-Flash": "leaves out the heads",
}  # fmt: skip


def read(name: str) -> ModelSpec:
    return spec_from_hf(CONFIGS[name], name)


def test_every_file_is_accounted_for() -> None:
    assert PUBLISHED.keys() | REFUSED.keys() | {"XiaomiMiMo/MiMo-7B-Base"} == CONFIGS.keys()


@pytest.mark.parametrize(("name", "billions"), PUBLISHED.items())
def test_totals_are_the_published_ones(name: str, billions: str) -> None:
    digits = len(billions.partition(".")[2])
    off = abs(read(name).num_params() / 1e9 - float(billions))
    assert off <= max(0.01 * float(billions), 0.5 * 10**-digits)


def test_a_total_that_counts_the_layer_for_speculation() -> None:
    """MiMo-7B: 7.83 B with the layer that predicts a further token (a decoder layer behind a projection of two inputs)."""
    spec = read("XiaomiMiMo/MiMo-7B-Base")
    further = spec.attention_params() + spec.mlp_params(0) + 2 * spec.hidden_size**2
    assert (spec.num_params() + further) / 1e9 == pytest.approx(7.83, abs=0.005)


@pytest.mark.parametrize(("name", "words"), REFUSED.items())
def test_what_would_come_out_wrong_is_refused_in_words(name: str, words: str) -> None:
    with pytest.raises(ModelError) as caught:
        read(name)
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "gigabytes"),
    [("moonshotai/Kimi-K2.5", 595), ("openai/gpt-oss-120b", 65.2), ("deepseek-ai/DeepSeek-R1", 673), ("openai/gpt-oss-20b", 13.8)],
)  # fmt: skip
def test_sizes_of_checkpoints(name: str, gigabytes: float) -> None:
    assert read(name).weight_bytes() / 1e9 == pytest.approx(gigabytes, rel=0.01)


@pytest.mark.parametrize("name", ["nvidia/GLM-5.1-NVFP4", "nvidia/Kimi-K2.6-NVFP4", "nvidia/Qwen3.5-122B-A10B-NVFP4"])
def test_four_bit_experts_beside_wide_attention(name: str) -> None:
    spec = read(name)
    assert (spec.expert_bits, spec.expert_dtype, spec.kv_dtype) == (pytest.approx(4.5, abs=0.06), "fp4", "fp8")
    assert spec.linear_bits > 10 and spec.linear_dtype == ""


@pytest.mark.parametrize("name", PUBLISHED)
def test_work_agrees_with_the_weights(name: str) -> None:
    """Linears do two FLOPs per active weight and token; norms, tables and encoders aside."""
    spec = read(name)
    gemms = [op for op in step_ops(spec, StepShape.decode(1)) if op.kind in ("gemm", "grouped_gemm")]
    linears = spec.block_params(active=True) + spec.vocab_size * spec.hidden_size
    assert total(gemms, "flops") / 2 == pytest.approx(linears, rel=0.01)
