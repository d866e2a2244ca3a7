"""The Capacity page: its question, its charts, and the page itself through AppTest with a finished search on disk."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest

from twinfer.core.errors import ConfigError
from twinfer.core.goal import Goal
from twinfer.core.registry import Registry
from twinfer.dashboard import capacity
from twinfer.dashboard.scenario import Scenario
from twinfer.simulator.plan import Plan, plan

pytestmark = pytest.mark.usefixtures("no_cached_pages")

REGISTRY = Registry(entry_points=False)
ASKED = {
    "model": "llama-3.1-8b", "plan_devices": "l40s,h100-sxm", "plan_rate": "20", "plan_requests": "40", "input_len": "400",
    "output_len": "6", "spread": "0", "plan_ttft": "0.5", "plan_tpot": "0", "plan_percentile": "90",
}  # fmt: skip


@pytest.fixture(scope="module")
def scenario() -> Scenario:
    found, problems = Scenario.from_params(ASKED)
    assert not problems
    return found


@pytest.fixture(scope="module")
def found(scenario: Scenario) -> dict[str, Any]:
    question = capacity.question_of(scenario, REGISTRY)
    made: Plan = plan(question, REGISTRY)
    return json.loads(json.dumps(made.plain()))


GOALS = (Goal("ttft", "p90", 0.5),)


def test_the_question_is_the_scenarios(scenario: Scenario) -> None:
    question = capacity.question_of(scenario, REGISTRY)
    assert question.goals == GOALS and question.model == "llama-3.1-8b"
    assert question.axes["device"] == ("l40s", "h100-sxm")
    assert question.workload.rate == 20 and question.workload.num_requests == 40 and question.workload.input_len == 400
    other = capacity.question_of(scenario.edited(plan_rate=21.0), REGISTRY)
    assert capacity.key_of(question) != capacity.key_of(other)
    every = capacity.question_of(scenario.edited(plan_devices=""), REGISTRY)
    assert len(every.axes["device"]) >= 6 and "cpu" not in every.axes["device"]
    sees = scenario.edited(model="qwen2.5-vl-7b", images_per_request=1.0, image_tokens=500)
    assert capacity.question_of(sees, REGISTRY).workload.image_tokens == 500
    assert "+ 1 image of 500 tokens" in capacity.line_of(sees)
    assert scenario.key() == scenario.edited(plan_rate=21.0).key()  # runs do not depend on what is planned


@pytest.mark.parametrize(
    ("changes", "option"),
    [
        ({"plan_ttft": 0.0}, "--slo"),
        ({"plan_devices": "h1000"}, "--device"),
        ({"plan_trace": "missing.csv"}, "--trace"),
        ({"plan_trace": "\0"}, "--trace"),
        ({"scheduler": "nope"}, "--scheduler"),
        ({"images_per_request": 1.0}, "--images-per-request"),
        ({"kv_cache": "paged:block_size=word"}, "--kv-cache"),
    ],
)
def test_what_cannot_be_asked_is_said(scenario: Scenario, changes: dict[str, Any], option: str) -> None:
    with pytest.raises(ConfigError) as error:
        capacity.question_of(scenario.edited(**changes), REGISTRY)
    assert error.value.option == option


def test_front_chart_shows_cost_and_goodput_of_priced_fleets(found: dict[str, Any]) -> None:
    fleets = [{**f} for f in found["answer"]["fleets"]]
    for f, cost in zip(fleets, (3.0, 5.0), strict=True):
        f["cost_per_hour"] = cost
    chart = capacity.front_chart(fleets, 20.0)
    assert chart is not None
    points = {(x, y) for t in chart.figure.data if t.mode == "markers" for x, y in zip(t.x, t.y, strict=True)}
    assert points == {(f["cost_per_hour"], f["goodput"]) for f in fleets}
    assert (
        "US$ per hour" in chart.figure.layout.xaxis.title.text and "requests/s" in chart.figure.layout.yaxis.title.text
    )
    assert fleets[0]["label"] in chart.alt and len(chart.table) == 2
    fleets[1]["cost_per_hour"] = None
    assert len(capacity.front_chart(fleets, 20.0).table) == 1
    assert capacity.front_chart([{**f, "cost_per_hour": None} for f in fleets], 20.0) is None


def test_promise_chart_shows_shares_of_the_promise_and_cuts_bands(found: dict[str, Any]) -> None:
    fleets = found["answer"]["fleets"]
    chart = capacity.promise_chart(fleets, GOALS)
    draws, trace, promise = chart.figure.data
    ends = [f["spread"]["ttft.p90"] for f in fleets]
    assert [v for v in draws.x if v is not None] == pytest.approx([100 * v / 0.5 for pair in ends for v in pair])
    assert [y for y in draws.y if y is not None] == [y for y in trace.y for _ in range(2)]
    assert all(
        low - 1e-9 <= x <= high + 1e-9 for x, low, high in zip(trace.x, draws.x[::3], draws.x[1::3], strict=True)
    )
    assert "all draws" in chart.alt and chart.table[0]["most of all draws (s)"] == ends[0][1]
    alone = capacity.promise_chart([{**f, "seeds": 1} for f in fleets], GOALS)
    assert len(alone.figure.data) == 2 and "draws" not in alone.alt
    assert list(promise.x) == [100, 100]
    assert list(trace.x) == pytest.approx([100 * f["values"]["ttft.p90"] / 0.5 for f in fleets])
    assert all(0 <= x <= 100 for x in trace.x), "a fleet that is proposed keeps its promises"
    assert all(x + up <= 200 + 1e-9 for x, up in zip(trace.x, trace.error_x.array, strict=True))
    assert "%" in chart.figure.layout.xaxis.title.text and len(chart.table) == len(fleets)
    wide = {
        **fleets[0],
        "label": "3 x 4 l40s (tp 4, 512 tokens a step)",
    }  # replicas and devices of each, as in the table
    assert list(capacity.promise_chart([wide], GOALS).figure.layout.yaxis.ticktext) == ["3 x 4 l40s"]


def test_change_chart_counts_replicas_against_the_answer(found: dict[str, Any]) -> None:
    best, changed = found["answer"]["fleets"][0], found["answer"]["changed"]
    chart = capacity.change_chart(changed, best)
    assert chart is not None
    (bar,) = chart.figure.data
    assert list(bar.x) == [r["replicas"] - best["replicas"] for r in changed if r["replicas"] is not None]
    assert bar.x[-1] == 1  # N+1
    assert capacity.change_chart([], best) is None


def test_rows_say_what_is_not_known(found: dict[str, Any]) -> None:
    fleet = {**found["answer"]["fleets"][0], "cost_per_hour": None, "cost_per_million": None, "joules_per_token": None}
    (row,) = capacity.fleet_rows([fleet], GOALS)
    spread = row[f"TTFT p90 of {fleet['seeds']} draws (ms)"]
    assert fleet["seeds"] > 1 and " to " in spread and spread != row["TTFT p90 (ms, 80 % band)"]
    one = {**fleet, "seeds": 1, "goodput_spread": (2.0, 2.0), "clients": 7, "spread": {}}
    (row_of_one,) = capacity.fleet_rows([one], GOALS)
    assert row_of_one["goodput (req/s)"] == "2 by 7 clients" and not any("draws" in name for name in row_of_one)
    lost = {**fleet, "goodput_spread": (1.5, 2.5), "spread": {"ttft.p90": (0.25, None)}}
    (row_of_lost,) = capacity.fleet_rows([lost], GOALS)
    assert row_of_lost["goodput (req/s)"] == "1.50 to 2.50"
    assert row_of_lost[f"TTFT p90 of {fleet['seeds']} draws (ms)"] == "250 to not served"
    assert row["US$/h"] == "no price" and row["J/token"] == "not known" and "TTFT p90 (ms, 80 % band)" in row


CHEAPER = [
    {"fleet": "2 x l40s", "cost_per_hour": 1.58, "num_devices": 2, "why": "TTFT p90 would be 0.9 s"},
    {"fleet": "1 x *own*", "cost_per_hour": None, "num_devices": 1, "why": "memory: KV capacity"},
]


def test_cheaper_fleets_say_what_each_lacks() -> None:
    first, second = capacity.cheaper_rows(CHEAPER)
    assert first == {"fleet": "2 x l40s", "devices": "2", "US$/h": "1.58", "why not": "TTFT p90 would be 0.9 s"}
    assert second["US$/h"] == "no price"
    told = {
        **CHEAPER[0],
        "why": "--max-model-len=1785: one request of 1785 tokens needs 0.55 GiB; try --tp 2, or --quant fp8",
    }
    (row,) = capacity.cheaper_rows([told])
    assert row["why not"] == "one request of 1785 tokens needs 0.55 GiB; try Tensor parallel 2, or Quantization fp8"


def test_an_answer_of_another_version_is_none(tmp_path: Path, found: dict[str, Any]) -> None:
    for text in (json.dumps({**found, "schema": 1}), json.dumps({**found, "kind": "x"}), "[" * 20000, "", "[1]"):
        (tmp_path / "plan.json").write_text(text)
        assert capacity.read_answer(tmp_path / "plan.json") is None
    (tmp_path / "plan.json").write_text(json.dumps(found))
    assert capacity.read_answer(tmp_path / "plan.json") == found


# --- the page ---------------------------------------------------------------------------------------


def _script(root: str) -> None:
    from twinfer.dashboard.app import main

    main(["--runs-dir", root], first="capacity")


@pytest.fixture
def page(tmp_path: Path) -> Callable[..., AppTest]:
    def open_page(**params: str) -> AppTest:
        at = AppTest.from_function(_script, args=(str(tmp_path),), default_timeout=300)
        for key, value in params.items():
            at.query_params[key] = value
        at.run()
        assert not at.exception
        return at

    return open_page


def texts(at: AppTest) -> str:
    kinds = ("markdown", "caption", "info", "warning", "error", "success")
    return "\n".join(str(e.value) for kind in kinds for e in at.get(kind))


def store(root: Path, scenario: Scenario, found: dict[str, Any], state: str = "done") -> str:
    """A finished search as the worker leaves it."""
    ident = "20261130-120000-abcdef"
    folder = root / "jobs" / ident
    folder.mkdir(parents=True)
    task = {
        "world": "plan", "label": "fleets", "config": found["question"], "workload": {},
        "scenario": scenario.to_params(), "key": capacity.key_of(capacity.question_of(scenario, REGISTRY)),
    }  # fmt: skip
    job = {"title": "Capacity", "created": "2026-11-30T12:00:00", "tasks": [task], "scenario": scenario.to_params()}
    (folder / "job.json").write_text(json.dumps(job))
    (folder / "events.jsonl").write_text(json.dumps({"event": "end", "state": state}) + "\n")
    (folder / "plan.json").write_text(json.dumps(found))
    return ident


def test_a_cold_start_asks_and_can_search(page) -> None:
    at = page()
    assert at.title[0].value == "Capacity" and "No search was made for this yet" in texts(at)
    assert not next(b for b in at.button if b.label == "Search").disabled
    next(b for b in at.button if b.label.startswith("Example")).click().run()
    assert not at.exception
    assert at.number_input(key="w_plan_rate").value == 6.0 and "llama-3.1-70b" in texts(at).replace("\\", "")


def test_a_promise_must_be_made(page) -> None:
    at = page(plan_ttft="0", plan_tpot="0")
    assert "every fleet will do" in texts(at)
    assert next(b for b in at.button if b.label == "Search").disabled


def test_a_deep_link_shows_the_stored_answer(page, tmp_path: Path, scenario: Scenario, found: dict[str, Any]) -> None:
    answer = {**found["answer"], "cheaper": CHEAPER}
    store(tmp_path, scenario, {**found, "answer": answer})
    at = page(**ASKED)
    assert not at.exception
    shown = texts(at).replace("\\", "")
    assert found["answer"]["sentence"] in shown and "simulated" in shown
    assert at.multiselect(key="w_plan_devices").value == ["l40s", "h100-sxm"]
    spec = json.loads(at.get_by_key("chart-promises").proto.spec)
    assert len(spec["data"]) == 3 and at.get_by_key("chart-promises").proto.alt
    assert json.loads(at.get_by_key("chart-front").proto.spec)["data"]
    assert "Why nothing cheaper will do" in [h.value for h in at.subheader] and "grey bars are all of them" in shown
    tables = "\n".join(table.value.to_string() for table in at.table).replace("\\", "")
    assert all(row["why"] in tables for row in CHEAPER) and "draws (ms)" in tables
    assert (
        "2\N{NO-BREAK SPACE}x\N{NO-BREAK SPACE}l40s" in tables
    )  # a narrow column keeps a count and what it counts together
    at.number_input(key="w_plan_rate").set_value(21.0).run()
    assert not at.exception and "No search was made for this yet" in texts(at)


def test_a_stopped_search_says_so_and_old_answers_are_marked(
    page, tmp_path: Path, scenario: Scenario, found: dict
) -> None:
    partial = {**found, "complete": False, "answer": {**found["answer"], "changed": []}}
    ident = store(tmp_path, scenario, partial, "cancelled")
    at = page(job=ident, **ASKED)
    assert "may be cheaper" in texts(at) and "cancelled" in texts(at)
    at.number_input(key="w_plan_ttft").set_value(0.6).run()
    assert not at.exception and "inputs changed since the search" in texts(at)
    next(b for b in at.button if b.label == "Back to what was searched").click().run()
    assert at.number_input(key="w_plan_ttft").value == 0.5
