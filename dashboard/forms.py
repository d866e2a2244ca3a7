"""Widgets made from the pydantic option schemas of techniques, so that a plugin's options appear by themselves.

`fields_of` is pure (schema in, `OptionField`s out); `draw` is the only place that makes the widgets.

Invariants
* Widgets are seeded from the value given and report a change through the callback; they own no state.
* number_input wants min, max, value and step of one type: all int or all float.
* A field this form cannot draw as a native widget becomes a text field holding JSON, never nothing.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import streamlit as st
from pydantic import BaseModel

Changed = Callable[[str, Any], None]
EXACT = 2.0**53  # a browser's numbers are whole ones up to here


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionField:
    """One option of a technique. kind: bool | int | float | choice | text | json; unit and group are hints."""

    name: str
    kind: str
    default: Any = None
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[Any, ...] = ()
    nullable: bool = False
    unit: str = ""
    group: str = ""
    help: str = ""
    title: str = ""

    @property
    def label(self) -> str:
        words = self.title or self.name.replace("_", " ")
        words = words[:1].upper() + words[1:]
        return f"{words} ({self.unit})" if self.unit else words

    def as_text(self, value: Any) -> str:
        return "auto" if value is None else str(value)


def fields_of(model: type[BaseModel]) -> list[OptionField]:
    """The options of a technique in declaration order."""
    schema = model.model_json_schema()
    found = []
    for name, entry in schema.get("properties", {}).items():
        default = (
            model.model_fields[name].get_default(call_default_factory=True) if name in model.model_fields else None
        )
        found.append(_field(name, entry, schema.get("$defs", {}), default))
    return found


def _field(name: str, entry: Mapping[str, Any], defs: Mapping[str, Any], default: Any) -> OptionField:
    merged = dict(entry)
    nullable = False
    if "anyOf" in merged:
        parts = [part for part in merged.pop("anyOf") if part.get("type") != "null"]
        nullable = len(parts) < len(entry["anyOf"])
        if len(parts) == 1:
            merged = {**parts[0], **merged}
        else:
            merged["type"] = "any"
    if "$ref" in merged:
        merged = {**defs.get(merged["$ref"].rsplit("/", 1)[-1], {}), **{k: v for k, v in merged.items() if k != "$ref"}}
    if "const" in merged:
        merged["enum"] = [merged["const"]]
    kinds = {"boolean": "bool", "integer": "int", "number": "float", "string": "text"}
    kind = "choice" if "enum" in merged else kinds.get(str(merged.get("type")), "json")
    if kind == "bool" and nullable:
        kind, merged["enum"] = "choice", [True, False]  # three states do not fit a toggle
    step = 1 if kind == "int" else 0
    low, high = merged.get("minimum"), merged.get("maximum")
    if low is None and "exclusiveMinimum" in merged:
        low = merged["exclusiveMinimum"] + step
    if high is None and "exclusiveMaximum" in merged:
        high = merged["exclusiveMaximum"] - step
    return OptionField(
        name=name, kind=kind, default=default, minimum=low, maximum=high, choices=tuple(merged.get("enum", ())),
        nullable=nullable, unit=str(merged.get("unit", "")), group=str(merged.get("group", "")),
        help=str(merged.get("description", "")), title=str(merged.get("label", "")),
    )  # fmt: skip


def draw(field: OptionField, value: Any, key: str, changed: Changed) -> None:
    """The widget of `field`, seeded with `value`; a change calls `changed(field.name, new value)`."""

    def report() -> None:
        new = st.session_state[key]
        if field.kind == "json":
            with contextlib.suppress(
                ValueError, RecursionError
            ):  # else handed on as text; the option's own model says what is wrong
                new = json.loads(new) if new else None
        if new is None and not field.nullable:
            return
        changed(field.name, new)

    help_text = field.help or None
    if field.kind == "bool":
        st.session_state[key] = bool(value)
        st.toggle(field.label, key=key, on_change=report, help=help_text)
    elif field.kind == "choice":
        options = ([None] if field.nullable else []) + list(field.choices)
        st.session_state[key] = value if value in options else options[0]
        st.selectbox(
            field.label, options, key=key, on_change=report, help=help_text,
            format_func=field.as_text,
        )  # fmt: skip
    elif field.kind in ("int", "float"):
        to = int if field.kind == "int" else float
        low = None if field.minimum is None else to(field.minimum)
        high = None if field.maximum is None else to(field.maximum)
        st.session_state[key] = seed_of(field, value)
        span = 1.0 if low is None or high is None else high - low
        st.number_input(
            field.label, low, high, step=1 if to is int else (0.05 if span <= 2 else 1.0), key=key, on_change=report,
            help=help_text, placeholder="auto",
        )  # fmt: skip
    else:
        as_is = field.kind == "text" and isinstance(value, str)
        st.session_state[key] = "" if value is None else value if as_is else json.dumps(value, default=str)
        st.text_input(field.label, key=key, on_change=report, help=help_text)


def seed_of(field: OptionField, value: Any) -> float | int | None:
    """`value` as the number that its widget shows: within the field's bounds, None where it is no number (of that kind).

    A link may say anything; whoever takes the value says what is wrong with it.
    """
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    if not math.isfinite(number) or (field.kind == "int" and not number.is_integer()) or abs(number) >= EXACT:
        return None
    number = max(number, number if field.minimum is None else field.minimum)
    number = min(number, number if field.maximum is None else field.maximum)
    return int(number) if field.kind == "int" else number


def option_form(model: type[BaseModel], options: Mapping[str, Any], prefix: str, changed: Changed) -> None:
    """All options of one technique; `changed` gets the name and the new value of the one that was edited."""
    group = ""
    for field in fields_of(model):
        if field.group and field.group != group:
            group = field.group
            st.caption(group)
        draw(field, options.get(field.name, field.default), f"{prefix}.{field.name}", changed)


def with_option(model: type[BaseModel], options: Mapping[str, Any], name: str, value: Any) -> dict[str, Any]:
    """`options` with one changed; an option at its default is left out, so that links stay short."""
    rest = {k: v for k, v in options.items() if k != name}
    default = model.model_fields[name].get_default(call_default_factory=True)
    return rest if value == default else {**rest, name: value}
