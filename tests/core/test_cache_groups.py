"""Cache groups: which layers share tables, and how tables with a sliding window give up and find blocks again.

Everything that runs goes through `content_oracle.World`: in each group a row reads exactly its window, whoever has the
blocks before it by then.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable

import pytest
from content_oracle import World, entries, most_tokens
from hypothesis import given, settings
from hypothesis import strategies as st

from twinfer.core.cache_groups import MOST_GROUPS, cache_groups, layers_per_page, one_group
from twinfer.core.core import Core
from twinfer.core.ledger import Ledger
from twinfer.core.params import SamplingParams
from twinfer.core.plan import HOLE
from twinfer.core.policy import Limits
from twinfer.core.request import KVSource, Request, Sequence
from twinfer.plugins.kv_cache.paged import Paged
from twinfer.plugins.scheduler.continuous import Continuous

Windows = tuple[int | None, ...]
LAYOUTS: tuple[Windows, ...] = ((5,), (None, 5), (None, 3, 3), (8, 2), (1, None))
every_layout = pytest.mark.parametrize("windows", LAYOUTS, ids=str)


def make_world(windows: Windows, num_blocks: int = 64, block_size: int = 4, **more: object) -> World:
    options: dict[str, int] = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 96}
    limits = Limits(**{**options, "num_blocks": num_blocks, **more.pop("limits", {})})  # type: ignore[arg-type]
    sharing = bool(more.pop("sharing", True))
    cache = Paged(Paged.Options(block_size=block_size, prefix_sharing=sharing, headroom=0.0))
    return World(Continuous(), cache, limits, windows=windows, **more)  # type: ignore[arg-type]


def ask(name: str, tokens: tuple[int, ...], max_tokens: int = 6, **more: object) -> Request:
    params = {key: more.pop(key) for key in list(more) if key in SamplingParams.__dataclass_fields__}
    return Request(id=name, prompt=tokens, params=SamplingParams(max_tokens=max_tokens, **params), **more)  # type: ignore[arg-type]


def prompt(length: int, start: int = 0) -> tuple[int, ...]:
    return tuple(range(start, start + length))


# --- which layers share a table --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "every", "groups", "size", "room_lost"),
    [
        (26, 2, 2, 13, 0),  # Gemma 2 2B
        (42, 2, 2, 21, 0),  # Gemma 2 9B
        (24, 2, 2, 12, 0),  # GPT-OSS 20B
        (18, 6, 6, 3, 0),  # Gemma 3 270M
        (26, 6, 7, 4, 2),  # Gemma 3 1B: 22 sliding and 4 full; 2 a group would be 13 groups
        (34, 6, 7, 5, 1),  # Gemma 3 4B
        (48, 6, 6, 8, 0),  # Gemma 3 12B
        (62, 6, 7, 10, 8),  # Gemma 3 27B
    ],
)
def test_groups_of_known_models(layers: int, every: int, groups: int, size: int, room_lost: int) -> None:
    found = cache_groups([None if (i + 1) % every == 0 else 512 for i in range(layers)], 8192)
    assert (len(found), layers_per_page(found), len(found) * size - layers) == (groups, size, room_lost)
    assert found[0].window is None and found[0].layers[0] == every - 1
    assert all(len(group.layers) == size for group in found if group.window is None), (
        "nothing is lost where it costs most"
    )


@pytest.mark.parametrize("windows", [[None] * 5, [7] * 5, [40, None, 40, 99], [None, 32, 64]])
def test_a_model_of_one_kind_is_one_group(windows: list[int | None]) -> None:
    full = windows[0] is None or windows[0] > 32
    found = cache_groups(windows, max_context=32)
    assert len(found) == 1 and found[0].layers == tuple(range(len(windows)))
    assert found[0].window == (None if full else windows[0])
    assert one_group(5) == cache_groups([None] * 5)


@given(st.lists(st.sampled_from([None, None, 4, 8, 16]), min_size=1, max_size=70))
def test_every_layer_is_in_one_group_of_its_window(windows: list[int | None]) -> None:
    found = cache_groups(windows)
    assert sorted(layer for group in found for layer in group.layers) == list(range(len(windows)))
    assert all(windows[layer] == group.window for group in found for layer in group.layers)
    assert all(list(group.layers) == sorted(group.layers) for group in found)
    assert len(found) <= MOST_GROUPS
    divisor = math.gcd(*(windows.count(window) for window in set(windows)))
    if len(windows) // divisor <= MOST_GROUPS:
        assert {len(group.layers) for group in found} == {divisor}


# --- giving up -------------------------------------------------------------------------------------


def live(world: World, name: str) -> list[list[int]]:
    """Table entries that are blocks, per group."""
    groups = world.core.ledger.tables[name].groups
    return [[i for i, block in enumerate(blocks) if block != HOLE] for blocks in groups]


@pytest.mark.parametrize("window", range(1, 11))
@pytest.mark.parametrize("length", range(1, 14))
def test_wrap_around_at_every_offset_of_a_block_boundary(window: int, length: int) -> None:
    """What is held is what the next token reads and what it is written to: no block more, none less."""
    world = make_world((None, window), block_size=4)
    world.submit(ask("a", prompt(length), 14))
    while True:
        world.advance()
        if "a" not in world.core.sequences:
            break
        seq = world.core.sequences["a"]
        if not seq.inflight:
            full, sliding = live(world, "a")
            assert full == list(range(-(-seq.computed // 4)))
            needed = [i for i in entries(window, seq.computed, seq.computed + 1, 4) if i < len(full)]
            assert sliding == needed, f"{seq.computed} computed"
    world.drain()


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("drafts", [0, 4])
@every_layout
def test_chunks_drafts_and_outstanding_steps(windows: Windows, drafts: int, depth: int) -> None:
    """Rows in flight, and drafts that turn out wrong, read what is still theirs (edge 17)."""
    for budget in (1, 5, 16):
        limits = {"max_num_batched_tokens": budget, "max_outstanding": depth}
        world = make_world(windows, 40, max_drafts=drafts, lazy=budget % 2 == 1, limits=limits)
        for i in range(3):
            world.submit(ask(f"r{i}", prompt(9 + 4 * i, 30 * (i // 2)), 12))
            world.advance()
        world.drain()


@pytest.mark.parametrize("chunk", [1, 4, 7, 16])
@pytest.mark.parametrize("window", [1, 3, 8])
def test_a_long_sequence_holds_its_window_and_a_chunk(window: int, chunk: int) -> None:
    size, most = 4, -(-(window - 1 + chunk) // 4) + 1
    world = make_world((window,), most, size, limits={"max_num_batched_tokens": chunk})
    world.submit(ask("a", prompt(60), 30))
    held = 0
    while world.core.has_work:
        world.advance()
        held = max(held, world.core.ledger.pool.held)
    world.drain()
    assert world.current["a"].ends[0].reason == "length" and world.current["a"].ends[0].num_preemptions == 0
    assert held <= most < 90 // size
    assert {len(row.tokens) for plan in world.plans for row in plan.rows if row.stop < 60} == {chunk}, (
        "no chunk was cut"
    )


@every_layout
def test_alone_a_sequence_gets_what_the_pool_can_hold_of_it(windows: Windows) -> None:
    """Rows are cut to the blocks there are, so large chunks fail no earlier than single tokens would."""
    for num_blocks in range(len(windows), 4 * len(windows) + 2):
        can = most_tokens(windows, num_blocks, 4, 96)
        for length in (1, 6, 11, 23):
            world = make_world(windows, num_blocks)
            tracked = world.submit(ask("a", prompt(length), 40))
            world.drain()
            if tracked.rejected is None:
                end = tracked.ends[0]
                assert length + end.num_output_tokens == min(can + 1, length + 40) and end.num_preemptions <= 1
                assert end.reason == ("length" if length + 40 <= can + 1 else "capacity")
            else:
                assert length + 1 > can


@given(
    st.lists(st.sampled_from([None, 1, 2, 5, 8, 13]), min_size=1, max_size=4), st.sampled_from([1, 2, 3, 4, 8]),
    st.integers(0, 60),
)  # fmt: skip
def test_least_is_what_single_tokens_need_and_peak_no_less(windows: list[int | None], size: int, tokens: int) -> None:
    ledger = Ledger(Paged(Paged.Options(block_size=size)), Limits(max_num_batched_tokens=7), windows=windows)
    by_hand = [sum(len(entries(w, p, p + 1, size)) for w in windows) for p in range(tokens)]
    assert ledger.least(tokens) == max(by_hand, default=0) <= ledger.peak(tokens)
    full = sum(w is None for w in windows) * -(-tokens // size)
    chunks = sum((w - 1 + 7 + size - 2) // size + 1 for w in windows if w is not None)
    assert ledger.peak(tokens) <= min(full + chunks, len(windows) * -(-tokens // size))


def test_a_chunk_is_cut_before_anyone_is_preempted_for_it() -> None:
    world = make_world((6,), 7, limits={"max_num_batched_tokens": 32})
    world.submit(ask("a", prompt(4), 20))
    for _ in range(8):
        world.advance()
    world.submit(ask("b", prompt(40, 50), 2))
    world.drain()
    assert all(tracked.ends[0].num_preemptions == 0 for tracked in world.requests)
    assert max(len(row.tokens) for plan in world.plans for row in plan.rows if row.seq == "b") < 32


# --- finding again ---------------------------------------------------------------------------------


def expected_hit(ledger: Ledger, seq: Sequence) -> int:
    """Blocks of the longest hit, by definition: every length is tried."""
    size, parent, nodes = ledger.block_size, ledger._root(seq), []
    for start in range(0, seq.known - size, size):
        node = ledger.pool.tree.find(parent, tuple(seq.tokens(start, start + size)))
        if node is None:
            break
        nodes.append(node)
        parent = node  # type: ignore[assignment]
    for length in range(len(nodes), 0, -1):
        needed = [
            (nodes[i], group)
            for group, window in enumerate(ledger.windows)
            for i in entries(window, length * size, length * size + 1, size)
            if i < length
        ]
        if all(key in ledger.pool.index for key in needed):
            return length
    return 0


@every_layout
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_hits_are_the_longest_that_cover_every_window(windows: Windows, data: st.DataObject) -> None:
    """Blocks of a cached prompt are evicted at random; the rest is hit as far as it serves."""
    world = make_world(windows, 60)
    world.submit(ask("a", prompt(41), 1))
    world.drain()
    ledger = world.core.ledger
    cached = sorted(ledger.pool.index.values())
    for block in data.draw(st.lists(st.sampled_from(cached), unique=True, max_size=8)):
        ledger.pool.idle.remove(block)
        ledger.pool._unpublish(block, 1)
        ledger.pool.free.append(block)
    for length in (3, 17, 30, 41):
        seq = Sequence(ask("b", prompt(length)), 0, 9, 0, 96)
        hits = ledger.hits(seq)
        assert hits.length == expected_hit(ledger, seq)
        for window, blocks in zip(windows, hits.groups, strict=True):
            low = entries(window, hits.length * 4, hits.length * 4 + 1, 4).start
            assert [block == HOLE for block in blocks] == [i < low for i in range(hits.length)]
    world.submit(ask("b", prompt(37), 9))
    world.submit(ask("c", prompt(41), 9))
    world.drain()


@every_layout
def test_a_prompt_is_hit_again_although_its_windows_were_left(windows: Windows) -> None:
    world = make_world(windows, 200)
    world.submit(ask("a", prompt(40), 12))
    world.drain()
    for length in range(1, 45, 3):
        world.submit(ask(f"b{length}", prompt(length), 3))
        world.drain()
        assert world.current[f"b{length}"].ends[0].num_cached_tokens == (min(length, 40) - 1 + (length > 40)) // 4 * 4


def test_only_the_window_must_still_be_cached() -> None:
    """A sliding-only model under pressure: the prompt's beginning is evicted, its end still serves."""
    world = make_world((6,), 12)
    world.submit(ask("a", prompt(41), 1))
    world.drain()
    pool = world.core.ledger.pool
    for block in pool.take(pool.available - 3) or []:  # all but the youngest three
        pool.drop([block])
    world.submit(ask("b", prompt(41), 4))
    world.drain()
    assert world.current["b"].ends[0].num_cached_tokens == 40


