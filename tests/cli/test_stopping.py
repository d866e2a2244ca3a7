"""Ctrl-C: what is done is kept where something was begun; before that, and where nothing can be kept, it ends at once."""

from __future__ import annotations

import contextlib
import io
import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from twinfer.cli import show
from twinfer.cli.bar import Bar
from twinfer.core.errors import EngineError, RequestError
from twinfer.core.run_store import RunStore

INTERRUPTS = """
import signal
from twinfer import hookimpl

steps = 0

@hookimpl
def on_step(plan, result):
    global steps
    steps += 1
    if steps in {at!r}:
        signal.raise_signal(signal.SIGINT)
"""


@pytest.mark.parametrize("world", ["simulate", "run"])
def test_ctrl_c_saves_what_is_done(cli: Callable, tiny_llama_dir: Path, tmp_path: Path, world: str) -> None:
    (tmp_path / "stop.py").write_text(INTERRUPTS.format(at=(8,)))
    ran = cli("--plugins-dir", tmp_path, world, "--model", tiny_llama_dir, "--num-kv-blocks", "64", "--requests", "20",
              "--input-len", "16", "--output-len", "16", "--max-num-seqs", "2", "--runs-dir", tmp_path / "runs",
              "--json")  # fmt: skip
    assert ran.code == 130
    record = json.loads(ran.out)
    assert record["complete"] is False and 0 < record["metrics"]["num_steps"] < 20
    assert "stopping" in ran.err and "Traceback" not in ran.err
    [listed] = cli("compare", "--list", "--runs-dir", tmp_path / "runs", "--json").json
    assert listed["id"] == record["id"] and listed["complete"] is False


def test_a_second_ctrl_c_ends_at_once(cli: Callable, tiny_llama_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "stop.py").write_text(INTERRUPTS.format(at=(3, 4)))
    plugin = (tmp_path / "stop.py").read_text()
    (tmp_path / "stop.py").write_text(
        plugin.replace("steps in (3, 4)", "steps == 3") + "        signal.raise_signal(2)\n"
    )
    ran = cli("--plugins-dir", tmp_path, "simulate", "--model", tiny_llama_dir, "--num-kv-blocks", "64",
              "--requests", "20", "--runs-dir", tmp_path / "runs", "--json", "--input-len", "16", "--output-len", "16")  # fmt: skip
    assert ran.code == 130 and ran.out == "" and "Traceback" not in ran.err


ENGINE = ("twinfer.core.runtime.loading.load_tokenizer", "twinfer.core.runtime.families.decoder.rotary_of",
          "twinfer.core.runtime.run.warm_up")  # fmt: skip


def press(*given: Any, **named: Any) -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(
    ("command", "at"),
    [*(("run", at) for at in ENGINE), ("compare", ENGINE[1]), ("simulate", "twinfer.simulator.run.generate")],
)
def test_before_anything_has_begun_it_ends_at_once_and_nothing_is_stored(
    cli: Callable, tiny_llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, at: str
) -> None:
    monkeypatch.setattr(at, press)
    before = signal.getsignal(signal.SIGINT)
    ran = cli(command, "--model", tiny_llama_dir, "--requests", "2", "--input-len", "8", "--output-len", "4",
              "--runs-dir", tmp_path / "runs", "--json")  # fmt: skip
    assert (ran.code, ran.out, ran.err) == (130, "", "stopped, nothing is kept\n")
    assert RunStore(tmp_path / "runs").list() == []
    assert signal.getsignal(signal.SIGINT) is before


