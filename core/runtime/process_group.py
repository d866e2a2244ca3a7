"""Collectives of a tensor-parallel rank, over torch.distributed: gloo between CPU ranks, nccl between GPUs.

Invariants
* A group belongs to one engine; torch's process-wide default group is left alone, so that engines can coexist.
* Ranks of a group are on one machine and talk over its loopback interface (gloo) or its links (nccl).
* No collective waits for a dead rank: gloo sees the closed socket, nccl is aborted by `tensor_parallel.py`.
* A group is left (`Group.leave`) before the interpreter ends: torch's threads do not survive its end.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from twinfer.core.runtime.parallel import Mark, Parallel

JOIN_S = 120  # all ranks have told that they are up: they meet within milliseconds
STUCK_S = 600  # a rank that is alive but has not come to a collective for so long will not come


class PeerLost(RuntimeError):
    """A collective failed: another rank has died, or does not answer."""


class Group:
    """A process group of torch, until it is left."""

    __slots__ = ("_group",)

    def __init__(self, group: Any) -> None:
        self._group = group

    def all_reduce(self, x: Tensor) -> None:
        self._run("allreduce", [x])

    def all_gather(self, parts: list[Tensor], x: Tensor) -> None:
        self._run("allgather", [parts], [x])

    def _run(self, name: str, *arguments: Any) -> None:
        if self._group is None:
            raise PeerLost("the group has ended")
        try:
            getattr(self._group, name)(*arguments).wait()
        except RuntimeError as error:
            raise PeerLost(str(error)) from error

    def abort(self) -> None:
        """Let collectives that wait fail, from another thread."""
        if self._group is not None:
            self._group.abort()

    def leave(self) -> None:
        self._group = None


@dataclass(frozen=True, slots=True)
class ProcessGroupRank(Parallel):
    """`rank` of `size` processes that meet in `group`."""

    group: Group = field(default_factory=lambda: Group(None), compare=False)

    def all_reduce(self, x: Tensor, mark: Mark | None = None) -> Tensor:
        x = x.contiguous()
        if x.numel():
            self.group.all_reduce(x)
        if mark is not None:
            mark("all_reduce")
        return x

    def all_gather(self, x: Tensor, mark: Mark | None = None) -> Tensor:
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        if x.numel():
            self.group.all_gather(parts, x)
        x = torch.cat(parts, dim=-1)
        if mark is not None:
            mark("all_gather")
        return x


def backend_of(device: torch.device) -> str:
    return "nccl" if device.type == "cuda" else "gloo"


def join(rank: int, size: int, device: torch.device, store: str) -> ProcessGroupRank:
    """Meet the other ranks through the file `store`; returns when all have come. PeerLost when one does not."""
    import torch.distributed as dist

    meeting = dist.FileStore(store, size)
    meeting.set_timeout(timedelta(seconds=JOIN_S))
    try:
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timedelta(seconds=STUCK_S)
            group: Any = dist.ProcessGroupNCCL(meeting, rank, size, options)
        else:
            options = dist.ProcessGroupGloo._Options()
            options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
            options._timeout = timedelta(seconds=STUCK_S)
            group = dist.ProcessGroupGloo(meeting, rank, size, options)
        joined = ProcessGroupRank(rank, size, Group(group))
        joined.all_reduce(torch.ones(1, device=device))  # connects, so that the file is not needed again
    except RuntimeError as error:
        raise PeerLost(str(error)) from error
    return joined


__all__ = ["Group", "PeerLost", "ProcessGroupRank", "backend_of", "join"]
