"""The comparison with a peer's event loop: both get the same job, ours does it, and what cannot be compared is an error."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture(scope="module")
def bench(root: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("peer_simulator_of_bench", root / "bench" / "peer_simulator.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    spec.loader.exec_module(module)  # it looks for its siblings
    sys.path[:] = before
    return module


@pytest.fixture(scope="module")
def job(bench: ModuleType) -> dict[str, Any]:
    args = Namespace(
        model="llama-3-8b", device="a100-sxm-80gb", trace=None, requests=40, rate=6.0, scheduler="sarathi"
    )  # fmt: skip
    return bench.job_of(args)


def test_the_line_meets_our_step_times_where_it_was_drawn(bench: ModuleType, job: dict[str, Any]) -> None:
    shape, row = bench.StepShape, bench.RowShape
    _, timer = bench.world("llama-3-8b", "a100-sxm-80gb")

    def line(tokens: int, keys: int) -> float:
        return max(job["least"], job["per_token"] * tokens) + job["per_key"] * keys

    decode = shape((row(1, 2001),) * 32, 32)
    assert line(32, 32 * 2001) == pytest.approx(timer.exact(decode).seconds, rel=1e-3)
    prefill = shape((row(2048, 2048),), 1)
    assert line(2048, 2048) == pytest.approx(timer.exact(prefill).seconds, rel=1e-9)


def test_ours_does_the_job_that_the_peer_gets(bench: ModuleType, job: dict[str, Any]) -> None:
    assert len(job["rows"]) == 40 and job["rows"][0][2] == 0.0
    answer = bench.ours(job)
    assert answer["done"] == 40
    assert answer["simulated_s"] > sum(gap for *_, gap in job["rows"])
    longest = max(n for _, n, _ in job["rows"])
    assert longest <= answer["steps"] <= sum(n for _, n, _ in job["rows"]) + 40
    assert 0 < answer["start_mb"] <= answer["memory_mb"]


def test_ratios_are_of_cpu_time_and_scaled_ones_of_the_machines_speed(bench: ModuleType) -> None:
    own = [{"seconds": s, "reference_s": 1.0} for s in (2.0, 1.0, 4.0)]
    theirs = [{"seconds": s, "reference_s": 2.0} for s in (12.0, 10.0, 20.0)]
    assert bench.ratios(own, theirs) == (6.0, 3.0, 2.5)


def test_what_did_not_simulate_the_same_is_no_comparison(bench: ModuleType) -> None:
    bench.check_alike({"twinfer": [{"simulated_s": 100.0}], "other": [{"simulated_s": 104.0}]})
    with pytest.raises(bench.RunFailed, match="other simulated 94 s where ours took 100 s"):
        bench.check_alike({"twinfer": [{"simulated_s": 100.0}], "other": [{"simulated_s": 94.0}]})


def test_a_python_without_the_peer_is_said_to_be_one(root: Path, tmp_path: Path) -> None:
    command = [
        sys.executable, "bench/peer_simulator.py", "--peer-python", sys.executable, "--requests", "5", "--rounds", "1"
    ]  # fmt: skip
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and "No module named 'vidur'" in done.stderr and "Traceback" not in done.stderr
