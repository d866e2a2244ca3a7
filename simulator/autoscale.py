"""The autoscaler: at each interval how many replicas there should be, then starting and draining to get there.

    wanted = open requests / target_requests, or busy replicas / target_busy, rounded up, within its limits

Source of the rule and of its stabilisation: the horizontal pod autoscaler of Kubernetes (up at once, down only to
the largest number that was wanted within a window).

Invariants
* A replica that starts is paid for from that moment and serves when its weights are loaded.
* A replica that goes takes no new requests and ends the ones that it has; one that starts in vain goes first.
* At least `min_replicas` are serving or on their way.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import simpy

from twinfer.core.fleet import Autoscaler
from twinfer.simulator.replica import Replica

if TYPE_CHECKING:
    from twinfer.simulator.fleet_run import FleetRun


class Scaler:
    """`changes`: (seconds, replicas wanted) whenever that number changed."""

    def __init__(self, run: FleetRun, rule: Autoscaler) -> None:
        self._run, self._rule = run, rule
        self._computed: dict[int, float] = {}  # seconds of steps of each replica at the last decision
        self._wanted: deque[tuple[float, int]] = deque()
        self._boots: dict[int, int] = {}  # starts of each replica, to tell a cancelled one
        self.changes: list[tuple[float, int]] = [(0.0, run.fleet.replicas)]

    def run(self) -> Generator[simpy.Event, Any, None]:
        while True:
            yield self._run.env.timeout(self._rule.interval_s)
            self._decide(self._run.env.now)

    def _decide(self, now: float) -> None:
        rule = self._rule
        wanted = min(rule.max_replicas, max(rule.min_replicas, math.ceil(self._load() - 1e-9)))
        self._wanted.append((now, wanted))
        while self._wanted[0][0] < now - rule.down_after_s:
            self._wanted.popleft()
        present = [r for r in self._run.front.replicas if r.state in ("serving", "starting", "failed")]
        num = len(present)
        if wanted > num:
            self._grow(wanted - num)
        else:
            wanted = max(number for _, number in self._wanted)
            if wanted < num:
                self._shrink(present, num - wanted)
        if wanted != self.changes[-1][1]:
            self.changes.append((now, wanted))

    def _load(self) -> float:
        """Replicas that the load of this moment (or of the last interval) asks for."""
        rule, front = self._rule, self._run.front
        if rule.target_requests is not None:
            return (sum(r.num_requests for r in front.replicas) + len(front.parked)) / rule.target_requests
        busy = 0.0
        for r in front.replicas:
            busy += r.busy_s - self._computed.get(r.index, 0.0)
            self._computed[r.index] = r.busy_s
        assert rule.target_busy is not None
        return busy * self._run.scale / rule.interval_s / rule.target_busy

    def _grow(self, num: int) -> None:
        run = self._run
        for replica in reversed(run.front.replicas):
            if num and replica.state == "draining":
                replica.state = "serving"
                run.front.open(replica)
                num -= 1
        idle = [r for r in run.front.replicas if r.state == "off"]
        for _ in range(num):
            replica = idle.pop(0) if idle else run.add(run.front, run.pools["engine"])
            replica.state = "starting"
            replica.rent()
            boot = self._boots[replica.index] = self._boots.get(replica.index, 0) + 1
            run.env.process(self._boot(replica, boot))

    def _boot(self, replica: Replica, boot: int) -> Generator[simpy.Event, Any, None]:
        yield self._run.env.timeout(self._run.start_s(replica.world))
        if replica.state == "starting" and self._boots[replica.index] == boot:
            self._run.open(replica)

    def _shrink(self, present: list[Replica], num: int) -> None:
        order = {"starting": 0, "serving": 1}
        going = sorted(
            (r for r in present if r.state in order), key=lambda r: (order[r.state], r.num_requests, -r.index)
        )
        for replica in going[:num]:
            if replica.state == "serving":
                self._run.front.close(replica)
                replica.state = "draining"
            if not replica.num_requests:
                replica.stop()
                self._run.front.forget(replica)


__all__ = ["Scaler"]
