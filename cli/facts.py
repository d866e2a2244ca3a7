"""`twinfer models`, `devices` and `memory`: what is known of models and machines, without a run."""

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
    app.command("memory")(memory)
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
                row["name"], f"{row['num_params'] / 1e9:.3g} B", str(row["num_layers"]), row["attention"],
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


# --- memory -----------------------------------------------------------------------------------------

DEFAULT_CONTEXT = 4096


def memory(
    ctx: typer.Context,
    model: Annotated[
        str,
        typer.Option(
            "--model", "-m", help="A name of `twinfer models`, a config.json, a directory, a GGUF file or a hub id."
        ),
    ],
    context: Annotated[
        int | None,
        typer.Option(help="Prompt plus output tokens of a sequence; 4096, or the model's context if that is less."),
    ] = None,
    batch: Annotated[int, typer.Option(help="Sequences at once.")] = 1,
    dtype: Annotated[str, typer.Option(help="Of weights and activations; 'auto' is the checkpoint's.")] = "auto",
    kv_dtype: Annotated[str, typer.Option(help="Of the KV cache; 'auto' is the one of the weights.")] = "auto",
    attention: Annotated[
        str | None, typer.Option(metavar="NAME[:OPT=VAL,...]", help="Attention variant instead of the model's.")
    ] = None,
    quant: Annotated[str | None, typer.Option(metavar="NAME[:OPT=VAL,...]", help="Quantizer.")] = None,
    kv_cache: Annotated[
        str, typer.Option(metavar="NAME[:OPT=VAL,...]", help="KV cache, whose blocks are counted.")
    ] = "paged",
    device: Annotated[
        str | None, typer.Option(help="A name of `twinfer devices`: does it fit, and how many blocks?")
    ] = None,
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks; all numbers are of one rank.")] = 1,
    memory_fraction: Annotated[float, typer.Option(help="Share of device memory to use, in (0, 1].")] = 0.9,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(help="Tokens in one step, which activations depend on.")
    ] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Sequences in one step, which logits depend on.")] = None,
    as_json: Json = False,
) -> None:
    """Where the memory goes: weights, KV cache and activations, with the equations, and whether it fits a device.

    Examples:

    twinfer memory --model llama-2-70b --context 8192 --json

    twinfer memory --model llama-2-70b --attention mha --kv-dtype fp8

    twinfer memory --model llama-3.1-70b --device h100-sxm --tp 4 --batch 32
    """
    answer = memory_answer(
        ctx.obj, model=model, context=context, batch=batch, dtype=dtype, kv_dtype=kv_dtype, attention=attention,
        quant=quant, kv_cache=kv_cache, device=device, tp=tp, memory_fraction=memory_fraction,
        max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=max_num_seqs,
    )  # fmt: skip
    if as_json:
        show.print_json(answer)
        return
    each = " per device" if tp > 1 else ""
    table = show.new_table(f"{answer['model']}, {answer['batch']} x {answer['context']} tokens{each}", "", "", "")
    for name in ("weight_bytes", "kv_bytes_per_token", "kv_bytes", "activation_bytes", "total_bytes"):
        equation = answer["equations"].get(name, "")
        table.add_row(name.removesuffix("_bytes").replace("_", " "), show.size(answer[name]), equation)
    show.print_table(table)
    if "note" in answer:
        print(f"note: {answer['note']}")
    if device is None:
        return
    if not answer["fits"]:
        print(f"does not fit on {answer['device']}: {answer['problem']}")
        return
    print(
        f"on {answer['device']} ({show.size(answer['device_memory_bytes'])}): {answer['num_blocks']:,} KV blocks of "
        f"{answer['block_size']} tokens = {answer['kv_tokens']:,} tokens; {answer['worst_case_concurrency']:.1f} sequences "
        f"of {answer['max_model_len']:,} tokens at once"
    )
    print(f"num_blocks = {answer['equations']['num_blocks']}")


