"""`twinfer replay`, and `twinfer calibrate --from`: a real run beside its twin, cause by cause, and what mends it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from twinfer.cli import show

if TYPE_CHECKING:
    from twinfer.cli.session import Session
    from twinfer.core.config import EngineConfig
    from twinfer.core.device import DeviceSpec
    from twinfer.core.records import RunRecord
    from twinfer.simulator.attribute import Attribution
    from twinfer.simulator.replay import Replay

RUN_HELP = "A measured run: id, beginning of an id, folder, 'latest', or the JSONL log of a serving engine."


def add_commands(app: typer.Typer) -> None:
    app.command("replay")(replay)


def replay(
    ctx: typer.Context,
    run: Annotated[str, typer.Argument(help=RUN_HELP)],
    device: Annotated[str | None, typer.Option(help="Another device than the run's.")] = None,
    model: Annotated[str | None, typer.Option("--model", "-m", help="For a log: the model that was served.")] = None,
    dtype: Annotated[str | None, typer.Option(help="For a log: of weights and activations.")] = None,
    kv_dtype: Annotated[str | None, typer.Option(help="For a log: of the KV cache.")] = None,
    quant: Annotated[
        str | None, typer.Option(metavar="NAME[:OPT=VAL,...]", help="For a log: quantizer, or none.")
    ] = None,
    tp: Annotated[int | None, typer.Option(help="For a log: tensor-parallel ranks.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="For a log: sequences in one step.")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(help="For a log: tokens in one step.")] = None,
    num_kv_blocks: Annotated[int | None, typer.Option(help="For a log: blocks of the KV pool.")] = None,
    op_time: Annotated[
        list[str] | None,
        typer.Option("--op-time-model", "--op-time", metavar="NAME", help="Op-time model; repeat for a chain."),
    ] = None,
    runs_dir: Annotated[Path | None, typer.Option(metavar="DIR", help="Where runs are kept; your data folder.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Predict a real run from its own requests and say what the error is made of: ops, host, plans.

    Examples:

    twinfer replay latest

    twinfer replay 20260101-120000-engine-abc123 --json

    twinfer replay served.jsonl --model llama-3.1-8b --device rtx-pro-6000 --max-num-seqs 128
    """
    record = measured(run, runs_dir)
    fields = {
        "model": model, "device": device, "dtype": dtype, "kv_dtype": kv_dtype, "quantizer": quant, "tp": tp,
        "max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens, "num_kv_blocks": num_kv_blocks,
        "op_time": tuple(op_time) if op_time else None,
    }  # fmt: skip
    config = config_for(record, run, {k: v for k, v in fields.items() if v is not None})
    found = replayed(ctx.obj, record, config)
    from twinfer.simulator.attribute import attribute

    answer = attribute(found)
    if "device" in found.predicted.reasons:
        rests_on = f"predicted times are those of {found.predicted.reasons['device']}"
        answer = replace(answer, notes=(*answer.notes, rests_on))
    if as_json:
        show.print_json(attribution_payload(record, answer))
        return
    print_attribution(record, answer)


def measured(run: str, runs_dir: Path | None) -> RunRecord:
    """A stored run, or a log of another engine where `run` is the path of a file."""
    from twinfer.core.errors import ConfigError

    if Path(run).is_file():
        from twinfer.simulator.observed import read_log

        if runs_dir is not None:
            raise ConfigError(
                "--runs-dir", str(runs_dir), f"{run} is a file, which is read where it lies", "leave it out"
            )
        return read_log(run)
    from twinfer.core.run_store import RunStore

    record = RunStore(runs_dir).load(run, "engine")
    if record.world != "engine":
        raise ConfigError("RUN", run, "is a prediction, no measured run", "give a run of `twinfer run`, or a JSONL log")
    return record


def config_for(record: RunRecord, run: str, given: dict[str, Any]) -> EngineConfig:
    """The run's own settings; those of a log as they were `given`."""
    from twinfer.cli.values import make_config
    from twinfer.core.config import choice_of
    from twinfer.core.errors import ConfigError
    from twinfer.simulator.replay import config_of

    if record.config:
        settings = {k: v for k, v in given.items() if k not in ("device", "op_time")}
        if settings:
            name = next(iter(settings))
            raise ConfigError(
                "--" + {"quantizer": "quant"}.get(name, name).replace("_", "-"), settings[name],
                "a stored run has its own settings", "leave it out",
            )  # fmt: skip
        return config_of(record).model_copy(update=given)
    if "model" not in given:
        raise ConfigError("--model", None, f"the log {run} does not say what was served", "give the model's name")
    if "quantizer" in given:
        given = {**given, "quantizer": choice_of("quantizer", given["quantizer"], "--quant")}
    if "tp" in given:
        given = {**given, "num_devices": given["tp"]}
    return make_config(given)


def replayed(session: Session, record: RunRecord, config: EngineConfig, device: DeviceSpec | None = None) -> Replay:
    """The replay, with progress, until it is done or Ctrl-C is pressed (exit code 130)."""
    from twinfer.cli.runs import encoder_of
    from twinfer.simulator.replay import replay as run_replay

    with show.interruptible(keeps=False) as should_stop, show.progress("replaying") as on_progress:
        encode = None
        if record.workload.get("prompts") or record.workload.get("trace"):
            encode = encoder_of(config.model, on_progress)
        return run_replay(record, config, session.registry, device, encode, on_progress, should_stop)


