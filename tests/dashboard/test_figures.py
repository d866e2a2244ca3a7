"""Charts as data: values, units, order, bands, what is missing, and the label-range traps of plotly."""

from __future__ import annotations

import json
import math

import plotly.graph_objects as go
import pytest

from twinfer.core.records import StepRecord
from twinfer.dashboard import figures, theme, timelines
from twinfer.dashboard.charts import MAX_POINTS, Chart, log_ticks, short, thin
from twinfer.dashboard.quantities import (
    BY_KEY,
    MISSING,
    QUANTITIES,
    byte_scale,
    improvement,
    number,
    percent,
    shown,
    suited,
    value_of,
)

THROUGHPUT, TTFT = BY_KEY["output_throughput"], BY_KEY["ttft.p50"]
BARS = [
    figures.Bar("Baseline: static + contiguous", 31.0, (28.0, 35.0), 30.0, baseline=True),
    figures.Bar("continuous alone", 48.0, (43.0, 54.0), 45.0),
    figures.Bar("paged alone", 29.4, (27.0, 33.0), 27.0),
    figures.Bar("All: continuous + paged", 52.0, (47.0, 58.0), None),
]


def every_chart(pair) -> dict[str, Chart]:
    real, predicted = pair
    ops = timelines.op_bars(real, predicted)
    assert ops is not None
    return {
        "bars": figures.technique_bars(BARS, THROUGHPUT),
        "change": figures.change_bars(BARS, THROUGHPUT),
        "ratio": figures.ratio_dots(figures.pairs_of(real, predicted)),
        "parity": figures.parity(real, predicted),
        "steps": timelines.step_timeline(real, predicted),
        "memory": timelines.memory_timeline(real, predicted),
        "ops": ops,
    }


def test_every_chart_has_a_finding_a_table_and_units(pair):
    for name, chart in every_chart(pair).items():
        assert len(chart.alt) > 40 and chart.alt.endswith("."), name
        assert chart.table, name
        assert all(set(row) == set(chart.table[0]) for row in chart.table), name
        titled = [
            axis.title.text for axis in (*chart.figure.select_xaxes(), *chart.figure.select_yaxes()) if axis.title.text
        ]
        assert any("(" in text for text in titled), (name, titled)
        assert len(chart.figure.to_json()) < 500_000, name


def test_every_chart_fits_light_and_dark(pair):
    for name, chart in every_chart(pair).items():
        text = chart.figure.to_json().lower()
        layout = json.dumps(json.loads(text)["layout"]).replace(json.dumps(json.loads(text)["layout"]["template"]), "")
        for slab in ('"#ffffff"', '"white"', '"#000000"', '"black"'):
            assert slab not in layout, (name, slab)
        assert chart.figure.layout.paper_bgcolor == "rgba(0,0,0,0)", name


def test_annotations_on_log_axes_stay_inside_the_range(pair):
    """A label in data units on a log axis stretches it to 10^206; annotations take log10 there."""
    for name, chart in every_chart(pair).items():
        for axis in (*chart.figure.select_xaxes(), *chart.figure.select_yaxes()):
            if axis.type == "log":
                assert axis.range is not None and max(abs(v) for v in axis.range) < 7, name


def test_technique_bars_show_both_worlds_the_band_and_the_values():
    chart = figures.technique_bars(BARS, THROUGHPUT)
    traces = {trace.name: trace for trace in chart.figure.data}
    assert list(traces["predicted"].x) == [31.0, 48.0, 29.4, 52.0]
    assert list(traces["measured"].x) == [30.0, 45.0, 27.0, None]
    assert list(traces["predicted"].error_x.array) == pytest.approx([4, 6, 3.6, 6])
    assert list(traces["predicted"].error_x.arrayminus) == pytest.approx([3, 5, 2.4, 5])
    assert traces["predicted"].marker.pattern.shape == "/"  # not colour alone
    assert chart.figure.layout.xaxis.title.text == "Output throughput (tok/s)"
    texts = [note.text for note in chart.figure.layout.annotations]
    assert "45 tok/s" in texts and "52 tok/s" in texts
    assert chart.figure.layout.xaxis.range[1] <= 1.2 * 58
    row = chart.table[2]
    assert row["predicted, better than baseline"] == "−5.2 %" and row["measured, better than baseline"] == "−10 %"
    assert chart.table[3]["measured (tok/s)"] == MISSING


