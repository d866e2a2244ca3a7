"""Both pages through Streamlit's AppTest: what a scenario shows, edits, empty, error, partial and stale states."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import streamlit as st
from streamlit.testing.v1 import AppTest

from twinfer.core.records import RunRecord
from twinfer.core.run_store import RunStore
from twinfer.dashboard.jobs import JobManager
from twinfer.dashboard.resources import task_of
from twinfer.dashboard.scenario import Scenario

pytestmark = pytest.mark.usefixtures("no_cached_pages")

SMALL = {"num_requests": "4", "output_len": "8", "input_len": "16", "spread": "0"}


def _script(root: str, page: str, plugin_dirs: list[str]) -> None:
    from twinfer.dashboard.app import main

    extra = [word for folder in plugin_dirs for word in ("--plugins-dir", folder)]
    main(["--runs-dir", root, *extra], first=page)


@pytest.fixture
def page(tmp_path: Path) -> Callable[..., AppTest]:
    def open_page(name: str = "techniques", plugin_dirs: tuple[str, ...] = (), **params: str | list[str]) -> AppTest:
        at = AppTest.from_function(_script, args=(str(tmp_path), name, list(plugin_dirs)), default_timeout=300)
        for key, value in params.items():
            at.query_params[key] = value
        at.run()
        assert not at.exception
        return at

    return open_page


def spec(at: AppTest, key: str) -> dict[str, Any]:
    """The plotly JSON of a chart on the page."""
    return json.loads(at.get_by_key(f"chart-{key}").proto.spec)


def values(at: AppTest) -> dict[str, str]:
    return {metric.label: metric.value for metric in at.metric}


def texts(at: AppTest) -> str:
    return "\n".join(str(e.value) for kind in ("markdown", "caption", "info", "warning", "error") for e in at.get(kind))


def warned(at: AppTest) -> list[str]:
    """Warnings as they are read, without what escapes Markdown."""
    return [w.value.replace("\\", "") for w in at.warning]


def shown_url(at: AppTest) -> dict[str, str]:
    return {k: v[0] if isinstance(v, list) else v for k, v in at.query_params.items()}


# --- Techniques ---------------------------------------------------------------------------------


def test_a_cold_start_predicts_at_once(page):
    at = page()
    assert at.title[0].value == "Techniques"
    shown = values(at)
    assert set(shown) == {"Throughput", "TTFT p50", "TPOT p50", "KV waste"}
    assert all(any(c.isdigit() for c in value) for value in shown.values())
    assert texts(at).count("simulated") == 4 and "measured**" not in texts(at)
    chart = spec(at, "techniques")
    labels = [note["text"] for note in chart["layout"]["annotations"]]
    assert "<b>Baseline: static + contiguous</b>" in labels and "All: continuous + paged" in labels
    assert [trace["name"] for trace in chart["data"]] == ["predicted"]  # nothing unmeasured is drawn as measured
    assert "Output throughput by technique" in at.get_by_key("chart-techniques").proto.alt
    assert shown_url(at) == {}


def test_the_number_shown_is_the_simulators(page):
    from twinfer.dashboard.quantities import BY_KEY, shown
    from twinfer.simulator.run import simulate

    at = page(**SMALL)
    scenario, _ = Scenario.from_params(SMALL)
    metrics = simulate(scenario.config(), scenario.workload()).metrics
    assert values(at)["Throughput"] == shown(BY_KEY["output_throughput"], metrics["output_throughput"])


def test_a_deep_link_sets_every_widget(page):
    at = page(scheduler="continuous:chunk_size=64", kv_cache="contiguous", max_num_seqs="3", v="1", **SMALL)
    assert at.selectbox(key="w_scheduler").value == "continuous"
    assert at.selectbox(key="w_kv_cache").value == "contiguous"
    assert at.number_input(key="w_max_num_seqs").value == 3
    assert at.number_input(key="w_scheduler.continuous.chunk_size").value == 64
    assert shown_url(at)["scheduler"] == "continuous:chunk_size=64" and shown_url(at)["max_num_seqs"] == "3"


def test_an_edit_changes_the_prediction_and_the_url(page):
    at = page(**SMALL)
    before = values(at)
    at.selectbox(key="w_kv_cache").set_value("contiguous").run()
    assert not at.exception
    assert shown_url(at)["kv_cache"] == "contiguous"
    assert values(at)["KV waste"] != before["KV waste"]
    at.selectbox(key="w_kv_cache").set_value("paged").run()
    assert "kv_cache" not in shown_url(at) and values(at) == before


def test_options_come_from_the_techniques_schema_and_go_into_the_url(page):
    at = page(**SMALL)
    at.toggle(key="w_kv_cache.paged.prefix_sharing").set_value(False).run()
    at.number_input(key="w_kv_cache.paged.block_size").set_value(64).run()
    assert not at.exception
    assert shown_url(at)["kv_cache"] == "paged:block_size=64,prefix_sharing=false"


def test_speculation_is_chosen_with_its_options_and_says_what_became_of_guesses(page):
    at = page(**SMALL)
    assert "Guessed tokens" not in [h.value for h in at.subheader]
    at.selectbox(key="w_speculator").set_value("eagle").run()
    at.text_input(key="w_speculator.eagle.tree").set_value("3x2").run()
    at.number_input(key="w_speculator.eagle.num_tokens").set_value(2).run()
    assert not at.exception and not at.error
    assert shown_url(at)["speculator"] == 'eagle:num_tokens=2,tree="3x2"'
    assert "Guessed tokens, predicted" in [h.value for h in at.subheader]
    words = "\n".join(str(table.value) for table in at.table)
    assert "tokens per step" in words and "wasted" in words and "batch" in words
    assert (
        texts(at).count("no speculative decoding yet") == 2
    )  # at the control and beside the button that would measure
    assert at.button(key="run").disabled and not at.button(key="run-predicted").disabled


def test_a_tree_that_does_not_fit_is_said_in_words(page):
    at = page(speculator="eagle:tree=3x2x2x2x2", **SMALL)
    assert "5 deep" in texts(at)
    at.selectbox(key="w_speculator").set_value("").run()
    assert not at.exception and "speculator" not in shown_url(at) and values(at)


def test_back_adopts_the_url(page):
    at = page(**SMALL)
    at.number_input(key="w_max_num_seqs").set_value(2).run()
    assert shown_url(at)["max_num_seqs"] == "2"
    at.query_params.clear()
    for key, value in {"v": "1", **SMALL}.items():
        at.query_params[key] = value
    at.run()  # what the browser does on Back
    assert at.number_input(key="w_max_num_seqs").value == Scenario().max_num_seqs
    assert "max_num_seqs" not in shown_url(at)


def test_pinning_the_baseline(page):
    at = page(**SMALL)
    next(b for b in at.button if b.label == "Pin yours as baseline").click().run()
    assert not at.exception
    assert "Yours equals the baseline" not in texts(at) or spec(at, "techniques")
    assert shown_url(at)["base_scheduler"] == "continuous"
    assert any("Back to static + contiguous" in b.label for b in at.button)


def test_a_preset_fills_the_workload(page):
    at = page()
    at.button(key="preset-Long prompts").click().run()
    assert at.number_input(key="w_shared_prefix").value == 256 and shown_url(at)["input_len"] == "384"


def test_the_charted_metric_is_part_of_the_link(page):
    at = page(metric="kv_waste", **SMALL)
    assert spec(at, "techniques")["layout"]["xaxis"]["title"]["text"] == "KV waste (%)"
    at.selectbox(key="w_metric").set_value("tpot.p50").run()
    assert shown_url(at)["metric"] == "tpot.p50"
    assert "TPOT p50 (ms)" in spec(at, "techniques")["layout"]["xaxis"]["title"]["text"]


def test_a_loss_is_shown_as_one(page):
    """One row at a time is slower than the baseline's batch."""
    at = page(max_num_seqs="1", base_max_num_seqs="4", base_scheduler="continuous", base_kv_cache="paged", **SMALL)
    names = {trace["name"] for trace in spec(at, "changes")["data"]}
    assert "worse, predicted" in names
    delta = next(metric for metric in at.metric if metric.label == "Throughput")
    assert delta.delta.startswith("−") and "worse" in delta.proto.delta_description


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"model": "no-such-model"}, "no-such-model"),
        ({"scheduler": "nope"}, "no such scheduler"),
        ({"scheduler": "continuous:nope=1"}, "no option"),
        ({"shared_prefix": "500"}, "Shared prefix"),
        ({"device": "no-such-device"}, "no-such-device"),
    ],
)
def test_a_scenario_that_cannot_work_names_the_option_and_keeps_the_page(page, params, said):
    at = page(**SMALL, **params)
    assert said.replace("-", "") in texts(at).replace("\\", "").replace("-", "")
    assert "Traceback" not in texts(at) and "internal error" not in texts(at)
    assert at.button(key="run").disabled
    assert at.number_input(key="w_max_num_seqs")  # the controls are there to repair it


