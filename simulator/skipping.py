"""An engine under a simulated clock that takes many steps as one event, wherever nothing can come of them singly.

    wait for an event -> take it in -> ask the flock for a plan or a run -> launch it -> tell what there is to tell

While a run is under way, an arrival that may change the next plan ends it with the step that it falls into; the times of
all steps are known from the start. Anything else that happens (an abort, a transfer that ended) first brings the core to
where single steps would have it.

Invariants
* Times, plans, metrics and the order of what is told are those of `driver.engine` without skipping.
* A step begins when the one before it has ended; times of steps are sums in the order of the steps, so they do not
  depend on how steps are grouped into runs.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Generator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol

import simpy

from twinfer.core.core import Core
from twinfer.core.events import Abort, Blocked, Decoded, Event, Idle, Output, StepDone, Submit, Tick
from twinfer.core.executor import Executor
from twinfer.core.flock import Flock, Run, Stretch
from twinfer.core.loop import note_outputs, sample_ids
from twinfer.core.plan import StepPlan, StepResult
from twinfer.core.recorder import Recorder

if TYPE_CHECKING:
    from twinfer.simulator.driver import SimInbox

Emitted = Callable[[Sequence[Output], float], None]
_RUN_ENDED = Tick()  # known by identity


class RunExecutor(Executor, Protocol):
    """An executor whose tokens are constants and that knows beforehand how long decoding takes."""

    @property
    def serves_runs(self) -> bool: ...
    def decode(self, run: Run) -> list[float]:
        """Seconds of the steps of `run`."""
        ...

    def took(self, first: int, last: int) -> None:
        """Steps `first` to `last` (exclusive) of the latest run have been taken."""
        ...

    def results(self, stretch: Stretch) -> list[StepResult]:
        """The steps of `stretch` one by one, without rows."""
        ...


def can_skip(core: Core, executor: Executor, hook: Any) -> bool:
    """Whether steps of this engine can be taken as one: nobody watches each of them, and they can be foretold."""
    watched = hook is not None and (not hasattr(hook, "any") or hook.any())
    return not watched and getattr(executor, "serves_runs", False) and Flock.serves(core)


class SkippingEngine:
    """One engine; `process` is its SimPy process. `settle` brings `core` up to the present for who looks at it."""

    def __init__(
        self, env: simpy.Environment, core: Core, executor: RunExecutor, inbox: SimInbox, recorder: Recorder | None,
        emit: Emitted | None,
    ) -> None:  # fmt: skip
        self.env = env
        self.core = core
        self.executor = executor
        self.inbox = inbox
        self.recorder = recorder
        self.emit = emit
        self._each = recorder is not None and recorder.detail == "steps"  # every step is told of
        self.flock = Flock(core)
        self.now = env.now
        self._stamp = env.now  # SimPy's time where `now` is exact: it adds up delays and may be an ulp off
        self._last = env.now  # end of the latest step
        self._free = env.now  # end of the latest step that was launched
        self._plans: deque[tuple[StepPlan, StepResult]] = deque()  # outstanding; a run follows behind them
        self._lag = self.flock.lag
        self._run: Run | None = None
        self._times: list[float] = []  # of the run: its begin and the end of each step
        self._until = 0  # the run ends with this step (1 is the first)
        self._taken = 0  # steps of it that the core has taken
        self._head: object = None  # first in the queue when the run was planned
        self._timer = 0  # number of the latest timer: earlier ones mean nothing any more
        self._over = env.event()  # all is done, or the engine has failed
        inbox.settle = self.settle
        inbox.tell = self._tell_all
        if recorder is not None:
            recorder.before_finish = self._tell_all

    def process(self) -> Generator[simpy.Event, Any, None]:
        self._go_on()
        yield self._over

    def _go_on(self, happened: Event | None = None) -> None:
        """Take in what is in the inbox, and what has just `happened`; launch what there is to be launched, and wait for more."""
        inbox = self.inbox
        if inbox.failed:
            self._over.succeed()
            return
        events = inbox.drain() or []
        if happened is not None:
            events.append(happened)
        arrived = False
        for event in events:
            if isinstance(event, Submit):
                self._submit(event)
                arrived = True
            else:
                self._take_in(event)
        if self._run is not None and self._until == self._lag + self._taken and not self._plans:
            self._leave_run()
        if self._run is None and len(self._plans) <= self._lag:
            if not self._plan_on():
                self._over.succeed()
                return
        else:
            self._tell()
            if arrived:
                self._cut_short()
        bell = inbox.bell()
        assert bell.callbacks is not None
        bell.callbacks.append(self._rung)

    def _rung(self, bell: simpy.Event) -> None:
        if self.env.now != self._stamp:
            self.now = max(self.now, self.env.now)
        self._go_on()

    def _happens(self, event: Event) -> None:
        """`event` comes with a step that has just ended: it is taken in at once, unless more is to come at this moment, which is
        seen with it."""
        if self.env.peek() > self._stamp:
            self._go_on(event)
        else:
            self.inbox.put(event)

    def _plan_on(self) -> bool:
        """Launch what there is to be launched now; False when all is done and nothing will come."""
        inbox = self.inbox
        while self._run is None and len(self._plans) <= self._lag:
            action = self.flock.next_step(self.now)
            self._tell()
            if isinstance(action, StepPlan):
                self._launch(action)
            elif isinstance(action, Run):
                self._start(action)
            elif self._plans:  # a later plan may follow from what they give
                break
            elif isinstance(action, Idle):
                if inbox.closed and not self.core.has_work:
                    return False
                if action.until is not None:
                    self._ring_at(action.until)
                elif inbox.closed:
                    raise RuntimeError("the engine waits for an event that can never come")
                break
            else:
                assert isinstance(action, Blocked)
                if inbox.closed:
                    raise RuntimeError("the engine waits for an event that can never come")
                break
        return True

    # --- events ---------------------------------------------------------------------------------

    def _submit(self, event: Submit) -> None:
        if self.recorder is not None:
            self.recorder.submitted(event.request, self.env.now)
        self.core.receive(event, self.now)
        if self.core.accepted(event.request):
            self.executor.admit(event.request, sample_ids(event.request))

    def _take_in(self, event: Event) -> None:
        if event is _RUN_ENDED:
            self._take(self._until - self._lag)
            self._leave_run()
        elif isinstance(event, StepDone):
            self.flock.step_done(*self._plans.popleft())
        elif isinstance(event, Abort):
            self._single_out()
            self.core.receive(event, self.now)
            self.flock.refresh()
        else:
            self.settle()
            if self._run is not None:
                self.flock.plan_next(self._run)
            self.core.receive(event, self.now)
            self.flock.refresh()
            self._cut_short(surely=True)

    def _tell(self, now: float | None = None) -> None:
        outputs = self.core.outputs()
        if not outputs:
            return
        now = self.now if now is None else now
        if self._lag and now > self._last:  # tokens of members came with the latest step
            late = [output for output in outputs if type(output) is Decoded]
            self._note(late, self._last)
            outputs = [output for output in outputs if type(output) is not Decoded]
        self._note(outputs, now)

    def _note(self, outputs: Sequence[Output], now: float) -> None:
        note_outputs(outputs, now, self.recorder, None)
        if self.emit is not None and outputs:
            self.emit(outputs, now)

    def _tell_all(self) -> None:
        """All tokens up to now, before the record is closed."""
        if self.inbox.failed:
            return
        self.settle()
        self.flock.members.tell()
        self._tell(self._last)

    # --- single plans ---------------------------------------------------------------------------

    def _launch(self, plan: StepPlan) -> None:
        begin = max(self.now, self._free)
        result = self.executor.execute(plan)
        self._end_at(plan, result, begin, begin + result.seconds)

    def _end_at(self, plan: StepPlan, result: StepResult, begin: float, end: float) -> None:
        self._plans.append((plan, result))
        self._free = end

        def done(event: simpy.Event) -> None:
            if self.inbox.failed:
                return
            self._ended(end)
            if self.recorder is not None:
                self.recorder.step(self.core.outstanding[plan.step], result, begin, end)
            self._happens(StepDone(plan.step, result))

        self._after(end, done)

    def _ended(self, end: float) -> None:
        self.now = self._last = end
        self._stamp = self.env.now

    def _after(self, when: float, call: Callable[[simpy.Event], None]) -> None:
        now = self.env.now
        delay = max(0.0, when - now)
        # Others wait from SimPy's time, so it must be exact: where the sum is rounded, by way of the middle, from where it is not.
        exact = now >= when or now + delay == when
        timer = self.env.timeout(delay if exact else delay / 2)
        assert timer.callbacks is not None
        timer.callbacks.append(call if exact else lambda event: self._after(when, call))

    def _ring_at(self, when: float) -> None:
        self._after(when, lambda event: self.inbox.ring())

    # --- runs -----------------------------------------------------------------------------------

    def _start(self, run: Run) -> None:
        self._times = list(accumulate(self.executor.decode(run), initial=max(self.now, self._free)))
        self._run = run
        self._until, self._taken = run.most, 0
        self._head = self.core.waiting[0][2] if self.core.waiting else None
        self._wake()

    def _wake(self) -> None:
        """Be called when what comes after the run, as it is now, must be planned."""
        self._timer += 1
        if self._until == self._lag:  # when the plan before it is done
            return
        number, end = self._timer, self._times[self._until - self._lag]

        def done(event: simpy.Event) -> None:
            if number == self._timer and not self.inbox.failed:
                self._ended(end)
                self._happens(_RUN_ENDED)

        self._after(end, done)

    def _cut_short(self, surely: bool = False) -> None:
        """Something has come: end the run with the step that is under way, if the plan after it may be another."""
        run = self._run
        if run is None:
            return
        waiting = self.core.waiting
        same = run.closed or not waiting or (run.head and waiting[0][2] is self._head)
        if same and not surely and not self._each:  # else the record has the length of the queue in every step
            return
        until = max(1, self._taken + 1, bisect_left(self._times, self.env.now) + self._lag)
        if until < self._until:
            self._until = until
            self._wake()

    def _take(self, until: int) -> None:
        """Let the core take the steps of the run up to the end of step `until`."""
        run, first = self._run, self._taken
        if run is None or until <= first:
            return
        stretch, ended = self.flock.take(run, until - first, self._each)
        self.executor.took(first, until)
        if self.recorder is not None:
            results = self.executor.results(stretch) if self._each else ()
            times = self._times if until - first == len(self._times) - 1 else self._times[first : until + 1]
            self.recorder.run(stretch, times, results)
        self._taken = until
        self._last = self._times[until]
        self.flock.end(ended)

    def _leave_run(self, planned: int | None = None) -> None:
        """The run is over but for steps that are planned and not done, which become plans of their own."""
        run = self._run
        assert run is not None
        self._run = None
        self._timer += 1
        for _ in range(self._lag if planned is None else planned):
            begin, end = self._times[self._taken : self._taken + 2]
            self._taken += 1
            plan = self.flock.single(run)
            self._end_at(plan, self.executor.execute(plan), begin, end)

    def settle(self) -> None:
        """Bring the core up to the present: steps that have ended are taken, the one under way is not."""
        if self._run is not None and not self.inbox.failed:
            self._take(min(self._until - self._lag - 1, bisect_right(self._times, self.env.now) - 1))

    def _single_out(self) -> None:
        """Make the step under way an ordinary one, as an event needs the core as it is without a flock."""
        if self._run is not None:
            self.settle()
            self.flock.plan_next(self._run)
            self._leave_run(1 + self._lag - len(self._plans))
        self._tell()
        self.flock.dissolve()
        self._tell(self._last)  # what the members had before this step


__all__ = ["RunExecutor", "SkippingEngine", "can_skip"]
