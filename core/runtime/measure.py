"""Times this machine by running the engine itself: what calibration knows, it knows from here.

* steps: the engine as it is loaded for a run, its executor profiled on a design of decode, prefill, chunked and mixed
  steps, so every op is timed where it really runs, by whatever kernels the format has, recorded or written;
* gemms: the format's linear on a generic grid of shapes, for models other than the measured one;
* runs: a few short workloads through the whole engine, for the loop around the steps and for the level of it all.

Invariants
* Repeats are interleaved: every timing is spread over the whole measurement, so a slow minute of the
  machine widens all spreads instead of bending one table.
* A step is timed as it comes in a run: after another one, a decode step after one of its own shape (and so from its
  recording), a prefill never from a recording.
* One small step is repeated before every other: what its time does is the machine's drift and jitter.
* KV memory that is read has been written before (fresh pages would be read from one cached zero page).
* Stops at the next step after `should_stop` says so (`MeasurementStopped`), and writes no file.
"""

from __future__ import annotations

import os
import platform
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from twinfer.core.catalog import locate_weights, resolve_spec
from twinfer.core.config import Choice, EngineConfig
from twinfer.core.dtypes import canonical_dtype
from twinfer.core.errors import ConfigError, ModelError, TwinferError
from twinfer.core.loop import sample_ids
from twinfer.core.measured import GemmTiming, Measured, ServedRun, ServedStep, StepTiming, Timing, quantile
from twinfer.core.params import SamplingParams
from twinfer.core.plan import Grant, Need, PlanStats, Row, StepPlan, StepResult
from twinfer.core.registry import Registry, default_registry
from twinfer.core.request import Request
from twinfer.core.runtime.linear import Dense
from twinfer.core.runtime.loading import Engine, linears_of, load_engine
from twinfer.core.runtime.replay import MOST_TOKENS
from twinfer.core.runtime.run import serve, warm_up
from twinfer.core.runtime.stored_blocks import VALUES_PER_BLOCK, StoredBlocks
from twinfer.core.work import RowShape, StepShape
from twinfer.core.workload import Workload, generate
from twinfer.kernels.gemm import BLOCK_FORMATS

OnProgress = Callable[[float, str], None]
ShouldStop = Callable[[], bool]

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
RUNS = (
    Workload(num_requests=1, input_len=90, output_len=24, seed=21),
    Workload(num_requests=4, input_len=220, output_len=18, seed=22),
    Workload(num_requests=14, input_len=120, output_len=16, seed=23),
    Workload(num_requests=32, input_len=60, output_len=14, lengths="uniform", spread=0.5, concurrency=24, seed=24),
)
GEMM_GRID = ((512, 512), (2048, 2048), (6144, 2048), (4096, 4096))
GEMM_ROWS = (1, 8, 64, 256)
COLD_BYTES = 96 * 2**20  # weights cycled through so that none is found in the caches of a core


class MeasurementStopped(TwinferError):
    """The user stopped the measurement; nothing was stored."""


