"""The fidelity table: with the simulator itself as the engine every error is zero; a slower engine is seen."""

from __future__ import annotations

from pathlib import Path

import pytest

from twinfer.core.config import EngineConfig
from twinfer.core.device import calibrated_path, load_device, write_device
from twinfer.core.records import RunRecord
from twinfer.core.registry import Registry
from twinfer.core.workload import Workload, generate
from twinfer.plugins.op_time.calibration import Correction, Format
from twinfer.simulator.attribute import with_correction
from twinfer.simulator.fidelity import CASES, TARGETS, Line, fidelity, mixed, noise_floor, table
from twinfer.simulator.run import simulate

REGISTRY = Registry(entry_points=False)


def run_real(config: EngineConfig, workload: Workload) -> RunRecord:
    return simulate(config, workload, REGISTRY)


def test_a_perfect_engine_has_no_error() -> None:
    seen: list[str] = []
    lines = fidelity(run_real, repeats=2, cases=CASES[:2], registry=REGISTRY, report=seen.append)
    assert len(seen) == 8 and len(lines) == 2 * len(TARGETS)
    assert all(line.error == 0 and line.spread == 0 and line.inside for line in lines)
    assert noise_floor(lines) == (0, 0)


def test_formats_and_cases_are_interleaved_and_a_stop_keeps_whole_rounds() -> None:
    seen: list[str] = []
    lines = fidelity(
        run_real, repeats=3, cases=CASES[:1], registry=REGISTRY, report=seen.append, quantizers=("", "int8"),
        should_stop=lambda: len(seen) == 10,
    )  # fmt: skip
    formats = [text.split(": ")[1].split(",")[0] for text in seen]  # what a run gave, then beside its prediction
    assert formats == ["float32", "float32", "int8", "int8"] * 2 + ["float32"] * 2
    assert {line.format for line in lines} == {"float32", "int8"} and all(len(line.repeats) == 2 for line in lines)
    assert fidelity(run_real, cases=CASES[:1], registry=REGISTRY, should_stop=lambda: True) == []


def test_each_repeat_lies_between_two_calibrations_and_the_middle_of_their_means_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Tables that are right, twice and four times too slow, and right: means are 1.5, 3 and 2.5 times what is real."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    order: list[str] = []
    plain = load_device("cpu", REGISTRY)
    slowness = iter((1.0, 2.0, 4.0, 1.0))

    def measured(quantizer: str) -> None:
        order.append(f"calibrate {quantizer or 'float32'}")
        local = with_correction(plain, slower(next(slowness))).model_copy(update={"name": "local", "aliases": ()})
        write_device(local, calibrated_path())

    def run(config: EngineConfig, workload: Workload) -> RunRecord:
        order.append(f"run {config.quantizer or config.dtype}")
        return simulate(config, workload, REGISTRY, plain)

    lines = fidelity(run, repeats=3, cases=CASES[:1], registry=REGISTRY, calibrate=measured)
    assert order == ["calibrate float32", "run float32"] * 3 + ["calibrate float32"]
    ttft = next(line for line in lines if line.metric == "ttft.p50")
    assert ttft.predicted / ttft.real == pytest.approx(2.5, rel=0.001)
    assert ttft.spread == 0 and len(ttft.repeats) == 3


def test_the_middle_of_the_runs_counts() -> None:
    slow = iter((1.0, 3.0, 2.0))

    def run(config: EngineConfig, workload: Workload) -> RunRecord:
        record = run_real(config, workload)
        record.metrics["output_throughput"] *= next(slow)
        return record

    throughput, *_ = fidelity(run, repeats=3, cases=CASES[:1], registry=REGISTRY)
    assert throughput.metric == "output_throughput" and throughput.error == pytest.approx(-0.5)
    assert [value / throughput.predicted for value in throughput.repeats] == pytest.approx([1, 3, 2])
    assert throughput.spread == pytest.approx(1.0)


def test_short_runs_around_each_tell_how_fast_the_machine_is_at_the_moment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The engine takes 1.5 times as long as its device file says, then 2.5 times; the predictions follow."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))  # no tables of this machine
    plain = load_device("cpu", REGISTRY)
    number = 0  # of runs so far: each of the case comes between two short ones

    def run(config: EngineConfig, workload: Workload) -> RunRecord:
        nonlocal number
        factor = 1.5 if number < 3 else 2.5
        number += 1
        return simulate(config, workload, REGISTRY, with_correction(plain, slower(factor)))

    lines = fidelity(run, repeats=2, cases=CASES[:1], registry=REGISTRY, paced=True)
    assert number == 6
    assert all(abs(line.error) < 0.001 and line.inside for line in lines)
    assert lines[0].spread == pytest.approx(1 - 1.5 / 2.5, rel=0.01)
    plainly = fidelity(run, repeats=1, cases=CASES[:1], registry=REGISTRY)
    assert plainly[0].error == pytest.approx(1.5, rel=0.01)


def slower(factor: float) -> Correction:
    return Correction(
        format=Format(dtype="float32", compute="float32", bits=32, kv="float32"), model="smollm2-135m",
        factors={"*": factor}, spreads={"*": 0.05}, source="", date="",
    )  # fmt: skip


def test_mixed_requests_have_the_lengths_that_the_name_says(tmp_path: Path) -> None:
    case = mixed(tmp_path / "mixed.jsonl")
    requests = generate(case.workload, 1000, 2048, registry=REGISTRY)
    prompts, answers = [len(r.prompt) for r in requests], [r.params.max_tokens for r in requests]
    assert len(requests) == 200 and all(r.arrival == 0 for r in requests)
    assert 16 <= min(prompts) < 30 and 490 < max(prompts) <= 512
    assert 8 <= min(answers) < 12 and 120 < max(answers) <= 128


def test_the_table_marks_what_is_beyond_the_target() -> None:
    lines = [
        Line("a", "output_throughput", 100.0, 120.0, 0.01, (90.0, 99.0), repeats=(99.0, 100.0, 101.0)),
        Line("a", "tpot.p50", 0.05, 0.051, 0.01, None),
    ]
    text = table(lines)
    assert "+20.0%" in text and text.count(" *\n") == 1 and "90-99 !" in text
    assert lines[0].error == pytest.approx(0.2) and lines[0].inside is False
    assert "1 within their target, 0 of 1 within the 80 % band" in text
    assert noise_floor(lines) == (pytest.approx(0.01), 0.01)
