"""Attention over a paged cache and the rotary KV write, on the native kernels (`native/attention.cpp`).

    q [tokens, heads, dim]    keys [slots, kv_heads, dim]    values [slots, kv_heads, value_dim]

Computed in float32 over caches of float32 or bfloat16 on the CPU; callers ask `serves` first and have a torch path for
all else.

Invariants
* A row's result depends on that row alone: not on its neighbours, not on the number of threads.
* Addresses of a step's slots are taken once; the arrays must stay alive and in place while the step runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from ctypes import Structure, addressof, c_float, c_int, c_int64, c_void_p

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from twinfer.kernels import native

LANES = 16
CACHE_DTYPES = (torch.float32, torch.bfloat16)


class _Step(Structure):
    """struct tw_attention."""

    _fields_ = (
        ("rows", c_void_p), ("num_rows", c_int64), ("heads", c_int64), ("kv_heads", c_int64), ("dim", c_int64),
        ("value_dim", c_int64), ("q_stride", c_int64), ("key_stride", c_int64), ("key_head", c_int64),
        ("value_stride", c_int64), ("value_head", c_int64), ("window", c_int64), ("scale", c_float),
        ("softcap", c_float), ("threads", c_int64), ("bf16", c_int64),
    )  # fmt: skip


_ATTEND = (c_void_p, c_void_p, c_void_p, c_void_p, c_void_p)
_WRITE = (c_void_p,) * 6 + (c_int64,) * 7 + (c_void_p, c_void_p, c_float, c_float, c_int, c_int)


def serves(keys: Tensor, values: Tensor) -> bool:
    """Whether the native kernels can attend over this cache."""
    return (
        keys.dtype in CACHE_DTYPES and values.dtype is keys.dtype and keys.is_cpu
        and keys.shape[-1] % LANES == 0 and values.shape[-1] % LANES == 0
        and keys.stride(-1) == 1 and values.stride(-1) == 1 and native.load() is not None
    )  # fmt: skip


class PagedAttention:
    """Causal attention of one step's rows.

    rows: (first packed token, tokens, position of the first, slots of the sequence by position) of each.
    """

    def __init__(
        self, rows: Iterable[tuple[int, int, int, NDArray[np.int64]]], scale: float, softcap: float | None = None
    ) -> None:
        library = native.load()
        assert library is not None
        self._attend = library.function("tw_attend", _ATTEND)
        self._scale, self._softcap = scale, softcap or 0.0
        self._steps: dict[int | None, _Step] = {}
        self._rows = np.empty((0, 4), dtype=np.int64)
        self.refill(rows)

    def refill(self, rows: Iterable[tuple[int, int, int, NDArray[np.int64]]]) -> None:
        """Other rows in place of these, as many as before: a recorded program finds them where they were."""
        found = list(rows)
        self._slots = [slots for *_, slots in found]  # kept alive
        table = np.array(
            [(token, n, position, slots.__array_interface__["data"][0]) for token, n, position, slots in found],
            dtype=np.int64,
        )
        if len(self._rows):
            self._rows[:] = table
        else:
            self._rows = table

    def __call__(self, q: Tensor, keys: Tensor, values: Tensor, window: int | None = None) -> Tensor:
        """`[tokens, heads * value_dim]`. The strides of keys and values are those of the first call with `window`."""
        step = self._steps.get(window)
        if step is None:
            step = self._steps[window] = self._prepare(q, keys, values, window)
        if q.dtype is not torch.float32:
            return self(q.float(), keys, values, window).to(q.dtype)
        if q.stride(0) != step.q_stride or q.stride(1) != step.dim or q.stride(2) != 1:
            q = q.contiguous()
            step.q_stride = q.stride(0)
        out = native.empty(q.shape[0], step.heads * step.value_dim)
        self._attend(addressof(step), q.data_ptr(), keys.data_ptr(), values.data_ptr(), out.data_ptr())
        return out

    def _prepare(self, q: Tensor, keys: Tensor, values: Tensor, window: int | None) -> _Step:
        _, heads, dim = q.shape
        return _Step(
            self._rows.ctypes.data, len(self._rows), heads, keys.shape[1], dim, values.shape[2], q.stride(0),
            keys.stride(0), keys.stride(1), values.stride(0), values.stride(1), window or 0, self._scale,
            self._softcap, torch.get_num_threads(), keys.dtype is torch.bfloat16,
        )  # fmt: skip


def rope_kv_write(
    qkv: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, keys: Tensor, values: Tensor, q_norm: Tensor | None = None,
    k_norm: Tensor | None = None, eps: float = 0.0, plus_one: bool = False,
) -> bool:  # fmt: skip
    """Norm (where there are weights `[dim]`) and turn q and k in place, then write k and v to their slots.

    qkv [tokens, heads + 2 * kv_heads, dim];  cos, sin [tokens, 1, rotary_dim], sin signed;  slots int64 [tokens].
    False, with nothing done, for layouts the kernel does not take.
    """
    tokens, total, dim = qkv.shape
    kv_heads = keys.shape[1]
    if not (
        qkv.dtype is torch.float32 and cos.dtype is torch.float32 and qkv.is_contiguous() and cos.is_contiguous()
        and sin.is_contiguous() and slots.is_contiguous() and keys.shape[2] == dim == values.shape[2]
        and keys.stride(1) == dim == values.stride(1) and serves(keys, values)
        and (q_norm is None or (q_norm.dtype is torch.float32 and q_norm.is_contiguous()))
        and (k_norm is None or (k_norm.dtype is torch.float32 and k_norm.is_contiguous()))
    ):  # fmt: skip
        return False
    library = native.load()
    assert library is not None
    library.function("tw_rope_kv_write", _WRITE)(
        qkv.data_ptr(), cos.data_ptr(), sin.data_ptr(), slots.data_ptr(), keys.data_ptr(), values.data_ptr(), tokens,
        total - 2 * kv_heads, kv_heads, dim, cos.shape[-1], keys.stride(0), values.stride(0),
        None if q_norm is None else q_norm.data_ptr(), None if k_norm is None else k_norm.data_ptr(), eps,
        1.0 if plus_one else 0.0, keys.dtype is torch.bfloat16, torch.get_num_threads(),
    )  # fmt: skip
    return True


__all__ = ["LANES", "PagedAttention", "rope_kv_write", "serves"]
