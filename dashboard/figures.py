"""Charts that compare: technique combinations, and a real run with its prediction. Pure functions, see `charts.py`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from twinfer.core.compare import MetricPair, compare
from twinfer.core.records import RequestRecord, RunRecord
from twinfer.dashboard import theme
from twinfer.dashboard.charts import MAX_POINTS, Chart, escape, finish, log_ticks, short, tick_text
from twinfer.dashboard.quantities import BY_KEY, Band, Quantity, improvement, number, percent, shown


@dataclass(frozen=True, slots=True)
class Bar:
    """One technique combination: predicted and measured value of a metric, in the record's unit."""

    label: str
    predicted: float | None = None
    band: Band | None = None
    measured: float | None = None
    baseline: bool = False
    note: str = ""


@dataclass(frozen=True, slots=True)
class Pair:
    """One metric of two runs, as `core.compare` joined them, with how to show it."""

    quantity: Quantity
    metric: MetricPair

    @property
    def measured(self) -> float | None:
        return self.metric.real

    @property
    def predicted(self) -> float | None:
        return self.metric.predicted

    @property
    def band(self) -> Band | None:
        return self.metric.interval

    @property
    def error(self) -> float | None:
        """(predicted - measured) / measured."""
        return self.metric.error

    @property
    def covered(self) -> bool | None:
        """The measured value lies inside the band; None without a band."""
        return self.metric.inside


# --- technique combinations ---------------------------------------------------------------------


def _row_labels(figure: go.Figure, rows: Sequence[tuple[str, str]]) -> None:
    """A line of text over each row: what it is on the left, its value on the right."""
    for index, (left, right) in enumerate(rows):
        common = {"y": index - 0.13, "yanchor": "bottom", "xref": "paper", "showarrow": False, "font": {"size": 13}}
        figure.add_annotation(x=0, xanchor="left", text=left, **common)
        figure.add_annotation(x=1, xanchor="right", text=right, **common)


def technique_bars(bars: Sequence[Bar], quantity: Quantity, *, stale: bool = False) -> Chart:
    """Value of one metric for each technique combination, predicted with its 80 % band and measured."""
    figure = go.Figure()
    count = len(bars)
    scale = quantity.scale
    predicted = [None if bar.predicted is None else bar.predicted * scale for bar in bars]
    measured = [None if bar.measured is None else bar.measured * scale for bar in bars]
    has_predicted, has_measured = any(v is not None for v in predicted), any(v is not None for v in measured)
    width = 0.24 if has_predicted and has_measured else 0.36
    slots = {"measured": 0.02 if has_predicted else 0.08, "predicted": 0.28 if has_measured else 0.08}
    opacity = 0.35 if stale else 1.0
    labels = [bar.label for bar in bars]
    if has_measured:
        figure.add_bar(
            name="measured", orientation="h", x=measured, y=[i + slots["measured"] for i in range(count)],
            width=width, marker={"color": theme.MEASURED, "line": {"width": 0}}, opacity=opacity, customdata=labels,
            hovertemplate="%{customdata}<br>measured %{x:.3~g} " + quantity.unit + "<extra></extra>",
        )  # fmt: skip
    if has_predicted:
        bands = [bar.band for bar in bars]
        error = None
        if any(band is not None for band in bands):
            pairs = list(zip(predicted, bands, strict=True))
            error = {
                "type": "data", "symmetric": False, "thickness": 1.5, "width": 4, "color": theme.QUIET,
                "array": [0 if b is None or p is None else max(0, b[1] * scale - p) for p, b in pairs],
                "arrayminus": [0 if b is None or p is None else max(0, p - b[0] * scale) for p, b in pairs],
            }  # fmt: skip
        figure.add_bar(
            name="predicted", orientation="h", x=predicted, y=[i + slots["predicted"] for i in range(count)],
            width=width, error_x=error, opacity=opacity, customdata=labels,
            marker={
                "color": theme.transparent(theme.PREDICTED, 0.28),
                "line": {"color": theme.PREDICTED, "width": 1.5},
                "pattern": {"shape": "/", "size": 7, "solidity": 0.18, "fgcolor": theme.PREDICTED, "fgopacity": 0.9},
            },
            hovertemplate="%{customdata}<br>predicted %{x:.3~g} " + quantity.unit + "<extra></extra>",
        )  # fmt: skip
    rows = []
    for bar in bars:
        value = bar.measured if bar.measured is not None else bar.predicted
        text = shown(quantity, value)
        if bar.note and value is None:
            text = bar.note
        name = escape(short(bar.label))
        rows.append((f"<b>{name}</b>" if bar.baseline else name, escape(text)))
    _row_labels(figure, rows)
    highs = [v for v in (*predicted, *measured) if v is not None]
    highs += [bar.band[1] * scale for bar in bars if bar.band is not None and bar.predicted is not None]
    top = max(highs, default=1.0) or 1.0
    figure.update_xaxes(range=[0, top * 1.04], title_text=quantity.title, nticks=6)
    figure.update_yaxes(range=[count - 0.42, -0.62], visible=False)
    finish(figure, 96 + 72 * max(1, count))
    figure.update_layout(barmode="overlay")
    return Chart(figure, _bars_alt(bars, quantity), [_bar_row(bar, quantity, bars) for bar in bars])


