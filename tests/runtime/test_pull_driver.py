"""The pull driver: nothing runs unasked, timers wait, other threads may put events."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

from twinfer.core.core import Core
from twinfer.core.events import Abort, Finished, Submit, TokenDelta
from twinfer.core.params import SamplingParams
from twinfer.core.plan import Need, RowResult, StepPlan, StepResult
from twinfer.core.policy import Defer, Limits, View, Want
from twinfer.core.request import Request
from twinfer.core.runtime.pull_driver import PullDriver
from twinfer.plugins.kv_cache.paged import Paged
from twinfer.plugins.scheduler.continuous import Continuous


class Ones:
    """Samples token 1 everywhere."""

    steps = 0

    def admit(self, request: Request, seqs: tuple[tuple[str, int], ...]) -> None:
        pass

    def execute(self, plan: StepPlan) -> StepResult:
        self.steps += 1
        return StepResult(tuple(RowResult(() if r.need is Need.NONE else (1,)) for r in plan.rows))

    def close(self) -> None:
        pass


class Late(Continuous):
    """Runs nothing before a moment on the clock."""

    until = 0.0

    def propose(self, view: View) -> Iterable[Want | Defer]:
        if view.now < self.until:
            yield Defer(self.until)
        else:
            yield from super().propose(view)


def driver(scheduler: Continuous | None = None) -> PullDriver:
    limits = Limits(max_num_seqs=4, num_blocks=8, max_model_len=64)
    return PullDriver(Core(scheduler or Continuous(), Paged(), limits), Ones())


def request(name: str = "r", tokens: int = 3) -> Submit:
    return Submit(Request(id=name, prompt=(1, 2), params=SamplingParams(max_tokens=tokens)))


def test_one_poll_one_step() -> None:
    d = driver()
    assert d.poll() is None
    d.put(request())
    for count in range(1, 4):
        outputs = d.poll()
        assert outputs is not None and isinstance(outputs[0], TokenDelta)
        assert d.executor.steps == count  # type: ignore[attr-defined]
    assert isinstance(outputs[-1], Finished)
    assert d.poll() is None and d.poll() is None
    d.put(request("again", 1))
    assert d.poll() is not None


def test_a_deferred_step_waits_for_its_time() -> None:
    late = Late()
    late.until = time.perf_counter() + 0.15
    d = driver(late)
    d.put(request(tokens=1))
    assert d.poll() is not None
    assert time.perf_counter() >= late.until


def test_an_event_of_another_thread_ends_the_wait() -> None:
    late = Late()
    late.until = time.perf_counter() + 600
    d = driver(late)
    d.put(request())
    timer = threading.Timer(0.1, d.put, [Abort("r")])
    timer.start()
    outputs = d.poll()
    timer.join()
    assert outputs is not None and [o.reason for o in outputs if isinstance(o, Finished)] == ["abort"]
    assert time.perf_counter() < late.until
    assert d.poll() is None
