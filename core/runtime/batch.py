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
from dataclasses import dataclass, replace
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
    others: tuple[GroupView, ...] = ()

    @property
    def num_tokens(self) -> int:
        return int(self.tokens.shape[0])

    def clone(self) -> PackedBatch:
        """The same batch with tensors of its own."""
        return replace(
            self, tokens=self.tokens.clone(), positions=self.positions.clone(), slots=self.slots.clone(),
            logits_index=self.logits_index.clone(),
            others=tuple(group._replace(slots=group.slots.clone()) for group in self.others),
        )  # fmt: skip

    def take(self, other: PackedBatch) -> None:
        """Copy the tensors of a batch of the same shape into those of this one; the spans stay."""
        self.tokens.copy_(other.tokens)
        self.positions.copy_(other.positions)
        self.slots.copy_(other.slots)
        self.logits_index.copy_(other.logits_index)
        for mine, theirs in zip(self.others, other.others, strict=True):
            mine.slots.copy_(theirs.slots)

    @property
    def groups(self) -> tuple[GroupView, ...]:
        """All cache groups."""
        return (GroupView(self.slots, self.spans), *self.others)


def num_logits(need: Need, length: int, draft: int) -> int:
    """Positions of a row that go through the LM head; always its last ones."""
    return {Need.NONE: 0, Need.LAST: 1, Need.BEAM: 1, Need.DRAFTS: draft + 1, Need.ALL: length}[need]


def pack(rows: Sequence[PackedRow], device: torch.device | str = "cpu") -> PackedBatch:
    """Pack `rows` in order. Raises ValueError for a row whose table is too short for its tokens."""
    spans: list[Span] = []
    ids: list[int] = []
    positions, slots = [], []
    wanted: list[int] = []
    for row in rows:
        offset, length = len(ids), len(row.tokens)
        stop = row.start + length
        if length == 0 or stop > row.table.capacity:
            raise ValueError(f"row of {length} tokens at {row.start} does not fit {row.table.capacity} slots")
        ids.extend(row.tokens)
        positions.append(np.arange(row.start, stop, dtype=np.int64))
        slots.append(row.table.slots[row.start : stop])
        spans.append(Span(offset, length, row.start, row.table))
        wanted.extend(range(offset + length - num_logits(row.need, length, row.draft), offset + length))

    def tensor(values: object) -> Tensor:
        return torch.from_numpy(np.asarray(values, dtype=np.int64)).to(device)

    others = tuple(
        GroupView(
            tensor(np.concatenate([span.table.group(number).slots[span.start : span.stop] for span in spans])),
            tuple(span._replace(table=span.table.group(number)) for span in spans),
        )
        for number in range(1, 1 + len(rows[0].table.others))
    )
    return PackedBatch(
        tokens=tensor(ids),
        positions=tensor(np.concatenate(positions)),
        slots=tensor(np.concatenate(slots)),
        spans=tuple(spans),
        logits_index=tensor(wanted),
        others=others,
    )