def _base(bars: Sequence[Bar]) -> Bar | None:
    return next((bar for bar in bars if bar.baseline), None)


def _bar_row(bar: Bar, quantity: Quantity, bars: Sequence[Bar]) -> dict[str, Any]:
    base = _base(bars)
    row: dict[str, Any] = {
        "combination": bar.label,
        f"predicted ({quantity.unit})" if quantity.unit else "predicted": shown(quantity, bar.predicted, unit=False),
        "80 % band": "none" if bar.band is None
        else f"{number(bar.band[0] * quantity.scale)}–{number(bar.band[1] * quantity.scale)}",
        f"measured ({quantity.unit})" if quantity.unit else "measured": shown(quantity, bar.measured, unit=False),
    }  # fmt: skip
    if base is not None:
        row["predicted, better than baseline"] = percent(improvement(quantity, bar.predicted, base.predicted))
        row["measured, better than baseline"] = percent(improvement(quantity, bar.measured, base.measured))
    return row


def _bars_alt(bars: Sequence[Bar], quantity: Quantity) -> str:
    parts = []
    for bar in bars:
        said = [f"{w} {shown(quantity, v)}" for w, v in (("measured", bar.measured), ("predicted", bar.predicted))
                if v is not None]  # fmt: skip
        parts.append(f"{bar.label}: {', '.join(said) or bar.note or 'no value'}")
    return f"{quantity.label} by technique combination. " + "; ".join(parts) + "."


def change_bars(bars: Sequence[Bar], quantity: Quantity, *, stale: bool = False) -> Chart:
    """How much better (right, blue) or worse (left, vermilion, hatched) than the baseline each combination is."""
    base = _base(bars)
    rest = [bar for bar in bars if not bar.baseline]
    figure = go.Figure()
    found: list[tuple[Bar, str, float]] = []
    labels = []
    for bar in rest:
        real = improvement(quantity, bar.measured, base.measured if base else None)
        guess = improvement(quantity, bar.predicted, base.predicted if base else None)
        said = []
        for world, value in (("measured", real), ("predicted", guess)):
            if value is not None:
                found.append((bar, world, value))
                said.append(percent(value))
        labels.append((escape(short(bar.label)), said[0] if said else "no value"))
    both = len({world for _, world, _ in found}) == 2
    index = {bar.label: i for i, bar in enumerate(rest)}
    for world in ("measured", "predicted"):
        for gain in (True, False):
            chosen = [(bar, v) for bar, w, v in found if w == world and (v >= 0) == gain]
            if not chosen:
                continue
            colour = theme.GAIN if gain else theme.LOSS
            offset = 0.08 if not both else (0.02 if world == "measured" else 0.28)
            figure.add_bar(
                name=f"{'better' if gain else 'worse'}, {world}", orientation="h",
                x=[100 * v for _, v in chosen], y=[index[bar.label] + offset for bar, _ in chosen],
                width=0.24 if both else 0.36, opacity=0.35 if stale else 1.0,
                marker={
                    "color": colour if world == "measured" else theme.transparent(colour, 0.38),
                    "line": {"color": colour, "width": 1.5},
                    "pattern": {} if gain else {"shape": "x", "fillmode": "overlay", "size": 7, "solidity": 0.2, "fgcolor": "#F7E3D6"},
                },
                customdata=[f"{bar.label}<br>{world} {percent(v)}" for bar, v in chosen],
                hovertemplate="%{customdata}<extra></extra>",
            )  # fmt: skip
    _row_labels(figure, labels)
    values = [100 * v for _, _, v in found]
    low, high = min([0.0, *values]), max([0.0, *values])
    span = (high - low) or 1.0
    figure.update_xaxes(range=[low - 0.06 * span, high + 0.06 * span], ticksuffix=" %", nticks=6,
                        title_text=f"{quantity.label}: worse ← than baseline → better (%)")  # fmt: skip
    for i in range(len(rest)):  # beside the bars only: a full line would cross the labels
        figure.add_shape(
            type="line",
            x0=0,
            x1=0,
            y0=i - 0.12,
            y1=i + (0.42 if both else 0.28),
            line={"color": theme.QUIET, "width": 1.5},
        )
    figure.update_yaxes(range=[len(rest) - 0.42, -0.62], visible=False)
    finish(figure, 96 + 72 * max(1, len(rest)))
    figure.update_layout(barmode="overlay")
    parts = [f"{bar.label} {world} {percent(v)}" for bar, world, v in found]
    alt = f"{quantity.label}, improvement over the baseline {base.label if base else ''}. " + "; ".join(parts) + "."
    table = [{"combination": bar.label, "world": world, "better than baseline": percent(v)} for bar, world, v in found]
    return Chart(figure, alt, table)


