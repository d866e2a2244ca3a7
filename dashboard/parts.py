"""Pieces that pages share: scenario bar, metric cards, charts with their tables, the panel of a running job."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

import streamlit as st

from twinfer.core.errors import TwinferError
from twinfer.dashboard import session
from twinfer.dashboard.charts import Chart
from twinfer.dashboard.forms import draw, fields_of
from twinfer.dashboard.jobs import Job
from twinfer.dashboard.quantities import Band, Quantity, change, improvement, number, percent, shown, suited
from twinfer.dashboard.resources import Resources
from twinfer.dashboard.scenario import IMAGES, PRESETS, Scenario

FIELDS = {field.name: field for field in fields_of(Scenario)}
_CONFIG: dict[str, Any] = {
    "displaylogo": False,
    "displayModeBar": "hover",
    "modeBarButtonsToRemove": ["lasso2d", "select2d", "autoScale2d", "zoomIn2d", "zoomOut2d"],
}


def heading(title: str, question: str) -> None:
    st.title(title, anchor=False)
    st.caption(question)
    problems = [plain(problem) for problem in session.problems()]
    if problems:  # one box, so that the page stays in sight
        st.warning(problems[0] if len(problems) == 1 else "\n".join(f"* {problem}" for problem in problems))


def plain(text: object) -> str:
    """`text` with the characters that Markdown would take for itself escaped."""
    out = str(text)
    for character in "\\`*_~$[]<":
        out = out.replace(character, "\\" + character)
    return out.replace(":", "\\:")


def duration(seconds: float | None) -> str:
    """A time for people: "8 s", "2 min 10 s"."""
    if seconds is None:
        return ""
    if seconds < 1:
        return "under 1 s"
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds // 60:.0f} min {seconds % 60:.0f} s"


# --- the scenario -------------------------------------------------------------------------------


def setting(name: str) -> None:
    """The widget of one plain field of the scenario."""
    draw(
        FIELDS[name],
        getattr(session.scenario(), name),
        f"w_{name}",
        lambda field, value: session.edit(**{field: value}),
    )


def scenario_bar(resources: Resources, line: str = "") -> None:
    """One line that says what is asked (`line`, else the scenario's own), and the form behind it."""
    current = session.scenario()
    with st.container(horizontal=True, vertical_alignment="center", key="scenario-bar"):
        with st.popover("Model and workload", icon=":material/tune:"):
            _workload_form(resources)
        with st.popover("Link", icon=":material/link:", help="The address of this view"):
            st.caption("Opens this scenario and view in another tab of this machine.")
            st.code(session.link(), language=None, wrap_lines=True)
        st.markdown(plain(line or current.line()))


def _workload_form(resources: Resources) -> None:
    from twinfer.core.catalog import spec_names

    current = session.scenario()
    with st.container(horizontal=True):
        for name, values in PRESETS.items():
            st.button(
                name, key=f"preset-{name}", on_click=session.edit, kwargs=dict(values), help="Start from this workload"
            )
    models = spec_names()
    if current.model not in models:
        models = [current.model, *models]
    st.session_state.w_model = current.model
    st.selectbox(
        "Model", models, key="w_model", accept_new_options=True, on_change=_from_widget, args=("model",),
        help="A shipped name, or type a folder, a GGUF file or a hub id.",
    )  # fmt: skip
    devices = ["auto", *device_names(resources)]
    if current.device not in devices:
        devices.append(current.device)
    st.session_state.w_device = current.device
    st.selectbox(
        "Device", devices, key="w_device", on_change=_from_widget, args=("device",),
        format_func=lambda name: "this machine" if name == "auto" else name,
    )  # fmt: skip
    names = ["num_requests", "rate", "input_len", "output_len", "spread", "shared_prefix", "seed"]
    sees = _sees(current)
    if sees:
        names += IMAGES if current.images_per_request else IMAGES[:1]
    for start in range(0, len(names), 2):  # row by row: a narrow screen shows them in this order, too
        for column, name in zip(st.columns(2), names[start : start + 2], strict=False):
            with column:
                setting(name)
    if sees is False and current.images_per_request:
        st.warning(f"{plain(current.model)} takes no images, or its encoder is not known.")
        st.button("Leave images out", key="no-images", on_click=session.edit, kwargs={"images_per_request": 0.0})


def _sees(current: Scenario) -> bool | None:
    """Whether the model takes images; None when it is not known, and its own error is shown with the results."""
    from twinfer.core.catalog import resolve_spec

    try:
        return resolve_spec(current.model).vision is not None
    except TwinferError:
        return None


def device_names(resources: Resources) -> list[str]:
    """Device specs that the registry knows."""
    from twinfer.core.device import device_files

    return [name for name in device_files(resources.registry) if name != "auto"]


def _from_widget(name: str) -> None:
    value = st.session_state[f"w_{name}"]
    if value:
        session.edit(**{name: value.strip()})


# --- numbers ------------------------------------------------------------------------------------


def card(
    quantity: Quantity,
    *,
    predicted: float | None,
    band: Band | None,
    measured: float | None,
    base_predicted: float | None,
    base_measured: float | None,
    error: float | None = None,
    source: str = "",
) -> None:
    """One metric: the measured value when there is one, else the prediction; delta to the baseline of the same world.

    source: where the number comes from, when it is neither measured nor simulated.
    """
    real = measured is not None
    value, base = (measured, base_measured) if real else (predicted, base_predicted)
    quantity = suited(quantity, value)
    delta, gain = change(value, base), improvement(quantity, value, base)
    kwargs: dict[str, Any] = {}
    if delta is not None and abs(delta) >= 0.0005:
        kwargs = {
            "delta": percent(delta), "delta_arrow": "up" if delta > 0 else "down",
            "delta_color": "blue" if (gain or 0) > 0 else "orange",
            "delta_description": "better" if (gain or 0) > 0 else "worse",
        }  # fmt: skip
    elif base is not None and value is not None:
        kwargs = {"delta": "as baseline", "delta_arrow": "off", "delta_color": "gray"}
    with st.container(border=True):
        st.metric(quantity.card, shown(quantity, value), help=quantity.help, **kwargs)
        st.caption(source or provenance(quantity, predicted=predicted, band=band, measured=measured, error=error))


def provenance(
    quantity: Quantity,
    *,
    predicted: float | None,
    band: Band | None,
    measured: float | None,
    error: float | None = None,
) -> str:
    """Where a number comes from: measured with the prediction beside it, or simulated with its band."""
    within = "" if band is None else f", 80 % band {span(quantity, band)}"
    guess = shown(quantity, predicted, unit=False) if predicted is not None else "none"
    if measured is not None:
        wrong = "" if error is None else f" ({percent(error)})"
        return f"**measured**, predicted {guess}{wrong}{within}"
    if predicted is not None:
        return f"**simulated**{within or ', no band'}"
    return "no value"


def span(quantity: Quantity, band: Band) -> str:
    """A band in the metric's unit, without the unit."""
    return f"{number(band[0] * quantity.scale)}–{number(band[1] * quantity.scale)}"


def show(chart: Chart, key: str, *, table: bool = True) -> None:
    """A chart with its alt text, and below it the table behind it."""
    config = {**_CONFIG, "toImageButtonOptions": {"format": "png", "scale": 2, "filename": f"twinfer-{key}"}}
    st.plotly_chart(chart.figure, key=f"chart-{key}", alt=chart.alt, config=config)
    if table and chart.table:
        with st.expander("Table", key=f"table-{key}"):
            rows(chart.table)
            st.download_button(
                "CSV", to_csv(chart.table), f"twinfer-{key}.csv", "text/csv", key=f"csv-{key}", on_click="ignore",
                icon=":material/download:",
            )  # fmt: skip


def rows(table: Sequence[Mapping[str, Any]]) -> None:
    """A table to read; a number and its sign, or a count and what it counts, stay on one line."""
    shown = [{plain(k): _TOGETHER.sub(_unbroken, plain(v)) for k, v in row.items()} for row in table]
    st.table(shown, hide_index=True, border="horizontal")


_TOGETHER = re.compile(r"\d %|(?:★ )?\d x (?:\d+ )?(?=\S)")  # 80 %, ★ 2 x 4 h100-sxm


def _unbroken(found: re.Match[str]) -> str:
    return found[0].replace(" ", "\N{NO-BREAK SPACE}")


def to_csv(table: Sequence[Mapping[str, Any]]) -> str:
    """Rows as CSV; the header carries the units."""
    names = list(dict.fromkeys(name for row in table for name in row))
    out = io.StringIO()
    writer = csv.DictWriter(out, names, restval="")
    writer.writeheader()
    writer.writerows(table)
    return out.getvalue()


# --- jobs ---------------------------------------------------------------------------------------

_WORDS = {
    "starting": "Starting", "queued": "Waiting for another run on this machine", "loading": "Loading",
    "running": "Running",
}  # fmt: skip
_PHASES = {"load": "Loading the model", "warm up": "Warming up"}


def job_panel(resources: Resources) -> Job | None:
    """The job of this view: live while it runs (with Cancel), its outcome afterwards."""
    ident = session.view("job")
    if ident is None:
        running = resources.jobs.running()
        if running:
            with st.container(border=True, horizontal=True, vertical_alignment="center"):
                st.markdown(f"A run is going on: {plain(running[0].title)}")
                st.button("Watch it", on_click=session.show, kwargs={"job": running[0].id})
        return None
    job = resources.jobs.get(ident)
    if job is None:
        st.warning(
            f"The link names the job {plain(ident)}, which is not known here; it may have been on another machine."
        )
        return None
    if job.over:
        _outcome(resources, job)
    else:
        st.fragment(_live, run_every=0.5)(resources, ident)
    return job


def status_line(job: Job) -> str:
    """What a running job does, in words."""
    task = job.tasks[min(job.task, len(job.tasks) - 1)]
    world = {"engine": "Measuring", "plan": "Searching"}.get(task["world"], "Predicting")
    words = f"{world}: {task['label']}" if job.state == "running" else f"{_WORDS[job.state]}: {task['label']}"
    phase = str(job.info.get("phase", ""))
    if job.state == "running" and phase in _PHASES:
        doing = str(job.info.get("doing", ""))
        words = f"{doing[:1].upper()}{doing[1:]}" if doing else f"{_PHASES[phase]}: {task['label']}"
    if job.cancelling:
        words = f"Cancelling: {task['label']}"
    parts = [words]
    if len(job.tasks) > 1:
        parts.append(f"run {job.task + 1} of {len(job.tasks)}")
    if job.total:
        parts.append(f"{job.done} of {job.total} {'stages' if task['world'] == 'plan' else 'requests'}")
        if job.info.get("found"):
            parts.append(str(job.info["found"]))
    parts.append(f"{duration(job.seconds)} so far" if job.seconds >= 1 else "just started")
    if job.eta is not None:
        parts.append(f"about {duration(max(1, job.eta))} left")
    return " · ".join(parts)


def _live(resources: Resources, ident: str) -> None:
    job = resources.jobs.get(ident)
    if job is None or job.over:
        session.keep()
        st.rerun()
        return
    with st.container(border=True, key="job"):
        st.progress(job.fraction, text=plain(status_line(job)))
        with st.container(horizontal=True, vertical_alignment="center"):
            st.button(
                "Cancel", key="cancel", on_click=resources.jobs.cancel, args=(ident,), disabled=job.cancelling,
                icon=":material/stop_circle:", help="What is finished so far is kept",
            )  # fmt: skip
            st.caption("The run goes on if you close or reload this page.")


def _outcome(resources: Resources, job: Job) -> None:
    kept = (
        f" What had finished is kept ({len(job.records)} of {len(job.tasks)} runs)."
        if job.records
        else " Nothing was kept."
    )
    with st.container(border=True, key="job-over"):
        with st.container(horizontal=True, vertical_alignment="center"):
            if job.state == "done":
                st.badge("done", icon=":material/check:", color="blue")
                st.markdown(
                    f"{plain(job.title)}: {len(job.records)} of {len(job.tasks)} runs in {duration(job.seconds)}."
                )
            elif job.state == "cancelled":
                st.badge("cancelled", icon=":material/stop_circle:", color="gray")
                st.markdown(f"{plain(job.title)}.{kept}")
            else:
                st.badge("failed", icon=":material/error:", color="orange")
                st.markdown(f"{plain(job.title)}: {plain(job.error)}.{kept}")
            real, predicted = pair_of(job)
            both = real is not None and predicted is not None
            if both and st.button("Compare", key="to-compare", icon=":material/compare_arrows:", on_click=session.keep):
                session.show(real=real, predicted=predicted)
                st.switch_page(st.session_state.pages["compare"])
            st.button("Dismiss", key="dismiss", on_click=session.show, kwargs={"job": None}, type="tertiary")
        for index, text in job.problems.items():
            st.error(f"{plain(job.tasks[index]['label'])}: {plain(text)}")
        if job.state == "failed" and job.log.strip():
            with st.expander("Log of the run"):
                st.code(job.log, language=None)


def pair_of(job: Job) -> tuple[str | None, str | None]:
    """The last measured record of a job and the prediction of the same scenario."""
    real = next((i for i in reversed(job.records) if job.tasks[i]["world"] == "engine"), None)
    if real is None:
        return None, None
    key = job.tasks[real]["key"]
    twin = next(
        (job.records[i] for i in job.records if job.tasks[i]["world"] == "simulator" and job.tasks[i]["key"] == key),
        None,
    )
    return job.records[real], twin
