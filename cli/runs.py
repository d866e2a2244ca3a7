"""`twinfer run`, `simulate` and `compare`: one scenario, for real, predicted, or both."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from twinfer.cli import show
from twinfer.cli.flags import Scenario, takes_scenario
from twinfer.cli.fleet_flags import FleetFlags, takes_fleet
from twinfer.cli.technique_flags import ScenarioCommand

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from twinfer.cli.session import Session
    from twinfer.core.compare import Comparison
    from twinfer.core.config import EngineConfig
    from twinfer.core.fleet import Fleet
    from twinfer.core.records import RunRecord
    from twinfer.core.run_files import RunStoreError
    from twinfer.core.run_store import RunStore
    from twinfer.core.workload import Workload
    from twinfer.core.workload_source import Encode


OnAnswer: TypeAlias = "Callable[[str, str], None]"

_OF_STORED = ("runs_dir", "as_json", "save", "name")
"""Options that a comparison of stored runs allows; without `--save`, it changes nothing anyway."""


def add_commands(app: typer.Typer) -> None:
    app.command("run", cls=ScenarioCommand)(takes_scenario(run))
    app.command("simulate", cls=ScenarioCommand)(takes_scenario(takes_fleet(simulate)))
    app.command("compare", cls=ScenarioCommand)(takes_scenario(compare))


def run(ctx: typer.Context, scenario: Scenario) -> None:
    """Serve a workload with a real model on this machine and report what was measured.

    Examples:

    twinfer run --model smollm2-135m --requests 8 --input-len 64 --output-len 32

    twinfer run --model smollm2-135m --prompt "The capital of France is" --output-len 16

    twinfer run --model ./my-llama --scheduler static --kv-cache contiguous --json

    With --prompt the answers are printed too.

    With --json: the run's record; its `metrics` also stand at the top level, and the answers as `answers`.
    """
    from twinfer.core.errors import ConfigError

    if scenario.op_time:
        raise ConfigError(
            "--op-time-model", ",".join(scenario.op_time), "a real run predicts nothing",
            "leave it out, or use `twinfer simulate` or `twinfer compare`",
        )  # fmt: skip
    answers: list[tuple[str, str]] = []
    on_answer = (lambda prompt, text: answers.append((prompt, text))) if scenario.given["prompt"] else None
    _finish(execute("engine", scenario, on_answer), scenario, answers)


def simulate(ctx: typer.Context, scenario: Scenario, fleet: FleetFlags) -> None:
    """Predict a run: no weights, no GPU, the same scheduler and KV cache as the engine; of one engine, or of a fleet.

    Examples:

    twinfer simulate --model llama-3.1-8b --device h100-sxm --requests 1000 --rate 10

    twinfer simulate --model llama-3.1-70b --device h100-sxm --num-devices 4 --tp 4 --rate inf --json

    twinfer simulate --model qwen2.5-7b --device a100-sxm-80gb --trace azure.csv --scheduler continuous:chunk_size=512

    twinfer simulate --model llama-3.1-8b --device h100-sxm --replicas 4 --router prefix_aware --rate 60

    With --json: the run's record; its `metrics` also stand at the top level.
    """
    _finish(execute("simulator", scenario, fleet=fleet), scenario)


def compare(
    ctx: typer.Context,
    scenario: Scenario,
    real: Annotated[
        str | None, typer.Argument(help="A measured run: id, beginning of an id, folder, or 'latest' (measured one).")
    ] = None,
    predicted: Annotated[
        str | None, typer.Argument(help="A predicted run, likewise; 'latest' is the newest of the same settings.")
    ] = None,
    list_runs: Annotated[bool, typer.Option("--list", help="List the stored runs instead.")] = False,
) -> None:
    """Put a measured run beside its prediction, with the error of every metric.

    Give two stored runs, or a scenario: then both are made, first for real, then predicted.

    Examples:

    twinfer compare --list

    twinfer compare latest latest --json

    twinfer compare --model smollm2-135m --requests 8 --input-len 64 --output-len 32
    """
    from twinfer.core.compare import compare as join
    from twinfer.core.errors import ConfigError
    from twinfer.core.run_store import RunStore

    store = RunStore(scenario.runs_dir)
    unsaved: RunStoreError | None = None
    if list_runs:
        asked = {"REAL": real, "PREDICTED": predicted, **_asked(scenario)}
        for option, value in asked.items():
            if value is not None:
                raise ConfigError(option, value, "--list shows the stored runs and makes none", "give one of the two")
        _list(store, scenario.as_json)
        return
    if real is not None:
        if predicted is None:
            raise ConfigError(
                "PREDICTED", None, "one run cannot be compared", "give two runs, or --model for making both"
            )
        for option, value in _asked(scenario).items():
            raise ConfigError(option, value, "stored runs are compared as they are", "leave it out, or the two runs")
        measured = store.load(real, "engine")
        records = [
            measured,
            _latest_of(store, measured) if predicted == "latest" else store.load(predicted, "simulator"),
        ]
    else:
        if scenario.model is None:
            raise ConfigError("--model", None, "nothing to compare", "give two stored runs, or --model for making both")
        records = []
        for world in ("engine", "simulator"):
            record = execute(world, scenario)
            refuse_unserved(record)
            error = _save(record, scenario)[1]
            unsaved = unsaved or error
            if not record.complete:
                raise unsaved or typer.Exit(show.STOPPED)
            records.append(record)
    joined = join(*records)
    if scenario.as_json:
        show.print_json(comparison_payload(joined, records))
    else:
        _print_comparison(joined)
    if unsaved is not None:
        raise unsaved


def _asked(scenario: Scenario) -> dict[str, Any]:
    """Options that say how a run is made, with their values."""
    given = {k: v for k, v in scenario.given.items() if k not in _OF_STORED and v not in (None, [], False, "")}
    given |= {f"{kind}.{k}": v for kind, options in scenario.technique_options.items() for k, v in options.items()}
    return {"--" + name.replace("_", "-"): value for name, value in given.items()}


def _print_comparison(joined: Comparison) -> None:
    if joined.settings:
        print(f"not the same run: {len(joined.settings)} settings differ (below the table)")
    show.print_table(show.comparison_table(joined))
    for name, (a, b) in joined.settings.items():
        print(f"differs: {name}: {a} / {b}")
    for note in joined.notes:
        print(f"note: {note}")


_NEWEST = 32


def _latest_of(store: RunStore, measured: RunRecord) -> RunRecord:
    """The newest prediction with the settings of `measured`, else the newest there is."""
    from twinfer.core.compare import differences

    model = measured.config.get("model")
    alike = [s for s in store.list() if s.world == "simulator" and s.model == model and not s.problem]
    for summary in alike[:_NEWEST]:
        record = store.load(summary.id)
        if not differences(measured, record):
            return record
    return store.load("latest", "simulator")


def execute(
    world: str, scenario: Scenario, on_answer: OnAnswer | None = None, fleet: FleetFlags | None = None
) -> RunRecord:
    """The scenario in one world, with progress, until it is done or Ctrl-C is pressed."""
    from twinfer.core.errors import ConfigError, EngineError
    from twinfer.core.run_store import RunStore

    if scenario.model is None:
        raise ConfigError("--model", None, "no model was chosen", "give a name of `twinfer models` or a path")
    if scenario.name and not scenario.name.isprintable():
        raise ConfigError("--name", scenario.name, "has characters that cannot be printed", "give plain words")
    if scenario.save:
        RunStore(scenario.runs_dir).check_writable()
    elif scenario.runs_dir is not None:
        raise ConfigError("--runs-dir", str(scenario.runs_dir), "--no-save keeps no run", "give one of the two")
    try:
        config = scenario.config()
        record = start(world, "running" if world == "engine" else "simulating", config, scenario.workload(),
                       scenario.session, on_answer, fleet.fleet(config) if fleet is not None else None)  # fmt: skip
    except EngineError as error:
        path, unsaved = _save(error.record, scenario) if error.record is not None else (None, None)
        if path is not None:
            show.note(f"what was done until the engine broke is saved as {path.name}")
        elif unsaved is not None:
            show.note(str(unsaved))
        raise
    if scenario.name:
        record.name = scenario.name
    return record


def start(
    world: str, label: str, config: EngineConfig, workload: Workload, session: Session,
    on_answer: OnAnswer | None = None, fleet: Fleet | None = None,
) -> RunRecord:  # fmt: skip
    """A run in `world`, "engine" or "simulator", there of a fleet if one is given.

    Texts are encoded in both, where the model's tokenizer is at hand.

    on_answer(prompt, text) is called by the engine for each request, after the run.
    Raises `typer.Exit` with code 130 when it was stopped before any request had begun.
    """
    record = _run(world, label, config, workload, session, on_answer, fleet)
    if not record.complete and not record.begun:
        show.note("stopped before the first step, nothing is kept")
        raise typer.Exit(show.STOPPED)
    return record


def _run(
    world: str, label: str, config: EngineConfig, workload: Workload, session: Session, on_answer: OnAnswer | None,
    fleet: Fleet | None,
) -> RunRecord:  # fmt: skip
    with show.interruptible() as should_stop, show.progress(label) as on_progress:
        if world == "engine":
            on_progress(0, 0, {"phase": "load", "doing": "starting torch"})
            from twinfer.core.runtime.run import run_engine

            return run_engine(
                config, workload, session.registry, on_progress=on_progress, should_stop=should_stop,
                on_answer=on_answer,
            )  # fmt: skip
        encode = encoder_of(config.model, on_progress) if workload.prompts or workload.trace else None
        if fleet is not None:
            from twinfer.simulator.fleet_run import simulate_fleet

            return simulate_fleet(
                fleet, workload, session.registry, on_progress=on_progress, should_stop=should_stop, encode=encode
            )
        from twinfer.simulator.run import simulate as predict

        return predict(
            config, workload, session.registry, on_progress=on_progress, should_stop=should_stop, encode=encode
        )


def encoder_of(model: str, on_progress: show.OnProgress) -> Encode | None:
    """The model's tokenizer, when its files are on this machine; else lengths of texts are estimated."""
    from twinfer.core.catalog import locate_weights
    from twinfer.core.errors import ModelError

    weights = locate_weights(model)
    if weights is None:
        return None
    on_progress(0, 0, {"phase": "load", "doing": f"reading the tokenizer of {model}"})
    from twinfer.core.runtime.tokenizer import load_tokenizer

    try:
        return load_tokenizer(weights).encode
    except ModelError:
        return None


