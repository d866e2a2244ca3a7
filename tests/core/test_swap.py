"""Swap to host: a preempted sequence keeps its KV in host blocks; content checked by `World` after every event."""

from __future__ import annotations

import itertools

import pytest
from content_oracle import World

from twinfer.core.params import SamplingParams
from twinfer.core.plan import StepPlan
from twinfer.core.policy import Limits
from twinfer.core.request import Request, Status
from twinfer.plugins.kv_cache.paged import Paged
from twinfer.plugins.scheduler.continuous import Continuous


def make_world(
    num_host_blocks: int, num_blocks: int = 6, *, block_size: int = 4, depth: int = 1, **more: object
) -> World:
    limits = Limits(
        max_num_seqs=8, max_num_batched_tokens=16, max_model_len=64, num_blocks=num_blocks, max_outstanding=depth,
        num_host_blocks=num_host_blocks,
    )  # fmt: skip
    sharing = bool(more.pop("sharing", True))
    return World(Continuous(), Paged(Paged.Options(block_size=block_size, prefix_sharing=sharing)), limits, **more)


def request(number: int, length: int = 7, max_tokens: int = 12, **params: object) -> Request:
    prompt = tuple((number * 17 + i) % 11 for i in range(length))
    return Request(id=f"r{number}", prompt=prompt, params=SamplingParams(max_tokens=max_tokens, **params))


def crowd(world: World, count: int = 3, **params: object) -> World:
    for number in range(count):
        world.submit(request(number, **params))
    world.drain()
    return world


def swaps(world: World) -> tuple[list, list]:
    outs = [swap for plan in world.plans for swap in plan.swap_outs]
    return outs, [swap for plan in world.plans for swap in plan.swap_ins]


def until_swapped(world: World) -> str:
    """Advance until some sequence waits with its KV in host memory; its id."""
    for _ in range(200):
        for seq in world.core.sequences.values():
            if seq.host is not None:
                return seq.id
        world.advance()
    raise AssertionError("nothing was swapped")


def test_a_preempted_sequence_comes_back_without_being_computed_again() -> None:
    recomputed, swapped = crowd(make_world(0)), crowd(make_world(20))
    outs, ins = swaps(swapped)
    assert not swaps(recomputed)[0] and outs and ins
    assert sum(p.num_tokens for p in swapped.plans) < sum(p.num_tokens for p in recomputed.plans)
    positions: dict[str, set[int]] = {}
    for plan in swapped.plans:
        for row in plan.rows:
            fed = positions.setdefault(row.seq, set())
            assert fed.isdisjoint(range(row.start, row.stop)), f"{row} feeds again what it had computed"
            fed.update(range(row.start, row.stop))
    ends = [end for tracked in swapped.requests for end in tracked.ends.values()]
    assert sum(e.num_swaps for e in ends) == sum(e.num_preemptions for e in ends) == len(outs)


def test_a_swap_names_as_many_host_blocks_as_blocks() -> None:
    outs, ins = swaps(crowd(make_world(20)))
    for swap in (*outs, *ins):
        assert len(swap.blocks) == len(swap.host_blocks) > 0


@pytest.mark.parametrize("num_host_blocks", [0, 1])
def test_without_room_in_host_memory_it_is_recomputed(num_host_blocks: int) -> None:
    world = crowd(make_world(num_host_blocks))
    ends = [end for tracked in world.requests for end in tracked.ends.values()]
    assert not swaps(world)[0]
    assert sum(e.num_preemptions for e in ends) > 0 and not sum(e.num_swaps for e in ends)


def test_a_full_host_pool_takes_what_fits_and_recomputes_the_rest() -> None:
    world = crowd(make_world(3), count=5, max_tokens=16)
    ends = [end for tracked in world.requests for end in tracked.ends.values()]
    assert 0 < sum(e.num_swaps for e in ends) < sum(e.num_preemptions for e in ends)


def test_abort_while_swapped_gives_the_host_blocks_back() -> None:
    world = make_world(20)
    for number in range(3):
        world.submit(request(number))
    seq = until_swapped(world)
    assert len(world.core.host.free) < 20
    world.abort(seq)
    assert len(world.core.host.free) == 20
    world.drain()


