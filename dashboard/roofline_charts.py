"""The roofline chart: ops of two steps under the roofs of a device. Pure functions, see `charts.py`."""

from __future__ import annotations

import math
from typing import Any

import plotly.graph_objects as go

from twinfer.core.dtypes import dtype_bits
from twinfer.dashboard import theme
from twinfer.dashboard.charts import Chart, escape, finish, log_ticks, tick_text
from twinfer.dashboard.quantities import number, percent
from twinfer.dashboard.roofline_view import Point, RooflineView

PHASES = {"prefill": theme.PINK, "decode": theme.GREEN}
SYMBOLS = {"gemm": "circle", "attention": "diamond", "scan": "star", "elementwise": "square", "gather": "triangle-up"}
WORDS = {
    "gemm": "linears",
    "attention": "attention",
    "scan": "state scans",
    "elementwise": "elementwise",
    "gather": "gathers",
}
TERA = 1e12
LEAST_SHARE = 0.002  # of a step: less is in the table alone
SMALLEST, LARGEST = 7.0, 34.0  # pixels of a marker; its area is its share of time


def roofline(view: RooflineView) -> Chart:
    """Ops as points, roofs by dtype, the trail of a growing batch; below a roof an op reaches only part of it."""
    figure = go.Figure()
    drawn = [p for p in view.points if p.attainable and p.flops and p.share >= LEAST_SHARE]
    bandwidth = view.device.memory_bandwidth
    xs = [p.intensity for p in drawn] + [x for _, x, _ in view.trail]
    roofs = _roofs(view)
    ridges = [peak / bandwidth for _, peak in roofs]
    left, right = math.log10(min(xs) / 1.8), math.log10(max(*xs, *ridges) * 2.2)
    ends = [10**left, 10**right]
    for index, (name, peak) in enumerate(roofs):
        ridge = peak / bandwidth
        figure.add_scatter(
            name=f"{name}: {number(peak / TERA)} TFLOP/s, ridge {number(ridge)}", mode="lines",
            x=[ends[0], ridge, ends[1]] if index == 0 else [ridge, ends[1]],
            y=[ends[0] * bandwidth / TERA, peak / TERA, peak / TERA] if index == 0 else [peak / TERA] * 2,
            line={"color": theme.QUIET, "width": 2, "dash": ("solid", "dash", "dot", "dashdot")[index % 4]},
            hovertemplate=f"{name}: peak {number(peak / TERA)} TFLOP/s<br>ridge at {number(ridge)} FLOP/B<extra></extra>",
        )  # fmt: skip
    figure.add_scatter(
        name=f"decode linears, 1 to {view.batch} rows", mode="lines+markers",
        x=[x for _, x, _ in view.trail], y=[y / TERA for _, _, y in view.trail],
        line={"color": theme.transparent(PHASES["decode"], 0.6), "width": 1.5, "dash": "dot"},
        marker={"size": 5, "color": PHASES["decode"]}, customdata=[rows for rows, _, _ in view.trail],
        hovertemplate="all linears at %{customdata} rows<br>%{x:.3~g} FLOP/B, %{y:.3~g} TFLOP/s<extra></extra>",
    )  # fmt: skip
    for phase, colour in PHASES.items():
        for kind, symbol in SYMBOLS.items():
            chosen = [p for p in drawn if p.phase == phase and p.kind == kind]
            if not chosen:
                continue
            figure.add_scatter(
                name=f"{phase} {WORDS[kind]}", mode="markers", x=[p.intensity for p in chosen],
                y=[p.achieved / TERA for p in chosen],
                marker={"symbol": symbol, "color": theme.transparent(colour, 0.7), "line": {"color": colour, "width": 1.5},
                        "size": [max(SMALLEST, LARGEST * math.sqrt(p.share)) for p in chosen]},
                customdata=[[p.name, number(1e6 * p.seconds), percent(p.share, signed=False), p.bound,
                             percent(p.achieved / p.attainable, signed=False)] for p in chosen],
                hovertemplate=f"{phase}: %{{customdata[0]}}<br>%{{customdata[1]}} µs, %{{customdata[2]}} of the step<br>"
                "%{x:.3~g} FLOP/B, %{y:.3~g} TFLOP/s<br>%{customdata[3]}-bound, at %{customdata[4]} of its roof<extra></extra>",
            )  # fmt: skip
    ys = [p.achieved / TERA for p in drawn] + [y / TERA for _, _, y in view.trail] + [peak / TERA for _, peak in roofs]
    ys.append(ends[0] * bandwidth / TERA)
    bottom, top = math.log10(min(ys) / 1.5), math.log10(max(ys) * 1.5)
    for update, axis, title in (
        (figure.update_xaxes, [left, right], "FLOP per byte moved (FLOP/B)"),
        (figure.update_yaxes, [bottom, top], "reached (TFLOP/s)"),
    ):
        ticks = log_ticks(axis)
        update(type="log", range=axis, tickvals=ticks, ticktext=tick_text(ticks), title_text=title)
    finish(figure, 520)
    return Chart(figure, _alt(view), [_row(p) for phase in PHASES for p in view.step(phase)])


def _roofs(view: RooflineView) -> list[tuple[str, float]]:
    """(dtypes, peak) of the device, highest first: of what the linears compute in, and of 16 bits and less."""
    peaks: dict[float, list[str]] = {}
    for dtype, peak in view.device.peak_flops.items():
        if dtype in view.dtypes or dtype_bits(dtype) <= 16:
            peaks.setdefault(float(peak), []).append(dtype)
    peaks = peaks or {max(view.device.peak_flops.values()): ["peak"]}
    return sorted(((", ".join(map(escape, names)), peak) for peak, names in peaks.items()), key=lambda roof: -roof[1])


def _alt(view: RooflineView) -> str:
    parts = []
    for phase in PHASES:
        first = view.step(phase)[0]
        parts.append(
            f"{phase} takes {number(1e3 * view.seconds(phase))} ms, most of it in {first.name} "
            f"({percent(first.share, signed=False)}, {first.bound}-bound)"
        )
    return f"Ops of {view.device.name} under its roofs, FLOP/s reached against FLOP per byte. " + "; ".join(parts) + "."


def _row(point: Point) -> dict[str, Any]:
    has_roof = bool(point.attainable and point.flops)
    return {
        "step": point.phase, "op": point.name, "time (µs)": number(1e6 * point.seconds),
        "share": percent(point.share, signed=False), "FLOP/B": number(point.intensity) if has_roof else "none",
        "reached (TFLOP/s)": number(point.achieved / TERA) if has_roof else "none",
        "of its roof": percent(point.achieved / point.attainable, signed=False) if has_roof else "none",
        "bound by": point.bound, "source": point.source,
    }  # fmt: skip
