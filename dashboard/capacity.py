"""What the Capacity page asks and shows, as data and charts; no streamlit.

A question is made of the scenario (model, techniques, lengths) and its `plan_*` fields; the answer is the JSON of
`simulator/plan.py`.

Invariants
* The question of a scenario is the one that `twinfer plan` would ask; equal scenarios have equal keys.
* A fleet without a price is never drawn on an axis of money.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

from twinfer.core.catalog import resolve_spec
from twinfer.core.errors import ConfigError
from twinfer.core.goal import Goal, parse_goals
from twinfer.core.registry import Registry
from twinfer.core.workload import make_workload
from twinfer.dashboard import theme
from twinfer.dashboard.charts import Chart, escape, finish, short
from twinfer.dashboard.explain import in_controls
from twinfer.dashboard.quantities import number, percent
from twinfer.dashboard.scenario import KINDS, Scenario
from twinfer.simulator.plan_file import SCHEMA
from twinfer.simulator.plan_space import (
    DEFAULT_SEQS,
    DEFAULT_TOKENS,
    DEFAULT_TP,
    Question,
    check_question,
    default_devices,
)

MAX_REPLICAS = 64
EXAMPLE: Mapping[str, Any] = {
    "model": "llama-3.1-70b", "input_len": 1000, "output_len": 200, "spread": 0.5, "shared_prefix": 0, "plan_rate": 6.0,
    "plan_ttft": 1.0, "plan_tpot": 50.0, "plan_percentile": 95, "plan_devices": "", "plan_trace": "",
    "images_per_request": 0.0,
}  # fmt: skip


def question_of(scenario: Scenario, registry: Registry) -> Question:
    """What the page asks for `scenario`. Raises ConfigError that names the option, ModelError."""
    names = tuple(n for n in scenario.plan_devices.split(",") if n) or default_devices(registry)
    promises = [(scenario.plan_ttft, "ttft", "s"), (scenario.plan_tpot, "tpot", "ms")]
    goals = parse_goals(
        f"{metric}.p{scenario.plan_percentile}<={limit!r}{unit}" for limit, metric, unit in promises if limit
    )
    scenario.refuse_unseen(resolve_spec(scenario.model))
    for kind in KINDS:
        if getattr(scenario, kind) is not None:
            registry.build(kind, getattr(scenario, kind))
    if scenario.plan_trace:
        if not os.path.exists(scenario.plan_trace):
            raise ConfigError("--trace", scenario.plan_trace, "no such file", "check the path")
        traffic = {"trace": scenario.plan_trace, "rate_scale": scenario.plan_scale}
    else:
        traffic = {
            "num_requests": scenario.plan_requests, "rate": scenario.plan_rate, "input_len": scenario.input_len,
            "output_len": scenario.output_len, "lengths": "uniform" if scenario.spread else "fixed",
            "spread": scenario.spread, "shared_prefix": scenario.shared_prefix,
        }  # fmt: skip
    traffic |= scenario.images()
    base: dict[str, Any] = {"model": scenario.model}
    base |= {kind: getattr(scenario, kind) for kind in KINDS if getattr(scenario, kind) is not None}
    question = Question(
        base=base,
        axes={
            "device": names, "tp": DEFAULT_TP, "max_num_seqs": DEFAULT_SEQS, "max_num_batched_tokens": DEFAULT_TOKENS
        },
        workload=make_workload(**traffic, seed=scenario.seed), goals=goals, max_replicas=MAX_REPLICAS,
    )  # fmt: skip
    check_question(question, registry)
    return question


def line_of(scenario: Scenario) -> str:
    """What is asked, in one line."""
    traffic = f"{scenario.plan_rate:g} req/s, {scenario.input_len}/{scenario.output_len} tokens"
    if scenario.plan_trace:
        traffic = f"{Path(scenario.plan_trace).name} × {scenario.plan_scale:g}"
    elif scenario.spread:
        traffic += f" ±{scenario.spread:.0%}"
    traffic += scenario.images_line()
    promises = [(scenario.plan_ttft, "TTFT", "s"), (scenario.plan_tpot, "TPOT", "ms")]
    words = [f"{name} p{scenario.plan_percentile} ≤ {limit:g} {unit}" for limit, name, unit in promises if limit]
    devices = scenario.plan_devices.replace(",", ", ") or "all device types"
    return " · ".join([scenario.model, traffic, *words, devices])


def key_of(question: Question) -> str:
    """A short name of everything that decides the answer."""
    return hashlib.sha256(json.dumps(question.plain(), sort_keys=True).encode()).hexdigest()[:16]


def read_answer(path: Path) -> dict[str, Any] | None:
    """The plan in a file, None when there is none that can be read (by this version)."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and (found.get("kind"), found.get("schema")) == ("plan", SCHEMA) else None


