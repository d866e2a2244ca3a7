"""KV memory of one device and the block table of every sequence in it.

    keys, values: per layer [num_blocks * block_size, kv_heads, head_dim]; slot = block * block_size + offset

Invariants
* A table only grows by `append`, changes by `copy` and ends by `clear` or `drop`; nobody else writes it.
* `slots[i]` of a sequence is where position i lives.
* `run` tokens from position 0 lie in consecutive slots; such a prefix can be read as a view.
* Memory starts as zeros and `clear_non_finite` cleans up after a failed row, so that what padding reads and masks is
  always finite (0 * NaN would be NaN).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from twinfer.core.errors import ConfigError
from twinfer.core.plan import Copy


class Table:
    """Blocks of one sequence, spelled out as slots."""

    __slots__ = ("_block_size", "blocks", "run", "slots")

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self.clear()

    @property
    def capacity(self) -> int:
        """Tokens that fit."""
        return len(self.blocks) * self._block_size

    def clear(self) -> None:
        self.blocks: list[int] = []
        self.slots: NDArray[np.int64] = np.empty(0, dtype=np.int64)
        self.run = 0

    def append(self, blocks: Sequence[int]) -> None:
        new = np.asarray(blocks, dtype=np.int64)
        self.slots = np.concatenate((self.slots, self._slots_of(new)))
        self.blocks.extend(int(b) for b in blocks)
        self._find_run()

    def replace(self, index: int, block: int) -> None:
        size = self._block_size
        self.blocks[index] = block
        self.slots = self.slots.copy()  # plans of earlier steps may still hold views
        self.slots[index * size : (index + 1) * size] = self._slots_of(np.asarray([block], dtype=np.int64))
        self._find_run()

    def _slots_of(self, blocks: NDArray[np.int64]) -> NDArray[np.int64]:
        return (blocks[:, None] * self._block_size + np.arange(self._block_size, dtype=np.int64)).reshape(-1)

    def _find_run(self) -> None:
        breaks = np.flatnonzero(np.diff(np.asarray(self.blocks, dtype=np.int64)) != 1)
        self.run = (int(breaks[0]) + 1 if len(breaks) else len(self.blocks)) * self._block_size


class KVStorage:
    """KV tensors of all layers.

    kv_heads and head_dim are those of the stored vectors; dtype is the storage format.
    """

    def __init__(
        self, num_layers: int, num_blocks: int, block_size: int, kv_heads: int, head_dim: int,
        dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu",
    ) -> None:  # fmt: skip
        self.num_blocks, self.block_size = num_blocks, block_size
        self.device = torch.device(device)
        shape = (num_layers, 2, num_blocks, block_size, kv_heads, head_dim)
        try:
            self._all = _zeros(shape, dtype, self.device)
        except (MemoryError, torch.OutOfMemoryError) as error:
            size = math.prod(shape) * dtype.itemsize / 2**30
            raise ConfigError(
                "--num-kv-blocks", num_blocks, f"{size:.1f} GiB of KV memory cannot be had on {self.device}", "lower it"
            ) from error
        flat = self._all.flatten(2, 3)
        self.keys: list[Tensor] = [flat[layer, 0] for layer in range(num_layers)]
        self.values: list[Tensor] = [flat[layer, 1] for layer in range(num_layers)]

    @property
    def nbytes(self) -> int:
        return self._all.nbytes

    def new_table(self) -> Table:
        return Table(self.block_size)

    def copy_blocks(self, copies: Iterable[Copy]) -> None:
        """Copy whole blocks of all layers; every source is read before any target is written."""
        pairs = [(c.source, c.target) for c in copies]
        if not pairs:
            return
        source = torch.tensor([s for s, _ in pairs], device=self.device)
        target = torch.tensor([t for _, t in pairs], device=self.device)
        self._all.index_copy_(2, target, self._all.index_select(2, source))

    def clear_non_finite(self, table: Table) -> None:
        """Zero the NaN and infinite values of one sequence; its other values may be shared and stay."""
        slots = torch.from_numpy(table.slots).to(self.device)
        flat = self._all.flatten(2, 3)
        flat.index_copy_(2, slots, flat.index_select(2, slots).nan_to_num(0.0, 0.0, 0.0))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy's zeros are pages that cost nothing until they are first written; torch.zeros writes them all
    size = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(size, dtype=np.uint8)).view(dtype).view(shape)
