"""Recordings in the twin: kept, dropped and paid for as the engine does."""

from __future__ import annotations

import pytest

from twinfer.core.plan import Need, Row, StepPlan
from twinfer.simulator.recorded_passes import MOST_SHAPES, RecordedPasses, warm_shape
from twinfer.simulator.step_parts import StepCost

COST = StepCost(1.0, 0.1, {"attention": 0.9, "host": 0.1})


def decode(rows: int) -> StepPlan:
    return StepPlan(0, tuple(Row(f"r{i}", 50, (1,), 0, Need.LAST, 0) for i in range(rows)))


def prompt(tokens: int) -> StepPlan:
    return StepPlan(0, (Row("p", 0, tuple(range(tokens)), 0, Need.LAST, 0),))


def extra(passes: RecordedPasses, plan: StepPlan) -> float:
    found = passes.added(plan, COST)
    assert sum(found.ops.values()) == pytest.approx(found.seconds)
    assert found.ops["attention"] == 0.9  # what is added is the host's
    return round(found.seconds - 1.0, 9)


def test_a_new_shape_is_called_then_recorded_then_repeated() -> None:
    passes = RecordedPasses(0.2, 0.5, [(1, 1, 1)])
    assert [extra(passes, decode(n)) for n in (1, 4, 4, 4, 4, 5, 4, 5, 5, 5)] == [0, 0.2, 0.5, 0, 0, 0.2, 0, 0.5, 0, 0]
    assert [extra(passes, decode(40)) for _ in range(3)] == [0, 0, 0]  # too many tokens
    assert [extra(passes, prompt(20)), extra(passes, decode(6)), extra(passes, prompt(20))] == [0, 0.2, 0]


def test_the_oldest_recording_makes_room() -> None:
    passes = RecordedPasses(0.2, 0.5)
    for rows in range(1, MOST_SHAPES + 1):
        assert [extra(passes, decode(rows)) for _ in range(3)] == [0.2, 0.5, 0]
    assert [extra(passes, decode(20)) for _ in range(3)] == [0.2, 0.5, 0]
    assert extra(passes, decode(2)) == 0 and extra(passes, decode(1)) == 0.2


def test_the_rule_is_the_engine_s() -> None:
    from twinfer.core.params import SamplingParams
    from twinfer.core.request import Request
    from twinfer.core.runtime import replay, run
    from twinfer.plugins.op_time.calibrated import RECORDED

    assert (MOST_SHAPES, RECORDED) == (replay.MOST_SHAPES, replay.MOST_TOKENS)
    assert run.WARM_UP_TOKENS == 256
    params = SamplingParams(max_tokens=4)

    def warm(*lengths: int, seqs: int = 64) -> int:
        return warm_shape([Request(id=f"r{i}", prompt=range(n), params=params) for i, n in enumerate(lengths)], seqs)[0]

    assert (warm(50), warm(50, 50, 50, 50, 50), warm(700, 700), warm(200, 100, 100), warm(50, 50, seqs=1)) == (
        1,
        4,
        1,
        2,
        1,
    )


def test_replicas_of_a_fleet_pay_for_their_new_shapes_as_one_engine_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """One replica is `simulate` exactly; of two each has first steps of its own."""
    from twinfer.core.config import EngineConfig
    from twinfer.core.fleet import Fleet
    from twinfer.core.registry import Registry
    from twinfer.core.workload import Workload
    from twinfer.simulator import rank, run
    from twinfer.simulator.fleet_run import simulate_fleet

    registry = Registry(entry_points=False)
    config = EngineConfig(model="llama-3.1-8b", device="h100-sxm", num_kv_blocks=512)
    workload = Workload(num_requests=8, input_len=30, output_len=12)
    free = run.simulate(config, workload, registry)
    for module in (run, rank):
        monkeypatch.setattr(module, "passes_of", lambda world: RecordedPasses(0.2, 0.5))
    alone = run.simulate(config, workload, registry)
    one, two = (simulate_fleet(Fleet(engine=config, replicas=n), workload, registry) for n in (1, 2))
    assert (one.steps, one.requests, one.metrics) == (alone.steps, alone.requests, alone.metrics)
    assert alone.metrics["duration"] > free.metrics["duration"] + 0.7
    for index in range(2):
        assert sum(s.seconds for s in two.steps if s.replica == index) > 0.7, "a first and a second step of its shape"
