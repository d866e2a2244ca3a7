"""Predictions against served runs on Hopper: the end-to-end rows of `silicon_sample.csv` (aiconfigurator-core).

    python bench/fidelity_served.py [--folder SYSTEMS] [--sample N] [--seed S] [--jobs 2] [--json] [--rows]

Each row is one aggregated server (model, stack, tensor-parallel size, concurrency, lengths) with its measured mean TTFT
and TPOT. It is simulated as a closed loop of that concurrency; op times come from the kernel tables of the same stack
and card (`silicon`), everything else from the device file. Nothing is fitted to these rows.

Which rows count was decided before the first prediction was made:
* in: systems h100_sxm and h200_sxm, mode agg, dense models (Llama-3.1-8B, Llama-3.1-70B, Qwen3-32B), pipeline size 1,
  no attention data parallelism, at most 8 ranks;
* out, each a trap named in the data's description: repeats of (stack, version, model, system, precision, lengths,
  concurrency, ranks) after the first; rows whose batch size is not their concurrency (it is per rank there);
  nvidia/Llama-3.1-8B-Instruct-FP8 (its concurrency is that of several replicas).
Rows with a measured TTFT above 20 s (KV-bound queues) stay in.

How a server is set up is read from the scripts and defaults of its source, not from its row (`setting`). It was worked
out after a first look at ten rows; the rows looked at while it was worked out (`SEEN`: a sample of seed 0) are told
apart from the others in the result.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twinfer.core.catalog import resolve_spec
from twinfer.core.config import Choice, EngineConfig
from twinfer.core.errors import TwinferError
from twinfer.core.workload import Workload
from twinfer.plugins.op_time.silicon import installed_folder
from twinfer.simulator.bands import in_step, prompt_sigma
from twinfer.simulator.run import simulate

MODELS = {
    "meta-llama/Llama-3.1-8B-Instruct": "llama-3.1-8b", "meta-llama/Llama-3.1-70B": "llama-3.1-70b",
    "Qwen/Qwen3-32B": "qwen3-32b",
}  # fmt: skip
DEVICES = {"h100_sxm": "h100-sxm", "h200_sxm": "h200-sxm"}
NOMINAL = {"1024", "8192"}


def selected(rows: Iterable[dict[str, str]]) -> list[dict[str, str]]:
    """The rows that count, in the file's order (see the module's docstring)."""
    seen: set[tuple[str, ...]] = set()
    kept = []
    for row in rows:
        if row["system"] not in DEVICES or row["mode"] != "agg" or row["model_path"] not in MODELS:
            continue
        if row["pp_size"] not in ("", "1") or row["attention_dp_size"] not in ("", "1") or int(row["tp_size"]) > 8:
            continue
        names = ("backend", "backend_version", "model_path", "system", "precision", "isl", "osl", "tp_size")
        key = (*(row[name] for name in names), str(concurrency(row)))
        if key in seen or concurrency(row) != int(row["batch_size"]):
            continue
        seen.add(key)
        kept.append(row)
    return kept


def concurrency(row: dict[str, str]) -> int:
    """Requests in flight, as the source states it; the batch size where it does not."""
    for part in row["silicon_data_source"].split(";"):
        name, _, value = part.strip().partition("=")
        if name == "silicon_concurrency":
            return int(value)
    return int(row["batch_size"])


SEEN = 64
"""Rows of `--sample 64 --seed 0` were looked at while the settings below were worked out."""
VERSIONS = {"vllm": "0.11.0", "trtllm": "1.1.0"}
"""Of rows that state none: those of 2025-10, when they were measured."""
TARGETS = {"tpot": 0.08, "ttft": 0.20}
Z80 = 1.2816
WAVES = 10
GATHERED = 0.9
FRONT_END, FRONT_END_SIGMA = 0.013, 0.003
"""s that a server works on a request before the engine has it (HTTP, tokenizing), one after the other: 10 to 16 ms, as
published for servers of this kind (simulator.md)."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What the source of a row says about its server.

    async_steps: the next step is planned while the device computes.  kv: format of the KV cache, "" for bfloat16.
    drawn: lengths are drawn from 0.8 to 1.0 of the nominal ones.  tokens: budget of a step.
    """

    scheduler: Choice
    async_steps: bool
    kv: str
    tokens: int
    drawn: bool
    fp8: str = "tensor"
    fused_all_reduce: bool = False
    after_loading: bool = False
    """memory_fraction is a share of what is free after the weights have been loaded"""
    gather_steps: int = 0
    """steps that new requests wait, while others run, for enough of them to fill `GATHERED` of a step's tokens"""


