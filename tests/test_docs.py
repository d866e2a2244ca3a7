"""The documents say what the code says: hooks and contracts with their signatures, commands, links, runnable examples."""

from __future__ import annotations

import ast
import inspect
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from twinfer.core import hookspecs, policy, request, routing, technique, workload_source
from twinfer.core.hookspecs import hookspec

DOCUMENTS = (
    "README.md",
    "docs/architecture.md",
    "docs/plugins.md",
    "docs/models.md",
    "docs/parallelism.md",
    "docs/cluster.md",
    "docs/quantization.md",
    "docs/attention-variants.md",
    "docs/devices-and-models.md",
    "docs/op-times.md",
    "docs/capacity-planning.md",
    "docs/memory.md",
    "docs/speculation.md",
    *(
        f"docs/what-ifs/{name}.md"
        for name in (
            "README",
            "batching",
            "kv-cache",
            "attention",
            "formats",
            "long-context",
            "experts",
            "speculation",
            "pools",
            "prefix-tiers",
            "accelerators",
        )
    ),
)


def signatures(module: ModuleType) -> dict[str, str]:
    """Signature lines as written, by function name and by `Class.method`."""
    found: dict[str, str] = {}
    for node in ast.parse(inspect.getsource(module)).body:
        members = node.body if isinstance(node, ast.ClassDef) else [node]
        for member in members:
            if isinstance(member, ast.FunctionDef):
                prefix = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
                returns = f" -> {ast.unparse(member.returns)}" if member.returns else ""
                found[prefix + member.name] = f"def {member.name}({ast.unparse(member.args)}){returns}"
    return found


def hook_names() -> list[str]:
    marked = f"{hookspec.project_name}_spec"
    return [name for name, value in vars(hookspecs).items() if hasattr(value, marked)]


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def plugins_md(root: Path) -> str:
    return (root / "docs" / "plugins.md").read_text()


def test_every_hook_is_documented_with_its_exact_signature(plugins_md: str) -> None:
    names = hook_names()
    assert len(names) >= 10
    written = signatures(hookspecs)
    for name in names:
        assert f"#### `{name}`\n```python\n{written[name]}\n```\n" in plugins_md, f"docs/plugins.md, {name}"


def test_no_hook_is_documented_that_does_not_exist(plugins_md: str) -> None:
    assert re.findall(r"^#### `(\w+)`$", plugins_md, flags=re.MULTILINE) == hook_names()


def test_every_hook_says_its_phase() -> None:
    for name in hook_names():
        doc = inspect.getdoc(getattr(hookspecs, name)) or ""
        assert "Phase: " in doc and "may not block" in doc, name


@pytest.mark.parametrize(
    ("module", "cls", "methods"),
    [
        (technique, "Technique", ("why_not", "adapt_model", "adapt_ops")),
        (policy, "Scheduler", ("order", "propose", "victims")),
        (policy, "KVCache", ("block_size", "reserve", "headroom", "idle_order")),
        (routing, "Router", ("pick",)),
        (workload_source, "WorkloadSource", ("accepts", "drafts", "arrivals")),
    ],
)
def test_contracts_are_documented_as_written(
    plugins_md: str, module: ModuleType, cls: str, methods: tuple[str, ...]
) -> None:
    written = signatures(module)
    declared = {name.split(".")[1] for name in written if name.startswith(f"{cls}.") and not name.endswith("__")}
    assert declared == set(methods), f"{cls} has changed: document it in docs/plugins.md and here"
    for method in methods:
        assert written[f"{cls}.{method}"] in plugins_md


SHOWN = (request.Request, request.Sequence, policy.View, policy.Limits, policy.Shortage, policy.Want, policy.Defer,
         policy.Steady, routing.ReplicaView)  # fmt: skip
IN_PART = (request.Request, request.Sequence)  # the rest of their fields is for the Core


def readable(cls: type) -> set[str]:
    """What a plugin can read of an object: fields and properties by name, methods with their arguments."""
    found = {name for name in (*cls.__annotations__, *getattr(cls, "__slots__", ())) if not name.startswith("_")}
    for name, value in vars(cls).items():
        if inspect.isfunction(value) and not name.startswith("_"):
            found.add(f"{name}({', '.join([*inspect.signature(value).parameters][1:])})")
        elif isinstance(value, property):
            found.add(name)
    return found


def test_fields_that_plugins_are_shown_are_named_as_they_are(plugins_md: str) -> None:
    tables = re.findall(r"^`(\w+)` \(`core/(\w+)\.py`\).*\n(?:.+\n)?\n((?:\|.*\n)+)", plugins_md, flags=re.MULTILINE)
    assert [(name, module) for name, module, _ in tables] == [(c.__name__, c.__module__.split(".")[-1]) for c in SHOWN]
    for cls, (_, _, table) in zip(SHOWN, tables, strict=True):
        fields = [name for row in table.splitlines() for name in re.findall(r"`([^`]+)`", row.split("|")[1])]
        assert len(fields) == len(set(fields)) and set(fields) <= readable(cls), cls.__name__
        assert cls in IN_PART or set(fields) == readable(cls), cls.__name__


