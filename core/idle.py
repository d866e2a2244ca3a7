"""Orders in which idle cached blocks are given up; KV cache plugins choose one or bring their own."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from twinfer.core.errors import PluginError
from twinfer.core.guard import FAULTS, Blaming, raised
from twinfer.core.policy import IdleOrder, KVCache


class LRU:
    """The block that became idle first is reused first.

    Blocks come and go in runs, of which nobody asks for a single one until a prefix is hit for the first time: up to
    then only the runs are kept (`_runs`), from then on each block has its number in the queue (`_place`). A block that
    is removed leaves its place in the queue behind, which counts for nobody.
    """

    def __init__(self) -> None:
        self._runs: deque[list[int]] | None = deque()  # oldest first; in each, the oldest last
        self._size = 0  # blocks in the runs
        self._queue: deque[int] = deque()
        self._first = 0  # number of the first place in the queue
        self._place: dict[int, int] = {}

    def add(self, block: int) -> None:
        self.adds((block,))

    def adds(self, blocks: Sequence[int]) -> None:
        """`add` of each, in this order."""
        if self._runs is not None:
            self._runs.append(list(blocks[::-1]))
            self._size += len(blocks)
            return
        at = self._first + len(self._queue)
        self._place.update(zip(blocks, range(at, at + len(blocks)), strict=True))
        self._queue.extend(blocks)

    def remove(self, block: int) -> None:
        places = self._places()
        del places[block]
        if len(self._queue) > 2 * len(places) + 64:  # mostly places of nobody
            self._number(sorted(places, key=places.__getitem__))

    def pop(self) -> int:
        return self.pops(1)[0]

    def pops(self, count: int) -> list[int]:
        """What `count` calls of `pop` give."""
        if self._runs is None:
            return [self._next() for _ in range(count)]
        self._size -= count
        popped: list[int] = []
        while count:
            run = self._runs[0]
            popped += run[: -count - 1 : -1]
            if len(run) <= count:
                count -= len(run)
                self._runs.popleft()
            else:
                del run[-count:]
                count = 0
        return popped

    def _next(self) -> int:
        while True:
            block = self._queue.popleft()
            place = self._first
            self._first += 1
            if self._place.get(block) == place:
                del self._place[block]
                return block

    def _places(self) -> dict[int, int]:
        if self._runs is not None:
            self._number(block for run in self._runs for block in reversed(run))
            self._runs = None
        return self._place

    def _number(self, blocks: Iterator[int] | Sequence[int]) -> None:
        self._queue = deque(blocks)
        self._first = 0
        self._place = {block: place for place, block in enumerate(self._queue)}

    def __len__(self) -> int:
        return self._size if self._runs is not None else len(self._place)

    def __contains__(self, block: object) -> bool:
        return block in self._places()


class CheckedOrder:
    """The order that a plugin brought, held to what it was given: every call that breaks its contract is a PluginError that
    names the KV cache `owner` and what it did, when it does it and not when a block is missed."""

    def __init__(self, order: IdleOrder, owner: str) -> None:
        self._order, self._owner = order, owner
        self._given: set[int] = set()

    def add(self, block: int) -> None:
        self._given.add(block)
        self._call("add", block)
        self._look("add", block)

    def adds(self, blocks: Sequence[int]) -> None:
        """`add` of each, in this order."""
        for block in blocks:
            self.add(block)

    def remove(self, block: int) -> None:
        self._given.discard(block)
        self._call("remove", block)
        self._look("remove", block)

    def pop(self) -> int:
        block: int = self._call("pop")
        if not isinstance(block, int) or block not in self._given:
            raise self._broken(f"pop gave {block!r}, which is none of the {len(self._given)} idle blocks")
        self._given.discard(block)
        self._look("pop", block)
        return block

    def pops(self, count: int) -> list[int]:
        """What `count` calls of `pop` give."""
        return [self.pop() for _ in range(count)]

    def __len__(self) -> int:
        return len(self._given)

    def __contains__(self, block: object) -> bool:
        return block in self._given

    def _call(self, name: str, *given: int) -> Any:
        try:
            return getattr(self._order, name)(*given)
        except FAULTS as error:
            raise self._broken(
                f"{name}({', '.join(map(str, given))}) failed with {len(self._given)} idle blocks ({raised(error)})"
            ) from error

    def _look(self, name: str, block: int) -> None:
        """After `name` of `block`: it holds what it was given, neither less nor more."""
        held = self._call("__len__")
        inside = bool(self._call("__contains__", block))
        if held != len(self._given):
            raise self._broken(f"holds {held} blocks after {name} of block {block}, and was given {len(self._given)}")
        if inside != (block in self._given):
            raise self._broken(f"says {inside} when asked for block {block} after its {name}")

    def _broken(self, problem: str) -> PluginError:
        kind = type(self._order)
        return PluginError(
            f"KV cache {self._owner!r}: its idle order {kind.__qualname__} ({kind.__module__}): {problem}"
        )


def order_of(cache: KVCache) -> LRU | CheckedOrder:
    """The order of a new pool of `cache`."""
    with Blaming("kv_cache", cache, "idle_order"):
        order = cache.idle_order()
    return order if type(order) is LRU else CheckedOrder(order, getattr(cache, "name", type(cache).__name__))


__all__ = ["LRU", "CheckedOrder", "order_of"]
