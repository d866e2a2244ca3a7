"""`simulate`: one predicted run, from a configuration and a workload to a RunRecord.

Invariants
* Never imports torch or the runtime; equal arguments give equal metrics, steps and requests.
* The same `Core`, policies, limits and requests as the engine's run of this configuration.
* A run that is stopped gives a valid record with `complete` False.
"""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import simpy

from twinfer.core.catalog import resolve_spec
from twinfer.core.config import EngineConfig
from twinfer.core.device import GENERIC, DeviceSpec, load_device
from twinfer.core.errors import ConfigError
from twinfer.core.events import Finished, Output, Rejected
from twinfer.core.feeder import Feeder
from twinfer.core.flock import Run
from twinfer.core.guard import adapted_ops
from twinfer.core.memory_parts import heaviest_rank
from twinfer.core.overload import note_full_rows, note_overload
from twinfer.core.parallel_ops import ops_of_step
from twinfer.core.plan import StepPlan, StepResult
from twinfer.core.provision import provision
from twinfer.core.recorder import Detail, Recorder
from twinfer.core.records import RunRecord
from twinfer.core.registry import Registry, default_registry
from twinfer.core.request import Request
from twinfer.core.setup import Setup
from twinfer.core.work import Op, StepShape
from twinfer.core.workload import Workload, generate
from twinfer.core.workload_source import Encode, source_of
from twinfer.plugins.op_time.calibrated import coverage, jitter_of, recording_of
from twinfer.simulator.bands import bands_of
from twinfer.simulator.driver import SimInbox, arrivals, engine
from twinfer.simulator.encoding import encoding_of
from twinfer.simulator.executor import CostExecutor
from twinfer.simulator.garbage import collected_rarely
from twinfer.simulator.machine import differences
from twinfer.simulator.op_time import OpTimeChain, build_chain, host_words
from twinfer.simulator.pipeline import timer_of
from twinfer.simulator.recorded_passes import RecordedPasses, warm_shape
from twinfer.simulator.speculate import Speculation, break_even_batch
from twinfer.simulator.step_parts import StepCost
from twinfer.simulator.step_time import StepTimer

OnProgress = Callable[[int, int, dict[str, Any]], None]
ShouldStop = Callable[[], bool]

PROGRESS_EVERY_S = 0.05
MAX_KEPT_TOKENS = 1_000_000  # of answers: beyond, a record keeps requests but not steps


def simulate(
    config: EngineConfig,
    workload: Workload,
    registry: Registry | None = None,
    device: DeviceSpec | None = None,
    on_progress: OnProgress | None = None,
    should_stop: ShouldStop | None = None,
    *,
    encode: Encode | None = None,
    requests: Sequence[Request] | None = None,
    detail: Detail | None = None,
    skip: bool = True,
    front_end: float = 0.0,
) -> RunRecord:
    """Predict the run of `workload` on an engine set up by `config`.

    device: overrides `config.device`.  on_progress(done requests, all requests, info) is called about 20
    times a second; should_stop() is asked before each step or run of steps.  encode: text to tokens, for workloads of
    texts; without it their lengths are estimated (`reasons` says so).  requests: instead of those that `workload` makes,
    sorted by arrival (the replay of a real run).  detail: what the record keeps (`Recorder`); None keeps steps up to
    MAX_KEPT_TOKENS of answers.  skip: take many steps as one event where that changes nothing.
    front_end: s that a server works on each request, one after the other, before the engine gets it (HTTP, tokenizing).
    Raises ConfigError, ModelError or RequestError for what cannot be run; nothing is simulated then.
    """
    registry = registry or default_registry()
    world = replace(prepare(config, workload, registry, device, encode, requests), front_end=front_end)
    on_progress = on_progress or (lambda done, total, info: None)
    detail = detail or world.detail()
    record, sigma = run_world(world, 1.0, on_progress, should_stop, keep=True, detail=detail, skip=skip)
    if record.complete:
        total = len(world.requests)

        def again(scale: float) -> RunRecord:
            return run_world(
                world, scale, lambda done, all_, info: on_progress(total, total, info), should_stop, False,
                detail=detail, skip=skip,
            )[0]  # fmt: skip

        jitter = jitter_of(world.device, world.setup.model)
        record.intervals = bands_of(record, sigma, again, world.at_once, world.concurrency, jitter)
    note_break_even(record, world)
    note_overload(record)
    note_full_rows(record, world.setup.kv_pool_bytes / config.dp)
    return record


