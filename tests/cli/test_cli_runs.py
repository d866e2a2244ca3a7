"""`twinfer run`, `simulate` and `compare`: the fixed schema, stored runs, Ctrl-C, and everything a user can get wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from twinfer.cli import show
from twinfer.cli.show import comparison_table
from twinfer.core.compare import Comparison, MetricPair
from twinfer.core.run_files import RunStoreError
from twinfer.core.run_store import RunStore
from twinfer.simulator.plan_search import time_of

STATISTICS = {"mean", "p50", "p90", "p95", "p99"}
SIM = ("simulate", "--model", "llama-3.1-8b", "--device", "h100-sxm")
SMALL = ("--requests", "6", "--input-len", "24", "--output-len", "4")


def has_the_fixed_schema(record: dict[str, Any]) -> None:
    for metrics in (record, record["metrics"]):
        for name in ("output_throughput", "total_throughput", "request_throughput", "peak_kv_bytes"):
            assert metrics[name] > 0
        for name in ("ttft", "tpot", "itl", "e2e"):
            assert metrics[name].keys() == STATISTICS and all(v > 0 for v in metrics[name].values())
        assert 0 <= metrics["kv_waste"] < 1 and metrics["num_preemptions"] == 0
    assert record["complete"] is True and record["metrics"]["num_completed"] == record["metrics"]["num_requests"]


@pytest.fixture
def run(cli: Callable, tiny_llama_dir: Path) -> Callable:
    """`twinfer run` with the tiny model."""
    return lambda *args: cli("run", "--model", tiny_llama_dir, "--num-kv-blocks", "64", *args)


# --- the three commands -----------------------------------------------------------------------------


def test_simulate_returns_the_fixed_schema(cli: Callable) -> None:
    record = cli(*SIM, "--requests", "50", "--rate", "20", "--json").json
    has_the_fixed_schema(record)
    assert record["world"] == "simulator" and record["config"]["device"] == "h100-sxm"
    assert record["metrics"]["output_tokens"] == 50 * 128


def test_run_returns_the_same_schema(run: Callable) -> None:
    record = run(*SMALL, "--json").json
    has_the_fixed_schema(record)
    assert record["world"] == "engine" and record["metrics"]["output_tokens"] == 24


def test_run_prints_the_answers_to_prompts(run: Callable) -> None:
    done = run("--prompt", "hello", "--output-len", "4", "--no-save", "--json").json
    assert [a["prompt"] for a in done["answers"]] == ["hello"] and done["answers"][0]["text"]
    assert "hello ->" in run("--prompt", "hello", "--output-len", "4", "--no-save").out
    assert "answers" not in run(*SMALL, "--no-save", "--json").json


def test_rate_inf_is_valid_json(cli: Callable) -> None:
    record = cli(*SIM, *SMALL, "--rate", "inf", "--json").json
    assert record["workload"]["rate"] == "inf"


def test_simulation_is_repeatable(cli: Callable) -> None:
    args = (*SIM, *SMALL, "--rate", "5", "--seed", "3", "--no-save", "--json")
    assert cli(*args).json["metrics"] == cli(*args).json["metrics"]
    assert cli(*args).json["path"] is None


def test_runs_are_saved_listed_and_compared(cli: Callable, run: Callable, tmp_path: Path) -> None:
    real = run(*SMALL, "--runs-dir", tmp_path, "--name", "mine", "--json").json
    predicted = cli("simulate", "--model", real["config"]["model"], "--num-kv-blocks", "64", *SMALL,
                    "--runs-dir", tmp_path, "--json").json  # fmt: skip
    assert Path(real["path"]).is_dir() and real["name"] == "mine"
    listed = cli("compare", "--list", "--runs-dir", tmp_path, "--json").json
    assert {row["id"] for row in listed} == {real["id"], predicted["id"]}
    joined = cli("compare", real["id"], predicted["id"], "--runs-dir", tmp_path, "--json").json
    assert joined == cli("compare", "latest", "latest", "--runs-dir", tmp_path, "--json").json
    pair = joined["metrics"]["output_throughput"]
    assert pair["real"] == real["output_throughput"] and pair["predicted"] == predicted["output_throughput"]
    assert joined["error"]["output_throughput"] == pytest.approx(pair["predicted"] / pair["real"] - 1)
    assert joined["metrics"]["ttft"].keys() == STATISTICS == joined["error"]["tpot"].keys()
    assert joined["error"]["peak_kv_bytes"] == 0 and joined["error"]["num_preemptions"] == 0
    assert [s for s in joined["settings"] if not s.startswith("config.model")] == []
    table = cli("compare", real["id"], predicted["id"], "--runs-dir", tmp_path)
    assert table.code == 0 and "output throughput" in table.out and "predicted" in table.out
    assert "mine" in cli("compare", "--list", "--runs-dir", tmp_path).out


def test_statistics_that_read_the_same_share_a_line(cli: Callable, tmp_path: Path) -> None:
    """A batch that arrives at once and is fed in one step: all first tokens come together."""
    runs = [
        cli("simulate", "--model", "llama-3.1-8b", "--device", device, "--requests", "4", "--input-len", "16", "--rate", "inf",
            "--runs-dir", tmp_path, "--json").json
        for device in ("h100-sxm", "a100-sxm-80gb")
    ]  # fmt: skip
    lines = cli("compare", *(run["id"] for run in runs), "--runs-dir", tmp_path).out.splitlines()
    [ttft] = [line for line in lines if line.strip().startswith("TTFT")]
    assert ttft.strip().startswith("TTFT mean = p50 = p90 = p95 = p99")
    with_one_other = comparison_table(
        Comparison(
            real_id="a", predicted_id="b", settings={}, notes=(),
            pairs=tuple(MetricPair(name=f"itl.{s}", real=0.005, predicted=p, error=0.0)
                        for s, p in (("mean", 0.005), ("p50", 0.005), ("p90", 0.006), ("p95", 0.005))),
        )
    )  # fmt: skip
    assert list(with_one_other.columns[0].cells) == ["ITL mean = p50", "ITL p90", "ITL p95"]


def test_latest_prediction_is_the_newest_of_the_same_settings(cli: Callable, run: Callable, tmp_path: Path) -> None:
    real = run(*SMALL, "--runs-dir", tmp_path, "--json").json
    twin = ("simulate", "--model", real["config"]["model"], "--num-kv-blocks", "64", *SMALL, "--runs-dir", tmp_path)
    alike = cli(*twin, "--json").json
    other = cli(*twin, "--scheduler", "static", "--json").json
    assert cli("compare", "latest", "latest", "--runs-dir", tmp_path, "--json").json["predicted"]["id"] == alike["id"]
    unlike = cli("compare", "latest", other["id"], "--runs-dir", tmp_path)
    assert unlike.out.startswith("not the same run: ") and "differs: config.scheduler.name" in unlike.out
    ignored = cli("compare", "latest", "latest", "--runs-dir", tmp_path, "--scheduler.chunk-size", "8")
    assert ignored.code == 2 and "--scheduler.chunk-size=8" in ignored.err


def test_compare_makes_both_runs(cli: Callable, tiny_llama_dir: Path, tmp_path: Path) -> None:
    joined = cli("compare", "--model", tiny_llama_dir, "--num-kv-blocks", "64", *SMALL, "--runs-dir", tmp_path,
                 "--scheduler", "static", "--kv-cache", "contiguous", "--max-model-len", "64", "--json").json  # fmt: skip
    assert joined["real"]["world"] == "engine" and joined["predicted"]["world"] == "simulator"
    assert joined["real"]["config"]["scheduler"]["name"] == "static"
    assert joined["real"]["metrics"]["output_tokens"] == joined["predicted"]["metrics"]["output_tokens"] == 24
    assert joined["error"]["kv_waste"] is not None and joined["settings"] == {}
    assert len(list((tmp_path / "runs").iterdir())) == 2


def test_texts_have_the_same_lengths_in_both_worlds(cli: Callable, tiny_llama_dir: Path, tmp_path: Path) -> None:
    """The prediction counts tokens with the model's tokenizer where it is at hand (here: one a character)."""
    joined = cli("compare", "--model", tiny_llama_dir, "--num-kv-blocks", "64", "--output-len", "3", "--prompt",
                 "hello there", "--prompt", "and you", "--runs-dir", tmp_path, "--json").json  # fmt: skip
    assert joined["real"]["metrics"]["prompt_tokens"] == joined["predicted"]["metrics"]["prompt_tokens"] >= 18


