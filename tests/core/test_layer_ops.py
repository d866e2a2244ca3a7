"""The ops of a step: FLOPs, bytes and shapes against closed forms and brute force."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinfer.core.catalog import resolve_spec, spec_names
from twinfer.core.layer_ops import absorbing_is_cheaper
from twinfer.core.spec import MLASpec, ModelSpec, MoESpec
from twinfer.core.work import Op, RowShape, StepShape, keys_read, scaled, step_ops, total, visible_pairs

TINY = ModelSpec(
    name="tiny", family="llama", num_layers=3, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16,
    intermediate_size=96, vocab_size=100, max_context=512,
)  # fmt: skip
ROWS = st.lists(
    st.tuples(st.integers(1, 20), st.integers(0, 40)).map(lambda r: RowShape(r[0], r[0] + r[1])), min_size=1, max_size=6
)


def named(ops: list[Op], name: str) -> list[Op]:
    return [op for op in ops if op.name == name]


def one(ops: list[Op], name: str) -> Op:
    (op,) = named(ops, name)
    return op


def attention_flops(ops: list[Op]) -> float:
    return total(named(ops, "attention"), "flops")


# --- issue formulas -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama-2-7b", "llama-2-13b", "llama-2-70b"])
def test_prefill_is_2np_and_decode_2n_within_the_attention_term(name: str) -> None:
    """N weights cost 2N FLOPs a token; only the embedding table and small elementwise work differ."""
    model, prompt = resolve_spec(name), 512
    n = model.num_params()
    table = model.vocab_size * model.hidden_size
    for shape, tokens in ((StepShape.prefill(prompt), prompt), (StepShape.decode(prompt), 1)):
        ops = step_ops(model, shape)
        linear = 2 * (n - 2 * table) * tokens + 2 * table  # one position goes through the head
        rest = total(ops, "flops") - attention_flops(ops)
        assert rest == pytest.approx(linear, rel=0.005)
        pairs = prompt * (prompt + 1) / 2 if tokens > 1 else prompt
        assert attention_flops(ops) == 4 * model.num_layers * model.hidden_size * pairs
    decode = total(step_ops(model, StepShape.decode(prompt)), "flops")
    assert decode == pytest.approx(2 * n, rel=0.06)
    prefill = total(step_ops(model, StepShape.prefill(prompt)), "flops")
    assert prefill == pytest.approx(2 * n * prompt, rel=0.06)


@pytest.mark.parametrize("name", spec_names())
def test_linears_cost_two_flops_per_active_weight(name: str) -> None:
    model = resolve_spec(name)
    ops = step_ops(model, StepShape.decode(1))
    gemms = sum(op.flops * op.count for op in ops if op.kind == "gemm")
    head = 2 * model.vocab_size * model.hidden_size
    # biases, q/k norms and the like are in the weights but not in a matrix
    assert gemms - head == pytest.approx(2 * model.block_params(active=True), rel=0.01)


@pytest.mark.parametrize("name", spec_names())
def test_one_decode_step_reads_every_weight_once(name: str) -> None:
    """All experts are touched when there are enough tokens."""
    model = resolve_spec(name)
    ops = step_ops(model, StepShape.decode(*[1] * 3000))
    stored = sum((op.bytes_read - _inputs(op, model)) * op.count for op in ops if op.kind == "gemm")
    head = model.vocab_size * model.hidden_size * model.other_bits / 8
    assert stored - head == pytest.approx(model.block_params() * model.block_bits / 8, rel=0.01)


def _inputs(op: Op, model: ModelSpec) -> float:
    """Bytes of the activations a linear reads (2 per element: all shipped specs run in 16 bits)."""
    if op.name == "experts":
        assert model.moe is not None
        return op.shape[0] * (model.hidden_size + model.moe.intermediate_size) * 2
    return op.shape[0] * op.shape[2] * 2


def test_decode_reads_the_kv_cache_once() -> None:
    model = resolve_spec("llama-3-8b")
    op = one(step_ops(model, StepShape.decode(1000, 3000)), "attention")
    queries_and_outputs = 2 * 2 * 32 * 128 * 2
    assert op.bytes * op.count == 4000 * 131_072 + 32 * queries_and_outputs
    assert op.rows == (RowShape(1, 1000), RowShape(1, 3000))


def test_step_writes_the_kv_of_its_tokens() -> None:
    model = resolve_spec("llama-3-8b")
    op = one(step_ops(model, StepShape.prefill(100)), "rope_kv_write")
    assert (op.bytes_written - 100 * 32 * 128 * 2) * op.count == 100 * 131_072


# --- masks --------------------------------------------------------------------------------------


@given(queries=st.integers(1, 12), before=st.integers(0, 12), window=st.none() | st.integers(1, 16))
def test_pairs_and_keys_against_a_mask(queries: int, before: int, window: int | None) -> None:
    keys = before + queries
    seen = [
        [k for k in range(keys) if k <= before + q and (window is None or k > before + q - window)]
        for q in range(queries)
    ]
    assert visible_pairs(queries, keys, window) == sum(map(len, seen))
    assert keys_read(queries, keys, window) == len(set().union(*map(set, seen)))


@given(rows=ROWS, window=st.none() | st.integers(1, 30))
def test_attention_of_mixed_rows(rows: list[RowShape], window: int | None) -> None:
    model = replace(TINY, layer_windows=(window,) * 3)
    ops = step_ops(model, StepShape(tuple(rows), len(rows)))
    pairs = sum(visible_pairs(q, k, window) for q, k in rows)
    assert attention_flops(ops) == 3 * 2 * pairs * 4 * (16 + 16)
    op = one(ops, "attention")
    tokens = sum(q for q, _ in rows)
    assert op.bytes_read == tokens * 64 * 2 + sum(keys_read(q, k, window) for q, k in rows) * 2 * 2 * 16 * 2


def test_layers_are_grouped_by_window() -> None:
    model = replace(TINY, layer_windows=(8, None, 8))
    local, full = named(step_ops(model, StepShape.decode(100)), "attention")
    assert (local.count, local.shape[4], full.count, full.shape[4]) == (2, 8, 1, 0)
    assert full.flops == 100 / 8 * local.flops


@given(rows=ROWS)
def test_chunking_a_prompt_changes_no_flops_of_attention(rows: list[RowShape]) -> None:
    """The pairs of a prompt are the pairs of its chunks."""
    length = sum(q for q, _ in rows)
    end, chunks = 0, []
    for q, _ in rows:
        end += q
        chunks.append(attention_flops(step_ops(TINY, StepShape((RowShape(q, end),), 0))))
    assert sum(chunks) == attention_flops(step_ops(TINY, StepShape.prefill(length)))


# --- structure ----------------------------------------------------------------------------------


def test_names_and_counts_of_a_dense_model() -> None:
    ops = step_ops(TINY, StepShape.decode(5, 6))
    assert {op.name: op.count for op in ops} == {
        "embed": 1, "norms": 7, "qkv_proj": 3, "rope_kv_write": 3, "attention": 3, "o_proj": 3, "gate_up_proj": 3,
        "mlp_act": 3, "down_proj": 3, "lm_head": 1, "sample": 1,
    }  # fmt: skip
    assert one(ops, "qkv_proj").shape == (2, 4 * 16 + 2 * 2 * 16, 64)
    assert one(ops, "gate_up_proj").shape == (2, 192, 64)
    assert one(ops, "down_proj").shape == (2, 64, 96)
    assert one(ops, "lm_head").shape == (2, 100, 64)
    assert one(ops, "attention").shape == (4, 2, 16, 16, 0)


def test_rows_without_logits_skip_the_head() -> None:
    names = {op.name for op in step_ops(TINY, StepShape((RowShape(8, 8),), 0))}
    assert "lm_head" not in names and "sample" not in names


def test_empty_step_launches_nothing() -> None:
    assert step_ops(TINY, StepShape((), 0)) == []


def test_copy_on_write_moves_kv() -> None:
    op = one(step_ops(TINY, StepShape((RowShape(1, 1),), 1, copied_slots=16)), "kv_copy")
    assert op.bytes_read * op.count == op.bytes_written * op.count == 16 * TINY.kv_bytes_per_token()


def test_plain_mlp_has_one_matrix_up() -> None:
    assert one(step_ops(replace(TINY, gated_mlp=False), StepShape.decode(1)), "gate_up_proj").shape == (1, 96, 64)


def test_weight_formats_change_bytes_and_dtype_but_not_flops() -> None:
    shape = StepShape.decode(10, 10)
    plain, narrow = step_ops(TINY, shape), step_ops(replace(TINY, weight_bits=4.0), shape)
    assert total(plain, "flops") == total(narrow, "flops")
    saved = TINY.block_params() * (16 - 4) / 8
    assert total(plain, "bytes") - total(narrow, "bytes") == saved
    fp8 = step_ops(replace(TINY, weight_bits=8.0, linear_dtype="fp8"), shape)
    assert {op.name: op.dtype for op in fp8 if op.kind == "gemm"} == {
        "qkv_proj": "fp8", "o_proj": "fp8", "gate_up_proj": "fp8", "down_proj": "fp8", "lm_head": "float16",
    }  # fmt: skip


def test_no_result_is_confused_between_specs() -> None:
    """Constants are kept by spec object; another object with the same id must not get them."""
    for layers in range(1, 300):
        model = replace(TINY, num_layers=layers)
        assert one(step_ops(model, StepShape.decode(1)), "qkv_proj").count == layers


def test_op_totals() -> None:
    op = Op("x", "elementwise", 6.0, 2.0, 1.0, "float16", 3)
    assert (op.bytes, op.intensity, total([op, op], "flops"), total([op], "bytes")) == (3.0, 2.0, 36.0, 9.0)
    assert scaled(op, flops=12.0).flops == 12.0 and op.flops == 6.0
    assert Op("x", "comm", 0.0, 0.0, 0.0, "float16").intensity == 0.0


# --- tensor parallelism -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama-3-70b", "mixtral-8x7b", "qwen3-30b-a3b"])
@pytest.mark.parametrize("tp", [2, 4])
def test_ranks_share_the_linears(name: str, tp: int) -> None:
    model, shape = resolve_spec(name), StepShape.decode(*[100] * 8)
    alone, shared = step_ops(model, shape), step_ops(model, shape, tp)
    for op in shared:
        if op.kind in ("gemm", "attention") and op.name not in ("router",):
            assert op.flops * tp == pytest.approx(one(alone, op.name).flops, rel=1e-3), op.name
    assert one(shared, "all_reduce").comm_bytes == 8 * model.hidden_size * 2
    assert one(shared, "all_reduce").count == 2 * model.num_layers + 1
    assert one(shared, "all_gather").comm_bytes == 8 * -(-model.vocab_size // tp) * 2
    assert not [op for op in alone if op.kind == "comm"]


def test_kv_heads_replicated_beyond_their_number() -> None:
    model, shape = resolve_spec("llama-3-8b"), StepShape.decode(1000)
    read = [one(step_ops(model, shape, tp), "attention").bytes_read - 32 // tp * 128 * 2 for tp in (8, 16, 32)]
    assert read == [1000 * 2 * 128 * 2] * 3


# --- MoE ----------------------------------------------------------------------------------------


def test_experts() -> None:
    model = resolve_spec("mixtral-8x7b")
    op = one(step_ops(model, StepShape.decode(*[1] * 4)), "experts")
    matrices = 3 * 4096 * 14336
    assert op.flops == 2 * 4 * 2 * matrices, "each token passes through two experts"
    touched = 8 * (1 - 0.75**4)
    assert op.bytes_read == pytest.approx(touched * matrices * 2 + 8 * (4096 + 14336) * 2)
    assert op.shape == (8, 3 * 14336, 4096, 5) and op.count == 32
    assert one(step_ops(model, StepShape.decode(1)), "router").shape == (1, 8, 4096)


def test_dense_shared_and_routed_layers_of_deepseek() -> None:
    ops = step_ops(resolve_spec("deepseek-v3"), StepShape.decode(1))
    assert {(op.count, op.shape[1]) for op in named(ops, "gate_up_proj")} == {(58, 2 * 2048), (3, 2 * 18432)}
    assert one(ops, "experts").count == one(ops, "router").count == 58
    assert one(ops, "o_proj").count == 61


def test_expert_reads_grow_with_tokens_and_stop_at_all_experts() -> None:
    model = replace(TINY, moe=MoESpec(num_experts=8, top_k=2, intermediate_size=32))
    reads = [
        one(step_ops(model, StepShape.decode(*[1] * n)), "experts").bytes_read - n * 2 * (64 + 32) * 2
        for n in (1, 2, 4, 400)
    ]
    assert reads == sorted(reads)
    assert reads[0] == pytest.approx(2 * 3 * 64 * 32 * 2) and reads[-1] == pytest.approx(8 * 3 * 64 * 32 * 2)


# --- MLA ----------------------------------------------------------------------------------------

MLA = replace(
    TINY, head_dim=24, value_dim=16, num_kv_heads=4,
    mla=MLASpec(kv_lora_rank=32, q_lora_rank=48, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16),
)  # fmt: skip


def test_mla_decode_is_absorbed() -> None:
    ops = step_ops(MLA, StepShape.decode(1000))
    attention, up = one(ops, "attention"), one(ops, "kv_up_proj")
    assert attention.flops == 2 * 1000 * 4 * (40 + 32), "scores on 40 values, outputs on the 32 of the latent"
    assert attention.bytes_read == 1000 * 40 * 2 + 4 * 24 * 2, "one latent for all heads"
    assert up.shape == (1, 4 * 32, 32) and up.flops == 2 * 4 * 32 * 32
    assert [op.shape for op in ops if op.name in ("q_down_proj", "q_up_proj", "kv_down_proj")] == [
        (1, 48, 64), (1, 96, 48), (1, 40, 64),
    ]  # fmt: skip


def test_mla_prefill_is_expanded() -> None:
    model = resolve_spec("deepseek-v3")
    ops = step_ops(model, StepShape.prefill(4096))
    pairs = 4096 * 4097 / 2
    assert one(ops, "attention").flops == 2 * pairs * 128 * (192 + 128)
    assert one(ops, "kv_up_proj").shape == (4096, 128 * 256, 512)


def test_mla_naive_caches_heads_and_projects_each_token_once() -> None:
    mla = MLA.mla
    assert mla is not None
    naive = replace(MLA, mla=replace(mla, absorbed=False))
    heads, width = naive.num_heads, naive.head_dim + naive.v_dim
    assert naive.kv_shape() == (heads, naive.head_dim, naive.v_dim)
    assert naive.kv_bytes_per_token() == naive.num_layers * heads * width * 2
    assert naive.kv_bytes_per_token(tp=2) == naive.kv_bytes_per_token() / 2, "heads are split over ranks"
    assert MLA.kv_bytes_per_token(tp=2) == MLA.kv_bytes_per_token(), "the latent is not"
    for shape in (StepShape.decode(1000), StepShape.prefill(300)):
        ops = {op.name: op for op in step_ops(naive, shape)}
        t = shape.num_tokens
        assert ops["kv_up_proj"].shape == (t, heads * (mla.qk_nope_head_dim + mla.v_head_dim), mla.kv_lora_rank)
        assert ops["attention"].flops == 2 * sum(visible_pairs(q, n) for q, n in shape.rows) * heads * width


def test_mla_rows_run_the_cheaper_way() -> None:
    """Against a count of both ways; the choice does not depend on the number of heads."""
    mla = MLASpec(kv_lora_rank=512, q_lora_rank=None, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    for queries, end in [(1, 1), (1, 50_000), (8, 900), (100, 100), (170, 170), (200, 4000), (4096, 4096)]:
        pairs = sum(end - i for i in range(queries))
        up = 512 * 16 * 256
        absorbed = pairs * 16 * (576 + 512) + queries * up
        expanded = pairs * 16 * (192 + 128) + end * up
        assert absorbing_is_cheaper(mla, queries, end) == (absorbed <= expanded)


def test_mla_kv_write_is_the_latent() -> None:
    model = resolve_spec("deepseek-v3")
    op = one(step_ops(model, StepShape.decode(1)), "rope_kv_write")
    assert op.bytes_written == 128 * 192 * 2 + 576 * 2


def test_mla_without_query_compression() -> None:
    model = replace(MLA, mla=replace(MLA.mla, q_lora_rank=None))  # type: ignore[type-var]
    assert one(step_ops(model, StepShape.decode(1)), "q_proj").shape == (1, 96, 64)
