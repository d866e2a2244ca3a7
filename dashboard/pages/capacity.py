"""Capacity: how many of which devices for this traffic and these promises, and at what cost."""

from __future__ import annotations

from typing import Any

import streamlit as st
from pydantic import ValidationError

from twinfer.core.errors import TwinferError
from twinfer.core.goal import parse_goals
from twinfer.dashboard import capacity, parts, session
from twinfer.dashboard.explain import explain, in_controls
from twinfer.dashboard.jobs import Job, Task
from twinfer.dashboard.pages import Page
from twinfer.dashboard.resources import Resources
from twinfer.dashboard.scenario import Scenario
from twinfer.simulator.plan_space import Question


class CapacityPage(Page):
    name = "capacity"
    title = "Capacity"
    group = "Plan"
    summary = "The cheapest fleet that keeps its promises for some traffic, and what limits it next"

    def render(self, resources: Resources) -> None:
        parts.heading("Capacity", "How many of which devices for this traffic and these promises, at what cost?")
        parts.scenario_bar(resources, capacity.line_of(session.scenario()))
        _form(resources)
        question = None
        try:
            question = capacity.question_of(session.scenario(), resources.registry)
        except (TwinferError, ValidationError) as error:
            st.error(parts.plain(explain(error)))
        job = parts.job_panel(resources)
        _search_bar(resources, question, job is not None and not job.over)
        _results(resources, question, job)


# --- asking -----------------------------------------------------------------------------------------


def _form(resources: Resources) -> None:
    with st.container(border=True, key="promises"):
        columns = st.columns(4, gap="small")
        for column, name in zip(columns, ("plan_rate", "plan_ttft", "plan_tpot", "plan_percentile"), strict=True):
            with column:
                parts.setting(name)
        names = [n for n in parts.device_names(resources) if n != "cpu"]
        chosen = [n for n in session.scenario().plan_devices.split(",") if n]
        names += [n for n in chosen if n not in names]
        st.session_state.w_plan_devices = chosen
        st.multiselect(
            "Device types", names, key="w_plan_devices", placeholder="all of them",
            on_change=lambda: session.edit(plan_devices=",".join(st.session_state.w_plan_devices)),
        )  # fmt: skip
        with st.expander("Trace and size of the search", key="plan-more"):
            for name in ("plan_trace", "plan_scale", "plan_requests"):
                parts.setting(name)


def _search_bar(resources: Resources, question: Question | None, busy: bool) -> None:
    with st.container(horizontal=True, vertical_alignment="center", key="search-bar"):
        st.button(
            "Search", type="primary", icon=":material/search:", key="search", disabled=busy or question is None,
            on_click=_start, args=(resources, question), shortcut="Ctrl+Enter",
            help="Simulates fleets in the background until the cheapest is found (Ctrl+Enter)",
        )  # fmt: skip
        st.button(
            "Example: 70B chat", key="plan-example", on_click=session.edit, kwargs=dict(capacity.EXAMPLE),
            help="Llama-3.1-70B, 6 requests/s of 1,000 tokens in and 200 out, TTFT p95 1 s, TPOT p95 50 ms",
        )  # fmt: skip


def _start(resources: Resources, question: Question) -> None:
    scenario = session.scenario()
    task = Task(
        world="plan", label=f"fleets for {scenario.model}", config=question.plain(), workload={},
        scenario=scenario.to_params(), key=capacity.key_of(question),
    )  # fmt: skip
    session.show(job=resources.jobs.start([task], f"Capacity: {scenario.model}", scenario.to_params()))


# --- showing ----------------------------------------------------------------------------------------


def _results(resources: Resources, question: Question | None, job: Job | None) -> None:
    key = None if question is None else capacity.key_of(question)
    shown = job if job is not None and job.over and job.tasks[0]["world"] == "plan" else _of(resources, key)
    found = None if shown is None else capacity.read_answer(resources.jobs.folder / shown.id / "plan.json")
    if shown is None or found is None:
        if job is None or job.over:
            st.info(
                "No search was made for this yet. Press Search: it takes some seconds for a small model, minutes for a large "
                "one with long answers, and longer on a busy machine."
            )
        return
    if shown.tasks[0]["key"] != key:
        with st.container(horizontal=True, vertical_alignment="center"):
            st.badge("inputs changed since the search", icon=":material/history:", color="orange")
            old, _ = Scenario.from_params(shown.scenario)
            st.button(
                "Back to what was searched",
                key="restore",
                on_click=session.replace,
                args=(old,),
                icon=":material/undo:",
            )
    _answer(found)


def _of(resources: Resources, key: str | None) -> Job | None:
    """The newest finished search for the question `key`."""
    for job in resources.jobs.newest():
        if job.state == "done" and job.tasks[0]["world"] == "plan" and job.tasks[0]["key"] == key:
            return job
    return None


def _answer(found: dict[str, Any]) -> None:
    answer, goals = found["answer"], parse_goals(found["question"]["slo"])
    if answer is None:
        st.info("The search was stopped before a device type was searched to the end.")
        return
    fleets = answer["fleets"]
    (st.info if fleets else st.warning)(parts.plain(in_controls(answer["sentence"])))
    if not found["complete"]:
        st.warning("The search was stopped: devices that are missing may be cheaper.")
    if fleets:
        best = fleets[0]
        rate = best["goodput"] / (1 + best["headroom"])
        st.caption("Every number is **simulated**; each fleet was simulated as a whole and kept every promise.")
        st.subheader("Cost and goodput", anchor=False)
        chart = capacity.front_chart(fleets, rate)
        if chart is None:
            st.info("No device has a price: give one in its device file, or use `twinfer plan --price`.")
        else:
            parts.show(chart, "front")
        st.subheader("Promises", anchor=False)
        parts.show(capacity.promise_chart(fleets, goals), "promises")
        seeds = max(fleet["seeds"] for fleet in fleets)
        if seeds > 1:
            st.caption(
                f"The traffic was drawn {seeds} times at random. Points are the draw that comes nearest to any one promise, "
                "grey bars are all of them (least to most), thin lines the 80 % band of the prediction."
            )
        if command := best.get("command"):  # not in files of before there was one
            st.caption("The run behind the times of the cheapest fleet, on the command line:")
            st.code(command, language=None, wrap_lines=True)
        with st.expander("All fleets", key="fleets", expanded=True):
            parts.rows(capacity.fleet_rows(fleets, goals))
            st.download_button(
                "CSV", parts.to_csv(capacity.fleet_rows(fleets, goals)), "twinfer-fleets.csv", "text/csv", key="csv-fleets",
                on_click="ignore", icon=":material/download:",
            )  # fmt: skip
        changed = capacity.change_chart(answer["changed"], best)
        if changed is not None:
            st.subheader("If something is different", anchor=False)
            parts.show(changed, "changes-of-plan", table=False)
            parts.rows(capacity.change_rows(answer["changed"]))
    if answer["cheaper"]:
        st.subheader("Why nothing cheaper will do", anchor=False)
        parts.rows(capacity.cheaper_rows(answer["cheaper"]))
    for device, why in answer["none"].items():
        st.caption(f"{parts.plain(device)} is in no table: {parts.plain(in_controls(why))}")
    for source in dict.fromkeys(f"{f['device']}: {f['price_source']}" for f in fleets if f["price_source"]):
        st.caption(f"Price of {parts.plain(source)}")
    for note in answer["notes"]:
        st.caption(parts.plain(in_controls(note)))


__all__ = ["CapacityPage"]
