"""Flags that are generated: every option of every loaded technique is `--KIND.OPTION`.

Invariants
* A flag applies to the technique chosen for its kind, whose own `Options` model checks it.
* The help also tells the defaults, read from the models that have them.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

import typer
from typer.core import TyperCommand

from twinfer.cli.session import Session

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

FLAG_KINDS = ("scheduler", "kv_cache", "attention", "quantizer", "speculator", "workload")
GIVEN = "twinfer.technique_options"
"""Where a command line's context keeps these options: kind -> option -> value."""


class ScenarioCommand(TyperCommand):
    """A command whose help and parser also know the options of all loaded techniques."""

    def get_params(self, ctx: Any) -> list[Any]:
        params = super().get_params(ctx)
        if not isinstance(ctx.obj, Session):
            return params
        if "twinfer.generated" not in ctx.meta:
            ctx.meta["twinfer.generated"] = generated_params(ctx.obj)
            _tell_defaults(params)
        return [*params[:-1], *ctx.meta["twinfer.generated"], params[-1]]  # --help stays last


def _tell_defaults(params: list[Any]) -> None:
    """Add to each help text the default of the field that the option sets."""
    from twinfer.core.config import Choice, EngineConfig
    from twinfer.core.workload import Workload

    both = (*Workload.model_fields.items(), *EngineConfig.model_fields.items())
    defaults = {name: info.default for name, info in both if not info.is_required()}
    for param in params:
        default = defaults.get(param.name)
        more = f" (default {default.name if isinstance(default, Choice) else default})"
        if isinstance(default, str | int | float | Choice) and param.help and not param.help.endswith(more):
            param.help += more


def generated_params(session: Session) -> list[Any]:
    """One parameter for every option of every technique of `FLAG_KINDS`."""
    from twinfer.core.registry import OPTION_OF_KIND

    parameters: list[inspect.Parameter] = []
    for kind in FLAG_KINDS:
        about: dict[str, dict[str, list[str]]] = {}  # option -> what it does -> the techniques in which it does
        for item in session.registry.all(kind):
            for name, info in item.cls.Options.model_fields.items():
                about.setdefault(name, {}).setdefault(_about(info), []).append(item.name)
        for name, texts in about.items():
            flag = f"{OPTION_OF_KIND[kind]}.{name.replace('_', '-')}"
            option = typer.Option(
                flag, callback=_keep(kind, name), expose_value=False, metavar="VALUE", show_default=False,
                rich_help_panel="Options of techniques", help="; ".join(f"{', '.join(names)}: {text}" for text, names in texts.items()),
            )  # fmt: skip
            parameter = inspect.Parameter(
                f"{kind}__{name}",
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=Annotated[str | None, option],
            )
            parameters.append(parameter)

    def prototype(**given: Any) -> None: ...

    prototype.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    prototype.__annotations__ = {p.name: p.annotation for p in parameters}
    app = typer.Typer(add_completion=False)
    app.command(add_help_option=False)(prototype)
    return list(typer.main.get_command(app).params)


def _about(info: FieldInfo) -> str:
    """What an option does, the words it takes and its default."""
    more = []
    if get_origin(info.annotation) is Literal:
        more.append(", ".join(str(word) for word in get_args(info.annotation) if word != ""))
    default = None if info.is_required() else info.get_default(call_default_factory=True)
    if default not in (None, ""):
        more.append(f"default {default}")
    text = str(info.description or info.annotation)
    return f"{text} ({'; '.join(more)})" if more else text


def _keep(kind: str, name: str) -> Callable[..., None]:
    def callback(ctx: typer.Context, value: str | None) -> None:
        if value is None:
            return
        try:
            parsed = json.loads(value)
        except (ValueError, RecursionError):  # also a number of thousands of digits
            parsed = value
        ctx.meta.setdefault(GIVEN, {}).setdefault(kind, {})[name] = parsed

    return callback


__all__ = ["FLAG_KINDS", "GIVEN", "ScenarioCommand", "generated_params"]
