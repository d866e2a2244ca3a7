"""`twinfer calibrate`: this machine measured format by format, or any device corrected by a real run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from twinfer.cli import show
from twinfer.cli.facts import describe_device
from twinfer.cli.replay import correct
from twinfer.cli.session import Session

if TYPE_CHECKING:
    from twinfer.simulator.calibrate import Calibrated

DEFAULT_MODEL = "smollm2-135m"
DEFAULT_BUDGET = 55.0
MAX_BUDGET = 3600.0
"""Seconds that a calibration may be given."""


def add_commands(app: typer.Typer) -> None:
    app.command("calibrate")(calibrate)


def calibrate(
    ctx: typer.Context,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", "-m", help="Whose layers are timed (smollm2-135m); with --from: what a log's engine served."
        ),
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="Of weights and activations; float32.")] = None,
    quant: Annotated[
        str | None, typer.Option(metavar="NAME[:OPT=VAL,...]", help="Quantizer whose kernels are timed, or none.")
    ] = None,
    kv_dtype: Annotated[str | None, typer.Option(help="Of the KV cache; the one of the activations.")] = None,
    budget: Annotated[
        float | None,
        typer.Option(help="Seconds to take, about; 55. Longer where not every step has been timed by then."),
    ] = None,
    run: Annotated[
        str | None,
        typer.Option(
            "--from", metavar="RUN", help="Correct a device by this measured run, or JSONL log, instead of measuring."
        ),
    ] = None,
    device: Annotated[str | None, typer.Option(help="With --from: the device to correct; the run's.")] = None,
    to: Annotated[Path | None, typer.Option(metavar="FILE", help="With --from: the device file to write.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="With --from a log: sequences in one step.")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(help="With --from a log: tokens in one step.")] = None,
    num_kv_blocks: Annotated[int | None, typer.Option(help="With --from a log: blocks of the KV pool.")] = None,
    runs_dir: Annotated[Path | None, typer.Option(metavar="DIR", help="Where runs are kept; your data folder.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Measure this machine, so that predictions for it are of it; one to two minutes. Best with nothing else running.

    It becomes the device `local`, which `auto` then means. Each format (--dtype, --quant, --kv-dtype) is measured by
    itself and added. With --from, a real run corrects a device: this machine, or any other written to a file.

    Examples:

    twinfer calibrate

    twinfer calibrate --quant gguf

    twinfer calibrate --model ./my-llama --dtype bfloat16 --json

    twinfer calibrate --from latest

    twinfer calibrate --from served.jsonl --model llama-3.1-8b --device rtx-pro-6000 --to my-card.json
    """
    if run is not None:
        given = {"model": model, "dtype": dtype, "kv_dtype": kv_dtype, "quantizer": quant, "max_num_seqs": max_num_seqs,
                 "max_num_batched_tokens": max_num_batched_tokens, "num_kv_blocks": num_kv_blocks}  # fmt: skip
        _refuse("measures nothing when --from corrects by a run", "leave it out", budget=budget)
        correct(ctx.obj, run, device, to, {k: v for k, v in given.items() if v is not None}, runs_dir, as_json)
        return
    _refuse(
        "is for corrections by a run", "give --from RUN too", device=device, to=to, max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens, num_kv_blocks=num_kv_blocks, runs_dir=runs_dir,
    )  # fmt: skip
    done = run_calibration(
        ctx.obj,
        model or DEFAULT_MODEL,
        dtype or "float32",
        DEFAULT_BUDGET if budget is None else budget,
        quant,
        kv_dtype or "auto",
    )
    answer = {
        "path": str(done.path), "device": describe_device(done.device), "step_error_median": done.error[0],
        "step_error_max": done.error[1], "drift": done.drift, "seconds": done.seconds, "level": done.level,
        "runs": dict(done.runs),
    }  # fmt: skip
    if as_json:
        show.print_json(answer)
        return
    print(f"measured in {done.seconds:.0f} s and stored as device `local`: {done.path}")
    print(
        f"measured steps are reproduced within {show.percent(done.error[0])} (median) and {show.percent(done.error[1])} "
        f"(worst); the machine's speed drifted by {show.percent(done.drift)} meanwhile"
    )
    if done.runs:
        runs = ", ".join(f"{name}: {show.percent(ratio - 1, signed=True)}" for name, ratio in done.runs.items())
        print(
            f"short runs of the whole engine beside the sum of their steps: {runs}; all times are taken x {done.level:.3f}"
        )
    if done.busy:
        show.note(
            "the machine was not quiet: bands of predictions are wide; calibrate again when nothing else runs, or with a smaller OMP_NUM_THREADS"
        )


