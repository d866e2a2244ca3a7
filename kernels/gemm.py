"""Matrix products with packed weights, `x [m, k] @ w [n, k].T + bias`, and the torch twins that say what they compute.

    blocks   weights of a GGUF file: 32 (or 16) share a scale and perhaps a minimum. Q4_0, Q4_1 and Q8_0 as they are
             stored, Q5_0, Q5_1, Q4_K, Q5_K and Q6_K with what they share written out in float32. Activations are
             rounded to int8 with a scale per row and block of 32.
    bf16     weights rounded to bfloat16, everything computed in float32.
    int8     W8A8: a scale per output channel, activations in int8 with a scale per row.

Invariants
* A `Packed` takes float32 rows of any count on the CPU and allocates nothing but its result.
* A row's result depends on that row alone, not on the rows beside it or on the number of threads.
* Both sets of instructions (`instructions`) give the same numbers; how weights are laid out differs.
* Packed weights hold the values they were made of exactly; `rows` gives them back.
* Without native kernels or their instructions `why_not()` has the reason and nothing can be packed.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections.abc import Mapping
from ctypes import c_int, c_int64, c_void_p

import torch
from torch import Tensor

from twinfer.core.gguf_header import TYPES
from twinfer.kernels import native

BLOCK = 32
BLOCK_FORMATS: Mapping[str, int] = {
    "Q4_0": 0, "Q4_1": 1, "Q8_0": 2, "Q4_K": 5, "Q5_0": 6, "Q5_1": 7, "Q5_K": 8, "Q6_K": 9,
}  # fmt: skip
"""GGUF type to the number of the format in gemm_tiles.h."""

_BLOCKS_OF_FILE = {name: (values, nbytes) for name, values, nbytes in TYPES.values()}
_BF16, _INT8 = 3, 4
_CHUNK = 1 << 25  # bytes of one mapping of the arena
_LINE = 64

_INSTRUCTIONS = ("", "AVX2", "AVX-512 VNNI")  # by the number that the library answers

_P, _N, _I = c_void_p, c_int64, c_int
_SIGNATURES = {
    "tw_gemm": ((_P, _P, _N, _N, _P, _N, _I), None),
    "tw_gemm_instructions": ((), c_int),
    "tw_blocks_bytes": ((_N, _N, _N), c_int64),
    "tw_blocks_pack": ((_N, _P, _N, _N, _P, _I), None),
    "tw_blocks_rows": ((_N, _P, _N, _P, _N, _P), None),
    "tw_bf16_bytes": ((_N, _N), c_int64),
    "tw_bf16_pack": ((_P, _N, _N, _P, _I), None),
    "tw_bf16_rows": ((_P, _N, _P, _N, _P), None),
    "tw_int8_bytes": ((_N, _N), c_int64),
    "tw_int8_pack": ((_P, _N, _N, _P, _I), None),
    "tw_int8_rows": ((_P, _P, _N, _P, _N, _P), None),
}


def instructions() -> str:
    """What the packed products are built on here: "AVX-512 VNNI", "AVX2", or empty where there are none (`why_not`)."""
    return "" if native.load() is None else _INSTRUCTIONS[_function("tw_gemm_instructions")()]


def why_not() -> str:
    """Why there are no packed products here, in words; empty when there are."""
    if native.load() is None:
        return native.why_not()
    if not instructions():
        return "this CPU has neither AVX-512 VNNI nor AVX2 with FMA and F16C, which the packed matrix products need"
    return ""


def _function(name: str) -> native.Function:
    library = native.load()
    assert library is not None, native.why_not()
    return library.function(name, *_SIGNATURES[name])


_mappings: dict[int, weakref.ref[mmap.mmap]] = {}


def in_arena(tensor: Tensor) -> bool:
    """True when `tensor` lies in an `Arena`: its storage then is a mapping that it shares with other weights."""
    mapping = _mappings.get(tensor.untyped_storage().data_ptr())
    return mapping is not None and mapping() is not None


class Arena:
    """Zeroed memory for packed weights: a few large mappings, in huge pages where the system gives them.

    A step streams all weights once, and a page that is looked up every 2 MiB instead of every 4 KiB makes that stream
    about a tenth faster here.
    """

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int) -> Tensor:
        """`[num_bytes]` uint8 that starts on a cache line."""
        size = -(-num_bytes // _LINE) * _LINE
        if size > len(self._free):
            mapping = _mapping(max(size, _CHUNK))
            self._free = torch.frombuffer(mapping, dtype=torch.uint8)  # keeps the mapping alive
            _mappings[self._free.data_ptr()] = weakref.ref(mapping)
        taken, self._free = self._free[:num_bytes], self._free[size:]
        return taken


def _mapping(size: int) -> mmap.mmap:
    """Zeroed memory of this process alone; a shared mapping, the default of `mmap`, gets no huge pages."""
    if not hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, size)
    mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


class _Weight(ctypes.Structure):
    """`tiles::Weight` of gemm_tiles.h."""

    _fields_ = [
        ("format", c_int64), ("n", c_int64), ("k", c_int64), ("data", c_void_p), ("scale", c_void_p),
        ("bias", c_void_p),
    ]  # fmt: skip


class Packed:
    """A weight `[n, k]` in the layout of the native kernels."""

    __slots__ = ("_bias", "_data", "_gemm", "_pointer", "_scale", "_weight", "k", "n", "nbytes")

    def __init__(
        self, code: int, n: int, k: int, data: Tensor, scale: Tensor | None = None, bias: Tensor | None = None
    ) -> None:
        self.n, self.k = n, k
        self._data, self._scale = data, scale
        self._bias = None if bias is None else bias.detach().float().contiguous()
        self.nbytes = data.numel() + (0 if scale is None else 4 * scale.numel())
        self._weight = _Weight(
            code, n, k, data.data_ptr(), 0 if scale is None else scale.data_ptr(),
            0 if self._bias is None else self._bias.data_ptr(),
        )  # fmt: skip
        self._pointer = ctypes.addressof(self._weight)
        self._gemm = _function("tw_gemm")

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """`x [m, k]` to `[m, n]` float32 (a new tensor, or `out` with dense rows)."""
        m, k = x.shape
        if k != self.k:
            raise ValueError(f"rows of {k} values for a weight of {self.k} inputs")
        if x.dtype is not torch.float32 or not (x.is_contiguous() or x.stride(1) == 1):
            x = x.float().contiguous()
        row = k if x.is_contiguous() else x.stride(0)
        if out is None:
            out, out_row = native.empty(m, self.n), self.n
        else:
            out_row = out.stride(0)
        self._gemm(self._pointer, x.data_ptr(), row, m, out.data_ptr(), out_row, torch.get_num_threads())
        return out

    def rows(self, ids: Tensor) -> Tensor:
        """Rows `ids [count]` of the weight, `[count, k]` float32."""
        weight, ids = self._weight, ids.to(torch.int64).contiguous()
        out = native.empty(len(ids), weight.k)
        if weight.format == _BF16:
            _function("tw_bf16_rows")(weight.data, weight.k, ids.data_ptr(), len(ids), out.data_ptr())
        elif weight.format == _INT8:
            _function("tw_int8_rows")(
                weight.data, weight.scale, weight.k, ids.data_ptr(), len(ids), out.data_ptr()
            )  # fmt: skip
        else:
            _function("tw_blocks_rows")(weight.format, weight.data, weight.k, ids.data_ptr(), len(ids), out.data_ptr())
        return out


# --- packing --------------------------------------------------------------------------------------


def pack_blocks(kind: str, data: Tensor, arena: Arena, bias: Tensor | None = None) -> Packed:
    """Blocks `data [n, blocks, bytes]` (uint8, as in a GGUF file) of type `kind`, none cut."""
    code, (values, num_bytes) = BLOCK_FORMATS[kind], _BLOCKS_OF_FILE[kind]
    n, blocks, width = data.shape
    if width != num_bytes or data.dtype is not torch.uint8:
        raise ValueError(f"blocks of {kind} have {num_bytes} bytes, these {width} of {data.dtype}")
    data, k = data.contiguous(), blocks * values
    packed = arena.take(_function("tw_blocks_bytes")(code, n, k))
    _function("tw_blocks_pack")(code, data.data_ptr(), n, k, packed.data_ptr(), torch.get_num_threads())
    return Packed(code, n, k, packed, bias=bias)


def pack_bf16(weight: Tensor, arena: Arena, bias: Tensor | None = None) -> Packed:
    """`weight [n, k]`, rounded to bfloat16."""
    n, k = weight.shape
    rounded = weight.to(torch.bfloat16).contiguous()
    packed = arena.take(_function("tw_bf16_bytes")(n, k))
    _function("tw_bf16_pack")(rounded.data_ptr(), n, k, packed.data_ptr(), torch.get_num_threads())
    return Packed(_BF16, n, k, packed, bias=bias)


def pack_int8(weight: Tensor, arena: Arena, bias: Tensor | None = None) -> Packed:
    """`weight [n, k]`, rounded to int8 by `quantize_int8`."""
    n, k = weight.shape
    values, scale = quantize_int8(weight)
    packed = arena.take(_function("tw_int8_bytes")(n, k))
    _function("tw_int8_pack")(values.data_ptr(), n, k, packed.data_ptr(), torch.get_num_threads())
    return Packed(_INT8, n, k, packed, scale, bias)


# --- torch twins ----------------------------------------------------------------------------------


def quantize_int8(rows: Tensor) -> tuple[Tensor, Tensor]:
    """`rows [..., width]` as int8 and a float32 scale per row `[...]`: largest magnitude / 127, rounded half to even."""
    most = rows.float().abs().amax(-1)
    inverse = torch.where(most > 0, 127.0 / most, torch.zeros_like(most))
    return (rows.float() * inverse[..., None]).round_().to(torch.int8).contiguous(), most / 127.0


def blocks_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """What `pack_blocks` computes for dequantized `weight [n, k]`, up to the rounding of float32 sums."""
    values, scale = quantize_int8(x.view(*x.shape[:-1], -1, BLOCK))
    rounded = (values.to(x.dtype) * scale[..., None].to(x.dtype)).view(x.shape)
    return torch.nn.functional.linear(rounded, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def int8_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """What `pack_int8` computes for `weight [n, k]`, up to the rounding of float32 products."""
    values, scale = quantize_int8(x)
    weights, weight_scale = quantize_int8(weight)
    product = (values.to(x.dtype) * scale[..., None].to(x.dtype)) @ (weights.to(x.dtype) * weight_scale[:, None]).T
    return product if bias is None else product + bias


def bf16_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """What `pack_bf16` computes, up to the rounding of float32 sums."""
    rounded = weight.to(torch.bfloat16).to(x.dtype)
    return torch.nn.functional.linear(x, rounded, None if bias is None else bias.to(x.dtype))


__all__ = [
    "BLOCK", "BLOCK_FORMATS", "Arena", "Packed", "bf16_reference", "blocks_reference", "instructions", "int8_reference",
    "pack_bf16", "pack_blocks", "pack_int8", "quantize_int8", "why_not",
]  # fmt: skip
