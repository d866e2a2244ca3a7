"""Options that would be ignored, numbers beyond any use, broken plugins, places that cannot be written, signals."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from twinfer.core.device import load_device, write_device
from twinfer.core.errors import ConfigError
from twinfer.core.run_store import RunStore

SIM = ("simulate", "--model", "llama-3.1-8b", "--device", "h100-sxm", "--requests", "3", "--no-save")
HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--prompt", "hi", "--requests", "3"), ("--requests=3", "--prompt")),
        (("--prompt", "hi", "--requests", "1", "--input-len", "5"), ("--input-len",)),
        (("--prompt", "hi", "--requests", "1", "--shared-prefix", "5"), ("--shared-prefix",)),
        (("--num-prefixes", "4"), ("--num-prefixes", "--shared-prefix")),
        (("--trace", ""), ("--trace",)),
        (("--kv-memory", "1GiB", "--num-kv-blocks", "200"), ("--kv-memory-bytes", "--num-kv-blocks", "one of them")),
        (("--requests", "9" * 22), ("--requests", "at most")),
        (("--input-len", "999999999"), ("--input-len", "at most")),
        (("--output-len", "9" * 30), ("--output-len", "at most")),
        (("--rate", "1e-320"), ("--rate", "1e-9")),
        (("--scheduler", "continuous:chunk_size"), ("--scheduler", "has no value")),
        (("--scheduler", "static:max_wait_s=inf"), ("--scheduler", "max_wait_s", "finite")),
        (("--dtype", "int8"), ("--dtype='int8'",)),
        (("--dtype", "word"), ("--dtype='word'", "known")),
        (("--kv-dtype", "word"), ("--kv-dtype='word'", "known")),
        (("--stop-at-eos",), ("--stop-at-eos: a prediction", "leave it out")),
        (("--runs-dir", "x"), ("--runs-dir='x'", "--no-save keeps no run")),
        (("--name", "a\nb"), ("--name='a\\nb'", "printed")),
        (("--op-time", "roofline:foo=1"), ("--op-time-model", "foo")),
    ],
)
def test_nothing_is_accepted_and_ignored(cli: Callable, args: tuple[str, ...], words: tuple[str, ...]) -> None:
    base = [word for word in SIM if "--requests" not in args or word not in ("--requests", "3")]
    cli(*base, *args).is_error(*words)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--tp", "1", "--tp", "2"), ("--tp", "2 times")),
        (("--save",), ("--save", "2 times")),
        (("--runs-dir", ""), ("--runs-dir=''", "is empty")),
        (("--replicas", "2,2"), ("--replicas='2,2'", "is no whole number")),
        (("--pp", "0"), ("--pp=0", "is too small", "at least 1")),
        (("--kv-latency", "inf", "--prefill-replicas", "1", "--decode-replicas", "1"), ("--kv-latency=inf", "finite")),
        (("--scheduler", "continuous:chunk_size=8,chunk_size=9"), ("--scheduler", "given twice")),
        (("--scheduler", "continuous:chunk_size=8", "--scheduler.chunk-size", "9"), ("--scheduler.chunk-size", "once")),
        (
            ("--decode-router", "<", "--prefill-replicas", "1", "--decode-replicas", "1"),
            ("--decode-router='<'", "known"),
        ),
        (("--trace", "x" * 999), ("--trace='xxx", "too long for the name of a file")),
        (("--scheduler", "x" * 999), ("--scheduler='xxx", "...'", "known")),
    ],
)
def test_what_is_wrong_names_option_value_and_cure(
    cli: Callable, args: tuple[str, ...], words: tuple[str, ...]
) -> None:
    cli(*SIM, *args).is_error(*words)


def test_options_that_a_trace_decides_are_told_or_refused(cli: Callable, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(HEADER + "2023-11-16 18:15:46,3,4\n" * 3)
    ran = cli(*SIM, "--trace", tmp_path / "t.csv", "--input-len", "9", "--json")
    assert ran.json["prompt_tokens"] == 9 and "--input-len is not used" in ran.err
    cli(*SIM, "--trace", tmp_path / "t.csv", "--shared-prefix", "2").is_error("--shared-prefix")
    cli(*SIM, "--trace", tmp_path / "t.csv", "--workload", "synthetic").is_error("--trace")


def test_a_real_run_takes_no_op_time_model(cli: Callable, tiny_llama_dir: Path) -> None:
    cli("run", "--model", tiny_llama_dir, "--op-time", "roofline").is_error("--op-time-model", "simulate")


def test_stored_runs_are_compared_without_a_scenario(cli: Callable) -> None:
    cli("compare", "a", "b", "--model", "llama-3.1-8b").is_error("--model", "stored runs")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("simulate", "--devic", "l4"), ("--devic: is no option", "did you mean", "--device")),
        (("simulate", "--foo"), ("--foo: is no option", "`twinfer simulate --help` lists")),
        (("perplexity",), ("MODEL: is missing", "twinfer perplexity --help")), (("simulate", "--model"), ("--model: has no value",)),
        (("simulate", "extra"), ("(extra)", "twinfer simulate --help")), (("plugins", "nope"), ("'nope'", "twinfer plugins --help")),
        (("compare", "--list", "--rate", "3"), ("--rate=3", "--list shows")), (("compare", "a", "b", "--list"), ("REAL='a'", "--list shows")),
        (("compare", "--list", "--kv-cache.block-size", "8"), ("--kv-cache.block-size=8", "--list shows")),
    ],
)  # fmt: skip
def test_words_that_are_none_say_what_there_is(cli: Callable, args: tuple[str, ...], words: tuple[str, ...]) -> None:
    cli(*args).is_error(*words)


def test_the_dashboard_refuses_what_it_cannot_show(cli: Callable, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    cli("dashboard", "--page", "nope").is_error("--page", "compare")
    cli("dashboard", "--runs-dir", tmp_path / "file").is_error("--runs-dir")


@pytest.mark.parametrize("budget", ["0", "-1", "nan", "inf", "1e300"])
def test_calibrate_refuses_a_budget_without_end(cli: Callable, budget: str) -> None:
    cli("calibrate", "--budget", budget).is_error("--budget")


def test_calibrate_refuses_a_dtype_that_nothing_computes_in(cli: Callable) -> None:
    cli("calibrate", "--dtype", "int8").is_error("--dtype", "float32")


def test_a_module_without_hooks_is_no_plugin(cli: Callable) -> None:
    cli("-p", "colorsys", "plugins").is_error("-p colorsys", "hook")


def test_a_scheduler_that_answers_without_end_fails_its_check(cli: Callable, tmp_path: Path) -> None:
    (tmp_path / "endless.py").write_text(
        "from twinfer import Technique, hookimpl\nfrom twinfer.core.policy import Defer\n"
        "class Endless(Technique):\n    name = 'endless'\n    summary = 's'\n"
        "    def order(self, seq): return ()\n    def victims(self, view, shortage): return []\n"
        "    def propose(self, view):\n        while True: yield Defer(view.now + 1)\n"
        "@hookimpl\ndef register_scheduler(register): register(Endless)\n"
    )
    ran = cli("--plugins-dir", tmp_path, "plugins", "check", "endless")
    assert ran.code == 1 and "without end" in ran.out


def test_a_place_that_cannot_be_written_is_told_before_the_run(
    cli: Callable, tmp_path: Path, tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("twinfer.cli.runs.start", lambda *given: pytest.fail("the run began"))
    (tmp_path / "file").write_text("in the way")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        cli("run", "--model", tiny_llama_dir, "--runs-dir", folder).is_error("cannot save", "--runs-dir")
    cli("compare", "--list", "--runs-dir", tmp_path / "file").is_error("--runs-dir")


@pytest.mark.parametrize(
    "damage",
    [{"id": 7}, {"created": 5}, {"name": [1]}, {"intervals": [1]}, {"intervals": {"a": 5}}, {"metrics": 3},
     {"complete": "x"}, {"reasons": 3}],
)  # fmt: skip
def test_a_record_with_fields_of_other_types_is_damaged(cli: Callable, tmp_path: Path, damage: dict) -> None:
    made = cli(*SIM[:-1], "--input-len", "8", "--output-len", "2", "--runs-dir", tmp_path, "--json").json
    path = Path(made["path"]) / "record.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | damage))
    cli("compare", made["id"], made["id"], "--runs-dir", tmp_path).is_error(
        "record.json", "damaged", next(iter(damage))
    )
    assert "damaged" in cli("compare", "--list", "--runs-dir", tmp_path).out


BEGAN = """
from pathlib import Path
from twinfer import hookimpl