def test_relative_links_lead_somewhere(root: Path) -> None:
    for document in DOCUMENTS:
        text = (root / document).read_text()
        for target in re.findall(r"\]\((?!https?://|#|mailto:)([^)#\s]+)", text):
            assert ((root / document).parent / target).exists(), f"{document}: {target}"


def test_files_named_in_the_documents_exist(root: Path) -> None:
    for document in DOCUMENTS:
        named = re.findall(
            r"`((?:core|plugins|kernels|simulator|dashboard|cli|tests|docs|examples)/[\w/.-]+)`",
            (root / document).read_text(),
        )
        missing = [name for name in named if not (root / name).exists()]
        assert not missing, f"{document}: {missing}"


def test_models_md_lists_every_family_and_what_it_serves(root: Path) -> None:
    from twinfer.core.gguf_spec import GGUF_FAMILIES
    from twinfer.core.hf_config import FAMILIES
    from twinfer.core.registry import Registry

    text = (root / "docs" / "models.md").read_text()
    rows = {line.split("|")[1].strip(" `"): line for line in text.splitlines() if line.startswith("| `")}
    for item in Registry(entry_points=False).all("model_family"):
        for family in item.cls.families:
            assert f"`{FAMILIES[family]}`" in rows[item.name], family
            for gguf, architecture in GGUF_FAMILIES.items():
                if architecture == FAMILIES[family]:
                    assert gguf in rows[item.name], gguf


def test_python_examples_compile_and_their_imports_exist(root: Path) -> None:
    for document in DOCUMENTS:
        for source in blocks((root / document).read_text(), "python"):
            if source.startswith("def ") and ":\n" not in source:
                continue  # signatures alone
            tree = compile(source, document, "exec", flags=ast.PyCF_ONLY_AST)
            head = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
            exec(compile(ast.Module(head, []), document, "exec"), {})


@pytest.mark.model
def test_the_python_example_of_the_readme_runs(
    root: Path, smollm2_gguf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (source,) = blocks((root / "README.md").read_text(), "python")
    exec(compile(source, "README.md", "exec"), {"__name__": "__main__"})
    printed = capsys.readouterr().out
    assert printed.lstrip().startswith("Paris")
    assert "return" in printed


def test_the_plugin_of_the_document_works_as_written(plugins_md: str, tmp_path: Path) -> None:
    """It is loaded as a user would, keeps its options, and schedules a simulated run."""
    (source,) = [block for block in blocks(plugins_md, "python") if "@hookimpl" in block]
    (tmp_path / "shortest.py").write_text(source)
    from twinfer.core.config import EngineConfig
    from twinfer.core.registry import Registry
    from twinfer.core.workload import Workload
    from twinfer.simulator.run import simulate

    registry = Registry(plugin_dirs=[tmp_path], entry_points=False)
    assert "shortest-prompt" in registry.names("scheduler")
    config = EngineConfig.model_validate(
        {"model": "llama-3.1-8b", "device": "h100-sxm", "scheduler": "shortest-prompt:patience=2"}
    )
    record = simulate(config, Workload(num_requests=20, rate=50, input_len=64, output_len=8, seed=1), registry=registry)
    assert record.complete
    assert record.metrics["num_completed"] == 20
    assert record.config["scheduler"]["options"] == {"patience": 2}


WIDE = os.environ | {"COLUMNS": "200", "TERM": "dumb"}
GLOBAL_OPTIONS = ("-p", "--plugins-dir")


def commands(text: str) -> list[list[str]]:
    """[command, words...] of the `twinfer` lines in shell blocks: continuation lines joined, comments dropped."""
    found = []
    for line in "\n".join(blocks(text, "(?:sh|bash)")).replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] == ["twinfer"]:
            while words[1] in GLOBAL_OPTIONS:
                del words[1:3]
            found.append(words[1:])
    return found


def test_readme_commands_and_options_exist(root: Path) -> None:
    """Each command's options are in its own --help."""
    found = commands((root / "README.md").read_text())
    assert {command[0] for command in found} >= {"simulate", "run", "compare", "memory"}
    twinfer = str(Path(sys.executable).with_name("twinfer"))
    helps: dict[str, str] = {}
    for command in found:
        name = command[0]
        if name not in helps:
            done = subprocess.run([twinfer, name, "--help"], capture_output=True, text=True, env=WIDE)
            assert done.returncode == 0, f"twinfer {name}: {done.stderr}"
            helps[name] = done.stdout
        for word in command[1:]:
            if word.startswith("--"):
                assert re.search(rf"(?<![\w-]){word.split('=')[0]}(?![\w-])", helps[name]), f"twinfer {name} {word}"
