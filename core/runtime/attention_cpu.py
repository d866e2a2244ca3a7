"""Attention of a step on the native CPU kernels (`kernels/cpu_attention.py`): caches of float32 or bfloat16, any mix of rows.

Invariants
* Nothing is cut or masked here: the kernel reads each row's slots itself, so a step costs a few arrays.
* What the kernel does not take (a layout, a dtype) runs on the torch path of `AttentionStep`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from twinfer.core.runtime.attention_parts import AttentionShape
from twinfer.core.runtime.attention_step import AttentionStep, HeadNorms
from twinfer.core.runtime.batch import GroupView, PackedBatch
from twinfer.core.runtime.kv_storage import KVStorage
from twinfer.core.runtime.rope import Rotation
from twinfer.kernels.cpu_attention import PagedAttention, rope_kv_write


class NativeStep(AttentionStep):
    """See `AttentionStep`. The caller has asked `cpu_attention.serves` for the cache."""

    def __init__(self, shape: AttentionShape, batch: PackedBatch, kv: KVStorage) -> None:
        self.shape, self.group_of, self.keys = shape, kv.group_of, kv.keys
        self.values = [k[..., : shape.v_dim] for k in kv.keys] if shape.values_in_keys else kv.values
        self.slots = [group.slots for group in batch.groups]
        self.attention = [PagedAttention(_rows(group), shape.scale, shape.softcap) for group in batch.groups]

    def refill(self, batch: PackedBatch) -> None:
        """The rows of another batch of the same shape; its slots are to be copied into those of the first."""
        for attention, group in zip(self.attention, batch.groups, strict=True):
            attention.refill(_rows(group))

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        slots = self.slots[self.group_of[layer]]
        self.keys[layer].index_copy_(0, slots, k.to(self.keys[layer].dtype))
        if not self.shape.values_in_keys:
            self.values[layer].index_copy_(0, slots, v.to(self.values[layer].dtype))

    def rotate_store(
        self, layer: int, qkv: Tensor, kv_heads: int, rotation: Rotation, norms: HeadNorms | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        cos, sin = rotation
        keys, values, slots = self.keys[layer], self.values[layer], self.slots[self.group_of[layer]]
        if norms is None:
            done = rope_kv_write(qkv, cos, sin, slots, keys, values)
        else:
            done = rope_kv_write(
                qkv, cos, sin, slots, keys, values, norms.q_norm, norms.k_norm, norms.eps, norms.plus_one
            )
        if not done:
            return AttentionStep.rotate_store(self, layer, qkv, kv_heads, rotation, norms)
        return qkv[:, : -2 * kv_heads], qkv[:, -2 * kv_heads : -kv_heads], qkv[:, -kv_heads:]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        attention = self.attention[self.group_of[layer]]
        return attention(q, self.keys[layer], self.values[layer], self.shape.windows[layer])


def _rows(group: GroupView) -> list[tuple[int, int, int, NDArray[np.int64]]]:
    return [(span.offset, span.length, span.start, span.table.slots) for span in group.spans]


__all__ = ["NativeStep"]
