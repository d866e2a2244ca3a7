"""`twinfer explain`: the lines add up to what a simulated step costs, and bad rows are refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from twinfer.core.catalog import resolve_spec
from twinfer.core.device import load_device
from twinfer.core.registry import Registry
from twinfer.core.work import RowShape, StepShape, step_ops
from twinfer.simulator.op_time import build_chain
from twinfer.simulator.step_time import StepTimer

STEP = ("explain", "--model", "llama-3.1-8b", "--device", "h100-sxm", "--tp", "2", "--prefill", "2x300@100",
        "--decode", "16x1000")  # fmt: skip


@pytest.mark.parametrize("overlap", [False, True])
def test_the_lines_are_what_a_step_costs(cli: Callable, overlap: bool) -> None:
    ran = cli(*STEP, "--json", *(("--max-outstanding", "2") if overlap else ()))
    assert ran.code == 0
    found = json.loads(ran.out)
    registry = Registry(entry_points=False)
    spec, chain = resolve_spec("llama-3.1-8b"), build_chain((), load_device("h100-sxm", registry), registry)
    shape = StepShape((*(RowShape(300, 400),) * 2, *(RowShape(1, 1000),) * 16), 18)
    cost = StepTimer(lambda s: step_ops(spec, s, 2), chain, overlap=overlap).exact(shape)
    assert found["seconds"] == pytest.approx(cost.seconds) and found["sigma"] == pytest.approx(cost.sigma)
    ops: dict[str, float] = {}
    for line in found["ops"]:
        ops[line["op"]] = ops.get(line["op"], 0.0) + line["seconds"]
    assert ops == pytest.approx(dict(cost.ops))


def test_the_table_names_rules_and_the_chain(cli: Callable) -> None:
    ran = cli(*STEP, "--chain")
    assert ran.code == 0
    assert "all_reduce" in ran.out and "roofline: " in ran.out and "calibrated: cannot say" in ran.out


@pytest.mark.parametrize(
    ("option", "text"), [("--decode", "4x"), ("--decode", "5@3"), ("--prefill", "0x7"), ("--prefill", "a")]
)
def test_bad_rows_are_refused_by_name(cli: Callable, option: str, text: str) -> None:
    ran = cli("explain", "--model", "llama-3.1-8b", "--device", "h100-sxm", option, text)
    assert ran.code == 2 and ran.err.startswith(f"error: {option}") and text in ran.err


def test_ranks_that_cannot_share_the_model_are_refused_as_in_simulate(cli: Callable) -> None:
    cli("explain", "--model", "llama-3.1-8b", "--device", "h100-sxm", "--tp", "3").is_error(
        "--tp=3", "32 attention heads"
    )
