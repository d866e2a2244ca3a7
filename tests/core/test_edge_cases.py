"""Faults that users met in other engines, each held for its whole kind.

The numbers are those of the project's list of edge cases; tests of the same numbers about text, sampling
and logits lie in tests/runtime, those of the block pool in test_blocks.py, of hash seeds in test_golden.py.
Every run below goes through `content_oracle.World`: after each event the audit is empty, rows read exactly
their own context, and each request ends with what it gives alone.
"""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable, Iterable

import pytest
from content_oracle import Violation, World, digest_of, next_token, reference

from twinfer.core.core import Core
from twinfer.core.errors import ConfigError, ProtocolError
from twinfer.core.events import Abort, Blocked, Finished, Idle, Rejected, StepDone, Submit, TokenDelta, TransferDone
from twinfer.core.params import SamplingParams
from twinfer.core.plan import FromStep, Need, RowResult, StepPlan, StepResult
from twinfer.core.policy import KVCache, Limits, Scheduler, View, Want
from twinfer.core.request import KVSource, Request, Status
from twinfer.core.seeds import draw, sequence_seed
from twinfer.plugins.kv_cache.contiguous import Contiguous
from twinfer.plugins.kv_cache.paged import Paged
from twinfer.plugins.scheduler.continuous import Continuous
from twinfer.plugins.scheduler.static import Static

CONTINUOUS = Continuous.Options
PRIORITY = Continuous.Options(policy="priority")
SCHEDULERS: dict[str, Callable[[], Scheduler]] = {
    "continuous": lambda: Continuous(),
    "priority": lambda: Continuous(PRIORITY),
    "chunks of 3": lambda: Continuous(CONTINUOUS(chunk_size=3)),
    "static": lambda: Static(),
}
every_scheduler = pytest.mark.parametrize("scheduler", sorted(SCHEDULERS))
depths = pytest.mark.parametrize("depth", [1, 2, 3])


def paged(block_size: int, sharing: bool = True, headroom: float = 0.01) -> Paged:
    return Paged(Paged.Options(block_size=block_size, prefix_sharing=sharing, headroom=headroom))


def make_world(
    num_blocks: int = 16,
    block_size: int = 4,
    *,
    scheduler: Scheduler | None = None,
    cache: KVCache | None = None,
    rows: int = 8,
    budget: int = 64,
    max_len: int = 64,
    depth: int = 1,
    lazy: bool = False,
    max_drafts: int = 0,
    strict: bool = True,
) -> World:
    limits = Limits(
        max_num_seqs=rows,
        max_num_batched_tokens=budget,
        max_model_len=max_len,
        num_blocks=num_blocks,
        max_outstanding=depth,
    )
    return World(
        scheduler or Continuous(),
        cache or paged(block_size),
        limits,
        lazy=lazy,
        max_drafts=max_drafts,
        strict=strict,
    )


def prompt(length: int, start: int = 0) -> tuple[int, ...]:
    return tuple(range(start, start + length))


def ask(request_id: str, tokens: tuple[int, ...] | range, max_tokens: int = 6, **changes: object) -> Request:
    """A request; options of SamplingParams and of Request may be given by name."""
    options = {key: changes.pop(key) for key in list(changes) if key in SamplingParams.__dataclass_fields__}
    params = SamplingParams(max_tokens=max_tokens, **options)  # type: ignore[arg-type]
    return Request(id=request_id, prompt=tokens, params=params, **changes)  # type: ignore[arg-type]


def rows_of(world: World, seq: str) -> list[tuple[int, int]]:
    """(start, tokens) of every row of `seq`, in order."""
    return [(row.start, len(row.tokens)) for plan in world.plans for row in plan.rows if row.seq == seq]


def end_of(world: World, request_id: str, index: int = 0) -> Finished:
    return world.current[request_id].ends[index]


# --- 1 to 8 ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 8, 16, 64])
@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_edge_01_a_fully_cached_prompt_still_feeds_a_token(block_size: int, blocks: int) -> None:
    length = block_size * blocks
    world = make_world(32, block_size, max_len=300, budget=256)
    world.submit(ask("a", prompt(length)))
    world.drain()
    world.submit(ask("b", prompt(length)))
    world.drain()
    first_start, first_fed = rows_of(world, "b")[0]
    assert first_fed >= 1
    # Hits come in whole blocks and leave at least one token: all blocks but the last.
    assert first_start == end_of(world, "b").num_cached_tokens == (blocks - 1) * block_size
    assert first_start + first_fed == length


