"""The ops of one forward pass of a decoder-only transformer, on one tensor-parallel rank.

    embed, { norms, qkv_proj, rope_kv_write, attention, o_proj, all_reduce,
             norms, gate_up_proj, mlp_act, down_proj, all_reduce } x layers, norms, lm_head, sample

MoE layers have router and experts (all expert matrices of one layer) instead of, or with shared experts
next to, the dense MLP. MLA has q_proj (or q_down_proj, q_up_proj), kv_down_proj and kv_up_proj instead of qkv_proj;
kv_up_proj comes after rope_kv_write when the cache holds latents, before it when it holds keys and values.

Invariants
* Layers that do the same work are one `Op` with `count`; attention of all rows of a step is one `Op`,
  one per distinct window. `total(ops, "flops")` counts every launch.
* Linears do 2 FLOPs per weight and token, so that a step costs 2 * active weights * tokens + attention.
* Residual additions are part of `norms` (fused, as every engine does), q/k norms part of `rope_kv_write`.
* Called once per simulated step: constants of a model are worked out once and kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from twinfer.core.dtypes import dtype_bytes
from twinfer.core.spec import MLASpec, ModelSpec
from twinfer.core.work import Op, RowShape, StepShape, keys_read, visible_pairs

NORM_FLOPS = 4  # per element: square, sum, scale, weight
ACT_FLOPS = 5  # per element: sigmoid-like function and product
ROPE_FLOPS = 3  # per element
SAMPLE_FLOPS = 4  # per logit: scale, exponential, sum, compare
LOGIT_BYTES = 4.0  # logits are sampled in float32


@dataclass(frozen=True, slots=True)
class _Linear:
    """A [n, k] weight on one rank; `weight_bytes` as stored."""

    name: str
    n: int
    k: int
    weight_bytes: float
    dtype: str
    count: int

    def op(self, m: int, act: float) -> Op:
        """The product for `m` rows of activations of `act` bytes per element."""
        n, k = self.n, self.k
        return Op(
            self.name, "gemm", 2.0 * m * n * k, self.weight_bytes + m * k * act, m * n * act, self.dtype, self.count,
            (m, n, k),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Constants:
    """What the ops of a model on one of `tp` ranks depend on besides the step."""

    model: ModelSpec
    act: float  # bytes per activation element
    kv: float  # bytes per token and layer of KV
    heads: int  # query heads of this rank
    kv_heads: int
    rotated: int  # elements per token that rotary embedding turns
    projected: int  # elements per token of q and of what goes into the KV cache
    before: tuple[_Linear, ...]  # linears before attention, over all tokens
    o_proj: _Linear
    mlps: tuple[tuple[_Linear, int, _Linear], ...]  # (gate_up, width, down) dense or shared
    expert_bytes: float  # stored bytes of one expert on this rank
    expert_width: int
    router: _Linear | None
    lm_head: _Linear
    windows: tuple[tuple[int | None, int], ...]  # (window, number of layers)


_cache: dict[tuple[int, int], _Constants] = {}


def _constants(model: ModelSpec, tp: int) -> _Constants:
    key = (id(model), tp)
    found = _cache.get(key)
    if found is not None and found.model is model:  # ids are reused; the entry keeps its model alive
        return found
    if len(_cache) >= 64:
        _cache.clear()
    _cache[key] = made = _make_constants(model, tp)
    return made


def _make_constants(model: ModelSpec, tp: int) -> _Constants:
    act = dtype_bytes(model.dtype)
    block, other = model.block_bits / 8, model.other_bits / 8
    dtype = model.linear_dtype or model.dtype
    layers, h = model.num_layers, model.hidden_size
    heads = -(-model.num_heads // tp)

    def linear(name: str, n: int, k: int, count: int = layers) -> _Linear:
        return _Linear(name, n, k, n * k * block, dtype, count)

    def mlp(width: int, count: int) -> tuple[_Linear, int, _Linear]:
        up = 2 * width if model.gated_mlp else width
        return linear("gate_up_proj", up, h, count), width, linear("down_proj", h, width, count)

    if model.mla is not None:
        before, v_dim = _mla_linears(model.mla, linear, heads, h), model.mla.v_head_dim
        kv_heads, key, value = model.kv_shape(tp)
        rotated = (heads + 1) * model.mla.qk_rope_head_dim
        projected = heads * model.head_dim + kv_heads * (key + value)
    else:
        kv_heads, v_dim = model.kv_heads_per_rank(tp), model.v_dim
        width = heads * model.head_dim + kv_heads * (model.head_dim + v_dim)
        before = (linear("qkv_proj", width, h),)
        rotated, projected = (heads + kv_heads) * model.head_dim, width
    mlps = []
    router, expert_bytes, expert_width, num_dense = None, 0.0, 0, layers
    if model.moe is not None:
        e, num_sparse = model.moe, model.num_moe_layers
        num_dense = layers - num_sparse
        expert_width = -(-e.intermediate_size // tp)
        expert_bytes = (3 if model.gated_mlp else 2) * h * expert_width * block
        router = _Linear("router", e.num_experts, h, e.num_experts * h * act, model.dtype, num_sparse)
        if e.num_shared:
            shared = e.shared_width
            mlps.append(mlp(-(-shared // tp), num_sparse))
    if num_dense:
        mlps.append(mlp(-(-model.intermediate_size // tp), num_dense))
    vocab = -(-model.vocab_size // tp)
    windows: dict[int | None, int] = {}
    for layer in range(layers):
        windows[model.window(layer)] = windows.get(model.window(layer), 0) + 1
    return _Constants(
        model, act, model.kv_bytes_per_token_layer(tp=tp), heads, kv_heads, rotated, projected, before, linear("o_proj", h, heads * v_dim),
        tuple(mlps), expert_bytes, expert_width, router,
        _Linear("lm_head", vocab, h, vocab * h * other, model.dtype, 1), tuple(windows.items()),
    )  # fmt: skip


def _mla_linears(m: MLASpec, linear: Callable[[str, int, int], _Linear], heads: int, h: int) -> tuple[_Linear, ...]:
    qk = m.qk_nope_head_dim + m.qk_rope_head_dim
    query = (
        (linear("q_down_proj", m.q_lora_rank, h), linear("q_up_proj", heads * qk, m.q_lora_rank))
        if m.q_lora_rank
        else (linear("q_proj", heads * qk, h),)
    )
    down = linear("kv_down_proj", m.latent_dim, h)
    if m.absorbed:
        return (*query, down)
    return (*query, down, linear("kv_up_proj", heads * (m.qk_nope_head_dim + m.v_head_dim), m.kv_lora_rank))


def ops_of_model(model: ModelSpec, shape: StepShape, tp: int = 1) -> list[Op]:
    """All ops of one step on one of `tp` ranks, in the order of execution within a layer.

    A step without rows has no ops (nothing is launched).
    """
    c = _constants(model, tp)
    rows = shape.rows
    t = 0
    for row in rows:
        t += row[0]
    if not t:
        return []
    layers, h, act, dtype = model.num_layers, model.hidden_size, c.act, model.dtype
    wide = t * h
    num_norms = layers * model.norms_per_layer + 1
    ops = [
        Op("embed", "gather", 0.0, wide * act, wide * act, dtype, 1, (t, h)),
        # reads the residual and the sublayer's output, writes both sums
        Op("norms", "elementwise", float(NORM_FLOPS * wide), 2 * wide * act, 2 * wide * act, dtype, num_norms, (t, h)),
    ]
    for linear in c.before:
        ops.append(linear.op(t, act))
    ops.append(
        Op(
            "rope_kv_write", "elementwise", float(ROPE_FLOPS * t * c.rotated), t * c.projected * act,
            t * (c.heads * model.head_dim * act + c.kv), dtype, layers, (t, c.projected),
        )
    )  # fmt: skip
    if shape.copied_slots:
        moved = shape.copied_slots * c.kv
        ops.append(Op("kv_copy", "gather", 0.0, moved, moved, model.kv_dtype, layers, (shape.copied_slots,)))
    if shape.swapped_slots:
        moved = shape.swapped_slots * c.kv * layers
        ops.append(Op("kv_swap", "host_copy", 0.0, moved, moved, model.kv_dtype, 1, (shape.swapped_slots,), moved))
    if model.mla is not None and model.mla.absorbed:
        ops += _latent_attention(c, model.mla, rows, t)
    else:
        for window, count in c.windows:
            ops.append(_attention(c, rows, t, window, count))
    ops.append(c.o_proj.op(t, act))
    if c.router is not None:
        ops += _experts(c, t)
    for gate_up, width, down in c.mlps:
        inner = t * width
        ops.append(gate_up.op(t, act))
        ops.append(
            Op("mlp_act", "elementwise", float(ACT_FLOPS * inner), gate_up.n * t * act, inner * act, dtype,
               gate_up.count, (t, width))
        )  # fmt: skip
        ops.append(down.op(t, act))
    n = shape.num_logits
    if n:
        ops.append(c.lm_head.op(n, act))
    if tp > 1:
        # after attention, after the MLP, and once for the embedding split by vocabulary
        ops.append(Op("all_reduce", "comm", 0.0, wide * act, wide * act, dtype, 2 * layers + 1, (tp,), wide * act))
        if n:
            part = n * c.lm_head.n * act
            ops.append(Op("all_gather", "comm", 0.0, part, part * tp, dtype, 1, (tp,), part))
    if n:
        logits = n * model.vocab_size
        ops.append(
            Op("sample", "elementwise", float(SAMPLE_FLOPS * logits), logits * LOGIT_BYTES, n * 8.0, "float32", 1,
               (n, model.vocab_size))
        )  # fmt: skip
    return ops


def _attention(c: _Constants, rows: tuple[RowShape, ...], t: int, window: int | None, count: int) -> Op:
    """All rows of the step in one op; KV is read once per KV head and row."""
    pairs = keys = 0
    for row in rows:
        queries, end = row
        if window is None or end <= window:
            pairs += end if queries == 1 else (2 * end - queries + 1) * queries // 2
            keys += end
        else:
            pairs += visible_pairs(queries, end, window)
            keys += keys_read(queries, end, window)
    model, heads = c.model, c.heads
    qk, v = model.head_dim, model.v_dim
    return Op(
        "attention", "attention", 2.0 * pairs * heads * (qk + v), t * heads * qk * c.act + keys * c.kv,
        t * heads * v * c.act, model.dtype, count, (heads, c.kv_heads, qk, v, window or 0), 0.0, rows,
    )  # fmt: skip


def absorbing_is_cheaper(m: MLASpec, queries: int, end: int) -> bool:
    """Whether a row of `queries` tokens that ends at position `end` takes fewer FLOPs absorbed than expanded.

    Absorbed, queries move into the latent space and share one KV head of kv_lora_rank + rope; expanded, every latent
    of the row is turned back into keys and values of all heads. The number of heads cancels.
    """
    pairs = visible_pairs(queries, end)
    up = m.kv_lora_rank * (m.qk_nope_head_dim + m.v_head_dim)
    absorbed = pairs * (m.latent_dim + m.kv_lora_rank) + queries * up
    return absorbed <= pairs * (m.qk_nope_head_dim + m.qk_rope_head_dim + m.v_head_dim) + end * up


def _latent_attention(c: _Constants, m: MLASpec, rows: tuple[RowShape, ...], t: int) -> list[Op]:
    """Multi-head latent attention over stored latents (DeepSeek-V2, arXiv:2405.04434), row by row as is cheaper."""
    heads, act = c.heads, c.act
    qk, latent = m.qk_nope_head_dim + m.qk_rope_head_dim, m.latent_dim
    up = m.kv_lora_rank * heads * (m.qk_nope_head_dim + m.v_head_dim)
    expanded_width = heads * (qk + m.v_head_dim)
    flops = read = 0.0
    up_rows = written = 0
    for queries, end in rows:
        pairs = visible_pairs(queries, end)
        if absorbing_is_cheaper(m, queries, end):
            up_rows += queries
            flops += 2 * pairs * heads * (latent + m.kv_lora_rank)
            read += end * c.kv
            written += queries * heads * (m.kv_lora_rank + m.v_head_dim)
        else:
            up_rows += end
            flops += 2 * pairs * expanded_width
            read += end * expanded_width * act
            written += end * expanded_width
    model, layers = c.model, c.model.num_layers
    weights = up * model.block_bits / 8
    width = heads * (m.qk_nope_head_dim + m.v_head_dim)
    return [
        Op(
            "kv_up_proj", "gemm", 2.0 * up_rows * up, weights + up_rows * m.kv_lora_rank * act, written * act,
            model.linear_dtype or model.dtype, layers, (up_rows, width, m.kv_lora_rank),
        ),
        Op(
            "attention", "attention", flops, read + t * heads * qk * act, t * heads * m.v_head_dim * act, model.dtype,
            layers, (heads, 1, latent, m.kv_lora_rank, 0), 0.0, rows,
        ),
    ]  # fmt: skip


def _experts(c: _Constants, t: int) -> list[Op]:
    """Router and the routed experts of one MoE layer; weights of the experts expected to be touched are read once."""
    model, moe, router, act = c.model, c.model.moe, c.router, c.act
    assert moe is not None and router is not None
    h, width, m = model.hidden_size, c.expert_width, t * moe.top_k
    up = 2 * width if model.gated_mlp else width
    touched = moe.experts_touched(t)
    return [
        router.op(t, act),
        Op(
            "experts",
            "gemm", 2.0 * m * h * (up + width),
            touched * c.expert_bytes + m * (h + width) * act, m * (up + h) * act,
            model.linear_dtype or model.dtype, router.count, (m, up + width, h, max(1, round(touched))),
        ),
        Op("mlp_act", "elementwise", float(ACT_FLOPS * m * width), m * up * act, m * width * act, model.dtype,
           router.count, (m, width)),
    ]  # fmt: skip