# --- real against predicted ---------------------------------------------------------------------


def ratio_dots(pairs: Sequence[Pair]) -> Chart:
    """Paired dots on one axis: predicted / measured of each metric, measured at 1, with the 80 % band."""
    usable = [pair for pair in pairs if pair.error is not None and pair.measured]
    figure = go.Figure()
    rows = [pair.quantity.label for pair in usable]
    ratios = [1 + (pair.error or 0.0) for pair in usable]
    for pair, ratio in zip(usable, ratios, strict=True):
        figure.add_scatter(
            x=[1, ratio], y=[pair.quantity.label] * 2, mode="lines", showlegend=False, hoverinfo="skip",
            line={"color": theme.QUIET, "width": 2},
        )  # fmt: skip
    banded = [(p, r) for p, r in zip(usable, ratios, strict=True) if p.band is not None and p.measured]
    if banded:
        figure.add_scatter(
            name="80 % band", mode="markers", x=[r for _, r in banded], y=[p.quantity.label for p, _ in banded],
            marker={"color": "rgba(0,0,0,0)", "size": 1}, hoverinfo="skip", showlegend=False,
            error_x={
                "type": "data", "symmetric": False, "thickness": 7, "width": 0,
                "color": theme.transparent(theme.PREDICTED, 0.35),
                "array": [max(0.0, p.band[1] / p.measured - r) for p, r in banded],  # type: ignore[index, operator]
                "arrayminus": [max(0.0, r - p.band[0] / p.measured) for p, r in banded],  # type: ignore[index, operator]
            },
        )  # fmt: skip
    figure.add_scatter(
        name="measured", x=[1] * len(usable), y=rows, mode="markers",
        marker={"color": theme.MEASURED, "size": 11, "symbol": "circle"},
        customdata=[shown(p.quantity, p.measured) for p in usable],
        hovertemplate="%{y}<br>measured %{customdata}<extra></extra>",
    )  # fmt: skip
    figure.add_scatter(
        name="predicted, with 80 % band" if banded else "predicted", x=ratios, y=rows, mode="markers",
        marker={"color": theme.PREDICTED, "size": 12, "symbol": "diamond", "line": {"width": 1, "color": theme.QUIET}},
        customdata=[[shown(p.quantity, p.predicted), percent(p.error)] for p in usable],
        hovertemplate="%{y}<br>predicted %{customdata[0]}, error %{customdata[1]}<extra></extra>",
    )  # fmt: skip
    edges = [1.0, *ratios]
    for pair, _ in banded:
        edges += [pair.band[0] / pair.measured, pair.band[1] / pair.measured]  # type: ignore[index, operator]
    low, high = min(0.9, *edges), max(1.1, *edges)
    title = "predicted / measured (ratio, 1 is exact)"
    if low > 0 and high / low > 4:  # twice as much and half as much are equally wrong
        pad = 0.04 * math.log10(high / low)
        axis = [math.log10(low) - pad, math.log10(high) + pad]
        ticks = log_ticks(axis)
        figure.update_xaxes(type="log", range=axis, tickvals=ticks, ticktext=tick_text(ticks), title_text=title)
    else:
        pad = 0.06 * (high - low)
        figure.update_xaxes(range=[low - pad, high + pad], title_text=title, nticks=7)
    figure.update_yaxes(autorange="reversed", title_text=None)
    figure.add_vline(x=1, line={"color": theme.QUIET, "width": 1, "dash": "dot"})
    finish(figure, 90 + 38 * max(2, len(usable)))
    said = "; ".join(f"{p.quantity.label} {percent(p.error)}" for p in usable) or "no metric in both runs"
    return Chart(figure, f"Error of the prediction by metric: {said}.", [_pair_row(pair) for pair in pairs])


