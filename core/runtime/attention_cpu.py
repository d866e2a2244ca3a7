"""Attention of a step on the native CPU kernels (`kernels/cpu_attention.py`): float32 caches, any mix of rows.

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
from twinfer.core.runtime.batch import PackedBatch
from twinfer.core.runtime.kv_storage import KVStorage
from twinfer.core.runtime.rope import Rotation
from twinfer.kernels.cpu_attention import PagedAttention, rope_kv_write


class NativeStep(AttentionStep):
    """See `AttentionStep`. The caller has asked `cpu_attention.serves` for the cache."""

    def __init__(self, shape: AttentionShape, batch: PackedBatch, kv: KVStorage) -> None:
        self.shape, self.slots, self.keys = shape, batch.slots, kv.keys
        self.values = [k[..., : shape.v_dim] for k in kv.keys] if shape.values_in_keys else kv.values
        self.attention = PagedAttention(_rows(batch), shape.scale, shape.softcap)

    def refill(self, batch: PackedBatch) -> None:
        """The rows of another batch of the same shape; its slots are to be copied into those of the first."""
        self.attention.refill(_rows(batch))

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        self.keys[layer].index_copy_(0, self.slots, k)
        if not self.shape.values_in_keys:
            self.values[layer].index_copy_(0, self.slots, v)

    def rotate_store(
        self, layer: int, qkv: Tensor, kv_heads: int, rotation: Rotation, norms: HeadNorms | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        cos, sin = rotation
        keys, values = self.keys[layer], self.values[layer]
        if norms is None:
            done = rope_kv_write(qkv, cos, sin, self.slots, keys, values)
        else:
            done = rope_kv_write(
                qkv, cos, sin, self.slots, keys, values, norms.q_norm, norms.k_norm, norms.eps, norms.plus_one
            )
        if not done:
            return AttentionStep.rotate_store(self, layer, qkv, kv_heads, rotation, norms)
        return qkv[:, : -2 * kv_heads], qkv[:, -2 * kv_heads : -kv_heads], qkv[:, -kv_heads:]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.attention(q, self.keys[layer], self.values[layer], self.shape.windows[layer])


def _rows(batch: PackedBatch) -> list[tuple[int, int, int, NDArray[np.int64]]]:
    return [(span.offset, span.length, span.start, span.table.slots) for span in batch.spans]


__all__ = ["NativeStep"]
