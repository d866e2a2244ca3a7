"""Metric definitions against numpy and numbers worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twinfer.core.records import RequestRecord, RunRecord, StepRecord, compute_metrics, kv_waste, percentile, summary


@settings(deadline=None, derandomize=True)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40), st.floats(0, 100))
def test_percentiles_are_numpys(values: list[float], q: float) -> None:
    ordered = sorted(values)
    assert percentile(ordered, q) == pytest.approx(float(np.percentile(ordered, q)), rel=1e-9, abs=1e-9)


def test_summary_of_nothing_is_none_and_a_percentile_of_nothing_an_error() -> None:
    assert summary([]) is None
    with pytest.raises(ValueError, match="nothing"):
        percentile([], 50)
    assert summary([3.0]) == {"mean": 3.0, "p50": 3.0, "p90": 3.0, "p95": 3.0, "p99": 3.0}


def test_waste_is_weighted_by_time() -> None:
    def step(seconds: float, held: int, used: int) -> StepRecord:
        return StepRecord(step=0, start=0.0, seconds=seconds, held_blocks=held, used_slots=used, block_size=10)

    assert kv_waste([step(1.0, 1, 10)]) == 0.0
    assert kv_waste([step(3.0, 1, 10), step(1.0, 1, 0)]) == pytest.approx(0.25)
    assert kv_waste([step(1.0, 0, 0)]) is None and kv_waste([]) is None


def test_times_of_requests_without_tokens_are_none() -> None:
    entry = RequestRecord(request_id="a", arrival=1.0)
    assert (entry.ttft, entry.tpot, entry.e2e) == (None, None, None)
    entry.first_token = entry.last_token = 3.0
    entry.num_output_tokens = 1
    assert (entry.ttft, entry.tpot, entry.e2e) == (2.0, None, 2.0)


def test_aborted_requests_count_their_tokens_but_are_not_completed() -> None:
    record = RunRecord(id="r", world="engine", created="", config={})
    record.requests = [
        RequestRecord(
            request_id="a", arrival=0.0, first_token=1.0, last_token=4.0, reason="abort", num_output_tokens=4,
            num_prompt_tokens=2,
        ),
        RequestRecord(
            request_id="b", arrival=0.0, first_token=1.0, last_token=2.0, reason="stop", num_output_tokens=2,
            num_prompt_tokens=3,
        ),
        RequestRecord(request_id="c", arrival=0.0, reason="rejected", num_prompt_tokens=99),
    ]  # fmt: skip
    metrics = compute_metrics(record)
    assert (metrics["output_tokens"], metrics["prompt_tokens"], metrics["num_completed"]) == (6, 5, 1)
    assert metrics["duration"] == 4.0 and metrics["request_throughput"] == 0.25
    assert metrics["e2e"]["mean"] == 2.0 and metrics["tpot"]["mean"] == 1.0
