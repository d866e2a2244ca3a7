"""How close predictions come to real runs: held-out workloads, run for real and predicted, side by side.

The engine is passed in (`core.runtime.run.run_engine`), so this module stays free of torch.

Invariants
* The workloads share no prompt length, batch or context with the steps that calibration times.
* Real runs of all workloads are repeated in turn; each metric is the middle of its repeats, and the
  spread of the repeats is reported with it: an error below it means nothing.
* Nothing is fitted here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from twinfer.core.config import EngineConfig
from twinfer.core.records import RunRecord
from twinfer.core.registry import Registry
from twinfer.core.workload import Workload
from twinfer.simulator.run import flat, simulate

RunReal = Callable[[EngineConfig, Workload], RunRecord]

METRICS = ("output_throughput", "tpot.p50", "ttft.p50")
TARGET = 0.15
"""Largest relative error of throughput and TPOT on this machine (the foundation's goal)."""


@dataclass(frozen=True, slots=True)
class Case:
    """A held-out workload: `batch` requests at once, at most `batch` in a step."""

    name: str
    input_len: int
    output_len: int
    batch: int

    def config(self, model: str, dtype: str) -> EngineConfig:
        return EngineConfig(model=model, dtype=dtype, max_num_seqs=self.batch)

    @property
    def workload(self) -> Workload:
        return Workload(num_requests=self.batch, input_len=self.input_len, output_len=self.output_len, seed=11)


CASES = (
    Case("short prompt, batch 1", 50, 72, 1),
    Case("short prompt, batch 16", 50, 72, 16),
    Case("long prompt, batch 1", 700, 72, 1),
    Case("long prompt, batch 16", 700, 72, 16),
)


@dataclass(frozen=True, slots=True)
class Line:
    """One metric of one case. `spread`: (largest - smallest) / middle of the real repeats."""

    case: str
    metric: str
    real: float
    predicted: float
    spread: float
    band: tuple[float, float] | None

    @property
    def error(self) -> float:
        return self.predicted / self.real - 1

    @property
    def inside(self) -> bool | None:
        return None if self.band is None else self.band[0] <= self.real <= self.band[1]


def fidelity(
    run_real: RunReal,
    model: str = "smollm2-135m",
    dtype: str = "float32",
    repeats: int = 3,
    cases: Sequence[Case] = CASES,
    registry: Registry | None = None,
    report: Callable[[str], None] = lambda message: None,
) -> list[Line]:
    """Predict every case, then run each `repeats` times for real, in turn."""
    predicted = {c.name: simulate(c.config(model, dtype), c.workload, registry) for c in cases}
    real: dict[str, list[RunRecord]] = {c.name: [] for c in cases}
    for repeat in range(repeats):
        for case in cases:
            report(f"run {repeat + 1} of {repeats}: {case.name}")
            real[case.name].append(run_real(case.config(model, dtype), case.workload))
    lines = []
    for case in cases:
        ours = predicted[case.name]
        guesses = flat(ours.metrics)
        seen = [flat(r.metrics) for r in real[case.name]]
        for metric in METRICS:
            values = sorted(s[metric] for s in seen)
            middle = values[len(values) // 2]
            lines.append(
                Line(case.name, metric, middle, guesses[metric], (values[-1] - values[0]) / middle,
                     ours.intervals.get(metric))
            )  # fmt: skip
    return lines


def table(lines: Sequence[Line]) -> str:
    """The lines as text, errors beyond the target marked."""
    rows = [
        f"{'workload':<24} {'metric':<18} {'real':>9} {'predicted':>9} {'error':>7} {'80 % band':>17} {'repeats':>8}"
    ]
    for line in lines:
        band = "" if line.band is None else f"{line.band[0]:.4g}-{line.band[1]:.4g}{'' if line.inside else ' !'}"
        mark = " *" if abs(line.error) > TARGET and line.metric != "ttft.p50" else ""
        rows.append(
            f"{line.case:<24} {line.metric:<18} {line.real:9.4g} {line.predicted:9.4g} {line.error:+7.1%} "
            f"{band:>17} {line.spread:8.1%}{mark}"
        )
    rows.append(f"*: beyond {TARGET:.0%}.  !: real value outside the band.  repeats: spread of the real runs.")
    return "\n".join(rows)
