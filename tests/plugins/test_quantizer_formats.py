"""Analytic weight and KV formats: what they change, what they leave, and that the engine refuses them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from twinfer.core.catalog import resolve_spec
from twinfer.core.config import Choice
from twinfer.core.errors import ConfigError
from twinfer.core.registry import Registry
from twinfer.core.spec import ModelSpec
from twinfer.core.technique import Needs, Technique
from twinfer.core.work import Op, StepShape, step_ops, total

REGISTRY = Registry(entry_points=False)
NAMES = [
    "fp8", "int8", "int4", "gptq", "awq", "nvfp4", "mxfp4", "gguf-type", "kv-fp8", "kv-int8", "kv-int4", "kv-nvfp4",
]  # fmt: skip
LLAMA = resolve_spec("llama-3-8b")
NARROW = ("int4", "gptq", "awq", "mxfp4")


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
        ("fp8:scales=channel", 8 + 32 / 4096), ("gptq", 4 + 20 / 128), ("gptq:bits=3,group_size=64", 3 + 19 / 64),
        ("gptq:bits=8,group_size=-1,zero_point=false", 8 + 16 / 4096), ("gptq:desc_act=true", 4 + 20 / 128 + 32 / 4096),
        ("awq", 4 + 20 / 128), ("awq:group_size=64,zero_point=false", 4 + 16 / 64), ("nvfp4", 4.5), ("mxfp4", 4.25),
        ("gguf-type", 4.5), ("gguf-type:type=q6_k", 210 * 8 / 256), ("gguf-type:type=q8_0", 8.5),
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
        ("kv-fp8", 1 / 2), ("kv-nvfp4", (1 / 2 + 8 / 128) / 2), ("kv-int8:group_size=32", (1 + 8 / 128) / 2),
        ("kv-int4:group_size=64,zero_point=true", (1 / 2 + 8 / 128) / 2), ("gptq:kv=fp4", (1 / 2 + 8 / 128) / 2),
        ("kv-int8", (1 + 2 / 128) / 2), ("kv-int4", (1 / 2 + 2 / 32) / 2),
        ("fp8:kv=fp8", 1 / 2), ("int4:kv=int4", (1 / 2 + 2 / 32) / 2), ("int8:kv=int8", (1 + 2 / 128) / 2),
    ],
)  # fmt: skip
def test_kv_bytes_with_scales(text: str, share: float) -> None:
    assert adapted(text).kv_bytes_per_token() == share * LLAMA.kv_bytes_per_token()


@pytest.mark.parametrize("name", ["kv-fp8", "kv-int8", "kv-int4", "kv-nvfp4"])
def test_kv_formats_leave_weights_alone(name: str) -> None:
    assert adapted(name).weight_bytes() == LLAMA.weight_bytes()


def test_four_bit_kv_costs_what_ggufs_q4_0_does() -> None:
    assert adapted("kv-int4").kv_bytes_per_token() == LLAMA.kv_bytes_per_token("q4_0")


def test_latent_of_mla_has_one_set_of_scales() -> None:
    model = resolve_spec("deepseek-v3")
    assert adapted("kv-int8", model).kv_bytes_per_token_layer() == 576 + 2


def test_weight_only_formats_compute_in_16_bits() -> None:
    shape = StepShape.decode(100)
    for text in (
        "int4",
        "gptq",
        "awq",
        "mxfp4",
        "nvfp4:activations=false",
        "fp8:activations=false",
        "int8:activations=false",
    ):
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
    if spec.weight_bits is None or "kv" in name or name in NARROW:  # DeepSeek-V3 comes with 8-bit weights
        assert total(after, "bytes") < total(before, "bytes")
    assert total(after, "flops") >= total(before, "flops")


@pytest.mark.parametrize(
    "text",
    [
        "int4:group_size=8",
        "int4:bits=3",
        "fp8:kv=fp2",
        "gptq:group_size=8",
        "gptq:bits=5",
        "awq:bits=3",
        "gguf-type:type=q1_k",
        "nvfp4:activations=int8",
        "kv-fp8:scale=1",
        "fp8:scales=row",
    ],
)
def test_bad_options_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--quant=") as caught:
        build(text)
    assert "its options:" in caught.value.fix


# --- work that formats add ------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "flops"), [("fp8", 4), ("fp8:activation_scales=static", 2), ("nvfp4", 4)])
def test_scales_found_on_the_way_cost_a_pass(text: str, flops: int) -> None:
    (first, *_) = [op for op in ops_with(text, StepShape.decode(*[100] * 4)) if op.name == "quantize_input"]
    assert first.flops == flops * 4 * 4096


def test_w4a8_computes_in_eight_bits() -> None:
    ops = ops_with("int4:activations=int8", StepShape.decode(100))
    gemms = [op for op in ops if op.dtype == "int8" and op.kind == "gemm"]
    assert len(gemms) == 4
    for op in gemms:
        m, n, k = op.shape
        assert op.bytes_read == pytest.approx(n * k * (4 + 16 / 128) / 8 + m * k)


@pytest.mark.parametrize(("rows", "widened"), [(255, False), (256, True), (4096, True)])
def test_weights_are_widened_before_products_of_many_rows(rows: int, widened: bool) -> None:
    """Bytes by hand: the stored weights are read once, the wide ones written and read."""
    shape = StepShape.prefill(rows)
    plain, ops = step_ops(LLAMA, shape), ops_with("awq:expand_rows=256", shape)
    before = {op.name: op for op in plain if op.kind == "gemm" and op.name != "lm_head"}
    after = {op.name: op for op in ops if op.kind == "gemm" and op.name != "lm_head"}
    extra = [op for op in ops if op.name == "dequantize"]
    assert len(extra) == (len(before) if widened else 0)
    for name, op in after.items():
        m, n, k = op.shape
        weights = n * k * 2 if widened else n * k * (4 + 20 / 128) / 8
        assert op.bytes_read == pytest.approx(weights + m * k * 2)
        assert (op.flops, op.bytes_written) == (before[name].flops, before[name].bytes_written)
    for op in extra:
        n, k = op.shape
        assert (op.bytes_read, op.bytes_written, op.count) == (n * k * (4 + 20 / 128) / 8, n * k * 2, 32)


def test_expanding_pays_off_nowhere_in_bytes() -> None:
    """A fused kernel reads the least; widening is for kernels that would otherwise widen the same weights many times."""
    for rows in (1, 64, 4096):
        shape = StepShape.prefill(rows)
        assert total(ops_with("gptq", shape), "bytes") < total(ops_with("gptq:expand_rows=1", shape), "bytes")


def test_desc_act_gathers_the_inputs() -> None:
    ops = ops_with("gptq:desc_act=true", StepShape.decode(*[100] * 4))
    gathers = [op for op in ops if op.name == "reorder_input"]
    assert [op.shape for op in gathers] == [(4, 4096), (4, 4096), (4, 4096), (4, 14336)]
    assert all(op.bytes_read == op.bytes_written == op.shape[0] * op.shape[1] * 2 for op in gathers)


def test_experts_only() -> None:
    oss = resolve_spec("gpt-oss-20b")
    plain = replace(oss, weight_bits=None, expert_bits=None)
    narrow = adapted("mxfp4:experts_only=true", plain)
    assert narrow.expert_bits == 4.25 and narrow.linear_bits == pytest.approx(16)
    assert narrow.weight_bytes() == pytest.approx(oss.weight_bytes(), rel=0.002), "as it is published"
    with pytest.raises(ConfigError, match="llama-3-8b has no experts"):
        adapted("nvfp4:experts_only=true")


def test_a_format_replaces_that_of_the_checkpoint() -> None:
    oss = resolve_spec("gpt-oss-20b")
    assert oss.expert_bits is not None
    for name in ("fp8", "int4", "gptq", "nvfp4"):
        assert adapted(name, oss).expert_bits is None


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("model", ["qwen3-next-80b", "gpt-oss-20b", "nemotron-3-nano-30b", "deepseek-v3.2"])
def test_every_format_on_every_kind_of_model(name: str, model: str) -> None:
    spec = adapted(name, resolve_spec(model))
    assert 0 < spec.weight_bytes(2) < spec.weight_bytes() and spec.kv_bytes_per_token() > 0