# --- tables -----------------------------------------------------------------------------------------


def fleet_rows(fleets: Sequence[Mapping[str, Any]], goals: Sequence[Goal]) -> list[dict[str, str]]:
    """One row for every fleet, with units."""
    rows = []
    for fleet in fleets:
        row = {
            "fleet": ("★ " if fleet["on_front"] else "") + fleet["label"], "devices": str(fleet["num_devices"]),
            "US$/h": _money(fleet["cost_per_hour"]), "US$/1M tokens": _money(fleet["cost_per_million"]),
            "goodput (req/s)": _goodput(fleet),
        }  # fmt: skip
        for goal in goals:
            low, high = fleet["band"].get(goal.name, (None, None))
            band = f" ({_ms(low)} to {'far above' if high is None else _ms(high)})" if fleet["band"] else ""
            row[f"{_title(goal)} (ms, 80 % band)"] = _ms(fleet["values"].get(goal.name)) + band
            if fleet["seeds"] > 1:
                row[f"{_title(goal)} of {fleet['seeds']} draws (ms)"] = _draws(fleet["spread"].get(goal.name))
        joules = fleet["joules_per_token"]
        row |= {
            "busy": percent(fleet["busy"], signed=False), "J/token": "not known" if joules is None else number(joules),
            "next limit": fleet["next_limit"],
        }  # fmt: skip
        rows.append(row)
    return rows


