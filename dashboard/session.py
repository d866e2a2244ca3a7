"""The scenario of one browser tab: kept in session state, written to the URL, adopted from it on Back.

What is kept here is the truth. Streamlit's own binding of widgets to the URL loses values when a page
link follows a deep link at once, and on Back; this does not.

Invariants
* `adopt` and then `publish` run before the page draws anything: whatever a page shows is in the address already, so
  a reload loses nothing. `publish` runs again after the page, for what the page itself changed.
* The URL is adopted only when it differs from what was last written and nothing was edited in this run
  (that is Back or Forward); the empty URL of a fresh page link is not, nor what comes after `keep`.
* What is kept is one object. Streamlit may stop a script at any access to session state, so values that belong
  together and lay there one by one could part.
* Every edit is one history entry, so Back is undo.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

import streamlit as st
from pydantic import ValidationError

from twinfer.core.errors import TwinferError
from twinfer.dashboard.explain import explain
from twinfer.dashboard.link import read
from twinfer.dashboard.scenario import VERSION, Scenario


@dataclass(slots=True)
class _Tab:
    """url: as last written or adopted.  touched: changed since then by an edit.  problems: messages not yet shown."""

    scenario: Scenario
    view: Mapping[str, str]
    url: Mapping[str, str]
    page: str
    problems: list[str] = field(default_factory=list)
    touched: bool = False


def _tab() -> _Tab:
    return st.session_state.tab


def scenario() -> Scenario:
    """The scenario of this tab."""
    return _tab().scenario


def view(name: str) -> str | None:
    """What is being looked at: a job, a record, a metric; None when not chosen."""
    return _tab().view.get(name)


def show(**changes: str | None) -> None:
    """Change what is looked at; None forgets it."""
    tab = _tab()
    tab.view = {k: v for k, v in {**tab.view, **changes}.items() if v}
    tab.touched = True


def edit(**changes: Any) -> None:
    """Change the scenario; a value that cannot work is refused with a message and changes nothing."""
    tab = _tab()
    try:
        tab.scenario = tab.scenario.edited(**changes)
    except (TwinferError, ValidationError) as error:
        tab.problems = [explain(error)]
    tab.touched = True


def replace(new: Scenario) -> None:
    """Put another scenario in place, e.g. a preset or the one of a stored run."""
    tab = _tab()
    tab.scenario, tab.touched = new, True


def tell(problem: str) -> None:
    """Have a message shown by the next page, once."""
    _tab().problems = [problem]


def problems() -> list[str]:
    """Messages about the last edit or the link, shown once."""
    tab = _tab()
    found, tab.problems = tab.problems, []
    return found


def keep() -> None:
    """What is kept here stands, whatever the address says: one that comes with a timer or a click may be older than
    the last edit."""
    _tab().touched = True


def adopt(page: str) -> None:
    """Take the scenario from the URL: at the first run, and on Back or Forward."""
    url = st.query_params.to_dict()
    every = {name: st.query_params.get_all(name) for name in url}
    tab: _Tab | None = st.session_state.get("tab")
    if tab is None:
        found, looked_at, problems = read(every)
        st.session_state.tab = _Tab(found, looked_at, url, page, problems)
        return
    moved = page != tab.page
    if url != tab.url and not tab.touched and not (moved and not url):
        tab.scenario, tab.view, tab.problems = read(every)
        tab.url = url
    tab.page = page


def publish() -> None:
    """Write the scenario to the URL, if it says something else."""
    tab = _tab()
    new = parameters(tab.scenario, tab.view)
    if st.query_params.to_dict() != new:
        st.query_params.from_dict(new)
    tab.url, tab.touched = new, False


def parameters(current: Scenario, looked_at: Mapping[str, str]) -> dict[str, str]:
    """Query parameters of a scenario and a view; empty for the defaults."""
    found = {**current.to_params(), **looked_at}
    return {"v": VERSION, **found} if found else {}


def link() -> str:
    """The address that shows this page to somebody else on this machine."""
    tab = _tab()
    base = (st.context.url or "").split("?")[0]
    query = urlencode(parameters(tab.scenario, tab.view))
    return f"{base}?{query}" if query else base
