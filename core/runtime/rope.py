"""Rotary position embedding (arXiv:2104.09864) and its scalings: linear, dynamic NTK, llama3, yarn, longrope.

Two scalings depend on the length of the sequence. A rotation must not: keys stay in the cache while their sequence
grows, and may be shared with another one. So

* dynamic NTK: a token is turned by the base that belongs to its own position. That is what feeding tokens one by one
  gives in transformers, whatever the chunks, neighbours or cached prefixes here. Up to the trained length nothing is
  scaled.
* longrope (arXiv:2402.13753) has two sets of factors, for sequences within the trained length and beyond. One set
  serves all sequences of a loaded model: the short one when `ModelSpec.max_context` (what the engine was told to
  serve, `--max-model-len`) lies within the trained length, else the long one. So sequences on that side equal
  transformers, and nothing switches halfway through a sequence.

Invariants
* Angles are computed in float32 and rounded once to the dtype of the activations.
* Rotary halves: dimension i turns together with i + rotary_dim / 2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from twinfer.core.errors import ModelError
from twinfer.core.runtime.weights import Loader
from twinfer.core.spec import ModelSpec
from twinfer.kernels import ops, torch_ops

Rotation = tuple[Tensor, Tensor]
"""cos and signed sin of a step's tokens, each `[tokens, 1, rotary_dim]`; the first half of sin is negated."""


class Rotary:
    """Rotations by position.

    inv_freq: angle per position of each pair, `[rotary_dim / 2]`.  scale: factor of cos and sin (yarn, longrope).
    """

    def __init__(self, inv_freq: Tensor, dtype: torch.dtype, scale: float = 1.0) -> None:
        self.inv_freq, self.dtype, self.scale = inv_freq, dtype, scale

    def __call__(self, positions: Tensor) -> Rotation:
        """`positions [tokens]` to their rotation."""
        return ops.rotations(positions, self.inv_freq, self.dtype, self.scale)


class DynamicRotary(Rotary):
    """Dynamic NTK: the base grows with the position once it lies beyond `trained` tokens."""

    def __init__(self, inv_freq: Tensor, dtype: torch.dtype, factor: float, trained: int) -> None:
        super().__init__(inv_freq, dtype)
        self.factor, self.trained = factor, trained
        pairs = inv_freq.shape[0]
        # theta * growth ** (dim / (dim - 2)), to the power of -2i / dim
        self.exponents = -torch.arange(pairs, dtype=torch.float32, device=inv_freq.device) / max(pairs - 1, 1)

    def __call__(self, positions: Tensor) -> Rotation:
        return torch_ops.rotations(self.angles(positions.float()[:, None]), self.dtype, self.scale)

    def angles(self, positions: Tensor) -> Tensor:
        """`positions [tokens, 1]` to `[tokens, rotary_dim / 2]`."""
        growth = self.factor * (positions + 1) / self.trained - (self.factor - 1)
        return positions * (self.inv_freq * growth.clamp_min(1.0) ** self.exponents)


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Turn pairs (i, i + rotary_dim / 2) of `x [tokens, heads, head_dim]`; dimensions past rotary_dim stay."""
    cos, sin = rotation
    rotary_dim = cos.shape[-1]
    if rotary_dim < x.shape[-1]:
        return torch.cat((rotate(x[..., :rotary_dim], rotation), x[..., rotary_dim:]), dim=-1)
    half = rotary_dim // 2
    swapped = torch.cat((x[..., half:], x[..., :half]), dim=-1)
    return torch.addcmul(x * cos, swapped, sin)


def rotary_of(spec: ModelSpec, load: Loader) -> Rotary:
    """The rotary embedding of `spec` on the device of `load`, with the factors that a GGUF file holds."""
    scaling = spec.rope_scaling or {}
    inv_freq = rope_frequencies(spec, _stored_factors(spec, load)).to(load.device)
    if rope_kind(scaling) == "dynamic":
        trained = int(scaling["original_max_position_embeddings"])
        return DynamicRotary(inv_freq, load.dtype, float(scaling["factor"]), trained)
    return Rotary(inv_freq, load.dtype, rope_scale(scaling))


def local_rotary_of(spec: ModelSpec, load: Loader) -> Rotary | None:
    """The rotary embedding of sliding layers where they have a base of their own; never scaled (Gemma 3)."""
    if spec.rope_local_theta is None:
        return None
    local = replace(spec, rope_theta=spec.rope_local_theta, rope_scaling=None)
    return Rotary(rope_frequencies(local).to(load.device), load.dtype)


def rope_frequencies(spec: ModelSpec, factors: Tensor | None = None) -> Tensor:
    """Angle per position of each pair, `[rotary_dim / 2]`; of a dynamic scaling, that of short sequences.

    factors: divisors per pair that a GGUF file stores instead of the parameters.
    """
    if spec.mla is not None and spec.mla.rope_frequencies is not None:
        return torch.tensor(spec.mla.rope_frequencies)
    rotary_dim = spec.mla.qk_rope_head_dim if spec.mla is not None else int(spec.head_dim * spec.partial_rotary)
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim
    inv_freq = 1.0 / (spec.rope_theta**exponents)
    scaling = spec.rope_scaling or {}
    kind = rope_kind(scaling)
    if factors is not None:
        return _divided(spec, inv_freq, factors)
    if kind == "linear":
        return inv_freq / float(scaling["factor"])
    if kind == "llama3":
        return _llama3_frequencies(inv_freq, scaling)
    if kind == "yarn":
        return _yarn_frequencies(inv_freq, spec.rope_theta, scaling)
    if kind == "longrope":
        return _divided(spec, inv_freq, torch.tensor(scaling["long_factor" if is_long(spec) else "short_factor"]))
    if kind not in ("default", "dynamic"):
        raise ModelError(f"{spec.name}: rope scaling {kind!r} is not implemented")
    return inv_freq


def rope_kind(scaling: Mapping[str, Any] | None) -> str:
    """ "default" for plain rotary embeddings."""
    return str((scaling or {}).get("rope_type") or (scaling or {}).get("type") or "default")


def is_long(spec: ModelSpec) -> bool:
    """Whether longrope's factors for long sequences serve the context of `spec`; never with another scaling."""
    scaling = spec.rope_scaling or {}
    return rope_kind(scaling) == "longrope" and spec.max_context > int(scaling["original_max_position_embeddings"])


