"""Tensor parallelism as rank 0 sees it: the other ranks' processes, and the executor that keeps them in step.

    Core -> StoppingExecutor -> TensorParallelExecutor -> TorchExecutor (rank 0) -- collectives --+
                                        | plans, over pipes                                       |
                                        +-> process of rank 1: TorchExecutor -- collectives ------+
                                        +-> process of rank 2 ...

Ranks are fresh interpreters (no fork: this process has threads; no import of the caller's main module).

Invariants
* Plans reach every rank in the order in which rank 0 runs them, before it runs them.
* Every wait for a rank also sees its end: one that dies becomes an EngineError that names it and its exit code, the
  others are ended, and nothing is left behind (processes, files, ports).
* After a step has failed on any rank the group is over: its ranks may not be at the same collective.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

import torch

from twinfer.core.errors import ConfigError, EngineError, ModelError, PluginError, TwinferError
from twinfer.core.plan import StepPlan, StepResult
from twinfer.core.registry import Registry
from twinfer.core.request import Request
from twinfer.core.runtime.executor import TorchExecutor
from twinfer.core.runtime.parallel import ALONE, Parallel
from twinfer.core.runtime.process_group import Group, PeerLost, ProcessGroupRank, backend_of, join
from twinfer.core.runtime.tensor_parallel_rank import Admit, Build, Done, Drop, Failed, Job, Join, Load, Step
from twinfer.core.setup import Setup

OnPhase = Callable[[str], None]

MEET_S = 0.1  # between two looks at processes while the ranks meet
POLL_S = 1.0  # between two looks at processes whose pipes are silent
BLAME_S = 30.0  # for a rank that failed to be told from those that only lost it
END_S = 10.0  # for a rank to end by itself

_BOOT = (
    "import signal, sys; [signal.signal(s, signal.SIG_IGN) for s in (signal.SIGINT, signal.SIGTERM)]\n"
    "from multiprocessing.connection import Connection\n"
    "channel = Connection(int(sys.argv[1])); sys.path[:] = channel.recv()\n"
    "from twinfer.core.runtime.tensor_parallel_rank import main; main(channel)\n"
)


class Ranks:
    """Ranks 1 to `size - 1`, and the group that this process, rank 0, forms with them.

    Raises EngineError from every method that meets a rank which has died.
    """

    def __init__(self, size: int, device: torch.device, registry: Registry, on_phase: OnPhase) -> None:
        self.size, self.device = size, device
        self.parallel: Parallel = ALONE
        self.weight_bytes: tuple[int, ...] = ()
        self.processes: list[subprocess.Popen[bytes]] = []
        self.channels: list[Connection] = []
        self._on_phase = on_phase
        threads = torch.get_num_threads()
        self.threads = max(1, threads // size) if device.type == "cpu" else threads
        self._executors: set[int] = set()
        self._next = 0
        self._over = ""
        self._groups: list[Group] = []
        # runs when the interpreter ends, too, should nobody have closed this
        self._end = weakref.finalize(self, _end, self._groups, self.channels, self.processes, threads)
        try:
            on_phase(f"starting {size} ranks")
            for rank in range(1, size):
                self._start(rank, registry)
            torch.set_num_threads(self.threads)
            self._answers("starting")
            self._join()
        except BaseException:
            for process in self.processes:  # one that still starts looks at its life line late, and has nothing to end
                process.kill()
            self.close()
            raise

    @property
    def environment(self) -> dict[str, Any]:
        """What a record says of the ranks."""
        return {"ranks": self.size, "backend": backend_of(self.device), "threads_per_rank": self.threads}

    def load(self, setup: Setup, weights: Path, load_share: Callable[[Parallel], Any]) -> Any:
        """What `load_share` gives for rank 0, while the others load theirs (`weight_bytes` has their sizes).

        Raises what rank 0's own loading raises, and the other ranks' ConfigError or ModelError.
        """
        try:
            self._on_phase(f"loading the shares of {self.size} ranks")
            self._tell(Load(_pickled(setup), weights))
            share = load_share(self.parallel)
            self.weight_bytes = tuple(answer.weight_bytes for answer in self._answers("loading its share"))
        except BaseException:
            self.close()
            raise
        return share

    def executor(self, setup: Setup, inner: TorchExecutor) -> TensorParallelExecutor:
        """`inner` of rank 0 with its counterparts on the other ranks."""
        number, self._next = self._next, self._next + 1
        self._executors.add(number)
        try:
            self._tell(Build(number, _pickled(setup)))
            self._answers("building its executor")
        except BaseException:
            self.close()
            raise
        return TensorParallelExecutor(self, number, inner)

    def admit(self, number: int, request: Request, seqs: tuple[tuple[str, int], ...]) -> None:
        self._tell(Admit(number, request, seqs))

    def step(self, number: int, plan: StepPlan) -> None:
        """Start a step on the other ranks. EngineError also when one of them has failed since the last."""
        self._check_open()
        if wait(self.channels, 0):  # a rank that is well says nothing
            raise self._why_lost("in a step")
        self._tell(Step(number, plan))

    def drop(self, number: int) -> None:
        """An executor is done with; with the last one the ranks end."""
        if number in self._executors:
            self._executors.remove(number)
            if not self._executors:
                self.close()
            else:
                with contextlib.suppress(EngineError):
                    self._tell(Drop(number))

    def failure(self, error: BaseException) -> BaseException:
        """What to raise for `error` of a step of rank 0; the group is over."""
        try:
            if isinstance(error, PeerLost):
                return self._why_lost("in a step")
            if isinstance(error, RuntimeError) and "memory" in str(error):
                return EngineError(f"rank 0 of --tp {self.size} ran out of memory ({_line(error)}); {_LESS_MEMORY}")
            return error
        finally:
            self.close("a step has failed")

    def close(self, why: str = "it was closed") -> None:
        """End all ranks; calling it twice is harmless."""
        self._over = self._over or why
        self._end()

    # --- inside -----------------------------------------------------------------------------------

    def _start(self, rank: int, registry: Registry) -> None:
        mine, theirs = Pipe()
        device = f"cuda:{rank}" if self.device.type == "cuda" else "cpu"
        with theirs:
            # stdin is the life line: it closes with this process, however that ends. What a rank prints is no output. In a
            # group of its own it hears of no Ctrl-C of the terminal, not even while its interpreter starts.
            process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, str(theirs.fileno())],
                stdin=subprocess.PIPE, stdout=sys.__stderr__, pass_fds=(theirs.fileno(),), process_group=0,
                env=os.environ | {"OMP_NUM_THREADS": str(self.threads)},
            )  # fmt: skip
        self.processes.append(process)
        self.channels.append(mine)
        with self._telling():
            mine.send(list(sys.path))
            mine.send(Job(rank, self.size, device, self.threads, registry.recipe))

    def _join(self) -> None:
        with tempfile.TemporaryDirectory(prefix="twinfer-tp-", ignore_cleanup_errors=True) as folder:
            store = str(Path(folder) / "store")
            self._tell(Join(store))
            joined = self._meet(store)
            self.parallel = joined
            self._groups.append(joined.group)
            self._answers("meeting the others")
        if self.device.type == "cuda":
            threading.Thread(target=_abort_with_a_rank, args=(joined.group, self.processes), daemon=True).start()

    def _meet(self, store: str) -> ProcessGroupRank:
        """Join the group, in a thread, so that a rank which dies before it comes is not waited for."""
        met: list[ProcessGroupRank] = []
        given_up = threading.Event()

        def meet() -> None:
            with contextlib.suppress(PeerLost):
                met.append(join(0, self.size, self.device, store))
            if given_up.is_set():  # the folder is gone, but for what this thread wrote after that
                shutil.rmtree(Path(store).parent, ignore_errors=True)

        thread = threading.Thread(target=meet, daemon=True)
        thread.start()
        while thread.is_alive() and all(process.poll() is None for process in self.processes):
            thread.join(MEET_S)
        if not met:
            given_up.set()
            raise self._why_lost("meeting the others")
        return met[0]

    def _check_open(self) -> None:
        if self._over:
            raise EngineError(f"the ranks of --tp {self.size} have ended ({self._over}); load the engine again")

    def _tell(self, message: object) -> None:
        self._check_open()
        data = pickle.dumps(message)
        with self._telling():
            for channel in self.channels:
                channel.send_bytes(data)

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        try:
            yield
        except (BrokenPipeError, ConnectionResetError):
            raise self._why_lost("between two steps") from None

    def _answers(self, doing: str) -> list[Done]:
        """The answer of every rank, in order."""
        answers: dict[int, Done] = {}
        while len(answers) < len(self.channels):
            silent = {c: i for i, c in enumerate(self.channels) if i not in answers}
            for channel in wait(list(silent), POLL_S):
                assert isinstance(channel, Connection)
                answer = _heard(channel)
                if not isinstance(answer, Done):
                    raise self._why_lost(doing, {silent[channel]: answer})
                answers[silent[channel]] = answer
        return [answers[i] for i in range(len(self.channels))]

    def _why_lost(self, doing: str, heard: dict[int, Failed | None] | None = None) -> TwinferError:
        """The error of the rank that failed first, not of those that lost it."""
        heard = heard or {}
        end = time.monotonic() + BLAME_S
        while all(map(_is_victim, heard.values())) and time.monotonic() < end:
            silent = {c: i for i, c in enumerate(self.channels) if i not in heard}
            if not silent:
                break
            for channel in wait(list(silent), POLL_S):
                assert isinstance(channel, Connection)
                answer = _heard(channel)
                if not isinstance(answer, Done):
                    heard[silent[channel]] = answer
        if heard:
            index = min(heard, key=lambda i: _is_victim(heard[i]))
            return self._error(index, heard[index], doing)
        return EngineError(
            f"--tp {self.size}: the ranks lost each other {doing}, and all are still alive; run again, or with --tp 1"
        )

    def _error(self, index: int, failed: Failed | None, doing: str) -> TwinferError:
        name = f"rank {index + 1} of --tp {self.size}"
        if failed is None:
            return EngineError(f"{name} died {doing} ({_ending(self.processes[index])}); {_LESS_MEMORY}")
        error = pickle.loads(failed.error) if failed.error else None
        if isinstance(error, ConfigError):
            return error
        if isinstance(error, ModelError | PluginError):
            return type(error)(f"{name}: {error}")
        if "memory" in failed.text:
            return EngineError(f"{name} ran out of memory {doing} ({failed.text}); {_LESS_MEMORY}")
        return EngineError(f"{name} failed {doing}: {failed.text}; run again, or with --tp 1")


def _end(
    groups: Sequence[Group], channels: Sequence[Connection], processes: Sequence[subprocess.Popen[bytes]], threads: int
) -> None:
    """End all ranks and give torch its `threads` back."""
    for group in groups:
        group.leave()  # while the others are there: torch does not always survive leaving later
    for channel in channels:
        channel.close()
    for process in processes:
        assert process.stdin is not None
        process.stdin.close()
    end = time.monotonic() + END_S
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, end - time.monotonic()))
        if process.returncode is None:
            process.kill()
            process.wait()
    torch.set_num_threads(threads)


def _abort_with_a_rank(group: Group, processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """A kernel of nccl waits for a dead peer until its communicator is aborted."""
    while all(process.poll() is None for process in processes):
        time.sleep(POLL_S)
    group.abort()


_LESS_MEMORY = "if memory ran out, lower --num-kv-blocks or --max-num-batched-tokens; else run again, or with --tp 1"


def _heard(channel: Connection) -> Done | Failed | None:
    """What a rank says; None when it has ended without a word."""
    try:
        answer: Done | Failed = channel.recv()
    except (EOFError, OSError):
        return None
    return answer


def _is_victim(failed: Failed | None) -> bool:
    return failed is not None and failed.lost_peer


def _ending(process: subprocess.Popen[bytes]) -> str:
    try:
        code = process.wait(END_S)
    except subprocess.TimeoutExpired:
        return "it closed its pipe"
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return f"exit code {code}, {signal.Signals(-code).name}"
    return f"exit code {code}"


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())


def _pickled(setup: Setup) -> bytes:
    try:
        return pickle.dumps(setup)
    except Exception as error:
        raise PluginError(
            f"--tp: a technique cannot be sent to the other ranks ({type(error).__name__}: {_line(error)}); "
            "define its class in a module, and keep nothing in it that cannot be pickled"
        ) from error


class TensorParallelExecutor:
    """The executor of rank 0, whose every step the other ranks repeat. See `twinfer.core.executor.Executor`."""

    def __init__(self, ranks: Ranks, number: int, inner: TorchExecutor) -> None:
        self.ranks, self.inner = ranks, inner
        self._number = number

    def admit(self, request: Request, seqs: tuple[tuple[str, int], ...]) -> None:
        self.inner.admit(request, seqs)
        self.ranks.admit(self._number, request, seqs)

    def execute(self, plan: StepPlan) -> StepResult:
        """One step on all ranks; EngineError when one of them fails."""
        try:
            self.ranks.step(self._number, plan)
            return self.inner.execute(plan)
        except EngineError:
            self.ranks.close("a step has failed")
            raise
        except BaseException as error:
            failure = self.ranks.failure(error)
            if failure is error:
                raise
            raise failure from error

    def close(self) -> None:
        self.inner.close()
        self.ranks.drop(self._number)


__all__ = ["Ranks", "TensorParallelExecutor"]
