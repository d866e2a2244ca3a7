"""Records from what a driver sees, against numbers worked out by hand."""

from __future__ import annotations

import pytest

from twinfer.core.events import Finished, Rejected, TokenDelta
from twinfer.core.params import SamplingParams
from twinfer.core.plan import Need, PlanStats, Row, StepPlan, StepResult
from twinfer.core.recorder import Recorder
from twinfer.core.records import RunRecord
from twinfer.core.request import Request


def make_recorder(**changes: object) -> Recorder:
    arguments: dict[str, object] = {"world": "engine", "config": {"model": "m"}, "workload": {"rate": 1.0}}
    return Recorder(**{**arguments, "kv_bytes_per_token": 10.0, "start": 1000.0, **changes})  # type: ignore[arg-type]


def ask(request_id: str, length: int, arrival: float = 0.0, n: int = 1) -> Request:
    params = SamplingParams(n=n, temperature=1.0 if n > 1 else 0.0)
    return Request(id=request_id, prompt=range(length), params=params, arrival=arrival)


def row(seq: str, start: int, count: int) -> Row:
    return Row(seq, start, tuple(range(count)), 0, Need.LAST, 0)


def two_requests() -> Recorder:
    """Two requests, four steps: the timeline of the tests below, in seconds after 1000.

    0.0 a arrives   1.0 b arrives   1.0-2.0 a prefills 6   2.0-4.0 a decodes, b prefills 3
    4.0-5.0 both decode (a ends)    5.0-6.0 b decodes (ends)
    """
    recorder = make_recorder()
    recorder.submitted(ask("a", 6, arrival=1000.0), 1000.5)
    recorder.submitted(ask("b", 3), 1001.0)
    recorder.step(StepPlan(0, (row("a", 0, 6),), stats=PlanStats(1, 1, 2, 0, 8, 0, 4)), StepResult((), 1.0), 1001, 1002)
    recorder.output(TokenDelta("a", 0, (7,)), 1002.0)
    rows = (row("a", 6, 1), row("b", 0, 3))
    recorder.step(StepPlan(1, rows, stats=PlanStats(2, 0, 3, 0, 8, 6, 4)), StepResult((), 2.0), 1002.0, 1004.0)
    recorder.output(TokenDelta("a", 0, (8,)), 1004.0)
    recorder.output(TokenDelta("b", 0, (1,)), 1004.0)
    rows = (row("a", 7, 1), row("b", 3, 1))
    recorder.step(StepPlan(2, rows, stats=PlanStats(2, 0, 3, 1, 8, 10, 4)), StepResult((), 1.0), 1004.0, 1005.0)
    recorder.output(TokenDelta("a", 0, (9, 10)), 1005.0)
    recorder.output(Finished("a", 0, "length", "max_tokens=4", 6, 4, 0, 1), 1005.0)
    recorder.output(TokenDelta("b", 0, (2,)), 1005.0)
    plan = StepPlan(3, (row("b", 4, 1),), stats=PlanStats(1, 0, 2, 1, 8, 4, 4), preempted=("x",))
    recorder.step(plan, StepResult((), 1.0, 0.5, {"gemm": 0.9}), 1005.0, 1006.0)
    recorder.output(TokenDelta("b", 0, (3,)), 1006.0)
    recorder.output(Finished("b", 0, "stop", "token 3", 3, 3, 2, 0, num_hit_tokens=1), 1006.0)
    return recorder


def test_requests_are_timed_from_the_start_of_the_run() -> None:
    a, b = two_requests().finish().requests
    assert (a.arrival, a.first_scheduled, a.first_token, a.last_token, a.finished) == (0.0, 1.0, 2.0, 5.0, 5.0)
    assert (b.arrival, b.first_scheduled, b.first_token, b.last_token, b.finished) == (1.0, 2.0, 4.0, 6.0, 6.0)
    assert (a.ttft, a.e2e, a.itl) == (2.0, 5.0, [2.0, 1.0])
    assert (b.ttft, b.e2e, b.itl) == (3.0, 5.0, [1.0, 1.0])
    assert a.tpot == pytest.approx(3.0 / 3) and b.tpot == pytest.approx(2.0 / 2)
    assert (a.reason, a.detail, a.num_output_tokens, a.num_preemptions) == ("length", "max_tokens=4", 4, 1)
    assert (b.reason, b.detail, b.num_output_tokens, b.num_cached_tokens) == ("stop", "token 3", 3, 2)
    assert (a.num_hit_tokens, b.num_hit_tokens) == (0, 1)


def test_metrics_of_the_two_requests() -> None:
    metrics = two_requests().finish().metrics
    assert metrics["duration"] == 6.0
    assert metrics["output_throughput"] == pytest.approx(7 / 6)
    assert metrics["total_throughput"] == pytest.approx((7 + 9) / 6)
    assert metrics["request_throughput"] == pytest.approx(2 / 6)
    assert metrics["ttft"] == pytest.approx({"mean": 2.5, "p50": 2.5, "p90": 2.9, "p95": 2.95, "p99": 2.99})
    assert metrics["itl"]["mean"] == pytest.approx(5 / 4) and metrics["itl"]["p50"] == 1.0
    assert metrics["tpot"]["mean"] == pytest.approx(1.0) and metrics["e2e"]["p99"] == 5.0
    assert (metrics["num_requests"], metrics["num_completed"], metrics["num_preemptions"]) == (2, 2, 1)
    assert (metrics["prompt_tokens"], metrics["output_tokens"], metrics["num_steps"]) == (9, 7, 4)
    assert metrics["prefix_cache_hit_rate"] == pytest.approx(1 / 9), "of the first admission"
    # 3 blocks of 4 tokens at 10 B; waste: reserved 8*1 + 12*2 + 12*1 + 8*1 = 52 slot-seconds, used (committed and
    # being written) (0+6)*1 + (6+4)*2 + (10+2)*1 + (4+1)*1 = 43.
    assert metrics["peak_kv_bytes"] == 120.0
    assert metrics["kv_waste"] == pytest.approx(1 - 43 / 52)


