"""The pointwise ops of a decoder layer in plain torch: any dtype, device and layout, and the reference of `ops`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": _gelu_tanh,
}
"""By the names of Hugging Face's configurations."""


def rms_norm(x: Tensor, weight: Tensor, eps: float, plus_one: bool = False) -> Tensor:
    """Root-mean-square norm over the last dimension (arXiv:1910.07467), in float32, rounded once.

    plus_one: multiply by 1 + weight before rounding (Gemma), else by weight after it (Llama).
    """
    wide = x.float()
    scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    if plus_one:
        return (wide * scale).mul_(1.0 + weight.float()).to(x.dtype)
    return (wide * scale).to(x.dtype).mul_(weight)


def add_rms_norm(residual: Tensor, delta: Tensor, weight: Tensor, eps: float, plus_one: bool = False) -> Tensor:
    """The norm of `residual + delta`; `residual` becomes that sum in place."""
    residual.add_(delta)
    return rms_norm(residual, weight, eps, plus_one)


def gated(gate_up: Tensor, act: str) -> Tensor:
    """`act(gate) * up` of `gate_up [tokens, 2 * width]` (gate first): `[tokens, width]` (arXiv:2002.05202)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.mul(ACTIVATIONS[act](gate), up)


def take_rows(table: Tensor, ids: Tensor) -> Tensor:
    """Rows `ids [count]` of `table [rows, width]`, `[count, width]`."""
    if table.stride(0) == 1:  # stored transposed
        return table.t().index_select(1, ids).t().contiguous()
    return table.index_select(0, ids)


def rotations(angles: Tensor, dtype: torch.dtype, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """cos and signed sin of `angles [tokens, pairs]`, each `[tokens, 1, 2 * pairs]`; the first half of sin is negated."""
    cos, sin = angles.cos(), angles.sin()
    if scale != 1.0:
        cos, sin = cos * scale, sin * scale
    return torch.cat((cos, cos), -1)[:, None].to(dtype), torch.cat((-sin, sin), -1)[:, None].to(dtype)


def largest(logits: Tensor) -> tuple[list[int], list[float]]:
    """(index, value) of the largest of each row of `logits [rows, width]`; the first of equals, NaN before all."""
    best = logits.argmax(dim=-1)
    return best.tolist(), logits.gather(1, best[:, None])[:, 0].tolist()
