"""Stored runs: exact round trips, damage, races and full disks."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from twinfer.core.errors import TwinferError
from twinfer.core.records import RequestRecord, RunRecord, StepRecord, compute_metrics
from twinfer.core.run_store import RunStore, RunStoreError, default_root


def make_record(id: str = "run-1", created: str = "2026-01-01T00:00:00+00:00", **changes: object) -> RunRecord:
    record = RunRecord(
        id=id,
        world="engine",
        created=created,
        config={"model": "m", "device": "cpu", "scheduler": {"name": "static", "options": {"size": 4}}},
        workload={"rate": 2.0},
        reasons={"dtype": "auto: float32 on cpu"},
        kv_bytes_per_token=1024.0,
        intervals={"output_throughput": (1.0, 2.5)},
        steps=[
            StepRecord(
                step=i, start=i / 10, seconds=0.1, held_blocks=2, used_slots=5, block_size=16, ops={"gemm": 0.05}
            )
            for i in range(3)
        ],
        requests=[
            RequestRecord(
                request_id="r0",
                arrival=0.0,
                first_token=0.1,
                last_token=0.3,
                finished=0.3,
                reason="length",
                num_prompt_tokens=4,
                num_output_tokens=3,
                itl=[0.1, 0.1],
            ),
            RequestRecord(request_id="r1", arrival=0.2, reason="rejected", detail="too long — shorten it"),
        ],
    )
    for key, value in changes.items():
        setattr(record, key, value)
    record.metrics = compute_metrics(record)
    return record


@pytest.fixture
def store(tmp_path: Path) -> RunStore:
    return RunStore(tmp_path / "store")


def test_a_record_comes_back_exactly(store: RunStore) -> None:
    record = make_record()
    folder = store.save(record)
    assert sorted(p.name for p in folder.iterdir()) == ["record.json", "requests.parquet", "steps.parquet"]
    assert store.load("run-1") == record


def test_a_run_without_steps_or_requests_comes_back(store: RunStore) -> None:
    record = make_record(steps=[], requests=[], complete=False)
    store.save(record)
    assert store.load("run-1") == record


def test_json_has_no_infinity(store: RunStore) -> None:
    folder = store.save(make_record(workload={"rate": math.inf, "x": math.nan}))
    assert json.loads((folder / "record.json").read_text(), parse_constant=pytest.fail)["workload"] == {
        "rate": "inf",
        "x": None,
    }


def test_saving_again_replaces(store: RunStore) -> None:
    store.save(make_record(name="first"))
    store.save(make_record(name="second"))
    assert store.load("run-1").name == "second"
    assert [s.name for s in store.list()] == ["second"]
    assert sorted(p.name for p in store.root.iterdir()) == ["index.sqlite", "runs"]  # nothing left aside


def test_list_is_newest_first_and_tells_the_settings(store: RunStore) -> None:
    assert store.list() == []
    store.save(make_record("old", "2026-01-01T00:00:00+00:00"))
    store.save(make_record("new", "2026-01-02T00:00:00+00:00", complete=False))
    for _ in range(2):  # written through the index, then read from it
        new, old = store.list()
        assert (new.id, old.id) == ("new", "old")
        assert (new.model, new.device, new.scheduler, new.complete) == ("m", "cpu", "static:size=4", False)
        assert old.metrics["output_tokens"] == 3 and old.complete is True


def test_find_takes_id_prefix_latest_and_folder(store: RunStore, tmp_path: Path) -> None:
    folder = store.save(make_record("abc-1", "2026-01-01T00:00:00+00:00"))
    store.save(make_record("abd-2", "2026-01-02T00:00:00+00:00"))
    assert store.find("abc") == folder
    assert store.find("latest").name == "abd-2"
    store.save(make_record("sim", "2026-01-03T00:00:00+00:00", world="simulator"))
    assert store.find("latest").name == "sim" and store.find("latest", "engine").name == "abd-2"
    with pytest.raises(RunStoreError, match="no runs of world 'cluster'"):
        store.find("latest", "cluster")
    assert store.find(str(folder)) == folder
    with pytest.raises(RunStoreError, match="beginning of 2 ids"):
        store.find("ab")
    with pytest.raises(RunStoreError, match="'zzz' is not in"):
        store.load("zzz")
    with pytest.raises(RunStoreError, match="no runs in"):
        RunStore(tmp_path / "empty").find("latest")
    assert not (tmp_path / "empty").exists()


@pytest.mark.parametrize("bad", ["", ".", "..", "../x", "a/b", ".hidden", "a b", "x" * 200])
def test_ids_cannot_leave_the_store(store: RunStore, bad: str) -> None:
    with pytest.raises(RunStoreError, match="cannot name a folder"):
        store.save(make_record(bad))
    with pytest.raises(RunStoreError):
        store.undelete(bad)
    with pytest.raises(RunStoreError):
        store.delete(bad)


def test_delete_and_undelete(store: RunStore) -> None:
    record = make_record()
    store.save(record)
    store.delete("run-1")
    assert store.list() == [] and [s.id for s in store.list(deleted=True)] == ["run-1"]
    assert store.list(deleted=True)[0].deleted
    with pytest.raises(RunStoreError):
        store.load("run-1")
    store.undelete("run-1")
    assert store.load("run-1") == record and store.list(deleted=True) == []
    with pytest.raises(RunStoreError, match="nothing to restore"):
        store.undelete("run-1")


def test_undelete_does_not_overwrite_a_newer_run(store: RunStore) -> None:
    store.save(make_record(name="old"))
    store.delete("run-1")
    store.save(make_record(name="new"))
    with pytest.raises(RunStoreError, match="exists again"):
        store.undelete("run-1")
    assert store.load("run-1").name == "new"


def test_only_runs_of_the_store_can_be_deleted(store: RunStore, tmp_path: Path) -> None:
    elsewhere = RunStore(tmp_path / "other").save(make_record())
    with pytest.raises(RunStoreError, match="outside"):
        store.delete(str(elsewhere))
    assert (elsewhere / "record.json").exists()


# --- damage -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["record.json", "steps.parquet", "requests.parquet"])
@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "noise"])
def test_damaged_files_are_named(store: RunStore, name: str, damage: str) -> None:
    path = store.save(make_record()) / name
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes({"empty": b"", "cut": content[: len(content) // 2], "noise": b"\x00\xff" * 50}[damage])
    with pytest.raises(RunStoreError) as caught:
        store.load("run-1")
    assert name in str(caught.value) and "\n" not in str(caught.value)
    assert isinstance(caught.value, TwinferError)


@pytest.mark.parametrize(
    ("part", "values", "words"),
    [
        ("requests", {"arrival": math.nan}, "column arrival has values that are not finite"),
        ("requests", {"arrival": None}, "column arrival lacks values"),
        ("requests", {"last_token": -1.0}, "column last_token has -1.0, which is negative"),
        ("requests", {"num_prompt_tokens": -4}, "column num_prompt_tokens has -4"),
        ("steps", {"seconds": math.inf}, "column seconds has values that are not finite"),
        ("steps", {"num_rows": None}, "column num_rows lacks values"),
        ("steps", {"ops": [("gemm", math.nan)]}, "column ops has values that are not finite"),
    ],
)  # fmt: skip
def test_values_that_no_run_has_are_damage(store: RunStore, part: str, values: dict, words: str) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = store.save(make_record()) / f"{part}.parquet"
    table = pq.read_table(path)
    rows = table.to_pylist()
    rows[0].update(values)
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), path)
    with pytest.raises(RunStoreError, match=f"{part}.parquet: {words}.*the run is damaged"):
        store.load("run-1")
    names = ["1" if name == "step" else name for name in table.column_names]
    pq.write_table(table.rename_columns(names).append_column("step", pa.array(["a"] * len(rows))), path)
    if part == "steps":
        with pytest.raises(RunStoreError, match="column step is of type string, not int64"):
            store.load("run-1")


def test_metrics_that_are_no_numbers_are_damage(store: RunStore) -> None:
    path = store.save(make_record()) / "record.json"
    head = json.loads(path.read_text())
    for metrics in ({"output_throughput": "fast"}, {"ttft": {"p50": "fast"}}, {"duration": True}):
        path.write_text(json.dumps(head | {"metrics": metrics}))
        with pytest.raises(RunStoreError, match="is no number; the run is damaged"):
            store.load("run-1")


def test_bands_that_are_no_numbers_are_damage(store: RunStore) -> None:
    path = store.save(make_record()) / "record.json"
    head = json.loads(path.read_text())
    path.write_text(json.dumps(head | {"intervals": {"duration": [1, "inf"]}}))
    assert store.load("run-1").intervals == {"duration": (1, math.inf)}
    path.write_text(json.dumps(head | {"intervals": {"duration": [None, 1]}}))
    with pytest.raises(RunStoreError, match="is no pair of numbers; the run is damaged"):
        store.load("run-1")


def test_a_damaged_run_does_not_hide_the_others(store: RunStore) -> None:
    store.save(make_record("good"))
    (store.save(make_record("bad")) / "record.json").write_text("{")
    good, bad = store.list()
    assert good.id == "good" and not good.problem
    assert bad.id == "bad" and "record.json" in bad.problem
    assert store.find("latest").name == "good"


@pytest.mark.parametrize("content", ["[]", "{}", '{"id": "x"}'])
def test_json_of_something_else_is_refused(store: RunStore, content: str) -> None:
    (store.save(make_record()) / "record.json").write_text(content)
    with pytest.raises(RunStoreError, match="missing"):
        store.load("run-1")


def test_a_newer_schema_is_refused_and_extra_fields_are_not(store: RunStore) -> None:
    path = store.save(make_record()) / "record.json"
    head = json.loads(path.read_text())
    path.write_text(json.dumps(head | {"comment": "added by a friend"}))
    assert store.load("run-1") == make_record()
    path.write_text(json.dumps(head | {"schema_version": 99}))
    with pytest.raises(RunStoreError, match=r"schema version 99.*update twinfer"):
        store.load("run-1")


@pytest.mark.parametrize("damage", ["noise", "columns", "deleted", "stale"])
def test_the_index_is_only_a_cache(store: RunStore, damage: str) -> None:
    store.save(make_record("a"))
    store.save(make_record("b", "2026-02-01T00:00:00+00:00"))
    index = store.root / "index.sqlite"
    if damage == "noise":
        index.write_bytes(b"not a database at all " * 100)
    elif damage == "columns":
        index.unlink()
        with sqlite3.connect(index) as db:
            db.execute("CREATE TABLE runs (id PRIMARY KEY)")
    elif damage == "deleted":
        index.unlink()
    else:
        shutil.rmtree(store.root / "runs" / "a")  # by hand, behind the index's back
    assert [s.id for s in store.list()] == (["b"] if damage == "stale" else ["b", "a"])
    assert [s.id for s in store.list()] == (["b"] if damage == "stale" else ["b", "a"])


def test_list_works_where_the_index_cannot_be_written(store: RunStore) -> None:
    store.save(make_record("a"))
    (store.root / "index.sqlite").unlink()
    (store.root / "index.sqlite").mkdir()
    assert [s.id for s in store.list()] == ["a"]


# --- the world outside ------------------------------------------------------------------------------

WRITER = """
import sys
from twinfer.core.records import RequestRecord, RunRecord
from twinfer.core.run_store import RunStore
store, who = RunStore(sys.argv[1]), sys.argv[2]
for i in range(12):
    request = RequestRecord(request_id=who, arrival=0.0)
    for id in (f"{who}-{i}", "shared"):
        store.save(RunRecord(id=id, world="engine", created="2026-01-01", config={}, name=who, requests=[request]))
    own = {s.id for s in store.list() if s.name == who and s.id != "shared"}
    assert own == {f"{who}-{j}" for j in range(i + 1) if j % 3 != 2 or j == i}, own
    if i % 3 == 2:
        store.delete(f"{who}-{i}")
