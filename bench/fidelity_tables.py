"""Leave-one-out error of the op-time model `silicon` on the kernel tables it reads.

    python bench/fidelity_tables.py [--folder SYSTEMS] [--system h100_sxm] [--stack vllm] [--shapes N] [--json]

For each table N shapes are drawn (fixed seed); every point of such a shape is asked of a model that has never seen the
shape, and every inner point of a model that lacks just that point. Prints points, median, mean and 90th percentile of
the relative error, its bias, and how many measured times the 80 % band covers.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
from collections.abc import Iterator
from pathlib import Path

from twinfer.core.device import load_device
from twinfer.core.registry import Registry
from twinfer.plugins.op_time.kernel_tables import KernelTable
from twinfer.plugins.op_time.silicon import SYSTEMS, SystemTables, installed_folder

Z80 = 1.2816


def shape_errors(table: KernelTable, count: int, rng: random.Random) -> Iterator[tuple[float, float]]:
    """(relative error, relative sigma) of all points of `count` shapes, each shape left out whole."""
    shapes = sorted(table.curves)
    for shape in rng.sample(shapes, min(count, len(shapes))):
        curve = table.curves[shape]
        for point, seconds in zip(curve.points, curve.seconds, strict=True):
            answer = table.time(shape, point, leave_out=True)
            if answer is not None:
                yield answer.seconds / seconds - 1, answer.spread


def point_errors(table: KernelTable, count: int, rng: random.Random) -> Iterator[tuple[float, float]]:
    """The same of inner points, each left out alone: read off its two neighbours."""
    shapes = sorted(table.curves)
    for shape in rng.sample(shapes, min(count, len(shapes))):
        curve = table.curves[shape]
        for i in range(1, len(curve.points) - 1):
            low, high = curve.log_points[i - 1], curve.log_points[i + 1]
            share = (math.log2(curve.points[i]) - low) / (high - low)
            use = curve.log_use[i - 1] + (curve.log_use[i + 1] - curve.log_use[i - 1]) * share
            predicted = table.bound(shape, curve.points[i]) / 2**use
            yield predicted / curve.seconds[i] - 1, 0.04


def row(name: str, found: list[tuple[float, float]]) -> dict[str, float | str]:
    errors = [e for e, _ in found]
    size = sorted(map(abs, errors))
    return {
        "table": name, "points": len(size), "median": statistics.median(size), "mean": statistics.fmean(size),
        "p90": size[int(0.9 * (len(size) - 1))], "bias": statistics.fmean(errors),
        "covered": sum(abs(e) <= Z80 * s for e, s in found) / len(found),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="`systems` folder; default: of the installed aiconfigurator-core")
    parser.add_argument("--system", default="h100_sxm", help="system of the package")
    parser.add_argument("--stack", default="vllm")
    parser.add_argument("--shapes", type=int, default=120, help="shapes drawn per table")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    folder = args.folder or installed_folder()
    if folder is None:
        parser.error("aiconfigurator-core is not installed; pip install 'twinfer[silicon]' or give --folder")
    names = [name for name, system in SYSTEMS.items() if system == args.system]
    if not names:
        parser.error(f"no device reads the system {args.system!r}; known: {', '.join(sorted(set(SYSTEMS.values())))}")
    device = load_device(names[-1], Registry(entry_points=False))
    tables = SystemTables(folder / "data" / args.system, args.stack, None)
    wanted: list[tuple[str, KernelTable | None]] = [
        ("gemm bfloat16", tables.gemm("bfloat16", device)),
        ("gemm fp8", tables.gemm("fp8", device)),
        ("prefill attention 128", tables.prefill(device, 128, 0, "bfloat16")),
        ("decode attention 128", tables.decode(device, 128, 0, "bfloat16")),
        ("all_reduce", tables.collective("all_reduce", device)),
    ]
    rows = []
    for name, table in wanted:
        if table is None:
            print(f"{name}: {args.system} has no such table under {args.stack}")
            continue
        rng = random.Random(0)
        if len(table.curves) > 4:
            rows.append(row(f"{name}, shape left out", list(shape_errors(table, args.shapes, rng))))
        rows.append(row(f"{name}, point left out", list(point_errors(table, args.shapes, random.Random(0)))))
    if args.json:
        print(json.dumps(rows, indent=1))
        return
    print(f"{args.system}, {args.stack}")
    for r in rows:
        print(
            f"{r['table']:40} {r['points']:7,} points   median {r['median']:6.1%}  mean {r['mean']:6.1%}  "
            f"p90 {r['p90']:6.1%}  bias {r['bias']:+6.1%}  80 % band covers {r['covered']:.0%}"
        )


if __name__ == "__main__":
    main()