def _refuse(problem: str, fix: str, **given: Any) -> None:
    """ConfigError for the first option that was given."""
    from twinfer.core.errors import ConfigError

    for name, value in given.items():
        if value is not None:
            raise ConfigError("--" + name.replace("_", "-"), value, problem, fix)


def run_calibration(
    session: Session, model: str, dtype: str = "float32", budget: float = 55.0, quant: str | None = None,
    kv_dtype: str = "auto",
) -> Calibrated:  # fmt: skip
    """Measure and store this machine. Ctrl-C leaves what was stored before (exit code 130). Raises TwinferError."""
    from twinfer.cli.values import parse_technique
    from twinfer.core.dtypes import canonical_dtype, dtype_bits
    from twinfer.core.errors import ConfigError, figure

    dtype = canonical_dtype(dtype, "--dtype")
    if dtype_bits(dtype) < 16:
        raise ConfigError("--dtype", dtype, "activations need at least 16 bits", "use float32, bfloat16 or float16")
    if not 0 < budget <= MAX_BUDGET:
        raise ConfigError("--budget", budget, "out of range", f"give seconds above 0, at most {figure(MAX_BUDGET)}")
    if kv_dtype != "auto":
        kv_dtype = canonical_dtype(kv_dtype, "--kv-dtype")
    quantizer = None if quant is None else parse_technique(session, "quantizer", quant)
    with show.interruptible(keeps=False) as should_stop, show.progress("calibrating") as on_progress:

        def report(fraction: float, message: str) -> None:
            phase = "run" if fraction else "load"
            on_progress(round(100 * fraction), 100, {"phase": phase, "doing": message})

        report(0.0, "starting torch")
        from twinfer.core.runtime.measure import measure
        from twinfer.simulator.calibrate import calibrate as fit_and_store

        return fit_and_store(
            measure, model, dtype, budget, registry=session.registry, should_stop=should_stop, on_progress=report,
            quantizer=quantizer, kv_dtype=kv_dtype,
        )  # fmt: skip


def calibrate_if_needed(session: Session, model: str, dtype: str = "float32") -> bool:
    """Calibrate unless this machine has tables of `dtype` that still hold."""
    from twinfer.core.device import calibrated_path, read_device
    from twinfer.core.errors import ConfigError
    from twinfer.plugins.op_time.calibrated import calibration_of, is_outdated
    from twinfer.simulator.machine import differences

    why = "this machine is not calibrated yet"
    if calibrated_path().is_file():
        try:
            device = read_device(calibrated_path())
            known = calibration_of(device)
            changed = differences(known.fingerprint) if known else ""
            tables = known.tables if known else ()
            if is_outdated(device):
                why = "this machine was calibrated by an older version"
            elif changed:
                why = f"this machine has changed ({changed})"
            elif any(t.format.dtype == dtype and not t.quantizer for t in tables):
                why = ""
            else:
                why = f"{dtype} is not calibrated"
        except ConfigError as error:
            why = f"the calibration cannot be read ({error.problem})"
    if why:
        show.note(f"{why}: measuring it, one to two minutes")
        for budget, then in ((55.0, "; measuring once more, with twice as much"), (110.0, "")):
            try:
                run_calibration(session, model, dtype, budget)
                return True
            except ConfigError as error:  # the machine was too busy
                show.note(f"calibration with a budget of {budget:.0f} s failed: {error}{then}")
        show.note("predictions will use the generic CPU and be far off; `twinfer calibrate` mends that")
        return False
    return True


__all__ = ["add_commands", "calibrate", "calibrate_if_needed", "run_calibration"]
