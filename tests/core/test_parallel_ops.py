"""Steps over several devices: what ranks, stages and groups do adds up to the step of one device."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinfer.core.catalog import resolve_spec
from twinfer.core.errors import ConfigError
from twinfer.core.expert_load import rank_load
from twinfer.core.expert_ops import ranks_of_token
from twinfer.core.layer_ops import ops_of_stage
from twinfer.core.layout import Layout
from twinfer.core.parallel_ops import deal, largest_group, micro_batches, stages_of
from twinfer.core.spec import ModelSpec, MoESpec
from twinfer.core.work import COLLECTIVES, Op, RowShape, StepShape, stage_ops, step_ops, total, visible_pairs

TINY = ModelSpec(
    name="tiny", family="llama", num_layers=7, hidden_size=64, num_heads=8, num_kv_heads=4, head_dim=16,
    intermediate_size=96, vocab_size=128, max_context=4096,
)  # fmt: skip
SPARSE = replace(TINY, moe=MoESpec(num_experts=16, top_k=2, intermediate_size=32, num_shared=1, first_dense_layers=1))
ROWS = st.lists(
    st.tuples(st.integers(1, 40), st.integers(0, 90)).map(lambda r: RowShape(r[0], r[0] + r[1])), min_size=1, max_size=9
)
WORK = ("gemm", "attention", "elementwise", "scan")


def named(ops: list[Op], name: str) -> list[Op]:
    return [op for op in ops if op.name == name]


def one(ops: list[Op], name: str) -> Op:
    (op,) = named(ops, name)
    return op


def flops(ops: list[Op]) -> float:
    return total(ops, "flops")


def weights(ops: list[Op], act: float = 2.0) -> float:
    """Bytes of weights that linears read."""
    return sum((op.bytes_read - op.shape[0] * op.shape[2] * act) * op.count for op in ops if op.name.endswith("_proj"))


# --- pipeline -----------------------------------------------------------------------------------


@given(rows=ROWS, pp=st.integers(1, 7))
def test_stages_add_up_to_one_device(rows: list[RowShape], pp: int) -> None:
    for model in (TINY, SPARSE):
        shape = StepShape(tuple(rows), len(rows))
        alone, stages = step_ops(model, shape), stage_ops(model, shape, Layout(pp=pp))
        assert len(stages) == pp
        together = [op for ops in stages for op in ops if op.name != "hand_over"]
        assert flops(together) == pytest.approx(flops(alone), rel=1e-12)
        assert weights(together) == pytest.approx(weights(alone), rel=1e-12)
        assert total(together, "bytes") == pytest.approx(total(alone, "bytes"), rel=1e-12)
        sent = [op for ops in stages for op in named(ops, "hand_over")]
        assert [op.comm_bytes for op in sent] == [shape.num_tokens * 64 * 2] * (pp - 1)


def test_layers_are_dealt_to_stages_in_order() -> None:
    stages = stages_of(TINY, Layout(pp=3))
    assert [(s.first, s.last) for s in stages] == [(0, 2), (2, 5), (5, 7)]
    with pytest.raises(ConfigError, match="7 layers"):
        stages_of(TINY, Layout(pp=8))


@given(rows=ROWS, most=st.integers(1, 6))
def test_micro_batches_hold_every_token_and_every_pair_once(rows: list[RowShape], most: int) -> None:
    long = [RowShape(q * 100, n * 100) for q, n in rows]
    for some in (rows, long):
        shape = StepShape(tuple(some), len(some))
        parts = micro_batches(shape, most)
        assert 1 <= len(parts) <= most
        assert sum(p.num_tokens for p in parts) == shape.num_tokens
        pairs = sum(visible_pairs(q, n) for p in parts for q, n in p.rows)
        assert pairs == sum(visible_pairs(q, n) for q, n in some)


def test_a_full_pipeline_steps_as_fast_as_its_slowest_stage() -> None:
    """Equal stages and rows that divide: a step lasts a quarter of the compute of one device, and all weights' reading."""
    model, shape = replace(TINY, num_layers=8, vocab_size=1), StepShape.decode(*[100] * 64)
    whole, piped = step_ops(model, shape), step_ops(model, shape, Layout(pp=4))
    inner = [op for op in piped if op.kind in ("gemm", "attention") and op.name != "lm_head"]
    assert 4 * flops(inner) == pytest.approx(
        flops([o for o in whole if o.kind in ("gemm", "attention") and o.name != "lm_head"])
    )
    assert weights(piped) == pytest.approx(weights(whole)), "two layers, read once for each of four micro-batches"
    assert one(piped, "hand_over").count == 3 and one(piped, "hand_over").comm_bytes == 16 * 64 * 2