@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_edge_02_preempted_then_admitted_again_with_a_hit(block_size: int) -> None:
    preempted = hit_again = 0
    for length in range(1, 18):
        # Both prompts fit, their answers do not: the later one gives way and comes back.
        num_blocks = 2 * -(-(length + 2) // block_size) + 1
        world = make_world(num_blocks, block_size)
        for name in "ab":
            world.submit(ask(name, prompt(length, 0 if name == "a" else 50), max_tokens=12))
        world.drain()
        for name in "ab":
            end = end_of(world, name)
            preempted += end.num_preemptions
            hit_again += end.num_preemptions > 0 and end.num_cached_tokens > 0
            assert end.num_hit_tokens == 0, "nobody had computed any of it when it was first admitted"
    assert preempted >= 10, "the pools must be too small for both"
    assert hit_again >= 5, "what was preempted must find its own blocks again"


@every_scheduler
@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
def test_edge_03_a_lone_request_and_a_pool_of_two_blocks(scheduler: str, block_size: int) -> None:
    slots = 2 * block_size
    for length in range(1, slots + 1):
        for max_tokens in (1, 2, slots - length + 1, slots - length + 2, 40):
            if max_tokens < 1:
                continue
            world = make_world(2, block_size, scheduler=SCHEDULERS[scheduler]())
            tracked = world.submit(ask("a", prompt(length), max_tokens))
            world.drain(max_events=20 * (slots + 10))
            if tracked.rejected is not None:
                assert length == slots and max_tokens > 1 and "raise num_kv_blocks" in tracked.rejected
                continue
            end = end_of(world, "a")
            # The last token is never stored: exactly slots + 1 tokens can be had.
            if length + max_tokens <= slots + 1:
                assert (end.reason, end.num_output_tokens) == ("length", max_tokens)
            else:
                assert (end.reason, end.num_output_tokens) == ("capacity", slots + 1 - length)
                assert "raise num_kv_blocks" in end.detail
            assert end.num_preemptions <= 1


@every_scheduler
def test_edge_03_a_preempted_row_is_not_in_its_step(scheduler: str) -> None:
    world = make_world(3, 2, scheduler=SCHEDULERS[scheduler]())
    for name in "abc":
        world.submit(ask(name, prompt(2, ord(name)), max_tokens=4))
    world.drain()
    assert any(plan.preempted for plan in world.plans)
    for plan in world.plans:
        granted = {grant.seq for grant in plan.grants}
        assert {row.seq for row in plan.rows} & set(plan.preempted) <= granted


@pytest.mark.parametrize("max_len", [2, 3, 8, 17])
@pytest.mark.parametrize("cache", ["paged", "contiguous"])
def test_edge_04_nothing_is_longer_than_the_context(max_len: int, cache: str) -> None:
    for length in range(max_len + 3):
        world = make_world(64, cache=Contiguous() if cache == "contiguous" else paged(1), max_len=max_len, depth=3)
        tracked = world.submit(ask("a", prompt(length), max_tokens=99))
        if length == 0 or length >= max_len:
            assert tracked.rejected is not None
            assert "empty" in tracked.rejected if length == 0 else "max_model_len" in tracked.rejected
            assert not world.core.has_work
            continue
        world.drain()
        end = end_of(world, "a")
        assert (end.reason, end.detail) == ("length", f"max_model_len={max_len}")
        assert length + end.num_output_tokens == max_len
        assert max(row.stop for plan in world.plans for row in plan.rows) == max_len - 1


@pytest.mark.parametrize("scheduler", ["continuous", "static"])
def test_edge_05_recomputing_an_answer_feeds_chunks_not_single_tokens(scheduler: str) -> None:
    """A phase inferred from "has output" would take the recomputation for decoding."""
    budget = 8
    world = make_world(12, 2, scheduler=SCHEDULERS[scheduler](), budget=budget, rows=2)
    world.submit(ask("a", prompt(6), max_tokens=16))
    world.submit(ask("b", prompt(6, 50), max_tokens=16))
    world.drain()
    end = end_of(world, "b")
    assert end.num_preemptions >= 1 and end.num_output_tokens == 16
    again = [i for i, (start, _) in enumerate(rows_of(world, "b")) if start <= end.num_cached_tokens][-1]
    start, fed = rows_of(world, "b")[again]
    assert start + fed > 6, "the answer so far is fed again"
    assert fed >= budget - 1, "in chunks as large as the budget allows beside one decode"


@every_scheduler
@pytest.mark.parametrize("cache", ["paged", "contiguous"])
def test_edge_06_any_chunk_size_feeds_the_same_positions(scheduler: str, cache: str) -> None:
    length, max_tokens = 13, 4
    expected, _, _ = reference(ask("a", prompt(length), max_tokens), 0, Limits(max_model_len=64))
    for budget in range(1, 20):
        world = make_world(
            scheduler=SCHEDULERS[scheduler](), cache=Contiguous() if cache == "contiguous" else None, budget=budget
        )
        tracked = world.submit(ask("a", prompt(length), max_tokens))
        world.drain()
        assert tracked.tokens[0] == expected
        position = 0
        for plan in world.plans:
            for row in plan.rows:
                assert row.start == position and 1 <= len(row.tokens) <= budget
                position = row.stop
                # Logits are asked for at the last known token and nowhere before.
                assert (row.need is Need.LAST) == (position >= length)
        assert position == length + max_tokens - 1


def test_edge_07_rows_never_exceed_the_cap_not_even_after_loads() -> None:
    world = make_world(32, rows=2)
    for i in range(6):
        source = KVSource(handle=f"h{i}", num_tokens=5)
        world.submit(ask(f"r{i}", prompt(6, 10 * i), kv_from=source if i < 3 else None))
    world.launch()
    assert len(world.transfers()) == 3, "loads take no row, so they all begin"
    for seq in list(world.transfers()):
        world.end_transfer(seq)
    assert len(world.core.sequences) == 6 and max(len(plan.rows) for plan in world.plans) <= 2
    world.drain()
    assert max(len(plan.rows) for plan in world.plans) == 2


def test_edge_07_results_that_do_not_match_the_rows_are_errors() -> None:
    """Nothing is paired up as far as it goes."""
    for rows, problem in [
        ((), "0 results for 1 rows"),
        ((RowResult((1,)), RowResult((2,))), "2 results for 1 rows"),
        ((RowResult(),), "needed a token and got none"),
        ((RowResult((1, 2)),), "got 2 tokens for 0 drafts"),
    ]:
        core = Core(Continuous(), paged(4), Limits(num_blocks=4))
        core.receive(Submit(ask("a", prompt(3))), 0.0)
        assert isinstance(core.next_step(0.0), StepPlan)
        with pytest.raises(ProtocolError, match=problem):
            core.receive(StepDone(0, StepResult(rows)), 1.0)


def test_edge_07_options_are_served_or_refused() -> None:
    with pytest.raises(ConfigError, match="best_of"):
        SamplingParams.from_mapping({"best_of": 3})
    core = Core(Continuous(), paged(4), Limits(num_blocks=4))
    core.receive(Submit(ask("a", ())), 0.0)
    (rejected,) = core.outputs()
    assert isinstance(rejected, Rejected) and "empty" in rejected.why


@pytest.mark.parametrize("twins", [2, 3, 4])
@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_edge_08_equal_prompts_in_one_step_keep_their_own_blocks(twins: int, block_size: int) -> None:
    for victim in range(twins):
        world = make_world(80, block_size)
        for i in range(twins):
            world.submit(ask(f"r{i}", prompt(9), max_tokens=4 + i))
        world.advance()
        world.advance()
        tables = [set(world.core.ledger.tables[f"r{i}"].blocks) for i in range(twins)]
        assert sum(map(len, tables)) == len(set().union(*tables)), "computed at once, so nothing was there to share"
        world.abort(f"r{victim}")
        world.drain()
        pool = world.core.ledger.pool
        # One copy of each prefix stays cached; the twins' blocks are free.
        published = [node for node in pool.node if node is not None]
        assert len(published) == len({node.key for node in published}) == len(pool.idle)
        world.submit(ask("late", prompt(9)))
        world.drain()
        assert end_of(world, "late").num_cached_tokens == 8 // block_size * block_size


# --- 9, 11 -------------------------------------------------------------------------------------------


def _free_a_held_block(core: Core) -> None:
    core.ledger.pool.free.append(core.ledger.tables["a"].blocks[0])


def _free_block(core: Core) -> int:
    """A free block, which the pool does not know as free any more."""
    pool = core.ledger.pool
    pool.drop(pool.take(1) or ())
    return pool.free.pop()


def _lose_a_block(core: Core) -> None:
    _free_block(core)


def _double_a_block(core: Core) -> None:
    core.ledger.tables["a"].blocks.append(core.ledger.tables["a"].blocks[0])


def _share_silently(core: Core) -> None:
    core.ledger.tables["b"].blocks[-1] = core.ledger.tables["a"].blocks[-1]


def _mislead_the_index(core: Core) -> None:
    index = core.ledger.pool.index
    first, second = list(index)[:2]
    index[first], index[second] = index[second], index[first]


def _forget_a_node(core: Core) -> None:
    pool = core.ledger.pool
    pool.node[core.ledger.tables["a"].blocks[0]] = None


def _publish_a_partial_block(core: Core) -> None:
    pool = core.ledger.pool
    pool.publish(core.ledger.tables["a"].blocks[-1], pool.tree.enter("root", (1, 2)))


def _idle_without_content(core: Core) -> None:
    core.ledger.pool.idle.add(_free_block(core))


def _miscount_held(core: Core) -> None:
    core.ledger.pool.held -= 1


def _open_what_can_be_hit(core: Core) -> None:
    table = core.ledger.tables["a"]
    core.ledger.pool.refs[table.blocks[-1]] += 1
    core.ledger.pool.in_flight[next(iter(core.outstanding))] = [table.blocks[-1]]


def _open_what_is_not_granted(core: Core) -> None:
    core.ledger.tables["a"].open += 1


def _miscount_used(core: Core) -> None:
    core.ledger.pool.used += 1


def _overstate_computed(core: Core) -> None:
    core.sequences["a"].computed += 30


def _run_a_waiting_one(core: Core) -> None:
    core.waiting[0][2].status = Status.RUNNING


def _queue_a_running_one(core: Core) -> None:
    core.waiting.append(((), 99, core.sequences["a"]))


def _swap_the_queue(core: Core) -> None:
    core.waiting.reverse()


def _leak_a_table(core: Core) -> None:
    core.ledger.tables["ghost"] = core.ledger.tables.pop("b")


def _forget_inflight(core: Core) -> None:
    core.sequences["a"].inflight = 0


def _await_nothing(core: Core) -> None:
    core.sequences["a"].awaiting = [77]


def _invent_a_transfer(core: Core) -> None:
    core.transfers["nobody"] = "load"


def _lose_a_request(core: Core) -> None:
    del core.requests["a"]


def _keep_for_no_step(core: Core) -> None:
    core.ledger.pool.in_flight[55] = []


@pytest.mark.parametrize(
    "damage",
    [value for name, value in sorted(globals().items()) if name.startswith("_") and callable(value) and name[1] != "_"],
    ids=lambda damage: damage.__name__[1:],
)
def test_edge_09_the_audit_finds_every_kind_of_damage(damage: Callable[[Core], None]) -> None:
    world = make_world(16, 2, rows=2)
    for name in "abcd":
        world.submit(ask(name, prompt(5, ord(name)), max_tokens=9))
    world.advance()
    world.advance()
    world.launch()
    core = world.core
    assert core.audit() == [] and len(core.running) == 2 and len(core.waiting) == 2 and core.outstanding
    damage(core)
    assert core.audit(), damage.__name__


@pytest.mark.parametrize("block_size", range(1, 65))
def test_edge_11_every_block_size_shares_evicts_and_recovers(block_size: int) -> None:
    world = make_world(max(4, 96 // block_size), block_size, max_len=80, budget=40, depth=2)
    rng = random.Random(block_size)
    for i in range(8):
        world.submit(ask(f"r{i}", prompt(rng.randint(1, 40), 100 * (i % 3 == 0)), max_tokens=5))
        for _ in range(3):
            world.advance()
    world.drain()


# --- 15 to 21 ----------------------------------------------------------------------------------------


@depths
@pytest.mark.parametrize("n", [2, 3, 5])
def test_edge_15_many_samples_under_memory_pressure(n: int, depth: int) -> None:
    preemptions = forks = 0
    for length in (1, 3, 4, 5, 8, 11):
        world = make_world(-(-(length + 3) // 2) + n, 2, depth=depth)
        for name, seed in (("a", 1), ("b", 2)):
            world.submit(ask(name, prompt(length), 9, n=n, temperature=1.0, seed=seed))
        world.drain()
        preemptions += sum(end.num_preemptions for t in world.requests for end in t.ends.values())
        forks += world.memory.copies_made
    assert preemptions > 3 and forks >= 2


@every_scheduler
def test_edge_16_a_prompt_that_cannot_fit_now_is_not_started(scheduler: str) -> None:
    """Admitting its first chunk would lead to preempting it, again and again."""
    world = make_world(10, 2, scheduler=SCHEDULERS[scheduler](), budget=4, cache=paged(2, headroom=0.0))
    world.submit(ask("a", prompt(8), max_tokens=7))
    for _ in range(6):
        world.advance()
    world.submit(ask("long", prompt(12, 50), max_tokens=2))
    while "a" in world.core.sequences:
        assert "long" not in world.core.ledger.tables
        world.advance()
    world.drain()
    assert end_of(world, "long").reason == "length"
    assert all(end.num_preemptions == 0 for t in world.requests for end in t.ends.values())


@every_scheduler
@depths
def test_edge_16_preemptions_are_bounded(scheduler: str, depth: int) -> None:
    world = make_world(9, 2, scheduler=SCHEDULERS[scheduler](), depth=depth, budget=6)
    for i in range(10):
        world.submit(ask(f"r{i}", prompt(5, 20 * i), max_tokens=8, priority=i % 3))
    world.drain()
    ends = [end for t in world.requests for end in t.ends.values()]
    # A sequence gives way to others' growth, a few times each, not once a step.
    assert sum(end.num_preemptions for end in ends) <= 3 * len(ends)
    fed = sum(plan.num_tokens for plan in world.plans)
    assert fed <= 4 * sum(5 + 8 for _ in ends)


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("lazy", [False, True])
def test_edge_17_blocks_in_flight_are_never_taken(depth: int, lazy: bool) -> None:
    """Preempting what is in flight frees nothing, so one victim after the other would fall."""
    world = make_world(8, 2, depth=depth, lazy=lazy)
    for i in range(6):
        world.submit(ask(f"r{i}", prompt(3, 20 * i), max_tokens=8))
    while world.core.has_work:
        flying = {row.seq for plan in world.core.outstanding.values() for row in plan.rows}
        action = world.launch()
        if isinstance(action, StepPlan):
            assert not flying & set(action.preempted)
        elif world.core.outstanding:
            world.finish_step()
    world.drain()
    assert any(plan.preempted for plan in world.plans), "there must have been pressure"
    assert len(world.plans) <= 6 * 8 * 3


def test_edge_18_a_finished_load_is_seen_behind_a_head_that_cannot_run() -> None:
    world = make_world(8, 2, cache=paged(2, headroom=0.0))
    world.submit(ask("loads", prompt(8), kv_from=KVSource(handle="h", num_tokens=8)))
    world.launch()
    world.finish_step()  # of a plan that has a move and no rows
    world.submit(ask("head", prompt(12, 50)))
    action = world.launch()
    assert isinstance(action, Blocked) and action.transfers == ("loads",)
    world.end_transfer("loads")
    action = world.launch()
    assert isinstance(action, StepPlan) and [row.seq for row in action.rows] == ["loads"]
    world.drain()
    assert end_of(world, "head").num_output_tokens == 5, (
        "16 slots: 12 of the prompt, 4 of the answer, the last not stored"
    )


@pytest.mark.parametrize("rows", [1, 2])
def test_edge_19_what_waits_for_something_else_takes_no_row(rows: int) -> None:
    world = make_world(64, rows=rows)
    for i in range(5):
        world.submit(ask(f"load{i}", prompt(6, 10 * i), kv_from=KVSource(handle="h", num_tokens=6)))
    world.submit(ask("fork", prompt(6, 200), n=3, temperature=1.0, seed=1))
    for i in range(rows):
        world.submit(ask(f"plain{i}", prompt(6, 100 + 10 * i)))
    plan = world.launch()
    assert isinstance(plan, StepPlan) and len(plan.moves) == 5 and len(plan.rows) == rows
    while world.core.outstanding or any(not t.ended for t in world.requests[5:]):
        if not isinstance(world.launch(), StepPlan):
            world.finish_step()
    assert len(world.core.transfers) == 5, "all others ended while the loads were still under way"
    world.drain()


@pytest.mark.parametrize("depth", [1, 2])
def test_edge_20_priorities_preemption_and_aborts_together(depth: int) -> None:
    preemptions = 0
    for seed in range(25):
        rng = random.Random(seed)
        world = make_world(rng.randint(4, 9), 2, scheduler=Continuous(PRIORITY), depth=depth, rows=4, budget=8)
        for i in range(12):
            world.submit(ask(f"r{i}", prompt(rng.randint(1, 6), 10 * (i % 4)), 6, priority=rng.randrange(3)))
            for _ in range(rng.randrange(4)):
                world.advance()
            if rng.random() < 0.3:
                world.abort(f"r{rng.randint(0, i)}")
        world.drain()
        preemptions += sum(len(plan.preempted) for plan in world.plans)
    assert preemptions > 20


def test_edge_20_the_more_important_one_keeps_its_blocks() -> None:
    world = make_world(6, 2, scheduler=Continuous(PRIORITY))
    world.submit(ask("low", prompt(4), 6, priority=5))
    world.submit(ask("high", prompt(4, 50), 6, priority=1))
    world.drain()
    assert end_of(world, "high").num_preemptions == 0 and end_of(world, "low").num_preemptions > 0


def _state(core: Core) -> object:
    """All that could be lost or counted twice in a step that comes to nothing."""
    pool = core.ledger.pool
    return copy.deepcopy(
        (
            [seq.id for seq in core.running],
            [(entry[0], entry[1], entry[2].id) for entry in core.waiting],
            {s.id: (s.status, s.computed, s.inflight, s.awaiting, s.num_cached) for s in core.sequences.values()},
            {seq: table.blocks for seq, table in core.ledger.tables.items()},
            (pool.refs, pool.free, pool.fill, pool.held, pool.used, list(pool.index), pool.in_flight),
            (core.transfers, core.forget, core.preempted, core.num_steps),
        )
    )


def test_edge_21_a_refused_admission_leaves_nothing_behind() -> None:
    world = make_world(8, 2, depth=2, cache=paged(2, headroom=0.0))
    world.submit(ask("loads", prompt(8), kv_from=KVSource(handle="h", num_tokens=8)))
    world.launch()
    world.submit(ask("head", prompt(12, 50)))
    world.submit(ask("small", prompt(1, 90)))
    before = _state(world.core)
    for _ in range(5):
        assert isinstance(world.launch(), Blocked)
        assert _state(world.core) == before
    world.end_transfer("loads")
    assert world.core.sequences["loads"].computed == 7, "what was loaded is kept although others are refused"
    world.drain()


# --- 22, 23 ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"cache_salt": "x"}, {"cache_salt": "y"}),
        ({"cache_salt": "x"}, {}),
        ({"adapter": "x"}, {"adapter": "y"}),
        ({"adapter": "x"}, {"cache_salt": "x"}),
        ({"adapter": "ab", "cache_salt": "c"}, {"adapter": "a", "cache_salt": "bc"}),
    ],
)
def test_edge_22_salts_and_adapters_never_share(first: dict[str, str], second: dict[str, str]) -> None:
    world = make_world()
    world.submit(ask("a", prompt(12), **first))
    world.drain()
    world.submit(ask("b", prompt(12), **second))
    world.drain()
    world.submit(ask("c", prompt(12), **first))
    world.drain()
    assert end_of(world, "b").num_cached_tokens == 0
    assert end_of(world, "c").num_cached_tokens == 8


def test_edge_23_equal_hashes_are_not_equal_tokens() -> None:
    """CPython hashes 5 and 5 + (2**61 - 1) alike, and so tuples of them: a forced collision."""
    world = make_world()
    collides = tuple(token + (1 << 61) - 1 for token in prompt(12))
    assert hash(collides) == hash(prompt(12)) and collides != prompt(12)
    world.submit(ask("a", prompt(12)))
    world.drain()
    world.submit(ask("b", collides))
    world.drain()
    assert end_of(world, "b").num_cached_tokens == 0


# --- 25, 26 ------------------------------------------------------------------------------------------


class SkipsSteps:
    """Runs a different half of the sequences at every step."""

    name = "skips-steps"

    def order(self, seq: object) -> tuple[object, ...]:
        return ()

    def propose(self, view: View) -> Iterable[Want]:
        everyone = [*view.running, *view.waiting]
        half = [seq for seq in everyone if (seq.number + int(view.now)) % 2 == 0]
        for seq in half or everyone:
            yield Want(seq, 4)

    def victims(self, view: View, shortage: object) -> Iterable[object]:
        return ()


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("lazy", [False, True])
def test_edge_25_tokens_on_the_device_are_typed_and_survive_skipped_steps(depth: int, lazy: bool) -> None:
    world = make_world(64, scheduler=SkipsSteps(), depth=depth, lazy=lazy)
    for i in range(4):
        world.submit(ask(f"r{i}", prompt(5, 10 * i), max_tokens=8))
    while world.core.has_work:
        # Two steps out: each half runs twice in a row. Three: the halves take turns, so each skips a step.
        world.now = float(len(world.plans) // (4 - depth))
        if isinstance(world.launch(), StepPlan):
            continue
        if world.core.outstanding:
            world.finish_step()
    tokens = [token for plan in world.plans for row in plan.rows for token in row.tokens]
    assert any(isinstance(token, FromStep) for token in tokens)
    assert all(isinstance(token, FromStep) or token >= 0 for token in tokens)
    world.drain()


def test_edge_26_drafts_do_not_survive_a_preemption() -> None:
    preempted = accepted = 0
    for num_blocks in range(5, 12):
        world = make_world(num_blocks, 2, max_drafts=4)
        for name in "ab":
            world.submit(ask(name, prompt(4, ord(name)), max_tokens=8))
        known: dict[str, int] = {}
        while world.core.has_work:
            world.advance()
            plan = world.plans[-1]
            for seq in plan.preempted:
                preempted += 1
                first = next((row for row in plan.rows if row.seq == seq), None)
                assert first is None or first.draft == 0
            for row in plan.rows:  # a recomputation carries no drafts before it has sampled again
                if row.draft:
                    assert len(row.tokens) - row.draft == 1
                known[row.seq] = row.stop
        world.drain()
        accepted += world.memory.drafts_accepted
    assert preempted > 3 and accepted > 10


def test_edge_26_drafts_never_cost_anyone_a_block() -> None:
    """Guesses are left out when there is no room for them: no preemption, no early end."""
    # 4 + 5 tokens, the last never stored: 8 slots, all of the pool.
    for max_drafts in (1, 2, 4):
        world = make_world(4, 2, max_drafts=max_drafts)
        world.submit(ask("a", prompt(4), max_tokens=5))
        world.drain()
        end = end_of(world, "a")
        assert (end.reason, end.num_preemptions) == ("length", 0)


# --- 29, 31, 32 --------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["stop id", "max_tokens", "max_model_len", "stop string", "none"])
def test_edge_29_ids_log_probabilities_and_count_are_cut_together(kind: str, count: int) -> None:
    """A step that gives several tokens may end the sequence at any of them."""
    drafts = (20, 21, 22, 23)
    for end_at in range(1, count + 1):
        core = Core(
            Continuous(), paged(4), Limits(num_blocks=16, max_model_len=3 + 1 + end_at if "model" in kind else 64)
        )
        params = SamplingParams(
            max_tokens=1 + end_at if kind == "max_tokens" else 30,
            stop_token_ids=(19 + end_at,) if kind == "stop id" else (),
            stop=("end",),
            logprobs=1,
        )
        core.receive(Submit(Request(id="a", prompt=prompt(3), params=params)), 0.0)
        core.next_step(0.0)
        core.receive(StepDone(0, StepResult((RowResult((10,), ({10: -0.5},), drafts=drafts),))), 1.0)
        (first,) = core.outputs()
        assert first == TokenDelta("a", 0, (10,), ({10: -0.5},))
        plan = core.next_step(1.0)
        assert isinstance(plan, StepPlan)
        # Drafts beyond the last token that may be sampled are not even tried.
        num_drafts = min(4, end_at - 1) if kind.startswith("max") else 4
        assert plan.rows[0].draft == num_drafts
        num_tokens = min(count, num_drafts + 1)
        tokens = tuple(range(20, 20 + num_tokens))
        stopped = None
        if kind == "stop string":  # the executor has cut its tokens to the one that completed the string
            tokens, stopped = tokens[:end_at], "end"
        result = RowResult(tokens, tuple({t: -1.0, 0: -2.0} for t in tokens), stopped)
        core.receive(StepDone(1, StepResult((result,))), 2.0)
        kept = tokens[:end_at] if kind != "none" else tokens
        delta, *finished = core.outputs()
        assert delta == TokenDelta("a", 0, kept, tuple({t: -1.0, 0: -2.0} for t in kept))
        if kind == "none" or (kind.startswith("max") and num_tokens < end_at):
            assert not finished and core.sequences["a"].output == [10, *kept]
            continue
        (end,) = finished
        assert isinstance(end, Finished) and end.num_output_tokens == 1 + len(kept) == 1 + end_at
        assert end.reason == ("length" if kind.startswith("max") else "stop")
        detail = {"stop id": f"token {19 + end_at}", "stop string": "end"}.get(kind, f"{kind}=")
        assert end.detail.startswith(detail)
        assert core.audit() == [] and not core.has_work


@pytest.mark.parametrize("min_tokens", [0, 1, 2, 3])
def test_edge_29_stop_ids_count_only_after_min_tokens(min_tokens: int) -> None:
    core = Core(Continuous(), paged(4), Limits(num_blocks=16))
    params = SamplingParams(max_tokens=9, min_tokens=min_tokens, stop_token_ids=(7,))
    core.receive(Submit(Request(id="a", prompt=prompt(3), params=params)), 0.0)
    for step in range(9):
        if not core.has_work:
            break
        core.next_step(0.0)
        core.receive(StepDone(step, StepResult((RowResult((7,)),))), 1.0)
    end = core.outputs()[-1]
    assert isinstance(end, Finished) and (end.reason, end.num_output_tokens) == ("stop", min_tokens + 1)


def test_edge_31_seeds_do_not_depend_on_neighbours() -> None:
    def seeds(neighbours: int, first: bool, engine_seed: int = 0) -> dict[str, int]:
        core = Core(Continuous(), paged(4), Limits(num_blocks=64), seed=engine_seed)
        mine = [ask("a", prompt(4), seed=11, n=2, temperature=1.0), ask("b", prompt(4), seed=11)]
        others = [ask(f"o{i}", prompt(3), temperature=1.0) for i in range(neighbours)]
        for request in [*mine, *others] if first else [*others, *mine]:
            core.receive(Submit(request), 0.0)
        return {seq.id: seq.seed for seq in core.sequences.values() if seq.id[0] in "ab"}

    alone = seeds(0, True)
    assert alone["a"] != alone["a/1"], "samples of one request differ"
    assert alone["a"] == alone["b"], "the same seed draws the same, whatever the request's name"
    for neighbours in (1, 5):
        for first in (True, False):
            for engine_seed in (0, 99):
                assert seeds(neighbours, first, engine_seed) == alone


def test_edge_31_without_a_seed_the_engine_seed_and_the_arrival_number_decide() -> None:
    def seeds(engine_seed: int) -> list[int]:
        core = Core(Continuous(), paged(4), Limits(num_blocks=64), seed=engine_seed)
        for i in range(20):
            core.receive(Submit(ask(f"r{i}", prompt(3), temperature=1.0)), 0.0)
        return [seq.seed for seq in core.sequences.values()]

    assert seeds(1) == seeds(1) and len(set(seeds(1)) | set(seeds(2))) == 40


def test_edge_31_draws_are_keyed_by_seed_and_position_and_are_uniform() -> None:
    seed = sequence_seed(5, 0, 0, 0)
    values = [draw(seed, position) for position in range(20_000)]
    assert values[:3] == [draw(seed, position) for position in range(3)] and all(0 <= v < 1 for v in values)
    assert abs(sum(values) / len(values) - 0.5) < 0.01
    in_tenths = [sum(int(v * 10) == i for v in values) for i in range(10)]
    assert all(1850 < count < 2150 for count in in_tenths), in_tenths
    neighbours = [draw(s, 0) for s in range(20_000)]
    covariance = sum((a - 0.5) * (b - 0.5) for a, b in itertools.pairwise(neighbours)) / 20_000
    assert abs(covariance) < 0.003


@pytest.mark.parametrize("offset", range(-10, 11))
def test_edge_32_hits_at_every_offset_around_a_block_boundary(offset: int) -> None:
    block_size, boundary = 16, 32
    world = make_world(64, block_size, max_len=200, budget=200)
    world.submit(ask("a", prompt(boundary + offset), max_tokens=3))
    world.drain()
    for more in (0, 1, 5, 16):
        world.submit(ask(f"b{more}", prompt(boundary + offset + more), max_tokens=3))
        world.drain()
        cached = end_of(world, f"b{more}").num_cached_tokens
        assert cached % block_size == 0 and cached <= boundary + offset + more - 1


# --- 33 to 36 ----------------------------------------------------------------------------------------


def lives(depth: int, lazy: bool = False, max_drafts: int = 0) -> World:
    """A short life that crosses everything: a load, a send, forks, prefix hits, pressure."""
    world = make_world(14, 2, depth=depth, lazy=lazy, budget=7, rows=5, max_drafts=max_drafts)
    world.submit(ask("plain", prompt(7), 5))
    world.submit(ask("load", prompt(7), 4, kv_from=KVSource(handle="h", num_tokens=5)))
    world.submit(ask("send", prompt(5, 50), 3, kv_to="decoder"))
    world.submit(ask("fork", prompt(5, 80), 5, n=3, temperature=1.0, seed=3))
    return world


NAMES = ("plain", "load", "send", "fork")


@depths
@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("max_drafts", [0, 3])
def test_edge_36_an_abort_at_every_point_of_the_loop(depth: int, lazy: bool, max_drafts: int) -> None:
    full = lives(depth, lazy, max_drafts)
    full.drain()
    num_events = len(full.events)
    for name in NAMES:
        for point in range(4, num_events, 1 if depth == 1 else 2):
            world = lives(depth, lazy, max_drafts)
            while world.core.has_work and len(world.events) < point:
                world.advance()
            plans = len(world.plans)
            world.abort(name)
            said = copy.deepcopy(world.current[name].tokens)
            world.drain()
            assert world.current[name].tokens == said, "nothing is said after an abort"
            late = [row for plan in world.plans[plans:] for row in plan.rows if row.seq.split("/")[0] == name]
            assert not late, "no step launched after an abort runs the request"
            for other in NAMES:
                if other != name:
                    assert all(end.reason == "length" for end in world.current[other].ends.values())


@depths
def test_edge_33_blocks_are_released_once_on_every_path(depth: int) -> None:
    """Abort, finish, failure and transfer ends in every order: the pool is whole when all is over."""
    for seed in range(40):
        rng = random.Random(seed)
        world = lives(depth)
        while world.core.has_work:
            luck = rng.random()
            if luck < 0.06:
                world.abort(rng.choice(NAMES))
            elif luck < 0.3 and world.transfers():
                world.end_transfer(rng.choice(world.transfers()), rng.random() < 0.5)
            elif luck < 0.6 and world.core.outstanding:
                world.finish_step(rng.randrange(3) if rng.random() < 0.1 else None)
            else:
                world.advance()
        world.drain()
        assert world.core.ledger.pool.available == 14


def test_edge_33_a_second_release_is_harmless() -> None:
    core = Core(Continuous(), paged(4), Limits(num_blocks=8))
    core.receive(Submit(ask("a", prompt(9))), 0.0)
    core.next_step(0.0)
    seq = core.sequences["a"]
    core.receive(Abort("a"), 0.0)
    core.receive(Abort("a"), 0.0)
    core.ledger.release(seq, None)
    core.receive(StepDone(0, StepResult((RowResult((1,)),))), 1.0)
    core.receive(Abort("a"), 1.0)
    assert core.audit() == [] and core.ledger.pool.available == 8
    assert [type(o).__name__ for o in core.outputs()] == ["Finished"]
    with pytest.raises(ProtocolError, match="StepDone"):
        core.receive(StepDone(0, StepResult((RowResult((1,)),))), 2.0)
    with pytest.raises(ProtocolError, match="transfer"):
        core.receive(TransferDone("a"), 2.0)


@every_scheduler
@depths
def test_edge_34_not_caching_changes_nothing_but_publication(scheduler: str, depth: int) -> None:
    def run(cached: bool) -> World:
        world = make_world(9, 2, scheduler=SCHEDULERS[scheduler](), budget=5, depth=depth)
        for i in range(4):
            world.submit(ask(f"r{i}", prompt(6, 20 * i), 6, cache_prefix=cached))
        world.drain()
        return world

    without = run(False)
    assert not without.core.ledger.pool.index and not len(without.core.ledger.pool.idle)
    assert all(end.num_cached_tokens == 0 for t in without.requests for end in t.ends.values())
    assert all(t.ends[0].reason == "length" for t in without.requests)
    # Prompts differ, so only what was preempted could hit: the flag costs at most that recomputation.
    assert len(without.plans) <= 2 * len(run(True).plans)


@pytest.mark.parametrize("budget", [1, 2, 3, 5])
@pytest.mark.parametrize("end", ["abort", "failure"])
def test_edge_35_a_prompt_cut_short_leaves_only_valid_blocks(budget: int, end: str) -> None:
    """Blocks of a chunked prompt are published as they are committed; ending it in between must not hurt."""
    for cut in range(1, 11):
        world = make_world(8, 2, budget=budget)
        world.submit(ask("a", prompt(11), 2))
        fed = 0
        while fed < cut and "a" in world.core.sequences:
            plan = world.launch()
            assert isinstance(plan, StepPlan)
            fed += plan.num_tokens
            if fed >= cut and end == "failure":
                world.finish_step(fail_row=0)
            elif fed >= cut:
                world.abort("a")
                world.finish_step()
            else:
                world.finish_step()
        committed = fed - len(world.plans[-1].rows[0].tokens)
        assert len(world.core.ledger.pool.index) == committed // 2, "only committed tokens are published"
        world.submit(ask("b", prompt(11), 2))
        world.submit(ask("c", prompt(11), 2))
        world.drain()
        assert end_of(world, "b").num_cached_tokens >= committed // 2 * 2


@pytest.mark.parametrize("scheduler", ["continuous", "priority"])
def test_edge_35_preempted_in_the_middle_of_a_prompt(scheduler: str) -> None:
    world = make_world(7, 2, scheduler=SCHEDULERS[scheduler](), budget=2, cache=paged(2, headroom=0.0))
    world.submit(ask("old", prompt(2, 50), 12, priority=0))
    world.advance()
    world.advance()
    world.submit(ask("cut", prompt(8), 2, priority=1))
    world.drain()
    first = next(i for i, plan in enumerate(world.plans) if "cut" in plan.preempted)
    fed = max(row.stop for plan in world.plans[:first] for row in plan.rows if row.seq == "cut")
    assert 2 <= fed < 8, "some blocks of the prompt were published, and it was not all fed"
    world.submit(ask("again", prompt(8), 2))
    world.drain()


# --- the oracle itself -----------------------------------------------------------------------------


def test_the_model_of_these_tests_depends_on_every_token_and_position() -> None:
    base = list(prompt(12))
    outcomes = {digest_of(base)}
    for i in range(12):
        changed = [*base]
        changed[i] += 1
        outcomes.add(digest_of(changed))
        outcomes.add(digest_of(base[:i] + base[i + 1 :]))
    assert len(outcomes) == 25
    assert len({next_token(digest_of(base[:i]), 0) for i in range(12)}) > 4


def test_idle_is_idle() -> None:
    world = make_world()
    assert world.launch() == Idle(None)
    with pytest.raises(Violation, match="never ended"):
        world.requests.append(copy.deepcopy(make_world().submit(ask("a", prompt(3)))))
        world.drain()
