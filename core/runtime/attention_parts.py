"""How one group of rows of a step reads its keys and attends.

    q: [tokens, heads, head_dim]    k: [tokens, kv_heads, head_dim]    v: [tokens, kv_heads, value_dim]
    caches: the same per slot; with `values_in_keys` a value is the first value_dim elements of its key

* `PaddedRows`: rows of few queries (decode, verify) with keys as [rows, longest, ...]: a strided view when the rows
  lie at equal distances (contiguous cache), otherwise one gather. The query heads of one KV head are folded into the
  query axis, so KV is never repeated.
* `SingleRow`: one row alone. Keys are a view when they lie in consecutive slots or were all computed in this very
  step, otherwise one gather.

Invariants
* A query at position p sees keys max(0, p - window + 1) .. p of its own sequence and nothing else.
* Padding is memory of the same sequence and is masked: a NaN of one row never reaches another.
* Index tensors and masks are made once per step, not per layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from twinfer.core.runtime.batch import Span
from twinfer.core.work import keys_read

QUERY_BLOCK = 512  # queries of one row whose mask is held at once


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """What attention needs of a model.

    windows: one entry per layer.  value_dim: width of a value, 0 for head_dim.
    values_in_keys: values are the first value_dim elements of the keys (latent attention); nothing else is stored.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    windows: tuple[int | None, ...]
    softcap: float | None = None
    value_dim: int = 0
    values_in_keys: bool = False

    @property
    def v_dim(self) -> int:
        return self.value_dim or self.head_dim

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads


def softmax_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, softcap: float | None
) -> Tensor:
    """`q [rows, kv_heads, queries, dim]` over `k [rows, kv_heads, keys, dim], v [.., value_dim]`; adds `mask` to scores."""
    if softcap is None:
        return fused(q, k, v, attn_mask=mask, scale=scale)
    scores = torch.matmul(q, k.transpose(-1, -2)).float() * scale
    scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores + mask
    return torch.matmul(scores.softmax(dim=-1).to(v.dtype), v)


