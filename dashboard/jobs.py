"""Long runs in child processes: started, watched, cancelled and found again.

    root/jobs/<id>/job.json       what to run (written once)
                  /events.jsonl   one event a line, appended by the worker
                  /pid            the worker's process id
                  /lock           held by the worker while it lives
                  /log            the worker's stdout and stderr

Invariants
* The folder is the truth. A page reload, a second browser or a restarted server sees the same job.
* A worker that dies, however it dies, leaves a job that ends as `failed` with the end of its log.
* A child process, never a thread or multiprocessing: it can be killed, and its crash or memory is its own.
* Real runs wait for each other (a lock in the root): two at once would measure each other.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from twinfer.core.run_store import default_root

_ID = re.compile(r"[0-9]{8}-[0-9]{6}-[0-9a-f]{6}")
OVER = ("done", "failed", "cancelled")
GRACE = 30.0  # seconds a worker has to stop by itself before it is killed
KEPT = 200  # finished jobs whose folders are kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One run: `world` is "engine" or "simulator"; config and workload as plain data; label for people.

    scenario: the query parameters that ask for it again; key: `Scenario.key()`, by which results are found.
    """

    world: str
    label: str
    config: Mapping[str, Any]
    workload: Mapping[str, Any]
    scenario: Mapping[str, str] = field(default_factory=dict)
    key: str = ""

    def plain(self) -> dict[str, Any]:
        return {
            "world": self.world, "label": self.label, "config": dict(self.config),
            "workload": dict(self.workload), "scenario": dict(self.scenario), "key": self.key,
        }  # fmt: skip


@dataclass(slots=True, kw_only=True)
class Job:
    """A job as it stands. `state`: starting, queued, loading, running, then done, failed or cancelled."""

    id: str
    title: str
    created: str
    tasks: list[dict[str, Any]]
    scenario: dict[str, str] = field(default_factory=dict)
    state: str = "starting"
    task: int = 0
    done: int = 0
    total: int = 0
    info: dict[str, Any] = field(default_factory=dict)
    records: dict[int, str] = field(default_factory=dict)
    partial: set[int] = field(default_factory=set)  # tasks whose record was cut short
    problems: dict[int, str] = field(default_factory=dict)
    error: str = ""
    log: str = ""
    seconds: float = 0.0
    started: float = 0.0
    cancelling: bool = False

    @property
    def over(self) -> bool:
        return self.state in OVER

    @property
    def fraction(self) -> float:
        """Finished share of all tasks, in [0, 1]."""
        if self.state == "done":
            return 1.0
        part = self.done / self.total if self.total else 0.0
        return min(1.0, (self.task + min(1.0, part)) / max(1, len(self.tasks)))

    @property
    def eta(self) -> float | None:
        """Seconds to the end, from the pace so far; None while there is none."""
        if self.over or self.state != "running" or self.fraction < 0.02:
            return None
        return self.seconds * (1 - self.fraction) / self.fraction


