"""Beam search in the pure core: against a brute-force search over the content oracle's model, content checked."""

from __future__ import annotations

import itertools
import random

import pytest
from content_oracle import World, reference_beams

from twinfer.core.beam import Beam
from twinfer.core.events import Submit
from twinfer.core.params import SamplingParams
from twinfer.core.policy import Limits
from twinfer.core.request import KVSource, Request
from twinfer.plugins.kv_cache.contiguous import Contiguous
from twinfer.plugins.kv_cache.paged import Paged
from twinfer.plugins.scheduler.continuous import Continuous

ENDS = {"nothing ends": ((), ()), "eos": ((4,), ()), "three ids": ((4,), (7, 2))}


def make_world(num_blocks: int = 40, block_size: int = 4, **more: object) -> World:
    limits = Limits(
        max_num_seqs=more.pop("max_num_seqs", 8), max_num_batched_tokens=more.pop("budget", 64),
        max_model_len=more.pop("max_model_len", 48), num_blocks=num_blocks, max_outstanding=more.pop("depth", 1),
        num_host_blocks=more.pop("num_host_blocks", 0),
    )  # fmt: skip
    cache = Paged(Paged.Options(block_size=block_size)) if block_size else Contiguous()
    return World(more.pop("scheduler", None) or Continuous(), cache, limits, **more)


def beams(number: int = 0, width: int = 3, length: int = 6, eos: tuple[int, ...] = (), **params: object) -> Request:
    prompt = tuple((number * 5 + i * 3) % 11 for i in range(length))
    params = {"max_tokens": 7, **params}
    return Request(id=f"r{number}", prompt=prompt, params=SamplingParams(beam_width=width, **params), eos_token_ids=eos)


@pytest.mark.parametrize("ends", sorted(ENDS))
@pytest.mark.parametrize("early", [False, True, "never"])
def test_beams_are_those_of_a_brute_force_search(early: object, ends: str) -> None:
    eos, stops = ENDS[ends]
    reasons = set()
    for number, (width, penalty, minimum) in enumerate(itertools.product((2, 3, 5), (0.0, 1.0, -1.0, 2.0), (0, 3))):
        world = make_world()
        request = beams(
            number, width, eos=eos, stop_token_ids=stops, early_stopping=early, length_penalty=penalty,
            min_tokens=minimum, logprobs=2, max_tokens=6,
        )  # fmt: skip
        tracked = world.submit(request)
        world.drain()
        found = reference_beams(request, world.limits)
        assert [tracked.tokens.get(i, []) for i in range(width)] == [tokens for tokens, _, _ in found]
        scores = [
            tracked.ends[i].cumulative_logprob / len(tracked.tokens[i]) ** penalty
            for i in range(width)
            if i in tracked.tokens
        ]
        assert scores == sorted(scores, reverse=True)
        reasons |= {end.reason for end in tracked.ends.values()}
        assert all(len(tracked.tokens[i]) > minimum for i in tracked.tokens if tracked.ends[i].reason == "stop")
    assert reasons >= {"length", "stop"} - ({"stop"} if not (eos or stops) else set())


def test_surviving_parents_share_blocks_and_copy_only_what_they_write() -> None:
    world = make_world(block_size=4)
    world.submit(beams(width=4, length=30, max_tokens=12))
    peak = 0
    while world.core.has_work:
        world.advance()
        peak = max(peak, world.core.ledger.pool.held)
    assert world.memory.forks_made and world.memory.copies_made
    assert peak < 4 * 8, "four beams of a prompt of 8 blocks must share most of it"
    world.drain()