@hookimpl
def on_step(plan, result):
    Path({path!r}).touch()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_run_leaves_what_is_done(tmp_path: Path, tiny_llama_dir: Path, number: signal.Signals) -> None:
    """It is stopped once it has taken a step; its requests go on arriving for half an hour."""
    plugins, began = tmp_path / "plugins", tmp_path / "began"
    plugins.mkdir()
    (plugins / "began.py").write_text(BEGAN.format(path=str(began)))
    command = [
        sys.executable, "-m", "twinfer.cli.main", "--plugins-dir", str(plugins), "run", "--model", str(tiny_llama_dir),
        "--requests", "2000", "--rate", "1", "--input-len", "8", "--output-len", "40", "--runs-dir", str(tmp_path / "runs"),
    ]  # fmt: skip
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as process:
        try:
            end = time.monotonic() + 300
            while not began.exists() and process.poll() is None and time.monotonic() < end:
                time.sleep(0.05)
            assert began.exists(), process.stderr.read() if process.poll() is not None and process.stderr else "no step"
            process.send_signal(number)
            _, err = process.communicate(timeout=300)
        finally:
            process.kill()  # or leaving the block would wait for it
    assert process.returncode == 130 and "Traceback" not in err
    (summary,) = RunStore(tmp_path / "runs").list()
    record = RunStore(tmp_path / "runs").load(summary.id)
    assert not record.complete and not summary.problem and record.steps


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize(
    "words", [("--version",), ("--help",), ("devices",), ("devices", "--json"), ("memory", "-m", "smollm2-135m")]
)
def test_output_that_cannot_be_written_is_one_line(words: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:
        ran = subprocess.run(
            [sys.executable, "-m", "twinfer.cli.main", *words],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
        )
    assert ran.returncode == 2 and ran.stderr.startswith("error: the output: No space left on device; "), ran.stderr
    assert len(ran.stderr.splitlines()) == 1


def test_a_device_file_that_cannot_be_written_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_device(load_device("l4"), tmp_path / "mine.json")
    before = path.read_text()

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(ConfigError, match=r"mine.json': cannot be written \(No space left on device\); free the space"):
        write_device(load_device("a10"), path)
    assert path.read_text() == before
