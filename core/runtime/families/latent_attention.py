"""The attention block of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434).

    latent = (norm?(c), rope(k)) with c, k = kv_a_proj(x)          one per token, [rank + rope]
    q = q_b_proj(norm(q_a_proj(x))) or q_proj(x);  its last qk_rope_head_dim dimensions are turned
    out = o_proj(attention of q over keys and values that kv_b_proj makes of the latents)

Absorbed, the cache holds the latents and `LatentStep` attends to them; naive, every token's keys and values are made
once and cached like those of any other model.

Invariants
* Rotary pairs that lie side by side in the checkpoint are put into halves at load: queries and keys alike, so that
  their products stay the same.
* The latent is computed whole on every rank; heads are this rank's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from twinfer.core.runtime.attention_latent import LatentStep, UpProjection
from twinfer.core.runtime.attention_torch import AttentionStep
from twinfer.core.runtime.families import Mark
from twinfer.core.runtime.families.decoder import RankLoader, Shapes, linear_shapes
from twinfer.core.runtime.linear import Linear, owned
from twinfer.core.runtime.rope import Rotation, rotate
from twinfer.core.spec import MLASpec, ModelSpec
from twinfer.kernels import ops

LATENT_NORM_EPS = 1e-6  # of the norms inside the block, whatever the model's own


class LatentBlock:
    """See `AttentionBlock`. Tensors lie under `{prefix}self_attn.` in the checkpoint."""

    def __init__(self, weights: RankLoader, prefix: str) -> None:
        spec, load, self.parallel = weights.spec, weights.load, weights.parallel
        assert spec.mla is not None
        self.mla = m = spec.mla
        self.heads = self.parallel.share(spec.num_heads, "attention heads")
        name = f"{prefix}self_attn."
        self.q_norm: Tensor | None = None
        self.q_down: Linear | None = None
        if m.q_lora_rank:
            q_a = f"{name}q_a_proj"
            self.q_down = weights.linear(
                f"{prefix}q_down_proj", load.projection(f"{q_a}.weight"), load.optional(f"{q_a}.bias")
            )
            self.q_norm = load(f"{name}q_a_layernorm.weight")
        q, op = (f"{name}q_b_proj", "q_up_proj") if m.q_lora_rank else (f"{name}q_proj", "q_proj")
        queries = [self.parallel.cut_heads(load.projection(f"{q}.weight"), spec.num_heads), load.optional(f"{q}.bias")]
        if queries[1] is not None:
            queries[1] = self.parallel.cut_heads(queries[1], spec.num_heads)
        width = m.qk_nope_head_dim + m.qk_rope_head_dim
        self.q_proj = weights.linear(f"{prefix}{op}", *(_in_halves(w, width, m) for w in queries))
        kv = f"{name}kv_a_proj_with_mqa"
        latents = (load.projection(f"{kv}.weight"), load.optional(f"{kv}.bias"))
        self.kv_down = weights.linear(f"{prefix}kv_down_proj", *(_in_halves(w, m.latent_dim, m) for w in latents))
        self.latent_norm = load(f"{name}kv_a_layernorm.weight") if m.latent_norm else None
        up = f"{name}kv_b_proj.weight"
        if m.absorbed:
            mine = self.parallel.cut_heads(load(up), spec.num_heads)
            by_head = mine.view(self.heads, m.qk_nope_head_dim + m.v_head_dim, m.kv_lora_rank)
            k, v = by_head.split((m.qk_nope_head_dim, m.v_head_dim), dim=1)
            self.up = UpProjection(owned(k.contiguous()), owned(v.contiguous()))
        else:
            mine = self.parallel.cut_heads(load.projection(up), spec.num_heads)
            self.kv_up = weights.linear(f"{prefix}kv_up_proj", mine, None)
        self.o_proj = weights.rows(f"{prefix}o_proj", f"{name}o_proj", spec.num_heads)

    @staticmethod
    def shapes(spec: ModelSpec, prefix: str) -> Shapes:
        """What the checkpoint holds for one layer."""
        m, name, h, bias = spec.mla, f"{prefix}self_attn.", spec.hidden_size, spec.attention_bias
        assert m is not None
        q = spec.num_heads * (m.qk_nope_head_dim + m.qk_rope_head_dim)
        if m.q_lora_rank:
            shapes = linear_shapes(f"{name}q_a_proj", m.q_lora_rank, h, bias)
            shapes[f"{name}q_a_layernorm.weight"] = (m.q_lora_rank,)
            shapes |= linear_shapes(f"{name}q_b_proj", q, m.q_lora_rank)
        else:
            shapes = linear_shapes(f"{name}q_proj", q, h)
        shapes |= linear_shapes(f"{name}kv_a_proj_with_mqa", m.latent_dim, h, bias)
        if m.latent_norm:
            shapes[f"{name}kv_a_layernorm.weight"] = (m.kv_lora_rank,)
        up = spec.num_heads * (m.qk_nope_head_dim + m.v_head_dim)
        shapes |= linear_shapes(f"{name}kv_b_proj", up, m.kv_lora_rank)
        return shapes | linear_shapes(f"{name}o_proj", h, spec.num_heads * m.v_head_dim, spec.attention_out_bias)

    def __call__(
        self, x: Tensor, layer: int, rotation: Rotation, step: AttentionStep | LatentStep, mark: Mark
    ) -> Tensor:
        m, tokens = self.mla, x.shape[0]
        nope, rank = m.qk_nope_head_dim, m.kv_lora_rank
        if self.q_down is not None and self.q_norm is not None:
            q = self.q_down(x)
            mark("q_down_proj")
            q = self.q_proj(ops.rms_norm(q, self.q_norm, LATENT_NORM_EPS))
            mark("q_up_proj")
        else:
            q = self.q_proj(x)
            mark("q_proj")
        q = q.view(tokens, self.heads, nope + m.qk_rope_head_dim)
        latent = self.kv_down(x)
        mark("kv_down_proj")
        if self.latent_norm is not None:
            latent[:, :rank] = ops.rms_norm(latent[:, :rank], self.latent_norm, LATENT_NORM_EPS)
        latent[:, None, rank:] = rotate(latent[:, None, rank:], rotation)
        q[..., nope:] = rotate(q[..., nope:], rotation)
        if isinstance(step, LatentStep):
            step.store(layer, latent)
            mark("rope_kv_write")
            out = step.attend(layer, q, latent, self.up, mark)
        else:
            kv = self.kv_up(latent[:, :rank].contiguous()).view(tokens, self.heads, nope + m.v_head_dim)
            mark("kv_up_proj")
            k = torch.cat((kv[..., :nope], latent[:, None, rank:].expand(-1, self.heads, -1)), dim=-1)
            v = kv[..., nope:]
            step.store(layer, k, v)
            mark("rope_kv_write")
            out = step.attend(layer, q, k, v)
            mark("attention")
        out = self.o_proj(out)
        mark("o_proj")
        return self.parallel.all_reduce(out, mark)


def _in_halves(weight: Any, width: int, m: MLASpec) -> Any:
    """Rows in groups of `width`, the last qk_rope_head_dim of each rotary pairs side by side: those put into halves."""
    if weight is None or not m.interleaved:
        return weight
    plain = torch.arange(width - m.qk_rope_head_dim)
    pairs = torch.arange(width - m.qk_rope_head_dim, width, 2)
    group = torch.cat((plain, pairs, pairs + 1))
    starts = torch.arange(0, weight.shape[0], width)
    order = (starts[:, None] + group).flatten()
    device = weight.device if isinstance(weight, Tensor) else weight.data.device
    return weight.index_select(0, order.to(device))


__all__ = ["LatentBlock"]
