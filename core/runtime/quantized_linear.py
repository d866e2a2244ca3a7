"""Linears over weights in few bits, for the CPU's native kernels.

    GGUFLinears      the blocks of a GGUF file as they are stored, activations in int8 per block of 32
    BF16Linears      weights rounded to bfloat16, everything computed in float32
    Int8Linears      W8A8

Invariants
* A linear is `x @ weight.T + bias` of the rounded weight, float32 in and out; its result is a new tensor.
* Without the native kernels the same rounded values run as dense float32; the factory's `reason` says so.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from twinfer.core.runtime.linear import Dense, Linear
from twinfer.core.runtime.stored_blocks import Stacked, StoredBlocks, Weight, dense_of
from twinfer.kernels import gemm


class PackedLinears:
    """Base of the factories that pack weights for the native kernels, all into one arena."""

    takes_blocks = False

    def __init__(self) -> None:
        self.missing, self.instructions = gemm.why_not(), gemm.instructions()
        self.arena = gemm.Arena()

    @property
    def reason(self) -> str:
        """How the weights are multiplied here."""
        if self.missing:
            return f"values of {self.what} in float32 products: {self.missing}"
        return f"{self.what} on the native kernels ({self.instructions})"

    what = ""


class GGUFLinears(PackedLinears):
    """Blocks as they are stored, for the types the kernels know; other weights are dense float32."""

    takes_blocks = True

    def __init__(self) -> None:
        super().__init__()
        self.kinds: dict[str, int] = {}  # type -> number of linears

    @property
    def what(self) -> str:  # type: ignore[override]
        kinds = ", ".join(f"{kind} ({count})" for kind, count in sorted(self.kinds.items()))
        return f"the file's blocks: {kinds or 'none'}"

    def __call__(self, name: str, weight: Weight, bias: Tensor | None) -> Linear:
        if isinstance(weight, Stacked):
            start, parts = 0, []
            for part in weight.parts:
                rows = part.shape[0]
                parts.append(self(name, part, None if bias is None else bias[start : start + rows]))
                start += rows
            return Joined(parts)
        if isinstance(weight, StoredBlocks):
            if weight.kind in gemm.BLOCK_FORMATS and not self.missing:
                self.kinds[weight.kind] = self.kinds.get(weight.kind, 0) + 1
                return gemm.pack_blocks(weight.kind, weight.data, self.arena, bias)
            kind = f"{weight.kind} as float32"
        else:
            kind = "dense"
        self.kinds[kind] = self.kinds.get(kind, 0) + 1
        return Dense(dense_of(weight), bias)


class Joined:
    """Linears over one input, side by side."""

    __slots__ = ("parts",)

    def __init__(self, parts: Sequence[Linear]) -> None:
        self.parts = tuple(parts)

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.parts], dim=1)


class BF16Linears(PackedLinears):
    """Weights rounded to bfloat16, float32 activations and sums."""

    what = "bfloat16 weights, float32 sums"

    def __call__(self, name: str, weight: Weight, bias: Tensor | None) -> Linear:
        values = dense_of(weight)
        if self.missing:
            return Dense(values.bfloat16().float(), bias)
        return gemm.pack_bf16(values, self.arena, bias)


class Int8Linears(PackedLinears):
    """W8A8: a scale per output channel, activations with a scale per token. head: the LM head, too."""

    def __init__(self, head: bool = False) -> None:
        super().__init__()
        self.head = head

    @property
    def what(self) -> str:  # type: ignore[override]
        return "int8 weights and activations" + ("" if self.head else " (the head stays float32)")

    def __call__(self, name: str, weight: Weight, bias: Tensor | None) -> Linear:
        values = dense_of(weight)
        if name == "lm_head" and not self.head:
            return Dense(values, bias)
        if self.missing:
            return RoundedInputs(values, bias)
        return gemm.pack_int8(values, self.arena, bias)


class RoundedInputs:
    """W8A8 in float32: what `Int8Linears` computes where there are no native kernels."""

    __slots__ = ("linear",)

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        values, scale = gemm.quantize_int8(weight)
        self.linear = Dense(values.float() * scale[:, None], bias)

    def __call__(self, x: Tensor) -> Tensor:
        values, scale = gemm.quantize_int8(x)
        return self.linear(values.float() * scale[:, None])

    def rows(self, ids: Tensor) -> Tensor:
        """Rows `ids` of the rounded weight."""
        return self.linear.rows(ids)


__all__ = ["BF16Linears", "GGUFLinears", "Int8Linears", "Joined", "PackedLinears", "RoundedInputs"]
