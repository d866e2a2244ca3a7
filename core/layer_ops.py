"""The ops of the layers of one pipeline stage, on one rank of one group of rows.

    embed, { norms, MIXER, all_reduce, norms, MLP, all_reduce } x layers, norms, lm_head, sample

    MIXER   qkv_proj, rope_kv_write, attention, [attention_gate,] o_proj
            q_proj | q_down_proj, q_up_proj; kv_down_proj, rope_kv_write, kv_up_proj, attention, o_proj        (MLA)
            linear_in_proj, linear_conv, linear_attention, linear_gate, linear_out_proj                (state_ops)
    MLP     gate_up_proj, mlp_act, down_proj        (dense, and shared experts)
            router, experts, mlp_act, with what moves tokens to experts                               (expert_ops)

kv_up_proj comes after rope_kv_write when the cache holds latents, before it when it holds keys and values. What a
stage, a group of rows and a rank are is in `parallel_ops`.

Invariants
* Layers that do the same work are one `Op` with `count`; attention of all rows of a step is one `Op`,
  one per distinct window. `total(ops, "flops")` counts every launch.
* Linears do 2 FLOPs per weight and token, so that a step costs 2 * active weights * tokens + attention.
* Residual additions are part of `norms` (fused, as every engine does), q/k norms part of `rope_kv_write`.
* Called once per simulated step: constants of a model are worked out once and kept.
"""

from __future__ import annotations

from dataclasses import dataclass

from twinfer.core.dtypes import dtype_bytes
from twinfer.core.expert_ops import Experts, expert_ops
from twinfer.core.latent_ops import absorbing_is_cheaper, index_ops, latent_attention, latent_linears
from twinfer.core.layout import Layout
from twinfer.core.ring_ops import cut_attention
from twinfer.core.spec import ModelSpec
from twinfer.core.state_ops import StateLayers, state_ops
from twinfer.core.work import Linear, Op, RowShape, StepShape, counted, keys_read, visible_pairs

NORM_FLOPS = 4  # per element: square, sum, scale, weight
ACT_FLOPS = 5  # per element: sigmoid-like function and product
ROPE_FLOPS = 3  # per element
SAMPLE_FLOPS = 4  # per logit: scale, exponential, sum, compare
LOGIT_BYTES = 4.0  # logits are sampled in float32


@dataclass(frozen=True, slots=True)
class Stage:
    """What the ops of layers `first` to `last` (not included) on one rank depend on besides the step."""

    model: ModelSpec
    layout: Layout
    first: int
    last: int
    act: float  # bytes per activation element
    kv: float  # bytes per token and layer of KV
    heads: int  # query heads of this rank
    kv_heads: int
    num_attention: int  # layers with keys and values
    rotated: int  # elements per token that rotary embedding turns
    projected: int  # elements per token of q and of what goes into the KV cache
    before: tuple[Linear, ...]  # linears before attention, over all tokens
    o_proj: Linear
    mlps: tuple[tuple[Linear, int, Linear], ...]  # (gate_up, width, down) dense or shared
    experts: Experts | None
    states: StateLayers | None
    num_norms: int
    num_reduced: int  # sublayers whose output tensor-parallel ranks add up
    lm_head: Linear | None  # of the last stage
    windows: tuple[tuple[int | None, int], ...]  # (window, number of layers)


_cache: dict[tuple[int, Layout, int, int], Stage] = {}


def stage_of(model: ModelSpec, layout: Layout, first: int, last: int) -> Stage:
    """Constants of layers `first` to `last` (not included)."""
    key = (id(model), layout, first, last)
    found = _cache.get(key)
    if found is not None and found.model is model:  # ids are reused; the entry keeps its model alive
        return found
    if len(_cache) >= 256:
        _cache.clear()
    _cache[key] = made = _make_stage(model, layout, first, last)
    return made


