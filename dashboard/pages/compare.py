"""Real vs predicted: can the prediction be trusted; two records side by side, as numbers and over time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import streamlit as st
from pydantic import ValidationError

from twinfer.core.compare import Comparison, compare
from twinfer.core.errors import TwinferError
from twinfer.core.records import RunRecord
from twinfer.core.run_files import plain as plain_data
from twinfer.core.run_store import RunSummary
from twinfer.dashboard import figures, parts, session, timelines
from twinfer.dashboard.explain import explain
from twinfer.dashboard.jobs import Task
from twinfer.dashboard.pages import Page
from twinfer.dashboard.quantities import percent, shown, suited
from twinfer.dashboard.resources import Resources, task_of
from twinfer.dashboard.scenario import Scenario

CARDS = ("output_throughput", "ttft.p50", "tpot.p50", "peak_kv_bytes")
HEADLINE = ("output_throughput", "ttft.p50", "tpot.p50", "e2e.p50")


class ComparePage(Page):
    name = "compare"
    title = "Real vs predicted"
    group = "Explore"
    summary = "A measured run beside its prediction: errors, bands, steps and memory over time"

    def render(self, resources: Resources) -> None:
        parts.heading("Real vs predicted", "How far is the prediction from the measurement, and where?")
        parts.job_panel(resources)
        summaries = resources.store.list()
        readable = [s for s in summaries if not s.problem]
        for broken in [s for s in summaries if s.problem][:3]:
            st.warning(f"Run {parts.plain(broken.id)} cannot be read: {parts.plain(broken.problem)}")
        if not readable:
            _empty(resources)
            return
        left, right = st.columns(2, gap="medium")
        with left:
            real = _pick("real", "Measured run", [s for s in readable if s.world == "engine"], readable)
        candidates = [s for s in readable if s.world == "simulator"]
        with right:
            predicted = _pick("predicted", "Prediction", _closest(candidates, real), readable)
        _compare(resources, real, predicted)


# --- choosing -----------------------------------------------------------------------------------


def _empty(resources: Resources) -> None:
    st.info("No runs are stored yet. Start with the worked example: a small model, 16 requests, real and predicted.")
    example = Scenario()
    why = resources.why_not_real(example)
    if why:
        st.caption(f"It cannot be measured here: {parts.plain(why)}. Predictions work on the Techniques page.")
    st.button("Run the worked example", type="primary", icon=":material/play_arrow:", key="example", disabled=bool(why),
              on_click=_start, args=(resources, example))  # fmt: skip


def _start(resources: Resources, scenario: Scenario) -> None:
    tasks = [task_of(scenario, world, scenario.techniques()) for world in ("simulator", "engine")]
    session.show(job=resources.jobs.start(tasks, f"Worked example: {scenario.model}"))


def _closest(candidates: Sequence[RunSummary], real: RunSummary | None) -> list[RunSummary]:
    """Predictions of the same model and techniques first, newest first within each."""
    if real is None:
        return list(candidates)

    def unlike(s: RunSummary) -> tuple[bool, bool, bool]:
        return (
            s.model != real.model,
            (s.scheduler, s.kv_cache) != (real.scheduler, real.kv_cache),
            s.name != real.name,
        )

    return sorted(candidates, key=unlike)


def _pick(which: str, label: str, options: Sequence[RunSummary], everything: Sequence[RunSummary]) -> RunSummary | None:
    """The record of one side: what the link names, else the first of `options`."""
    asked = session.view(which)
    by_id = {s.id: s for s in options}
    named = next((s for s in everything if s.id == asked), None)
    if asked and named is None:
        st.warning(f"The link names the run {parts.plain(asked)}, which is not stored here; another one is shown.")
    if named is not None:
        by_id.setdefault(named.id, named)  # a link may compare two measurements
    if not by_id:
        return None
    current = named.id if named is not None else next(iter(by_id))
    key = f"w_{which}"
    st.session_state[key] = current

    def changed() -> None:
        session.show(**{which: st.session_state[key]})

    st.selectbox(label, list(by_id), key=key, on_change=changed, format_func=lambda run: _title(by_id[run]))
    return by_id[current]


def _title(s: RunSummary) -> str:
    name = s.name or f"{s.scheduler} + {s.kv_cache}"
    stopped = " (stopped early)" if not s.complete else ""
    return f"{name}{stopped} · {s.created.replace('T', ' ')[5:16]} UTC · {s.model}"


# --- showing ------------------------------------------------------------------------------------


def _compare(resources: Resources, real: RunSummary | None, predicted: RunSummary | None) -> None:
    measured_record, predicted_record = _load(resources, real), _load(resources, predicted)
    if real is None:
        st.info("No measured run is stored. Measure one on the Techniques page with “Run for real”.")
    if predicted is None and measured_record is not None:
        st.info("No prediction is stored for this run.")
        st.button("Predict this run", type="primary", icon=":material/query_stats:", key="predict-this",
                  on_click=_predict, args=(resources, measured_record))  # fmt: skip
    if measured_record is not None and predicted_record is not None:
        joined = compare(measured_record, predicted_record)
        _state(resources, measured_record, predicted_record, joined)
        pairs = figures.pairs_of(measured_record, predicted_record)
        _numbers(pairs, joined)
        parts.show(figures.ratio_dots(pairs), "errors")
        left, right = st.columns(2, gap="medium")
        with left:
            st.subheader("Each request", anchor=False)
            parts.show(figures.parity(measured_record, predicted_record), "parity")
        with right:
            ops = timelines.op_bars(measured_record, predicted_record)
            st.subheader("Time by op", anchor=False)
            if ops is None:
                st.info("Neither run recorded ops.")
            else:
                parts.show(ops, "ops")
    if measured_record is None and predicted_record is None:
        return
    st.subheader("Step by step", anchor=False)
    by = _axis()
    parts.show(timelines.step_timeline(measured_record, predicted_record, by=by), f"steps-{by}")
    st.subheader("KV memory", anchor=False)
    parts.show(timelines.memory_timeline(measured_record, predicted_record), "memory")


def _axis() -> str:
    """Time or step number, kept in the link."""
    st.session_state.w_axis = "step" if session.view("axis") == "step" else "time"

    def changed() -> None:
        session.show(axis="step" if st.session_state.w_axis == "step" else None)

    st.segmented_control(
        "Horizontal axis", ("time", "step"), key="w_axis", on_change=changed, required=True,
        format_func=lambda name: "by time" if name == "time" else "by step number", label_visibility="collapsed",
    )  # fmt: skip
    return "step" if session.view("axis") == "step" else "time"


def _load(resources: Resources, summary: RunSummary | None) -> RunRecord | None:
    if summary is None:
        return None
    try:
        return resources.load(summary.id)
    except (TwinferError, OSError, ValueError, KeyError) as error:
        st.error(f"Run {parts.plain(summary.id)} cannot be read: {parts.plain(explain(error))}")
        return None


def _predict(resources: Resources, record: RunRecord) -> None:
    try:
        task = _task_like(record)
    except (TwinferError, ValidationError) as error:
        session.tell(explain(error))
        return
    session.show(job=resources.jobs.start([task], f"Prediction of {record.id}"), predicted=None)


def _task_like(record: RunRecord) -> Task:
    """The prediction of a stored run, from its own configuration and workload."""
    label = record.name or f"prediction of {record.id}"
    return Task(world="simulator", label=label, config=plain_data(record.config), workload=plain_data(record.workload))


def _state(resources: Resources, real: RunRecord, predicted: RunRecord, joined: Comparison) -> None:
    """Badges and lists that say how far the two runs are of the same thing."""
    for note in joined.notes:
        st.warning(parts.plain(note))
    if joined.settings:
        some = [
            {"setting": name, "measured run": _text(a), "prediction": _text(b)}
            for name, (a, b) in joined.settings.items()
        ]
        with st.container(horizontal=True, vertical_alignment="center"):
            st.badge("not the same settings", icon=":material/difference:", color="orange")
            st.markdown(f"{len(some)} settings differ, so the errors below are not the model's alone.")
            st.button("Predict this run", icon=":material/query_stats:", key="predict-same", on_click=_predict,
                      args=(resources, real))  # fmt: skip
        with st.expander("Settings that differ", key="settings"):
            parts.rows(some)


def _text(value: Any) -> str:
    return "not set" if value is None else value if isinstance(value, str) else json.dumps(plain_data(value))


def _numbers(pairs: Sequence[figures.Pair], joined: Comparison) -> None:
    by_key = {pair.quantity.key: pair for pair in pairs}
    with st.container(horizontal=True, key="cards"):
        for key in CARDS:
            pair = by_key[key]
            quantity, error = suited(pair.quantity, pair.measured, pair.predicted), pair.error
            with st.container(border=True):
                st.metric(
                    f"{quantity.card} error", percent(error) if error is not None else "unknown", help=quantity.help
                )
                said = f"measured {shown(quantity, pair.measured)}, predicted {shown(quantity, pair.predicted)}"
                st.caption(said + (f" (80 % band {parts.span(quantity, pair.band)})" if pair.band is not None else ""))
    st.markdown(verdict(pairs))
    with st.container(horizontal=True):
        data = {"measured": joined.real_id, "predicted": joined.predicted_id, "settings": plain_data(joined.settings),
                "metrics": plain_data(joined.nested("real", "predicted", "error", "interval"))}  # fmt: skip
        st.download_button("Comparison as JSON", json.dumps(data, indent=1), f"{joined.real_id}-comparison.json",
                           "application/json", on_click="ignore", icon=":material/download:", key="json")  # fmt: skip


def verdict(pairs: Sequence[figures.Pair]) -> str:
    """The comparison in two sentences: size and sign of the errors, the worst, and the bands' coverage."""
    known = [(pair, pair.error) for pair in pairs if pair.quantity.key in HEADLINE and pair.error is not None]
    if not known:
        return "The two runs share no metric, so there is no error to show."
    mape = sum(abs(e) for _, e in known) / len(known)
    bias = sum(e for _, e in known) / len(known)
    worst, error = max(known, key=lambda item: abs(item[1]))
    text = (
        f"Mean absolute error **{percent(mape, signed=False)}** over {len(known)} headline metrics (signed {percent(bias)}); "
        f"the worst is {worst.quantity.label} at {percent(error)}."
    )
    banded = [pair.covered for pair in pairs if pair.covered is not None]
    if banded:
        text += f" {sum(banded)} of {len(banded)} measured values lie inside their 80 % band."
    return text


__all__ = ["ComparePage"]
