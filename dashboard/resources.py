"""What all tabs of one server share: the registry, the stored runs, the jobs, and quick predictions.

Invariants
* A prediction made here is `simulator.run.simulate`, the same function the command line calls.
* It runs in the page's script, so large workloads are sampled and there is a deadline; a sampled or cut
  prediction says so and is never shown as whole. Deadlines count the time of this thread: what else the machine does
  changes how long a page takes, not what it shows.
* Results are kept by scenario key in a bounded cache.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from twinfer.core.errors import TwinferError
from twinfer.core.guard import reasons_against
from twinfer.core.layout import SIZES
from twinfer.core.records import RunRecord
from twinfer.core.registry import Registry
from twinfer.core.run_store import RunStore
from twinfer.core.technique import Needs
from twinfer.dashboard.explain import explain, in_controls
from twinfer.dashboard.jobs import JobManager, Task
from twinfer.dashboard.scenario import Scenario

SAMPLE = 40_000  # output tokens a quick prediction simulates; of larger workloads it takes the first requests
SAMPLE_SPREAD = 12_000  # the same when arrivals are spread over time: bands then take two more simulations
DEADLINE = 3.0  # CPU seconds one quick prediction may take
PATIENCE = 4.0  # CPU seconds a page may spend on quick predictions before it shows what it has
KEPT = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A quick prediction: a record, or the reason why there is none.

    sample: it covers only the first so many requests.  partial: cut at the deadline, or not begun because the
    page's time was up (then there is no record).
    """

    record: RunRecord | None = None
    problem: str = ""
    sample: int | None = None
    partial: bool = False
    seconds: float = 0.0


@dataclass(slots=True)
class Resources:
    """Shared by every session of a server; made once by `app.py`."""

    registry: Registry
    store: RunStore
    jobs: JobManager
    _known: OrderedDict[str, Prediction] = field(default_factory=OrderedDict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _records: OrderedDict[tuple[str, int], RunRecord] = field(default_factory=OrderedDict)

    @classmethod
    def make(
        cls, runs_dir: str | Path | None = None, plugins: Sequence[str] = (), plugin_dirs: Sequence[str | Path] = ()
    ) -> Resources:
        store = RunStore(runs_dir)
        return cls(Registry(plugins, plugin_dirs), store, JobManager(store.root, plugins, plugin_dirs))

    def predict(self, scenario: Scenario, stored: Mapping[str, str] | None = None, wait: bool = True) -> Prediction:
        """The simulator's answer for a scenario, at once.

        stored: scenario key -> id of a stored prediction, which is preferred.  wait: False answers only from memory.
        """
        key = scenario.key()
        if stored and key in stored:
            with contextlib.suppress(TwinferError):  # deleted meanwhile
                return Prediction(record=self.load(stored[key]))
        with self._lock:  # one at a time: two tabs would only slow each other down
            if key in self._known:
                self._known.move_to_end(key)
                return self._known[key]
            if not wait:
                return Prediction(partial=True)
            found = self._predict(scenario)
            self._known[key] = found
            while len(self._known) > KEPT:
                self._known.popitem(last=False)
            return found

    def predict_all(self, scenarios: Sequence[Scenario], stored: Mapping[str, str] | None = None) -> list[Prediction]:
        """Predictions in order, the first always, the others while the page's patience lasts."""
        began = time.thread_time()
        found: list[Prediction] = []
        for scenario in scenarios:
            hopeless = bool(found) and found[0].partial  # the same workload would be cut again
            patient = not found or (not hopeless and time.thread_time() - began < PATIENCE)
            found.append(self.predict(scenario, stored, wait=patient))
        return found

    def _predict(self, scenario: Scenario) -> Prediction:
        from twinfer.simulator.run import simulate

        began, spent = time.monotonic(), time.thread_time()
        try:
            sample = sample_size(scenario)
            workload = (scenario if sample is None else scenario.edited(num_requests=sample)).workload()
            record = simulate(
                scenario.config(), workload, registry=self.registry,
                should_stop=lambda: time.thread_time() - spent > DEADLINE,
            )  # fmt: skip
        except Exception as error:  # shown on the page; the page and its other numbers stay
            if not isinstance(error, TwinferError | ValidationError):
                print(f"prediction failed: {type(error).__name__}: {error}", file=sys.stderr)
            return Prediction(problem=explain(error), seconds=time.monotonic() - began)
        done = [r for r in record.requests if r.num_output_tokens]
        refused = next((r.detail for r in record.requests if r.reason in ("rejected", "capacity", "error")), "")
        if refused and not done:
            return Prediction(
                problem=f"no request can be served: {in_controls(refused)}", seconds=time.monotonic() - began
            )
        return Prediction(record=record, sample=sample, partial=not record.complete, seconds=time.monotonic() - began)

    def load(self, run: str) -> RunRecord:
        """A stored record; read again only when its file changed. Raises TwinferError."""
        path = self.store.find(run) / "record.json"
        try:
            stamp = path.stat().st_mtime_ns
        except OSError:
            stamp = 0
        with self._lock:
            if (run, stamp) in self._records:
                return self._records[run, stamp]
        record = self.store.load(run)
        with self._lock:
            self._records[run, stamp] = record
            while len(self._records) > 24:
                self._records.popitem(last=False)
        return record

    def why_not_real(self, scenario: Scenario) -> str:
        """Why this scenario cannot be run for real on this machine; empty when it can."""
        from twinfer.core.catalog import locate_weights

        try:
            if locate_weights(scenario.model) is None:
                return f"the weights of {scenario.model} are not on this machine"
        except TwinferError as error:
            return explain(error)
        for name in SIZES[1:]:
            if getattr(scenario, name) > 1:
                return f"the engine shares a model over ranks by tensor parallelism alone, not by {name} {getattr(scenario, name)}"
        if scenario.speculator is not None:
            try:
                cls = self.registry.get("speculator", scenario.speculator.name)
                reasons = reasons_against("speculator", cls, Needs(world="engine"))
            except TwinferError as error:
                return explain(error)
            if reasons:
                return in_controls("; ".join(reasons))
        if scenario.images_per_request:
            return "the engine serves the text of every model, and no images"
        if scenario.device != "auto":
            return f"the device is {scenario.device}; choose this machine to measure"
        return ""


def sample_size(scenario: Scenario) -> int | None:
    """How many requests a quick prediction takes of a workload that is too large for it; None for all.

    At least four full batches: with fewer, filling and emptying the batch would count for too much.
    """
    room = (SAMPLE_SPREAD if scenario.rate else SAMPLE) // scenario.output_len
    wanted = max(room, 4 * scenario.max_num_seqs)
    return wanted if wanted < scenario.num_requests else None


def task_of(scenario: Scenario, world: str, label: str) -> Task:
    """A scenario as a task of a job. Raises TwinferError or ValidationError."""
    return Task(
        world=world, label=label, config=scenario.config().model_dump(mode="json"),
        workload=scenario.workload().plain(), scenario=scenario.to_params(), key=scenario.key(),
    )  # fmt: skip
