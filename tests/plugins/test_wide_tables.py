"""Tables of experts, latent attention, collectives and states, on small tables in the package's layout; links."""

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
from twinfer.core.layout import Layout
from twinfer.core.model_parts import LinearAttentionSpec
from twinfer.core.registry import Registry
from twinfer.core.work import Op, StepShape, step_ops
from twinfer.plugins.op_time.expert_tables import expert_bound, format_of, load_of, skew_of
from twinfer.plugins.op_time.latent_tables import DEEPSEEK_V3, latent_bound, projections
from twinfer.plugins.op_time.roofline import Roofline
from twinfer.plugins.op_time.silicon import SystemTables
from twinfer.plugins.op_time.wires import network_hops, sent_share, wire_seconds

H100 = load_device("h100-sxm", Registry(entry_points=False))
MIXTRAL = resolve_spec("mixtral-8x7b")
DEEPSEEK = replace(resolve_spec("deepseek-v3"), weight_bits=None, linear_dtype="")


def tables(tmp_path: Path, family: str, name: str, rows: list[dict[str, Any]], stack: str = "vllm") -> SystemTables:
    home = tmp_path / "data" / "h100_sxm" / family / "0.24.0"
    home.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), home / f"{name}.parquet")
    return SystemTables(tmp_path / "data" / "h100_sxm", stack, None)


def one(ops: list[Op], name: str) -> Op:
    (op,) = [op for op in ops if op.name == name]
    return op


# --- experts ------------------------------------------------------------------------------------


@pytest.fixture
def experts(tmp_path: Path) -> SystemTables:
    base = {
        "moe_dtype": "bfloat16", "hidden_size": 4096, "inter_size": 14336, "topk": 2, "num_experts": 8,
        "moe_ep_size": 1, "kernel_source": "triton",
    }  # fmt: skip
    return tables(tmp_path, "moe/vllm", "moe_perf", [
        base | {"num_tokens": n, "moe_tp_size": tp, "distribution": law, "latency": (1 + n / 100) / tp * times}
        for n in (16, 64, 256) for tp in (1, 2) for law, times in (("balanced", 1.0), ("power_law_1.2", 1.5))
    ])  # fmt: skip


def test_experts_are_read_at_their_shape_tokens_and_skew(experts: SystemTables) -> None:
    for layout, skew, ms in (
        (Layout(), 0.0, 1.64),
        (Layout(2), 0.0, 0.82),
        (Layout(), 1.2, 2.46),
        (Layout(), 1.0, 2.46),
    ):
        assert MIXTRAL.moe is not None
        model = replace(MIXTRAL, moe=replace(MIXTRAL.moe, skew=skew))
        answer = experts.time(one(step_ops(model, StepShape.decode(*[9] * 64), layout), "experts"), H100)
        assert answer is not None and answer.source == "measured"
        assert answer.seconds == pytest.approx(ms * 1e-3)


def test_the_activation_is_part_of_the_measured_experts(experts: SystemTables) -> None:
    op = one(step_ops(MIXTRAL, StepShape.decode(9)), "mlp_act")
    answer = experts.time(op, H100)
    assert answer is not None and answer.seconds == 0.0 and "part of" in answer.detail


def test_experts_of_other_shapes_take_the_utilisation_of_the_nearest(experts: SystemTables) -> None:
    assert MIXTRAL.moe is not None
    wide = replace(MIXTRAL, moe=replace(MIXTRAL.moe, intermediate_size=16384))
    here, there = (one(step_ops(m, StepShape.decode(*[9] * 64)), "experts") for m in (MIXTRAL, wide))
    known, other = experts.time(here, H100), experts.time(there, H100)
    assert known is not None and other is not None and other.source == "transferred"
    assert known.seconds < other.seconds < 1.3 * known.seconds
    assert other.spread > known.spread


def test_formats_that_were_not_measured_go_to_the_next_model(experts: SystemTables) -> None:
    int4 = replace(MIXTRAL, weight_bits=4.125)
    assert experts.time(one(step_ops(int4, StepShape.decode(9)), "experts"), H100) is None


@pytest.mark.parametrize(
    ("dtype", "bits", "name"),
    [("bfloat16", 16, "bfloat16"), ("fp8", 8, "fp8_block"), ("bfloat16", 4.25, "w4a16_mxfp4"),
     ("bfloat16", 4.125, "int4_wo"), ("fp8", 4.125, "w4afp8")],
)  # fmt: skip
def test_names_of_formats(dtype: str, bits: float, name: str) -> None:
    assert format_of(dtype, bits, "fp8_block") == name


