"""Observers are told in order; one that raises is warned about once, dropped, and stops nothing."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from twinfer.core.core import Core
from twinfer.core.events import Finished, StepDone, Submit, TokenDelta
from twinfer.core.hookspecs import hookimpl
from twinfer.core.loop import LocalInbox, drive
from twinfer.core.params import SamplingParams
from twinfer.core.plan import RowResult, StepPlan, StepResult
from twinfer.core.policy import Limits
from twinfer.core.registry import Registry
from twinfer.core.request import Request
from twinfer.plugins.kv_cache.paged import Paged
from twinfer.plugins.scheduler.continuous import Continuous


class Watcher:
    """Notes what it hears; `fails` names a hook in which it raises."""

    def __init__(self, fails: str = "") -> None:
        self.fails = fails
        self.heard: list[str] = []

    @hookimpl
    def on_step(self, plan: StepPlan) -> None:  # a hook may ask for some of the arguments only
        self._hear("on_step", f"step {plan.step}")

    @hookimpl
    def on_request(self, event: Any) -> None:
        self._hear("on_request", type(event).__name__)

    def _hear(self, hook: str, what: str) -> None:
        if hook == self.fails:
            raise ValueError("observer bug")
        self.heard.append(what)


def run(registry: Registry) -> list[Any]:
    class Fives:
        def admit(self, request: Request, seqs: object) -> None: ...

        def execute(self, plan: StepPlan) -> StepResult:
            return StepResult(tuple(RowResult((5,)) for _ in plan.rows), 1.0)

        def close(self) -> None: ...

    core = Core(Continuous(), Paged(), Limits(num_blocks=8, max_model_len=64))
    said: list[Any] = []
    inbox = LocalInbox([Submit(Request(id="a", prompt=(1, 2), params=SamplingParams(max_tokens=2)))])
    drive(core, Fives(), inbox, lambda: 0.0, lambda outputs, now: said.extend(outputs), None, registry.observers)
    return said


def test_without_observers_there_is_nothing_to_call() -> None:
    assert Registry(entry_points=False).observers is None


def test_observers_hear_everything_in_order() -> None:
    registry, watcher = Registry(entry_points=False), Watcher()
    registry._pm.register(watcher)
    said = run(registry)
    assert [type(o) for o in said] == [TokenDelta, TokenDelta, Finished]
    assert watcher.heard == ["Submit", "step 0", "TokenDelta", "step 1", "TokenDelta", "Finished"]


@pytest.mark.parametrize("fails", ["on_step", "on_request"])
def test_one_that_raises_is_dropped_and_the_run_goes_on(fails: str) -> None:
    registry, bad, good = Registry(entry_points=False), Watcher(fails), Watcher()
    registry._pm.register(bad, name="clumsy")
    registry._pm.register(good)
    with pytest.warns(RuntimeWarning, match=f"plugin 'clumsy' failed in {fails} .*ValueError: observer bug") as caught:
        assert len(run(registry)) == 3
    assert len(caught) == 1, "told once"
    assert len(good.heard) == 6 and len(bad.heard) <= 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(registry)
    assert registry.observers is not None and registry.observers.dropped == {"clumsy": "ValueError: observer bug"}


def test_events_that_are_no_news_are_not_told() -> None:
    """Results of steps go to `on_step`, not to `on_request`."""
    registry, watcher = Registry(entry_points=False), Watcher()
    registry._pm.register(watcher)
    run(registry)
    assert StepDone.__name__ not in watcher.heard
