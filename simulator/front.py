"""What stands before the replicas of a pool: its router, and the requests of the workload as jobs that go through it.

Invariants
* A job is one request of the workload until it ends, however many replicas see a piece of it.
* A router is only asked while a replica takes requests; what comes when none does is parked, in order.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, overload

from twinfer.core.fleet import Pool
from twinfer.core.guard import Blaming, unusable
from twinfer.core.request import KVSource, Request
from twinfer.simulator.prefix_index import PrefixIndex
from twinfer.simulator.replica import Replica
from twinfer.simulator.transfers import Handover


class Continued(Sequence[int]):
    """A prompt and what has been answered to it: `num` tokens 0, as the simulator's executor samples them."""

    __slots__ = ("base", "num")

    def __init__(self, base: Sequence[int], num: int) -> None:
        self.base, self.num = base, num

    def __len__(self) -> int:
        return len(self.base) + self.num

    @overload
    def __getitem__(self, key: int) -> int: ...
    @overload
    def __getitem__(self, key: slice) -> Sequence[int]: ...
    def __getitem__(self, key: int | slice) -> int | Sequence[int]:
        split = len(self.base)
        places = range(split + self.num)[key]
        if isinstance(places, int):
            return self.base[places] if places < split else 0
        if places.step != 1:
            return [self[place] for place in places]
        if places.stop <= split:
            return self.base[places.start : places.stop]
        return [*self.base[min(places.start, split) : split], *(0,) * (places.stop - max(places.start, split))]


class Job:
    """A request of the workload until it ends.

    told: output tokens so far.  pieces: (replica, piece id) of each piece.  handover: its KV is on the way, or is to
    be when its prompt is done.
    """

    __slots__ = ("handover", "pieces", "request", "told")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.told = 0
        self.pieces: list[tuple[int, str]] = []
        self.handover: Handover | None = None

    @property
    def in_prefill(self) -> bool:
        """Its prompt is being computed where it will be handed over from."""
        return self.handover is not None and self.handover.source_id in self.handover.source.pieces

    def whole(self, now: float) -> Request:
        """All that is left of it: the request itself at first."""
        if not self.pieces:
            return self.request
        return self._piece(now, self.told, self.request.params.max_tokens - self.told)

    def prefill(self, now: float) -> Request:
        """Its next token, and the KV to a decode replica when that is not the last."""
        left = self.request.params.max_tokens - self.told
        return self._piece(now, self.told, 1, kv_to="decode" if left > 1 else None)

    def decode(self, now: float) -> Request:
        """All but the token of `prefill`, from the KV that it hands over."""
        assert self.handover is not None
        told = self.told + self.in_prefill  # chosen early: the token comes before the KV is here
        source = KVSource(
            handle=f"replica:{self.handover.source.index}", num_tokens=len(self.request.prompt) + told - 1
        )
        return self._piece(now, told, self.request.params.max_tokens - told, kv_from=source)

    def _piece(self, now: float, told: int, tokens: int, **more: Any) -> Request:
        request, number = self.request, len(self.pieces)
        return replace(
            request,
            id=f"{request.id}~{number}" if number else request.id,
            prompt=Continued(request.prompt, told) if told else request.prompt,
            params=replace(request.params, max_tokens=tokens, min_tokens=min(request.params.min_tokens, tokens)),
            arrival=now if number else request.arrival,
            **more,
        )


class Front:
    """The replicas of one pool as its router sees them, and the jobs that wait because there are none."""

    def __init__(self, pool: Pool, router: Any) -> None:
        self.pool = pool
        self.router = router
        self.replicas: list[Replica] = []
        self.serving: list[Replica] = []  # take new requests, by index
        self.parked: list[Job] = []
        with Blaming("router", router, "prefix_block"):
            block = int(getattr(router, "prefix_block", 0))
        self.history = PrefixIndex(block) if block else None

    def open(self, replica: Replica) -> None:
        insort(self.serving, replica, key=lambda r: r.index)

    def close(self, replica: Replica) -> None:
        if replica in self.serving:
            self.serving.remove(replica)

    def forget(self, replica: Replica) -> None:
        """What was sent to `replica` is not there any more."""
        if self.history is not None:
            self.history.forget(replica.index)

    def pick(self, request: Request) -> Replica:
        """The replica that the router names for `request`."""
        views = tuple(self.serving)
        with Blaming("router", self.router, "pick"):
            index = self.router.pick(request, views)
            for replica in views:
                if replica.index == index:
                    return replica
        raise unusable(
            "router", self.router, "pick", index, f"the index of one of the views: {[r.index for r in views]}"
        )

    def sent(self, replica: Replica, request: Request) -> None:
        """Remember the prompt, when the router wants to know."""
        if self.history is not None:
            room = max(1, replica.num_blocks * replica.block_size // self.history.block)
            self.history.note(replica.index, request, room)


__all__ = ["Continued", "Front", "Job"]