@dataclass(frozen=True, slots=True)
class World:
    """All that a run needs; runs of one world differ in the speed of their steps, and perhaps in their requests."""

    setup: Setup
    registry: Registry
    device: DeviceSpec
    requests: Sequence[Request]
    timer: StepTimer
    workload: Mapping[str, Any]
    reasons: dict[str, str]
    environment: Mapping[str, Any]
    concurrency: int | None
    chain: OpTimeChain
    ops_of: Callable[[StepShape], Sequence[Op]]
    front_end: float = 0.0

    @property
    def at_once(self) -> bool:
        """Everything arrives at the beginning, or when an answer has ended: then times scale with those of steps."""
        if any(r.follows is not None and r.follows.think_s for r in self.requests):
            return False
        return self.concurrency is not None or all(r.arrival == 0 for r in self.requests)

    def detail(self) -> Detail:
        """What a record of these requests can keep; `reasons` say so when it is not all."""
        tokens = sum(r.params.max_tokens * r.params.num_samples for r in self.requests)
        if tokens <= MAX_KEPT_TOKENS:
            return "steps"
        self.reasons["detail"] = f"requests: steps of {tokens} answer tokens are more than a record keeps"
        return "requests"


def prepare(
    config: EngineConfig,
    workload: Workload,
    registry: Registry,
    device: DeviceSpec | None = None,
    encode: Encode | None = None,
    requests: Sequence[Request] | None = None,
    wrap: Callable[[OpTimeChain], OpTimeChain] | None = None,
    longest: int | None = None,
) -> World:
    """Check everything and gather it.

    requests: of `workload`, where they have been made before.  wrap: what to put around the op-time chain.
    longest: tokens of the longest request, where that is known.
    """
    if not workload.ignore_eos:
        raise ConfigError(
            "--stop-at-eos", None, "a prediction has no text that could end a request",
            "leave it out and give the --output-len you expect",
        )  # fmt: skip
    layout = config.layout
    if config.num_devices not in (None, layout.devices):
        raise ConfigError(
            "--num-devices", config.num_devices, f"one replica {layout.flags} uses {layout.devices} device(s)",
            f"give --num-devices {layout.devices}, or groups of ranks that use {config.num_devices}",
        )  # fmt: skip
    spec = resolve_spec(config.model)
    device = device or load_device(config.device, registry)
    context = config.max_model_len or spec.max_context
    if requests is None:
        requests = generate(workload, spec.vocab_size, context, encode=encode, registry=registry, vision=spec.vision)
    longest = longest or max(r.max_length for r in requests)
    setup = provision(config, spec, registry, device, world="simulator", max_request_tokens=longest)
    reasons = dict(setup.reasons)
    from_file = workload.trace is not None and source_of(workload, registry).name == "prompts"
    if encode is None and (workload.prompts or from_file):
        reasons["prompts"] = "texts are counted as one token per 4 bytes: no tokenizer was given"
    if device.calibration:
        reasons["device"] = f"{device.name}: {device.source}, {device.date}"
        changed = differences(device.calibration.get("fingerprint", {}))
        if changed:
            reasons["device"] += f"; this machine differs ({changed}): run `twinfer calibrate`"
        known = coverage(device, setup.model)
        if known:
            reasons["device"] += f"; {known}"
    elif device.name == GENERIC:
        reasons["device"] = (
            f"{device.name}: a generic one, not this machine, and maybe far from it: run `twinfer calibrate`"
        )
    elif not device.efficiency:
        reasons["device"] = (
            f"{device.name} reaches the peaks of its data sheet here, an upper bound of speed: nothing was measured"
        )
    model, techniques = setup.model, setup.techniques
    device = device.placed(heaviest_rank(model, layout))  # as `provision` did
    chain = build_chain(config.op_time, device, registry, model)
    if words := host_words(config, device, chain):
        reasons["host"] = words
    if wrap is not None:
        chain = wrap(chain)

    def adapt(ops: Sequence[Op], shape: StepShape) -> Sequence[Op]:
        return adapted_ops(techniques, ops, model, shape)

    def ops_of(shape: StepShape) -> Sequence[Op]:
        return adapt(ops_of_step(model, shape, layout), shape)

    windows = [w for w in model.layer_windows if w is not None]
    timer = timer_of(model, layout, adapt, ops_of, chain, windows, overlap=config.max_outstanding > 1)
    timer.speculation = speculation_of(setup, device, config.op_time, registry, wrap)
    timer.encoding = encoding_of(model, requests, chain, layout.tp)
    environment = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: _version(name) for name in ("twinfer", "simpy", "numpy")},
        "device": device.name,
        "op_time": [m.name for m in chain.models],
        "seed": config.seed,
    }
    return World(
        setup, registry, device, requests, timer, workload.plain(), reasons, environment, workload.concurrency, chain,
        ops_of,
    )  # fmt: skip


