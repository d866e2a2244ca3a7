"""A plugin's order of idle blocks that breaks its contract is told at that call, by name, with what it did."""

from __future__ import annotations

from typing import Any

import pytest

from twinfer.core.core import Core
from twinfer.core.errors import PluginError
from twinfer.core.events import StepDone, Submit
from twinfer.core.idle import LRU, CheckedOrder, order_of
from twinfer.core.params import SamplingParams
from twinfer.core.plan import Need, RowResult, StepPlan, StepResult
from twinfer.core.policy import Limits
from twinfer.core.request import Request
from twinfer.plugins.kv_cache.paged import Paged
from twinfer.plugins.scheduler.continuous import Continuous


class MRU:
    """The block that became idle last is reused first; a sound order, and no LRU."""

    def __init__(self) -> None:
        self.blocks: list[int] = []

    def add(self, block: int) -> None:
        self.blocks.append(block)

    def remove(self, block: int) -> None:
        self.blocks.remove(block)

    def pop(self) -> int:
        return self.blocks.pop()

    def __len__(self) -> int:
        return len(self.blocks)

    def __contains__(self, block: object) -> bool:
        return block in self.blocks


class Loses(MRU):
    def add(self, block: int) -> None:
        if block % 3:
            super().add(block)


class Keeps(MRU):
    def remove(self, block: int) -> None:
        pass


class Invents(MRU):
    def pop(self) -> int:
        return super().pop() + 1000


class Repeats(MRU):
    def pop(self) -> int:
        return self.blocks[-1]


class Breaks(MRU):
    def pop(self) -> int:
        raise KeyError("lru")


class Denies(MRU):
    def __contains__(self, block: object) -> bool:
        return False


class Swaps(MRU):
    """As many blocks as it was given, but others."""

    def add(self, block: int) -> None:
        super().add(block + 500)


def mine(order: type[Any]) -> Paged:
    class Mine(Paged):
        name = "mine"

        def idle_order(self) -> Any:
            return order()

    return Mine(Paged.Options(block_size=4, headroom=0))


def play(cache: Paged) -> list[str]:
    """Requests of which some share prompts, in a pool of few blocks: orders are added to, removed from and popped."""
    core = Core(Continuous(), cache, Limits(max_model_len=64, num_blocks=10, max_num_seqs=2))
    wrong: list[str] = []
    for number, first in enumerate((1, 1, 2, 3, 1, 4, 2, 5)):
        prompt = tuple(range(20 * first, 20 * first + 17))
        core.receive(
            Submit(Request(id=f"r{number}", prompt=prompt, params=SamplingParams(max_tokens=2, ignore_eos=True))), 0.0
        )
        while isinstance(plan := core.next_step(0.0), StepPlan):
            rows = tuple(RowResult(() if row.need is Need.NONE else (7,)) for row in plan.rows)
            core.receive(StepDone(plan.step, StepResult(rows)), 0.0)
            wrong += core.audit()
    return wrong


def test_a_sound_order_is_taken_as_it_is() -> None:
    assert play(mine(MRU)) == [] == play(mine(LRU))
    assert isinstance(order_of(mine(MRU)), CheckedOrder) and type(order_of(mine(LRU))) is LRU


@pytest.mark.parametrize(
    ("order", "words"),
    [
        (Loses, ("after add of block", "was given")),
        (Keeps, ("after remove of block", "was given")),
        (Invents, ("pop gave 10", "none of the")),
        (Repeats, ("after pop of block",)),
        (Breaks, ("pop() failed", "KeyError: 'lru'")),
        (Denies, ("says False when asked for block",)),
        (Swaps, ("says False when asked for block",)),
    ],
)
def test_what_breaks_the_contract_is_told_when_it_does(order: type[Any], words: tuple[str, ...]) -> None:
    with pytest.raises(PluginError) as caught:
        play(mine(order))
    for word in ("KV cache 'mine'", order.__name__, *words):
        assert word in str(caught.value), (word, str(caught.value))
