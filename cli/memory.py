"""`twinfer memory`: where the memory of a replica goes, whether it fits, and what would make it fit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from twinfer.cli import show
from twinfer.cli.session import Session

if TYPE_CHECKING:
    from twinfer.core.memory_parts import RankMemory
    from twinfer.core.spec import ModelSpec


def add_commands(app: typer.Typer) -> None:
    app.command("memory")(memory)


DEFAULT_CONTEXT = 4096
_ROWS = {
    "weight_bytes": "weights", "kv_bytes_per_token": "KV per token", "kv_bytes": "KV", "state_bytes": "states",
    "activation_bytes": "activations", "library_bytes": "libraries", "outside_bytes": "context, graphs",
    "total_bytes": "total", "all_weight_bytes": "",
}  # fmt: skip
_IF_ANY = ("state_bytes", "library_bytes", "outside_bytes")
"""Rows that are left out where there is nothing of it."""
SAMPLED = 256  # requests whose lengths stand for a distribution


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
        typer.Option(
            help="Prompt plus output tokens of a sequence; the longest of --input-len and --output-len, else 4096 or the model's context."
        ),
    ] = None,
    batch: Annotated[int, typer.Option(help="Sequences at once.")] = 1,
    input_len: Annotated[
        int | None, typer.Option(help="Mean tokens of a prompt, for how many typical requests fit.")
    ] = None,
    output_len: Annotated[int | None, typer.Option(help="Mean tokens of an answer, with --input-len.")] = None,
    lengths: Annotated[str | None, typer.Option(help="Of those: fixed, uniform or lognormal.")] = None,
    spread: Annotated[float | None, typer.Option(help="Their width, relative to the mean.")] = None,
    images_per_request: Annotated[float | None, typer.Option(help="Images in each of those prompts.")] = None,
    image_size: Annotated[str | None, typer.Option(metavar="WxH", help="Pixels of each image.")] = None,
    image_tokens: Annotated[int | None, typer.Option(help="Tokens of each in the prompt, instead of a size.")] = None,
    image_compression: Annotated[float | None, typer.Option(help="How many times fewer tokens they take.")] = None,
    dtype: Annotated[str, typer.Option(help="Of weights and activations; 'auto' is the checkpoint's.")] = "auto",
    kv_dtype: Annotated[str, typer.Option(help="Of the KV cache; 'auto' is the one of the weights.")] = "auto",
    attention: Annotated[
        str | None, typer.Option(metavar="NAME[:OPT=VAL,...]", help="Attention variant instead of the model's.")
    ] = None,
    quant: Annotated[str | None, typer.Option(metavar="NAME[:OPT=VAL,...]", help="Quantizer, or none.")] = None,
    kv_cache: Annotated[
        str, typer.Option(metavar="NAME[:OPT=VAL,...]", help="KV cache, whose blocks are counted.")
    ] = "paged",
    device: Annotated[
        str | None, typer.Option(help="A name of `twinfer devices`: does it fit, and how many blocks?")
    ] = None,
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks; all numbers are of one rank.")] = 1,
    pp: Annotated[int, typer.Option(help="Pipeline stages.")] = 1,
    cp: Annotated[int, typer.Option(help="Ranks that share the tokens of a prompt.")] = 1,
    dp: Annotated[int, typer.Option(help="Groups of ranks that attend to different requests.")] = 1,
    ep: Annotated[int, typer.Option(help="Ranks that the experts are spread over.")] = 1,
    memory_fraction: Annotated[float, typer.Option(help="Share of device memory to use, in (0, 1].")] = 0.9,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(help="Tokens in one step, which activations depend on.")
    ] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Sequences in one step, which logits depend on.")] = None,
    num_kv_blocks: Annotated[
        int | None, typer.Option(help="Blocks of the KV pool; else what the device leaves, on a CPU at most 4 GiB.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Where the memory goes, rank by rank, with the equations; whether it fits a device, and what would make it fit.

    Exit code 3, also with --json: it does not fit the device.

    Examples:

    twinfer memory --model llama-2-70b --context 8192 --json

    twinfer memory --model llama-2-70b --attention mha --kv-dtype fp8

    twinfer memory --model llama-3.1-70b --device h100-sxm --tp 4 --batch 32 --input-len 1000 --output-len 300

    twinfer memory --model deepseek-v3 --device h200-sxm --tp 4 --dp 4 --ep 16
    """
    if device is None:
        _refuse_without_device(ctx, "memory_fraction")
        _refuse_without_device(ctx, "num_kv_blocks")
    answer = memory_answer(
        ctx.obj, model=model, context=context, batch=batch, dtype=dtype, kv_dtype=kv_dtype, attention=attention,
        quant=quant, kv_cache=kv_cache, device=device, layout=(tp, pp, cp, dp, ep), memory_fraction=memory_fraction,
        max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=max_num_seqs,
        num_kv_blocks=num_kv_blocks, typical=_given(
            input_len=input_len, output_len=output_len, lengths=lengths, spread=spread,
            images_per_request=images_per_request, image_size=image_size, image_tokens=image_tokens,
            image_compression=image_compression,
        ),
    )  # fmt: skip
    if as_json:
        show.print_json(answer)
    else:
        _print(answer)
    if answer.get("fits") is False:
        raise typer.Exit(show.NO)


