"""Joining two records: errors, what is missing, what differs."""

from __future__ import annotations

import json
from typing import Any

import pytest

from twinfer.core.compare import compare, relative_error
from twinfer.core.records import RunRecord


def record(id: str, world: str, metrics: dict[str, Any], **changes: Any) -> RunRecord:
    config = {"model": "m", "scheduler": {"name": "continuous", "options": {}}, "tp": 1} | changes.pop("config", {})
    return RunRecord(id=id, world=world, created="2026-01-01T00:00:00Z", config=config, metrics=metrics, **changes)


def stats(mean: float, p50: float) -> dict[str, float]:
    return {"mean": mean, "p50": p50}


def test_error_is_a_fraction_of_the_real_value() -> None:
    joined = compare(
        record("a", "engine", {"output_throughput": 100.0, "tpot": stats(0.02, 0.01), "num_preemptions": 0}),
        record("b", "simulator", {"output_throughput": 110.0, "tpot": stats(0.01, 0.01), "num_preemptions": 0}),
    )
    assert joined["output_throughput"].error == pytest.approx(0.10)
    assert joined["tpot.mean"].error == pytest.approx(-0.5)
    assert joined["tpot.p50"].error == 0
    assert joined["num_preemptions"].error == 0
    assert joined.notes == ()
    with pytest.raises(KeyError):
        joined["nothing"]


@pytest.mark.parametrize(
    ("real", "predicted", "error"),
    [(None, 1.0, None), (1.0, None, None), (0.0, 1.0, None), (0.0, 0.0, 0.0), (4.0, 3.0, -0.25), (2, 5, 1.5)],
)
def test_relative_error(real: float | None, predicted: float | None, error: float | None) -> None:
    assert relative_error(real, predicted) == error


def test_missing_metrics_stay_missing() -> None:
    joined = compare(
        record("a", "engine", {"ttft": None, "kv_waste": 0.5}),
        record("b", "simulator", {"ttft": stats(1.0, 2.0), "energy": 3.0}),
    )
    assert joined["ttft.p50"].real is None and joined["ttft.p50"].predicted == 2.0 and joined["ttft.p50"].error is None
    assert joined["kv_waste"].predicted is None and joined["energy"].real is None
    assert any("not measured" in note for note in joined.notes)
    assert joined.nested("error") == {"ttft": {"mean": None, "p50": None}, "kv_waste": None, "energy": None}


def test_nested_keeps_the_metrics_schema_and_is_json() -> None:
    metrics = {"output_throughput": 1.0, "e2e": stats(1.0, 2.0)}
    joined = compare(record("a", "engine", metrics), record("b", "simulator", metrics))
    tree = joined.nested("real", "predicted", "error")
    assert tree["e2e"]["p50"] == {"real": 2.0, "predicted": 2.0, "error": 0.0}
    assert json.loads(json.dumps(tree)) == tree


def test_headline_metrics_come_first() -> None:
    metrics = {"num_steps": 1, "kv_waste": 0.1, "ttft": stats(1, 1), "output_throughput": 2.0}
    joined = compare(record("a", "engine", metrics), record("b", "simulator", metrics))
    assert [p.name for p in joined.pairs] == ["output_throughput", "ttft.mean", "ttft.p50", "kv_waste", "num_steps"]


def test_settings_that_differ_are_listed_by_name() -> None:
    joined = compare(
        record("a", "engine", {}, config={"device": "cpu"}, workload={"rate": 1.0, "seed": 0}),
        record("b", "simulator", {}, workload={"rate": 2.0, "seed": 0},
               config={"scheduler": {"name": "static", "options": {}}, "op_time": ["roofline"]}),
    )  # fmt: skip
    assert joined.settings == {"config.scheduler.name": ("continuous", "static"), "workload.rate": (1.0, 2.0)}


def test_interval_says_whether_the_real_value_is_inside() -> None:
    bands = {"output_throughput": (90.0, 105.0), "kv_waste": (0.0, 0.1)}
    joined = compare(
        record("a", "engine", {"output_throughput": 100.0, "kv_waste": 0.2}),
        record("b", "simulator", {"output_throughput": 97.0, "kv_waste": 0.05}, intervals=bands),
    )
    assert joined["output_throughput"].inside is True
    assert joined["kv_waste"].inside is False


def test_notes_name_the_wrong_world_and_the_early_stop() -> None:
    joined = compare(
        record("a", "simulator", {"num_completed": 3}, complete=False), record("b", "engine", {"num_completed": 5})
    )
    text = " | ".join(joined.notes)
    assert "a was not measured" in text and "b is not a prediction" in text
    assert "a was stopped early" in text and "3 requests completed in a, 5 in b" in text


def test_times_of_no_calibrated_machine_are_noted() -> None:
    def noted(reason: str) -> tuple[str, ...]:
        return compare(record("a", "engine", {}), record("b", "simulator", {}, reasons={"device": reason})).notes

    [note] = noted("cpu: a generic one: run `twinfer calibrate`")
    assert "generic one" in note
    assert noted("local: measured") == ()
