"""The block pool: one state per block, exact hits, tail-first eviction, and a machine against a plain model."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from twinfer.core.blocks import BlockPool
from twinfer.core.idle import LRU

ROOT = ("root", "m", "", "")


def make_pool(num_blocks: int = 6, block_size: int = 2) -> BlockPool:
    return BlockPool(num_blocks, block_size, LRU())


def fill(pool: BlockPool, block: int, parent: object, *tokens: int) -> int:
    pool.fill_to(block, pool.block_size)
    return publish(pool, block, parent, tokens)


def publish(pool: BlockPool, block: int, parent: object, tokens: tuple[int, ...], group: int = 0) -> int:
    node = pool.tree.enter(parent, tokens)
    pool.publish(block, node, group)
    return node


def test_blocks_are_taken_in_a_fixed_order_and_all_or_none() -> None:
    pool = make_pool()
    assert pool.take(3) == [0, 1, 2]
    assert pool.take(4) is None and pool.available == 3 and pool.audit([[0, 1, 2]]) == []
    assert pool.take(3) == [3, 4, 5] and pool.take(1) is None
    assert pool.take(0) == []


def test_a_pool_costs_what_is_used_of_it() -> None:
    """And its blocks come in the order in which they would if all were listed: those given back first, last ones before."""
    pool = make_pool(10**12)
    assert pool.take(3) == [0, 1, 2] and pool.take_one() == 3 and pool.available == 10**12 - 4
    pool.drop([1])
    pool.drop([3])
    assert pool.take(4) == [3, 1, 4, 5] and pool.num_idle == 0
    assert len(pool.refs) == len(pool.fill) == len(pool.node) < 20
    assert pool.audit([[0, 2, 3, 1, 4, 5]]) == []


@pytest.mark.parametrize("num_blocks", [1, 2, 3, 5, 8, 13])
def test_every_block_of_a_pool_can_be_had_once(num_blocks: int) -> None:
    for sizes in ([1] * num_blocks, [num_blocks], [1, num_blocks - 1]):
        pool = make_pool(num_blocks)
        taken = [block for size in sizes for block in pool.take(size) or ()]
        assert taken == list(range(num_blocks)) and pool.take(1) is None and pool.audit([taken]) == []


def test_the_tail_of_a_prefix_is_given_up_before_its_head() -> None:
    pool = make_pool(3)
    blocks = pool.take(3)
    assert blocks is not None
    parent: object = ROOT
    for i, block in enumerate(blocks):
        parent = fill(pool, block, parent, i, i)
    pool.drop(blocks)
    assert (pool.held, pool.used, pool.available, len(pool.idle)) == (0, 0, 3, 3)
    assert pool.take(1) == [2]
    assert pool.find(ROOT, (0, 0)) == 0
    assert pool.take(1) == [1]
    assert pool.find(ROOT, (0, 0)) == 0
    assert pool.take(1) == [0]
    assert pool.find(ROOT, (0, 0)) is None and not pool.index


def test_free_blocks_go_before_cached_ones() -> None:
    pool = make_pool(4)
    blocks = pool.take(2)
    assert blocks is not None
    fill(pool, blocks[0], ROOT, 1, 1)
    pool.drop(blocks)
    assert pool.take(3) == [1, 2, 3] and pool.find(ROOT, (1, 1)) == 0


def test_a_hit_brings_an_idle_block_back() -> None:
    pool = make_pool()
    (block,) = pool.take(1) or ()
    fill(pool, block, ROOT, 1, 2)
    pool.drop([block])
    assert pool.held == 0 and block in pool.idle
    pool.share(block)
    pool.share(block)
    assert (pool.refs[block], pool.held, pool.used, len(pool.idle)) == (2, 1, 2, 0)
    pool.drop([block])
    pool.drop([block])
    assert pool.find(ROOT, (1, 2)) == block and block in pool.idle


def test_equal_content_is_published_once_and_the_twin_hangs_below_the_first() -> None:
    pool = make_pool()
    first, second, child = pool.take(3) or ()
    node = fill(pool, first, ROOT, 1, 2)
    assert fill(pool, second, ROOT, 1, 2) == node
    assert pool.node[second] is None and pool.find(ROOT, (1, 2)) == first
    fill(pool, child, node, 3, 4)
    assert pool.find(node, (3, 4)) == child
    pool.drop([second])
    assert second in pool.free, "the twin was never published, so it is simply free"


def test_a_recomputed_block_takes_the_place_of_the_one_that_was_evicted() -> None:
    """What hung below the evicted block hangs below the new one, and is found again."""
    pool = make_pool()
    old_parent, child, grandchild, new_parent = pool.take(4) or ()
    parent_node = fill(pool, old_parent, ROOT, 1, 1)
    child_node = fill(pool, child, parent_node, 2, 2)
    fill(pool, grandchild, child_node, 3, 3)
    pool.drop([old_parent])
    for block in pool.take(3) or ():  # the two free ones, then the idle parent
        pool.drop([block])
    assert pool.find(ROOT, (1, 1)) is None and pool.find(parent_node, (2, 2)) == child
    assert fill(pool, new_parent, ROOT, 1, 1) == parent_node
    assert pool.find(ROOT, (1, 1)) == new_parent
    assert pool.find(parent_node, (2, 2)) == child and pool.find(child_node, (3, 3)) == grandchild
    assert pool.audit([[child], [grandchild], [new_parent]]) == []
    pool.drop([child, grandchild, new_parent])
    assert pool.take(6) is not None and not pool.tree.ids, "nodes go with what hangs at them and below them"


def test_a_node_has_one_block_of_each_group() -> None:
    pool = make_pool()
    first, second, twin = pool.take(3) or ()
    node = fill(pool, first, ROOT, 1, 1)
    for block in (second, twin):
        pool.fill_to(block, 2)
        assert publish(pool, block, ROOT, (1, 1), group=1) == node
    assert (pool.find(ROOT, (1, 1)), pool.find(ROOT, (1, 1), 1), pool.find(ROOT, (1, 1), 2)) == (first, second, None)
    assert pool.audit([[first], [second], [twin]]) == []
    pool.drop([first])
    for block in pool.take(4) or ():  # the three free ones, then the idle one
        pool.drop([block])
    assert pool.find(ROOT, (1, 1)) is None and pool.find(ROOT, (1, 1), 1) == second, "groups are cached apart"


def test_blocks_of_an_outstanding_step_are_in_flight_until_it_ends() -> None:
    pool = make_pool()
    blocks = pool.take(4) or []
    pool.drop(blocks[:2], until_step=7)
    pool.drop(blocks[2:], until_step=8)
    assert pool.available == 2 and pool.audit([]) == []
    pool.step_ended(6)
    assert pool.available == 2
    pool.step_ended(7)
    assert pool.available == 4 and pool.audit([]) == []
    pool.step_ended(7)
    pool.step_ended(8)
    assert pool.available == 6 and pool.in_flight == {}


def test_used_counts_committed_slots_of_held_blocks_once() -> None:
    pool = make_pool(4, 4)
    a, b = pool.take(2) or ()
    pool.fill_to(a, 4)
    pool.fill_to(b, 1)
    pool.share(a)
    assert (pool.held, pool.used) == (2, 5)
    pool.drop([a])
    assert pool.used == 5
    pool.drop([a, b])
    assert (pool.held, pool.used) == (0, 0)


def test_lru_gives_up_the_longest_idle_first_and_a_hit_makes_young() -> None:
    lru = LRU()
    for block in (4, 1, 3):
        lru.add(block)
    lru.remove(4)
    lru.add(4)
    assert 3 in lru and 9 not in lru and len(lru) == 3
    assert [lru.pop() for _ in range(3)] == [1, 3, 4] and len(lru) == 0


class PoolLife(RuleBasedStateMachine):
    """Random takes, shares, publications and drops; the model is a list of tables and what was written."""

    @initialize(num_blocks=st.integers(1, 8), block_size=st.sampled_from([1, 2, 3, 16, 64]))
    def start(self, num_blocks: int, block_size: int) -> None:
        self.pool = make_pool(num_blocks, block_size)
        self.tables: list[list[int]] = []
        self.in_flight: dict[int, list[int]] = {}
        self.content: dict[int, tuple[object, tuple[int, ...]]] = {}  # block -> where it was published
        self.step = 0

    @rule(count=st.integers(0, 5))
    def take(self, count: int) -> None:
        before = self.pool.available
        taken = self.pool.take(count)
        assert (taken is None) == (count > before)
        if taken is None:
            assert self.pool.available == before
            return
        held = {b for table in [*self.tables, *self.in_flight.values()] for b in table}
        assert len(set(taken)) == count and not held & set(taken)
        for block in taken:
            self.content.pop(block, None)
            assert self.pool.node[block] is None and self.pool.fill[block] == 0
        self.tables.append(taken)

    @precondition(lambda self: self.tables)
    @rule(which=st.integers(0, 9), tokens=st.integers(0, 1))
    def publish(self, which: int, tokens: int) -> None:
        table = self.tables[which % len(self.tables)]
        parent: object = ROOT
        for block in table:
            if self.pool.refs[block] != 1 and self.pool.node[block] is None:
                break
            if self.pool.node[block] is not None:
                parent = self.pool.node[block].id
                continue
            key = (tokens,) * self.pool.block_size
            twin = self.pool.find(parent, key)
            self.pool.fill_to(block, self.pool.block_size)
            node = publish(self.pool, block, parent, key)
            if twin is None:
                self.content[block] = (parent, key)
            else:
                assert node == self.pool.node[twin].id and self.pool.node[block] is None
            break

    @rule(which=st.integers(0, 9))
    def hit(self, which: int) -> None:
        """A hit finds exactly what was published at that place."""
        if not self.content:
            return
        block, (parent, key) = sorted(self.content.items())[which % len(self.content)]
        assert self.pool.find(parent, key) == block
        self.pool.share(block)
        self.tables.append([block])

    @rule(parent=st.integers(1, 50), token=st.integers(0, 1))
    def miss(self, parent: int, token: int) -> None:
        key = (parent, (token,) * self.pool.block_size)
        assert (self.pool.find(*key) is not None) == (key in self.content.values())

    @precondition(lambda self: self.tables)
    @rule(which=st.integers(0, 9), later=st.booleans())
    def drop(self, which: int, later: bool) -> None:
        table = self.tables.pop(which % len(self.tables))
        if later:
            self.step += 1
            self.in_flight[self.step] = table
        self.pool.drop(table, self.step if later else None)

    @precondition(lambda self: self.in_flight)
    @rule()
    def step_ended(self) -> None:
        step = next(iter(self.in_flight))
        del self.in_flight[step]
        self.pool.step_ended(step)

    @invariant()
    def sound(self) -> None:
        if not hasattr(self, "pool"):
            return
        pool = self.pool
        assert pool.audit(self.tables) == []
        held = {b for table in [*self.tables, *self.in_flight.values()] for b in table}
        assert pool.held == len(held) and pool.available == pool.num_blocks - len(held)
        published = {b for b, node in enumerate(pool.node) if node is not None}
        assert published == set(self.content), "cached until evicted, and never cached twice"
        assert set(pool.free) == set(range(len(pool.refs))) - held - published


def test_edge_24_allocate_free_and_evict_in_any_order() -> None:
    run_state_machine_as_test(
        PoolLife,
        settings=settings(max_examples=60, stateful_step_count=40, deadline=None, derandomize=True, database=None),
    )


@pytest.mark.parametrize("num_blocks", [1, 2, 5])
def test_edge_24_churn_never_loses_a_block(num_blocks: int) -> None:
    """Everything is cached, evicted and taken again, many times over."""
    pool = make_pool(num_blocks, 1)
    for i in range(50):
        blocks = pool.take(num_blocks)
        assert blocks is not None and sorted(blocks) == list(range(num_blocks))
        parent: object = ROOT
        for block in blocks:
            parent = fill(pool, block, parent, i)
        pool.drop(blocks)
        assert pool.audit([]) == [] and len(pool.index) == num_blocks
