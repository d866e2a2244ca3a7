"""Dashboard pages. Built-in ones are registered here through the hook that plugins use.

A page is a class with `name` (its path in the URL), `title`, `group` (heading in the sidebar), `summary`,
`Options`, `why_not` (as every technique) and `render(resources)`, which draws it with Streamlit. The scenario
of the tab is `twinfer.dashboard.session.scenario()`; charts come from `figures` and `timelines`.
"""

from __future__ import annotations

from typing import Any, ClassVar

from twinfer.core.hookspecs import Register, hookimpl
from twinfer.core.technique import Technique


class Page(Technique):
    """Base of dashboard pages; third parties may subclass it or give the same attributes."""

    title: ClassVar[str]
    group: ClassVar[str] = "Plugins"

    def render(self, resources: Any) -> None:
        """Draw the page; `resources` is `twinfer.dashboard.resources.Resources`."""
        raise NotImplementedError(f"page {self.name!r} has no render(resources)")


@hookimpl
def register_dashboard_page(register: Register) -> None:
    from twinfer.dashboard.pages.capacity import CapacityPage
    from twinfer.dashboard.pages.compare import ComparePage
    from twinfer.dashboard.pages.memory import MemoryPage
    from twinfer.dashboard.pages.roofline import RooflinePage
    from twinfer.dashboard.pages.techniques import TechniquesPage

    register(TechniquesPage)
    register(ComparePage)
    register(MemoryPage)
    register(RooflinePage)
    register(CapacityPage)
