"""The attention block with one projection into queries, keys and values (MHA, GQA, MQA).

    q, k, v = split(qkv_proj(x));  out = o_proj(attention(rope(norm?(q)), rope(norm?(k)), v))

Invariants
* The three projections are one product; heads are this rank's.
* A token meets others only inside `step`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from twinfer.core.runtime.attention_torch import AttentionStep
from twinfer.core.runtime.families import Mark
from twinfer.core.runtime.families.decoder import RankLoader, Shapes, linear_shapes
from twinfer.core.runtime.rope import Rotation, rotate
from twinfer.core.spec import ModelSpec
from twinfer.kernels import ops


class QKVAttention:
    """See `AttentionBlock`. Tensors lie under `{prefix}self_attn.` in the checkpoint."""

    def __init__(self, weights: RankLoader, prefix: str) -> None:
        spec, load, self.parallel = weights.spec, weights.load, weights.parallel
        self.q_heads = self.parallel.share(spec.num_heads, "attention heads")
        self.kv_heads = self.parallel.kv_heads(spec.num_kv_heads)
        self.head_dim, self.eps, self.plus_one = spec.head_dim, spec.norm_eps, spec.norm_plus_one
        name = f"{prefix}self_attn."
        self.qkv_proj = weights.columns(
            f"{prefix}qkv_proj",
            [f"{name}{part}_proj" for part in "qkv"],
            [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads],
        )
        self.q_norm = load(f"{name}q_norm.weight") if spec.qk_norm else None
        self.k_norm = load(f"{name}k_norm.weight") if spec.qk_norm else None
        self.o_proj = weights.rows(f"{prefix}o_proj", f"{name}o_proj", spec.num_heads)

    @staticmethod
    def shapes(spec: ModelSpec, prefix: str) -> Shapes:
        """What the checkpoint holds for one layer."""
        name, h, dim = f"{prefix}self_attn.", spec.hidden_size, spec.head_dim
        q, kv = spec.num_heads * dim, spec.num_kv_heads * dim
        shapes = linear_shapes(f"{name}q_proj", q, h, spec.attention_bias)
        shapes |= linear_shapes(f"{name}k_proj", kv, h, spec.attention_bias)
        shapes |= linear_shapes(f"{name}v_proj", kv, h, spec.attention_bias)
        shapes |= linear_shapes(f"{name}o_proj", h, q, spec.attention_out_bias)
        if spec.qk_norm:
            shapes |= {f"{name}q_norm.weight": (dim,), f"{name}k_norm.weight": (dim,)}
        return shapes

    def __call__(self, x: Tensor, layer: int, rotation: Rotation, step: AttentionStep, mark: Mark) -> Tensor:
        q_heads, kv_heads = self.q_heads, self.kv_heads
        qkv = self.qkv_proj(x).view(x.shape[0], q_heads + 2 * kv_heads, self.head_dim)
        mark("qkv_proj")
        qk, v = qkv[:, : q_heads + kv_heads], qkv[:, q_heads + kv_heads :]
        if self.q_norm is not None and self.k_norm is not None:
            qk = torch.cat(
                (
                    ops.rms_norm(qk[:, :q_heads], self.q_norm, self.eps, self.plus_one),
                    ops.rms_norm(qk[:, q_heads:], self.k_norm, self.eps, self.plus_one),
                ),
                dim=1,
            )
        qk = rotate(qk, rotation)
        q, k = qk[:, :q_heads], qk[:, q_heads:]
        step.store(layer, k, v)
        mark("rope_kv_write")
        out = step.attend(layer, q, k, v)
        mark("attention")
        out = self.o_proj(out)
        mark("o_proj")
        return self.parallel.all_reduce(out)


__all__ = ["QKVAttention"]