def test_a_bad_link_is_explained_and_ignored(page):
    at = page(max_num_seqs="-3", **SMALL)
    assert any(
        "max_num_seqs='-3' in the link was ignored: is too small; give at least 1" in text for text in warned(at)
    )
    assert at.number_input(key="w_max_num_seqs").value == Scenario().max_num_seqs


def test_a_model_without_weights_is_predicted_only(page):
    at = page(model="llama-3-8b", device="h100-sxm", **SMALL)
    assert at.button(key="run").disabled and "Predictions only" in texts(at)
    assert any(c.isdigit() for c in values(at)["Throughput"])


def test_a_prediction_cut_at_the_deadline_says_so(page, monkeypatch):
    from twinfer.dashboard import resources

    monkeypatch.setattr(resources, "DEADLINE", -1.0)
    at = page(**SMALL)
    assert any("too large for an estimate at once" in w.value for w in at.warning)
    assert "nothing to draw yet" in texts(at)  # never drawn as whole
    assert not any(e.key == "chart-techniques" for e in at.get("plotly_chart"))


def test_a_large_workload_is_sampled_and_says_so(page, monkeypatch):
    from twinfer.dashboard import resources

    monkeypatch.setattr(resources, "SAMPLE", 64)
    at = page(**{**SMALL, "num_requests": "9", "max_num_seqs": "2"})
    assert any("first 8 of 9 requests" in i.value for i in at.info)
    assert any(c.isdigit() for c in values(at)["Throughput"])
    assert "Yours takes" not in texts(at)  # the time of a sample is not the time of the run


