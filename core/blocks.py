"""One pool of KV blocks: who holds what, which blocks are cached, which may be reused.

A block is in exactly one state:

    free         nobody holds it, its content means nothing
    idle-cached  nobody holds it, its content is published and may be hit again
    held(n)      n block-table entries (or outstanding steps, see below) refer to it
    in flight    the only references left are those of outstanding steps; it is not reusable yet

Invariants
* `refs[b]` = table entries + references of outstanding steps and transfers; free and idle have none.
* Only full, committed blocks are published, at a node of the prefix tree: at most one per node and cache group.
* A block is released through `drop` alone; releasing to `step` keeps it in flight until that step ends.
* Order is deterministic: free blocks are a stack, idle blocks leave in the policy's order.
* Lists grow with what is used: blocks from `len(refs)` on have never been free for taking yet, and stand, the lowest
  number on top, below those of the list `free`, where `_write_out` puts them when they are reached.
* A `Chain` is a shortcut that nobody can tell: whoever looks below its node unfolds it first (`BlockPool.unfold`). Its
  blocks become idle together and are given up last first, so of them `node` knows the last idle one alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, NamedTuple

from twinfer.core.idle import LRU, CheckedOrder
from twinfer.core.prefix_tree import Key, PrefixTree, Tokens

if TYPE_CHECKING:
    from twinfer.core.ledger import Table
    from twinfer.core.request import Sequence


class Node(NamedTuple):
    """Where a published block hangs: `id` and `key` of the tree's node, and the cache group it belongs to."""

    id: int
    key: Key
    group: int = 0


class Chain:
    """Published blocks that hang one below the other, whose nodes nobody has asked for yet.

    `seq` has their tokens, from block `start` on; `table` is that of `seq` while it holds them, alone.
    """

    __slots__ = ("blocks", "node", "seq", "start", "table")

    def __init__(self, node: int, seq: Sequence, start: int, table: Table) -> None:
        self.node = node  # the node above the first of them
        self.seq = seq
        self.start = start
        self.table: Table | None = table
        self.blocks: list[int] = []


