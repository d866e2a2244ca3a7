"""The SimPy driver: the effects of `core.loop.engine_loop`, answered on a simulated clock.

    Drain = inbox    Now = env.now    Launch = timeout(cost of the plan), then StepDone    Wait = inbox | timeout

Invariants
* The same `Core` class and the same loop as the real driver; only who answers differs.
* Executors run one step at a time: a plan launched while another runs starts when that one ends. In a pipeline that holds of
  each of its stages (`pipeline.py`).
* The clock never goes backwards, and at equal times arrivals come in the order of the requests.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import replace
from typing import Any, cast

import simpy

from twinfer.core.core import Core
from twinfer.core.events import Event, Output, StepDone, Submit
from twinfer.core.executor import Executor
from twinfer.core.feeder import Feeder
from twinfer.core.loop import Admit, Drain, Emit, Launch, Now, Wait, engine_loop, note_event, note_outputs, sample_ids
from twinfer.core.plan import StepPlan, StepResult
from twinfer.core.recorder import Recorder
from twinfer.core.request import Request
from twinfer.simulator.pipeline import Line
from twinfer.simulator.skipping import RunExecutor, SkippingEngine, can_skip

Emitted = Callable[[Sequence[Output], float], None]


class SimInbox:
    """Events for one engine under one SimPy environment; closed when its sender says so."""

    def __init__(self, env: simpy.Environment) -> None:
        self._env = env
        self._events: list[Event] = []
        self._bell: simpy.Event | None = None
        self.closed = False
        self.failed = False
        self.settle: Callable[[], None] = _nothing
        """Bring the core up to this moment: for a driver that takes several steps as one and is looked into meanwhile."""
        self.tell: Callable[[], None] = _nothing
        """As `settle`, and let the driver tell of every token up to this moment."""

    def put(self, event: Event) -> None:
        self._events.append(event)
        self.ring()

    def close(self) -> None:
        self.closed = True
        self.ring()

    def fail(self) -> None:
        """The engine breaks at this moment: the step in progress is lost, nothing more is read or told."""
        self.tell()
        self.failed = True
        self.ring()

    def drain(self) -> list[Event] | None:
        """Events that have arrived, for who then asks for a new `bell`; None once closed and empty."""
        self._bell = None
        if not self._events and self.closed:
            return None
        events, self._events = self._events, []
        return events

    def ring(self) -> None:
        if self._bell is not None and not self._bell.triggered:
            self._bell.succeed()

    def bell(self) -> simpy.Event:
        """An event that fires at the next `put` or `close`, at once when something is there."""
        self._bell = self._env.event()
        if self._events:
            self._bell.succeed()
        return self._bell


def _nothing() -> None:
    """A core that is stepped one by one is always as of now."""


def arrivals(
    env: simpy.Environment,
    inbox: SimInbox,
    requests: Iterable[Request] | Feeder,
    freed: Callable[[], simpy.Event] | None = None,
    front_end: float = 0.0,
) -> Generator[simpy.Event, Any, None]:
    """Submit requests when they are due, then close the inbox.

    freed: an event that fires when a client of a closed loop may send again, or a turn has become due (`Feeder.note`).
    front_end: s that a server works on each request, one after the other, before the engine gets it.
    """
    feeder = requests if isinstance(requests, Feeder) else Feeder(requests)
    while True:
        while due := feeder.due(env.now):
            for request in due:
                if front_end:
                    yield env.timeout(front_end)
                    if not request.arrival:  # 0 would mean that it came when the engine got it
                        request = replace(request, arrival=sys.float_info.min)
                inbox.put(Submit(request))
        if feeder.exhausted:
            break
        when = feeder.next_time()
        if when is None:
            assert freed is not None, "a closed loop needs to hear what has ended"
            yield freed()
        elif feeder.listens:
            assert freed is not None, "a session needs to hear what has ended"
            yield freed() | env.timeout(max(0.0, when - env.now))
        else:
            yield env.timeout(when - env.now)
    inbox.close()


def engine(
    env: simpy.Environment,
    core: Core,
    executor: Executor,
    inbox: SimInbox,
    recorder: Recorder | None = None,
    emit: Emitted | None = None,
    hook: Any = None,
    skip: bool = True,
    line: Line | None = None,
) -> Generator[simpy.Event, Any, None]:
    """One engine as a SimPy process; ends when the inbox is closed and all work is done.

    line: the way of its plans, where it shares that with others.
    skip: take steps that differ in nothing but time as one event where the policies allow it (`skipping.py`). Whoever
    looks at `core` from outside calls `inbox.settle()` first.
    """
    if skip and line is None and can_skip(core, executor, hook):
        yield from SkippingEngine(env, core, cast(RunExecutor, executor), inbox, recorder, emit).process()
        return
    loop = engine_loop(core)
    line = line or Line(env)
    running = 0
    told = False  # the loop knows that the inbox is closed
    answer: Any = None

    def complete(plan: StepPlan) -> Callable[[StepResult, float], None]:
        def done(result: StepResult, begin: float) -> None:
            nonlocal running
            running -= 1
            if inbox.failed:
                return
            if recorder is not None:
                recorder.step(plan, result, begin, env.now)
            if hook is not None:
                hook.on_step(plan=plan, result=result)
            inbox.put(StepDone(plan.step, result))

        return done

    while True:
        try:
            effect = loop.send(answer)
        except StopIteration:
            return
        answer = None
        if isinstance(effect, Drain):
            if inbox.failed:
                return
            answer = inbox.drain()
            if answer is None and running:
                answer = []  # closed, but a step is still out
            told = answer is None
            for event in answer or ():
                note_event(event, env.now, recorder, hook)
        elif isinstance(effect, Now):
            answer = env.now
        elif isinstance(effect, Admit):
            executor.admit(effect.request, sample_ids(effect.request))
        elif isinstance(effect, Emit):
            note_outputs(effect.outputs, env.now, recorder, hook)
            if emit is not None:
                emit(effect.outputs, env.now)
        elif isinstance(effect, Launch):
            running += 1
            line.launch(executor, effect.plan, complete(effect.plan))
        else:
            assert isinstance(effect, Wait)
            bell = inbox.bell()
            if effect.until is None:
                if inbox.closed and not running and not bell.triggered:
                    if told:
                        raise RuntimeError("the engine waits for an event that can never come")
                    continue
                yield bell
            else:
                yield bell | env.timeout(max(0.0, effect.until - env.now))