def test_traffic_above_capacity_is_said(page):
    crowd = {**SMALL, "num_requests": "40", "max_num_seqs": "1", "rate": "1000"}
    at = page(**crowd)
    assert any("Traffic is above capacity: " in words for words in warned(at))
    assert any(i.value.startswith("Rows: all 1 were taken ") and "--" not in i.value for i in at.info)
    assert not any("Traffic" in words for words in warned(page(**{**crowd, "rate": "0.01"})))


def test_the_page_does_not_wait_for_ever_for_estimates(page, monkeypatch):
    from twinfer.dashboard import resources

    monkeypatch.setattr(resources, "PATIENCE", -1.0)
    at = page(**SMALL)
    assert any(c.isdigit() for c in values(at)["Throughput"])  # yours always
    assert "not estimated" in str(spec(at, "techniques")["layout"]["annotations"])


def test_measurements_of_a_scenario_that_was_left_are_dimmed_with_the_way_back(page, tmp_path, record):
    asked, _ = Scenario.from_params(SMALL)
    store, run = RunStore(tmp_path), record("engine", run="real-run")
    store.save(run)
    folder = tmp_path / "jobs" / "20261129-120000-abcdef"
    folder.mkdir(parents=True)
    task = task_of(asked, "engine", "continuous + paged").plain()
    spec_of_job = {"id": folder.name, "title": "Yours", "created": "", "tasks": [task], "scenario": asked.to_params()}
    (folder / "job.json").write_text(json.dumps(spec_of_job))
    events = [
        {"event": "state", "state": "loading", "task": 0, "time": 1.0},
        {"event": "record", "task": 0, "id": run.id, "complete": True, "time": 9.0},
        {"event": "end", "state": "done", "time": 9.0},
    ]
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    os.utime(folder / "job.json", (1, 1))
    at = page(job=folder.name, **SMALL)
    assert "measured**, predicted" in texts(at)
    assert {t["name"] for t in spec(at, "techniques")["data"]} == {"measured", "predicted"}
    at.number_input(key="w_max_num_seqs").set_value(2).run()
    assert "measured**, predicted" not in texts(at)
    assert spec(at, "stale")["data"][0]["opacity"] < 0.5
    at.button(key="restore").click().run()
    assert at.number_input(key="w_max_num_seqs").value == asked.max_num_seqs
    assert "measured**, predicted" in texts(at)


