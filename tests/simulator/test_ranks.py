"""Data-parallel ranks of a replica: independent ones are replicas, those that share experts go as fast as the slowest."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import simpy

from twinfer.core.config import EngineConfig
from twinfer.core.events import Abort
from twinfer.core.fleet import Failure, Fleet
from twinfer.core.params import SamplingParams
from twinfer.core.records import RunRecord, StepRecord
from twinfer.core.registry import Registry
from twinfer.core.request import Request
from twinfer.core.work import RowShape, StepShape
from twinfer.core.workload import Workload
from twinfer.simulator.fleet_run import FleetRun, prepare_pools
from twinfer.simulator.op_time import host_op
from twinfer.simulator.pipeline import StagedTimer
from twinfer.simulator.run import World, prepare, run_world, simulate

REGISTRY = Registry(entry_points=False)
SPARSE = EngineConfig(
    model="mixtral-8x7b", device="h100-sxm", dp=4, ep=4, num_kv_blocks=1024, max_model_len=2048, max_num_seqs=64
)


def ask(i: int, prompt: int = 64, tokens: int = 8, at: float = 0.0) -> Request:
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    return Request(id=f"r{i}", prompt=range(10_000 * i, 10_000 * i + prompt), params=params, arrival=at)


def world_of(config: EngineConfig, requests: Sequence[Request]) -> World:
    return replace(prepare(config, Workload(num_requests=1), REGISTRY), requests=requests)


def run(world: World, **how: Any) -> RunRecord:
    return run_world(world, 1.0, lambda *_: None, None, True, **how)[0]


def test_ranks_without_experts_are_replicas() -> None:
    """Nothing is shared, so two ranks of one replica are two replicas behind `least_loaded`, to the last bit."""
    requests = [ask(i, 40 + 17 * i % 300, 5 + i % 20, at=0.004 * i) for i in range(40)]
    one = EngineConfig(model="llama-3.1-8b", device="h100-sxm", num_kv_blocks=60, max_model_len=640, max_num_seqs=8)
    plain = world_of(one, requests)
    limits = replace(plain.setup.limits, num_blocks=120, max_num_seqs=16)
    setup = replace(plain.setup, config=one.model_copy(update={"dp": 2}), limits=limits)
    ranks = run(replace(plain, setup=setup))
    fleet = Fleet(engine=one, replicas=2, router="least_loaded")
    replicas, _ = FleetRun(fleet, {"engine": plain}, keep=True).run()
    assert [replace(s, rank=s.replica, replica=0) for s in replicas.steps] == ranks.steps
    assert [replace(r, replica=0) for r in replicas.requests] == ranks.requests
    assert {s.rank for s in ranks.steps} == {0, 1}


def test_ranks_that_share_experts_step_together() -> None:
    record = run(world_of(SPARSE, [ask(i, 30 + 40 * i, 6 + 5 * i, at=0.001 * i) for i in range(10)]))
    assert {r.reason for r in record.requests} == {"length"}
    spans: dict[float, set[float]] = {}
    for step in record.steps:
        spans.setdefault(step.start, set()).add(round(step.seconds, 12))
        assert sum(step.ops.values()) == pytest.approx(step.seconds)
    assert all(len(seconds) == 1 for seconds in spans.values()), "who begins together ends together"
    starts = sorted(spans)
    for a, b in pairwise(starts):
        assert b >= a + max(spans[a]) - 1e-9, "nobody begins while the others are at it"
    assert max(sum(s.start == at for s in record.steps) for at in starts) == 4


def test_a_step_lasts_as_long_as_its_slowest_rank() -> None:
    """One rank has a prompt, the others one token each: all take what the prompt takes alone, and what experts take for all."""
    world = world_of(SPARSE, [ask(0, 1500, 2), *(ask(i, 16, 40) for i in range(1, 4))])
    record = run(world)
    first = [s for s in record.steps if s.start == 0]
    assert sorted(s.num_tokens for s in first) == [16, 16, 16, 1500]
    timer = world.timer
    assert isinstance(timer, StagedTimer) and len(timer._stages) == 1
    stage = timer._stages[0]
    assert stage.experts is not None
    own = stage.own.exact(StepShape((RowShape(1500, 1500),), 1)).seconds - _host(world, 1500)
    assert first[0].seconds == pytest.approx(
        own + stage.experts.part(1500, 1548).seconds + _host(world, 1500), rel=1e-6
    )
    waits = {s.num_tokens: s.ops.get("rank_wait", 0.0) for s in first}
    assert waits[1500] == 0 and waits[16] > 0.5 * own
    alone = run(world_of(SPARSE, [ask(0, 1500, 2)]))
    assert first[0].seconds >= alone.steps[0].seconds


def _host(world: World, tokens: int) -> float:
    return world.chain.time(host_op(StepShape((RowShape(tokens, tokens),), 1))).seconds


def test_even_ranks_are_faster_than_uneven_ones() -> None:
    """The same tokens: four prompts on four ranks, or all of them in one prompt on one rank."""
    even = run(world_of(SPARSE, [ask(i, 500, 1) for i in range(4)]))
    uneven = run(world_of(SPARSE, [ask(0, 2000, 1)]))
    assert even.metrics["duration"] < 0.75 * uneven.metrics["duration"]


def test_requests_go_to_the_rank_with_the_fewest() -> None:
    record = run(world_of(SPARSE, [ask(i, 20, 30, at=0.0001 * i) for i in range(12)]))
    rows: dict[int, int] = {}
    for step in record.steps:
        rows[step.rank] = max(rows.get(step.rank, 0), step.num_rows)
    assert rows == {0: 3, 1: 3, 2: 3, 3: 3}


@pytest.mark.parametrize("layout", [{"dp": 2, "ep": 2, "pp": 2}, {"dp": 2, "pp": 2}, {"dp": 2, "tp": 2, "ep": 4}])
def test_ranks_and_stages_together(layout: dict[str, int]) -> None:
    config = SPARSE.model_copy(update={"dp": 1, "ep": 1} | layout)
    requests = [ask(i, 30 + 40 * i, 6 + 2 * i, at=0.002 * i) for i in range(10)]
    a, b = (run(world_of(config, requests)) for _ in range(2))
    assert (a.steps, a.requests, a.metrics) == (b.steps, b.requests, b.metrics)
    assert a.complete and {r.reason for r in a.requests} == {"length"}
    assert all(sum(s.ops.values()) <= s.seconds * (1 + 1e-9) for s in a.steps), "in a pipeline steps also wait"


def test_simulate_has_bands_and_both_details() -> None:
    workload = Workload(num_requests=20, rate=50.0, input_len=100, output_len=10)
    steps = simulate(SPARSE, workload, REGISTRY)
    brief = simulate(SPARSE, workload, REGISTRY, detail="requests")
    assert steps.intervals and not brief.steps
    assert isinstance(steps.steps[0], StepRecord) and "replicas" not in steps.metrics
    for name in ("num_steps", "num_completed", "duration", "kv_waste"):
        assert brief.metrics[name] == pytest.approx(steps.metrics[name])


def test_limits_of_a_rank_are_its_share() -> None:
    setup = prepare(SPARSE, Workload(num_requests=1), REGISTRY).setup
    assert (setup.rank_limits.num_blocks, setup.rank_limits.max_num_seqs) == (256, 16)
    assert setup.rank_limits.max_num_batched_tokens == setup.limits.max_num_batched_tokens


def test_fleets_of_replicas_with_ranks_fail_and_come_back_whole() -> None:
    requests = [ask(i, 100, 20, at=0.002 * i) for i in range(24)]
    fleet = Fleet(engine=SPARSE, replicas=2, failures=(Failure(replica=0, at=0.05),), load_bandwidth=1e13)
    pools = {name: replace(w, requests=requests) for name, w in prepare_pools(fleet, Workload(), REGISTRY).items()}
    done = FleetRun(fleet, pools, keep=True)
    record, _ = done.run()
    assert {r.reason for r in record.requests} == {"length"} and record.metrics["num_failures"] == 1
    assert all(r.num_output_tokens == 20 for r in record.requests)
    for replica in done.replicas:
        assert all(rank.core.audit() == [] and not rank.core.has_work for rank in replica.ranks)
        assert not replica.pieces and not any(rank.num_requests for rank in replica.ranks)
    assert len(record.metrics["replicas"]) == 2


@pytest.mark.parametrize("layout", [{"pp": 2}, {"pp": 1}, {"dp": 1, "ep": 1, "tp": 2, "pp": 3}])
def test_aborts_and_failures_amid_steps_on_their_way(layout: dict[str, int]) -> None:
    """Clients go away at random moments while a replica breaks: who stays gets all tokens, and all blocks come back."""
    draws = random.Random(7)
    config = SPARSE.model_copy(update=layout)
    requests = [ask(i, draws.randrange(1, 300), draws.randrange(1, 30), 0.003 * i) for i in range(30)]
    fleet = Fleet(engine=config, replicas=2, failures=(Failure(replica=1, at=0.11),), load_bandwidth=1e13)
    pools = {name: replace(w, requests=requests) for name, w in prepare_pools(fleet, Workload(), REGISTRY).items()}
    done = FleetRun(fleet, pools, keep=True)
    gone = set()

    def leave() -> Iterator[simpy.Event]:
        for _ in range(8):
            yield done.env.timeout(draws.uniform(0.01, 0.04))
            for replica in done.replicas:
                if replica.state == "serving" and replica.pieces:
                    name = draws.choice(list(replica.pieces))
                    gone.add(replica.pieces[name].job.request.id)
                    replica.tell(Abort(name))

    done.env.process(leave())
    record, _ = done.run()
    assert len(gone) > 5 and record.metrics["num_failures"] == 1
    for asked, r in zip(requests, record.requests, strict=True):
        assert (r.reason == "length" and r.num_output_tokens == asked.params.max_tokens) or asked.id in gone, r
    for replica in done.replicas:
        assert all(rank.core.audit() == [] and not rank.core.has_work for rank in replica.ranks)
        assert not replica.pieces and not any(rank.num_requests for rank in replica.ranks)
