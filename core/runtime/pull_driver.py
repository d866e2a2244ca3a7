"""The engine loop, advanced by whoever wants outputs: no thread, no queue, nothing runs unless somebody asks.

Invariants
* `put` may be called from any thread; everything else from one thread at a time.
* `poll` returns as soon as something was said; what the next step would do is left for the next call.
* An exception out of a step leaves the engine unusable, and every later call says so.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from twinfer.core.core import Core
from twinfer.core.events import Event, Output, StepDone
from twinfer.core.executor import Executor
from twinfer.core.loop import Admit, Drain, Emit, Launch, Now, Wait, engine_loop, note_event, sample_ids
from twinfer.core.plan import StepResult


class PullDriver:
    """Drives `core` and `executor` step by step; see `twinfer.core.loop.drive` for the one that runs to the end."""

    def __init__(
        self, core: Core, executor: Executor, hook: Any = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.core = core
        self.executor = executor
        self.hook = hook
        self.clock = clock
        self._loop = engine_loop(core)
        self._answer: Any = None
        self._inbox: deque[Event] = deque()
        self._bell = threading.Event()
        self._ready: list[Event] = []
        self._broken: BaseException | None = None

    def put(self, event: Event) -> None:
        """Add an event, from any thread; it is seen before the next step."""
        self._inbox.append(event)
        self._bell.set()

    def poll(self) -> list[Output] | None:
        """Run until there are outputs and return them; None when there is nothing to do."""
        if self._broken is not None:
            raise RuntimeError(f"the engine has failed ({self._broken}); make a new one") from self._broken
        try:
            return self._advance()
        except BaseException as error:
            self._broken = error
            raise

    def _advance(self) -> list[Output] | None:
        while True:
            effect = self._loop.send(self._answer)
            self._answer = None
            match effect:
                case Drain():
                    self._answer = self._drain()
                case Now():
                    self._answer = self.clock()
                case Admit(request):
                    self.executor.admit(request, sample_ids(request))
                case Emit(outputs):
                    if self.hook is not None:
                        for output in outputs:
                            self.hook.on_request(event=output)
                    return list(outputs)
                case Launch(plan):
                    start = self.clock()
                    result = self.executor.execute(plan)
                    if not result.seconds:
                        result = StepResult(result.rows, self.clock() - start, result.sigma, result.ops)
                    if self.hook is not None:
                        self.hook.on_step(plan=plan, result=result)
                    self._ready.append(StepDone(plan.step, result))
                case Wait(until):
                    if not self._inbox and not self._ready:
                        if until is None:
                            return None
                        self._bell.wait(max(0.0, until - self.clock()))

    def _drain(self) -> list[Event]:
        self._bell.clear()
        arrived: list[Event] = []
        while self._inbox:
            event = self._inbox.popleft()
            note_event(event, self.clock(), None, self.hook)
            arrived.append(event)
        done, self._ready = self._ready, []
        return [*done, *arrived]
