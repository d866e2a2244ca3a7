"""Orders in which idle cached blocks are given up; KV cache plugins choose one or bring their own."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class LRU:
    """The block that became idle first is reused first.

    A queue in which a block that was removed leaves its place behind: it counts only if its number is the one noted.
    """

    def __init__(self) -> None:
        self._queue: deque[int] = deque()
        self._first = 0  # number of the first place in the queue
        self._place: dict[int, int] = {}  # of each block that is here

    def add(self, block: int) -> None:
        self._place[block] = self._first + len(self._queue)
        self._queue.append(block)

    def adds(self, blocks: Sequence[int]) -> None:
        """`add` of each, in this order."""
        at = self._first + len(self._queue)
        self._place.update(zip(blocks, range(at, at + len(blocks)), strict=True))
        self._queue.extend(blocks)

    def remove(self, block: int) -> None:
        del self._place[block]
        if len(self._queue) > 2 * len(self._place) + 64:  # mostly places of nobody
            self._queue = deque(sorted(self._place, key=self._place.__getitem__))
            self._first = 0
            self._place = {block: place for place, block in enumerate(self._queue)}

    def pop(self) -> int:
        while True:
            block = self._queue.popleft()
            place = self._first
            self._first += 1
            if self._place.get(block) == place:
                del self._place[block]
                return block

    def pops(self, count: int) -> list[int]:
        """What `count` calls of `pop` give."""
        if len(self._queue) > len(self._place):
            return [self.pop() for _ in range(count)]
        popleft, place = self._queue.popleft, self._place
        blocks = [popleft() for _ in range(count)]
        for block in blocks:
            del place[block]
        self._first += count
        return blocks

    def __len__(self) -> int:
        return len(self._place)

    def __contains__(self, block: object) -> bool:
        return block in self._place
