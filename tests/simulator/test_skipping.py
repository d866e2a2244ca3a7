"""Taking many steps as one event changes nothing: the same runs step by step are the oracle."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import simpy

from twinfer.core.catalog import resolve_spec
from twinfer.core.config import EngineConfig
from twinfer.core.core import Core
from twinfer.core.device import load_device
from twinfer.core.events import Abort, Decoded, Event, Output, TokenDelta, TransferDone, TransferFailed
from twinfer.core.feeder import Feeder
from twinfer.core.flock import promise_of
from twinfer.core.params import SamplingParams
from twinfer.core.plan import StepPlan, StepResult
from twinfer.core.policy import Limits, Steady, View, Want
from twinfer.core.recorder import Detail, Recorder
from twinfer.core.records import RunRecord
from twinfer.core.registry import Registry
from twinfer.core.request import KVSource, Request
from twinfer.core.work import step_ops
from twinfer.core.workload import Workload
from twinfer.plugins.kv_cache.contiguous import Contiguous
from twinfer.plugins.kv_cache.paged import Paged
from twinfer.plugins.scheduler.continuous import Continuous
from twinfer.plugins.scheduler.static import Static
from twinfer.simulator.driver import SimInbox, arrivals, engine
from twinfer.simulator.executor import CostExecutor
from twinfer.simulator.op_time import build_chain
from twinfer.simulator.run import simulate
from twinfer.simulator.step_time import StepTimer

REGISTRY = Registry(entry_points=False)
SPEC = resolve_spec("llama-3.1-8b")
CHAIN = build_chain((), load_device("h100-sxm", REGISTRY), REGISTRY)
TIMER = StepTimer(lambda shape: step_ops(SPEC, shape), CHAIN)
OVERLAPPING = StepTimer(lambda shape: step_ops(SPEC, shape), CHAIN, overlap=True)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One workload on one engine. events: what else happens, (time, event)."""

    scheduler: Any
    kv_cache: Any
    limits: Limits
    requests: tuple[Request, ...]
    concurrency: int | None = None
    events: tuple[tuple[float, Event], ...] = ()
    transfer: float = 0.02  # seconds of a transfer of KV; every third fails


class Patient(SimInbox):
    """Stays open until `SimInbox.close` is called on it."""

    def close(self) -> None: ...


class Watching(CostExecutor):
    """Ends transfers after a while, and counts what it was asked to execute."""

    def __init__(self, env: simpy.Environment, inbox: SimInbox, seconds: float, timer: StepTimer) -> None:
        super().__init__(timer)
        self.env, self.inbox, self.delay = env, inbox, seconds
        self.num_plans = self.num_moves = 0

    def execute(self, plan: StepPlan) -> StepResult:
        self.num_plans += 1
        for move in plan.moves:
            self.num_moves += 1
            done: Event = TransferDone(move.seq) if self.num_moves % 3 else TransferFailed(move.seq, "lost")
            self.env.process(self._transfer(done))
        return super().execute(plan)

    def _transfer(self, done: Event) -> Any:
        yield self.env.timeout(self.delay)
        self.inbox.put(done)


def play(case: Case, skip: bool, detail: Detail = "steps") -> tuple[RunRecord, list[Output], Watching, Core]:
    core = Core(case.scheduler, case.kv_cache, case.limits)
    env = simpy.Environment()
    inbox = Patient(env)
    executor = Watching(env, inbox, case.transfer, OVERLAPPING if case.limits.max_outstanding > 1 else TIMER)
    recorder = Recorder("simulator", {}, {}, 1.0, detail=detail)
    outputs: list[Output] = []
    feeder = Feeder(case.requests, case.concurrency)
    bell = env.event()

    def freed() -> simpy.Event:
        nonlocal bell
        bell = env.event()
        return bell

    def emit(told: Sequence[Output], now: float) -> None:
        outputs.extend(told)
        if feeder.note(told, now) and not bell.triggered:
            bell.succeed()

    def happen() -> Any:
        for when, event in case.events:
            yield env.timeout(when - env.now)
            inbox.put(event)
            yield env.timeout(0)
            inbox.settle()
            assert core.audit() == []

    def closing() -> Any:  # transfers may end after the last arrival
        while not feeder.exhausted or core.has_work or env.now < 0.5:
            yield env.timeout(0.5)
        SimInbox.close(inbox)

    env.process(arrivals(env, inbox, feeder, freed))
    env.process(closing())
    done = env.process(engine(env, core, executor, inbox, recorder, emit, None, skip))
    if case.events:
        env.process(happen())
    env.run(done)
    assert core.audit() == []
    return recorder.finish(), outputs, executor, core


