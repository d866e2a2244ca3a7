"""What the built-in KV caches promise: how much they reserve, waste and share."""

from __future__ import annotations

import random
import zlib
from typing import Any

import pytest
from pydantic import ValidationError

from twinfer.core.core import Core
from twinfer.core.events import Finished, StepDone, Submit
from twinfer.core.params import SamplingParams
from twinfer.core.plan import Need, RowResult, StepPlan, StepResult
from twinfer.core.policy import IdleOrder, KVCache, Limits
from twinfer.core.recorder import Recorder
from twinfer.core.request import Request
from twinfer.plugins.kv_cache.contiguous import Contiguous
from twinfer.plugins.kv_cache.paged import Paged
from twinfer.plugins.scheduler.continuous import Continuous


def run(
    cache: KVCache, limits: Limits, requests: list[Request]
) -> tuple[list[StepPlan], dict[str, Any], list[Finished]]:
    """All requests through a core with steps of one second: (plans, metrics, ends)."""
    core = Core(Continuous(), cache, limits)
    recorder = Recorder("simulator", {}, {}, 1.0)
    plans, ends, now = [], [], 0.0
    for request in requests:
        core.receive(Submit(request), now)
        recorder.submitted(request, now)
    while core.has_work:
        plan = core.next_step(now)
        assert isinstance(plan, StepPlan)
        plans.append(plan)
        rows = tuple(RowResult() if row.need is Need.NONE else RowResult((1,)) for row in plan.rows)
        result = StepResult(rows, 1.0)
        recorder.step(plan, result, now, now + 1.0)
        now += 1.0
        core.receive(StepDone(plan.step, result), now)
        for output in core.outputs():
            recorder.output(output, now)
            if isinstance(output, Finished):
                ends.append(output)
        assert core.audit() == []
    return plans, recorder.finish().metrics, ends


def ask(name: str, length: int, max_tokens: int, shared: int = 0) -> Request:
    prompt = tuple(range(shared)) + tuple(
        zlib.crc32(f"{name}/{i}".encode()) % 1000 + 1000 for i in range(length - shared)
    )
    return Request(id=name, prompt=prompt, params=SamplingParams(max_tokens=max_tokens, ignore_eos=True))


def traffic(num: int) -> list[Request]:
    rng = random.Random(1)
    return [ask(f"r{i}", rng.randint(1, 400), rng.randint(1, 100)) for i in range(num)]


@pytest.mark.parametrize("block_size", [1, 16, 1024])
@pytest.mark.parametrize("num_tokens", [0, 1, 15, 16, 17, 500])
def test_paged_reserves_what_is_stored(block_size: int, num_tokens: int) -> None:
    cache, limits = Paged(Paged.Options(block_size=block_size)), Limits(max_model_len=512)
    assert cache.block_size(limits) == block_size
    assert cache.reserve(num_tokens, limits) == num_tokens


@pytest.mark.parametrize("num_tokens", [1, 17, 512])
def test_contiguous_reserves_the_whole_context(num_tokens: int) -> None:
    cache, limits = Contiguous(), Limits(max_model_len=512)
    assert cache.block_size(limits) == cache.reserve(num_tokens, limits) == 512
    assert not cache.shares_prefixes and not cache.copies_on_write


def test_headroom_is_a_share_of_the_pool() -> None:
    assert Paged(Paged.Options(headroom=0.1)).headroom(Limits(num_blocks=256)) == 25
    assert Paged(Paged.Options(headroom=0.0)).headroom(Limits(num_blocks=256)) == 0
    assert Contiguous().headroom(Limits(num_blocks=256)) == 0


def test_headroom_leaves_room_to_grow() -> None:
    """With it, sequences grow into what admission left; without, they are preempted."""
    limits = Limits(num_blocks=40, max_model_len=512, max_num_batched_tokens=512)
    requests = [ask(f"r{i}", 31, 20) for i in range(20)]
    preemptions = []
    for headroom in (0.0, 0.3):
        plans, _, _ = run(Paged(Paged.Options(block_size=4, headroom=headroom)), limits, requests)
        preemptions.append(sum(len(plan.preempted) for plan in plans))
    assert preemptions[1] < preemptions[0]