def payload(record: RunRecord, path: Path | None) -> dict[str, Any]:
    """The JSON of `run` and `simulate`: the record without its rows, and its metrics at the top level too."""
    from twinfer.core.run_files import record_head

    return {**record.metrics, **record_head(record), "path": None if path is None else str(path)}


def comparison_payload(joined: Any, records: list[RunRecord]) -> dict[str, Any]:
    """The JSON of `compare`: `metrics` in the records' schema with both values, `error` with the errors alone."""
    from twinfer.core.run_files import record_head

    return {
        "real": record_head(records[0]),
        "predicted": record_head(records[1]),
        "metrics": joined.nested("real", "predicted", "error"),
        "error": joined.nested("error"),
        "intervals": {p.name: {"band": p.interval, "inside": p.inside} for p in joined.pairs if p.interval is not None},
        "settings": joined.settings,
        "notes": joined.notes,
    }


def _finish(record: RunRecord, scenario: Scenario, answers: Sequence[tuple[str, str]] = ()) -> None:
    refuse_unserved(record)
    path, unsaved = _save(record, scenario)
    if scenario.as_json:
        texts = {"answers": [{"prompt": prompt, "text": text} for prompt, text in answers]} if answers else {}
        show.print_json({**payload(record, path), **texts})
    else:
        for prompt, text in answers:
            print(f"{prompt} ->{text if text[:1].isspace() else ' ' + text}\n")
        for table in show.record_tables(record):
            show.print_table(table)
        for key, reason in record.reasons.items():
            print(f"{key}: {reason}")
        if path is not None:
            print(f"saved as {record.id} in {path}")
    if unsaved is not None:
        raise unsaved
    if not record.complete:
        raise typer.Exit(show.STOPPED)


