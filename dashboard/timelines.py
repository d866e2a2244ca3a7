"""Charts over the time of a run: steps, memory, ops; measured and predicted on shared axes. Pure, see `charts.py`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from twinfer.core.records import RunRecord, StepRecord
from twinfer.dashboard import theme
from twinfer.dashboard.charts import MAX_POINTS, Chart, finish, log_ticks, thin, tick_text
from twinfer.dashboard.quantities import byte_scale, number, percent


def _held(
    steps: Sequence[StepRecord], read: Callable[[StepRecord], float], idle: float | None = 0
) -> tuple[list[float], list[float | None]]:
    """A step function: the value from each step's start to its end, `idle` while nothing ran between steps."""
    x: list[float] = []
    y: list[float | None] = []
    for i, step in enumerate(steps):
        x.append(step.start)
        y.append(read(step))
        end = step.start + step.seconds
        last = i + 1 == len(steps)
        if last or steps[i + 1].start - end > max(0.02, 2 * step.seconds):
            x += [end, end]
            y += [read(step), idle]
    return thin(x, y)


_STYLE: dict[str, dict[str, Any]] = {
    "measured": {"color": theme.MEASURED, "width": 2, "dash": "solid"},
    "predicted": {"color": theme.PREDICTED, "width": 2, "dash": "5px,2px"},
}


def _named(measured: RunRecord | None, predicted: RunRecord | None) -> list[tuple[str, RunRecord]]:
    pairs = (("measured", measured), ("predicted", predicted))
    return [(name, record) for name, record in pairs if record is not None and record.steps]


def _by_step(
    steps: Sequence[StepRecord], read: Callable[[StepRecord], float]
) -> tuple[list[float], list[float | None]]:
    """The value of each step, over its number in the run (0, 1, 2, ...)."""
    return thin([float(i) for i in range(len(steps))], [read(step) for step in steps])


