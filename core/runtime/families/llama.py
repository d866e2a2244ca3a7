"""The Llama decoder (arXiv:2302.13971), written out. Mistral, Qwen2 and Qwen3 (dense) are the same with other options.

    x = embed(tokens)
    each layer:  x += o_proj(attention(rope(q), rope(k), v))   with q, k, v = qkv_proj(norm(x))
                 x += down_proj(silu(gate) * up)               with gate, up = gate_up_proj(norm(x))
    logits = lm_head(norm(x)) at the wanted positions

Invariants
* Activations are packed `[tokens, ...]`; a token meets others only inside `attention`.
* Norms and rotations are computed in float32 and rounded once, as Hugging Face's files do.
* Rotary halves: dimension i turns together with i + rotary_dim / 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from twinfer.core.errors import ModelError
from twinfer.core.runtime.attention_torch import AttentionStep
from twinfer.core.runtime.families import Mark
from twinfer.core.runtime.linear import Linear, LinearFactory, TokenTable, fused
from twinfer.core.runtime.weights import Loader
from twinfer.core.spec import ModelSpec

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one layer; q_norm and k_norm `[head_dim]` only where the model has them."""

    input_norm: Tensor
    qkv_proj: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    o_proj: Linear
    post_norm: Tensor
    gate_up_proj: Linear
    down_proj: Linear


