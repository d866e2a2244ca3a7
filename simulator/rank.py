"""One rank of a replica: a Core with its driver, its KV pool and its own record.

Invariants
* The engine is the one of `simulate`: same Core, same loop, same executor; a replica only feeds its inbox.
* A replica has as many ranks as its layout has data-parallel groups (`--dp`), nearly always one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import simpy

from twinfer.core.events import Output
from twinfer.core.plan import StepPlan, StepResult
from twinfer.core.recorder import Recorder
from twinfer.simulator.driver import SimInbox, engine
from twinfer.simulator.pipeline import Line
from twinfer.simulator.run import StoppableExecutor, World, passes_of
from twinfer.simulator.step_parts import StepCost


class RankExecutor(StoppableExecutor):
    """Tells the fleet of plans that move KV; `watch` makes it tell of every plan."""

    on_launch: Callable[[StepPlan, float], None] | None = None
    watch = False

    def charge(self, plan: StepPlan, cost: StepCost) -> StepResult:
        result = super().charge(plan, cost)
        if (plan.moves or self.watch) and self.on_launch is not None:
            self.on_launch(plan, result.seconds)
        return result


class Rank:
    """num_requests, last_pick: for choosing among the ranks of a replica, as a router does among replicas."""

    __slots__ = (
        "_env",
        "_world",
        "core",
        "executor",
        "inbox",
        "index",
        "last_pick",
        "num_requests",
        "process",
        "recorder",
    )

    def __init__(self, env: simpy.Environment, index: int, world: World, recorder: Recorder, scale: float) -> None:
        self._env, self._world = env, world
        self.index = index
        self.recorder = recorder
        self.executor = RankExecutor(world.timer, scale, recorder.keep_ops and recorder.detail == "steps")
        self.core = world.setup.build_core()
        self.inbox = SimInbox(env)
        self.process: simpy.Event | None = None
        self.num_requests = 0
        self.last_pick = -1

    def renew(self) -> None:
        """An empty core in place of one that has run."""
        if self.process is not None or self.inbox.closed:
            self.core = self._world.setup.build_core()
            self.inbox = SimInbox(self._env)
            self.num_requests = 0

    def start(
        self, emit: Callable[[Sequence[Output], float], None], hook: Any, skip: bool, line: Line | None
    ) -> None:  # fmt: skip
        """The engine begins to run. line: the way of its plans, where it shares that with other ranks."""
        self.executor.passes = passes_of(self._world)
        self.process = self._env.process(
            engine(self._env, self.core, self.executor, self.inbox, self.recorder, emit, hook, skip, line)
        )


__all__ = ["Rank", "RankExecutor"]
