"""Two drivers, one loop: the SimPy driver and the real-time driver make identical plans when costs are equal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import simpy

from twinfer.core.core import Core
from twinfer.core.events import Event, Finished, Output, Rejected, Submit
from twinfer.core.loop import drive
from twinfer.core.params import SamplingParams
from twinfer.core.plan import Need, RowResult, StepPlan, StepResult
from twinfer.core.policy import Limits
from twinfer.core.recorder import Recorder
from twinfer.core.records import RunRecord
from twinfer.core.registry import Registry
from twinfer.core.request import Request
from twinfer.core.workload import Workload, generate
from twinfer.simulator.driver import SimInbox, arrivals, engine

REGISTRY = Registry(entry_points=False)


def make_core(scheduler: str = "continuous", kv_cache: str = "paged", **limits: Any) -> Core:
    given = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 256, "num_blocks": 40} | limits
    if kv_cache == "contiguous":
        given["num_blocks"] = 6
    return Core(
        REGISTRY.get("scheduler", scheduler)(), REGISTRY.get("kv_cache", kv_cache)(), Limits(**given)
    )  # fmt: skip


class Costly:
    """Costs are multiples of 1/1024 s, so that sums are exact in any order. Keeps the plans it saw."""

    def __init__(self) -> None:
        self.plans: list[str] = []
        self.now: float | None = None  # set: a scripted clock that executing moves

    def admit(self, request: Request, seqs: tuple[tuple[str, int], ...]) -> None: ...
    def close(self) -> None: ...

    def execute(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan.to_json())
        seconds = (4 + len(plan.rows) + plan.num_tokens) / 1024
        if self.now is not None:
            self.now += seconds
        rows = tuple(RowResult() if r.need is Need.NONE else RowResult(tokens=(0,)) for r in plan.rows)
        return StepResult(rows, seconds)


class ScriptedInbox:
    """Arrivals by the executor's scripted clock; waiting moves that clock to the next arrival."""

    def __init__(self, requests: Sequence[Request], executor: Costly) -> None:
        self.left = list(requests)
        self.executor = executor

    def drain(self) -> list[Event] | None:
        assert self.executor.now is not None
        here: list[Event] = []
        while self.left and self.left[0].arrival <= self.executor.now:
            here.append(Submit(self.left.pop(0)))
        return here or (None if not self.left else [])

    def wait(self, seconds: float | None) -> None:
        assert self.executor.now is not None
        if not self.left and seconds is None:
            return  # closed: the next drain says so
        until = self.left[0].arrival if self.left else math.inf
        if seconds is not None:
            until = min(until, self.executor.now + seconds)
        assert until < math.inf, "waits for ever"
        self.executor.now = max(self.executor.now, until)


def requests_for(seed: int, rate: float = 20.0, num: int = 40) -> list[Request]:
    workload = Workload(
        num_requests=num, rate=rate, input_len=48, output_len=12, lengths="uniform", spread=0.9, seed=seed
    )  # fmt: skip
    grid = [  # arrivals on the costs' grid
        Request(id=r.id, prompt=r.prompt, params=r.params, arrival=round(r.arrival * 1024) / 1024)
        for r in generate(workload, 4096, 256, registry=REGISTRY)
    ]
    return grid


def in_real_time(core: Core, requests: Sequence[Request]) -> tuple[list[str], RunRecord, list[Output]]:
    executor = Costly()
    executor.now = 0.0
    recorder = Recorder("engine", {}, {}, 1.0)
    outputs: list[Output] = []
    drive(core, executor, ScriptedInbox(requests, executor), lambda: executor.now or 0.0,
          lambda out, now: outputs.extend(out), recorder)  # fmt: skip
    return executor.plans, recorder.finish(), outputs


def simulated(core: Core, requests: Sequence[Request]) -> tuple[list[str], RunRecord, list[Output]]:
    executor = Costly()
    recorder = Recorder("simulator", {}, {}, 1.0)
    outputs: list[Output] = []
    env = simpy.Environment()
    inbox = SimInbox(env)
    env.process(arrivals(env, inbox, requests))
    done = env.process(engine(env, core, executor, inbox, recorder, lambda out, now: outputs.extend(out)))
    env.run(done)
    return executor.plans, recorder.finish(), outputs


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("scheduler", "kv_cache"), [("continuous", "paged"), ("static", "contiguous"),
                                                     ("continuous", "contiguous"), ("static", "paged")])  # fmt: skip
def test_equal_costs_give_identical_plans_outputs_and_times(scheduler: str, kv_cache: str, seed: int) -> None:
    requests = requests_for(seed)
    plans, record, outputs = in_real_time(make_core(scheduler, kv_cache), requests)
    sim_plans, sim_record, sim_outputs = simulated(make_core(scheduler, kv_cache), requests)
    assert len(plans) > 20
    assert sim_plans == plans
    assert sim_outputs == outputs
    assert [(s.start, s.seconds) for s in sim_record.steps] == [(s.start, s.seconds) for s in record.steps]
    assert sim_record.requests == record.requests
    assert sim_record.metrics == record.metrics


def test_preemption_is_the_same_under_both_clocks() -> None:
    requests = requests_for(7, rate=400.0)
    plans, record, _ = in_real_time(make_core(num_blocks=12), requests)
    sim_plans, sim_record, _ = simulated(make_core(num_blocks=12), requests)
    assert record.metrics["num_preemptions"] > 0
    assert sim_plans == plans and sim_record.metrics == record.metrics


def test_steps_of_one_executor_do_not_overlap_when_two_may_be_out() -> None:
    core = make_core(max_outstanding=2)
    _, record, _ = simulated(core, requests_for(1))
    ends = [s.start + s.seconds for s in record.steps]
    assert all(s.start >= end - 1e-12 for s, end in zip(record.steps[1:], ends, strict=False))
    assert all(r.reason == "length" for r in record.requests)
    assert core.audit() == []


def test_requests_that_cannot_run_are_rejected_and_the_run_ends() -> None:
    requests = [*requests_for(2, num=3), Request(id="long", prompt=range(400), arrival=5.0)]
    _, record, outputs = simulated(make_core(), requests)
    assert any(isinstance(o, Rejected) and o.request_id == "long" for o in outputs)
    assert sum(isinstance(o, Finished) for o in outputs) == 3
    assert {r.request_id: r.reason for r in record.requests}["long"] == "rejected"


def test_an_idle_engine_wakes_at_the_next_arrival() -> None:
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    requests = [Request(id=f"r{i}", prompt=range(8), params=params, arrival=100.0 * i) for i in range(3)]
    _, record, _ = simulated(make_core(), requests)
    assert [s.start for s in record.steps if s.num_tokens > 1] == [0.0, 100.0, 200.0]


def test_no_requests_ends_at_once() -> None:
    plans, record, _ = simulated(make_core(), [])
    assert plans == [] and record.steps == []