def _print(answer: dict[str, Any]) -> None:
    each = ", per device" if answer["num_devices"] > 1 else ""
    table = show.new_table(f"{answer['model']}, {answer['batch']} x {answer['context']} tokens{each}", "", "", "")
    for name, title in _ROWS.items():
        if name == "total_bytes" and "device" not in answer:
            title = "total without libraries, context"
        if name == "all_weight_bytes":
            title = f"weights of all {answer['num_devices']} devices"
        shown = answer["num_devices"] > 1 if name == "all_weight_bytes" else answer[name] or name not in _IF_ANY
        if shown:
            table.add_row(title, show.size(answer[name]), answer["equations"][name])
    show.print_table(table)
    if "note" in answer:
        print(f"note: {answer['note']}")
    if "device" not in answer:
        return
    _print_ranks(answer)
    if not answer["fits"]:
        print(f"does not fit on {answer['device']}: {answer['problem']}")
        return
    expected = answer["expected_concurrency"]
    print(
        f"fits on {answer['device']} ({show.size(answer['device_memory_bytes'])}): {answer['num_blocks']:,} KV blocks of "
        f"{answer['block_size']} tokens = {answer['kv_tokens']:,} tokens; {answer['worst_case_concurrency']:.1f} sequences "
        f"of {answer['max_model_len']:,} tokens at once"
        + ("" if expected is None else f", {expected:.1f} of the lengths expected")
    )
    print(f"num_blocks = {answer['equations']['num_blocks']}")
    if "pool_note" in answer:
        print(answer["pool_note"])


def _refuse_without_device(ctx: typer.Context, name: str) -> None:
    """ConfigError for an option that only says something about a device."""
    from twinfer.core.errors import ConfigError

    source = ctx.get_parameter_source(name)
    if source is not None and source.name == "COMMANDLINE":
        option = "--" + name.replace("_", "-")
        raise ConfigError(option, ctx.params[name], "what fits is asked of no device", "give --device too")


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _print_ranks(answer: dict[str, Any]) -> None:
    """Each kind of rank, where there are several devices."""
    if answer["num_devices"] == 1:
        return
    table = show.new_table(
        "", "rank", "layers", "weights", "activations", "libraries", "context, graphs", "left for KV", "blocks"
    )
    for rank in answer["ranks"]:
        table.add_row(
            rank["name"], f"{rank['first_layer']}-{rank['last_layer']}", show.size(rank["weight_bytes"]),
            show.size(rank["activation_bytes"]), show.size(rank["library_bytes"]), show.size(rank["outside_bytes"]),
            show.size(rank["kv_bytes"]), f"{rank['num_blocks']:,}",
        )  # fmt: skip
    show.print_table(table)