"""


def test_two_processes_save_list_and_delete_at_once(store: RunStore) -> None:
    jobs = [subprocess.Popen([sys.executable, "-c", WRITER, str(store.root), who]) for who in ("left", "right")]
    assert [job.wait(timeout=300) for job in jobs] == [0, 0]
    assert len(store.list()) == 2 * 8 + 1 and len(store.list(deleted=True)) == 2 * 4
    for summary in store.list():
        record = store.load(summary.id)
        assert record.requests[0].request_id == record.name  # never half of one and half of the other
    assert sorted(p.name for p in store.root.iterdir()) == ["index.sqlite", "runs", "trash"]


def test_a_run_that_another_process_moves_away_meanwhile_is_replaced(
    store: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rename fails for a folder that is in the way, which is gone when it is looked at."""
    rename, failed = Path.rename, []

    def first_fails(source: Path, target: Path) -> Path:
        if target.name == "a" and not failed:
            failed.append(target)
            raise OSError(errno.ENOTEMPTY, "Directory not empty")
        return rename(source, target)

    monkeypatch.setattr(Path, "rename", first_fails)
    store.save(make_record("a"))
    assert failed and store.load("a").id == "a"


FULL_DISK = """
import resource, signal, sys
from pathlib import Path
from twinfer.core.records import RequestRecord, RunRecord
from twinfer.core.run_store import RunStore, RunStoreError
store = RunStore(sys.argv[1])
requests = [RequestRecord(request_id=f"r{i}", arrival=i * 0.37) for i in range(20_000)]
record = RunRecord(id="big", world="engine", created="2026-01-01", config={}, requests=requests)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (8192, resource.RLIM_INFINITY))
try:
    store.save(record)
except RunStoreError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
assert sorted(p.name for p in store.root.iterdir()) == ["runs"], "something was left behind"
assert store.list() == []
store.save(record)
assert store.load("big") == record
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs file size limits")
def test_a_disk_that_fills_up_is_one_line_and_leaves_nothing(store: RunStore) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(store.root)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "cannot save run big" in done.stdout and "--runs-dir" in done.stdout
    assert len(done.stdout.splitlines()) == 1


def test_a_root_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(RunStoreError, match=r"cannot save run run-1.*--runs-dir"):
        RunStore(tmp_path / "file" / "store").save(make_record())


@pytest.mark.skipif(os.geteuid() == 0 if hasattr(os, "geteuid") else True, reason="the superuser may write anywhere")
def test_a_folder_without_permission_is_one_line(store: RunStore) -> None:
    store.root.mkdir()
    store.root.chmod(0o500)
    with pytest.raises(RunStoreError, match=r"[Pp]ermission"):
        store.save(make_record())
    store.root.chmod(0o700)


def test_a_value_of_the_wrong_type_is_refused_before_anything_appears(store: RunStore) -> None:
    record = make_record()
    record.steps[0].start = "soon"  # type: ignore[assignment]
    with pytest.raises(RunStoreError, match="wrong type"):
        store.save(record)
    assert store.list() == []


def test_default_root_follows_the_platform(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert default_root() == tmp_path / "twinfer"
    monkeypatch.delenv("XDG_DATA_HOME")
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert default_root() == tmp_path / ".local" / "share" / "twinfer"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert default_root() == tmp_path / "Library" / "Application Support" / "twinfer"


def test_importing_the_store_imports_no_pyarrow() -> None:
    code = "import sys, twinfer.core.run_store, twinfer.core.compare; print('pyarrow' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
