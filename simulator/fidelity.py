"""How close predictions come to real runs: held-out workloads, run for real and predicted, side by side.

The engine is passed in (`core.runtime.run.run_engine`), so this module stays free of torch.

Invariants
* The four workloads share no prompt length with the steps that calibration times, and nothing is fitted here.
* Real runs of all workloads and formats are repeated in turn; each metric is the middle of its repeats, and their spread
  is reported with it: an error below it means nothing.
* Where the machine is calibrated for the comparison, that is done before and after each repeat of a format. The prediction of
  a repeat is the mean of those by either tables, that of all the middle of the repeats: tables and runs meet the same slow
  and fast minutes of a shared machine.
* With `paced`, a short run of other lengths before and after each run says how fast the machine is at that moment, op by op
  (`attribute.correction`); the prediction is the mean of those with either. The run itself is not looked at.
* The noise floor of the machine comes from the repeats themselves: what identical runs differ by.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from twinfer.core.config import Choice, EngineConfig
from twinfer.core.device import DeviceSpec, load_device
from twinfer.core.records import RunRecord
from twinfer.core.registry import Registry, default_registry
from twinfer.core.workload import Workload
from twinfer.simulator.attribute import correction, with_correction, without_corrections
from twinfer.simulator.bands import flat
from twinfer.simulator.replay import replay
from twinfer.simulator.run import simulate

RunReal = Callable[[EngineConfig, Workload], RunRecord]

TARGETS: Mapping[str, float] = {
    "output_throughput": 0.05, "ttft.p50": 0.08, "ttft.p95": 0.15, "tpot.p50": 0.08, "tpot.p95": 0.15,
}  # fmt: skip
"""Metric -> largest relative error on a quiet machine."""


@dataclass(frozen=True, slots=True)
class Case:
    """A held-out workload on an engine of at most `batch` sequences in a step."""

    name: str
    workload: Workload
    batch: int

    def config(self, model: str, dtype: str, quantizer: str = "") -> EngineConfig:
        chosen = Choice.model_validate(quantizer) if quantizer else None
        return EngineConfig(model=model, dtype=dtype, quantizer=chosen, max_num_seqs=self.batch)


_LONE = 5  # requests of batch 1, one after another: identical single prompts differ by a quarter on a shared machine


def _alike(name: str, input_len: int, batch: int) -> Case:
    requests = batch if batch > 1 else _LONE
    work = Workload(num_requests=requests, input_len=input_len, output_len=72, seed=11, concurrency=batch)
    return Case(name, work, batch)


CASES = (
    _alike("short prompt, batch 1", 50, 1),
    _alike("short prompt, batch 16", 50, 16),
    _alike("long prompt, batch 1", 700, 1),
    _alike("long prompt, batch 16", 700, 16),
)


def mixed(path: Path, num_requests: int = 200) -> Case:
    """Requests of 16 to 512 tokens with answers of 8 to 128, all at once; their lengths are written to `path` (.jsonl)."""
    rng = random.Random(0)
    rows = [{"prompt_len": rng.randint(16, 512), "output_len": rng.randint(8, 128)} for _ in range(num_requests)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return Case(f"{num_requests} mixed requests", Workload(trace=str(path), seed=12), 64)


def device_now(run_real: RunReal, config: EngineConfig, registry: Registry, known: DeviceSpec) -> DeviceSpec:
    """This machine as fast as it is at the moment: what is `known`, corrected by a short run as `calibrate --from` does."""
    few = min(24, max(4, 2 * config.max_num_seqs))
    seen = run_real(
        config, Workload(num_requests=few, input_len=110, output_len=24, lengths="uniform", spread=0.6, seed=13)
    )
    device = without_corrections(known)
    return with_correction(device, correction(replay(seen, registry=registry, device=device)))


@dataclass(frozen=True, slots=True)
class _Pair:
    """A prediction (or the mean of two) and the run: metrics by flat name; `bands` of the prediction."""

    predicted: Mapping[str, float]
    bands: Mapping[str, tuple[float, float]]
    real: Mapping[str, float]

    @classmethod
    def of(cls, predicted: Sequence[RunRecord], real: RunRecord) -> _Pair:
        guesses, intervals = [flat(p.metrics) for p in predicted], [p.intervals for p in predicted]
        bands = {
            metric: (_mean([i[metric][0] for i in intervals]), _mean([i[metric][1] for i in intervals]))
            for metric in intervals[0]
        }
        return cls({metric: _mean([g[metric] for g in guesses]) for metric in TARGETS}, bands, flat(real.metrics))


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


@dataclass(frozen=True, slots=True)
class Line:
    """One metric of one case. `spread`: (largest - smallest) / middle of the real repeats."""

    case: str
    metric: str
    real: float
    predicted: float
    spread: float
    band: tuple[float, float] | None
    format: str = ""
    repeats: tuple[float, ...] = ()

    @property
    def error(self) -> float:
        return self.predicted / self.real - 1

    @property
    def inside(self) -> bool | None:
        return None if self.band is None else self.band[0] <= self.real <= self.band[1]

    @property
    def target(self) -> float:
        return TARGETS.get(self.metric, 0.15)


def fidelity(
    run_real: RunReal,
    model: str = "smollm2-135m",
    dtype: str = "float32",
    repeats: int = 3,
    cases: Sequence[Case] = CASES,
    registry: Registry | None = None,
    report: Callable[[str], None] = lambda message: None,
    quantizers: Sequence[str] = ("",),
    should_stop: Callable[[], bool] = lambda: False,
    calibrate: Callable[[str], None] | None = None,
    paced: bool = False,
) -> list[Line]:
    """Predict every case in every format and run it for real, `repeats` times in turn.

    quantizers: the formats, "" for none.  should_stop: asked before each run; the lines are then of whole rounds.
    calibrate: measures the machine in one of the formats, before and after each repeat of its cases; None leaves it as it is
    known.  paced: predict with the speed that short runs before and after each run had.
    """
    registry = registry or default_registry()

    def looked_at(quantizer: str) -> DeviceSpec:
        if calibrate is not None:
            calibrate(quantizer)
        return load_device(cases[0].config(model, dtype, quantizer).device, registry)

    rounds: list[dict[tuple[str, str], _Pair]] = []
    known: dict[str, DeviceSpec] = {}  # by format
    for repeat in range(repeats):
        done: dict[tuple[str, str], _Pair] = {}
        for quantizer in quantizers:
            runs: list[tuple[Case, list[DeviceSpec], RunRecord]] = []
            where = f"run {repeat + 1} of {repeats}: {quantizer or dtype}"
            for case in cases:
                if should_stop():
                    break
                if quantizer not in known:
                    known[quantizer] = looked_at(quantizer)
                config = case.config(model, dtype, quantizer)
                looks = [device_now(run_real, config, registry, known[quantizer])] if paced else [known[quantizer]]
                real = run_real(config, case.workload)
                if paced:
                    looks.append(device_now(run_real, config, registry, known[quantizer]))
                report(f"{where}, {case.name}: {real.metrics['output_throughput']:.4g} tok/s")
                runs.append((case, looks, real))
            if len(runs) < len(cases):
                break
            if calibrate is not None and not should_stop():
                known[quantizer] = looked_at(quantizer)
            for case, looks, real in runs:
                if calibrate is not None and not paced:
                    looks.append(known[quantizer])
                config = case.config(model, dtype, quantizer)
                ours = [simulate(config, case.workload, registry, device) for device in looks]
                pair = done[quantizer, case.name] = _Pair.of(ours, real)
                shown = ", ".join(f"{m} {pair.real[m]:.4g} (predicted {pair.predicted[m]:.4g})" for m in TARGETS)
                report(f"{where}, {case.name}: {shown}")
        if len(done) < len(quantizers) * len(cases):
            break
        rounds.append(done)
    if not rounds:
        return []
    lines = []
    for quantizer in quantizers:
        for case in cases:
            pairs = [done[quantizer, case.name] for done in rounds]
            for metric in TARGETS:
                values = [pair.real[metric] for pair in pairs]
                real_value, predicted = middle(values), middle([pair.predicted[metric] for pair in pairs])
                bands = [pair.bands[metric] for pair in pairs if metric in pair.bands]
                band = (middle([low for low, _ in bands]), middle([high for _, high in bands])) if bands else None
                lines.append(
                    Line(case.name, metric, real_value, predicted, (max(values) - min(values)) / real_value, band,
                         quantizer or dtype, tuple(values))
                )  # fmt: skip
    return lines


def middle(values: Sequence[float]) -> float:
    """The median; of an even number, the upper one of the two in the middle."""
    return sorted(values)[len(values) // 2]


def noise_floor(lines: Sequence[Line]) -> tuple[float, float]:
    """(pooled standard deviation, largest range) of the throughput of identical runs, relative to their middle."""
    squares, freedom, widest = 0.0, 0, 0.0
    for line in lines:
        if line.metric == "output_throughput" and len(line.repeats) > 1:
            mean = math.fsum(line.repeats) / len(line.repeats)
            squares += math.fsum((x / mean - 1) ** 2 for x in line.repeats)
            freedom += len(line.repeats) - 1
            widest = max(widest, line.spread)
    return math.sqrt(squares / freedom) if freedom else math.nan, widest


def table(lines: Sequence[Line]) -> str:
    """The lines as text, errors beyond the target marked, with a summary."""
    rows = [
        f"{'format':<8} {'workload':<24} {'metric':<18} {'real':>9} {'predicted':>9} {'error':>7} {'80 % band':>17} "
        f"{'repeats':>8}"
    ]
    for line in lines:
        band = "" if line.band is None else f"{line.band[0]:.4g}-{line.band[1]:.4g}{'' if line.inside else ' !'}"
        mark = " *" if abs(line.error) > line.target else ""
        rows.append(
            f"{line.format:<8} {line.case:<24} {line.metric:<18} {line.real:9.4g} {line.predicted:9.4g} "
            f"{line.error:+7.1%} {band:>17} {line.spread:8.1%}{mark}"
        )
    limits = ", ".join(f"{metric} {share:.0%}" for metric, share in TARGETS.items())
    rows.append(f"*: beyond {limits}.  !: real value outside the band.  repeats: range of the real runs.")
    if lines:
        errors = sorted(abs(line.error) for line in lines)
        banded = [line for line in lines if line.band is not None]
        noise, widest = noise_floor(lines)
        rows.append(
            f"{len(lines)} metrics: median error {errors[len(errors) // 2]:.1%}, largest {errors[-1]:.1%}, "
            f"bias {math.fsum(line.error for line in lines) / len(lines):+.1%}; "
            f"{sum(abs(line.error) <= line.target for line in lines)} within their target, "
            f"{sum(bool(line.inside) for line in banded)} of {len(banded)} within the 80 % band"
        )
        rows.append(
            f"noise floor: throughput of identical runs has a standard deviation of {noise:.1%}, a range up to {widest:.1%}"
        )
    return "\n".join(rows)