def setting(row: dict[str, str]) -> Setting:
    """How the server of `row` ran.

    InferenceMAX of 2025-10 (SemiAnalysisAI/InferenceX, `benchmarks/70b_fp8_{h100,h200,h200_trt}_slurm.sh` and
    `.github/workflows/full-sweep-tmpl.yml`): KV in fp8 under both stacks; vLLM with async scheduling and 8,192 tokens a
    step; TensorRT-LLM with steps of max-model-len tokens (2,048 or 9,216), and at 1,024 + 1,024 on fewer than 8 ranks with
    prompts that wait up to 20 steps until they fill 0.9 of one (`batch_wait_timeout_iters`, `_max_tokens_ratio`); lengths of 0.8 to 1.0 of the nominal ones,
    10 requests per client.
    The other rows are aiconfigurator's own runs (`eval/benchmarks/genai_perf_runner.py`: fixed lengths, 10 requests per
    client, 2 more to warm up) of servers that its own generator set up (`generator/rule_plugin/benchmark/*.rule`,
    `generator/backends/trtllm.py`): a step has room for one prompt, 1,500 tokens and one token of each client
    (SGLang: of prompts alone); the next step is planned ahead under TensorRT-LLM; KV as the row's products. Prompts and
    answers share steps under SGLang where `--enable-mixed-chunk` reaches the server (`backend_templates/sglang`: from
    0.5.6 on; before, the flag is misspelt and left out). TensorRT-LLM's Qwen3-32B in fp8 is Qwen/Qwen3-32B-FP8
    (`tools/automation/README.md`, 1.0.0rc3), whose scales are per block.
    Defaults of the stacks: TensorRT-LLM feeds prompts whole and admits only what fits at its full length
    (GUARANTEED_NO_EVICT); its Llama fuses all-reduce and norm where hidden states are wider than 4,096, its Qwen3 does
    not (`_torch/models`); its KV pool is 90 % of what is free after loading.  SGLang plans ahead and runs prompts alone.  vLLM plans ahead by default from 0.14 on.
    """
    stack, fp8 = row["backend"], row["gemm_quant_mode"].startswith("fp8")
    published = row["silicon_data_source"].startswith("source_file=2026-04-06.csv")
    isl, osl = int(row["isl"]), int(row["osl"])
    block = row["gemm_quant_mode"] == "fp8_block" or (fp8 and stack == "trtllm" and "Qwen3" in row["model_path"])
    kind = "block" if block else "tensor"
    room = isl + 1500 + (0 if stack == "sglang" else concurrency(row))
    if stack == "trtllm":
        return Setting(
            Choice(name="continuous", options={"chunked_prefill": False, "admission": "whole"}), True,
            "fp8" if fp8 else "", isl + osl if published else room, published, kind,
            fused_all_reduce="Llama-3.1-70B" in row["model_path"] and int(row["tp_size"]) > 1, after_loading=True,
            gather_steps=20 * (published and (isl, osl) == (1024, 1024) and int(row["tp_size"]) < 8),
        )  # fmt: skip
    if stack == "sglang":
        mixed = not row["backend_version"].startswith("0.5.1")
        scheduler = "continuous" if mixed else "prompts-first"
        return Setting(Choice(name=scheduler), True, "", room + mixed * concurrency(row), published, kind)
    tokens = 8192 if published else room
    return Setting(Choice(name="continuous"), published, "fp8" if published else "", tokens, published, kind)


def scenario(row: dict[str, str], folder: Path) -> tuple[EngineConfig, Workload]:
    """The engine and the load of a row; of long answers fewer waves are run than were (`predict` weighs them)."""
    how = setting(row)
    clients, isl, osl, tp = concurrency(row), int(row["isl"]), int(row["osl"]), int(row["tp_size"])
    model, version = MODELS[row["model_path"]], row["backend_version"] or VERSIONS[row["backend"]]
    quantizer = None
    if row["gemm_quant_mode"].startswith("fp8"):
        quantizer = Choice(name="fp8", options={"scales": how.fp8, "kv": how.kv})
    options = f"folder={folder},stack={row['backend']},fp8={how.fp8},version={version}"
    if how.fused_all_reduce:
        options += ",fused_all_reduce=true"
    fraction = 0.9
    if how.after_loading:
        weights = resolve_spec(model).num_params() * (1 if quantizer else 2) / tp
        memory = {"h100_sxm": 84.9e9, "h200_sxm": 150.1e9}[row["system"]]
        fraction = min(0.97, 0.9 + 0.1 * weights / memory)
    config = EngineConfig(
        model=model, device=DEVICES[row["system"]], dtype="bfloat16", tp=tp, quantizer=quantizer,
        scheduler=how.scheduler, kv_cache=Choice(name="paged", options={"prefix_sharing": False}),
        max_num_seqs=max(clients, 1), max_num_batched_tokens=how.tokens, max_model_len=isl + osl + 1,
        max_outstanding=2 if how.async_steps else 1, memory_fraction=fraction, op_time=(f"silicon:{options}", "roofline"),
    )  # fmt: skip
    workload = Workload(
        num_requests=waves(osl) * clients, concurrency=clients,
        input_len=round(0.9 * isl) if how.drawn else isl, output_len=round(0.9 * osl) if how.drawn else osl,
        lengths="uniform" if how.drawn else "fixed", spread=1 / 9 if how.drawn else 0.0,
    )  # fmt: skip
    return config, workload


