"""A test that cannot fail is a defect: the oracle must find every fault put into the core on purpose."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from content_oracle import MemoryModel, Violation, World
from test_state_machine import WINDOWS, live

from twinfer.core import ledger as ledger_module
from twinfer.core.blocks import BlockPool
from twinfer.core.core import Core
from twinfer.core.ledger import Ledger
from twinfer.core.plan import FromStep, Need, StepPlan
from twinfer.core.planner import Planner, Tokens
from twinfer.core.prefix_tree import PrefixTree
from twinfer.core.request import Sequence

Patch = pytest.MonkeyPatch


def no_copy_on_write(patch: Patch) -> None:
    """Writes go into shared blocks."""
    grow = Ledger.grow

    def careless(self: Ledger, seq: Sequence, start: int, stop: int) -> object:
        index = start // self.block_size
        blocks = self.tables[seq.id].blocks
        if index < len(blocks):
            refs, self.pool.refs[blocks[index]] = self.pool.refs[blocks[index]], 1
            node, self.pool.node[blocks[index]] = self.pool.node[blocks[index]], None
            try:
                return grow(self, seq, start, stop)
            finally:
                self.pool.refs[blocks[index]], self.pool.node[blocks[index]] = refs, node
        return grow(self, seq, start, stop)

    patch.setattr(Ledger, "grow", careless)


def rejected_drafts_are_kept(patch: Patch) -> None:
    """The count of computed tokens includes drafts that were not accepted."""
    advance = Core._advance

    def eager(self: Core, seq: Sequence, computed: int) -> None:
        advance(self, seq, min(max(computed, seq.known - 1), seq.computed + 5) if seq.drafts else computed)

    patch.setattr(Core, "_advance", lambda self, seq, computed: eager(self, seq, computed + bool(seq.drafts)))


def preemptions_are_not_told(patch: Patch) -> None:
    """The executor keeps the old block table."""
    launch = Core.launch

    def silent(self: Core, planner: Planner) -> StepPlan:
        self.preempted = []
        return launch(self, planner)

    patch.setattr(Core, "launch", silent)


def parents_do_not_matter(patch: Patch) -> None:
    """Equal tokens hit whatever came before them."""
    enter, find = PrefixTree.enter, PrefixTree.find
    patch.setattr(PrefixTree, "enter", lambda self, parent, tokens: enter(self, "any", tokens))
    patch.setattr(PrefixTree, "find", lambda self, parent, tokens: find(self, "any", tokens))


def published_before_it_is_there(patch: Patch) -> None:
    """Blocks are shared as soon as they are planned."""
    row = Planner._row

    def early(self: Planner, seq: Sequence, start: int, tokens: Tokens, draft: int, need: Need, fed: int) -> None:
        row(self, seq, start, tokens, draft, need, fed)
        stop = min(start + fed - draft, seq.known)
        for index in range(seq.computed // self.ledger.block_size, -(-stop // self.ledger.block_size)):
            end = min(self.ledger.block_size, stop - index * self.ledger.block_size)
            block = self.ledger.tables[seq.id].blocks[index]
            self.ledger.pool.fill_to(block, max(end, self.ledger.pool.fill[block]))
        self.ledger.commit(seq, stop, stop)

    patch.setattr(Planner, "_row", early)


def tokens_of_the_wrong_step(patch: Patch) -> None:
    """Outstanding samples are named newest first."""
    row = Planner._row

    def swapped(self: Planner, seq: Sequence, *rest: object) -> None:
        row(self, seq, *rest)  # type: ignore[arg-type]
        last = self.rows[-1]
        tokens = [FromStep(t.step - 1, t.seq) if isinstance(t, FromStep) and t.step else t for t in last.tokens]
        self.rows[-1] = last._replace(tokens=tokens)

    patch.setattr(Planner, "_row", swapped)


def blocks_leave_before_their_step_is_done(patch: Patch) -> None:
    """What an outstanding row uses is handed to others."""
    drop = BlockPool.drop
    patch.setattr(BlockPool, "drop", lambda self, blocks, until_step=None: drop(self, blocks))


def loads_are_not_waited_for(patch: Patch) -> None:
    """A block that a transfer fills is released at once."""
    finish = Core.finish

    def hasty(self: Core, seq: Sequence, reason: str, detail: str = "") -> None:
        loading = self.transfers.get(seq.id) == "load"
        finish(self, seq, reason, detail)
        if loading:
            self.ledger.release(seq, None)
            self.ledger.tables[seq.id] = ledger_module.Table()

    patch.setattr(Core, "finish", hasty)


def chunks_skip_a_token(patch: Patch) -> None:
    """Off by one after a chunk."""
    row = Planner._row

    def skipping(self: Planner, seq: Sequence, start: int, tokens: Tokens, draft: int, need: Need, fed: int) -> None:
        shift = 1 if fed - draft > 2 and start else 0
        row(self, seq, start + shift, tokens[shift:], draft, need, fed - shift)

    patch.setattr(Planner, "_row", skipping)


def windows_are_left_too_early(patch: Patch) -> None:
    """A block goes while the next token still reads its last position."""
    low = Ledger.low
    patch.setattr(Ledger, "low", lambda self, window, position: low(self, window, position + 1))


def hits_need_not_cover_the_window(patch: Patch) -> None:
    """A prefix counts as cached although a sliding group has lost what would be read of it."""
    patch.setattr(Ledger, "_covered", lambda self, found, length: length)


def forks_from_what_the_leader_has_left(patch: Patch) -> None:
    """A fork shares the leader's blocks although its window begins before the leader's."""
    patch.setattr(Ledger, "can_fork", lambda self, seq, leader: True)


def groups_are_mixed_up(patch: Patch) -> None:
    """Blocks of one group are told for another."""
    launch = Core.launch

    def swapped(self: Core, planner: Planner) -> StepPlan:
        planner.grants.sort(key=lambda grant: -grant.group)
        groups = {g.group for g in planner.grants}
        planner.grants[:] = [g._replace(group=max(groups) - g.group) for g in planner.grants]
        return launch(self, planner)

    patch.setattr(Core, "launch", swapped)


WINDOW_FAULTS = (
    windows_are_left_too_early,
    hits_need_not_cover_the_window,
    forks_from_what_the_leader_has_left,
    groups_are_mixed_up,
)

FAULTS = (
    no_copy_on_write,
    rejected_drafts_are_kept,
    preemptions_are_not_told,
    parents_do_not_matter,
    published_before_it_is_there,
    tokens_of_the_wrong_step,
    blocks_leave_before_their_step_is_done,
    loads_are_not_waited_for,
    chunks_skip_a_token,
)


@pytest.mark.parametrize("fault", FAULTS + WINDOW_FAULTS, ids=lambda fault: fault.__name__)
def test_every_fault_is_found(fault: Callable[[Patch], None], monkeypatch: Patch) -> None:
    fault(monkeypatch)
    # The content alone must give it away: the core's own audit is silenced.
    monkeypatch.setattr(Core, "audit", lambda self: [])
    for life in range(60):
        try:
            live("continuous", random.Random(f"fault-{life}"), 200, WINDOWS if fault in WINDOW_FAULTS else ((None,),))
        except Violation:
            return
        except (AssertionError, IndexError, KeyError, ValueError, RuntimeError):
            continue  # the core tripped over its own fault; the oracle must find it in another life
    pytest.fail(f"{fault.__name__} went unseen")


def test_two_writers_of_one_block_are_found() -> None:
    """Rows of a step run at once, so a block that one row writes may stand in no other table."""
    from twinfer.core.plan import Grant, Need, Row
    from twinfer.core.request import Request

    memory = MemoryModel(2, 4)
    for name in "ab":
        memory.admit(Request(id=name, prompt=(1, 2)), ((name, 0),))
    row = Row("a", 0, (1, 2), 0, Need.LAST, 0)
    shared = (Grant("a", 0, (0,), 1), Grant("b", 0, (0,), 1))
    with pytest.raises(Violation, match="block 0 is written for a while it stands in the table of b"):
        memory.execute(StepPlan(0, (row,), shared))


def test_the_world_counts_what_it_reads() -> None:
    worlds: list[World] = [live("continuous", random.Random(seed), 200) for seed in range(3)]
    assert sum(world.memory.rows_checked for world in worlds) > 90
    assert sum(world.memory.tokens_read for world in worlds) > 900