def refuse_unserved(record: RunRecord) -> None:
    """A run in which nothing could be served is the user's mistake, said as one."""
    from twinfer.core.errors import RequestError

    failed = [r for r in record.requests if r.reason in ("rejected", "capacity", "error")]
    if failed and len(failed) == len(record.requests):
        raise RequestError(f"no request could be served: {failed[0].detail}")
    for request in failed[:3]:
        show.note(f"request {request.request_id} was not served: {request.detail}")
    if len(failed) > 3:
        show.note(f"... and {len(failed) - 3} more")


def _save(record: RunRecord, scenario: Scenario) -> tuple[Path | None, RunStoreError | None]:
    """Where the run was saved, and why it could not be: what it found is shown all the same, then the error is raised."""
    from twinfer.core.run_files import RunStoreError
    from twinfer.core.run_store import RunStore

    if not scenario.save:
        return None, None
    try:
        return RunStore(scenario.runs_dir).save(record), None
    except RunStoreError as error:
        return None, error


def _list(store: Any, as_json: bool) -> None:
    summaries = store.list()
    if as_json:
        show.print_json([{name: getattr(s, name) for name in s.__dataclass_fields__} for s in summaries])
    elif summaries:
        show.print_table(show.runs_table(summaries))
    else:
        print(f"no runs in {store.root}; make one with `twinfer run` or `twinfer simulate`")
