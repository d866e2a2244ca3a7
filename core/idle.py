"""Orders in which idle cached blocks are given up; KV cache plugins choose one or bring their own."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable


class LRU:
    """The block that became idle first is reused first."""

    def __init__(self) -> None:
        # Insertion order is age. A plain dict would walk over all that was popped before to find its first key.
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def add(self, block: int) -> None:
        self._blocks[block] = None

    def remove(self, block: int) -> None:
        del self._blocks[block]

    def pop(self) -> int:
        return self._blocks.popitem(last=False)[0]

    def adds(self, blocks: Iterable[int]) -> None:
        """`add` of each, in this order; none of them is here."""
        self._blocks.update(dict.fromkeys(blocks))

    def pops(self, count: int) -> list[int]:
        """What `count` calls of `pop` give."""
        pop = self._blocks.popitem
        return [pop(last=False)[0] for _ in range(count)]

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block: object) -> bool:
        return block in self._blocks
