"""`twinfer explain`: the lines add up to what a simulated step costs, and bad rows are refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

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


def test_a_cpu_computes_in_float32_as_in_simulate(cli: Callable, tmp_path: Path) -> None:
    sizes = ("--model", "smollm2-135m", "--device", "auto", "--json")
    explained = cli("explain", *sizes, "--decode", "1x1000").json
    simulated = cli(
        "simulate", *sizes, "--requests", "1", "--input-len", "999", "--output-len", "2", "--runs-dir", tmp_path
    ).json
    assert {op["dtype"] for op in explained["ops"] if op["op"] == "down_proj"} == {"float32"}
    assert simulated["metrics"]["itl"]["mean"] == pytest.approx(explained["seconds"], rel=0.02)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("llama-3.1-70b", "h100-sxm"), "one request of 1024 tokens needs 0.31 GiB, 0.00 GiB is left for KV (weights take 131.42 GiB"),
        (("llama-3.1-8b", "h100-sxm", "--decode", "64x20000"), "64 sequences of 20,000 tokens in the mean are in the step, 22.8 fit; use 22, or raise --tp"),
        (("llama-3.1-8b", "h100-sxm", "--prefill", "8@2000000"), "one request of 2000008 tokens needs"),
    ],
)  # fmt: skip
def test_a_step_that_does_not_fit_is_timed_and_said_not_to_fit(
    cli: Callable, words: tuple[str, ...], said: str
) -> None:
    model, device, *rows = words
    ran = cli("explain", "--model", model, "--device", device, *rows)
    assert ran.code == 0 and f"does not fit on {device}: {said}" in ran.out and "down_proj" in ran.out
    found = cli("explain", "--model", model, "--device", device, *rows, "--json").json
    assert found["seconds"] > 0 and not found["fits"] and found["problem"].startswith(said)


def test_a_step_that_fits_says_nothing_of_it(cli: Callable) -> None:
    assert "fit" not in cli(*STEP).out
    found = cli(*STEP, "--json").json
    assert found["fits"] and "problem" not in found


def test_kv_of_another_format_is_read_faster(cli: Callable) -> None:
    words = ("explain", "--model", "llama-3.1-8b", "--device", "h100-sxm", "--decode", "8x8192", "--json")
    plain, short = (
        {op["op"]: op for op in cli(*words, "--kv-dtype", kv).json["ops"]}["attention"] for kv in ("auto", "fp8")
    )
    assert 0.5 * plain["bytes"] < short["bytes"] < 0.6 * plain["bytes"] and short["seconds"] < plain["seconds"]
    cli(*words, "--kv-dtype", "fp99").is_error("--kv-dtype='fp99'")
