"""Cost of deciding: microseconds the pure core takes per scheduled row and per admitted request.

    python bench/core.py [--json] [--profile] [--only decode|admission] [--seconds S]

Two situations, no executor and no torch:

* decode: N requests run and every step feeds one token of each; time of `next_step` + `receive(StepDone)` + `outputs`.
* admission: N requests wait; every step admits as many as fit and each ends with its first token. Also the time to
  submit one request.

Times are the median over repeated steps of this process' CPU time, so that other load matters little.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import statistics
import time
from collections.abc import Callable

from twinfer.core.core import Core
from twinfer.core.events import StepDone, Submit
from twinfer.core.params import SamplingParams
from twinfer.core.plan import RowResult, StepPlan, StepResult
from twinfer.core.policy import Limits
from twinfer.core.request import Request
from twinfer.plugins.kv_cache.paged import Paged
from twinfer.plugins.scheduler.continuous import Continuous

PROMPT = 32
BLOCK = 16
ANSWER = RowResult((5,))

clock = time.process_time


def make_core(num_seqs: int, budget: int, num_blocks: int) -> Core:
    limits = Limits(
        max_num_seqs=num_seqs, max_num_batched_tokens=budget, max_model_len=1_000_000, num_blocks=num_blocks
    )
    return Core(Continuous(), Paged(Paged.Options(block_size=BLOCK)), limits)


def submit(core: Core, number: int, max_tokens: int) -> None:
    prompt = range(number * PROMPT, (number + 1) * PROMPT)  # all different: nothing is shared
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    core.receive(Submit(Request(id=f"r{number}", prompt=prompt, params=params)), 0.0)


def step(core: Core) -> tuple[int, float]:
    """One step: rows it had, and CPU seconds of the core alone."""
    begin = clock()
    plan = core.next_step(0.0)
    planned = clock() - begin
    assert isinstance(plan, StepPlan), plan
    result = StepDone(plan.step, StepResult((ANSWER,) * len(plan.rows)))
    begin = clock()
    core.receive(result, 0.0)
    core.outputs()
    return len(plan.rows), planned + clock() - begin


def decode(num_seqs: int, seconds: float) -> dict[str, float]:
    """Steady decoding of `num_seqs` requests."""
    core = make_core(num_seqs, max(num_seqs, 2) * PROMPT, num_seqs * (PROMPT // BLOCK + 64))
    for number in range(num_seqs):
        submit(core, number, 900)
    step(core)
    times = []
    end = clock() + seconds
    while len(times) < 8 or (clock() < end and len(times) < 800):
        rows, took = step(core)
        assert rows == num_seqs
        times.append(took)
    per_step = statistics.median(times)
    return {"rows": num_seqs, "us_per_step": per_step * 1e6, "us_per_row": per_step / num_seqs * 1e6}


def admission(num_waiting: int, seconds: float) -> dict[str, float]:
    """Admitting from a queue of `num_waiting`, 256 a step, until time is up or half the queue is served."""
    per_step = 256
    core = make_core(per_step, per_step * PROMPT, per_step * 8)
    begin = clock()
    for number in range(num_waiting):
        submit(core, number, 1)
    submitting = clock() - begin
    times, served = [], 0
    end = clock() + seconds
    while served < num_waiting // 2 and (len(times) < 4 or clock() < end):
        rows, took = step(core)
        served += rows
        times.append(took / rows)
    return {
        "waiting": num_waiting,
        "us_per_submit": submitting / num_waiting * 1e6,
        "us_per_admitted": statistics.median(times) * 1e6,
    }


def profiled(call: Callable[[], object]) -> None:
    profile = cProfile.Profile()
    profile.runcall(call)
    pstats.Stats(profile).sort_stats("tottime").print_stats(15)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    parser.add_argument("--profile", action="store_true", help="also print cProfile's top 15 of one case of each kind")
    parser.add_argument("--only", choices=("decode", "admission"), help="one kind instead of both")
    parser.add_argument("--seconds", type=float, default=2.0, help="CPU seconds per case")
    args = parser.parse_args()
    results: dict[str, list[dict[str, float]]] = {}
    if args.only != "admission":
        results["decode"] = [decode(n, args.seconds) for n in (1, 64, 512, 4096)]
    if args.only != "decode":
        results["admission"] = [admission(n, args.seconds) for n in (10_000, 100_000)]
    if args.json:
        print(json.dumps(results))
    else:
        for kind, rows in results.items():
            print(kind)
            for row in rows:
                print(
                    "  "
                    + "   ".join(
                        f"{key} {value:,.2f}" if "us" in key else f"{key} {value:>7,}" for key, value in row.items()
                    )
                )
    if args.profile:
        if "decode" in results:
            print("\ndecode, 512 requests")
            profiled(lambda: decode(512, 1.0))
        if "admission" in results:
            print("\nadmission, 10,000 waiting")
            profiled(lambda: admission(10_000, 1.0))


if __name__ == "__main__":
    main()