class JobManager:
    """All jobs below `root`; one per server process, shared by its sessions."""

    def __init__(
        self, root: str | Path | None = None, plugins: Sequence[str] = (), plugin_dirs: Sequence[str | Path] = ()
    ) -> None:
        self.root = Path(root) if root is not None else default_root()
        self.folder = self.root / "jobs"
        self._plugins, self._plugin_dirs = list(plugins), [str(p) for p in plugin_dirs]
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._cancelled: dict[str, float] = {}
        self._over: dict[str, Job] = {}  # finished jobs change no more

    def start(self, tasks: Sequence[Task], title: str, scenario: Mapping[str, str] | None = None) -> str:
        """Start a worker for `tasks`; returns the job's id. scenario: parameters of the page it was started from."""
        if not tasks:
            raise ValueError("a job needs at least one task")
        job = f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"
        folder = self.folder / job
        folder.mkdir(parents=True)
        spec = {
            "id": job, "title": title, "scenario": dict(scenario or {}),
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "runs_dir": str(self.root), "plugins": self._plugins, "plugin_dirs": self._plugin_dirs,
            "tasks": [task.plain() for task in tasks],
        }  # fmt: skip
        with open(folder / "log", "wb") as log, open(folder / "lock", "ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # before the job can be seen; the worker inherits it and ends with it
            text = json.dumps(spec, indent=1, allow_nan=False) + "\n"
            (folder / "job.json").write_text(text, encoding="utf-8")
            child = subprocess.Popen(
                [sys.executable, "-m", "twinfer.dashboard.worker", str(folder)], pass_fds=[lock.fileno()],
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        (folder / "pid").write_text(str(child.pid), encoding="utf-8")
        self._children[job] = child
        self._prune()
        return job

    def get(self, job: str) -> Job | None:
        """The job as its folder tells it now; None when there is no such job."""
        if job in self._over:
            return self._over[job]
        if not _ID.fullmatch(job):
            return None
        folder = self.folder / job
        try:
            spec = json.loads((folder / "job.json").read_text(encoding="utf-8"))
            found = Job(
                id=job, title=spec["title"], created=spec["created"], tasks=spec["tasks"],
                scenario=spec.get("scenario", {}),
            )  # fmt: skip
        except (OSError, ValueError, KeyError, TypeError, AttributeError):  # damaged, or of somebody else
            return None
        alive = self._alive(job)  # before the events: a worker writes its last one while it is alive
        for event in _events(folder / "events.jsonl"):
            _apply(found, event)
        asked = self._cancelled.get(job)
        found.cancelling = not found.over and ((folder / "cancel").exists() or asked is not None)
        if not found.over and not alive:
            found.state = "cancelled" if found.cancelling else "failed"
            found.error = "" if found.cancelling else found.error or "the run's process ended without a word"
        if not found.over:
            if found.started:
                found.seconds = max(found.seconds, time.time() - found.started)
            if asked is not None and time.monotonic() - asked > GRACE:
                self._signal(job, signal.SIGKILL)
        elif found.state == "failed":
            found.log = _tail(folder / "log")
        if found.over and not alive:
            self._over[job] = found
        return found

    def cancel(self, job: str) -> None:
        """Ask the worker to stop and keep what it has; it is killed after a grace time."""
        folder = self.folder / job
        if folder.is_dir():
            (folder / "cancel").touch()
            self._cancelled.setdefault(job, time.monotonic())
            self._signal(job, signal.SIGTERM)

    def newest(self, limit: int = 50) -> list[Job]:
        """The newest jobs first."""
        try:
            names = sorted((p.name for p in self.folder.iterdir() if p.is_dir()), reverse=True)[:limit]
        except OSError:
            return []
        return [job for name in names if (job := self.get(name)) is not None]

    def results(self, world: str) -> dict[str, str]:
        """Scenario key -> id of the newest complete record of that world."""
        found: dict[str, str] = {}
        for job in reversed(self.newest(KEPT)):
            for index, record in job.records.items():
                task = job.tasks[index]
                if task["world"] == world and task.get("key") and index not in job.partial:
                    found[task["key"]] = record
        return found

    def running(self) -> list[Job]:
        return [job for job in self.newest() if not job.over]

    def close(self) -> None:
        """Stop the workers of this server (their partial records are kept)."""
        for job, child in self._children.items():
            if child.poll() is None:
                self.cancel(job)
        deadline = time.monotonic() + 3
        for child in self._children.values():
            try:
                child.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()

    # --- inside ---------------------------------------------------------------------------------

    def _alive(self, job: str) -> bool:
        child = self._children.get(job)
        if child is not None:
            return child.poll() is None
        try:  # a job of another server: its worker holds the lock while it lives
            with open(self.folder / job / "lock", "rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    def _signal(self, job: str, number: int) -> None:
        if not self._alive(job):
            return
        try:
            pid = int((self.folder / job / "pid").read_text(encoding="utf-8"))
            os.kill(pid, number)
        except (OSError, ValueError):
            pass

    def _prune(self) -> None:
        names = sorted((p.name for p in self.folder.iterdir() if p.is_dir()), reverse=True)
        for name in names[KEPT:]:
            if not self._alive(name):
                shutil.rmtree(self.folder / name, ignore_errors=True)
                self._children.pop(name, None)


def _events(path: Path) -> list[dict[str, Any]]:
    found = []
    try:
        text = path.read_text(encoding="utf-8")
    except OSError:
        return []
    for line in text.splitlines():
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):  # the last line may be half written
            continue
        if isinstance(event, dict):
            found.append(event)
    return found


def _apply(job: Job, event: Mapping[str, Any]) -> None:
    kind = event.get("event")
    if kind == "state":
        job.state = str(event["state"])
        job.task = int(event.get("task", job.task))
        if job.state == "loading":
            job.done = job.total = 0
        if not job.started and job.state in ("loading", "running"):
            job.started = float(event["time"])
    elif kind == "progress":
        job.done, job.total = int(event["done"]), int(event["total"])
        job.info = dict(event.get("info", {}))
    elif kind == "record":
        job.records[int(event["task"])] = str(event["id"])
        if not event.get("complete", True):
            job.partial.add(int(event["task"]))
    elif kind == "problem":
        job.problems[int(event["task"])] = str(event["text"])
    elif kind == "end":
        job.state = str(event["state"])
        job.error = str(event.get("text", ""))
    if job.started and "time" in event:
        job.seconds = max(job.seconds, float(event["time"]) - job.started)


def _tail(path: Path, size: int = 4000) -> str:
    try:
        return path.read_bytes()[-size:].decode("utf-8", "replace")
    except OSError:
        return ""