@pytest.mark.parametrize("host", [0, 30])
@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
def test_beams_end_alike_however_short_memory_is(block_size: int, host: int) -> None:
    """Down to a pool that holds a single beam: the others give way and are computed again (or swapped)."""
    preempted = 0
    for slots in (16, 20, 24, 36):
        world = make_world(num_blocks=-(-slots // block_size), block_size=block_size, num_host_blocks=host)
        for number in range(3):
            world.submit(beams(number, 3, eos=(4,), max_tokens=8))
        world.drain()
        ends = [end for tracked in world.requests for end in tracked.ends.values()]
        preempted += sum(end.num_preemptions for end in ends)
        assert {end.reason for end in ends} <= {"length", "stop"}, (slots, ends)
        assert not host or world.memory.blocks_swapped_in or not any(e.num_preemptions for e in ends)
    assert preempted


def test_a_beam_search_that_outgrows_the_pool_ends_with_what_it_has() -> None:
    world = make_world(num_blocks=3, block_size=4)
    tracked = world.submit(beams(width=2, length=9, max_tokens=20))
    world.drain()
    assert [end.reason for end in tracked.ends.values()] == ["capacity"] * 2
    assert len(tracked.tokens[0]) == 4
    assert "num_kv_blocks" in tracked.ends[0].detail


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("lazy", [False, True])
def test_beams_beside_others_chunked_and_deep(depth: int, lazy: bool) -> None:
    """Chunked prefill, a prefix that is shared, forks of samples and drafts beside them; snapshots on the way."""
    world = make_world(
        depth=depth, lazy=lazy, budget=5, scheduler=Continuous(Continuous.Options(chunk_size=3)), max_drafts=3
    )
    for number in range(3):
        world.submit(beams(number, 2 + number, length=13, eos=(4,)))
        params = SamplingParams(max_tokens=9, n=2, temperature=1.0, seed=3)
        world.submit(Request(id=f"n{number}", prompt=beams(number, length=13).prompt, params=params))
    for events in itertools.count():
        if not world.core.has_work:
            break
        world.advance()
        if events % 7 == 0:
            world.restore()
    world.drain()
    ends = [e for t in world.requests for e in t.ends.values() if t.request.params.beam_width > 1]
    assert all(end.reason in ("stop", "length") for end in ends)


def test_no_row_of_a_beam_runs_before_all_have_been_reselected() -> None:
    world = make_world(depth=3, lazy=True)
    world.submit(beams(width=3))
    world.drain()
    for before, after in itertools.pairwise(world.plans):
        for row in after.rows:
            assert all(isinstance(token, int) for token in row.tokens)
        assert {row.stop for row in before.rows} != {row.stop for row in after.rows}


@pytest.mark.parametrize("events", range(0, 26, 2))
def test_abort_at_every_moment(events: int) -> None:
    world = make_world(num_blocks=9, num_host_blocks=4)
    for number in range(2):
        world.submit(beams(number, 3, max_tokens=12))
    for _ in range(events):
        world.advance()
    world.abort("r0")
    assert "r0" not in world.core.requests
    world.drain()
    assert len(world.requests[0].ends) == 3


def test_a_failed_row_ends_the_whole_search() -> None:
    world = make_world()
    tracked = world.submit(beams(width=3))
    for _ in range(3):
        world.launch()
        world.finish_step()
    world.launch()
    world.finish_step(fail_row=1)
    assert [end.reason for end in tracked.ends.values()] == ["error"] * 3
    world.drain()


def test_kv_may_come_from_a_peer_but_not_go_to_one() -> None:
    world = make_world()
    request = beams(width=3)
    loading = Request(
        id="load", prompt=request.prompt, params=request.params, kv_from=KVSource(handle="peer", num_tokens=5)
    )
    world.submit(loading)
    world.drain()
    sending = Request(id="send", prompt=request.prompt, params=request.params, kv_to="peer")
    world.core.receive(Submit(sending), 0.0)
    (rejected,) = world.core.outputs()
    assert "kv_to" in rejected.why and "beam" in rejected.why


def test_an_id_is_free_again_after_its_search() -> None:
    world = make_world()
    for _ in range(3):
        world.submit(beams(width=3))
        world.drain()
    world.submit(beams(width=2))
    world.abort("r0")
    world.submit(beams(width=4))
    world.drain()


@pytest.mark.parametrize("seed", range(6))
def test_random_crowds(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(4):
        block_size = rng.choice([0, 1, 2, 4, 8])
        world = make_world(
            num_blocks=rng.randint(2, 5) if not block_size else -(-rng.randint(20, 60) // block_size),
            block_size=block_size, depth=rng.choice([1, 2, 3]), lazy=rng.random() < 0.5, budget=rng.choice([3, 8, 64]),
            max_num_seqs=rng.choice([1, 2, 4, 8]), num_host_blocks=rng.choice([0, 4, 30]), max_drafts=rng.choice([0, 3]),
        )  # fmt: skip
        for number in range(5):
            world.submit(
                beams(number % 3, rng.choice([2, 3, 4]), rng.choice([3, 8, 12]), rng.choice([(), (4,)]),
                      max_tokens=rng.randint(1, 8), min_tokens=rng.choice([0, 1]), logprobs=rng.choice([None, 3]))
                if rng.random() < 0.6
                else Request(id=f"o{number}", prompt=range(rng.randint(1, 15)), params=SamplingParams(max_tokens=6))
            )  # fmt: skip
            for _ in range(rng.randint(0, 8)):
                world.advance()
        world.drain()


def test_equal_sums_go_to_the_better_beam_then_to_the_smaller_id() -> None:
    core = make_world().core
    core.receive(Submit(beams(width=3)), 0.0)
    group = core.requests["r0"][0].beams
    assert group is not None
    first = group.seqs[0]
    group.answers[first.id] = ((9, -1.0), (2, -1.0), (5, -1.0), (7, -1.0), (1, -2.0), (0, -2.0))
    assert [(heir.parent, heir.token) for heir in group.select()] == [(0, 2), (0, 5), (0, 7)]
    for seq, token in zip(group.seqs, (2, 5, 7), strict=True):
        seq.output = [token]
    group.live = [Beam(seq, -1.0) for seq in group.seqs]
    group.answers = {seq.id: ((6, -1.0), (4, -1.0), (8, -3.0)) for seq in group.seqs}
    assert [(heir.parent, heir.token) for heir in group.select()] == [(0, 4), (0, 6), (1, 4)]
