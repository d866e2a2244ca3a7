"""Ops of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434) over stored latents, sparse indices included.

    absorbed   queries move into the latent space and share one KV head of kv_lora_rank + rope elements
    expanded   latents are turned back into the keys and values of all heads, then it is ordinary attention

Invariants
* Row by row the way with fewer FLOPs is taken, as the engine does.
* Under context parallelism latents are small enough to be gathered whole: each rank attends with its share of the
  queries, and expands all keys. A decode row attends with all its heads to the rank's share of the latents.
* With a sparse index each query attends to at most `top_k` keys, and the index itself reads all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from twinfer.core.work import LatentShape, Linear, Op, RowShape, visible_pairs

if TYPE_CHECKING:
    from twinfer.core.layer_ops import Stage
    from twinfer.core.spec import MLASpec, ModelSpec


def latent_linears(model: ModelSpec, linear: Callable[[str, int, int], Linear], heads: int) -> tuple[Linear, ...]:
    """Projections before attention of a rank with `heads` query heads."""
    m, h = model.mla, model.hidden_size
    assert m is not None
    qk = m.qk_nope_head_dim + m.qk_rope_head_dim
    query = (
        (linear("q_down_proj", m.q_lora_rank, h), linear("q_up_proj", heads * qk, m.q_lora_rank))
        if m.q_lora_rank
        else (linear("q_proj", heads * qk, h),)
    )
    down = linear("kv_down_proj", m.latent_dim, h)
    if m.absorbed:
        return (*query, replace(down, of=latent_shape(model, heads)))
    return (*query, down, linear("kv_up_proj", heads * (m.qk_nope_head_dim + m.v_head_dim), m.kv_lora_rank))


def latent_shape(model: ModelSpec, heads: int) -> LatentShape:
    """Sizes of the block on a rank with `heads` query heads."""
    m = model.mla
    assert m is not None
    return LatentShape(
        model.hidden_size, heads, m.q_lora_rank or 0, m.kv_lora_rank, m.qk_nope_head_dim, m.qk_rope_head_dim,
        m.v_head_dim, model.linear_dtype or model.dtype,
    )  # fmt: skip


def absorbing_is_cheaper(m: MLASpec, queries: int, end: int, reach: int | None = None) -> bool:
    """Whether a row of `queries` tokens that ends at position `end` takes fewer FLOPs absorbed than expanded.

    Absorbed, queries move into the latent space and share one KV head of kv_lora_rank + rope; expanded, every latent
    of the row is turned back into keys and values of all heads. The number of heads cancels. `reach`: most keys that a
    query attends to.
    """
    pairs = visible_pairs(queries, end, reach)
    up = m.kv_lora_rank * (m.qk_nope_head_dim + m.v_head_dim)
    absorbed = pairs * (m.latent_dim + m.kv_lora_rank) + queries * up
    return absorbed <= pairs * (m.qk_nope_head_dim + m.qk_rope_head_dim + m.v_head_dim) + end * up


def latent_attention(c: Stage, m: MLASpec, rows: tuple[RowShape, ...], t: int) -> list[Op]:
    """Attention of all rows, and the products between latents and heads that it needs."""
    model, heads, act, cp = c.model, c.heads, c.act, c.layout.cp
    reach = model.sparse_index.top_k if model.sparse_index is not None else None
    qk, latent = m.qk_nope_head_dim + m.qk_rope_head_dim, m.latent_dim
    up = m.kv_lora_rank * heads * (m.qk_nope_head_dim + m.v_head_dim)
    expanded_width = heads * (qk + m.v_head_dim)
    flops = read = gathered = 0.0
    up_rows = written = 0
    shares = []
    for queries, end in rows:
        pairs = visible_pairs(queries, end, reach)
        part = end if cp == 1 else -(-end // cp)
        mine = queries if cp == 1 or queries == 1 else -(-queries // cp)
        held = part if queries == 1 else end  # latents of other ranks are gathered for prompts
        gathered += 0 if queries == 1 else part * c.kv
        shares.append(RowShape(mine, max(mine, part if queries == 1 else end)))
        if absorbing_is_cheaper(m, queries, end, reach):
            up_rows += mine
            flops += 2 * pairs * heads * (latent + m.kv_lora_rank) / cp
            read += (held if reach is None or queries > 1 else min(held, -(-reach // cp))) * c.kv
            written += mine * heads * (m.kv_lora_rank + m.v_head_dim)
        else:
            up_rows += held
            flops += 2 * pairs * expanded_width / cp
            read += held * expanded_width * act
            written += held * expanded_width
    count = c.num_attention
    weights = up * model.linear_bits / 8
    width = heads * (m.qk_nope_head_dim + m.v_head_dim)
    ops = [
        Op(
            "kv_up_proj", "gemm", 2.0 * up_rows * up, weights + up_rows * m.kv_lora_rank * act, written * act,
            model.linear_dtype or model.dtype, count, (up_rows, width, m.kv_lora_rank),
        ),
        Op(
            "attention", "attention", flops, read + t * heads * qk * act, t * heads * m.v_head_dim * act, model.dtype,
            count, (heads, 1, latent, m.kv_lora_rank, reach or 0), 0.0, tuple(shares) if cp > 1 else rows, model.kv_dtype,
            latent_shape(model, heads),
        ),
    ]  # fmt: skip
    if cp > 1:
        ops += _exchanges(c, m, rows, gathered)
    return ops


def _exchanges(c: Stage, m: MLASpec, rows: tuple[RowShape, ...], gathered: float) -> list[Op]:
    """Latents of prompts, and the parts of decode rows' outputs, that context-parallel ranks send each other."""
    cp, count = c.layout.cp, c.num_attention
    ops = []
    if gathered:
        ops.append(Op("kv_gather", "comm", 0.0, gathered, gathered * cp, c.model.kv_dtype, count, (cp,), gathered))
    decode = sum(queries == 1 for queries, _ in rows)
    if decode:
        part = decode * c.heads * (m.kv_lora_rank + 2) * 4.0  # float32 sums, with maximum and weight of each
        ops.append(Op("cp_merge", "comm", 0.0, part, part / cp, "float32", count, (cp,), part))
    return ops


def index_ops(c: Stage, rows: tuple[RowShape, ...], t: int) -> list[Op]:
    """The sparse index of the layers that have one (DeepSeek sparse attention, arXiv:2512.02556)."""
    model, index, act, cp = c.model, c.model.sparse_index, c.act, c.layout.cp
    assert index is not None
    count = round(index.layers * c.num_attention / max(1, model.num_attention_layers))
    if not count:
        return []
    rank = (model.mla.q_lora_rank if model.mla else None) or model.hidden_size
    pairs = sum(visible_pairs(queries, end) for queries, end in rows) / cp
    keys = sum(end for _, end in rows) / cp
    width, wide = index.heads * index.dim, index.dim + index.heads
    bits, dtype = model.linear_bits / 8, model.linear_dtype or model.dtype
    return [
        Linear("index_q_proj", width, rank, width * rank * bits, dtype, count).op(t, act),
        Linear("index_k_proj", wide, model.hidden_size, wide * model.hidden_size * bits, dtype, count).op(t, act),
        Op(
            "index_scores", "gemm", 2.0 * pairs * width, keys * index.bytes_per_token + t * width, pairs * 4.0, "fp8",
            count, (t, round(pairs / max(1, t)), index.dim, index.heads),
        ),
    ]  # fmt: skip


__all__ = ["absorbing_is_cheaper", "index_ops", "latent_attention", "latent_linears"]
