"""One rank of a tensor-parallel group: what a model file needs to hold its share of the weights.

Megatron's split (arXiv:1909.08053): projections into heads or MLP columns are cut by rows of the weight, projections
back by columns, and the partial sums of a block are added up over the ranks.

Invariants
* `ALONE` changes nothing and costs nothing: a model file is written once, for any number of ranks.
* Every rank calls the same collectives in the same order: they follow from the plan alone.
* Whole heads belong to a rank. With more ranks than KV heads each head is held by `size / num_heads` ranks.
* Shares are equal in shape on all ranks; the vocabulary is padded to a multiple of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from twinfer.core.errors import ConfigError
from twinfer.core.spec import ModelSpec

Mark = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Parallel:
    """`rank` of `size`. The base class is the single rank; `process_group.py` has the one that communicates."""

    rank: int = 0
    size: int = 1

    def share(self, count: int, what: str) -> int:
        """`count / size`; ConfigError when the ranks do not divide it."""
        if count % self.size:
            raise ConfigError("--tp", self.size, f"does not divide the {count} {what}", "use a divisor of it")
        return count // self.size

    def kv_heads(self, num_kv_heads: int) -> int:
        """KV heads of this rank."""
        return max(1, num_kv_heads // self.size)

    def local(self, model: ModelSpec) -> ModelSpec:
        """`model` with the heads of one rank: what attention and the KV pool of a rank are made for."""
        if self.size == 1:
            return model
        heads = self.share(model.num_heads, "attention heads")
        return replace(model, num_heads=heads, num_kv_heads=self.kv_heads(model.num_kv_heads))

    def cut(self, tensor: Any, dim: int = 0, what: str = "rows") -> Any:
        """This rank's contiguous share of dimension `dim` of a tensor or its stored blocks."""
        if self.size == 1:
            return tensor
        length = self.share(tensor.shape[dim], what)
        return tensor.narrow(dim, self.rank * length, length)

    def cut_heads(self, tensor: Any, num_heads: int, dim: int = 0) -> Any:
        """This rank's whole heads of dimension `dim`; KV heads are repeated over ranks once ranks outnumber them."""
        if self.size == 1:
            return tensor
        width = tensor.shape[dim] // num_heads
        if num_heads >= self.size:
            heads = self.share(num_heads, "heads")
            return tensor.narrow(dim, self.rank * heads * width, heads * width)
        if self.size % num_heads:
            raise ConfigError("--tp", self.size, f"is no multiple of the {num_heads} KV heads", "use a multiple of it")
        return tensor.narrow(dim, self.rank * num_heads // self.size * width, width)

    def cut_vocab(self, table: Any) -> Any:
        """This rank's rows of a `[vocab, ...]` table, `ceil(vocab / size)` of them; what is missing is zeros."""
        if self.size == 1:
            return table
        num_rows = table.shape[0]
        length = -(-num_rows // self.size)
        start = min(self.rank * length, num_rows)
        rows = table.narrow(0, start, min(length, num_rows - start))
        if rows.shape[0] == length:
            return rows
        if not isinstance(rows, Tensor):
            return rows.padded(length)
        whole = rows.new_zeros((length, *rows.shape[1:]))
        whole[: len(rows)] = rows
        return whole

    def all_reduce(self, x: Tensor, mark: Mark | None = None) -> Tensor:
        """`x` summed over the ranks (in place); `mark` is told when there was something to sum."""
        return x

    def all_gather(self, x: Tensor, mark: Mark | None = None) -> Tensor:
        """The ranks' `x` joined along the last dimension, in rank order."""
        return x


ALONE = Parallel()

__all__ = ["ALONE", "Parallel"]
