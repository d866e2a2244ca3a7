"""Techniques: what does each technique give here, alone and together; predicted at once, measured on demand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import streamlit as st
from pydantic import ValidationError

from twinfer.core.compare import relative_error
from twinfer.core.device import GENERIC
from twinfer.core.errors import TwinferError
from twinfer.core.guesses import in_words
from twinfer.dashboard import figures, parts, session
from twinfer.dashboard.choices import technique
from twinfer.dashboard.combinations import Combination, combinations, interaction
from twinfer.dashboard.explain import explain, in_controls
from twinfer.dashboard.jobs import Job
from twinfer.dashboard.pages import Page
from twinfer.dashboard.quantities import BY_KEY, CHARTED, band_of, percent, value_of
from twinfer.dashboard.resources import Prediction, Resources, task_of
from twinfer.dashboard.scenario import PLACEMENT, Scenario

CARDS = ("output_throughput", "ttft.p50", "tpot.p50", "kv_waste")


class TechniquesPage(Page):
    name = "techniques"
    title = "Techniques"
    group = "Explore"
    summary = "Toggle techniques and see what each does to speed and memory, real and predicted"

    def render(self, resources: Resources) -> None:
        parts.heading("Techniques", "What does each technique give here, alone and together?")
        parts.scenario_bar(resources)
        results, controls = st.columns([3, 1], gap="medium")
        with controls:
            _controls(resources)
        with results:
            _results(resources)


# --- controls -----------------------------------------------------------------------------------


def _controls(resources: Resources) -> None:
    with st.container(border=True, key="controls"):
        st.subheader("Yours", anchor=False)
        for kind in ("scheduler", "kv_cache"):
            technique(resources, kind)
        for kind in ("attention", "quantizer", "speculator"):
            if resources.registry.names(kind):
                technique(resources, kind, optional=True)
        parts.setting("max_num_seqs")
        parts.setting("max_num_batched_tokens")
        with st.expander("Memory limits", key="memory-limits"):
            parts.setting("max_model_len")
            parts.setting("num_kv_blocks")
        with st.expander("Devices and formats", key="placement"):
            for name in PLACEMENT:
                parts.setting(name)
    with st.container(border=True, key="baseline"):
        st.subheader("Baseline", anchor=False)
        base = session.scenario().baseline()
        st.markdown(parts.plain(base.techniques()))
        st.caption(
            f"{base.max_num_seqs} rows, {base.max_num_batched_tokens} tokens per step. Every change refers to it."
        )
        st.button(
            "Pin yours as baseline",
            icon=":material/keep:",
            on_click=lambda: session.replace(session.scenario().pinned()),
        )
        if any(name.startswith("base_") for name in session.scenario().to_params()):
            default = Scenario()
            st.button(
                f"Back to {default.baseline().techniques()}", type="tertiary", on_click=session.edit,
                kwargs={n: getattr(default, n) for n in Scenario.model_fields if n.startswith("base_")},
            )  # fmt: skip


# --- results ------------------------------------------------------------------------------------


def _results(resources: Resources) -> None:
    scenario = session.scenario()
    found = combinations(scenario, resources.registry)
    stored = resources.jobs.results("simulator")
    asked = [scenario, scenario.baseline(), *(c.scenario for c in found)]
    mine, base, *others = resources.predict_all(asked, stored)
    predictions = {c.label: prediction for c, prediction in zip(found, others, strict=True)}
    measured = _measured(resources)
    yours, base_key = scenario.key(), scenario.baseline().key()

    job = parts.job_panel(resources)
    _run_bar(
        resources, found, _times(found, predictions, measured), bool(mine.problem), job is not None and not job.over
    )
    if mine.problem:
        st.error(parts.plain(mine.problem))
        st.caption(
            "Nothing can be predicted for this scenario until that is changed. Back in the browser undoes the last edit."
        )
    else:
        _cards(mine, measured.get(yours), base, measured.get(base_key), same=yours == base_key)
        _caveats(mine)
    _charts(found, predictions, measured)
    _guesses(mine)
    _chosen(mine)
    if job is not None and job.over:
        _stale(resources, job, {c.scenario.key() for c in found})


def _caveats(mine: Prediction) -> None:
    """What keeps the estimate from being the whole answer."""
    if mine.partial:
        st.warning(
            "This workload is too large for an estimate at once: the numbers cover the requests that were finished "
            f"after {mine.seconds:.0f} s. “Predict and store” computes all of it in the background."
        )
    elif mine.sample is not None:
        st.info(
            f"Quick estimate from the first {mine.sample:,} of {session.scenario().num_requests:,} requests. "
            "“Predict and store” computes all of it in the background.",
            icon=":material/filter_list:",
        )
    if mine.record is not None and (traffic := mine.record.reasons.get("traffic")):
        st.warning(f"Traffic is {parts.plain(traffic)}.")
    if mine.record is not None and (rows := mine.record.reasons.get("rows")):
        st.info(f"Rows: {parts.plain(in_controls(rows))}.")


def _measured(resources: Resources) -> dict[str, Mapping[str, Any]]:
    """Scenario key -> metrics of its newest measurement in the store."""
    stored = {summary.id: summary for summary in resources.store.list() if not summary.problem}
    found = resources.jobs.results("engine")
    return {key: stored[record].metrics for key, record in found.items() if record in stored}


def _cards(
    mine: Prediction,
    real: Mapping[str, Any] | None,
    base: Prediction,
    base_real: Mapping[str, Any] | None,
    same: bool,
) -> None:
    with st.container(horizontal=True, key="cards"):
        for key in CARDS:
            quantity = BY_KEY[key]
            guess = None if mine.record is None else value_of(mine.record.metrics, key)
            got = None if real is None else value_of(real, key)
            parts.card(
                quantity,
                predicted=guess,
                band=None if mine.record is None else band_of(mine.record.intervals, key),
                measured=got,
                base_predicted=None if base.record is None or same else value_of(base.record.metrics, key),
                base_measured=None if base_real is None or same else value_of(base_real, key),
                error=relative_error(got, guess),
            )


def _guesses(mine: Prediction) -> None:
    """What became of guessed tokens, where there are any."""
    guesses = None if mine.record is None else mine.record.metrics.get("speculation")
    if guesses is None:
        return
    with st.container(border=True, key="guesses"):
        st.subheader("Guessed tokens, predicted", anchor=False)
        words = in_words(guesses, session.scenario().max_num_seqs)
        parts.rows([{"of guesses": what, "here": in_controls(text)} for what, text in words.items()])
        st.caption(
            "How many are right follows from the acceptance given in the options of the speculator: an assumption, or a measurement."
        )


def _chosen(mine: Prediction) -> None:
    """What "auto" became and why, and what the prediction rests on."""
    if mine.record is None:
        return
    reasons = mine.record.reasons
    if session.scenario().device == "auto" and mine.record.environment.get("device") == GENERIC:
        st.caption(
            "Times rest on typical data for this kind of machine. `twinfer calibrate` measures this one in one to two minutes; "
            "predictions are much closer after it."
        )
    if reasons:
        with st.expander("Chosen automatically", key="reasons"):
            parts.rows([{"setting": name, "choice and reason": in_controls(text)} for name, text in reasons.items()])


def _times(
    found: Sequence[Combination], predictions: Mapping[str, Prediction], measured: Mapping[str, Mapping[str, Any]]
) -> dict[str, float]:
    """Scenario key -> how long its real run takes in s: as measured before, else as predicted."""
    times = {}
    for combination in found:
        key, prediction = combination.scenario.key(), predictions[combination.label]
        cut = prediction.record is None or prediction.partial or prediction.sample is not None
        guess = None if cut or prediction.record is None else prediction.record.metrics.get("duration")
        time = measured.get(key, {}).get("duration") or guess
        if time is not None:
            times[key] = float(time)
    return times


def _run_bar(
    resources: Resources, found: Sequence[Combination], times: Mapping[str, float], wrong: bool, busy: bool
) -> None:
    why = resources.why_not_real(session.scenario())
    mine = times.get(session.scenario().key())
    with st.container(horizontal=True, vertical_alignment="center", key="run-bar"):
        st.button(
            "Run for real", type="primary", icon=":material/play_arrow:", key="run", disabled=busy or bool(why) or wrong,
            on_click=_start, args=(resources, [_own(found)], "Yours, real and predicted"), shortcut="Ctrl+Enter",
            help=why or "Measures this configuration on this machine and stores its prediction beside it (Ctrl+Enter)",
        )  # fmt: skip
        if len(found) > 1:
            st.button(
                f"Run all {len(found)} for real", icon=":material/playlist_play:", key="run-all",
                disabled=busy or bool(why) or wrong, on_click=_start,
                args=(resources, list(found), f"All {len(found)} combinations, real and predicted"),
                help=why or "Measures every combination of the chart, one after the other",
            )  # fmt: skip
        st.button(
            "Predict and store", icon=":material/query_stats:", key="run-predicted", disabled=busy or wrong,
            on_click=_start, args=(resources, [_own(found)], "Yours, predicted"), kwargs={"worlds": ("simulator",)},
            help="Runs the whole prediction in the background and stores its record",
        )  # fmt: skip
        if why:
            st.caption(f"Predictions only: {parts.plain(why)}.")
        elif mine is not None:
            everything = f", all about {parts.duration(sum(times.values()))}" if len(found) > 1 else ""
            st.caption(f"Yours takes about {parts.duration(mine)} here{everything}, plus loading.")


def _own(found: Sequence[Combination]) -> Combination:
    scenario = session.scenario()
    return next((c for c in found if c.scenario.key() == scenario.key()), Combination("Yours", scenario, "all"))


def _start(
    resources: Resources, found: Sequence[Combination], title: str, worlds: Sequence[str] = ("simulator", "engine")
) -> None:
    tasks = []
    try:
        for combination in found:
            label = combination.scenario.techniques()
            tasks += [task_of(combination.scenario, world, label) for world in worlds]
    except (TwinferError, ValidationError) as error:
        session.tell(explain(error))
        return
    scenario = session.scenario()
    session.show(job=resources.jobs.start(tasks, f"{title}: {scenario.model}", scenario.to_params()))


def _charts(
    found: Sequence[Combination],
    predictions: Mapping[str, Prediction],
    measured: Mapping[str, Mapping[str, Any]],
) -> None:
    chosen = session.view("metric")
    key = chosen if chosen in CHARTED else CHARTED[0]
    st.session_state.w_metric = key

    def changed() -> None:
        picked = st.session_state.w_metric
        session.show(metric=None if picked == CHARTED[0] else picked)

    st.subheader("Each technique alone and together", anchor=False)
    st.selectbox(
        "Metric", CHARTED, key="w_metric", on_change=changed, format_func=lambda k: BY_KEY[k].title, width=280,
        label_visibility="collapsed",
    )  # fmt: skip
    quantity = BY_KEY[key]
    bars = []
    for combination in found:
        prediction = predictions[combination.label]
        real = measured.get(combination.scenario.key())
        record = None if prediction.partial else prediction.record
        bars.append(
            figures.Bar(
                label=combination.label,
                predicted=None if record is None else value_of(record.metrics, key),
                band=None if record is None else band_of(record.intervals, key),
                measured=None if real is None else value_of(real, key),
                baseline=combination.role == "baseline",
                note="cannot run" if prediction.problem else "not estimated" if prediction.partial else "",
            )
        )
    own = next(
        (
            p.problem
            for c, p in zip(found, predictions.values(), strict=True)
            if c.scenario.key() == session.scenario().key()
        ),
        "",
    )
    for combination in found:
        problem = predictions[combination.label].problem
        if problem and problem != own:
            st.caption(f"{parts.plain(combination.label)}: {parts.plain(problem)}")
    if all(bar.predicted is None and bar.measured is None for bar in bars):
        st.info("There is nothing to draw yet: no combination has an estimate or a measurement.")
        return
    parts.show(figures.technique_bars(bars, quantity), "techniques")
    if len(bars) < 2:
        st.info("Yours equals the baseline. Choose another scheduler, KV cache or limit to see what it changes.")
        return
    if quantity.better and any(b.baseline and (b.predicted or b.measured) for b in bars):
        st.subheader("Change against the baseline", anchor=False)
        parts.show(figures.change_bars(bars, quantity), "changes")
        st.caption(_interaction(found, bars))


def _interaction(found: Sequence[Combination], bars: Sequence[figures.Bar]) -> str:
    """Whether the techniques help or hinder each other, in words."""
    base = next((b for b in bars if b.baseline), None)
    together = next((b for c, b in zip(found, bars, strict=True) if c.role == "all"), None)
    alone = [b for c, b in zip(found, bars, strict=True) if c.role == "alone"]
    if base is None or together is None or not alone:
        return "Yours differs from the baseline in one thing; there is no interaction to show."
    real = all(b.measured is not None for b in (base, together, *alone))
    world = "measured" if real else "predicted"
    effect = interaction(getattr(base, world), [getattr(b, world) for b in alone], getattr(together, world))
    if effect is None:
        return "The interaction is not known: some combination has no value."
    if abs(effect) < 0.01:
        return f"Interaction ({world}): the effects multiply; together they give what they promise alone."
    return (
        f"Interaction ({world}): together the value is {percent(effect)} off what the effects alone would multiply to."
    )


def _stale(resources: Resources, job: Job, current: set[str]) -> None:
    """The measurements of a job whose scenario was left since: dimmed, with the way back."""
    tasks = {i: task for i, task in enumerate(job.tasks) if task["world"] == "engine" and i in job.records}
    if not tasks or any(task["key"] in current for task in tasks.values()):
        return
    old, _ = Scenario.from_params(job.scenario)
    with st.container(horizontal=True, vertical_alignment="center"):
        st.badge("inputs changed since the run", icon=":material/history:", color="orange")
        st.button(
            "Back to what was measured", key="restore", on_click=session.replace, args=(old,), icon=":material/undo:"
        )
    st.caption(parts.plain(old.line()))
    stored = {summary.id: summary.metrics for summary in resources.store.list() if not summary.problem}
    quantity = BY_KEY[CHARTED[0]]
    bars = [
        figures.Bar(label=task["label"], measured=value_of(stored.get(job.records[i], {}), quantity.key))
        for i, task in tasks.items()
    ]
    parts.show(figures.technique_bars(bars, quantity, stale=True), "stale")


__all__ = ["TechniquesPage"]
