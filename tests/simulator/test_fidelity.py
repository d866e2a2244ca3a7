"""The fidelity table: with the simulator itself as the engine every error is zero; a slower engine is seen."""

from __future__ import annotations

import pytest

from twinfer.core.config import EngineConfig
from twinfer.core.records import RunRecord
from twinfer.core.registry import Registry
from twinfer.core.workload import Workload
from twinfer.simulator.fidelity import CASES, Line, fidelity, table
from twinfer.simulator.run import simulate

REGISTRY = Registry(entry_points=False)


def test_a_perfect_engine_has_no_error() -> None:
    seen: list[str] = []

    def run_real(config: EngineConfig, workload: Workload) -> RunRecord:
        return simulate(config, workload, REGISTRY)

    lines = fidelity(run_real, repeats=2, cases=CASES[:2], registry=REGISTRY, report=seen.append)
    assert len(seen) == 4 and len(lines) == 6
    assert all(line.error == 0 and line.spread == 0 and line.inside for line in lines)


def test_the_table_marks_what_is_beyond_the_target() -> None:
    lines = [
        Line("a", "output_throughput", 100.0, 120.0, 0.01, (90.0, 99.0)),
        Line("a", "tpot.p50", 0.05, 0.051, 0.01, None),
    ]
    text = table(lines)
    assert "+20.0%" in text and text.count(" *\n") == 1 and "90-99 !" in text
    assert lines[0].error == pytest.approx(0.2) and lines[0].inside is False
