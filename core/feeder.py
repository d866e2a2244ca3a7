"""When requests are sent: at their times, as many at once as there are clients, or after the turn before.

    open loop      a request is due at its arrival time, whatever the engine does
    closed loop    `concurrency` clients; each sends its next request when its last one has ended
    session        a turn is due some time after the turn before has ended, and begins with all that was said so far

Both drivers, real and simulated, ask the same object, so that a prediction is loaded as the engine is.

Invariants
* Requests are sent in order, each once; in a closed loop at most `concurrency` are open at any time, and a client goes
  through a whole session before it begins another.
* A request's `arrival` is when it was due: in a closed loop when its client became free, even if the engine was in
  the middle of a step and took it in later.
* A turn is sent whatever became of the one before it, so that no request is lost.
* Never reads a clock: times are the driver's.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterable, Sized
from dataclasses import replace

from twinfer.core.events import Finished, Output, Rejected, TokenDelta
from twinfer.core.request import Request
from twinfer.core.session import History


class Feeder:
    """Hands out `requests` (sorted by arrival, in s from `start`); an iterator is read one session ahead.

    A request that `follows` another comes right after it, or after another turn of the same session.
    answer: the token that every answer consists of, where nobody computes one (simulated runs); None listens to
    what is told.
    """

    def __init__(
        self,
        requests: Iterable[Request],
        concurrency: int | None = None,
        start: float = 0.0,
        answer: int | None = None,
    ) -> None:
        self._requests = iter(requests)
        self._concurrency = concurrency
        self._start = start
        self._answer = answer
        self._turns: dict[str, Request] = {}  # request that must end -> turn that follows it
        self._listened: dict[str, tuple[Request, list[int]]] = {}  # sent, with a turn to follow: answer so far
        self._later: list[tuple[float, int, Request]] = []  # turns with a time, the last is due first
        self._number = 0
        self._next: Request | None = None
        self._ahead = next(self._requests, None)
        self._advance()
        self._open: dict[str, int] = {}  # request -> samples that have not ended; of closed loops and sessions
        num_clients = min(concurrency or 0, len(requests)) if isinstance(requests, Sized) else concurrency or 0
        self._clients: deque[float] = deque([start] * num_clients)  # idle ones, since when

    def _advance(self) -> None:
        """The next request that opens a session (or is alone), with its turns."""
        self._next, self._ahead = self._ahead, next(self._requests, None) if self._ahead is not None else None
        while self._ahead is not None and self._ahead.follows is not None:
            self._turns[self._ahead.follows.request_id] = self._ahead
            self._ahead = next(self._requests, None)

    @property
    def exhausted(self) -> bool:
        """True when every request has been handed out."""
        return self._next is None and not self._turns and not self._later

    @property
    def listens(self) -> bool:
        """True while what ends may make a request due earlier than `next_time` says."""
        return bool(self._turns)

    def due(self, now: float) -> list[Request]:
        """Requests to be sent at `now`."""
        found: list[Request] = []
        while True:
            opener = self._opener(now)
            later = -self._later[-1][0] if self._later else None
            if later is not None and later <= now and (opener is None or later <= opener):
                request = self._later.pop()[2]
            elif opener is not None:
                request = self._take(opener)
            else:
                return found
            self._sent(request)
            found.append(request)

    def _opener(self, now: float) -> float | None:
        """When the next session was due; None if that is not yet."""
        if self._next is None:
            return None
        if self._concurrency is not None:
            return self._clients[0] if self._clients else None
        when = self._start + self._next.arrival
        return when if when <= now else None

    def _take(self, when: float) -> Request:
        request = self._next
        assert request is not None
        if self._concurrency is not None:
            self._clients.popleft()
        self._advance()
        return request if when == request.arrival else replace(request, arrival=when)

    def _sent(self, request: Request) -> None:
        followed = request.id in self._turns
        if followed:
            self._listened[request.id] = (request, [])
        if followed or self._concurrency is not None:
            self._open[request.id] = request.params.num_samples

    def next_time(self) -> float | None:
        """When the next request is due, as far as that is known; None when it hangs on a request that is still open,
        or none is left."""
        times = [-self._later[-1][0]] if self._later else []
        if self._next is not None and self._concurrency is None:
            times.append(self._start + self._next.arrival)
        return min(times, default=None)

    def note(self, outputs: Iterable[Output], now: float) -> bool:
        """Take note of what has ended at `now`; True when a request has become due, now or later."""
        freed = False
        if not self._open:
            return freed
        for output in outputs:
            left = self._open.get(getattr(output, "request_id", ""))
            if left is None:
                continue
            if isinstance(output, Rejected) or (isinstance(output, Finished) and left == 1):
                del self._open[output.request_id]
                freed = self._ended(output.request_id, now) or freed
            elif isinstance(output, Finished):
                self._open[output.request_id] = left - 1
            elif isinstance(output, TokenDelta) and output.index == 0 and output.request_id in self._listened:
                self._listened[output.request_id][1].extend(output.tokens)
        return freed

    def _ended(self, request_id: str, now: float) -> bool:
        turn = self._turns.pop(request_id, None)
        if turn is None:
            if self._concurrency is None:
                return False
            self._clients.append(now)
            return self._next is not None
        before, answer = self._listened.pop(request_id)
        if self._answer is not None:
            answer = [self._answer] * before.params.max_tokens
        assert turn.follows is not None
        when = now + turn.follows.think_s
        prompt = History(before.prompt, tuple(answer), turn.prompt)
        images = turn.images
        if before.images or images:  # those of the turn stand behind all that was said
            behind = len(prompt) - len(turn.prompt)
            images = (*before.images, *(image._replace(start=image.start + behind) for image in images))
        self._number += 1  # turns of one time keep the order in which they became due
        insort(
            self._later, (-when, -self._number, replace(turn, prompt=prompt, arrival=when, follows=None, images=images))
        )
        return True


__all__ = ["Feeder"]
