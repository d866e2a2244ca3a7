"""A trial's outcome is the one of full records, though it keeps no steps."""

from __future__ import annotations

import random
from dataclasses import fields
from typing import Any

import pytest

from twinfer.core.goal import most_late, parse_goals
from twinfer.core.recorder import Recorder
from twinfer.core.records import RequestRecord, RunRecord
from twinfer.core.registry import Registry
from twinfer.core.workload import Workload
from twinfer.simulator import plan_tally, plan_trial
from twinfer.simulator.plan_space import Question
from twinfer.simulator.plan_tally import Watch
from twinfer.simulator.plan_trial import FLEET, Evaluator, Trial

REGISTRY = Registry(entry_points=False)
TRAFFIC = Workload(num_requests=90, rate=30.0, input_len=500, output_len=90, lengths="uniform", spread=0.8)


@pytest.mark.parametrize(
    "base",
    [
        {},  # runs of decode steps, few of them with a queue
        {"num_kv_blocks": 400},  # the pool is full: requests wait, and are preempted
        {"max_num_seqs": 4},  # all rows are taken
        {"scheduler": "continuous:policy=priority", "num_kv_blocks": 300}, {"max_outstanding": 2, "max_num_seqs": 12},
        {"scheduler": "prompts-first"}, {"speculator": "ngram"},  # each step by itself
    ],
)  # fmt: skip
def test_sums_give_the_outcome_of_full_records(base: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Question(
        base={"model": "llama-3.1-8b", "max_num_batched_tokens": 512, **base}, axes={"device": ("h100-sxm",)},
        workload=TRAFFIC, goals=parse_goals(["ttft.p95<=60", "tpot.p95<=1"]),
    )  # fmt: skip
    trial = Trial(design=0, replicas=2, level=FLEET)
    monkeypatch.setattr(plan_tally, "BACKLOG", 1.0)  # no more requests than these
    found = Evaluator(asked, REGISTRY).answer(trial)
    monkeypatch.setattr(plan_trial, "TrialRecorder", lambda sums, *given, **more: Recorder(*given, **more))
    full = Evaluator(asked, REGISTRY).answer(trial)
    assert found is not None and full is not None and not full.problem and full.num_requests == 90
    assert 0 < full.busy <= 1 and full.parts
    if base:
        assert full.waiting > 0
    for field in fields(full):
        left, right = getattr(found, field.name), getattr(full, field.name)
        if isinstance(right, float) or field.name in ("parts", "queue_parts"):
            assert left == pytest.approx(right, rel=1e-9, abs=1e-12), field.name
        else:
            assert left == right, field.name


def test_gaps_are_kept_where_a_promise_is_about_them() -> None:
    asked = Question(
        base={"model": "llama-3.1-8b"}, axes={"device": ("h100-sxm",)}, workload=TRAFFIC, goals=parse_goals(["itl.p99<=1"])
    )  # fmt: skip
    outcome = Evaluator(asked, REGISTRY).answer(Trial(design=0, replicas=1, level=FLEET))
    assert outcome is not None and 0 < outcome.values["itl.p99"] < 1


def test_designs_that_differ_in_limits_alone_share_what_is_known_of_steps() -> None:
    asked = Question(
        base={"model": "llama-3.1-8b"}, workload=TRAFFIC, goals=parse_goals(["ttft.p95<=1"]),
        axes={"device": ("h100-sxm",), "tp": (1, 2), "max_num_batched_tokens": (512, 1024), "quantizer": (None, "fp8")},
    )  # fmt: skip
    one = Evaluator(asked, REGISTRY)
    trials = [Trial(design=design.index, replicas=1, level=FLEET) for design in one.designs]
    outcomes = [one.answer(trial) for trial in trials]
    timers = {id(one._world(design, 1.0).timer) for design in one.designs}
    assert len(trials) == 8 and len(timers) == 4
    assert outcomes == [Evaluator(asked, REGISTRY).answer(trial) for trial in trials]
    assert len({outcome.values["tpot.p95"] for outcome in outcomes if outcome is not None}) == 8


def test_the_watch_ends_a_run_with_the_request_that_breaks_the_promise() -> None:
    """As a count of all requests at each step says, with two limits, and requests that come while it watches."""
    rng = random.Random(3)
    goals = parse_goals(["ttft.p80<=1", "ttft.p95<=1.4", "tpot.p95<=1"])
    for _ in range(60):
        arrivals = sorted(rng.uniform(0, 30) for _ in range(40))
        waits = [rng.choice([0.4, rng.uniform(0.5, 4.0)]) for _ in arrivals]
        watch, record = Watch(goals, len(arrivals)), record_of()
        for now in sorted(rng.uniform(0, 36) for _ in range(400)):
            for arrival in arrivals[len(record.requests) : sum(a <= now for a in arrivals)]:
                record.requests.append(RequestRecord(request_id=str(arrival), arrival=arrival))
            for request, wait in zip(record.requests, waits, strict=False):
                request.first_token = request.arrival + wait if request.arrival + wait <= now else None
            late = [
                sum(a + limit < now and w > limit for a, w in zip(arrivals, waits, strict=True))
                for limit in (1.25, 1.75)
            ]
            broken = any(count >= most_late(goal, 40) for count, goal in zip(late, goals, strict=False))
            assert watch(record, now) == broken
            if broken:
                break


def record_of() -> RunRecord:
    return RunRecord(id="r", world="simulator", created="", config={})
