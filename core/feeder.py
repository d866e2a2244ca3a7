"""When requests are sent: at their times, or as many at once as there are clients.

    open loop      a request is due at its arrival time, whatever the engine does
    closed loop    `concurrency` clients; each sends its next request when its last one has ended

Both drivers, real and simulated, ask the same object, so that a prediction is loaded as the engine is.

Invariants
* Requests are sent in order, each once; in a closed loop at most `concurrency` are open at any time.
* A request's `arrival` is when it was due: in a closed loop when its client became free, even if the engine was in
  the middle of a step and took it in later.
* Never reads a clock: times are the driver's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sized
from dataclasses import replace

from twinfer.core.events import Finished, Output, Rejected
from twinfer.core.request import Request


class Feeder:
    """Hands out `requests` (sorted by arrival, in s from `start`); an iterator is read one request ahead."""

    def __init__(self, requests: Iterable[Request], concurrency: int | None = None, start: float = 0.0) -> None:
        self._requests = iter(requests)
        self._concurrency = concurrency
        self._start = start
        self._next = next(self._requests, None)
        self._open: dict[str, int] = {}  # request -> samples that have not ended; only of a closed loop
        num_clients = min(concurrency or 0, len(requests)) if isinstance(requests, Sized) else concurrency or 0
        self._clients: deque[float] = deque([start] * num_clients)  # idle ones, since when

    @property
    def exhausted(self) -> bool:
        """True when every request has been handed out."""
        return self._next is None

    def due(self, now: float) -> list[Request]:
        """Requests to be sent at `now`."""
        found: list[Request] = []
        while self._next is not None:
            request = self._next
            if self._concurrency is None:
                when = self._start + request.arrival
                if when > now:
                    break
            else:
                if not self._clients:
                    break
                when = self._clients.popleft()
                self._open[request.id] = request.params.num_samples
            found.append(request if when == request.arrival else replace(request, arrival=when))
            self._next = next(self._requests, None)
        return found

    def next_time(self) -> float | None:
        """When the next request is due; None when that hangs on a request that is still open, or none is left."""
        if self._next is None or self._concurrency is not None:
            return None
        return self._start + self._next.arrival

    def note(self, outputs: Iterable[Output], now: float) -> bool:
        """Take note of what has ended at `now`; True when a client is free to send again."""
        freed = False
        if self._concurrency is None:
            return freed
        for output in outputs:
            left = self._open.get(getattr(output, "request_id", ""))
            if left is None:
                continue
            if isinstance(output, Rejected) or (isinstance(output, Finished) and left == 1):
                del self._open[output.request_id]
                self._clients.append(now)
                freed = True
            elif isinstance(output, Finished):
                self._open[output.request_id] = left - 1
        return freed and not self.exhausted


__all__ = ["Feeder"]
