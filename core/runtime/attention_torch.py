"""Attention of a packed batch over the KV storage, in stock torch; on native kernels where those serve.

    q: [tokens, heads, head_dim]    k, v: [tokens, kv_heads, head_dim]    result: [tokens, heads * value_dim]

A step is cut once into parts (`attention_parts.py`) that all layers of one cache group and window share: rows of few
queries and similar context together, longer rows one by one.

Invariants
* `store` writes k and v through the slots of the layer's cache group before `attend` reads anything.
* Every packed token belongs to exactly one part; results come back in packed order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from twinfer.core.runtime.attention_cpu import NativeStep
from twinfer.core.runtime.attention_parts import AttentionShape, PaddedRows, Part, SingleRow, distance_of, first_key
from twinfer.core.runtime.attention_step import AttentionStep
from twinfer.core.runtime.batch import PackedBatch, Span
from twinfer.core.runtime.kv_storage import KVStorage
from twinfer.core.spec import ModelSpec
from twinfer.kernels.cpu_attention import serves

SHORT_ROW = 8  # queries up to which rows of equal length are padded together
VIEW_BYTES = 1024 * 1024  # keys of one row from which a view each beats one gather for all (measured on a CPU)
PAD_BYTES = 512 * 1024  # padding that costs about as much as the launches of one more part


def attention_of(model: ModelSpec) -> TorchAttention:
    """Torch attention with the shapes of `model`, over keys and values of heads."""
    scale = model.query_scale if model.query_scale is not None else model.head_dim**-0.5
    windows = tuple(model.window(layer) for layer in range(model.num_layers))
    return TorchAttention(
        AttentionShape(
            num_heads=model.num_heads, num_kv_heads=model.kv_heads_per_rank(), head_dim=model.head_dim, scale=scale,
            windows=windows, softcap=model.attn_softcap, value_dim=model.v_dim,
        )
    )  # fmt: skip


class TorchAttention:
    """Causal softmax attention (arXiv:1706.03762), grouped over KV heads (arXiv:2305.13245)."""

    def __init__(self, shape: AttentionShape) -> None:
        self.shape = shape

    def step(self, batch: PackedBatch, kv: KVStorage) -> AttentionStep:
        """Index tensors and masks of this step, made once; native kernels where they serve."""
        values = kv.keys[0][..., : self.shape.v_dim] if self.shape.values_in_keys else kv.values[0]
        if serves(kv.keys[0], values):
            return NativeStep(self.shape, batch, kv)
        return _Step(self.shape, batch, kv)


class _Step(AttentionStep):
    def __init__(self, shape: AttentionShape, batch: PackedBatch, kv: KVStorage) -> None:
        self.shape, self.kv, self.groups = shape, kv, batch.groups
        self.whole = slice(0, batch.num_tokens)
        dtype = kv.keys[0].dtype
        self.parts = {
            (group, window): cut(self.groups[group].spans, window, shape, dtype, kv.device)
            for group, window in dict.fromkeys((kv.group_of[i], w) for i, w in enumerate(shape.windows))
        }

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        slots = self.groups[self.kv.group_of[layer]].slots
        self.kv.keys[layer].index_copy_(0, slots, k)
        if not self.shape.values_in_keys:
            self.kv.values[layer].index_copy_(0, slots, v)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self.kv.keys[layer], self.kv.values[layer]
        parts = self.parts[self.kv.group_of[layer], self.shape.windows[layer]]
        where = parts[0].where
        if isinstance(where, slice) and where == self.whole:
            return parts[0].run(q, k, v, keys, values).flatten(1)
        out = q.new_empty(q.shape[0], q.shape[1], self.shape.v_dim)
        for part in parts:
            out[part.where] = part.run(q, k, v, keys, values)
        return out.flatten(1)


# --- cutting a step into parts --------------------------------------------------------------------


def cut(
    spans: Sequence[Span], window: int | None, shape: AttentionShape, dtype: torch.dtype, device: torch.device
) -> list[Part]:
    """Parts that together answer for all tokens of `spans`."""
    row_bytes = shape.num_kv_heads * shape.head_dim * dtype.itemsize
    parts: list[Part] = []
    by_length: dict[int, list[Span]] = {}
    for span in spans:
        if span.length > SHORT_ROW:
            parts.append(SingleRow(span, window, shape, dtype, device))
        else:
            by_length.setdefault(span.length, []).append(span)
    for same in by_length.values():
        for bucket in _buckets(same, window, row_bytes):
            if len(bucket) == 1:
                parts.append(SingleRow(bucket[0], window, shape, dtype, device))
            else:
                parts.append(PaddedRows(bucket, window, shape, dtype, device))
    return parts


def _buckets(spans: list[Span], window: int | None, row_bytes: int) -> list[list[Span]]:
    """Rows to be padded together; rows that need no sorting keep their order, so that q is read as a view."""
    if len(spans) == 1:
        return [spans]
    firsts = {s.offset: first_key(s, window) for s in spans}
    keys = {s.offset: s.stop - firsts[s.offset] for s in spans}
    longest = max(keys.values())
    waste = sum(longest - n for n in keys.values())
    by_slot = sorted(spans, key=lambda s: int(s.table.slots[firsts[s.offset]]))
    if waste <= sum(keys.values()) and distance_of(by_slot, [firsts[s.offset] for s in by_slot], longest) is not None:
        return [by_slot]
    alone = [s for s in spans if s.stop <= s.table.run and keys[s.offset] * row_bytes >= VIEW_BYTES]
    rest = [s for s in spans if s not in alone]
    if not rest or max(keys[s.offset] for s in rest) * len(rest) - sum(keys[s.offset] for s in rest) <= (
        PAD_BYTES // row_bytes
    ):
        return [[s] for s in alone] + ([rest] if rest else [])
    buckets: list[list[Span]] = []
    waste = 0
    for span in sorted(rest, key=lambda s: -keys[s.offset]):
        if buckets:
            waste += keys[buckets[-1][0].offset] - keys[span.offset]
        if not buckets or waste * row_bytes > PAD_BYTES:
            buckets.append([])
            waste = 0
        buckets[-1].append(span)
    return [[s] for s in alone] + [sorted(bucket, key=lambda s: s.offset) for bucket in buckets]


__all__ = ["AttentionShape", "AttentionStep", "TorchAttention", "attention_of"]
