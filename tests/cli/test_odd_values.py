"""`run` and `compare` with values that cannot be: one line that names the option, the value and what would work."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest

from twinfer.cli.scenario_options import scenario_options
from twinfer.core.device import load_device

SMALL = ("--requests", "2", "--input-len", "4", "--output-len", "2", "--no-save")
ODD = ("", "0", "-1", "1e99", "nan", "inf", "word", "9" * 30)
FINE = {
    "--rate": {"inf"}, "--spread": {"0"}, "--shared-prefix": {"0"}, "--trace-start": {"0"}, "--think-time": {"0"},
    "--images-per-request": {"0"}, "--temperature": {"0", "1e99", "9" * 30}, "--seed": {"0", "9" * 30},
    "--max-num-seqs": {"9" * 30}, "--max-num-batched-tokens": {"9" * 30}, "--num-kv-blocks": {"9" * 30},
    "--scheduler.chunk-size": {"9" * 30}, "--num-devices": {"9" * 30}, "--max-model-len": {"9" * 30},
}  # fmt: skip
"""Values that work, or whose limit only the model knows."""


def _numeric() -> list[str]:
    """The options of a scenario that take a number."""
    found = []
    for name, parameter in inspect.signature(scenario_options, eval_str=True).parameters.items():
        kind, option = get_args(parameter.annotation)[:2]
        kinds = {kind, *get_args(kind)}
        if kinds & {int, float} and bool not in kinds:
            named = [word for word in option.param_decls or () if word.startswith("--")]
            found.append(named[0] if named else "--" + name.replace("_", "-"))
    return found


FLAGS = [
    *_numeric(), "--kv-memory-bytes", "--host-kv-bytes", "--image-size", "--scheduler.chunk-size", "--kv-cache.block-size",
    "--dtype", "--kv-dtype", "--lengths", "--preemption", "--repeat", "--image-counts", "--too-long",
]  # fmt: skip


@pytest.mark.parametrize("command", ["run", "compare"])
@pytest.mark.parametrize("flag", FLAGS)
def test_every_number_is_taken_or_refused_before_a_model_is_loaded(
    cli: Callable, command: str, flag: str, tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Began(Exception):
        pass

    def start(*given: object) -> None:
        raise Began

    monkeypatch.setattr("twinfer.cli.runs.start", start)
    base = list(SMALL)
    if flag in base:
        del base[base.index(flag) : base.index(flag) + 2]
    for value in ODD if command == "run" else ODD[:3]:
        args = (command, "--model", tiny_llama_dir, *base, f"{flag}={value}")
        if value in FINE.get(flag, ()):
            with pytest.raises(Began):
                cli(*args)
        else:
            ran = cli(*args)
            ran.is_error(flag.partition(".")[0], ";")
            assert not any(raw in ran.err for raw in ("Input should", "validation error")), ran.err


@pytest.mark.parametrize("size", ["1000000000", "9" * 30])
def test_a_step_larger_than_the_device_says_so(cli: Callable, tiny_llama_dir: Path, size: str) -> None:
    ran = cli("run", "--model", tiny_llama_dir, *SMALL, "--num-kv-blocks", "64", "--max-num-batched-tokens", size)
    ran.is_error("too large for the device", "lower --max-num-batched-tokens")
    assert "use at most" not in ran.err


SIM = ("simulate", "--model", "llama-3.1-8b", "--device", "h100-sxm", "--requests", "3", "--no-save")
FAILS, SCALES, POOLS = (
    ("--replicas", "2"),
    ("--max-replicas", "3"),
    ("--prefill-replicas", "1", "--decode-replicas", "1"),
)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--rate", "1e99"), ("--rate=1e99", "1e-9 to 1e9", "inf")),
        (("--rate", "2", "--ramp-to", "1e99"), ("--ramp-to=1e99", "1e-9 to 1e9")),
        (("--think-time", "1e99", "--turns", "2"), ("--think-time=1e99", "0 to 1e9")),
        (("--think-time", "5"), ("--think-time=5", "no turn follows", "--turns 2")),
        (("--temperature", "-1"), ("--temperature=-1", "use 0 for greedy")),
        (("--cp", "9" * 9), ("--cp=999999999", "at most 1024")),
        (("--cp", "9" * 22), ("--cp=", "at most 1024")),
        (("--dp", "5000", "--max-num-seqs", "5000"), ("--dp=5000", "at most 1024")),
        ((*FAILS, "--mtbf", "1e99"), ("--mtbf=1e99", "too large", "at most 1e9")),
        ((*FAILS, "--mtbf", "9", "--repair", "1e99"), ("--repair=1e99", "at most")),
        ((*FAILS, "--fail", "0@1e99"), ("--fail='0@1e99'", "up to 1e9 s")),
        ((*FAILS, "--fail", "0@1", "--boot-time", "1e99"), ("--boot-time=1e99", "at most")),
        ((*POOLS, "--kv-latency", "1e99"), ("--kv-latency=1e99", "at most")),
        ((*SCALES, "--target-busy", "0.5", "--scale-interval", "1e-99"), ("--scale-interval=1e-99", "at least 0.01")),
        ((*SCALES, "--target-busy", "0.5", "--scale-down-after", "1e99"), ("--scale-down-after=1e99", "at most")),
        (("--max-replicas", "9" * 22, "--target-busy", "0.5"), ("--max-replicas=", "at most 4096")),
        (("--scheduler.chunk-size", "9" * 5000), ("--scheduler", "is no whole number")),
        (("--scheduler.chunk-size", "[" * 20000), ("--scheduler", "is no whole number")),
    ],
)
def test_numbers_beyond_any_use_are_refused(cli: Callable, args: tuple[str, ...], words: tuple[str, ...]) -> None:
    cli(*SIM, *args).is_error(*words)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--cp", "9" * 9), ("--cp=999999999", "at most 1024")),
        (("--cp", "64", "--context", "32"), ("--cp=64", "32 tokens of context", "at most 32")),
        (("--context", "9" * 22), ("--context=", "16,777,216")),
        (("--batch", "9" * 22), ("--batch=", "10,000,000")),
    ],
)
def test_memory_of_what_no_machine_has_is_not_computed(
    cli: Callable, args: tuple[str, ...], words: tuple[str, ...]
) -> None:
    cli("memory", "--model", "llama-3.1-8b", *args).is_error(*words)


# --- files ----------------------------------------------------------------------------------------


@pytest.fixture
def odd_paths(tmp_path: Path) -> list[str]:
    """A file that is not there, a folder, empty and binary files, a pipe nobody writes to, a link to itself, devices."""
    (tmp_path / "folder").mkdir()
    for ending in ("", ".json", ".csv", ".jsonl", ".gguf", ".safetensors"):
        (tmp_path / f"empty{ending}").touch()
        (tmp_path / f"binary{ending}").write_bytes(bytes(range(256)) * 8)
    (tmp_path / "deep.json").write_text("[" * 50_000)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    return [
        *map(str, sorted(tmp_path.iterdir())),
        "/dev/zero",
        "not-there",
        "x" * 300,
        "\udcff",
        "http://127.0.0.1:1/x",
    ]


@pytest.mark.parametrize("command", ["run", "compare"])
@pytest.mark.parametrize("option", ["--model", "--device", "--trace"])
def test_files_that_cannot_be_read_are_named(
    cli: Callable, odd_paths: list[str], tiny_llama_dir: Path, command: str, option: str
) -> None:
    for path in odd_paths:
        model = () if option == "--model" else ("--model", tiny_llama_dir)
        ran = cli(command, *model, "--no-save", "--output-len", "2", option, path)
        last = ran.err.splitlines()[-1]
        assert ran.code == 2 and ran.out == "" and last.startswith("error: ") and "Traceback" not in ran.err, (
            path,
            ran,
        )
        assert (
            Path(path).name[:60].encode("utf8", "backslashreplace").decode() in last.replace("\\\\", "\\")
            or path in last
        ), (path, last)


def test_stored_runs_and_places_that_are_none(cli: Callable, odd_paths: list[str]) -> None:
    for path in odd_paths:
        cli("compare", path, path).is_error(
            "too long for the name" if len(path) > 290 else "is not in",
            "check the path" if len(path) > 290 else "--list",
        )
        if Path(path).name.startswith(("empty", "binary", "pipe", "zero")):
            cli("compare", "a", "b", "--runs-dir", path).is_error("is no folder", "--runs-dir")
            cli("compare", "--list", "--runs-dir", path).is_error("is no folder", "--runs-dir")


def test_a_place_for_runs_may_have_any_name(cli: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("http://127.0.0.1:1/x", "file:/none", "~nobody/x", "💥"):
        made = cli(*SIM[:-1], "--runs-dir", name, "--json").json
        assert cli("compare", made["id"], made["id"], "--runs-dir", name, "--json").json["real"]["id"] == made["id"]
    (tmp_path / "loop").symlink_to("loop")
    cli(*SIM[:-1], "--runs-dir", "loop").is_error("cannot save", "--runs-dir")
    cli(*SIM[:-1], "--runs-dir", "\udcff").is_error("no Unicode text", "--runs-dir")


def test_a_script_that_ends_itself_is_no_plugin(cli: Callable, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import sys\nsys.exit('usage: script')\n")
    cli("--plugins-dir", tmp_path, "plugins").is_error("script.py", "SystemExit", "usage")
    for word in ("--plugins-dir=", "--plugin-module="):
        cli("plugins", word).is_error(word + "''", "is empty")
    cli("plugins", "--plugins-dir", "").is_error("--plugins-dir=''", "is empty")


def test_names_are_no_markup(cli: Callable, tmp_path: Path) -> None:
    """`[/b]` ends nothing, `[red]` and `:moon:` are written as they are."""
    name = "[red]x[/b]:moon:"
    spec = load_device("l4").model_dump(mode="json") | {"name": name, "aliases": []}
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(spec))
    assert name in cli("devices", path).out
    ran = cli("simulate", "--model", "smollm2-135m", "--device", path, "--requests", "2", "--input-len", "8", "--output-len", "2",
              "--name", name)  # fmt: skip
    assert ran.code == 0 and name in ran.out
    assert name in cli("compare", "--list").out