def rope_scale(scaling: Mapping[str, Any]) -> float:
    """What cos and sin are multiplied by: yarn and longrope sharpen attention over stretched contexts."""
    kind = rope_kind(scaling)
    if kind not in ("yarn", "longrope"):
        return 1.0
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    factor = float(scaling["factor"])
    if factor <= 1.0:
        return 1.0
    if kind == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(scaling["original_max_position_embeddings"]))
    strength, all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if strength and all_dim:
        return _mscale(factor, strength) / _mscale(factor, all_dim)
    return _mscale(factor, 1.0)


def _mscale(factor: float, strength: float) -> float:
    return 0.1 * strength * math.log(factor) + 1.0


def _stored_factors(spec: ModelSpec, load: Loader) -> Tensor | None:
    if rope_kind(spec.rope_scaling) == "longrope" and "rope_factors_long.weight" in load:
        return load.source.get(f"rope_factors_{'long' if is_long(spec) else 'short'}.weight")
    return load.source.get("rope_freqs.weight") if "rope_freqs.weight" in load else None


def _divided(spec: ModelSpec, inv_freq: Tensor, factors: Tensor) -> Tensor:
    if factors.shape != inv_freq.shape:
        raise ModelError(
            f"{spec.name}: {len(factors)} rope factors for {len(inv_freq)} pairs of rotated dimensions; "
            "the configuration does not belong to this model"
        )
    return inv_freq / factors.float()


def _llama3_frequencies(inv_freq: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    """Long waves are stretched by `factor`, short ones kept, those between blended (Llama 3.1)."""
    factor, original = float(scaling["factor"]), float(scaling["original_max_position_embeddings"])
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    wavelength = 2 * math.pi / inv_freq
    blend = ((original / wavelength - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - blend) * inv_freq / factor + blend * inv_freq


def _yarn_frequencies(inv_freq: Tensor, theta: float, scaling: Mapping[str, Any]) -> Tensor:
    """Pairs that turn more than `beta_fast` times over the trained length are kept, those that turn less than
    `beta_slow` times stretched by `factor`, those between blended linearly by their index (arXiv:2309.00071)."""
    factor, original = float(scaling["factor"]), float(scaling["original_max_position_embeddings"])
    pairs = inv_freq.shape[0]

    def index_of(turns: float) -> float:
        """The (fractional) pair that turns so often."""
        return pairs * math.log(original / (turns * 2 * math.pi)) / math.log(theta)

    first, last = index_of(scaling.get("beta_fast") or 32), index_of(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    stretched = ((torch.arange(pairs) - first) / max(last - first, 1e-3)).clamp(0.0, 1.0)
    return inv_freq / factor * stretched + inv_freq * (1 - stretched)


__all__ = [
    "DynamicRotary", "Rotary", "Rotation", "is_long", "local_rotary_of", "rope_frequencies", "rope_kind", "rope_scale",
    "rotary_of", "rotate",
]  # fmt: skip
