"""Trees of guesses: every outcome counted one by one as the oracle, and all trees of a size for the best one."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import pytest

from twinfer.core.guess_tree import Chance, GuessTree, Node, chain, full, likeliest, parse

RANKED = ((0.5, 0.2, 0.1), (0.4, 0.3, 0.05), (0.6, 0.1, 0.1))  # by depth, by rank


def ranked(depth: int, rank: int) -> float:
    return RANKED[depth - 1][rank] if rank < 3 else 0.0


def brute_force(nodes: Sequence[Node], chance: Chance, depth: int) -> float:
    """Expected tokens of a step: over all ranks that the right tokens may have (3: none of the ranked ones)."""
    total = 0.0
    for right in itertools.product(range(4), repeat=depth):
        likely = math.prod(
            chance(d, r) if r < 3 else 1 - sum(chance(d, i) for i in range(3)) for d, r in enumerate(right, 1)
        )
        stay = next((d for d in range(depth) if right[: d + 1] not in nodes), depth)
        total += likely * (stay + 1)
    return total


TREES: tuple[tuple[Node, ...], ...] = (
    chain(3),
    full((3, 2, 1)),
    full((1, 3, 2)),
    ((0,), (2,), (2, 1), (2, 1, 0)),
    ((1,), (1, 0), (1, 2)),
)


@pytest.mark.parametrize("nodes", TREES)
def test_expected_tokens_are_those_of_all_outcomes(nodes: tuple[Node, ...]) -> None:
    tree = GuessTree(nodes, ranked)
    assert tree.mean_tokens() == pytest.approx(brute_force(nodes, ranked, 3), rel=1e-12)
    for checked in range(len(tree) + 1):
        assert tree.mean_tokens(checked) == pytest.approx(brute_force(tree.nodes[:checked], ranked, 3), rel=1e-12)


@pytest.mark.parametrize(("a", "k"), [(0.0, 3), (0.3, 1), (0.7, 4), (1.0, 5)])
def test_a_chain_follows_its_closed_form(a: float, k: int) -> None:
    tree = GuessTree(chain(k), lambda depth, rank: a if rank == 0 else 0.0)
    assert tree.mean_tokens() == pytest.approx(k + 1 if a == 1 else (1 - a ** (k + 1)) / (1 - a))
    assert tree.widths == (1,) * k and tree.depth == k


@pytest.mark.parametrize("nodes", TREES[1:])
@pytest.mark.parametrize("cut", [0, 2])
def test_what_is_accepted_when_drawn_is_what_is_expected(nodes: tuple[Node, ...], cut: int) -> None:
    tree, rng = GuessTree(nodes, ranked), random.Random(5)
    checked = len(tree) - cut
    found = [1 + tree.accepted(checked, lambda _: rng.random()) for _ in range(8000)]
    mean = sum(found) / len(found)
    error = math.sqrt(sum((n - mean) ** 2 for n in found)) / len(found)
    assert abs(mean - tree.mean_tokens(checked)) < 4 * error


def test_guesses_stand_by_their_chance_and_parents_come_first() -> None:
    tree = GuessTree([(2, 1, 0), (2, 1), (2,), (0,)], ranked)
    assert tree.nodes == ((0,), (2,), (2, 1), (2, 1, 0))
    assert full((4, 2))[:5] == ((0,), (1,), (2,), (3,), (0, 0)) and len(full((4, 2, 1))) == 4 + 8 + 8
    assert GuessTree(full((4, 2, 1)), ranked).widths == (1, 4, 8)


@pytest.mark.parametrize("count", [1, 3, 5])
def test_no_tree_of_its_size_yields_more_than_the_likeliest(count: int) -> None:
    """Oracle: all trees of two depths and three ranks."""
    every = full((3, 3))
    trees = (set(some) for some in itertools.combinations(every, count))
    best = max(
        brute_force(sorted(some), ranked, 2) for some in trees if all(len(n) == 1 or n[:-1] in some for n in some)
    )
    found = likeliest(count, 2, ranked)
    assert len(found) == count
    assert GuessTree(found, ranked).mean_tokens() == pytest.approx(best, rel=1e-12)


def test_the_likeliest_may_be_of_any_rank_and_never_what_is_never_right() -> None:
    def odd(depth: int, rank: int) -> float:
        return (0.1, 0.6)[rank] if rank < 2 else 0.0

    assert likeliest(2, 2, odd) == ((1,), (1, 1))
    assert likeliest(50, 1, odd) == ((1,), (0,))
    assert likeliest(0, 2, odd) == () and likeliest(3, 0, odd) == ()


def test_trees_are_written_as_text() -> None:
    assert parse("4x2x1") == (4, 2, 1)
    assert parse("0 1 0.0 0.10") == ((0,), (1,), (0, 0), (0, 10))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: parse("wide"), "candidates at each depth"),
        (lambda: parse("4xx2"), "candidates at each depth"),
        (lambda: full((4, 0)), "at least one"),
        (lambda: full((64, 64)), "at most 1024"),
        (lambda: GuessTree([(0, 0)], ranked), "no parent"),
        (lambda: GuessTree([()], ranked), "no parent"),
        (lambda: GuessTree([(0,), (0,)], ranked), "twice"),
    ],
)
def test_what_is_no_tree_is_refused(make, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()