def test_balanced_tokens_are_dealt_like_cards() -> None:
    assert load_of(8, 2, 1, 1, 0.0) == (2, 2) and load_of(8, 2, 100, 4, 0.0) == (50, 2)
    assert skew_of("balanced") == 0 and skew_of("power_law_1.01") == 1.01
    bound = expert_bound("bfloat16", "balanced", H100)
    shape = (4096.0, 14336.0, 2.0, 8.0, 1.0)
    weights = 8 * 3 * 4096 * 14336 * 2 / 3.35e12
    assert weights < bound(shape, 64) < 1.5 * weights
    assert bound(shape, 65536) > 6 * 65536 * 2 * 4096 * 14336 / 989e12


# --- latent attention ---------------------------------------------------------------------------


def latent_rows(kind: str, more: dict[str, Any], latency: float = 1.0) -> list[dict[str, Any]]:
    base = {"mla_dtype": "bfloat16", "kv_cache_dtype": "bfloat16", "num_heads": 128, **more}
    if kind == "context":
        return [base | {"batch_size": 1, "isl": n, "step": 0, "latency": latency * n / 1000} for n in (500, 1000, 2000)]
    return [base | {"batch_size": 4, "isl": 1, "step": n - 1, "latency": latency * n / 1e4} for n in (1000, 4000)]


def test_latent_attention_kernels(tmp_path: Path) -> None:
    tables(tmp_path, "mla/sglang", "context_mla_perf", latent_rows("context", {}))
    found = tables(tmp_path, "mla/sglang", "generation_mla_perf", latent_rows("generation", {}), "sglang")
    prompt = found.time(one(step_ops(DEEPSEEK, StepShape.prefill(1000)), "attention"), H100)
    decode = found.time(one(step_ops(DEEPSEEK, StepShape.decode(*[4000] * 4)), "attention"), H100)
    assert prompt is not None and prompt.seconds == pytest.approx(1e-3) and prompt.source == "measured"
    assert decode is not None and decode.seconds == pytest.approx(0.4e-3)


def test_what_is_left_of_a_block_when_its_products_are_known(tmp_path: Path) -> None:
    """The ops of a block add up to the measured block."""
    gemms = [
        {"gemm_dtype": "bfloat16", "m": m, "n": n, "k": k, "latency": 0.01 * m}
        for n, k in projections(128) for m in (4, 1000, 4096)
    ]  # fmt: skip
    tables(tmp_path, "gemm/vllm", "gemm_perf", gemms)
    more = {"gemm_type": "bfloat16"}
    found = tables(tmp_path, "mla/vllm", "mla_generation_module_perf", latent_rows("generation", more))
    ops = step_ops(DEEPSEEK, StepShape.decode(*[4000] * 4))
    parts = [found.time(one(ops, name), H100) for name in (
        "q_down_proj", "q_up_proj", "kv_down_proj", "kv_up_proj", "attention", "o_proj"
    )]  # fmt: skip
    assert sum(p.seconds for p in parts if p is not None) == pytest.approx(0.4e-3)
    assert parts[4] is not None and parts[4].seconds == pytest.approx(0.4e-3 - 4 * 0.04e-3), "four products"


def test_other_sizes_than_deepseek_v3_are_scaled_by_the_bound(tmp_path: Path) -> None:
    found = tables(tmp_path, "mla/sglang", "generation_mla_perf", latent_rows("generation", {}), "sglang")
    lite = resolve_spec("deepseek-v2-lite")
    op = one(step_ops(lite, StepShape.decode(*[4000] * 4)), "attention")
    answer = found.time(op, H100)
    assert answer is not None and answer.source == "transferred"
    v3 = latent_bound("generation", "bfloat16", H100)
    assert v3((16, 4), 4000) < v3((128, 4), 4000)
    assert answer.seconds == pytest.approx(0.4e-3 * v3((16, 4), 4000) / v3((128, 4), 4000), rel=0.05)
    assert DEEPSEEK_V3.kv_rank + DEEPSEEK_V3.rope == 576


# --- collectives --------------------------------------------------------------------------------


