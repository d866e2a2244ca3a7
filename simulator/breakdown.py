"""Replicas that fail: at given times, or now and then; and what becomes of the work that they had.

    an open request           goes to another replica and is computed again, with the tokens that it has told
    KV that lay at a prefill  its decode replica computes the prompt itself (if it was done; else it is routed again)
    KV on its way to a decode another decode replica loads it from where it lies

Invariants
* A replica that failed comes back empty after its repair and its start; steps in progress and its caches are lost.
* A fleet that fails too often to serve anything ends in an error, not in an endless run.
* Times are drawn from the fleet's seed and the replica's number alone.
"""

from __future__ import annotations

import random
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import simpy

from twinfer.core.errors import ConfigError
from twinfer.core.events import Abort
from twinfer.simulator.front import Job
from twinfer.simulator.replica import Replica

if TYPE_CHECKING:
    from twinfer.simulator.fleet_run import FleetRun

IN_VAIN = 200
"""Failures per replica, with requests open and no token of any between them, after which a run is given up: even a token
that takes five times as long as a replica lives would most likely have come by then.
"""


class Breakdowns:
    """The failures of one fleet run."""

    def __init__(self, run: FleetRun) -> None:
        self._run = run
        self.in_vain = 0  # failures since the last token

    def schedule(self) -> None:
        """The failures at given times; before them, `watch` was called for the replicas that are named."""
        for failure in self._run.fleet.failures:
            self._run.env.process(self._at(failure.replica, failure.at))

    def watch(self, replica: Replica) -> None:
        """From now on the replica may fail now and then, when the fleet has a mean time between failures."""
        if self._run.fleet.mtbf is not None:
            self._run.env.process(self._now_and_then(replica, self._run.fleet.mtbf))

    def _at(self, index: int, at: float) -> Generator[simpy.Event, Any, None]:
        yield self._run.env.timeout(at)
        yield from self._fail(self._run.replicas[index])

    def _now_and_then(self, replica: Replica, mtbf: float) -> Generator[simpy.Event, Any, None]:
        rng = random.Random(f"failures/{self._run.fleet.engine.seed}/{replica.index}")
        while True:
            yield self._run.env.timeout(rng.expovariate(1 / mtbf))
            yield from self._fail(replica)

    def _fail(self, replica: Replica) -> Generator[simpy.Event, Any, None]:
        """It breaks, its work goes elsewhere, and after repair and start it comes back empty."""
        run = self._run
        if replica.state not in ("serving", "draining"):
            return
        was, replica.state = replica.state, "failed"
        replica.num_failures += 1
        self.in_vain = self.in_vain + 1 if run.jobs else 0
        if run.fleet.mtbf is not None and self.in_vain > IN_VAIN * len(run.replicas):
            run.give_up(ConfigError(
                "--mtbf", run.fleet.mtbf, f"{self.in_vain} failures in a row let no request have one more token",
                "give a longer mean time between failures, shorter prompts, or larger replicas",
            ))  # fmt: skip
        front = run.front_of(replica)
        front.close(replica)
        front.forget(replica)
        replica.fail()
        assert replica.ended is not None
        yield replica.ended  # in this instant
        self._lose(replica)
        if was == "draining":
            replica.stop()
            return
        yield run.env.timeout(run.fleet.repair_s + run.start_s(replica.world))
        run.open(replica)

    def _lose(self, replica: Replica) -> None:
        """Everything that was open at a failed replica goes on elsewhere."""
        run = self._run
        lost = replica.lose(run.env.now, "the replica failed")
        if run.transfers is not None:
            self._lose_sources(replica, [piece.job for piece, _ in lost])
            run.transfers.fail(replica)
        for piece, told in lost:
            job: Job = piece.job
            if job.handover is not None and run.back is not None and replica.pool == "decode":
                assert run.transfers is not None
                run.transfers.detach(job.handover)  # its KV still lies at the prefill replica
                if not job.in_prefill:
                    run.place(job, run.back)
                continue
            if told:
                self.in_vain = 0
            if job.request.params.num_samples == 1:
                job.told += told
            run.place_again(job)

    def _lose_sources(self, replica: Replica, lost: list[Job]) -> None:
        """The KV that lay at `replica` for decode replicas is gone."""
        run = self._run
        assert run.transfers is not None
        for handover in run.transfers.sourced_at(replica):
            job, target = handover.job, handover.target
            if target is not None and job in lost:  # chosen early: the token it should go on from never came
                target.release(handover.target_id)
                target.tell(Abort(handover.target_id))
            run.transfers.drop(handover, source_lives=False)
            job.handover = None
            if target is None and job not in lost and run.back is not None:
                run.back.parked.remove(job)
                run.place_again(job)


__all__ = ["Breakdowns"]
