"""Quantized blocks of a checkpoint on their way from the file to a linear, before anything turns them into floats.

    StoredBlocks   a weight `[out, in]` as blocks along `in`; cut and joined like the tensor it stands for
    Stacked        weights of one input whose blocks are of different types

Invariants
* Rows are whole outputs, so they may be cut, reordered and joined; columns may be cut at whole blocks only.
* `dense()` gives the values the blocks stand for, exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from twinfer.core.errors import ConfigError
from twinfer.core.gguf_header import TYPES

VALUES_PER_BLOCK = {name: values for name, values, _ in TYPES.values()}


@dataclass(frozen=True, slots=True)
class StoredBlocks:
    """kind: GGUF's name of the type.  data: uint8 `[out, blocks, bytes of a block]`."""

    kind: str
    data: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """`(out, in)`."""
        return self.data.shape[0], self.data.shape[1] * VALUES_PER_BLOCK[self.kind]

    def narrow(self, dim: int, start: int, length: int) -> StoredBlocks:
        """As `Tensor.narrow`; ConfigError for columns that would cut a block."""
        if dim == 0:
            return StoredBlocks(self.kind, self.data.narrow(0, start, length))
        values = VALUES_PER_BLOCK[self.kind]
        if start % values or length % values:
            raise ConfigError(
                "--tp", f"columns {start} to {start + length}", f"cut a {self.kind} block of {values} weights",
                "use fewer ranks, or leave --quant out",
            )  # fmt: skip
        return StoredBlocks(self.kind, self.data.narrow(1, start // values, length // values))

    def index_select(self, dim: int, index: Tensor) -> StoredBlocks:
        """As `Tensor.index_select`, of rows only."""
        assert dim == 0
        return StoredBlocks(self.kind, self.data.index_select(0, index))

    def padded(self, length: int) -> StoredBlocks:
        """With rows of zeros up to `length`: in every type a block of zero bytes stands for zeros."""
        zeros = self.data.new_zeros((length - len(self.data), *self.data.shape[1:]))
        return StoredBlocks(self.kind, torch.cat([self.data, zeros]))

    def dense(self) -> Tensor:
        """`[out, in]` float32."""
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        rows, blocks, width = self.data.shape
        values = dequantize(self.data.reshape(rows, blocks * width).numpy(), GGMLQuantizationType[self.kind])
        return torch.from_numpy(values).float()


@dataclass(frozen=True, slots=True)
class Stacked:
    """Weights of one input, one below the other."""

    parts: tuple[StoredBlocks | Tensor, ...]

    def dense(self) -> Tensor:
        """`[sum of out, in]` float32."""
        return torch.cat([dense_of(part).float() for part in self.parts])


Weight: TypeAlias = Tensor | StoredBlocks | Stacked
"""A weight `[out, in]` as a `LinearFactory` gets it; blocks only when the factory takes them (`takes_blocks`)."""


def dense_of(weight: Weight) -> Tensor:
    """`weight` as a tensor."""
    return weight if isinstance(weight, Tensor) else weight.dense()


def stacked(parts: Sequence[Tensor | StoredBlocks]) -> Weight:
    """Weights of linears with one input as one weight."""
    if len(parts) == 1:
        return parts[0]
    tensors = [part for part in parts if isinstance(part, Tensor)]
    if len(tensors) == len(parts):
        return torch.cat(tensors)
    blocks = [part for part in parts if isinstance(part, StoredBlocks)]
    if len(blocks) == len(parts) and len({part.kind for part in blocks}) == 1:
        return StoredBlocks(blocks[0].kind, torch.cat([part.data for part in blocks]))
    return Stacked(tuple(parts))


__all__ = ["VALUES_PER_BLOCK", "Stacked", "StoredBlocks", "Weight", "dense_of", "stacked"]
