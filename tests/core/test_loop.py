"""The loop's effects in order, and the real-time driver with a scripted clock, executor and inbox."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from content_oracle import MemoryModel, reference

from twinfer.core.core import Core
from twinfer.core.errors import PluginError
from twinfer.core.events import Abort, Event, Finished, Output, Rejected, StepDone, Submit, TokenDelta
from twinfer.core.loop import Admit, Drain, Emit, Launch, LocalInbox, Now, Wait, drive, engine_loop, sample_ids
from twinfer.core.params import SamplingParams
from twinfer.core.plan import Need, RowResult, StepPlan, StepResult
from twinfer.core.policy import Limits
from twinfer.core.recorder import Recorder
from twinfer.core.request import Request
from twinfer.plugins.kv_cache.paged import Paged
from twinfer.plugins.scheduler.continuous import Continuous
from twinfer.plugins.scheduler.static import Static


def make_core(scheduler: Any = None, **limits: int) -> Core:
    numbers = {"num_blocks": 64, "max_model_len": 64, **limits}
    return Core(scheduler or Continuous(), Paged(Paged.Options(block_size=4)), Limits(**numbers))


def ask(request_id: str, length: int = 4, max_tokens: int = 3, **fields: object) -> Request:
    prompt = tuple(range(length))
    return Request(id=request_id, prompt=prompt, params=SamplingParams(max_tokens=max_tokens), **fields)  # type: ignore[arg-type]


class Clock:
    """Seconds that pass only when something says so."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class Script(LocalInbox):
    """An inbox to which events come at given times; waiting moves the clock."""

    def __init__(self, clock: Clock, coming: Sequence[tuple[float, Event]]) -> None:
        super().__init__(closed=False)
        self.clock, self.coming, self.waits = clock, list(coming), []

    def drain(self) -> list[Event] | None:
        while self.coming and self.coming[0][0] <= self.clock.now:
            self.put(self.coming.pop(0)[1])
        self.closed = not self.coming
        return super().drain()

    def wait(self, seconds: float | None) -> None:
        self.waits.append(seconds)
        until = self.clock.now + seconds if seconds is not None else float("inf")
        arrival = self.coming[0][0] if self.coming else float("inf")
        if self.closed and seconds is None:
            return
        assert min(until, arrival) < float("inf"), "the engine waits for an event that can never come"
        self.clock.now = max(self.clock.now, min(until, arrival))


