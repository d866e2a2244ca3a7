"""The ops of a decoder between its matrix products and attention, in one place so that each can have a faster twin.

    x [tokens, hidden]    weights [hidden]

float32 on the CPU runs on the native kernels (`native/pointwise.cpp`) where they could be built. All else, and every
layout they do not take, runs on the torch twin of the same name in `torch_ops.py`, which is also their reference.

Invariants
* A row's result depends on that row alone, not on the rows beside it or on the number of threads.
* Results are new tensors; the only arguments written are the `residual` of `add_rms_norm` and what `scale` and
  `softcap` change.
"""

from __future__ import annotations

from ctypes import addressof, c_float, c_int, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from twinfer.kernels import native, torch_ops
from twinfer.kernels.torch_ops import ACTIVATIONS

_ACT_CODES = {"silu": 0, "gelu": 1, "gelu_pytorch_tanh": 2}  # enum Activation in pointwise.cpp

_P, _N, _F, _I = c_void_p, c_int64, c_float, c_int
_SIGNATURES = {
    "tw_rms_norm": (_P, _P, _P, _N, _N, _N, _F, _F, _I),
    "tw_add_rms_norm": (_P, _P, _P, _P, _N, _N, _F, _F, _I),
    "tw_gated": (_P, _P, _N, _N, _N, _I, _I),
    "tw_largest": (_P, _P, _P, _N, _N, _N, _I),
    "tw_scale": (_P, _N, _F, _I),
    "tw_softcap": (_P, _N, _F, _I),
    "tw_take_rows": (_P, _P, _P, _N, _N, _N, _N, _I),
    "tw_rotations": (_P, _P, _P, _P, _N, _N, _F, _I),
}


def _function(name: str, x: Tensor) -> Any:
    """The native function for `x`, None where there is none."""
    if x.dtype is torch.float32 and x.is_cpu and (library := native.load()) is not None:
        return library.function(name, _SIGNATURES[name])
    return None


def rms_norm(x: Tensor, weight: Tensor, eps: float, plus_one: bool = False) -> Tensor:
    """Root-mean-square norm over the last dimension (arXiv:1910.07467), in float32, rounded once.

    plus_one: multiply by 1 + weight before rounding (Gemma), else by weight after it (Llama).
    """
    run = _function("tw_rms_norm", x)
    if run is None or x.dim() != 2 or x.stride(1) != 1 or not _plain(weight):
        return torch_ops.rms_norm(x, weight, eps, plus_one)
    rows, width = x.shape
    out = native.empty(rows, width)
    run(
        x.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, width, x.stride(0), eps, 1.0 if plus_one else 0.0,
        torch.get_num_threads(),
    )  # fmt: skip
    return out


def add_rms_norm(residual: Tensor, delta: Tensor, weight: Tensor, eps: float, plus_one: bool = False) -> Tensor:
    """The norm of `residual + delta`; `residual` becomes that sum in place."""
    run = _function("tw_add_rms_norm", residual)
    if (
        run is None or residual.dim() != 2 or delta.shape != residual.shape or delta.dtype is not torch.float32
        or not (residual.is_contiguous() and delta.is_contiguous() and _plain(weight))
    ):  # fmt: skip
        return torch_ops.add_rms_norm(residual, delta, weight, eps, plus_one)
    rows, width = residual.shape
    out = native.empty(rows, width)
    run(
        residual.data_ptr(), delta.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, width, eps,
        1.0 if plus_one else 0.0, torch.get_num_threads(),
    )  # fmt: skip
    return out


def gated(gate_up: Tensor, act: str) -> Tensor:
    """`act(gate) * up` of `gate_up [tokens, 2 * width]` (gate first): `[tokens, width]` (arXiv:2002.05202)."""
    run = _function("tw_gated", gate_up)
    code = _ACT_CODES.get(act)
    if run is None or code is None or gate_up.dim() != 2 or gate_up.stride(1) != 1 or gate_up.shape[1] % 2:
        return torch_ops.gated(gate_up, act)
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = native.empty(rows, width)
    run(gate_up.data_ptr(), out.data_ptr(), rows, width, gate_up.stride(0), code, torch.get_num_threads())
    return out


def scale(x: Tensor, factor: float) -> Tensor:
    """`x *= factor`."""
    run = _function("tw_scale", x)
    if run is None or not x.is_contiguous():
        return x.mul_(factor)
    run(x.data_ptr(), x.numel(), factor, torch.get_num_threads())
    return x


def softcap(x: Tensor, cap: float) -> Tensor:
    """`x = cap * tanh(x / cap)`, in place (arXiv:2408.00118)."""
    run = _function("tw_softcap", x)
    if run is None or not x.is_contiguous():
        return x.div_(cap).tanh_().mul_(cap)
    run(x.data_ptr(), x.numel(), cap, torch.get_num_threads())
    return x


def take_rows(table: Tensor, ids: Tensor) -> Tensor:
    """Rows `ids [count]` (int64, all within it) of `table [rows, width]` of any layout, as a new `[count, width]`."""
    run = _function("tw_take_rows", table)
    if run is None or not ids.is_contiguous():
        return torch_ops.take_rows(table, ids)
    count, width = len(ids), table.shape[1]
    out = native.empty(count, width)
    run(
        table.data_ptr(), ids.data_ptr(), out.data_ptr(), count, width, table.stride(0), table.stride(1),
        torch.get_num_threads(),
    )  # fmt: skip
    return out


def largest(logits: Tensor) -> tuple[list[int], list[float]]:
    """(index, value) of the largest of each row of `logits [rows, width]`; the first of equals, NaN before all."""
    run = _function("tw_largest", logits)
    rows, width = logits.shape
    if run is None or logits.stride(1) != 1 or not width:
        return torch_ops.largest(logits)
    ids, tops = (c_int64 * rows)(), (c_float * rows)()
    run(logits.data_ptr(), addressof(ids), addressof(tops), rows, width, logits.stride(0), torch.get_num_threads())
    return list(ids), list(tops)


def rotations(positions: Tensor, frequencies: Tensor, dtype: torch.dtype, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """cos and signed sin of `positions [tokens]` (int64) times `frequencies [pairs]`, each `[tokens, 1, 2 * pairs]`.

    The first half of sin is negated; both are multiplied by `scale`.
    """
    run = _function("tw_rotations", frequencies)
    if run is None or dtype is not torch.float32 or not (positions.is_contiguous() and frequencies.is_contiguous()):
        return torch_ops.rotations(positions.float()[:, None] * frequencies, dtype, scale)
    tokens, pairs = len(positions), len(frequencies)
    cos, sin = native.empty(tokens, 2 * pairs), native.empty(tokens, 2 * pairs)
    run(
        positions.data_ptr(), frequencies.data_ptr(), cos.data_ptr(), sin.data_ptr(), tokens, pairs, scale,
        torch.get_num_threads(),
    )  # fmt: skip
    return cos[:, None], sin[:, None]


def _plain(weight: Tensor) -> bool:
    return weight.dtype is torch.float32 and weight.is_contiguous()


__all__ = ["ACTIVATIONS", "add_rms_norm", "gated", "largest", "rms_norm", "rotations", "scale", "softcap", "take_rows"]
