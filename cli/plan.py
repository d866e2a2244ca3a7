"""`twinfer plan`: the cheapest fleet that keeps its promises for some traffic, on every device type that is searched."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from twinfer.cli import show
from twinfer.cli.flags import Scenario, takes_workload
from twinfer.cli.values import make_config

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from twinfer.cli.session import Session
    from twinfer.core.goal import Goal
    from twinfer.simulator.plan import Plan
    from twinfer.simulator.plan_answer import Fleet
    from twinfer.simulator.plan_space import Question

_SPACE, _SEARCH, _RECORD = "Search space", "Search", "Record"
DEFAULT_REQUESTS = 2000
"""Synthetic requests: enough that one in twenty is a hundred."""
_OF_RESUME = ("workers", "ray", "as_json", "resume")
_LISTS = {
    "tp": int, "pp": int, "dp": int, "ep": int, "cp": int, "max_num_seqs": int, "max_num_batched_tokens": int, "kv_dtype": str, "pools": str,
}  # fmt: skip


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
        axes = _axes(
            session, device=device, tp=tp, pp=pp, dp=dp, ep=ep, cp=cp, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens,
            kv_dtype=kv_dtype, quantizer=quant, attention=attention, scheduler=scheduler, kv_cache=kv_cache, router=router,
            pools=pools, tries=tries,
        )  # fmt: skip
        question = _question(
            model, scenario, slo or (), axes, price or (), op_time or (), max_replicas, screen, confirm, top
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
        _print(found, path)
    if not found.complete:
        raise typer.Exit(show.STOPPED)
    if found.answer is not None and not found.answer.fleets:
        raise typer.Exit(show.NO)


def default_path(question: Question) -> Path:
    """A file of the user's data folder, named after the question."""
    import hashlib

    from twinfer.core.run_store import default_root

    name = hashlib.sha256(json.dumps(question.plain(), sort_keys=True).encode()).hexdigest()[:12]
    return Path(default_root()) / "plans" / f"{name}.json"


def _refuse_beside_resume(ctx: typer.Context) -> None:
    """The question stands in the file; one on the command line would be ignored."""
    from twinfer.core.errors import ConfigError

    for name, value in ctx.params.items():
        source = ctx.get_parameter_source(name)
        if name not in _OF_RESUME and source is not None and source.name == "COMMANDLINE":
            option = {"tries": "--try", "requests": "--requests"}.get(name, "--" + name.replace("_", "-"))
            raise ConfigError(
                option, value if isinstance(value, str | int | float) else None,
                "the file of --resume holds the whole question", "leave it out, or ask anew without --resume",
            )  # fmt: skip


# --- from options to a question ---------------------------------------------------------------------


def _axes(
    session: Session, *, device: list[str] | None, tries: list[str] | None, **given: Any
) -> dict[str, tuple[Any, ...]]:
    """Field of `EngineConfig` -> values to try."""
    from twinfer.cli.values import parse_technique
    from twinfer.core.config import EngineConfig
    from twinfer.core.device import device_files, load_device
    from twinfer.core.dtypes import canonical_dtype
    from twinfer.core.errors import ConfigError
    from twinfer.simulator.plan_space import DEFAULT_SEQS, DEFAULT_TOKENS, DEFAULT_TP, default_devices

    axes: dict[str, tuple[Any, ...]] = {"device": default_devices(session.registry)}
    if device:
        files = device_files(session.registry)
        specs = {word: load_device(word, session.registry) for word in device}
        axes["device"] = tuple(spec.name if spec.name in files else word for word, spec in specs.items())
    axes |= {"tp": DEFAULT_TP, "max_num_seqs": DEFAULT_SEQS, "max_num_batched_tokens": DEFAULT_TOKENS}
    for name, kind in _LISTS.items():
        if given[name] is not None:
            axes[name] = _list("--" + name.replace("_", "-"), given[name], kind)
    if "kv_dtype" in axes:
        axes["kv_dtype"] = tuple(v if v == "auto" else canonical_dtype(v, "--kv-dtype") for v in axes["kv_dtype"])
    for name in ("quantizer", "attention", "scheduler", "kv_cache"):
        if given[name]:
            axes[name] = tuple(
                None if text == "none" and EngineConfig.model_fields[name].default is None
                else str(parse_technique(session, name, text))
                for text in given[name]
            )  # fmt: skip
    if given["router"]:
        axes["router"] = tuple(str(parse_technique(session, "router", text)) for text in given["router"])
    tried = _tries(tries or ())
    for name in tried:
        if given.get(name):
            option = {"quantizer": "--quant"}.get(name, "--" + name.replace("_", "-"))
            raise ConfigError(
                "--try", f"{name}={tried[name][0]}", f"{option} says what to try, too", "give one of the two"
            )
    return {**axes, **tried}


def _tries(texts: Sequence[str]) -> dict[str, tuple[Any, ...]]:
    """Values of the `--try` options, by field."""
    from twinfer.core.errors import ConfigError

    found: dict[str, list[Any]] = {}
    for text in texts:
        name, eq, raw = text.partition("=")
        name = name.strip().replace("-", "_")
        if not eq:
            raise ConfigError("--try", text, "names no value", "write FIELD=VALUE, e.g. memory_fraction=0.95")
        if name in ("model", "seed", "num_devices", "device", "op_time"):
            raise ConfigError(
                "--try", text, f"{name} is not tried this way", "use the option of that name, if there is one"
            )
        try:
            value = json.loads(raw)
        except ValueError:
            value = None if raw == "none" else raw
        found.setdefault(name, []).append(value)
    return {name: tuple(values) for name, values in found.items()}