def measure(
    model: str = "smollm2-135m",
    dtype: str = "float32",
    budget_s: float = 55.0,
    on_progress: OnProgress | None = None,
    should_stop: ShouldStop | None = None,
    registry: Registry | None = None,
    max_rounds: int = 12,
    quantizer: Choice | None = None,
    kv_dtype: str = "auto",
) -> Measured:
    """Time `model` in one format on this machine within about `budget_s` seconds (loading included), sooner after
    `max_rounds` rounds.

    Raises ConfigError for a budget too small to time everything once and for a format that the engine refuses,
    ModelError when the model has no weights here, MeasurementStopped when `should_stop` answers True.
    """
    begin = time.perf_counter()
    deadline = begin + budget_s
    report = on_progress or (lambda fraction, message: None)
    if budget_s < 10:
        raise ConfigError("--budget", budget_s, "too short to time every op", "give at least 10 s")

    def check() -> None:
        if should_stop is not None and should_stop():
            raise MeasurementStopped("calibration stopped; nothing was stored")

    registry = registry or default_registry()
    engine = _load(model, canonical_dtype(dtype), quantizer, kv_dtype, registry, lambda phase: report(0.0, phase))
    try:
        check()
        bench = _Bench(engine)
        grid = _grid(engine, registry)
        found = Measured(
            model=model, dtype=engine.setup.model.dtype, quantizer="" if quantizer is None else str(quantizer),
            kv_dtype=engine.setup.model.kv_dtype, fingerprint=fingerprint(),
        )  # fmt: skip
        report(0.05, "warming up")
        bench.reference.time(5)
        del bench.reference.moments[:]
        runs: list[_Served] = []
        jobs: list[_StepJob | _GemmJob] = [*bench.jobs, *grid]
        copies: list[float] = []
        rounds = 0
        share = budget_s / 120  # of the time, for one job over all rounds, before it is skipped
        while time.perf_counter() < deadline and rounds < max_rounds:
            for job in jobs:
                check()
                left = deadline - time.perf_counter()
                if left < -3 * budget_s:
                    raise ConfigError(
                        "--budget", budget_s, "this machine is too busy or too slow to time every step once",
                        "close other programs, or give a longer budget",
                    )  # fmt: skip
                if rounds and (job.seconds > left or (rounds > 2 and job.seconds * rounds > share)):
                    continue  # dear steps are repeated less often than cheap ones
                job.run()
                fraction = 1 - max(0.0, deadline - time.perf_counter()) / budget_s
                report(min(0.99, max(0.06, fraction)), f"round {rounds + 1}: {job.label}")
            again = rounds == 2 and deadline - time.perf_counter() > 0.3 * budget_s
            if rounds == 0 or again:  # amid all the steps, and once more when there is time
                for workload in RUNS:
                    check()
                    runs.append(_served(engine, workload, registry, check))
            copies.append(_copy_bandwidth())
            rounds += 1
        found.steps = [job.timing() for job in bench.jobs]
        found.gemms = [GemmTiming(job.n, job.k, len(job.x), Timing.of(job.samples)) for job in grid if job.samples]
        found.runs = [run.timing() for run in runs]
        found.copy_bandwidth = max(copies)
        found.records = not bench.inner.forward.why_not
        found.drift, found.jitter = drift_of(bench.reference.moments)
    finally:
        engine.close()
    found.seconds = time.perf_counter() - begin
    report(1.0, f"{rounds} rounds in {found.seconds:.0f} s")
    return found


