"""One loop, two clocks: the order of engine life as a generator of effects, and the real-time driver.

`engine_loop(core)` never waits and never looks at a clock; it yields what it wants done and is sent the
answer. The SimPy driver (`twinfer.simulator.driver`) and `drive` below interpret the same effects, so
real and simulated runs differ only in who answers.

Invariants
* Events are drained before every plan, so a finished transfer or an abort is seen before the queue.
* The loop ends only when the inbox is closed and the core has no work left.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from twinfer.core.core import Core
from twinfer.core.events import Blocked, Event, Idle, Output, StepDone, Submit
from twinfer.core.executor import Executor
from twinfer.core.plan import StepPlan, StepResult
from twinfer.core.recorder import Recorder
from twinfer.core.request import Request


@dataclass(frozen=True, slots=True)
class Drain:
    """Answer: list of events that have arrived (maybe empty); None when no more will ever come."""


@dataclass(frozen=True, slots=True)
class Now:
    """Answer: seconds on the driver's clock."""


@dataclass(frozen=True, slots=True)
class Emit:
    outputs: Sequence[Output]


@dataclass(frozen=True, slots=True)
class Launch:
    """Start the plan; its StepDone arrives through the inbox later (or at once)."""

    plan: StepPlan


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to do before the next event, or `until`."""

    until: float | None = None


@dataclass(frozen=True, slots=True)
class Admit:
    """The core has accepted the request: tell the executor, before the next Launch."""

    request: Request


Effect = Drain | Now | Admit | Emit | Launch | Wait


def engine_loop(core: Core) -> Generator[Effect, Any, None]:
    """Yields effects until the inbox is closed and all work is done."""
    drain, now_effect = Drain(), Now()
    closed = False
    while True:
        events = yield drain
        if events is None:
            closed, events = True, []
        now: float = yield now_effect
        for event in events:
            core.receive(event, now)
            if isinstance(event, Submit) and core.accepted(event.request):
                yield Admit(event.request)
        action = core.next_step(now)
        outputs = core.outputs()
        if outputs:
            yield Emit(outputs)
        if isinstance(action, StepPlan):
            yield Launch(action)
        elif isinstance(action, Idle):
            if closed and not core.has_work:
                return
            yield Wait(action.until)
        else:
            assert isinstance(action, Blocked)
            yield Wait()


class Inbox(Protocol):
    """Where events arrive. `queue.SimpleQueue`-like; `LocalInbox` below serves one thread."""

    def drain(self) -> list[Event] | None:
        """Events that have arrived, oldest first; None once closed and empty."""
        ...

    def wait(self, seconds: float | None) -> None:
        """Return when an event is there, or after `seconds`."""
        ...


def drive(
    core: Core,
    executor: Executor,
    inbox: Inbox,
    clock: Callable[[], float],
    emit: Callable[[Sequence[Output], float], None],
    recorder: Recorder | None = None,
    hook: Any = None,
) -> None:
    """Run the loop in real time, executing each plan in the calling thread, until the inbox closes.

    `hook` tells observers (`twinfer.core.observers`). Raises what the executor or a policy raises.
    """
    loop = engine_loop(core)
    ready: list[Event] = []  # StepDone events of plans executed here
    answer: Any = None
    while True:
        try:
            effect = loop.send(answer)
        except StopIteration:
            return
        answer = None
        match effect:
            case Drain():
                arrived = inbox.drain()
                if arrived is None:
                    answer = ready or None
                else:
                    for event in arrived:
                        note_event(event, clock(), recorder, hook)
                    answer = [*ready, *arrived]
                ready = []
            case Now():
                answer = clock()
            case Admit(request):
                executor.admit(request, sample_ids(request))
            case Emit(outputs):
                now = clock()
                note_outputs(outputs, now, recorder, hook)
                emit(outputs, now)
            case Launch(plan):
                start = clock()
                result = executor.execute(plan)
                end = clock()
                if not result.seconds:
                    result = StepResult(result.rows, end - start, result.sigma, result.ops)
                if recorder is not None:
                    recorder.step(plan, result, start, end)
                if hook is not None:
                    hook.on_step(plan=plan, result=result)
                ready.append(StepDone(plan.step, result))
            case Wait(until):
                inbox.wait(None if until is None else max(0.0, until - clock()))


def note_event(event: Event, now: float, recorder: Recorder | None, hook: Any) -> None:
    """What every driver does when a request arrives: tell recorder and observers."""
    if isinstance(event, Submit):
        if recorder is not None:
            recorder.submitted(event.request, now)
        if hook is not None:
            hook.on_request(event=event)


def note_outputs(outputs: Sequence[Output], now: float, recorder: Recorder | None, hook: Any) -> None:
    """What every driver does with what the core has to tell: recorder and observers hear of it."""
    for output in outputs:
        if recorder is not None:
            recorder.output(output, now)
        if hook is not None:
            hook.on_request(event=output)


def sample_ids(request: Request) -> tuple[tuple[str, int], ...]:
    """(sequence id, sample index) of each sample of `request`, as Core names them."""
    return tuple((request.id if i == 0 else f"{request.id}/{i}", i) for i in range(request.params.num_samples))


class LocalInbox:
    """Events for a driver in the same thread: fill it, close it, drive."""

    def __init__(self, events: Sequence[Event] = (), closed: bool = True) -> None:
        self._events = list(events)
        self.closed = closed

    def put(self, event: Event) -> None:
        self._events.append(event)

    def drain(self) -> list[Event] | None:
        if not self._events and self.closed:
            return None
        events, self._events = self._events, []
        return events

    def wait(self, seconds: float | None) -> None:
        if seconds is None and not self._events and not self.closed:
            raise RuntimeError("the engine waits for an event that can never come")
