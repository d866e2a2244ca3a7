"""`twinfer plan`: the cheapest fleet that keeps its promises for some traffic, on every device type that is searched."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from twinfer.cli import show
from twinfer.cli.flags import Scenario, takes_workload
from twinfer.cli.plan_question import axes_of, question_of
from twinfer.cli.plan_tables import print_plan

if TYPE_CHECKING:
    from twinfer.cli.session import Session
    from twinfer.simulator.plan_space import Question

_SPACE, _SEARCH, _RECORD = "Search space", "Search", "Record"
_OF_RESUME = ("workers", "ray", "as_json", "resume")


def add_commands(app: typer.Typer) -> None:
    app.command("plan")(takes_workload(plan))


def plan(
    ctx: typer.Context,
    scenario: Scenario,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", "-m", help="A name of `twinfer models`, a config.json, a directory, a GGUF file or a hub id."
        ),
    ] = None,
    slo: Annotated[
        list[str] | None,
        typer.Option(
            metavar="METRIC.STAT<=SECONDS", help="A promise, such as 'ttft.p95<=1' or 'tpot.p95<=50ms'; repeatable."
        ),
    ] = None,
    device: Annotated[
        list[str] | None,
        typer.Option(rich_help_panel=_SPACE, help="A device type to try; repeatable. Without it: all but CPUs."),
    ] = None,
    tp: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=_SPACE, metavar="N,...", help="Tensor-parallel ranks of a replica (default 1,2,4,8)."
        ),
    ] = None,
    pp: Annotated[
        str | None, typer.Option(rich_help_panel=_SPACE, metavar="N,...", help="Pipeline stages of a replica.")
    ] = None,
    dp: Annotated[
        str | None,
        typer.Option(rich_help_panel=_SPACE, metavar="N,...", help="Attention data-parallel groups of a replica."),
    ] = None,
    ep: Annotated[
        str | None,
        typer.Option(rich_help_panel=_SPACE, metavar="N,...", help="Groups that whole experts are spread over."),
    ] = None,
    cp: Annotated[
        str | None, typer.Option(rich_help_panel=_SPACE, metavar="N,...", help="Context-parallel ranks of a replica.")
    ] = None,
    max_num_seqs: Annotated[
        str | None, typer.Option(rich_help_panel=_SPACE, metavar="N,...", help="Sequences in one step (default 256).")
    ] = None,
    max_num_batched_tokens: Annotated[
        str | None,
        typer.Option(rich_help_panel=_SPACE, metavar="N,...", help="Tokens in one step (default 512,1024,2048)."),
    ] = None,
    kv_dtype: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=_SPACE, metavar="NAME,...", help="Formats of the KV cache, e.g. auto,fp8 (default auto)."
        ),
    ] = None,
    quant: Annotated[
        list[str] | None,
        typer.Option(
            rich_help_panel=_SPACE,
            metavar="NAME[:OPT=VAL,...]",
            help="Quantizer to try; repeatable, 'none' is one too.",
        ),
    ] = None,
    attention: Annotated[
        list[str] | None,
        typer.Option(
            rich_help_panel=_SPACE, metavar="NAME[:OPT=VAL,...]", help="Attention variant to try; repeatable."
        ),
    ] = None,
    scheduler: Annotated[
        list[str] | None,
        typer.Option(rich_help_panel=_SPACE, metavar="NAME[:OPT=VAL,...]", help="Scheduler to try; repeatable."),
    ] = None,
    kv_cache: Annotated[
        list[str] | None,
        typer.Option(rich_help_panel=_SPACE, metavar="NAME[:OPT=VAL,...]", help="KV cache to try; repeatable."),
    ] = None,
    router: Annotated[
        list[str] | None,
        typer.Option(
            rich_help_panel=_SPACE, metavar="NAME[:OPT=VAL,...]", help="Router of the fleet to try; repeatable."
        ),
    ] = None,
    speculator: Annotated[
        list[str] | None,
        typer.Option(
            rich_help_panel=_SPACE,
            metavar="NAME[:OPT=VAL,...]",
            help="Speculator to try; repeatable, 'none' is one too.",
        ),
    ] = None,
    host_kv: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=_SPACE,
            metavar="SIZE,...",
            help="Host memory per device that KV is swapped to, e.g. none,64GiB.",
        ),
    ] = None,
    host_tier: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=_SPACE,
            metavar="SIZE,...",
            help="Host memory per replica that keeps KV of ended requests, e.g. none,256GiB.",
        ),
    ] = None,
    pools: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=_SPACE,
            metavar="P:D,...",
            help="Prefill and decode replicas apart, e.g. colocated,1:1,1:2 (default colocated).",
        ),
    ] = None,
    tries: Annotated[
        list[str] | None,
        typer.Option(
            "--try",
            rich_help_panel=_SPACE,
            metavar="FIELD=VALUE",
            help="A value of any other field of the configuration, e.g. memory_fraction=0.95; repeatable.",
        ),
    ] = None,
    max_replicas: Annotated[int, typer.Option(rich_help_panel=_SPACE, help="Replicas of the largest fleet.")] = 64,
    price: Annotated[
        list[str] | None,
        typer.Option(rich_help_panel=_SPACE, metavar="DEVICE=USD", help="Your price per device and hour; repeatable."),
    ] = None,
    screen: Annotated[int, typer.Option(rich_help_panel=_SEARCH, help="Requests per replica of a first look.")] = 240,
    confirm: Annotated[
        int, typer.Option(rich_help_panel=_SEARCH, help="Requests of the whole fleet, to confirm a design.")
    ] = 4000,
    top: Annotated[
        int, typer.Option(rich_help_panel=_SEARCH, help="Device types that are confirmed, cheapest first.")
    ] = 8,
    seeds: Annotated[
        int, typer.Option(rich_help_panel=_SEARCH, help="Draws of the traffic, in each of which promises must be kept.")
    ] = 3,
    op_time: Annotated[
        list[str] | None,
        typer.Option(
            "--op-time-model",
            "--op-time",
            rich_help_panel=_SEARCH,
            metavar="NAME",
            help="Op-time model; repeat for a chain.",
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(rich_help_panel=_SEARCH, help="Processes; as many as there are cores.", show_default=False),
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(rich_help_panel=_SEARCH, metavar="ADDRESS", help="A Ray cluster instead of local processes."),
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(rich_help_panel=_SEARCH, metavar="FILE", help="Go on with a search that was stopped.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            rich_help_panel=_RECORD, metavar="FILE", help="Where every point is kept; in your data folder otherwise."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", rich_help_panel=_RECORD, help="Print one JSON document.")] = False,
) -> None:
    """Find the cheapest fleet that keeps its promises for some traffic: devices, replicas, layout, techniques, limits.

    Examples:

    twinfer plan --model llama-3.1-70b --trace azure.csv --rate-scale 4 --slo 'ttft.p95<=1' --slo 'tpot.p95<=50ms'

    twinfer plan -m llama-3.1-8b --rate 20 --input-len 1000 --output-len 200 --slo 'e2e.p99<=10' --device l40s --device h100-sxm

    twinfer plan -m llama-3.1-70b --rate 5 --slo 'ttft.p95<=2' --quant none --quant fp8 --kv-dtype auto,fp8 --price l40s=0.9

    twinfer plan -m llama-3.1-8b --concurrency 100 --slo 'ttft.p95<=1' --device h100-sxm --speculator none --speculator ngram

    twinfer plan --resume FILE

    Every answer was simulated as a whole fleet and kept every promise. Ctrl-C leaves a file that --resume goes on with.
    Exit code 3, also with --json: no fleet keeps the promises.
    """
    from twinfer.core.errors import ConfigError
    from twinfer.simulator.plan import plan as search
    from twinfer.simulator.plan import read_plan

    session: Session = ctx.obj
    if resume is not None:
        _refuse_beside_resume(ctx)
        known = read_plan(resume)
        question, path = known.question, resume
    else:
        known = None
        if model is None:
            raise ConfigError("--model", None, "no model was chosen", "give a name of `twinfer models` or a path")
        axes = axes_of(
            session, device=device, tp=tp, pp=pp, dp=dp, ep=ep, cp=cp, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens,
            kv_dtype=kv_dtype, quantizer=quant, attention=attention, scheduler=scheduler, kv_cache=kv_cache, router=router,
            pools=pools, speculator=speculator, host_kv=host_kv, host_tier=host_tier, tries=tries,
        )  # fmt: skip
        question = question_of(
            model, scenario, slo or (), axes, price or (), op_time or (), max_replicas, screen, confirm, top, seeds
        )
        path = out or default_path(question)
    with show.interruptible() as should_stop, show.progress("searching") as on_progress:
        found = search(
            question, session.registry, known=known, workers=workers, ray=ray, out=path, on_progress=on_progress,
            should_stop=should_stop,
        )  # fmt: skip
    if as_json:
        show.print_json({**found.plain(), "path": str(path)})
    else:
        print_plan(found, path)
    if not found.complete:
        raise typer.Exit(show.STOPPED)
    if found.answer is not None and not found.answer.fleets:
        raise typer.Exit(show.NO)


def default_path(question: Question) -> Path:
    """A file of the user's data folder, which is made, named after the question."""
    import hashlib

    from twinfer.core.errors import ConfigError
    from twinfer.core.run_store import default_root

    name = hashlib.sha256(json.dumps(question.plain(), sort_keys=True).encode()).hexdigest()[:12]
    folder = Path(default_root()) / "plans"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("--out", None, f"{str(folder)!r} cannot be made ({error.strerror})", "give a file") from None
    return folder / f"{name}.json"


def _refuse_beside_resume(ctx: typer.Context) -> None:
    """The question stands in the file; one on the command line would be ignored."""
    from twinfer.core.errors import ConfigError

    for name, value in ctx.params.items():
        source = ctx.get_parameter_source(name)
        if name not in _OF_RESUME and source is not None and source.name == "COMMANDLINE":
            option = {"tries": "--try", "quant": "--quant"}.get(name, "--" + name.replace("_", "-"))
            raise ConfigError(
                option, value if isinstance(value, str | int | float) else None,
                "the file of --resume holds the whole question", "leave it out, or ask anew without --resume",
            )  # fmt: skip


__all__ = ["add_commands", "default_path", "plan"]
