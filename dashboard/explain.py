"""Mistakes in words: what was set, why it cannot work, what would; nothing of the library that found them."""

from __future__ import annotations

from pydantic import ValidationError

from twinfer.core.errors import ConfigError, TwinferError
from twinfer.core.mistakes import first_mistake
from twinfer.dashboard.scenario import Scenario


def explain(error: Exception) -> str:
    """One line for people: typed errors and validation errors name what to change, others say they are ours."""
    if isinstance(error, ValidationError):
        wrong = first_mistake(error)
        name = wrong.where or error.title
        if error.title == Scenario.__name__:
            name = label_of(wrong.field) or name
        elif wrong.path:
            name = "--" + name.replace("_", "-")  # as the command line has it, and all typed errors
        return str(ConfigError(name, wrong.value, wrong.problem, wrong.fix))
    if isinstance(error, TwinferError):
        return str(error)
    return f"internal error, please report it ({type(error).__name__}: {error})"


def label_of(name: str) -> str:
    """What a field of the scenario is called on the pages; "" where they do not have it."""
    field = Scenario.model_fields.get(name)
    more = field.json_schema_extra if field is not None else None
    return str(more.get("label", "")) if isinstance(more, dict) else ""


__all__ = ["explain", "label_of"]
