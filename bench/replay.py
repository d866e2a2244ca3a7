"""Replay of a real serving run: the same requests, simulated with the kernel times of the same card.

    python bench/replay.py FOLDER [--model M] [--device D] [--op-time CHAIN ...] [--json]

FOLDER holds `requests.jsonl` (input_toks, output_toks, queued_ts, first_token_ts, last_token_ts of every request) and,
for the default chain, the engine's layer profile (`twinfer/plugins/op_time/profiled.py`) and `timeseries.csv` (running
requests second by second). Limits are those of the recorded run (`meta.json`: engine_kwargs).

Prints TTFT, TPOT and E2E, real and predicted, and how far the curves of running requests lie apart.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from twinfer.core.config import EngineConfig
from twinfer.core.records import RunRecord, percentile
from twinfer.core.workload import Workload
from twinfer.simulator.run import simulate

START = datetime.datetime(2026, 1, 1)


def trace_of(rows: Sequence[dict[str, Any]], folder: str) -> str:
    """The requests as a trace that the workload reader knows; arrival is when the engine queued them."""
    path = Path(folder) / "replay.csv"
    begin = rows[0]["queued_ts"]
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["TIMESTAMP", "ContextTokens", "GeneratedTokens"])
        for row in rows:
            when = START + datetime.timedelta(seconds=row["queued_ts"] - begin)
            writer.writerow([when.isoformat(sep=" "), row["input_toks"], row["output_toks"]])
    return str(path)


def measured(rows: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
    """Seconds per request, sorted."""
    ttft = [r["first_token_ts"] - r["queued_ts"] for r in rows]
    e2e = [r["last_token_ts"] - r["queued_ts"] for r in rows]
    tpot = [(r["last_token_ts"] - r["first_token_ts"]) / (r["output_toks"] - 1) for r in rows if r["output_toks"] > 1]
    return {"ttft": sorted(ttft), "tpot": sorted(tpot), "e2e": sorted(e2e)}


def predicted(record: RunRecord) -> dict[str, list[float]]:
    return {
        name: sorted(v for r in record.requests if (v := getattr(r, name)) is not None)
        for name in ("ttft", "tpot", "e2e")
    }


def running_at(record: RunRecord, seconds: Sequence[float]) -> list[int]:
    """Requests that have been scheduled and are not finished, at each time."""
    return [
        sum(
            r.first_scheduled is not None and r.finished is not None and r.first_scheduled <= t < r.finished
            for r in record.requests
        )
        for t in seconds
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--device", default="rtx-pro-6000")
    parser.add_argument("--op-time", nargs="+", help="chain of op-time models; default: the profile, then roofline")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = [json.loads(line) for line in (args.folder / "requests.jsonl").read_text().splitlines() if line.strip()]
    limits = json.loads((args.folder / "meta.json").read_text())["engine_kwargs"]
    chain = tuple(args.op_time or (f"profiled:folder={args.folder}", "roofline"))
    longest = max(r["input_toks"] + r["output_toks"] for r in rows)
    with tempfile.TemporaryDirectory() as folder:
        config = EngineConfig(
            model=args.model, device=args.device, dtype=limits["dtype"], op_time=chain,
            max_num_seqs=limits["max_num_seqs"], max_num_batched_tokens=limits["max_num_batched_tokens"],
            max_model_len=limits["max_model_len"] or longest,
        )  # fmt: skip
        record = simulate(config, Workload(trace=trace_of(rows, folder)))
    real, twin = measured(rows), predicted(record)
    table = []
    for name in real:
        for label, of in (
            ("mean", statistics.fmean), ("p50", lambda v: percentile(v, 50)), ("p95", lambda v: percentile(v, 95)),
        ):  # fmt: skip
            a, b = of(real[name]), of(twin[name])
            table.append({"metric": name, "statistic": label, "real": a, "predicted": b, "error": b / a - 1})
    curve: dict[str, float] = {}
    series = args.folder / "timeseries.csv"
    if series.exists():
        with series.open(newline="") as file:
            points = [(float(r["t"]), int(r["running"])) for r in csv.DictReader(file)]
        ours = running_at(record, [t for t, _ in points])
        gaps = [abs(a - b) for (_, a), b in zip(points, ours, strict=True)]
        curve = {"seconds": len(points), "mean_gap": statistics.fmean(gaps), "largest_gap": max(gaps),
                 "mean_running": statistics.fmean(a for _, a in points)}  # fmt: skip
    if args.json:
        json.dump({"requests": len(rows), "chain": chain, "table": table, "running": curve}, sys.stdout, indent=1)
        return
    print(
        f"{len(rows)} requests, {args.model} on {args.device}, op times: {', '.join(c.partition(':')[0] for c in chain)}"
    )
    for line in table:
        print(
            f"{line['metric']:5} {line['statistic']:5} real {line['real']:9.4f} s   predicted {line['predicted']:9.4f} s"
            f"   {line['error']:+.1%}"
        )
    if curve:
        print(
            f"running requests: mean gap {curve['mean_gap']:.1f} of {curve['mean_running']:.1f} on average over "
            f"{curve['seconds']:.0f} s, largest {curve['largest_gap']:.0f}"
        )


if __name__ == "__main__":
    main()
