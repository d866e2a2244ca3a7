"""The simulator as a queue: closed forms of queueing theory, and laws that hold for any server."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
import simpy

from twinfer.core.core import Core
from twinfer.core.feeder import Feeder
from twinfer.core.flock import Run, Stretch
from twinfer.core.params import SamplingParams
from twinfer.core.plan import Need, RowResult, StepPlan, StepResult
from twinfer.core.policy import Limits
from twinfer.core.recorder import Recorder
from twinfer.core.records import RunRecord
from twinfer.core.request import Request
from twinfer.plugins.kv_cache.paged import Paged
from twinfer.plugins.scheduler.continuous import Continuous
from twinfer.simulator.driver import SimInbox, arrivals, engine

STEP = 0.01  # seconds


class Constant:
    """Every step takes `STEP` seconds, whatever it does."""

    serves_runs = True

    def admit(self, request: Request, seqs: tuple[tuple[str, int], ...]) -> None: ...
    def close(self) -> None: ...
    def took(self, first: int, last: int) -> None: ...

    def execute(self, plan: StepPlan) -> StepResult:
        return StepResult(
            tuple(RowResult() if row.need is Need.NONE else RowResult(tokens=(0,)) for row in plan.rows), STEP
        )

    def decode(self, run: Run) -> list[float]:
        return [STEP] * run.most

    def results(self, stretch: Stretch) -> list[StepResult]:
        return [StepResult((), STEP)] * stretch.steps


def serve(times: Sequence[float], tokens: int, rows: int, concurrency: int | None = None) -> RunRecord:
    """Requests of one prompt token and `tokens` answer tokens, on a server of `rows` rows."""
    limits = Limits(max_num_seqs=rows, max_num_batched_tokens=64, max_model_len=4096, num_blocks=64 + 64 * rows)
    core = Core(Continuous(), Paged(), limits)
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    feeder = Feeder(
        (Request(id=f"r{i}", prompt=range(i, i + 1), params=params, arrival=t) for i, t in enumerate(times)),
        concurrency,
    )
    env = simpy.Environment()
    inbox = SimInbox(env)
    bell = [env.event()]

    def freed() -> simpy.Event:
        bell[0] = env.event()
        return bell[0]

    def emit(outputs: Sequence[object], now: float) -> None:
        if feeder.note(outputs, now) and not bell[0].triggered:  # type: ignore[arg-type]
            bell[0].succeed()

    recorder = Recorder("simulator", {}, {}, 1.0, detail="requests")
    env.process(arrivals(env, inbox, feeder, freed))
    env.run(env.process(engine(env, core, Constant(), inbox, recorder, emit)))
    return recorder.finish()


def poisson(rate: float, num: int, seed: int) -> list[float]:
    rng = random.Random(seed)
    now, times = 0.0, []
    for _ in range(num):
        now += rng.expovariate(rate)
        times.append(now)
    return times


def waits(times: Sequence[float], service: float) -> list[float]:
    """Lindley's recursion: how long each customer of a single server waits."""
    free, found = 0.0, []
    for at in times:
        begin = max(at, free)
        found.append(begin - at)
        free = begin + service
    return found


@pytest.mark.parametrize("load", [0.5, 0.7])
def test_m_d_1(load: float) -> None:
    """One row, answers of 20 steps: each customer waits as Lindley's recursion says, whose mean is rho s / (2 (1 - rho))."""
    service = 20 * STEP
    times = poisson(load / service, 1000, 1)
    record = serve(times, 20, rows=1)
    expected = waits(times, service)
    for request, wait in zip(record.requests, expected, strict=True):
        assert request.first_scheduled is not None and request.e2e is not None
        assert request.first_scheduled - request.arrival == pytest.approx(wait, abs=1e-9)
        assert request.e2e == pytest.approx(wait + service, abs=1e-9)
    # Lindley for many: a wait is how far the walk of (service - gap) is above its lowest point so far.
    walk = np.concatenate([[0.0], np.cumsum(service - np.random.default_rng(2).exponential(service / load, 4_000_000))])
    many = walk - np.minimum.accumulate(walk)
    assert many.mean() == pytest.approx(load * service / (2 * (1 - load)), rel=0.01)


def test_closed_loop_with_a_row_for_each_client_never_waits() -> None:
    record = serve([0.0] * 300, 10, rows=6, concurrency=6)
    assert all(r.e2e == pytest.approx(10 * STEP, abs=1e-9) for r in record.requests)
    assert record.metrics["request_throughput"] == pytest.approx(6 / (10 * STEP), rel=1e-9)


def test_closed_loop_on_fewer_rows_is_limited_by_the_rows() -> None:
    """Ten clients, four rows: always full, so four answers every ten steps."""
    record = serve([0.0] * 400, 10, rows=4, concurrency=10)
    assert record.metrics["request_throughput"] == pytest.approx(4 / (10 * STEP), rel=0.01)
    assert record.metrics["e2e"]["mean"] == pytest.approx(10 / 4 * 10 * STEP, rel=0.05)


@pytest.mark.parametrize("rows", [1, 3])
def test_littles_law(rows: int) -> None:
    """Area under the number in the system, counted at arrivals and departures, is the sum of the times in it."""
    record = serve(poisson(rows * 4.0, 400, 3), 20, rows)
    changes = sorted([(r.arrival, 1) for r in record.requests] + [(r.finished or 0.0, -1) for r in record.requests])
    area, number, last = 0.0, 0, 0.0
    for when, change in changes:
        area += number * (when - last)
        number, last = number + change, when
    assert number == 0
    assert area == pytest.approx(sum(r.e2e or 0.0 for r in record.requests), rel=1e-9)


def test_work_is_conserved_at_any_load() -> None:
    """Steps times their length is the time the server was busy; every answer has all of its tokens."""
    record = serve(poisson(30.0, 800, 4), 15, rows=8)
    assert record.metrics["output_tokens"] == 800 * 15
    assert all(r.num_output_tokens == 15 and r.reason == "length" for r in record.requests)
    assert record.metrics["num_steps"] >= 800 * 15 / 8
