"""Designed steps, timed as they come in a run: what is fed, on how much context, by the engine's own executor.

Invariants
* A step is timed after another one, a decode step after one of its own shape (and so from its recording), a prefill never
  from a recording.
* One small step is repeated before every other: what its time does is the machine's drift and jitter (`drift_of`).
* KV memory that is read has been written before (fresh pages would be read from one cached zero page).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from twinfer.core.errors import ModelError
from twinfer.core.loop import sample_ids
from twinfer.core.measured import StepTiming, Timing, quantile
from twinfer.core.params import SamplingParams
from twinfer.core.plan import Grant, Need, PlanStats, Row, StepPlan, StepResult
from twinfer.core.request import Request
from twinfer.core.runtime.loading import Engine
from twinfer.core.runtime.replay import MOST_TOKENS
from twinfer.core.work import RowShape, StepShape

BLOCK = 16
Design = tuple[tuple[int, int], ...]
"""(queries, keys) of each row of a step."""
REFERENCE: Design = ((1, 64),)
DESIGN: tuple[Design, ...] = (
    *(((1, c),) * n for n, c in ((1, 40), (1, 500), (1, 1900), (2, 250), (4, 60), (4, 900), (8, 250), (12, 90),
                                 (14, 40), (16, 300), (18, 60), (22, 450), (24, 130), (26, 60), (32, 60), (32, 330),
                                 (40, 180), (64, 60), (64, 280))),
    *(((q, q),) for q in (4, 16, 32, 44, 64, 96, 128, 180, 256, 512, 1024)),
    ((512, 512),) * 4,
    ((4, 260),) * 6, ((16, 16),) * 4, ((64, 64),) * 4, ((128, 128),) * 3, ((24, 24),) * 8, ((170, 170),) * 9,
    ((128, 1000),), ((320, 1400),), ((64, 1900),), ((560, 660),),
    ((300, 300), *((1, 330),) * 12), ((12, 500), *((1, 400),) * 15), ((96, 96), *((1, 250),) * 8),
    ((200, 200), (56, 312), *((1, 120),) * 4), ((1, 30), *((1, 600),) * 7), ((264, 264), *((1, 200),) * 63),
    ((60, 60), *((1, 150),) * 31), ((420, 420), (90, 90), *((1, 260),) * 60),
)  # fmt: skip
"""Decode steps first, cheap to dear, then prompts, chunks on a context, and mixtures as continuous batching makes them.