class BlockPool:
    """`num_blocks` blocks of `block_size` token slots."""

    def __init__(self, num_blocks: int, block_size: int, idle: LRU | CheckedOrder) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.refs: list[int] = []
        self.fill: list[int] = []  # committed slots of a held block
        self.node: list[Node | Chain | None] = []
        self.free: list[int] = []
        self.idle = idle
        self.tree = PrefixTree()
        self.index: dict[tuple[int, int], int] = {}  # (node, group) -> published block
        self.chains: dict[object, Chain] = {}  # by the node they hang at
        self.in_flight: dict[int, list[int]] = {}  # step -> references it keeps
        self.aside: list[int] = []  # held, but in no table yet: taken for sequences that are looked at later
        self.on_unfold: Callable[[Chain], None] | None = None  # told before a chain ends, to bring it up to date
        self.held = 0  # blocks with refs > 0
        self.used = 0  # committed slots of held blocks

    @property
    def available(self) -> int:
        """Blocks that can be handed out now, free and idle ones: all that are not held."""
        return self.num_blocks - self.held

    @property
    def num_idle(self) -> int:
        """Blocks that are idle-cached."""
        return len(self.refs) - self.held - len(self.free)

    # --- taking ---------------------------------------------------------------------------------

    def take(self, count: int) -> list[int] | None:
        """`count` private empty blocks, or None (and no change) when there are not enough."""
        free, refs, fill = self.free, self.refs, self.fill
        if count > self.num_blocks - self.held:
            return None
        if count > len(free) and len(refs) < self.num_blocks:
            self._write_out(count - len(free))
        at = max(0, len(free) - count)
        taken = free[at:]
        taken.reverse()  # a stack: the last one is taken first
        del free[at:]
        if len(taken) < count:
            taken += self._evict(count - len(taken))
        for block in taken:
            refs[block] = 1
            fill[block] = 0
        self.held += count
        return taken

    def _write_out(self, count: int) -> None:
        """Put `count` blocks that were never taken under those of `free`, as many again as there are if that is more, or
        all that are left."""
        first = len(self.refs)
        count = min(max(count, first), self.num_blocks - first)
        self.refs += [0] * count
        self.fill += [0] * count
        self.node += [None] * count
        self.free[:0] = range(first + count - 1, first - 1, -1)

    def _evict(self, count: int) -> list[int]:
        """Idle blocks, which lose their content, in the order of the policy; there are enough."""
        evicted = self.idle.pops(count)
        at = 0
        while at < count:
            at += self._unpublish(evicted[at], count - at)
        return evicted

    def share(self, block: int) -> None:
        """One more reference to a held or idle block (a prefix hit or a fork)."""
        if self.refs[block] == 0:
            self.idle.remove(block)
            self.held += 1
            self.used += self.fill[block]
        self.refs[block] += 1

    # --- giving back ----------------------------------------------------------------------------

    def drop(self, blocks: Seq[int], until_step: int | None = None) -> None:
        """Give up one reference to each; with `until_step` only when that outstanding step has ended.

        Later blocks are freed first, so that the tail of a prefix is evicted before its head.
        """
        if until_step is not None:
            self.in_flight.setdefault(until_step, []).extend(blocks)
            return
        refs, fill, node, freed = self.refs, self.fill, self.node, self.free.append
        gone = used = 0
        cached: list[int] = []
        for block in reversed(blocks):
            refs[block] -= 1
            if not refs[block]:
                gone += 1
                used += fill[block]
                if node[block] is None:
                    freed(block)
                else:
                    cached.append(block)
        if cached:
            self.idle.adds(cached)
        self.held -= gone
        self.used -= used

    def drop_chain(self, chain: Chain) -> None:
        """Give up the blocks of a chain: they are full, published, and nobody else has them."""
        refs, blocks = self.refs, chain.blocks
        for block in blocks:
            refs[block] = 0
        if blocks:
            self.node[blocks[-1]] = chain
        self.held -= len(blocks)
        self.used -= len(blocks) * self.block_size
        self.idle.adds(blocks[::-1])

    def step_ended(self, step: int) -> None:
        """Release what outstanding step `step` kept in flight."""
        blocks = self.in_flight.pop(step, None)
        if blocks:
            self.drop(blocks)

    def take_one(self) -> int:
        """As `take(1)`, when there is one."""
        if not self.free and len(self.refs) < self.num_blocks:
            self._write_out(1)
        if self.free:
            block = self.free.pop()
        else:
            block = self.idle.pop()
            self._unpublish(block, 1)
        self.refs[block] = 1
        self.fill[block] = 0
        self.held += 1
        return block

    def set_aside(self, count: int) -> None:
        """Take `count` blocks that come into tables later (`aside`); there are enough."""
        if count == 1:
            self.aside.append(self.take_one())
        elif count:
            taken = self.take(count)
            assert taken is not None
            self.aside += taken

    # --- content --------------------------------------------------------------------------------

    def fill_to(self, block: int, slots: int) -> None:
        """`slots` slots of a held block are committed."""
        self.used += slots - self.fill[block]
        self.fill[block] = slots

    def publish(self, block: int, node: int, group: int = 0) -> None:
        """Offer a full committed block for sharing at `node`; one that has a twin there already stays private."""
        if (node, group) not in self.index:
            assert self.node[block] is None
            self.index[node, group] = block
            self.node[block] = Node(node, self.tree.keys[node], group)
            self.tree.use(node)

    def find(self, parent: object, tokens: Tokens, group: int = 0) -> int | None:
        """The published block that holds `tokens` after `parent`, if any; does not change the pool."""
        node = self.tree.find(parent, tokens)
        return None if node is None else self.index.get((node, group))

    def _unpublish(self, block: int, most: int) -> int:
        """Forget what an idle block held and, where it is the last of a chain, those before it, up to `most`; how many."""
        node = self.node[block]
        self.node[block] = None
        if isinstance(node, Chain):
            blocks = node.blocks
            count = min(most, len(blocks))
            del blocks[-count:]
            if blocks:
                self.node[blocks[-1]] = node
            else:
                self._end_chain(node)
            return count
        assert node is not None
        del self.index[node.id, node.group]
        self.tree.leave(node.id)
        return 1

    def unfold(self, chain: Chain) -> None:
        """Enter the nodes of `chain` into the tree, because somebody looks there."""
        if self.on_unfold is not None:
            self.on_unfold(chain)
        del self.chains[chain.node]
        size, tokens, tree, node = self.block_size, chain.seq.tokens, self.tree, chain.node
        if chain.blocks:
            self.node[chain.blocks[-1]] = None
        for index, block in enumerate(chain.blocks, chain.start):
            node = tree.enter(node, tuple(tokens(index * size, (index + 1) * size)))
            self.publish(block, node)
        if chain.table is not None:
            tree.use(node)
            chain.table.node = node
            chain.table.chain = None
            tree.leave(chain.node)
        tree.leave(chain.node)

    def let_go(self, chain: Chain) -> None:
        """The sequence of `chain` gives up its table."""
        chain.table = None
        if not chain.blocks:
            self._end_chain(chain)

    def _end_chain(self, chain: Chain) -> None:
        del self.chains[chain.node]
        self.tree.leave(chain.node)

    # --- audit ----------------------------------------------------------------------------------

    def audit(self, tables: Iterable[Seq[int]], nodes: Iterable[object] = ()) -> list[str]:
        """Violated invariants, given every block table that refers to this pool, and every node they stand at."""
        wrong = self.tree.audit([*nodes, *(n.id for n in self.node if isinstance(n, Node))])
        count = [0] * len(self.refs)
        for table in tables:
            if len(set(table)) != len(table):
                wrong.append(f"a block stands twice in one table: {table}")
            for block in table:
                count[block] += 1
        for blocks in (self.aside, *self.in_flight.values()):
            for block in blocks:
                count[block] += 1
        if count != self.refs:
            bad = [(b, count[b], self.refs[b]) for b in range(len(self.refs)) if count[b] != self.refs[b]]
            wrong.append(f"references differ from tables (block, counted, kept): {bad[:4]}")
        free = set(self.free)
        if len(free) != len(self.free):
            wrong.append("a block is twice in the free list")
        if not len(self.refs) == len(self.fill) == len(self.node) <= self.num_blocks:
            wrong.append(f"{len(self.refs)} of {self.num_blocks} blocks are written out, but not everywhere")
        num_idle = 0
        for block in range(len(self.refs)):
            in_free, in_idle, held = block in free, block in self.idle, self.refs[block] > 0
            num_idle += in_idle
            if in_free + in_idle + held != 1:
                wrong.append(f"block {block}: free={in_free} idle={in_idle} refs={self.refs[block]}")
            node = self.node[block]
            if in_free and node is not None:
                wrong.append(f"block {block} is free but published")
            if in_idle and node is None:
                wrong.append(f"block {block} is idle-cached but not published")
            if isinstance(node, Node):
                if self.index.get((node.id, node.group)) != block or self.tree.find(*node.key) != node.id:
                    wrong.append(f"block {block} is published but the index finds another")
                if self.fill[block] != self.block_size:
                    wrong.append(f"block {block} is published with {self.fill[block]} of {self.block_size} slots")
            if not 0 <= self.fill[block] <= self.block_size:
                wrong.append(f"block {block}: fill {self.fill[block]}")
        if num_idle != len(self.idle):
            wrong.append("the idle order holds blocks that are not idle")
        if len(self.index) != sum(n is not None for n in self.node):
            wrong.append("the prefix index holds blocks that are not published")
        if self.held != sum(r > 0 for r in self.refs):
            wrong.append(f"held={self.held} is miscounted")
        used = sum(f for f, r in zip(self.fill, self.refs, strict=True) if r > 0)
        if self.used != used:
            wrong.append(f"used={self.used} slots, counted {used}")
        return wrong
