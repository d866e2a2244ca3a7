"""The scenario of one browser tab: kept in session state, written to the URL, adopted from it on Back.

`st.session_state.sc` is the truth. Streamlit's own binding of widgets to the URL loses values when a page
link follows a deep link at once, and on Back; this does not.

Invariants
* `adopt` runs before the page, `publish` after it; nothing else touches the query parameters.
* The URL is adopted only when it differs from what was last written and nothing was edited in this run
  (that is Back or Forward); the empty URL of a fresh page link is not.
* Every edit is one history entry, so Back is undo.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

import streamlit as st
from pydantic import ValidationError

from twinfer.core.errors import TwinferError
from twinfer.dashboard.scenario import VERSION, Scenario

VIEW = ("job", "real", "predicted", "metric", "axis", "batch")  # query parameters that say what is looked at
_SAFE = set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")


def scenario() -> Scenario:
    """The scenario of this tab."""
    return st.session_state.sc


def view(name: str) -> str | None:
    """What is being looked at: a job, a record, a metric; None when not chosen."""
    return st.session_state.vw.get(name)


def show(**changes: str | None) -> None:
    """Change what is looked at; None forgets it."""
    kept = {**st.session_state.vw, **changes}
    st.session_state.vw = {k: v for k, v in kept.items() if v}
    st.session_state.touched = True


def edit(**changes: Any) -> None:
    """Change the scenario; a value that cannot work is refused with a message and changes nothing."""
    try:
        st.session_state.sc = scenario().edited(**changes)
    except ValidationError as error:
        first = error.errors()[0]
        st.session_state.problems = [f"{'.'.join(map(str, first['loc']))}: {first['msg']}"]
    except TwinferError as error:
        st.session_state.problems = [str(error)]
    st.session_state.touched = True


def replace(new: Scenario) -> None:
    """Put another scenario in place, e.g. a preset or the one of a stored run."""
    st.session_state.sc = new
    st.session_state.touched = True


def problems() -> list[str]:
    """Messages about the last edit or the link, shown once."""
    found: list[str] = st.session_state.get("problems", [])
    st.session_state.problems = []
    return found


def adopt(page: str) -> None:
    """Take the scenario from the URL: at the first run, and on Back or Forward."""
    state = st.session_state
    url = st.query_params.to_dict()
    if "sc" not in state:
        _read(url)
    else:
        moved = page != state.get("page")
        if url != state.get("written") and not state.get("touched") and not (moved and not url):
            _read(url)
    state.page = page


def publish() -> None:
    """Write the scenario to the URL, if it says something else."""
    state = st.session_state
    new = parameters(state.sc, state.vw)
    if st.query_params.to_dict() != new:
        st.query_params.from_dict(new)
    state.written = new
    state.touched = False


def parameters(current: Scenario, looked_at: Mapping[str, str]) -> dict[str, str]:
    """Query parameters of a scenario and a view; empty for the defaults."""
    found = {**current.to_params(), **looked_at}
    return {"v": VERSION, **found} if found else {}


def link() -> str:
    """The address that shows this page to somebody else on this machine."""
    base = (st.context.url or "").split("?")[0]
    query = urlencode(parameters(scenario(), st.session_state.vw))
    return f"{base}?{query}" if query else base


def _read(url: Mapping[str, str]) -> None:
    state = st.session_state
    state.sc, state.problems = Scenario.from_params(url)
    state.vw = {k: url[k] for k in VIEW if url.get(k) and len(url[k]) <= 128 and set(url[k]) <= _SAFE}
    if url.get("v", VERSION) != VERSION:
        state.problems = [*state.problems, f"this link is of version {url['v']}; version {VERSION} is understood"]