class Echo:
    """Answers every row with its position; a step takes `seconds`."""

    def __init__(self, clock: Clock, seconds: float = 1.0, reported: float = 0.0) -> None:
        self.clock, self.seconds, self.reported = clock, seconds, reported
        self.admitted: list[tuple[str, tuple[tuple[str, int], ...]]] = []
        self.plans: list[StepPlan] = []

    def admit(self, request: Request, seqs: tuple[tuple[str, int], ...]) -> None:
        self.admitted.append((request.id, seqs))

    def execute(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        self.clock.now += self.seconds
        rows = [RowResult() if row.need is Need.NONE else RowResult((row.stop,)) for row in plan.rows]
        return StepResult(tuple(rows), self.reported)

    def close(self) -> None:
        pass


class Observer:
    """Stands in for pluggy's relay."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.requests: list[str] = []

    def on_step(self, plan: StepPlan, result: StepResult) -> None:
        self.steps.append(plan.step)

    def on_request(self, event: Event | Output) -> None:
        self.requests.append(type(event).__name__)


def collect() -> tuple[list[tuple[float, Output]], Any]:
    said: list[tuple[float, Output]] = []
    return said, lambda outputs, now: said.extend((now, output) for output in outputs)


# --- the generator ------------------------------------------------------------------------------------


def test_the_loop_yields_its_effects_in_a_fixed_order() -> None:
    loop = engine_loop(make_core())
    assert next(loop) == Drain()
    request = ask("a", max_tokens=1)
    assert loop.send([Submit(request), Submit(ask("", 0)), Submit(ask("a", 9))]) == Now()
    assert loop.send(1.0) == Admit(request), "told before any plan names it; what was rejected never is"
    emitted = next(loop)
    assert isinstance(emitted, Emit) and isinstance(emitted.outputs[0], Rejected)
    launch = next(loop)
    assert isinstance(launch, Launch) and launch.plan.step == 0
    assert next(loop) == Drain()
    assert loop.send([]) == Now()
    assert loop.send(1.5) == Wait(None), "blocked on the step"
    assert next(loop) == Drain()
    assert loop.send([StepDone(0, StepResult((RowResult((9,)),)))]) == Now()
    emitted = loop.send(2.0)
    assert isinstance(emitted, Emit) and [type(o) for o in emitted.outputs] == [TokenDelta, Finished]
    assert next(loop) == Wait(None), "idle, but more may come"
    assert next(loop) == Drain()
    assert loop.send(None) == Now()
    with pytest.raises(StopIteration):
        loop.send(3.0)


def test_a_closed_inbox_does_not_end_the_loop_before_the_work() -> None:
    loop = engine_loop(make_core())
    next(loop)
    loop.send([Submit(ask("a", max_tokens=1))])
    assert isinstance(loop.send(0.0), Admit)
    assert isinstance(next(loop), Launch)
    assert next(loop) == Drain()
    assert loop.send(None) == Now()
    assert loop.send(0.0) == Wait(None)
    assert next(loop) == Drain()
    loop.send([StepDone(0, StepResult((RowResult((9,)),)))])
    assert isinstance(loop.send(0.0), Emit)
    with pytest.raises(StopIteration):
        next(loop)


def test_waiting_for_a_full_batch_is_a_wait_until() -> None:
    core = make_core(Static(Static.Options(batch_size=2, max_wait_s=5.0)))
    loop = engine_loop(core)
    next(loop)
    loop.send([Submit(ask("a", arrival=1.0))])
    loop.send(2.0)
    assert next(loop) == Wait(6.0)
    next(loop)
    loop.send([Submit(ask("b", arrival=3.0))])
    loop.send(3.0)
    launch = next(loop)
    assert isinstance(launch, Launch) and len(launch.plan.rows) == 2


# --- the driver ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2])
def test_everything_submitted_is_served_and_times_come_from_the_clock(depth: int) -> None:
    clock = Clock(100.0)
    executor, observer = Echo(clock, seconds=0.5), Observer()
    said, emit = collect()
    recorder = Recorder("engine", {}, {}, 1.0, run_id="r", start=100.0)
    inbox = LocalInbox([Submit(ask("a")), Submit(ask("b", 6, arrival=100.0)), Submit(ask("bad", 0))])
    drive(make_core(max_outstanding=depth), executor, inbox, clock, emit, recorder, observer)
    tokens = [(now, o.request_id, o.tokens) for now, o in said if isinstance(o, TokenDelta)]
    ends = {o.request_id: now for now, o in said if isinstance(o, Finished)}
    assert set(ends) == {"a", "b"}
    assert [t for _, name, (t,) in tokens if name == "a"] == [4, 5, 6]
    assert [t for _, name, (t,) in tokens if name == "b"] == [6, 7, 8]
    assert executor.admitted == [(name, ((name, 0),)) for name in ("a", "b")], "what was rejected is not admitted"
    # Executing is synchronous, so a result is told before the next launch whatever the depth.
    assert [now for now, name, _ in tokens if name == "a"] == [100.5, 101.0, 101.5]
    record = recorder.finish()
    assert [step.start for step in record.steps] == [0.5 * i for i in range(len(record.steps))]
    assert {step.seconds for step in record.steps} == {0.5}
    assert observer.steps == [plan.step for plan in executor.plans]
    assert sorted(observer.requests) == sorted(["Submit"] * 3 + ["Rejected"] + ["TokenDelta"] * 6 + ["Finished"] * 2)


def test_an_idle_engine_waits_for_the_next_arrival() -> None:
    clock = Clock()
    inbox = Script(clock, [(1.0, Submit(ask("a"))), (50.0, Submit(ask("b")))])
    said, emit = collect()
    drive(make_core(), Echo(clock), inbox, clock, emit)
    assert [(now, o.request_id) for now, o in said if isinstance(o, Finished)] == [(4.0, "a"), (53.0, "b")]
    assert inbox.waits == [None, None, None], "before a, before b, and once for the inbox to close"


def test_a_deferred_batch_waits_as_long_as_the_scheduler_said() -> None:
    clock = Clock()
    inbox = Script(clock, [(1.0, Submit(ask("a", arrival=1.0))), (40.0, Abort("nobody"))])
    said, emit = collect()
    scheduler = Static(Static.Options(batch_size=2, max_wait_s=5.0))
    drive(make_core(scheduler), Echo(clock), inbox, clock, emit)
    assert inbox.waits[:2] == [None, 5.0]
    assert next(now for now, o in said if isinstance(o, TokenDelta)) == 7.0


def test_events_are_seen_before_the_next_plan() -> None:
    """An abort that arrives while a step runs takes effect before another step is launched."""
    clock = Clock()
    inbox = Script(clock, [(0.0, Submit(ask("a", max_tokens=50))), (2.5, Abort("a"))])
    executor = Echo(clock)
    said, emit = collect()
    drive(make_core(), executor, inbox, clock, emit)
    assert len(executor.plans) == 3
    (end,) = [o for _, o in said if isinstance(o, Finished)]
    assert (end.reason, end.num_output_tokens) == ("abort", 3)


def test_measured_seconds_are_filled_in_and_modelled_ones_kept() -> None:
    for reported, expected in ((0.0, 0.25), (3.0, 3.0)):
        clock = Clock()
        seen: list[float] = []

        class Watch(Observer):
            def on_step(self, plan: StepPlan, result: StepResult) -> None:
                seen.append(result.seconds)  # noqa: B023

        drive(
            make_core(), Echo(clock, 0.25, reported), LocalInbox([Submit(ask("a"))]), clock, collect()[1], None, Watch()
        )
        assert seen == [expected] * 3


def test_what_a_policy_raises_comes_out_of_the_driver() -> None:
    class Broken(Continuous):
        def propose(self, view: object) -> Any:
            raise ValueError("no idea")

    with pytest.raises(PluginError, match="no idea"):
        drive(make_core(Broken()), Echo(Clock()), LocalInbox([Submit(ask("a"))]), Clock(), collect()[1])


def test_an_open_inbox_in_one_thread_never_hangs() -> None:
    with pytest.raises(RuntimeError, match="can never come"):
        drive(make_core(), Echo(Clock()), LocalInbox(closed=False), Clock(), collect()[1])


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_driver_serves_the_content_oracle(depth: int) -> None:
    """The same answers as each request alone, through the real driver."""
    core = make_core(max_outstanding=depth, num_blocks=9, max_num_batched_tokens=7)
    requests = [ask(f"r{i}", 5 + i, 4 + i) for i in range(5)]
    said, emit = collect()
    clock = Clock()
    drive(core, MemoryModel(9, 4, max_drafts=2), LocalInbox([Submit(r) for r in requests]), clock, emit)
    for request in requests:
        tokens = [t for _, o in said if isinstance(o, TokenDelta) and o.request_id == request.id for t in o.tokens]
        assert tokens == reference(request, 0, core.limits)[0]


def test_a_duplicate_id_does_not_disturb_the_first_request() -> None:
    """In one batch of events and through the executor: the second is turned away, the first is served."""
    core, memory = make_core(), MemoryModel(64, 4)
    first = ask("a", 4)
    said, emit = collect()
    recorder = Recorder("engine", {}, {}, 1.0)
    inbox = LocalInbox([Submit(first), Submit(ask("a", 9)), Submit(ask("b"))])
    drive(core, memory, inbox, Clock(), emit, recorder)
    rejected = [o for _, o in said if isinstance(o, Rejected)]
    assert len(rejected) == 1 and "already in use" in rejected[0].why
    tokens = [t for _, o in said if isinstance(o, TokenDelta) and o.request_id == "a" for t in o.tokens]
    assert tokens == reference(first, 0, core.limits)[0]
    assert [entry.reason for entry in recorder.finish().requests] == ["length", "length"]


def test_sample_ids_are_those_the_core_gives() -> None:
    core = make_core()
    request = Request(id="q", prompt=(1, 2), params=SamplingParams(n=3, temperature=1.0))
    core.receive(Submit(request), 0.0)
    assert sample_ids(request) == tuple((s.id, s.index) for s in core.sequences.values())
