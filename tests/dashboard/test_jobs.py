"""Jobs as real child processes: progress, records, cancel, crash, restart of the server, turns of real runs."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from twinfer.core.errors import ConfigError
from twinfer.core.run_store import RunStore
from twinfer.dashboard import worker
from twinfer.dashboard.jobs import Job, JobManager, Task
from twinfer.dashboard.resources import task_of
from twinfer.dashboard.scenario import Scenario

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="workers are told to stop by POSIX signals")

PATIENCE = 300.0  # s; costs nothing when all is well
CHEAP = Scenario(num_requests=4, output_len=8, input_len=16, spread=0, max_num_seqs=4)
ENDLESS = CHEAP.edited(num_requests=50_000, output_len=32, scheduler="slow")  # lasts for hours, see `conftest.SLOW`


@pytest.fixture(autouse=True)
def _no_worker_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that is told to stop may take as long to save its part as a busy machine makes it."""
    monkeypatch.setattr("twinfer.dashboard.jobs.GRACE", 10 * PATIENCE)


@pytest.fixture
def jobs(tmp_path: Path, slow_plugins: Path) -> Iterator[JobManager]:
    manager = JobManager(tmp_path, plugin_dirs=[slow_plugins])
    yield manager
    manager.close()


def until(manager: JobManager, job: str, ready: Callable[[Job], bool], patience: float = PATIENCE) -> Job:
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        found = manager.get(job)
        assert found is not None
        if ready(found):
            return found
        time.sleep(0.05)
    raise AssertionError(f"job stayed {found.state}: {found}")


def over(job: Job) -> bool:
    return job.over


def test_a_job_runs_and_its_record_is_stored(jobs: JobManager, tmp_path: Path):
    ident = jobs.start([task_of(CHEAP, "simulator", "yours")], "one prediction")
    job = until(jobs, ident, over)
    assert job.state == "done" and job.fraction == 1.0 and not job.problems
    record = RunStore(tmp_path).load(job.records[0])
    assert record.world == "simulator" and record.complete and record.name == "yours"
    assert record.metrics["num_completed"] == 4
    assert record.environment["scenario"] == CHEAP.to_params()
    assert jobs.results("simulator") == {CHEAP.key(): record.id} and jobs.results("engine") == {}


def test_the_worker_gives_what_the_page_gives(jobs: JobManager, tmp_path: Path):
    """One function behind the quick estimate, the job and the command line: equal numbers."""
    from twinfer.simulator.run import simulate

    job = until(jobs, jobs.start([task_of(CHEAP, "simulator", "yours")], "one"), over)
    assert RunStore(tmp_path).load(job.records[0]).metrics == simulate(CHEAP.config(), CHEAP.workload()).metrics


def test_a_long_run_reports_progress_and_keeps_its_part_when_cancelled(jobs: JobManager, tmp_path: Path):
    ident = jobs.start([task_of(ENDLESS, "simulator", "long")], "long")
    job = until(jobs, ident, lambda j: j.done > 0)
    assert job.state == "running" and job.total == 50_000 and 0 < job.fraction < 1
    assert job.seconds > 0
    later = until(jobs, ident, lambda j: j.done > job.done)
    assert later.fraction > job.fraction
    jobs.cancel(ident)
    cancelling = jobs.get(ident)
    assert cancelling is not None and (cancelling.cancelling or cancelling.over)
    ended = until(jobs, ident, over)
    assert ended.state == "cancelled" and not ended.error
    record = RunStore(tmp_path).load(ended.records[0])
    assert not record.complete and 0 < record.metrics["num_completed"] < 50_000
    assert jobs.results("simulator") == {}  # a partial record is no result


def test_a_job_cancelled_before_it_runs_ends_as_cancelled(jobs: JobManager):
    ident = jobs.start([task_of(ENDLESS, "simulator", "long")], "long")
    jobs.cancel(ident)
    assert until(jobs, ident, over).state == "cancelled"


def test_a_task_that_cannot_run_leaves_the_others_their_turn(jobs: JobManager):
    wrong = task_of(CHEAP.edited(model="no-such-model"), "simulator", "wrong")
    job = until(jobs, jobs.start([wrong, task_of(CHEAP, "simulator", "right")], "two"), over)
    assert job.state == "done" and list(job.records) == [1]
    assert "no-such-model" in job.problems[0] and "Traceback" not in job.problems[0]


def test_a_job_of_which_nothing_runs_failed(jobs: JobManager):
    job = until(jobs, jobs.start([task_of(CHEAP.edited(scheduler="nope"), "simulator", "x")], "x"), over)
    assert job.state == "failed" and "Scheduler=" in job.problems[0] and job.records == {}


def test_a_killed_worker_is_a_failed_job_and_nothing_else_breaks(jobs: JobManager, tmp_path: Path):
    ident = jobs.start([task_of(ENDLESS, "simulator", "long")], "long")
    until(jobs, ident, lambda j: j.done > 0)
    os.kill(int((tmp_path / "jobs" / ident / "pid").read_text()), signal.SIGKILL)
    job = until(jobs, ident, over)
    assert job.state == "failed" and "ended without a word" in job.error
    assert until(jobs, jobs.start([task_of(CHEAP, "simulator", "next")], "next"), over).state == "done"


