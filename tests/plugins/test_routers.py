"""Built-in routers: their contract by the kit, and the decisions that each is named for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from twinfer.core.request import Request
from twinfer.core.routing import ReplicaView, Router
from twinfer.core.technique import Technique
from twinfer.plugins.conformance import ReplicaFacts, RouterKit, check
from twinfer.plugins.router.kv_aware import KVAware
from twinfer.plugins.router.load import LeastLoaded, RandomOfTwo, RoundRobin
from twinfer.plugins.router.prefix_aware import PrefixAware


class TestRoundRobin(RouterKit):
    technique = RoundRobin


class TestRandomOfTwo(RouterKit):
    technique = RandomOfTwo


class TestPlainRandom(RouterKit):
    technique = RandomOfTwo
    options = {"choices": 1, "seed": 3}  # noqa: RUF012


class TestLeastLoaded(RouterKit):
    technique = LeastLoaded


class TestLeastTokens(RouterKit):
    technique = LeastLoaded
    options = {"by": "tokens"}  # noqa: RUF012


class TestPrefixAware(RouterKit):
    technique = PrefixAware


class TestKVAware(RouterKit):
    technique = KVAware


def ask(i: int, length: int = 100) -> Request:
    return Request(id=f"r{i}", prompt=range(length))


def sent(router: Router, replicas: list[ReplicaFacts], num: int) -> list[int]:
    """Where `num` requests go, none of which ends."""
    picks = []
    for number in range(num):
        request = ask(number)
        index = router.pick(request, replicas)
        (chosen,) = [r for r in replicas if r.index == index]
        chosen.num_requests += 1
        chosen.num_tokens += len(request.prompt)
        chosen.last_pick = number
        picks.append(index)
    return picks


def test_round_robin_goes_round_and_takes_a_newcomer_in() -> None:
    replicas = [ReplicaFacts(0), ReplicaFacts(1), ReplicaFacts(3)]
    assert sent(RoundRobin(), replicas, 7) == [0, 1, 3, 0, 1, 3, 0]
    replicas.append(ReplicaFacts(5))
    for number, request in enumerate((ask(7), ask(8), ask(9), ask(10)), 7):
        index = RoundRobin().pick(request, replicas)
        next(r for r in replicas if r.index == index).last_pick = number
        assert index == [5, 1, 3, 0][number - 7], "one for the newcomer, not a burst"


def test_least_loaded_fills_the_gap() -> None:
    replicas = [ReplicaFacts(0, num_requests=5, num_tokens=10), ReplicaFacts(1, num_requests=2, num_tokens=500)]
    assert sent(LeastLoaded(), replicas, 3) == [1, 1, 1]
    assert LeastLoaded(LeastLoaded.Options(by="tokens")).pick(ask(0), replicas) == 0


def test_two_choices_are_nearly_even_and_one_is_not() -> None:
    """Mitzenmacher: the longest of n queues is about ln ln n / ln 2 above the mean with two choices, far more with one."""
    ends = []
    for choices in (1, 2):
        replicas = [ReplicaFacts(i) for i in range(50)]
        sent(RandomOfTwo(RandomOfTwo.Options(choices=choices)), replicas, 500)
        ends.append(max(r.num_requests for r in replicas))
    assert ends[1] <= 13 < ends[0]
    assert {RandomOfTwo().pick(ask(i), [ReplicaFacts(0), ReplicaFacts(1)]) for i in range(9)} == {0}, (
        "all idle: in turn"
    )


def test_prefix_aware_follows_the_prefix_until_load_is_uneven() -> None:
    def views(requests: int) -> list[ReplicaFacts]:
        return [ReplicaFacts(0), ReplicaFacts(1, num_requests=requests, routed={"r0": 64})]

    router = PrefixAware()
    assert router.prefix_block == 64
    assert router.pick(ask(0), views(1)) == 1
    assert router.pick(ask(0), views(8)) == 1, "as many as `most_behind` allows"
    assert router.pick(ask(0), views(9)) == 0
    assert router.pick(ask(1), views(1)) == 0, "another prompt"
    assert router.pick(ask(0, 1000), views(1)) == 0, "64 of 1000 tokens are not worth it"


def test_kv_aware_weighs_what_is_cached_against_what_is_held() -> None:
    def views(free: int) -> list[ReplicaFacts]:
        return [ReplicaFacts(0), ReplicaFacts(1, free_blocks=free, cached={"r0": 96})]

    assert KVAware().pick(ask(0), views(free=95)) == 1, "96 tokens cached, 80 held"
    assert KVAware().pick(ask(0), views(free=93)) == 0, "96 tokens cached, 112 held"
    assert KVAware(KVAware.Options(weight=2)).pick(ask(0), views(free=93)) == 1


class Stateful(Technique):
    name, summary = "stateful", "Counts for itself."
    calls = 0

    def pick(self, request: Request, views: Sequence[ReplicaView]) -> int:
        self.calls += 1
        return views[self.calls % len(views)].index


class Meddling(Technique):
    name, summary = "meddling", "Books the load itself."

    def pick(self, request: Request, views: Sequence[ReplicaView]) -> int:
        views[0].num_requests += 1
        return views[0].index


class ByPlace(Technique):
    name, summary = "by-place", "Takes a place in the list for a replica."

    def pick(self, request: Request, views: Sequence[ReplicaView]) -> int:
        return len(views) - 1


class NoCount(RoundRobin):
    name, prefix_block = "no-count", 1.5


@pytest.mark.parametrize(
    ("technique", "test"),
    [
        (Stateful, "test_answers_are_a_pure_function_of_the_views"),
        (Meddling, "test_answers_are_a_pure_function_of_the_views"),
        (ByPlace, "test_it_picks_one_of_the_views"),
        (NoCount, "test_the_prefix_block_is_a_count"),
    ],
)
def test_the_kit_finds_what_it_is_for(technique: type[Any], test: str) -> None:
    results = check("router", technique)
    assert results[test], results