def test_an_unknown_job_in_the_link(page):
    at = page(job="20200101-000000-abcdef", **SMALL)
    assert any("not known here" in w.value for w in at.warning)


def test_a_third_party_scheduler_is_selectable_with_its_options(page, tmp_path):
    folder = tmp_path / "plugins"
    folder.mkdir()
    (folder / "lifo.py").write_text(
        "from pydantic import Field\n"
        "from twinfer.core.hookspecs import hookimpl\n"
        "from twinfer.core.policy import Want\n"
        "from twinfer.core.technique import Options, Technique\n"
        "class Lifo(Technique):\n"
        "    name = 'lifo'\n    summary = 'newest first'\n"
        "    class Options(Options):\n        boost: int = Field(3, ge=1, le=9, description='a number')\n"
        "    def order(self, seq): return (-seq.arrival,)\n"
        "    def propose(self, view):\n"
        "        for seq in (*view.running, *view.waiting):\n            yield Want(seq, seq.remaining)\n"
        "    def victims(self, view, shortage): return list(reversed(view.running))\n"
        "class Extra(Technique):\n"
        "    name = 'extra'\n    summary = 'a page'\n    title = 'Extra page'\n"
        "    def render(self, resources):\n        import streamlit as st\n        st.title('Hello from a plugin')\n"
        "class Broken(Extra):\n"
        "    name = 'broken'\n"
        "    def render(self, resources): raise RuntimeError('plugin page broke')\n"
        "@hookimpl\ndef register_scheduler(register): register(Lifo)\n"
        "@hookimpl\ndef register_dashboard_page(register):\n    register(Extra)\n    register(Broken)\n"
    )
    dirs = (str(folder),)
    at = page(plugin_dirs=dirs, **SMALL)
    assert "lifo" in at.selectbox(key="w_scheduler").options
    at.selectbox(key="w_scheduler").set_value("lifo").run()
    assert not at.exception and not at.error
    at.number_input(key="w_scheduler.lifo.boost").set_value(5).run()
    assert shown_url(at)["scheduler"] == "lifo:boost=5" and "newest first" in texts(at)
    assert any("lifo" in note["text"] for note in spec(at, "techniques")["layout"]["annotations"])
    st.cache_resource.clear()
    assert page("extra", plugin_dirs=dirs).title[0].value == "Hello from a plugin"
    broken = page("broken", plugin_dirs=dirs)
    assert "plugin page broke" in broken.error[0].value and "Traceback" not in broken.error[0].value


