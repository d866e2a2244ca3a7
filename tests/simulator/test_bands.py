"""Bands of predictions: what first tokens add to the uncertainty of steps."""

from __future__ import annotations

from typing import Any

import pytest

from twinfer.core.config import EngineConfig
from twinfer.core.records import RequestRecord, RunRecord, StepRecord
from twinfer.core.registry import Registry
from twinfer.core.workload import Workload
from twinfer.simulator.bands import Z80, Bands, bands_of, in_step, prompt_sigma
from twinfer.simulator.run import simulate

PROMPT, DECODE = 0.1, 0.01  # s of a step


def recorded(lengths: tuple[int, ...] = (64, 64, 64, 64), prompt_sigma: float = 0.02, steps: bool = True) -> RunRecord:
    """Two clients with two requests each: first tokens after 0.1 and 0.2 s, then after 0.1 and 0.15 s."""
    record = RunRecord(id="a", created="2026-11-30", world="simulator", config={}, workload={})
    for i, (length, ttft) in enumerate(zip(lengths, (0.1, 0.2, 0.1, 0.15), strict=True)):
        arrival = 0.0 if i < 2 else 1.0
        record.requests.append(
            RequestRecord(
                request_id=str(i), arrival=arrival, first_token=arrival + ttft, last_token=arrival + ttft + 0.1,
                num_prompt_tokens=length, num_output_tokens=11,
            )
        )  # fmt: skip
    if steps:
        for i in range(4):
            record.steps.append(
                StepRecord(step=i, start=0.1 * i, seconds=PROMPT, sigma=prompt_sigma, num_tokens=65, num_decode_rows=1)
            )
        record.steps += [
            StepRecord(step=4 + i, start=0.4, seconds=DECODE, sigma=0.001, num_tokens=2, num_decode_rows=2)
            for i in range(40)
        ]
    record.metrics = {"ttft": {"mean": 0.1375}, "tpot": {"mean": 0.01}, "output_throughput": 40.0}
    return record


def bands(record: RunRecord, sigma: float = 0.1, concurrency: int | None = 2, scales: bool = True) -> Bands:
    def again(scale: float) -> RunRecord:
        other = recorded()
        other.metrics = {"ttft": {"mean": 0.1375 * scale}, "tpot": {"mean": 0.01 * scale}, "output_throughput": 40.0}
        other.complete = True
        return other

    return bands_of(record, sigma, again, scales, concurrency, 0.0)


def test_first_tokens_are_as_unsure_as_the_steps_that_feed_prompts_where_those_are_less_sure() -> None:
    drawn = recorded((64, 60, 64, 64))
    assert prompt_sigma(drawn) == pytest.approx(0.2)
    found = bands(drawn)
    assert found["ttft.mean"] == pytest.approx((0.1375 / (1 + 0.2 * Z80), 0.1375 * (1 + 0.2 * Z80)))
    assert found["tpot.mean"] == pytest.approx((0.01 / (1 + 0.1 * Z80), 0.01 * (1 + 0.1 * Z80)))
    sure = bands(recorded((64, 60, 64, 64), prompt_sigma=0.005))
    assert sure["ttft.mean"] == pytest.approx((0.1375 / (1 + 0.1 * Z80), 0.1375 * (1 + 0.1 * Z80)))


def test_alike_clients_come_alone_or_wait_for_one_more_prompt() -> None:
    slow = 1 + 0.2 * Z80
    record = recorded()
    assert in_step(record, 2) == pytest.approx((0.1, PROMPT))
    assert bands(record)["ttft.mean"] == pytest.approx((0.1 / slow, (0.1375 + PROMPT) * slow))
    for other in (bands(record, concurrency=None), bands(record, concurrency=1), bands(record, scales=False)):
        assert other["ttft.mean"] == pytest.approx((0.1375 / slow, 0.1375 * slow))
    assert in_step(recorded((64, 64, 64, 65)), 2) is None
    assert in_step(record, 4) is None, "no request follows an answer"


def test_a_record_without_steps_widens_nothing() -> None:
    record = recorded(steps=False)
    assert prompt_sigma(record) == 0.0 and in_step(record, 2) is None
    assert bands(record)["ttft.mean"] == pytest.approx((0.1375 / (1 + 0.1 * Z80), 0.1375 * (1 + 0.1 * Z80)))


def test_a_closed_loop_of_alike_requests_has_the_wider_band_of_first_tokens() -> None:
    def width(**lengths: Any) -> float:
        workload = Workload(num_requests=12, concurrency=4, input_len=500, output_len=20, seed=1, **lengths)
        config = EngineConfig(model="llama-3.1-8b", device="h100-sxm", max_num_batched_tokens=512)
        record = simulate(config, workload, Registry(entry_points=False))
        low, high = record.intervals["ttft.mean"]
        assert low < record.metrics["ttft"]["mean"] < high
        return float(high / low)

    assert width() > width(lengths="uniform", spread=0.1)
