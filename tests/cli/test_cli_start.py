"""The command line itself: fast help, global options, and errors that are one line."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from twinfer.cli import main as cli_main

COMMANDS = (
    "run",
    "simulate",
    "compare",
    "explain",
    "memory",
    "calibrate",
    "replay",
    "plugins",
    "models",
    "devices",
    "dashboard",
    "demo",
)
HEAVY = ("torch", "transformers", "streamlit", "pyarrow", "numpy", "pandas", "plotly", "simpy", "pydantic")


def modules_after(code: str) -> set[str]:
    """Heavy modules that a fresh process holds after `code`."""
    tail = f"\nimport sys; print('MODULES', *[m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code + tail], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.rpartition("MODULES")[2].split())


def test_help_imports_nothing_heavy() -> None:
    """Asserted on modules, since a clock depends on the machine: what is not imported takes no time."""
    assert modules_after("from twinfer.cli.main import main; assert main(['--help']) == 0") == set()


def test_importing_twinfer_imports_nothing_heavy() -> None:
    assert modules_after("import twinfer") == set()


def test_importtime_of_twinfer_shows_no_torch() -> None:
    done = subprocess.run([sys.executable, "-X", "importtime", "-c", "import twinfer"], capture_output=True, text=True)
    assert done.returncode == 0 and "twinfer" in done.stderr
    assert "torch" not in done.stderr


@pytest.mark.parametrize("command", ["simulate", "run", "memory", "plugins"])
def test_help_of_a_command_imports_no_torch(command: str) -> None:
    heavy = modules_after(f"from twinfer.cli.main import main; assert main([{command!r}, '--help']) == 0")
    assert heavy <= {"pydantic"}


def test_a_thousand_requests_are_simulated_where_torch_cannot_be_imported() -> None:
    """A what-if run needs neither torch nor transformers: here importing them raises."""
    code = (
        "import sys\n"
        "for name in ('torch', 'transformers', 'triton'): sys.modules[name] = None\n"
        "from twinfer.cli.main import main\n"
        "args = 'simulate --model llama-3.1-8b --device h100-sxm --requests 1000 --rate 10 --input-len 128'\n"
        "assert main([*args.split(), '--output-len', '16', '--no-save', '--json']) == 0\n"
        "for name in ('torch', 'transformers', 'triton'): del sys.modules[name]\n"
    )
    assert modules_after(code) & {"torch", "transformers", "streamlit"} == set()


def test_console_script_runs() -> None:
    script = Path(sys.executable).with_name("twinfer")
    done = subprocess.run([script, "--version"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("twinfer ")


def test_help_names_every_command(cli: Callable) -> None:
    for args in ((), ("--help",), ("-h",)):
        ran = cli(*args)
        assert ran.code == 0 and all(command in ran.out for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example_and_json(cli: Callable, command: str) -> None:
    ran = cli(command, "--help")
    assert ran.code == 0
    assert f"twinfer {command}" in ran.out.replace("Usage: twinfer " + command, "")
    assert "--json" in ran.out


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("frobnicate",), ("'frobnicate'", "known: run")),
        (("simualte",), ("did you mean 'simulate'",)),
        (("simulate", "--modle", "x"), ("--modle", "--model")),
        (("simulate",), ("--model",)),
        (("simulate", "--model"), ("--model",)),
        (("memory",), ("--model",)),
        (("memory", "--model", "llama-2-7b", "--batch", "many"), ("--batch='many'", "whole number")),
        (("memory", "--model", "llama-2-7b", "extra"), ("extra",)),
        (("--nonsense",), ("--nonsense",)),
        (("-p",), ("-p",)),
    ],
)
def test_mistakes_in_the_command_line(cli: Callable, args: tuple[str, ...], words: tuple[str, ...]) -> None:
    cli(*args).is_error(*words)


def test_a_plugin_that_does_not_load_is_an_error_wherever_the_option_stands(cli: Callable, tmp_path: Path) -> None:
    cli("-p", "no_such_module", "plugins").is_error("no_such_module", "cannot be imported")
    cli("plugins", "-p", "no_such_module").is_error("no_such_module")
    cli("plugins", f"--plugins-dir={tmp_path / 'none'}").is_error("no such folder")
    (tmp_path / "broken.py").write_text("import nothing_like_this")
    cli("--plugins-dir", tmp_path, "plugins").is_error("broken.py", "fails to load")


def test_errors_are_one_line_even_when_the_message_is_not(cli: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    from twinfer.core.errors import TwinferError

    def broken(**_: object) -> None:
        raise TwinferError("first\nsecond")

    monkeypatch.setattr(cli_main, "_commands", lambda: broken)
    cli("anything").is_error("first second")


def test_bugs_are_not_hidden(cli: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a user's mistakes are one line; a bug keeps its traceback."""

    def broken(**_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(cli_main, "_commands", lambda: broken)
    with pytest.raises(ZeroDivisionError):
        cli("anything")


COMMAND_PLUGIN = """
import typer
from typing import Annotated
from twinfer import Technique, hookimpl

class Hello(Technique):
    name = "hello"
    summary = "Says hello."

    @staticmethod
    def run(who: Annotated[str, typer.Option(help="Whom.")] = "you") -> None:
        print(f"hello {who}")

@hookimpl
def register_cli_command(register):
    register(Hello)
"""


def test_plugins_add_commands(cli: Callable, tmp_path: Path) -> None:
    (tmp_path / "hello.py").write_text(COMMAND_PLUGIN)
    cli("hello").is_error("'hello'")
    ran = cli("--plugins-dir", tmp_path, "hello", "--who", "world")
    assert (ran.code, ran.out) == (0, "hello world\n")
    assert "Says hello." in cli("--plugins-dir", tmp_path, "hello", "--help").out


def test_ctrl_c_while_the_command_line_is_imported_is_no_traceback() -> None:
    code = (
        "import sys\n"
        "class Interrupted:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'typer': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupted())\n"
        "from twinfer.cli.entry import main\n"
        "sys.exit(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "stopped\n")


def test_help_says_which_command_answers_which_question(cli: Callable) -> None:
    shown = cli("--help").out
    for command in ("demo", "run", "compare", "replay", "memory", "simulate", "explain", "plan", "models", "dashboard"):
        assert f"? twinfer {command}" in shown, command
