"""Speed of the simulator beside a peer's (Vidur): requests per CPU second and peak memory on the same requests.

    python bench/peer_simulator.py --peer-python ENV/bin/python [--trace FILE] [--requests 10000] [--rate 6] [--rounds 5]

One model on one device, Poisson arrivals, lengths of a trace (Azure 2023 conversation) or lognormal with its means. ENV is
an environment with PyPI's `vidur` (0.0.26 was tried; of what it requires, numpy, pandas, scikit-learn, ddsketch, fasteners
and huggingface_hub are enough). It runs twice: as it is by default (metrics and trace are collected in memory), and with
nothing kept.

How the comparison is kept fair
* Both get the same list of (prompt, answer, gap), the same limits on sequences and tokens of a step, the same KV pool, and
  serve first come first served with chunked prefills (the peer's `sarathi`; `--scheduler vllm` for its other one).
* Every run is a process of its own; rounds are interleaved, in an order that rotates.
* Counted is CPU time from the list of lengths to the last answer: making requests and the loop; of ours also each step's
  cost by its chain of op times and the metrics of the record. Not counted, of both: start and imports, reading the trace,
  model and device. Not counted of the peer: training what predicts its step times, and writing tables and plots.
* The peer's step times are a line through ours at three points (least time, per token, per key), as its tables are not in
  the wheel. So both simulate about the same steps; the table shows how nearly. A run that ends requests unfinished, or
  whose simulated time is over 5 % from ours, is an error.
* Every second a run is stopped (SIGSTOP) for a million additions, whose CPU time is measured: `scaled` ratios are of CPU
  seconds by the mean of these, so a machine that changes its speed between runs changes them less. Absolute numbers of
  two machines can be set in relation by that time, too.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from peer_event_loop import peak_mb  # noqa: E402
from peers import print_table, say  # noqa: E402
from simulated_load import lengths, served, stream  # noqa: E402

from twinfer.core.catalog import resolve_spec  # noqa: E402
from twinfer.core.config import EngineConfig  # noqa: E402
from twinfer.core.device import load_device  # noqa: E402
from twinfer.core.layout import ALONE  # noqa: E402
from twinfer.core.parallel_ops import ops_of_step  # noqa: E402
from twinfer.core.provision import provision  # noqa: E402
from twinfer.core.registry import default_registry  # noqa: E402
from twinfer.core.setup import Setup  # noqa: E402
from twinfer.core.work import RowShape, StepShape  # noqa: E402
from twinfer.simulator.op_time import build_chain  # noqa: E402
from twinfer.simulator.step_time import StepTimer  # noqa: E402

PEER_NAMES = {"llama-3-8b": "meta-llama/Llama-3-8B", "llama-3-70b": "meta-llama/Llama-3-70B"}
PEER_DEVICES = {"a100-sxm-80gb": "a100", "h100-sxm": "h100"}
OURS, PLAIN, KEEPING = "twinfer", "vidur, nothing kept", "vidur, its defaults"
SLICE_S = 1.0  # of a run between two looks at the speed of the machine
APART = 0.05  # of simulated time, above which the two did not simulate the same

Job = dict[str, Any]
Answer = dict[str, float]


class RunFailed(Exception):
    """A simulator did not do the job; says why."""


def world(model: str, device_name: str) -> tuple[Setup, StepTimer]:
    registry = default_registry()
    spec, device = resolve_spec(model), load_device(device_name, registry)
    config = EngineConfig(model=model, device=device_name, max_model_len=min(16384, spec.max_context))
    setup = provision(config, spec, registry, device, world="simulator")
    return setup, StepTimer(lambda shape: ops_of_step(setup.model, shape, ALONE), build_chain((), device, registry))


def line(timer: StepTimer, tokens: int) -> dict[str, float]:
    """Seconds of a step: at least (weights are read), per token of a step of `tokens`, per key that is read."""
    short, long = (timer.exact(StepShape((RowShape(1, keys),) * 32, 32)).seconds for keys in (1, 2001))
    prefill = timer.exact(StepShape((RowShape(tokens, tokens),), 1)).seconds
    per_key = (long - short) / (32 * 2000)
    return {"least": short, "per_token": (prefill - per_key * tokens) / tokens, "per_key": per_key}


def job_of(args: argparse.Namespace) -> Job:
    setup, timer = world(args.model, args.device)
    limits = setup.limits
    found = lengths(args.trace, limits.max_model_len, setup.model.vocab_size)
    rng = random.Random(1)
    gaps = [0.0, *(rng.expovariate(args.rate) for _ in range(args.requests - 1))]
    rows = [(*found[number % len(found)][:2], gap) for number, gap in enumerate(gaps)]
    return {
        "model": args.model, "device": args.device, "peer_model": PEER_NAMES[args.model],
        "peer_device": PEER_DEVICES[args.device], "scheduler": args.scheduler, "rows": rows,
        "max_num_seqs": limits.max_num_seqs, "max_num_batched_tokens": limits.max_num_batched_tokens,
        "max_model_len": limits.max_model_len, "block_size": setup.block_size, "num_blocks": setup.config.num_kv_blocks,
    } | line(timer, limits.max_num_batched_tokens)  # fmt: skip


def ours(job: Job) -> Answer:
    """The job in this process."""
    setup, timer = world(job["model"], job["device"])
    memory = peak_mb()
    begin = time.process_time()
    arriving = stream(job["rows"], len(job["rows"]), None, setup.model.vocab_size)
    (record,), simulated = served(setup, timer, arriving)
    seconds = time.process_time() - begin
    done = [r for r in record.requests if r.reason == "length"]
    return {
        "seconds": seconds, "memory_mb": peak_mb(), "start_mb": memory, "done": len(done),
        "steps": record.metrics["num_steps"], "simulated_s": simulated,
        "e2e_p50": sorted(r.e2e or 0.0 for r in done)[len(done) // 2],
    }  # fmt: skip


def additions_s() -> float:
    """CPU seconds that 20 million additions take at this moment, from a million of them."""
    begin, total = time.process_time(), 0
    for number in range(1_000_000):
        total += number
    return 20 * (time.process_time() - begin)


def apart(name: str, job: Job, peer_python: str) -> Answer:
    """The job in a process of its own, and the mean of `additions_s` during it."""
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    if name == OURS:
        command = [sys.executable, str(HERE / "peer_simulator.py"), "--one"]
    else:
        command = [peer_python, "-P", str(HERE / "peer_event_loop.py")]
        env.pop("PYTHONPATH", None)  # the peer's environment is not ours
    additions = []
    with (
        tempfile.TemporaryFile("w+") as asked,
        tempfile.TemporaryFile("w+") as out,
        tempfile.TemporaryFile("w+") as log,
    ):
        json.dump(job | {"kept": name == KEEPING}, asked)
        asked.seek(0)
        process = subprocess.Popen(command, stdin=asked, stdout=out, stderr=log, env=env)
        try:
            while process.poll() is None:
                try:
                    process.wait(SLICE_S)
                except subprocess.TimeoutExpired:
                    process.send_signal(signal.SIGSTOP)
                    additions.append(additions_s())
                    process.send_signal(signal.SIGCONT)
        finally:
            process.kill()
            process.wait()
        out.seek(0)
        log.seek(0)
        said, complaint = out.read().splitlines(), log.read().strip().splitlines()
    if process.returncode:
        raise RunFailed(f"{name} ended with {process.returncode}: {complaint[-1] if complaint else 'nothing was said'}")
    answer: Answer = json.loads(said[-1])
    if answer["done"] != len(job["rows"]):
        raise RunFailed(f"{name} finished {answer['done']:.0f} requests of {len(job['rows'])}")
    return answer | {"reference_s": statistics.mean(additions or [additions_s()])}


def rounds(job: Job, names: Sequence[str], num: int, peer_python: str) -> Iterator[tuple[str, Answer]]:
    for number in range(num):
        turn = number % len(names)
        for name in (*names[turn:], *names[:turn]):
            say(f"round {number + 1} of {num}: {name}")
            yield name, apart(name, job, peer_python)


def check_alike(table: dict[str, list[Answer]]) -> None:
    """Raises RunFailed where the two did not simulate about the same."""
    expected = table[OURS][0]["simulated_s"]
    for name, answers in table.items():
        for answer in answers:
            if abs(answer["simulated_s"] / expected - 1) > APART:
                raise RunFailed(f"{name} simulated {answer['simulated_s']:.0f} s where ours took {expected:.0f} s")


def ratios(own: Sequence[Answer], theirs: Sequence[Answer]) -> tuple[float, float, float]:
    """How many times the peer's CPU time is ours: of medians; of medians by the time of additions; worst against best."""
    plain, scaled = (
        statistics.median(map(cost, theirs)) / statistics.median(map(cost, own))
        for cost in (lambda a: a["seconds"], lambda a: a["seconds"] / a["reference_s"])
    )
    return plain, scaled, min(a["seconds"] for a in theirs) / max(a["seconds"] for a in own)