def test_tables_for_people(cli: Callable, run: Callable) -> None:
    for ran in (cli(*SIM, *SMALL), run(*SMALL)):
        assert ran.code == 0 and ran.err == ""
        for word in ("output throughput", "tok/s", "TTFT", "TPOT", "KV waste", "6 of 6", "saved as"):
            assert word in ran.out


def test_generated_flags_are_the_techniques_options(cli: Callable) -> None:
    record = cli(*SIM, *SMALL, "--scheduler.chunk-size", "8", "--kv-cache", "paged", "--kv-cache.block-size", "4",
                 "--no-save", "--json").json  # fmt: skip
    assert record["config"]["scheduler"] == {"name": "continuous", "options": {"chunk_size": 8}}
    assert record["config"]["kv_cache"] == {"name": "paged", "options": {"block_size": 4}}
    same = cli(*SIM, *SMALL, "--scheduler", "continuous:chunk_size=8", "--kv-cache", "paged:block_size=4",
               "--no-save", "--json").json  # fmt: skip
    assert same["metrics"] == record["metrics"] and same["config"] == record["config"]


def test_guesses_are_in_the_table_and_in_the_json(cli: Callable, run: Callable, tmp_path: Path) -> None:
    profile = tmp_path / "measured.json"
    profile.write_text('{"acceptance": [0.8, 0.5]}')
    flags = (
        "--speculator",
        "medusa",
        "--speculator.heads",
        "2",
        "--speculator.tree",
        "3x2",
        "--speculator.profile",
        profile,
    )
    found = cli(*SIM, *SMALL, *flags, "--no-save", "--json").json["metrics"]["speculation"]
    assert found["num_accepted_tokens"] + found["num_wasted_tokens"] == found["num_draft_tokens"] > 0
    text = cli(*SIM, *SMALL, *flags, "--no-save").out
    for word in (
        f"{found['mean_acceptance_length']:.2f} (1 + right guesses), delivered in one ITL",
        "wasted",
        "right at position",
        "pays",
    ):
        assert word in text
    refused = run(*SMALL, "--speculator", "ngram")
    assert refused.code and "no speculative decoding yet" in refused.err


