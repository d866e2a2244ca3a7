"""Roofline: what bounds each op of a prefill and of a decode step, and how far from the roof it stays."""

from __future__ import annotations

import streamlit as st
from pydantic import ValidationError

from twinfer.core.errors import TwinferError
from twinfer.dashboard import parts, roofline_charts, session
from twinfer.dashboard.choices import technique, unused
from twinfer.dashboard.explain import explain
from twinfer.dashboard.pages import Page
from twinfer.dashboard.quantities import Quantity, number, percent
from twinfer.dashboard.resources import Resources
from twinfer.dashboard.roofline_view import LARGEST_BATCH, RooflineView, roofline_view

BATCHES = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048]
QUANTITIES = (
    Quantity("prefill", "Prefill", "ms", "lower", 1e3, "One prompt of the workload's mean length, in one step."),
    Quantity("decode", "Decode step", "ms", "lower", 1e3, "One token for every row."),
    Quantity("rate", "Decode rate", "tok/s", "higher", 1.0, "Rows per second of a decode step, without prefills."),
    Quantity("crossover", "Crossover batch", "rows", "", 1.0, "Rows from which the linears of a decode step take longer to compute than to move."),
)  # fmt: skip


class RooflinePage(Page):
    name = "roofline"
    title = "Roofline"
    group = "Explore"
    summary = "Ops of prefill and decode under a device's roofs: what bounds them, and from which batch on"

    def render(self, resources: Resources) -> None:
        parts.heading("Roofline", "Compute-bound or memory-bound, and how far from the roof?")
        parts.scenario_bar(resources)
        results, controls = st.columns([3, 1], gap="medium")
        with controls, st.container(border=True, key="controls"):
            st.subheader("Yours", anchor=False)
            _device(resources)
            for name in ("tp", "dtype", "kv_dtype"):
                parts.setting(name)
            for kind in ("quantizer", "attention"):
                if resources.registry.names(kind):
                    technique(resources, kind, optional=True)
        with results:
            unused(resources, ("scheduler", "speculator"))
            batch = _batch()
            try:
                view = roofline_view(session.scenario(), resources.registry, batch)
            except (TwinferError, ValidationError) as error:
                st.error(parts.plain(explain(error)))
                st.caption("Nothing can be computed until that is changed. Back in the browser undoes the last edit.")
                return
            _show(view)


def _device(resources: Resources) -> None:
    current = session.scenario().device
    names = list(dict.fromkeys(["auto", *parts.device_names(resources), current]))
    st.session_state.w_roof_device = current
    st.selectbox(
        "Device of the roofs", names, key="w_roof_device", format_func=lambda name: "this machine" if name == "auto" else name,
        on_change=lambda: session.edit(device=st.session_state.w_roof_device),
    )  # fmt: skip


def _batch() -> int:
    """Rows of the decode step, kept in the link."""
    asked = session.view("batch") or ""
    rows = int(asked) if asked.isdigit() and 1 <= int(asked) <= LARGEST_BATCH else session.scenario().max_num_seqs
    rows = min(rows, LARGEST_BATCH)
    options = sorted({*BATCHES, rows})
    st.session_state.w_batch = rows
    st.select_slider(
        "Rows of the decode step", options, key="w_batch",
        on_change=lambda: session.show(batch=str(st.session_state.w_batch)),
    )  # fmt: skip
    return rows


def _show(view: RooflineView) -> None:
    decode, prefill = view.step("decode"), view.step("prefill")
    st.markdown(_verdict(view))
    values = {
        "prefill": view.seconds("prefill"), "decode": view.seconds("decode"), "rate": view.batch / view.seconds("decode"),
        "crossover": view.crossover,
    }  # fmt: skip
    sources = sorted({p.source for p in (*decode, *prefill)})
    with st.container(horizontal=True, key="cards"):
        for quantity in QUANTITIES:
            value = values[quantity.key]
            if value is not None:
                parts.card(
                    quantity, predicted=float(value), band=None, measured=None, base_predicted=None, base_measured=None,
                    source="**analytic**, by peaks" if quantity.key == "crossover" else f"**{', '.join(sources)}**",
                )  # fmt: skip
    parts.show(roofline_charts.roofline(view), "roofline")
    images = ", images and their encoder included" if session.scenario().images_per_request else ""
    st.caption(
        f"Decode: {view.batch:,} rows with {view.context:,} tokens of context; prefill: {view.prompt:,} tokens{images}. The area of a "
        "point is its share of the step; what computes nothing, such as copies and collectives, is in the table alone."
    )


def _verdict(view: RooflineView) -> str:
    """Which op bounds each step, and from which batch on decoding is bound by compute."""
    said = []
    for phase in ("prefill", "decode"):
        first = view.step(phase)[0]
        said.append(
            f"**{phase.capitalize()}** spends {percent(first.share, signed=False)} in `{first.name}`, which is bound by "
            f"{first.bound}."
        )
    attention = next((p for p in view.step("decode") if p.name == "attention"), None)
    if view.crossover is None:
        said.append(f"Its linears stay bound by memory up to {LARGEST_BATCH:,} rows.")
    else:
        where = "already" if view.batch >= view.crossover else "not yet"
        said.append(
            f"Its linears are bound by compute from **{view.crossover:,} rows** on ({where} at {view.batch:,} rows)."
        )
    if attention is not None and attention.bound == "memory":
        said.append(
            f"Attention stays bound by memory at {number(attention.intensity)} FLOP/B however many rows there are."
        )
    return " ".join(said)


__all__ = ["RooflinePage"]
