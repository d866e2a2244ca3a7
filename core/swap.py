"""KV in host memory: where a preempted sequence can keep what it has computed instead of computing it again.

Invariants
* A host block is free or belongs to exactly one waiting sequence (`Sequence.host`).
* A sequence is swapped as a whole or not at all; when host memory is full it is recomputed.
* Host blocks of a sequence that is swapped in are free once its plan is launched: within one plan nobody else
  writes them, and plans run in order.
* A sequence that ends before its swap-out was launched takes the swap-out back.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from twinfer.core.plan import HOLE, Swap
from twinfer.core.request import HostCopy, Sequence

if TYPE_CHECKING:
    from twinfer.core.ledger import Ledger


class HostPool:
    """`num_blocks` host blocks, and the swap-outs that no plan has taken along yet."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.free = list(range(num_blocks - 1, -1, -1))
        self.swap_outs: list[Swap] = []

    def swap_out(self, seq: Sequence, ledger: Ledger) -> bool:
        """Keep the computed tokens of `seq`, which is about to lose its table; False when there is no room."""
        table = ledger.tables[seq.id]
        count = -(-seq.computed // ledger.block_size)
        held = sum(count - first for first in table.first)
        if not seq.computed or held > len(self.free):
            return False
        copies = []
        for group, (blocks, first) in enumerate(zip(table.groups, table.first, strict=True)):
            fresh = tuple(self.free.pop() for _ in range(count - first))
            if fresh:
                self.swap_outs.append(Swap(seq.id, group, tuple(blocks[first:count]), fresh))
            copies.append((HOLE,) * first + fresh)
        seq.host = HostCopy(tuple(copies), seq.computed)
        seq.num_swaps += 1
        return True

    def forget(self, seq: Sequence) -> None:
        """The host copy of `seq`, if it has one, is not wanted any more."""
        if seq.host is not None:
            self.swap_outs = [swap for swap in self.swap_outs if swap.seq != seq.id]
            self.give_back(block for copies in seq.host.blocks for block in copies if block != HOLE)
            seq.host = None

    def give_back(self, blocks: Iterable[int]) -> None:
        self.free.extend(blocks)

    def audit(self, sequences: Iterable[Sequence]) -> list[str]:
        wrong: list[str] = []
        owned = [
            (block, seq.id)
            for seq in sequences
            if seq.host is not None
            for copies in seq.host.blocks
            for block in copies
            if block != HOLE
        ]
        places = sorted([*self.free, *(block for block, _ in owned)])
        if places != list(range(self.num_blocks)):
            wrong.append(f"host blocks are not each free or owned once: free {self.free}, owned {owned}")
        known = {block: seq for block, seq in owned}
        for swap in self.swap_outs:
            if any(known.get(block) != swap.seq for block in swap.host_blocks):
                wrong.append(f"{swap} goes to blocks of another sequence")
        return wrong
