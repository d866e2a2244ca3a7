"""`twinfer models` and `devices`: what is known of models and machines, without a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from twinfer.cli import show
from twinfer.cli.session import Session

if TYPE_CHECKING:
    from rich.table import Table

    from twinfer.core.device import DeviceSpec
    from twinfer.core.spec import ModelSpec

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


def add_commands(app: typer.Typer) -> None:
    app.command("models")(models)
    app.command("devices")(devices)


# --- models -----------------------------------------------------------------------------------------


def models(
    ctx: typer.Context,
    model: Annotated[
        str | None, typer.Argument(help="One model: name, config.json, directory, GGUF file or hub id.")
    ] = None,
    as_json: Json = False,
) -> None:
    """List the shipped model specs, or describe one model.

    Examples:

    twinfer models

    twinfer models llama-3.1-8b --json
    """
    from twinfer.core.catalog import resolve_spec, spec_names

    rows = [describe_model(name, resolve_spec(name)) for name in ([model] if model else spec_names())]
    if as_json:
        show.print_json(rows[0] if model else rows)
        return
    if model:
        table = facts_table(rows[0])
    else:
        table = show.new_table(
            "", "name", "parameters", "layers", "attention", "context", "KV per token", "weights here"
        )
        for row in rows:
            table.add_row(
                row["name"], f"{show.number(row['num_params'] / 1e9)} B", str(row["num_layers"]), row["attention"],
                show.number(row["max_context"]), show.size(row["kv_bytes_per_token"]), row["weights"] or "",
            )  # fmt: skip
    show.print_table(table)


def describe_model(name: str, spec: ModelSpec) -> dict[str, Any]:
    """A model as JSON data. Bytes are in the spec's own dtypes, on one device."""
    from twinfer.core.catalog import locate_weights

    weights = locate_weights(name)
    return {
        "name": spec.name, "family": spec.family, "attention": spec.variant, "num_params": spec.num_params(),
        "num_active_params": spec.num_params(active=True), "num_layers": spec.num_layers,
        "hidden_size": spec.hidden_size, "num_heads": spec.num_heads, "num_kv_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim, "intermediate_size": spec.intermediate_size, "vocab_size": spec.vocab_size,
        "max_context": spec.max_context, "dtype": spec.dtype, "weight_bytes": spec.weight_bytes(),
        "kv_bytes_per_token": spec.kv_bytes_per_token(), "num_linear_layers": spec.num_linear_layers,
        "state_bytes_per_seq": int(spec.state_bytes_per_seq()),
        "image_tokens": spec.vision.prefix_tokens if spec.vision else None, "weights": None if weights is None else str(weights),
    }  # fmt: skip


# --- devices ----------------------------------------------------------------------------------------


def devices(
    ctx: typer.Context,
    device: Annotated[str | None, typer.Argument(help="One device: a name, or a JSON file.")] = None,
    links: Annotated[bool, typer.Option("--links", help="List the links that device files name.")] = False,
    as_json: Json = False,
) -> None:
    """List the known devices, or describe one; after `twinfer calibrate` this machine is `local`.

    Examples:

    twinfer devices

    twinfer devices --links

    twinfer devices h100-sxm --json
    """
    from twinfer.core.device import all_devices, calibrated_path, load_device

    session: Session = ctx.obj
    if links:
        list_links(session, as_json)
        return
    if device:
        found = [load_device(device, session.registry)]
    else:
        found = all_devices(session.registry)
        if calibrated_path().is_file():
            found = [load_device("local", session.registry), *found]
    rows = [describe_device(spec) for spec in found]
    if as_json:
        show.print_json(rows[0] if device else rows)
        return
    if device:
        table = facts_table(rows[0])
    else:
        table = show.new_table(
            "", "name", "kind", "memory", "bandwidth", "16 bit", "ridge", "link", "power", "US$/h", "calibrated"
        )
        for spec, row in zip(found, rows, strict=True):
            wide = "bfloat16" if "bfloat16" in spec.peak_flops else "float16"
            peak = spec.peak_flops.get(wide)
            table.add_row(
                spec.name, spec.kind, show.size(spec.usable_bytes), f"{spec.memory_bandwidth / 1e9:,.0f} GB/s",
                "" if peak is None else f"{show.number(peak / 1e12)} TFLOP/s",
                "" if peak is None else f"{spec.ridge(wide):.0f} FLOP/B",
                "" if spec.link_bandwidth is None else f"{spec.link_bandwidth / 1e9:,.0f} GB/s",
                "" if spec.tdp_watts is None else f"{show.number(spec.tdp_watts)} W",
                "" if spec.price_per_hour is None else f"{spec.price_per_hour:.2f}",
                "yes" if row["calibrated"] else "",
            )  # fmt: skip
    show.print_table(table)


def list_links(session: Session, as_json: bool) -> None:
    """The known links, one a row."""
    from twinfer.core.link import link_files, read_link

    found = [read_link(path) for path in link_files(session.registry).values()]
    if as_json:
        show.print_json([link.model_dump(mode="json") for link in found])
        return
    table = show.new_table("", "name", "a direction", "latency", "reached", "source")
    for link in found:
        table.add_row(
            link.name, f"{show.number(link.bandwidth / 1e9)} GB/s", "" if link.latency is None else show.seconds(link.latency),
            "" if link.efficiency is None else show.percent(link.efficiency), f"{link.source}, {link.date}",
        )  # fmt: skip
    show.print_table(table)


def describe_device(spec: DeviceSpec) -> dict[str, Any]:
    """A device as JSON data, with its ridge points instead of its calibration tables."""
    fields = spec.model_dump(mode="json", exclude={"calibration"})
    ridges = {dtype: spec.ridge(dtype) for dtype in spec.peak_flops}
    return {**fields, "ridge_flop_per_byte": ridges, "calibrated": bool(spec.calibration)}


def facts_table(facts: dict[str, Any]) -> Table:
    """What is known of one thing, a line each, with units; what is not known and nested curves are left out."""
    table = show.new_table(facts["name"], "", "")
    table.columns[1].justify = "left"
    for key, value in facts.items():
        for part, item in value.items() if isinstance(value, dict) else [("", value)]:
            if item not in (None, "", []) and key != "efficiency":
                table.add_row(f"{key.replace('_', ' ')} {part}".strip(), _with_unit(key, item))
    return table


def _with_unit(key: str, value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if key == "tiers":
        return ", ".join(
            f"{t['name']} {show.size(t['bytes'])} at {show.number(t['bandwidth'] / 1e9)} GB/s" for t in value
        )
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if key.endswith("_latency"):
        return show.seconds(value)
    if key.endswith("_bytes") or key in ("kv_bytes_per_token", "state_bytes_per_seq"):
        return show.size(value)
    if key.endswith("_bandwidth"):
        return f"{show.number(value / 1e9)} GB/s"
    if key == "peak_flops":
        return f"{show.number(value / 1e12)} TFLOP/s"
    if key == "ridge_flop_per_byte":
        return f"{show.number(value)} FLOP/B"
    if key.endswith("_watts"):
        return f"{show.number(value)} W"
    if key == "price_per_hour":
        return f"US$ {value:.2f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
