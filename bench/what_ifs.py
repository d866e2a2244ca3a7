"""What-ifs: one question a table, answered by the simulator with shipped models and devices.

    python bench/what_ifs.py [--only NAME[,NAME]] [--op-time-model M ...] [--list]

Prints markdown, as it stands in docs/what-ifs/. Op times are the device files' rooflines unless
`--op-time-model` names other models: no hardware was run. Equal arguments give equal tables; what does not fit says so in
its cell.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from what_if_accelerators import accelerators
from what_if_guesses import speculation
from what_if_runs import OP_TIME, REFUSED, Engine, busy, closed, decode_ms, metric, ms, rate, run, table
from what_if_tiers import prefix_tiers


def batching() -> None:
    """Static or continuous batching?"""
    policies: dict[str, Engine] = {"static": {"scheduler": "static:batch_size=64"}, "continuous": {}}
    model: Engine = {"model": "llama-3.1-8b", "max_num_seqs": 64, "max_model_len": 8192}
    lengths: tuple[tuple[str, dict[str, Any]], ...] = (
        ("all alike", {}),
        ("uniform, +-50 %", {"lengths": "uniform", "spread": 0.5}),
        ("lognormal, 0.5", {"lengths": "lognormal", "spread": 0.5}),
        ("lognormal, 1", {"lengths": "lognormal", "spread": 1.0}),
    )

    def at_once() -> Iterable[list[str]]:
        for name, shape in lengths:
            both = [
                run({**model, **policy}, num_requests=512, rate=math.inf, input_len=512, output_len=128, **shape)
                for policy in policies.values()
            ]
            static, continuous = (r.metrics["output_throughput"] if r else math.nan for r in both)
            yield [name, *map(rate, both), f"{continuous / static:.2f}", *(ms(r, "tpot", "p95") for r in both)]

    table(
        ["lengths", "static, tok/s", "continuous, tok/s", "ratio", "static, TPOT p95 ms", "continuous, TPOT p95 ms"],
        at_once(), "512 requests at once, 512 tokens in and 128 out on average:",
    )  # fmt: skip

    def arriving() -> Iterable[list[str]]:
        for arrivals in (0.5, 1, 2, 5, 10, 15, 20, 30):
            both = [
                run({**model, **policy}, num_requests=300, rate=arrivals, input_len=512, output_len=128,
                    lengths="lognormal", spread=0.5) for policy in policies.values()
            ]  # fmt: skip
            yield [
                f"{arrivals:g}", *(ms(r, "ttft", "p50", 0) for r in both), *(ms(r, "tpot", "p50") for r in both),
                *(ms(r, "e2e", "p50", 0) for r in both),
            ]  # fmt: skip

    table(
        ["requests/s", "TTFT p50 ms: static", "continuous", "TPOT p50 ms: static", "continuous", "E2E p50 ms: static",
         "continuous"], arriving(), "Arriving (Poisson), lognormal lengths of spread 0.5:",
    )  # fmt: skip


def kv_cache() -> None:
    """Contiguous or paged KV?"""

    def rows() -> Iterable[list[str]]:
        for longest in (640, 1024, 2048, 8192, 32768, 131072):
            found = [
                run({"model": "llama-3.1-8b", "max_num_seqs": 512, "max_model_len": longest, "kv_cache": cache},
                    num_requests=1024, rate=math.inf, input_len=512, output_len=128)
                for cache in ("contiguous", "paged")
            ]  # fmt: skip
            yield [
                f"{longest:,}",
                *map(busy, found),
                *(metric(r, "kv_waste", "", 100) for r in found),
                *map(rate, found),
            ]

    table(
        ["`--max-model-len`", "most at once: contiguous", "paged", "KV waste, %: contiguous", "paged",
         "tok/s: contiguous", "paged"], rows(), "1,024 requests at once, 512 tokens in, 128 out, up to 512 at once:",
    )  # fmt: skip

    def blocks() -> Iterable[list[str]]:
        for size in (8, 16, 64, 128, 256, 512, 1024):
            found = run(
                {"model": "llama-3.1-8b", "max_num_seqs": 512, "max_model_len": 8192, "kv_cache": f"paged:block_size={size}"},
                num_requests=1024, rate=math.inf, input_len=512, output_len=128,
            )  # fmt: skip
            yield [str(size), busy(found), metric(found, "kv_waste", "", 100), rate(found)]

    table(["tokens per block", "most at once", "KV waste, %", "tok/s"], blocks(), "The same, by size of block:")


def attention() -> None:
    """MHA, GQA, MQA or MLA?"""
    variants = {
        "mha (as trained)": None, "gqa, 8 KV heads": "gqa:num_kv_heads=8", "mqa": "mqa",
        "mla, 512 + 64 values": "mla:rank=576,rope_dim=64",
    }  # fmt: skip

    def rows() -> Iterable[list[str]]:
        for name, variant in variants.items():
            engine: Engine = {"model": "llama-2-7b", "attention": variant, "max_model_len": 4096}
            prompt = closed(engine, 1, 3072, 2, 1)
            one, many = closed(engine, 1, 3072, 128, 1), closed(engine, 32, 3072, 128)
            full = run({**engine, "max_num_seqs": 512}, num_requests=512, rate=math.inf, input_len=3072, output_len=512)
            size = REFUSED if one is None else f"{one.kv_bytes_per_token:,.0f}"
            yield [
                name,
                size,
                ms(prompt, "ttft"),
                ms(one, "tpot", digits=2),
                ms(many, "itl", "p50"),
                busy(full),
                rate(full),
            ]

    table(
        ["attention", "KV bytes/token", "TTFT ms, alone", "TPOT ms, alone", "ITL p50 ms, 32 clients", "most at once",
         "tok/s, 512 at once"], rows(), "Llama-2-7B, prompts of 3,072 tokens, answers of 128 (last columns: 512):",
    )  # fmt: skip

    def contexts() -> Iterable[list[str]]:
        for length in (64, 256, 1024, 3072):
            found = [
                closed({"model": "llama-2-7b", "attention": v, "max_model_len": 4096}, 32, length, 128, 1)
                for v in variants.values()
            ]
            yield [f"{length:,}", *(ms(r, "itl", "p50", 2) for r in found)]

    table(["prompt", *variants], contexts(), "ITL p50 in ms, 32 clients, by length of the prompt:")


FORMATS: dict[str, Engine] = {
    "bf16": {}, "int8 weights": {"quantizer": "int8:activations=false"}, "int4 weights": {"quantizer": "int4"},
    "int4, widened from 256 rows": {"quantizer": "awq:expand_rows=256"},
    "fp8 weights": {"quantizer": "fp8:activations=false"}, "fp8 (W8A8)": {"quantizer": "fp8"},
    "fp8, KV too": {"quantizer": "fp8:kv=fp8"}, "int8 (W8A8), bound": {"quantizer": "int8"},
}  # fmt: skip
NO_FP8 = ("a100-sxm-80gb",)  # its 16-bit units would do the products: FP8 is a format of weights there


def formats() -> None:
    """FP16, INT8, INT4 or FP8?"""
    batches = (1, 8, 32, 128, 256, 512)

    def rows(device: str) -> Iterable[list[str]]:
        for name, quant in FORMATS.items():
            if device in NO_FP8 and quant.get("quantizer", "") in ("fp8", "fp8:kv=fp8"):
                continue
            engine = {"model": "llama-3.1-8b", "device": device, **quant}
            prompt = closed(engine, 1, 2048, 2, 1)
            full = run({**engine, "max_num_seqs": 256}, num_requests=512, rate=math.inf, input_len=1024, output_len=256)
            yield [name, ms(prompt, "ttft"), *(decode_ms(engine, n) for n in batches), rate(full)]

    head = ["format", "TTFT ms, 2,048 tokens", *(f"step ms, {n}" for n in batches), "tok/s"]
    for device, name in (("h100-sxm", "H100 SXM"), ("a100-sxm-80gb", "A100 SXM")):
        table(
            head, rows(device),
            f"Llama-3.1-8B on one {name}; decode steps of so many rows, each with 256 to 512 tokens of KV; tok/s: 512 "
            "requests at once, 1,024 in, 256 out:",
        )  # fmt: skip


def long_context() -> None:
    """Long prompts: context parallelism or tensor parallelism?"""
    layouts: dict[str, Engine] = {
        "1": {}, "cp 2": {"cp": 2}, "tp 2": {"tp": 2}, "cp 4": {"cp": 4}, "tp 4": {"tp": 4}, "cp 8": {"cp": 8},
        "tp 8": {"tp": 8}, "tp 2, cp 4": {"tp": 2, "cp": 4},
    }  # fmt: skip
    lengths = (256, 512, 1024, 2048, 8192, 32768, 129024)

    def rows(budget: int) -> Iterable[list[str]]:
        for name, layout in layouts.items():
            engine = {"model": "llama-3.1-8b", "max_num_batched_tokens": budget, "max_model_len": 131072, **layout}
            first = [ms(closed(engine, 1, length, 2, 1), "ttft", digits=0) for length in lengths]
            yield [name, *first, ms(closed(engine, 1, 129024, 64, 1), "tpot", digits=2)]

    head = ["devices", *(f"TTFT ms, {n:,}" for n in lengths), "TPOT ms at 129,024"]
    for budget in (8192, 131072):
        table(head, rows(budget), f"One request alone on H100 SXM, prompts in steps of up to {budget:,} tokens:")


def experts() -> None:
    """Mixture of experts against dense, and where experts go."""
    batches = (1, 2, 4, 16, 64, 256, 512)
    models = {"mixtral-8x7b": 4, "llama-2-13b": 4, "llama-2-70b": 4}

    def dense() -> Iterable[list[str]]:
        for name, tp in models.items():
            prompt = closed({"model": name, "tp": tp}, 1, 2048, 2, 1)
            yield [name, ms(prompt, "ttft"), *(decode_ms({"model": name, "tp": tp}, n) for n in batches)]

    table(
        ["model", "TTFT ms, 2,048 tokens", *(f"step ms, {n}" for n in batches)], dense(),
        "On 4 H100 SXM, tp 4; decode steps of so many rows, each with 256 to 512 tokens of KV:",
    )  # fmt: skip

    rows_of = (1, 8, 32, 128, 512, 1024, 2048)

    def placed() -> Iterable[list[str]]:
        layouts: dict[str, Engine] = {
            "tp 8": {"tp": 8},
            "tp 8, ep 8": {"tp": 8, "ep": 8},
            "dp 8, ep 8": {"dp": 8, "ep": 8},
        }
        for name, layout in layouts.items():
            engine = {"model": "deepseek-v3", "device": "h200-sxm", "max_model_len": 4096, **layout}
            one = run(
                {**engine, "max_num_seqs": 2048, "max_num_batched_tokens": 16384},
                num_requests=1,
                input_len=16,
                output_len=2,
            )
            pools = layout.get("dp", 1)  # a step tells of its rank's
            room = REFUSED if one is None else f"{pools * one.steps[0].total_blocks * one.steps[0].block_size:,}"
            yield [name, room, *(decode_ms(engine, n) for n in rows_of)]

    table(
        ["layout", "KV room, tokens", *(f"step ms, {n}" for n in rows_of)], placed(),
        "DeepSeek-V3 (fp8, as published) on 8 H200 SXM; decode steps as above:",
    )  # fmt: skip


TABLES: dict[str, Callable[[], None]] = {
    "batching": batching, "kv-cache": kv_cache, "attention": attention, "formats": formats,
    "long-context": long_context, "experts": experts, "speculation": speculation, "prefix-tiers": prefix_tiers,
    "accelerators": accelerators,
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help=f"of {', '.join(TABLES)}; several with commas between")
    parser.add_argument("--list", action="store_true", help="names and questions, and no runs")
    parser.add_argument("--op-time-model", action="append", default=[], help="as for `twinfer simulate`")
    args = parser.parse_args()
    OP_TIME.extend(args.op_time_model)
    names = args.only.split(",") if args.only else list(TABLES)
    for name in names:
        if name not in TABLES:
            parser.error(f"--only {name}: choose from {', '.join(TABLES)}")
    for name in names:
        print(f"{name}: {TABLES[name].__doc__}", flush=True)
        if not args.list:
            TABLES[name]()
    return 0


if __name__ == "__main__":
    sys.exit(main())