def test_a_metric_in_ms_is_scaled_everywhere():
    bars = [figures.Bar("a", 0.25, (0.2, 0.3), 0.24, baseline=True), figures.Bar("b", 0.5)]
    chart = figures.technique_bars(bars, TTFT)
    assert list(chart.figure.data[1].x) == [250.0, 500.0]
    assert chart.table[0]["80 % band"] == "200–300"
    assert chart.table[1]["predicted, better than baseline"] == "−100 %"  # a longer time is worse


def test_losses_have_their_own_colour_and_hatching():
    chart = figures.change_bars(BARS, THROUGHPUT)
    by_name = {trace.name: trace for trace in chart.figure.data}
    worse, better = by_name["worse, measured"], by_name["better, measured"]
    assert list(worse.x) == pytest.approx([-10.0]) and list(better.x) == pytest.approx([50.0])
    assert worse.marker.color == theme.LOSS and worse.marker.pattern.shape == "x"
    assert better.marker.color == theme.GAIN and not better.marker.pattern.shape
    assert "paged alone measured −10 %" in chart.alt
    low, high = chart.figure.layout.xaxis.range
    assert low < -10 and high > 60


def test_nothing_missing_is_drawn_as_zero():
    bars = [figures.Bar("a", 10.0, baseline=True), figures.Bar("b", None, note="cannot run")]
    chart = figures.technique_bars(bars, THROUGHPUT)
    assert list(chart.figure.data[0].x) == [10.0, None]
    assert "cannot run" in [note.text for note in chart.figure.layout.annotations]
    assert [trace.name for trace in figures.change_bars(bars, THROUGHPUT).figure.data] == []


def test_stale_bars_are_dimmed():
    assert figures.technique_bars(BARS, THROUGHPUT, stale=True).figure.data[0].opacity < 0.5


def test_labels_are_escaped_and_cut():
    bars = [figures.Bar("<script>" + "x" * 60, 1.0, baseline=True)]
    text = figures.technique_bars(bars, THROUGHPUT).figure.layout.annotations[0].text
    assert "<script>" not in text and "&lt;script&gt;" in text and "…" in text
    assert short("abc") == "abc" and len(short("y" * 99)) == 34


def test_ratio_dots_join_what_compare_joins(pair):
    pairs = figures.pairs_of(*pair)
    by_key = {p.quantity.key: p for p in pairs}
    assert by_key["tpot.p50"].error == pytest.approx(0.046 / 0.05 - 1)
    assert by_key["tpot.p50"].covered is True
    chart = figures.ratio_dots(pairs)
    predicted = next(t for t in chart.figure.data if t.name == "predicted, with 80 % band")
    rows = dict(zip(predicted.y, predicted.x, strict=True))
    assert rows["TPOT p50"] == pytest.approx(0.92)
    assert "Preemptions" not in rows  # 0 measured: no ratio; the table still has it
    table = {row["metric"]: row for row in chart.table}
    assert table["Preemptions"]["measured"] == "0" and table["TPOT p50"]["error"] == "−8.0 %"
    assert table["TPOT p50"]["measured in band"] == "inside" and table["TPOT p95"]["measured in band"] == "no band"
    low, high = chart.figure.layout.xaxis.range
    assert low < 0.828 < 1.152 < high


def test_ratio_dots_of_unlike_runs_say_so(record):
    empty = record("simulator", num_requests=1)
    empty.metrics = {}
    chart = figures.ratio_dots(figures.pairs_of(record("engine"), empty))
    assert "no metric in both runs" in chart.alt
    assert {row["predicted"] for row in chart.table} == {"not predicted"}


