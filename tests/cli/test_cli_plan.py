"""`twinfer plan`: one answer as text and JSON, a file that resumes, and everything a user can get wrong."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from twinfer.core.device import load_device, write_device

PLAN = ("plan", "--model", "llama-3.1-8b", "--device", "h100-sxm", "--tp", "1", "--max-num-batched-tokens", "1024",
        "--rate", "20", "--requests", "40", "--input-len", "400", "--output-len", "8", "--workers", "1")  # fmt: skip
SLO = ("--slo", "ttft.p90<=0.5")


def test_a_plan_in_json_and_where_it_lies(cli: Callable) -> None:
    found: dict[str, Any] = cli(*PLAN, *SLO, "--price", "h100-sxm=2", "--json").json
    (fleet,) = found["answer"]["fleets"]
    assert fleet["device"] == "h100-sxm" and fleet["cost_per_hour"] == 2 * fleet["num_devices"]
    assert fleet["values"]["ttft.p90"] <= 0.5 and found["complete"] is True
    assert "next limit" in found["answer"]["sentence"] or "no limit" in found["answer"]["sentence"]
    assert json.loads(Path(found["path"]).read_text())["answer"] == found["answer"]
    assert all("outcome" in p and "rejected" in p for p in found["points"])


def test_a_plan_in_words(cli: Callable, tmp_path: Path) -> None:
    done = cli(*PLAN, *SLO, "--out", tmp_path / "p.json")
    assert done.code == 0, done.err
    for word in ("The cheapest fleet", "h100-sxm", "US$/h", "goodput", "next limit", "traffic +20 %", "80 % band",
                 "price of h100-sxm:", "points in"):  # fmt: skip
        assert word in done.out, word
    assert done.out.count("1 x h100-sxm (256 rows, 1024 tokens a step)") >= 3  # the answer, and a line of both tables
    (row,) = (line for line in done.out.splitlines() if line.startswith(" * 1 x h100-sxm"))
    assert "kW of all" in done.out and any(limit in row for limit in ("TTFT p90: ", "memory: ", "none")), "in one line"
    assert "(as drawn, 20 were asked)" in done.out
    assert "twinfer simulate --model llama-3.1-8b --device h100-sxm " in done.out
    again = cli("plan", "--resume", tmp_path / "p.json", "--workers", "1")
    assert again.code == 0 and again.out == done.out


@pytest.mark.parametrize(
    "more",
    [
        ("--lengths", "uniform", "--spread", "0.5", "--seed", "7", "--quant", "fp8", "--scheduler", "continuous:chunk_size=256",
         "--try", "memory_fraction=0.8"),
        ("--speculator", "ngram", "--seed", "3"), ("--concurrency", "4"), ("--pools", "1:1", "--seeds", "1"),
        ("--rate", "400", "--max-num-seqs", "8", "--seeds", "1", "--requests", "30"),
        ("--turns", "2", "--think-time", "1", "--seeds", "1", "--requests", "16"),
    ],
    ids=["techniques", "guesses", "clients", "pools", "replicas", "sessions"],
)  # fmt: skip
def test_the_command_of_a_fleet_repeats_its_times(cli: Callable, more: tuple[str, ...]) -> None:
    dropped = {*more, "--rate"} if "--concurrency" in more else set(more)
    kept = [word for pair in zip(PLAN[1::2], PLAN[2::2], strict=True) if pair[0] not in dropped for word in pair]
    (fleet,) = cli("plan", *kept, *more, "--slo", "ttft.p90<=0.2", "--json").json["answer"]["fleets"]
    program, *words = shlex.split(fleet["command"])
    assert program == "twinfer"
    again = cli(*words, "--no-save", "--json").json
    for name in ("ttft.p50", "ttft.p90", "tpot.p50", "tpot.p99"):
        metric, _, statistic = name.partition(".")
        assert again[metric][statistic] == pytest.approx(fleet["values"][name], rel=1e-9), name


def test_a_trace_at_several_times_its_rate(cli: Callable, tmp_path: Path) -> None:
    rows = [f"2023-11-16 18:00:{i:02d}.0000000,300,6" for i in range(30)]
    (tmp_path / "t.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(rows) + "\n")
    plain = [
        a for a in PLAN if a not in ("--rate", "20", "--requests", "40", "--input-len", "400", "--output-len", "8")
    ]
    found = cli(*plain, *SLO, "--trace", tmp_path / "t.csv", "--rate-scale", "4", "--json").json
    assert found["question"]["workload"]["rate_scale"] == 4
    assert "at 4.14 requests/s" in found["answer"]["sentence"]  # 30 requests over 29 s / 4


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ((), ("--slo", "every fleet will do")), (("--slo", "ttft"), ("--slo", "METRIC.STATISTIC")),
        ((*SLO, "--tp", "two"), ("--tp", "not a number")), ((*SLO, "--device", "h1000"), ("--device", "h100")),
        ((*SLO, "--quant", "int3"), ("--quant", "known")), ((*SLO, "--kv-dtype", "fp99"), ("--kv-dtype",)),
        ((*SLO, "--price", "h100-sxm"), ("--price", "DEVICE=USD")), ((*SLO, "--price", "l4=1"), ("--price", "searched")),
        ((*SLO, "--try", "memory_fraction"), ("--try", "FIELD=VALUE")), ((*SLO, "--try", "colour=red"), ("--try", "colour")),
        ((*SLO, "--try", "memory_fraction=7"), ("--try='memory_fraction=7'", "too large")), ((*SLO, "--try", "device=l4"), ("--try",)),
        ((*SLO, "--price", "=1"), ("--price='=1'", "DEVICE=USD")), ((*SLO, "--price", "h1000=1"), ("--price='h1000=1'", "h100")),
        ((*SLO, "--workers", "0"), ("--workers",)), ((*SLO, "--workers", "99999"), ("--workers=99999", "1 to 256")),
        ((*SLO, "--rate", "1e-9"), ("--rate=1e-9", "after the first", "more come in a second")),
        ((*SLO, "--max-replicas", "0"), ("--max-replicas",)),
        ((*SLO, "--concurrency", "4"), ("--concurrency",)), ((*SLO, "--resume", "missing.json"), ("--resume",)),
        ((*SLO, "--stop-at-eos"), ("--stop-at-eos",)),
        ((*SLO, "--price", "h100-sxm=1", "--price", "h100=2"), ("--price", "before")),
        ((*SLO, "--try", "tp=4"), ("--try='tp=4'", "--tp")), ((*SLO, "--try", "dtype=3"), ("--try='dtype=3'",)),
        ((*SLO, "--speculator", "draft"), ("--speculator", "draft:model=NAME")), ((*SLO, "--pp", "33,64"), ("--pp=33", "32 layers")),
        ((*SLO, "--ep", "2"), ("--ep=2",)), ((*SLO, "--dp", "2"), ("--dp=2",)), ((*SLO, "--try", "num_kv_blocks=1"), ("--num-kv-blocks=1",)),
        ((*SLO, "--turns", "100"), ("--requests=40", "turns of one session", "--turns")),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(cli: Callable, more: tuple[str, ...], words: tuple[str, ...]) -> None:
    flags = set(more)
    kept = [word for pair in zip(PLAN[1::2], PLAN[2::2], strict=True) if pair[0] not in flags for word in pair]
    cli("plan", *kept, *more).is_error(*words)


def test_a_device_file_that_has_the_name_of_another_is_searched_as_itself(cli: Callable, tmp_path: Path) -> None:
    """Beside the one of that name, and at a price of its own."""
    spec = load_device("h100-sxm")
    slow = {name: peak / 3 for name, peak in spec.peak_flops.items()}
    shadow = write_device(spec.model_copy(update={"peak_flops": slow}), tmp_path / "shadow.json")
    both = cli(*PLAN, *SLO, "--device", shadow, "--price", f"{shadow}=1", "--price", "h100=2", "--json").json
    fleets = {f["device"]: f for f in both["answer"]["fleets"]}
    assert set(fleets) == {"h100-sxm", str(shadow)} and str(shadow) in fleets[str(shadow)]["label"]
    assert fleets[str(shadow)]["values"]["ttft.p50"] > 1.5 * fleets["h100-sxm"]["values"]["ttft.p50"]
    assert {name: f["price_per_hour"] for name, f in fleets.items()} == {"h100-sxm": 2, str(shadow): 1}


def test_only_a_question_that_is_all_mistakes_is_one(cli: Callable) -> None:
    found = cli(*PLAN, *SLO, "--speculator", "none", "--speculator", "draft", "--json").json
    assert found["answer"]["fleets"] and any("draft:model=NAME" in why for why in found["verdicts"].values())
    large = [word.replace("-8b", "-70b") for word in PLAN]
    assert cli(*large, *SLO, "--json").code == 3  # well formed, and too large for the device


def test_the_fields_to_try_are_those_that_are_taken(cli: Callable) -> None:
    words = cli(*PLAN, *SLO, "--try", "colour=red").err
    assert "memory_fraction" in words and "seed" not in words and "num_devices" not in words


def test_a_model_is_needed_and_a_resumed_question_is_not_asked_twice(cli: Callable, tmp_path: Path) -> None:
    cli("plan", *SLO).is_error("--model")
    cli("plan", "--resume", tmp_path / "x.json").is_error("--resume", "cannot be read")
    cli("plan", "--resume", tmp_path / "x.json", "--model", "llama-3.1-8b").is_error("--model", "whole question")