def report(table: dict[str, list[Answer]], job: Job) -> None:
    num = len(job["rows"])
    tokens = sum(answer for _, answer, _ in job["rows"])

    def row(name: str, answers: list[Answer]) -> tuple[str, ...]:
        rates = [num / a["seconds"] for a in answers]
        first = answers[0]
        medians = {key: statistics.median(a[key] for a in answers) for key in first}
        return (
            name, f"{statistics.median(rates):.0f} ({min(rates):.0f}-{max(rates):.0f})", f"{medians['memory_mb']:.0f}",
            f"{medians['start_mb']:.0f}", f"{first['steps']:.0f}", f"{tokens / first['steps']:.1f}",
            f"{first['simulated_s']:.0f}", f"{first['e2e_p50']:.2f}", f"{medians['reference_s']:.2f}",
        )  # fmt: skip

    say("")
    print(f"{num} requests, {tokens} answer tokens, {job['model']} on one {job['device']}, CPU time")
    print_table(
        (
            "",
            "requests/s",
            "peak MB",
            "at start",
            "steps",
            "tokens/step",
            "simulated s",
            "E2E p50 s",
            "20M additions s",
        ),
        [row(name, answers) for name, answers in table.items()],
    )
    print()
    print_table(
        ("requests/s, ratios", "medians", "scaled", "our worst by their best"),
        [
            (f"twinfer / {name}", *(f"{ratio:.2f}" for ratio in ratios(table[OURS], answers)))
            for name, answers in table.items()
            if name != OURS
        ],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", default=os.environ.get("VIDUR_PYTHON"), help="Python with vidur")
    parser.add_argument("--trace", help="CSV with TIMESTAMP, ContextTokens, GeneratedTokens; lognormal without it")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--rate", type=float, default=6.0, help="requests per s (Poisson)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", default="llama-3-8b", choices=sorted(PEER_NAMES))
    parser.add_argument("--device", default="a100-sxm-80gb", choices=sorted(PEER_DEVICES))
    parser.add_argument("--scheduler", default="sarathi", choices=("sarathi", "vllm"), help="of the peer")
    parser.add_argument("--json", type=Path, help="also write what every run gave there")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(ours(json.load(sys.stdin))))
        return
    if not args.peer_python:
        parser.error("--peer-python: give the Python of an environment with vidur, or set VIDUR_PYTHON")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    names = (OURS, PLAIN, KEEPING)
    table: dict[str, list[Answer]] = {name: [] for name in names}
    job = job_of(args)
    try:
        for name, answer in rounds(job, names, args.rounds, args.peer_python):
            table[name].append(answer)
        check_alike(table)
    except RunFailed as error:
        raise SystemExit(str(error)) from None
    report(table, job)
    if args.json:
        args.json.write_text(json.dumps({"runs": table, "job": job | {"rows": len(job["rows"])}}, indent=1) + "\n")


if __name__ == "__main__":
    main()
