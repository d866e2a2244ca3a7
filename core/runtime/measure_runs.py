"""Short workloads through the whole engine: what the loop around the steps takes, and the level of it all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from twinfer.core.measured import ServedRun, ServedStep
from twinfer.core.plan import StepPlan, StepResult
from twinfer.core.registry import Registry
from twinfer.core.request import Request
from twinfer.core.runtime.loading import Engine
from twinfer.core.runtime.run import serve, warm_up
from twinfer.core.work import StepShape
from twinfer.core.workload import Workload, generate

RUNS = (
    Workload(num_requests=1, input_len=90, output_len=24, seed=21),
    Workload(num_requests=4, input_len=220, output_len=18, seed=22),
    Workload(num_requests=14, input_len=120, output_len=16, seed=23),
    Workload(num_requests=32, input_len=60, output_len=14, lengths="uniform", spread=0.5, concurrency=24, seed=24),
)


class _Listening:
    """The engine's executor, with the plans it was given and what they took kept."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.done: list[tuple[StepPlan, StepResult]] = []

    def admit(self, request: Request, seqs: tuple[tuple[str, int], ...]) -> None:
        self.inner.admit(request, seqs)

    def execute(self, plan: StepPlan) -> StepResult:
        result: StepResult = self.inner.execute(plan)
        self.done.append((plan, result))
        return result

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Served:
    label: str
    done: list[tuple[StepPlan, StepResult]]
    times: list[tuple[float, float]]  # (start, seconds) of each step

    def timing(self, pace: float) -> ServedRun:
        ends = [None, *(start + seconds for start, seconds in self.times)]
        steps = [
            ServedStep(StepShape.of(plan), seconds, None if end is None else start - end, result.ops)
            for (plan, result), (start, seconds), end in zip(self.done, self.times, ends, strict=False)
            if plan.rows
        ]
        return ServedRun(self.label, tuple(steps), pace)


def served(engine: Engine, workload: Workload, registry: Registry, check: Callable[[], None]) -> Served:
    """`workload` through the whole engine, scheduler, loop and recorder, on a KV pool as fresh as that of a run."""
    spec = engine.setup.model
    requests = generate(workload, spec.vocab_size, engine.setup.limits.max_model_len, registry=registry)
    fresh = engine.reconfigured(engine.setup.config)
    try:
        warm_up(fresh, requests)
        listening = _Listening(fresh.executor)
        record = serve(
            replace(fresh, executor=listening), requests, workload, lambda done, total, info: None,
            should_stop=lambda: _stops(check),
        )  # fmt: skip
    finally:
        fresh.close()
    lengths = f"{workload.num_requests} x ({workload.input_len} + {workload.output_len})"
    return Served(lengths, listening.done, [(step.start, step.seconds) for step in record.steps])


def _stops(check: Callable[[], None]) -> bool:
    check()
    return False


__all__ = ["RUNS", "Served", "served"]