def _list(option: str, text: str, kind: type) -> tuple[Any, ...]:
    from twinfer.core.errors import ConfigError

    values = []
    for part in text.split(","):
        try:
            values.append(kind(part.strip()))
        except ValueError:
            raise ConfigError(
                option, text, f"{part.strip()!r} is not a number", "write numbers between commas"
            ) from None
        if part.strip() == "":
            raise ConfigError(option, text, "a value is missing", "write values between commas")
    return tuple(values)


def _question(
    model: str, scenario: Scenario, slo: Sequence[str], axes: Mapping[str, tuple[Any, ...]], price: Sequence[str],
    op_time: Sequence[str], max_replicas: int, screen: int, confirm: int, top: int,
) -> Question:  # fmt: skip
    from twinfer.core.goal import parse_goals
    from twinfer.simulator.plan_space import Question

    goals = parse_goals(slo)
    base: dict[str, Any] = {"model": model}
    if op_time:
        base["op_time"] = list(op_time)
        make_config({"model": model, "op_time": tuple(op_time)})
    workload = scenario.workload()
    if workload.num_requests is None and not (workload.trace or workload.prompts or workload.source):
        workload = workload.model_copy(update={"num_requests": DEFAULT_REQUESTS})
    return Question(
        base=base, axes=axes, workload=workload, goals=goals, prices=_prices(scenario.session, price),
        max_replicas=max_replicas, screen=screen, confirm=confirm, top=top,
    )  # fmt: skip


def _prices(session: Session, texts: Sequence[str]) -> dict[str, float]:
    """Device name -> US$ per hour of `NAME=PRICE`."""
    from twinfer.core.device import load_device
    from twinfer.core.errors import ConfigError

    prices: dict[str, float] = {}
    for text in texts:
        name, eq, raw = text.rpartition("=")
        try:
            value = float(raw)
        except ValueError:
            eq = ""
        if not eq:
            raise ConfigError("--price", text, "is no price of a device", "write DEVICE=USD, e.g. h100-sxm=2.5")
        device = load_device(name, session.registry).name
        if device in prices:
            raise ConfigError("--price", text, f"{device} had a price before", "give each device one price")
        prices[device] = value
    return prices


# --- how a plan looks -------------------------------------------------------------------------------


def _print(found: Plan, path: Path) -> None:
    goals, answer = found.question.goals, found.answer
    if answer is not None:
        print(answer.sentence + "\n")
        if answer.fleets:
            show.print_table(_fleets_table(answer.fleets))
            show.print_table(_promises_table(answer.fleets, goals))
        if answer.changed:
            table = show.new_table("if something is different (the design stays)", "", "replicas", "US$/h", "")
            table.columns[3].justify = "left"
            for row in answer.changed:
                table.add_row(
                    row["case"], "none of those allowed" if row["replicas"] is None else str(row["replicas"]),
                    money(row["cost_per_hour"]), row["text"],
                )  # fmt: skip
            show.print_table(table)
        for device, why in answer.none.items():
            print(f"no fleet of {device}: {why}")
        for source in dict.fromkeys(f"{f.device}: {f.price_source}" for f in answer.fleets if f.price_source):
            print(f"price of {source}")
        for text in answer.notes:
            print(f"note: {text}")
    state = "" if found.complete else f", stopped early: `twinfer plan --resume {path}` goes on"
    print(f"{len(found.points)} points in {path}{state}")


def money(value: float | None) -> str:
    return "no price" if value is None else f"{value:,.2f}"


def _fleets_table(fleets: Sequence[Fleet]) -> Any:
    table = show.new_table(
        "cheapest fleet of every device (* no other is better in cost, goodput and every promise)",
        "", "devices", "US$/h", "US$/1M tok", "goodput", "busy", "power", "J/tok", "next limit",
    )  # fmt: skip
    table.columns[8].justify = "left"
    for fleet in fleets:
        table.add_row(
            f"{'*' if fleet.on_front else ' '} {fleet.label}", str(fleet.num_devices), money(fleet.cost_per_hour),
            money(fleet.cost_per_million), f"{show.number(fleet.goodput)} /s", show.percent(fleet.busy),
            "not known" if fleet.watts is None else f"{show.number(fleet.watts / 1e3)} kW",
            "not known" if fleet.joules_per_token is None else show.number(fleet.joules_per_token), fleet.next_limit,
        )  # fmt: skip
    return table


def _promises_table(fleets: Sequence[Fleet], goals: Sequence[Goal]) -> Any:
    names = list(dict.fromkeys([*(g.name for g in goals), "ttft.p50", "ttft.p99", "tpot.p50", "tpot.p99"]))
    promised = {g.name: f" <= {show.seconds(g.limit)}" for g in goals}
    table = show.new_table(
        "times at this traffic (80 % band)", "", *(show.title(n) + promised.get(n, "") for n in names), "in time"
    )
    for fleet in fleets:
        cells = [f"{_seconds(fleet.values.get(n))}{_band(fleet, n)}" for n in names]
        table.add_row(f"{fleet.replicas} x {fleet.device}", *cells, show.percent(fleet.attained))
    return table


def _seconds(value: float | None) -> str:
    return "not served" if value is None else show.seconds(value)


def _band(fleet: Fleet, name: str) -> str:
    if name not in fleet.band:
        return ""
    low, high = fleet.band[name]
    return f" ({_seconds(low)} to {'far above' if high is None else show.seconds(high)})"


__all__ = ["add_commands", "default_path", "plan"]