@pytest.mark.parametrize("length", range(1, 18))
@every_layout
def test_samples_fork_what_the_leader_still_has(windows: Windows, length: int) -> None:
    world = make_world(windows, 120)
    world.submit(ask("a", prompt(length), 10, n=3, temperature=1.0, seed=4))
    world.drain()
    for index in (1, 2):
        end = world.current["a"].ends[index]
        left = any(entries(w, length, length + 1, 4).start > entries(w, length - 1, length, 4).start
                   for w in windows if w is not None)  # fmt: skip
        # The leader's window may just have left a block that the last prompt token reads: then the cache serves.
        assert end.num_cached_tokens == ((length - 1) // 4 * 4 if left else length - 1)


@every_layout
@pytest.mark.parametrize("what", ["preempted", "swapped", "loaded", "sent", "beams"])
def test_everything_else_that_moves_kv(windows: Windows, what: str) -> None:
    seen = 0
    for seed in range(2):
        rng = random.Random(f"{what}-{seed}")
        tight = what in ("preempted", "swapped")
        limits = {"num_host_blocks": 50 if what == "swapped" else 0, "max_outstanding": 1 + seed % 2}
        num_blocks = (5 + seed % 3) * len(windows) if tight else 100
        world = make_world(windows, num_blocks, limits=limits, sharing=bool(seed % 3))
        for i in range(4):
            length = rng.randint(2, 5) if tight else rng.randint(2, 30)
            more: dict[str, object] = {}
            if what == "loaded":
                more["kv_from"] = KVSource(handle="h", num_tokens=rng.randint(1, length))
            elif what == "sent":
                more["kv_to"] = "peer"
            elif what == "beams":
                more["beam_width"] = 2
            world.submit(ask(f"r{i}", prompt(length, 40 * (i % 3)), 13, **more))
        world.drain()
        ends = [end for tracked in world.requests for end in tracked.ends.values()]
        seen += {
            "preempted": sum(end.num_preemptions for end in ends), "swapped": sum(end.num_swaps for end in ends),
            "beams": world.memory.forks_made,
        }.get(what, sum(len(plan.moves) for plan in world.plans))  # fmt: skip
    assert seen > 1


# --- the audit -------------------------------------------------------------------------------------


def _keep_what_was_left(core: Core) -> None:
    table = core.ledger.tables["a"]
    table.first[1] -= 1
    (block,) = core.ledger.pool.take(1) or ()
    core.ledger.pool.fill_to(block, 4)
    table.groups[1][table.first[1]] = block


def _leave_what_is_read(core: Core) -> None:
    table = core.ledger.tables["a"]
    core.ledger.pool.drop([table.groups[1][table.first[1]]])
    table.groups[1][table.first[1]] = HOLE
    table.first[1] += 1


def _leave_without_counting(core: Core) -> None:
    table = core.ledger.tables["a"]
    core.ledger.pool.drop([table.groups[1][table.first[1]]])
    table.groups[1][table.first[1]] = HOLE


def _hole_in_a_full_group(core: Core) -> None:
    table = core.ledger.tables["a"]
    core.ledger.pool.drop([table.groups[0][0]])
    table.groups[0][0] = HOLE


def _group_that_is_shorter(core: Core) -> None:
    table = core.ledger.tables["a"]
    core.ledger.pool.drop([table.groups[1].pop()])


def _block_in_two_groups(core: Core) -> None:
    table = core.ledger.tables["a"]
    table.groups[1][-1] = table.groups[0][-1]


def _node_nobody_uses(core: Core) -> None:
    core.ledger.pool.tree.enter("root", (1, 2, 3, 4))


def _node_used_once_too_often(core: Core) -> None:
    core.ledger.pool.tree.use(core.ledger.tables["a"].node)


def _block_hung_at_another_group(core: Core) -> None:
    pool = core.ledger.pool
    key = next(key for key in pool.index if key[1] == 1)
    pool.index[key[0], 2] = pool.index.pop(key)


@pytest.mark.parametrize(
    "damage",
    [value for name, value in sorted(globals().items()) if name.startswith("_") and callable(value) and name[1] != "_"],
    ids=lambda damage: damage.__name__[1:],
)
def test_the_audit_finds_damage_of_groups(damage: Callable[[Core], None]) -> None:
    world = make_world((None, 6), 40)
    for name in "ab":
        world.submit(ask(name, prompt(14, ord(name)), 20))
    for _ in range(12):
        world.advance()
    core = world.core
    table = core.ledger.tables["a"]
    assert core.audit() == [] and table.first[1] > 1 and len(table.groups[1]) > table.first[1] + 1
    damage(core)
    assert core.audit(), damage.__name__


def test_pairs_of_layouts_and_block_sizes_in_small_pools() -> None:
    """Many short lives where blocks change hands all the time."""
    for windows, size, depth in itertools.product(LAYOUTS, (1, 2, 3), (1, 3)):
        rng = random.Random(f"{windows}-{size}-{depth}")
        least = len(windows) * -(-24 // size)
        world = make_world(windows, least, size, limits={"max_outstanding": depth, "max_num_batched_tokens": 9})
        for i in range(6):
            world.submit(ask(f"r{i}", prompt(rng.randint(1, 20), 50 * (i % 2)), rng.randint(1, 14)))
            for _ in range(rng.randrange(4)):
                world.advance()
        world.drain()
