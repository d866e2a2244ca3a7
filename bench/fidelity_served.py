"""Predictions against served runs on Hopper: the end-to-end rows of `silicon_sample.csv` (aiconfigurator-core).

    python bench/fidelity_served.py [--folder SYSTEMS] [--sample N] [--seed S] [--json] [--rows]

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

How a row is simulated, decided at the same time: lengths of 0.8 to 1.0 of the nominal ones where both are 1024 or 8192
(how that source drew them), nominal ones elsewhere; 10 waves of requests for answers up to 1,024 tokens, 3 for longer
ones; 90 % of device memory; bfloat16 KV; prompts in chunks of 8,192 tokens.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from twinfer.core.config import Choice, EngineConfig
from twinfer.core.errors import TwinferError
from twinfer.core.workload import Workload
from twinfer.plugins.op_time.silicon import installed_folder
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


def predict(row: dict[str, str], folder: Path) -> dict[str, float]:
    """Mean TTFT and TPOT of a row in s, with the ends of their 80 % bands."""
    clients, isl, osl = concurrency(row), int(row["isl"]), int(row["osl"])
    kind = row["gemm_quant_mode"]
    fp8 = "block" if kind == "fp8_block" else "tensor"
    drawn = {row["isl"], row["osl"]} <= NOMINAL
    waves = 10 if osl <= 1024 else 3
    config = EngineConfig(
        model=MODELS[row["model_path"]], device=DEVICES[row["system"]], dtype="bfloat16", tp=int(row["tp_size"]),
        quantizer=Choice(name="fp8", options={"scales": fp8}) if kind.startswith("fp8") else None,
        max_num_seqs=max(clients, 1), max_num_batched_tokens=8192, max_model_len=isl + osl + 1,
        op_time=(f"silicon:folder={folder},stack={row['backend']},fp8={fp8}", "roofline"),
    )  # fmt: skip
    workload = Workload(
        num_requests=waves * clients, concurrency=clients, input_len=round(0.9 * isl) if drawn else isl,
        output_len=round(0.9 * osl) if drawn else osl, lengths="uniform" if drawn else "fixed",
        spread=1 / 9 if drawn else 0.0,
    )  # fmt: skip
    record = simulate(config, workload)
    found: dict[str, float] = {}
    for name in ("ttft", "tpot"):
        found[name] = record.metrics[name]["mean"]
        found[f"{name}_low"], found[f"{name}_high"] = record.intervals[f"{name}.mean"]
    return found


def summary(errors: Sequence[float], inside: Sequence[bool]) -> str:
    size = sorted(map(abs, errors))
    return (
        f"{len(size):4} rows   median {statistics.median(size):6.1%}   mean {statistics.fmean(size):6.1%}   "
        f"p90 {size[int(0.9 * (len(size) - 1))]:6.1%}   bias {statistics.median(errors):+6.1%}   "
        f"80 % band covers {sum(inside) / len(inside):.0%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="`systems` folder; default: of the installed aiconfigurator-core")
    parser.add_argument("--sample", type=int, help="so many rows, drawn with --seed; default: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", action="store_true", help="one line per row")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    folder = args.folder or installed_folder()
    if folder is None:
        parser.error("aiconfigurator-core is not installed; pip install 'twinfer[silicon]' or give --folder")
    with (folder / "silicon_sample.csv").open(newline="", encoding="utf-8") as file:
        rows = selected(csv.DictReader(file))
    if args.sample is not None and args.sample < len(rows):
        picked = sorted(random.Random(args.seed).sample(range(len(rows)), args.sample))
        rows = [rows[i] for i in picked]
    results: list[dict[str, Any]] = []
    begin = time.monotonic()
    for number, row in enumerate(rows, 1):
        try:
            found = predict(row, folder)
        except TwinferError as error:
            print(f"{row['id']}: {error}", file=sys.stderr)
            continue
        real = {"ttft": float(row["silicon_ttft_ms"]) / 1e3, "tpot": float(row["silicon_tpot_ms"]) / 1e3}
        result: dict[str, Any] = {
            "id": row["id"], "model": MODELS[row["model_path"]], "stack": row["backend"], "system": row["system"],
            "precision": row["gemm_quant_mode"] or "bf16", "tp": row["tp_size"], "concurrency": concurrency(row),
            "isl": row["isl"], "osl": row["osl"],
        }  # fmt: skip
        for name, value in real.items():
            result |= {
                f"{name}_real": value, f"{name}_predicted": found[name], f"{name}_error": found[name] / value - 1,
                f"{name}_inside": found[f"{name}_low"] <= value <= found[f"{name}_high"],
            }  # fmt: skip
        results.append(result)
        if args.rows:
            print(json.dumps(result), flush=True)
        if sys.stderr.isatty():
            print(f"\r{number}/{len(rows)} rows, {time.monotonic() - begin:.0f} s", end="", file=sys.stderr)
    if args.json:
        json.dump(results, sys.stdout, indent=1)
        return
    for name in ("tpot", "ttft"):
        print(
            f"\n{name.upper()}: {summary([r[f'{name}_error'] for r in results], [r[f'{name}_inside'] for r in results])}"
        )
        slices: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for r in results:
            slices[f"{r['model']} {r['precision']} {r['system']} {r['stack']}"].append(r)
        for label, part in sorted(slices.items()):
            print(f"  {label:45} {summary([r[f'{name}_error'] for r in part], [r[f'{name}_inside'] for r in part])}")


if __name__ == "__main__":
    main()
