"""What pydantic finds wrong with a user's value, in this house's words: why it cannot work, and what would.

Invariants
* A problem continues "FIELD=VALUE: ", a fix stands by itself; neither names pydantic, its types or its "input".
* The first mistake decides: a user mends one thing at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from twinfer.core.errors import figure, short

_WHOLE = ("is no whole number", "give a whole number")
_NUMBER = ("is no number", "give a number")
_TRUTH = ("is neither true nor false", "give true or false")
_LIST = ("is no list of values", "give a list")
_WORDS: dict[str, tuple[str, str]] = {
    "int_parsing": _WHOLE, "int_type": _WHOLE, "int_from_float": _WHOLE, "int_parsing_size": _WHOLE,
    "float_parsing": _NUMBER, "float_type": _NUMBER, "finite_number": ("is not finite", "give a finite number"),
    "bool_parsing": _TRUTH, "bool_type": _TRUTH, "string_type": ("is no text", "give a text"),
    "list_type": _LIST, "tuple_type": _LIST, "missing": ("is missing", "give it"),
    "dict_type": ("is no set of named values", "write NAME=VALUE"),
    "model_type": ("names no technique", "write NAME or NAME:option=value"),
    "extra_forbidden": ("is not known", "leave it out"),
}  # fmt: skip
_BOUNDS = {
    "greater_than_equal": ("is too small", "give at least", "ge"), "greater_than": ("is too small", "give more than", "gt"),
    "less_than_equal": ("is too large", "give at most", "le"), "less_than": ("is too large", "give less than", "lt"),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Mistake:
    """path: names from the outermost field to the one that is wrong.  kind: pydantic's own word for it."""

    path: tuple[str, ...]
    value: Any
    problem: str
    fix: str
    kind: str

    @property
    def field(self) -> str:
        """The outermost field; "" when the mistake is of the whole."""
        return self.path[0] if self.path else ""

    @property
    def where(self) -> str:
        return ".".join(self.path)

    @property
    def told(self) -> str:
        """The field, with its value where it has one."""
        return self.where if self.kind == "missing" else f"{self.where}={short(self.value)}"


def first_mistake(error: ValidationError) -> Mistake:
    """The first thing that `error` complains about; of a field that may be of several kinds, the one that came furthest."""
    errors = error.errors()
    same = [each for each in errors if each["loc"][:1] == errors[0]["loc"][:1]]
    first = max(same, key=lambda each: len(each["loc"]))
    nan = first["type"] in _BOUNDS and str(first.get("input")).strip().lower() in ("nan", "+nan", "-nan")
    problem, fix = _NUMBER if nan else _words(first["type"], first.get("ctx") or {}, first["msg"])
    return Mistake(tuple(map(str, first["loc"])), first.get("input"), problem, fix, first["type"])


def _words(kind: str, context: dict[str, Any], message: str) -> tuple[str, str]:
    if kind in _WORDS:
        return _WORDS[kind]
    if kind in _BOUNDS:
        problem, fix, name = _BOUNDS[kind]
        return problem, f"{fix} {_bound(context[name])}"
    if kind in ("literal_error", "enum"):
        return "is none of its values", f"give {context['expected']}"
    if kind in ("value_error", "assertion_error"):  # raised by a check of ours
        return str(context.get("error", message)), "give a value that fits"
    if kind in ("too_short", "string_too_short"):
        return "is too short", f"give at least {figure(context['min_length'])}"
    if kind in ("too_long", "string_too_long"):
        return "is too long", f"give at most {figure(context['max_length'])}"
    return message[:1].lower() + message[1:].removeprefix("Input "), "give a value that fits"


def _bound(value: object) -> str:
    return figure(value) if isinstance(value, int | float) else str(value)


__all__ = ["Mistake", "first_mistake"]
