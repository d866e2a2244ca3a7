"""Features that cross in pairs: each pair of settings runs in the pure core, audited after every event.

`World` is the oracle: what every request gives alone, memory whose content is known, block tables, one end a sample.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from typing import Any

import pytest
from content_oracle import World
from pairwise import Case, pairs_of, pairwise, wanted_pairs

from twinfer.core.errors import ConfigError
from twinfer.core.params import SamplingParams
from twinfer.core.plan import Need
from twinfer.core.policy import Limits
from twinfer.core.request import Request
from twinfer.plugins.kv_cache.paged import Paged
from twinfer.plugins.scheduler.continuous import Continuous

BLOCK = 4
FACTORS: dict[str, tuple[Any, ...]] = {
    # of the engine
    "chunk": (None, 3),
    "prefix": (True, False),
    "memory": ("ample", "recompute", "swap"),
    "window": ((None,), (6,), (None, 5)),
    "drafts": (0, 3),
    "depth": (1, 2),
    "restore": (False, True),
    # of a request
    "sampling": ("greedy", "seeded"),
    "n": (1, 3),
    "beams": (1, 3),
    "stop": ("", "id", "string", "eos, not early"),
    "logprobs": (None, 2),
    "abort": (False, True),
}


def valid(case: Case) -> bool:
    """What one request cannot ask for at the same time; `test_what_is_left_out_is_refused` holds this to account."""
    if case.get("n", 1) > 1 and case.get("sampling") == "greedy":
        return False
    if case.get("beams", 1) == 1:
        return True
    return case.get("n", 1) == 1 and case.get("sampling") != "seeded" and case.get("stop") != "string"


CASES = pairwise(FACTORS, valid)


def params(case: Case, **more: Any) -> SamplingParams:
    stop = case.get("stop", "")
    return SamplingParams(
        temperature=1.0 if case.get("sampling") == "seeded" else 0.0,
        seed=7 if case.get("sampling") == "seeded" else None,
        n=case.get("n", 1),
        beam_width=case.get("beams", 1),
        stop=("end",) if stop == "string" else (),
        stop_token_ids=(7,) if stop == "id" else (),
        min_tokens=3 if stop == "eos, not early" else 0,
        logprobs=case.get("logprobs"),
        max_tokens=10,
        **more,
    )


def request(name: str, case: Case, family: int) -> Request:
    prompt = tuple((i * 7 + 3 * (family % 2)) % 11 if i < 9 else (family * 5 + i) % 11 for i in range(13))
    eos = (4,) if case.get("stop") == "eos, not early" else ()
    return Request(id=name, prompt=prompt, params=params(case), eos_token_ids=eos)


def make_world(case: Case) -> World:
    groups = len(case["window"])
    limits = Limits(
        max_num_seqs=6,
        max_num_batched_tokens=24,
        max_model_len=40,
        num_blocks=(80 if case["memory"] == "ample" else 9) * groups,
        max_outstanding=case["depth"],
        num_host_blocks=60 if case["memory"] == "swap" else 0,
    )
    return World(
        Continuous(Continuous.Options(chunk_size=case["chunk"])),
        Paged(Paged.Options(block_size=BLOCK, prefix_sharing=case["prefix"])),
        limits,
        lazy=case["depth"] > 1,
        max_drafts=case["drafts"],
        windows=case["window"],
    )


@functools.cache
def lived(number: int) -> World:
    """Case `number` to its end: its request four times and that of the next case, among plain ones."""
    case, other = CASES[number], CASES[(number + 1) % len(CASES)]
    world = make_world(case)
    for i, asked in enumerate((case, {}, case, other, case, case)):
        world.submit(request(f"r{i}", asked, i))
        for _ in range(2):
            world.advance()
    for events in itertools.count():
        if not world.core.has_work:
            break
        world.advance()
        if case["restore"] and events % 3 == 0:
            world.restore()
        if case["abort"] and events == 6:
            world.abort("r2")
    world.drain()
    return world


def test_the_cases_cover_every_pair() -> None:
    covered = set().union(*(pairs_of(case) for case in CASES))
    assert covered >= set(wanted_pairs(FACTORS, valid))
    assert all(valid(case) and list(case) == list(FACTORS) for case in CASES)
    assert len(CASES) < 40, "pairs, not the whole cross"


def test_what_is_left_out_is_refused() -> None:
    """A pair that no case may have is one that `SamplingParams` refuses."""
    wanted = set(wanted_pairs(FACTORS, valid))
    for a, b in itertools.combinations(FACTORS, 2):
        for x, y in itertools.product(FACTORS[a], FACTORS[b]):
            if ((a, x), (b, y)) not in wanted:
                with pytest.raises(ConfigError):
                    params({a: x, b: y})


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda i: "-".join(str(v) for v in CASES[i].values()))
def test_a_pair_of_features(number: int) -> None:
    case, world = CASES[number], lived(number)
    ends = [end for tracked in world.requests for end in tracked.ends.values()]
    assert len(ends) == sum(t.request.params.num_samples for t in world.requests)
    reasons = {end.reason for end in ends}
    assert reasons <= {"length", "stop"} | ({"abort"} if case["abort"] else set())
    if case["memory"] == "recompute":
        assert not any(plan.swap_outs for plan in world.plans)


def _shown(world: World, case: Case) -> Iterable[tuple[str, Any]]:
    """Settings of `case` that had an effect in `world`."""
    ends = [end for tracked in world.requests for end in tracked.ends.values()]
    if any(row.need is Need.NONE for plan in world.plans for row in plan.rows):
        yield "chunk", case["chunk"]
    if any(end.num_cached_tokens for end in ends):
        yield "prefix", case["prefix"]
    if any(end.num_preemptions for end in ends):
        yield "memory", case["memory"] if world.memory.blocks_swapped_in or case["memory"] != "swap" else ""
    if world.memory.drafts_accepted:
        yield "drafts", case["drafts"]
    if world.core.ledger.sliding and any(end.num_output_tokens > 5 for end in ends):
        yield "window", case["window"]
    if world.memory.forks_made:
        yield "beams", case["beams"]
    if world.memory.copies_made:
        yield "n", case["n"]
    if any(end.reason == "stop" for end in ends):
        yield "stop", case["stop"]
    if any(end.reason == "abort" for end in ends):
        yield "abort", case["abort"]


def test_the_features_did_something() -> None:
    """Settings that change nothing would be pairs in name only."""
    shown = {setting for number, case in enumerate(CASES) for setting in _shown(lived(number), case)}
    expected = {
        ("chunk", 3), ("prefix", True), ("memory", "recompute"), ("memory", "swap"), ("drafts", 3), ("beams", 3),
        ("n", 3), ("stop", "id"), ("stop", "string"), ("stop", "eos, not early"), ("abort", True),
        ("window", (6,)), ("window", (None, 5)),
    }  # fmt: skip
    assert shown >= expected
    pressed = [number for number, case in enumerate(CASES) if case["memory"] != "ample"]
    preempted = [n for n in pressed if any(plan.preempted for plan in lived(n).plans)]
    assert len(preempted) > len(pressed) / 2