def step_timeline(measured: RunRecord | None, predicted: RunRecord | None, *, by: str = "time") -> Chart:
    """Batch size, tokens and time of each step, both worlds on one axis.

    by: "time" since the first arrival, or "step": equal plans lie on each other whatever their steps took.
    """
    lanes: tuple[tuple[str, Callable[[StepRecord], float]], ...] = (
        ("rows in the batch", lambda s: s.num_rows),
        ("tokens per step", lambda s: s.num_tokens),
        ("step time (ms)", lambda s: 1e3 * s.seconds),
    )
    where = "step %{x:.0f}" if by == "step" else "%{x:.3~g} s"
    figure = make_subplots(rows=3, cols=1, shared_xaxes=True, vertical_spacing=0.06)
    table: list[dict[str, Any]] = []
    said = []
    cut = False
    step_times: list[float] = []
    for world, record in _named(measured, predicted):
        cut = cut or len(record.steps) > MAX_POINTS
        for row, (lane, read) in enumerate(lanes, start=1):
            if by == "step":
                x, y = _by_step(record.steps, read)
            else:
                x, y = _held(record.steps, read, idle=0 if row < 3 else None)
            if row == 3:
                step_times += [v for v in y if v]
            figure.add_scatter(
                x=x, y=y, row=row, col=1, name=world, legendgroup=world, showlegend=row == 1, mode="lines",
                line={**_STYLE[world], "shape": "hv", "width": 2 if row < 3 else 1.5},
                hovertemplate=f"{world}, {where}<br>{lane} %{{y:.3~g}}<extra></extra>",
            )  # fmt: skip
        times = sorted(1e3 * s.seconds for s in record.steps)
        end = record.steps[-1].start + record.steps[-1].seconds
        median = times[len(times) // 2]
        said.append(f"{world}: {len(record.steps)} steps in {number(end)} s, median step {number(median)} ms")
        table.append({
            "world": world, "steps": len(record.steps), "run time (s)": number(end),
            "mean rows": number(sum(s.num_rows for s in record.steps) / len(record.steps)),
            "mean tokens per step": number(sum(s.num_tokens for s in record.steps) / len(record.steps)),
            "median step (ms)": number(median), "longest step (ms)": number(times[-1]),
        })  # fmt: skip
    for row, (lane, _) in enumerate(lanes, start=1):
        figure.update_yaxes(title_text=lane, rangemode="tozero", nticks=4, row=row, col=1)
    if step_times:
        low, high = min(step_times), max(step_times)
        if high / low > 12:
            pad = 0.05 * math.log10(high / low)
            axis = [math.log10(low) - pad, math.log10(high) + pad]
            ticks = log_ticks(axis)
            figure.update_yaxes(type="log", range=axis, tickvals=ticks, ticktext=tick_text(ticks), row=3, col=1)
    title = "step (number in the run)" if by == "step" else "time since the first arrival (s)"
    figure.update_xaxes(title_text=title, row=3, col=1)
    finish(figure, 540)
    note = f" Thinned to about {MAX_POINTS} points a line; extremes kept." if cut else ""
    return Chart(
        figure, ("Steps by number. " if by == "step" else "Steps over time. ") + "; ".join(said) + "." + note, table
    )


def memory_timeline(measured: RunRecord | None, predicted: RunRecord | None) -> Chart:
    """KV memory reserved and really used over time, both worlds; the gap is waste."""
    worlds = _named(measured, predicted)

    def reserved(record: RunRecord) -> Callable[[StepRecord], float]:
        return lambda s: s.held_blocks * s.block_size * record.kv_bytes_per_token

    def used(record: RunRecord) -> Callable[[StepRecord], float]:
        return lambda s: s.used_slots * record.kv_bytes_per_token

    peak = max((reserved(record)(s) for _, record in worlds for s in record.steps), default=0.0)
    factor, unit = byte_scale(peak)
    figure = go.Figure()
    table: list[dict[str, Any]] = []
    said = []
    for world, record in worlds:
        for kind, read in (("used", used(record)), ("reserved", reserved(record))):
            x, y = _held(record.steps, read)
            fill = kind == "used" and world == worlds[0][0]  # two fills would blend into a third colour
            line = dict(_STYLE[world], shape="hv")
            if kind == "used":
                line |= {"width": 1.5, "dash": "solid" if world == "measured" else "dot"}
            figure.add_scatter(
                name=f"{kind}, {world}", x=x, y=[None if v is None else v * factor for v in y], mode="lines",
                line=line, fill="tozeroy" if fill else None,
                fillcolor=theme.transparent(_STYLE[world]["color"], 0.16) if fill else None,
                hovertemplate=f"{world}, %{{x:.3~g}} s<br>{kind} %{{y:.3~g}} {unit}<extra></extra>",
            )  # fmt: skip
        top = max(reserved(record)(s) for s in record.steps)
        top_used = max(used(record)(s) for s in record.steps)
        waste = record.metrics.get("kv_waste")
        pool = record.steps[-1].total_blocks * record.steps[-1].block_size * record.kv_bytes_per_token
        said.append(f"{world}: peak reserved {number(top * factor)} {unit}, peak used {number(top_used * factor)} {unit}, "
                    f"waste {percent(waste, signed=False)}")  # fmt: skip
        table.append({
            "world": world, f"peak reserved ({unit})": number(top * factor), f"peak used ({unit})": number(top_used * factor),
            f"pool ({unit})": number(pool * factor), "KV waste": percent(waste, signed=False),
        })  # fmt: skip
        if world == worlds[0][0] and 0 < pool <= 1.15 * peak:
            figure.add_hline(y=pool * factor, line={"color": theme.QUIET, "width": 1.5, "dash": "dash"})
            figure.add_annotation(x=1, xref="paper", xanchor="right", y=pool * factor, yanchor="bottom",
                                  text="pool size", showarrow=False, font={"size": 12})  # fmt: skip
    figure.update_xaxes(title_text="time since the first arrival (s)")
    figure.update_yaxes(title_text=f"KV memory ({unit})", rangemode="tozero", nticks=6)
    finish(figure, 340)
    return Chart(figure, "KV memory over time. " + "; ".join(said) + ".", table)


def op_bars(measured: RunRecord | None, predicted: RunRecord | None, limit: int = 10) -> Chart | None:
    """Seconds of the run by op name, joined over both worlds; None when neither recorded ops."""
    totals: dict[str, dict[str, float]] = {}
    for world, record in _named(measured, predicted):
        for step in record.steps:
            for name, seconds in step.ops.items():
                totals.setdefault(name, {})[world] = totals.get(name, {}).get(world, 0.0) + seconds
    if not totals:
        return None
    names = sorted(totals, key=lambda n: -max(totals[n].values()))
    top, rest = names[:limit], names[limit:]
    if rest:
        totals["other ops"] = {
            w: sum(totals[n].get(w, 0.0) for n in rest)
            for w in ("measured", "predicted")
            if any(w in totals[n] for n in rest)
        }
        top.append("other ops")
    figure = go.Figure()
    for world in ("measured", "predicted"):
        if not any(world in totals[n] for n in top):
            continue
        style: dict[str, Any] = {"color": theme.MEASURED}
        if world == "predicted":
            style = {"color": theme.transparent(theme.PREDICTED, 0.28), "line": {"color": theme.PREDICTED, "width": 1.5},
                     "pattern": {"shape": "/", "size": 7, "solidity": 0.18, "fgcolor": theme.PREDICTED}}  # fmt: skip
        figure.add_bar(
            name=world, orientation="h", x=[totals[n].get(world) for n in top], y=top, marker=style,
            hovertemplate=f"%{{y}}<br>{world} %{{x:.3~g}} s<extra></extra>",
        )  # fmt: skip
    figure.update_xaxes(title_text="time in the run (s)", rangemode="tozero", nticks=6)
    figure.update_yaxes(autorange="reversed")
    finish(figure, 90 + 34 * len(top))
    figure.update_layout(barmode="group", bargap=0.25)
    table = []
    for n in top:
        real, guess = totals[n].get("measured"), totals[n].get("predicted")
        error = None if not real or guess is None else (guess - real) / real
        table.append({
            "op": n, "measured (s)": number(real), "predicted (s)": number(guess) if guess is not None else "not predicted",
            "error": percent(error) if error is not None else "none",
        })  # fmt: skip
    alt = "Time by op: " + "; ".join(
        f"{r['op']} measured {r['measured (s)']}, predicted {r['predicted (s)']} s" for r in table[:5]
    )
    return Chart(figure, alt + ".", table)