def gathering(config: EngineConfig, seconds: float) -> EngineConfig:
    """`config` whose prompts wait so long for others, from when the engine has them."""
    more = {"gather_s": FRONT_END + seconds, "gather_tokens": int(GATHERED * config.max_num_batched_tokens)}
    scheduler = Choice(name=config.scheduler.name, options={**config.scheduler.options, **more})
    return config.model_copy(update={"scheduler": scheduler})


def waves(osl: int) -> int:
    """Requests per client that are simulated."""
    return WAVES if osl <= 256 else 6 if osl <= 512 else 3 if osl <= 2048 else 2


def predict(row: dict[str, str], folder: Path) -> dict[str, float]:
    """Mean TTFT and TPOT of a row in s, with the ends of their 80 % bands.

    The first request of each client comes with all the others, the later ones when an answer has ended: where fewer
    than `WAVES` are run, the two kinds keep the weights that they have in `WAVES`; so do the ends of their bands
    (`simulator/bands.py`).
    """
    config, workload = scenario(row, folder)
    record = simulate(config, workload, front_end=FRONT_END)
    steps = setting(row).gather_steps
    if steps:  # a scheduler waits by the clock: by that of the steps of such a run
        record = simulate(gathering(config, steps * record.metrics["tpot"]["mean"]), workload, front_end=FRONT_END)
    clients = workload.concurrency or 1
    found: dict[str, float] = {}
    for name in TARGETS:
        values = [getattr(r, name) for r in record.requests]
        first = [v for v in values[:clients] if v is not None]
        later = [v for v in values[clients:] if v is not None]
        mean = (statistics.fmean(first) + (WAVES - 1) * statistics.fmean(later)) / WAVES
        low, high = (end / record.metrics[name]["mean"] for end in record.intervals[f"{name}.mean"])
        found |= {name: mean, f"{name}_low": mean * low, f"{name}_high": mean * high}
    sigma = (record.intervals["duration"][1] / record.metrics["duration"] - 1) / Z80
    slow, beside = 1 + Z80 * max(sigma, prompt_sigma(record)), Z80 * FRONT_END_SIGMA
    pattern = in_step(record, clients)
    alone, step = (found["ttft"], 0.0) if pattern is None else pattern
    found["ttft_low"] = min(alone, found["ttft"]) / slow - beside
    found["ttft_high"] = (found["ttft"] + step) * slow + beside
    return found


def compared(row: dict[str, str], folder: Path) -> dict[str, Any]:
    """A row's facts, real and predicted; `error` instead when it cannot be simulated."""
    result: dict[str, Any] = {
        "id": row["id"], "model": MODELS[row["model_path"]], "stack": row["backend"], "system": row["system"],
        "precision": row["gemm_quant_mode"] or "bf16", "tp": int(row["tp_size"]), "concurrency": concurrency(row),
        "isl": int(row["isl"]), "osl": int(row["osl"]),
    }  # fmt: skip
    begin = time.process_time()
    try:
        found = predict(row, folder)
    except TwinferError as error:
        return result | {"refused": str(error)}
    for name in TARGETS:
        real = float(row[f"silicon_{name}_ms"]) / 1e3
        result |= {
            f"{name}_real": real, f"{name}_predicted": found[name], f"{name}_error": found[name] / real - 1,
            f"{name}_inside": found[f"{name}_low"] <= real <= found[f"{name}_high"],
        }  # fmt: skip
    return result | {"cpu_s": time.process_time() - begin}


