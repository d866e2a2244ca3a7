"""One look at one fleet: what is simulated, and what is kept of it.

    assess     bounds of a design, nothing is simulated
    screen     one replica of n, on the busiest part of the traffic, every n-th request of it
    replica    one replica of n, on the busiest part that is used to confirm, every n-th request of it
    fleet      all n replicas on that part, requests dealt out in turn
    proof      all n replicas on all of the traffic

Dealing in turn (round robin) makes replicas independent of each other: the fleet is exactly its replicas, one by one.
With another router, or pools for prefill and decode, replicas run together (`fleet_run.py`), and a first look is at one
of n groups of them.

Invariants
* An outcome depends on its trial and the question alone: not on the process, on other trials or on the clock.
* A run that has already broken a promise for certain, even one 25 % weaker, is ended early and says so.
* Whatever is not served counts against the promises (`core/goal.py`) and as `failed`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from twinfer.core.catalog import resolve_spec
from twinfer.core.config import Choice
from twinfer.core.errors import ConfigError, TwinferError
from twinfer.core.fleet import Fleet
from twinfer.core.op_time import OpTime
from twinfer.core.records import RunRecord
from twinfer.core.registry import Registry, default_registry
from twinfer.core.request import Request
from twinfer.core.work import Op
from twinfer.core.workload import generate
from twinfer.simulator.fleet_run import FleetRun
from twinfer.simulator.op_time import OpTimeChain
from twinfer.simulator.plan_bound import bound_of, demand_of
from twinfer.simulator.plan_space import Design, Question, check_question, designs_of, devices_of_question
from twinfer.simulator.plan_tally import Outcome, Tally, Watch
from twinfer.simulator.run import World, prepare, run_world

ASSESS, SCREEN, REPLICA, FLEET, PROOF = "assess", "screen", "replica", "fleet", "proof"
KEPT_WORLDS = 12  # designs whose op times a process remembers

ShouldStop = Callable[[], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """`replicas` of the design number `design`, looked at by `level`.

    load: how many times the traffic.  steps: how many times as long all steps take.  bandwidth: share of the
    device's memory bandwidth.
    """

    design: int
    replicas: int
    level: str
    load: float = 1.0
    steps: float = 1.0
    bandwidth: float = 1.0

    @property
    def key(self) -> str:
        more = "".join(f" {n}={v:.6g}" for n in ("load", "steps", "bandwidth") if (v := getattr(self, n)) != 1)
        return f"{self.design:05d} {self.level} x{self.replicas}{more}"


class Evaluator:
    """Answers trials of one question in one process; remembers the op times of the last designs."""

    def __init__(self, question: Question, registry: Registry | None = None) -> None:
        self.question = question
        self.registry = registry or default_registry()
        check_question(question, self.registry)
        self.devices = devices_of_question(question, self.registry)
        self.designs = designs_of(question)
        self.requests = requests_of(question, self.registry)
        self.demand = demand_of(self.requests)
        self.whole = busiest(self.requests, question.confirm)
        self._worlds: OrderedDict[tuple[int, float], World] = OrderedDict()

    def level(self, level: str, replicas: int) -> str:
        """`level`, or `fleet` where the traffic is so little that there is no difference."""
        if level == PROOF:
            return PROOF if len(self.requests) > self.question.confirm else FLEET
        return FLEET if level != ASSESS and len(self.requests) <= self.question.screen else level

    def answer(self, trial: Trial, should_stop: ShouldStop | None = None) -> Outcome | None:
        """The outcome of `trial`; None when `should_stop` said so."""
        design = self.designs[trial.design]
        if design.config is None:
            return Outcome(problem=design.problem)
        try:
            world = self._world(design, trial.bandwidth)
            if trial.level == ASSESS:
                bound = bound_of(world, self.demand, self.question.goals, self._peak_rate(), design.pools)
                return Outcome(fewest=bound.fewest, likely=bound.likely, problem=bound.problem)
            return self._simulate(world, trial, should_stop)
        except TwinferError as error:  # what does not fit, or techniques that refuse each other
            return Outcome(problem=str(error))

    def _world(self, design: Design, bandwidth: float) -> World:
        key = (design.index, bandwidth)
        world = self._worlds.pop(key, None)
        if world is None:
            assert design.config is not None
            slower = None if bandwidth == 1 else lambda chain: SlowMemory(chain, bandwidth)
            world = prepare(
                design.config, self.question.workload, self.registry, self.devices[design.device],
                requests=self.requests, wrap=slower,
            )  # fmt: skip
        self._worlds[key] = world
        while len(self._worlds) > KEPT_WORLDS:
            self._worlds.popitem(last=False)
        return world

    def _peak_rate(self) -> float:
        part = busiest(self.requests, max(self.question.screen, len(self.requests) // 8))
        return demand_of(part).rate if part[-1].arrival > part[0].arrival else self.demand.rate

    def _simulate(self, world: World, trial: Trial, should_stop: ShouldStop | None) -> Outcome | None:
        design, requests = self.designs[trial.design], self.requests if trial.level == PROOF else self.whole
        if trial.level == SCREEN:
            requests = busiest(requests, self.question.screen * trial.replicas)
        together = trial.level in (FLEET, PROOF)
        shares = trial.replicas if together else 1
        if design.simple:
            dealt = [retimed(requests[i :: trial.replicas], trial.load, requests[0].arrival) for i in range(shares)]
        else:  # the router decides, so the replicas run together
            step = 1 if together else trial.replicas
            dealt = [retimed(requests[::step], trial.load, requests[0].arrival)]
        watch = Watch(self.question.goals, sum(map(len, dealt)))
        tally = Tally()
        for part in filter(None, dealt):
            here = replace(world, requests=part)
            if design.simple:
                record, sigma = run_world(here, trial.steps, _quiet, should_stop, False, watch)
            else:
                record, sigma = _run_fleet(design, shares, here, trial.steps, should_stop, watch)
            tally.add(record, sigma)
            if watch.broken:
                break
            if not record.complete:
                return None
        return tally.outcome(world, self.question.goals, shares * design.num_engines, watch.broken)


def _quiet(done: int, total: int, info: dict[str, Any]) -> None:
    """Nobody watches a single trial."""


def _run_fleet(
    design: Design, groups: int, world: World, steps: float, should_stop: ShouldStop | None, watch: Watch
) -> tuple[RunRecord, float]:  # fmt: skip
    """`groups` times the engines of `design` behind its router, as `simulate --replicas` runs them."""
    config = world.setup.config
    prefill, decode = design.pools
    fleet = Fleet(
        engine=config, replicas=groups * prefill, router=Choice.model_validate(design.router),
        decode=config if decode else None, decode_replicas=groups * decode,
    )  # fmt: skip
    pools = {"engine": world, **({"decode": world} if decode else {})}
    run: FleetRun | None = None

    def stop() -> bool:
        if should_stop is not None and should_stop():
            return True
        fronts = [r for r in run.replicas if r.pool != "decode"] if run is not None else []
        return run is not None and any(watch(replica.recorder.record, run.env.now) for replica in fronts)

    run = FleetRun(fleet, pools, steps, should_stop=stop)
    return run.run()


class SlowMemory(OpTimeChain):
    """A chain on a device with less memory bandwidth: what memory bounds takes longer, the rest stays."""

    def __init__(self, chain: OpTimeChain, share: float) -> None:
        super().__init__(chain.models, chain.device)
        self.share = share

    def ask(self, op: Op) -> OpTime:
        answer = super().ask(op)
        if op.kind in ("host", "comm", "host_copy"):
            return answer
        peak = self.device.peak_flops.get(op.dtype) or max(self.device.peak_flops.values())
        if op.bytes / self.device.memory_bandwidth < op.flops / peak:
            return answer
        return OpTime(answer.seconds / self.share, answer.sigma / self.share, answer.source, answer.detail)


# --- traffic ----------------------------------------------------------------------------------------


def requests_of(question: Question, registry: Registry) -> list[Request]:
    """All requests of the question's traffic, sorted by arrival."""
    spec = resolve_spec(question.model)
    context = int(question.base.get("max_model_len") or spec.max_context)
    requests = generate(question.workload, spec.vocab_size, context, registry=registry, vision=spec.vision)
    if any(r.follows is not None for r in requests):
        raise ConfigError(
            "--turns", question.workload.turns, "a search cuts traffic into parts, which would tear sessions apart",
            "plan for the same requests without sessions, and check the answer with simulate",
        )  # fmt: skip
    return requests


