"""`twinfer plugins`: what is plugged in, a new one to start from, and whether one keeps its contract."""

from __future__ import annotations

import keyword
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from twinfer.cli import show
from twinfer.cli.session import Session

plugins = typer.Typer(
    invoke_without_command=True,
    help="""List plugins, begin a new one, or check one.

    Examples:

    twinfer plugins

    twinfer plugins new my-scheduler

    twinfer plugins new my-router --kind router

    twinfer -p my_scheduler plugins check my-scheduler
    """,
)
NEW: Mapping[str, tuple[str, str, str, str]] = {
    "scheduler": ("a scheduler", "chunk_size", "3", "--scheduler {}"),
    "kv_cache": ("a KV cache", "block_size", "4", "--kv-cache {}"),
    "router": ("a router", "cached_weight", "0.5", "--replicas 2 --router {}"),
    "attention": ("an attention variant", "window", "16", "--attention {}"),
    "quantizer": ("a quantizer", "bits", "8", "--quant {}"),
    "op_time_model": ("an op-time model", "efficiency", "0.5", "--op-time-model {} --op-time-model roofline"),
}
"""Kinds that `new` has a skeleton of (`templates/KIND.py.tmpl`): in words, an option of it, a value of that, flags to use it."""
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


def add_commands(app: typer.Typer) -> None:
    app.add_typer(plugins, name="plugins")


@plugins.callback()
def _list_by_default(ctx: typer.Context, as_json: Json = False) -> None:
    if ctx.invoked_subcommand is None:
        list_plugins(ctx, as_json)


@plugins.command("list")
def list_plugins(
    ctx: typer.Context,
    as_json: Json = False,
    kind: Annotated[str | None, typer.Option(help="Only this kind, e.g. scheduler.")] = None,
) -> None:
    """Every technique: its kind, options and origin, whether it can be used here, and what failed to load."""
    session: Session = ctx.obj
    registry = session.registry
    rows = [describe(item) for item in registry.all(_kind(kind))]
    if as_json:
        show.print_json({"techniques": rows, "broken": registry.broken})
        return
    table = show.new_table("", "name", "kind", "version", "from", "options", "summary")
    for column in table.columns:
        column.justify = "left"
    for row in rows:
        options = ", ".join(f"{o['name']}={o['default']}" for o in row["options"])
        summary = row["summary"] if row["usable"] else f"not usable here: {'; '.join(row['why_not'])}"
        origin = "built in" if row["builtin"] else row["plugin"]
        table.add_row(row["name"], row["kind"], row["version"], origin, options, summary)
    show.print_table(table)
    for name, reason in registry.broken.items():
        show.note(f"failed to load: {name}: {reason}")


def describe(item: Any) -> dict[str, Any]:
    """A registered technique as JSON data."""
    from twinfer.core.errors import PluginError
    from twinfer.core.guard import reasons_against
    from twinfer.core.technique import Needs

    options = []
    for name, field in item.cls.Options.model_fields.items():
        default = None if field.is_required() else field.get_default(call_default_factory=True)
        options.append(
            {"name": name, "type": str(field.annotation), "default": default, "description": field.description}
        )
    try:
        reasons = reasons_against(item.kind, item.cls, Needs())
    except PluginError as error:
        reasons = [str(error)]
    return {
        "name": item.name, "kind": item.kind, "plugin": item.plugin, "version": item.version, "source": item.source,
        "builtin": item.builtin, "summary": item.cls.summary, "reference": getattr(item.cls, "reference", ""),
        "options": options, "usable": not reasons, "why_not": reasons,
    }  # fmt: skip


@plugins.command("new")
def new(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(help="Of the plugin: lower-case words joined by '-'.")],
    kind: Annotated[str, typer.Option(help=f"What it is: {', '.join(NEW)}.")] = "scheduler",
    directory: Annotated[Path, typer.Option("--dir", help="Where its folder is made.")] = Path("."),
    as_json: Json = False,
) -> None:
    """Write a working plugin package: a technique in one file, its pyproject.toml, its test, a README.

    Example: twinfer plugins new my-scheduler && cd my-scheduler && pytest
    """
    files = write_plugin(name, directory, kind.replace("-", "_"))
    if as_json:
        show.print_json({"name": name, "files": [str(f) for f in files]})
        return
    for path in files:
        print(path)
    module = name.replace("-", "_")
    print(f"next: cd {files[0].parent} && pytest; then edit {module}.py; `twinfer -p {module} plugins check {name}`")