def told(outputs: Iterable[Output]) -> tuple[dict[tuple[str, int], int], list[Output]]:
    """Tokens by sample, and all that is not tokens in order."""
    tokens: dict[tuple[str, int], int] = {}
    others = []
    for output in outputs:
        if isinstance(output, TokenDelta):
            key = (output.request_id, output.index)
            tokens[key] = tokens.get(key, 0) + len(output.tokens)
        else:
            others.append(output)
    return tokens, others


def same(case: Case) -> tuple[int, int]:
    """Both ways of running `case` agree in everything; the plans that each executed."""
    record, outputs, stepping, core = play(case, skip=False)
    fast, fast_outputs, skipping, fast_core = play(case, skip=True)
    short, _, _, short_core = play(case, skip=True, detail="requests")
    assert fast.requests == record.requests
    assert fast.steps == record.steps
    assert fast.metrics == record.metrics
    assert told(fast_outputs) == told(outputs)
    assert skipping.relative_sigma == pytest.approx(stepping.relative_sigma, rel=1e-12)
    assert [replace(r, itl=[]) for r in record.requests] == short.requests
    for name in ("itl", "kv_waste", "peak_kv_bytes", "num_steps"):
        exact, kept = (r.metrics[name] for r in (record, short))
        assert kept == exact or (kept["mean"] if name == "itl" else kept) == pytest.approx(
            exact["mean"] if name == "itl" else exact, rel=1e-9, abs=1e-12
        ), name
    pools = [c.ledger.pool for c in (core, fast_core, short_core)]
    cached = [sorted(_paths(pool)) for pool in pools]
    assert cached[0] == cached[1] == cached[2], "the same prefixes are cached at the end"
    assert len({pool.available - pool.num_idle for pool in pools}) == 1, "as many are free"
    return stepping.num_plans, skipping.num_plans


def _paths(pool: Any) -> Iterable[tuple[Any, ...]]:
    for node, _ in pool.index:
        path: list[Any] = []
        while isinstance(node, int):
            above, tokens = pool.tree.keys[node]
            path.append(tokens)
            node = above
        yield tuple(reversed(path))


