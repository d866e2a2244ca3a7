"""Who evaluates trials: this process, a few child processes, or a Ray cluster.

Invariants
* Outcomes are the same wherever they are made; only their order may differ.
* Children are spawned, never forked, ignore Ctrl-C and end with their pool, or with a parent that was killed; a cancel does not wait for the trials
  that are running.
* Closing a pool twice, or after a failure, is harmless.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import multiprocessing
import os
import signal
import sys
import threading
import types
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Protocol

from twinfer.core.errors import ConfigError, EngineError
from twinfer.core.registry import Registry, set_default_registry
from twinfer.simulator.garbage import RARELY
from twinfer.simulator.plan_space import Question
from twinfer.simulator.plan_trial import Evaluator, Outcome, ShouldStop, Trial

Done = list[tuple[Trial, Outcome]]
MOST_WORKERS = 256
"""Processes of a search: more would take longer to start than it takes."""
POLL_S = 0.2
STEPS_PER_LOOK = 64
"""Steps of a simulation, a fraction of a ms each, between two looks at whether the search was stopped."""


class Pool(Protocol):
    """Takes trials and hands back outcomes."""

    @property
    def room(self) -> int:
        """Trials that it takes now without letting them wait for long."""
        ...

    def submit(self, trial: Trial) -> None: ...
    def collect(self) -> Done:
        """Outcomes that are there; waits a moment for the first. Empty when there is none yet."""
        ...

    def close(self) -> None: ...


class SerialPool:
    """In this process, one trial at a time."""

    def __init__(self, evaluator: Evaluator, should_stop: ShouldStop | None) -> None:
        self._evaluator, self._should_stop = evaluator, should_stop
        self._waiting: list[Trial] = []

    @property
    def room(self) -> int:
        return 1 - len(self._waiting)

    def submit(self, trial: Trial) -> None:
        self._waiting.append(trial)

    def collect(self) -> Done:
        if not self._waiting:
            return []
        trial = self._waiting.pop(0)
        outcome = self._evaluator.answer(trial, self._should_stop)
        return [] if outcome is None else [(trial, outcome)]

    def close(self) -> None:
        self._waiting.clear()


_evaluator: Evaluator | None = None
_stopped: Any = None


def _start_child(question: dict[str, Any], recipe: tuple[Any, ...], stopped: Any) -> None:
    global _evaluator, _stopped
    for number in (signal.SIGINT, signal.SIGTERM):  # also sent to the whole group; the parent decides
        signal.signal(number, signal.SIG_IGN)
    _stopped = stopped
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sys.stdout = sys.stderr  # what plugins print here is none of the parent's answer
    registry = Registry(*recipe)
    set_default_registry(registry)
    _evaluator = Evaluator(Question.from_plain(question), registry)
    gc.freeze()  # the traffic stays, so it need not be looked through again and again
    gc.set_threshold(*RARELY)


def _end_with_parent() -> None:
    """A parent that was killed closes no pool; the pipe that it held tells."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _answer(trial: Trial) -> Outcome | None:
    assert _evaluator is not None
    times = itertools.count(1)  # asking takes a lock that is shared with the parent, so it is asked in few steps
    return _evaluator.answer(trial, lambda: next(times) % STEPS_PER_LOOK == 0 and _stopped.is_set())


