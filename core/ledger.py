"""Block tables: which sequence holds which blocks of one cache group, and what of them is committed.

    table of a sequence:   [ shared | shared | private | private ]
    positions              0 ..................... computed ...... granted slots

Invariants
* A table has blocks for every position below `computed + inflight` of its sequence.
* A block is written only at positions at or above the holder's `computed`, and only while it is
  unpublished and the holder's reference is the only one: `grow` copies it first (copy-on-write).
* A prefix hit or a fork never covers the last known token: there is always one token to feed.
* Blocks are published when their tokens are committed, never while they are drafts or in flight.
"""

from __future__ import annotations

from collections.abc import Iterable

from twinfer.core.blocks import BlockPool
from twinfer.core.plan import Copy, Grant
from twinfer.core.policy import KVCache, Limits
from twinfer.core.request import Sequence


class Table:
    """Blocks of one sequence, and how far they are published."""

    __slots__ = ("blocks", "node", "open", "published")

    def __init__(self) -> None:
        self.blocks: list[int] = []
        self.published = 0  # leading blocks that are in the prefix tree (or have a twin there)
        self.node: object = None  # tree node of the last of them
        self.open = 0  # positions from `computed` to here (exclusive) can be written as things stand


class Ledger:
    """KV accounting of one cache group."""

    def __init__(self, cache: KVCache, limits: Limits, namespace: str = "", group: int = 0) -> None:
        self.cache = cache
        self.limits = limits
        self.namespace = namespace
        self.group = group
        self.block_size = cache.block_size(limits)
        self.pool = BlockPool(limits.num_blocks, self.block_size, cache.idle_order())
        self.tables: dict[str, Table] = {}

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that back `num_tokens` tokens under the cache's reservation rule."""
        return -(-self.cache.reserve(num_tokens, self.limits) // self.block_size)

    def missing(self, seq: Sequence, num_tokens: int) -> int:
        """Blocks that `seq` still lacks to store `num_tokens`."""
        table = self.tables.get(seq.id)
        lacking = self.blocks_for(num_tokens) - (len(table.blocks) if table else 0)
        return lacking if lacking > 0 else 0

    # --- admission ------------------------------------------------------------------------------

    def _root(self, seq: Sequence) -> tuple[object, ...]:
        request = seq.request
        return ("root", self.namespace, request.adapter, request.cache_salt)

    def hits(self, seq: Sequence) -> list[int]:
        """Published blocks that hold the start of `seq`, leaving at least one token to feed."""
        if not (self.cache.shares_prefixes and seq.request.cache_prefix) or not self.pool.index:
            return []
        found: list[int] = []
        parent: object = self._root(seq)
        size = self.block_size
        for start in range(0, seq.known - size, size):
            block = self.pool.find(parent, tuple(seq.tokens(start, start + size)))
            if block is None:
                break
            found.append(block)
            node = self.pool.node[block]
            assert node is not None
            parent = node.id
        return found

    def admit(self, seq: Sequence, hits: list[int]) -> int:
        """Open a table whose first blocks are `hits`; returns the tokens that are already in KV."""
        table = Table()
        table.node = self._root(seq)
        for block in hits:
            self.pool.share(block)
        table.blocks.extend(hits)
        if hits:
            node = self.pool.node[hits[-1]]
            assert node is not None
            table.node, table.published = node.id, len(hits)
        self.tables[seq.id] = table
        return len(hits) * self.block_size

    def fork(self, seq: Sequence, leader: Sequence) -> int:
        """Open a table that shares the leader's prompt blocks; returns the tokens that are in KV.

        The last prompt token is fed again by the fork (the L-1 rule), so a shared partial block is
        copied before either of the two writes to it.
        """
        source = self.tables[leader.id]
        tokens = min(leader.computed, seq.known - 1)
        count = -(-tokens // self.block_size)
        table = Table()
        table.node = self._root(seq)
        for i in range(min(source.published, count)):
            node = self.pool.node[source.blocks[i]]
            if node is None:  # a twin stands in the tree for this block
                break
            table.node, table.published = node.id, i + 1
        source.open = 0  # its last block may be shared now
        for block in source.blocks[:count]:
            self.pool.share(block)
        table.blocks.extend(source.blocks[:count])
        self.tables[seq.id] = table
        return tokens

    # --- growth ---------------------------------------------------------------------------------

    def grow(self, seq: Sequence, start: int, stop: int) -> tuple[Grant | None, Copy | None] | int:
        """Blocks so that positions `start` to `stop` (exclusive) can be written.

        Returns the grant and the copy to put into the plan, or the number of blocks that are lacking
        (then nothing has changed).
        """
        table = self.tables[seq.id]
        if stop <= table.open and start >= seq.computed:
            return (None, None)
        size = self.block_size
        blocks = table.blocks
        pool = self.pool
        lacking = self.blocks_for(stop) - len(blocks)
        index = start // size
        # A published block is never written either, even by its only holder (a fork re-feeds a token).
        shared = index < len(blocks) and (pool.refs[blocks[index]] > 1 or pool.node[blocks[index]] is not None)
        if lacking <= 0 and not shared:
            table.open = len(blocks) * size
            return (None, None)
        need = max(lacking, 0) + shared
        taken = pool.take(need)
        if taken is None:
            return need - pool.available
        copy = None
        if shared:
            target = taken.pop(0)
            source = blocks[index]
            copy = Copy(seq.id, self.group, index, source, target)
            pool.fill_to(target, start - index * size)
            blocks[index] = target
            # The source is read by this step before anyone may write it: copies run before rows.
            pool.drop([source])
        blocks.extend(taken)
        table.open = len(blocks) * size
        grant = Grant(seq.id, self.group, tuple(taken)) if taken else None
        return (grant, copy)

    def restore(self, seq: Sequence, start: int, stop: int) -> tuple[int, ...]:
        """Fresh blocks for positions `start` (a block's first) to `stop`, whose KV is written back in this step."""
        grown = self.grow(seq, start, stop)
        assert not isinstance(grown, int) and grown[0] is not None
        table, size = self.tables[seq.id], self.block_size
        for index in range(start // size, -(-stop // size)):
            self.pool.fill_to(table.blocks[index], min(size, stop - index * size))
        return grown[0].blocks

    # --- commitment -----------------------------------------------------------------------------

    def commit(self, seq: Sequence, old: int, new: int) -> None:
        """Positions `old` to `new` (exclusive) of `seq` are in KV for good; publish full blocks."""
        table = self.tables[seq.id]
        size = self.block_size
        pool = self.pool
        if new - old == 1:
            pool.fill_to(table.blocks[old // size], old % size + 1)
        else:
            for index in range(old // size, -(-new // size)):
                end = new - index * size
                pool.fill_to(table.blocks[index], end if end < size else size)
        if (table.published + 1) * size > new:
            return
        if not (self.cache.shares_prefixes and seq.request.cache_prefix):
            return
        while (table.published + 1) * size <= new:
            start = table.published * size
            tokens = tuple(seq.tokens(start, start + size))
            table.node = pool.publish(table.blocks[table.published], table.node, tokens)
            table.published += 1

    def release(self, seq: Sequence, until_step: int | None) -> None:
        """Give up the table of `seq`; harmless when it has none (release is idempotent)."""
        table = self.tables.pop(seq.id, None)
        if table is not None:
            self.pool.drop(table.blocks, until_step)

    # --- audit ----------------------------------------------------------------------------------

    def audit(self, sequences: Iterable[Sequence]) -> list[str]:
        wrong = self.pool.audit(t.blocks for t in self.tables.values())
        by_id = {seq.id: seq for seq in sequences}
        for seq_id, table in self.tables.items():
            seq = by_id.get(seq_id)
            if seq is None:
                wrong.append(f"{seq_id}: holds blocks but does not live")
                continue
            granted = len(table.blocks) * self.block_size
            if seq.computed + seq.inflight > granted:
                wrong.append(f"{seq_id}: computed {seq.computed} + inflight {seq.inflight} > granted {granted}")
            for index, block in enumerate(table.blocks[: -(-table.open // self.block_size)]):
                if (index + 1) * self.block_size > seq.computed and (
                    self.pool.refs[block] > 1 or self.pool.node[block] is not None
                ):
                    wrong.append(f"{seq_id}: block {index} counts as open to writing, but others may read it")
            if table.open > granted:
                wrong.append(f"{seq_id}: open to {table.open}, granted {granted}")
            for index, block in enumerate(table.blocks):
                expected = min(self.block_size, max(0, seq.computed - index * self.block_size))
                if self.pool.refs[block] == 1 and self.pool.fill[block] < expected:
                    wrong.append(f"{seq_id}: block {index} has {self.pool.fill[block]} slots, needs {expected}")
        return wrong
