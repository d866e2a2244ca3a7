"""Op times from kernel tables: rules of `KernelTable`, and the reader on small tables in the package's layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from twinfer.core.catalog import resolve_spec
from twinfer.core.device import load_device
from twinfer.core.errors import ConfigError
from twinfer.core.op_time import host_op
from twinfer.core.registry import Registry
from twinfer.core.technique import Needs
from twinfer.core.work import Op, RowShape, StepShape
from twinfer.plugins.op_time import silicon
from twinfer.plugins.op_time.kernel_tables import KernelTable, median_rows
from twinfer.plugins.op_time.silicon import Silicon, SystemTables

H100 = load_device("h100-sxm", Registry(entry_points=False))


def law(shape: tuple[float, ...], point: float) -> float:
    return 1e-6 * shape[0] * point


def table(use: float = 0.5) -> KernelTable:
    return KernelTable({((n,), p): law((n,), p) / use for n in (1.0, 4.0, 16.0) for p in (1.0, 8.0, 64.0)}, law)


def test_a_measured_point_is_answered_as_it_stands() -> None:
    answer = table().time((4.0,), 8.0)
    assert answer is not None
    assert (answer.seconds, answer.source) == (pytest.approx(64e-6), "measured")


def test_between_points_and_shapes_the_utilisation_is_carried_over() -> None:
    between, other = table().time((4.0,), 20.0), table().time((9.0,), 20.0)
    assert between is not None and other is not None
    assert between.seconds == pytest.approx(law((4.0,), 20.0) / 0.5) and between.source == "interpolated"
    assert other.seconds == pytest.approx(law((9.0,), 20.0) / 0.5) and other.source == "transferred"
    assert other.spread > between.spread


def test_beyond_the_table_it_says_so_and_is_less_sure() -> None:
    inside, outside = table().time((4.0,), 64.0), table().time((4.0,), 1024.0)
    assert inside is not None and outside is not None
    assert outside.source == "extrapolated" and outside.spread > 4 * inside.spread
    assert "4.0 octaves beyond" in outside.detail


def test_left_out_shapes_are_not_looked_at() -> None:
    rows = {((n,), p): law((n,), p) / (0.1 if n == 4.0 else 0.5) for n in (1.0, 4.0, 16.0) for p in (1.0, 8.0)}
    answer = KernelTable(rows, law).time((4.0,), 8.0, leave_out=True)
    assert answer is not None and answer.seconds == pytest.approx(law((4.0,), 8.0) / 0.5)


def test_the_last_number_of_a_shape_is_interpolated_where_it_is_a_grid() -> None:
    rows = {((2.0, b), p): b * p * 1e-6 / use for b, use in ((1.0, 0.25), (4.0, 1.0)) for p in (1.0, 64.0)}
    bound = lambda shape, p: shape[1] * p * 1e-6  # noqa: E731
    between = KernelTable(rows, bound, lerp=True).time((2.0, 2.0), 8.0)
    assert between is not None and between.source == "interpolated"
    assert between.seconds == pytest.approx(2 * 8e-6 / 0.5), "half way in log2, so is its utilisation"
    outside = KernelTable(rows, bound, lerp=True).time((2.0, 16.0), 8.0)
    assert outside is not None and outside.source == "transferred"


def test_a_grid_point_left_out_is_read_off_its_neighbours() -> None:
    rows = {((1.0, b), p): b * p * 1e-6 / (0.1 if b == 2.0 else 0.5) for b in (1.0, 2.0, 4.0) for p in (1.0, 8.0)}
    answer = KernelTable(rows, lambda s, p: s[1] * p * 1e-6, lerp=True).time((1.0, 2.0), 8.0, leave_out=True)
    assert answer is not None and answer.seconds == pytest.approx(2 * 8e-6 / 0.5)


def test_repeated_measurements_count_as_their_median() -> None:
    key = ((1.0,), 2.0)
    assert median_rows([key] * 3, [1.0, 9.0, 2.0]) == {key: 2.0}


def test_an_empty_table_cannot_say() -> None:
    assert KernelTable({}, law).time((1.0,), 1.0) is None


# --- the reader -----------------------------------------------------------------------------------


def write(folder: Path, family: str, name: str, rows: list[dict[str, Any]], version: str = "0.9.0") -> None:
    home = folder / "data" / "h100_sxm" / family / version
    home.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), home / f"{name}.parquet")


@pytest.fixture
def systems(tmp_path: Path) -> Path:
    def gemm(factor: float) -> list[dict[str, Any]]:
        return [
            {"gemm_dtype": "bfloat16", "m": m, "n": 4096, "k": 4096, "latency": factor * 1e-3 * m}
            for m in (16, 64, 256)
        ]

    write(tmp_path, "gemm/vllm", "gemm_perf", gemm(5.0), "0.9.0")
    write(tmp_path, "gemm/vllm", "gemm_perf", gemm(1.0), "0.10.0")
    heads = {"num_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "kv_cache_dtype": "bfloat16"}
    write(tmp_path, "attention/vllm", "context_attention_perf", [
        heads | {"batch_size": b, "isl": x, "step": 0, "latency": 0.01 + 1e-6 * b * x} for b in (1, 2) for x in (128, 1024)
    ])  # fmt: skip
    write(tmp_path, "attention/vllm", "generation_attention_perf", [
        heads | {"batch_size": b, "isl": 1, "step": x - 1, "latency": 0.01 + 1e-6 * b * x}
        for b in (1, 2) for x in (128, 1024)
    ])  # fmt: skip
    write(tmp_path, "comm/nccl", "nccl_perf", [
        {"op_name": "all_gather", "nccl_dtype": "half", "num_gpus": 2, "message_size": 1024, "latency": 0.007}
    ], "2.29.2")  # fmt: skip
    return tmp_path


def model(folder: Path, **options: Any) -> Silicon:
    silicon._tables.cache_clear()
    return Silicon(Silicon.Options(folder=str(folder), **options))


def gemm(m: int, dtype: str = "bfloat16") -> Op:
    return Op("g", "gemm", 2.0 * m * 4096**2, 2.0 * 4096**2, 2.0 * m * 4096, dtype, shape=(m, 4096, 4096))


def test_the_newest_version_is_read_unless_another_is_named(systems: Path) -> None:
    newest, named = model(systems).time(gemm(64), H100), model(systems, version="0.9.0").time(gemm(64), H100)
    assert newest is not None and named is not None
    assert newest.seconds == pytest.approx(64e-6) and named.seconds == pytest.approx(5 * 64e-6)
    assert newest.source == "measured" and newest.sigma > 0 and "h100_sxm" in newest.detail


def test_narrower_weights_are_not_what_the_table_measured(systems: Path) -> None:
    source = model(systems)
    assert source.time(replace(gemm(64), bytes_read=0.5 * 4096**2 + 2 * 64 * 4096), H100) is None
    assert source.time(gemm(64), H100) is not None


def attention(*rows: tuple[int, int]) -> Op:
    return Op("attention", "attention", 1.0, 1.0, 1.0, "bfloat16", shape=(32, 8, 128, 128, 0),
              rows=tuple(RowShape(*row) for row in rows))  # fmt: skip


def test_rows_of_one_launch_pay_the_launch_once(systems: Path) -> None:
    source = model(systems)
    prefill, decode, both = (
        source.time(attention(*rows), H100) for rows in ([(1024, 1024)], [(1, 1024)], [(1024, 1024), (1, 1024)])
    )
    assert prefill is not None and decode is not None and both is not None
    assert prefill.seconds == pytest.approx(11.024e-6) and prefill.source == "measured"
    assert max(prefill.seconds, decode.seconds) < both.seconds < prefill.seconds + decode.seconds


def test_a_chunk_takes_what_a_prompt_of_as_many_pairs_takes(systems: Path) -> None:
    chunk = model(systems).time(attention((512, 1024)), H100)
    assert chunk is not None and chunk.source == "transferred" and "as 1 prompt(s) of 887" in chunk.detail


def test_collectives_come_from_nccl_where_the_stack_has_none(systems: Path) -> None:
    op = Op("all_gather", "comm", 0.0, 1024, 1024, "bfloat16", shape=(2,), comm_bytes=1024)
    answer = model(systems).time(op, H100)
    assert answer is not None and answer.seconds == pytest.approx(7e-6)


@pytest.mark.parametrize(
    "op",
    [gemm(64, "int8"), Op("norms", "elementwise", 1.0, 1.0, 1.0, "bfloat16"),
     Op("all_reduce", "comm", 0.0, 9.0, 9.0, "bfloat16", shape=(2,), comm_bytes=9.0)],
)  # fmt: skip
def test_what_was_not_measured_goes_to_the_next_model(systems: Path, op: Op) -> None:
    assert model(systems).time(op, H100) is None


def test_an_unknown_device_goes_to_the_next_model(systems: Path) -> None:
    cpu = load_device("cpu", Registry(entry_points=False))
    assert model(systems).time(gemm(64), cpu) is None


def test_a_folder_without_tables_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="silicon:folder"):
        model(tmp_path / "nowhere").time(gemm(64), H100)


def test_without_the_package_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(silicon, "installed_folder", lambda: None)
    assert "twinfer[silicon]" in Silicon.why_not(Needs())[0]
    with pytest.raises(ConfigError, match="aiconfigurator-core"):
        Silicon().time(gemm(64), H100)


def test_versions_sort_as_numbers() -> None:
    order = sorted(["0.9.0", "1.3.0rc20", "0.24.0", "1.3.0rc9", "0.10.0"], key=silicon._order)
    assert order == ["0.9.0", "0.10.0", "0.24.0", "1.3.0rc9", "1.3.0rc20"]


def test_system_tables_of_a_missing_system_are_empty(tmp_path: Path) -> None:
    assert SystemTables(tmp_path / "data" / "none", "vllm", None).gemm("bfloat16", H100) is None


# --- what a stack does in one kernel, and what a measured time holds -------------------------------


@pytest.fixture
def fp8(systems: Path) -> Path:
    """Products in FP8 of 100 us, of which narrowing 64 tokens takes 5 us, another 1 us a token; fp8 KV at half the time."""
    for stack in ("vllm", "trtllm", "sglang"):
        write(systems, f"gemm/{stack}", "gemm_perf", [
            {"gemm_dtype": "fp8", "m": m, "n": 4096, "k": 4096, "latency": 0.1} for m in (1, 64, 4096)
        ], "1.0")  # fmt: skip
        write(systems, f"quantize/{stack}", "scale_matrix_perf", [
            {"quant_dtype": "fp8", "m": m, "k": 4096, "latency": 0.005 if m < 4096 else 0.1} for m in (1, 64, 4096)
        ], "1.0")  # fmt: skip
    heads = {"num_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "step": 1023, "isl": 1, "batch_size": 4}
    write(systems, "attention/sglang", "generation_attention_perf", [
        heads | {"kv_cache_dtype": kv, "attn_dtype": computed, "latency": ms}
        for kv, computed, ms in (("bfloat16", "bfloat16", 0.02), ("fp8", "bfloat16", 0.015), ("fp8", "fp8", 0.01))
    ], "1.0")  # fmt: skip
    return systems


def product(name: str, m: int = 64) -> Op:
    return Op(name, "gemm", 1.0, 4096.0**2, 1.0, "fp8", shape=(m, 4096, 4096))


def streaming(name: str, m: int = 64, dtype: str = "bfloat16") -> Op:
    return Op(name, "elementwise", 1.0, 2.0 * m * 4096, 1.0 * m * 4096, dtype, shape=(m, 4096))


def test_narrowing_is_part_of_the_measured_product_and_not_counted_twice(fp8: Path) -> None:
    source = model(fp8)
    own, of_int8 = (
        source.time(streaming("quantize_input", dtype="fp8"), H100),
        streaming("quantize_input", dtype="int8"),
    )
    assert own is not None and own.seconds == 0 and "part of" in own.detail
    assert source.time(of_int8, H100) is None, "of products that were not measured it is work of its own"


@pytest.mark.parametrize(
    ("stack", "narrowed"),
    [("vllm", {"qkv_proj", "gate_up_proj", "down_proj"}), ("trtllm", {"o_proj", "down_proj"}), ("sglang", set())],
)
def test_a_stack_saves_the_narrowing_that_the_kernel_before_does(fp8: Path, stack: str, narrowed: set[str]) -> None:
    source = model(fp8, stack=stack)
    for name in ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"):
        answer = source.time(product(name), H100)
        assert answer is not None
        assert answer.seconds == pytest.approx(95e-6 if name in narrowed else 100e-6), name


def test_a_scale_that_the_checkpoint_holds_is_not_searched_for(fp8: Path) -> None:
    """TensorRT-LLM's products were measured with the search; others' were not, whatever lies in their folders."""
    for stack in ("vllm", "trtllm"):
        write(fp8, f"quantize/{stack}", "computescale_perf", [
            {"quant_dtype": "fp8", "m": m, "k": 4096, "latency": 0.02 if m < 4096 else 0.4} for m in (1, 64, 4096)
        ], "1.0")  # fmt: skip
    took = {}
    for stack, dynamic in (("trtllm", False), ("trtllm", True), ("vllm", False)):
        answer = model(fp8, stack=stack, dynamic=dynamic).time(product("gate_up_proj"), H100)
        assert answer is not None
        took[stack, dynamic] = answer.seconds * 1e6
    assert took == {("trtllm", False): pytest.approx(80), ("trtllm", True): pytest.approx(100), ("vllm", False): 95}


def test_a_streaming_kernel_takes_a_measured_launch_and_its_bytes(fp8: Path) -> None:
    moving = 3.0 * 64 * 4096 / (0.8 * H100.memory_bandwidth)
    norms, rope = (model(fp8).time(streaming(name), H100) for name in ("norms", "rope_kv_write"))
    assert norms is not None and norms.seconds == pytest.approx(5e-6 + moving) and norms.source == "transferred"
    assert rope is not None and rope.seconds == pytest.approx(10e-6 + moving), "two launches under vLLM"
    within = model(fp8, stack="trtllm").time(streaming("rope_kv_write"), H100)
    assert within is not None and within.seconds == 0
    for stack, launches in (("vllm", 4), ("trtllm", 1)):
        normed = model(fp8, stack=stack).for_model(resolve_spec("qwen3-32b")).time(streaming("rope_kv_write"), H100)
        assert normed is not None and normed.seconds == pytest.approx(launches * 5e-6 + moving)
    plain = model(fp8).for_model(resolve_spec("llama-3.1-8b")).time(streaming("rope_kv_write"), H100)
    assert plain == rope


def test_keys_and_values_are_read_in_their_own_format(fp8: Path) -> None:
    op = Op(
        "attention", "attention", 1.0, 1.0, 1.0, "bfloat16", shape=(32, 8, 128, 128, 0), rows=(RowShape(1, 1024),) * 4
    )
    source = model(fp8, stack="sglang")
    wide, narrow = source.time(op, H100), source.time(replace(op, kv_dtype="fp8"), H100)
    assert wide is not None and wide.seconds == pytest.approx(20e-6)
    assert narrow is not None and narrow.seconds == pytest.approx(10e-6), (
        "computed in FP8, too, where that was measured"
    )
    assert source.time(replace(op, kv_dtype="int4"), H100) is None


def test_prompts_of_a_step_are_one_launch(systems: Path) -> None:
    both = model(systems).time(attention((128, 128), (128, 128)), H100)
    assert both is not None and both.seconds == pytest.approx(10.256e-6) and both.source == "measured"
    mixed = model(systems).time(attention((100, 100), (150, 150)), H100)
    assert mixed is not None and mixed.source == "transferred" and mixed.seconds == pytest.approx(10.256e-6, rel=0.02)


def test_another_version_than_was_measured_is_less_sure(systems: Path) -> None:
    same, other = (model(systems, version=v).time(gemm(64), H100) for v in ("0.10.0", "0.11.0"))
    assert same is not None and other is not None and other.seconds == same.seconds
    assert other.sigma > same.sigma and "another version" in other.detail


def test_an_all_reduce_that_does_the_norm_saves_its_launch(fp8: Path) -> None:
    write(fp8, "comm/trtllm", "custom_allreduce_perf", [
        {"num_gpus": 2, "message_size": size, "latency": 0.02} for size in (512, 1 << 20)
    ], "1.0")  # fmt: skip
    op = Op("all_reduce", "comm", 0.0, 1024, 1024, "bfloat16", shape=(2,), comm_bytes=1024)
    plain, fused = (model(fp8, stack="trtllm", fused_all_reduce=f).time(op, H100) for f in (False, True))
    assert plain is not None and fused is not None
    assert plain.seconds == pytest.approx(20e-6) and fused.seconds == pytest.approx(15e-6, rel=0.02)


def test_the_cpu_part_of_a_step_is_that_of_a_serving_stack(systems: Path) -> None:
    few, many = (model(systems).time(host_op(StepShape.decode(*[10] * n)), H100) for n in (1, 128))
    assert few is not None and many is not None
    assert few.seconds == pytest.approx(1.5e-3, rel=0.05) and many.seconds == pytest.approx(7e-3, rel=0.01)


def test_neighbours_that_were_disturbed_are_left_out() -> None:
    """One of four took four times as long as the others."""
    rows = {((n,), p): law((n,), p) / (0.1 if n == 8.0 else 0.5) for n in (1.0, 2.0, 8.0, 16.0) for p in (1.0, 8.0)}
    careful, trusting = KernelTable(rows, law, slow=1.0).time((4.0,), 8.0), KernelTable(rows, law).time((4.0,), 8.0)
    assert careful is not None and careful.seconds == pytest.approx(law((4.0,), 8.0) / 0.5)
    assert trusting is not None and trusting.seconds > 1.3 * careful.seconds


def test_spreads_are_what_the_points_show_when_they_are_left_out() -> None:
    """A table whose utilisation jumps by 30 % from point to point is less sure than a smooth one."""
    points = [2.0**i for i in range(20)]
    rows = {((1.0,), p): law((1.0,), p) / (0.5 if i % 2 else 0.65) for i, p in enumerate(points)}
    smooth = {((1.0,), p): law((1.0,), p) / 0.5 for p in points}
    assert KernelTable(rows, law).spread_between() == pytest.approx(0.3 / 1.2816, rel=0.3)
    assert KernelTable(smooth, law).spread_between() == pytest.approx(0.01)
