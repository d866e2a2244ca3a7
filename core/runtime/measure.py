"""Times this machine by running the engine's own code: what calibration knows, it knows from here.

* steps: the real executor, profiled, on a design of decode, prefill, chunked and mixed steps of the
  model, so every op is timed where it really runs (cold weights, real threads, real overheads);
* gemms: the engine's dense linear on a generic grid of shapes, for models other than the measured one;
* loop: the real driver around an executor that does nothing, for what scheduling and recording take.

Invariants
* Repeats are interleaved: every timing is spread over the whole measurement, so a slow minute of the
  machine widens all spreads instead of bending one table.
* KV memory that is read has been written before (fresh pages would be read from one cached zero page).
* Stops at the next step after `should_stop` says so (`MeasurementStopped`), and writes no file.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from twinfer.core.catalog import locate_weights, resolve_spec
from twinfer.core.core import Core
from twinfer.core.dtypes import canonical_dtype
from twinfer.core.errors import ConfigError, ModelError, TwinferError
from twinfer.core.events import Submit
from twinfer.core.loop import LocalInbox, drive, sample_ids
from twinfer.core.measured import GemmTiming, LoopTiming, Measured, StepTiming, Timing, quantile
from twinfer.core.params import SamplingParams
from twinfer.core.plan import Grant, Need, PlanStats, Row, RowResult, StepPlan, StepResult
from twinfer.core.policy import Limits
from twinfer.core.recorder import Recorder
from twinfer.core.registry import Registry, default_registry
from twinfer.core.request import Request
from twinfer.core.runtime.attention_torch import TorchAttention
from twinfer.core.runtime.executor import TorchExecutor
from twinfer.core.runtime.families import DecoderModel, load_model
from twinfer.core.runtime.linear import Dense
from twinfer.core.work import RowShape, StepShape

OnProgress = Callable[[float, str], None]
ShouldStop = Callable[[], bool]

BLOCK = 16
# (queries, keys) of each row; decode steps first, cheap to dear
DESIGN: tuple[tuple[tuple[int, int], ...], ...] = (
    *(((1, c),) * n for n, c in ((1, 40), (1, 500), (1, 2000), (2, 250), (4, 60), (4, 900), (8, 250), (16, 60),
                                 (16, 400), (16, 900), (32, 250), (64, 60), (64, 220))),
    *(((q, q),) for q in (4, 16, 32, 64, 128, 256, 512, 1024)),
    ((16, 16),) * 4, ((64, 64),) * 4, ((128, 128),) * 4, ((32, 32),) * 16, ((24, 24),) * 8,
    ((128, 1000),), ((256, 1300),), ((64, 1900),),
    ((300, 300), *((1, 330),) * 12), ((12, 500), *((1, 400),) * 15), ((96, 96), *((1, 250),) * 8),
    ((200, 200), (56, 312), *((1, 120),) * 4), ((1, 30), *((1, 600),) * 7),
)  # fmt: skip
GEMM_GRID = ((512, 512), (2048, 2048), (6144, 2048), (4096, 4096))
GEMM_ROWS = (1, 8, 64, 256)
COLD_BYTES = 96 * 2**20  # weights cycled through so that none is found in the cache


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
) -> Measured:
    """Time `model` in `dtype` on this machine within about `budget_s` seconds (loading included), sooner after
    `max_rounds` rounds.

    Raises ConfigError for a budget too small to time everything once, ModelError when the model has no
    weights here, MeasurementStopped when `should_stop` answers True.
    """
    begin = time.perf_counter()
    report = on_progress or (lambda fraction, message: None)
    if budget_s < 10:
        raise ConfigError("--budget", budget_s, "too short to time every op", "give at least 10 s")

    def check() -> None:
        if should_stop is not None and should_stop():
            raise MeasurementStopped("calibration stopped; nothing was stored")

    registry = registry or default_registry()
    report(0.0, f"loading {model}")
    spec = resolve_spec(model)
    weights = locate_weights(model)
    if weights is None:
        raise ModelError(f"{model}: no weights on this machine; give a directory or a GGUF file")
    dtype = canonical_dtype(dtype)
    spec = replace(spec, dtype=dtype, kv_dtype=dtype)
    torch_dtype = getattr(torch, dtype)
    attention = registry.get("attention", spec.variant)()
    spec = attention.adapt_model(spec)
    network = load_model(spec, weights, registry, "cpu", torch_dtype)
    check()
    design = [d for d in DESIGN if max(keys for _, keys in d) <= spec.max_context]
    bench = _Bench(network, attention.build(spec), design)
    gemms = [_Gemm(n, k, torch_dtype) for n, k in GEMM_GRID]
    found = Measured(model=model, dtype=dtype, fingerprint=fingerprint())
    report(0.05, "timing the loop")
    found.loops = _time_loop(spec.vocab_size, registry)
    deadline = begin + budget_s
    rounds = 0
    jobs: list[_StepJob | _GemmJob] = [*bench.jobs, *(gemm.row(m) for gemm in gemms for m in GEMM_ROWS)]
    copies: list[float] = []
    share = budget_s / 120  # of the time, for one job over all rounds, before it is skipped
    while time.perf_counter() < deadline and rounds < max_rounds:
        for job in jobs:
            check()
            left = deadline - time.perf_counter()
            if left < 0 or (rounds and (job.seconds > left or (rounds > 2 and job.seconds * rounds > share))):
                continue  # dear steps are repeated less often than cheap ones
            job.run()
            report(min(0.99, max(0.06, 1 - left / budget_s)), f"round {rounds + 1}: {job.label}")
        copies.append(_copy_bandwidth())
        rounds += 1
    untimed = [job.label for job in bench.jobs if not job.totals]
    if untimed or rounds < min(2, max_rounds):
        raise ConfigError(
            "--budget", budget_s, f"this machine is too busy or too slow: {len(untimed)} steps were not timed",
            "close other programs, or give a longer budget",
        )  # fmt: skip
    found.steps = [job.timing() for job in bench.jobs]
    found.gemms = [
        GemmTiming(g.n, g.k, m, Timing.of(g.row(m).samples)) for g in gemms for m in GEMM_ROWS if g.row(m).samples
    ]
    found.copy_bandwidth = max(copies)
    found.drift = _drift([job.totals for job in bench.jobs])
    bench.executor.close()
    found.seconds = time.perf_counter() - begin
    report(1.0, f"{rounds} rounds in {found.seconds:.0f} s")
    return found


# --- steps ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class _StepJob:
    bench: _Bench
    design: tuple[tuple[int, int], ...]
    plan: StepPlan
    requests: list[Request]
    totals: list[float] = field(default_factory=list)
    ops: dict[str, list[float]] = field(default_factory=dict)

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
        result = executor.execute(replace(self.plan, grants=()))
        executor.execute(StepPlan(0, (), forget=tuple(r.id for r in self.requests)))
        failed = next((row.failure for row in result.rows if row.failure is not None), None)
        if failed is not None:
            raise ModelError(f"the engine could not run a step that was to be timed: {failed}")
        self.totals.append(result.seconds)
        for name, seconds in result.ops.items():
            self.ops.setdefault(name, []).append(seconds)

    def timing(self) -> StepTiming:
        rows = tuple(RowShape(q, k) for q, k in self.design)
        return StepTiming(
            StepShape(rows, len(rows)), Timing.of(self.totals), {n: Timing.of(s) for n, s in self.ops.items()}
        )  # fmt: skip


class _Bench:
    """The executor with enough written KV, and one job per designed step."""

    def __init__(
        self, model: DecoderModel, attention: TorchAttention, design: Sequence[tuple[tuple[int, int], ...]]
    ) -> None:
        num_blocks = max(sum(-(-keys // BLOCK) for _, keys in d) for d in design)
        self.executor = TorchExecutor(model, attention, num_blocks, BLOCK, profile=True)
        for keys, values in zip(self.executor.kv.keys, self.executor.kv.values, strict=True):
            keys.fill_(0.01)
            values.fill_(0.01)
        self.jobs = [self._job(number, d) for number, d in enumerate(design)]

    def _job(self, number: int, design: tuple[tuple[int, int], ...]) -> _StepJob:
        """Prompts take consecutive blocks; what several rows grew by since then lies interleaved."""
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        vocab = self.executor.model.spec.vocab_size
        requests = [
            Request(id=f"m{number}-{i}", prompt=[(7 * j + i) % vocab for j in range(keys)], params=params)
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


# --- generic products -----------------------------------------------------------------------------


@dataclass(slots=True)
class _GemmJob:
    gemm: _Gemm
    x: torch.Tensor
    samples: list[float] = field(default_factory=list)

    @property
    def label(self) -> str:
        return f"[{self.x.shape[0]}, {self.gemm.k}] x [{self.gemm.k}, {self.gemm.n}]"

    @property
    def seconds(self) -> float:
        return min(self.samples, default=0.0) * len(self.gemm.copies)

    def run(self) -> None:
        copies = self.gemm.copies
        with torch.inference_mode():
            copies[0](self.x)
            begin = time.perf_counter()
            for copy in copies:
                copy(self.x)
            self.samples.append((time.perf_counter() - begin) / len(copies))


class _Gemm:
    """Copies of one random weight, more than the nearest caches hold."""

    def __init__(self, n: int, k: int, dtype: torch.dtype) -> None:
        self.n, self.k = n, k
        count = max(2, min(24, COLD_BYTES // (n * k * dtype.itemsize)))
        with torch.inference_mode():
            weight = torch.full((n, k), 0.01, dtype=dtype)
            self.copies = [Dense(weight.clone()) for _ in range(count)]
            self._rows = {m: _GemmJob(self, torch.full((m, k), 0.5, dtype=dtype)) for m in GEMM_ROWS}

    def row(self, m: int) -> _GemmJob:
        return self._rows[m]


def _copy_bandwidth(size: int = 128 * 2**20) -> float:
    """Bytes per second, read plus written, of a copy that no cache holds."""
    source = torch.ones(size, dtype=torch.uint8)
    target = torch.empty_like(source)
    target.copy_(source)
    begin = time.perf_counter()
    target.copy_(source)
    return 2 * size / (time.perf_counter() - begin)


def _drift(samples: Sequence[Sequence[float]]) -> float:
    """Relative standard deviation, between rounds, of the middle of all steps' times over their own lower quartile."""
    rounds: dict[int, list[float]] = {}
    for times in samples:
        own = quantile(sorted(times), 0.25)
        for i, seconds in enumerate(times):
            rounds.setdefault(i, []).append(seconds / own)
    middles = [quantile(sorted(r), 0.5) for r in rounds.values() if len(r) * 2 >= len(samples)]
    if len(middles) < 2:
        return 0.05  # one round says nothing about itself
    mean = sum(middles) / len(middles)
    return min(0.3, (sum((m - mean) ** 2 for m in middles) / (len(middles) - 1)) ** 0.5 / mean)


