"""Times this machine by running the engine itself: what calibration knows, it knows from here.

* steps (`measure_steps.py`): the engine as it is loaded for a run, its executor profiled on a design of decode, prefill,
  chunked and mixed steps, so every op is timed where it really runs, by whatever kernels the format has;
* gemms (`measure_products.py`): the format's linear on a generic grid of shapes, for models other than the measured one;
* runs (`measure_runs.py`): a few short workloads through the whole engine, for the loop around the steps.

Invariants
* Repeats are interleaved: every timing is spread over the whole measurement, so a slow minute of the
  machine widens all spreads instead of bending one table. What is cheap comes in three rounds at least, even where the
  first took all the time. Runs come between the steps of a round, each with the machine's pace at its moment.
* Stops at the next step after `should_stop` says so (`MeasurementStopped`), and writes no file.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch

from twinfer.core.catalog import locate_weights, resolve_spec
from twinfer.core.config import Choice, EngineConfig
from twinfer.core.dtypes import canonical_dtype
from twinfer.core.errors import ConfigError, ModelError, TwinferError
from twinfer.core.host import cpu_name, packed_products
from twinfer.core.measured import GemmTiming, Measured, Timing, quantile, remedy
from twinfer.core.registry import Registry, default_registry
from twinfer.core.runtime.loading import Engine, load_engine
from twinfer.core.runtime.measure_products import GemmJob, copy_bandwidth, grid_of
from twinfer.core.runtime.measure_runs import RUNS, Served, served
from twinfer.core.runtime.measure_steps import BLOCK, Bench, StepJob, designs_of, drift_of

_MORE = 1.3  # of the time of the first round: that of all that has to be, where the first took all the time
_PATIENCE = 4  # budgets that timing everything once may take
_ROUNDS = 3  # of what is cheap, at least: one visit says nothing about the machine's other moments

OnProgress = Callable[[float, str], None]
ShouldStop = Callable[[], bool]


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
    `max_rounds` rounds, later where not everything has been timed once, and what is cheap three times, by then.

    Raises ConfigError for a budget too small to time everything once, as soon as that is foreseen, and for a format that the engine refuses,
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
        bench = Bench(engine)
        grid = grid_of(engine, registry)
        found = Measured(
            model=model, dtype=engine.setup.model.dtype, quantizer="" if quantizer is None else str(quantizer),
            kv_dtype=engine.setup.model.kv_dtype, fingerprint=fingerprint(),
        )  # fmt: skip
        report(0.05, "warming up")
        bench.reference.time(5)
        del bench.reference.moments[:]
        runs: list[tuple[Served, float]] = []  # with the seconds of the reference step around it
        jobs: list[StepJob | GemmJob] = [*bench.jobs, *grid]
        copies: list[float] = []
        rounds = 0
        start, whole, done, weight = time.perf_counter(), budget_s, 0, sum(job.weight for job in jobs)
        once = 0.0  # seconds until everything will have been timed once, when that is known
        share = budget_s / 120  # of the time, for one job over all rounds, before it is skipped
        while rounds < max_rounds and (rounds < _ROUNDS or time.perf_counter() < deadline):
            again = rounds == 2 and deadline - time.perf_counter() > 0.3 * budget_s  # the runs, when there is time
            spread = dict(zip(_spread_over(len(jobs)), RUNS, strict=True)) if rounds == 0 or again else {}
            for at, job in enumerate(jobs):
                check()
                if at in spread:
                    before = bench.reference.time(3)
                    run = served(engine, spread[at], registry, check)
                    runs.append((run, quantile(sorted(before + bench.reference.time(3)), 0.5)))
                left = deadline - time.perf_counter()
                if not rounds and max(once, budget_s - left) > _PATIENCE * budget_s:
                    raise ConfigError(
                        "--budget", budget_s, "this machine is too busy or too slow to time every step once",
                        f"{remedy(torch.get_num_threads())}; or give a longer budget",
                    )  # fmt: skip
                cheap = job.seconds * rounds <= share
                needed = rounds == 0 or (rounds < _ROUNDS and cheap)
                if not needed and (job.seconds > left or (rounds >= _ROUNDS and not cheap)):
                    continue  # dear steps are repeated less often than cheap ones
                job.run()
                if not rounds:  # how long it all takes on this machine shows while everything is timed once
                    done += job.weight
                    took = (time.perf_counter() - start) * weight / done
                    whole = max(budget_s, start - begin + _MORE * took)
                    if done > weight / 4:  # the first few say little about the rest
                        once = start - begin + took
                fraction = (time.perf_counter() - begin) / whole
                report(min(0.99, max(0.05, fraction)), f"round {rounds + 1}: {job.label}")
            copies.append(copy_bandwidth())
            rounds += 1
        found.steps = [job.timing() for job in bench.jobs]
        found.gemms = [GemmTiming(job.n, job.k, len(job.x), Timing.of(job.samples)) for job in grid if job.samples]
        usual = quantile(sorted(seconds for _, seconds in bench.reference.moments), 0.5)
        found.runs = [run.timing(around / usual) for run, around in runs]
        found.copy_bandwidth = max(copies)
        found.records = not bench.inner.forward.why_not
        found.drift, found.jitter = drift_of(bench.reference.moments)
    finally:
        engine.close()
    found.seconds = time.perf_counter() - begin
    report(1.0, f"{rounds} rounds in {found.seconds:.0f} s")
    return found


def _spread_over(jobs: int) -> list[int]:
    """Between which of so many jobs the short runs come: as far from each other as from both ends twice."""
    return [jobs * (2 * i + 1) // (2 * len(RUNS)) for i in range(len(RUNS))]


def _load(
    model: str, dtype: str, quantizer: Choice | None, kv_dtype: str, registry: Registry, on_phase: Callable[[str], None]
) -> Engine:
    """The engine as a run of this format has it, with a pool for the largest step."""
    spec = resolve_spec(model)
    if locate_weights(model) is None:
        raise ModelError(f"{model}: no weights on this machine; give a directory or a GGUF file")
    num_blocks = max(sum(-(-keys // BLOCK) for _, keys in design) for design in designs_of(spec.max_context))
    config = EngineConfig(
        model=model, device="cpu", dtype=dtype, quantizer=quantizer, kv_dtype=kv_dtype,
        kv_cache=Choice(name="paged", options={"block_size": BLOCK, "free_windows": False}), num_kv_blocks=num_blocks + len(RUNS),
        max_model_len=min(spec.max_context, 2048),
    )  # fmt: skip
    return load_engine(config, registry, on_phase=on_phase)


def fingerprint() -> dict[str, object]:
    """What the timings hold for: another CPU, torch, number of threads or kind of packed products needs new ones."""
    return {
        "cpu": cpu_name(), "cores": os.cpu_count(), "threads": torch.get_num_threads(), "torch": torch.__version__,
        "products": packed_products(),
    }  # fmt: skip


__all__ = ["MeasurementStopped", "fingerprint", "measure"]
