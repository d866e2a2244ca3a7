"""Throughput of twinfer and of its peers on this CPU: the same prompts, the same threads, taking turns.

    python bench/peers.py --model smollm2-135m --format float32 --format gguf \
        --hf DIR --vllm-python ENV/bin/python --llama-python ENV/bin/python [--llama-model FILE.gguf]

Workloads: bN is N requests of 128 random tokens in and 64 out; mixed is 200 requests of 16 to 512 in and 8 to 128 out
(`random.Random(0)`), all at once. Greedy, past every end of text. A rate is output tokens by the wall time of the whole
workload, prompts included; prompts are new in every round, so nothing is found in a prefix cache.

How the comparison is kept fair
* Each engine is a process of its own that loads once, on the same CPUs, and is stopped (SIGSTOP) while others run.
* Rounds are interleaved: every round runs each workload on each engine, in an order that rotates. One round before
  them, of at most 32 requests a workload, warms up and is not counted.
* An engine that gives fewer tokens than asked is an error, not a fast engine.
* The share of the machine that other processes used meanwhile is measured; cells above 10 % are marked with `!`.
* Ratios are of medians; one is marked `~` (undecided) when the ranges of the two overlap.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from twinfer.core.catalog import resolve_spec

HERE = Path(__file__).resolve().parent
WORKLOADS = ("b1", "b8", "b32", "mixed")
MAX_MODEL_LEN = 768
WARM_UP = 32  # requests of the round that is not counted
LOUD = 0.10  # share of the machine used by others, above which a cell is marked
LOAD_S, RUN_S = 900.0, 1800.0  # longest waits: vLLM compiles for minutes

Requests = list[tuple[list[int], int]]


def requests_of(workload: str, vocab: int, round_: int) -> Requests:
    """Prompts and output lengths: lengths are the same in every round, tokens are not."""
    if workload == "mixed":
        rng = random.Random(0)
        shapes = [(rng.randint(16, 512), rng.randint(8, 128)) for _ in range(200)]
    else:
        shapes = [(128, 64)] * int(workload.removeprefix("b"))
    tokens = random.Random(f"{workload} {round_}")
    first = min(1000, vocab // 2)  # below lie control tokens
    return [([tokens.randrange(first, vocab) for _ in range(length)], n) for length, n in shapes]


@dataclass(slots=True)
class Cell:
    """One engine on one workload: output tokens per second and the share others used, by round."""

    rates: list[float] = field(default_factory=list)
    others: list[float] = field(default_factory=list)
    unserved: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.rates)

    def text(self) -> str:
        if not self.rates:
            return "n/a" if self.unserved else "-"
        mark = "!" if max(self.others) > LOUD else ""
        return f"{self.median:.0f} ({min(self.rates):.0f}-{max(self.rates):.0f}){mark}"


class EngineFailed(Exception):
    """The engine's process ended or did not answer."""


