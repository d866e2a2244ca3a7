"""`simulate_fleet`: one predicted run of many replicas behind a router, from a `Fleet` and a workload to a RunRecord.

    arrivals -> router -> replica (Core + driver, `replica.py`) -> ends
                            | prefill pool: first token, then KV to a decode replica (`transfers.py`)
                            | failure: what was open is routed again, told tokens stay told (`breakdown.py`)

Invariants
* Every request ends exactly once, whatever fails on its way; a token that was told is never told again.
* The clock is one SimPy environment; equal arguments give equal metrics, steps and requests.
* No work per step or token is done here: only when a request comes, moves on or ends, and when something else happens.
* One replica and no extras (`Fleet.alone`) gives the record of `simulate`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import simpy

from twinfer.core.device import DeviceSpec
from twinfer.core.errors import ConfigError, PluginError
from twinfer.core.events import Abort, Finished, Output, Rejected, TokenDelta
from twinfer.core.feeder import Feeder
from twinfer.core.fleet import Fleet
from twinfer.core.memory_parts import heaviest_rank
from twinfer.core.overload import note_full_rows, note_overload
from twinfer.core.plan import Need, StepPlan
from twinfer.core.recorder import Detail, Recorder
from twinfer.core.records import RunRecord
from twinfer.core.registry import Registry, default_registry
from twinfer.core.request import Request
from twinfer.core.routing import Router
from twinfer.core.workload import Workload
from twinfer.core.workload_source import Encode
from twinfer.plugins.op_time.calibrated import jitter_of
from twinfer.simulator.autoscale import Scaler
from twinfer.simulator.bands import bands_of
from twinfer.simulator.breakdown import Breakdowns
from twinfer.simulator.fleet_record import fleet_record
from twinfer.simulator.front import Front, Job
from twinfer.simulator.garbage import collected_rarely
from twinfer.simulator.replica import Piece, Replica
from twinfer.simulator.run import (
    PROGRESS_EVERY_S,
    OnProgress,
    ShouldStop,
    Stopped,
    World,
    note_break_even,
    prepare,
)
from twinfer.simulator.transfers import Transfers, devices_of, kv_link


def simulate_fleet(
    fleet: Fleet,
    workload: Workload,
    registry: Registry | None = None,
    device: DeviceSpec | None = None,
    on_progress: OnProgress | None = None,
    should_stop: ShouldStop | None = None,
    *,
    encode: Encode | None = None,
    bands: bool = True,
    detail: Detail | None = None,
    skip: bool = True,
) -> RunRecord:
    """Predict the run of `workload` on `fleet`.

    The record is that of `simulate` for the whole fleet: the same metrics, steps of all replicas by their start, one
    request however many replicas it saw; `metrics["replicas"]` has those of each replica.
    device: overrides the device of both pools.  on_progress, should_stop, encode, detail, skip: as for `simulate`.
    bands: work out the 80 % bands, which takes two more runs unless everything arrives at once.
    Raises ConfigError, ModelError, RequestError or PluginError for what cannot be run.
    """
    registry = registry or default_registry()
    tell = on_progress or (lambda done, total, info: None)
    pools = prepare_pools(fleet, workload, registry, device, encode)
    total = len(pools["engine"].requests)
    detail = detail or pools["engine"].detail()
    record, sigma = FleetRun(fleet, pools, 1.0, tell, should_stop, keep=True, detail=detail, skip=skip).run()
    if record.complete and bands:

        def again(scale: float) -> RunRecord:
            return FleetRun(
                fleet,
                pools,
                scale,
                lambda done, all_, info: tell(total, total, info),
                should_stop,
                detail=detail,
                skip=skip,
            ).run()[0]

        scales = fleet.only_replicas and pools["engine"].at_once
        engine = pools["engine"]
        jitter = jitter_of(engine.device, engine.setup.model)
        record.intervals = bands_of(record, sigma, again, scales, engine.concurrency, jitter)
    note_break_even(record, pools.get("decode", pools["engine"]))
    note_overload(record)
    if not fleet.disaggregated:  # there a request has rows in two pools, one after the other
        note_full_rows(record, pools["engine"].setup.kv_pool_bytes / fleet.engine.dp)
    return record


def prepare_pools(
    fleet: Fleet, workload: Workload, registry: Registry, device: DeviceSpec | None = None, encode: Encode | None = None
) -> Mapping[str, World]:
    """Everything resolved for each pool: "engine" (the prefill pool of two) and, if there is one, "decode"."""
    for option, choice in (("--router", fleet.router), ("--decode-router", fleet.decode_router)):
        if not isinstance(registry.build("router", choice), Router):
            raise PluginError(f"{option} {choice}: it has no method pick(request, views)")
    pools = {"engine": prepare(fleet.engine, workload, registry, device, encode)}
    if fleet.decode is not None:
        if workload.beam_width > 1:
            raise ConfigError(
                "--beam-width", workload.beam_width, "the KV of a beam search is not handed from replica to replica",
                "leave it out, or use one pool",
            )  # fmt: skip
        pools["decode"] = prepare(fleet.decode, workload, registry, device, encode, pools["engine"].requests)
        ours, theirs = (pools[name].setup.model.kv_dtype for name in ("engine", "decode"))
        if ours != theirs:
            raise ConfigError(
                "--kv-dtype", ours, f"the decode pool stores KV in {theirs}", "give it, so that both store the same"
            )
    return pools


class FleetRun:
    """One run. `scale` multiplies every step; `keep` keeps op times and tells observers; the others as for `simulate`."""

    def __init__(
        self,
        fleet: Fleet,
        pools: Mapping[str, World],
        scale: float = 1.0,
        on_progress: OnProgress = lambda done, total, info: None,
        should_stop: ShouldStop | None = None,
        keep: bool = False,
        detail: Detail = "steps",
        skip: bool = True,
    ) -> None:
        self.detail: Detail = detail
        self.skip = skip
        self.fleet = fleet
        self.pools = pools
        self.scale = scale
        self.keep = keep
        self.env = simpy.Environment()
        first = pools["engine"]
        registry = first.registry
        self.feeder = Feeder(first.requests, first.concurrency, answer=0)
        self.num_done = 0
        self.arrived: list[Request] = []
        self.jobs: dict[str, Job] = {}  # that have not ended
        self.several: dict[
            str, list[tuple[int, str]]
        ] = {}  # (replica, piece) of each, of jobs with more than one piece
        self.picks = 0
        self.reroutes = 0
        self.replicas: list[Replica] = []
        self._on_progress, self._should_stop = on_progress, should_stop
        self._told = 0.0  # wall clock of the latest progress
        self._bell = self.env.event()
        self._over = self.env.event()  # all requests have ended
        self.transfers = Transfers(self.env, fleet) if fleet.moves_kv else None
        split = fleet.disaggregated
        self.front = Front("prefill" if split else "engine", registry.build("router", fleet.router))
        self.back = Front("decode", registry.build("router", fleet.decode_router)) if split else None
        self.breakdowns = Breakdowns(self)
        self.env.process(self._arrivals())  # before the engines, as in `simulate`
        for _ in range(fleet.replicas):
            self.open(self.add(self.front, first))
        for _ in range(fleet.decode_replicas):
            assert self.back is not None
            self.open(self.add(self.back, pools["decode"]))
        self.breakdowns.schedule()
        if fleet.autoscaler is not None:
            self.env.process(Scaler(self, fleet.autoscaler).run())

    # --- replicas -------------------------------------------------------------------------------

    def add(self, front: Front, world: World) -> Replica:
        """One more replica of a pool; it does not run yet."""
        setup = world.setup

        def recorder() -> Recorder:
            return Recorder(
                "simulator", setup.config.model_dump(mode="json"), world.workload, setup.kv_bytes_per_slot,
                environment=world.environment, reasons=world.reasons, keep_ops=self.keep, detail=self.detail,
            )  # fmt: skip

        replica = Replica(
            self.env, len(self.replicas), front.pool, world, recorder, scale=self.scale,
            hook=world.registry.observers if self.keep else None, skip=self.skip, should_stop=self._should_stop,
            on_outputs=self._emitted, on_launch=self._launched if self.transfers is not None else None,
            watch=self.fleet.kv_overlap and front.pool == "prefill", history=front.history,
        )  # fmt: skip
        self.replicas.append(replica)
        front.replicas.append(replica)
        if self.transfers is not None:
            self.transfers.connect(replica)
        self.breakdowns.watch(replica)
        return replica

    def front_of(self, replica: Replica) -> Front:
        return self.back if replica.pool == "decode" and self.back is not None else self.front

    def open(self, replica: Replica) -> None:
        """The replica begins to serve, now."""
        replica.start()
        front = self.front_of(replica)
        front.open(replica)
        parked, front.parked = front.parked, []
        for job in parked:
            self.place(job, front)

    def start_s(self, world: World) -> float:
        """Seconds from renting a replica until it serves: each of its devices reads its share of the weights."""
        setup = world.setup
        return self.fleet.boot_s + heaviest_rank(setup.model, setup.config.layout) / self.fleet.load_bandwidth

    # --- requests -------------------------------------------------------------------------------

    def _arrivals(self) -> Generator[simpy.Event, Any, None]:
        feeder, env, front_end = self.feeder, self.env, self.pools["engine"].front_end
        while True:
            for request in feeder.due(env.now):
                if front_end:  # a server works on each request, one after the other
                    yield env.timeout(front_end)
                    request = replace(request, arrival=request.arrival or sys.float_info.min)
                self.arrived.append(request)
                job = self.jobs[request.id] = Job(request)
                self.place(job, self.front)
            if feeder.exhausted:
                break
            when = feeder.next_time()
            if when is None:
                self._bell = env.event()
                yield self._bell
            elif feeder.listens:
                self._bell = env.event()
                yield self._bell | env.timeout(max(0.0, when - env.now))
            else:
                yield env.timeout(when - env.now)
        self._check_over()

    def place_again(self, job: Job) -> None:
        """Its replica failed: what is left of it is computed elsewhere."""
        self.reroutes += 1
        self.place(job, self.front)

    def place(self, job: Job, front: Front) -> None:
        """Route what is left of a job to a replica of a pool; it waits while there is none."""
        if not front.serving:
            front.parked.append(job)
            return
        now, transfers = self.env.now, self.transfers
        request = job.whole(now) if self.back is None else job.decode(now) if front is self.back else job.prefill(now)
        replica = front.pick(request)
        if transfers is not None:
            if front is self.back:
                assert job.handover is not None
                transfers.assign(job.handover, replica, request.id)
            else:
                source = transfers.tier_source(replica, request)
                if source is not None:
                    request = replace(request, kv_from=source)
                if request.kv_to is not None:
                    job.handover = transfers.offer(replica, request.id, len(request.prompt), job)
        if job.pieces:
            self.several[job.request.id] = job.pieces
        job.pieces.append((replica.index, request.id))
        replica.take(Piece(job, request), self.picks)
        self.picks += 1
        front.sent(replica, request)

    def _launched(self, replica: Replica, plan: StepPlan, seconds: float) -> None:
        """A plan that moves KV (or, with overlap, any plan of a prefill replica) was launched."""
        assert self.transfers is not None
        if replica.watch:
            for row in plan.rows:
                if row.need is not Need.NONE:
                    self._prompt_ends(replica, row.seq, seconds)
        for move in plan.moves:
            self.transfers.moved(replica, move)

    def _prompt_ends(self, replica: Replica, piece_id: str, seconds: float) -> None:
        """The last step of a prompt was launched: with overlap its decode replica is chosen now."""
        piece = replica.pieces.get(piece_id)
        if piece is None or piece.job.handover is None or self.back is None or not self.back.serving:
            return
        assert self.transfers is not None
        self.transfers.overlap(piece.job.handover, seconds)
        self.place(piece.job, self.back)

    def _emitted(self, replica: Replica, outputs: Sequence[Output], now: float) -> None:
        if outputs:
            self.breakdowns.in_vain = 0
        for output in outputs:
            if not isinstance(output, TokenDelta):
                self._ended(replica, output, now)
        wall = time.monotonic()
        if wall - self._told >= PROGRESS_EVERY_S:
            self._told = wall
            self._progress(sum(r.num_requests for r in self.replicas))

    def _progress(self, running: int) -> None:
        steps = sum(r.num_steps for r in self.replicas)
        info = {"steps": steps, "simulated_s": self.env.now, "running": running}
        self._on_progress(self.num_done, len(self.pools["engine"].requests), info)

    def _ended(self, replica: Replica, output: Finished | Rejected, now: float) -> None:
        """A sample of a piece has ended at `replica`."""
        piece = replica.pieces.get(output.request_id)
        if piece is None:  # taken away before
            return
        piece.left = 0 if isinstance(output, Rejected) else piece.left - 1
        if piece.left:
            return
        job: Job = piece.job
        early = job.handover is not None and job.handover.target is not None
        replica.release(output.request_id)
        if self.jobs.get(job.request.id) is not job:  # it has ended elsewhere
            return
        well = isinstance(output, Finished) and output.reason == "length"
        if self.transfers is not None and isinstance(output, Finished) and well:
            self.transfers.keep(replica, piece.request, output.num_output_tokens)
        if well and self.back is not None and piece.request.kv_to is not None:
            job.told += 1
            if not early:
                self.place(job, self.back)
        else:
            self._undo(job)
            self._finish(job, now)
        if replica.state == "draining" and not replica.num_requests:
            replica.stop()
            self.front_of(replica).forget(replica)

    def _undo(self, job: Job) -> None:
        """The job has ended; should KV of it be on the way (it was rejected, or had no room), nobody waits for it."""
        handover, job.handover = job.handover, None
        if handover is None:
            return
        assert self.transfers is not None
        target = handover.target
        if target is not None and target.release(handover.target_id) is not None:
            target.tell(Abort(handover.target_id))
        self.transfers.drop(handover, source_lives=True)

    def _finish(self, job: Job, now: float) -> None:
        del self.jobs[job.request.id]
        self.num_done += 1
        # to the client all samples have ended, however many pieces there were
        if self.feeder.note((Rejected(job.request.id, ""),), now) and not self._bell.triggered:
            self._bell.succeed()
        self._check_over()

    def give_up(self, why: Exception) -> None:
        """The run cannot come to an end: `run` raises `why`."""
        if not self._over.triggered:
            self._over.fail(why)

    def _check_over(self) -> None:
        if self.feeder.exhausted and not self.jobs and not self._over.triggered:
            self._over.succeed()

    # --- the run --------------------------------------------------------------------------------

    def run(self) -> tuple[RunRecord, float]:
        """The record of the whole fleet, and the relative sigma of its step times."""
        complete = True
        try:
            with collected_rarely():
                self.env.run(self._over)
                for replica in self.replicas:
                    if replica.state in ("serving", "draining"):
                        replica.stop()
                self.env.run(simpy.AllOf(self.env, [r.ended for r in self.replicas if r.ended is not None]))
        except Stopped:
            complete = False
        self._progress(0)
        executors = [rank.executor for r in self.replicas for rank in r.ranks]
        seconds, sigma = sum(e.seconds for e in executors), sum(e.sigma for e in executors)
        return fleet_record(self, complete), sigma / seconds if seconds else 0.0

    def reasons(self) -> dict[str, str]:
        """What was decided for the fleet, in words."""
        fleet, found = self.fleet, {}
        first = self.pools["engine"]
        if fleet.networked:
            per_device, _, why = kv_link(fleet, first)
            total = per_device * devices_of(first)
            found["kv_bandwidth"] = f"{total / 1e9:.4g} GB/s per replica and direction: {why}"
        if fleet.autoscaler is not None or fleet.failures or fleet.mtbf is not None:
            found["start"] = (
                f"{self.start_s(first):.4g} s until a replica serves: {fleet.boot_s:g} s, and its weights at "
                f"{fleet.load_bandwidth / 1e9:g} GB/s per device"
            )
        if "decode" in self.pools:
            theirs = self.pools["decode"].reasons
            found |= {f"decode.{name}": text for name, text in theirs.items() if first.reasons.get(name) != text}
        return found


def run_ranks(
    world: World, scale: float, on_progress: OnProgress, should_stop: ShouldStop | None, keep: bool,
    hopeless: Callable[[RunRecord, float], bool] | None, detail: Detail, skip: bool,
) -> tuple[RunRecord, float]:  # fmt: skip
    """`run_world` of a replica with several data-parallel ranks."""
    run: FleetRun | None = None

    def stop() -> bool:
        if should_stop is not None and should_stop():
            return True
        if hopeless is None or run is None:
            return False
        return any(hopeless(rank.recorder.record, run.env.now) for r in run.replicas for rank in r.ranks)

    fleet = Fleet(engine=world.setup.config)
    run = FleetRun(fleet, {"engine": world}, scale, on_progress, stop, keep=keep, detail=detail, skip=skip)
    return run.run()


__all__ = ["FleetRun", "prepare_pools", "run_ranks", "simulate_fleet"]
