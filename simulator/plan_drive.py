"""Runs searches side by side: hands their trials to a pool, each once, and their outcomes back.

Invariants
* A trial whose outcome is known (from a file, or from another search) is not run again.
* The file is written every few seconds, and is valid at any moment.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from twinfer.simulator.plan_file import Plan
from twinfer.simulator.plan_pool import Pool
from twinfer.simulator.plan_search import Found, Search
from twinfer.simulator.plan_trial import ASSESS, Evaluator, Outcome, ShouldStop, Trial

WRITE_EVERY_S = 2.0
WRITE_RARELY = 100  # times as long as it took, until the file is written again
OnProgress = Callable[[int, int, dict[str, Any]], None]


class Drive:
    """Runs searches side by side: hands their trials to the pool, each once, and their outcomes back."""

    def __init__(
        self, evaluator: Evaluator, pool: Pool, result: Plan, out: Path | None, on_progress: OnProgress,
        should_stop: ShouldStop | None,
    ) -> None:  # fmt: skip
        self._pool, self._result, self._out = pool, result, out
        self._on_progress, self._should_stop = on_progress, should_stop
        self._known = {key: outcome for key, (_, outcome) in result.points.items()}
        self.asked: set[str] = set()
        self._passed: set[tuple[str, str]] = set()  # (search, stage)
        num = len({d.device for d in evaluator.designs})
        self._total = 2 * num + 3 * min(num, evaluator.question.top)
        self._ended = 0
        self._wrote, self._pause = time.monotonic(), WRITE_EVERY_S
        self._best = ""
        self._requests = 0  # simulated since the start
        self.stopped = False

    def run(self, searches: Mapping[str, Search[Any]]) -> dict[str, Any]:
        """The results of those searches that came to their end."""
        results: dict[str, Any] = {}
        wants: dict[str, list[Trial]] = {}
        queue: list[Trial] = []
        running: set[str] = set()

        def advance(name: str, outcomes: list[Outcome] | None) -> None:
            """Let a search go on until it wants what is not known yet."""
            search = searches[name]
            while True:
                try:
                    trials = next(search) if outcomes is None else search.send(outcomes)
                except StopIteration as end:
                    results[name] = end.value
                    self._tell(name, None, end.value)
                    return
                self._tell(name, trials[0], None)
                missing = [t for t in trials if t.key not in self._known]
                self.asked |= {t.key for t in trials}
                if missing:
                    wants[name] = trials
                    waiting = {t.key for t in queue} | running
                    queue.extend(t for t in missing if t.key not in waiting)
                    return
                outcomes = [self._known[t.key] for t in trials]

        for name in searches:
            advance(name, None)
        while wants and not self._stop():
            while queue and self._pool.room > 0:
                trial = queue.pop(0)
                running.add(trial.key)
                self._pool.submit(trial)
            for trial, outcome in self._pool.collect():
                running.discard(trial.key)
                self._known[trial.key] = outcome
                self._result.points[trial.key] = (trial, outcome)
                self._requests += outcome.num_requests
            for name in [n for n, trials in wants.items() if all(t.key in self._known for t in trials)]:
                advance(name, [self._known[t.key] for t in wants.pop(name)])
            self._write()
        return results

    def _stop(self) -> bool:
        self.stopped = self.stopped or (self._should_stop is not None and self._should_stop())
        return self.stopped

    def _tell(self, name: str, trial: Trial | None, value: Any) -> None:
        if isinstance(value, Found):
            self._ended += 1
            if value.design is not None:
                self._best = f"{value.replicas * value.design.num_devices} {value.device} will do"
        if trial is not None and trial.level != ASSESS:
            self._passed.add((name, "confirmed" if trial.steps != 1 or trial.load != 1 else "assessed"))
        done = len(self._passed) + self._ended
        self._on_progress(
            min(done, self._total),
            self._total,
            {"points": len(self._result.points), "requests": self._requests, "found": self._best},
        )

    def _write(self) -> None:
        begin = time.monotonic()
        if self._out is not None and begin - self._wrote >= self._pause:
            self._result.write(self._out)
            self._wrote = time.monotonic()
            self._pause = max(WRITE_EVERY_S, WRITE_RARELY * (self._wrote - begin))


__all__ = ["Drive", "OnProgress"]
