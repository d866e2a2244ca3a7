"""Contract of the policy that spreads requests over the replicas of a fleet: the router.

Invariants
* A router is a pure function of the request and the views: equal arguments give equal answers. It keeps no state
  between calls, reads no clock and draws no random numbers; what it needs to remember, a view remembers for it.
* Views are those of the replicas that take requests now, at least one, in ascending order of `index`. Indices can
  have gaps: replicas fail, start and drain.
* The fleet enforces the answer: anything but the index of one of the views is a PluginError.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol, runtime_checkable

from twinfer.core.request import Request


class ReplicaView(Protocol):
    """What a router may look at of one replica; read it, never write it."""

    index: int
    """The replica's number, which is what a router answers with."""
    num_requests: int
    """Requests that were sent here and have not ended."""
    num_tokens: int
    """Prompt tokens of those requests."""
    last_pick: int
    """Number of the latest request that was sent here (they are counted over the whole fleet); -1: none yet."""

    @property
    def num_blocks(self) -> int:
        """KV blocks of the replica's pool."""
        ...

    @property
    def free_blocks(self) -> int:
        """KV blocks that can be handed out now, free and idle-cached ones."""
        ...

    @property
    def block_size(self) -> int:
        """Tokens per KV block."""
        ...

    def routed_tokens(self, request: Request) -> int:
        """Longest start of the prompt that an earlier request sent here had, in whole `Router.prefix_block`s.

        What a router can know by itself: the replica may have evicted it by now. 0 for a router without prefix blocks.
        """
        ...

    def cached_tokens(self, request: Request) -> int:
        """Tokens at the start of the prompt whose KV the replica's prefix cache holds at this moment."""
        ...


@runtime_checkable
class Router(Protocol):
    """Which replica gets a request."""

    # prefix_block: int = 0, optional. Above 0 the fleet remembers the prompts that were sent to each replica, cut into
    # blocks of so many tokens, and `ReplicaView.routed_tokens` tells what it remembers.

    def pick(self, request: Request, views: Seq[ReplicaView]) -> int:
        """The `index` of one of the views. Asked once for every request, and again when its replica failed."""
        ...


__all__ = ["ReplicaView", "Router"]