def evaluate(
    rows: Sequence[dict[str, str]],
    folder: Path,
    jobs: int = 1,
    on_row: Callable[[dict[str, Any]], None] = lambda r: None,
) -> list[dict[str, Any]]:
    """Results in the order of `rows`. Rows of one card and stack are computed one after the other: tables load once."""
    order = sorted(range(len(rows)), key=lambda i: (rows[i]["system"], rows[i]["backend"], rows[i]["model_path"], i))
    results: dict[int, dict[str, Any]] = {}
    if jobs < 2:
        for i in order:
            results[i] = compared(rows[i], folder)
            on_row(results[i])
    else:
        with ProcessPoolExecutor(jobs) as pool:
            chunk = max(1, min(8, len(order) // (4 * jobs)))
            found = pool.map(compared, (rows[i] for i in order), [folder] * len(order), chunksize=chunk)
            for i, result in zip(order, found, strict=True):
                results[i] = result
                on_row(result)
    return [results[i] for i in range(len(rows))]


# --- tables -------------------------------------------------------------------------------------------


def summary(results: Sequence[dict[str, Any]], name: str) -> str:
    errors = [r[f"{name}_error"] for r in results]
    size = sorted(map(abs, errors))
    inside = sum(r[f"{name}_inside"] for r in results) / len(results)
    return (
        f"{len(size):4} rows   median {statistics.median(size):6.1%}   mean {statistics.fmean(size):6.1%}   "
        f"p90 {size[math.ceil(0.9 * len(size)) - 1]:6.1%}   bias {statistics.median(errors):+6.1%}   "
        f"80 % band covers {inside:.0%}"
    )


SLICES: dict[str, Callable[[dict[str, Any]], str]] = {
    "server": lambda r: f"{r['model']} {r['precision']} {r['system']} {r['stack']}",
    "concurrency": lambda r: "concurrency " + next(
        words for most, words in ((8, "1-8"), (32, "9-32"), (128, "33-128"), (10**9, "129-")) if r["concurrency"] <= most
    ),
    "lengths": lambda r: f"lengths {r['isl']} + {r['osl']}",
    "ranks": lambda r: f"{r['tp']} rank(s)",
}  # fmt: skip


def table(results: Sequence[dict[str, Any]], seen: Iterable[str] = ()) -> str:
    """All figures as text; slices whose median misses the target are marked."""
    done = [r for r in results if "refused" not in r]
    known = set(seen)
    lines = [f"{len(done)} rows predicted, {len(results) - len(done)} refused"]
    lines += [f"  refused: {r['id']}: {r['refused']}" for r in results if "refused" in r]
    for name, target in TARGETS.items():
        lines.append(f"\n{name.upper()} (target: median <= {target:.0%}; slices beyond it are marked *)")
        for label, part in (
            ("all rows", done),
            ("rows not looked at while building", [r for r in done if r["id"] not in known]),
            ("rows looked at", [r for r in done if r["id"] in known]),
        ):
            if part:
                lines.append(f"  {label:44} {summary(part, name)}")
        for key in SLICES.values():
            slices: dict[str, list[dict[str, Any]]] = defaultdict(list)
            for r in done:
                slices[key(r)].append(r)
            for label, part in sorted(slices.items()):
                missed = statistics.median(abs(r[f"{name}_error"]) for r in part) > target
                lines.append(f"{'*' if missed else ' '} {label:44} {summary(part, name)}")
    return "\n".join(lines)


def read(folder: Path) -> list[dict[str, str]]:
    with (folder / "silicon_sample.csv").open(newline="", encoding="utf-8") as file:
        return selected(csv.DictReader(file))


def sample(rows: Sequence[dict[str, str]], number: int | None, seed: int = 0) -> list[dict[str, str]]:
    if number is None or number >= len(rows):
        return list(rows)
    return [rows[i] for i in sorted(random.Random(seed).sample(range(len(rows)), number))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="`systems` folder; default: of the installed aiconfigurator-core")
    parser.add_argument("--sample", type=int, help="so many rows, drawn with --seed; default: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--rows", action="store_true", help="one line per row")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    folder = args.folder or installed_folder()
    if folder is None:
        parser.error("aiconfigurator-core is not installed; pip install 'twinfer[silicon]' or give --folder")
    everything = read(folder)
    rows = sample(everything, args.sample, args.seed)
    begin, count = time.monotonic(), 0

    def on_row(result: dict[str, Any]) -> None:
        nonlocal count
        count += 1
        if args.rows:
            print(json.dumps(result), flush=True)
        if sys.stderr.isatty():
            print(f"\r{count}/{len(rows)} rows, {time.monotonic() - begin:.0f} s", end="", file=sys.stderr)

    results = evaluate(rows, folder, args.jobs, on_row)
    if args.json:
        json.dump(results, sys.stdout, indent=1)
        return
    print(table(results, (row["id"] for row in sample(everything, SEEN))))


if __name__ == "__main__":
    main()
