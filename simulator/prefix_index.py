"""Who has seen which beginning of a prompt: a tree of blocks of tokens, with its holders at each node.

Used for what a router remembers of the prompts that it sent, and for what a KV tier keeps. A holder has room for so
many nodes and lets go of those that it used longest ago.

Invariants
* A node is found by (parent, its token ids): a match is exact, as in the engine's own prefix cache.
* A holder of a node holds its parent: a path is refreshed from its end to its root, so leaves go first.
* A node lives as long as it has a holder. One request costs one walk over its blocks, however many holders there are.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from twinfer.core.request import Request

Block = tuple[int, ...]


class PrefixIndex:
    """`block`: tokens per node."""

    def __init__(self, block: int) -> None:
        self.block = block
        self._ids: dict[tuple[object, Block], int] = {}
        self._keys: dict[int, tuple[object, Block]] = {}
        self._holders: dict[int, dict[object, None]] = {}
        self._age: dict[object, OrderedDict[int, None]] = {}  # holder -> its nodes, least recently used first
        self._next = 0
        self._last: tuple[Request, dict[object, int]] | None = None  # answers for the latest request that was asked for

    def held(self, holder: object) -> int:
        """Nodes of `holder`."""
        return len(self._age.get(holder, ()))

    def depths(self, request: Request) -> dict[object, int]:
        """Tokens at the start of the prompt of `request` that each holder has; holders of none are left out."""
        if self._last is not None and self._last[0] is request:
            return self._last[1]
        found: dict[object, int] = {}
        node: object = _root(request)
        prompt, size = request.prompt, self.block
        for start in range(0, len(prompt) - size + 1, size):
            below = self._ids.get((node, tuple(prompt[start : start + size])))
            if below is None:
                break
            for holder in self._holders[below]:
                found[holder] = start + size
            node = below
        self._last = (request, found)
        return found

    def note(self, holder: object, request: Request, room: int, tail: Sequence[int] = ()) -> int:
        """`holder` has the prompt of `request`, and `tail` behind it; returns how many nodes are new to it.

        room: nodes that it can hold.
        """
        self._last = None
        age = self._age.setdefault(holder, OrderedDict())
        prompt, size = request.prompt, self.block
        split, length = len(prompt), len(prompt) + len(tail)
        path: list[int] = []
        node: object = _root(request)
        new = 0
        for start in range(0, min(length - size + 1, room * size), size):
            stop = start + size
            if stop <= split:
                tokens = tuple(prompt[start:stop])
            else:
                tokens = (*prompt[start:split], *tail[max(0, start - split) : stop - split])
            key = (node, tokens)
            below = self._ids.get(key)
            if below is None:
                below = self._ids[key] = self._next
                self._next += 1
                self._keys[below] = key
                self._holders[below] = {}
            if holder not in self._holders[below]:
                self._holders[below][holder] = None
                new += 1
            path.append(below)
            node = below
        for below in reversed(path):
            age[below] = None
            age.move_to_end(below)
        while len(age) > room:
            self._drop(age.popitem(last=False)[0], holder)
        return new

    def forget(self, holder: object) -> None:
        """`holder` has lost everything."""
        self._last = None
        for node in list(self._age.pop(holder, ())):
            self._drop(node, holder)

    def _drop(self, node: int, holder: object) -> None:
        holders = self._holders[node]
        del holders[holder]
        if not holders:
            del self._holders[node], self._ids[self._keys.pop(node)]

    def audit(self) -> list[str]:
        """Violated invariants."""
        wrong = []
        for node, (parent, _) in self._keys.items():
            if not self._holders[node]:
                wrong.append(f"node {node} has no holder")
            missing = [h for h in self._holders[node] if isinstance(parent, int) and h not in self._holders[parent]]
            if missing:
                wrong.append(f"holders {missing} of node {node} do not hold its parent")
        counted = sum(len(holders) for holders in self._holders.values())
        if counted != sum(len(age) for age in self._age.values()):
            wrong.append("ages and holders differ")
        if {key: node for node, key in self._keys.items()} != self._ids:
            wrong.append("nodes are not found where they are")
        return wrong


def _root(request: Request) -> object:
    return ("root", request.adapter, request.cache_salt)


__all__ = ["PrefixIndex"]