def test_steps_keep_what_the_plan_said() -> None:
    steps = two_requests().finish().steps
    assert [s.start for s in steps] == [1.0, 2.0, 4.0, 5.0] and [s.seconds for s in steps] == [1.0, 2.0, 1.0, 1.0]
    assert [s.num_tokens for s in steps] == [6, 4, 2, 1]
    assert [s.num_decode_rows for s in steps] == [0, 1, 2, 1]
    assert [s.num_context_tokens for s in steps] == [6, 7 + 3, 8 + 4, 5]
    assert [s.held_blocks for s in steps] == [2, 3, 3, 2] and [s.idle_blocks for s in steps] == [0, 0, 1, 1]
    assert [s.waiting for s in steps] == [1, 0, 0, 0] and [s.preempted for s in steps] == [0, 0, 0, 1]
    assert (steps[3].sigma, steps[3].ops) == (0.5, {"gemm": 0.9})


def test_ops_can_be_left_out() -> None:
    recorder = make_recorder(keep_ops=False)
    recorder.step(StepPlan(0, ()), StepResult((), 1.0, ops={"gemm": 1.0}), 1000.0, 1001.0)
    assert recorder.finish().steps[0].ops == {}


def test_a_run_that_was_stopped_has_the_metrics_of_what_finished() -> None:
    recorder = make_recorder()
    for name in "abc":
        recorder.submitted(ask(name, 4, arrival=1000.0), 1000.0)
    recorder.output(TokenDelta("a", 0, (1, 2)), 1001.0)
    recorder.output(Finished("a", 0, "length", "", 4, 2), 1001.0)
    recorder.output(TokenDelta("b", 0, (1,)), 1002.0)
    record = recorder.finish(complete=False)
    assert not record.complete
    metrics = record.metrics
    assert (metrics["num_requests"], metrics["num_completed"], metrics["output_tokens"]) == (3, 1, 3)
    assert metrics["e2e"]["mean"] == 1.0 and metrics["ttft"]["mean"] == 1.5
    assert record.requests[2].first_token is None and record.requests[2].reason is None
    assert record.requests[1].tpot is None


def test_nothing_at_all_is_a_valid_record() -> None:
    record = make_recorder().finish()
    assert record.metrics["output_throughput"] is None and record.metrics["ttft"] is None
    assert record.metrics["kv_waste"] is None and record.metrics["peak_kv_bytes"] is None


def test_rejections_are_recorded_once_per_sample() -> None:
    recorder = make_recorder()
    recorder.submitted(ask("a", 0, n=2), 1003.0)
    recorder.output(Rejected("a", "the prompt is empty"), 1003.5)
    for entry in recorder.finish().requests:
        assert (entry.reason, entry.detail, entry.finished, entry.arrival) == (
            "rejected",
            "the prompt is empty",
            3.5,
            3.0,
        )
    assert recorder.record.metrics["num_completed"] == 0


@pytest.mark.parametrize("scheduled", [False, True])
def test_a_duplicate_id_leaves_the_living_request_alone(scheduled: bool) -> None:
    recorder = make_recorder()
    recorder.submitted(ask("a", 4), 1001.0)
    if scheduled:
        recorder.step(StepPlan(0, (row("a", 0, 4),)), StepResult((), 1.0), 1001.0, 1002.0)
    recorder.submitted(ask("a", 9), 1002.0)
    recorder.output(Rejected("a", "already in use"), 1002.0)
    recorder.output(TokenDelta("a", 0, (1,)), 1003.0)
    recorder.output(Finished("a", 0, "length", "", 4, 1), 1003.0)
    (entry,) = recorder.finish().requests
    assert (entry.reason, entry.num_prompt_tokens, entry.num_output_tokens) == ("length", 4, 1)


def test_samples_are_separate_and_times_of_arrival_are_kept() -> None:
    recorder = make_recorder()
    recorder.submitted(ask("a", 4, n=3), 1002.0)
    recorder.step(StepPlan(0, (row("a/2", 0, 4),)), StepResult((), 1.0), 1002.0, 1003.0)
    recorder.output(TokenDelta("a", 2, (1,)), 1003.0)
    entries = recorder.finish().requests
    assert [(e.index, e.first_scheduled, e.num_output_tokens) for e in entries] == [
        (0, None, 0),
        (1, None, 0),
        (2, 2.0, 1),
    ]
    assert {e.arrival for e in entries} == {2.0}


def test_records_name_their_run() -> None:
    record = make_recorder(run_id="mine", environment={"cpu": "x"}, reasons={"dtype": "why"}).record
    assert isinstance(record, RunRecord)
    assert (record.id, record.world, record.environment, record.reasons) == (
        "mine",
        "engine",
        {"cpu": "x"},
        {"dtype": "why"},
    )
    assert make_recorder().record.id != make_recorder().record.id
    assert record.created.endswith("+00:00")
