"""Pipelines: closed forms of balanced and unbalanced stages, and what a simulated run makes of them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import simpy
from hypothesis import given
from hypothesis import strategies as st

from twinfer.core.config import EngineConfig
from twinfer.core.core import Core
from twinfer.core.layout import Layout
from twinfer.core.params import SamplingParams
from twinfer.core.plan import FromStep, Need, RowResult, StepPlan, StepResult
from twinfer.core.policy import Limits
from twinfer.core.recorder import Recorder
from twinfer.core.records import RunRecord
from twinfer.core.registry import Registry
from twinfer.core.request import Request
from twinfer.core.work import RowShape, StepShape, stage_ops
from twinfer.core.workload import Workload
from twinfer.plugins.kv_cache.paged import Paged
from twinfer.plugins.scheduler.continuous import Continuous
from twinfer.simulator.driver import SimInbox, arrivals, engine
from twinfer.simulator.op_time import host_op
from twinfer.simulator.pipeline import StagedTimer, pass_through
from twinfer.simulator.run import World, prepare, run_world, simulate
from twinfer.simulator.step_time import StepTimer

REGISTRY = Registry(entry_points=False)
SAMPLED, FED = RowResult(tokens=(0,)), RowResult()


class Fixed:
    """Every step takes the same in each stage, whatever is in it."""

    def __init__(self, stages: Sequence[float]) -> None:
        self.stages = tuple(stages)
        self.plans: list[StepPlan] = []

    def admit(self, request: Request, seqs: tuple[tuple[str, int], ...]) -> None:
        pass

    def execute(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        rows = tuple(FED if row.need is Need.NONE else SAMPLED for row in plan.rows)
        return StepResult(rows, sum(self.stages), stages=self.stages)

    def close(self) -> None:
        pass


def ask(i: int, prompt: int = 8, tokens: int = 10, at: float = 0.0) -> Request:
    first = 1000 * i
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    return Request(id=f"r{i}", prompt=range(first, first + prompt), params=params, arrival=at)


def served(stages: Sequence[float], requests: Sequence[Request], **limits: Any) -> tuple[RunRecord, Fixed]:
    """`requests` on an engine whose steps take `stages`; the core is checked after every step."""
    env = simpy.Environment()
    depth = len(stages)
    numbers = {"max_num_seqs": 64, "num_blocks": 256, "max_outstanding": depth, "num_stages": depth} | limits
    core = Core(Continuous(), Paged(), Limits(**numbers))
    executor, inbox, recorder = Fixed(stages), SimInbox(env), Recorder("simulator", {}, {}, 1.0)
    env.process(arrivals(env, inbox, requests))
    process = env.process(
        engine(env, core, executor, inbox, recorder, lambda outputs, now: audited(core), skip=False)
    )  # fmt: skip
    env.run(process)
    assert not core.has_work and core.audit() == []
    return recorder.finish(), executor


def audited(core: Core) -> None:
    assert core.audit() == []


# --- closed forms -----------------------------------------------------------------------------------


def test_one_request_takes_the_way_through_all_stages_for_every_token() -> None:
    stages = (0.3, 0.1, 0.5, 0.2)
    record, _ = served(stages, [ask(0)])
    (request,) = record.requests
    assert request.ttft == pytest.approx(sum(stages))
    assert request.itl == pytest.approx([sum(stages)] * 9)


@pytest.mark.parametrize("num", [1, 2, 3, 4, 8])
def test_a_full_pipeline_gives_a_batch_every_slowest_stage(num: int) -> None:
    """One request a step: with fewer requests than stages stages are idle, then one of them is the bottleneck."""
    stages = (0.1, 0.25, 0.2, 0.1)
    requests = [ask(i, tokens=100, at=0.001 * i) for i in range(num)]
    record, executor = served(stages, requests, max_num_seqs=4)
    rate = record.metrics["output_tokens"] / record.metrics["duration"]
    rows = max(len(plan.rows) for plan in executor.plans)
    assert rows == 1, "max_num_seqs / stages"
    together = min(num, 4)
    assert rate == pytest.approx(min(together / sum(stages), 1 / max(stages)), rel=0.05)


def test_balanced_stages_multiply_throughput_by_their_number() -> None:
    for depth in (1, 2, 4):
        requests = [ask(i, tokens=60, at=0.0001 * i) for i in range(4)]
        record, _ = served((0.4 / depth,) * depth, requests, max_num_seqs=depth)
        rate = record.metrics["output_tokens"] / record.metrics["duration"]
        assert rate == pytest.approx(depth / 0.4, rel=0.03)


def test_chunks_of_one_prompt_follow_each_other_through_the_stages() -> None:
    """n chunks over s equal stages: (n + s - 1) stage times, and the other tokens one way each."""
    record, executor = served((0.1, 0.1, 0.1), [ask(0, prompt=80, tokens=3)], max_num_batched_tokens=16)
    (request,) = record.requests
    assert len(executor.plans) == 5 + 2
    assert request.ttft == pytest.approx((5 + 3 - 1) * 0.1)
    assert request.itl == pytest.approx([0.3, 0.3])


@given(
    st.lists(st.lists(st.floats(0, 9), min_size=3, max_size=3), min_size=1, max_size=12),
    st.lists(st.floats(0, 5), min_size=12, max_size=12),
)
def test_steps_pass_like_customers_of_queues_in_a_row(steps: list[list[float]], gaps: list[float]) -> None:
    """The last end is the longest path through (step, stage), by brute force over when who moves on."""
    free: list[float] = []
    now, ends, begins = 0.0, [], []
    for stages, gap in zip(steps, gaps, strict=False):
        now += gap
        begin, end = pass_through(free, now, stages)
        begins.append(begin), ends.append(end)
        assert begin >= now and end >= begin + sum(stages) - 1e-9
    assert ends == sorted(ends) and begins == sorted(begins)
    arrived = [sum(gaps[: k + 1]) for k in range(len(steps))]

    def path(k: int, i: int) -> float:
        """End of stage i of step k."""
        before = [arrived[k] if i == 0 else path(k, i - 1)]
        if k:
            before.append(path(k - 1, i))
        return max(before) + steps[k][i]

    if len(steps) <= 7:
        assert [path(k, 2) for k in range(len(steps))] == pytest.approx(ends)


def test_plans_on_their_way_hold_each_sequence_once_and_feed_what_is_known() -> None:
    draws = random.Random(3)
    requests = [ask(i, draws.randrange(1, 90), draws.randrange(1, 20), draws.uniform(0, 3)) for i in range(40)]
    requests.sort(key=lambda r: r.arrival)
    record, executor = served(
        (0.1, 0.3, 0.2), requests, max_num_seqs=7, max_num_batched_tokens=24, num_blocks=24, max_model_len=128
    )
    assert {r.reason for r in record.requests} == {"length"} and record.metrics["num_preemptions"] > 0
    assert not any(isinstance(token, FromStep) for plan in executor.plans for row in plan.rows for token in row.tokens)
    assert max(len(plan.rows) for plan in executor.plans) == 3, "7 rows over 3 stages"
    ends = [step.start + step.seconds for step in record.steps]
    assert ends == sorted(ends)
    for a, b in pairwise(record.steps):
        assert b.start >= a.start + 0.1 - 1e-9, "the first stage has one at a time"
    at = sorted([(s.start + 1e-9, 1) for s in record.steps] + [(end, -1) for end in ends])
    most = out = 0
    for _, change in at:
        out += change
        most = max(most, out)
    assert most == 3


# --- predictions --------------------------------------------------------------------------------------


def world_of(workload: Workload, **config: Any) -> World:
    base = {"model": "llama-3.1-8b", "device": "h100-sxm", "num_kv_blocks": 2048, "max_model_len": 4096}
    return prepare(EngineConfig(**(base | config)), workload, REGISTRY)


def stage_seconds(world: World, shape: StepShape) -> list[float]:
    """Seconds of all parts of the way of one step, op by op."""
    chain, setup = world.chain, world.setup
    found = [chain.time(host_op(shape)).seconds]
    for ops in stage_ops(setup.model, shape, setup.config.layout):
        found.append(sum(chain.time(op).seconds * op.count for op in ops if op.name != "hand_over"))
        found += [chain.time(op).seconds for op in ops if op.name == "hand_over"]
    return found


@pytest.mark.parametrize("layout", [{"pp": 2}, {"pp": 4, "tp": 2}, {"pp": 3, "cp": 2}])
def test_tpot_of_one_request_is_the_sum_of_stages_and_sends(layout: dict[str, int]) -> None:
    world = world_of(Workload(num_requests=1, input_len=1000, output_len=4), **layout)
    record, _ = run_world(world, 1.0, lambda *_: None, None, True)
    (request,) = record.requests
    first = stage_seconds(world, StepShape((RowShape(1000, 1000),), 1))
    assert len(first) == 2 * layout["pp"]
    assert request.ttft == pytest.approx(sum(first), rel=1e-6)
    for i, gap in enumerate(request.itl):
        assert gap == pytest.approx(sum(stage_seconds(world, StepShape.decode(1001 + i))), rel=1e-4)
    for step in record.steps:
        assert sum(step.ops.values()) == pytest.approx(step.seconds)


def test_first_and_last_stage_have_embedding_and_head() -> None:
    world = world_of(Workload(num_requests=1), pp=4)
    assert isinstance(world.timer, StagedTimer)
    shape = StepShape.decode(*[500] * 32)
    host, first, _, second, _, third, _, last = stage_seconds(world, shape)
    assert host > 0 and second == third < first and last > second, "8 layers each"
    names = [{op.name for op in ops} for ops in stage_ops(world.setup.model, shape, Layout(pp=4))]
    assert ["embed" in n for n in names] == [True, False, False, False]
    assert ["lm_head" in n for n in names] == [False, False, False, True]


def test_a_loaded_pipeline_is_as_fast_as_its_slowest_stage() -> None:
    """Closed loop of as many clients as rows: every stage time one batch of its share comes out."""
    workload = Workload(num_requests=128, concurrency=32, input_len=64, output_len=65, lengths="fixed")
    world = world_of(workload, pp=4, max_num_seqs=32)
    record, _ = run_world(world, 1.0, lambda *_: None, None, True)
    parts = stage_seconds(world, StepShape.decode(*[96] * 8))
    decodes = [s for s in record.steps if s.num_rows == s.num_decode_rows == 8]
    assert len(decodes) > 0.8 * len(record.steps)
    gaps = sorted(b.start + b.seconds - a.start - a.seconds for a, b in pairwise(decodes))
    assert gaps[len(gaps) // 2] == pytest.approx(max(parts), rel=0.02)


def test_planning_ahead_hides_the_cpu_of_a_pipeline() -> None:
    """One step more than stages: while the CPU makes a step ready all stages have work."""
    workload = Workload(num_requests=120, concurrency=24, input_len=64, output_len=64)
    seconds = {}
    for ahead in (1, 2):
        record = simulate(
            world_of(workload, pp=2, max_num_seqs=24, max_outstanding=ahead).setup.config, workload, REGISTRY
        )
        seconds[ahead] = record.metrics["duration"]
    assert seconds[2] <= seconds[1]


def test_equal_arguments_give_equal_records() -> None:
    workload = Workload(num_requests=30, rate=200.0, input_len=300, output_len=20, lengths="lognormal", spread=0.7)
    config = EngineConfig(model="llama-3.1-8b", device="h100-sxm", num_kv_blocks=300, max_model_len=2048, pp=2)
    a, b = (simulate(config, workload, REGISTRY) for _ in range(2))
    assert (a.steps, a.requests, a.metrics, a.intervals) == (b.steps, b.requests, b.metrics, b.intervals)
    assert a.complete and {r.reason for r in a.requests} == {"length"}


def test_stages_alike_are_timed_once() -> None:
    world = world_of(Workload(num_requests=1), pp=8)
    timer = world.timer
    assert isinstance(timer, StagedTimer) and type(timer) is not StepTimer
    assert len({id(stage) for stage in timer._stages}) == 3 and len(timer._stages) == 8


def test_a_slow_start_of_a_stage_holds_up_those_behind_it() -> None:
    """A prompt in front: the decode behind it waits in every stage, and nobody overtakes."""
    free: list[float] = []
    assert pass_through(free, 0.0, (1.0, 1.0)) == (0.0, 2.0)
    assert pass_through(free, 0.0, (0.1, 0.1)) == (1.0, 2.1)
    assert pass_through(free, 5.0, (0.1, 0.1)) == (5.0, pytest.approx(5.2))


def test_chunked_prompts_fill_the_pipeline() -> None:
    """TTFT of a long prompt in chunks: the slowest stage for all of them, and the others once."""
    workload = Workload(num_requests=1, input_len=4000, output_len=2)
    world = world_of(workload, pp=4, max_num_batched_tokens=512)
    record, _ = run_world(world, 1.0, lambda *_: None, None, True)
    free: list[float] = []
    end = 0.0
    for stop in (*range(512, 4000, 512), 4000):
        size = 512 if stop < 4000 else 4000 - 512 * 7
        parts = stage_seconds(world, StepShape((RowShape(size, stop),), int(stop == 4000)))
        _, end = pass_through(free, 0.0, parts)  # four are out at once: the fifth is planned when the first is done
    assert record.requests[0].ttft == pytest.approx(end, rel=0.02)