class Llama:
    """A Llama-family model on one device."""

    def __init__(self, spec: ModelSpec, load: Loader, linear: LinearFactory) -> None:
        self.spec, self.dtype, self.device = spec, load.dtype, load.device
        self.act = ACTIVATIONS[spec.hidden_act]
        tied = spec.tie_embeddings
        self.table = TokenTable(load("model.embed_tokens.weight"), tied)
        self.layers = [_load_layer(spec, load, linear, i) for i in range(spec.num_layers)]
        self.norm = load("model.norm.weight")
        if tied:
            assert self.table.head is not None
            self.lm_head: Linear = self.table.head
        else:
            self.lm_head = linear("lm_head", load("lm_head.weight"), None)
        factors = load.source.get("rope_freqs.weight") if "rope_freqs.weight" in load else None
        self.inv_freq = rope_frequencies(spec, factors).to(load.device)

    def forward(
        self, tokens: Tensor, positions: Tensor, attention: AttentionStep, logits_index: Tensor, mark: Mark
    ) -> Tensor:
        """Float32 logits `[len(logits_index), vocab]`; see `DecoderModel`."""
        spec = self.spec
        num_tokens = tokens.shape[0]
        q_heads, kv_heads, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        x = self.table.embed(tokens)
        if spec.embed_scale != 1.0:
            x = x * spec.embed_scale
        cos, sin = rotations(positions, self.inv_freq, self.dtype)
        mark("embed")
        for i, layer in enumerate(self.layers):
            h = rms_norm(x, layer.input_norm, spec.norm_eps)
            mark("norms")
            qkv = layer.qkv_proj(h).view(num_tokens, q_heads + 2 * kv_heads, dim)
            mark("qkv_proj")
            qk, v = qkv[:, : q_heads + kv_heads], qkv[:, q_heads + kv_heads :]
            if layer.q_norm is not None and layer.k_norm is not None:
                qk = torch.cat(
                    (
                        rms_norm(qk[:, :q_heads], layer.q_norm, spec.norm_eps),
                        rms_norm(qk[:, q_heads:], layer.k_norm, spec.norm_eps),
                    ),
                    dim=1,
                )
            qk = rotate(qk, cos, sin)
            q, k = qk[:, :q_heads], qk[:, q_heads:]
            attention.store(i, k, v)
            mark("rope_kv_write")
            h = attention.attend(i, q, k, v)
            mark("attention")
            h = layer.o_proj(h)
            mark("o_proj")
            x = x + h
            h = rms_norm(x, layer.post_norm, spec.norm_eps)
            mark("norms")
            h = layer.gate_up_proj(h)
            mark("gate_up_proj")
            gate, up = h.chunk(2, dim=-1)
            h = self.act(gate).mul_(up)
            mark("mlp_act")
            h = layer.down_proj(h)
            mark("down_proj")
            x = x + h
        x = rms_norm(x.index_select(0, logits_index), self.norm, spec.norm_eps)
        mark("norms")
        logits = self.lm_head(x).float()
        if spec.logit_softcap is not None:
            logits = torch.tanh(logits / spec.logit_softcap) * spec.logit_softcap
        mark("lm_head")
        return logits


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension (arXiv:1910.07467)."""
    wide = x.float()
    scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return (wide * scale).to(x.dtype).mul_(weight)


# --- rotary embedding (arXiv:2104.09864) ----------------------------------------------------------


def rotations(positions: Tensor, inv_freq: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and signed sin, each `[tokens, 1, rotary_dim]`; the first half of sin is negated (see `rotate`)."""
    angles = positions.float()[:, None] * inv_freq
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1)[:, None].to(dtype), torch.cat((-sin, sin), -1)[:, None].to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn pairs (i, i + rotary_dim / 2) of `x [tokens, heads, head_dim]`; dimensions past rotary_dim stay."""
    rotary_dim = cos.shape[-1]
    if rotary_dim < x.shape[-1]:
        return torch.cat((rotate(x[..., :rotary_dim], cos, sin), x[..., rotary_dim:]), dim=-1)
    half = rotary_dim // 2
    swapped = torch.cat((x[..., half:], x[..., :half]), dim=-1)
    return torch.addcmul(x * cos, swapped, sin)


def rope_frequencies(spec: ModelSpec, factors: Tensor | None = None) -> Tensor:
    """Angle per position of each pair, `[rotary_dim / 2]`.

    factors: divisors per pair that a GGUF file stores instead of the llama3 parameters.
    """
    rotary_dim = int(spec.head_dim * spec.partial_rotary)
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim
    inv_freq = 1.0 / (spec.rope_theta**exponents)
    scaling = spec.rope_scaling or {}
    kind = rope_kind(scaling)
    if kind == "linear":
        inv_freq = inv_freq / float(scaling["factor"])
    elif kind == "llama3" and factors is None:
        inv_freq = _llama3_frequencies(inv_freq, scaling)
    elif kind not in ("default", "llama3"):
        raise ModelError(f"{spec.name}: rope scaling {kind!r} is not implemented")
    return inv_freq if factors is None else inv_freq / factors.float()


def rope_kind(scaling: Mapping[str, Any] | None) -> str:
    """ "default" for plain rotary embeddings."""
    return str((scaling or {}).get("rope_type") or (scaling or {}).get("type") or "default")


def _llama3_frequencies(inv_freq: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    """Long waves are stretched by `factor`, short ones kept, those between blended (Llama 3.1)."""
    factor, original = float(scaling["factor"]), float(scaling["original_max_position_embeddings"])
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    wavelength = 2 * math.pi / inv_freq
    blend = ((original / wavelength - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - blend) * inv_freq / factor + blend * inv_freq


# --- weights --------------------------------------------------------------------------------------


def expected_tensors(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Names and shapes that a checkpoint of `spec` holds."""
    h, dim = spec.hidden_size, spec.head_dim
    q, kv, ffn = spec.num_heads * dim, spec.num_kv_heads * dim, spec.intermediate_size
    linears = {
        "self_attn.q_proj": (q, h, spec.attention_bias),
        "self_attn.k_proj": (kv, h, spec.attention_bias),
        "self_attn.v_proj": (kv, h, spec.attention_bias),
        "self_attn.o_proj": (h, q, spec.attention_out_bias),
        "mlp.gate_proj": (ffn, h, spec.mlp_bias),
        "mlp.up_proj": (ffn, h, spec.mlp_bias),
        "mlp.down_proj": (h, ffn, spec.mlp_bias),
    }
    vectors = {"input_layernorm": h, "post_attention_layernorm": h}
    if spec.qk_norm:
        vectors |= {"self_attn.q_norm": dim, "self_attn.k_norm": dim}
    expected: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (spec.vocab_size, h),
        "model.norm.weight": (h,),
    }
    if not spec.tie_embeddings:
        expected["lm_head.weight"] = (spec.vocab_size, h)
    for i in range(spec.num_layers):
        prefix = f"model.layers.{i}."
        for name, (rows, columns, bias) in linears.items():
            expected[f"{prefix}{name}.weight"] = (rows, columns)
            if bias:
                expected[f"{prefix}{name}.bias"] = (rows,)
        for name, width in vectors.items():
            expected[f"{prefix}{name}.weight"] = (width,)
    return expected


def _load_layer(spec: ModelSpec, load: Loader, linear: LinearFactory, i: int) -> Layer:
    prefix = f"model.layers.{i}."

    def joined(op: str, *names: str) -> Linear:
        """Linears over the same input as one; a part without bias counts as zeros."""
        weights = [load(f"{prefix}{name}.weight") for name in names]
        biases = [load.optional(f"{prefix}{name}.bias") for name in names]
        bias = None
        if any(b is not None for b in biases):
            bias = fused([b if b is not None else w.new_zeros(len(w)) for b, w in zip(biases, weights, strict=True)])
        return linear(f"{prefix}{op}", fused(weights), bias)

    return Layer(
        input_norm=load(f"{prefix}input_layernorm.weight"),
        qkv_proj=joined("qkv_proj", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        q_norm=load(f"{prefix}self_attn.q_norm.weight") if spec.qk_norm else None,
        k_norm=load(f"{prefix}self_attn.k_norm.weight") if spec.qk_norm else None,
        o_proj=joined("o_proj", "self_attn.o_proj"),
        post_norm=load(f"{prefix}post_attention_layernorm.weight"),
        gate_up_proj=joined("gate_up_proj", "mlp.gate_proj", "mlp.up_proj"),
        down_proj=joined("down_proj", "mlp.down_proj"),
    )
