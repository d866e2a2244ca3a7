"""One pool or two? The same devices as replicas that do both, and split into prefill and decode pools: DistServe's question.

    python bench/pools.py [--model M] [--device D] [--devices N] [--input-len N] [--output-len N] [--ttft S]
                          [--tpots S,S,...] [--rates R,R,...] [--requests N] [--kv-bandwidth B/s] [--only NAME] [--json]

Every fleet is simulated at every rate (Poisson, per device). Goodput under a pair of limits is the highest rate at which the
95th percentiles of TTFT and of TPOT keep both, between two rates by linear interpolation of what breaks first (DistServe,
arXiv:2401.09670, asks for 90 % of requests instead). Prints goodput by limit of TPOT: where splitting begins to pay is where
its best column overtakes the best of the engines that do both, which are tried with several budgets of tokens per step, and with
whole prompts, as engines before chunked prefill.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from typing import Any

from twinfer.core.config import Choice, EngineConfig
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
    whole = engine.model_copy(
        update={
            "max_num_batched_tokens": 8192,
            "scheduler": Choice(name="continuous", options={"chunked_prefill": False}),
        }
    )
    yield f"{args.devices} together, whole prompts", Fleet(engine=whole, replicas=args.devices, router="least_loaded")
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


def goodput(points: list[tuple[float, float, float]], ttft: float, tpot: float) -> float:
    """Requests/s from (rate, TTFT p95, TPOT p95) by rising rate; 0 when the lowest rate is too much already."""
    best = 0.0
    for i, (rate, *found) in enumerate(points):
        over = max(value / limit for value, limit in zip(found, (ttft, tpot), strict=True))
        if over > 1:
            if i:
                last, *before = points[i - 1]
                under = max(value / limit for value, limit in zip(before, (ttft, tpot), strict=True))
                best = last + (rate - last) * (1 - under) / (over - under)
            return best
        best = rate
    return best


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--device", default="h100-sxm")
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--input-len", type=int, default=2048)
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--ttft", type=float, default=0.3)
    parser.add_argument("--tpots", default="0.01,0.012,0.014,0.016,0.02,0.03")
    parser.add_argument("--rates", default="1,2,3,4,5,6,7,8,9,10,11,12,14")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--kv-bandwidth", type=float, default=None)
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
    parser.add_argument("--only", default="", help="fleets whose name has this in it")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rates = [float(rate) for rate in args.rates.split(",")]
    limits = [float(tpot) for tpot in args.tpots.split(",")]
    rows: list[dict[str, Any]] = []
    if not args.json:
        print(f"requests/s/device at TTFT p95 <= {args.ttft:g} s and TPOT p95 <=")
        print(f"{'':32}" + "".join(f"{tpot * 1e3:7.0f} ms" for tpot in limits), flush=True)
    for name, fleet in fleets(args):
        if args.only not in name:
            continue
        points: list[tuple[float, float, float]] = []
        for rate in rates:
            metrics = run(fleet, args, rate * args.devices).metrics
            points.append((rate, metrics["ttft"]["p95"], metrics["tpot"]["p95"]))
            if points[-1][1] > 4 * args.ttft:  # it only gets worse
                break
        found = [goodput(points, args.ttft, tpot) for tpot in limits]
        rows.append({"fleet": name, "goodput_per_device": found, "points": points})
        if not args.json:
            print(f"{name:32}" + "".join(f"{rate:10.2f}" for rate in found), flush=True)
    if args.json:
        print(json.dumps({"question": vars(args), "rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
