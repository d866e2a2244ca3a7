"""Expectations about routing, against counting and against draws."""

from __future__ import annotations

import math
import random

import pytest

from twinfer.core.expert_load import expected_maximum, experts_touched, popularity, rank_load


@pytest.mark.parametrize(("tokens", "touched"), [(1, 8.0), (32, 256 * (1 - (1 - 8 / 256) ** 32)), (100_000, 256.0)])
def test_uniform_routing_touches_what_the_formula_says(tokens: int, touched: float) -> None:
    assert experts_touched(256, 8, tokens) == pytest.approx(touched)


# expected maximum of n standard normals: tables of order statistics (Harter 1961)
@pytest.mark.parametrize(("n", "value"), {1: 0.0, 2: 0.56419, 3: 0.84628, 8: 1.42360, 64: 2.34373}.items())
def test_expected_maximum_of_normals(n: int, value: float) -> None:
    assert expected_maximum(n) == pytest.approx(value, abs=2e-4)


def drawn(num_experts: int, top_k: int, tokens: int, ranks: int, times: int) -> tuple[float, float]:
    """Mean over draws of the busiest rank's pairs, and of the most experts touched on one rank."""
    rng = random.Random(0)
    here = num_experts // ranks
    pairs = touched = 0.0
    for _ in range(times):
        load, hit = [0] * ranks, [set() for _ in range(ranks)]
        for _ in range(tokens):
            for e in rng.sample(range(num_experts), top_k):
                load[e // here] += 1
                hit[e // here].add(e)
        pairs += max(load) / times
        touched += max(map(len, hit)) / times
    return pairs, touched


@pytest.mark.parametrize(
    ("num_experts", "top_k", "tokens", "ranks"), [(64, 6, 128, 8), (256, 8, 64, 32), (8, 2, 256, 4), (128, 8, 1, 8)]
)
def test_busiest_rank_against_draws(num_experts: int, top_k: int, tokens: int, ranks: int) -> None:
    pairs, touched = drawn(num_experts, top_k, tokens, ranks, 200)
    load = rank_load(num_experts, top_k, tokens, ranks)
    assert load.pairs == pytest.approx(pairs, rel=0.08)
    assert load.touched == pytest.approx(touched, rel=0.08)


def test_alone_a_rank_has_everything_and_all_experts_is_the_end() -> None:
    assert rank_load(8, 2, 100, 1) == (200.0, experts_touched(8, 2, 100))
    assert rank_load(8, 8, 100, 4).pairs == 200.0, "every token goes everywhere: nothing is uneven"
    assert rank_load(256, 8, 10**6, 8).touched == pytest.approx(32)


@pytest.mark.parametrize("skew", [0.5, 1.0, 1.01, 1.2])
@pytest.mark.parametrize("tokens", [1, 16, 4096])
def test_popularity_is_a_distribution_of_top_k_choices(skew: float, tokens: int) -> None:
    found = popularity(64, 6, tokens, skew)
    assert math.fsum(found) == pytest.approx(6)
    assert list(found) == sorted(found, reverse=True) and found[-1] > 0 and found[0] <= 1.0


def test_skew_touches_fewer_experts_and_loads_one_rank_more() -> None:
    for tokens in (16, 256, 4096):
        assert experts_touched(128, 8, tokens, 1.2) < experts_touched(128, 8, tokens)
        assert rank_load(128, 8, tokens, 8, 1.2).pairs > rank_load(128, 8, tokens, 8).pairs
        assert rank_load(128, 8, tokens, 8, 1.2).pairs <= tokens * 8


def test_a_steeper_law_is_more_uneven() -> None:
    loads = [rank_load(128, 8, 2048, 8, skew).pairs for skew in (0.2, 0.6, 1.0, 1.2)]
    assert loads == sorted(loads)