def memory_answer(
    session: Session, *, model: str, context: int | None, batch: int, dtype: str, kv_dtype: str,
    attention: str | None, quant: str | None, kv_cache: str, device: str | None,
    layout: tuple[int, int, int, int, int], memory_fraction: float, max_num_batched_tokens: int | None,
    max_num_seqs: int | None, num_kv_blocks: int | None, typical: dict[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """Memory of one rank as JSON data, in bytes; each of `equations` evaluates to the number of its name.

    kv_bytes: of `batch` sequences of `context` tokens, without block rounding; what has left a window is not there.  total_bytes: weights, those,
    states, activations, and with a device its libraries, context and graphs; all_weight_bytes: of all ranks.  Of several unlike ranks it is the one that decides; `ranks` has each kind.  With a device:
    whether one sequence fits, the pool the engine would have there, and what would make it fit (`fixes`).
    typical: options of a synthetic workload whose lengths are expected.
    """
    from twinfer.cli.values import make_config
    from twinfer.core.catalog import resolve_spec
    from twinfer.core.config import Choice, choice_of, parse_choice
    from twinfer.core.device import all_devices, load_device
    from twinfer.core.dtypes import canonical_dtype
    from twinfer.core.errors import ConfigError, DoesNotFit, figure
    from twinfer.core.layout import SIZES
    from twinfer.core.memory import rank_equations, trials
    from twinfer.core.memory_parts import Room, fullest, ranks_of
    from twinfer.core.provision import place
    from twinfer.core.registry import OPTION_OF_KIND
    from twinfer.core.setup import adapt_model, groups_of
    from twinfer.core.technique import Needs
    from twinfer.core.workload import MAX_REQUESTS, MAX_TOKENS

    for option, given, most in (("--batch", batch, MAX_REQUESTS), ("--context", context, MAX_TOKENS)):
        if given is not None and not 1 <= given <= most:
            raise ConfigError(option, given, "out of range", f"give 1 to {figure(most)}")
    plain = resolve_spec(model)
    lengths = _typical_lengths(typical, plain)
    assumed = context is None and not lengths
    if context is None:
        context = max(lengths, default=min(DEFAULT_CONTEXT, plain.max_context))
    fields: dict[str, Any] = {
        "model": model,
        "memory_fraction": memory_fraction,
        **dict(zip(SIZES, layout, strict=True)),
    }
    fields["kv_cache"] = Choice(**parse_choice(kv_cache, "--kv-cache"))
    for key, value in (("dtype", dtype), ("kv_dtype", kv_dtype)):
        fields[key] = value if value == "auto" else canonical_dtype(value, "--" + key.replace("_", "-"))
    for key, text in (("attention", attention), ("quantizer", quant)):
        fields[key] = None if text is None else choice_of(key, text, OPTION_OF_KIND[key])
    limits = {
        "max_num_batched_tokens": max_num_batched_tokens, "max_num_seqs": max_num_seqs, "num_kv_blocks": num_kv_blocks
    }  # fmt: skip
    for key, limit in limits.items():
        if limit is not None:
            fields[key] = limit
    config = make_config(fields).model_copy(update={"max_model_len": max(2, context)})
    if config.cp > context:
        raise ConfigError(
            "--cp", config.cp, f"{context} tokens of context are too few to share", f"give at most {context}"
        )
    if lengths and device is None:
        raise ConfigError("--input-len", typical["input_len"], "what fits is asked of no device", "give --device too")
    registry = session.registry
    if device is not None:
        on = load_device(device, registry)
        placed = place(config, plain, registry, on, world="simulator")
        question = placed.question(max(2, context), lambda: all_devices(registry))
        spec, paging, room, config = question.spec, question.paging, question.room, question.config
    else:
        from twinfer.core.cache_groups import Paging

        spec, _ = adapt_model(config, plain, registry, Needs(world="simulator", device="cpu", dtype=plain.dtype))
        paging, room = Paging(16, groups_of(spec, registry.build("kv_cache", config.kv_cache))), Room(0)
    ranks = ranks_of(spec, config, room, paging)
    rank = max(ranks, key=lambda r: r.weights + batch * context * r.per_token)
    if device is not None:
        rank = fullest(ranks, paging.block_size)
    here = -(-batch // config.dp)  # sequences of one data-parallel group
    kv_bytes, equation = here * context * rank.per_token, f"{here} * {context} * {rank.per_token!r}"
    if any(group.window is not None for group in paging.groups):
        layers: dict[int, int] = {}  # how many keep so many tokens
        for group in paging.groups:
            kept = min(context, group.window or context)
            layers[kept] = layers.get(kept, 0) + sum(layer in rank.layers for layer in group.layers)
        per_layer = rank.per_token / rank.num_kv_layers
        kv_bytes = here * sum(kept * count for kept, count in layers.items()) * per_layer
        equation = f"{here} * ({' + '.join(f'{count} * {kept}' for kept, count in layers.items())}) * {per_layer!r}"
    per_seq = spec.state_bytes_per_seq(config.tp)
    states = here * per_seq * len(rank.layers) / spec.num_layers
    answer: dict[str, Any] = {
        "model": spec.name, "attention": spec.variant, "dtype": spec.dtype, "kv_dtype": spec.kv_dtype, "tp": config.tp,
        "layout": str(config.layout), "num_devices": config.layout.devices, "context": context, "batch": batch,
        "kv_bytes_per_token": rank.per_token, "kv_bytes": kv_bytes, "state_bytes": states, "weight_bytes": rank.weights,
        "activation_bytes": rank.activations, "library_bytes": rank.libraries, "outside_bytes": rank.outside,
        "total_bytes": rank.weights + kv_bytes + states + rank.activations + rank.libraries + rank.outside,
        "all_weight_bytes": sum(r.ranks * r.weights for r in ranks),
    }  # fmt: skip
    equations = {
        "kv_bytes": equation, "state_bytes": f"{here} * {per_seq!r} * {len(rank.layers)} / {spec.num_layers}",
        "library_bytes": f"{room.libraries} + {rank.libraries - room.libraries}",
        "outside_bytes": f"{rank.runtime} + {rank.graphs}",
        "total_bytes": f"{rank.weights} + {kv_bytes!r} + {states!r} + {rank.activations} + {rank.libraries} + {rank.outside}",
        "all_weight_bytes": " + ".join(f"{r.ranks} * {r.weights}" for r in ranks),
    }  # fmt: skip
    of_rank = rank_equations(spec, config, rank, paging.block_size)
    equations |= {name: of_rank[name] for name in ("kv_bytes_per_token", "weight_bytes", "activation_bytes")}
    if device is not None:
        answer |= {"device": on.name, "device_memory_bytes": room.memory, "block_size": paging.block_size,
                   "num_blocks": None, "expected_concurrency": None, "fixes": [],
                   "ranks": [_rank_answer(r, paging.block_size) for r in ranks]}  # fmt: skip
        try:
            budget = placed.budget(expected_lengths=lengths, others=lambda: all_devices(registry))
        except DoesNotFit as error:
            answer |= {"fits": False, "problem": f"{error.problem}; {error.fix}"}
            answer["fixes"] = [
                {"change": fix.change, "effect": fix.effect, "fits": fix.fits, "spare_bytes": fix.spare}
                for fix in trials(question)
            ]
        else:
            answer |= {
                "fits": budget.worst_case_concurrency >= batch, "num_blocks": budget.num_blocks,
                "kv_pool_bytes": budget.kv_pool_bytes, "kv_tokens": budget.kv_tokens, "max_model_len": budget.max_model_len,
                "worst_case_concurrency": budget.worst_case_concurrency,
                "expected_concurrency": budget.expected_concurrency, "segments": dict(budget.segments()),
            }  # fmt: skip
            if rank.kv_most < rank.free:
                answer["pool_note"] = (
                    f"KV takes at most {show.size(rank.kv_most)} on a CPU unless told otherwise (--num-kv-blocks)"
                )
            if not answer["fits"]:
                answer["problem"] = (
                    f"{batch} sequences of {context} tokens were asked for, {budget.worst_case_concurrency:.1f} fit; "
                    f"use --batch {int(budget.worst_case_concurrency)}, or raise --tp or --memory-fraction"
                )
            equations |= budget.equations
    if assumed:
        answer["note"] = (
            f"{context:,} tokens of context are assumed, {plain.name} was made for {plain.max_context:,}: give --context, "
            "or --input-len and --output-len"
        )
    elif context > plain.max_context:
        answer["note"] = f"{plain.name} was made for {plain.max_context} tokens, {context} were asked for"
    answer["equation"] = f"kv_bytes = {equations['kv_bytes']}"
    answer["equations"] = equations
    return {
        k: int(v) if isinstance(v, float) and k.endswith(("_bytes", "_token")) and v.is_integer() else v
        for k, v in answer.items()
    }


def _rank_answer(rank: RankMemory, block_size: int) -> dict[str, Any]:
    """One kind of rank as JSON data; num_blocks: what it has room for, kv_bytes: what is left for KV there."""
    return {
        "name": rank.name, "stage": rank.stage, "ranks": rank.ranks, "first_layer": rank.layers.start,
        "last_layer": rank.layers.stop - 1, "weight_bytes": rank.weights, "activation_bytes": rank.activations,
        "library_bytes": rank.libraries, "state_bytes": rank.states, "outside_bytes": rank.outside,
        "kv_bytes": max(0.0, rank.left), "missing_bytes": max(0.0, -rank.left), "kv_bytes_per_token": rank.per_token,
        "num_blocks": rank.blocks(block_size),
    }  # fmt: skip


def _typical_lengths(typical: dict[str, Any], spec: ModelSpec) -> tuple[int, ...]:
    """Prompt plus output tokens of sampled requests; none when no lengths were given."""
    from twinfer.core.errors import ConfigError
    from twinfer.core.workload import generate, make_workload

    if not typical:
        return ()
    if "input_len" not in typical and "output_len" not in typical:
        name, value = next(iter(typical.items()))
        option = "--" + name.replace("_", "-")
        raise ConfigError(
            option, value, "it is of requests whose lengths are not given", "give --input-len and --output-len"
        )
    if "input_len" not in typical or "output_len" not in typical:
        missing = "--output-len" if "input_len" in typical else "--input-len"
        raise ConfigError(missing, None, "typical requests need both lengths", "give --input-len and --output-len")
    workload = make_workload(num_requests=SAMPLED, **typical)
    requests = generate(workload, spec.vocab_size, spec.max_context, vision=spec.vision)
    return tuple(r.max_length for r in requests)