def test_starting_a_run_shows_its_progress_and_outcome(page, tmp_path):
    at = page(**SMALL)
    at.button(key="run-predicted").click().run()
    assert not at.exception
    job = shown_url(at)["job"]
    jobs = JobManager(tmp_path)
    end = time.monotonic() + 300
    while not jobs.get(job).over and time.monotonic() < end:
        at.run()  # timers do not tick here
        time.sleep(0.1)
    assert jobs.get(job).state == "done"
    at.run()
    assert "1 of 1 runs" in texts(at)
    at.button(key="dismiss").click().run()
    assert "job" not in shown_url(at)


# --- images ---------------------------------------------------------------------------------------

CONTROLS = ("images_per_request", "image_counts", "image_size", "image_tokens", "image_compression")
SEES = {"model": "qwen2.5-vl-7b", "device": "h100-sxm", "max_model_len": "8192", **SMALL}


def keys(at: AppTest) -> set[str]:
    return {w.key for kind in ("number_input", "selectbox", "text_input") for w in at.get(kind)}


def test_images_have_controls_where_the_model_sees(page):
    assert not keys(page(**SMALL)) & {f"w_{name}" for name in CONTROLS}
    at = page(**SEES)
    assert keys(at) & {f"w_{name}" for name in CONTROLS} == {"w_images_per_request"}
    before = values(at)["TTFT p50"]
    at.number_input(key="w_images_per_request").set_value(2.0).run()
    assert not at.exception and {f"w_{name}" for name in CONTROLS} <= keys(at)
    assert shown_url(at)["images_per_request"] == "2" and values(at)["TTFT p50"] != before
    assert at.button(key="run").disabled and not at.button(key="run-predicted").disabled
    at.text_input(key="w_image_size").set_value("1280x720").run()
    assert shown_url(at)["image_size"] == "1280x720" and "+ 2 images 1280x720" in texts(at).replace("\\", "")
    at.text_input(key="w_image_size").set_value("wide").run()
    assert any("write 1024 or 1024x768" in text for text in warned(at)) and shown_url(at)["image_size"] == "1280x720"
    at.number_input(key="w_image_tokens").set_value(64).run()
    assert not at.exception and any(
        "Tokens per image=64" in e.value for e in at.error
    )  # a size says how many there are


def test_images_of_a_model_that_sees_none_can_be_left_out(page):
    at = page(images_per_request="1", **SMALL)
    assert any("smollm2-135m takes no images" in text for text in warned(at))
    assert any("Images per request" in e.value for e in at.error)
    at.button(key="no-images").click().run()
    assert not at.exception and not at.error and "images_per_request" not in shown_url(at)


@pytest.mark.parametrize("name", ["memory", "roofline", "capacity"])
def test_other_pages_count_images(page, name):
    params = {**SEES, "images_per_request": "1.5", "image_counts": "poisson"}
    at = page(name, **params)
    assert not at.error and "+ 1.5 images" in texts(at)
    if name == "roofline":
        assert "vision_qkv_proj" in "\n".join(t.value.to_string() for t in at.table).replace("\\", "")
    wrong = page(name, **{**params, "model": "llama-3.1-8b"})
    assert any("Images per request" in e.value for e in wrong.error)
    assert wrong.button(key="no-images")


# --- Real vs predicted --------------------------------------------------------------------------


@pytest.fixture
def stored(tmp_path: Path, pair: tuple[RunRecord, RunRecord]) -> tuple[RunRecord, RunRecord]:
    store = RunStore(tmp_path)
    for record in pair:
        store.save(record)
    return pair


def test_an_empty_store_says_what_to_do(page):
    at = page("compare")
    assert "No runs are stored yet" in texts(at) and at.button(key="example")
    assert not at.metric


