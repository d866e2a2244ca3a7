"""`twinfer memory`, `models` and `devices`: known numbers, equations that evaluate, and mistakes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (("llama-2-70b", "--kv-dtype", "fp16"), {"kv_bytes_per_token": 327_680}),
        (("llama-2-70b", "--attention", "mha"), {"kv_bytes_per_token": 2_621_440}),
        (("llama-2-70b", "--attention", "gqa"), {"kv_bytes_per_token": 327_680}),
        (("llama-2-70b", "--attention", "mqa"), {"kv_bytes_per_token": 40_960}),
        (("llama-2-7b", "--context", "2048"), {"kv_bytes": 2**30}),
        (("llama-2-7b", "--context", "2048", "--batch", "3"), {"kv_bytes": 3 * 2**30}),
        (("llama-2-70b", "--context", "8192"), {"kv_bytes": 8192 * 327_680, "context": 8192}),
        (("gemma-2-9b", "--context", "8192"), {"kv_bytes": 21 * (8192 + 4096) * 8 * 512 * 2}),  # half slide over 4,096
        (("gemma-2-9b", "--context", "8192", "--kv-cache", "contiguous"), {"kv_bytes": 42 * 8192 * 8 * 512 * 2}),
        (("llama-3.1-8b", "--tp", "8"), {"kv_bytes_per_token": 131_072 // 8}),
        (("llama-3.1-8b", "--tp", "16"), {"kv_bytes_per_token": 131_072 // 8}),
        (("llama-3.1-8b", "--pp", "4"), {"kv_bytes_per_token": 131_072 // 4, "num_devices": 4}),
        (("llama-3.1-8b", "--cp", "2", "--batch", "2"), {"kv_bytes": 2 * 4096 * 65_536}),
        (("deepseek-v3", "--tp", "2", "--dp", "4", "--ep", "8", "--batch", "8"), {"kv_bytes": 2 * 4096 * 70_272}),
        (("llama-3.1-8b",), {"context": 4096, "kv_bytes_per_token": 131_072}),
    ],
)
def test_known_kv_sizes(cli: Callable, args: tuple[str, ...], expected: dict[str, int]) -> None:
    answer = cli("memory", "--model", *args, "--json").json
    assert {k: answer[k] for k in expected} == expected
    assert answer["total_bytes"] == answer["weight_bytes"] + answer["kv_bytes"] + answer["activation_bytes"]


def test_halving_the_kv_dtype_halves_kv_and_leaves_weights(cli: Callable) -> None:
    full, half = (cli("memory", "--model", "llama-3.1-8b", "--kv-dtype", d, "--json").json for d in ("bf16", "fp8"))
    assert half["kv_bytes"] * 2 == full["kv_bytes"] and half["weight_bytes"] == full["weight_bytes"]


def test_every_equation_evaluates_to_its_number(cli: Callable) -> None:
    args = ("memory", "--model", "llama-3.1-70b", "--device", "h100-sxm", "--tp", "4")
    answer = cli(*args, "--json").json
    shown = {name for name in answer if name.endswith(("_bytes", "per_token"))} - {
        "device_memory_bytes",
        "kv_pool_bytes",
    }
    assert {*shown, "num_blocks"} <= answer["equations"].keys() and "activation_bytes" in shown
    parts = ("weight_bytes", "kv_bytes", "state_bytes", "activation_bytes", "library_bytes", "outside_bytes")
    assert answer["total_bytes"] == sum(answer[name] for name in parts) and answer["library_bytes"] > 2 * 2**30
    assert answer["all_weight_bytes"] == 4 * answer["weight_bytes"]
    out = cli(*args).out
    assert "weights of all 4 devices" in out and "libraries" in out and "per device" in out
    for name, equation in answer["equations"].items():
        if name in answer:
            assert eval(equation, {"int": int, "max": max}) == answer[name], name
    name, _, equation = answer["equation"].partition(" = ")
    assert eval(equation) == answer[name]
    assert answer["fits"] and answer["num_blocks"] > 0
    assert sum(answer["segments"].values()) == answer["device_memory_bytes"]


def test_every_rank_of_a_layout_and_typical_lengths(cli: Callable) -> None:
    args = ("memory", "--model", "llama-3.1-70b", "--device", "h100-sxm", "--tp", "2", "--pp", "2", "--context", "8192")
    answer = cli(*args, "--input-len", "1000", "--output-len", "200", "--json").json
    first, last = answer["ranks"]
    assert (first["first_layer"], first["last_layer"], last["last_layer"]) == (0, 39, 79) and first["ranks"] == 2
    assert answer["num_blocks"] == min(first["num_blocks"], last["num_blocks"])
    assert answer["expected_concurrency"] == answer["num_blocks"] / 75
    assert answer["worst_case_concurrency"] == answer["num_blocks"] / 512
    out = cli(*args, "--input-len", "1000", "--output-len", "200").out
    assert "stage 1 of 2" in out and "of the lengths expected" in out


def test_typical_lengths_are_the_question_where_no_context_is_given(cli: Callable) -> None:
    args = ("memory", "--model", "gemma-3-27b", "--device", "h100-sxm", "--input-len", "200", "--output-len", "200")
    assert "gemma-3-27b, 1 x 400 tokens" in cli(*args).out
    assert cli(*args, "--json").json["max_model_len"] == 400


def test_on_a_cpu_the_pool_is_the_one_that_runs_have(cli: Callable) -> None:
    args = ("--model", "smollm2-135m", "--device", "cpu")
    answer = cli("memory", *args, "--json").json
    run = cli(
        "simulate", *args, "--requests", "2", "--input-len", "32", "--output-len", "4", "--json", "--no-save"
    ).json
    assert answer["num_blocks"] == run["config"]["num_kv_blocks"] == 5825
    assert "at most 4 GiB on a CPU" in cli("memory", *args).out
    assert cli("memory", *args, "--num-kv-blocks", "9000", "--json").json["num_blocks"] == 9000


def test_fixes_are_part_of_the_answer(cli: Callable) -> None:
    answer = cli("memory", "--model", "llama-3.1-70b", "--device", "l40s", "--tp", "2", "--json").json_with(3)
    assert answer["fits"] is False and any(fix["fits"] for fix in answer["fixes"])
    assert any(not fix["fits"] and fix["spare_bytes"] < 0 for fix in answer["fixes"])


def test_what_does_not_fit_says_what_would(cli: Callable) -> None:
    answer = cli("memory", "--model", "llama-3.1-70b", "--device", "h100-sxm", "--json").json_with(3)
    assert answer["fits"] is False and "--tp 2" in answer["problem"]
    told = cli("memory", "--model", "llama-3.1-70b", "--device", "h100-sxm")
    assert "does not fit" in told.out and told.code == 3
    asked = cli("simulate", "--model", "llama-3.1-70b", "--device", "h100-sxm")
    assert asked.code == 3 and asked.err.startswith("error: ") and "--tp 2" in asked.err
    many = cli("memory", "--model", "llama-3.1-8b", "--device", "h100-sxm", "--batch", "100000", "--json").json_with(3)
    assert many["fits"] is False and "--batch" in many["problem"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--model", "llama-9"), ("llama-9", "known")),
        (("--model", "none.gguf"), ("none.gguf", "no such file")),
        (("--model", "llama-2-7b", "--kv-dtype", "fp17"), ("--kv-dtype", "fp17")),
        (("--model", "llama-2-7b", "--attention", "nope"), ("--attention", "nope", "known: mha")),
        (("--model", "llama-2-7b", "--attention", "gqa:heads=3"), ("heads", "num_kv_heads")),
        (("--model", "llama-2-7b", "--attention", "gqa:num_kv_heads=3"), ("num_kv_heads", "3")),
        (("--model", "llama-2-7b", "--attention", "gqa:"[:-1] + ":num_kv_heads"), ("has no value",)),
        (("--model", "llama-2-7b", "--context", "0"), ("--context",)),
        (("--model", "llama-2-7b", "--batch", "-1"), ("--batch", "-1")),
        (("--model", "llama-2-7b", "--tp", "0"), ("--tp",)),
        (("--model", "llama-2-7b", "--tp", "7", "--device", "h100-sxm"), ("--tp", "7", "use 1, 2")),
        (("--model", "llama-2-7b", "--dp", "2"), ("--dp", "no experts")),
        (("--model", "llama-2-7b", "--tp", "4", "--ep", "3"), ("--ep", "divisor of 4")),
        (("--model", "llama-2-7b", "--input-len", "100"), ("--output-len", "both lengths")),
        (("--model", "llama-2-7b", "--memory-fraction", "1.5"), ("--memory-fraction", "1.5")),
        (("--model", "llama-2-7b", "--device", "h1000"), ("h1000", "known")),
        (("--model", "llama-2-7b", "--device", "none.json"), ("none.json", "no such file")),
    ],
)
def test_mistakes(cli: Callable, args: tuple[str, ...], words: tuple[str, ...]) -> None:
    for more in ((), ("--json",)):
        ran = cli("memory", *args, *more)
        ran.is_error(*[w for w in words if w != "known"])


def test_damaged_model_files(cli: Callable, tmp_path: Path) -> None:
    (tmp_path / "cut.gguf").write_bytes(b"GGUF\x03\x00\x00\x00")
    (tmp_path / "noise.gguf").write_bytes(b"\x00" * 100)
    (tmp_path / "config.json").write_text('{"architectures": ')
    (tmp_path / "list.json").write_text("[1]")
    for name in ("cut.gguf", "noise.gguf", "config.json", "list.json"):
        cli("memory", "--model", tmp_path / name).is_error(name)
    cli("models", tmp_path / "cut.gguf").is_error("cut.gguf")


def test_models_lists_the_shipped_specs(cli: Callable) -> None:
    rows = {row["name"]: row for row in cli("models", "--json").json}
    for name in ("llama-2-7b", "llama-2-70b", "llama-3-8b", "llama-3.1-8b", "llama-3.1-70b", "mistral-7b",
                 "qwen2.5-7b", "mixtral-8x7b", "deepseek-v3", "smollm2-135m"):  # fmt: skip
        assert name in rows
    assert rows["mixtral-8x7b"]["num_active_params"] < rows["mixtral-8x7b"]["num_params"]
    one = cli("models", "llama-3.1-8b", "--json").json
    assert one == rows["llama-3.1-8b"] and one["kv_bytes_per_token"] == 131_072
    table = cli("models").out
    assert "llama-3.1-8b" in table and "128 KiB" in table and "1,026 B" in table and "e+" not in table
    cli("models", "llama-9").is_error("llama-9")


def test_a_config_file_is_a_model(cli: Callable, tmp_path: Path) -> None:
    config = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 128,
              "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128,
              "max_position_embeddings": 512, "torch_dtype": "float32"}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    answer = cli("memory", "--model", tmp_path, "--json").json
    assert answer["kv_bytes_per_token"] == 2 * 2 * 2 * 16 * 4
    assert answer["context"] == 512


def test_devices_tell_their_ridge(cli: Callable) -> None:
    rows = {row["name"]: row for row in cli("devices", "--json").json}
    assert {"cpu", "h100-sxm", "h200-sxm"} <= rows.keys() and any(n.startswith("a100") for n in rows)
    assert round(rows["h100-sxm"]["ridge_flop_per_byte"]["bfloat16"]) == 295
    assert cli("devices", "h100-sxm", "--json").json == rows["h100-sxm"]
    assert "295 FLOP/B" in cli("devices").out
    cli("devices", "h1000").is_error("h1000")


def test_one_device_and_one_model_are_described_with_units(cli: Callable) -> None:
    device = cli("devices", "h100-sxm").out
    assert "3,350 GB/s" in device and "989 TFLOP/s" in device and "79.1 GiB" in device and "700 W" in device
    assert "320 KiB" in cli("models", "llama-2-70b").out


def test_memory_says_that_it_fits_and_which_context_it_assumed(cli: Callable) -> None:
    words = ("memory", "--model", "llama-3.1-8b", "--device", "h100-sxm")
    assumed = cli(*words)
    assert "\nfits on h100-sxm (79.1 GiB): " in assumed.out
    assert "note: 4,096 tokens of context are assumed, llama-3.1-8b was made for 131,072: give --context" in assumed.out
    for given in (("--context", "4096"), ("--input-len", "3000", "--output-len", "96")):
        told = cli(*words, *given).out
        assert "assumed" not in told and "fits on h100-sxm" in told
