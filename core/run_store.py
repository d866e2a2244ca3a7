"""Stored runs: one folder a run, and a small index that can always be rebuilt from the folders.

    root/runs/<id>/record.json        everything but steps and requests
                  /steps.parquet      one row a step
                  /requests.parquet   one row a sample of a request
    root/trash/<id>/                  deleted runs, until they are restored
    root/index.sqlite                 summaries, so that a list of 1,000 runs opens no run

Invariants
* The folders are the truth. The index is a cache: absent, damaged or read-only, it is rebuilt or done without.
* A run appears under its id whole or not at all: it is written aside and moved into place, so several
  processes may save, list and delete at the same time.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import sqlite3
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from twinfer.core.records import RunRecord
from twinfer.core.run_files import RunStoreError, read_head, read_run, write_run

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_COLUMNS = "id, folder, world, created, name, model, device, scheduler, kv_cache, complete, metrics, stamp"
_MAKERS = {"run": "engine", "simulate": "simulator"}
"""Commands that make runs, and of which world."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """What a list of runs shows. `problem` says why a run cannot be read; its other fields are then empty."""

    id: str
    path: Path
    world: str = ""
    created: str = ""
    name: str = ""
    model: str = ""
    device: str = ""
    scheduler: str = ""
    kv_cache: str = ""
    complete: bool = True
    metrics: Mapping[str, Any] = field(default_factory=dict)
    deleted: bool = False
    problem: str = ""


Summaries = list[RunSummary]


def default_root() -> Path:
    """The user's data folder for twinfer, by the platform's convention."""
    home = Path.home()
    if sys.platform == "darwin":
        base = home / "Library" / "Application Support"
    elif sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local")
    else:
        base = Path(os.environ.get("XDG_DATA_HOME") or home / ".local" / "share")
    return base / "twinfer"


class RunStore:
    """Runs below `root` (default: the user's data folder). Nothing is created before the first save."""

    def __init__(self, root: str | Path | None = None) -> None:
        self.root = Path(root) if root is not None else default_root()
        self._runs, self._trash = self.root / "runs", self.root / "trash"
        try:
            str(self.root).encode()
        except UnicodeEncodeError:
            raise RunStoreError(
                f"{str(self.root)!r}: the name of the folder is no Unicode text; give another --runs-dir"
            ) from None
        if self.root.exists() and not self.root.is_dir():
            raise RunStoreError(
                f"{self.root} is no folder: cannot save or list runs there; give a folder to --runs-dir"
            )

    # --- writing --------------------------------------------------------------------------------

    def check_writable(self) -> None:
        """Refuse a place where `save` cannot work, before a run is made for it. Creates nothing."""
        place = self._runs
        while not os.path.lexists(place) and place != place.parent:  # a link to nowhere is in the way
            place = place.parent
        if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
            raise RunStoreError(
                f"cannot save runs below {self.root}: {place} cannot be written; fix the permissions, give another "
                "--runs-dir, or --no-save"
            )

    def save(self, record: RunRecord) -> Path:
        """Write `record` and return its folder; a run of the same id is replaced."""
        folder = self._runs / _checked(record.id)
        with _typed(f"cannot save run {record.id} below {self.root}"):
            self._runs.mkdir(parents=True, exist_ok=True)
            aside = Path(tempfile.mkdtemp(prefix=f".{record.id}.", dir=self.root))
            try:
                write_run(aside, record)
                aside.chmod(0o755)  # mkdtemp makes it private
                _put(aside, folder)
            finally:
                shutil.rmtree(aside, ignore_errors=True)
        self._sync_index()
        return folder

    def delete(self, run: str) -> None:
        """Move a run to the trash; `undelete` brings it back."""
        folder = self.find(run)
        if folder.parent != self._runs:
            raise RunStoreError(f"run {run!r} lies outside {self.root}; only runs of this store can be deleted")
        self._move(folder, self._trash)

    def undelete(self, run: str) -> Path:
        """Bring a deleted run back."""
        source = self._trash / _checked(run)
        if not source.is_dir():
            raise RunStoreError(f"run {run!r} is not among the deleted runs of {self.root}; nothing to restore")
        if (self._runs / run).exists():
            raise RunStoreError(f"run {run!r} exists again in {self.root}; delete it before restoring the older one")
        return self._move(source, self._runs)

    # --- reading --------------------------------------------------------------------------------

    def find(self, run: str, world: str | None = None) -> Path:
        """Folder of a run given by id, unique beginning of an id, `latest` (of `world`), or the folder itself."""
        if run == "latest":
            for summary in self.list():
                if not summary.problem and world in (None, summary.world):
                    return summary.path
            what = "runs" if world is None else f"runs of world {world!r}"
            makers = [f"`twinfer {command}`" for command, makes in _MAKERS.items() if world in (None, makes)]
            raise RunStoreError(f"no {what} in {self.root}; make one with {' or '.join(makers) or 'a driver of it'}")
        if _ID.fullmatch(run):
            if (self._runs / run).is_dir():
                return self._runs / run
            found = [p for p in _folders(self._runs) if p.name.startswith(run)]
            if len(found) == 1:
                return found[0]
            if found:
                names = ", ".join(p.name for p in found[:4])
                raise RunStoreError(f"run {run!r} is the beginning of {len(found)} ids ({names}); give more of it")
        if (Path(run) / "record.json").is_file():
            return Path(run)
        raise RunStoreError(f"run {run!r} is not in {self.root}; `twinfer compare --list` shows the runs there")

    def load(self, run: str, world: str | None = None) -> RunRecord:
        """The record of `run` (see `find`), exactly as it was saved."""
        return read_run(self.find(run, world))

    def list(self, deleted: bool = False) -> Summaries:
        """Summaries of the runs (or of the deleted ones), newest first; damaged ones say so and come last."""
        found = [_summary(f, deleted=True) for f in _folders(self._trash)] if deleted else self._sync_index()
        return sorted(sorted(found, key=lambda s: (s.created, s.id), reverse=True), key=lambda s: bool(s.problem))

    # --- inside ---------------------------------------------------------------------------------

    def _move(self, source: Path, parent: Path) -> Path:
        with _typed(f"cannot move run {source.name} in {self.root}"):
            parent.mkdir(parents=True, exist_ok=True)
            _put(source, parent / source.name)
        self._sync_index()
        return parent / source.name

    def _sync_index(self) -> Summaries:
        """Summaries of all runs, through the index where it can be used."""
        folders = {p.name: p for p in _folders(self._runs)}
        if not folders:
            return []
        for attempt in (1, 2):
            try:
                with contextlib.closing(sqlite3.connect(self.root / "index.sqlite", timeout=20)) as db, db:
                    return _through_index(db, folders)
            except sqlite3.DatabaseError as error:
                # an index that is no database, or has other columns, is made anew once
                if attempt == 2 or "locked" in str(error) or "readonly" in str(error):
                    break
                with contextlib.suppress(OSError):
                    (self.root / "index.sqlite").unlink(missing_ok=True)
        return [_summary(folder) for folder in folders.values()]


def _through_index(db: sqlite3.Connection, folders: Mapping[str, Path]) -> list[RunSummary]:
    db.execute(f"CREATE TABLE IF NOT EXISTS runs ({_COLUMNS.replace('folder', 'folder PRIMARY KEY')})")
    found = []
    rows = {row[1]: row for row in db.execute(f"SELECT {_COLUMNS} FROM runs")}
    for name in rows.keys() - folders.keys():
        db.execute("DELETE FROM runs WHERE folder = ?", (name,))
    for name, folder in folders.items():
        stamp = _stamp(folder)
        row = rows.get(name)
        if row is not None and row[-1] == stamp:
            texts = dict(zip(_COLUMNS.split(", ")[2:9], row[2:9], strict=True))
            found.append(
                RunSummary(id=row[0], path=folder, **texts, complete=bool(row[9]), metrics=json.loads(row[10]))
            )
            continue
        summary = _summary(folder)
        found.append(summary)
        if summary.problem:  # read again next time: it may be repaired
            db.execute("DELETE FROM runs WHERE folder = ?", (name,))
            continue
        s = summary
        values = (s.id, name, s.world, s.created, s.name, s.model, s.device, s.scheduler, s.kv_cache, s.complete)
        marks = ",".join("?" * 12)
        db.execute(
            f"INSERT OR REPLACE INTO runs ({_COLUMNS}) VALUES ({marks})", (*values, json.dumps(s.metrics), stamp)
        )
    return found


def _stamp(folder: Path) -> str:
    try:
        stat = (folder / "record.json").stat()
    except OSError:
        return ""
    return f"{stat.st_mtime_ns}/{stat.st_size}"


def _summary(folder: Path, deleted: bool = False) -> RunSummary:
    try:
        head = read_head(folder)
    except RunStoreError as error:
        return RunSummary(id=folder.name, path=folder, deleted=deleted, problem=str(error))
    config = head["config"]
    return RunSummary(
        id=head["id"], path=folder, deleted=deleted, world=head["world"], created=head["created"],
        name=head.get("name", ""), complete=head.get("complete", True), metrics=head.get("metrics", {}),
        **{key: _label(config.get(key)) for key in ("model", "device", "scheduler", "kv_cache")},
    )  # fmt: skip


def _label(value: Any) -> str:
    """A setting in a few characters: a technique by its name and options, a model by the end of its path."""
    if isinstance(value, Mapping):
        options = ",".join(f"{k}={v}" for k, v in sorted(value.get("options", {}).items()))
        return str(value.get("name", "")) + (":" + options if options else "")
    return "" if value is None else str(value)


def _folders(parent: Path) -> Iterator[Path]:
    with _typed(f"cannot list {parent}"):
        if parent.is_dir():
            yield from (p for p in sorted(parent.iterdir()) if _ID.fullmatch(p.name) and p.is_dir())


def _checked(run_id: str) -> str:
    if not _ID.fullmatch(run_id):
        raise RunStoreError(
            f"run id {run_id!r} cannot name a folder; use up to 128 letters, digits, '.', '_' and '-', not '.' first"
        )
    return run_id


def _put(source: Path, target: Path) -> None:
    """Move folder `source` to `target`, replacing what is there, while others may do the same."""
    for _ in range(100):
        try:
            source.rename(target)
            return
        except OSError as error:
            # a target that was in the way may be gone by now: another process has just moved it
            in_the_way = error.errno in (errno.ENOTEMPTY, errno.EEXIST) or target.exists()
            if not source.is_dir() or not in_the_way:
                raise
        old = Path(tempfile.mkdtemp(prefix=".old.", dir=target.parent.parent))
        try:
            with contextlib.suppress(FileNotFoundError):  # another process has moved it away already
                target.rename(old / "run")
        finally:
            shutil.rmtree(old, ignore_errors=True)
    source.rename(target)


@contextlib.contextmanager
def _typed(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error).splitlines()[0]
        raise RunStoreError(
            f"{what}: {reason}; free the space, fix the permissions or give another --runs-dir"
        ) from error


__all__ = ["RunStore", "RunStoreError", "RunSummary", "default_root"]
