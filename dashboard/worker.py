"""The child process of one job: runs its tasks, appends events to its folder, saves the records.

    python -m twinfer.dashboard.worker FOLDER      (FOLDER is made by `jobs.JobManager.start`)

Invariants
* It talks through `events.jsonl` only; stdout and stderr are its log.
* A stopped run still saves its partial record, once a request has begun; before that it ends at once. A task that fails
  leaves the others their turn.
* It inherits the lock on `lock` in its folder, held while it lives; it takes the root's `engine.lock` while it measures.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from types import FrameType
from typing import IO, Any

from pydantic import ValidationError

from twinfer.core.errors import TwinferError
from twinfer.dashboard.explain import explain

PACE = 0.2  # seconds between progress events


class Cancelled(BaseException):
    """The job was cancelled while nothing that could be kept was running."""


class Worker:
    """State of the process: its folder, its event file, whether it was asked to stop."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.spec: dict[str, Any] = json.loads((folder / "job.json").read_text(encoding="utf-8"))
        self.events: IO[str] = open(folder / "events.jsonl", "a", encoding="utf-8", buffering=1)  # noqa: SIM115
        self.stopped = False
        self.interruptible = True  # nothing to keep yet: a cancel raises at once
        self.last = 0.0
        self.root = Path(self.spec["runs_dir"])

    def emit(self, event: str, **fields: Any) -> None:
        self.events.write(json.dumps({"event": event, "time": time.time(), **fields}, default=str) + "\n")

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        self.stopped = True
        if self.interruptible:
            raise Cancelled

    def should_stop(self) -> bool:
        if self.stopped and self.interruptible:  # the exception was lost on its way, in a callback of some library
            raise Cancelled
        self.interruptible = False  # steps are taken: from here on it hands back a partial record
        return self.stopped

    def progress(self, done: int, total: int, info: dict[str, Any] | None = None) -> None:
        now = time.monotonic()
        if now - self.last >= PACE or done == total:
            if self.last == 0.0:
                self.emit("state", state="running")
            self.last = now
            plain = {k: v for k, v in (info or {}).items() if isinstance(v, int | float | str)}
            self.emit("progress", done=done, total=total, info=plain)

    def run(self) -> None:
        from twinfer.core.config import EngineConfig
        from twinfer.core.registry import Registry, set_default_registry
        from twinfer.core.run_store import RunStore
        from twinfer.core.workload import make_workload

        registry = Registry(self.spec["plugins"], self.spec["plugin_dirs"])
        set_default_registry(registry)
        store = RunStore(self.root)
        failed = 0
        for index, task in enumerate(self.spec["tasks"]):
            self.interruptible, self.last = True, 0.0
            if self.stopped:
                raise Cancelled
            try:
                if task["world"] == "plan":
                    self.plan(task, index, registry)
                    continue
                with self.turn(task["world"], index):
                    self.emit("state", state="loading", task=index)
                    config, workload = EngineConfig(**task["config"]), make_workload(**task["workload"])
                    simulate = _runner(task["world"])
                    record = simulate(
                        config, workload, registry=registry, on_progress=self.progress, should_stop=self.should_stop
                    )
                if not record.complete and not record.begun:
                    raise Cancelled
                self.interruptible = False
                record.name = record.name or task["label"]
                record.environment["scenario"] = dict(task["scenario"])
                store.save(record)
                self.emit("record", task=index, id=record.id, complete=record.complete)
                if not record.complete and self.stopped:
                    raise Cancelled
            except TwinferError as error:
                if self.stopped:
                    raise
                failed += 1
                self.emit("problem", task=index, text=explain(error))
            except Cancelled:
                raise
            except Exception as error:
                if self.stopped:
                    raise
                failed += 1
                traceback.print_exc()
                wrong = isinstance(error, ValidationError)  # a stored run asks for what cannot be
                self.emit("problem", task=index, text=explain(error) if wrong else f"{type(error).__name__}: {error}")
        if failed == len(self.spec["tasks"]):
            self.emit("end", state="failed", text="no run of this job could be finished")
        else:
            self.emit("end", state="done")

    def plan(self, task: dict[str, Any], index: int, registry: Any) -> None:
        """A capacity search; its file is in the job's folder, also when it was stopped."""
        from twinfer.simulator.plan import plan
        from twinfer.simulator.plan_space import Question

        self.emit("state", state="loading", task=index)
        found = plan(
            Question.from_plain(task["config"]), registry, workers=None, out=self.folder / "plan.json",
            on_progress=self.progress, should_stop=self.should_stop,
        )  # fmt: skip
        self.emit("record", task=index, id="plan.json", complete=found.complete)
        if not found.complete:
            raise Cancelled

    def turn(self, world: str, index: int) -> Turn:
        return Turn(self, world, index)


class Turn:
    """Context: the right to measure; waits for other engine runs of this root. The simulator waits for nobody."""

    def __init__(self, worker: Worker, world: str, index: int) -> None:
        self.worker, self.world, self.index = worker, world, index
        self.file: IO[bytes] | None = None

    def __enter__(self) -> Turn:
        if self.world == "engine":
            self.file = open(self.worker.root / "engine.lock", "ab")
            said = False
            while True:
                try:
                    fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if not said:
                        self.worker.emit("state", state="queued", task=self.index)
                        said = True
                    time.sleep(0.2)
        return self

    def __exit__(self, *error: object) -> None:
        if self.file is not None:
            self.file.close()


def _runner(world: str) -> Any:
    if world == "engine":
        from twinfer.core.runtime.run import run_engine

        return run_engine
    if world == "simulator":
        from twinfer.simulator.run import simulate

        return simulate
    raise ValueError(f"unknown world {world!r}")


def main(folder: str) -> int:
    path = Path(folder)
    os.nice(10)  # pages stay quick while a run computes
    worker = Worker(path)
    signal.signal(signal.SIGTERM, worker.on_signal)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        if (path / "cancel").exists():
            raise Cancelled
        worker.run()
    except Cancelled:
        worker.interruptible = False
        worker.emit("end", state="cancelled")
    except Exception as error:
        if worker.stopped:  # a library that was being imported may wrap `Cancelled` in an error of its own
            worker.interruptible = False
            worker.emit("end", state="cancelled")
            return 0
        if not isinstance(error, TwinferError):
            traceback.print_exc()
            worker.emit("end", state="failed", text=f"{type(error).__name__}: {error}")
            return 1
        # a plugin of the whole job does not load
        worker.emit("end", state="failed", text=explain(error))
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