class Engine:
    """The process of one engine; stopped except inside `awake`."""

    def __init__(self, name: str, kind: str, python: str, options: dict[str, Any]) -> None:
        self.name = name
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the engine)
        env = os.environ | {"OMP_NUM_THREADS": str(options["threads"]), "TOKENIZERS_PARALLELISM": "false"}
        self._process = subprocess.Popen(
            [python, "-P", str(HERE / "peer_engines.py"), kind, json.dumps(options)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, env=env, process_group=0,
        )  # fmt: skip
        try:
            self._answer(LOAD_S)
        except BaseException:
            self.close()
            raise
        self._signal(signal.SIGSTOP)

    def run(self, requests: Requests, cell: Cell, count: bool = True) -> None:
        """Serve `requests` and note the rate in `cell` (unless not to be counted). Raises EngineFailed."""
        asked = json.dumps({"requests": requests}).encode() + b"\n"
        with self._awake():
            before, begin = _busy_seconds(), time.perf_counter()
            assert self._process.stdin is not None
            try:
                self._process.stdin.write(asked)
                self._process.stdin.flush()
            except BrokenPipeError:
                raise self._failed() from None
            answer = self._answer(RUN_S)
            wall = time.perf_counter() - begin
            busy = _busy_seconds() - before
        if "unserved" in answer:
            cell.unserved = answer["unserved"]
            return
        for (_, n), output in zip(requests, answer["outputs"], strict=True):
            if len(output) != n:
                raise EngineFailed(f"gave {len(output)} tokens where {n} were asked for")
        if count:
            cell.rates.append(sum(n for _, n in requests) / answer["seconds"])
            cell.others.append(max(0.0, busy - answer["cpu"]) / (wall * (os.cpu_count() or 1)))

    def close(self) -> None:
        self._signal(signal.SIGKILL)
        self._process.wait()

    @contextlib.contextmanager
    def _awake(self) -> Iterator[None]:
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _answer(self, seconds: float) -> dict[str, Any]:
        pipe = self._process.stdout
        assert pipe is not None
        line = pipe.readline() if select.select([pipe], [], [], seconds)[0] else b""
        if not line:
            raise self._failed()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _failed(self) -> EngineFailed:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(2)
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        how = "did not answer" if self._process.returncode is None else f"ended with {self._process.returncode}"
        return EngineFailed(f"{how}: {lines[-1] if lines else 'nothing was said'}")


def _busy_seconds() -> float:
    """CPU seconds that all processes of the machine have used; 0 where the system does not say."""
    try:
        fields = [int(v) for v in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    except (OSError, ValueError):
        return 0.0
    idle = fields[3] + fields[4]
    return float(sum(fields[:8]) - idle) / os.sysconf("SC_CLK_TCK")


def engines_of(args: argparse.Namespace) -> list[tuple[str, str, str, dict[str, Any]]]:
    """(name, kind, python, options) of every engine asked for."""
    common = {"threads": args.threads, "max_num_seqs": args.max_num_seqs, "max_model_len": args.max_model_len}
    found = [
        (f"twinfer {name}", "twinfer", sys.executable, common | {"model": args.model, "format": name})
        for name in args.format or ["float32"]
    ]
    if args.hf:
        found += [
            (f"transformers {dtype}", "transformers", sys.executable, common | {"model": args.hf, "dtype": dtype})
            for dtype in args.transformers_dtype or ["bfloat16"]
        ]
    if args.vllm_python:
        if not args.hf:
            raise SystemExit("--vllm-python: vLLM reads no GGUF file; give --hf DIR, too")
        found.append(("vLLM bfloat16", "vllm", args.vllm_python, common | {"model": args.hf, "dtype": "bfloat16"}))
    if args.llama_python:
        models = args.llama_model or [args.model]
        for model in models:
            if not model.endswith(".gguf"):
                raise SystemExit("--llama-python: llama.cpp reads GGUF files; give --llama-model FILE.gguf")
            name = Path(model).stem if len(models) > 1 else "the file's blocks"
            slots = {"slots": args.llama_slots, "model": model}
            found.append((f"llama.cpp, {name}", "llama.cpp", args.llama_python, common | slots))
    return found


def measure(args: argparse.Namespace) -> tuple[dict[str, dict[str, Cell]], dict[str, str]]:
    """Cells by engine and workload, and why engines failed."""
    table: dict[str, dict[str, Cell]] = {}
    failures: dict[str, str] = {}
    engines: list[Engine] = []
    try:
        for name, kind, python, options in engines_of(args):
            say(f"loading {name}")
            table[name] = {workload: Cell() for workload in args.workloads}
            try:
                engines.append(Engine(name, kind, python, options))
            except (EngineFailed, OSError) as error:
                failures[name] = str(error)
        for round_ in range(args.rounds + 1):
            for workload in args.workloads:
                turn = round_ % max(1, len(engines))
                for engine in engines[turn:] + engines[:turn]:
                    cell = table[engine.name][workload]
                    if engine.name in failures or cell.unserved:
                        continue
                    say(f"round {round_} of {args.rounds}: {workload} on {engine.name}")
                    try:
                        requests = requests_of(workload, args.vocab, round_)
                        engine.run(requests if round_ else requests[:WARM_UP], cell, count=round_ > 0)
                    except EngineFailed as error:
                        failures[engine.name] = str(error)
    except KeyboardInterrupt:
        say("stopped; this is what was measured\n")
    finally:
        for engine in engines:
            engine.close()
    return table, failures


def say(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    for row in (header, *rows):
        print(
            "  ".join(
                cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
            )
        )


def ratio(ours: Cell, peer: Cell) -> str:
    if not ours.rates or not peer.rates:
        return "-"
    overlap = min(ours.rates) <= max(peer.rates) and min(peer.rates) <= max(ours.rates)
    return f"{ours.median / peer.median:.2f}{'~' if overlap else ''}"


def report(table: dict[str, dict[str, Cell]], failures: dict[str, str], args: argparse.Namespace) -> None:
    say("")
    print(f"output tokens/s, median (range) of up to {args.rounds} interleaved rounds, {args.threads} threads")
    print_table(("", *args.workloads), [(name, *(c.text() for c in cells.values())) for name, cells in table.items()])
    peers = [name for name in table if not name.startswith("twinfer")]
    if peers:
        print("\ntwinfer by peer, ratios of medians")
        print_table(
            ("", *args.workloads),
            [
                (f"{ours} / {peer}", *(ratio(table[ours][w], table[peer][w]) for w in args.workloads))
                for ours in table
                if ours not in peers
                for peer in peers
            ],
        )
    loud = max((o for cells in table.values() for c in cells.values() for o in c.others), default=0.0)
    print(f"\nothers used up to {loud:.0%} of the machine" + ("; cells with ! were disturbed" if loud > LOUD else ""))
    for name, why in failures.items():
        print(f"{name} failed: {why}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="what twinfer loads: name, directory or GGUF file")
    parser.add_argument("--format", action="append", help="of twinfer's weights, repeatable: a dtype or a quantizer")
    parser.add_argument("--hf", help="the same weights as a Hugging Face directory, for transformers and vLLM")
    parser.add_argument("--transformers-dtype", action="append", help="repeatable; bfloat16 unless given")
    parser.add_argument("--vllm-python", default=os.environ.get("VLLM_PYTHON"), help="Python with vLLM's CPU build")
    parser.add_argument("--llama-python", default=os.environ.get("LLAMA_PYTHON"), help="Python with llama-cpp-python")
    parser.add_argument("--llama-model", action="append", help="GGUF file, repeatable; --model unless given")
    parser.add_argument("--llama-slots", type=int, default=32, help="sequences that llama.cpp decodes together")
    parser.add_argument("--max-num-seqs", type=int, default=64, help="of twinfer and vLLM")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workloads", type=lambda text: text.split(","), default=list(WORKLOADS), help="b1,b8,mixed")
    parser.add_argument("--json", type=Path, help="also write all rates there")
    args = parser.parse_args()
    for workload in args.workloads:
        if workload != "mixed" and not workload.removeprefix("b").isdigit():
            parser.error(f"--workloads: {workload!r} is none; known: bN and mixed")
    spec = resolve_spec(args.model)
    args.vocab, args.max_model_len = spec.vocab_size, min(MAX_MODEL_LEN, spec.max_context)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a time limit, too, leaves a table
    table, failures = measure(args)
    report(table, failures, args)
    if args.json:
        cells = {
            name: {w: {"rates": c.rates, "others": c.others, "unserved": c.unserved} for w, c in cells.items()}
            for name, cells in table.items()
        }
        args.json.write_text(json.dumps({"cells": cells, "failures": failures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
