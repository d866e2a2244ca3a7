"""KV in host memory: where swapped sequences' blocks lie while they wait (`StepPlan.swap_outs`, `swap_ins`).

    one tensor a KV tensor of the device: [num_blocks, layers, block_size, kv_heads, width], a block in one piece

Invariants
* Copies keep the order of the device's stream: what a swap-out reads was written by earlier steps, and nothing later
  overwrites host memory that a copy still reads.
* On a GPU the memory is pinned and a block of one tensor is one transfer; on a CPU swapping is a copy within memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from twinfer.core.errors import ConfigError
from twinfer.core.plan import Swap
from twinfer.core.runtime.kv_storage import KVStorage


class HostStorage:
    """`num_blocks` host blocks beside `kv`. ConfigError when the memory cannot be had."""

    def __init__(self, kv: KVStorage, num_blocks: int) -> None:
        self._device = [t for t in kv.block_tensors if t.numel()]  # latent attention has values of no width
        self.num_blocks = num_blocks
        try:
            self._blocks = [_host_memory(t, num_blocks) for t in self._device] if num_blocks else []
        except (MemoryError, RuntimeError) as error:
            raise ConfigError(
                "--host-kv-bytes", num_blocks, f"so many KV blocks cannot be had in host memory ({error})", "lower it"
            ) from error

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self._blocks)

    def swap_out(self, swaps: Iterable[Swap]) -> None:
        """Copy device blocks to host blocks."""
        device, host = _pairs(swaps)
        for tensor, store in zip(self._device, self._blocks, strict=False):
            read = tensor.index_select(1, torch.tensor(device, device=tensor.device)).transpose(0, 1).contiguous()
            for i, block in enumerate(host):
                store[block].copy_(read[i], non_blocking=True)

    def swap_in(self, swaps: Iterable[Swap]) -> None:
        """Copy host blocks to device blocks."""
        device, host = _pairs(swaps)
        for tensor, store in zip(self._device, self._blocks, strict=False):
            written = torch.empty((len(host), *store.shape[1:]), dtype=store.dtype, device=tensor.device)
            for i, block in enumerate(host):
                written[i].copy_(store[block], non_blocking=True)
            tensor.index_copy_(1, torch.tensor(device, device=tensor.device), written.transpose(0, 1))


def _pairs(swaps: Iterable[Swap]) -> tuple[list[int], list[int]]:
    device = [block for swap in swaps for block in swap.blocks]
    return device, [block for swap in swaps for block in swap.host_blocks]


def _host_memory(like: Tensor, num_blocks: int) -> Tensor:
    """[num_blocks, layers, ...] for blocks of `like` [layers, blocks, ...]."""
    shape = (num_blocks, like.shape[0], *like.shape[2:])
    if like.device.type == "cuda":
        return torch.empty(shape, dtype=like.dtype, pin_memory=True)
    # numpy's zeros are pages that cost nothing until they are first written
    size = math.prod(shape) * like.dtype.itemsize
    return torch.from_numpy(np.zeros(size, dtype=np.uint8)).view(like.dtype).view(shape)