def memory_answer(
    session: Session, *, model: str, context: int | None, batch: int, dtype: str, kv_dtype: str,
    attention: str | None, quant: str | None, kv_cache: str, device: str | None, tp: int, memory_fraction: float,
    max_num_batched_tokens: int | None, max_num_seqs: int | None,
) -> dict[str, Any]:  # fmt: skip
    """Memory of one rank as JSON data, in bytes; each of `equations` evaluates to the number of its name.

    kv_bytes: of `batch` sequences of `context` tokens, without block rounding; what has left a window is not there.  total_bytes: weights, those and
    the activations.  With a device: whether one sequence fits, and the pool the engine would have there.
    """
    from twinfer.cli.flags import make_config
    from twinfer.core.catalog import resolve_spec
    from twinfer.core.config import Choice, parse_choice
    from twinfer.core.device import load_device
    from twinfer.core.dtypes import canonical_dtype
    from twinfer.core.errors import ConfigError
    from twinfer.core.memory import activation_bytes, budget_on
    from twinfer.core.policy import Limits
    from twinfer.core.registry import OPTION_OF_KIND
    from twinfer.core.setup import adapt_model, groups_of
    from twinfer.core.technique import Needs

    if batch < 1:
        raise ConfigError("--batch", batch, "out of range", "give at least 1")
    if context is not None and context < 1:
        raise ConfigError("--context", context, "out of range", "give at least 1")
    plain = resolve_spec(model)
    if context is None:
        context = min(DEFAULT_CONTEXT, plain.max_context)
    fields: dict[str, Any] = {"model": model, "tp": tp, "num_devices": tp, "memory_fraction": memory_fraction}
    fields["kv_cache"] = Choice(**parse_choice(kv_cache, "--kv-cache"))
    for key, value in (("dtype", dtype), ("kv_dtype", kv_dtype)):
        fields[key] = value if value == "auto" else canonical_dtype(value, "--" + key.replace("_", "-"))
    for key, text in (("attention", attention), ("quantizer", quant)):
        fields[key] = None if text is None else Choice(**parse_choice(text, OPTION_OF_KIND[key]))
    for key, limit in (("max_num_batched_tokens", max_num_batched_tokens), ("max_num_seqs", max_num_seqs)):
        if limit is not None:
            fields[key] = limit
    config = make_config(fields)
    spec, _ = adapt_model(
        config, plain, session.registry, Needs(world="simulator", device=device or "cpu", dtype=plain.dtype)
    )
    cache = session.registry.build("kv_cache", config.kv_cache)
    block_size = cache.block_size(Limits(max_model_len=max(2, context)))
    groups = groups_of(spec, cache)
    per_token, weights = spec.kv_bytes_per_token(tp=tp), int(spec.weight_bytes(tp))
    kv_bytes, equation = batch * context * per_token, f"{batch} * {context} * {per_token!r}"
    if any(group.window is not None for group in groups):
        layers: dict[int, int] = {}  # how many keep so many tokens
        for group in groups:
            kept = min(context, group.window or context)
            layers[kept] = layers.get(kept, 0) + len(group.layers)
        per_layer = spec.kv_bytes_per_token_layer(tp=tp)
        kv_bytes = batch * sum(kept * count for kept, count in layers.items()) * per_layer
        equation = f"{batch} * ({' + '.join(f'{count} * {kept}' for kept, count in layers.items())}) * {per_layer!r}"
    activations = activation_bytes(spec, config.max_num_batched_tokens, config.max_num_seqs, tp)
    answer: dict[str, Any] = {
        "model": spec.name, "attention": spec.variant, "dtype": spec.dtype, "kv_dtype": spec.kv_dtype, "tp": tp,
        "context": context, "batch": batch, "kv_bytes_per_token": per_token, "kv_bytes": kv_bytes,
        "weight_bytes": weights, "activation_bytes": activations, "total_bytes": weights + kv_bytes + activations,
    }  # fmt: skip
    equations = {"kv_bytes": equation}
    if device is not None:
        on = load_device(device, session.registry).placed(weights)
        answer |= {
            "device": on.name,
            "device_memory_bytes": on.usable_bytes,
            "block_size": block_size,
            "num_blocks": None,
        }
        try:
            room = budget_on(
                spec, on, config.model_copy(update={"max_model_len": max(2, context)}), block_size=block_size,
                groups=groups, expected_lengths=(context,),
            )  # fmt: skip
        except ConfigError as error:
            if error.option not in ("--model", "--max-model-len"):
                raise
            answer |= {"fits": False, "problem": f"{error.problem}; {error.fix}"}
        else:
            answer |= {
                "fits": room.worst_case_concurrency >= batch, "num_blocks": room.num_blocks,
                "kv_pool_bytes": room.kv_pool_bytes, "kv_tokens": room.kv_tokens, "max_model_len": room.max_model_len,
                "worst_case_concurrency": room.worst_case_concurrency, "segments": dict(room.segments()),
            }  # fmt: skip
            if not answer["fits"]:
                answer["problem"] = (
                    f"{batch} sequences of {context} tokens were asked for, {room.worst_case_concurrency:.1f} fit; "
                    f"use --batch {int(room.worst_case_concurrency)}, or raise --tp or --memory-fraction"
                )
            equations |= room.equations
    if context > plain.max_context:
        answer["note"] = f"{plain.name} was made for {plain.max_context} tokens, {context} were asked for"
    answer["equation"] = f"kv_bytes = {equations['kv_bytes']}"
    answer["equations"] = equations
    return {
        k: int(v) if isinstance(v, float) and k.endswith(("_bytes", "_token")) and v.is_integer() else v
        for k, v in answer.items()
    }
