"""Searches over sessions, closed loops, speculation and KV tiers: what a trial sees is what `simulate` predicts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from twinfer.core.config import EngineConfig
from twinfer.core.errors import ConfigError
from twinfer.core.fleet import Fleet
from twinfer.core.goal import parse_goals
from twinfer.core.registry import Registry
from twinfer.core.workload import Workload
from twinfer.simulator import plan_tally
from twinfer.simulator.fleet_run import simulate_fleet
from twinfer.simulator.plan import plan
from twinfer.simulator.plan_space import Question
from twinfer.simulator.plan_traffic import sessions_of
from twinfer.simulator.plan_trial import ASSESS, FLEET, REPLICA, SCREEN, Evaluator, Outcome, Trial
from twinfer.simulator.run import simulate

REGISTRY = Registry(entry_points=False)
SESSIONS = Workload(num_requests=30, rate=8.0, input_len=300, output_len=6, turns=3, think_time=0.5)
LOOP = Workload(num_requests=80, concurrency=8, input_len=300, output_len=6, lengths="uniform", spread=0.5)
OPEN = Workload(num_requests=40, rate=20.0, input_len=300, output_len=12)


@pytest.fixture
def as_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """No trial is repeated with more requests than were asked for."""
    monkeypatch.setattr(plan_tally, "BACKLOG", 1.0)


def question(workload: Workload, axes: Mapping[str, tuple[Any, ...]] | None = None, **more: Any) -> Question:
    given = {"base": {"model": "llama-3.1-8b"}, "max_replicas": 4, "goals": parse_goals(["ttft.p90<=0.2"]), **more}
    return Question(axes={"device": ("h100-sxm",), **(axes or {})}, workload=workload, **given)


def asked(evaluator: Evaluator, **trial: Any) -> Outcome:
    outcome = evaluator.answer(Trial(**{"design": 0, "replicas": 1, "level": FLEET, **trial}))
    assert outcome is not None and not outcome.problem, outcome
    return outcome


def same(outcome: Outcome, metrics: Mapping[str, Any]) -> None:
    for name in ("ttft.p50", "ttft.p95", "tpot.p95", "e2e.p95"):
        head, _, part = name.partition(".")
        assert outcome.values[name] == pytest.approx(metrics[head][part], rel=1e-9)


@pytest.mark.parametrize("router", ["prefix_aware", "round_robin"])
@pytest.mark.usefixtures("as_given")
def test_sessions_stay_whole_and_a_fleet_is_the_one_that_simulate_predicts(router: str) -> None:
    evaluator = Evaluator(question(SESSIONS, {"router": (router,)}), REGISTRY)
    assert evaluator.traffic.sessions and not evaluator.traffic.cut
    seen = evaluator.traffic.seen(2, whole=False, screen=False, seed=0)
    shares = evaluator.traffic.dealt(seen, 2, shares=range(2), merged=False, load=1.0)
    (both,) = evaluator.traffic.dealt(seen, 2, shares=range(2), merged=True, load=1.0)
    assert both == list(evaluator.requests)
    assert sorted(r.id for r in chain.from_iterable(shares)) == sorted(r.id for r in evaluator.requests)
    for part in shares:
        for session in sessions_of(part):
            assert [r.follows.request_id for r in session[1:] if r.follows] == [r.id for r in session[:-1]]
    config = EngineConfig(model="llama-3.1-8b", device="h100-sxm")
    record = simulate_fleet(Fleet(engine=config, replicas=2, router=router), SESSIONS, REGISTRY, bands=False)
    same(asked(evaluator, replicas=2), record.metrics)


def test_turns_go_where_their_kv_is_unless_another_router_is_named() -> None:
    assert Evaluator(question(SESSIONS), REGISTRY).designs[0].router == "prefix_aware"
    assert Evaluator(question(OPEN), REGISTRY).designs[0].router == "round_robin"


def test_a_plan_for_sessions_proposes_what_keeps_its_promises_in_every_draw() -> None:
    found = plan(question(SESSIONS, {"max_num_batched_tokens": (512,)}), REGISTRY)
    assert found.complete and found.answer is not None
    (fleet,) = found.answer.fleets
    assert fleet.seeds == 3 and all(v is not None and v <= 0.2 for v in fleet.spread["ttft.p90"])
    assert "prefix_aware" in found.answer.sentence


def test_a_closed_loop_is_asked_by_its_clients() -> None:
    evaluator = Evaluator(question(LOOP), REGISTRY)
    config = EngineConfig(model="llama-3.1-8b", device="h100-sxm")
    same(asked(evaluator), simulate(config, LOOP, REGISTRY).metrics)
    more = LOOP.model_copy(update={"concurrency": 10})
    same(asked(evaluator, load=1.25), simulate(config, more, REGISTRY).metrics)
    assert evaluator.snapped(1.26) == 1.25 and evaluator.most_load == 1.0
    pair = simulate_fleet(Fleet(engine=config, replicas=2), LOOP, REGISTRY, bands=False)
    same(asked(evaluator, replicas=2), pair.metrics)
    assert asked(evaluator, replicas=4, level=REPLICA).num_requests == 60 and evaluator.share(REPLICA, 4) == 4 / 3


def test_a_plan_for_a_closed_loop_finds_how_many_clients_its_fleet_serves() -> None:
    loop = LOOP.model_copy(update={"num_requests": 240})
    axes = {"max_num_batched_tokens": (1024,), "max_num_seqs": (8,)}
    found = plan(question(loop, axes, goals=parse_goals(["e2e.p90<=0.25"])), REGISTRY)
    assert found.answer is not None
    (fleet,) = found.answer.fleets
    assert fleet.clients is not None and fleet.clients >= 8 and "at 8 clients" in found.answer.sentence
    assert fleet.headroom == pytest.approx(fleet.clients / 8 - 1)
    assert {"clients +20 %"} <= {row["case"] for row in found.answer.changed}


def test_a_loop_whose_clients_hardly_begin_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--requests=80: 9 clients begin at once.*at least 90"):
        Evaluator(question(LOOP.model_copy(update={"concurrency": 9})), REGISTRY)


@pytest.mark.usefixtures("as_given")
def test_a_speculator_is_a_technique_to_try_and_bounds_stay_optimistic() -> None:
    guess = "ngram:num_tokens=3,alpha=0.8"
    asked_of = question(OPEN, {"speculator": (None, guess)}, goals=parse_goals(["tpot.p90<=0.02", "ttft.p90<=0.5"]))
    evaluator = Evaluator(asked_of, REGISTRY)
    plain, guesses = evaluator.designs
    assert guesses.guesses and not plain.guesses and guesses.key.endswith(f"speculator={guess}")
    config = EngineConfig(model="llama-3.1-8b", device="h100-sxm", speculator=guess)
    outcome = asked(evaluator, design=1)
    same(outcome, simulate(config, OPEN, REGISTRY).metrics)
    assert outcome.values["tpot.p50"] < asked(evaluator).values["tpot.p50"]
    other = asked(evaluator, design=1, seed=1)
    assert other.values != outcome.values and asked(evaluator, design=1, seed=1) == other
    for design in evaluator.designs:
        bound = evaluator.answer(Trial(design=design.index, replicas=1, level=ASSESS))
        assert bound is not None and not bound.problem
        kept = [n for n in (1, 2, 3) if asked(evaluator, design=design.index, replicas=n).keeps(asked_of.goals)]
        assert kept and bound.fewest <= kept[0]


@pytest.mark.usefixtures("as_given")
def test_host_memory_is_searched_as_swap_space_and_as_a_tier() -> None:
    axes = {"host_tier": (None, 2**34), "host_kv_bytes": (None, 2**34)}
    evaluator = Evaluator(question(SESSIONS, axes), REGISTRY)
    keys = [d.key for d in evaluator.designs]
    assert len(keys) == len(set(keys)) == 4 and any("host_tier=16GiB" in key for key in keys)
    assert {d.config.preemption for d in evaluator.designs if d.config and d.config.host_kv_bytes} == {"swap"}
    tiered = next(d for d in evaluator.designs if d.host_tier and d.config and not d.config.host_kv_bytes)
    config = EngineConfig(model="llama-3.1-8b", device="h100-sxm")
    fleet = Fleet(engine=config, router="prefix_aware", host_tier_bytes=2**34)
    same(asked(evaluator, design=tiered.index), simulate_fleet(fleet, SESSIONS, REGISTRY, bands=False).metrics)


def test_nothing_cheaper_is_left_without_its_reason() -> None:
    crowd = Workload(num_requests=60, rate=60.0, input_len=2000, output_len=8)
    axes = {"device": ("h100-sxm", "l40s"), "max_num_batched_tokens": (1024, 2048)}
    found = plan(question(crowd, axes, max_replicas=8, goals=parse_goals(["ttft.p90<=0.4"])), REGISTRY)
    assert found.answer is not None and found.answer.fleets[0].replicas > 1
    best, rows = found.answer.fleets[0], found.answer.cheaper
    assert best.cost_per_hour is not None
    assert rows[0]["num_devices"] == best.num_devices - best.num_devices // best.replicas
    assert (rows[0]["why"].startswith("with ") and "above 400 ms" in rows[0]["why"]) or "far above" in rows[0]["why"]
    assert all(row["why"] and row["cost_per_hour"] < best.cost_per_hour for row in rows)
    for row in rows:
        tried, fleet = re.search(r"with (\d+) replica", row["why"]), int(row["fleet"].split(" x ")[0])
        assert tried is None or row["why"].startswith("even ") == (int(tried[1]) > fleet)
        assert row["why"].startswith("even ") == ("which cost no less" in row["why"])
    costs = [row["cost_per_hour"] for row in rows[1:]]
    assert costs == sorted(costs, reverse=True)


# --- long enough ------------------------------------------------------------------------------------

BURST = Workload(num_requests=40, rate=200.0, input_len=64, output_len=200)


def burst(workload: Workload = BURST, **more: Any) -> Evaluator:
    axes = {"max_num_seqs": (16,), "max_num_batched_tokens": (512,)}
    given = {"base": {"model": "smollm2-135m"}, "goals": parse_goals(["ttft.p90<=0.5"]), "seeds": 1} | more
    return Evaluator(question(workload, axes, **given), REGISTRY)


def test_a_burst_that_is_over_before_it_is_answered_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """So many replicas have a row for each of few requests; the many that come at this rate wait for one."""
    with monkeypatch.context() as patch:
        patch.setattr(plan_tally, "BACKLOG", 1.0)
        short = asked(burst(), replicas=3)
    assert short.num_requests == 40 and short.backlog > 0.5 and not short.settled
    assert short.keeps(parse_goals(["ttft.p90<=0.5"]))
    long = asked(burst(), replicas=3)
    assert long.num_requests > 40 and not long.keeps(parse_goals(["ttft.p90<=0.5"]))


def test_synthetic_traffic_goes_on_until_the_last_request_finds_few_before_it() -> None:
    evaluator = burst(BURST.model_copy(update={"lengths": "uniform", "spread": 0.5}), seeds=2)
    for level in (SCREEN, REPLICA, FLEET):
        found = asked(evaluator, replicas=12, level=level)
        assert found.settled and found.keeps(evaluator.question.goals), level
    longer = evaluator.traffic.drawn(1, 8)
    assert 300 <= len(longer) <= 320 and longer == evaluator.traffic.drawn(1, 8)
    assert max(r.max_length for r in longer) <= evaluator.traffic.longest
    assert longer[-1].arrival == pytest.approx(8 * evaluator.requests[-1].arrival, rel=0.4)


def test_a_trace_ends_and_the_answer_says_that_it_is_of_a_burst(tmp_path: Path) -> None:
    rows = [f"2023-11-16 18:00:{i // 20:02d}.{i % 20 * 5:02d}00000,64,100" for i in range(20)]
    (tmp_path / "t.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(rows) + "\n")
    recorded = Workload(trace=str(tmp_path / "t.csv"), rate_scale=20)
    asked_of = burst(recorded, screen=5, confirm=10, max_replicas=2).question
    found = plan(asked_of, REGISTRY)
    assert found.answer is not None
    (fleet,) = found.answer.fleets
    assert fleet.backlog > 0.5 and "this holds for a burst" in found.answer.sentence
    confirmed = [o for t, o in found.points.values() if t.level == FLEET and t.load == t.steps == t.bandwidth == 1]
    assert all(o.num_requests == 20 for o in confirmed)  # the busiest 10 were not enough