def correct(
    session: Session, run: str, device: str | None, to: Path | None, given: dict[str, Any], runs_dir: Path | None,
    as_json: bool,
) -> None:  # fmt: skip
    """`twinfer calibrate --from RUN`: replay, attribute, and store the correction in a device file."""
    from twinfer.core.device import GENERIC, LOCAL, calibrated_path, check_device_out, load_device, write_device
    from twinfer.core.errors import ConfigError
    from twinfer.simulator import attribute as parts

    record = measured(run, runs_dir)
    config = config_for(record, run, given | ({"device": device} if device else {}))
    base = load_device(config.device, session.registry)
    if to is None:
        if base.name == GENERIC:
            raise ConfigError(
                "--from", run, "this machine is not calibrated, so that there is nothing of its own to correct",
                "run `twinfer calibrate` first, or say with --to where to store a corrected generic CPU",
            )  # fmt: skip
        if base.name != LOCAL:
            raise ConfigError(
                "--to",
                None,
                f"{base.name} is not this machine's own device file",
                "say where to store the corrected one",
            )
        to = calibrated_path()
    else:
        check_device_out("--to", to)
    plain = parts.without_corrections(base)
    found = replayed(session, record, config, plain)
    before = parts.attribute(found)
    made = (
        parts.correction(found)
        if found.steps
        else parts.fitted_correction(found, lambda device: replayed(session, record, config, device))
    )
    corrected = parts.with_correction(base, made)
    after = parts.attribute(replayed(session, record, config, corrected))
    if to.stem != LOCAL:
        corrected = corrected.model_copy(update={"name": to.stem, "aliases": ()})
    write_device(corrected, to)
    if as_json:
        show.print_json(
            {
                "path": str(to), "correction": made.model_dump(mode="json"),
                "before": attribution_payload(record, before), "after": attribution_payload(record, after),
            }
        )  # fmt: skip
        return
    print_attribution(record, before)
    table = show.new_table("corrections", "op", "factor (small to large launches)", "80 % of windows within")
    for name, factor in made.factors.items():
        sizes = made.by_size.get(name)
        shown = f"{factor:.3f}" if sizes is None else f"{sizes[0][1]:.3f} to {sizes[1][1]:.3f}"
        table.add_row(name, shown, f"+- {show.percent(1.2816 * made.spreads[name])}")
    show.print_table(table)
    print(
        f"duration {show.percent(after.predicted / after.real - 1, signed=True)} with them, on the run they come from"
    )
    print(f"stored in {to}")


def attribution_payload(record: RunRecord, found: Attribution) -> dict[str, Any]:
    """JSON: seconds; every error is (predicted - real), every share relative to the real duration."""
    return {
        "run": record.id, "requests": len(record.requests),
        "duration": {"real": found.real, "predicted": found.predicted, "error": found.predicted / found.real - 1},
        "parts": [
            {"group": p.group, "op": p.name, "real": p.real, "predicted": p.predicted, "error": p.error,
             "share": p.error / found.real}
            for p in found.parts
        ],
        "plans": {name: {"real": a, "predicted": b} for name, (a, b) in found.counts.items()},
        "plans_alike": found.same if found.parts else None,
        "metrics": {
            name: {"real": a, "predicted": b, "error": b / a - 1 if a else None} for name, (a, b) in found.metrics.items()
        },
        "notes": list(found.notes),
    }  # fmt: skip


def print_attribution(record: RunRecord, found: Attribution) -> None:
    table = show.new_table(f"{record.id}: {len(record.requests)} requests", "", "real", "predicted", "error")
    for name, (a, b) in found.metrics.items():
        error = show.percent(b / a - 1, signed=True) if a else ""
        table.add_row(show.title(name), show.metric(name, a), show.metric(name, b), error)
    table.add_row("duration", show.seconds(found.real), show.seconds(found.predicted),
                  show.percent(found.predicted / found.real - 1, signed=True))  # fmt: skip
    show.print_table(table)
    if not found.parts:
        print("the log has no steps: nothing can be said of ops and plans")
    else:
        parts = show.new_table("where the time goes", "", "real", "predicted", "of the run")
        for group in found.groups():
            share = show.percent(group.error / found.real, signed=True)
            parts.add_row(group.group, show.seconds(group.real), show.seconds(group.predicted), share)
            for part in found.parts:
                if part.group == group.group and part.name:
                    share = show.percent(part.error / found.real, signed=True)
                    parts.add_row(f"  {part.name}", show.seconds(part.real), show.seconds(part.predicted), share)
        show.print_table(parts)
        plans = show.new_table("what was scheduled", "", "real", "predicted")
        for name, (a, b) in found.counts.items():
            plans.add_row(name, show.number(a), show.number(b))
        show.print_table(plans)
        print(
            f"the twin, given the times of the run's steps, put as many rows and tokens as the run did into "
            f"{show.percent(found.same)} of them"
        )
    for note in found.notes:
        print(f"note: {note}")


__all__ = ["add_commands", "attribution_payload", "correct", "measured", "replay"]
