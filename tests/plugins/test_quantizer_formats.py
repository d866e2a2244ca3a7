"""Analytic weight and KV formats: what they change, what they leave, and that the engine refuses them."""

from __future__ import annotations

import pytest

from twinfer.core.catalog import resolve_spec
from twinfer.core.config import Choice
from twinfer.core.errors import ConfigError
from twinfer.core.registry import Registry
from twinfer.core.spec import ModelSpec
from twinfer.core.technique import Needs, Technique
from twinfer.core.work import Op, StepShape, step_ops, total

REGISTRY = Registry(entry_points=False)
NAMES = ["fp8", "int8", "int4", "kv-fp8", "kv-int8", "kv-int4"]
LLAMA = resolve_spec("llama-3-8b")


def build(text: str) -> Technique:
    technique: Technique = REGISTRY.build("quantizer", Choice.model_validate(text))
    return technique


def adapted(text: str, model: ModelSpec = LLAMA) -> ModelSpec:
    return build(text).adapt_model(model)


def ops_with(text: str, shape: StepShape, model: ModelSpec = LLAMA) -> list[Op]:
    technique = build(text)
    changed = technique.adapt_model(model)
    return list(technique.adapt_ops(step_ops(changed, shape), changed, shape))


def test_registered() -> None:
    assert set(NAMES) <= set(REGISTRY.names("quantizer"))


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"int8"}))
def test_engine_is_refused_with_a_reason_and_the_simulator_is_not(name: str) -> None:
    technique = build(name)
    (reason,) = technique.why_not(Needs(world="engine"))
    assert "no real implementation yet" in reason and f"simulate --quant {name}" in reason
    assert technique.why_not(Needs(world="simulator")) == []


@pytest.mark.parametrize(
    ("text", "bits"),
    [
        ("fp8", 8.0), ("fp8:scales=block", 8 + 32 / 128**2), ("int8", 8 + 16 / 4096), ("int4", 4 + 16 / 128),
        ("int4:group_size=32", 4 + 16 / 32), ("int4:group_size=64,zero_point=true", 4 + 20 / 64),
    ],
)  # fmt: skip
def test_weight_bits_with_scales(text: str, bits: float) -> None:
    model = adapted(text)
    assert model.weight_bits == bits
    others = LLAMA.other_params() * 2
    assert model.weight_bytes() == LLAMA.block_params() * bits / 8 + others, "embeddings, head and norms untouched"
    assert model.kv_bytes_per_token() == LLAMA.kv_bytes_per_token()


def test_int8_head_counts_once() -> None:
    """Of Llama-3's two tables only the head is rounded."""
    plain, head = adapted("int8"), adapted("int8:head=true")
    saved = (16 - 8 - 16 / 4096) / 8 * LLAMA.vocab_size * LLAMA.hidden_size
    assert plain.weight_bytes() - head.weight_bytes() == pytest.approx(saved)


def test_last_group_of_a_row_is_counted_whole() -> None:
    """576 inputs are four groups of 128 and half a one: five scales."""
    assert adapted("int4", resolve_spec("smollm2-135m")).weight_bits == 4 + 16 * 5 / 576


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ("kv-fp8", 1 / 2), ("kv-int8", (1 + 2 / 128) / 2), ("kv-int4", (1 / 2 + 2 / 32) / 2),
        ("fp8:kv=fp8", 1 / 2), ("int4:kv=int4", (1 / 2 + 2 / 32) / 2), ("int8:kv=int8", (1 + 2 / 128) / 2),
    ],
)  # fmt: skip
def test_kv_bytes_with_scales(text: str, share: float) -> None:
    assert adapted(text).kv_bytes_per_token() == share * LLAMA.kv_bytes_per_token()


@pytest.mark.parametrize("name", ["kv-fp8", "kv-int8", "kv-int4"])
def test_kv_formats_leave_weights_alone(name: str) -> None:
    assert adapted(name).weight_bytes() == LLAMA.weight_bytes()


def test_four_bit_kv_costs_what_ggufs_q4_0_does() -> None:
    assert adapted("kv-int4").kv_bytes_per_token() == LLAMA.kv_bytes_per_token("q4_0")


def test_latent_of_mla_has_one_set_of_scales() -> None:
    model = resolve_spec("deepseek-v3")
    assert adapted("kv-int8", model).kv_bytes_per_token_layer() == 576 + 2


def test_weight_only_formats_compute_in_16_bits() -> None:
    shape = StepShape.decode(100)
    for text in ("int4", "fp8:activations=false", "int8:activations=false"):
        ops = ops_with(text, shape)
        assert {op.dtype for op in ops if op.kind == "gemm"} == {"bfloat16"}
        assert total(ops, "flops") == total(step_ops(LLAMA, shape), "flops")


@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_narrow_activations_are_work_of_their_own(name: str) -> None:
    shape = StepShape.decode(*[100] * 4)
    ops = ops_with(name, shape)
    linears = [op for op in ops if op.dtype == name and op.kind == "gemm"]
    assert {op.name for op in linears} == {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}
    for op in linears:
        m, n, k = op.shape
        assert op.bytes_read == pytest.approx(n * k * adapted(name).block_bits / 8 + m * k), "inputs are one byte"
    narrowing = [op for op in ops if op.name == "quantize_input"]
    assert len(narrowing) == len(linears) and all(op.count == 32 for op in narrowing)
    assert sum(op.bytes_written for op in narrowing) == 4 * (3 * 4096 + 14336)
    assert next(op for op in ops if op.name == "lm_head").dtype == "bfloat16"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("model", ["llama-3-8b", "mixtral-8x7b", "deepseek-v3", "gemma-2-9b"])
def test_less_is_read_when_decoding(name: str, model: str) -> None:
    spec, shape = resolve_spec(model), StepShape.decode(*[2000] * 16)
    before, after = step_ops(spec, shape), ops_with(name, shape, spec)
    if spec.weight_bits is None or "kv" in name or name == "int4":  # DeepSeek-V3 comes with 8-bit weights
        assert total(after, "bytes") < total(before, "bytes")
    assert total(after, "flops") >= total(before, "flops")


@pytest.mark.parametrize("text", ["int4:group_size=8", "int4:bits=3", "fp8:kv=fp4", "kv-fp8:scale=1", "fp8:scales=row"])
def test_bad_options_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--quant=") as caught:
        build(text)
    assert "its options:" in caught.value.fix
