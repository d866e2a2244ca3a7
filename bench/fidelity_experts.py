"""Leave-one-out error of the tables beyond dense layers: experts, latent attention, collectives, linear attention.

    python bench/fidelity_experts.py [--folder SYSTEMS] [--system h100_sxm] [--stack vllm] [--shapes N] [--json]

Columns and the rule are those of `fidelity_tables.py`, which prints these rows too: N shapes of each table are drawn
(fixed seed), and answered by a table that lacks the shape, or lacks just the point.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

from twinfer.core.device import DeviceSpec, load_device
from twinfer.core.registry import Registry
from twinfer.plugins.op_time.kernel_tables import KernelTable
from twinfer.plugins.op_time.latent_tables import module_bound
from twinfer.plugins.op_time.silicon import SYSTEMS, SystemTables, installed_folder


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


def table_rows(tables: SystemTables, device: DeviceSpec, shapes: int) -> Iterator[dict[str, float | str]]:
    """Error rows of all tables: whole shapes left out, then points left out."""
    from fidelity_tables import point_errors, row, shape_errors

    for name, table in wide_tables(tables, device):
        if len(table.curves) > 4:
            yield row(f"{name}, shape left out", list(shape_errors(table, shapes, random.Random(0))))
        points = list(point_errors(table, shapes, random.Random(0)))
        if points:
            yield row(f"{name}, point left out", points)


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
    rows = []
    for r in table_rows(SystemTables(folder / "data" / args.system, args.stack, None), device, args.shapes):
        rows.append(r)
        if not args.json:
            print(
                f"{r['table']:60} {r['points']:7,} points   median {r['median']:6.1%}  mean {r['mean']:6.1%}  "
                f"p90 {r['p90']:6.1%}  bias {r['bias']:+6.1%}  80 % band covers {r['covered']:.0%}",
                flush=True,
            )
    if args.json:
        print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