def test_a_swap_out_that_was_not_launched_is_taken_back_with_its_sequence() -> None:
    world = make_world(20)
    core = world.core
    world.submit(request(0))
    world.advance()
    world.advance()
    seq = core.sequences["r0"]
    assert seq.status is Status.RUNNING and seq.computed
    core.preempt(seq)
    core.running.clear()
    core.enqueue(seq)
    assert [swap.seq for swap in core.host.swap_outs] == ["r0"]
    world.abort("r0")
    assert not core.host.swap_outs and len(core.host.free) == 20
    world.drain()


def test_what_the_prefix_cache_still_has_is_not_brought_back() -> None:
    """The swapped request's full blocks are still cached: only its last, partial block comes from the host."""
    world = make_world(20, num_blocks=12)
    core = world.core
    world.submit(request(0, length=9))
    while len(core.sequences["r0"].output) < 2:
        world.advance()
    assert not core.outstanding
    seq = core.sequences["r0"]
    core.preempt(seq)
    core.running.clear()
    core.enqueue(seq)
    plan = world.launch()
    assert isinstance(plan, StepPlan)
    (out,), (back,) = plan.swap_outs, plan.swap_ins
    assert len(out.blocks) == 3 and back.host_blocks == out.host_blocks[2:]
    (grant,) = plan.grants
    assert grant.shared == 2 and [row.start for row in plan.rows] == [10]
    world.drain()


def test_when_the_cache_has_everything_nothing_is_brought_back() -> None:
    world = make_world(20, num_blocks=12)
    core = world.core
    world.submit(request(0, length=8))
    while not core.sequences["r0"].output:
        world.advance()
    seq = core.sequences["r0"]
    assert seq.computed == 8
    core.preempt(seq)
    core.running.clear()
    core.enqueue(seq)
    plan = world.launch()
    assert isinstance(plan, StepPlan) and not plan.swap_ins and len(core.host.free) == 20
    assert [(row.start, len(row.tokens)) for row in plan.rows] == [(8, 1)]
    world.drain()


@pytest.mark.parametrize("sharing", [True, False])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_half_a_prompt_can_be_swapped(depth: int, sharing: bool) -> None:
    world = make_world(20, num_blocks=10, block_size=3, depth=depth, sharing=sharing)
    world.submit(request(1, length=20, max_tokens=4))
    core = world.core
    seq = core.sequences["r1"]
    world.launch()
    world.finish_step()
    assert seq.computed == 16
    core.preempt(seq)
    core.running.clear()
    core.enqueue(seq)
    world.check()
    world.drain()
    assert any(swap.seq == "r1" for swap in swaps(world)[1])


@pytest.mark.parametrize(
    ("n", "drafts", "lazy", "block_size"),
    [(1, 3, False, 2), (3, 0, False, 4), (3, 0, True, 3), (2, 4, True, 1), (3, 4, False, 16)],
)
def test_forks_drafts_and_snapshots_under_swapping(n: int, drafts: int, lazy: bool, block_size: int) -> None:
    for depth, slots in itertools.product((1, 2), (36, 52)):
        world = make_world(
            24, num_blocks=-(-slots // block_size), block_size=block_size, depth=depth, lazy=lazy, max_drafts=drafts
        )
        for number in range(4):
            world.submit(request(number, n=n, seed=5, temperature=1.0))
        for events in itertools.count():
            if not world.core.has_work:
                break
            world.advance()
            if events % 5 == 0:
                world.restore()
        world.drain()
        assert world.memory.blocks_swapped_in, (depth, slots)


def test_a_sample_does_not_fork_from_a_leader_that_is_just_coming_back() -> None:
    """Copies are made before swap-ins, so the fork's copy of the leader's last block would be of an empty one."""
    world = make_world(20, num_blocks=12, sharing=False)
    core = world.core
    world.submit(request(0, length=10, n=2, seed=5, temperature=1.0))
    world.launch()
    world.finish_step()
    leader = core.sequences["r0"]
    assert leader.computed == 10 and core.sequences["r0/1"].status is Status.WAITING
    core.preempt(leader)
    core.running.clear()
    core.enqueue(leader)
    plan = world.launch()
    assert isinstance(plan, StepPlan) and [swap.seq for swap in plan.swap_ins] == ["r0"]
    assert [row.seq for row in plan.rows] == ["r0"]
    world.drain()
    assert world.memory.copies_made, "it forked a step later"