def speculation_of(
    setup: Setup, device: DeviceSpec, op_time: Sequence[str], registry: Registry,
    wrap: Callable[[OpTimeChain], OpTimeChain] | None = None,
) -> Speculation | None:  # fmt: skip
    """What guesses tokens ahead in `setup`, and how long that takes on `device`; wrap: as for `prepare`."""
    speculator, model, layout = setup.speculator, setup.model, setup.config.layout
    if speculator is None:
        return None
    drafter = speculator.drafter(model)
    if not speculator.draft_ops(model, StepShape.decode(1), layout):
        return Speculation.of(speculator, None)
    chain = build_chain(op_time, device, registry, drafter or model)
    if wrap is not None:
        chain = wrap(chain)
    windows = [w for w in (drafter or model).layer_windows if w is not None]
    timer = StepTimer(lambda shape: speculator.draft_ops(model, shape, layout), chain, windows, host=False)
    return Speculation.of(speculator, timer, chain)


def note_break_even(record: RunRecord, world: World) -> None:
    """Add to the metrics the largest batch with which guesses pay, at the mean context of the requests and up to as many rows
    as run at once."""
    guesses = record.metrics.get("speculation")
    if guesses is not None and world.timer.speculation is not None:
        contexts = [len(r.prompt) + r.params.max_tokens / 2 for r in world.requests]
        most = world.setup.limits.max_num_seqs
        guesses["break_even_batch"] = break_even_batch(world.timer, round(math.fsum(contexts) / len(contexts)), most)


class Stopped(Exception):
    """`should_stop` answered True."""


class StoppableExecutor(CostExecutor):
    """Asks before each step whether to go on."""

    should_stop: ShouldStop | None = None

    def charge(self, plan: StepPlan, cost: StepCost) -> StepResult:
        if self.should_stop is not None and self.should_stop():
            raise Stopped
        return super().charge(plan, cost)

    def decode(self, run: Run) -> list[float]:
        if self.should_stop is not None and self.should_stop():
            raise Stopped
        return super().decode(run)


def passes_of(world: World) -> RecordedPasses | None:
    """The recordings of an engine that makes any, as it starts with them."""
    measured = any(model.name == "calibrated" for model in world.chain.models)
    alone = world.setup.config.layout.devices == 1  # an engine on several devices records nothing
    found = recording_of(world.device, world.setup.model) if measured and alone else None
    if found is None:
        return None
    return RecordedPasses(*found, [warm_shape(world.requests, world.setup.limits.max_num_seqs)])


def run_world(
    world: World,
    scale: float,
    on_progress: OnProgress,
    should_stop: ShouldStop | None,
    keep: bool,
    hopeless: Callable[[RunRecord, float], bool] | None = None,
    detail: Detail = "steps",
    skip: bool = True,
    make_recorder: Callable[..., Recorder] = Recorder,
) -> tuple[RunRecord, float]:
    """One run with all steps `scale` times as long: its record and its relative sigma.

    hopeless(record so far, now): asked before each step or run of steps; True ends the run, which is then not `complete`.
    make_recorder: of an engine without data-parallel ranks.
    """
    setup = world.setup
    if setup.config.dp > 1:
        from twinfer.simulator.fleet_run import run_ranks  # which is made of this module

        return run_ranks(world, scale, on_progress, should_stop, keep, hopeless, detail, skip)
    core = setup.build_core()
    executor = StoppableExecutor(world.timer, scale, keep and detail == "steps")
    executor.passes = passes_of(world)
    recorder = make_recorder(
        "simulator", setup.config.model_dump(mode="json"), world.workload, setup.kv_bytes_per_slot,
        environment=world.environment, reasons=world.reasons, keep_ops=keep, detail=detail,
    )  # fmt: skip
    env = simpy.Environment()
    executor.should_stop = should_stop
    if hopeless is not None:
        executor.should_stop = lambda: (should_stop is not None and should_stop()) or hopeless(recorder.record, env.now)
    inbox = SimInbox(env)
    total = len(world.requests)
    done = 0
    told = 0.0

    feeder = Feeder(world.requests, world.concurrency, answer=0)
    bell = env.event()

    def freed() -> simpy.Event:
        nonlocal bell
        bell = env.event()
        return bell

    def emit(outputs: Sequence[Output], now: float) -> None:
        nonlocal done, told
        if feeder.note(outputs, now) and not bell.triggered:
            bell.succeed()
        done += sum(isinstance(o, Finished | Rejected) for o in outputs)
        wall = time.monotonic()
        if wall - told >= PROGRESS_EVERY_S:
            told = wall
            on_progress(done, total, {"steps": core.num_steps, "simulated_s": now, "running": len(core.running)})

    hook = world.registry.observers if keep else None
    env.process(arrivals(env, inbox, feeder, freed, world.front_end))
    process = env.process(engine(env, core, executor, inbox, recorder, emit, hook, skip))
    try:
        with collected_rarely():
            env.run(process)
    except Stopped:
        return recorder.finish(complete=False), executor.relative_sigma
    on_progress(done, total, {"steps": core.num_steps, "simulated_s": env.now, "running": 0})
    return recorder.finish(), executor.relative_sigma


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
