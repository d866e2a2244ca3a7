"""Attention of layers with KV heads when the tokens of a step are cut over context-parallel ranks.

    prompts   ring attention (arXiv:2310.01889): each rank keeps 1 / cp of the queries, keys and values go round in cp
              steps; a step's compute and the sending of the next keys run at the same time
    decode    each rank holds 1 / cp of a row's keys: queries are gathered, partial outputs are merged

Invariants
* Queries are dealt so that each rank sees an equal share of the pairs (zigzag): FLOPs of all ranks and steps add up to
  those of one rank exactly.
* The sending is `Op.beside`: a launch takes the longer of the two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from twinfer.core.work import Op, RowShape

if TYPE_CHECKING:
    from twinfer.core.layer_ops import Stage

AttentionOf = Callable[["Stage", tuple[RowShape, ...], int, int | None, int], Op]


def cut_attention(
    c: Stage, rows: tuple[RowShape, ...], window: int | None, count: int, attention: AttentionOf
) -> list[Op]:
    """Ops of `count` layers of one window; `attention` gives the op of rows on a rank alone."""
    prompts = tuple(row for row in rows if row.queries > 1)
    decode = tuple(row for row in rows if row.queries == 1)
    ops = []
    if prompts:
        ops += _ring(c, prompts, attention(c, prompts, sum(q for q, _ in prompts), window, count))
    if decode:
        ops += _merged(c, decode, attention(c, decode, len(decode), window, count))
    return ops


def _ring(c: Stage, rows: tuple[RowShape, ...], whole: Op) -> list[Op]:
    """One ring step with the next keys on their way, cp - 1 times, and the last one without."""
    cp = c.layout.cp
    mine = [RowShape(-(-q // cp), -(-end // cp)) for q, end in rows]
    queries = sum(q for q, _ in rows) * c.heads * c.model.head_dim * c.act
    keys = whole.bytes_read - queries
    step = replace(
        whole, flops=whole.flops / cp**2, bytes_read=whole.bytes_read / cp, bytes_written=whole.bytes_written / cp,
        rows=tuple(RowShape(q, max(q, end)) for q, end in mine), count=whole.count,
    )  # fmt: skip
    sent = keys / cp
    ring = Op("kv_ring", "comm", 0.0, sent, sent, c.model.kv_dtype, 1, (c.layout.tp * cp,), sent)
    return [replace(step, count=whole.count * (cp - 1), beside=ring), step]


def _merged(c: Stage, rows: tuple[RowShape, ...], whole: Op) -> list[Op]:
    cp, n = c.layout.cp, len(rows)
    asked = -(-n // cp) * c.heads * c.model.head_dim * c.act
    part = n * c.heads * (c.model.v_dim + 2) * 4.0  # float32 sums, with maximum and weight of each
    query_bytes = n * c.heads * c.model.head_dim * c.act
    return [
        Op("cp_queries", "comm", 0.0, asked, asked * cp, c.model.dtype, whole.count, (cp,), asked),
        replace(
            whole, flops=whole.flops / cp, bytes_read=query_bytes + (whole.bytes_read - query_bytes) / cp,
            rows=tuple(RowShape(1, -(-end // cp)) for _, end in rows),
        ),
        Op("cp_merge", "comm", 0.0, part, part / cp, "float32", whole.count, (cp,), part),
    ]  # fmt: skip


__all__ = ["cut_attention"]