def test_one_row_takes_the_way_through_all_stages() -> None:
    shape = StepShape.decode(500)
    whole, piped = step_ops(TINY, shape), step_ops(TINY, shape, Layout(pp=4))
    assert flops(piped) == pytest.approx(flops(whole))
    assert {op.name for op in piped} - {op.name for op in whole} == {"hand_over"}


# --- groups of rows -----------------------------------------------------------------------------


@given(rows=ROWS, groups=st.integers(1, 8))
def test_rows_are_dealt_once_and_evenly(rows: list[RowShape], groups: int) -> None:
    parts = deal(rows, groups)
    assert sorted(row for part in parts for row in part) == sorted(rows)
    sizes = [sum(q for q, _ in part) for part in parts]
    assert max(sizes) - min(sizes) <= max(q for q, _ in rows)


@given(rows=ROWS)
def test_groups_add_up_to_one_device(rows: list[RowShape]) -> None:
    """Dense work of all groups is that of one device; with attention data-parallel each group reads all weights."""
    shape, layout = StepShape(tuple(rows), 0), Layout(dp=4)
    stage = stages_of(TINY, layout)[0]
    groups = [ops_of_stage(stage, StepShape(part, 0)) for part in deal(shape.rows, 4) if part]
    together = [op for ops in groups for op in ops]
    alone = step_ops(TINY, shape)
    assert flops(together) == pytest.approx(flops(alone), rel=1e-12)
    assert weights(together) == pytest.approx(len(groups) * weights(alone))
    slowest = step_ops(TINY, shape, layout)
    assert flops(slowest) == pytest.approx(max(flops(ops) for ops in groups), rel=0.5)
    assert largest_group(shape, 4).num_tokens == max(sum(q for q, _ in part) for part in deal(shape.rows, 4))


# --- experts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [Layout(2), Layout(4, ep=2), Layout(4, ep=4), Layout(dp=4, ep=4), Layout(2, dp=2)])
def test_expert_ranks_add_up_to_one_device_times_their_imbalance(layout: Layout) -> None:
    shape = StepShape.decode(*[50] * 512)
    alone, rank = one(step_ops(SPARSE, shape), "experts"), one(step_ops(SPARSE, shape, layout), "experts")
    ranks = layout.tp * layout.dp
    uneven = rank_load(16, 2, 512, layout.ep).pairs * layout.ep / (512 * 2)
    assert rank.flops * ranks == pytest.approx(alone.flops * uneven)
    assert 1.0 <= uneven < 1.3
    inputs = 64 + 32 // layout.expert_tp
    stored = rank.bytes_read - rank.flops / (2 * 64 * 3 * 32 / layout.expert_tp) * inputs * 2
    assert stored * ranks == pytest.approx(16 * 3 * 64 * 32 * 2, rel=1e-6), "all experts are held, and touched, once"


def test_without_data_parallel_attention_nothing_is_sent_to_experts() -> None:
    ops = step_ops(SPARSE, StepShape.decode(*[50] * 64), Layout(4, ep=4))
    assert {op.name for op in ops if op.kind == "comm"} == {"all_reduce", "all_gather"}
    assert one(ops, "all_reduce").count == 2 * 7 + 1


def test_tokens_go_to_experts_and_back() -> None:
    model = replace(SPARSE, moe=replace(SPARSE.moe, num_experts=256, top_k=8))  # type: ignore[type-var]
    ops = step_ops(model, StepShape.decode(*[50] * 64), Layout(dp=8, ep=8))
    there, back = one(ops, "moe_dispatch"), one(ops, "moe_combine")
    copies = ranks_of_token(256, 8, 8)
    uneven = rank_load(256, 8, 64, 8).pairs * 8 / (64 * 8)
    assert there.comm_bytes == back.comm_bytes == pytest.approx(8 * copies * 64 * 2 * uneven)
    assert there.count == 6 and there.shape == (8,) and COLLECTIVES[there.name] == "all_to_all"
    assert there.of is not None and there.of[0] == 8, "tokens of one rank"
    assert one(ops, "experts").of[0] == 64, "tokens of all ranks"  # type: ignore[index]
    narrow = step_ops(
        replace(model, weight_bits=8.0, linear_dtype="fp8"), StepShape.decode(*[50] * 64), Layout(dp=8, ep=8)
    )
    assert one(narrow, "moe_dispatch").comm_bytes == pytest.approx(there.comm_bytes * (1 + 4 / 128) / 2)
    assert one(narrow, "moe_combine").comm_bytes == back.comm_bytes


