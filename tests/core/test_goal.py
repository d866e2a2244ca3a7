"""SLOs: what is written is what is judged; statistics against numpy; what is not served counts."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinfer.core.errors import ConfigError
from twinfer.core.goal import Goal, kept, most_late, parse_goal, parse_goals, statistic_of, values_of
from twinfer.core.records import RequestRecord


def served(ttft: float, tpot: float = 0.1, tokens: int = 3, reason: str | None = "length") -> RequestRecord:
    last = 1 + ttft + tpot * (tokens - 1)
    return RequestRecord(
        request_id="r", arrival=1.0, first_token=1 + ttft, last_token=last, finished=last, reason=reason,
        num_output_tokens=tokens, itl=[tpot] * (tokens - 1),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "goal"),
    [
        ("ttft.p95<=1", Goal("ttft", "p95", 1.0)), ("tpot.p95 <= 50ms", Goal("tpot", "p95", 0.05)),
        ("e2e.p99.9<=20s", Goal("e2e", "p99.9", 20.0)), ("itl.mean<=2e-2", Goal("itl", "mean", 0.02)),
        (" ttft.p50<=900us ", Goal("ttft", "p50", 0.0009)), ("ttft.p95.0<=1", Goal("ttft", "p95", 1.0)),
    ],
)  # fmt: skip
def test_a_goal_is_read_as_written(text: str, goal: Goal) -> None:
    assert parse_goal(text) == goal
    assert parse_goal(str(goal)) == goal


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("ttft<=1", "METRIC.STATISTIC"), ("ttfp.p95<=1", "ttft, tpot, itl, e2e"), ("ttft.p0<=1", "p1 to p100"),
        ("ttft.p101<=1", "percentile"), ("ttft.p95>=1", "METRIC"), ("ttft.p95<=", "METRIC"), ("ttft.p95<=0", "above 0"),
        ("ttft.p95<=-1", "above 0"), ("ttft.p95<=1 h", "METRIC"), ("ttft.p95<=1e999", "finite"), ("ttft.p95<=1e", "number"),
        ("ttft.max<=1", "METRIC"), ("", "METRIC"), ("<", "METRIC"), ("ttft.p95<1", "write <="),
    ],
)  # fmt: skip
def test_what_is_no_goal_is_refused_in_words(text: str, word: str) -> None:
    with pytest.raises(ConfigError, match="--slo") as error:
        parse_goal(text)
    assert word in str(error.value)


def test_goals_must_be_given_and_differ() -> None:
    assert [g.name for g in parse_goals(["ttft.p95<=1", "ttft.p50<=0.5"])] == ["ttft.p95", "ttft.p50"]
    with pytest.raises(ConfigError, match="promised before"):
        parse_goals(["ttft.p95<=1", "ttft.p95<=2s"])
    with pytest.raises(ConfigError, match="every fleet will do"):
        parse_goals([])


@given(st.lists(st.floats(0, 100), min_size=1, max_size=40), st.floats(1, 100))
def test_statistics_are_numpys(values: list[float], rank: float) -> None:
    assert statistic_of(values, f"p{rank:g}") == pytest.approx(np.percentile(values, float(f"{rank:g}")), abs=1e-9)
    assert statistic_of(values, "mean") == pytest.approx(np.mean(values), abs=1e-9)


@given(st.lists(st.floats(0, 10), min_size=1, max_size=40), st.integers(1, 100), st.floats(0.1, 10))
def test_enough_late_ones_break_a_percentile_for_certain(values: list[float], rank: int, limit: float) -> None:
    goal = Goal("ttft", f"p{rank}", limit)
    late = sum(v > limit for v in values)
    if late >= most_late(goal, len(values)):
        assert not goal.met(statistic_of(values, goal.statistic))


def test_what_is_not_served_is_infinitely_late() -> None:
    requests = [served(0.1 * i) for i in range(1, 10)] + [served(0.1, reason="rejected")]
    assert values_of(requests, "ttft")[-1] == math.inf
    assert statistic_of(values_of(requests, "ttft"), "p50") == pytest.approx(0.55)
    assert statistic_of(values_of(requests, "ttft"), "p95") is None
    assert not Goal("ttft", "p95", 100.0).met(None)


def test_a_metric_says_nothing_of_answers_without_it() -> None:
    assert values_of([served(0.1, tokens=1)], "tpot") == []
    assert kept(served(0.1, tokens=1), [Goal("tpot", "p95", 1e-9), Goal("itl", "p95", 1e-9)])
    assert values_of([served(0.1), served(0.2)], "itl") == pytest.approx([0.1] * 4)


def test_attainment_is_of_all_limits_at_once() -> None:
    goals = [Goal("ttft", "p95", 1.0), Goal("tpot", "p95", 0.2)]
    assert kept(served(0.9), goals) and not kept(served(1.1), goals) and not kept(served(0.5, tpot=0.3), goals)
    assert not kept(served(0.5, reason=None), goals)
