"""A step's rows as packed tensors, built once per step and shared by all layers.

    tokens, positions, slots: [num_tokens], rows one after another in plan order
    logits_index:             [num_logits], packed positions that go through the LM head

Slots and tables are those of the first cache group; `others` has the further ones.

Invariants
* Rows keep plan order; nothing here sorts or drops a row.
* A token that an earlier step sampled is looked up before packing: tensors hold real ids only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from twinfer.core.plan import Need
from twinfer.core.runtime.kv_storage import Table


class Span(NamedTuple):
    """One row: `length` tokens packed at `offset`, fed at positions `start...` of a sequence with `table`."""

    offset: int
    length: int
    start: int
    table: Table

    @property
    def stop(self) -> int:
        return self.start + self.length


class GroupView(NamedTuple):
    """Where the layers of one cache group find the KV of a step's rows."""

    slots: Tensor
    spans: tuple[Span, ...]


class PackedRow(NamedTuple):
    """A row ready to be packed: every token is an id, the last `draft` of them are guesses."""

    tokens: Sequence[int]
    start: int
    need: Need
    table: Table
    draft: int = 0


@dataclass(frozen=True, slots=True)
class PackedBatch:
    tokens: Tensor
    positions: Tensor
    slots: Tensor
    spans: tuple[Span, ...]
    logits_index: Tensor
    """Packed positions whose logits are wanted, in row order."""
    others: tuple[GroupView, ...]
    numbers: Tensor
    """What all tensors here are views of: one copy moves them all."""

    @property
    def num_tokens(self) -> int:
        return int(self.tokens.shape[0])

    def clone(self) -> PackedBatch:
        """The same batch with tensors of its own."""
        return _split(self.numbers.clone(), [group.spans for group in self.groups], self.num_tokens)

    def take(self, other: PackedBatch) -> None:
        """Copy the tensors of a batch of the same shape into those of this one; the spans stay."""
        self.numbers.copy_(other.numbers)

    @property
    def groups(self) -> tuple[GroupView, ...]:
        """All cache groups."""
        return (GroupView(self.slots, self.spans), *self.others)


def num_logits(need: Need, length: int, draft: int) -> int:
    """Positions of a row that go through the LM head; always its last ones."""
    if need is Need.LAST or need is Need.BEAM:
        return 1
    if need is Need.DRAFTS:
        return draft + 1
    return length if need is Need.ALL else 0


def pack(rows: Sequence[PackedRow], device: torch.device | str = "cpu") -> PackedBatch:
    """Pack `rows` in order. Raises ValueError for a row whose table is too short for its tokens."""
    spans: list[Span] = []
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    wanted: list[int] = []
    for row in rows:
        offset, length = len(ids), len(row.tokens)
        stop = row.start + length
        if length == 0 or stop > row.table.capacity:
            raise ValueError(f"row of {length} tokens at {row.start} does not fit {row.table.capacity} slots")
        ids += row.tokens
        positions += range(row.start, stop)
        slots += row.table.slots[row.start : stop].tolist()
        spans.append(Span(offset, length, row.start, row.table))
        wanted += range(offset + length - num_logits(row.need, length, row.draft), offset + length)
    groups = [tuple(spans)]
    for number in range(1, 1 + len(rows[0].table.others)):
        groups.append(tuple(span._replace(table=span.table.group(number)) for span in spans))
        for span in groups[number]:
            slots += span.table.slots[span.start : span.stop].tolist()
    numbers = torch.from_numpy(np.array(ids + positions + slots + wanted, dtype=np.int64))
    return _split(numbers.to(device), groups, len(ids))


def _split(numbers: Tensor, groups: Sequence[tuple[Span, ...]], num_tokens: int) -> PackedBatch:
    """A batch of views of `numbers`: tokens, positions, slots of each group, logits index."""
    sizes = [num_tokens] * (2 + len(groups))
    tokens, positions, slots, *others, wanted = numbers.split([*sizes, len(numbers) - sum(sizes)])
    return PackedBatch(
        tokens, positions, slots, groups[0], wanted,
        tuple(GroupView(mine, spans) for mine, spans in zip(others, groups[1:], strict=True)), numbers,
    )  # fmt: skip
