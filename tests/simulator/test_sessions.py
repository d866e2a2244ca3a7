"""Sessions in a simulation: turns wait for answers, find their history in the prefix cache, and skipping changes nothing."""

from __future__ import annotations

import pytest

from twinfer.core.config import EngineConfig
from twinfer.core.fleet import Fleet
from twinfer.core.workload import Workload
from twinfer.simulator.fleet_run import simulate_fleet
from twinfer.simulator.run import simulate

CONFIG = EngineConfig.model_validate({"model": "llama-3.1-8b", "device": "h100-sxm", "max_model_len": 8192})
CHATS = Workload(num_requests=24, turns=4, think_time=2.0, input_len=160, output_len=48, rate=1.0)


def test_turns_come_after_answers_and_hit_the_cache() -> None:
    record = simulate(CONFIG, CHATS)
    requests = {r.request_id: r for r in record.requests}
    assert record.complete and len(requests) == 24 and all(r.reason == "length" for r in requests.values())
    for number in range(24):
        request = requests[f"r{number}"]
        turn = number % 4
        assert request.num_prompt_tokens == 160 * (turn + 1) + 48 * turn
        if turn:
            before = requests[f"r{number - 1}"]
            assert request.arrival >= (before.finished or 0.0)
            said = before.num_prompt_tokens + before.num_output_tokens
            assert said - 16 <= request.num_cached_tokens + 1 <= said + 1, "all full blocks of what was said"
    assert record.metrics["prefix_cache_hit_rate"] > 0.5


def test_stepping_skipping_and_a_fleet_of_one_agree() -> None:
    skipped, stepped = simulate(CONFIG, CHATS), simulate(CONFIG, CHATS, skip=False)
    fleet = simulate_fleet(Fleet(engine=CONFIG), CHATS)
    for other in (stepped, fleet):
        for a, b in zip(skipped.requests, other.requests, strict=True):
            assert a.request_id == b.request_id and a.num_cached_tokens == b.num_cached_tokens
            assert a.arrival == pytest.approx(b.arrival, abs=1e-9) and a.finished == pytest.approx(b.finished, abs=1e-9)


def test_a_router_that_knows_prefixes_keeps_sessions_together() -> None:
    many = Workload(num_requests=64, turns=4, think_time=1.0, input_len=512, output_len=32, rate=4.0)
    hits = {}
    for router in ("round_robin", "prefix_aware"):
        fleet = Fleet.model_validate({"engine": CONFIG, "replicas": 3, "router": router})
        record = simulate_fleet(fleet, many)
        assert record.complete and len(record.requests) == 64
        hits[router] = record.metrics["prefix_cache_hit_rate"]
    assert hits["prefix_aware"] > hits["round_robin"]


def test_closed_loop_sessions_end() -> None:
    record = simulate(CONFIG, CHATS.model_copy(update={"rate": None, "concurrency": 2, "think_time": 0.5}))
    assert record.complete and len(record.requests) == 24