def test_parity_pairs_requests_and_reports_error_bias_and_n(pair):
    chart = figures.parity(*pair)
    tpot = next(trace for trace in chart.figure.data if trace.name == "TPOT")
    assert len(tpot.x) == 8
    assert all(y / x == pytest.approx(0.92, rel=1e-6) for x, y in zip(tpot.x, tpot.y, strict=True))
    row = next(row for row in chart.table if row["metric"] == "TPOT")
    assert row == {"metric": "TPOT", "requests": 8, "mean absolute error": "8.0 %", "signed bias": "−8.0 %"}
    assert {"exact", "±20 %"} <= {trace.name for trace in chart.figure.data}
    low, high = chart.figure.layout.xaxis.range
    values = [math.log10(v) for t in chart.figure.data if t.name in ("TTFT", "TPOT", "E2E") for v in (*t.x, *t.y)]
    assert low < min(values) and high > max(values) and high - low <= 1.2 * (max(values) - min(values)) + 0.1


def test_parity_of_runs_without_shared_requests(record):
    other = record("simulator")
    for request in other.requests:
        request.request_id = "x" + request.request_id
    chart = figures.parity(record("engine"), other)
    assert "no shared request" in chart.alt and chart.table == []


def test_step_timeline_has_three_lanes_on_one_axis(pair):
    real, predicted = pair
    figure = timelines.step_timeline(real, predicted).figure
    assert [t.name for t in figure.data] == ["measured"] * 3 + ["predicted"] * 3
    assert figure.layout.xaxis3.title.text.endswith("(s)")
    assert figure.layout.xaxis.matches == "x3"
    rows, tokens, seconds = figure.data[:3]
    assert max(rows.y) == 4 and rows.y[-1] == 0  # back to none at the end
    assert max(tokens.y) == 4 * 96
    assert max(v for v in seconds.y if v is not None) == pytest.approx(400)
    assert seconds.y[-1] is None  # no step, no step time
    assert figure.data[0].line.dash != figure.data[3].line.dash


def test_step_timeline_by_number_lays_equal_plans_on_each_other(pair):
    figure = timelines.step_timeline(*pair, by="step").figure
    real, predicted = figure.data[0], figure.data[3]
    assert list(real.x) == list(predicted.x) == [float(i) for i in range(48)]
    assert list(figure.data[1].y) == list(figure.data[4].y)
    assert figure.layout.xaxis3.title.text == "step (number in the run)"


def test_idle_time_between_steps_is_drawn_as_idle(record):
    run = record("engine", num_requests=1, output=2)
    run.steps = [
        StepRecord(step=0, start=0.0, seconds=0.1, num_rows=1, num_tokens=9, held_blocks=1, used_slots=9),
        StepRecord(step=1, start=5.0, seconds=0.1, num_rows=1, num_tokens=1, held_blocks=1, used_slots=10),
    ]
    rows = timelines.step_timeline(run, None).figure.data[0]
    assert list(zip(rows.x, rows.y, strict=True)) == [
        (0.0, 1), (0.1, 1), (0.1, 0), (5.0, 1), (5.1, 1), (5.1, 0),
    ]  # fmt: skip


def test_memory_timeline_shows_reserved_above_used_in_binary_units(pair):
    chart = timelines.memory_timeline(*pair)
    lines = {trace.name: trace for trace in chart.figure.data}
    used, reserved = lines["used, measured"], lines["reserved, measured"]
    assert chart.figure.layout.yaxis.title.text == "KV memory (MiB)"
    assert all(a <= b for a, b in zip(used.y, reserved.y, strict=True))
    assert max(reserved.y) == pytest.approx(4 * 8 * 16 * 46_080 / 2**20)
    assert max(used.y) == pytest.approx(4 * (96 + 23) * 46_080 / 2**20)
    assert "KV waste" in chart.table[0]


def test_memory_timeline_draws_the_pool_only_where_it_does_not_flatten_the_rest(pair, record):
    assert not timelines.memory_timeline(*pair).figure.layout.shapes
    tight = record("engine")
    for step in tight.steps:
        step.total_blocks = 33
    assert timelines.memory_timeline(tight, None).figure.layout.shapes