def _load(
    model: str, dtype: str, quantizer: Choice | None, kv_dtype: str, registry: Registry, on_phase: Callable[[str], None]
) -> Engine:
    """The engine as a run of this format has it, with a pool for the largest step."""
    spec = resolve_spec(model)
    if locate_weights(model) is None:
        raise ModelError(f"{model}: no weights on this machine; give a directory or a GGUF file")
    num_blocks = max(sum(-(-keys // BLOCK) for _, keys in design) for design in _designs(spec.max_context))
    config = EngineConfig(
        model=model, device="cpu", dtype=dtype, quantizer=quantizer, kv_dtype=kv_dtype,
        kv_cache=Choice(name="paged", options={"block_size": BLOCK, "free_windows": False}), num_kv_blocks=num_blocks + len(RUNS),
        max_model_len=min(spec.max_context, 2048),
    )  # fmt: skip
    return load_engine(config, registry, on_phase=on_phase)


def _designs(max_context: int) -> list[Design]:
    return [d for d in DESIGN if max(keys for _, keys in d) <= max_context]


# --- steps ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class _StepJob:
    bench: _Bench
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


class _Reference:
    """The small step that is repeated throughout; `moments` are (when, seconds)."""

    def __init__(self, job: _StepJob) -> None:
        self.moments: list[tuple[float, float]] = []
        executor, self._executor = job.bench.executor, job.bench.executor
        for request in job.requests:
            executor.admit(request, sample_ids(request))
        executor.execute(replace(job.plan, rows=()))
        self._plan = replace(job.plan, grants=())

    def time(self, repeats: int) -> None:
        for _ in range(repeats):
            result = self._executor.execute(self._plan)
            self.moments.append((time.perf_counter(), result.seconds))


class _Bench:
    """The engine's executor with enough written KV, and one job per designed step."""

    def __init__(self, engine: Engine) -> None:
        self.executor = engine.executor
        self._vocab = engine.setup.model.vocab_size
        self.inner: Any = getattr(engine.executor, "inner", engine.executor)
        for tensor in (*self.inner.kv.keys, *self.inner.kv.values):
            tensor.fill_(0.01)
        self.recorded = {1}  # rows of decode steps that have been; the reference has one
        designs = _designs(engine.setup.limits.max_model_len)
        self.reference = _Reference(self._job(len(designs), REFERENCE))
        self.jobs = [self._job(number, d) for number, d in enumerate(designs)]

    def _job(self, number: int, design: Design) -> _StepJob:
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
        return _StepJob(self, design, StepPlan(0, rows, grants, stats=stats), requests)


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


# --- generic products -----------------------------------------------------------------------------


@dataclass(slots=True)
class _GemmJob:
    """`copies` of one weight, more than the nearest caches hold, on rows `x`."""

    n: int
    k: int
    copies: Sequence[Callable[[torch.Tensor], torch.Tensor]]
    x: torch.Tensor
    samples: list[float] = field(default_factory=list)

    @property
    def label(self) -> str:
        return f"[{self.x.shape[0]}, {self.k}] x [{self.k}, {self.n}]"

    @property
    def seconds(self) -> float:
        return min(self.samples, default=0.0) * len(self.copies)

    def run(self) -> None:
        with torch.inference_mode():
            self.copies[0](self.x)
            begin = time.perf_counter()
            for copy in self.copies:
                copy(self.x)
            self.samples.append((time.perf_counter() - begin) / len(self.copies))


def _grid(engine: Engine, registry: Registry) -> list[_GemmJob]:
    """Products of the engine's own linears, in its own format; none where that takes blocks of no known type."""
    model = engine.setup.model
    dtype = engine.model.dtype
    factory = linears_of(engine.setup, registry, torch.device("cpu"))
    kind = ""
    if getattr(factory, "takes_blocks", False):
        stored: Counter[str] = Counter(dict(model.extra.get("stored_linears", {})))
        kind = next((name for name, _ in stored.most_common() if name in BLOCK_FORMATS), "")
        if not kind:
            return []
    jobs = []
    with torch.inference_mode():
        for n, k in GEMM_GRID:
            count = max(2, min(24, COLD_BYTES // (n * k * dtype.itemsize)))
            copies = [_linear(factory, kind, n, k, dtype) for _ in range(count)]
            jobs += [_GemmJob(n, k, copies, torch.full((m, k), 0.5, dtype=dtype)) for m in GEMM_ROWS]
    return jobs


def _linear(factory: Any, kind: str, n: int, k: int, dtype: torch.dtype) -> Any:
    if kind:
        width = _block_bytes(kind)
        return factory(
            "grid", StoredBlocks(kind, torch.zeros(n, k // VALUES_PER_BLOCK[kind], width, dtype=torch.uint8)), None
        )
    weight = torch.full((n, k), 0.01, dtype=dtype)
    return Dense(weight) if factory is None else factory("grid", weight, None)


def _block_bytes(kind: str) -> int:
    """Bytes of one block of a GGUF type."""
    from twinfer.core.gguf_header import TYPES

    return next(num_bytes for name, _, num_bytes in TYPES.values() if name == kind)


def _copy_bandwidth(size: int = 128 * 2**20) -> float:
    """Bytes per second, read plus written, of a copy that no cache holds."""
    source = torch.ones(size, dtype=torch.uint8)
    target = torch.empty_like(source)
    target.copy_(source)
    begin = time.perf_counter()
    target.copy_(source)
    return 2 * size / (time.perf_counter() - begin)


# --- whole runs -----------------------------------------------------------------------------------


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
class _Served:
    label: str
    done: list[tuple[StepPlan, StepResult]]
    times: list[tuple[float, float]]  # (start, seconds) of each step

    def timing(self) -> ServedRun:
        ends = [None, *(start + seconds for start, seconds in self.times)]
        steps = [
            ServedStep(StepShape.of(plan), seconds, None if end is None else start - end, result.ops)
            for (plan, result), (start, seconds), end in zip(self.done, self.times, ends, strict=False)
            if plan.rows
        ]
        return ServedRun(self.label, tuple(steps))


def _served(engine: Engine, workload: Workload, registry: Registry, check: Callable[[], None]) -> _Served:
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
    return _Served(lengths, listening.done, [(step.start, step.seconds) for step in record.steps])


def _stops(check: Callable[[], None]) -> bool:
    check()
    return False


def fingerprint() -> dict[str, object]:
    """What the timings hold for: another CPU, torch or number of threads needs new ones."""
    name = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    name = line.partition(":")[2].strip()
                    break
    except OSError:
        pass
    return {
        "cpu": name, "cores": os.cpu_count(), "threads": torch.get_num_threads(), "torch": torch.__version__,
    }  # fmt: skip