def test_a_plugin_that_crashes_takes_only_its_job_down(tmp_path: Path):
    folder = tmp_path / "plugins"
    folder.mkdir()
    (folder / "bad.py").write_text(
        "from twinfer.core.hookspecs import hookimpl\n"
        "from twinfer.core.technique import Technique\n"
        "class Bad(Technique):\n"
        "    name = 'bad'\n    summary = 'crashes'\n"
        "    def order(self, seq): return ()\n"
        "    def propose(self, view): raise RuntimeError('bad plugin')\n"
        "    def victims(self, view, shortage): return ()\n"
        "@hookimpl\ndef register_scheduler(register): register(Bad)\n"
    )
    jobs = JobManager(tmp_path / "runs", plugin_dirs=[folder])
    bad = task_of(CHEAP.edited(scheduler="bad"), "simulator", "bad")
    job = until(jobs, jobs.start([bad, task_of(CHEAP, "simulator", "good")], "two"), over)
    jobs.close()
    assert job.state == "done" and list(job.records) == [1] and "bad plugin" in job.problems[0]


def test_a_plugin_that_does_not_load_fails_the_job_with_its_reason(tmp_path: Path):
    jobs = JobManager(tmp_path, plugins=["no_such_plugin_module"])
    job = until(jobs, jobs.start([task_of(CHEAP, "simulator", "x")], "x"), over)
    jobs.close()
    assert job.state == "failed" and "no_such_plugin_module" in job.error


def test_another_server_finds_the_running_job_and_can_cancel_it(jobs: JobManager, tmp_path: Path):
    ident = jobs.start([task_of(ENDLESS, "simulator", "long")], "long")
    os.utime(tmp_path / "jobs" / ident / "job.json", (1, 1))  # however long its worker takes to come up
    early = JobManager(tmp_path).get(ident)
    assert early is not None and not early.over
    until(jobs, ident, lambda j: j.done > 0)
    restarted = JobManager(tmp_path)
    found = restarted.get(ident)
    assert found is not None and found.state == "running" and found.title == "long"
    assert [job.id for job in restarted.running()] == [ident]
    restarted.cancel(ident)
    assert until(restarted, ident, over).state == "cancelled"
    assert restarted.running() == []


