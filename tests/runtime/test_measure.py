"""Measuring a machine: every op of every designed step is timed by the engine's own code, and a stop stops it."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from twinfer.core.config import Choice, EngineConfig
from twinfer.core.errors import ConfigError, ModelError
from twinfer.core.registry import Registry
from twinfer.simulator.calibrate import adapted, device_of, step_errors
from twinfer.simulator.machine import fingerprint

REGISTRY = Registry(entry_points=False)


def test_all_ops_are_timed_and_the_fit_knows_all_of_them(tiny_llama_dir: Path) -> None:
    from twinfer.core.runtime.measure import measure

    seen: list[float] = []
    found = measure(
        str(tiny_llama_dir), budget_s=3000, on_progress=lambda f, m: seen.append(f), registry=REGISTRY, max_rounds=2
    )  # fmt: skip
    assert seen == sorted(seen) and seen[0] == 0 and seen[-1] == 1
    spec, ops_of = adapted(EngineConfig(model=str(tiny_llama_dir), dtype="float32"), REGISTRY)
    assert len(found.steps) > 20 and len(found.gemms) == 16 and found.copy_bandwidth > 1e8
    for step in found.steps:
        names = {op.name for op in ops_of(step.shape)}
        assert names <= set(step.ops), "an op of the model's work was not timed"
        assert set(step.ops) - names == {"host"}
        assert sum(t.seconds for t in step.ops.values()) > 0
    assert len(found.runs) == 4
    for run in found.runs:
        assert run.steps[0].gap is None and all(step.gap is not None and step.gap >= 0 for step in run.steps[1:])
        assert all(set(step.ops) >= {"host", "attention"} for step in run.steps)
    assert 0 <= found.drift < 0.5 and 0 <= found.jitter <= 0.5
    here = fingerprint()
    assert {key: found.fingerprint[key] for key in here} == here  # both sides of the wall agree
    device = device_of(found, spec, REGISTRY)
    middle, _ = step_errors(found, spec, device)
    assert middle >= 0  # how close it is depends on what else runs here; `bench/fidelity_cpu.py` tells


def test_a_stop_is_obeyed_before_the_next_step(tiny_llama_dir: Path) -> None:
    from twinfer.core.runtime.measure import MeasurementStopped, measure

    calls = iter(range(1000))
    steps: list[str] = []
    with pytest.raises(MeasurementStopped, match="nothing was stored"):
        measure(
            str(tiny_llama_dir), budget_s=20, registry=REGISTRY,
            should_stop=lambda: next(calls) >= 5, on_progress=lambda f, m: steps.append(m),
        )  # fmt: skip
    assert sum("round 1" in s for s in steps) <= 5


def test_what_cannot_be_measured_is_refused(tiny_llama_dir: Path) -> None:
    from twinfer.core.runtime.measure import measure

    with pytest.raises(ConfigError, match="at least 10 s"):
        measure(str(tiny_llama_dir), budget_s=1, registry=REGISTRY)
    with pytest.raises(ModelError, match="llama-2-70b"):
        measure("llama-2-70b", budget_s=20, registry=REGISTRY)


def test_a_budget_that_loading_used_up_still_gives_one_round(
    tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from twinfer.core.runtime import measure as module

    late = [0.0]
    load, clock = module._load, time.perf_counter

    def slow(*given: Any) -> Any:
        late[0] = 11.0
        return load(*given)

    monkeypatch.setattr(module, "_load", slow)
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: clock() + late[0]))
    found = module.measure(str(tiny_llama_dir), budget_s=10, registry=REGISTRY)
    assert len(found.steps) > 20 and all(step.total.seconds > 0 for step in found.steps) and found.runs


def test_what_cannot_end_in_time_is_given_up_when_that_shows(
    tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from twinfer.core.runtime import measure as module

    now, done = [0.0], []

    def run(job: Any) -> None:
        done.append(job.label)
        now[0] += 2.0

    monkeypatch.setattr(module.StepJob, "run", run)
    monkeypatch.setattr(module.GemmJob, "run", run)
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(module.torch, "get_num_threads", lambda: 2)
    with pytest.raises(ConfigError, match=r"too busy or too slow.*OMP_NUM_THREADS=1"):
        module.measure(str(tiny_llama_dir), budget_s=20, registry=REGISTRY)
    assert now[0] < 3 * 20 < 4 * 20 < 2 * len(module.designs_of(2048)), "not when the time is up"


def test_a_format_is_measured_on_its_own_kernels(tiny_llama_dir: Path) -> None:
    """The packed products run, recorded passes too, and every op that is not inside another has a time."""
    from twinfer.core.runtime.measure import measure
    from twinfer.kernels.gemm import why_not

    if why_not():
        pytest.skip(f"needs the native kernels: {why_not()}")
    quantizer = Choice(name="int8")
    found = measure(str(tiny_llama_dir), budget_s=3000, registry=REGISTRY, max_rounds=1, quantizer=quantizer)
    assert found.quantizer == "int8" and found.kv_dtype == "float32"
    spec, ops_of = adapted(EngineConfig(model=str(tiny_llama_dir), dtype="float32", quantizer=quantizer), REGISTRY)
    device = device_of(found, spec, REGISTRY, ops_of=ops_of)
    (tables,) = device.calibration["tables"]
    assert tables["inside"] == ["quantize_input"]
    assert {(table["dtype"], table["bits"]) for table in tables["gemm"]} >= {("float32", 32.0)}
    assert any(table["dtype"] == "int8" for table in tables["gemm"])


def test_drift_and_jitter_are_told_apart() -> None:
    from twinfer.core.runtime.measure_steps import drift_of

    steady = [(i * 0.1, 1.0 + 0.001 * (i % 3)) for i in range(200)]
    assert max(drift_of(steady)) < 0.002
    drifting = [(t, s * (1 + 0.2 * (t > 10))) for t, s in steady]
    assert drift_of(drifting)[0] > 0.08 and drift_of(drifting)[1] < 0.01
    jittery = [(t, s * (1.3 if i % 5 == 0 else 1.0)) for i, (t, s) in enumerate(steady)]
    assert drift_of(jittery)[0] < 0.01 and drift_of(jittery)[1] > 0.1
    assert drift_of(steady[:5]) == (0.05, 0.05)