def _make_stage(model: ModelSpec, layout: Layout, first: int, last: int) -> Stage:
    tp = layout.tp
    act = dtype_bytes(model.dtype)
    block, other = model.linear_bits / 8, model.other_bits / 8
    dtype = model.linear_dtype or model.dtype
    h = model.hidden_size
    heads = -(-model.num_heads // tp)
    layers = range(first, last)
    attending = [i for i in layers if model.is_attention(i)]
    sparse = [i for i in layers if model.is_moe(i)]
    bare = sum(i in model.bare_layers for i in layers)
    num_linear = sum(model.is_linear(i) for i in layers)
    num_attention, num_dense = len(attending), len(layers) - len(sparse) - bare

    def linear(name: str, n: int, k: int, count: int = num_attention) -> Linear:
        return Linear(name, n, k, n * k * block, dtype, count)

    def mlp(width: int, count: int) -> tuple[Linear, int, Linear]:
        up = 2 * width if model.gated_mlp else width
        return linear("gate_up_proj", up, h, count), width, linear("down_proj", h, width, count)

    kv_heads, key, value = model.kv_shape(tp)
    if model.mla is not None:
        before, v_dim = latent_linears(model, linear, heads), model.mla.v_head_dim
        rotated = (heads + 1) * model.mla.qk_rope_head_dim
        projected = heads * model.head_dim + kv_heads * (key + value)
    else:
        v_dim = model.v_dim
        projected = heads * model.head_dim + kv_heads * (model.head_dim + v_dim)
        before = (linear("qkv_proj", projected + (heads * v_dim if model.attention_gate else 0), h),)
        rotated = (heads + kv_heads) * model.head_dim
    mlps = []
    if sparse and model.moe is not None and model.moe.num_shared:
        mlps.append(mlp(-(-model.moe.shared_width // tp), len(sparse)))
    if num_dense:
        mlps.append(mlp(-(-model.intermediate_size // tp), num_dense))
    vocab = -(-model.vocab_size // tp)
    windows: dict[int | None, int] = {}
    for layer in attending:
        reach = _reach(model, layer)
        windows[reach] = windows.get(reach, 0) + 1
    at_end = last == model.num_layers
    head = Linear("lm_head", vocab, h, vocab * h * other, model.dtype, 1) if at_end else None
    num_norms = len(layers) * model.norms_per_layer - bare * (model.norms_per_layer // 2) + at_end
    return Stage(
        model, layout, first, last, act, model.kv_bytes_per_token_layer(tp=tp), heads, kv_heads, num_attention,
        rotated, projected, before, linear("o_proj", h, heads * v_dim), tuple(mlps),
        Experts.of(model, layout, len(sparse)) if sparse else None,
        StateLayers.of(model, tp, num_linear) if num_linear else None,
        num_norms, num_attention + num_linear + len(layers) - bare, head, tuple(windows.items()),
    )  # fmt: skip


def _reach(model: ModelSpec, layer: int) -> int | None:
    """Most keys that a query of `layer` attends to: its window, or what a sparse index picks."""
    window, index = model.window(layer), model.sparse_index
    return window if index is None else min(window or index.top_k, index.top_k)


def ops_of_stage(stage: Stage, shape: StepShape, all_tokens: int = 0) -> list[Op]:
    """All ops of `shape` on one rank of `stage`, in the order of execution within a layer.

    all_tokens: tokens of this step in all data-parallel groups, which share the experts; 0 for just these.
    A step without rows has no ops (nothing is launched).
    """
    c = stage
    model, layout = c.model, c.layout
    rows = shape.rows
    t = 0
    for row in rows:
        t += row[0]
    if not t:
        return []
    all_tokens = all_tokens or t
    if layout.cp > 1:
        t = -(-t // layout.cp)
        all_tokens = -(-all_tokens // layout.cp)
    if shape.rows_only:
        ops = _by_rows(c, rows, t) if c.num_attention else []
        return ops if c.states is None else [*ops, *state_ops(c.states, rows, t, layout.cp)]
    h, act, dtype = model.hidden_size, c.act, model.dtype
    wide = t * h
    ops = []
    if c.first == 0:
        ops.append(Op("embed", "gather", 0.0, wide * act, wide * act, dtype, 1, (t, h)))
    # reads the residual and the sublayer's output, writes both sums
    ops.append(
        Op("norms", "elementwise", float(NORM_FLOPS * wide), 2 * wide * act, 2 * wide * act, dtype, c.num_norms, (t, h))
    )
    if c.num_attention:
        ops += _mixer(c, rows, t, shape)
    if c.states is not None:
        ops += state_ops(c.states, rows, t, layout.cp)
    if c.experts is not None:
        ops += expert_ops(c.experts, t, all_tokens)
    for gate_up, width, down in c.mlps:
        inner = t * width
        ops.append(gate_up.op(t, act))
        ops.append(
            Op("mlp_act", "elementwise", float(ACT_FLOPS * inner), gate_up.n * t * act, inner * act, dtype,
               gate_up.count, (t, width))
        )  # fmt: skip
        ops.append(down.op(t, act))
    n = -(-shape.num_logits // layout.cp) if c.lm_head is not None else 0
    if n and c.lm_head is not None:
        ops.append(c.lm_head.op(n, act))
    if layout.tp > 1:
        ops += _collectives(c, wide * act, n)
    if n:
        logits = n * model.vocab_size
        ops.append(
            Op("sample", "elementwise", float(SAMPLE_FLOPS * logits), logits * LOGIT_BYTES, n * 8.0, "float32", 1,
               (n, model.vocab_size))
        )  # fmt: skip
    return ops


def _mixer(c: Stage, rows: tuple[RowShape, ...], t: int, shape: StepShape) -> list[Op]:
    """Attention layers: projections, what is written to the cache, and attention itself."""
    model, act, dtype = c.model, c.act, c.model.dtype
    ops = [linear.op(t, act) for linear in c.before]
    ops.append(
        Op(
            "rope_kv_write", "elementwise", float(ROPE_FLOPS * t * c.rotated), t * c.projected * act,
            t * (c.heads * model.head_dim * act + c.kv), dtype, c.num_attention, (t, c.projected),
        )
    )  # fmt: skip
    if shape.copied_slots:
        moved = shape.copied_slots * c.kv
        ops.append(Op("kv_copy", "gather", 0.0, moved, moved, model.kv_dtype, c.num_attention, (shape.copied_slots,)))
    if shape.swapped_slots:
        moved = shape.swapped_slots * c.kv * c.num_attention
        ops.append(Op("kv_swap", "host_copy", 0.0, moved, moved, model.kv_dtype, 1, (shape.swapped_slots,), moved))
    ops += _by_rows(c, rows, t)
    if model.attention_gate:
        gated = t * c.o_proj.k
        ops.append(
            Op("attention_gate", "elementwise", float(ACT_FLOPS * gated), 2 * gated * act, gated * act, dtype,
               c.num_attention, (t, c.o_proj.k))
        )  # fmt: skip
    ops.append(c.o_proj.op(t, act))
    return ops


def _by_rows(c: Stage, rows: tuple[RowShape, ...], t: int) -> list[Op]:
    """What attention layers do that depends on how many tokens and keys each row has."""
    model = c.model
    ops = [] if model.sparse_index is None else index_ops(c, rows, t)
    if model.mla is not None and model.mla.absorbed:
        return ops + latent_attention(c, model.mla, rows, t)
    for window, count in c.windows:
        if c.layout.cp > 1:
            ops += cut_attention(c, rows, window, count, _attention)
        else:
            ops.append(_attention(c, rows, t, window, count))
    return ops


def _collectives(c: Stage, size: float, n: int) -> list[Op]:
    """What tensor-parallel ranks add up and gather; `size`: bytes of the hidden state, `n`: logits.

    With data-parallel attention the tokens of a sparse layer are cut over the ranks of a group before they are sent to
    experts: a reduce-scatter and an all-gather stand for its all-reduces, once more when shared experts need the whole.
    """
    tp, dtype = c.layout.tp, c.model.dtype
    pairs, reduces = 0, c.num_reduced + (c.first == 0)  # once for the embedding split by vocabulary
    if c.experts is not None and c.layout.dp > 1:
        moe = c.model.moe
        reduces -= 2 * c.experts.count
        pairs = c.experts.count * (2 if moe is not None and moe.num_shared else 1)
    ops = []
    if reduces:
        ops.append(Op("all_reduce", "comm", 0.0, size, size, dtype, reduces, (tp,), size))
    if pairs:
        ops.append(Op("reduce_scatter", "comm", 0.0, size, size / tp, dtype, pairs, (tp,), size))
        ops.append(Op("hidden_gather", "comm", 0.0, size / tp, size, dtype, pairs, (tp,), size / tp))
    if n and c.lm_head is not None:
        part = n * c.lm_head.n * c.act
        ops.append(Op("all_gather", "comm", 0.0, part, part * tp, dtype, 1, (tp,), part))
    return ops


def _attention(c: Stage, rows: tuple[RowShape, ...], t: int, window: int | None, count: int) -> Op:
    """All rows of the step in one op; KV is read once per KV head and row."""
    pairs = keys = 0
    for (queries, end), times in counted(rows).items():
        pairs += times * visible_pairs(queries, end, window)
        keys += times * keys_read(queries, end, window)
    model, heads = c.model, c.heads
    qk, v = model.head_dim, model.v_dim
    return Op(
        "attention", "attention", 2.0 * pairs * heads * (qk + v), t * heads * qk * c.act + keys * c.kv,
        t * heads * v * c.act, model.dtype, count, (heads, c.kv_heads, qk, v, window or 0), 0.0, rows, model.kv_dtype,
    )  # fmt: skip


__all__ = ["ACT_FLOPS", "Stage", "absorbing_is_cheaper", "ops_of_stage", "stage_of"]
