"""Guesses that branch: which are made, how many of them are likely to be right, and which are when chance has spoken.

    (0,)         the likeliest next token
    (1,)         the second likeliest
    (0, 0)       the likeliest token after (0,), and so on

A node is the ranks on the way to it. At most one of a node's children can be right, so their chances add up to at most one, and the
tokens that a step yields on average are 1 + the sum over nodes of the product of the chances on the way to it (Medusa,
arXiv:2401.10774; Sequoia, arXiv:2402.12374). A chain is a tree of one child a node; then that is (1 - a^(k+1)) / (1 - a).

Invariants
* Guesses stand by how likely they are, parents before their children: the first ones, however many, are the best tree of that size
  within the tree. So a step that has no room for all of them checks the first.
* Equal arguments give equal trees.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush

Node = tuple[int, ...]
"""Ranks of the guesses on the way from the last token, each from 0, the likeliest."""
Chance = Callable[[int, int], float]
"""(depth from 1, rank from 0) -> probability that this guess is right, its parent being right."""

MOST_NODES = 1024


class GuessTree:
    """The guesses of one step. Raises ValueError for nodes without parents, twice the same, or too many."""

    def __init__(self, nodes: Sequence[Node], chance: Chance) -> None:
        if len(nodes) > MOST_NODES:
            raise ValueError(f"a tree of {len(nodes)} guesses: at most {MOST_NODES} are modelled")
        likely: dict[Node, float] = {(): 1.0}
        for node in sorted(nodes, key=len):
            if not node or node[:-1] not in likely:
                raise ValueError(f"guess {name(node)!r} has no parent {name(node[:-1])!r} in the tree")
            if node in likely:
                raise ValueError(f"guess {name(node)!r} is there twice")
            likely[node] = likely[node[:-1]] * chance(len(node), node[-1])
        self.nodes = tuple(sorted(nodes, key=lambda node: (-likely[node], len(node), node)))
        self._likely = [likely[node] for node in ((), *self.nodes)]
        places = {node: number for number, node in enumerate(((), *self.nodes))}
        self._children: list[list[tuple[float, float, int]]] = [[] for _ in places]
        for node in self.nodes:
            depth, rank = len(node), node[-1]
            low = math.fsum(chance(depth, better) for better in range(rank))
            self._children[places[node[:-1]]].append((low, low + chance(depth, rank), places[node]))

    def __len__(self) -> int:
        return len(self.nodes)

    @property
    def depth(self) -> int:
        """Most guesses that can be right in one step."""
        return max(map(len, self.nodes), default=0)

    @property
    def widths(self) -> tuple[int, ...]:
        """Nodes at depth 0 (the last token), 1, ... that have children: what drafts must be fed to make the next depth."""
        found = [0] * self.depth
        for node, children in zip(((), *self.nodes), self._children, strict=True):
            if children:
                found[len(node)] += 1
        return tuple(found)

    def mean_tokens(self, checked: int | None = None) -> float:
        """Expected tokens of a step that checks the first `checked` guesses (all): those that are right, and one more."""
        count = len(self.nodes) if checked is None else min(checked, len(self.nodes))
        return math.fsum(self._likely[: count + 1])

    def accepted(self, checked: int, draw: Callable[[int], float]) -> int:
        """How many guesses are right when the first `checked` are checked; `draw(i)`: uniform, of the i-th token from 0."""
        node = right = 0
        while self._children[node]:
            u = draw(right)
            node = next((n for low, high, n in self._children[node] if low <= u < high), 0)
            if not node or node > checked:
                break
            right += 1
        return right


def chain(length: int) -> tuple[Node, ...]:
    """One guess after the other."""
    return tuple((0,) * depth for depth in range(1, length + 1))


def full(widths: Sequence[int]) -> tuple[Node, ...]:
    """Each guess of one depth is followed by as many candidates as the next width says. Raises ValueError for too many."""
    if any(width < 1 for width in widths):
        raise ValueError("each depth has at least one candidate")
    total = sum(math.prod(widths[:depth]) for depth in range(1, len(widths) + 1))
    if total > MOST_NODES:
        raise ValueError(f"a tree of {total} guesses: at most {MOST_NODES} are modelled")
    nodes: list[Node] = []
    level: list[Node] = [()]
    for width in widths:
        level = [(*node, rank) for node in level for rank in range(width)]
        nodes += level
    return tuple(nodes)


def likeliest(count: int, depth: int, chance: Chance) -> tuple[Node, ...]:
    """The `count` guesses that are right most often, at most `depth` deep: no tree of that size yields more tokens."""
    ranks = [sorted(range(count), key=lambda rank: (-chance(at, rank), rank)) for at in range(1, depth + 1)]
    # Of a parent only the best child not yet taken is on offer: (-likelihood, parent, place among the ranks).
    offers: list[tuple[float, Node, int]] = [(-chance(1, ranks[0][0]), (), 0)] if depth and count else []
    heapify(offers)
    found: dict[Node, float] = {(): 1.0}
    while offers and len(found) <= count:
        minus, parent, place = heappop(offers)
        if not minus:
            break  # what is left is never right
        order = ranks[len(parent)]
        node = (*parent, order[place])
        found[node] = -minus
        if place + 1 < len(order):
            heappush(offers, (-found[parent] * chance(len(node), order[place + 1]), parent, place + 1))
        if len(node) < depth:
            heappush(offers, (minus * chance(len(node) + 1, ranks[len(node)][0]), node, 0))
    return tuple(found)[1:]


def parse(text: str) -> tuple[int, ...] | tuple[Node, ...]:
    """`4x2x1`, candidates at each depth, or guesses by their ranks, `0 1 0.0 0.1`. Raises ValueError."""
    try:
        if "x" in text:
            return tuple(int(width) for width in text.split("x"))
        return tuple(tuple(int(rank) for rank in node.split(".")) for node in text.split())
    except ValueError:
        raise ValueError(
            f"{text!r} is no tree: write candidates at each depth (4x2x1), the guesses by their ranks (0 1 0.0 0.1), or how many"
        ) from None


def name(node: Node) -> str:
    return ".".join(map(str, node))


__all__ = ["MOST_NODES", "Chance", "GuessTree", "Node", "chain", "full", "likeliest", "name", "parse"]
