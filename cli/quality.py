"""`twinfer perplexity`: how well a model, as the engine runs it, predicts a text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from twinfer.cli import show
from twinfer.cli.values import make_config, parse_technique

if TYPE_CHECKING:
    from twinfer.cli.session import Session
    from twinfer.core.runtime.perplexity import Perplexity


_CHANGES = ("attention", "quantizer")
"""Decisions that change what a model answers; printed with its perplexity."""


MAX_CHUNK = 2**24


def add_commands(app: typer.Typer) -> None:
    app.command("perplexity")(perplexity)


def perplexity(
    ctx: typer.Context,
    model: Annotated[str, typer.Argument(help="A name of `twinfer models`, a directory, a GGUF file or a hub id.")],
    text: Annotated[Path, typer.Option("--text", metavar="FILE", help="The text to score, UTF-8.")],
    chunk: Annotated[
        int, typer.Option(help="Tokens of one chunk; chunks do not overlap and do not see each other.")
    ] = 512,
    max_tokens: Annotated[int | None, typer.Option(help="Use at most this many tokens of the text.")] = None,
    device: Annotated[str | None, typer.Option(help="A name of `twinfer devices`; 'auto' is this machine.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Of weights and activations: float32, bfloat16 or float16.")] = None,
    kv_dtype: Annotated[str | None, typer.Option(help="Of the KV cache.")] = None,
    attention: Annotated[
        str | None, typer.Option(metavar="NAME[:OPT=VAL,...]", help="Attention variant instead of the model's.")
    ] = None,
    quant: Annotated[str | None, typer.Option(metavar="NAME[:OPT=VAL,...]", help="Quantizer, or none.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Score a text with a real model: every token but the first of each chunk, given the tokens before it.

    Lower is better. Numbers compare only for one tokenizer, text and chunk length.

    Examples:

    twinfer perplexity smollm2-135m --text README.md

    twinfer perplexity smollm2-135m --text book.txt --attention mqa --max-tokens 20000 --json
    """
    from twinfer.core.dtypes import canonical_dtype
    from twinfer.core.errors import ConfigError, figure

    session: Session = ctx.obj
    if max_tokens is not None and max_tokens < 2:
        raise ConfigError("--max-tokens", max_tokens, "nothing to score", "give at least 2")
    if chunk > MAX_CHUNK:
        raise ConfigError("--chunk", chunk, "is too large", f"give at most {figure(MAX_CHUNK)}")
    content = read_text(text)
    fields: dict[str, Any] = {"model": model}
    if device is not None:
        fields["device"] = device
    for name, flag, value in (("dtype", "--dtype", dtype), ("kv_dtype", "--kv-dtype", kv_dtype)):
        if value is not None:
            fields[name] = value if value == "auto" else canonical_dtype(value, flag)
    for kind, choice in (("attention", attention), ("quantizer", quant)):
        if choice is not None:
            fields[kind] = parse_technique(session, kind, choice)
    config = make_config(fields)

    with show.interruptible() as should_stop, show.progress("scoring") as on_progress:
        on_progress(0, 0, {"phase": "load", "doing": "starting torch"})
        from twinfer.core.runtime.perplexity import perplexity as measure

        found = measure(config, content, chunk, max_tokens, session.registry, on_progress, should_stop)
    facts = described(found)
    if as_json:
        show.print_json(facts)
    else:
        error = facts["standard_error"]
        print(f"perplexity: {found.perplexity:.4f}")
        print(f"nats per token: {found.nats_per_token:.5f}" + (f" +- {error:.5f}" if error is not None else ""))
        print(f"tokens scored: {found.num_tokens:,} in {len(found.losses):,} chunks of at most {chunk}")
        for name in _CHANGES:
            if name in found.reasons:
                print(f"{name}: {found.reasons[name]}")
    if not found.complete:
        show.note("stopped: the text was scored in part")
        raise typer.Exit(show.STOPPED)


def described(found: Perplexity) -> dict[str, Any]:
    """A perplexity as JSON data."""
    return {
        "perplexity": found.perplexity, "nats_per_token": found.nats_per_token,
        "standard_error": found.standard_error, "num_tokens": found.num_tokens, "num_chunks": len(found.losses),
        "chunk": found.chunk, "complete": found.complete, "reasons": dict(found.reasons),
    }  # fmt: skip


def read_text(path: Path) -> str:
    """The UTF-8 text in `path`; ConfigError when it cannot be read."""
    from twinfer.core.errors import ConfigError

    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            "--text", str(path), f"cannot be read ({error.strerror or error})", "check the path"
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError("--text", str(path), f"is not UTF-8 (byte {error.start})", "give a text file") from None
