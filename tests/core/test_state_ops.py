"""Layers that carry a state, sliding windows, and indices: ops against closed forms."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinfer.core.latent_ops import absorbing_is_cheaper
from twinfer.core.layout import Layout
from twinfer.core.model_parts import LinearAttentionSpec, MLASpec, SparseIndexSpec
from twinfer.core.spec import ModelSpec
from twinfer.core.work import Op, RowShape, StepShape, step_ops, total, visible_pairs

DELTA = LinearAttentionSpec(
    kind="gated_delta_net", key_heads=4, value_heads=8, key_dim=16, value_dim=32, conv_width=4
)  # fmt: skip
HYBRID = ModelSpec(
    name="hybrid", family="llama", num_layers=4, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16,
    intermediate_size=96, vocab_size=100, max_context=4096, linear_attention=DELTA,
    layer_kinds=("linear", "linear", "linear", "attention"),
)  # fmt: skip


def named(ops: list[Op], name: str) -> list[Op]:
    return [op for op in ops if op.name == name]


def one(ops: list[Op], name: str) -> Op:
    (op,) = named(ops, name)
    return op


def test_layers_with_a_state_stand_beside_those_with_a_cache() -> None:
    ops = step_ops(HYBRID, StepShape.decode(100, 200))
    assert {op.name: op.count for op in ops} == {
        "embed": 1, "norms": 9, "qkv_proj": 1, "rope_kv_write": 1, "attention": 1, "o_proj": 1, "linear_in_proj": 3,
        "linear_conv": 3, "linear_attention": 3, "linear_gate": 3, "linear_out_proj": 3, "gate_up_proj": 4,
        "mlp_act": 4, "down_proj": 4, "lm_head": 1, "sample": 1,
    }  # fmt: skip
    assert one(ops, "linear_in_proj").shape == (2, 2 * 4 * 16 + 2 * 8 * 32 + 2 * 8, 64)
    assert one(ops, "linear_out_proj").shape == (2, 64, 8 * 32)


def test_the_state_is_read_and_written_once_a_row_however_long() -> None:
    state = 8 * 16 * 32 * 4
    inputs, outputs = (2 * 4 * 16 + 8 * 32) * 2, 8 * 32 * 2
    for context in (10, 3000):
        op = one(step_ops(HYBRID, StepShape.decode(context)), "linear_attention")
        assert (op.bytes_read, op.bytes_written) == (inputs + state, outputs + state)
        assert op.flops == 7 * 8 * 16 * 32
    op = one(step_ops(HYBRID, StepShape.prefill(1000)), "linear_attention")
    assert (op.bytes_read, op.flops) == (1000 * inputs + state, 1000 * 7 * 8 * 16 * 32)


@given(chunks=st.lists(st.integers(1, 50), min_size=1, max_size=6))
def test_chunks_of_a_prompt_do_the_work_of_the_whole(chunks: list[int]) -> None:
    end, flops = 0, 0.0
    for chunk in chunks:
        end += chunk
        flops += one(step_ops(HYBRID, StepShape((RowShape(chunk, end),), 0)), "linear_attention").flops
    assert flops == pytest.approx(one(step_ops(HYBRID, StepShape.prefill(end)), "linear_attention").flops)


def test_heads_of_the_state_are_split() -> None:
    shape = StepShape.decode(10, 20)
    alone, half = step_ops(HYBRID, shape), step_ops(HYBRID, shape, 2)
    for name in ("linear_in_proj", "linear_conv", "linear_attention", "linear_out_proj"):
        assert 2 * one(half, name).flops == pytest.approx(one(alone, name).flops)
    assert one(half, "all_reduce").count == 2 * 4 + 1


def test_parameters_and_linears_agree() -> None:
    """2 FLOPs per weight, what is no matrix aside (convolution, norms, decay)."""
    ops = step_ops(HYBRID, StepShape.decode(1))
    gemms = sum(op.flops * op.count for op in ops if op.kind == "gemm") - 2 * 100 * 64
    small = 3 * (DELTA.conv_channels * 4 + 2 * 8 + 32)
    assert gemms == 2 * (HYBRID.block_params() - small)


def test_mamba_counts_five_flops_a_state_element() -> None:
    mamba = replace(HYBRID, linear_attention=replace(DELTA, kind="mamba2"))
    ops = step_ops(mamba, StepShape.decode(1))
    assert one(ops, "linear_attention").flops == 5 * 8 * 16 * 32
    assert one(ops, "linear_in_proj").shape[1] == 2 * 4 * 16 + 2 * 8 * 32 + 8


def test_a_gate_on_attention_widens_its_projection() -> None:
    ops = step_ops(replace(HYBRID, attention_gate=True), StepShape.decode(1))
    assert one(ops, "qkv_proj").shape[1] == 4 * 16 + 4 * 16 + 2 * 2 * 16
    assert one(ops, "attention_gate").shape == (1, 64)


def test_layers_without_an_mlp() -> None:
    ops = step_ops(replace(HYBRID, bare_layers=(0, 2)), StepShape.decode(1), 2)
    assert (one(ops, "down_proj").count, one(ops, "norms").count, one(ops, "all_reduce").count) == (2, 7, 7)


LATENT = replace(
    HYBRID, layer_kinds=(), linear_attention=None, head_dim=24, value_dim=16, num_kv_heads=4,
    mla=MLASpec(kv_lora_rank=32, q_lora_rank=48, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16),
    sparse_index=SparseIndexSpec(heads=2, dim=8, top_k=64, layers=4),
)  # fmt: skip


def test_a_sparse_index_reads_all_keys_so_that_attention_reads_a_few() -> None:
    ops = step_ops(LATENT, StepShape.decode(1000))
    attention, scores = one(ops, "attention"), one(ops, "index_scores")
    assert attention.flops == 2 * 64 * 4 * (40 + 32)
    assert attention.bytes_read == 64 * 40 * 2 + 4 * 24 * 2
    assert (scores.flops, scores.bytes_read) == (2 * 1000 * 2 * 8, 1000 * (8 + 4) + 2 * 8)
    assert one(ops, "index_q_proj").shape == (1, 16, 48)
    near = one(step_ops(LATENT, StepShape.decode(50)), "attention")
    assert near.flops == 2 * 50 * 4 * (40 + 32)


def test_prompts_longer_than_the_index_picks_see_top_k_keys_each() -> None:
    op = one(step_ops(LATENT, StepShape.prefill(400)), "attention")
    m = LATENT.mla
    assert m is not None
    width = 40 + 32 if absorbing_is_cheaper(m, 400, 400, 64) else 24 + 16
    assert op.flops == 2 * visible_pairs(400, 400, 64) * 4 * width


def test_latents_are_gathered_for_prompts_and_split_for_decode() -> None:
    plain = replace(LATENT, sparse_index=None)
    prompt = step_ops(plain, StepShape.prefill(400), Layout(cp=4))
    assert one(prompt, "kv_gather").comm_bytes == 100 * 40 * 2
    assert 4 * one(prompt, "attention").flops == one(step_ops(plain, StepShape.prefill(400)), "attention").flops
    alone, cut = (one(step_ops(plain, StepShape.decode(4000), Layout(cp=cp)), "attention") for cp in (1, 4))
    assert 4 * cut.flops == alone.flops and cut.bytes_read - 4 * 24 * 2 == (alone.bytes_read - 4 * 24 * 2) / 4


def test_total_work_of_a_hybrid_step_is_linear_in_its_rows() -> None:
    one_row, two = step_ops(HYBRID, StepShape.decode(70)), step_ops(HYBRID, StepShape.decode(70, 70))
    assert total(two, "flops") == pytest.approx(2 * total(one_row, "flops"))


def test_lightning_attention_has_neither_convolution_nor_numbers_per_head() -> None:
    """MiniMax-01 (arXiv:2501.08313): queries, keys, values and gate of 64 heads of 128, and a norm over them."""
    spec = LinearAttentionSpec(
        kind="lightning", key_heads=64, value_heads=64, key_dim=128, value_dim=128, conv_width=1
    )  # fmt: skip
    assert spec.params(6144) == 5 * 6144 * 8192 + 8192
    ops = step_ops(
        replace(HYBRID, linear_attention=replace(DELTA, kind="lightning", conv_width=1)), StepShape.decode(1)
    )
    assert not named(ops, "linear_conv")
    assert one(ops, "linear_attention").flops == 5 * 8 * 16 * 32
