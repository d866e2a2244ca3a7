"""How close predictions are to measurements: every table, by one command.

    python bench/fidelity.py [--folder SYSTEMS] [--replay FOLDER] [--sample N] [--jobs 2] [--only a b c d]

(a) kernel tables, leave-one-out (`fidelity_tables.py`, `fidelity_experts.py`), and what differs between versions
(b) served rows on Hopper (`fidelity_served.py`)
(c) replay of 300 requests that vLLM served (`replay.py`)
(d) figures that others have published (`fidelity_published.py`)

Tables (a), (b) and (d) read the package aiconfigurator-core (`pip install 'twinfer[silicon]'`, or --folder), (c) a
recorded run; what is not at hand is said and left out. Nothing is fitted by any of them.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import fidelity_experts  # noqa: E402
import fidelity_published  # noqa: E402
import fidelity_served  # noqa: E402
import fidelity_tables  # noqa: E402

from twinfer.plugins.op_time.silicon import SystemTables, installed_folder  # noqa: E402

REPLAY = HERE.parent.parent / "shared" / "data" / "vllm_replay" / "rtxpro6000_llama31_8b"
KERNELS = (("h100_sxm", "vllm"), ("h100_sxm", "trtllm"), ("h100_sxm", "sglang"), ("h200_sxm", "vllm"))


def title(text: str) -> None:
    print(f"\n=== {text}", flush=True)


def kernel_tables(folder: Path, shapes: int) -> None:
    for system, stack in KERNELS:
        title(f"(a) kernel tables, leave-one-out: {system}, {stack}")
        print(fidelity_tables.text(fidelity_tables.left_out(folder, system, stack, shapes)), flush=True)
        tables, device = SystemTables(folder / "data" / system, stack, None), fidelity_tables.device_of(system)
        for row in fidelity_experts.table_rows(tables, device, max(8, shapes // 4)):
            print(fidelity_tables.text([row]), flush=True)
    title("(a) the same kernels under two versions of a stack: h100_sxm, h200_sxm")
    for system in ("h100_sxm", "h200_sxm"):
        print(fidelity_tables.text(fidelity_tables.between_versions(folder, system)))


def served(folder: Path, number: int | None, jobs: int) -> None:
    everything = fidelity_served.read(folder)
    rows = fidelity_served.sample(everything, number, seed=1)
    title(f"(b) served rows on Hopper: {len(rows)} of {len(everything)}")
    begin, done = time.monotonic(), 0

    def on_row(result: dict[str, Any]) -> None:
        nonlocal done
        done += 1
        if sys.stderr.isatty():
            print(f"\r{done}/{len(rows)} rows, {time.monotonic() - begin:.0f} s", end="", file=sys.stderr)

    results = fidelity_served.evaluate(rows, folder, jobs, on_row)
    seen = [row["id"] for row in fidelity_served.sample(everything, fidelity_served.SEEN)]
    print(fidelity_served.table(results, seen))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="`systems` folder; default: of the installed aiconfigurator-core")
    parser.add_argument("--replay", type=Path, default=REPLAY, help="folder of the recorded run of (c)")
    parser.add_argument("--sample", type=int, help="so many served rows (seed 1), and a part of (d); default: all")
    parser.add_argument("--shapes", type=int, default=120, help="shapes drawn per kernel table")
    parser.add_argument("--jobs", type=int, default=2, help="processes for (b)")
    parser.add_argument("--only", nargs="+", choices="abcd", default=list("abcd"), help="which tables")
    args = parser.parse_args()
    folder = args.folder or installed_folder()
    if folder is None and set(args.only) - {"c"}:
        print("(a), (b), (d) left out: aiconfigurator-core is not installed (pip install 'twinfer[silicon]'; --folder)")
    if folder is not None and "a" in args.only:
        kernel_tables(folder, args.shapes)
    if folder is not None and "b" in args.only:
        served(folder, args.sample, args.jobs)
    if "c" in args.only:
        title("(c) replay of a vLLM run")
        if (args.replay / "requests.jsonl").is_file():
            subprocess.run([sys.executable, str(HERE / "replay.py"), str(args.replay)], check=True)
        else:
            print(f"left out: {args.replay} holds no requests.jsonl (--replay FOLDER)")
    if folder is not None and "d" in args.only:
        title("(d) published figures")
        print(fidelity_published.table(fidelity_published.results(folder, quick=args.sample is not None)))


if __name__ == "__main__":
    main()
