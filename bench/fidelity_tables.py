"""Leave-one-out error of the op-time model `silicon` on the kernel tables it reads.

    python bench/fidelity_tables.py [--folder SYSTEMS] [--system h100_sxm] [--stack vllm] [--shapes N] [--json]

For each table N shapes are drawn (fixed seed); every point of such a shape is asked of a model that has never seen the
shape, and every inner point of a model that lacks just that point. Prints points, median, mean and 90th percentile of
the relative error, its bias, and how many measured times the 80 % band covers.

`between versions`: the same kernel and shape as measured under two versions of a stack, for all stacks of the system:
what a prediction is unsure by when another version runs than was measured (`silicon.VERSION_SPREAD`).
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from twinfer.core.device import DeviceSpec, load_device
from twinfer.core.registry import Registry
from twinfer.plugins.op_time.kernel_tables import KernelTable
from twinfer.plugins.op_time.silicon import SYSTEMS, VERSION_SPREAD, SystemTables, installed_folder

Z80 = 1.2816
STACKS = ("vllm", "trtllm", "sglang")
Rows = list[dict[str, Any]]


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
            yield predicted / curve.seconds[i] - 1, table.spread_between()


def row(name: str, found: list[tuple[float, float]]) -> dict[str, Any]:
    errors = [e for e, _ in found]
    size = sorted(map(abs, errors))
    return {
        "table": name, "points": len(size), "median": statistics.median(size), "mean": statistics.fmean(size),
        "p90": size[int(0.9 * (len(size) - 1))], "bias": statistics.fmean(errors),
        "covered": sum(abs(e) <= Z80 * s for e, s in found) / len(found),
    }  # fmt: skip


def device_of(system: str) -> DeviceSpec:
    """A device that reads `system`; StopIteration for an unknown one."""
    name = next(name for name in reversed(SYSTEMS) if SYSTEMS[name] == system)
    return load_device(name, Registry(entry_points=False))


def left_out(folder: Path, system: str, stack: str, shapes: int = 120) -> Rows:
    """Leave-one-out rows of the tables of `system` under `stack`; a table that is not there gives a row of words."""
    device = device_of(system)
    tables = SystemTables(folder / "data" / system, stack, None)
    wanted: list[tuple[str, KernelTable | None]] = [
        ("gemm bfloat16", tables.gemm("bfloat16", device)),
        ("gemm fp8", tables.gemm("fp8", device)),
        ("gemm fp8_block", tables.gemm("fp8_block", device)),
        ("prefill attention, bf16 KV", tables.attention.prefill(device, 128, 0, "bfloat16")),
        ("decode attention, bf16 KV", tables.attention.decode(device, 128, 0, "bfloat16")),
        ("prefill attention, fp8 KV", tables.attention.prefill(device, 128, 0, "fp8")),
        ("decode attention, fp8 KV", tables.attention.decode(device, 128, 0, "fp8")),
        ("narrowing to fp8", tables.narrowing(device)),
        ("all_reduce", tables.collective("all_reduce", device)),
    ]
    rows: Rows = []
    for name, table in wanted:
        if table is None:
            rows.append({"table": name, "missing": f"{system} has no such table under {stack}"})
            continue
        if len(table.curves) > 4:
            rows.append(row(f"{name}, shape left out", list(shape_errors(table, shapes, random.Random(0)))))
        rows.append(row(f"{name}, point left out", list(point_errors(table, shapes, random.Random(0)))))
    return rows


def between_versions(folder: Path, system: str) -> Rows:
    """The same points under two versions of a stack: older as the prediction of newer."""
    device = device_of(system)
    found: list[tuple[str, list[tuple[float, float]]]] = []
    asked: dict[str, tuple[str, Callable[[SystemTables], KernelTable | None]]] = {
        "gemm bfloat16": ("gemm", lambda t: t.gemm("bfloat16", device)),
        "gemm fp8": ("gemm", lambda t: t.gemm("fp8", device)),
        "all_reduce": ("comm", lambda t: t.collective("all_reduce", device)),
    }
    for stack in STACKS:
        home = folder / "data" / system
        for name, (family, table_of) in asked.items():
            versions = [
                p.name
                for p in (home / family / stack).glob("*")
                if any(p.glob("*allreduce*" if family == "comm" else "gemm_*"))
            ]
            tables = {v: table_of(SystemTables(home, stack, v)) for v in versions}
            newest = table_of(SystemTables(home, stack, None))
            spread = VERSION_SPREAD["gemm" if family == "gemm" else "comm"]
            for version, table in sorted(tables.items()):
                if table is None or newest is None:
                    continue
                pairs = [
                    (s / other.seconds[other.points.index(p)] - 1, spread)
                    for shape, curve in table.curves.items() if (other := newest.curves.get(shape)) is not None
                    for p, s in zip(curve.points, curve.seconds, strict=True) if p in other.points
                ]  # fmt: skip
                if pairs and any(e for e, _ in pairs):
                    found.append((f"{name}, {stack} {version} for the newest", pairs))
    return [row(name, pairs) for name, pairs in found]


def text(rows: Rows) -> str:
    lines = []
    for r in rows:
        if "missing" in r:
            lines.append(f"{r['table']:44} {r['missing']}")
            continue
        lines.append(
            f"{r['table']:44} {r['points']:7,} points   median {r['median']:6.1%}  mean {r['mean']:6.1%}  "
            f"p90 {r['p90']:6.1%}  bias {r['bias']:+6.1%}  80 % band covers {r['covered']:.0%}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="`systems` folder; default: of the installed aiconfigurator-core")
    parser.add_argument("--system", default="h100_sxm", help="system of the package")
    parser.add_argument("--stack", default="vllm", choices=STACKS)
    parser.add_argument("--shapes", type=int, default=120, help="shapes drawn per table")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    folder = args.folder or installed_folder()
    if folder is None:
        parser.error("aiconfigurator-core is not installed; pip install 'twinfer[silicon]' or give --folder")
    if args.system not in SYSTEMS.values():
        parser.error(f"no device reads the system {args.system!r}; known: {', '.join(sorted(set(SYSTEMS.values())))}")
    rows, versions = left_out(folder, args.system, args.stack, args.shapes), between_versions(folder, args.system)
    if args.json:
        print(json.dumps({"left_out": rows, "between_versions": versions}, indent=1))
        return
    print(f"{args.system}, {args.stack}\n{text(rows)}\nbetween versions, {args.system}\n{text(versions)}")


if __name__ == "__main__":
    main()