def test_help_shows_options_of_techniques(cli: Callable) -> None:
    text = cli("simulate", "--help").out
    assert "--scheduler.chunk-size" in text and "--kv-cache.block-size" in text and "static: most sequences" in text
    assert text.count("format of the KV cache") == 1  # once, for all quantizers that have it


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1GiB", 2**30), ("1.5 GB", 15 * 10**8), ("512k", 2**19), ("1e9", 10**9), ("42", 42), ("3b", 3)],
)
def test_sizes(text: str, expected: int) -> None:
    from twinfer.cli.values import parse_size

    assert parse_size("--x", text) == expected


def test_defaults_are_those_of_the_core(cli: Callable) -> None:
    """An option that was not given must not override the default of the configuration."""
    from twinfer.core.config import EngineConfig

    config = cli(*SIM, *SMALL, "--no-save", "--json").json["config"]
    decided = {"model", "device", "dtype", "kv_dtype", "max_model_len", "num_kv_blocks", "num_devices"}
    default = EngineConfig(model="m").model_dump(mode="json")
    assert {k: v for k, v in config.items() if k not in decided} == {
        k: v for k, v in default.items() if k not in decided
    }
    assert config["num_devices"] == config["tp"] == 1


# --- mistakes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--prompt", ""), ("--prompt", "empty")),
        (("--prompt", "  "), ("--prompt", "empty")),
        (("--input-len", "600"), ("600 tokens", "max_model_len")),
        (("--prompt", "x" * 600), ("tokens", "max_model_len")),
        (("--input-len", "24", "--max-model-len", "16"), ("24 tokens", "max_model_len")),
        (("--max-model-len", "513"), ("--max-model-len", "512")),
        (("--scheduler", "nope"), ("--scheduler", "nope", "continuous")),
        (("--kv-cache", "nope"), ("--kv-cache", "nope", "paged")),
        (("--attention", "nope"), ("--attention", "nope")),
        (("--quant", "nope"), ("--quant", "nope")),
        (("--op-time-model", "nope"), ("--op-time-model", "nope")),
        (("--workload", "nope"), ("--workload", "nope")),
        (("--scheduler", "continuous:chunks=3"), ("chunks", "chunk_size")),
        (("--scheduler", "continuous:chunk_size=many"), ("chunk_size", "whole number")),
        (("--scheduler", "continuous:chunk_size=0"), ("chunk_size", "0")),
        (("--kv-cache", "paged:block_size"), ("block_size", "has no value")),
        (("--scheduler.nothing", "3"), ("--scheduler.nothing",)),
        (("--scheduler", "static", "--scheduler.chunk-size", "3"), ("static", "chunk_size", "batch_size")),
        (("--unknown-option", "3"), ("--unknown-option",)),
        (("--trace", "missing.csv"), ("--trace", "missing.csv", "no such file")),
        (("--num-kv-blocks", "1", "--input-len", "64"), ("--num-kv-blocks", "use at least")),
        (("--kv-memory-bytes", "1KiB"), ("--kv-memory-bytes", "use at least")),
        (("--kv-memory-bytes", "lots"), ("--kv-memory-bytes", "lots", "GiB")),
        (("--num-kv-blocks", "0"), ("--num-kv-blocks", "0")),
        (("--rate", "-1"), ("--rate", "-1", "inf")),
        (("--rate", "0"), ("--rate", "0")),
        (("--rate", "nan"), ("--rate", "nan")),
        (("--requests", "0"), ("--requests", "0")),
        (("--requests", "-5"), ("--requests", "-5")),
        (("--input-len", "0"), ("--input-len", "0")),
        (("--output-len", "0"), ("--output-len", "0")),
        (("--lengths", "normal"), ("--lengths", "normal", "lognormal")),
        (("--spread", "0.5"), ("--spread", "--lengths")),
        (("--temperature", "-1"), ("temperature", "-1")),
        (("--seed", "-1"), ("--seed", "-1")),
        (("--dtype", "fp17"), ("--dtype", "fp17")),
        (("--kv-dtype", "fp17"), ("--kv-dtype", "fp17")),
        (("--device", "h1000"), ("--device", "h1000")),
        (("--memory-fraction", "0"), ("--memory-fraction", "0")),
        (("--max-num-seqs", "0"), ("--max-num-seqs", "0")),
        (("--max-num-batched-tokens", "0"), ("--max-num-batched-tokens", "0")),
        (("--tp", "0"), ("--tp", "0")),
    ],
)
@pytest.mark.parametrize("world", ["run", "simulate"])
def test_mistakes(
    cli: Callable, tiny_llama_dir: Path, world: str, args: tuple[str, ...], words: tuple[str, ...]
) -> None:
    given = dict.fromkeys(args[::2])
    sizes = [] if {"--num-kv-blocks", "--kv-memory-bytes"} & given.keys() else ["--num-kv-blocks", "64"]
    number = [] if {"--prompt", "--requests"} & given.keys() else ["--requests", "2"]
    ran = cli(world, "--model", tiny_llama_dir, *sizes, *number, *args, "--json")
    ran.is_error(*words)
    assert list(Path.home().rglob("record.json")) == []  # nothing was saved


