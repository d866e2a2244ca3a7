"""`twinfer explain`: the time of one step, op by op, with the rule that gave each number."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from twinfer.cli import show
from twinfer.cli.session import Session
from twinfer.cli.values import make_config, parse_technique

if TYPE_CHECKING:
    from twinfer.core.work import RowShape
    from twinfer.simulator.explain import Line


def add_commands(app: typer.Typer) -> None:
    app.command("explain")(explain)


def explain(
    ctx: typer.Context,
    model: Annotated[
        str,
        typer.Option("--model", "-m", help="A name of `twinfer models`, a config.json, a directory or a GGUF file."),
    ],
    device: Annotated[str, typer.Option(help="A name of `twinfer devices` or a device file.")] = "auto",
    dtype: Annotated[
        str, typer.Option(help="Of weights and activations; 'auto' is the checkpoint's, on a CPU float32.")
    ] = "auto",
    kv_dtype: Annotated[
        str, typer.Option(help="Of the KV cache, e.g. fp8; 'auto' is the one of the activations.")
    ] = "auto",
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks; times are of one rank.")] = 1,
    quant: Annotated[str | None, typer.Option(metavar="NAME[:OPT=VAL,...]", help="Quantizer, or none.")] = None,
    op_time: Annotated[
        list[str] | None,
        typer.Option("--op-time-model", "--op-time", metavar="NAME", help="Op-time model; repeat for a chain."),
    ] = None,
    max_outstanding: Annotated[
        int, typer.Option(help="2 plans the next step meanwhile, so that the CPU's part is hidden.")
    ] = 1,
    prefill: Annotated[
        list[str] | None, typer.Option(metavar="[ROWSx]TOKENS[@START]", help="Prompts in the step; repeatable.")
    ] = None,
    decode: Annotated[
        list[str] | None, typer.Option(metavar="[ROWSx]CONTEXT", help="Answers that go on; repeatable.")
    ] = None,
    chain: Annotated[bool, typer.Option("--chain", help="Also what every model of the chain says.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Where the time of one step goes, op by op, and which rule says so.

    A step whose weights or contexts do not fit the device is timed all the same, and said not to fit (`fits` with --json).

    Examples:

    twinfer explain --model llama-3.1-8b --device h100-sxm --decode 32x2048

    twinfer explain --model llama-3.1-70b --device h100-sxm --tp 4 --quant fp8 --prefill 2048 --decode 16x1000 --chain
    """
    from twinfer.core.device import load_device
    from twinfer.core.work import StepShape
    from twinfer.simulator.explain import explain as lines_of
    from twinfer.simulator.explain import unfit

    session: Session = ctx.obj
    fields: dict[str, Any] = {
        "model": model, "device": device, "dtype": dtype, "kv_dtype": kv_dtype, "tp": tp, "op_time": tuple(op_time or ()),
        "max_outstanding": max_outstanding,
    }  # fmt: skip
    if quant is not None:
        fields["quantizer"] = parse_technique(session, "quantizer", quant)
    rows: list[RowShape] = []
    for text in prefill or ():
        rows += parse_rows("--prefill", text)
    for text in decode or ():
        rows += parse_rows("--decode", text)
    rows = rows or parse_rows("--decode", "1x1024")
    config, shape = make_config(fields), StepShape(tuple(rows), len(rows))
    on = load_device(config.device, session.registry)
    lines = lines_of(config, shape, session.registry, on)
    problem = unfit(config, shape, session.registry, on)
    total, sigma = sum(line.seconds for line in lines), sum(line.sigma for line in lines)
    if as_json:
        fits: dict[str, Any] = {"fits": True} if problem is None else {"fits": False, "problem": problem}
        show.print_json({"seconds": total, "sigma": sigma, **fits, "ops": [describe(line) for line in lines]})
        return
    table = show.new_table(
        f"{len(rows)} row(s), {sum(r.queries for r in rows)} token(s) in the step: {total * 1e3:.3g} ms "
        f"+- {sigma * 1e3:.2g} ms",
        "op", "launches", "each", "in all", "share", "how",
    )  # fmt: skip
    table.columns[-1].justify = "left"
    for line in lines:
        table.add_row(
            line.op.name, str(line.op.count), f"{line.seconds / line.op.count * 1e6:.1f} us", f"{line.seconds * 1e3:.3f} ms",
            show.percent(line.seconds / total if total else 0.0), f"{line.source}; {line.detail}",
        )  # fmt: skip
    show.print_table(table)
    if problem is not None:
        print(f"does not fit on {on.name}: {problem}")
    if chain:
        for line in lines:
            print(line.op.name)
            for words in line.models:
                print(f"  {words}")


def describe(line: Line) -> dict[str, Any]:
    return {
        "op": line.op.name, "kind": line.op.kind, "shape": list(line.op.shape), "dtype": line.op.dtype,
        "launches": line.op.count, "flops": line.op.flops * line.op.count, "bytes": line.op.bytes * line.op.count,
        "seconds": line.seconds, "sigma": line.sigma, "source": line.source, "detail": line.detail,
        "models": list(line.models),
    }  # fmt: skip


def parse_rows(option: str, text: str) -> list[RowShape]:
    """Rows of `32x2048` or `1024`; of prompts also `512@1024`: 512 tokens after a context of 1,024."""
    from twinfer.core.errors import ConfigError
    from twinfer.core.work import RowShape

    count, _, rest = text.rpartition("x")
    tokens, at, start = rest.partition("@")
    try:
        number, length, before = int(count or 1), int(tokens), int(start) if at else 0
    except ValueError:
        number = length = before = 0
    prompts = option == "--prefill"
    if not (1 <= number <= 65536 and 1 <= length <= 2**24 and 0 <= before <= 2**24 and (prompts or not at)):
        form = "ROWSxTOKENS@START" if prompts else "ROWSxCONTEXT"
        raise ConfigError(option, text, "not rows of a step", f"write {form}, e.g. {'4x512' if prompts else '32x2048'}")
    row = RowShape(length, before + length) if prompts else RowShape(1, length)
    return [row] * number
