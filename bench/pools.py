"""One pool or two? Goodput of the same devices as prefill and decode replicas together, and split: DistServe's question.

    python bench/pools.py [--model M] [--device D] [--devices N] [--input-len N] [--output-len N] [--ttft S] [--tpot S]
                          [--requests N] [--kv-bandwidth B/s] [--max-num-batched-tokens N] [--json]

Goodput is the highest Poisson rate at which the 95th percentiles of TTFT and of TPOT keep both limits (the definition of
DistServe, arXiv:2401.09670, which asks for 90 % of requests instead), found by bisection to 3 %. Rates are given per device.
Every split has the same devices: i prefill and N - i decode replicas. Colocated engines are tried with several budgets of
tokens per step, the best counts: a smaller budget makes steps shorter, and prompts slower.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from typing import Any

from twinfer.core.config import EngineConfig
from twinfer.core.fleet import Fleet
from twinfer.core.records import RunRecord
from twinfer.core.workload import Workload
from twinfer.simulator.fleet_run import simulate_fleet

BUDGETS = (512, 1024, 2048, 8192)


def fleets(args: argparse.Namespace) -> Iterator[tuple[str, Fleet]]:
    """Colocated with each budget, then every split, decode replicas with the largest batch."""
    engine = EngineConfig(model=args.model, device=args.device, max_num_seqs=256)
    for budget in BUDGETS:
        mixed = engine.model_copy(update={"max_num_batched_tokens": budget})
        yield (
            f"{args.devices} together, {budget} tokens a step",
            Fleet(engine=mixed, replicas=args.devices, router="least_loaded"),
        )
    prefill = engine.model_copy(update={"max_num_batched_tokens": args.max_num_batched_tokens})
    for i in range(1, args.devices):
        yield f"{i} prefill, {args.devices - i} decode", Fleet(
            engine=prefill, replicas=i, router="least_loaded", decode=engine, decode_replicas=args.devices - i,
            kv_bandwidth=args.kv_bandwidth,
        )  # fmt: skip


def run(fleet: Fleet, args: argparse.Namespace, rate: float) -> RunRecord:
    workload = Workload(
        num_requests=args.requests, rate=rate, input_len=args.input_len, output_len=args.output_len,
        lengths="uniform", spread=0.5, seed=1,
    )  # fmt: skip
    return simulate_fleet(fleet, workload, bands=False)


def keeps(record: RunRecord, args: argparse.Namespace) -> bool:
    ttft, tpot = record.metrics["ttft"], record.metrics["tpot"]
    return bool(ttft["p95"] <= args.ttft and tpot["p95"] <= args.tpot)


def goodput(fleet: Fleet, args: argparse.Namespace) -> float:
    """Requests/s, 0 when even a lone request is too slow."""
    low, high = 0.0, 1.0 * args.devices
    while keeps(run(fleet, args, high), args):
        low, high = high, 2 * high
    if not low and not keeps(run(fleet, args, 0.05), args):
        return 0.0
    while high - low > 0.03 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if keeps(run(fleet, args, middle), args) else (low, middle)
    return low


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--device", default="h100-sxm")
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--input-len", type=int, default=2048)
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--ttft", type=float, default=0.3)
    parser.add_argument("--tpot", type=float, default=0.02)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--kv-bandwidth", type=float, default=None)
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name, fleet in fleets(args):
        rate = goodput(fleet, args)
        row: dict[str, Any] = {"fleet": name, "goodput_per_device": rate / args.devices}
        if rate:
            metrics = run(fleet, args, rate).metrics
            row |= {"ttft_p95": metrics["ttft"]["p95"], "tpot_p95": metrics["tpot"]["p95"],
                    "busy": [round(r["busy"], 2) for r in metrics["replicas"]]}  # fmt: skip
        rows.append(row)
        if not args.json:
            late = (
                f"TTFT p95 {row['ttft_p95'] * 1e3:5.0f} ms, TPOT p95 {row['tpot_p95'] * 1e3:5.1f} ms" if rate else "-"
            )
            print(f"{name:32} {row['goodput_per_device']:6.2f} requests/s/device   {late}", flush=True)
    if args.json:
        print(json.dumps({"question": vars(args), "rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