def test_the_latest_pair_is_compared(page, stored):
    at = page("compare")
    assert values(at) == {
        "Throughput error": "+2.9 %",
        "TTFT p50 error": "+2.3 %",
        "TPOT p50 error": "−8.0 %",
        "Peak KV error": "0.0 %",
    }
    assert "Mean absolute error **4.0 %** over 4 headline metrics" in texts(at)
    assert "5 of 5 measured values lie inside their 80 % band" in texts(at)
    for key in ("errors", "parity", "ops", "steps-time", "memory"):
        assert spec(at, key)["data"], key
        assert len(at.get_by_key(f"chart-{key}").proto.alt) > 40
    assert len(at.get("table")) == 5  # one under each chart


def test_the_errors_are_those_of_compare(page, stored):
    from twinfer.core.compare import compare
    from twinfer.dashboard.quantities import percent

    at = page("compare")
    assert values(at)["TPOT p50 error"] == percent(compare(*stored)["tpot.p50"].error)


def test_a_link_names_the_pair(page, stored, tmp_path, record):
    other = record("engine", decode=0.1, run="engine-slow")
    other.created = "2020-01-01T00:00:00+00:00"
    RunStore(tmp_path).save(other)
    at = page("compare", real="engine-slow")
    assert at.selectbox(key="w_real").value == "engine-slow"
    assert values(at)["TPOT p50 error"] == "−54 %"
    at.selectbox(key="w_real").set_value(stored[0].id).run()
    assert shown_url(at)["real"] == stored[0].id and values(at)["TPOT p50 error"] == "−8.0 %"


def test_a_link_to_a_run_that_is_gone(page, stored):
    at = page("compare", real="gone-run")
    assert any("not stored here" in w.value for w in at.warning) and at.metric


def test_steps_by_number(page, stored):
    at = page("compare", axis="step")
    chart = spec(at, "steps-step")
    assert chart["layout"]["xaxis3"]["title"]["text"] == "step (number in the run)"
    assert shown_url(at)["axis"] == "step"


def test_unlike_settings_are_listed(page, tmp_path, record):
    store = RunStore(tmp_path)
    store.save(record("engine", rows=4))
    store.save(record("simulator", rows=2, decode=0.04))
    at = page("compare")
    assert "settings differ" in texts(at)
    assert at.button(key="predict-same")


def test_partial_runs_say_so(page, tmp_path, record, pair):
    store = RunStore(tmp_path)
    store.save(record("engine", complete=False))
    store.save(pair[1])
    at = page("compare")
    assert any("stopped early" in w.value for w in at.warning)
    assert "stopped early" in at.selectbox(key="w_real").options[0]


def test_only_a_measurement_offers_to_predict_it(page, tmp_path, record):
    RunStore(tmp_path).save(record("engine"))
    at = page("compare")
    assert at.button(key="predict-this") and not at.metric
    assert spec(at, "steps-time")["data"]


def test_only_a_prediction_says_what_is_missing(page, tmp_path, record):
    RunStore(tmp_path).save(record("simulator"))
    at = page("compare")
    assert "No measured run is stored" in texts(at)
    names = {trace["name"] for trace in spec(at, "steps-time")["data"]}
    assert names == {"predicted"}


def test_a_damaged_run_is_named_and_the_rest_works(page, stored, tmp_path):
    bad = tmp_path / "runs" / "broken-run"
    bad.mkdir()
    (bad / "record.json").write_text("{ not json")
    at = page("compare")
    assert any("broken" in w.value for w in at.warning) and at.metric


def test_a_run_whose_tables_are_damaged(page, stored, tmp_path):
    (tmp_path / "runs" / stored[0].id / "steps.parquet").write_bytes(b"nothing")
    at = page("compare")
    assert any("cannot be read" in e.value for e in at.error)


def test_runs_without_ops_or_bands(page, tmp_path, record):
    store = RunStore(tmp_path)
    store.save(record("engine", ops=False))
    store.save(record("simulator", ops=False))
    at = page("compare")
    assert "Neither run recorded ops" in texts(at) and "80 % band" not in texts(at)