def write_plugin(name: str, directory: Path, kind: str = "scheduler") -> list[Path]:
    """The files of a new plugin of `kind` in `directory/name`, which must not exist. Raises ConfigError."""
    from string import Template

    from twinfer.core.errors import ConfigError
    from twinfer.plugins.conformance import KITS

    if kind not in NEW:
        raise ConfigError(
            "--kind", kind, "there is nothing to begin such a plugin from", f"use one of {', '.join(NEW)}"
        )
    module = name.replace("-", "_")
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name) or keyword.iskeyword(module):
        raise ConfigError(
            "NAME", name, "cannot name a plugin", "use lower-case words joined by '-', such as my-scheduler"
        )
    folder = directory / name
    if folder.exists():
        raise ConfigError("NAME", name, f"{folder} exists", "choose another name or --dir")
    what, option, value, flags = NEW[kind]
    words = {
        "NAME": name, "MODULE": module, "CLASS": "".join(part.capitalize() for part in name.split("-")), "WHAT": what,
        "KIT": KITS[kind].__name__, "OPTION": option, "VALUE": value, "FLAGS": flags.format(f"{name}:{option}={value}"),
    }  # fmt: skip
    written = []
    try:
        folder.mkdir(parents=True)
        for template, target in ((f"{kind}.py", f"{module}.py"), ("pyproject.toml", "pyproject.toml"),
                                 ("test_plugin.py", f"test_{module}.py"), ("README.md", "README.md")):  # fmt: skip
            text = (Path(__file__).parent / "templates" / f"{template}.tmpl").read_text(encoding="utf-8")
            path = folder / target
            path.write_text(Template(text).substitute(words), encoding="utf-8")
            written.append(path)
    except OSError as error:
        raise ConfigError(
            "--dir", str(directory), str(error.strerror).lower(), "give a folder you may write to"
        ) from error
    return written


@plugins.command("check")
def check(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(help="Technique or plugin, with options if wanted: NAME[:OPT=VAL,...].")],
    kind: Annotated[str | None, typer.Option(help="Its kind, when the name is used by several.")] = None,
    as_json: Json = False,
) -> None:
    """Run the conformance kit of each technique of this name; exit code 1 when one fails.

    Examples:

    twinfer plugins check continuous:chunk_size=3

    twinfer -p my_scheduler plugins check my-scheduler --json
    """
    from twinfer.core.config import Choice, parse_choice
    from twinfer.core.errors import ConfigError
    from twinfer.core.registry import validate_options
    from twinfer.plugins.conformance import KITS
    from twinfer.plugins.conformance import check as run_kit

    session: Session = ctx.obj
    choice = Choice(**parse_choice(name, "NAME"))
    registry = session.registry
    items = [i for i in registry.all(_kind(kind)) if choice.name in (i.name, i.plugin)]
    if not items:
        if choice.name in registry.broken:
            raise ConfigError(
                "NAME", choice.name, f"failed to load ({registry.broken[choice.name]})", "repair the plugin"
            )
        names = sorted({i.name for i in registry.all()})
        raise ConfigError("NAME", choice.name, "no such technique or plugin", f"known: {', '.join(names)}")
    if choice.options and len(items) > 1:
        raise ConfigError("NAME", name, f"options, but {len(items)} techniques", "give the technique's name, or --kind")
    results: dict[str, dict[str, str]] = {}
    for item in items:
        label = f"{item.kind} {item.name}"
        results[label] = {"declaration": ""}
        if item.kind in KITS:
            validate_options("NAME", Choice(name=item.name, options=choice.options), item.cls.Options)
            results[label] = run_kit(item.kind, item.cls, choice.options)
        elif not as_json:
            show.note(f"{label}: loads and declares itself; there is no further kit for this kind yet")
    failed = [(label, test) for label, tests in results.items() for test, problem in tests.items() if problem]
    if as_json:
        show.print_json({"passed": not failed, "results": results})
    else:
        for label, tests in results.items():
            for test, problem in tests.items():
                print(f"{'FAILED' if problem else 'passed'}  {label}: {test.removeprefix('test_').replace('_', ' ')}")
                if problem:
                    print(f"        {problem}")
    if failed:
        raise typer.Exit(1)


def _kind(kind: str | None) -> str | None:
    from twinfer.core.errors import ConfigError
    from twinfer.core.technique import KINDS

    if kind is not None and kind.replace("-", "_") not in KINDS:
        raise ConfigError("--kind", kind, "no such kind", f"known: {', '.join(KINDS)}")
    return None if kind is None else kind.replace("-", "_")