def test_a_run_that_is_stopped_before_its_first_step_is_not_stored(
    cli: Callable, tiny_llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked whether to stop before the first step, it does; there is no record of no request."""
    monkeypatch.setattr(show.Interrupt, "__call__", lambda self: True)
    for world in ("run", "simulate"):
        ran = cli(world, "--model", tiny_llama_dir, "--requests", "2", "--input-len", "8", "--output-len", "4",
                  "--runs-dir", tmp_path / "runs")  # fmt: skip
        assert (ran.code, ran.out) == (130, "") and "before the first step" in ran.err
    assert RunStore(tmp_path / "runs").list() == []


def test_a_text_that_is_stopped_before_its_first_chunk_has_no_score(
    cli: Callable, tiny_llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text").write_text("some words " * 40)
    monkeypatch.setattr("twinfer.core.runtime.perplexity.cut", press)
    ran = cli("perplexity", tiny_llama_dir, "--text", tmp_path / "text")
    assert (ran.code, ran.out, ran.err) == (130, "", "stopped, nothing is kept\n")


def test_ctrl_c_between_two_things_that_take_long_is_said(cli: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twinfer.cli.session.Session.registry", property(press))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        ran = cli("devices")
    finally:
        signal.signal(signal.SIGINT, before)
    assert (ran.code, ran.out, ran.err) == (130, "", "stopped\n")


def stopped(body: Callable[[show.Interrupt], None], keeps: bool = True) -> BaseException | None:
    try:
        with show.interruptible(keeps) as should_stop:
            body(should_stop)
    except BaseException as error:
        return error
    return None


def test_an_interrupt_that_a_library_wraps_or_swallows_is_an_interrupt(capsys: pytest.CaptureFixture[str]) -> None:
    """As imports do where the signal comes in the middle of one."""

    def wrapped(should_stop: show.Interrupt) -> None:
        try:
            press()
        except KeyboardInterrupt as error:
            raise ImportError("cannot import") from error

    def swallowed(should_stop: show.Interrupt) -> None:
        with contextlib.suppress(KeyboardInterrupt):
            press()
        should_stop()
        pytest.fail("it went on")

    for body in (wrapped, swallowed):
        error = stopped(body)
        assert getattr(error, "exit_code", None) == 130, repr(error)
        assert capsys.readouterr().err == "stopped, nothing is kept\n"


def test_what_keeps_nothing_ends_at_once_however_far_it_came() -> None:
    def body(should_stop: show.Interrupt) -> None:
        assert not should_stop()
        press()
        pytest.fail("it went on")

    assert getattr(stopped(body, keeps=False), "exit_code", None) == 130


@pytest.mark.parametrize(("error", "ends"), [(RequestError("nothing was done"), True), (EngineError("died"), False)])
def test_an_error_that_follows_from_stopping_is_no_mistake(error: Exception, ends: bool) -> None:
    def body(should_stop: show.Interrupt) -> None:
        should_stop()
        press()
        raise error

    found = stopped(body)
    assert getattr(found, "exit_code", None) == 130 if ends else found is error


# --- the line on stderr -----------------------------------------------------------------------------


@pytest.fixture
def bar() -> Iterator[Bar]:
    yield Bar("running")


def shown(bar: Bar) -> str:
    console = Console(file=io.StringIO(), width=200)
    with console.capture() as captured:
        console.print(*bar.get_renderables())
    return captured.get()


def test_what_is_being_done_is_said_until_there_is_something_to_count(bar: Bar) -> None:
    assert "running" in shown(bar)
    bar.on_progress(0, 0, {"phase": "load", "doing": "reading the weights"})
    assert "reading the weights ..." in shown(bar) and "0/" not in shown(bar)
    bar.on_progress(0, 8, {"phase": "warm up", "doing": "warming up"})
    assert "warming up ..." in shown(bar) and "0/" not in shown(bar)
    bar.on_progress(3, 8, {"phase": "run", "steps": 1234})
    assert "running" in shown(bar) and "3/8" in shown(bar) and "steps=1,234" in shown(bar)
    assert "warming" not in shown(bar) and "phase" not in shown(bar)
    bar.on_progress(5, 8, {"steps": 2000})  # of a prediction, which has no phases
    assert "5/8" in shown(bar)


def test_nothing_is_drawn_where_stderr_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with show.progress("running") as on_progress:
        on_progress(0, 0, {"phase": "load", "doing": "reading the weights"})
        on_progress(1, 2, {"phase": "run"})
    assert capsys.readouterr() == ("", "")
