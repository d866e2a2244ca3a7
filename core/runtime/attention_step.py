"""What a model file knows of attention: one object per step that writes to the cache and attends over it.

q: [tokens, heads, head_dim]    k, v: [tokens, kv_heads, head_dim]    result: [tokens, heads * value_dim]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from twinfer.core.runtime.rope import Rotation, rotate
from twinfer.kernels import ops


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Norms of each query and key head before the rotation; weights `[head_dim]`."""

    q_norm: Tensor
    k_norm: Tensor
    eps: float
    plus_one: bool = False


class AttentionStep(Protocol):
    """Attention of one step; each layer calls `store` or `rotate_store`, then `attend` with the same k and v."""

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Write k (rotated) and v of this step's tokens into their slots."""
        ...

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...

    def rotate_store(
        self, layer: int, qkv: Tensor, kv_heads: int, rotation: Rotation, norms: HeadNorms | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Norm and turn the q and k of `qkv [tokens, heads + 2 * kv_heads, head_dim]` (which is spent), store k and v.

        Returns q, k and v, ready for `attend`.
        """
        qk, v = qkv[:, :-kv_heads], qkv[:, -kv_heads:]
        if norms is not None:
            q, k = qk[:, :-kv_heads], qk[:, -kv_heads:]
            qk = torch.cat(
                (
                    ops.rms_norm(q, norms.q_norm, norms.eps, norms.plus_one),
                    ops.rms_norm(k, norms.k_norm, norms.eps, norms.plus_one),
                ),
                dim=1,
            )
        qk = rotate(qk, rotation)
        q, k = qk[:, :-kv_heads], qk[:, -kv_heads:]
        self.store(layer, k, v)
        return q, k, v


__all__ = ["AttentionStep", "HeadNorms"]