def draw(seed: int) -> Case:
    rng = random.Random(seed)
    budget = rng.choice([8, 24, 64, 256])
    max_len = rng.choice([40, 80, 160])
    if rng.random() < 0.7:
        scheduler: Any = Continuous(
            Continuous.Options(
                chunked_prefill=rng.random() < 0.8, chunk_size=rng.choice([None, None, 5, 16]),
                policy=rng.choice(["fcfs", "priority"]),
            )
        )  # fmt: skip
    else:
        scheduler = Static(Static.Options(batch_size=rng.choice([2, 5, 16]), max_wait_s=rng.choice([0.0, 0.05])))
    size = rng.choice([1, 2, 4, 16])
    longest = -(-max_len // size)
    if rng.random() < 0.8:
        kv_cache: Any = Paged(
            Paged.Options(block_size=size, prefix_sharing=rng.random() < 0.75, headroom=rng.choice([0.0, 0.05]))
        )
        num_blocks = longest * rng.choice([1, 2, 3, 8]) + rng.randrange(4)
    else:
        kv_cache, num_blocks = Contiguous(), rng.choice([1, 3, 8])
    limits = Limits(
        max_num_seqs=rng.choice([1, 3, 6, 12]), max_num_batched_tokens=budget, max_model_len=max_len,
        num_blocks=num_blocks, num_host_blocks=rng.choice([0, 0, longest, 4 * longest]),
    )  # fmt: skip
    count = rng.randint(4, 14)
    rate = rng.choice([3.0, 10.0, 40.0, 200.0])
    special = rng.random()
    when, requests = 0.0, []
    for number in range(count):
        length = rng.randint(1, min(max_len, 60) if rng.random() < 0.9 else max_len + 5)
        shared = rng.random()
        if shared < 0.3:
            prompt: Any = range(length)
        elif shared < 0.5:
            prompt = (0,) * length  # like the answers
        else:
            prompt = range(1000 * number + 1, 1000 * number + 1 + length)
        params = SamplingParams(max_tokens=rng.choice([1, 2, 7, 30, 60]), ignore_eos=True)
        if special < 0.15 and rng.random() < 0.4:
            params = replace(params, n=3, temperature=1.0, max_tokens=12)
        elif special < 0.25 and rng.random() < 0.3 and limits.max_num_seqs >= 3:
            params = replace(params, beam_width=2, max_tokens=6)
        source = KVSource(handle="peer", num_tokens=length) if special > 0.85 and rng.random() < 0.5 else None
        sink = "peer" if special > 0.9 and rng.random() < 0.5 and params.beam_width == 1 else None
        requests.append(
            Request(
                id=f"r{number}", prompt=prompt, params=params, arrival=when, priority=rng.randrange(3), kv_from=source,
                kv_to=sink,
            )
        )  # fmt: skip
        if rng.random() < 0.8:
            when += rng.expovariate(rate)
    concurrency = rng.choice([1, 3, 8]) if rng.random() < 0.3 else None
    events: list[tuple[float, Event]] = []
    if 0.4 < special < 0.55:
        events = [(rng.uniform(0, when + 0.3), Abort(f"r{rng.randrange(count)}")) for _ in range(4)]
        events.sort(key=lambda e: e[0])
    return Case(
        scheduler=scheduler, kv_cache=kv_cache, limits=limits, requests=tuple(requests), concurrency=concurrency,
        events=tuple(events),
    )  # fmt: skip


@pytest.mark.parametrize("first", range(0, 200, 20))
def test_200_random_workloads_run_the_same(first: int) -> None:
    """Open and closed loops, chunks, priorities, preemptions, swaps, prefix hits, forks, beams, aborts, transfers."""
    plans = [0, 0]
    for seed in range(first, first + 20):
        try:
            counts = same(draw(seed))
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        plans = [a + b for a, b in zip(plans, counts, strict=True)]
    assert plans[1] < 0.6 * plans[0], "it does skip"


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_60_random_workloads_run_the_same_where_steps_overlap(first: int) -> None:
    """Each step is planned while the one before it runs."""
    plans = [0, 0]
    for seed in range(first, first + 20):
        case = draw(seed)
        try:
            counts = same(replace(case, limits=replace(case.limits, max_outstanding=2)))
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        plans = [a + b for a, b in zip(plans, counts, strict=True)]
    assert plans[1] < 0.8 * plans[0], "it does skip"


class NewestFirst:
    """The idle block that came last is given up first."""

    def __init__(self) -> None:
        self.blocks: dict[int, None] = {}

    def add(self, block: int) -> None:
        self.blocks[block] = None

    def remove(self, block: int) -> None:
        del self.blocks[block]

    def pop(self) -> int:
        return self.blocks.popitem()[0]

    def __len__(self) -> int:
        return len(self.blocks)

    def __contains__(self, block: object) -> bool:
        return block in self.blocks


class OwnOrder(Paged):
    def idle_order(self) -> Any:
        return NewestFirst()


@pytest.mark.parametrize("ahead", [1, 2])
def test_idle_blocks_in_an_order_of_their_own_run_the_same(ahead: int) -> None:
    """Chains are for `LRU`, which gives up their blocks from the end; this order begins with the head of a prompt."""
    played = 0
    for seed in range(0, 200, 4):
        case = draw(seed)
        if isinstance(case.kv_cache, Paged) and case.kv_cache.shares_prefixes:
            limits = replace(case.limits, max_outstanding=ahead)
            same(replace(case, kv_cache=OwnOrder(case.kv_cache.options), limits=limits))
            played += 1
    assert played > 15


def test_a_steady_batch_is_a_handful_of_events() -> None:
    requests = tuple(
        Request(id=f"r{i}", prompt=range(i * 100, i * 100 + 50), params=SamplingParams(max_tokens=400, ignore_eos=True))
        for i in range(8)
    )
    limits = Limits(max_num_seqs=16, max_num_batched_tokens=64, max_model_len=512, num_blocks=400)
    for ahead in (1, 2):
        limits = replace(limits, max_outstanding=ahead)
        stepping, skipping = same(Case(scheduler=Continuous(), kv_cache=Paged(), limits=limits, requests=requests))
        assert stepping > 400 and skipping < 20


def test_a_queue_that_cannot_move_does_not_stop_a_run() -> None:
    """More clients than rows: the head waits for an end, arrivals queue up behind it."""
    requests = tuple(
        Request(
            id=f"r{i}", prompt=range(i * 100, i * 100 + 20), params=SamplingParams(max_tokens=100, ignore_eos=True),
            arrival=0.01 * i,
        )
        for i in range(30)
    )  # fmt: skip
    limits = Limits(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=512, num_blocks=400)
    case = Case(scheduler=Continuous(), kv_cache=Paged(), limits=limits, requests=requests)
    stepping, skipping = same(case)
    assert skipping < stepping / 8
    record = play(case, skip=True, detail="requests")[0]
    assert record.requests and not record.steps and not any(r.itl for r in record.requests)


@pytest.mark.parametrize("seed", range(0, 200, 23))
def test_without_steps_a_record_has_the_same_requests_and_metrics(seed: int) -> None:
    full = play(draw(seed), skip=False)[0]
    short = play(draw(seed), skip=True, detail="requests")[0]
    assert not short.steps
    assert [replace(r, itl=[]) for r in full.requests] == short.requests
    for name, value in full.metrics.items():
        got = short.metrics[name]
        if isinstance(value, dict):
            assert got == pytest.approx(value, rel=0.005 if name == "itl" else 1e-12), name
        else:
            assert got == pytest.approx(value, rel=1e-9), name


def test_a_promise_that_was_inherited_past_propose_is_not_believed() -> None:
    class Backwards(Continuous):
        def propose(self, view: View) -> Iterable[Want]:
            return [Want(seq, 64) for seq in [*reversed(view.running), *view.waiting]]

    class Again(Backwards):
        def propose(self, view: View) -> Iterable[Want]:
            return super().propose(view)

        def steady(self, view: View) -> Steady:
            return Steady(rank=lambda seq: (-seq.admission,))

    class Renamed(Continuous):
        name = "renamed"

    assert promise_of(Continuous()) and promise_of(Static()) and promise_of(Renamed()) and promise_of(Again())
    assert not promise_of(Backwards())
    for scheduler in (Backwards(), Again()):
        same(replace(draw(5), scheduler=scheduler))


def test_a_run_that_is_stopped_has_told_all_tokens() -> None:
    workload = Workload(num_requests=6, rate=50.0, input_len=40, output_len=300)
    asked = 0

    def stop() -> bool:
        nonlocal asked
        asked += 1
        return asked > 15

    config = EngineConfig(model="llama-3.1-8b", device="h100-sxm")
    record = simulate(config, workload, REGISTRY, should_stop=stop)
    assert not record.complete
    steps = sum(s.num_decode_rows for s in record.steps)
    assert steps > 100
    assert sum(r.num_output_tokens for r in record.requests) == steps + sum(
        r.first_token is not None for r in record.requests
    )
    assert all(len(r.itl) == max(0, r.num_output_tokens - 1) for r in record.requests)


def test_simulate_gives_the_same_with_and_without_skipping() -> None:
    config = EngineConfig(model="llama-3.1-8b", device="h100-sxm")
    workload = Workload(num_requests=25, rate=30.0, input_len=100, output_len=40, lengths="lognormal", spread=0.7)
    fast, slow = (simulate(config, workload, REGISTRY, skip=skip) for skip in (True, False))
    assert (fast.requests, fast.steps, fast.metrics) == (slow.requests, slow.steps, slow.metrics)
    assert fast.intervals.keys() == slow.intervals.keys()
    for name, band in slow.intervals.items():
        assert fast.intervals[name] == pytest.approx(band, rel=1e-9), name


def test_windows_are_stepped() -> None:
    """A model with sliding windows has costs that the mean context does not tell."""
    config = EngineConfig(model="gemma-3-270m", device="h100-sxm")
    workload = Workload(num_requests=5, input_len=100, output_len=20)
    fast, slow = (simulate(config, workload, REGISTRY, skip=skip) for skip in (True, False))
    assert (fast.requests, fast.steps) == (slow.requests, slow.steps)


def test_tokens_of_many_steps_are_a_delta_like_any_other() -> None:
    delta = Decoded("a", 0, (0, 0, 0))
    assert isinstance(delta, TokenDelta) and (delta.request_id, delta.index, len(delta.tokens)) == ("a", 0, 3)
