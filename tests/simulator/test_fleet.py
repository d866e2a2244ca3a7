"""Fleets of replicas: one is `simulate`, many conserve requests, tokens, blocks and bytes whatever fails on the way."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twinfer.core.config import EngineConfig
from twinfer.core.errors import ConfigError, PluginError
from twinfer.core.fleet import Autoscaler, Failure, Fleet
from twinfer.core.params import SamplingParams
from twinfer.core.records import RunRecord
from twinfer.core.registry import Registry
from twinfer.core.request import Request
from twinfer.core.work import RowShape, StepShape
from twinfer.core.workload import Workload
from twinfer.simulator.fleet_run import FleetRun, prepare_pools, simulate_fleet
from twinfer.simulator.front import Continued
from twinfer.simulator.run import World, simulate
from twinfer.simulator.transfers import kv_bytes

REGISTRY = Registry(entry_points=False)
ENGINE = EngineConfig(model="llama-3.1-8b", device="h100-sxm", num_kv_blocks=1024)
WORKLOAD = Workload(num_requests=40, rate=30.0, input_len=200, output_len=20, lengths="lognormal", spread=0.6, seed=3)


def predicted(workload: Workload, **fleet: Any) -> RunRecord:
    return simulate_fleet(Fleet(**({"engine": ENGINE} | fleet)), workload, REGISTRY)


def same(a: RunRecord, b: RunRecord) -> bool:
    return (a.steps, a.requests, a.metrics, a.intervals) == (b.steps, b.requests, b.metrics, b.intervals)


_pools: dict[str, dict[str, World]] = {}


def pools_of(fleet: Fleet) -> dict[str, World]:
    """Resolved once for all traffic: of a context that is long enough for every test here."""
    key = fleet.model_dump_json()
    if key not in _pools:
        _pools[key] = dict(prepare_pools(fleet, Workload(num_requests=1, input_len=900, output_len=100), REGISTRY))
    return _pools[key]


def run(fleet: Fleet, requests: Sequence[Request], **how: Any) -> tuple[FleetRun, RunRecord]:
    """One run, and what holds of every run."""
    base = Fleet(engine=fleet.engine, decode=fleet.decode, decode_replicas=min(1, fleet.decode_replicas))
    pools = {name: replace(world, requests=requests) for name, world in pools_of(base).items()}
    done = FleetRun(fleet, pools, **how)
    record, _ = done.run()
    if done.detail == "steps":
        check(done, record, requests)
    return done, record


def check(done: FleetRun, record: RunRecord, requests: Sequence[Request]) -> None:
    """Conservation of requests, tokens and blocks; causality; a monotone clock."""
    assert record.complete and [r.request_id for r in record.requests] == [r.id for r in requests]
    assert not done.jobs
    for asked, r in zip(requests, record.requests, strict=True):
        assert r.reason in ("length", "rejected", "capacity"), r
        times = [
            t for t in (asked.arrival, r.first_scheduled, r.first_token, r.last_token, r.finished) if t is not None
        ]
        assert times == sorted(times), r
        if r.reason == "length":
            assert r.num_output_tokens == asked.params.max_tokens and len(r.itl) == r.num_output_tokens - 1
            assert r.first_token is not None and r.last_token is not None
            assert min(r.itl, default=0) >= 0
            assert sum(r.itl) == pytest.approx(r.last_token - r.first_token)
            assert 0 <= r.num_cached_tokens <= r.num_prompt_tokens + r.num_output_tokens  # its own, after preemption
            assert 0 <= r.num_hit_tokens < r.num_prompt_tokens
    for replica in done.replicas:
        if replica.state != "failed":
            assert all(rank.core.audit() == [] and not rank.core.has_work for rank in replica.ranks)
        assert not replica.pieces and replica.num_requests == 0 and replica.num_tokens == 0
    for replica in done.replicas:
        assert replica.num_requests == sum(rank.num_requests for rank in replica.ranks)
        for rank in range(len(replica.ranks)):
            steps = [s for s in record.steps if (s.replica, s.rank) == (replica.index, rank)]
            assert all(s.held_blocks <= s.total_blocks for s in steps)
            if replica.world.setup.config.pp == 1:  # else steps are on their way together
                assert all(b.start >= a.start + a.seconds - 1e-9 for a, b in pairwise(steps))
    if done.transfers is not None:
        network = done.transfers.network
        outs, ins = (
            sum(carried for name, carried in network.carried.items() if name.startswith(side)) for side in ("out", "in")
        )
        if done.fleet.disaggregated and not done.fleet.shared_tier_bytes:
            assert outs == pytest.approx(ins)
            assert done.transfers.sent_bytes <= ins * (1 + 1e-9)
        if done.transfers.tiers is not None:
            assert done.transfers.tiers.audit() == []


def ask(i: int, prompt: int = 64, tokens: int = 8, at: float = 0.0, prefix: int | None = None) -> Request:
    """Request i; those of one `prefix` begin with the same half."""
    own = range(100_000 + 1000 * i, 100_000 + 1000 * i + prompt)
    shared = tuple(range(1000 * prefix, 1000 * prefix + prompt // 2)) if prefix is not None else ()
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    return Request(id=f"r{i}", prompt=(*shared, *own[len(shared) :]), params=params, arrival=at)


# --- one replica ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("workload", "config"),
    [
        (WORKLOAD, {}),
        (Workload(num_requests=30, concurrency=4, input_len=100, output_len=20), {"scheduler": "static"}),
        (
            Workload(num_requests=40, input_len=200, output_len=150, lengths="uniform", spread=0.9),
            {"max_model_len": 400, "num_kv_blocks": 60, "max_num_seqs": 16},
        ),
        (Workload(num_requests=3, rate=5.0, input_len=60, output_len=20, beam_width=3), {}),
    ],
)
def test_one_replica_is_exactly_simulate(workload: Workload, config: dict[str, Any]) -> None:
    engine = EngineConfig(**({"model": "llama-3.1-8b", "device": "h100-sxm"} | config))
    alone = simulate(engine, workload, REGISTRY)
    fleet = simulate_fleet(Fleet(engine=engine), workload, REGISTRY)
    assert same(alone, fleet)
    assert (alone.config, alone.workload, alone.environment, alone.reasons) == (
        fleet.config, fleet.workload, fleet.environment, fleet.reasons
    )  # fmt: skip


# --- many -------------------------------------------------------------------------------------------


def test_round_robin_over_replicas_is_each_with_its_share() -> None:
    """Replica i of n gets every n-th request: its record is that of an engine that gets those alone."""
    requests = [ask(i, 40 + 13 * i, 10, at=0.004 * i) for i in range(24)]
    _, record = run(Fleet(engine=ENGINE, replicas=3), requests)
    assert [r.replica for r in record.requests] == [i % 3 for i in range(24)]
    for index in range(3):
        _, alone = run(Fleet(engine=ENGINE), requests[index::3])
        mine = [replace(r, replica=0) for r in record.requests if r.replica == index]
        assert mine == alone.requests
        assert [replace(s, replica=0) for s in record.steps if s.replica == index] == alone.steps


def test_metrics_of_replicas_add_up_to_those_of_the_fleet() -> None:
    record = predicted(WORKLOAD, replicas=3, router="least_loaded")
    parts = record.metrics["replicas"]
    assert [p["replica"] for p in parts] == [0, 1, 2] and all(p["num_requests"] for p in parts)
    for name in ("num_requests", "num_completed", "output_tokens", "prompt_tokens", "num_steps"):
        assert sum(p[name] for p in parts) == record.metrics[name]
    assert all(0 < p["busy"] <= 1 for p in parts)
    assert record.metrics["replica_seconds"] == pytest.approx(sum(p["rented_s"] for p in parts))
    assert record.config["fleet"] == {"replicas": 3, "router": {"name": "least_loaded"}}
    assert record.intervals["ttft.p95"][0] < record.metrics["ttft"]["p95"] < record.intervals["ttft.p95"][1]


def test_equal_arguments_give_equal_records() -> None:
    for fleet in ({"replicas": 3, "router": "random"}, {"replicas": 2, "mtbf": 0.5, "load_bandwidth": 1e12}):
        assert same(predicted(WORKLOAD, **fleet), predicted(WORKLOAD, **fleet))


def test_routers_that_know_prefixes_hit_more_than_turns_do() -> None:
    """8 prefixes over 4 replicas with room for two prefixes each."""
    draws = random.Random(1)
    requests = [ask(i, 800, 4, at=0.03 * i, prefix=draws.randrange(8)) for i in range(80)]
    engine = ENGINE.model_copy(update={"num_kv_blocks": 110})
    hits = {}
    for router in ("round_robin", "prefix_aware", "kv_aware"):
        _, record = run(Fleet(engine=engine, replicas=4, router=router), requests)
        hits[router] = record.metrics["prefix_cache_hit_rate"]
    assert hits["prefix_aware"] > 1.3 * hits["round_robin"] and hits["kv_aware"] > 1.3 * hits["round_robin"], hits
    assert hits["kv_aware"] <= 0.5, "no more than the half that is shared"


def test_a_router_that_answers_nonsense_is_named() -> None:
    pools = pools_of(Fleet(engine=ENGINE))
    for answer, words in ((7, "gave 7 in pick"), (None, "gave None in pick")):
        done = FleetRun(Fleet(engine=ENGINE, replicas=2), {k: replace(w, requests=[ask(0)]) for k, w in pools.items()})
        done.front.router = type("Bad", (), {"name": "bad", "pick": lambda self, request, views, a=answer: a})()
        with pytest.raises(PluginError, match=words):
            done.run()


def test_a_stop_leaves_a_valid_record() -> None:
    calls = iter(range(10_000))
    record = simulate_fleet(
        Fleet(engine=ENGINE, replicas=2), WORKLOAD, REGISTRY, should_stop=lambda: next(calls) >= 30
    )  # fmt: skip
    assert not record.complete and record.intervals == {}
    assert (
        0
        < len(record.steps)
        < len(simulate_fleet(Fleet(engine=ENGINE, replicas=2), WORKLOAD, REGISTRY, bands=False).steps)
    )
    assert record.metrics["num_steps"] == len(record.steps)


# --- prefill and decode pools -------------------------------------------------------------------------


def split(prefill: int = 1, decode: int = 1, **more: Any) -> Fleet:
    return Fleet(engine=ENGINE, replicas=prefill, decode=ENGINE, decode_replicas=decode, **more)


def test_the_second_token_comes_after_the_transfer() -> None:
    """Closed form: TTFT is the prefill, the first gap is latency + bytes / bandwidth + one decode step."""
    done, record = run(split(kv_bandwidth=1e9, kv_latency=0.005), [ask(0, 640, 3)])
    (request,) = record.requests
    timer = done.pools["engine"].timer
    assert request.ttft == pytest.approx(timer.exact(StepShape((RowShape(640, 640),), 1)).seconds)
    num_bytes = 640 * 131_072
    assert kv_bytes(done.pools["engine"], 640) == num_bytes == done.transfers.sent_bytes  # type: ignore[union-attr]
    step = timer.exact(StepShape((RowShape(1, 641),), 1)).seconds
    assert request.itl[0] == pytest.approx(0.005 + num_bytes / 1e9 + step, rel=1e-4)
    assert request.itl[1] == pytest.approx(timer.exact(StepShape((RowShape(1, 642),), 1)).seconds, rel=1e-4)
    assert record.metrics["kv_transfer"]["mean"] == pytest.approx(0.005 + num_bytes / 1e9)
    assert [p["pool"] for p in record.metrics["replicas"]] == ["prefill", "decode"]


def test_pools_may_be_laid_out_differently() -> None:
    """The same bytes, through the ports of two devices of the prefill replica into four of the decode replica."""
    two, four = (ENGINE.model_copy(update={"tp": tp}) for tp in (2, 4))
    _, record = run(Fleet(engine=two, decode=four, decode_replicas=1, kv_bandwidth=1e9), [ask(0, 640, 3)])
    assert record.metrics["kv_transfer_bytes"] == 640 * 131_072
    assert record.metrics["kv_transfer"]["mean"] == pytest.approx(640 * 131_072 / 2e9, rel=1e-3)
    assert record.config["tp"] == 2 and record.config["fleet"]["decode"] == {"tp": 4}


def test_overlap_hides_all_but_the_last_layer_of_a_fast_link_and_nothing_of_the_prefill() -> None:
    plain, hidden = (
        run(split(kv_bandwidth=100e9, kv_overlap=o), [ask(0, 640, 2)])[1].requests[0] for o in (False, True)
    )
    transfer = 640 * 131_072 / 100e9
    assert hidden.ttft == plain.ttft
    assert hidden.itl[0] == pytest.approx(plain.itl[0] - transfer * 31 / 32, rel=1e-3)
    slow = [run(split(kv_bandwidth=1e9, kv_overlap=o), [ask(0, 640, 2)])[1].requests[0] for o in (False, True)]
    assert slow[0].ttft is not None
    assert slow[1].itl[0] == pytest.approx(slow[0].itl[0] - slow[0].ttft, rel=0.02), "the link was busy all the time"


def test_transfers_to_one_decode_replica_share_its_link() -> None:
    requests = [ask(i, 640, 2) for i in range(3)]
    _, alone = run(split(prefill=3, kv_bandwidth=1e9), requests[:1])
    _, record = run(split(prefill=3, kv_bandwidth=1e9), requests)
    assert {r.first_token for r in record.requests} == {alone.requests[0].first_token}, "three prefills side by side"
    first = alone.metrics["kv_transfer"]["mean"]
    assert record.metrics["kv_transfer"]["mean"] == pytest.approx(3 * first, rel=0.01)
    _, narrow = run(split(prefill=3, decode=3, kv_bandwidth=1e9, fabric_bandwidth=1e9), requests)
    assert narrow.metrics["kv_transfer"]["mean"] == pytest.approx(3 * first, rel=0.01)


def test_a_full_decode_pool_holds_prefill_memory() -> None:
    """Back-pressure: KV that finds no room stays where it is, and new prompts wait."""
    small = ENGINE.model_copy(update={"num_kv_blocks": 64})
    fleet = Fleet(engine=small, replicas=1, decode=small, decode_replicas=1)
    requests = [ask(i, 400, 60) for i in range(8)]
    _, tight = run(fleet, requests)
    _, ample = run(split(), requests)
    late = [max(r.first_token for r in record.requests if r.first_token) for record in (tight, ample)]
    assert late[0] > 3 * late[1]


def test_answers_of_one_token_need_no_decode_replica() -> None:
    done, record = run(split(), [ask(0, 100, 1)])
    assert record.metrics["kv_transfer_bytes"] == 0 and not [s for s in record.steps if s.replica == 1]
    assert done.replicas[1].last_pick == -1


# --- failures -----------------------------------------------------------------------------------------


def test_a_failure_costs_time_but_no_token() -> None:
    """What had been told stays told; the rest is computed elsewhere, the prompt and those tokens again."""
    requests = [ask(i, 100, 40) for i in range(6)]
    _, calm = run(Fleet(engine=ENGINE, replicas=2), requests)
    when = calm.metrics["duration"] / 2
    done, record = run(Fleet(engine=ENGINE, replicas=2, failures=(Failure(replica=0, at=when),)), requests)
    assert record.metrics["num_failures"] == 1 and record.metrics["num_reroutes"] == 3
    assert {r.replica for r in record.requests} == {1}
    assert record.metrics["duration"] > calm.metrics["duration"]
    for before, after in zip(calm.requests, record.requests, strict=True):
        assert after.first_token == before.first_token, "told before the failure"
    lost = [p for p in record.metrics["replicas"] if p["replica"] == 0]
    assert lost[0]["num_failures"] == 1 and lost[0]["num_completed"] == 0
    assert done.replicas[0].state == "failed", "its weights take longer than the run"


def test_when_all_have_failed_requests_wait_for_the_first_to_come_back() -> None:
    fleet = Fleet(engine=ENGINE, failures=(Failure(replica=0, at=0.0),), repair_s=2.0, boot_s=1.0, load_bandwidth=1e12)
    done, record = run(fleet, [ask(0, at=0.5)])
    back = 2.0 + done.start_s(done.pools["engine"])
    assert done.start_s(done.pools["engine"]) == pytest.approx(1.0 + 8.03e9 * 2 / 1e12, rel=0.01)
    assert record.requests[0].first_scheduled == back


def test_a_fleet_that_fails_faster_than_it_serves_ends_in_an_error() -> None:
    fleet = Fleet(engine=ENGINE.model_copy(update={"num_kv_blocks": 64}), mtbf=1e-6)
    with pytest.raises(ConfigError, match=r"--mtbf.*201 failures in a row"):
        run(fleet, [ask(0)])


@pytest.mark.parametrize("replica", range(4))
@pytest.mark.parametrize("overlap", [False, True])
def test_pools_survive_a_failure_at_any_moment(replica: int, overlap: bool) -> None:
    """Two prefill and two decode replicas; the failure sweeps over prefill, transfer and decode."""
    requests = [ask(i, 640, 6, at=0.002 * i) for i in range(6)]
    for step in range(9):
        failure = Failure(replica=replica, at=0.004 + 0.015 * step)
        run(split(2, 2, kv_bandwidth=2e9, kv_overlap=overlap, failures=(failure,), load_bandwidth=1e12), requests)


# --- autoscaling --------------------------------------------------------------------------------------


def test_the_autoscaler_follows_the_load_up_and_down() -> None:
    rule = Autoscaler(max_replicas=4, target_requests=4, interval_s=0.1, down_after_s=0.3)
    burst = [ask(i, 200, 60, at=0.02 * i) for i in range(100)]
    trickle = [ask(100 + i, 50, 4, at=5.0 + i) for i in range(4)]
    done, record = run(Fleet(engine=ENGINE, autoscaler=rule, load_bandwidth=1e11, boot_s=0.2), [*burst, *trickle])
    used = [p for p in record.metrics["replicas"] if p["num_requests"]]
    assert len(used) == 4 and record.metrics["num_replicas"] == 4
    ready = 0.2 + done.pools["engine"].setup.model.weight_bytes(1) / 1e11
    assert done.start_s(done.pools["engine"]) == pytest.approx(ready)
    first = min(s.start for s in record.steps if s.replica)
    assert first >= 0.1 + ready, "no work before its weights are there"
    assert [r.state for r in done.replicas].count("off") == 4
    assert record.metrics["replica_seconds"] < 0.6 * 4 * record.metrics["duration"]
    assert sum(p["rented_s"] > 0.9 * record.metrics["duration"] for p in record.metrics["replicas"]) == 1


def test_a_busy_target_adds_replicas_too() -> None:
    rule = Autoscaler(max_replicas=3, target_busy=0.5, interval_s=0.2)
    _, record = run(
        Fleet(engine=ENGINE, autoscaler=rule, load_bandwidth=1e12), [ask(i, 300, 80, at=0.02 * i) for i in range(40)]
    )
    assert record.metrics["num_replicas"] > 1


# --- tiers of KV ----------------------------------------------------------------------------------------


def test_host_memory_brings_back_what_the_device_has_evicted() -> None:
    """A pool for one prompt: the second prompt evicts the first, which comes again and is loaded over the host link."""
    small = ENGINE.model_copy(update={"num_kv_blocks": 64})
    requests = [
        replace(ask(0, 900, 2, at=float(i)), id=f"r{i}") if i != 1 else ask(1, 900, 2, at=1.0) for i in range(3)
    ]
    _, plain = run(Fleet(engine=small), requests)
    _, tiered = run(Fleet(engine=small, host_tier_bytes=2**34), requests)
    assert plain.requests[2].num_cached_tokens < 200
    assert tiered.requests[2].num_cached_tokens == 768, "three blocks of 256"
    assert tiered.metrics["tier_loads"] == 1 and tiered.metrics["tier_tokens"] == 768
    assert tiered.metrics["tier_bytes"] == 768 * 131_072
    assert tiered.requests[2].ttft < plain.requests[2].ttft
    _, tiny = run(Fleet(engine=small, host_tier_bytes=2**25), requests)
    assert tiny.metrics["tier_tokens"] <= 256


def test_the_shared_store_serves_replicas_that_never_saw_the_prompt() -> None:
    requests = [replace(ask(0, 900, 2, at=float(i)), id=f"r{i}") for i in range(2)]
    _, host = run(Fleet(engine=ENGINE, replicas=2, host_tier_bytes=2**34), requests)
    _, store = run(Fleet(engine=ENGINE, replicas=2, shared_tier_bytes=2**34), requests)
    assert host.requests[1].num_cached_tokens == 0 and store.requests[1].num_cached_tokens == 768


def test_slow_links_are_left_alone() -> None:
    """Loading 768 tokens at 1 GB/s takes 0.1 s, computing them far less."""
    requests = [replace(ask(0, 900, 2, at=float(i)), id=f"r{i}") for i in range(2)]
    _, record = run(Fleet(engine=ENGINE, replicas=2, shared_tier_bytes=2**34, kv_bandwidth=1e9), requests)
    assert record.metrics["tier_loads"] == 0


# --- many steps as one --------------------------------------------------------------------------------------

CROWD = [ask(i, 60 + 37 * i % 400, 5 + 11 * i % 60, at=0.013 * i, prefix=i % 3) for i in range(40)]


@pytest.mark.parametrize(
    "fleet",
    [
        Fleet(engine=ENGINE, replicas=3, router="kv_aware"),
        Fleet(engine=ENGINE, replicas=2, router="prefix_aware", mtbf=0.2, load_bandwidth=1e12),
        Fleet(
            engine=ENGINE, replicas=2, decode=ENGINE, decode_replicas=2, kv_bandwidth=5e9, kv_overlap=True,
            failures=(Failure(replica=2, at=0.31), Failure(replica=0, at=0.17)), load_bandwidth=1e12,
        ),
        Fleet(
            engine=ENGINE, load_bandwidth=1e12, host_tier_bytes=2**33,
            autoscaler=Autoscaler(max_replicas=3, target_busy=0.4, interval_s=0.1, down_after_s=0.2),
        ),
    ],
)  # fmt: skip
def test_taking_many_steps_as_one_changes_nothing(fleet: Fleet) -> None:
    _, stepped = run(fleet, CROWD, skip=False)
    _, skipped = run(fleet, CROWD)
    assert [r.replica for r in skipped.requests] == [r.replica for r in stepped.requests]
    for a, b in zip(skipped.requests, stepped.requests, strict=True):
        assert (a.num_output_tokens, a.num_cached_tokens, a.num_preemptions) == (
            b.num_output_tokens, b.num_cached_tokens, b.num_preemptions
        )  # fmt: skip
        assert [a.first_token, a.last_token, *a.itl] == pytest.approx([b.first_token, b.last_token, *b.itl], abs=1e-9)
    assert len(skipped.steps) == len(stepped.steps)
    _, brief = run(fleet, CROWD, detail="requests")
    assert not brief.steps and not any(r.itl for r in brief.requests)
    for name in ("num_steps", "num_completed", "num_reroutes", "num_failures"):
        assert brief.metrics[name] == stepped.metrics[name]
    for name in ("output_throughput", "kv_waste", "peak_kv_bytes", "replica_seconds"):
        assert brief.metrics[name] == pytest.approx(stepped.metrics[name], rel=1e-6)
    for name in ("ttft", "tpot", "e2e"):
        assert brief.metrics[name] == pytest.approx(stepped.metrics[name], rel=1e-6)
    assert brief.metrics["itl"]["mean"] == pytest.approx(stepped.metrics["itl"]["mean"], rel=1e-6)
    assert brief.metrics["itl"]["p99"] == pytest.approx(stepped.metrics["itl"]["p99"], rel=0.01)


# --- everything at once -----------------------------------------------------------------------------------

SMALL = EngineConfig(
    model="llama-3.1-8b",
    device="h100-sxm",
    num_kv_blocks=40,
    max_model_len=640,
    max_num_seqs=4,
    max_num_batched_tokens=128,
)
STAGES = SMALL.model_copy(update={"pp": 2})
RANKS = SMALL.model_copy(update={"model": "mixtral-8x7b", "dp": 2, "ep": 2, "num_kv_blocks": 80, "max_num_seqs": 8})
BOTH = RANKS.model_copy(update={"pp": 2})
requests_ = st.lists(
    st.tuples(st.integers(1, 300), st.integers(1, 12), st.floats(0, 0.3), st.none() | st.integers(0, 2)),
    min_size=1, max_size=14,
)  # fmt: skip
fleets = st.builds(
    lambda engine, split, replicas, extra, **more: Fleet(
        engine=engine, replicas=replicas, **({"load_bandwidth": 1e12} if more["failures"] or more["mtbf"] else {}),
        **({"decode": engine, "decode_replicas": extra, **split} if split is not None else {}),
        **{name: value for name, value in more.items() if value is not None},
    ),
    engine=st.sampled_from([SMALL, SMALL, STAGES, RANKS, BOTH]),
    split=st.none() | st.fixed_dictionaries(
        {"kv_bandwidth": st.sampled_from([1e9, 2e10, 1e12]), "kv_overlap": st.booleans(),
         "fabric_bandwidth": st.sampled_from([None, 1e9])}
    ),
    replicas=st.integers(1, 3), extra=st.integers(1, 2),
    router=st.sampled_from(["round_robin", "random", "least_loaded", "prefix_aware:block=16", "kv_aware"]),
    host_tier_bytes=st.none() | st.sampled_from([2**25, 2**33]),
    shared_tier_bytes=st.none() | st.sampled_from([2**25, 2**33]),
    failures=st.lists(st.builds(Failure, replica=st.just(0), at=st.floats(0, 0.4)), max_size=2).map(tuple),
    mtbf=st.sampled_from([None, None, 0.3]),
)  # fmt: skip


@given(fleets, requests_)
@settings(max_examples=40)
def test_whatever_happens_every_request_ends_once(
    fleet: Fleet, drawn: list[tuple[int, int, float, int | None]]
) -> None:
    """`check` holds of random fleets, with failures, tiers, transfers and pools that are short of memory, of replicas of
    one device, with stages, and with ranks; and they are the same each time."""
    drawn.sort(key=lambda d: d[2])
    requests = [ask(i, prompt, tokens, at, prefix) for i, (prompt, tokens, at, prefix) in enumerate(drawn)]
    _, record = run(fleet, requests)
    _, again = run(fleet, requests)
    assert (record.steps, record.requests, record.metrics) == (again.steps, again.requests, again.metrics)


# --- mistakes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fleet", "option"),
    [
        ({"decode_replicas": 2}, "--decode-replicas"),
        ({"decode": ENGINE}, "--decode-replicas"),
        ({"kv_overlap": True}, "--kv-overlap"),
        ({"kv_bandwidth": 1e9}, "--kv-bandwidth"),
        ({"tier_block": 64}, "--tier-block"),
        ({"repair_s": 3.0}, "--repair"),
        ({"boot_s": 3.0}, "--boot-time"),
        ({"failures": (Failure(replica=4, at=1.0),)}, "--fail"),
        ({"replicas": 5, "autoscaler": Autoscaler(max_replicas=4, target_requests=2)}, "--replicas"),
        ({"decode": EngineConfig(model="qwen2.5-7b", device="h100-sxm"), "decode_replicas": 1}, "--model"),
        ({"router": "nearest"}, "--router"),
        ({"router": "random:choices=0"}, "--router"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(fleet: dict[str, Any], option: str) -> None:
    with pytest.raises(ConfigError) as error:
        predicted(Workload(num_requests=1), **fleet)
    assert error.value.option == option


def test_beams_are_not_handed_over() -> None:
    with pytest.raises(ConfigError, match="beam"):
        predicted(Workload(num_requests=1, beam_width=2), decode=ENGINE, decode_replicas=1)


def test_a_continued_prompt_reads_as_prompt_and_zeros() -> None:
    plain = [*range(5, 9), 0, 0, 0]
    lazy = Continued(range(5, 9), 3)
    assert len(lazy) == 7 and list(lazy) == plain
    for a in range(-8, 9):
        for b in range(-8, 9):
            assert list(lazy[a:b]) == plain[a:b]
            assert list(lazy[a:b:2]) == plain[a:b:2]


def test_one_request_at_a_time_is_lindleys_recursion() -> None:
    """W' = max(0, W + service - gap), exactly, on each of two replicas that get every other request (Lindley 1952)."""
    draws = random.Random(5)
    at, requests = 0.0, []
    for i in range(120):
        requests.append(ask(i, 64, 1, at=at))
        at += draws.expovariate(300.0)
    engine = ENGINE.model_copy(update={"max_num_seqs": 1})
    _, record = run(Fleet(engine=engine, replicas=2), requests)
    service = record.steps[0].seconds
    for index in range(2):
        wait, last = 0.0, None
        mine = [r for r in record.requests if r.replica == index]
        assert len(mine) == 60
        for r in mine:
            if last is not None:
                wait = max(0.0, wait + service - (r.arrival - last))
            last = r.arrival
            assert r.ttft == pytest.approx(wait + service, abs=1e-9)
    assert max(r.ttft or 0 for r in record.requests) > 3 * service, "there was a queue"
