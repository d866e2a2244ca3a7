"""Transfers over shared links: flows that get max-min fair rates, as long as each lasts.

    flow      bytes over a path of links, all at one rate
    fair      no flow can be given more without taking from one that has less (progressive filling: all rates rise
              together; a flow stops rising when a link of its path is full, or at its own cap)

Rates change only when a flow begins or ends, so that each change is one computation over the flows in progress and one
timer for the next end. Source: Bertsekas and Gallager, Data Networks, section 6.5.2.

Invariants
* No link carries more than its capacity; a flow's rate is 0 only before its latency has passed.
* Every byte that enters a path leaves it: a flow that ends has carried its bytes over each of its links, one that is
  cancelled those up to then (`Network.carried`).
* Flows are kept in order of their beginning, so equal calls give equal times.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import simpy


def fair_rates(flows: Sequence[tuple[Sequence[str], float]], capacity: Mapping[str, float]) -> list[float]:
    """Max-min fair rate of each flow, given as (path, cap), in B/s. A flow without links gets its cap."""
    rates = [0.0] * len(flows)
    room = dict.fromkeys((link for path, _ in flows for link in path), 0.0)
    users: dict[str, int] = dict.fromkeys(room, 0)
    for link in room:
        room[link] = capacity[link]
    rising = list(range(len(flows)))
    for path, _ in flows:
        for link in path:
            users[link] += 1
    while rising:
        level = min((room[link] / users[link] for link in room if users[link]), default=math.inf)
        level = min(level, min(flows[i][1] for i in rising))
        full = {link for link in room if users[link] and room[link] / users[link] <= level}
        still = []
        for i in rising:
            path, cap = flows[i]
            if cap > level and full.isdisjoint(path):
                still.append(i)
                continue
            rates[i] = level
        done = set(rising).difference(still)
        for i in sorted(done):
            for link in flows[i][0]:
                room[link] = max(0.0, room[link] - level)
                users[link] -= 1
        rising = still
    return rates


class Flow:
    """One transfer. `rate` in B/s at this moment; `left` bytes as of `Network`'s last change."""

    __slots__ = ("begun", "cap", "done", "ended", "left", "num_bytes", "path", "rate")

    def __init__(
        self, path: tuple[str, ...], num_bytes: float, cap: float, done: Callable[[Flow], None], now: float
    ) -> None:
        self.path, self.num_bytes, self.cap, self.done = path, num_bytes, cap, done
        self.left = num_bytes
        self.rate = 0.0
        self.begun = now
        self.ended: float | None = None


class Network:
    """Links by name, and the flows in progress under one SimPy environment."""

    def __init__(self, env: simpy.Environment) -> None:
        self._env = env
        self._flows: dict[Flow, None] = {}
        self._waiting: dict[Flow, None] = {}  # for their latency to pass
        self._changed = 0.0  # when rates were worked out last
        self._version = 0
        self.capacity: dict[str, float] = {}
        self.carried: dict[str, float] = {}

    def add_link(self, name: str, bandwidth: float) -> None:
        """A link of `bandwidth` B/s."""
        self.capacity[name] = bandwidth
        self.carried.setdefault(name, 0.0)

    @property
    def num_flows(self) -> int:
        return len(self._flows) + len(self._waiting)

    def share(self, path: Sequence[str]) -> float:
        """B/s that one more flow over `path` could count on: an equal share of its tightest link."""
        using = [sum(link in flow.path for flow in self._flows) for link in path]
        return min((self.capacity[link] / (n + 1) for link, n in zip(path, using, strict=True)), default=math.inf)

    def send(
        self,
        path: Sequence[str],
        num_bytes: float,
        done: Callable[[Flow], None],
        latency: float = 0.0,
        cap: float = math.inf,
    ) -> Flow:
        """Begin a flow; `done(flow)` is called when its last byte has arrived, never before this returns.

        latency: s before the first byte.  cap: B/s beyond which its source cannot go.
        """
        flow = Flow(tuple(path), num_bytes, cap, done, self._env.now)
        self._waiting[flow] = None
        self._env.timeout(latency).callbacks.append(lambda _: self._join(flow))
        return flow

    def cancel(self, flow: Flow) -> None:
        """Stop a flow; its `done` is not called. Harmless when it has ended."""
        self._waiting.pop(flow, None)
        if flow in self._flows:
            self._advance()
            del self._flows[flow]
            flow.ended, flow.rate = self._env.now, 0.0
            self._settle()

    def _join(self, flow: Flow) -> None:
        if flow not in self._waiting:  # cancelled meanwhile
            return
        del self._waiting[flow]
        self._advance()
        self._flows[flow] = None
        self._settle()

    def _advance(self) -> None:
        """Carry bytes up to now at the rates so far."""
        passed = self._env.now - self._changed
        self._changed = self._env.now
        if passed <= 0:
            return
        for flow in self._flows:
            moved = min(flow.left, flow.rate * passed)
            flow.left -= moved
            for link in flow.path:
                self.carried[link] += moved

    def _settle(self) -> None:
        """New rates, and a timer for the first end."""
        self._version += 1
        flows = list(self._flows)
        if not flows:
            return
        for flow, rate in zip(flows, fair_rates([(f.path, f.cap) for f in flows], self.capacity), strict=True):
            flow.rate = rate
        times = [f.left / f.rate if math.isfinite(f.rate) else 0.0 for f in flows]
        first = min(times)
        due = [flow for flow, t in zip(flows, times, strict=True) if t <= first * (1 + 1e-12)]
        version = self._version
        self._env.timeout(first).callbacks.append(lambda _: self._end(due, version))

    def _end(self, due: Sequence[Flow], version: int) -> None:
        if version != self._version:  # rates have changed since: another timer holds
            return
        self._advance()
        for flow in due:
            for link in flow.path:  # what rounding left
                self.carried[link] += flow.left
            flow.left, flow.rate, flow.ended = 0.0, 0.0, self._env.now
            del self._flows[flow]
        self._settle()
        for flow in due:
            flow.done(flow)


__all__ = ["Flow", "Network", "fair_rates"]
