"""The example plugin, installed as a third party's: it is listed, runs for real, is simulated and keeps its contract.

Everything happens in fresh processes that see it through PYTHONPATH alone, as `pip install` would have put it there.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

NAME = "shortest-prompt-first"


@pytest.fixture(scope="module")
def installed(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the plugin installed by pip, without network and without touching this environment."""
    folder = tmp_path_factory.mktemp("site")
    source = tmp_path_factory.mktemp("source") / NAME
    shutil.copytree(root / "examples" / NAME, source, ignore=shutil.ignore_patterns("build", "*.egg-info"))
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index",
               "--disable-pip-version-check", "--target", str(folder), str(source)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def twinfer(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """`twinfer(*args)`: the parsed JSON of a command in a process that has the plugin installed."""
    env = {**os.environ, "PYTHONPATH": str(installed), "XDG_DATA_HOME": str(tmp_path_factory.mktemp("data"))}

    def call(*args: str, code: int = 0) -> Any:
        command = [sys.executable, "-m", "twinfer.cli.main", *args]
        done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=300)
        assert done.returncode == code, done.stdout + done.stderr
        return json.loads(done.stdout) if code == 0 else done.stderr

    return call


def test_it_appears_in_the_list_with_its_option(twinfer: Callable[..., Any]) -> None:
    [row] = [r for r in twinfer("plugins", "--json")["techniques"] if r["name"] == NAME]
    assert row["kind"] == "scheduler" and not row["builtin"] and row["usable"]
    assert row["version"] == "0.1.0" and row["source"] == "entry point shortest_prompt_first"
    [option] = row["options"]
    assert option["name"] == "aging_tokens_per_s" and option["default"] == 100.0 and option["description"]


def test_it_keeps_the_contract(twinfer: Callable[..., Any]) -> None:
    for options in ("", ":aging_tokens_per_s=0"):
        answer = twinfer("plugins", "check", NAME + options, "--json")
        assert answer["passed"], answer


def test_a_wrong_option_is_told(twinfer: Callable[..., Any]) -> None:
    line = twinfer(
        "simulate", "--model", "llama-3.1-8b", "--device", "h100-sxm", "--scheduler", f"{NAME}:age=1", code=2
    )
    assert line.startswith("error: --scheduler=") and "aging_tokens_per_s" in line and line.count("\n") == 1


def waits(twinfer: Callable[..., Any], *args: str) -> dict[str, float]:
    return twinfer("simulate", "--model", "llama-3.1-8b", "--device", "h100-sxm", "--no-save", "--json", *args)[
        "metrics"
    ]


def test_it_is_simulated_and_does_what_it_says(twinfer: Callable[..., Any], tmp_path: Path) -> None:
    """Short prompts no longer wait behind long ones, so the median wait falls and the longest does not."""
    trace = tmp_path / "mixed.jsonl"
    lengths = [4000, 4000, 4000, 4000, *[50] * 12]
    trace.write_text("".join(json.dumps({"prompt_len": n, "output_len": 8}) + "\n" for n in lengths))
    args = ("--trace", str(trace), "--rate", "inf", "--max-num-seqs", "2")
    fcfs = waits(twinfer, *args)
    short = waits(twinfer, *args, "--scheduler", f"{NAME}:aging_tokens_per_s=0")
    assert short["num_completed"] == fcfs["num_completed"] == len(lengths)
    assert short["ttft"]["p50"] < fcfs["ttft"]["p50"] / 2
    assert short["output_tokens"] == fcfs["output_tokens"]
    flag = waits(twinfer, *args, "--scheduler", NAME, "--scheduler.aging-tokens-per-s", "0")
    assert flag["ttft"] == short["ttft"]  # the generated flag is the same option


def test_it_runs_for_real(twinfer: Callable[..., Any], tiny_llama_dir: Path) -> None:
    record = twinfer("run", "--model", str(tiny_llama_dir), "--scheduler", f"{NAME}:aging_tokens_per_s=5",
                     "--requests", "6", "--input-len", "24", "--lengths", "uniform", "--spread", "0.8",
                     "--output-len", "6", "--num-kv-blocks", "64", "--no-save", "--json")  # fmt: skip
    assert record["world"] == "engine" and record["complete"] and record["metrics"]["num_completed"] == 6
    assert record["config"]["scheduler"] == {"name": NAME, "options": {"aging_tokens_per_s": 5}}


DASHBOARD = """
import json, sys
from streamlit.testing.v1 import AppTest

app = "from twinfer.dashboard.app import main; main(['--runs-dir', {!r}], first='techniques')"
at = AppTest.from_string(app.format(sys.argv[1]), default_timeout=300)
for key, value in {"num_requests": "4", "output_len": "8", "input_len": "16"}.items():
    at.query_params[key] = value
at.run()
[choice] = [box for box in at.selectbox if box.label == "Scheduler"]
offered = list(choice.options)
choice.set_value(sys.argv[2]).run()
assert not at.exception, at.exception
numbers = {box.label: box.value for box in at.number_input}
print(json.dumps({"offered": offered, "numbers": numbers, "url": dict(at.query_params),
                  "metrics": {m.label: m.value for m in at.metric}}))
"""


def test_it_is_selectable_in_the_dashboard_with_its_option(installed: Path, tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(installed), "XDG_DATA_HOME": str(tmp_path / "data")}
    command = [sys.executable, "-c", DASHBOARD, str(tmp_path / "runs"), NAME]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    page = json.loads(done.stdout.splitlines()[-1])
    assert NAME in page["offered"]
    [option] = [label for label in page["numbers"] if "aging" in label.lower()]
    assert page["numbers"][option] == 100.0
    assert NAME in str(page["url"])  # it is part of the scenario's link
    assert any(c.isdigit() for c in page["metrics"]["Throughput"])  # and it is predicted at once