def busiest(requests: Sequence[Request], num: int) -> Sequence[Request]:
    """The `num` requests in a row that ask for the most tokens per second; all when there are no more."""
    if len(requests) <= num:
        return requests
    sizes = [len(r.prompt) + (r.params.max_tokens or 1) for r in requests]
    inside = sum(sizes[:num])
    best, where = -1.0, 0
    for first in range(len(requests) - num + 1):
        span = requests[first + num - 1].arrival - requests[first].arrival
        rate = inside / max(span, 1e-9)
        if rate > best:
            best, where = rate, first
        if first + num < len(requests):
            inside += sizes[first + num] - sizes[first]
    return requests[where : where + num]


def retimed(requests: Sequence[Request], load: float, origin: float) -> list[Request]:
    """`requests` from `origin` on, arriving `load` times as fast."""
    if load == 1 and not origin:
        return list(requests)
    return [replace(r, arrival=(r.arrival - origin) / load) for r in requests]


def outcome_of(plain: Mapping[str, Any]) -> Outcome:
    """The outcome that `Outcome.plain` described. Raises TypeError for unknown fields."""
    return Outcome(**plain)


def trial_of(plain: Mapping[str, Any]) -> Trial:
    return Trial(**plain)


def plain_trial(trial: Trial) -> dict[str, Any]:
    return asdict(trial)


__all__ = [
    "ASSESS", "FLEET", "PROOF", "REPLICA", "SCREEN", "Evaluator", "Outcome", "Trial", "busiest", "outcome_of", "plain_trial",
    "requests_of", "retimed", "trial_of",
]  # fmt: skip
