"""Dense linears and the token table, stored the way the device multiplies fastest.

Invariants
* `Dense(x)` is `x @ weight.T + bias` for a checkpoint weight `[out, in]`, whatever the stored layout.
* On the CPU weights are kept as `[in, out]`: at 4-64 rows the BLAS of stock torch is up to 1.6x faster that way
  than with `[out, in]`, and equal at one row. Elsewhere the checkpoint's layout is kept.
* A tied token table exists once; the embedding then reads columns of the transposed table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Linear = Callable[[Tensor], Tensor]
"""`[tokens, in]` to `[tokens, out]`; what quantizers put in place of `Dense`."""

LinearFactory = Callable[[str, Tensor, "Tensor | None"], Linear]
"""(name of the op, weight `[out, in]`, bias `[out]` or None) to a linear."""


class Dense:
    """`x [tokens, in]` to `[tokens, out]`."""

    __slots__ = ("bias", "transposed", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.transposed = weight.device.type == "cpu"
        self.weight = weight.t().contiguous() if self.transposed else weight.contiguous()
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
    """Embedding and, when tied, the LM head of one `[vocab, hidden]` table."""

    __slots__ = ("head", "table")

    def __init__(self, weight: Tensor, tied: bool) -> None:
        self.head = Dense(weight) if tied else None
        self.table = weight if self.head is None else self.head.weight

    def embed(self, ids: Tensor) -> Tensor:
        """`ids [tokens]` to `[tokens, hidden]`."""
        if self.head is not None and self.head.transposed:
            return self.table.index_select(1, ids).t().contiguous()
        return self.table.index_select(0, ids)
