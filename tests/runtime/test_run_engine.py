"""Real runs of workloads on a tiny random model: arrivals, records, progress, stopping."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest

from twinfer.core.catalog import resolve_spec
from twinfer.core.config import EngineConfig
from twinfer.core.errors import ConfigError, TwinferError
from twinfer.core.records import RunRecord
from twinfer.core.registry import default_registry
from twinfer.core.runtime import run as run_module
from twinfer.core.runtime.run import run_engine
from twinfer.core.workload import Workload


def config(folder: Path, **fields: Any) -> EngineConfig:
    return EngineConfig.model_validate({"model": str(folder), "max_num_seqs": 8, **fields})


def workload(**fields: Any) -> Workload:
    return Workload(**{"num_requests": 12, "input_len": 20, "output_len": 6, "rate": math.inf, **fields})


def test_a_run_is_recorded_whole(tiny_llama_dir: Path) -> None:
    record = run_engine(config(tiny_llama_dir), workload(lengths="uniform", spread=0.5))
    assert (record.world, record.complete) == ("engine", True)
    assert len(record.requests) == 12
    assert {r.reason for r in record.requests} == {"length"}
    for request in record.requests:
        assert request.first_scheduled is not None and request.first_token is not None
        assert request.last_token is not None and request.finished is not None
        assert 0 <= request.arrival <= request.first_scheduled <= request.first_token <= request.last_token
        assert len(request.itl) == request.num_output_tokens - 1
    ends = [s.start + s.seconds for s in record.steps]
    assert all(a <= s.start for a, s in zip(ends, record.steps[1:], strict=False))
    fed = sum(s.num_tokens for s in record.steps)
    # The last sampled token of a request is never fed; prompts share nothing here.
    assert fed == sum(r.num_prompt_tokens + r.num_output_tokens - 1 for r in record.requests)
    assert record.metrics["num_completed"] == 12
    assert record.metrics["output_tokens"] == sum(r.num_output_tokens for r in record.requests)
    for name in ("output_throughput", "ttft", "tpot", "itl", "e2e", "peak_kv_bytes", "kv_waste"):
        assert record.metrics[name] is not None, name
    assert all(r.num_output_tokens >= 1 for r in record.requests)


def test_decisions_environment_and_ops_are_in_the_record(tiny_llama_dir: Path) -> None:
    record = run_engine(config(tiny_llama_dir, seed=7), workload(num_requests=2))
    assert record.config["dtype"] == "float32" and record.config["num_kv_blocks"] > 0
    assert record.config["max_model_len"] == 26  # nothing in the workload is longer
    assert "longest request" in record.reasons["max_model_len"]
    assert record.environment["num_threads"] >= 1 and record.environment["versions"]["torch"]
    assert record.environment["seed"] == 7
    assert record.workload["num_requests"] == 2
    step = record.steps[-1]
    assert {"qkv_proj", "attention", "lm_head", "sample", "host"} <= set(step.ops)
    assert 0 < sum(step.ops.values()) <= step.seconds * (1 + 1e-9)  # the step holds what the driver does besides


def test_arrivals_are_honoured_on_the_wall_clock(tiny_llama_dir: Path) -> None:
    begin = time.perf_counter()
    record = run_engine(config(tiny_llama_dir), workload(num_requests=6, rate=20.0, seed=1))
    arrivals = [r.arrival for r in record.requests]
    assert arrivals == sorted(arrivals) and arrivals[0] == pytest.approx(0, abs=1e-6)
    assert arrivals[-1] > 0.05
    assert time.perf_counter() - begin > arrivals[-1]
    for request in record.requests:
        assert request.first_scheduled is not None and request.first_scheduled >= request.arrival
    from twinfer.core.workload import generate

    expected = generate(workload(num_requests=6, rate=20.0, seed=1), 128, 512)
    assert arrivals == pytest.approx([r.arrival for r in expected], abs=1e-6)


def test_warm_up_is_not_in_the_record_and_leaves_nothing_cached(tiny_llama_dir: Path) -> None:
    record = run_engine(config(tiny_llama_dir), workload(num_requests=1, input_len=64))
    assert [r.request_id for r in record.requests] == ["r0"]
    assert record.requests[0].num_cached_tokens == 0
    assert record.steps[0].step == 0 and record.steps[0].num_tokens == 64


def test_plans_equal_the_simulators(tiny_llama_dir: Path) -> None:
    """With all requests at once, both worlds take the same steps (costs differ, plans cannot)."""
    from twinfer.simulator.run import simulate

    for fields in ({}, {"scheduler": "static", "kv_cache": "contiguous"}, {"max_num_batched_tokens": 16}):
        settings, load = config(tiny_llama_dir, **fields), workload(lengths="uniform", spread=0.8, seed=4)
        real, predicted = run_engine(settings, load), simulate(settings, load)
        same = ("num_rows", "num_tokens", "num_context_tokens", "held_blocks", "used_slots", "running", "waiting")
        assert [[getattr(s, f) for f in same] for s in real.steps] == [
            [getattr(s, f) for f in same] for s in predicted.steps
        ]
        assert real.config == predicted.config
        for metric in ("output_tokens", "prompt_tokens", "num_steps", "peak_kv_bytes", "num_preemptions"):
            assert real.metrics[metric] == predicted.metrics[metric], metric


def test_answers_are_told_in_the_order_of_arrival(tiny_llama_dir: Path) -> None:
    answers: list[tuple[str, str]] = []
    run_engine(
        config(tiny_llama_dir, max_model_len=40), Workload(prompts=("short", "x" * 60), output_len=4),
        on_answer=lambda prompt, text: answers.append((prompt, text)),
    )  # fmt: skip
    assert [prompt for prompt, _ in answers] == ["short", "x" * 60]
    assert answers[0][1] and not answers[1][1]  # the second one is rejected


def test_progress_is_told_and_ends_at_the_total(tiny_llama_dir: Path) -> None:
    seen: list[tuple[int, int, dict[str, Any]]] = []
    run_engine(config(tiny_llama_dir), workload(), on_progress=lambda *args: seen.append(args))
    assert list(dict.fromkeys(info["phase"] for _, _, info in seen)) == ["load", "warm up", "run"]
    words = [info["doing"] for _, _, info in seen if "doing" in info]
    assert [w.split(" of ")[0] for w in words[:4]] == [
        f"loading {tiny_llama_dir}", "finding the weights", "reading the tokenizer", "loading the CPU kernels",
    ]  # fmt: skip
    layers = resolve_spec(str(tiny_llama_dir)).num_layers
    assert [w.rpartition(": ")[2] for w in words if ": layer" in w] == [
        f"layer {i + 1} of {layers}" for i in range(layers)
    ]
    runs = [(done, total, info) for done, total, info in seen if info["phase"] == "run"]
    assert [done for done, _, _ in runs] == sorted(done for done, _, _ in runs)
    assert runs[-1][:2] == (12, 12) and runs[-1][2]["output_tokens"] == 72


def test_a_stopped_run_is_a_valid_partial_record(tiny_llama_dir: Path) -> None:
    polls = iter(range(10_000))
    record = run_engine(
        config(tiny_llama_dir, max_num_seqs=2), workload(output_len=30), should_stop=lambda: next(polls) > 40
    )
    assert not record.complete
    assert 0 < len(record.steps) <= 41
    assert 0 < record.metrics["num_completed"] < 12
    assert record.metrics["output_throughput"] > 0
    assert any(r.reason is None for r in record.requests)


def test_a_run_can_be_stopped_while_it_waits_for_arrivals(tiny_llama_dir: Path) -> None:
    """The first request takes a few steps; the many looks after them are of the wait for the second, minutes away."""
    polls = iter(range(10_000))
    record = run_engine(
        config(tiny_llama_dir), workload(num_requests=2, rate=0.001, seed=3), should_stop=lambda: next(polls) > 40
    )
    assert not record.complete and record.metrics["num_completed"] == 1


def test_prompts_as_texts_and_requests_that_do_not_fit(tiny_llama_dir: Path) -> None:
    record = run_engine(
        config(tiny_llama_dir, max_model_len=40), Workload(prompts=("short", "x" * 60, "also short"), output_len=4)
    )
    assert [r.reason for r in record.requests] == ["length", "rejected", "length"]
    assert [r.num_prompt_tokens for r in record.requests] == [5, 60, 10]
    assert "max_model_len" in record.requests[1].detail
    assert record.complete and record.metrics["num_completed"] == 2


def test_preemptions_are_counted(tiny_llama_dir: Path) -> None:
    record: RunRecord = run_engine(
        config(tiny_llama_dir, kv_cache="paged:block_size=4,headroom=0", num_kv_blocks=16, max_model_len=50),
        workload(num_requests=4, input_len=10, output_len=40),
    )
    assert record.metrics["num_completed"] == 4 and record.metrics["num_preemptions"] > 0
    assert sum(s.preempted for s in record.steps) == record.metrics["num_preemptions"]


def test_observers_see_steps_and_requests(tiny_llama_dir: Path) -> None:
    from twinfer import hookimpl

    class Observer:
        steps, events = 0, 0

        @hookimpl
        def on_step(self, plan: Any, result: Any) -> None:
            self.steps += 1

        @hookimpl
        def on_request(self, event: Any) -> None:
            self.events += 1

    observer, registry = Observer(), default_registry()
    registry._pm.register(observer)
    try:
        record = run_engine(config(tiny_llama_dir), workload(num_requests=2), registry)
    finally:
        registry._pm.unregister(observer)
    assert observer.steps == len(record.steps)
    assert observer.events >= 2 + 12 + 2


@pytest.mark.parametrize(
    ("fields", "load", "says"),
    [
        ({"tp": 3}, {}, "attention heads"),
        ({"num_devices": 2}, {}, "num-devices"),
        ({"pp": 2}, {}, "--pp=2: the engine shares"),
        ({"dp": 2, "ep": 2}, {}, "--dp=2: the engine shares"),
        ({"scheduler": "nope"}, {}, "no such scheduler"),
        ({"num_kv_blocks": 1}, {}, "num-kv-blocks"),
        ({}, {"trace": "/nowhere.csv"}, "nowhere"),
    ],
    ids=str,
)
def test_what_cannot_work_is_said_before_anything_runs(
    tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], load: dict[str, Any], says: str
) -> None:
    monkeypatch.setattr(run_module, "warm_up", lambda *a: pytest.fail("it ran"))
    with pytest.raises(TwinferError, match=says) as caught:
        run_engine(config(tiny_llama_dir, **fields), workload(**load))
    assert isinstance(caught.value, ConfigError) and "\n" not in str(caught.value)


def test_a_closed_loop_keeps_to_its_clients(tiny_llama_dir: Path) -> None:
    workload = Workload(num_requests=7, concurrency=2, input_len=9, output_len=4)
    record = run_engine(EngineConfig(model=str(tiny_llama_dir), max_model_len=64, num_kv_blocks=32), workload)
    assert [r.reason for r in record.requests] == ["length"] * 7
    for request in record.requests:
        others = [r for r in record.requests if r.arrival <= request.arrival < (r.finished or 0.0)]
        assert len(others) <= 2
    assert max(step.num_rows for step in record.steps) == 2


def test_turns_of_a_session_come_after_answers_and_find_them_cached(tiny_llama_dir: Path) -> None:
    record = run_engine(config(tiny_llama_dir), workload(num_requests=6, turns=3, input_len=20, think_time=0.01))
    requests = {r.request_id: r for r in record.requests}
    assert record.complete and len(requests) == 6
    for number in range(6):
        request, turn = requests[f"r{number}"], number % 3
        assert request.num_prompt_tokens == 20 * (turn + 1) + 6 * turn
        if turn:
            before = requests[f"r{number - 1}"]
            assert request.arrival > (before.finished or 0)
            said = before.num_prompt_tokens + before.num_output_tokens - 1  # the last token was never fed
            assert request.num_cached_tokens == said // 16 * 16
