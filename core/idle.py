"""Orders in which idle cached blocks are given up; KV cache plugins choose one or bring their own."""

from __future__ import annotations


class LRU:
    """The block that became idle first is reused first."""

    def __init__(self) -> None:
        self._blocks: dict[int, None] = {}  # insertion order is age

    def add(self, block: int) -> None:
        self._blocks[block] = None

    def remove(self, block: int) -> None:
        del self._blocks[block]

    def pop(self) -> int:
        block = next(iter(self._blocks))
        del self._blocks[block]
        return block

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block: object) -> bool:
        return block in self._blocks
