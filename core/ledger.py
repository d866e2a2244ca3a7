"""Block tables: which sequence holds which blocks, and what of them is committed.

    table of a sequence:   [ shared | shared | private | private ]
    positions              0 ..................... computed ...... granted slots

Layers whose attention has the same window form cache groups; a sequence has one table per group, all equally long,
and all groups take their blocks from one pool. In a group with a window, blocks that no later row can read are given
up as they are left behind, and their entries become holes:

    window of 6, blocks of 4, 13 tokens computed:   [ hole | hole(4..7) | 8..11 | 12..15 ]    reads from 8 on

Invariants
* A table has entries for every position below `computed + inflight` of its sequence. Entries that a row may read or
  write hold blocks: those from `low(window, computed)` on. All before that are holes, from commit to commit.
* A row that starts at `computed` or above never reads a hole, so giving a block up needs no outstanding step to end:
  rows of outstanding steps start at `computed` at the least, and drafts are not counted as computed.
* A block is written only at positions at or above the holder's `computed`, and only while it is
  unpublished and the holder's reference is the only one: `grow` copies it first (copy-on-write).
* A prefix hit or a fork never covers the last known token: there is always one token to feed.
* Blocks are published when their tokens are committed, never while they are drafts or in flight; before they become
  holes, so that a later request may hit them.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

from twinfer.core.blocks import BlockPool, Chain
from twinfer.core.guard import block_size_of, whole
from twinfer.core.idle import order_of
from twinfer.core.plan import HOLE, Copy, Grant
from twinfer.core.policy import KVCache, Limits
from twinfer.core.request import Sequence


class Table:
    """Blocks of one sequence, and how far they are published."""

    __slots__ = ("blocks", "chain", "first", "groups", "leaves_at", "node", "open", "published")

    def __init__(self, num_groups: int = 1) -> None:
        self.groups: list[list[int]] = [[] for _ in range(num_groups)]
        self.blocks = self.groups[0]
        self.first = [0] * num_groups  # holes at the front of each group
        self.leaves_at = 0  # no group leaves a block before this position is computed
        self.published = 0  # leading blocks that are in the prefix tree (or have a twin there)
        self.node: object = None  # tree node of the last of them, or of the last before `chain`
        self.chain: Chain | None = None  # the last of them, while their nodes are not needed
        self.open = 0  # positions from `computed` to here (exclusive) can be written as things stand

    @property
    def held(self) -> int:
        """Entries that are blocks, all groups together."""
        return len(self.groups) * len(self.blocks) - sum(self.first)


class Hits(NamedTuple):
    """Published blocks that hold the start of a sequence: `length` entries per group, holes where none is needed."""

    length: int
    groups: Seq[Seq[int]]
    node: object  # of the last block

    @property
    def blocks(self) -> list[int]:
        return [block for blocks in self.groups for block in blocks if block != HOLE]


class Ledger:
    """KV accounting of all cache groups. `windows` has the attention window of each, None for full attention."""

    def __init__(self, cache: KVCache, limits: Limits, namespace: str = "", windows: Seq[int | None] = (None,)) -> None:
        self.cache = cache
        self.limits = limits
        self.namespace = namespace
        self.windows = tuple(windows)
        self.sliding = tuple((group, window) for group, window in enumerate(windows) if window is not None)
        self.block_size = block_size_of(cache, limits)
        self.pool = BlockPool(limits.num_blocks, self.block_size, order_of(cache))
        self.tables: dict[str, Table] = {}
        self.chained = False
        """Publish in chains: worth it where many blocks are published that are never looked for. Only with `LRU`, which gives
        up blocks in the order in which they became idle."""

    # --- how many blocks ------------------------------------------------------------------------

    def blocks_for(self, num_tokens: int) -> int:
        """Entries of one group's table that back `num_tokens` tokens under the cache's reservation rule."""
        least = min(num_tokens, self.limits.max_model_len)  # more is asked about, but never stored
        return -(-whole("kv_cache", self.cache, "reserve", least, num_tokens, self.limits) // self.block_size)

    def low(self, window: int | None, position: int) -> int:
        """The first table entry that a row starting at `position` reads."""
        return 0 if window is None or position < window else (position - window + 1) // self.block_size

    def least(self, num_tokens: int) -> int:
        """Blocks without which no sequence can come to have `num_tokens` in KV, and with which one alone can.

        Fed one token at a time, token c needs the blocks from `low(window, c)` to its own in every group. What that is
        at its most is found among the last `block_size` tokens: one block earlier, no group needs more.
        """
        if not self.sliding:
            return len(self.windows) * self.blocks_for(num_tokens)
        most = 0
        for last in range(max(0, num_tokens - self.block_size), num_tokens):
            entries = self.blocks_for(last + 1)
            most = max(most, sum(entries - self.low(window, last) for window in self.windows))
        return most

    def _peak(self, window: int | None, num_tokens: int) -> int:
        """Blocks of one group while `num_tokens` are fed in the largest chunks that the limits allow."""
        whole = self.blocks_for(num_tokens)
        if window is None:
            return whole
        chunk = min(num_tokens, self.limits.max_num_batched_tokens * self.limits.max_outstanding)
        return min(whole, (window - 1 + chunk + self.block_size - 2) // self.block_size + 1)

    def peak(self, num_tokens: int) -> int:
        """Blocks that feeding `num_tokens` takes at its most; never less than `least` of them."""
        return sum(self._peak(window, num_tokens) for window in self.windows)

    def read_at(self, position: int) -> int:
        """Blocks, all groups together, with KV that a row starting at `position` reads."""
        entries = -(-position // self.block_size)
        return sum(entries - self.low(window, position) for window in self.windows)

    def copied(self, position: int) -> int:
        """Blocks that a fork copies before its first row, which starts at `position`."""
        return len(self.windows) if position % self.block_size else 0

    def missing(self, seq: Sequence, num_tokens: int) -> int:
        """Blocks that `seq` may still take on its way to storing `num_tokens`."""
        table = self.tables.get(seq.id)
        if table is None:
            return self.peak(num_tokens)
        entries = len(table.blocks)
        lacking = self.blocks_for(num_tokens) - entries
        if lacking <= 0:
            return 0
        if not self.sliding:
            return len(self.windows) * lacking
        return sum(
            min(lacking, max(0, self._peak(window, num_tokens) - entries + first))
            for window, first in zip(self.windows, table.first, strict=True)
        )

    # --- admission ------------------------------------------------------------------------------

    def _root(self, seq: Sequence) -> tuple[object, ...]:
        request = seq.request
        return ("root", self.namespace, request.adapter, request.cache_salt)

    def hits(self, seq: Sequence) -> Hits:
        """The longest start of `seq` whose KV is there, leaving at least one token to feed.

        Groups with full attention need all of its blocks, the others those that the next token reads.
        """
        root = self._root(seq)
        node: object = root
        none = Hits(0, [()] * len(self.windows), root)
        pool = self.pool
        if not (self.cache.shares_prefixes and seq.request.cache_prefix) or not pool.index:
            return none
        size, index = self.block_size, pool.index
        found: list[list[int]] = [[] for _ in self.windows]
        nodes: list[object] = []
        for start in range(0, seq.known - size, size):
            if pool.chains and node in pool.chains:
                pool.unfold(pool.chains[node])
            below = pool.tree.find(node, tuple(seq.tokens(start, start + size)))
            if below is None:
                break
            here = [index.get((below, group), HOLE) for group in range(len(found))]
            if any(block == HOLE and window is None for block, window in zip(here, self.windows, strict=True)):
                break
            for blocks, block in zip(found, here, strict=True):
                blocks.append(block)
            nodes.append(below)
            node = below
        length = self._covered(found, len(nodes))
        if not length:
            return none
        groups = []
        for window, blocks in zip(self.windows, found, strict=True):
            low = self.low(window, length * size)
            groups.append([HOLE] * low + blocks[low:length])
        return Hits(length, groups, nodes[length - 1])

    def _covered(self, found: list[list[int]], length: int) -> int:
        """The largest number of blocks up to `length` before which no sliding group lacks one that would be read."""
        gap = length
        while gap >= 0:
            length, gap = gap, -1
            for group, window in self.sliding:
                needed = range(length - 1, self.low(window, length * self.block_size) - 1, -1)
                # A missing block rules out every length from just behind it up to this one.
                gap = max(gap, next((at for at in needed if found[group][at] == HOLE), -1))
        return length

    def admit(self, seq: Sequence, hits: Hits | None = None) -> int:
        """Open a table whose first blocks are `hits`; returns the tokens that are already in KV."""
        table = Table(len(self.windows))
        table.node = self._root(seq)
        if hits is not None and hits.length:
            for group, blocks in enumerate(hits.groups):
                self._share(table, group, blocks)
            table.node, table.published = hits.node, hits.length
            self.pool.tree.use(table.node)
        self.tables[seq.id] = table
        return len(table.blocks) * self.block_size

    def can_fork(self, seq: Sequence, leader: Sequence) -> bool:
        """True while the leader holds all that `seq` would read of the prompt they share."""
        tokens = min(leader.computed, seq.known - 1)
        first = self.tables[leader.id].first
        return all(first[group] <= self.low(window, tokens) for group, window in self.sliding)

    def fork(self, seq: Sequence, leader: Sequence) -> int:
        """Open a table that shares the leader's prompt blocks; returns the tokens that are in KV.

        The last prompt token is fed again by the fork (the L-1 rule), so a shared partial block is
        copied before either of the two writes to it.
        """
        source = self.tables[leader.id]
        tokens = min(leader.computed, seq.known - 1)
        count = -(-tokens // self.block_size)
        table = Table(len(self.windows))
        table.published = min(source.published, count)
        table.node = self.pool.tree.above(source.node, source.published - table.published)
        self.pool.tree.use(table.node)
        source.open = 0  # its last block may be shared now
        for group, window in enumerate(self.windows):
            low = self.low(window, tokens)
            self._share(table, group, [HOLE] * low + source.groups[group][low:count])
        self.tables[seq.id] = table
        return tokens

    def _share(self, table: Table, group: int, blocks: Seq[int]) -> None:
        """Append blocks that others hold or held, behind any number of holes."""
        table.groups[group].extend(blocks)
        for block in blocks:
            if block == HOLE:
                table.first[group] += 1
            else:
                self.pool.share(block)

    # --- growth ---------------------------------------------------------------------------------

    def grow(self, seq: Sequence, start: int, stop: int) -> tuple[list[Grant], list[Copy]] | int:
        """Blocks so that positions `start` to `stop` (exclusive) can be written, and what is before can be read.

        Returns the grants and copies to put into the plan, or the number of blocks that are lacking (then nothing has
        changed).
        """
        table = self.tables[seq.id]
        if stop <= table.open and start >= seq.computed:
            return [], []
        size, pool = self.block_size, self.pool
        held = len(table.blocks)
        index = start // size
        entries = max(held, self.blocks_for(stop))
        if (
            index >= held < entries and not self.sliding and len(self.windows) == 1
        ):  # as prompts do: nothing that others read
            taken = pool.take(entries - held)
            if taken is None:
                return entries - held - pool.available
            table.blocks += taken
            table.open = entries * size
            return [Grant(seq.id, 0, tuple(taken))], []
        # A published block is never written either, even by its only holder (a fork re-feeds a token).
        shared = [
            index < held and (pool.refs[blocks[index]] > 1 or pool.node[blocks[index]] is not None)
            for blocks in table.groups
        ]
        # A table that starts behind position 0 (loaded KV) begins with what its first row reads.
        begin = [max(held, self.low(window, start)) for window in self.windows]
        need = sum(shared) + sum(entries - at for at in begin)
        taken = pool.take(need)
        if taken is None:
            return need - pool.available
        grants, copies = [], []
        for group, blocks in enumerate(table.groups):
            if shared[group]:
                target, source = taken.pop(0), blocks[index]
                copies.append(Copy(seq.id, group, index, source, target))
                pool.fill_to(target, start - index * size)
                blocks[index] = target
                # The source is read by this step before anyone may write it: copies run before rows.
                pool.drop([source])
            if entries > held:
                fresh = taken[: entries - begin[group]]
                del taken[: len(fresh)]
                holes = [HOLE] * (begin[group] - held)
                table.first[group] += len(holes)
                blocks += holes + fresh
                grants.append(Grant(seq.id, group, (*holes, *fresh)))
        table.open = len(table.blocks) * size
        return grants, copies

    def reach(self, seq: Sequence, start: int) -> int:
        """The position up to which (exclusive) `seq` could grow now with the blocks that nobody holds."""
        table = self.tables[seq.id]
        index, held = start // self.block_size, len(table.blocks)
        pool = self.pool
        copies = sum(
            index < held and (pool.refs[blocks[index]] > 1 or pool.node[blocks[index]] is not None)
            for blocks in table.groups
        )
        return (held + (pool.available - copies) // len(self.windows)) * self.block_size

    def restore(self, seq: Sequence, num_tokens: int) -> None:
        """Fresh blocks behind those that were hit, for KV up to `num_tokens` that is written back in this step."""
        table, size = self.tables[seq.id], self.block_size
        held = len(table.blocks)
        if self.sliding:
            self._leave(table, num_tokens)
        grown = self.grow(seq, num_tokens, num_tokens)
        assert not isinstance(grown, int)
        for blocks, first in zip(table.groups, table.first, strict=True):
            for index in range(max(held, first), len(blocks)):
                self.pool.fill_to(blocks[index], max(0, min(size, num_tokens - index * size)))

    def take_aside(self, table: Table, count: int) -> None:
        """`count` of the blocks set aside come behind those of `table`, all of which are full."""
        aside = self.pool.aside
        table.blocks += aside[-count:]
        del aside[-count:]
        table.open += count * self.block_size

    def fill_up(self, table: Table, old: int, new: int) -> None:
        """Positions `old` to `new` are in KV for good, in a table whose blocks nobody looks for (`Chain`) or ever can."""
        size, pool, blocks = self.block_size, self.pool, table.blocks
        fill, last = pool.fill, (new - 1) // size
        for block in blocks[old // size : last]:
            fill[block] = size
        fill[blocks[last]] = new - last * size
        pool.used += new - old
        chain = table.chain
        if chain is not None:
            fresh = blocks[table.published : new // size]
            chain.blocks += fresh
            table.published += len(fresh)

    # --- commitment -----------------------------------------------------------------------------

    def commit(self, seq: Sequence, old: int, new: int) -> None:
        """Positions `old` to `new` (exclusive) of `seq` are in KV for good: publish full blocks, give up left ones."""
        table = self.tables[seq.id]
        size = self.block_size
        pool = self.pool
        if new - old == 1:
            for blocks in table.groups:
                pool.fill_to(blocks[old // size], old % size + 1)
        elif not self.sliding and len(table.groups) == 1:
            fill, last, used = pool.fill, (new - 1) // size, 0
            for block in table.blocks[old // size : last]:
                used += size - fill[block]
                fill[block] = size
            pool.used += used
            if new > old:
                pool.fill_to(table.blocks[last], new - last * size)
        else:
            for index in range(old // size, -(-new // size)):
                end = new - index * size
                for blocks in table.groups:
                    if blocks[index] != HOLE:
                        pool.fill_to(blocks[index], end if end < size else size)
        if (table.published + 1) * size <= new and self.cache.shares_prefixes and seq.request.cache_prefix:
            self._publish(seq, table, new)
        if self.sliding and new >= table.leaves_at:
            self._leave(table, new)

    def _leave(self, table: Table, computed: int) -> None:
        """Make holes of the blocks that no row from position `computed` on reads."""
        for group, window in self.sliding:
            blocks, first = table.groups[group], table.first[group]
            low = min(self.low(window, computed), len(blocks))
            if low > first:
                left = blocks[first:low]
                blocks[first:low] = [HOLE] * len(left)
                table.first[group] = low
                self.pool.drop(left[::-1])  # as if left one by one: what a longer prefix can use is evicted last
        size = self.block_size
        table.leaves_at = min((table.first[group] + 1) * size + window - 1 for group, window in self.sliding)

    def _publish(self, seq: Sequence, table: Table, computed: int) -> None:
        size, pool = self.block_size, self.pool
        while (table.published + 1) * size <= computed:
            if table.chain is not None:
                fresh = table.blocks[table.published : computed // size]
                table.chain.blocks += fresh
                table.published += len(fresh)
                return
            start = table.published * size
            tokens = tuple(seq.tokens(start, start + size))
            above = table.node
            if pool.chains and above in pool.chains:
                pool.unfold(pool.chains[above])
            newest = pool.tree.next_id
            table.node = pool.tree.enter(above, tokens)
            pool.tree.use(table.node)
            pool.tree.leave(above)
            for group, blocks in enumerate(table.groups):
                if blocks[table.published] != HOLE:
                    pool.publish(blocks[table.published], table.node, group)
            table.published += 1
            if self.chained and newest != pool.tree.next_id and self._chainable(seq):
                # A node that nobody knew has nothing below it: what follows can wait until somebody looks there.
                assert isinstance(table.node, int)
                table.chain = pool.chains[table.node] = Chain(table.node, seq, table.published, table)
                pool.tree.use(table.node)

    def _chainable(self, seq: Sequence) -> bool:
        """Whether nobody but `seq` refers to its table or changes its tokens."""
        return len(self.windows) == 1 and not self.sliding and seq.request.params.num_samples == 1

    def release(self, seq: Sequence, until_step: int | None) -> None:
        """Give up the table of `seq`; harmless when it has none (release is idempotent)."""
        table, pool = self.tables.pop(seq.id, None), self.pool
        if table is None:
            return
        if table.chain is not None and until_step is not None:  # its blocks do not become idle now, all at once
            pool.unfold(table.chain)
        chain, blocks = table.chain, table.blocks
        if chain is not None:  # the only group, without holes
            pool.drop(blocks[table.published :])
            pool.drop_chain(chain)
            pool.drop(blocks[: chain.start])
            pool.let_go(chain)
        else:
            for group, first in zip(table.groups, table.first, strict=True):
                pool.drop(group[first:] if first else group, until_step)
        pool.tree.leave(table.node)