@contextlib.contextmanager
def _no_main() -> Iterator[None]:
    """While children are started: they need nothing of this process' main module, which may be a script that runs only
    once (a notebook, a page of a web framework), and must not run it again."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """What comes now waits for this thread, and never reaches a child that is started now, not even while its interpreter
    starts: a child keeps what its parent held back."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class ProcessPool:
    """`workers` child processes."""

    def __init__(self, question: Question, registry: Registry, workers: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._stopped = context.Event()
        self._executor = ProcessPoolExecutor(
            workers, context, initializer=_start_child,
            initargs=(question.plain(), registry.recipe, self._stopped),
        )  # fmt: skip
        self._workers = workers
        self._running: dict[Future[Outcome | None], Trial] = {}

    @property
    def room(self) -> int:
        return self._workers - len(self._running)

    def submit(self, trial: Trial) -> None:
        with _no_main(), _signals_held():  # children may be started now
            self._running[self._executor.submit(_answer, trial)] = trial

    def collect(self) -> Done:
        finished, _ = wait(self._running, timeout=POLL_S, return_when=FIRST_COMPLETED)
        done: Done = []
        for future in finished:
            trial = self._running.pop(future)
            try:
                outcome = future.result()
            except BrokenProcessPool:
                raise EngineError(
                    "a process of the search died (out of memory?); continue with --resume and fewer --workers"
                ) from None
            if outcome is not None:
                done.append((trial, outcome))
        return sorted(done, key=lambda pair: pair[0].key)

    def close(self) -> None:
        self._stopped.set()
        self._executor.shutdown(wait=True, cancel_futures=True)


class RayPool:
    """Tasks on a Ray cluster that has twinfer installed."""

    def __init__(self, question: Question, registry: Registry, address: str) -> None:
        try:
            import ray
        except ImportError:
            raise ConfigError(
                "--ray",
                address,
                "ray is not installed",
                "install twinfer[ray], or leave --ray out: this machine's processes are used",
            ) from None
        try:
            ray.init(address=address, ignore_reinit_error=True, log_to_driver=False)
        except Exception as error:  # whatever its client raises
            reason = " ".join(str(error).split())
            raise ConfigError(
                "--ray", address, f"no cluster answers ({reason})", "check the address, or leave --ray out"
            ) from None
        self._ray = ray
        given, recipe = question.plain(), registry.recipe

        class Worker:
            def __init__(self) -> None:
                made = Registry(*recipe)
                set_default_registry(made)
                self.evaluator = Evaluator(Question.from_plain(given), made)

            def answer(self, trial: Trial) -> Outcome | None:
                return self.evaluator.answer(trial)

        count = max(1, int(ray.cluster_resources().get("CPU", 1)))
        actor = ray.remote(num_cpus=1)(Worker)
        self._idle = [actor.remote() for _ in range(count)]
        self._running: dict[Any, tuple[Trial, Any]] = {}

    @property
    def room(self) -> int:
        return len(self._idle)

    def submit(self, trial: Trial) -> None:
        worker = self._idle.pop()
        self._running[worker.answer.remote(trial)] = (trial, worker)

    def collect(self) -> Done:
        if not self._running:
            return []
        finished, _ = self._ray.wait(list(self._running), num_returns=1, timeout=POLL_S)
        done: Done = []
        for reference in finished:
            trial, worker = self._running.pop(reference)
            self._idle.append(worker)
            done.append((trial, self._ray.get(reference)))
        return done

    def close(self) -> None:
        for _, worker in self._running.values():
            self._ray.kill(worker)
        self._running.clear()
        self._ray.shutdown()


def default_workers() -> int:
    """Processes that this one may use: its cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(MOST_WORKERS, cores or 1)


@contextlib.contextmanager
def open_pool(
    evaluator: Evaluator, workers: int | None, ray: str | None, should_stop: ShouldStop | None
) -> Iterator[Pool]:  # fmt: skip
    """The pool that was asked for, closed at the end. workers: None is `default_workers`; 1 is this process itself."""
    workers = default_workers() if workers is None else workers
    if not 1 <= workers <= MOST_WORKERS:
        raise ConfigError("--workers", workers, "out of range", f"give 1 to {MOST_WORKERS}")
    pool: Pool
    if ray is not None:
        pool = RayPool(evaluator.question, evaluator.registry, ray)
    elif workers == 1:
        pool = SerialPool(evaluator, should_stop)
    else:
        pool = ProcessPool(evaluator.question, evaluator.registry, workers)
    try:
        yield pool
    finally:
        pool.close()


__all__ = ["Pool", "ProcessPool", "RayPool", "SerialPool", "default_workers", "open_pool"]
