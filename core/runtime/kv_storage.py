"""KV memory of one device and the block table of every sequence in it.

    keys, values: per layer [num_blocks * block_size, kv_heads, width]; slot = block * block_size + offset

Layers of different cache groups (`core/cache_groups.py`) lie in the same memory: layer i of every group is the same
tensor, and each group's tables name blocks of their own.

Invariants
* A table only grows by `append`, changes by `copy` and ends by `clear` or `drop`; nobody else writes it.
* `slots[i]` of a sequence is where position i lives, while it can still be read: what has left the window of its group
  may be negative or belong to others, and is never asked for.
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

from twinfer.core.cache_groups import CacheGroup, layers_per_page, one_group
from twinfer.core.errors import ConfigError
from twinfer.core.plan import Copy
from twinfer.core.spec import ModelSpec


class Table:
    """Blocks of one sequence, spelled out as slots; of the first cache group, and `others` of the further ones."""

    __slots__ = ("_block_size", "blocks", "others", "run", "slots")

    def __init__(self, block_size: int, num_groups: int = 1) -> None:
        self._block_size = block_size
        self.others = tuple(Table(block_size) for _ in range(num_groups - 1))
        self.clear()

    def group(self, number: int) -> Table:
        """The table of one cache group."""
        return self.others[number - 1] if number else self

    @property
    def capacity(self) -> int:
        """Tokens that fit."""
        return len(self.blocks) * self._block_size

    def clear(self) -> None:
        self.blocks: list[int] = []
        self.slots: NDArray[np.int64] = np.empty(0, dtype=np.int64)
        self.run = 0
        for table in self.others:
            table.clear()

    def become(self, other: Table) -> None:
        """Hold the blocks of `other`."""
        self.clear()
        self.append(other.blocks)
        for mine, theirs in zip(self.others, other.others, strict=True):
            mine.append(theirs.blocks)

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

    kv_heads: of the stored vectors.  head_dim: width of a key.  value_dim: width of a value, None for that of a key;
    0 where values are part of the keys (latent attention).  dtype: the storage format.  groups: the cache groups of the
    layers, None for one of them all.
    """

    def __init__(
        self, num_layers: int, num_blocks: int, block_size: int, kv_heads: int, head_dim: int,
        dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", value_dim: int | None = None,
        groups: Sequence[CacheGroup] | None = None,
    ) -> None:  # fmt: skip
        self.num_blocks, self.block_size = num_blocks, block_size
        self.device = torch.device(device)
        self.groups = tuple(groups or one_group(num_layers))
        self.group_of = {layer: number for number, group in enumerate(self.groups) for layer in group.layers}
        if sorted(self.group_of) != list(range(num_layers)):
            raise ValueError(f"cache groups {self.groups} are not of {num_layers} layers")
        widths = (head_dim, head_dim if value_dim is None else value_dim)
        shapes = [(layers_per_page(self.groups), num_blocks, block_size, kv_heads, width) for width in widths]
        try:
            self._all = [_zeros(shape, dtype, self.device) for shape in shapes]
        except (MemoryError, torch.OutOfMemoryError) as error:
            size = sum(math.prod(shape) for shape in shapes) * dtype.itemsize / 2**30
            raise ConfigError(
                "--num-kv-blocks", num_blocks, f"{size:.1f} GiB of KV memory cannot be had on {self.device}", "lower it"
            ) from error
        places = [self.groups[self.group_of[layer]].layers.index(layer) for layer in range(num_layers)]
        self.keys, self.values = ([t.flatten(1, 2)[place] for place in places] for t in self._all)

    @classmethod
    def of(
        cls, spec: ModelSpec, num_blocks: int, block_size: int, dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu", tp: int = 1, groups: Sequence[CacheGroup] | None = None,
    ) -> KVStorage:  # fmt: skip
        """Storage for what `spec` caches on one of `tp` ranks."""
        heads, key, value = spec.kv_shape(tp)
        return cls(spec.num_layers, num_blocks, block_size, heads, key, dtype, device, value, groups)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._all)

    @property
    def block_tensors(self) -> list[Tensor]:
        """All KV memory: tensors with the layers of a page and then blocks as their first dimensions."""
        return self._all

    def new_table(self) -> Table:
        return Table(self.block_size, len(self.groups))

    def copy_blocks(self, copies: Iterable[Copy]) -> None:
        """Copy whole blocks of all layers; every source is read before any target is written."""
        pairs = [(c.source, c.target) for c in copies]
        if not pairs:
            return
        source = torch.tensor([s for s, _ in pairs], device=self.device)
        target = torch.tensor([t for _, t in pairs], device=self.device)
        for tensor in self._all:
            tensor.index_copy_(1, target, tensor.index_select(1, source))

    def clear_non_finite(self, table: Table) -> None:
        """Zero the NaN and infinite values of one sequence; its other values may be shared and stay."""
        own = np.concatenate([part.slots for part in (table, *table.others)])
        slots = torch.from_numpy(own[own >= 0]).to(self.device)
        for tensor in self._all:
            flat = tensor.flatten(1, 2)
            flat.index_copy_(1, slots, flat.index_select(1, slots).nan_to_num(0.0, 0.0, 0.0))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu" or 0 in shape:
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy's zeros are pages that cost nothing until they are first written; torch.zeros writes them all
    size = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(size, dtype=np.uint8)).view(dtype).view(shape)
