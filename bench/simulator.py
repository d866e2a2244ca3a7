"""Speed of the simulator: requests per second of one core, memory, and whether the cost of a request stays flat.

    python bench/simulator.py [--json] [--requests 10000,100000] [--replicas 8] [--trace FILE] [--rate R] [--stepping]

The lengths and times are those of a trace (Azure 2023 conversation: CSV with TIMESTAMP, ContextTokens, GeneratedTokens),
looped until there are enough requests; without `--trace` lengths are lognormal with the same means. `--rate` replaces
the times by a Poisson process of so many requests per s over all replicas. Requests go to the replicas in turn. Each size
runs in a process of its own, so that peak memory is its own. `--stepping` takes every step by itself, for comparison.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from twinfer.core.catalog import resolve_spec
from twinfer.core.config import EngineConfig
from twinfer.core.device import load_device
from twinfer.core.layout import ALONE
from twinfer.core.parallel_ops import ops_of_step
from twinfer.core.provision import provision
from twinfer.core.registry import default_registry
from twinfer.simulator.op_time import build_chain
from twinfer.simulator.step_time import StepTimer

sys.path.insert(0, str(Path(__file__).resolve().parent))

from simulated_load import lengths, served, stream


@dataclass
class Result:
    """One size. seconds: CPU of everything, requests included; memory_mb: peak resident."""

    requests: int
    replicas: int
    seconds: float
    per_request_us: float
    per_second: float
    memory_mb: float
    steps: int
    output_tokens: int
    simulated_s: float
    mean_rows: float
    ttft_p50: float
    tpot_p50: float


def measure(args: argparse.Namespace, num: int) -> Result:
    begin = time.process_time()
    registry = default_registry()
    spec, device = resolve_spec(args.model), load_device(args.device, registry)
    config = EngineConfig(model=args.model, device=args.device, max_model_len=min(16384, spec.max_context))
    setup = provision(config, spec, registry, device, world="simulator")
    rows = lengths(args.trace, setup.limits.max_model_len, spec.vocab_size)
    timer = StepTimer(lambda shape: ops_of_step(setup.model, shape, ALONE), build_chain((), device, registry))
    arriving = stream(rows, num, args.rate, spec.vocab_size)
    records, simulated = served(setup, timer, arriving, args.replicas, skip=not args.stepping)
    requests = [r for record in records for r in record.requests]
    done = [r for r in requests if r.reason == "length"]
    assert len(done) == num, f"{num - len(done)} of {num} requests did not finish"
    ttft = sorted(r.ttft or 0.0 for r in done)
    tpot = sorted(r.tpot or 0.0 for r in done)
    tokens = sum(r.num_output_tokens for r in done)
    steps = sum(record.metrics["num_steps"] for record in records)
    seconds = time.process_time() - begin
    return Result(
        num, args.replicas, seconds, seconds / num * 1e6, num / seconds,
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, steps,
        tokens, simulated, tokens / max(1, steps), ttft[num // 2], tpot[num // 2],
    )  # fmt: skip


def apart(argv: Sequence[str], num: int) -> Result:
    """`measure` in a process of its own."""
    command = [sys.executable, str(Path(__file__).resolve()), *argv, "--one", str(num)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return Result(**json.loads(done.stdout))


def profiled(call: Callable[[], object]) -> None:
    import cProfile
    import pstats

    profile = cProfile.Profile()
    profile.runcall(call)
    pstats.Stats(profile).sort_stats("tottime").print_stats(40)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON list instead of a table")
    parser.add_argument("--requests", default="10000,100000", help="sizes, separated by commas")
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--trace", help="CSV with TIMESTAMP, ContextTokens, GeneratedTokens")
    parser.add_argument("--rate", type=float, help="requests per s over all replicas, instead of the trace's times")
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--device", default="h100-sxm")
    parser.add_argument("--stepping", action="store_true", help="every step by itself")
    parser.add_argument("--profile", action="store_true", help="cProfile's top of the first size")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one is not None:
        print(json.dumps(asdict(measure(args, args.one))))
        return
    sizes = [int(size) for size in args.requests.split(",")]
    if args.profile:
        profiled(lambda: measure(args, sizes[0]))
        return
    argv = [a for a in sys.argv[1:] if a != "--json"]
    results = [apart(argv, size) for size in sizes]
    if args.json:
        print(json.dumps([asdict(r) for r in results]))
        return
    print("requests replicas   s CPU  us/request  requests/s  peak MB      steps  mean rows")
    for r in results:
        print(
            f"{r.requests:>8} {r.replicas:>8} {r.seconds:>7.1f} {r.per_request_us:>11.0f} {r.per_second:>11.0f}"
            f" {r.memory_mb:>8.0f} {r.steps:>10} {r.mean_rows:>10.1f}"
        )


if __name__ == "__main__":
    main()
