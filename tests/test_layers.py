"""The walls of the house: what may import what, and what may not be written anywhere.

The pure modules are named here one by one: a new file in `core/` must be put in `PURE` or, with its reason, in `EDGE`.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PURE = frozenset({
    "__init__", "admission", "audit", "beam", "blocks", "catalog", "checked_speculator", "compare", "config", "core", "data_file", "device", "dtypes", "errors",
    "events", "executor", "feeder", "fleet", "flock", "flock_members", "goal", "guard", "gguf_header", "gguf_spec", "hf_config", "hf_rope", "hookspecs", "idle", "layer_ops", "layout", "ledger",
    "hf_experts", "hf_families", "hf_fields", "hf_layers", "hf_stored", "hf_vision", "link", "model_fields", "model_parts",
    "images", "loop", "measured", "memory", "mistakes", "memory_fixes", "memory_parts", "observers", "op_time", "overload", "params", "plan", "planner",
    "intake", "policy", "provision", "recorder", "records", "registry", "request", "routing", "seeds", "session", "setup", "spec", "swap",
    "technique", "trace_rows", "vision", "vision_ops",
    "cache_groups", "prefix_tree",
    "expert_load", "expert_ops", "latent_ops", "parallel_ops", "ring_ops", "speculation", "state_ops",
    "guess_tree", "guesses",
    "work", "workload", "workload_source",
})  # fmt: skip
"""core/*.py that are functions of their arguments: the state machine, its values and its contracts."""

EDGE = {
    "acceptance": "reads measured acceptance from a file",
    "cache_folder": "knows where the platform keeps caches",
    "host": "asks the system for its CPU and compilers",
    "hub": "finds and fetches checkpoints of the model hub",
    "replace_file": "replaces files that a user names",
    "run_store": "keeps runs on disk",
    "run_files": "reads and writes the files of a run",
}
"""core/*.py that touch the outside world, with what for."""

IMPURE = frozenset({
    "asyncio", "http", "multiprocessing", "os", "random", "requests", "secrets", "socket", "subprocess", "threading",
    "time", "torch", "triton", "urllib",
})  # fmt: skip
FRAMEWORKS = frozenset({"torch", "triton", "transformers", "accelerate"})
HOUSE = ("core", "plugins", "kernels", "simulator", "dashboard", "cli")


def tracked(root: Path) -> list[str]:
    command = ["git", "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout.split("\0")
    return sorted(name for name in names if name and (root / name).is_file())


def python_files(root: Path, *folders: str) -> list[str]:
    return [name for name in tracked(root) if name.endswith(".py") and name.split("/")[0] in folders]


def imports(tree: ast.AST, *, top_level_only: bool = False) -> Iterator[tuple[int, str]]:
    """(line, module) of each import that runs; those for type checkers alone do not.

    With `top_level_only`, those in functions are left out too: they run later, if at all.
    """
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, "." * node.level + (node.module or "")
        elif isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for other in node.orelse:
                yield from imports(ast.Module([other], []), top_level_only=top_level_only)
        elif not (top_level_only and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)):
            yield from imports(node, top_level_only=top_level_only)


def offences(root: Path, names: list[str], forbidden: frozenset[str], *, top_level_only: bool) -> list[str]:
    return [
        f"{name}:{line} imports {module}"
        for name in names
        for line, module in imports(ast.parse((root / name).read_text()), top_level_only=top_level_only)
        if module.split(".")[0] in forbidden
    ]


def test_import_finder_sees_what_runs() -> None:
    source = """
import torch.nn
from os import path
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    import random
else:
    import time
try:
    import threading
except ImportError:
    pass
class A:
    import numpy
    def f(self):
        from . import sibling
"""
    tree = ast.parse(source)
    top = ["torch.nn", "os", "typing", "time", "threading", "numpy"]
    assert [module for _, module in imports(tree, top_level_only=True)] == top
    assert [module for _, module in imports(tree)] == [*top, "."]


def test_every_core_module_is_declared_pure_or_edge(root: Path) -> None:
    assert not PURE & set(EDGE)
    modules = {Path(name).stem for name in python_files(root, "core") if name.count("/") == 1}
    assert modules - PURE - set(EDGE) == set(), "put the new module in PURE, or in EDGE with its reason"
    assert (PURE | set(EDGE)) - modules == set(), "no such module any more"


def test_pure_core_touches_no_clock_no_chance_no_threads_no_tensors(root: Path) -> None:
    """Also not in functions: the same events must give the same plans wherever and whenever they are replayed."""
    assert not offences(root, [f"core/{name}.py" for name in sorted(PURE)], IMPURE, top_level_only=False)


def test_no_core_module_beside_the_runtime_imports_a_framework(root: Path) -> None:
    names = [name for name in python_files(root, "core") if not name.startswith("core/runtime/")]
    assert not offences(root, names, FRAMEWORKS, top_level_only=False)


def test_simulator_never_imports_torch(root: Path) -> None:
    assert not offences(root, python_files(root, "simulator"), FRAMEWORKS, top_level_only=False)


def test_cli_dashboard_and_plugins_import_no_torch_at_import(root: Path) -> None:
    names = ["__init__.py", *python_files(root, "cli", "dashboard", "plugins")]
    assert not offences(root, names, FRAMEWORKS, top_level_only=True)


def test_imports_are_absolute(root: Path) -> None:
    """`from twinfer.core.plan import ...`: a bare `core` or `kernels` may be somebody else's package."""
    names = ["__init__.py", *python_files(root, *HOUSE, "tests", "examples", "bench")]
    bare = frozenset({"", *HOUSE, "tests"})
    assert not offences(root, names, bare, top_level_only=False)


@pytest.mark.parametrize("module", ["twinfer", "twinfer.core.core", "twinfer.simulator.run", "twinfer.cli.main"])
def test_module_loads_without_torch(module: str) -> None:
    """In a fresh process, since other tests load torch."""
    heavy = sorted(FRAMEWORKS | {"streamlit", "plotly", "pandas"})
    code = f"import sys, {module}; print(*sorted(set({heavy}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def test_import_contracts(root: Path) -> None:
    """import-linter follows chains of imports too, which the tests above do not."""
    command = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([command, "--no-cache"], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


# Put together here, so that this file does not hold what it forbids.
REGISTRIES = [f"{name}.org" for name in ("pypi", "pythonhosted", "registry.npmjs", "deb.debian", "download.pytorch")]
FORBIDDEN_TEXT = {
    "a path of one machine": re.compile(r"(?<![\w.}])/(?:work|root|home/\w+|opt|Users)/[\w.]"),
    "the host of a package registry": re.compile(r"\b(?:" + "|".join(map(re.escape, REGISTRIES)) + r")\b"),
}


def test_no_machine_paths_or_registry_hosts_in_the_repository(root: Path) -> None:
    found: list[str] = []
    for name in tracked(root):
        try:
            text = (root / name).read_text()
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            found += [f"{name}:{number}: {what}" for what, pattern in FORBIDDEN_TEXT.items() if pattern.search(line)]
    assert not found


@pytest.mark.parametrize("text", ["/" + "work/main/x", "see /" + "root/.cache", f"https://{REGISTRIES[0]}/simple"])
def test_forbidden_text_is_recognised(text: str) -> None:
    assert any(pattern.search(text) for pattern in FORBIDDEN_TEXT.values())


@pytest.mark.parametrize("text", ["/v1/work/x", "${OUT}/work/y", "a/root/b", "shared/data", "/usr/bin/chromium"])
def test_ordinary_text_is_not_forbidden(text: str) -> None:
    assert not any(pattern.search(text) for pattern in FORBIDDEN_TEXT.values())
