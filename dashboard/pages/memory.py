"""Memory: does it fit, what fills it, and which change would make it fit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import streamlit as st
from pydantic import ValidationError

from twinfer.core.errors import TwinferError
from twinfer.core.memory import Fix
from twinfer.dashboard import memory_charts, parts, session
from twinfer.dashboard.choices import technique, unused
from twinfer.dashboard.explain import explain, in_controls
from twinfer.dashboard.memory_view import MemoryView, memory_view
from twinfer.dashboard.pages import Page
from twinfer.dashboard.quantities import Quantity, number
from twinfer.dashboard.resources import Resources
from twinfer.dashboard.scenario import PLACEMENT, Scenario

GIB = 2**30
QUANTITIES = (
    Quantity("weights", "Weights", "GiB", "lower", 1 / GIB, "Weights of one device, in the format they are stored in."),
    Quantity("pool", "KV pool", "GiB", "higher", 1 / GIB, "What is left for keys and values on one device, in whole blocks."),
    Quantity("per_token", "KV per token", "KiB", "lower", 1 / 1024, "What one token of context takes on one device."),
    Quantity("worst", "Requests, worst case", "", "higher", 1.0, "Requests that fit if each is as long as the context allows.", "Worst case"),
    Quantity("expected", "Requests, expected", "", "higher", 1.0, "Requests of the workload's lengths that fit, whatever the batch is limited to.", "Expected"),
)  # fmt: skip


class MemoryPage(Page):
    name = "memory"
    title = "Memory"
    group = "Explore"
    summary = "Whether a model fits, what fills each device, and computed changes that make room"

    def render(self, resources: Resources) -> None:
        parts.heading("Memory", "Does it fit, what fills it, and what would make room?")
        parts.scenario_bar(resources)
        results, controls = st.columns([3, 1], gap="medium")
        with controls, st.container(border=True, key="controls"):
            st.subheader("Yours", anchor=False)
            for name in ("tp", "pp", "cp", "dp", "ep", "kv_dtype"):
                parts.setting(name)
            for kind in ("quantizer", "attention", "kv_cache"):
                if resources.registry.names(kind):
                    technique(resources, kind, optional=kind != "kv_cache")
            with st.expander("Limits", key="memory-limits"):
                for name in (
                    "max_model_len",
                    "max_num_seqs",
                    "max_num_batched_tokens",
                    "num_kv_blocks",
                    *PLACEMENT[-3:],
                ):
                    if name != "kv_dtype":
                        parts.setting(name)
        with results:
            if session.scenario().speculator is not None:
                st.caption(
                    "Weights and KV of what guesses ahead are not counted here; the Techniques page counts them."
                )
            unused(resources, ("scheduler", "speculator"))
            _results(resources)


def _results(resources: Resources) -> None:
    scenario = session.scenario()
    try:
        view = memory_view(scenario, resources.registry)
    except (TwinferError, ValidationError) as error:
        st.error(parts.plain(explain(error)))
        st.caption("Nothing can be computed until that is changed. Back in the browser undoes the last edit.")
        return
    _answer(view, scenario)
    _cards(view, _baseline(scenario, resources))
    if view.budget is None:
        _fixes(view)
    parts.show(memory_charts.rank_bars(view), "ranks")
    st.caption(
        "Up to the dashed line: what the memory fraction covers. Driver context and captured graphs lie beyond it, "
        "as in engines that size their pool before they capture."
    )
    st.subheader("KV against context", anchor=False)
    pool = None if view.budget is None else view.budget.kv_pool_bytes
    parts.show(memory_charts.kv_lines(view.curves, pool, view.wanted), "kv")
    _equations(view)


def _answer(view: MemoryView, scenario: Scenario) -> None:
    """Whether it fits, in one sentence."""
    device, rank = view.placed.device, view.rank
    count = f"{scenario.num_devices} × {device.name}" if scenario.num_devices > 1 else device.name
    if view.budget is None:
        missing = max(0.0, rank.held + view.request_bytes(rank) - rank.ceiling) / GIB
        where = f" on {rank.name}" if len(view.ranks) > 1 else ""
        st.error(
            f"**Does not fit** on {parts.plain(count)}: {number(missing)} GiB are missing{parts.plain(where)} for one request of "
            f"{view.wanted:,} tokens."
        )
        return
    budget = view.budget
    expected = budget.expected_concurrency or 0.0
    limit = "memory" if expected < scenario.max_num_seqs else f"the limit of {scenario.max_num_seqs} rows"
    deciding = f" {rank.name.capitalize()} decides." if len(view.ranks) > 1 else ""
    st.info(
        f"**Fits** on {parts.plain(count)}: {budget.num_blocks:,} blocks hold {budget.kv_tokens:,} tokens, "
        f"{number(budget.worst_case_concurrency)} requests of {budget.max_model_len:,} tokens or about {number(expected)} of this "
        f"workload's; the batch is bounded by {limit}.{parts.plain(deciding)}",
        icon=":material/check:",
    )


def _baseline(scenario: Scenario, resources: Resources) -> MemoryView | None:
    base = scenario.baseline()
    if base.key() == scenario.key():
        return None
    try:
        return memory_view(base, resources.registry)
    except (TwinferError, ValidationError):
        return None


def _cards(view: MemoryView, base: MemoryView | None) -> None:
    now, then = _values(view), {} if base is None else _values(base)
    with st.container(horizontal=True, key="cards"):
        for quantity in QUANTITIES:
            if quantity.key in now:  # without room there is no pool
                parts.card(
                    quantity, predicted=now[quantity.key], band=None, measured=None, base_measured=None,
                    base_predicted=then.get(quantity.key), source="**analytic**",
                )  # fmt: skip


def _values(view: MemoryView) -> Mapping[str, float]:
    rank = view.rank
    found: dict[str, float] = {"weights": rank.weights, "per_token": rank.per_token}
    if view.budget is not None:
        found |= {"pool": view.budget.kv_pool_bytes, "worst": view.budget.worst_case_concurrency}
        found |= {"expected": view.budget.expected_concurrency or 0.0}
    return found


# --- changes that make room ---------------------------------------------------------------------


def _fixes(view: MemoryView) -> None:
    """Each change that was computed to suffice, with a button that makes it; and what was tried in vain."""
    offered = [fix for fix in view.fixes if fix.fits] or view.pairs()
    vain = [fix for fix in view.fixes if not fix.fits]
    st.subheader("What would make it fit", anchor=False)
    if not offered:
        st.info("No change that is known here, nor two of them, makes it fit. Take a larger device or more of them.")
    with st.container(key="fixes"):
        for index, fix in enumerate(offered):
            with st.container(horizontal=True, vertical_alignment="center"):
                st.button(
                    "Apply", key=f"fix-{index}", on_click=session.edit, kwargs=_edit(fix), help=in_controls(fix.change)
                )
                st.markdown(f"**{parts.plain(in_controls(fix.change))}**: {parts.plain(fix.effect)}")
    if vain:
        with st.expander("Tried, not enough", key="vain"):
            parts.rows(
                [{"change": in_controls(fix.change), "still missing (GiB)": number(-fix.spare / GIB)} for fix in vain]
            )


def _edit(fix: Fix) -> dict[str, Any]:
    return {name: value for name, value in fix.updates.items() if name in Scenario.model_fields}


# --- equations ----------------------------------------------------------------------------------


def _equations(view: MemoryView) -> None:
    st.subheader("The equation", anchor=False)
    text, value = view.equations(view.rank)["num_blocks"]
    st.code(f"num_blocks = {text}\n           = {value}", language=None, wrap_lines=True)
    with st.expander("Every number of every rank", key="equations"):
        for rank in view.ranks:
            if len(view.ranks) > 1:
                st.markdown(f"**{parts.plain(rank.name)}**")
            lines = [f"{name} = {text} = {value!r}" for name, (text, value) in view.equations(rank).items()]
            st.code("\n".join(lines), language=None, wrap_lines=True)


__all__ = ["MemoryPage"]
