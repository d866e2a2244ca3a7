"""Which layers share a block table: cache groups, made of layers whose attention has the same window.

    layers            0:w 1:w 2:w 3:full 4:w 5:w 6:w 7:full        (w: window of that many tokens)
    groups            (0, 1), (2, 4), (5, 6): w    (3, 7): full
    a page of KV      block_size tokens x the layers of one group

All groups draw pages from one pool, so pages must be equally large: groups have equally many layers. That number is
the greatest common divisor of the counts of the kinds, and then nothing is wasted. Where that would make more than
`MOST_GROUPS` groups, the last group of a kind may have fewer layers than a page has room for: first as little room as
possible is lost in groups with full attention, whose pages grow with the context, then in the others.

Invariants
* Every layer is in exactly one group; layers of a group have one window and ascend.
* A window that the model's context cannot exceed counts as full attention.
* A model of one kind has exactly one group.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple

MOST_GROUPS = 8
"""More groups save nothing more, but cost tables and index work at every step."""


class CacheGroup(NamedTuple):
    """Layers with one block table. `window`: of their attention, None for full."""

    window: int | None
    layers: tuple[int, ...]


def cache_groups(windows: Sequence[int | None], max_context: int | None = None) -> tuple[CacheGroup, ...]:
    """Groups of a model whose layer i has attention window `windows[i]` (None: full); full attention comes first."""
    kinds: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        full = window is None or (max_context is not None and window >= max_context)
        kinds.setdefault(None if full else window, []).append(layer)
    size = _layers_per_group([(window, len(layers)) for window, layers in kinds.items()])
    order = sorted(kinds, key=lambda window: (window is not None, window or 0))
    return tuple(
        CacheGroup(window, tuple(kinds[window][at : at + size]))
        for window in order
        for at in range(0, len(kinds[window]), size)
    )


def layers_per_page(groups: Sequence[CacheGroup]) -> int:
    """Layers that a page has room for."""
    return max(len(group.layers) for group in groups)


class Paging(NamedTuple):
    """How many pages sequences take: `block_size` tokens x the layers of a group each."""

    block_size: int
    groups: tuple[CacheGroup, ...]

    @property
    def share(self) -> float:
        """Part of what a token adds to all layers that it adds to one page."""
        return layers_per_page(self.groups) / sum(len(group.layers) for group in self.groups)

    def pages(self, length: int) -> int:
        """Pages of one sequence of `length` tokens that decodes: all of it, or the most that a window takes."""
        return sum(count * pages for count, pages in self._terms(length))

    def pages_of(self, lengths: Iterable[int]) -> int:
        return sum(self.pages(length) for length in lengths)

    def longest(self, num_pages: int, most: int) -> int:
        """Tokens of the longest sequence, up to `most`, that fits in `num_pages`."""
        if len(self.groups) == 1 and self.groups[0].window is None:
            return min(most, num_pages * self.block_size)
        return bisect_right(range(1, most + 1), num_pages, key=self.pages)

    def equation(self, length: int) -> str:
        """Arithmetic of `pages(length)`: groups x pages of each, by window."""
        terms = [f"{count} * {pages}" if count > 1 else f"{pages}" for count, pages in self._terms(length)]
        return " + ".join(terms) if len(terms) == 1 else f"({' + '.join(terms)})"

    def _terms(self, length: int) -> list[tuple[int, int]]:
        """(groups, pages of each) by window."""
        whole = -(-length // self.block_size)
        counts: dict[int | None, int] = {}
        for group in self.groups:
            counts[group.window] = counts.get(group.window, 0) + 1
        # wherever blocks begin, `window` tokens in a row lie in no more than this many
        return [
            (n, whole if window is None else min(whole, (window + self.block_size - 2) // self.block_size + 1))
            for window, n in counts.items()
        ]


def one_group(num_layers: int) -> tuple[CacheGroup, ...]:
    """All layers with one table that keeps every token, whatever their windows."""
    return (CacheGroup(None, tuple(range(num_layers))),)


def _layers_per_group(kinds: Sequence[tuple[int | None, int]]) -> int:
    """The number of layers per group that loses least: (room in full groups, room in all, groups)."""

    def lost(size: int) -> tuple[int, int, int]:
        full = sum(-count % size for window, count in kinds if window is None)
        return full, sum(-count % size for _, count in kinds), sum(-(-count // size) for _, count in kinds)

    sizes = range(1, max(count for _, count in kinds) + 1)
    return min((size for size in sizes if len(kinds) > MOST_GROUPS or lost(size)[2] <= MOST_GROUPS), key=lost)
