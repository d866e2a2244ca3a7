"""One line on stderr while something long goes on: what is being done, then how much of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.spinner import Spinner

from twinfer.cli import show


class Bar(Progress):
    """A spinner with words until there is something to count, a bar from then on; gone at the end."""

    def __init__(self, label: str) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
                   TextColumn("eta"), TimeRemainingColumn(), TextColumn("{task.fields[more]}"))  # fmt: skip
        self._spinner = Spinner("dots", label)
        self._counts = False
        super().__init__(*columns, console=Console(stderr=True), transient=True)
        self._task = self.add_task(label, total=None, more="")

    def get_renderables(self) -> Iterable[RenderableType]:
        if self._counts:
            yield from super().get_renderables()
        else:
            yield self._spinner

    def on_progress(self, done: int, total: int, info: Mapping[str, Any]) -> None:
        """info: numbers and words beside the bar; with a `phase` that is no "run", nothing is counted yet and `doing` says
        what goes on."""
        if info.get("phase", "run") != "run":
            self._spinner.update(text=f"{info.get('doing') or info['phase']} ...")
            return
        if not self._counts:
            self.reset(self._task, total=total)  # the time left follows from what is counted
            self._counts = True
        more = " ".join(v if isinstance(v, str) else f"{k}={show.number(v)}" for k, v in info.items() if _shown(k, v))
        self.update(self._task, completed=done, total=total, more=more)


def _shown(name: str, value: object) -> bool:
    return name != "phase" and isinstance(value, str | int | float) and not isinstance(value, bool)


__all__ = ["Bar"]
