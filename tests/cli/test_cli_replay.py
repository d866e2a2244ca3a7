"""`twinfer replay` and `twinfer calibrate --from`: stored runs and logs, on the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from twinfer.core.config import EngineConfig
from twinfer.core.device import calibrated_path, load_device, read_device, write_device
from twinfer.core.run_store import RunStore
from twinfer.core.workload import Workload
from twinfer.simulator.run import simulate

WORKLOAD = Workload(num_requests=6, input_len=60, output_len=12, seed=3)


@pytest.fixture
def stored(tmp_path: Path) -> str:
    """A run that stands for a measured one: what the twin says of a CPU."""
    record = simulate(EngineConfig(model="smollm2-135m", device="cpu"), WORKLOAD)
    record.world = "engine"
    RunStore(tmp_path).save(record)
    return record.id


def test_a_stored_run_is_replayed_and_its_error_has_causes(cli: Callable, stored: str, tmp_path: Path) -> None:
    answer = cli("replay", stored, "--runs-dir", tmp_path, "--json").json
    assert answer["run"] == stored and answer["requests"] == 6 and answer["plans_alike"] == 1
    assert answer["duration"]["error"] == pytest.approx(0, abs=1e-9)
    assert {part["group"] for part in answer["parts"]} >= {"products", "attention", "other ops", "host", "plans"}
    out = cli("replay", "latest", "--runs-dir", tmp_path).out
    for word in ("TPOT mean", "down_proj", "attention", "rows per step", "100.0 % of them",
                 "generic one", "run `twinfer calibrate`"):  # fmt: skip
        assert word in out, word
    assert "e-1" not in out  # of what rounding leaves


def test_no_run_to_replay_says_what_makes_one(cli: Callable, tmp_path: Path) -> None:
    ran = cli("replay", "latest", "--runs-dir", tmp_path)
    ran.is_error("no runs of world 'engine'", "`twinfer run`")
    assert "simulate" not in ran.err


def test_a_run_corrects_a_device_file(cli: Callable, stored: str, tmp_path: Path) -> None:
    cli("calibrate", "--from", stored, "--runs-dir", tmp_path).is_error("--from", "run `twinfer calibrate` first")
    cli("calibrate", "--from", stored, "--device", "h100-sxm", "--runs-dir", tmp_path).is_error("--to", "h100-sxm")
    (tmp_path / "notes.json").write_text('{"kind": "notes"}')
    for other, why in (
        (tmp_path / "notes.json", "is not a device file"),
        (tmp_path / "no" / "x.json", "no folder"),
        (tmp_path, "no regular file"),
    ):
        cli("calibrate", "--from", stored, "--runs-dir", tmp_path, "--to", other).is_error("--to", why)
    assert (tmp_path / "notes.json").read_text() == '{"kind": "notes"}'
    to = tmp_path / "mine.json"
    answer = cli("calibrate", "--from", stored, "--runs-dir", tmp_path, "--to", to, "--json").json
    assert answer["path"] == str(to) and answer["after"]["duration"]["error"] == pytest.approx(0, abs=1e-3)
    assert all(factor == pytest.approx(1, rel=1e-3) for factor in answer["correction"]["factors"].values())
    assert read_device(to).name == "mine"
    done = cli("simulate", "--model", "smollm2-135m", "--device", to, "--requests", "2", "--no-save", "--json").json
    assert "corrected by run" in done["reasons"]["device"]
    assert "+-" in cli("calibrate", "--from", stored, "--runs-dir", tmp_path, "--to", to).out


def test_this_machine_is_corrected_in_place(cli: Callable, stored: str, tmp_path: Path) -> None:
    write_device(load_device("cpu").model_copy(update={"name": "local"}), calibrated_path())
    answer = cli("calibrate", "--from", stored, "--device", "local", "--runs-dir", tmp_path, "--json").json
    assert answer["path"] == str(calibrated_path())
    assert len(read_device(calibrated_path()).calibration["corrections"]) == 1


def test_a_log_needs_a_model_and_gives_metrics(cli: Callable, tmp_path: Path) -> None:
    log = tmp_path / "served.jsonl"
    rows = [
        {"arrival": i, "prompt_tokens": 50, "output_tokens": 9, "first_token": i + 0.2, "last_token": i + 0.9}
        for i in range(5)
    ]
    log.write_text("\n".join(json.dumps(row) for row in rows))
    cli("replay", log).is_error("--model", "served.jsonl")
    answer = cli("replay", log, "--model", "smollm2-135m", "--device", "cpu", "--max-num-seqs", "4", "--json").json
    assert answer["parts"] == [] and answer["metrics"]["ttft.mean"]["real"] == pytest.approx(0.2)
    assert "no steps" in cli("replay", log, "--model", "smollm2-135m", "--device", "cpu").out
    to = tmp_path / "fitted.json"
    made = cli("calibrate", "--from", log, "--model", "smollm2-135m", "--device", "cpu", "--to", to, "--json").json
    assert list(made["correction"]["factors"]) == ["*"]
    assert abs(made["after"]["metrics"]["e2e.mean"]["error"]) < 0.01


def test_mistakes_are_one_line(cli: Callable, stored: str, tmp_path: Path) -> None:
    cli("replay", "nothing-of-the-kind", "--runs-dir", tmp_path).is_error("nothing-of-the-kind")
    cli("replay", stored, "--runs-dir", tmp_path, "--max-num-seqs", "3").is_error("--max-num-seqs", "its own settings")
    cli("calibrate", "--to", tmp_path / "x.json").is_error("--to", "--from")
    (log := tmp_path / "log.jsonl").write_text("{}")
    cli("replay", log, "--runs-dir", tmp_path).is_error("--runs-dir", "is read where it lies", "leave it out")
    RunStore(tmp_path).save(simulate(EngineConfig(model="smollm2-135m", device="cpu"), WORKLOAD))
    predicted = next(s.id for s in RunStore(tmp_path).list() if s.world == "simulator")
    cli("replay", predicted, "--runs-dir", tmp_path).is_error(predicted, "is a prediction", "twinfer run")
    cli("calibrate", "--from", stored, "--budget", "20", "--runs-dir", tmp_path).is_error("--budget")
    cli("calibrate", "--quant", "nope").is_error("--quant", "nope")
