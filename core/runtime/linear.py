"""Linears and the token table, stored the way the device multiplies fastest.

Invariants
* A linear is `x @ weight.T + bias` for a checkpoint weight `[out, in]`, whatever the stored layout; its result is new.
* On the CPU dense weights are kept as `[in, out]`: at 4-64 rows the BLAS of stock torch is up to 1.6x faster that way
  than with `[out, in]`, and equal at one row. Elsewhere the checkpoint's layout is kept.
* A tied token table exists once; the embedding then reads rows of the head's weight.
* A share of a weight is not kept as a view of the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from twinfer.core.runtime.parallel import ALONE, Mark, Parallel
from twinfer.core.runtime.stored_blocks import StoredBlocks, Weight, dense_of, stacked
from twinfer.kernels import ops
from twinfer.kernels.gemm import Arena

Linear = Callable[[Tensor], Tensor]
"""`[tokens, in]` to `[tokens, out]`. One with `rows(ids)` (rows of its weight, `[count, in]`) may hold a token table."""


class LinearFactory(Protocol):
    """(name of the op, weight `[out, in]`, bias `[out]` or None) to a linear.

    An attribute `takes_blocks` that is true asks for the blocks of a quantized file instead of their values.
    An attribute `reason` says in words how its weights are multiplied here.
    """

    def __call__(self, name: str, weight: Any, bias: Tensor | None, /) -> Linear: ...


def owned(tensor: Tensor) -> Tensor:
    """`tensor` in memory of its own: a share of a weight must not keep the whole alive."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


_arena = Arena()


def _in_huge_pages(weight: Tensor) -> Tensor:
    """A copy of a CPU tensor in the memory that packed weights have: a step streams all of it."""
    return _arena.take(weight.nbytes).view(weight.dtype).view(weight.shape).copy_(weight)


class Dense:
    """`x [tokens, in]` to `[tokens, out]`."""

    __slots__ = ("bias", "transposed", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.transposed = weight.device.type == "cpu"
        self.weight = _in_huge_pages(weight.t()) if self.transposed else owned(weight.contiguous())
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        weight = self.weight if self.transposed else self.weight.t()
        return torch.mm(x, weight) if self.bias is None else torch.addmm(self.bias, x, weight)

    def rows(self, ids: Tensor) -> Tensor:
        """Rows `ids` of the weight."""
        return ops.take_rows(self.weight.t() if self.transposed else self.weight, ids)


def dense(name: str, weight: Weight, bias: Tensor | None) -> Linear:
    """The default `LinearFactory`."""
    return Dense(dense_of(weight), bias)


def fused(parts: Sequence[Any]) -> Any:
    """Weights (or biases) of linears with one input, stacked so that one matrix product serves them all."""
    return stacked(parts)


class TokenTable:
    """Embedding and, when tied, the LM head of one `[vocab, hidden]` table; `weight` is this rank's rows of it."""

    __slots__ = ("_rows", "first", "head", "num_rows", "parallel", "weight")

    def __init__(
        self, weight: Tensor | StoredBlocks, tied: bool, parallel: Parallel = ALONE, linear: LinearFactory = dense
    ) -> None:
        self.num_rows = weight.shape[0]
        self.parallel, self.first = parallel, parallel.rank * self.num_rows
        self.head = linear("lm_head", weight, None) if tied else None
        held = linear("embed_tokens", weight, None) if not tied and isinstance(weight, StoredBlocks) else self.head
        self._rows = getattr(held, "rows", None)
        self.weight = None if self._rows is not None else owned(dense_of(weight))

    def embed(self, ids: Tensor, mark: Mark | None = None) -> Tensor:
        """`ids [tokens]` to `[tokens, hidden]`."""
        if self.parallel.size == 1:
            return self._look_up(ids)
        ids = ids - self.first
        elsewhere = (ids < 0) | (ids >= self.num_rows)
        x = self._look_up(ids.masked_fill(elsewhere, 0)).masked_fill_(elsewhere[:, None], 0.0)
        if mark is not None:
            mark("embed")
        return self.parallel.all_reduce(x, mark)

    def _look_up(self, ids: Tensor) -> Tensor:
        if self._rows is not None:
            found: Tensor = self._rows(ids)
            return found
        assert self.weight is not None
        return ops.take_rows(self.weight, ids)