def test_gathers_are_read_at_the_whole_buffer(tmp_path: Path) -> None:
    found = tables(tmp_path, "comm/nccl", "nccl_perf", [
        {"op_name": kind, "nccl_dtype": "half", "num_gpus": 4, "message_size": size // 2, "latency": size / 1e6 * times}
        for kind, times in (("all_gather", 1.0), ("reduce_scatter", 2.0), ("alltoall", 3.0)) for size in (2048, 65536)
    ])  # fmt: skip

    def seconds(name: str, message: float) -> float:
        answer = found.time(Op(name, "comm", 0.0, 1.0, 1.0, "bfloat16", 1, (4,), message), H100)
        assert answer is not None
        return answer.seconds

    assert seconds("all_gather", 16384) == pytest.approx(65536e-9)
    assert seconds("moe_scatter", 65536) == pytest.approx(2 * 65536e-9)
    assert seconds("moe_dispatch", 65536) == pytest.approx(3 * 65536e-9)
    assert found.time(Op("all_gather", "comm", 0.0, 1.0, 1.0, "bfloat16", 1, (16,), 1024), H100) is None


def test_tokens_sent_to_experts(tmp_path: Path) -> None:
    found = tables(tmp_path, "comm/vllm", "moe_a2a_perf", [
        {"comm_backend": "deepep_ll", "phase": phase, "comm_dtype": "default", "ep_size": 8, "node_num": 1,
         "hidden_size": 7168, "topk": 8, "num_experts": 256, "num_tokens": n, "sms": 0, "latency": n * times}
        for phase, times in (("dispatch", 1.0), ("combine", 2.0)) for n in (1, 16, 128)
    ])  # fmt: skip
    ops = step_ops(DEEPSEEK, StepShape.decode(*[100] * 128), Layout(dp=8, ep=8))
    there, back = (found.time(one(ops, name), H100) for name in ("moe_dispatch", "moe_combine"))
    assert there is not None and there.seconds == pytest.approx(16e-6) and there.source == "measured"
    assert back is not None and back.seconds == pytest.approx(32e-6)


def test_groups_over_several_nodes() -> None:
    size = 8e6
    op = Op("all_reduce", "comm", 0.0, size, size, "bfloat16", 1, (16,), size)
    assert H100.devices_per_node == 8 and H100.network_bandwidth and H100.link_bandwidth
    seconds, words = wire_seconds(op, H100, 1.0, 1.0)
    within, between = 1.75 * size / H100.link_bandwidth, 2 * 0.5 * size / 8 / H100.network_bandwidth
    assert seconds == pytest.approx(within + between) and "2 nodes" in words
    assert network_hops(op, H100) == 2 and network_hops(replace(op, shape=(8,)), H100) == 0
    exchange = replace(op, name="moe_dispatch")
    assert wire_seconds(exchange, H100, 1.0, 1.0)[0] == pytest.approx(0.5 * size / H100.network_bandwidth)
    unknown = H100.model_copy(update={"network_bandwidth": None})
    with pytest.raises(ConfigError, match="how nodes are linked"):
        wire_seconds(op, unknown, 1.0, 1.0)
    assert sent_share("all_gather", 4) == sent_share("all_to_all", 4) == 0.75


def test_what_runs_beside_is_hidden_as_far_as_the_op_takes() -> None:
    from twinfer.simulator.op_time import OpTimeChain

    chain = OpTimeChain((Roofline(),), H100)
    ring, last = [
        op for op in step_ops(resolve_spec("llama-3.1-8b"), StepShape.prefill(65536), Layout(cp=4)) if op.name == "attention"
    ]  # fmt: skip
    assert chain.time(ring).seconds == chain.time(last).seconds, "compute of long prompts hides the ring"
    assert ring.beside is not None
    slow = replace(ring, beside=replace(ring.beside, comm_bytes=1e12))
    assert slow.beside is not None
    assert chain.time(slow).seconds == chain.time(slow.beside).seconds > chain.time(last).seconds
    assert "hidden" in chain.time(slow).detail
    assert any("beside it, kv_ring" in line for line in chain.explain(ring))


# --- states -------------------------------------------------------------------------------------


def test_states(tmp_path: Path) -> None:
    sizes = {"num_k_heads": 4, "num_v_heads": 8, "head_k_dim": 16, "head_v_dim": 32, "d_model": 64, "d_conv": 4}
    found = tables(tmp_path, "linear_attention/vllm", "gdn_perf", [
        sizes | {"kernel_source": kernel, "phase": phase, "batch_size": b, "seq_len": n, "latency": ms * b * n}
        for kernel, phase, ms in (
            ("chunk_gated_delta_rule", "context", 0.001), ("fused_sigmoid_gating_delta_rule_update", "generation", 0.02),
            ("causal_conv1d_fn", "context", 0.003), ("causal_conv1d_update", "generation", 0.04),
        )
        for b in (1, 4) for n in ((100, 1000) if phase == "context" else (1,))
    ])  # fmt: skip
    delta = LinearAttentionSpec(
        kind="gated_delta_net", key_heads=4, value_heads=8, key_dim=16, value_dim=32, conv_width=4
    )  # fmt: skip
    model = replace(resolve_spec("llama-3.1-8b"), linear_attention=delta, layer_kinds=("linear",) * 31 + ("attention",))
    decode, prompt = step_ops(model, StepShape.decode(*[50] * 4)), step_ops(model, StepShape.prefill(1000))
    for ops, name, ms in (
        (decode, "linear_attention", 0.08), (decode, "linear_conv", 0.16),
        (prompt, "linear_attention", 1.0), (prompt, "linear_conv", 3.0),
    ):  # fmt: skip
        answer = found.time(one(ops, name), H100)
        assert answer is not None and answer.seconds == pytest.approx(ms * 1e-3)
    bound = Roofline().time(one(decode, "linear_attention"), H100)
    assert bound is not None and bound.seconds > 0