@pytest.mark.parametrize("world", ["run", "simulate"])
def test_damaged_model_files(cli: Callable, tmp_path: Path, world: str) -> None:
    (tmp_path / "cut.gguf").write_bytes(b"GGUF\x03\x00\x00\x00")
    (tmp_path / "noise.gguf").write_bytes(bytes(range(256)) * 4)
    (tmp_path / "empty.gguf").write_bytes(b"")
    (tmp_path / "config.json").write_text("{")
    for name in ("cut.gguf", "noise.gguf", "empty.gguf", "config.json", "missing.gguf"):
        cli(world, "--model", tmp_path / name).is_error(name)
    cli(world, "--model", tmp_path / "no" / "folder").is_error("folder")


def test_a_model_without_weights_cannot_be_run(cli: Callable, tiny_llama_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((tiny_llama_dir / "config.json").read_text())
    cli("run", "--model", tmp_path, *SMALL).is_error("weights")


def test_a_truncated_gguf_is_one_line(cli: Callable, smollm2_gguf: Path, tmp_path: Path) -> None:
    """The header is whole, the weights are not."""
    with smollm2_gguf.open("rb") as file:
        (tmp_path / "half.gguf").write_bytes(file.read(8_000_000))
    cli("run", "--model", tmp_path / "half.gguf", *SMALL).is_error("half.gguf")


@pytest.mark.parametrize(
    "content",
    ["", "not a trace\n", "TIMESTAMP,ContextTokens\n", "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-01-01,x,3\n"],
)
def test_damaged_traces(cli: Callable, tmp_path: Path, content: str) -> None:
    (tmp_path / "trace.csv").write_text(content)
    cli(*SIM, "--trace", tmp_path / "trace.csv").is_error("trace.csv")


def test_stored_runs_that_are_not_there(cli: Callable, tmp_path: Path) -> None:
    cli("compare", "a", "b", "--runs-dir", tmp_path).is_error("'a'", "--list")
    cli("compare", "a", "--runs-dir", tmp_path).is_error("two runs")
    cli("compare", "--runs-dir", tmp_path).is_error("--model", "two stored runs")
    assert "no runs in" in cli("compare", "--list", "--runs-dir", tmp_path).out
    assert cli("compare", "--list", "--runs-dir", tmp_path, "--json").json == []


def test_a_damaged_stored_run_is_told(cli: Callable, tmp_path: Path) -> None:
    record = cli(*SIM, *SMALL, "--runs-dir", tmp_path, "--json").json
    (Path(record["path"]) / "steps.parquet").write_bytes(b"PAR1 no")
    cli("compare", record["id"], record["id"], "--runs-dir", tmp_path).is_error("steps.parquet", "damaged")
    (Path(record["path"]) / "record.json").write_text("{")
    assert "damaged" in cli("compare", "--list", "--runs-dir", tmp_path).out


def test_a_place_that_cannot_be_written_is_told(cli: Callable, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    ran = cli(*SIM, *SMALL, "--runs-dir", tmp_path / "file", "--json")
    ran.is_error("cannot save", "--runs-dir")


def test_what_cannot_be_saved_is_shown_all_the_same(
    cli: Callable, run: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a full disk: the place can be written to, until it is written to."""

    def full(self: RunStore, record: Any) -> Path:
        raise RunStoreError("cannot save run x: no space left on device; free the space")

    monkeypatch.setattr(RunStore, "save", full)
    ran = run(*SMALL, "--save")
    assert ran.code == 2 and "no space left on device" in ran.err.splitlines()[-1]
    assert "output throughput" in ran.out and "saved as" not in ran.out
    ran = cli(*SIM, *SMALL, "--save", "--json")
    assert ran.code == 2 and "no space left on device" in ran.err.splitlines()[-1]
    has_the_fixed_schema(json.loads(ran.out))


def test_some_requests_too_long_are_told_and_the_rest_is_served(cli: Callable, tmp_path: Path) -> None:
    lines = [{"prompt_len": n, "output_len": 4} for n in (10, 5000, 20)]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    args = (*SIM, "--trace", tmp_path / "t.jsonl", "--max-model-len", "100", "--no-save", "--json")
    ran = cli(*args)
    assert ran.json["metrics"]["num_completed"] == 2
    assert "r1 was not served" in ran.err and "5000 tokens" in ran.err
    filtered = cli(*args, "--too-long", "filter")
    assert filtered.json["metrics"]["num_requests"] == 2 and filtered.err == ""


@pytest.mark.parametrize("kind", ["quant", "speculator", "attention"])
def test_none_is_no_technique(cli: Callable, kind: str) -> None:
    words = ("simulate", "--model", "llama-3.1-8b", "--device", "h100-sxm", "--requests", "4", "--no-save", "--json")
    plain, off = cli(*words).json, cli(*words, f"--{kind}", "none").json
    fleet = cli(*words, "--decode-replicas", "1", "--decode", f"{'quantizer' if kind == 'quant' else kind}=none")
    assert off["config"] == plain["config"] and off["ttft"] == plain["ttft"] and fleet.code == 0, fleet.err
    cli(*words, "--scheduler", "none").is_error("--scheduler='none'")


@pytest.mark.parametrize("command", ["memory", "explain"])
def test_none_is_no_quantizer_in_other_commands(cli: Callable, command: str) -> None:
    words = (command, "--model", "llama-3.1-8b", "--device", "h100-sxm", "--json")
    assert cli(*words, "--quant", "none").json == cli(*words).json


@pytest.mark.parametrize(
    ("value", "words"),
    [(0.0123, "0.0123"), (999.4, "999"), (999.6, "1,000"), (1234.5, "1,234"), (-999.6, "-1,000"), (7.0, "7")],
)
def test_numbers_are_written_out_at_the_edge_of_a_thousand(value: float, words: str) -> None:
    assert show.number(value) == words
    assert (show.seconds(0.99949), show.seconds(0.9996), time_of(0.9996), time_of(0.9996, 6)) == (
        "999 ms", "1 s", "1 s", "999.6 ms"
    )  # fmt: skip
