"""Attention over stored latents: multi-head latent attention as DeepSeek-V2 runs it (arXiv:2405.04434, section 2.1).

    stored per token: latent [rank + rope] = (what keys and values of all heads are made of, one rotated key part)
    key of head h = (up_k[h] @ latent[:rank], latent[rank:])        value of head h = up_v[h] @ latent[:rank]

Two ways to the same result; each row of a step takes the one of fewer FLOPs (`layer_ops.absorbing_is_cheaper`):
* absorbed: up_k moves to the query and up_v behind the weighted sum, so that all heads attend to the latents
  themselves as one shared KV head. Right for rows of few queries.
* expanded: keys and values of the row are computed from its latents, a few heads at a time. Right for long rows.

Invariants
* `store` writes the latents through `batch.slots` before `attend` reads anything.
* Every packed token is answered by one of the two, in packed order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from twinfer.core.layer_ops import absorbing_is_cheaper
from twinfer.core.runtime.attention_parts import AttentionShape, SingleRow
from twinfer.core.runtime.attention_step import AttentionStep
from twinfer.core.runtime.attention_torch import TorchAttention
from twinfer.core.runtime.batch import PackedBatch, Span
from twinfer.core.runtime.families import Mark
from twinfer.core.runtime.kv_storage import KVStorage
from twinfer.core.spec import ModelSpec
from twinfer.kernels.cpu_attention import LANES, PagedAttention, serves

EXPAND_BYTES = 64 * 2**20  # keys and values held at once while a row is expanded


@dataclass(frozen=True, slots=True)
class UpProjection:
    """What makes keys `[heads, nope, rank]` and values `[heads, value_dim, rank]` of a latent."""

    k: Tensor
    v: Tensor


class LatentAttention:
    """Attention of `model`'s heads over its latents."""

    def __init__(self, model: ModelSpec) -> None:
        assert model.mla is not None
        self.mla = mla = model.mla
        scale = model.query_scale if model.query_scale is not None else model.head_dim**-0.5
        windows = (None,) * model.num_layers
        self.absorbed = TorchAttention(
            AttentionShape(
                num_heads=model.num_heads, num_kv_heads=1, head_dim=mla.latent_dim, scale=scale, windows=windows,
                value_dim=min(_aligned(mla.kv_lora_rank), mla.latent_dim), values_in_keys=True,
            )
        )  # fmt: skip
        self.expanded = AttentionShape(
            num_heads=model.num_heads, num_kv_heads=model.num_heads, scale=scale, windows=windows,
            head_dim=mla.qk_nope_head_dim + mla.qk_rope_head_dim, value_dim=mla.v_head_dim,
        )  # fmt: skip

    def step(self, batch: PackedBatch, kv: KVStorage) -> LatentStep:
        """Index tensors and masks of this step, made once."""
        return LatentStep(self, batch, kv)


