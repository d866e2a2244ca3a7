"""A rank process of a tensor-parallel engine: holds its share of the weights and repeats every step of rank 0.

    rank 0 -> Join | Load | Build | Admit | Step | Drop,  one answer to each of the first three

Steps are not answered: every rank comes to the same tokens by itself, since logits are gathered whole on all of them
and sampling depends on nothing else. What fails here is told once (`Failed`), then the process ends.

Invariants
* The order of messages is the order of collectives; nothing else decides what is computed here.
* The process ends when rank 0 does, whatever it is doing: its stdin is a pipe that closes with rank 0.
* Ctrl-C and SIGTERM are for rank 0 alone; it ends its ranks.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

from twinfer.core.errors import TwinferError
from twinfer.core.plan import StepPlan
from twinfer.core.registry import Registry
from twinfer.core.request import Request
from twinfer.core.runtime.executor import TorchExecutor
from twinfer.core.runtime.families import DecoderModel
from twinfer.core.runtime.parallel import Parallel
from twinfer.core.runtime.process_group import PeerLost, join
from twinfer.kernels.gemm import in_arena


@dataclass(frozen=True, slots=True)
class Job:
    """What a rank is told first. plugins: arguments of its `Registry`; threads: of torch."""

    rank: int
    size: int
    device: str
    threads: int
    plugins: tuple[Sequence[str], Sequence[str], bool]


class Join(NamedTuple):
    """Meet the other ranks through this file."""

    store: str


class Load(NamedTuple):
    """Read this rank's share of the weights. setup: a pickled `Setup` (its classes may come from plugins)."""

    setup: bytes
    weights: Path


class Build(NamedTuple):
    """Make executor `number`, with a KV pool of its own, on the loaded weights."""

    number: int
    setup: bytes


class Admit(NamedTuple):
    number: int
    request: Request
    seqs: tuple[tuple[str, int], ...]


class Step(NamedTuple):
    number: int
    plan: StepPlan


class Drop(NamedTuple):
    """Free executor `number`."""

    number: int


class Done(NamedTuple):
    """Answer: it is done. weight_bytes: that this rank holds, once it has loaded."""

    weight_bytes: int = 0


class Failed(NamedTuple):
    """Answer, or said unasked: this rank cannot go on.

    error: a pickled TwinferError, empty for another kind.  lost_peer: because of another rank.
    """

    text: str
    error: bytes = b""
    lost_peer: bool = False

    @classmethod
    def of(cls, error: BaseException) -> Failed:
        pickled = b""
        if isinstance(error, TwinferError):
            pickled = pickle.dumps(error)
            text = str(error)
        else:
            text = " ".join(f"{type(error).__name__}: {error}".split())
        return cls(text, pickled, isinstance(error, PeerLost))


class RankProcess:
    """Answers the messages of rank 0 until its channel closes."""

    def __init__(self, channel: Connection, job: Job) -> None:
        self.channel, self.job = channel, job
        self.device = torch.device(job.device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        torch.set_num_threads(job.threads)
        self.registry = Registry(*job.plugins)
        self.parallel = Parallel(job.rank, job.size)
        self.model: DecoderModel | None = None
        self.executors: dict[int, TorchExecutor] = {}

    def serve(self) -> None:
        self.channel.send(Done())  # up
        while True:
            match self.channel.recv():
                case Step(number, plan):
                    self.executors[number].execute(plan)
                case Admit(number, request, seqs):
                    self.executors[number].admit(request, seqs)
                case Drop(number):
                    self.executors.pop(number).close()
                case Join(store):
                    self.parallel = join(self.job.rank, self.job.size, self.device, store)
                    self.channel.send(Done())
                case Load(setup, weights):
                    self.channel.send(Done(self.load(pickle.loads(setup), weights)))
                case Build(number, setup):
                    self.build(number, pickle.loads(setup))
                    self.channel.send(Done())

    def load(self, setup: Any, weights: Path) -> int:
        from twinfer.core.runtime.loading import load_share

        self.model = load_share(setup, weights, self.registry, self.device, self.parallel)
        return weight_bytes(self.model)

    def build(self, number: int, setup: Any) -> None:
        from twinfer.core.runtime.loading import torch_executor

        assert self.model is not None
        self.executors[number] = executor = torch_executor(setup, self.registry, self.model)
        executor.profile = False  # rank 0 tells how long ops take


def weight_bytes(root: object) -> int:
    """Bytes of all tensors reachable from `root` by attributes, lists and mappings; shared memory counts once."""
    storages: dict[int, int] = {}
    seen: set[int] = set()
    todo: list[object] = [root]
    while todo:
        item = todo.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            if item.device.type == "cpu" and in_arena(item):
                storages[item.data_ptr()] = item.nbytes
            else:
                storage = item.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
        elif isinstance(item, dict):
            todo.extend(item.values())
        elif isinstance(item, list | tuple | set | frozenset):
            todo.extend(item)
        elif type(item).__module__.startswith("twinfer") and not isinstance(item, type):
            slots = [name for kind in type(item).__mro__ for name in getattr(kind, "__slots__", ())]
            todo.extend(getattr(item, name) for name in slots if hasattr(item, name))
            todo.extend(getattr(item, "__dict__", {}).values())
    return sum(storages.values())


def main(channel: Connection) -> None:
    """Run one rank to its end; called in its process, see `tensor_parallel.py`."""
    threading.Thread(target=_end_with_rank_0, daemon=True).start()
    code = 0
    try:
        RankProcess(channel, channel.recv()).serve()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # rank 0 is gone, or done
    except BaseException as error:
        code = 1
        with contextlib.suppress(OSError):
            channel.send(Failed.of(error))
    # at once: destructors of a group whose peers are gone may wait for them
    os._exit(code)


def _end_with_rank_0() -> None:
    while os.read(0, 1):
        pass
    os._exit(0)


__all__ = [
    "Admit", "Build", "Done", "Drop", "Failed", "Job", "Join", "Load", "RankProcess", "Step", "main", "weight_bytes",
]  # fmt: skip