def fused(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """torch's attention. On the CPU it is fused only for values as wide as keys, so that narrower ones are padded."""
    width = v.shape[-1]
    if v.is_cpu and width < k.shape[-1]:
        v = F.pad(v, (0, k.shape[-1] - width))
    return F.scaled_dot_product_attention(q, k, v, **options)[..., :width]


class Part(Protocol):
    where: slice | Tensor  # packed tokens this part answers for

    def run(self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """`[tokens of the part, heads, value_dim]`, in the order of `where`."""
        ...


class PaddedRows:
    """Rows with `queries` tokens each, their keys padded to the longest."""

    def __init__(
        self, spans: Sequence[Span], window: int | None, shape: AttentionShape, dtype: torch.dtype, device: torch.device
    ) -> None:
        queries = spans[0].length
        firsts = [first_key(s, window) for s in spans]
        lengths = [s.stop - f for s, f in zip(spans, firsts, strict=True)]
        self.shape, self.rows, self.queries, self.longest = shape, len(spans), queries, max(lengths)
        self.strided = distance_of(spans, firsts, self.longest)
        self.index: Tensor | None = None
        if self.strided is None:
            slots = np.empty((len(spans), self.longest), dtype=np.int64)
            for i, (span, first, length) in enumerate(zip(spans, firsts, lengths, strict=True)):
                slots[i, :length] = span.table.slots[first : span.stop]
                slots[i, length:] = span.table.slots[span.stop - 1]
            self.index = torch.from_numpy(slots.reshape(-1)).to(device)
        self.mask: Tensor | None = None
        if queries > 1 or min(lengths) < self.longest:
            position = np.array([s.start for s in spans])[:, None, None] + np.arange(queries)[None, :, None]
            key = np.array(firsts)[:, None, None] + np.arange(self.longest)[None, None, :]
            mask = additive(visible(position, key, window), dtype, device)
            self.mask = mask.repeat_interleave(shape.group, dim=1)[:, None]  # [rows, 1, queries * group, keys]
        offsets = [s.offset for s in spans]
        if offsets == list(range(offsets[0], offsets[0] + queries * len(spans), queries)):
            self.where: slice | Tensor = slice(offsets[0], offsets[0] + queries * len(spans))
        else:
            self.where = torch.tensor([o + i for o in offsets for i in range(queries)], device=device)

    def run(self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        s = self.shape
        folded = q[self.where].view(self.rows, self.queries, s.num_kv_heads, s.group, s.head_dim)
        folded = folded.transpose(1, 2).reshape(self.rows, s.num_kv_heads, self.queries * s.group, s.head_dim)
        all_k = self._context(keys)
        all_v = all_k if s.values_in_keys else self._context(values)
        out = softmax_attention(folded, all_k, all_v, self.mask, s.scale, s.softcap)[..., : s.v_dim]
        out = out.reshape(self.rows, s.num_kv_heads, self.queries, s.group, s.v_dim).transpose(1, 2)
        return out.reshape(self.rows * self.queries, s.num_heads, s.v_dim)

    def _context(self, cache: Tensor) -> Tensor:
        """`[rows, kv_heads, longest, width]` of one cache tensor `[slots, kv_heads, width]`."""
        s, width = self.shape, cache.shape[-1]
        if self.index is not None:
            rows = cache.index_select(0, self.index).view(self.rows, self.longest, s.num_kv_heads, width)
        else:
            assert self.strided is not None
            base, distance = self.strided
            slot, head, one = cache.stride()
            rows = cache.as_strided(
                (self.rows, self.longest, s.num_kv_heads, width),
                (distance * slot, slot, head, one),
                cache.storage_offset() + base * slot,
            )
        return rows.transpose(1, 2)


def distance_of(spans: Sequence[Span], firsts: Sequence[int], longest: int) -> tuple[int, int] | None:
    """(first slot, slots from one row to the next) when all rows can be read as one strided view.

    Every row must own `longest` consecutive slots, so that its padding is its own memory.
    """
    if any(first + longest > span.table.run for span, first in zip(spans, firsts, strict=True)):
        return None
    bases = [int(span.table.slots[first]) for span, first in zip(spans, firsts, strict=True)]
    distance = bases[1] - bases[0] if len(bases) > 1 else longest
    if distance <= 0 or any(b - a != distance for a, b in pairwise(bases)):
        return None
    return bases[0], distance


class SingleRow:
    """One row; many queries are answered in blocks so that masks stay small."""

    def __init__(
        self, span: Span, window: int | None, shape: AttentionShape, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.shape, self.span = shape, span
        self.where = slice(span.offset, span.offset + span.length)
        self.first = first_key(span, window)
        slots = span.table.slots[self.first : span.stop]
        self.fresh = span.start == 0  # all keys are computed in this step
        self.view = slice(int(slots[0]), int(slots[0]) + len(slots)) if span.stop <= span.table.run else None
        self.index = None
        if not self.fresh and self.view is None:
            self.index = torch.from_numpy(slots).to(device)
        self.causal = self.fresh and shape.softcap is None and (window is None or span.length <= window)
        self.blocks: list[tuple[int, int, int, int, Tensor | None]] = []  # queries from, to, keys from, to, mask
        if self.causal:
            return
        for low in range(0, span.length, QUERY_BLOCK):
            high = min(low + QUERY_BLOCK, span.length)
            position = np.arange(span.start + low, span.start + high)
            seen = max(self.first, int(position[0]) - window + 1) if window is not None else self.first
            last = int(position[-1]) + 1
            mask = None
            if high - low > 1:
                allowed = visible(position[:, None], np.arange(seen, last)[None, :], window)
                mask = additive(allowed, dtype, device)
            self.blocks.append((low, high, seen - self.first, last - self.first, mask))

    def run(self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        row_k = self.context(k, keys)
        row_v = row_k if self.shape.values_in_keys else self.context(v, values)
        return self.attend(q[self.where], row_k, row_v)[..., : self.shape.v_dim]

    def context(self, fresh: Tensor, cache: Tensor) -> Tensor:
        """All keys (or values) of the row, `[keys, kv_heads, width]`."""
        if self.fresh:
            return fresh[self.where]
        return cache[self.view] if self.view is not None else cache.index_select(0, self.index)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The row's own `q [queries, heads, head_dim]` over `k, v` of `context`."""
        s = self.shape
        row_q, row_k, row_v = (x.transpose(0, 1)[None] for x in (q, k, v))
        if self.causal:
            out = fused(row_q, row_k, row_v, is_causal=True, scale=s.scale, enable_gqa=s.group > 1)
            return out[0].transpose(0, 1)
        outs = [
            self._block(row_q[:, :, low:high], row_k[:, :, seen:last], row_v[:, :, seen:last], mask)
            for low, high, seen, last, mask in self.blocks
        ]
        return torch.cat(outs, dim=1).transpose(0, 1)

    def _block(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        s = self.shape
        _, heads, queries, dim = q.shape
        if s.softcap is None and queries > 1:
            return fused(q, k, v, attn_mask=mask, scale=s.scale, enable_gqa=s.group > 1)[0]
        folded = q.reshape(1, k.shape[1], s.group * queries, dim)
        tiled = mask.repeat(s.group, 1) if mask is not None else None
        return softmax_attention(folded, k, v, tiled, s.scale, s.softcap).reshape(heads, queries, v.shape[-1])


def first_key(span: Span, window: int | None) -> int:
    """First position that any query of the row sees."""
    return span.stop - keys_read(span.length, span.stop, window)


def visible(position: NDArray[np.int64], key: NDArray[np.int64], window: int | None) -> NDArray[np.bool_]:
    allowed = key <= position
    return allowed if window is None else allowed & (key > position - window)


def additive(allowed: NDArray[np.bool_], dtype: torch.dtype, device: torch.device) -> Tensor:
    """0 where allowed, -inf elsewhere; made once, because a boolean mask is converted at every call."""
    mask = torch.zeros(allowed.shape, dtype=dtype)
    mask.masked_fill_(torch.from_numpy(~allowed), float("-inf"))
    return mask.to(device)
