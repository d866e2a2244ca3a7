"""Plugins that break their contract: whatever they do, it is one line that names them, and never looks like success."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SIMULATE = (
    "simulate", "--model", "smollm2-135m", "--device", "h100-sxm", "--requests", "4", "--rate", "10000", "--input-len", "64",
    "--output-len", "4",
)  # fmt: skip
MEMORY = ("memory", "--model", "smollm2-135m", "--device", "h100-sxm")
EXPLAIN = ("explain", "--model", "smollm2-135m", "--device", "h100-sxm")
PLAN = (
    "plan", "--model", "smollm2-135m", "--device", "h100-sxm", "--tp", "1", "--rate", "1", "--requests", "20", "--input-len", "64",
    "--output-len", "4", "--slo", "ttft.p90<=0.5", "--max-replicas", "1",
)  # fmt: skip
HEAD = """import sys
from twinfer import Technique, Want, hookimpl
from twinfer.core.op_time import OpTime
from twinfer.core.policy import Defer
from twinfer.core.speculation import Speculator
from twinfer.core.workload_source import Draft
from twinfer.plugins.kv_cache.paged import Paged
from twinfer.plugins.scheduler.continuous import Continuous
from twinfer.plugins.workload.synthetic import Synthetic
"""
KINDS = {
    "scheduler": ("Continuous", "--scheduler"),
    "kv_cache": ("Paged", "--kv-cache"),
    "quantizer": ("Technique", "--quant"),
    "op_time_model": ("Technique", "--op-time-model"),
    "router": ("Technique", "--router"),
    "speculator": ("Speculator", "--speculator"),
    "workload": ("Synthetic", "--workload"),
}
EXIT = "sys.exit(0)"
THINKING = (*SIMULATE, "--turns", "2", "--think-time", "1")
IMAGES = ("simulate", "--model", "qwen2.5-vl-7b", *SIMULATE[3:], "--images-per-request", "1", "--image-tokens", "4")


def plugin(folder: Path, kind: str, body: str, outside: str = "") -> tuple[str, ...]:
    """Options that load a technique `odd` of `kind` with the methods `body`, and those that choose it."""
    base, option = KINDS[kind]
    text = f"{HEAD}\n\nclass Odd({base}):\n    name = 'odd'\n    summary = 'breaks its contract'\n    {body}\n"
    text += f"\n\n@hookimpl\ndef register_{kind}(register):\n    register(Odd)\n{outside}\n"
    (folder / "odd_plugin.py").write_text(text)
    return ("--plugins-dir", str(folder), option, "odd")


BROKEN = [
    ("scheduler", f"def propose(self, view): {EXIT}", SIMULATE, ("'odd' failed in propose", "SystemExit")),
    ("scheduler", f"def propose(self, view):\n        {EXIT}\n        yield", SIMULATE, ("failed in propose",)),
    ("scheduler", f"def order(self, seq): {EXIT}", SIMULATE, ("scheduler 'odd' failed in order: SystemExit",)),
    ("scheduler", f"propose = Continuous.propose\n\n    def steady(self, view): {EXIT}", SIMULATE, ("scheduler 'odd' failed in steady: SystemExit",)),
    ("scheduler", "propose = Continuous.propose\n\n    def steady(self, view): return 1", SIMULATE, ("gave 1 in steady", "Steady")),
    ("scheduler", "def __init__(self, options): 1 / 0", SIMULATE, ("failed in __init__: ZeroDivisionError",)),
    ("scheduler", f"def __init__(self, options): {EXIT}", SIMULATE, ("failed in __init__: SystemExit: 0",)),
    ("scheduler", "why_not = classmethod(lambda cls, needs: 1 / 0)", SIMULATE, ("failed in why_not: ZeroDivision",)),
    ("scheduler", "why_not = classmethod(lambda cls, needs: 'no')", SIMULATE, ("gave 'no' in why_not", "a list")),
    ("scheduler", "why_not = classmethod(lambda cls, needs: None)", SIMULATE, ("gave None in why_not", "a list")),
    ("scheduler", "def propose(self, view): return [Want(view.waiting, 1)]", SIMULATE, ("in propose", "a Sequence")),
    ("scheduler", "def propose(self, view): return [Want(s, float('nan')) for s in view.waiting]", SIMULATE,
     ("scheduler 'odd' gave Want(", "in propose; give a Want", "whole number")),
    ("scheduler", "def propose(self, view): return [Want(s, 2.5) for s in view.waiting]", SIMULATE, ("whole number",)),
    ("scheduler", "def propose(self, view): return [Defer('later')]", SIMULATE, ("Defer(until='later')", "time in s")),
    ("scheduler", "def propose(self, view):\n        view.running.clear()\n        return []", SIMULATE,
     ("failed in propose: AttributeError",)),
    ("kv_cache", f"def __init__(self, options): {EXIT}", SIMULATE, ("KV cache 'odd' failed in __init__: SystemExit",)),
    ("kv_cache", "def block_size(self, limits): return 0", SIMULATE, ("KV cache 'odd' gave 0 in block_size",)),
    ("kv_cache", "def block_size(self, limits): return 16.5", SIMULATE, ("gave 16.5 in block_size", "whole number")),
    ("kv_cache", "def block_size(self, limits): 1 / 0", SIMULATE, ("failed in block_size: ZeroDivisionError",)),
    ("kv_cache", "def block_size(self, limits): 1 / 0", MEMORY, ("failed in block_size: ZeroDivisionError",)),
    ("kv_cache", "def block_size(self, limits): return 10**400", SIMULATE, ("gave 1000", "in block_size", "at most 1e18")),
    ("kv_cache", "def block_size(self, limits): return type('R', (), {'__repr__': lambda self: 1 / 0})()", SIMULATE,
     ("gave <R> in block_size",)),
    ("kv_cache", "frees_windows = property(lambda self: 1 / 0)", SIMULATE, ("failed in frees_windows: ZeroDivision",)),
    ("kv_cache", "frees_windows = 'yes'", MEMORY, ("gave 'yes' in frees_windows", "True or False")),
    ("scheduler", "def order(self, seq): raise type('Wordless', (Exception,), {'__str__': lambda self: 1 / 0})()", SIMULATE,
     ("failed in order: Wordless: (its text cannot be had)",)),
    ("kv_cache", "def reserve(self, num_tokens, limits): return -5", SIMULATE, ("gave -5 in reserve", "at least")),
    ("kv_cache", "def headroom(self, limits): return -1", SIMULATE, ("gave -1 in headroom", "at least 0")),
    ("kv_cache", "def idle_order(self): 1 / 0", SIMULATE, ("failed in idle_order: ZeroDivisionError",)),
    ("kv_cache", "def idle_order(self): return None", SIMULATE, ("KV cache 'odd'", "idle order NoneType")),
    ("kv_cache", "copies_on_write = None", SIMULATE, ("gave None in copies_on_write", "True or False")),
    ("quantizer", f"def __init__(self, options): {EXIT}", MEMORY, ("quantizer 'odd' failed in __init__: SystemExit",)),
    *(
        ("quantizer", body, command, words)
        for command in (SIMULATE, MEMORY, EXPLAIN)
        for body, words in (
            ("def adapt_model(self, model): 1 / 0", ("quantizer 'odd' failed in adapt_model: ZeroDivisionError",)),
            ("def adapt_model(self, model): return None", ("quantizer 'odd' gave None in adapt_model", "a ModelSpec")),
        )
    ),
    *(
        ("quantizer", f"def adapt_ops(self, ops, model, shape): {body}", command, words)
        for command in (SIMULATE, EXPLAIN)
        for body, words in (
            ("1 / 0", ("'odd' failed in adapt_ops: ZeroDivisionError",)),
            (EXIT, ("'odd' failed in adapt_ops: SystemExit",)),
            ("return None", ("'odd' gave None in adapt_ops", "a list of Op")),
            ("return ['x']", ("'odd' gave", "in adapt_ops", "a list of Op")),
            ("return []", ("'odd' gave", "in adapt_ops", "never without work")),
        )
    ),
    *(
        ("op_time_model", body, command, words)
        for command in (SIMULATE, EXPLAIN)
        for body, words in (
            ("def time(self, op, device): return 1e-6", ("op time model 'odd' gave 1e-6 in time", "OpTime")),
            ("def time(self, op, device): 1 / 0", ("op time model 'odd' failed in time: ZeroDivisionError",)),
            ("def time(self, op, device): return OpTime(float('inf'), 0.0, 'x')", ("gave inf s",)),
        )
    ),
    ("op_time_model", "def for_model(self, model): 1 / 0", SIMULATE, ("op time model 'odd' failed in for_model: Zero",)),
    *(
        ("router", body, (*SIMULATE, "--replicas", "2"), words)
        for body, words in (
            (f"def pick(self, request, views): {EXIT}", ("router 'odd' failed in pick: SystemExit",)),
            ("def pick(self, request, views): return views.pop().index", ("router 'odd' failed in pick: Attribute",)),
            ("def pick(self, request, views): return 'a'", ("gave 'a' in pick", "[0, 1]")),
            ("prefix_block = 'x'\n\n    def pick(self, request, views): return 0", ("in prefix_block",)),
        )
    ),
    *(
        ("speculator", body, SIMULATE, words)
        for names, given in (
            (("num_tokens", "depth", "mean_tokens", "drafting", "reads_prompt"), "property(lambda self: {})"),
            (("accepted", "drafter", "draft_ops", "weight_bytes", "kv_bytes_per_token"), "lambda self, *given: {}"),
        )
        for name in names
        for body, words in (
            (f"{name} = {given.format('1 / 0')}", (f"speculator 'odd' failed in {name}: ZeroDivisionError",)),
            (f"{name} = {given.format('{1}')}", (f"speculator 'odd' gave {{1}} in {name}; give ",)),
        )
    ),
    *(
        ("workload", f"{name} = {given.format(bad)}", command, (f"workload 'odd' {words}", f" in {name}"))
        for name, command, given in (
            ("ignores", SIMULATE, "property(lambda self: {})"),
            ("drafts", SIMULATE, "lambda self, *given: {}"), ("arrivals", SIMULATE, "lambda self, *given: {}"),
            ("made_up", IMAGES, "lambda self, *given: {}"), ("chances", THINKING, "lambda self, *given: {}"),
        )
        for bad, words in (("1 / 0", "failed"), ("[None]", "gave"))
    ),
    *(
        ("workload", f"def drafts(self, *given): return [Draft({fields})]", SIMULATE, (f"workload 'odd' gave {words}", "of a Draft"))
        for fields, words in (
            ("'hello', 4", "'hello' in drafts"), ("(), 4", "() in drafts"), ("(1, 2), 0", "0 in drafts"), ("(1, 2), 4.0", "4 in drafts"),
            ("(1, 2), 4, 'noon'", "'noon' in drafts"), ("(1, 2), 4, float('nan')", "nan in drafts"),
            ("(1, 2), 4, temperature='hot'", "'hot' in drafts"), ("(1, 2), 4, session=7", "7 in drafts"),
            ("(1, 2), 4, think_s=-1", "-1 in drafts"), ("(1, 2), 4, shared=-1", "-1 in drafts"), ("(1, 2), 4, images=(1,)", "(1,) in drafts"),
        )
    ),
    ("workload", "def drafts(self, *given): return None", SIMULATE, ("gave None in drafts", "a list of Draft")),
    ("workload", "def drafts(self, *given): return []", SIMULATE, ("gave [] in drafts", "at least one Draft")),
    ("workload", "def drafts(self, *given):\n        yield 1 / 0", SIMULATE, ("failed in drafts: ZeroDivisionError",)),
    ("workload", "def arrivals(self, workload, num): return [0.0]", SIMULATE, ("gave [0.0] in arrivals", "give 4 times in s")),
    ("workload", "def chances(self, *given): return iter([0.5])", THINKING, ("gave 0.5 in chances", "without end")),
    ("workload", "ignores = 'trace'", SIMULATE, ("gave 'trace' in ignores", "as a tuple")),
    ("speculator", "def accepted(self, checked, draw): return checked + 1", SIMULATE, ("in accepted", "at most the")),
    ("speculator", "def draft_ops(self, model, shape, layout): return ['x']", SIMULATE, ("in draft_ops", "a list of Op")),
    ("speculator", "def weight_bytes(self, model, layout): return 10**400", SIMULATE, ("in weight_bytes", "a number of bytes")),
    ("speculator", "num_tokens = 10**400", SIMULATE, ("in num_tokens", "0 to 4096")),
    ("speculator", "def weight_bytes(self, model, layout): return float('nan')", SIMULATE, ("gave nan in weight_bytes",)),
    ("speculator", "def __init__(self, options): self.options = options", SIMULATE, ("failed in num_tokens: AttributeError",)),
    ("speculator", f"def drafter(self, model): {EXIT}", SIMULATE, ("'odd' failed in drafter: SystemExit",)),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "body", "command", "words"), BROKEN)
def test_what_a_plugin_breaks_is_one_line_that_names_it(
    cli: Callable, tmp_path: Path, kind: str, body: str, command: tuple[str, ...], words: tuple[str, ...]
) -> None:
    cli(*command, *plugin(tmp_path, kind, body)).is_error("'odd'", *words)


def test_a_workload_source_that_cannot_say_what_it_reads_is_named(cli: Callable, tmp_path: Path) -> None:
    """Nobody chose it: it is asked in its turn whether it reads the file."""
    chosen = plugin(tmp_path, "workload", "accepts = classmethod(lambda cls, workload: 1 / 0)")
    trace = tmp_path / "trace.unknown"
    trace.write_text("?")
    cli(*SIMULATE, *chosen[:2], "--trace", trace).is_error("workload 'odd' failed in accepts: ZeroDivisionError")


def test_the_end_of_a_process_is_no_answer_wherever_it_comes_from(cli: Callable, tmp_path: Path) -> None:
    """`sys.exit(0)` in a plugin is neither success nor, with 3, the answer no."""
    chosen = plugin(tmp_path, "scheduler", f"def propose(self, view): {EXIT}")
    cli(*PLAN, "--workers", "1", *chosen).is_error("'odd' failed in propose: SystemExit")
    checked = cli(*chosen[:2], "plugins", "check", "odd")
    assert checked.code == 1 and "SystemExit" in checked.out
    chosen = plugin(tmp_path, "scheduler", "", "    sys.exit(3)")
    cli(*SIMULATE, *chosen[:2]).is_error("odd_plugin", "SystemExit: 3")


def test_an_observer_that_ends_the_process_is_dropped_and_the_run_goes_on(cli: Callable, tmp_path: Path) -> None:
    listening = f"@hookimpl\ndef on_step(plan, result):\n    {EXIT}"
    chosen = plugin(tmp_path, "scheduler", "", listening)
    with pytest.warns(RuntimeWarning, match=r"failed in on_step .*SystemExit: 0"):
        record = cli(*SIMULATE, *chosen[:2], "--json").json
    assert record["metrics"]["num_completed"] == 4


def test_ctrl_c_in_a_plugin_stays_ctrl_c(cli: Callable, tmp_path: Path) -> None:
    for body in (
        "def propose(self, view): raise KeyboardInterrupt",
        "def __init__(self, options): raise KeyboardInterrupt",
    ):
        assert cli(*SIMULATE, *plugin(tmp_path, "scheduler", body)).code == 130


def test_a_technique_that_cannot_say_whether_it_serves_is_listed_so(cli: Callable, tmp_path: Path) -> None:
    chosen = plugin(tmp_path, "scheduler", "why_not = classmethod(lambda cls, needs: 1 / 0)")
    rows = cli(*chosen[:2], "plugins", "--json").json["techniques"]
    found = next(row for row in rows if row["name"] == "odd")
    assert not found["usable"] and "failed in why_not: ZeroDivisionError" in found["why_not"][0]


LOUD = "print('loading')\n\n@hookimpl\ndef on_step(plan, result): print('a step')\n"
LOUD_SCHEDULER = """def __init__(self, options):
        print('made')
        super().__init__(options)

    def order(self, seq):
        print('asked')
        return super().order(seq)"""


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (SIMULATE, "asked"),
        (MEMORY, "loading"),
        (EXPLAIN, "loading"),
        (("plugins",), "loading"),
        (("plugins", "list"), "loading"),
        (("plugins", "check", "odd"), "asked"),
        (("devices",), "loading"),
        ((*PLAN, "--workers", "1"), "asked"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)  # fmt: skip
def test_what_plugins_print_is_no_part_of_the_document(
    cli: Callable, tmp_path: Path, command: tuple[str, ...], said: str
) -> None:
    chosen = plugin(tmp_path, "scheduler", LOUD_SCHEDULER, LOUD)
    ran = cli(*command, *(chosen if command[0] in ("simulate", "plan") else chosen[:2]), "--json")
    assert ran.json and said in ran.err
    assert cli("plugins", *chosen[:2]).out.startswith("loading")  # people read both


def test_children_of_a_search_print_to_stderr_too(tmp_path: Path) -> None:
    chosen = plugin(tmp_path, "scheduler", LOUD_SCHEDULER, LOUD)
    done = subprocess.run(
        [sys.executable, "-m", "twinfer.cli.main", *PLAN, "--workers", "2", *chosen, "--json", "--out", str(tmp_path / "p.json")],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0 and json.loads(done.stdout) and "asked" in done.stderr, done.stderr


def test_a_command_of_a_plugin_keeps_its_stdout(cli: Callable, tmp_path: Path) -> None:
    (tmp_path / "greet.py").write_text(
        "from twinfer import Technique, hookimpl\nimport typer\n\n"
        "def run(as_json: bool = typer.Option(False, '--json')) -> None:\n    print('[1]')\n\n"
        "class Greet(Technique):\n    name = 'greet'\n    summary = 's'\n    run = staticmethod(run)\n\n"
        "@hookimpl\ndef register_cli_command(register): register(Greet)\n"
    )
    assert cli("--plugins-dir", tmp_path, "greet", "--json").json == [1]


@pytest.mark.parametrize(
    ("kind", "body", "words"),
    [
        ("quantizer", "def adapt_model(self, model): return None", "gave None in adapt_model"),
        ("quantizer", "def adapt_ops(self, ops, model, shape): return []", "never without work"),
        ("quantizer", "def adapt_ops(self, ops, model, shape): return [*ops, *ops, *ops]", "comes 3 times"),
        ("op_time_model", "def time(self, op, device): return 1e-6", "give an OpTime"),
        ("op_time_model", "def time(self, op, device): return OpTime(float('nan'), 0.0, 'x')", "another time"),
        ("scheduler", "why_not = classmethod(lambda cls, needs: 'no')", "gave 'no' in why_not"),
        ("kv_cache", "def block_size(self, limits): return 0", "gave 0 in block_size"),
    ],
)
def test_the_kit_finds_them(cli: Callable, tmp_path: Path, kind: str, body: str, words: str) -> None:
    ran = cli(*plugin(tmp_path, kind, body)[:2], "plugins", "check", "odd")
    assert ran.code == 1 and words in ran.out, ran.out


@pytest.mark.parametrize("name", ["int8", "fp8", "int4", "bf16", "mha", "gqa", "roofline", "calibrated"])
def test_built_ins_pass_the_kits_of_ops(cli: Callable, name: str) -> None:
    assert cli("plugins", "check", name, "--json").json["passed"]