@pytest.mark.parametrize("block_size", [1, 4, 16, 64])
def test_paged_waste_is_below_one_block_a_sequence(block_size: int) -> None:
    limits = Limits(num_blocks=8000, max_model_len=512, max_num_seqs=16)
    plans, metrics, _ = run(Paged(Paged.Options(block_size=block_size)), limits, traffic(30))
    for plan in plans:
        stats = plan.stats
        # Slots that this step writes are held already and not yet used.
        reserved_for_nothing = stats.held_blocks * stats.block_size - stats.used_slots - plan.num_tokens
        assert 0 <= reserved_for_nothing < block_size * stats.running
    assert metrics["kv_waste"] < 0.12 if block_size <= 16 else metrics["kv_waste"] < 0.3


def test_contiguous_wastes_what_paged_does_not() -> None:
    requests = traffic(30)
    limits = Limits(num_blocks=16, max_model_len=512, max_num_seqs=16)
    _, contiguous, _ = run(Contiguous(), limits, requests)
    paged_limits = Limits(num_blocks=16 * 32, max_model_len=512, max_num_seqs=16)
    _, paged, _ = run(Paged(), paged_limits, requests)
    assert contiguous["kv_waste"] > 0.4 > 0.12 > paged["kv_waste"]
    assert contiguous["peak_kv_bytes"] == 16 * 512 > paged["peak_kv_bytes"]


def test_the_same_memory_holds_more_sequences_when_paged() -> None:
    requests = [ask(f"r{i}", 40, 10) for i in range(24)]
    plans, _, _ = run(Contiguous(), Limits(num_blocks=4, max_model_len=512), requests)
    paged_plans, _, _ = run(Paged(), Limits(num_blocks=4 * 32, max_model_len=512), requests)
    assert max(len(plan.rows) for plan in plans) == 4
    assert max(len(plan.rows) for plan in paged_plans) == 24


def test_a_common_prefix_is_computed_and_held_once() -> None:
    limits = Limits(num_blocks=400, max_model_len=512, max_num_seqs=2, max_num_batched_tokens=512)
    requests = [ask(f"r{i}", 100, 3, shared=80) for i in range(10)]
    results = {}
    for sharing in (True, False):
        plans, metrics, ends = run(Paged(Paged.Options(prefix_sharing=sharing)), limits, requests)
        cached = [end.num_cached_tokens for end in ends]
        fed = sum(plan.num_tokens for plan in plans)
        results[sharing] = (fed, metrics["prefix_cache_hit_rate"])
        assert cached == ([0, 0] + [80] * 8 if sharing else [0] * 10)
    assert results[False][0] - results[True][0] == 8 * 80
    assert results[True][1] == pytest.approx(640 / 1000) and results[False][1] == 0.0


def test_samples_share_their_prompt_until_they_diverge() -> None:
    params = SamplingParams(n=4, temperature=1.0, max_tokens=8, ignore_eos=True)
    request = Request(id="a", prompt=tuple(range(70)), params=params)
    limits = Limits(num_blocks=100, max_model_len=512)
    plans, _, _ = run(Paged(), limits, [request])
    assert sum(row.seq == "a" and len(row.tokens) == 70 for plan in plans for row in plan.rows) == 1
    copies = [copy for plan in plans for copy in plan.copies]
    assert [copy.seq for copy in copies] == ["a/1", "a/2", "a/3"], "each copies the one block it writes to"
    # 4 full blocks shared, and 1 own block of each sample (70 + 8 tokens end in the fifth).
    assert max(plan.stats.held_blocks for plan in plans) == 4 + 4
    plans, _, _ = run(Contiguous(), limits, [request])
    assert sum(len(row.tokens) == 70 for plan in plans for row in plan.rows) == 4
    assert not any(plan.copies for plan in plans)


@pytest.mark.parametrize(
    "options", [{"block_size": 0}, {"block_size": 1025}, {"headroom": 1.0}, {"headroom": -0.1}, {"x": 1}]
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Paged.Options(**options)


@pytest.mark.parametrize("cache", [Paged, Contiguous])
def test_caches_keep_the_protocol(cache: type[Any]) -> None:
    built = cache()
    assert isinstance(built, KVCache)
    order: IdleOrder = built.idle_order()
    assert order is not built.idle_order() and len(order) == 0
    order.add(3)
    assert 3 in order and order.pop() == 3
    assert all(field.description for field in cache.Options.model_fields.values())
