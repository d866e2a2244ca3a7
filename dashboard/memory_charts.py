"""Charts of memory: what each rank holds, and KV against context. Pure functions, see `charts.py`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from twinfer.core.memory_parts import RankMemory
from twinfer.dashboard import theme
from twinfer.dashboard.charts import Chart, escape, finish, log_ticks, tick_text
from twinfer.dashboard.memory_view import Curve, MemoryView
from twinfer.dashboard.quantities import byte_scale, number

GIB = 2**30
# component -> (colour, hatch): never colour alone
COMPONENTS: Mapping[str, tuple[str, str]] = {
    "weights": (theme.SKY, ""), "activations": (theme.PINK, "."), "libraries": (theme.GREY, "-"),
    "states": (theme.ORANGE, "\\"), "kv": (theme.GREEN, "/"), "outside": (theme.GREY, "+"),
}  # fmt: skip
NAMES = {"kv": "KV blocks", "outside": "context, graphs"}
HATCH = "rgba(40,52,64,0.6)"  # on the colours of the components, in light and dark
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")


def rank_bars(view: MemoryView) -> Chart:
    """Memory of every kind of rank as a stacked bar, the budget and the capacity as lines, an overflow hatched."""
    figure, count = go.Figure(), len(view.ranks)
    rows = [_row(view, rank) for rank in view.ranks]
    for name, (colour, hatch) in COMPONENTS.items():
        sizes = [row[name] / GIB for row in rows]
        if not any(sizes):
            continue
        title = NAMES.get(name, name)
        if name == "kv" and view.budget is None:
            title = "KV of one request"
        figure.add_bar(
            name=title, orientation="h", x=sizes, y=[i + 0.12 for i in range(count)], width=0.4,
            marker={"color": theme.transparent(colour, 0.75), "line": {"color": colour, "width": 1},
                    "pattern": {"shape": hatch, "size": 7, "solidity": 0.2, "fgcolor": HATCH, "fillmode": "overlay"}},
            text=[number(size) if size else "" for size in sizes], textposition="inside", insidetextanchor="middle",
            textangle=0, customdata=[rank.name for rank in view.ranks],
            hovertemplate="%{customdata}<br>" + title + " %{x:.3~g} GiB<extra></extra>",
        )  # fmt: skip
    overflow = [
        max(0.0, rank.held + row["kv"] - rank.ceiling) / GIB for rank, row in zip(view.ranks, rows, strict=True)
    ]
    if view.budget is None:
        figure.add_bar(
            name="over the budget", orientation="h", x=overflow, y=[i + 0.12 for i in range(count)], width=0.52,
            base=[rank.ceiling / GIB for rank in view.ranks],
            marker={"color": theme.transparent(theme.LOSS, 0.15), "line": {"color": theme.LOSS, "width": 2},
                    "pattern": {"shape": "x", "size": 8, "solidity": 0.25, "fgcolor": theme.LOSS}},
            hovertemplate="%{x:.3~g} GiB over the budget<extra></extra>",
        )  # fmt: skip
    device, budget = view.ranks[0].memory / GIB, view.ranks[0].budget / GIB
    for size, dash, name in ((budget, "dash", "budget"), (device, "solid", "device")):
        figure.add_scatter(
            name=f"{name}, {number(size)} GiB", mode="lines", x=[size, size], y=[-0.3, count - 0.5],
            line={"color": theme.QUIET, "width": 2.5, "dash": dash}, hovertemplate=f"{name} %{{x:.4~g}} GiB<extra></extra>",
        )  # fmt: skip
    for index, (rank, over) in enumerate(zip(view.ranks, overflow, strict=True)):
        common = {"y": index - 0.1, "yanchor": "bottom", "xref": "paper", "showarrow": False, "font": {"size": 13}}
        figure.add_annotation(x=0, xanchor="left", text=escape(rank.name), **common)
        if view.budget is None:
            text = f"{number(over)} GiB over" if over else "has room"
            figure.add_annotation(x=1, xanchor="right", text=text, **common)
    ends = [device, *(sum(size for name, size in row.items() if name != "unused") / GIB for row in rows)]
    figure.update_xaxes(range=[0, 1.02 * max(ends)], title_text="memory of a device (GiB)", nticks=6)
    figure.update_yaxes(range=[count - 0.42, -0.62], visible=False)
    finish(figure, 190 + 76 * count)
    figure.update_layout(barmode="stack", uniformtext={"minsize": 11, "mode": "hide"})
    return Chart(figure, _bars_alt(view, overflow), [_bar_row(view, i) for i in range(count)])


def _row(view: MemoryView, rank: RankMemory) -> dict[str, float]:
    row = view.segments(rank)
    return {**row, "outside": row.pop("runtime") + row.pop("graphs")}


def _bars_alt(view: MemoryView, overflow: Sequence[float]) -> str:
    said = []
    for rank, over in zip(view.ranks, overflow, strict=True):
        row = _row(view, rank)
        parts = ", ".join(f"{NAMES.get(n, n)} {number(row[n] / GIB)}" for n in COMPONENTS if row[n])
        end = f", {number(over)} GiB over the budget" if view.budget is None and over else ""
        said.append(f"{rank.name}: {parts} GiB{end}")
    device, budget = view.ranks[0].memory / GIB, view.ranks[0].budget / GIB
    return (
        f"Memory of each rank of {number(device)} GiB with a budget of {number(budget)} GiB. " + "; ".join(said) + "."
    )


def _bar_row(view: MemoryView, index: int) -> dict[str, Any]:
    rank = view.ranks[index]
    row = _row(view, rank)
    return {
        "rank": rank.name, "layers": f"{rank.layers.start}–{rank.layers.stop - 1}",
        **{f"{NAMES.get(name, name)} (GiB)": number(row[name] / GIB) for name in (*COMPONENTS, "unused")},
        "blocks": f"{rank.blocks(view.paging.block_size):,}",
    }  # fmt: skip


def kv_lines(curves: Sequence[Curve], pool: float | None, wanted: int) -> Chart:
    """KV of one sequence against its length, as chosen and otherwise, with the pool it has to fit in.

    pool: bytes of one rank, None when there is none.  wanted: the length that is asked for.
    """
    figure = go.Figure()
    everything = [size for curve in curves for size in curve.sizes] + ([pool] if pool else [])
    scale, unit = byte_scale(max(everything))
    lengths = curves[0].lengths
    for index, curve in enumerate(curves):
        colour = theme.GREEN if curve.chosen else theme.CATEGORICAL[(index + 2) % len(theme.CATEGORICAL)]
        figure.add_scatter(
            name=curve.label, x=list(curve.lengths), y=[size * scale for size in curve.sizes], mode="lines",
            line={"color": colour, "width": 3.5 if curve.chosen else 2, "dash": DASHES[index % len(DASHES)]},
            hovertemplate=f"{escape(curve.label)}<br>%{{x:,.0f}} tokens<br>%{{y:.3~g}} {unit}<extra></extra>",
        )  # fmt: skip
    if pool:
        figure.add_scatter(
            name="KV pool of a rank", x=[lengths[0], lengths[-1]], y=[pool * scale] * 2, mode="lines",
            line={"color": theme.QUIET, "width": 2, "dash": "dash"},
            hovertemplate=f"pool %{{y:.3~g}} {unit}<extra></extra>",
        )  # fmt: skip
    yours = next(curve for curve in curves if curve.chosen)
    at = yours.sizes[list(yours.lengths).index(wanted)]
    figure.add_scatter(
        name=f"{wanted:,} tokens", x=[wanted], y=[at * scale], mode="markers",
        marker={"color": theme.GREEN, "size": 12, "symbol": "circle-open", "line": {"width": 3}},
        hovertemplate=f"yours at %{{x:,.0f}} tokens<br>%{{y:.3~g}} {unit}<extra></extra>",
    )  # fmt: skip
    for update, values, title in (
        (figure.update_xaxes, [float(n) for n in lengths], "context (tokens)"),
        (figure.update_yaxes, [size * scale for size in everything], f"KV of a sequence on a rank ({unit})"),
    ):
        low, high = math.log10(min(values)), math.log10(max(values))
        pad = 0.03 * max(high - low, 0.5)
        axis = [low - pad, high + pad]
        ticks = log_ticks(axis)
        update(type="log", range=axis, tickvals=ticks, ticktext=tick_text(ticks), title_text=title)
    finish(figure, 380)
    said = "; ".join(f"{c.label} {number(c.sizes[list(c.lengths).index(wanted)] * scale)} {unit}" for c in curves)
    alt = f"KV memory of one sequence against its length; at {wanted:,} tokens: {said}."
    table = [
        {"context (tokens)": f"{length:,}", **{f"{c.label} ({unit})": number(c.sizes[i] * scale) for c in curves}}
        for i, length in enumerate(lengths)
        if i % 2 == 0 or length in (wanted, lengths[-1])
    ]
    return Chart(figure, alt, table)