def test_ops_are_joined_by_name_and_cut_to_ten(pair, record):
    real, predicted = pair
    chart = timelines.op_bars(real, predicted)
    assert chart is not None and [row["op"] for row in chart.table] == ["mlp", "attention", "lm_head"]
    total = sum(step.seconds for step in real.steps)
    assert chart.figure.data[0].x[0] == pytest.approx(0.6 * total)
    for step in real.steps:
        step.ops = {f"op{i}": 0.01 * (i + 1) for i in range(15)}
    many = timelines.op_bars(real, None)
    assert many is not None and len(many.table) == 11 and many.table[-1]["op"] == "other ops"
    assert timelines.op_bars(record("engine", ops=False), None) is None


def test_charts_of_no_steps_are_empty_not_broken(record):
    run = record("engine")
    run.steps, run.requests = [], []
    for chart in (timelines.step_timeline(run, None), timelines.memory_timeline(None, run)):
        assert isinstance(chart.figure, go.Figure) and chart.table == [] and not chart.figure.data


def test_thin_keeps_ends_and_extremes():
    x = [float(i) for i in range(50_000)]
    y = [math.sin(i / 500) for i in range(50_000)]
    y[12_345] = 99.0
    y[12_346] = -99.0
    tx, ty = thin(x, y)
    assert len(tx) <= MAX_POINTS + 2 and tx == sorted(tx)
    assert (tx[0], tx[-1]) == (0.0, 49_999.0) and {99.0, -99.0} <= set(ty)


def test_long_runs_say_that_they_are_thinned(record):
    run = record("engine", num_requests=400, output=24, rows=4, ops=False)
    chart = timelines.step_timeline(run, None)
    assert "Thinned" in chart.alt
    assert all(len(trace.x) <= MAX_POINTS + 2 for trace in chart.figure.data)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (None, MISSING), (0.01234, "0.0123"), (9.996, "10"), (12.34, "12.3"), (123.4, "123"), (123_456, "123,456"),
     (-8.04, "-8.04"), (100, "100"), (0.5, "0.500")],
)  # fmt: skip
def test_number(value, text):
    assert number(value) == text


def test_percent_and_improvement():
    assert (
        percent(0.123) == "+12 %"
        and percent(-0.08) == "−8.0 %"
        and percent(0.0) == "0.0 %"
        and percent(None) == MISSING
    )
    assert percent(-0.0001) == "0.0 %"
    assert improvement(TTFT, 0.5, 1.0) == 0.5 and improvement(THROUGHPUT, 0.5, 1.0) == -0.5
    assert improvement(THROUGHPUT, 1.0, 0.0) is None


def test_quantities_read_records(pair):
    real, _ = pair
    assert value_of(real.metrics, "ttft.p50") == real.metrics["ttft"]["p50"]
    assert value_of(real.metrics, "nothing.p50") is None and value_of({"ttft": None}, "ttft.p50") is None
    assert value_of({"a": float("nan")}, "a") is None
    assert shown(suited(TTFT, 6.569), 6.569) == "6.57 s" and shown(suited(TTFT, 0.5, None), 0.5) == "500 ms"
    assert shown(suited(TTFT, 0.9, 1.2), 0.9) == "0.900 s" and suited(THROUGHPUT, 5000.0) == THROUGHPUT
    assert shown(BY_KEY["kv_waste"], 0.25) == "25 %" and shown(THROUGHPUT, None) == MISSING
    assert all(q.unit or q.key == "num_preemptions" for q in QUANTITIES)


def test_byte_scale_and_ticks():
    assert byte_scale(3 * 2**30)[1] == "GiB" and byte_scale(5 * 2**20)[1] == "MiB" and byte_scale(12)[1] == "B"
    assert log_ticks([0, 1]) == [1, 2, 5, 10] and log_ticks([0, 4]) == [1, 10, 100, 1000, 10000]
