"""Mistakes in words: what was set, why it cannot work, what would; nothing of the library that found them.

Who reads them has controls, no command line: an option that a message names is called what its control is called.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache

from pydantic import ValidationError

from twinfer.core.errors import ConfigError, TwinferError
from twinfer.core.mistakes import first_mistake
from twinfer.dashboard.scenario import Scenario

KIND_WORDS = {
    "scheduler": "Scheduler", "kv_cache": "KV cache", "attention": "Attention", "quantizer": "Quantization",
    "speculator": "Speculation",
}  # fmt: skip
"""Controls of techniques."""


def explain(error: BaseException) -> str:
    """One line for people: typed errors and validation errors name what to change, others say they are ours."""
    if isinstance(error, ValidationError):
        wrong = first_mistake(error)
        name = wrong.where or error.title
        if error.title == Scenario.__name__:
            name = label_of(wrong.field) or name
        elif wrong.path:
            name = _controls().get(wrong.field.replace("_", "-")) or name
        return in_controls(ConfigError(name, wrong.value, wrong.problem, wrong.fix))
    if isinstance(error, TwinferError):
        return in_controls(error)
    return f"internal error, please report it ({type(error).__name__}: {error})"


def label_of(name: str) -> str:
    """What a field of the scenario is called on the pages; "" where they do not have it."""
    field = Scenario.model_fields.get(name)
    more = field.json_schema_extra if field is not None else None
    return str(more.get("label", "")) if isinstance(more, dict) else ""


_FLAG = re.compile(r"(?<![\w-])--([a-z][a-z-]*[a-z])")


def in_controls(text: object) -> str:
    """`text` with the controls of the pages for options of the command line; those without a control are said to be its."""

    def named(flag: re.Match[str]) -> str:
        return _controls().get(flag[1]) or f"the command line's {flag[0]}"

    return _FLAG.sub(named, str(text))


@cache
def _controls() -> Mapping[str, str]:
    """Options of the command line to what their controls are called."""
    found = {name.replace("_", "-"): label for name in Scenario.model_fields if (label := label_of(name))}
    found |= {kind.replace("_", "-"): words for kind, words in KIND_WORDS.items()}
    return found | {
        "model": "Model", "device": "Device", "quant": found["quantizer"], "requests": found["num-requests"],
        "trace": found["plan-trace"], "rate-scale": found["plan-scale"], "slo": "Promises",
    }  # fmt: skip


__all__ = ["KIND_WORDS", "explain", "in_controls", "label_of"]