def test_real_runs_take_turns(jobs: JobManager, tmp_path: Path):
    with open(tmp_path / "engine.lock", "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # as if another run were measuring
        ident = jobs.start([task_of(CHEAP.edited(model="no-such-model"), "engine", "x")], "x")
        until(jobs, ident, lambda j: j.state == "queued")
        other = jobs.start([task_of(CHEAP, "simulator", "y")], "y")
        assert until(jobs, other, over).state == "done"  # predictions wait for nobody
        queued = jobs.get(ident)
        assert queued is not None and queued.state == "queued"
    assert until(jobs, ident, over).state == "failed"


def test_a_queued_run_can_be_cancelled(jobs: JobManager, tmp_path: Path):
    with open(tmp_path / "engine.lock", "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        ident = jobs.start([task_of(CHEAP, "engine", "x")], "x")
        until(jobs, ident, lambda j: j.state == "queued")
        jobs.cancel(ident)
        assert until(jobs, ident, over).state == "cancelled"


def test_closing_the_server_stops_its_workers(jobs: JobManager, tmp_path: Path):
    ident = jobs.start([task_of(ENDLESS, "simulator", "long")], "long")
    until(jobs, ident, lambda j: j.done > 0)
    jobs.close()
    assert jobs.running() == []
    job = jobs.get(ident)
    assert job is not None and job.state == "cancelled"


@pytest.mark.parametrize("ident", ["", "..", "../../etc", "nope", "20261129-000000-abcdef", "a/b"])
def test_unknown_and_odd_ids_are_no_jobs(jobs: JobManager, ident: str):
    assert jobs.get(ident) is None
    jobs.cancel(ident)


def test_half_written_events_are_read_over(jobs: JobManager, tmp_path: Path):
    folder = tmp_path / "jobs" / "20261129-120000-abcdef"
    folder.mkdir(parents=True)
    (folder / "job.json").write_text(json.dumps({"id": "x", "title": "t", "created": "", "tasks": [{"label": "a"}]}))
    (folder / "events.jsonl").write_text(
        '{"event": "state", "state": "running", "task": 0, "time": 1}\n[1]\n{"event": "progress", "done": 3, "tot'
    )
    os.utime(folder / "job.json", (1, 1))
    job = jobs.get(folder.name)
    assert job is not None and job.state == "failed" and job.done == 0


def test_eta_and_fraction():
    job = Job(id="x", title="t", created="", tasks=[{}, {}], state="running", task=1, done=5, total=10, seconds=30.0)
    assert job.fraction == 0.75 and job.eta == pytest.approx(10.0)
    job.done = 0
    job.task = 0
    assert job.fraction == 0 and job.eta is None


def test_a_job_needs_a_task(jobs: JobManager):
    with pytest.raises(ValueError, match="at least one task"):
        jobs.start([], "nothing")


def test_a_real_run_of_a_tiny_model(jobs: JobManager, tmp_path: Path, tiny_llama_dir: Path):
    scenario = CHEAP.edited(model=str(tiny_llama_dir), max_model_len=128)
    tasks: list[Task] = [task_of(scenario, world, "tiny") for world in ("simulator", "engine")]
    job = until(jobs, jobs.start(tasks, "tiny"), over)
    assert job.state == "done", (job.error, job.problems)
    real, predicted = (RunStore(tmp_path).load(job.records[i]) for i in (1, 0))
    assert (real.world, predicted.world) == ("engine", "simulator")
    assert real.metrics["output_tokens"] == predicted.metrics["output_tokens"] == 32
    assert {r.request_id for r in real.requests} == {r.request_id for r in predicted.requests}


def test_a_real_run_is_cancelled_and_its_part_is_kept(jobs: JobManager, tmp_path: Path, tiny_llama_dir: Path):
    scenario = CHEAP.edited(
        model=str(tiny_llama_dir), max_model_len=128, num_requests=5000, output_len=32, scheduler="slow"
    )
    ident = jobs.start([task_of(scenario, "engine", "long")], "long")
    job = until(jobs, ident, lambda j: j.done > 3)
    assert job.state == "running" and job.total == 5000 and job.info["phase"] == "run"
    jobs.cancel(ident)
    ended = until(jobs, ident, over)
    assert ended.state == "cancelled"
    record = RunStore(tmp_path).load(ended.records[0])
    assert record.world == "engine" and not record.complete and 0 < record.metrics["num_completed"] < 5000


LOADS = """
import time
from pathlib import Path
from twinfer import hookimpl
from twinfer.plugins.kv_cache.paged import Paged

class Loads(Paged):
    name = "loads"
    summary = "paged, and takes an hour to be set up"

    def block_size(self, limits):
        Path({path!r}).touch()
        time.sleep(3600)
        return super().block_size(limits)

@hookimpl
def register_kv_cache(register):
    register(Loads)
"""


@pytest.mark.parametrize("world", ["engine", "simulator"])
def test_a_run_that_is_cancelled_while_it_loads_ends_at_once_and_leaves_no_record(
    tmp_path: Path, tiny_llama_dir: Path, world: str
) -> None:
    (tmp_path / "loads.py").write_text(LOADS.format(path=str(tmp_path / "loading")))
    manager = JobManager(tmp_path, plugin_dirs=[tmp_path])
    try:
        scenario = CHEAP.edited(model=str(tiny_llama_dir), max_model_len=128, kv_cache="loads")
        ident = manager.start([task_of(scenario, world, "never")], "never")
        until(manager, ident, lambda job: (tmp_path / "loading").exists())
        manager.cancel(ident)
        job = until(manager, ident, over)
        assert (job.state, job.records, job.problems) == ("cancelled", {}, {})
        assert RunStore(tmp_path).list() == []
    finally:
        manager.close()


def test_a_cancel_that_was_lost_in_a_callback_comes_with_the_next_question(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text(json.dumps({"runs_dir": str(tmp_path), "tasks": []}), encoding="utf-8")
    child = worker.Worker(tmp_path)
    child.progress(0, 0, {"phase": "load"})
    with pytest.raises(worker.Cancelled):
        child.on_signal(signal.SIGTERM, None)
    with pytest.raises(worker.Cancelled):
        child.should_stop()


def test_once_steps_are_taken_a_cancel_is_answered_not_raised(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text(json.dumps({"runs_dir": str(tmp_path), "tasks": []}), encoding="utf-8")
    child = worker.Worker(tmp_path)
    assert not child.should_stop()
    child.on_signal(signal.SIGTERM, None)
    assert child.should_stop()


@pytest.mark.parametrize("wrapped", [RuntimeError, ConfigError])
def test_a_cancel_that_a_library_wraps_in_its_own_error_is_a_cancel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrapped: type[Exception]
) -> None:
    """As pydantic does where it builds a model when the signal comes."""
    (tmp_path / "job.json").write_text(json.dumps({"runs_dir": str(tmp_path), "tasks": []}), encoding="utf-8")
    told: list[bool] = [True, False]

    def run(self: worker.Worker) -> None:
        try:
            if told.pop(0):
                self.on_signal(signal.SIGTERM, None)
        except worker.Cancelled as cancelled:
            raise make(wrapped) from cancelled
        raise make(wrapped)

    monkeypatch.setattr(worker.Worker, "run", run)
    monkeypatch.setattr(worker.os, "nice", lambda by: 0)
    monkeypatch.setattr(worker.signal, "signal", lambda number, handler: None)
    assert [worker.main(str(tmp_path)) == 0 for _ in range(2)] == [True, False]
    states = [
        json.loads(line)["state"] for line in (tmp_path / "events.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert states == ["cancelled", "failed"]


def make(kind: type[Exception]) -> Exception:
    return kind("--x", 1, "wrong", "another") if kind is ConfigError else kind("wrong")