# --- the loop around the executor -----------------------------------------------------------------


class _Nothing:
    """An executor that computes nothing, so that what is left is the loop."""

    def __init__(self) -> None:
        self.row = RowResult(tokens=(0,))
        self.none = RowResult()

    def admit(self, request: Request, seqs: tuple[tuple[str, int], ...]) -> None: ...
    def close(self) -> None: ...

    def execute(self, plan: StepPlan) -> StepResult:
        return StepResult(tuple(self.none if r.need is Need.NONE else self.row for r in plan.rows), 1e-9)


def _time_loop(vocab_size: int, registry: Registry) -> list[LoopTiming]:
    scheduler, cache = registry.get("scheduler", "continuous"), registry.get("kv_cache", "paged")
    samples: dict[int, list[float]] = {1: [], 8: [], 32: []}
    steps = 64
    params = SamplingParams(max_tokens=steps, ignore_eos=True)
    for _ in range(5):
        for rows, times in samples.items():
            limits = Limits(max_num_seqs=rows, max_num_batched_tokens=2048, max_model_len=256, num_blocks=rows * 16)
            core = Core(scheduler(), cache(), limits)
            events = [Submit(Request(id=f"l{i}", prompt=range(i, i + 16), params=params)) for i in range(rows)]
            recorder = Recorder("engine", {}, {}, 1.0)
            begin = time.perf_counter()
            drive(core, _Nothing(), _Quiet(events), time.perf_counter, lambda out, now: None, recorder)
            times.append((time.perf_counter() - begin) / steps)
    return [LoopTiming(rows, Timing.of(times)) for rows, times in samples.items()]


class _Quiet(LocalInbox):
    """A closed inbox: waiting for more returns at once."""

    def wait(self, seconds: float | None) -> None:
        return


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