Products take 12 or 16 rows at a time: there are decode steps on both sides of these."""


def designs_of(max_context: int) -> list[Design]:
    return [d for d in DESIGN if max(keys for _, keys in d) <= max_context]


@dataclass(slots=True)
class StepJob:
    bench: Bench
    design: Design
    plan: StepPlan
    requests: list[Request]
    totals: list[float] = field(default_factory=list)
    ops: dict[str, list[float]] = field(default_factory=dict)
    first: tuple[float, float] | None = None

    @property
    def label(self) -> str:
        queries, keys = self.design[0]
        return f"{len(self.design)} row(s), first {queries} token(s) on {keys}"

    @property
    def weight(self) -> int:
        """About what it takes beside other jobs: a decode step is as dear as some tokens of a prompt."""
        return 16 + sum(queries for queries, _ in self.design)

    @property
    def seconds(self) -> float:
        """What one more run would take."""
        return min(self.totals, default=0.0)

    def run(self) -> None:
        executor = self.bench.executor
        for request in self.requests:
            executor.admit(request, sample_ids(request))
        executor.execute(replace(self.plan, rows=()))  # brings the block tables up
        self.bench.reference.time(1)
        plan = replace(self.plan, grants=())
        decode = all(queries == 1 for queries, _ in self.design)
        if decode and self.seconds < 0.1:
            # the second one of a shape is recorded, the third repeats it
            first = [executor.execute(plan).seconds for _ in range(1 if self.totals else 2)]
            if len(self.design) <= MOST_TOKENS and len(self.design) not in self.bench.recorded:
                self.bench.recorded.add(len(self.design))
                self.first = (first[0], first[1])
        for _ in range(3 if decode else 1):  # a prefill that is repeated would be recorded
            self._take(executor.execute(plan))
            if self.totals[-1] > 0.03:
                break
        executor.execute(StepPlan(0, (), forget=tuple(r.id for r in self.requests)))

    def _take(self, result: StepResult) -> None:
        failed = next((row.failure for row in result.rows if row.failure is not None), None)
        if failed is not None:
            raise ModelError(f"the engine could not run a step that was to be timed: {failed}")
        self.totals.append(result.seconds)
        for name, seconds in result.ops.items():
            self.ops.setdefault(name, []).append(seconds)

    def timing(self) -> StepTiming:
        rows = tuple(RowShape(q, k) for q, k in self.design)
        return StepTiming(
            StepShape(rows, len(rows)), Timing.of(self.totals), {n: Timing.of(s) for n, s in self.ops.items()},
            self.first,
        )  # fmt: skip


class Reference:
    """The small step that is repeated throughout; `moments` are (when, seconds)."""

    def __init__(self, job: StepJob) -> None:
        self.moments: list[tuple[float, float]] = []
        executor, self._executor = job.bench.executor, job.bench.executor
        for request in job.requests:
            executor.admit(request, sample_ids(request))
        executor.execute(replace(job.plan, rows=()))
        self._plan = replace(job.plan, grants=())

    def time(self, repeats: int) -> list[float]:
        """Seconds of each of so many repeats, which are remembered, too."""
        taken = [self._executor.execute(self._plan).seconds for _ in range(repeats)]
        self.moments += [(time.perf_counter(), seconds) for seconds in taken]
        return taken


class Bench:
    """The engine's executor with enough written KV, and one job per designed step."""

    def __init__(self, engine: Engine) -> None:
        self.executor = engine.executor
        self._vocab = engine.setup.model.vocab_size
        self.inner: Any = getattr(engine.executor, "inner", engine.executor)
        for tensor in (*self.inner.kv.keys, *self.inner.kv.values):
            tensor.fill_(0.01)
        self.recorded = {1}  # rows of decode steps that have been; the reference has one
        designs = designs_of(engine.setup.limits.max_model_len)
        self.reference = Reference(self._job(len(designs), REFERENCE))
        self.jobs = [self._job(number, d) for number, d in enumerate(designs)]

    def _job(self, number: int, design: Design) -> StepJob:
        """Prompts take consecutive blocks; what several rows grew by since then lies interleaved."""
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        requests = [
            Request(id=f"m{number}-{i}", prompt=[(7 * j + i) % self._vocab for j in range(keys)], params=params)
            for i, (_, keys) in enumerate(design)
        ]
        tables: list[list[int]] = [[] for _ in design]
        block = 0
        for want_half in (True, False):
            left = [
                -(-keys // BLOCK) // 2 if want_half else -(-keys // BLOCK) - len(table)
                for (_, keys), table in zip(design, tables, strict=True)
            ]
            while any(left):
                for i, count in enumerate(left):
                    take = count if want_half else min(1, count)
                    tables[i].extend(range(block, block + take))
                    block += take
                    left[i] -= take
        rows = tuple(
            Row(r.id, keys - queries, r.prompt[keys - queries : keys], 0, Need.LAST, 0)
            for r, (queries, keys) in zip(requests, design, strict=True)
        )
        grants = tuple(Grant(r.id, 0, tuple(table)) for r, table in zip(requests, tables, strict=True))
        stats = PlanStats(len(rows), 0, block, 0, block, block * BLOCK, BLOCK)
        return StepJob(self, design, StepPlan(0, rows, grants, stats=stats), requests)


def drift_of(moments: Sequence[tuple[float, float]], blocks: int = 8) -> tuple[float, float]:
    """(drift, jitter) of a step that was repeated at (when, seconds): relative standard deviation of the medians of
    `blocks` stretches of time, and, within them, of one repeat that is slower than usual (90th percentile)."""
    if len(moments) < 10:
        return 0.05, 0.05  # too few say nothing
    first, last = moments[0][0], moments[-1][0]
    stretches: list[list[float]] = [[] for _ in range(blocks)]
    for when, seconds in moments:
        stretches[min(blocks - 1, int(blocks * (when - first) / max(last - first, 1e-9)))].append(seconds)
    ordered = [sorted(s) for s in stretches if len(s) >= 3]
    if len(ordered) < 2:
        return 0.05, 0.05
    middles = [quantile(s, 0.5) for s in ordered]
    mean = sum(middles) / len(middles)
    drift = (sum((m - mean) ** 2 for m in middles) / (len(middles) - 1)) ** 0.5 / mean
    jitter = sorted((quantile(s, 0.9) / quantile(s, 0.5) - 1) / 1.2816 for s in ordered)
    return min(0.3, drift), min(0.5, quantile(jitter, 0.5))


__all__ = ["BLOCK", "Bench", "Design", "StepJob", "designs_of", "drift_of"]
