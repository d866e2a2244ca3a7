"""Dense linears and the token table, stored the way the device multiplies fastest.

Invariants
* `Dense(x)` is `x @ weight.T + bias` for a checkpoint weight `[out, in]`, whatever the stored layout.
* On the CPU weights are kept as `[in, out]`: at 4-64 rows the BLAS of stock torch is up to 1.6x faster that way
  than with `[out, in]`, and equal at one row. Elsewhere the checkpoint's layout is kept.
* A tied token table exists once; the embedding then reads columns of the transposed table.
* A share of a weight is not kept as a view of the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from twinfer.core.runtime.parallel import ALONE, Mark, Parallel

Linear = Callable[[Tensor], Tensor]
"""`[tokens, in]` to `[tokens, out]`; what quantizers put in place of `Dense`."""

LinearFactory = Callable[[str, Tensor, "Tensor | None"], Linear]
"""(name of the op, weight `[out, in]`, bias `[out]` or None) to a linear."""


def owned(tensor: Tensor) -> Tensor:
    """`tensor` in memory of its own: a share of a weight must not keep the whole alive."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


class Dense:
    """`x [tokens, in]` to `[tokens, out]`."""

    __slots__ = ("bias", "transposed", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.transposed = weight.device.type == "cpu"
        self.weight = owned(weight.t().contiguous() if self.transposed else weight.contiguous())
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        weight = self.weight if self.transposed else self.weight.t()
        return torch.mm(x, weight) if self.bias is None else torch.addmm(self.bias, x, weight)


def dense(name: str, weight: Tensor, bias: Tensor | None) -> Linear:
    """The default `LinearFactory`."""
    return Dense(weight, bias)


def fused(parts: Sequence[Tensor]) -> Tensor:
    """Weights (or biases) of linears with one input, stacked so that one matrix product serves them all."""
    return torch.cat(list(parts), dim=0)


class TokenTable:
    """Embedding and, when tied, the LM head of one `[vocab, hidden]` table, cut by vocabulary over the ranks."""

    __slots__ = ("first", "head", "parallel", "table")

    def __init__(self, weight: Tensor, tied: bool, parallel: Parallel = ALONE) -> None:
        weight = parallel.cut_vocab(weight)
        self.parallel, self.first = parallel, parallel.rank * len(weight)
        self.head = Dense(weight) if tied else None
        self.table = self.head.weight if self.head is not None else weight if parallel.size == 1 else owned(weight)

    def embed(self, ids: Tensor, mark: Mark | None = None) -> Tensor:
        """`ids [tokens]` to `[tokens, hidden]`."""
        if self.parallel.size == 1:
            return self._look_up(ids)
        ids = ids - self.first
        num_rows = self.table.shape[1 if self.head is not None and self.head.transposed else 0]
        elsewhere = (ids < 0) | (ids >= num_rows)
        x = self._look_up(ids.masked_fill(elsewhere, 0)).masked_fill_(elsewhere[:, None], 0.0)
        if mark is not None:
            mark("embed")
        return self.parallel.all_reduce(x, mark)

    def _look_up(self, ids: Tensor) -> Tensor:
        if self.head is not None and self.head.transposed:
            return self.table.index_select(1, ids).t().contiguous()
        return self.table.index_select(0, ids)
