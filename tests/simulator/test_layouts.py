"""Predictions of replicas laid over several devices."""

from __future__ import annotations

import pytest

from twinfer.core.config import EngineConfig
from twinfer.core.records import RunRecord
from twinfer.core.registry import Registry
from twinfer.core.workload import Workload
from twinfer.simulator.run import simulate

REGISTRY = Registry(entry_points=False)
LOAD = Workload(num_requests=16, rate=float("inf"), input_len=2000, output_len=16)


def predicted(**layout: int) -> RunRecord:
    config = EngineConfig(model="mixtral-8x7b", device="h100-sxm", **layout)
    return simulate(config, LOAD, REGISTRY)


@pytest.mark.parametrize(
    ("layout", "sent"),
    [({"tp": 4}, {"all_reduce", "all_gather"}), ({"tp": 2, "pp": 2}, {"all_reduce", "all_gather", "hand_over"}),
     ({"tp": 2, "cp": 2}, {"all_reduce", "all_gather", "cp_merge", "cp_queries"}),
     ({"dp": 4, "ep": 4}, {"moe_dispatch", "moe_combine"}), ({"dp": 4}, {"moe_gather", "moe_scatter"})],
)  # fmt: skip
def test_every_layout_of_four_devices_is_simulated(layout: dict[str, int], sent: set[str]) -> None:
    record = predicted(**layout)
    assert record.complete and len(record.requests) == 16
    names = {name for step in record.steps for name in step.ops}
    comm = {n for n in names if n.startswith(("all_", "moe_", "cp_", "hand_", "reduce_", "hidden_"))}
    assert comm == sent
