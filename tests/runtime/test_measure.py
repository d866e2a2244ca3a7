"""Measuring a machine: every op of every designed step is timed by the engine's own code, and a stop stops it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from twinfer.core.catalog import resolve_spec
from twinfer.core.errors import ConfigError, ModelError
from twinfer.core.registry import Registry
from twinfer.core.work import step_ops
from twinfer.simulator.calibrate import device_of, step_errors
from twinfer.simulator.machine import fingerprint

REGISTRY = Registry(entry_points=False)


def test_all_ops_are_timed_and_the_fit_knows_all_of_them(tiny_llama_dir: Path) -> None:
    from twinfer.core.runtime.measure import measure

    seen: list[float] = []
    found = measure(
        str(tiny_llama_dir), budget_s=300, on_progress=lambda f, m: seen.append(f), registry=REGISTRY, max_rounds=2
    )  # fmt: skip
    assert seen == sorted(seen) and seen[0] == 0 and seen[-1] == 1
    spec = replace(resolve_spec(str(tiny_llama_dir)), dtype="float32", kv_dtype="float32")
    assert len(found.steps) > 20 and len(found.gemms) == 16 and found.copy_bandwidth > 1e8
    for step in found.steps:
        names = {op.name for op in step_ops(spec, step.shape)}
        assert names <= set(step.ops), "an op of the model's work was not timed"
        assert set(step.ops) - names == {"host"}
        assert sum(t.seconds for t in step.ops.values()) > 0
    assert [loop.rows for loop in found.loops] == [1, 8, 32]
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