def change_rows(changed: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    return [
        {
            "if": row["case"],
            "replicas": "none of those allowed" if row["replicas"] is None else str(row["replicas"]),
            "US$/h": _money(row["cost_per_hour"]),
            "": row["text"],
        }
        for row in changed
    ]


def cheaper_rows(cheaper: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Fleets that cost less than the answer, and the limit that each meets."""
    return [
        {
            "fleet": row["fleet"], "devices": str(row["num_devices"]), "US$/h": _money(row["cost_per_hour"]),
            "why not": in_controls(_OPTION.sub("", row["why"])),
        }
        for row in cheaper
    ]  # fmt: skip


_OPTION = re.compile(r"^--[a-z-]+=\S+: ")
"""What an error of the command line opens with; here it is no option that someone gave."""


def _goodput(fleet: Mapping[str, Any]) -> str:
    """The least of all draws of the traffic, and the most where that is more."""
    least, most = (number(value) for value in fleet["goodput_spread"])
    words = least if least == most else f"{least} to {most}"
    return words if fleet["clients"] is None else f"{words} by {fleet['clients']} clients"


def _draws(ends: Sequence[float | None] | None) -> str:
    """Least and most of all draws; the most is not known where requests of one were not served."""
    if ends is None or ends[0] is None:
        return "not served"
    return f"{_ms(ends[0])} to {'not served' if ends[1] is None else _ms(ends[1])}"


def _money(value: float | None) -> str:
    return "no price" if value is None else f"{value:,.2f}"


def _ms(value: float | None) -> str:
    return "not served" if value is None else number(value * 1e3)


def _title(goal: Goal) -> str:
    return f"{goal.metric.upper()} {goal.statistic}"


# --- charts -----------------------------------------------------------------------------------------


def front_chart(fleets: Sequence[Mapping[str, Any]], rate: float) -> Chart | None:
    """Cost against goodput: one point for every device's cheapest fleet, the Pareto front joined. None without prices."""
    priced = [f for f in fleets if f["cost_per_hour"] is not None]
    if not priced:
        return None
    figure = go.Figure()
    front = sorted((f for f in priced if f["on_front"]), key=lambda f: (f["cost_per_hour"], f["goodput"]))
    if len(front) > 1:
        figure.add_scatter(
            x=[f["cost_per_hour"] for f in front], y=[f["goodput"] for f in front], mode="lines", name="Pareto front",
            line={"color": theme.PREDICTED, "dash": "dash", "width": 2}, hoverinfo="skip",
        )  # fmt: skip
    for on_front, name, symbol, colour in (
        (True, "nothing is better", "diamond", theme.PREDICTED), (False, "another is better in all", "diamond-open", theme.GREY)
    ):  # fmt: skip
        some = [f for f in priced if f["on_front"] == on_front]
        if some:
            figure.add_scatter(
                x=[f["cost_per_hour"] for f in some], y=[f["goodput"] for f in some], mode="markers", name=name,
                marker={"size": 12, "symbol": symbol, "color": colour, "line": {"width": 1.5, "color": colour}},
                customdata=[[escape(f["label"]), f["next_limit"]] for f in some],
                hovertemplate="%{customdata[0]}<br>US$ %{x:,.2f} an hour<br>%{y:.3~g} req/s"
                "<br>next limit: %{customdata[1]}<extra></extra>",
            )  # fmt: skip
    costs, rates = [f["cost_per_hour"] for f in priced], [f["goodput"] for f in priced]
    across, up = _around(costs), _around(rates)
    figure.update_xaxes(title="Cost (US$ per hour)", range=across)
    figure.update_yaxes(title="Goodput (requests/s)", range=up)
    for fleet in _apart(priced, across, up):
        right = fleet["cost_per_hour"] > (across[0] + across[1]) / 2
        figure.add_annotation(
            x=fleet["cost_per_hour"], y=fleet["goodput"], text=escape(f"{fleet['num_devices']} {fleet['device']}"),
            showarrow=False, xanchor="right" if right else "left", xshift=-9 if right else 9, yshift=-11, font={"size": 12},
        )  # fmt: skip
    best = priced[0]
    alt = (
        f"Cost and goodput of {len(priced)} fleets that keep the promises at {number(rate)} requests/s. The cheapest is "
        f"{best['label']} at {best['cost_per_hour']:.2f} dollars an hour, good for {number(best['goodput'])} requests/s."
    )
    table = [
        {"fleet": f["label"], "cost (US$/h)": f["cost_per_hour"], "goodput (req/s)": f["goodput"], "on the front": f["on_front"]}
        for f in priced
    ]  # fmt: skip
    return Chart(finish(figure, 340), alt, table)


def _apart(
    fleets: Sequence[Mapping[str, Any]], across: Sequence[float], up: Sequence[float]
) -> list[Mapping[str, Any]]:
    """Those of `fleets` whose names can stand beside their points without covering each other, the first ones first."""
    kept: list[Mapping[str, Any]] = []
    for fleet in sorted(fleets, key=lambda f: not f["on_front"]):
        near = [
            k for k in kept
            if abs(k["cost_per_hour"] - fleet["cost_per_hour"]) < 0.6 * (across[1] - across[0])
            and abs(k["goodput"] - fleet["goodput"]) < 0.09 * (up[1] - up[0])
        ]  # fmt: skip
        if not near:
            kept.append(fleet)
    return kept


def _around(values: Sequence[float]) -> list[float]:
    """A range with a little room on both sides."""
    low, high = min(values), max(values)
    room = 0.09 * (high - low) or 0.05 * (abs(high) or 1.0)
    return [low - room, high + room]


def promise_chart(fleets: Sequence[Mapping[str, Any]], goals: Sequence[Goal], most: float = 2.0) -> Chart:
    """How much of each promise a fleet uses up, with the 80 % band; the line at 100 % is the promise.

    Bands are cut at `most` times the promise: beyond it a queue only grows. Bars behind the points go from the least to
    the most of all draws of the traffic, where there are several.
    """
    figure = go.Figure()
    drawn: tuple[list[float | None], list[float | None]] = ([], [])
    symbols, colours = ("diamond", "circle", "square", "cross"), (theme.PREDICTED, theme.SKY, theme.PINK, theme.GREEN)
    table = []
    for index, goal in enumerate(goals):
        x, low, high, where, words = [], [], [], [], []
        for place, fleet in enumerate(fleets):
            value = fleet["values"].get(goal.name)
            if value is None:
                continue
            ends = fleet["band"].get(goal.name, (value, value))
            slow = most if ends[1] is None else ends[1] / goal.limit
            share = 100 * min(most, value / goal.limit)
            x.append(share)
            low.append(max(0.0, share - 100 * (value if ends[0] is None else ends[0]) / goal.limit))
            high.append(max(0.0, 100 * min(most, slow) - share))
            where.append(place + (index - (len(goals) - 1) / 2) * 0.26)
            least, worst = fleet["spread"].get(goal.name) or (None, None)
            if fleet["seeds"] > 1 and least is not None:
                ended = most if worst is None else min(most, worst / goal.limit)
                drawn[0].extend((100 * min(most, least / goal.limit), 100 * ended, None))
                drawn[1].extend((where[-1], where[-1], None))
            words.append([escape(fleet["label"]), number(value * 1e3)])
            table.append({
                "fleet": fleet["label"], "promise": str(goal), "predicted (s)": value, "low (s)": ends[0],
                "high (s)": "" if ends[1] is None else ends[1], "draws": fleet["seeds"],
                "least of all draws (s)": "" if least is None else least, "most of all draws (s)": "" if worst is None else worst,
            })  # fmt: skip
        figure.add_scatter(
            x=x, y=where, mode="markers", name=_title(goal), customdata=words,
            marker={"size": 10, "symbol": symbols[index % 4], "color": colours[index % 4]},
            cliponaxis=False,  # a point near 0 is seen whole
            error_x={"type": "data", "symmetric": False, "array": high, "arrayminus": low, "thickness": 1.5, "width": 4,
                     "color": theme.QUIET},
            hovertemplate="%{customdata[0]}<br>" + _title(goal) + " %{customdata[1]} ms, %{x:.3~g} % of the promise<extra></extra>",
        )  # fmt: skip
    if drawn[0]:
        figure.add_scatter(
            x=drawn[0], y=drawn[1], mode="lines", name="all draws of the traffic", hoverinfo="skip",
            line={"color": theme.transparent(theme.GREY, 0.45), "width": 9},
        )  # fmt: skip
        figure.data = (figure.data[-1], *figure.data[:-1])  # behind the points
    figure.add_scatter(
        x=[100, 100], y=[-0.5, len(fleets) - 0.5], mode="lines", name="the promise", hovertemplate="the promise<extra></extra>",
        line={"color": theme.LOSS, "width": 1.5, "dash": "dot"},
    )  # fmt: skip
    figure.update_yaxes(
        tickmode="array", tickvals=list(range(len(fleets))), range=[len(fleets) - 0.45, -0.55],
        ticktext=[escape(short(f["label"].partition(" (")[0], 22)) for f in fleets],  # as in the table
    )  # fmt: skip
    marks = [t for t in figure.data if t.mode == "markers"]
    highest = max(
        (float(v) + float(u) for t in marks for v, u in zip(t.x, t.error_x.array, strict=True)), default=100.0
    )
    highest = max([highest, *(v for v in drawn[0] if v is not None)])
    figure.update_xaxes(title="Share of the promise (%)", range=[0, max(110.0, 1.04 * highest)], rangemode="tozero")
    tight = max(table, key=lambda r: r["predicted (s)"], default=None)
    alt = (
        f"How much of its promises each of {len(fleets)} fleets uses up, with the 80 percent band; the line at 100 percent "
        "is the promise itself."
        + (" Grey bars go from the least to the most of all draws of the traffic." if drawn[0] else "")
        + ("" if tight is None else f" The longest time is {tight['predicted (s)']:.3g} s.")
    )
    legend = 20 if drawn[0] else 0  # px of one line more, where a narrow screen writes them below each other
    return Chart(finish(figure, 96 + legend + 46 * len(fleets)), alt, table)


def change_chart(changed: Sequence[Mapping[str, Any]], best: Mapping[str, Any]) -> Chart | None:
    """Replicas of the best design when something is different, beside those of the answer."""
    known = [row for row in changed if row["replicas"] is not None]
    if not known:
        return None
    differences = [row["replicas"] - best["replicas"] for row in known]
    figure = go.Figure()
    figure.add_bar(
        x=differences, y=list(range(len(known))), orientation="h", width=0.5, showlegend=False,
        marker={
            "color": [theme.LOSS if d > 0 else theme.GAIN for d in differences],
            "pattern": {"shape": ["/" if d > 0 else "" for d in differences], "size": 7, "solidity": 0.3},
        },
        customdata=[[escape(row["case"]), row["replicas"], _money(row["cost_per_hour"])] for row in known],
        hovertemplate="%{customdata[0]}<br>%{customdata[1]} replicas, US$/h %{customdata[2]}<extra></extra>",
    )  # fmt: skip
    for index, (row, difference) in enumerate(zip(known, differences, strict=True)):
        common = {"y": index - 0.28, "yanchor": "bottom", "xref": "paper", "showarrow": False, "font": {"size": 13}}
        figure.add_annotation(x=0, xanchor="left", text=escape(short(row["case"], 40)), **common)
        figure.add_annotation(x=1, xanchor="right", text=f"{difference:+d}" if difference else "same", **common)
    low, high = min(0, *differences), max(0, *differences)
    figure.update_xaxes(
        title=f"Replicas more or less than {best['replicas']}",
        range=[low - 0.1, high + 0.1],
        dtick=max(1, (high - low) // 6),
    )
    figure.update_yaxes(visible=False, range=[len(known) - 0.4, -0.85])
    worst = max(known, key=lambda row: row["replicas"])
    alt = (
        f"Replicas that are needed when something is different. The most, {worst['replicas']} instead of {best['replicas']}, "
        f"for: {worst['case']}."
    )
    table = [{"if": r["case"], "replicas": r["replicas"], "cost (US$/h)": r["cost_per_hour"]} for r in known]
    return Chart(finish(figure, 84 + 52 * len(known), legend=False, top=8), alt, table)


__all__ = [
    "EXAMPLE", "change_chart", "change_rows", "cheaper_rows", "fleet_rows", "front_chart", "key_of", "line_of",
    "promise_chart", "question_of", "read_answer",
]  # fmt: skip
