"""The attention block with one projection into queries, keys and values (MHA, GQA, MQA).

    q, k, v = split(qkv_proj(x));  out = o_proj(attention(rope(norm?(q)), rope(norm?(k)), v))

Invariants
* The three projections are one product; heads are this rank's.
* A token meets others only inside `step`.
"""

from __future__ import annotations

from torch import Tensor

from twinfer.core.runtime.attention_step import AttentionStep, HeadNorms
from twinfer.core.runtime.families import Mark
from twinfer.core.runtime.families.decoder import RankLoader, Shapes, linear_shapes
from twinfer.core.runtime.rope import Rotation
from twinfer.core.spec import ModelSpec


class QKVAttention:
    """See `AttentionBlock`. Tensors lie under `{prefix}self_attn.` in the checkpoint."""

    def __init__(self, weights: RankLoader, prefix: str) -> None:
        spec, load, self.parallel = weights.spec, weights.load, weights.parallel
        self.q_heads = self.parallel.share(spec.num_heads, "attention heads")
        self.kv_heads = self.parallel.kv_heads(spec.num_kv_heads)
        self.head_dim = spec.head_dim
        name = f"{prefix}self_attn."
        self.qkv_proj = weights.columns(
            f"{prefix}qkv_proj",
            [f"{name}{part}_proj" for part in "qkv"],
            [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads],
        )
        self.norms: HeadNorms | None = None
        if spec.qk_norm:
            q_norm, k_norm = (load(f"{name}{part}_norm.weight") for part in "qk")
            self.norms = HeadNorms(q_norm, k_norm, spec.norm_eps, spec.norm_plus_one)
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
        qkv = self.qkv_proj(x).view(x.shape[0], self.q_heads + 2 * self.kv_heads, self.head_dim)
        mark("qkv_proj")
        q, k, v = step.rotate_store(layer, qkv, self.kv_heads, rotation, self.norms)
        mark("rope_kv_write")
        out = step.attend(layer, q, k, v)
        mark("attention")
        out = self.o_proj(out)
        mark("o_proj")
        return self.parallel.all_reduce(out, mark)


__all__ = ["QKVAttention"]
