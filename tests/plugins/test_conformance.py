"""The kits find what they are for: each technique here breaks one clause of its contract."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest

from twinfer.core.policy import Defer, Limits, Shortage, View, Want
from twinfer.core.request import Request, Sequence
from twinfer.core.technique import Technique
from twinfer.plugins.conformance import KVCacheKit, Player, SchedulerKit, Traffic, check
from twinfer.plugins.kv_cache.contiguous import Contiguous
from twinfer.plugins.kv_cache.paged import Paged
from twinfer.plugins.scheduler.continuous import Continuous
from twinfer.plugins.scheduler.static import Static

# --- built-ins keep the contract, as subclasses that pytest collects ---------------------------------


class TestContinuous(SchedulerKit):
    technique = Continuous


class TestContinuousPriority(SchedulerKit):
    technique = Continuous
    options = {"policy": "priority", "chunk_size": 5}  # noqa: RUF012


class TestContinuousUnchunked(SchedulerKit):
    technique = Continuous
    options = {"chunked_prefill": False}  # noqa: RUF012


class TestStatic(SchedulerKit):
    technique = Static
    options = {"batch_size": 3, "max_wait_s": 0.05}  # noqa: RUF012


class TestPaged(KVCacheKit):
    technique = Paged


class TestPagedOneToken(KVCacheKit):
    technique = Paged
    options = {"block_size": 1}  # noqa: RUF012


class TestPagedWithoutSharing(KVCacheKit):
    technique = Paged
    options = {"prefix_sharing": False}  # noqa: RUF012


class TestContiguous(KVCacheKit):
    technique = Contiguous


# --- bad schedulers ---------------------------------------------------------------------------------


class Good(Technique):
    """The least that a scheduler needs; the others spoil one thing of it."""

    name, summary = "good", "Runs everybody in order."

    def order(self, seq: Sequence) -> tuple[object, ...]:
        return ()

    def propose(self, view: View) -> Iterable[Want | Defer]:
        for seq in (*view.running, *view.waiting):
            yield Want(seq, view.limits.max_num_batched_tokens)

    def victims(self, view: View, shortage: Shortage) -> Iterable[Sequence]:
        return [s for s in reversed(view.running) if s.number >= shortage.seq.number]


class Lazy(Good):
    def propose(self, view: View) -> Iterable[Want | Defer]:
        return []


class Forgetful(Good):
    """Counts its calls, and lets the count decide."""

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self.calls = 0

    def propose(self, view: View) -> Iterable[Want | Defer]:
        self.calls += 1
        yield from super().propose(view)


class Meddling(Good):
    def propose(self, view: View) -> Iterable[Want | Defer]:
        for want in super().propose(view):
            assert isinstance(want, Want)
            want.seq.drafts = (1,)
            yield want


_coin = itertools.count()


class Random(Good):
    """Its answers come from outside the view."""

    def propose(self, view: View) -> Iterable[Want | Defer]:
        wants = list(super().propose(view))
        return wants if next(_coin) % 2 else wants[::-1]


class ByName(Good):
    """The order of a set of names changes with PYTHONHASHSEED."""

    def propose(self, view: View) -> Iterable[Want | Defer]:
        wants = {w.seq.id: w for w in super().propose(view) if isinstance(w, Want)}
        return [wants[name] for name in set(wants)]


class Raising(Good):
    def propose(self, view: View) -> Iterable[Want | Defer]:
        raise KeyError("oops")


class Wordy(Good):
    def propose(self, view: View) -> Iterable[Any]:
        return ["everybody"]


class WaitsForEver(Good):
    def propose(self, view: View) -> Iterable[Want | Defer]:
        yield Defer(view.now + 1)


class WaitsForThePast(Good):
    def propose(self, view: View) -> Iterable[Want | Defer]:
        yield Defer(view.now)


class PreemptsWaiting(Good):
    def victims(self, view: View, shortage: Shortage) -> Iterable[Sequence]:
        return [*view.running, *view.waiting]


class BadOrder(Good):
    def order(self, seq: Sequence) -> Any:
        return seq.prompt_len


def failures(kind: str, technique: type[Any]) -> dict[str, str]:
    return {test: why for test, why in check(kind, technique).items() if why}


def test_the_plain_scheduler_passes() -> None:
    assert failures("scheduler", Good) == {}


@pytest.mark.parametrize(
    ("technique", "test", "words"),
    [
        (Lazy, "served_when_memory_is_ample", "ended as capacity: scheduler 'good' proposed nothing although work is"),
        (Forgetful, "pure_function", "keeps state"),
        (Meddling, "pure_function", "changed a sequence"),
        (Random, "pure_function", "different answers"),
        (ByName, "equal_traffic", "depend on the names"),
        (Raising, "served_when_memory_is_ample", "oops"),
        (Wordy, "pure_function", "everybody"),
        (WaitsForEver, "served_when_memory_is_ample", "answers in a row run nothing"),
        (PreemptsWaiting, "pure_function", "one that does not run"),
        (BadOrder, "pure_function", "give a tuple"),
    ],
)
def test_bad_schedulers_are_found(technique: type[Any], test: str, words: str) -> None:
    kit = type("Bad", (SchedulerKit,), {"technique": technique})()
    [name] = [name for name in dir(kit) if name.startswith("test_") and test in name]
    with pytest.raises(Exception, match=words):
        getattr(kit, name)()


def test_the_checker_tells_its_own_failures_from_those_of_a_technique() -> None:
    raised = failures("scheduler", Raising)["test_every_request_is_served_when_memory_is_ample"]
    assert raised == "PluginError: scheduler 'good' failed in propose: KeyError: 'oops'"
    assert all(why.startswith("good, seed 0: ") for why in failures("scheduler", Lazy).values())


def test_waiting_for_a_time_that_has_passed_never_hangs() -> None:
    assert failures("scheduler", WaitsForThePast)  # the core's progress law ends the requests: that is found


# --- bad caches -------------------------------------------------------------------------------------


class Stingy(Paged):
    def reserve(self, num_tokens: int, limits: Limits) -> int:
        return num_tokens - 1


class Blockless(Paged):
    def block_size(self, limits: Limits) -> int:
        return 0


class AllHeadroom(Paged):
    def headroom(self, limits: Limits) -> int:
        return limits.num_blocks


class Shy(Paged):
    shares_prefixes = None  # type: ignore[assignment]


class LosesIdle(Paged):
    def idle_order(self) -> Any:
        order = super().idle_order()
        order.remove = lambda block: None  # type: ignore[method-assign]
        return order


@pytest.mark.parametrize("technique", [Stingy, Blockless, AllHeadroom, Shy, LosesIdle])
def test_bad_caches_are_found(technique: type[Any]) -> None:
    assert failures("kv_cache", technique)


# --- others are told as a run would tell it -----------------------------------------------------------


class Nowhere(Technique):
    name, summary = "nowhere", "Answers with a view instead of its index."

    def pick(self, request: Request, views: Any) -> Any:
        return views[0]


class Misread(Nowhere):
    def pick(self, request: Request, views: Any) -> Any:
        return views[0].index if request.prompt_len else None  # type: ignore[attr-defined]


class Timeless(Technique):
    name, summary = "timeless", "Raises."

    def time(self, op: Any, device: Any) -> Any:
        raise ValueError("no time")


class Halved(Paged):
    def reserve(self, num_tokens: int, limits: Limits) -> Any:
        return num_tokens / 0


@pytest.mark.parametrize(
    ("kind", "technique", "test", "words"),
    [
        ("router", Nowhere, "test_it_picks_one_of_the_views", "give the index of one of the views, "),
        (
            "router",
            Misread,
            "test_it_picks_one_of_the_views",
            "router 'nowhere' failed in pick: AttributeError: 'Request'",
        ),
        ("op_time_model", Timeless, "test_times_are_times", "'timeless' failed in time: ValueError: no time"),
        ("kv_cache", Halved, "test_sizes", "KV cache 'paged' failed in reserve: ZeroDivisionError"),
        ("kv_cache", Stingy, "test_sizes", "KV cache 'paged' gave 0 in reserve; give a whole number, at least 1"),
    ],
)
def test_failures_name_the_method_and_the_remedy(kind: str, technique: type[Any], test: str, words: str) -> None:
    assert words in failures(kind, technique)[test]


# --- the traffic is worth playing ---------------------------------------------------------------------


def test_traffic_reaches_what_it_should() -> None:
    """Preemptions, aborts, shared prefixes, several samples and overlapped steps all occur in the seeds used."""
    preempted = aborted = shared = forked = overlapped = 0
    for seed in SchedulerKit.seeds:
        for tight in (False, True):
            traffic = Traffic.random(seed, tight)
            player = Player(traffic, Continuous(), Paged(Paged.Options(block_size=traffic.block_size)), "traffic")
            played = player.play()
            text = "".join(played.plans)
            preempted += '"preempted":["' in text
            aborted += "abort" in played.endings.values()
            shared += '"copies":[{' in text
            forked += any(index for _, index in played.endings)
            overlapped += traffic.limits.max_outstanding > 1
    assert min(preempted, aborted, shared, forked, overlapped) >= 2, (preempted, aborted, shared, forked, overlapped)


def test_equal_seeds_give_equal_traffic() -> None:
    assert Traffic.random(3, tight=True) == Traffic.random(3, tight=True)
    assert Traffic.random(3, tight=True) != Traffic.random(4, tight=True)


def test_a_kind_without_a_kit_is_a_key_error() -> None:
    with pytest.raises(KeyError):
        check("device", Good)