class LatentStep:
    """Attention of one step; each layer calls `store`, then `attend` with the same latents."""

    def __init__(self, attention: LatentAttention, batch: PackedBatch, kv: KVStorage) -> None:
        self.mla, self.kv, self.slots = attention.mla, kv, batch.slots
        short = [s for s in batch.spans if absorbing_is_cheaper(self.mla, s.length, s.stop)]
        self.short = _tokens_of(short, batch.num_tokens, kv.device)
        self.over_latents: AttentionStep | None = None
        if short:
            some = replace(batch, tokens=batch.tokens[self.short], spans=tuple(_packed(short)))
            self.over_latents = attention.absorbed.step(some, kv)
        self.rows = [
            _Row(span, attention.expanded, kv)
            for span in batch.spans
            if not absorbing_is_cheaper(self.mla, span.length, span.stop)
        ]

    def store(self, layer: int, latent: Tensor) -> None:
        """Write `latent [tokens, rank + rope]` (normed and rotated) of this step's tokens into their slots."""
        keys = self.kv.keys[layer]
        keys.index_copy_(0, self.slots, latent[:, None].to(keys.dtype))

    def attend(self, layer: int, q: Tensor, latent: Tensor, up: UpProjection, mark: Mark) -> Tensor:
        """`q [tokens, heads, nope + rope]` (rotated) to `[tokens, heads * value_dim]`."""
        keys = self.kv.keys[layer]
        latent = latent[:, None].to(keys.dtype)
        if not self.rows:
            return self._absorbed(layer, q, latent, up, mark).flatten(1)
        out = q.new_empty(q.shape[0], q.shape[1], up.v.shape[1])
        if self.over_latents is not None:
            out[self.short] = self._absorbed(layer, q[self.short], latent[self.short], up, mark)
        for row in self.rows:
            self._expanded(row, q, row.context(latent, keys)[:, 0].to(q.dtype), up, out[row.where], mark)
        return out.flatten(1)

    def _absorbed(self, layer: int, q: Tensor, latent: Tensor, up: UpProjection, mark: Mark) -> Tensor:
        """The short rows, packed: `q [tokens, heads, nope + rope]` to `[tokens, heads, value_dim]`."""
        tokens, heads, _ = q.shape
        nope, rank = self.mla.qk_nope_head_dim, self.mla.kv_lora_rank
        wide = q.new_empty(tokens, heads, self.mla.latent_dim)
        wide[..., :rank] = torch.bmm(q[..., :nope].transpose(0, 1), up.k).transpose(0, 1)
        wide[..., rank:] = q[..., nope:]
        mark("kv_up_proj")
        assert self.over_latents is not None
        # what lies behind the rank is summed up with it where that fills a vector of the kernel
        sums = self.over_latents.attend(layer, wide, latent, latent).view(tokens, heads, -1)[..., :rank]
        mark("attention")
        out = torch.bmm(sums.transpose(0, 1), up.v.transpose(1, 2)).transpose(0, 1)
        mark("kv_up_proj")
        return out

    def _expanded(self, row: _Row, q: Tensor, latent: Tensor, up: UpProjection, out: Tensor, mark: Mark) -> None:
        """One row over its own `latent [keys, rank + rope]` into `out [queries, heads, value_dim]`."""
        nope, rank = self.mla.qk_nope_head_dim, self.mla.kv_lora_rank
        heads, keys = q.shape[1], latent.shape[0]
        q, value_dim = q[row.where], up.v.shape[1]
        spare = _aligned(q.shape[2]) - q.shape[2] if q.is_cpu else 0
        if spare:  # zeros that fill a vector of the kernel
            q = F.pad(q, (0, spare))
        at_once = max(1, EXPAND_BYTES // (keys * (q.shape[2] + value_dim) * q.element_size()))
        source, rotated = latent[:, :rank], latent[:, None, rank:]
        for low in range(0, heads, at_once):
            some = slice(low, min(low + at_once, heads))
            k = q.new_empty(keys, some.stop - low, q.shape[2])
            k[..., :nope] = torch.mm(source, up.k[some].flatten(0, 1).t()).view(keys, some.stop - low, nope)
            k[..., nope : nope + rotated.shape[2]] = rotated
            if spare:
                k[..., -spare:] = 0.0
            v = torch.mm(source, up.v[some].flatten(0, 1).t()).view(keys, some.stop - low, value_dim)
            mark("kv_up_proj")
            out[:, some] = row.attend(q[:, some], k, v)
            mark("attention")


class _Row(SingleRow):
    """A row whose keys and values are tensors of its own: on the native kernels where those serve."""

    def __init__(self, span: Span, shape: AttentionShape, kv: KVStorage) -> None:
        super().__init__(span, None, shape, kv.keys[0].dtype, kv.device)
        self.native: dict[int, PagedAttention] = {}  # by number of heads, which the strides depend on

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not serves(k, v):
            return super().attend(q, k, v)
        heads = q.shape[1]
        if heads not in self.native:
            slots = np.arange(self.span.stop, dtype=np.int64)
            self.native[heads] = PagedAttention([(0, self.span.length, self.span.start, slots)], self.shape.scale)
        return self.native[heads](q, k, v).view(len(q), heads, -1)


def _aligned(width: int) -> int:
    """`width` in whole vectors of the native kernel."""
    return -(-width // LANES) * LANES


def _packed(spans: Sequence[Span]) -> list[Span]:
    """`spans` as if they were packed without gaps."""
    packed, offset = [], 0
    for span in spans:
        packed.append(span._replace(offset=offset))
        offset += span.length
    return packed


def _tokens_of(spans: Sequence[Span], num_tokens: int, device: torch.device) -> slice | Tensor:
    """Packed positions of the tokens of `spans`, a slice where they are all tokens."""
    if sum(s.length for s in spans) == num_tokens:
        return slice(0, num_tokens)
    positions = [i for s in spans for i in range(s.offset, s.offset + s.length)]
    return torch.tensor(positions, dtype=torch.int64, device=device)


__all__ = ["LatentAttention", "LatentStep", "UpProjection"]
