"""What all charts share: the `Chart` value, layout, log ticks, thinning; no streamlit, no files.

Invariants
* A `Chart` is a plotly figure, the finding in words (`alt`) and the rows behind it (`table`), one source for all.
* Every axis title has its unit; ranges are explicit where a label or a log axis could stretch them.
* Measured is blue, solid, circles; predicted is orange, dashed or hatched, diamonds: never colour alone.
* Nothing missing is drawn as 0; no line has more than about `MAX_POINTS` points, and the alt text says so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import plotly.graph_objects as go

from twinfer.dashboard import theme

MAX_POINTS = 1200
LABEL_CHARS = 34


@dataclass(frozen=True, slots=True)
class Chart:
    """A figure, its finding in words, and the data behind it (rows of column -> value)."""

    figure: go.Figure
    alt: str
    table: list[dict[str, Any]] = field(default_factory=list)


def finish(figure: go.Figure, height: int, *, legend: bool = True, top: int = 34) -> go.Figure:
    figure.update_layout(
        height=height,
        margin={"l": 8, "r": 12, "t": top, "b": 8},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        showlegend=legend,
        legend={
            "orientation": "h", "x": 0, "xanchor": "left", "y": 1, "yanchor": "bottom",
            "yref": "paper", "traceorder": "normal", "title": None, "tracegroupgap": 0,
        },
        hoverlabel={"namelength": -1},
        uirevision="keep",
    )  # fmt: skip
    figure.update_xaxes(gridcolor=theme.GRID, zeroline=False, automargin=True, title_standoff=8)
    figure.update_yaxes(gridcolor=theme.GRID, zeroline=False, automargin=True, title_standoff=8)
    return figure


def short(label: str, limit: int = LABEL_CHARS) -> str:
    """`label` cut to `limit` characters; tables and hover text keep all of it."""
    return label if len(label) <= limit else label[: limit - 1].rstrip() + "…"


def escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def log_ticks(axis: Sequence[float]) -> list[float]:
    """Round values 1, 2, 5 times a power of ten inside a log10 range; powers only when the range is long."""
    steps = (1, 2, 5) if axis[1] - axis[0] < 2.2 else (1,) if axis[1] - axis[0] > 3.5 else (1, 3)
    found = []
    for power in range(math.floor(axis[0]) - 1, math.ceil(axis[1]) + 1):
        found += [s * 10.0**power for s in steps if axis[0] <= math.log10(s * 10.0**power) <= axis[1]]
    return found


def tick_text(ticks: Sequence[float]) -> list[str]:
    """Labels of round tick values: no trailing zeros, thousands separated."""
    return [f"{tick:,.6g}" for tick in ticks]


def thin(
    x: Sequence[float], y: Sequence[float | None], limit: int = MAX_POINTS
) -> tuple[list[float], list[float | None]]:
    """At most about `limit` points that keep the ends and the extremes of every stretch."""
    if len(x) <= limit:
        return list(x), list(y)
    keep = {0, len(x) - 1}
    size = math.ceil(2 * len(x) / limit)
    for start in range(0, len(x), size):
        known = [i for i in range(start, min(start + size, len(x))) if y[i] is not None]
        if known:
            keep |= {min(known, key=lambda i: y[i]), max(known, key=lambda i: y[i])}  # type: ignore[arg-type, return-value]
    order = sorted(keep)
    return [x[i] for i in order], [y[i] for i in order]
