"""`twinfer simulate` with fleet options: the same record, a line for each replica, and mistakes in the words of the command line."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

SIM = ("simulate", "--model", "llama-3.1-8b", "--device", "h100-sxm", "--requests", "12", "--rate", "40",
       "--input-len", "64", "--output-len", "8")  # fmt: skip


def test_a_fleet_is_predicted_and_stored(cli: Callable, tmp_path: Path) -> None:
    record = cli(*SIM, "--replicas", "3", "--router", "least_loaded:by=tokens", "--runs-dir", tmp_path, "--json").json
    assert [r["replica"] for r in record["replicas"]] == [0, 1, 2]
    assert record["num_completed"] == 12 and record["replica_seconds"] > 0
    assert record["config"]["fleet"] == {
        "replicas": 3, "router": {"name": "least_loaded", "options": {"by": "tokens"}},
    }  # fmt: skip
    from twinfer.core.run_store import RunStore

    stored = RunStore(tmp_path).load(record["id"])
    assert {s.replica for s in stored.steps} == {0, 1, 2} and {r.replica for r in stored.requests} == {0, 1, 2}
    assert stored.metrics == record["metrics"]


def test_people_get_a_line_for_each_replica(cli: Callable) -> None:
    out = cli(*SIM, "--prefill-replicas", "1", "--decode-replicas", "2", "--decode", "max_num_seqs=8", "--kv-bandwidth",
              "20GB", "--no-save").out  # fmt: skip
    lines = [line.split() for line in out.splitlines()]
    assert [line[1] for line in lines if line[:1] in (["0"], ["1"], ["2"])] == ["prefill", "decode", "decode"]
    assert "outputs do not add up to the fleet's" in out
    assert "KV handed over" in out and "20 GB/s per replica" in out
    assert "llama-3.1-8b on 1 prefill + 2 decode x h100-sxm, continuous" in out


def test_the_title_says_what_was_configured(cli: Callable) -> None:
    sim = ("simulate", "--model", "llama-3.1-70b", "--device", "h100-sxm", "--requests", "4", "--input-len", "64",
           "--output-len", "8", "--no-save")  # fmt: skip
    out = cli(*sim, "--tp", "4", "--quant", "fp8", "--kv-dtype", "fp8", "--speculator", "eagle", "--replicas", "2",
              "--router", "prefix_aware").out  # fmt: skip
    assert "llama-3.1-70b on 2 x 4 h100-sxm (tp 4, fp8, eagle, fp8 KV, prefix_aware), continuous + paged" in out


def test_bands_of_latencies_and_traffic_above_capacity_are_said(cli: Callable) -> None:
    words = ("simulate", "--model", "llama-3.1-8b", "--device", "l4", "--requests", "120", "--no-save")
    out = cli(*words, "--rate", "20").out
    assert "traffic: above capacity: " in out
    lines = [line.split() for line in out.splitlines()]
    assert len([line for line in lines if line[:3] == ["80", "%", "band"] and line.count("to") == 2]) == 4
    assert "above capacity" not in cli(*words, "--rate", "0.5").out


@pytest.mark.parametrize("traffic", [("--concurrency", "24"), ("--rate", "100")], ids=["closed", "open"])
def test_rows_that_are_the_limit_are_said_with_a_value_that_helps(cli: Callable, traffic: tuple[str, ...]) -> None:
    words = ("simulate", "--model", "llama-3.1-8b", "--device", "h100-sxm", "--requests", "96", "--input-len", "64",
             "--output-len", "32", "--no-save", "--json", *traffic)  # fmt: skip
    few = cli(*words, "--max-num-seqs", "4").json
    found = re.search(r"--max-num-seqs (\d+)", few["reasons"]["rows"])
    assert found is not None
    more = cli(*words, "--max-num-seqs", found[1]).json
    assert "rows" not in more["reasons"]
    assert more["output_throughput"] > 1.5 * few["output_throughput"] and more["ttft"]["p50"] < few["ttft"]["p50"]


@pytest.mark.parametrize("fleet", [(), ("--replicas", "2")], ids=["alone", "fleet"])
def test_traffic_above_capacity_is_in_the_document_and_in_the_store(
    cli: Callable, tmp_path: Path, fleet: tuple[str, ...]
) -> None:
    from twinfer.core.run_store import RunStore

    words = ("simulate", "--model", "llama-3.1-8b", "--device", "l4", "--requests", "120", *fleet)
    first, again = (cli(*words, "--rate", "40", "--runs-dir", tmp_path, "--json").json for _ in range(2))
    assert first["reasons"]["traffic"].startswith("above capacity: ") and again["reasons"] == first["reasons"]
    assert RunStore(tmp_path).load(first["id"]).reasons == first["reasons"]
    assert "traffic" not in cli(*words, "--rate", "0.5", "--no-save", "--json").json["reasons"]


def test_failures_and_the_autoscaler_are_shown(cli: Callable) -> None:
    out = cli(*SIM, "--replicas", "2", "--fail", "0@0.05", "--load-bandwidth", "1000GB", "--no-save").out
    assert "failures" in out and "until a replica serves" in out
    scaled = cli(*SIM, "--max-replicas", "3", "--target-requests", "1", "--scale-interval", "0.05", "--boot-time", "0.01",
                 "--load-bandwidth", "1000GB", "--no-save", "--json").json  # fmt: skip
    assert scaled["num_replicas"] == 3


def test_without_fleet_options_nothing_changes(cli: Callable) -> None:
    record = cli(*SIM, "--no-save", "--json").json
    assert "replicas" not in record and "fleet" not in record["config"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--replicas", "0"), ("--replicas",)),
        (("--prefill-replicas", "0", "--decode-replicas", "1"), ("--prefill-replicas=0",)),
        (("--router", "nearest"), ("--router", "round_robin")),
        (("--prefill-replicas", "2"), ("--prefill-replicas", "--decode-replicas")),
        (("--replicas", "2", "--prefill-replicas", "2", "--decode-replicas", "1"), ("--prefill-replicas",)),
        (("--decode", "tp=2"), ("--decode", "--decode-replicas")),
        (("--decode-replicas", "1", "--decode", "cake=2"), ("--decode", "cake", "tp")),
        (("--decode-replicas", "1", "--decode", "tp=zero"), ("--tp", "zero")),
        (("--kv-overlap",), ("--kv-overlap", "--decode-replicas")),
        (("--kv-bandwidth", "fast"), ("--kv-bandwidth", "fast")),
        (("--fail", "later"), ("--fail", "REPLICA@SECONDS")),
        (("--fail", "3@1"), ("--fail", "3@1")),
        (("--target-busy", "0.5"), ("--target-busy", "--max-replicas")),
        (("--max-replicas", "2"), ("--target-requests",)),
        (("--max-replicas", "2", "--target-busy", "7"), ("--target-busy",)),
        (("--mtbf", "-1"), ("--mtbf",)),
        (("--host-tier-bytes", "1MB"), ("--host-tier-bytes", "256 tokens", "--tier-block")),
        (("--shared-tier-bytes", "1MB"), ("--shared-tier-bytes", "256 tokens")),
    ],
)
def test_mistakes_are_named(cli: Callable, options: tuple[str, ...], words: tuple[str, ...]) -> None:
    cli(*SIM, *options, "--no-save").is_error(*words)


def test_a_real_run_has_no_fleet(cli: Callable) -> None:
    ran = cli("run", "--model", "smollm2-135m", "--replicas", "2")
    assert ran.code == 2 and "--replicas" in ran.err


def test_a_mistake_that_shows_within_a_fleet_is_the_one_of_a_single_engine(cli: Callable) -> None:
    asked = (*SIM, "--op-time-model", "calibrated", "--no-save")
    for fleet in ((), ("--replicas", "2"), ("--mtbf", "5")):
        cli(*asked, *fleet).is_error("--op-time-model='calibrated'", "no model can time", "add roofline")