def _pair_row(pair: Pair) -> dict[str, Any]:
    q = pair.quantity
    band = "none" if pair.band is None else f"{number(pair.band[0] * q.scale)}–{number(pair.band[1] * q.scale)}"
    inside = {None: "no band", True: "inside", False: "outside"}[pair.covered]
    return {
        "metric": q.label, "unit": q.unit or "count", "measured": shown(q, pair.measured, unit=False),
        "predicted": shown(q, pair.predicted, unit=False) if pair.predicted is not None else "not predicted",
        "error": percent(pair.error) if pair.error is not None else "none", "80 % band": band,
        "measured in band": inside,
    }  # fmt: skip


_PARITY: tuple[tuple[str, Callable[[RequestRecord], float | None], str, str], ...] = (
    ("TTFT", lambda r: r.ttft, theme.BLUE, "circle"),
    ("TPOT", lambda r: r.tpot, theme.GREEN, "square"),
    ("E2E", lambda r: r.e2e, theme.PINK, "triangle-up"),
)


def parity(measured: RunRecord, predicted: RunRecord) -> Chart:
    """Each request's TTFT, TPOT and E2E, predicted against measured, log-log, with the ±20 % lines."""
    other = {(r.request_id, r.index): r for r in predicted.requests}
    figure = go.Figure()
    table: list[dict[str, Any]] = []
    everything: list[float] = []
    said = []
    for name, read, colour, symbol in _PARITY:
        points = []
        for request in measured.requests:
            twin = other.get((request.request_id, request.index))
            x, y = read(request), None if twin is None else read(twin)
            if x is not None and y is not None and x > 0 and y > 0:
                points.append((request.request_id, 1e3 * x, 1e3 * y))
        if not points:
            continue
        mape = sum(abs(y - x) / x for _, x, y in points) / len(points)
        bias = sum((y - x) / x for _, x, y in points) / len(points)
        said.append(f"{name} error {percent(mape, signed=False)}, bias {percent(bias)}, n = {len(points)}")
        table.append({
            "metric": name, "requests": len(points), "mean absolute error": percent(mape, signed=False),
            "signed bias": percent(bias),
        })  # fmt: skip
        everything += [v for _, x, y in points for v in (x, y)]
        kept = points[:: max(1, math.ceil(len(points) / MAX_POINTS))]
        figure.add_scatter(
            name=name, mode="markers", x=[p[1] for p in kept], y=[p[2] for p in kept],
            marker={"color": theme.transparent(colour, 0.75), "symbol": symbol, "size": 9,
                    "line": {"width": 1, "color": theme.QUIET}},
            customdata=[p[0] for p in kept],
            hovertemplate=f"{name} of %{{customdata}}<br>measured %{{x:.3~g}} ms<br>predicted %{{y:.3~g}} ms<extra></extra>",
        )  # fmt: skip
    low, high = (min(everything), max(everything)) if everything else (1.0, 10.0)
    pad = max(0.06 * math.log10(high / low), 0.04) if high > low else 0.2
    axis = [math.log10(low) - pad, math.log10(high) + pad]
    ends = [10**v for v in axis]
    for factor, dash, name in ((1.0, "solid", "exact"), (1.2, "dot", "±20 %"), (1 / 1.2, "dot", "−20 %")):
        figure.add_scatter(
            name=name, x=ends, y=[v * factor for v in ends], mode="lines", hoverinfo="skip",
            showlegend=factor >= 1, line={"color": theme.QUIET, "width": 1.5, "dash": dash},
        )  # fmt: skip
    ticks = log_ticks(axis)
    common = {"type": "log", "range": axis, "tickvals": ticks, "ticktext": tick_text(ticks)}
    figure.update_xaxes(title_text="measured (ms)", **common)
    figure.update_yaxes(title_text="predicted (ms)", **common)
    finish(figure, 420)
    return Chart(
        figure, "Predicted against measured per request: " + ("; ".join(said) or "no shared request") + ".", table
    )


def pairs_of(measured: RunRecord, predicted: RunRecord) -> list[Pair]:
    """The metrics both pages and the command line show, in display order, joined by `core.compare`."""
    joined = {pair.name: pair for pair in compare(measured, predicted).pairs}
    empty = MetricPair(name="", real=None, predicted=None, error=None)
    return [Pair(quantity, joined.get(key, empty)) for key, quantity in BY_KEY.items()]
