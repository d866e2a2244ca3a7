"""Roofline op times against the kernel tables its constants were fitted to, and its own rules."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from twinfer.core.catalog import resolve_spec
from twinfer.core.device import load_device
from twinfer.core.errors import ConfigError
from twinfer.core.op_time import host_op
from twinfer.core.registry import Registry
from twinfer.core.work import Op, RowShape, StepShape, step_ops
from twinfer.plugins.op_time.roofline import Curves, Roofline, curves_of, gemm_curve, on_curve

REGISTRY = Registry(entry_points=False)
H100 = load_device("h100-sxm", REGISTRY)
BARE = H100.model_copy(update={"efficiency": {}})


def gemm(m: int, n: int, k: int, dtype: str = "bfloat16", size: float = 2.0) -> Op:
    return Op("g", "gemm", 2.0 * m * n * k, size * (n * k + m * k), size * m * n, dtype, shape=(m, n, k))


def attention(*rows: tuple[int, int], heads: int = 32, kv_heads: int = 32) -> Op:
    spec = replace(resolve_spec("llama-3.1-8b"), num_heads=heads, num_kv_heads=kv_heads)
    shape = StepShape(tuple(RowShape(q, k) for q, k in rows), len(rows))
    return next(op for op in step_ops(spec, shape) if op.kind == "attention")


# H100 SXM, vLLM 0.24, cuBLAS bf16, n = k = 8192: m -> us (aiconfigurator-core 0.12.0 tables)
TABLE = {1: 52, 64: 47, 256: 51, 1024: 164, 4096: 698, 8192: 1542}


@pytest.mark.parametrize(("m", "us"), TABLE.items())
def test_h100_products_are_close_to_the_measured_table(m: int, us: float) -> None:
    answer = Roofline().time(gemm(m, 8192, 8192), H100)
    assert answer is not None and answer.source == "analytic"
    assert answer.seconds * 1e6 == pytest.approx(us, rel=0.17)


# causal FlashAttention 3, one sequence, 32 heads of 128: context -> us
@pytest.mark.parametrize(("context", "us"), {1024: 35, 4096: 264, 16384: 3381}.items())
def test_h100_prefill_attention_is_close_to_the_measured_table(context: int, us: float) -> None:
    answer = Roofline().time(attention((context, context)), H100)
    assert answer is not None
    assert answer.seconds * 1e6 == pytest.approx(us, rel=0.2)


def test_without_curves_it_is_an_upper_bound_of_speed() -> None:
    for op in (gemm(1, 4096, 4096), gemm(4096, 4096, 4096), attention((512, 512)), attention((1, 3000))):
        bound, real = Roofline().time(op, BARE), Roofline().time(op, H100)
        assert bound is not None and real is not None
        assert bound.source == "upper bound"
        assert bound.seconds <= real.seconds
        assert bound.sigma / bound.seconds > real.sigma / real.seconds
    exact = Roofline().time(gemm(1, 4096, 4096), BARE)
    assert exact is not None
    assert exact.seconds == pytest.approx(gemm(1, 4096, 4096).bytes / 3.35e12)


def test_a_mixed_batch_costs_its_parts_without_the_second_launch() -> None:
    def seconds(*rows: tuple[int, int]) -> float:
        answer = Roofline().time(attention(*rows), H100)
        assert answer is not None
        return answer.seconds

    overhead = Curves.model_validate(H100.efficiency).attention_overhead
    decode = [(1, 4000)] * 16
    assert seconds((512, 512), *decode) == pytest.approx(seconds((512, 512)) + seconds(*decode) - overhead, rel=0.02)
    assert seconds((512, 512), *decode) == pytest.approx(seconds(*decode, (512, 512)), rel=1e-12)


def test_more_work_never_takes_less_time() -> None:
    def rising(times: list[float]) -> bool:
        return all(b >= a for a, b in itertools.pairwise(times))

    model = Roofline()
    assert rising([model.time(gemm(m, 4096, 4096), H100).seconds for m in range(1, 3000, 13)])  # type: ignore[union-attr]
    assert rising([model.time(attention((1, c)), H100).seconds for c in range(1, 60000, 97)])  # type: ignore[union-attr]
    assert rising([model.time(attention((c, c)), H100).seconds for c in range(2, 20000, 97)])  # type: ignore[union-attr]


@pytest.mark.parametrize("context", [96, 2000, 50_000])
def test_checking_guesses_reads_the_kv_that_one_token_reads(context: int) -> None:
    model = Roofline()
    times = [model.time(attention(*[(q, context)] * 16), H100).seconds for q in (1, 2, 5, 17, 65)]  # type: ignore[union-attr]
    assert all(b >= a for a, b in itertools.pairwise(times))


def test_efficiency_is_interpolated_in_octaves_and_flat_outside() -> None:
    points = ((256.0, 0.1), (1024.0, 0.3))
    assert on_curve(points, 512) == pytest.approx(0.2)
    assert on_curve(points, 1) == 0.1 and on_curve(points, 1e9) == 0.3 and on_curve((), 7) == 1.0


def test_host_time_grows_with_rows_and_all_ops_of_all_devices_have_a_time() -> None:
    one, many = (Roofline().time(host_op(StepShape.decode(*([9] * n))), H100) for n in (1, 64))
    assert one is not None and many is not None and many.seconds > one.seconds > 0
    for name in ("llama-3.1-8b", "mixtral-8x7b", "deepseek-v3"):
        for op in step_ops(resolve_spec(name), StepShape.decode(100, 2000), 2):
            answer = Roofline().time(op, H100)
            assert answer is not None and answer.detail
            assert answer.seconds > 0 or "part of the experts" in answer.detail


def test_communication_without_a_link_is_refused() -> None:
    alone = H100.model_copy(update={"link_bandwidth": None})
    op = next(o for o in step_ops(resolve_spec("llama-3.1-8b"), StepShape.decode(10), 2) if o.kind == "comm")
    with pytest.raises(ConfigError, match="has no link"):
        Roofline().time(op, alone)


@pytest.mark.parametrize(
    ("efficiency", "words"),
    [
        ({"gemm": {"bfloat16": {"overhead": -1}}}, r"efficiency\.gemm\.bfloat16\.overhead=-1, which is too small"),
        ({"attention_compute": [[0, 0.5]]}, r"attention_compute\.0\.0=0, which is too small; give more than 0"),
        ({"attention_compute": [[2, 0.5], [1, 0.5]]}, "points whose x do not rise"),
        ({"host_step": float("inf")}, "host_step=inf, which is not finite"), ({"host_row": 1e300}, "at most 60"),
    ],
)  # fmt: skip
def test_malformed_curves_name_field_and_value(efficiency: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        curves_of(H100.model_copy(update={"efficiency": efficiency}))


def test_every_shipped_device_has_well_formed_curves() -> None:
    from twinfer.core.device import all_devices

    for device in all_devices(REGISTRY):
        curves_of(device)


def test_fp4_takes_the_curve_of_fp8_where_there_are_units_and_of_16_bits_where_there_are_none() -> None:
    for name, like in (("b200", "fp8"), ("h100-sxm", "bfloat16")):
        device = load_device(name)
        curves = curves_of(device)
        assert curves is not None and gemm_curve(curves, device, "fp4") == curves.gemm[like]
    op = Op("g", "gemm", 2.0 * 4096**3, 4096**2 * 2.5, 4096**2 * 2.0, "fp4", shape=(4096, 4096, 4096))
    wide = replace(op, dtype="bfloat16")
    h100, b200 = load_device("h100-sxm"), load_device("b200")
    assert Roofline().time(op, h100) == Roofline().time(wide, h100)
    assert Roofline().time(op, b200).seconds < Roofline().time(wide, b200).seconds / 2
