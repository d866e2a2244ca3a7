"""Leave-one-out error of the tables beyond dense layers: experts, latent attention, collectives, linear attention.

    python bench/fidelity_experts.py [--folder SYSTEMS] [--system h100_sxm] [--stack vllm] [--shapes N] [--json]

Columns and the rule are those of `fidelity_tables.py`: N shapes of each table are drawn (fixed seed) and answered by a
table that lacks the shape, or lacks just the point; experts also by a table that lacks all shapes of their model.
`fidelity.py` prints these rows, too.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

from twinfer.core.device import DeviceSpec
from twinfer.plugins.op_time.kernel_tables import KernelTable
from twinfer.plugins.op_time.latent_tables import module_bound
from twinfer.plugins.op_time.silicon import SYSTEMS, SystemTables, installed_folder

sys.path.insert(0, str(Path(__file__).resolve().parent))

from fidelity_tables import device_of, point_errors, row, shape_errors, text

SYSTEM_STACKS = (("h100_sxm", "vllm"), ("h100_sxm", "trtllm"), ("h100_sxm", "sglang"), ("h200_sxm", "vllm"))


def wide_tables(tables: SystemTables, device: DeviceSpec) -> Iterator[tuple[str, KernelTable]]:
    """(name, table) of every table that this system has under the stack of `tables`."""
    experts = tables.experts
    for kind, law in sorted(experts.rows()):
        table = experts.table(kind, law, device)
        if table is not None and len(table.curves) > 4:
            yield f"experts {kind} {law}", table
    for phase in ("context", "generation"):
        for kv in ("bfloat16", "fp8"):
            rows = tables.latent.kernels(phase, kv)
            if rows:
                table = tables.latent.table(phase, kv, "bfloat16", device)
                assert table is not None
                yield f"latent attention {phase}, {kv} KV", table
            for linear in ("bfloat16", "fp8_block"):
                rows = tables.latent.modules(phase, kv, linear)
                if rows:
                    yield (
                        f"latent block {phase}, {kv} KV, {linear}",
                        KernelTable(rows, module_bound(phase, kv, linear, device)),
                    )
    for what in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        table = tables.exchange.collective(what, device)
        if table is not None:
            yield what, table
    for phase in ("dispatch", "combine"):
        table = tables.exchange.experts(phase, device)
        if table is not None:
            yield f"expert {phase}", table
    for kind in ("gated_delta_net", "mamba2"):
        for op in ("linear_conv", "linear_attention"):
            for phase in ("context", "generation"):
                table = tables.state.table(kind, op, phase, device)
                if table is not None:
                    yield f"{kind} {op.removeprefix('linear_')} {phase}", table


def model_errors(table: KernelTable, models: int, rng: random.Random) -> Iterator[tuple[float, float]]:
    """(relative error, relative sigma) of all experts of `models` models, each model left out whole: hidden size, experts
    per token and number of experts tell one model's shapes from another's."""
    known = sorted({(shape[0], *shape[2:4]) for shape in table.curves})
    for model in rng.sample(known, min(models, len(known))):
        mine = [shape for shape in table.curves if (shape[0], *shape[2:4]) == model]
        rest = {
            (shape, point): seconds
            for shape, curve in table.curves.items() if shape not in mine
            for point, seconds in zip(curve.points, curve.seconds, strict=True)
        }  # fmt: skip
        other = KernelTable(rest, table.bound, slow=table.slow)
        for shape in mine[::4]:
            curve = table.curves[shape]
            for point, seconds in zip(curve.points, curve.seconds, strict=True):
                answer = other.time(shape, point)
                if answer is not None:
                    yield answer.seconds / seconds - 1, answer.spread


def table_rows(tables: SystemTables, device: DeviceSpec, shapes: int) -> Iterator[dict[str, float | str]]:
    """Error rows of all tables: shapes left out whole (of experts models, too), then points left out."""
    for name, table in wide_tables(tables, device):
        if len(table.curves) > 4:
            yield row(f"{name}, shape left out", list(shape_errors(table, shapes, random.Random(0))))
        if name.startswith("experts") and len({(s[0], *s[2:4]) for s in table.curves}) > 3:
            yield row(f"{name}, model left out", list(model_errors(table, max(2, shapes // 10), random.Random(0))))
        points = list(point_errors(table, shapes, random.Random(0)))
        if points:
            yield row(f"{name}, point left out", points)


def tables(folder: Path, shapes: int = 40) -> Iterator[tuple[str, str]]:
    """(title, text) for `fidelity.py`."""
    for system, stack in SYSTEM_STACKS:
        device = device_of(system)
        found = list(table_rows(SystemTables(folder / "data" / system, stack, None), device, shapes))
        yield f"(a) experts, latent attention, collectives, states, leave-one-out: {system}, {stack}", text(found)


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
    if args.system not in SYSTEMS.values():
        parser.error(f"no device reads the system {args.system!r}; known: {', '.join(sorted(set(SYSTEMS.values())))}")
    found = SystemTables(folder / "data" / args.system, args.stack, None)
    rows = []
    for r in table_rows(found, device_of(args.system), args.shapes):
        rows.append(r)
        if not args.json:
            print(text([r]), flush=True)
    if args.json:
        print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
