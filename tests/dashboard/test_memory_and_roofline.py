"""The pages Memory and Roofline: numbers of the core, charts as data, edits that go into the link."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest

from twinfer.core.registry import Registry
from twinfer.core.work import StepShape, step_ops, total
from twinfer.dashboard import memory_charts, roofline_charts
from twinfer.dashboard.memory_view import MemoryView, memory_view
from twinfer.dashboard.roofline_view import RooflineView, crossover_batch, roofline_view
from twinfer.dashboard.scenario import Scenario

pytestmark = pytest.mark.usefixtures("no_cached_pages")

GIB = 2**30
FITS = {"model": "llama-3.1-8b", "device": "h100-sxm", "max_num_seqs": "64"}
OVER = {"model": "llama-3.1-70b", "device": "l40s", "tp": "2", "max_num_seqs": "8"}
CODE = {"__builtins__": {"int": int, "max": max}}


@pytest.fixture(scope="module")
def registry() -> Registry:
    return Registry(entry_points=False)


def _script(root: str, page: str) -> None:
    from twinfer.dashboard.app import main

    main(["--runs-dir", root], first=page)


@pytest.fixture
def page(tmp_path: Path) -> Callable[..., AppTest]:
    def open_page(name: str, **params: str) -> AppTest:
        at = AppTest.from_function(_script, args=(str(tmp_path), name), default_timeout=300)
        for key, value in params.items():
            at.query_params[key] = value
        at.run()
        assert not at.exception
        return at

    return open_page


def texts(at: AppTest) -> str:
    return "\n".join(str(e.value) for kind in ("markdown", "caption", "info", "warning", "error") for e in at.get(kind))


def spec(at: AppTest, key: str) -> dict[str, Any]:
    return json.loads(at.get_by_key(f"chart-{key}").proto.spec)


def url(at: AppTest) -> dict[str, str]:
    return {k: v[0] if isinstance(v, list) else v for k, v in at.query_params.items()}


def view_of(registry: Registry, **params: str) -> MemoryView:
    return memory_view(Scenario.from_params(params)[0], registry)


# --- Memory -------------------------------------------------------------------------------------


def test_the_page_shows_what_the_command_line_says(page, tmp_path, registry):
    from twinfer.cli.memory import memory_answer
    from twinfer.cli.session import Session

    at = page("memory", max_model_len="4096", **FITS)
    answer = memory_answer(
        Session(), model="llama-3.1-8b", context=4096, batch=1, dtype="auto", kv_dtype="auto", attention=None, quant=None,
        kv_cache="paged", device="h100-sxm", layout=(1, 1, 1, 1, 1), memory_fraction=0.9, max_num_batched_tokens=512,
        max_num_seqs=64, num_kv_blocks=None, typical={},
    )  # fmt: skip
    shown = {metric.label: metric.value for metric in at.metric}
    assert f"{answer['num_blocks']:,} blocks hold {answer['kv_tokens']:,} tokens" in texts(at)
    assert shown["Weights"] == f"{answer['weight_bytes'] / GIB:.3g} GiB" == "15 GiB"
    assert shown["KV per token"] == "128 KiB" and shown["Worst case"] == f"{answer['worst_case_concurrency']:.0f}"
    assert texts(at).count("**analytic**") == 5


def test_the_equation_that_is_shown_evaluates_to_the_number_that_is_shown(page):
    at = page("memory", tp="2", pp="3", **FITS)
    codes = [code.value for code in at.get("code")]
    first = next(code for code in codes if code.startswith("num_blocks ="))
    rest = [code for code in codes if code.startswith("kv_bytes_per_token =")]
    text, _, value = first.removeprefix("num_blocks = ").partition("\n           = ")
    assert eval(text, CODE) == int(value)
    lines = [line for block in rest for line in block.splitlines() if " = " in line]
    assert len(lines) == 3 * 5, "three stages"
    for line in lines:
        _, text, value = line.split(" = ")
        assert eval(text, CODE) == float(value)


def test_bars_stack_to_the_device_and_lines_are_at_budget_and_capacity(registry):
    view = view_of(registry, pp="2", **FITS)
    chart = memory_charts.rank_bars(view)
    bars = [trace for trace in chart.figure.data if trace.type == "bar"]
    sums = [sum(trace.x[i] for trace in bars) for i in range(2)]
    device = view.ranks[0].memory / GIB
    assert max(sums) <= device < 1.001 * device and len({trace.marker.pattern.shape for trace in bars}) >= 5
    lines = {trace.name.partition(",")[0]: trace for trace in chart.figure.data if trace.type == "scatter"}
    assert lines["budget"].x[0] == pytest.approx(0.9 * device) and lines["device"].x[0] == pytest.approx(device)
    assert lines["budget"].line.dash != lines["device"].line.dash
    assert len(chart.table) == 2 and "stage 1 of 2" in chart.alt


def test_what_does_not_fit_is_drawn_with_the_overflow_hatched(registry):
    view = view_of(registry, **OVER)
    assert view.budget is None
    figure = memory_charts.rank_bars(view).figure
    over = next(trace for trace in figure.data if trace.name == "over the budget")
    held = sum(
        trace.x[0]
        for trace in figure.data
        if trace.name in ("weights", "activations", "libraries", "KV of one request")
    )
    assert over.base[0] + over.x[0] == pytest.approx(held) and over.marker.pattern.shape == "x"
    assert figure.layout.xaxis.range[1] > held


def test_curves_follow_the_formula_and_meet_the_pool(registry):
    view = view_of(registry, **FITS)
    yours = next(curve for curve in view.curves if curve.chosen)
    assert yours.label == "yours (gqa, bfloat16)"
    for length, size in zip(yours.lengths, yours.sizes, strict=True):
        assert size == -(-length // 16) * 16 * 131_072
    named = {curve.label: curve for curve in view.curves}
    assert named["KV in fp8"].sizes[-1] * 2 == yours.sizes[-1]
    assert named["mha"].sizes[-1] == 4 * yours.sizes[-1] and named["mqa"].sizes[-1] * 8 == yours.sizes[-1]
    assert view.budget is not None
    chart = memory_charts.kv_lines(view.curves, view.budget.kv_pool_bytes, view.wanted)
    for axis in (chart.figure.layout.xaxis, chart.figure.layout.yaxis):
        assert axis.type == "log" and max(abs(v) for v in axis.range) < 7
    assert chart.figure.layout.yaxis.title.text == "KV of a sequence on a rank (GiB)"


def test_windows_bend_the_curve(registry):
    """Gemma 2: half of the layers keep 4,096 tokens."""
    view = view_of(registry, model="gemma-2-9b", device="h100-sxm")
    yours = next(curve for curve in view.curves if curve.chosen)
    size = dict(zip(yours.lengths, yours.sizes, strict=True))
    assert size[8192] == pytest.approx(21 * 8 * 512 * 2 * (8192 + 4096 + 16))


def test_fixes_are_offered_applied_and_then_it_fits(page):
    at = page("memory", **OVER)
    assert "Does not fit" in texts(at) and "GiB are missing" in texts(at)
    assert not any(metric.label == "KV pool" for metric in at.metric)
    offered = [button for button in at.button if (button.key or "").startswith("fix-")]
    assert offered and any("Quantization int4" in button.help for button in offered)
    assert not any("--" in button.help for button in offered), "a page has controls, no flags"
    for index in {0, len(offered) - 1}:
        fresh = page("memory", **OVER)
        fresh.button(key=f"fix-{index}").click().run()
        assert not fresh.exception
        assert "**Fits**" in texts(fresh) and set(url(fresh)) >= {"model", "v"}, offered[index].help
        assert url(fresh) != {**OVER, "v": "1"}


def test_a_layout_that_cannot_be_names_the_option_and_keeps_the_controls(page):
    at = page("memory", dp="2", **FITS)
    assert "Attention data parallel" in texts(at) and "\\-\\-dp" not in texts(at)
    assert at.number_input(key="w_dp").value == 2
    at.number_input(key="w_dp").set_value(1).run()
    assert "**Fits**" in texts(at) and "dp" not in url(at)


@pytest.mark.parametrize("params", [{"model": "no-such-model"}, {"device": "no-such-device"}, {"ep": "2"}])
@pytest.mark.parametrize("name", ["memory", "roofline"])
def test_a_scenario_that_cannot_be_is_explained(page, name: str, params: dict[str, str]):
    at = page(name, **params)
    assert at.error and "internal error" not in texts(at) and "Back in the browser" in texts(at)


def test_every_chart_has_words_a_table_and_fits_both_themes(registry):
    fits, over = view_of(registry, tp="2", pp="2", **FITS), view_of(registry, **OVER)
    charts = [memory_charts.rank_bars(fits), memory_charts.rank_bars(over)]
    charts += [memory_charts.kv_lines(v.curves, None, v.wanted) for v in (fits, over)]
    charts.append(roofline_charts.roofline(roofline(registry)))
    for chart in charts:
        assert len(chart.alt) > 40 and chart.alt.endswith(".") and chart.table
        assert all(set(row) == set(chart.table[0]) for row in chart.table)
        text = chart.figure.to_json().lower()
        layout = json.dumps({k: v for k, v in json.loads(text)["layout"].items() if k != "template"})
        assert not any(slab in layout for slab in ('"#ffffff"', '"white"', '"#000000"', '"black"'))
        assert len(text) < 500_000


# --- Roofline -----------------------------------------------------------------------------------


def roofline(registry: Registry, batch: int = 64, **params: str) -> RooflineView:
    return roofline_view(Scenario.from_params({**FITS, **params})[0], registry, batch)


def test_no_point_lies_above_its_roof_and_shares_add_up(registry):
    view = roofline(registry, input_len="1000")
    for phase in ("prefill", "decode"):
        assert sum(point.share for point in view.step(phase)) == pytest.approx(1)
    for point in view.points:
        if point.flops and point.attainable:
            assert point.achieved <= point.attainable * (1 + 1e-9), point
            peak, bandwidth = view.device.peak_flops.get(point.dtype, 0), view.device.memory_bandwidth
            if peak:
                assert point.attainable == min(peak, point.intensity * bandwidth)
                assert (point.bound == "compute") == (point.intensity >= peak / bandwidth)


def test_the_decode_step_is_the_simulators(registry):
    from twinfer.core.device import load_device
    from twinfer.simulator.op_time import build_chain, host_op
    from twinfer.simulator.step_time import StepTimer

    view = roofline(registry, 32, input_len="500", output_len="100")
    from twinfer.core.catalog import resolve_spec

    model = resolve_spec("llama-3.1-8b")
    timer = StepTimer(lambda shape: step_ops(model, shape), build_chain((), load_device("h100-sxm"), registry))
    shape = StepShape.decode(*[550] * 32)
    assert view.seconds("decode") == pytest.approx(timer.exact(shape).seconds)
    assert sum(p.flops for p in view.step("decode")) == pytest.approx(total(step_ops(model, shape), "flops"))
    assert host_op(shape).name in {p.name for p in view.points}


def test_the_crossover_is_where_linears_reach_the_ridge(registry):
    """Weights of 2 bytes: about one FLOP per byte and row, so a little above the ridge of 295 because of activations."""
    view = roofline(registry)
    assert view.crossover is not None and 295 < view.crossover < 350

    def ops(shape: StepShape) -> Any:
        return step_ops(view_model(), shape)

    assert crossover_batch(ops, view.device) == view.crossover
    for rows, expected in ((view.crossover - 1, False), (view.crossover, True)):
        linears = [op for op in ops(StepShape.decode(*[1] * rows)) if op.kind == "gemm"]
        intensity = total(linears, "flops") / total(linears, "bytes")
        assert (intensity >= view.device.ridge()) == expected
    fp8 = roofline(registry, quantizer="fp8")
    assert fp8.crossover == pytest.approx(view.crossover, rel=0.2), "twice the peak, half the bytes"


def view_model() -> Any:
    from twinfer.core.catalog import resolve_spec

    return resolve_spec("llama-3.1-8b")


def test_the_trail_goes_up_towards_the_ridge(registry):
    trail = roofline(registry, 256).trail
    assert [rows for rows, _, _ in trail] == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    assert all(a[1] < b[1] and a[2] < b[2] for a, b in itertools.pairwise(trail))


def test_the_chart_has_a_roof_per_dtype_with_its_ridge(registry):
    chart = roofline_charts.roofline(roofline(registry))
    names = [trace.name for trace in chart.figure.data]
    assert any("bfloat16" in name and "989" in name and "ridge 295" in name for name in names)
    assert any("fp8" in name and "ridge 591" in name for name in names)
    assert any(name.startswith("decode linears, 1 to 64") for name in names)
    for axis in (chart.figure.layout.xaxis, chart.figure.layout.yaxis):
        assert axis.type == "log" and max(abs(v) for v in axis.range) < 7
    assert not chart.figure.layout.annotations, "a label on a log axis stretches it"
    symbols = {
        t.marker.symbol for t in chart.figure.data if t.name.startswith(("prefill ", "decode ")) and t.mode == "markers"
    }
    assert {"circle", "diamond"} <= symbols
    assert {row["step"] for row in chart.table} == {"prefill", "decode"}
    assert math.isclose(sum(p.share for p in roofline(registry).step("decode")), 1)


def test_batch_and_device_are_part_of_the_link(page):
    at = page("roofline", batch="128", **FITS)
    assert at.select_slider(key="w_batch").value == 128 and "**Decode** spends" in texts(at)
    before = {metric.label: metric.value for metric in at.metric}
    at.select_slider(key="w_batch").set_value(512).run()
    assert url(at)["batch"] == "512"
    assert "already at 512 rows" in texts(at)
    at.selectbox(key="w_roof_device").set_value("h200-sxm").run()
    assert not at.exception and url(at)["device"] == "h200-sxm" and url(at)["batch"] == "512"
    after = {metric.label: metric.value for metric in at.metric}
    assert after["Decode step"] != before["Decode step"]
