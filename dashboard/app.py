"""The app: pages in the sidebar, shared resources, the scenario around each page.

`launch.py` starts Streamlit on `entry/script.py`, which calls `main` with the words after `--`:
[--runs-dir DIR] [-p MODULE] [--plugins-dir DIR].

Invariants
* Built-in pages and those of plugins come through the same hook; a page that fails shows its reason and
  leaves the others working.
* The scenario is adopted from the URL and published before the page is drawn, and published again after it (`session.py`).
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Sequence
from typing import Any

import streamlit as st

from twinfer.core.guard import FAULTS
from twinfer.core.registry import Registry
from twinfer.dashboard import session
from twinfer.dashboard.explain import explain
from twinfer.dashboard.resources import Resources

LOGO = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 196 48" width="196" height="48">'
    '<circle cx="20" cy="24" r="14" fill="none" stroke="#0072B2" stroke-width="5"/>'
    '<circle cx="36" cy="24" r="14" fill="none" stroke="#E69F00" stroke-width="5" stroke-dasharray="7 4"/>'
    '<text x="62" y="33" font-family="Source Sans,Source Sans Pro,Helvetica,Arial,sans-serif" font-size="28" '
    'font-weight="700" fill="#7A8794">twinfer</text></svg>'
)
GROUPS = ("Explore", "Plan", "Records")


@st.cache_resource(show_spinner=False)
def resources(runs_dir: str | None, plugins: tuple[str, ...], plugin_dirs: tuple[str, ...]) -> Resources:
    """Shared by all tabs of this server."""
    import atexit

    made = Resources.make(runs_dir, plugins, plugin_dirs)
    atexit.register(made.jobs.close)
    return made


def page_classes(registry: Registry) -> list[tuple[str, type[Any]]]:
    """(path, page class) of the built-in pages and of the plugins' pages."""
    from twinfer.dashboard.pages import register_dashboard_page

    found: dict[str, type[Any]] = {}
    register_dashboard_page(lambda cls: found.__setitem__(cls.name, cls))
    for item in registry.all("dashboard_page"):
        name = item.name.replace("/", "-")
        found[name if name not in found else f"{item.plugin}-{name}"] = item.cls
    return list(found.items())


def _renderer(path: str, cls: type[Any], shared: Resources) -> Callable[[], None]:
    def render() -> None:
        session.adopt(path)
        session.publish()
        try:
            cls().render(shared)
        except FAULTS as error:  # a broken page must not take the dashboard down
            logging.getLogger("twinfer.dashboard").exception("page %s", path)
            st.error(f"This page could not be drawn: {explain(error)}")
        session.publish()

    render.__name__ = path.replace("-", "_")
    return render


def main(argv: Sequence[str] = (), first: str | None = None) -> None:
    """Draw the app. `first`: path of the page that opens by default."""
    parser = argparse.ArgumentParser(prog="twinfer dashboard")
    parser.add_argument("--runs-dir")
    parser.add_argument("-p", dest="plugins", action="append", default=[])
    parser.add_argument("--plugins-dir", dest="plugin_dirs", action="append", default=[])
    given = parser.parse_args(list(argv))
    st.set_page_config(page_title="twinfer", layout="wide")
    st.logo(LOGO, size="large")
    shared = resources(given.runs_dir, tuple(given.plugins), tuple(given.plugin_dirs))
    classes = page_classes(shared.registry)
    opening = first if first in {path for path, _ in classes} else classes[0][0]
    groups: dict[str, list[Any]] = {name: [] for name in GROUPS}
    st.session_state.pages = {}
    for path, cls in classes:
        title, render = getattr(cls, "title", cls.name), _renderer(path, cls, shared)
        page = st.Page(render, title=title, url_path=path)
        st.session_state.pages[path] = page
        groups.setdefault(getattr(cls, "group", "Plugins"), []).append(page)
        if path == opening:  # streamlit gives the default page no path of its own, so "/" is a hidden twin
            groups[GROUPS[0]].append(st.Page(render, title=title, url_path="home", default=True, visibility="hidden"))
    st.navigation({name: pages for name, pages in groups.items() if pages}).run()
