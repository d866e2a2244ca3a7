"""Mistakes that the parser of the command line finds, or would let pass: said as all others are, option, value, cure.

Invariants
* An option that takes one value and is given twice is refused: the first value would be ignored.
* An empty value is refused where nobody says something better of it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import typer

UsageError: type[Exception] = typer.BadParameter.__bases__[0]  # typer keeps it in a private module
_EMPTY_IS_FINE = ("name", "prompt", "trace", "page")
"""Options whose own check says more, and a name, which may be none."""


def check_options(command: Any, context: Any, args: Sequence[str]) -> None:
    """Look at the options in `args` of `command` before they are taken. Raises UsageError."""
    given, _, order = command.make_parser(context).parse_args(list(args))
    for param, count in Counter(order).items():
        if count > 1 and not getattr(param, "multiple", False) and not _harmless(param):
            raise UsageError(f"{_longest(param)} is given {count} times; give it once")
    for param in order:
        value = given.get(param.name)
        if "" in (value if isinstance(value, list | tuple) else [value]) and param.name not in _EMPTY_IS_FINE:
            raise UsageError(f"{_longest(param)}='': is empty; give a value, or leave the option out")


def message_of(error: Any) -> str:
    """What is wrong, with the option and its value where the parser knows them.

    Newer parsers check values with pydantic, older ones say "VALUE is not a valid KIND".
    """
    from pydantic import ValidationError

    from twinfer.core.errors import ConfigError
    from twinfer.core.mistakes import first_mistake

    text = error.format_message() if hasattr(error, "format_message") else str(error)
    param = getattr(error, "param", None)
    if param is None or type(error).__name__ == "MissingParameter":
        return _of_usage(error, text)
    if isinstance(error.__cause__, ValidationError):
        wrong = first_mistake(error.__cause__)
        return str(ConfigError(_longest(param), wrong.value, wrong.problem, wrong.fix))
    found = re.fullmatch(r"'(.*)' is not a valid (integer|float)\.?", str(getattr(error, "message", "")), re.DOTALL)
    if found is None:
        return text
    kind = "whole number" if found[2] == "integer" else "number"
    return str(ConfigError(_longest(param), found[1], f"is no {kind}", f"give a {kind}"))


def _of_usage(error: Any, text: str) -> str:
    """What is wrong with the words themselves, and what would work. Errors are told by name: typer keeps them private."""
    kind, context = type(error).__name__, getattr(error, "ctx", None)
    listed = f"`{context.command_path} --help` lists what there is" if context is not None else "see --help"
    if kind == "NoSuchOption":
        close = " or ".join(sorted(getattr(error, "possibilities", None) or ()))
        return f"{error.option_name}: is no option; " + (f"did you mean {close}?" if close else listed)
    if kind == "MissingParameter" and error.param is not None:
        return f"{_longest(error.param)}: is missing; give it ({listed})"
    if kind == "BadOptionUsage" and "requires" in text:
        return f"{error.option_name}: has no value; give one"
    if kind == "UsageError" and text.startswith(("Got unexpected", "No such command")):
        return f"{text.rstrip('.')}; {listed}"
    return text


def _harmless(param: Any) -> bool:
    """A flag that says the same however often it is given."""
    return bool(getattr(param, "is_flag", False)) and not param.secondary_opts


def _longest(param: Any) -> str:
    """`--model` of `--model`, `-m`; an argument's name in capitals."""
    options = [o for o in param.opts if o.startswith("-")]
    return max(options, key=len) if options else str(param.name).upper()


__all__ = ["UsageError", "check_options", "message_of"]
