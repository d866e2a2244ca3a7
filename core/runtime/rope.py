"""Rotary position embedding (arXiv:2104.09864) and its scalings.

Invariants
* Angles are computed in float32 and rounded once to the dtype of the activations.
* Rotary halves: dimension i turns together with i + rotary_dim / 2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from twinfer.core.errors import ModelError
from twinfer.core.runtime.weights import Loader
from twinfer.core.spec import ModelSpec

Rotation = tuple[Tensor, Tensor]
"""cos and signed sin of a step's tokens, each `[tokens, 1, rotary_dim]`; the first half of sin is negated."""


class Rotary:
    """Rotations by position.  inv_freq: angle per position of each pair, `[rotary_dim / 2]`."""

    def __init__(self, inv_freq: Tensor, dtype: torch.dtype) -> None:
        self.inv_freq, self.dtype = inv_freq, dtype

    def __call__(self, positions: Tensor) -> Rotation:
        """`positions [tokens]` to their rotation."""
        angles = positions.float()[:, None] * self.inv_freq
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((cos, cos), -1)[:, None].to(self.dtype), torch.cat((-sin, sin), -1)[:, None].to(self.dtype)


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
    """The rotary embedding of `spec` on the device of `load`."""
    factors = load.source.get("rope_freqs.weight") if "rope_freqs.weight" in load else None
    return Rotary(rope_frequencies(spec, factors).to(load.device), load.dtype)


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


__all__ = ["Rotary", "Rotation", "rope_frequencies", "rope_kind", "rotary_of", "rotate"]
