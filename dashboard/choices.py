"""The controls of one technique: its choice, its summary, why it may not serve, and its options from its own schema."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import streamlit as st

from twinfer.core.config import Choice
from twinfer.core.errors import TwinferError
from twinfer.core.guard import reasons_against
from twinfer.core.technique import Needs
from twinfer.dashboard import parts, session
from twinfer.dashboard.explain import KIND_WORDS, explain, in_controls
from twinfer.dashboard.forms import option_form, with_option
from twinfer.dashboard.resources import Resources
from twinfer.dashboard.scenario import Scenario


def technique(resources: Resources, kind: str, optional: bool = False) -> None:
    """Choice of one technique, its summary, why it may not serve, and its options from its own schema."""
    choice: Choice | None = getattr(session.scenario(), kind)
    names = resources.registry.names(kind)
    key = f"w_{kind}"

    def chosen() -> None:
        name = st.session_state[key]
        session.edit(**{kind: Choice(name=name) if name else None})

    options = ([""] if optional else []) + names
    current = choice.name if choice is not None else ""
    if current not in options:
        options = [*options, current]
    st.session_state[key] = current
    st.selectbox(
        KIND_WORDS[kind], options, key=key, on_change=chosen,
        format_func=lambda name: name or ("as the model" if kind == "attention" else "none"),
    )  # fmt: skip
    if choice is None:
        return
    try:
        cls = resources.registry.get(kind, choice.name)
    except TwinferError as error:
        st.error(parts.plain(explain(error)))
        return
    st.caption(parts.plain(cls.summary))
    for reason in _why_not(kind, cls, session.scenario()):
        st.warning(parts.plain(reason))
    if kind == "speculator":  # others say so when they are run
        for reason in _why_not(kind, cls, session.scenario(), "engine"):
            st.caption(f"Predicted only: {parts.plain(reason)}.")
    if cls.Options.model_fields:

        def changed(name: str, value: Any) -> None:
            now: Choice = getattr(session.scenario(), kind)
            session.edit(**{kind: Choice(name=now.name, options=with_option(cls.Options, now.options, name, value))})

        with st.expander(f"Options of {choice.name}", key=f"options-{kind}", expanded=bool(choice.options)):
            option_form(cls.Options, choice.options, f"w_{kind}.{choice.name}", changed)


def unused(resources: Resources, kinds: Sequence[str]) -> None:
    """Says what is wrong with techniques of the scenario that a page has no control of, and does not need."""
    for kind in kinds:
        choice: Choice | None = getattr(session.scenario(), kind)
        try:
            if choice is not None:
                resources.registry.build(kind, choice)
        except TwinferError as error:
            st.warning(
                f"{parts.plain(explain(error))}. It makes no difference here; the Techniques page has its control."
            )


def _why_not(kind: str, cls: type[Any], scenario: Scenario, world: str = "simulator") -> list[str]:
    try:
        from twinfer.core.catalog import resolve_spec

        needs = Needs(world=world, device=scenario.device, model=resolve_spec(scenario.model))
        return [in_controls(reason) for reason in reasons_against(kind, cls, needs)]
    except TwinferError:  # the model's own error is shown with the results
        return []


__all__ = ["KIND_WORDS", "technique", "unused"]