def test_ranks_of_a_token() -> None:
    """Against counting: 8 of 256 experts on 8 ranks of 32; all of 4 experts on 4 ranks."""
    assert ranks_of_token(4, 4, 4) == 4
    assert ranks_of_token(256, 1, 8) == pytest.approx(1)
    none = 1.0
    for i in range(8):
        none *= (224 - i) / (256 - i)
    assert ranks_of_token(256, 8, 8) == pytest.approx(8 * (1 - none))


def test_shared_experts_are_gathered_over_all_ranks_where_ep_is_1() -> None:
    ops = step_ops(SPARSE, StepShape.decode(*[50] * 64), Layout(2, dp=4))
    gather, scatter = one(ops, "moe_gather"), one(ops, "moe_scatter")
    assert gather.shape == scatter.shape == (8,)
    assert gather.comm_bytes * 8 == scatter.comm_bytes == 64 * 64 * 2
    # attention and shared experts of the 6 sparse layers by halves, the dense layer and the embedding whole
    assert (one(ops, "all_reduce").count, one(ops, "reduce_scatter").count) == (3, 12)


# --- context ------------------------------------------------------------------------------------


@given(rows=ROWS, cp=st.sampled_from([2, 4]))
def test_ring_steps_of_all_ranks_are_the_attention_of_one(rows: list[RowShape], cp: int) -> None:
    shape = StepShape(tuple(rows), 0)
    alone, cut = step_ops(TINY, shape), step_ops(TINY, shape, Layout(cp=cp))
    assert cp * flops(named(cut, "attention")) == pytest.approx(flops(named(alone, "attention")), rel=1e-12)


def test_keys_go_round_beside_the_compute() -> None:
    ring, last = named(step_ops(TINY, StepShape.prefill(4096), Layout(cp=4)), "attention")
    assert (ring.count, last.count) == (7 * 3, 7)
    assert ring.beside is not None and last.beside is None
    assert ring.beside.comm_bytes == 1024 * 2 * 4 * 16 * 2, "keys and values of a quarter of the prompt"
    assert ring.rows == (RowShape(1024, 1024),)
    assert visible_pairs(1024, 1024) * 4 * 8 * 16 == pytest.approx(ring.flops, rel=1e-3)


def test_decode_reads_a_share_of_the_keys_on_each_rank() -> None:
    alone, cut = step_ops(TINY, StepShape.decode(4000)), step_ops(TINY, StepShape.decode(4000), Layout(cp=4))
    kv = 2 * 4 * 16 * 2
    queries = 8 * 16 * 2
    assert one(alone, "attention").bytes_read - queries == 4000 * kv
    assert one(cut, "attention").bytes_read - queries == 1000 * kv
    assert {"cp_queries", "cp_merge"} <= {op.name for op in cut}


def test_tokens_are_cut_over_context_parallel_ranks() -> None:
    ops = step_ops(TINY, StepShape.prefill(4096), Layout(cp=4))
    assert one(ops, "qkv_proj").shape[0] == 1024 and one(ops, "norms").shape == (1024, 64)


# --- all together -------------------------------------------------------------------------------

LAYOUTS = [Layout(), Layout(8), Layout(2, 2), Layout(1, 1, 4), Layout(1, 1, 1, 8, 8), Layout(2, 2, 2, 2, 4)]


@pytest.mark.parametrize("name", ["llama-3.1-8b", "mixtral-8x7b", "deepseek-v3", "gpt-oss-20b", "qwen3-30b-a3b"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_model_has_ops_in_every_layout(name: str, layout: Layout) -> None:
    model = resolve_spec(name)
    for shape in (StepShape.prefill(3000, 20), StepShape.decode(*range(100, 164)), StepShape.decode(7)):
        ops = step_ops(model, shape, layout)
        assert ops and all(op.count >= 1 and op.bytes > 0 and op.flops >= 0 for op in ops)
        assert all(op.name in COLLECTIVES and op.comm_bytes > 0 for op in ops if op.kind == "comm")
        assert {op.kind for op in ops} <= {*WORK, "gather", "comm"}


def test_an_int_is_the_tensor_parallel_group() -> None:
    shape = StepShape.decode(5, 6)
    assert step_ops(TINY, shape, 4) == step_ops(TINY, shape, Layout(4))
    assert step_ops(TINY, StepShape((), 0), Layout(2, 2, 2, 2)) == []


def test_experts_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match="16 experts"):
        step_ops(SPARSE, StepShape.decode(5), Layout(dp=3, ep=3))
