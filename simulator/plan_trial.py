"""One look at one fleet: what is simulated, and what is kept of it.

    assess     bounds of a design, nothing is simulated
    screen     one replica of n, on the busiest part of the traffic, every n-th request of it
    replica    at most 3 replicas of n, on the busiest part that is used to confirm, their requests of it
    fleet      all n replicas on that part, requests dealt out in turn
    proof      all n replicas on all of the traffic

Dealing in turn (round robin) makes replicas independent of each other: the fleet is exactly its replicas, one by one.
With another router, pools for prefill and decode, or a KV tier, replicas run together (`fleet_run.py`), and a first look
is at one of n groups of them. So do those of a fleet whose requests come when others have ended: sessions and closed
loops. Traffic with sessions or in a closed loop is never cut (`plan_traffic.py`).

Invariants
* An outcome depends on its trial and the question alone: not on the process, on other trials or on the clock.
* What keeps its promises was looked at until it was settled (`plan_tally.BACKLOG`), or on all the traffic there is.
* A run that has already broken a promise for certain, even one 25 % weaker, is ended early and says so.
* Whatever is not served counts against the promises (`core/goal.py`) and as `failed`.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from itertools import chain
from typing import Any

from twinfer.core.config import Choice
from twinfer.core.errors import DoesNotFit, PluginError, TwinferError
from twinfer.core.fleet import Fleet
from twinfer.core.op_time import OpTime
from twinfer.core.recorder import Recorder
from twinfer.core.records import RunRecord
from twinfer.core.registry import Registry, default_registry
from twinfer.core.request import Request
from twinfer.core.work import Op
from twinfer.simulator.fleet_run import FleetRun
from twinfer.simulator.op_time import OpTimeChain
from twinfer.simulator.plan_bound import bound_of, demand_of
from twinfer.simulator.plan_designs import ROUND_ROBIN, Design, designs_of
from twinfer.simulator.plan_record import TrialRecorder
from twinfer.simulator.plan_space import FLEET_AXES, Question, check_question, devices_of_question
from twinfer.simulator.plan_tally import BACKLOG, PATIENCE, Outcome, TrialTally, Watch
from twinfer.simulator.plan_traffic import Traffic, busiest
from twinfer.simulator.run import World, prepare, run_world

ASSESS, SCREEN, REPLICA, FLEET, PROOF = "assess", "screen", "replica", "fleet", "proof"
KEPT_WORLDS = 48  # designs whose op times a process remembers
NOT_OF_STEPS = ("max_num_batched_tokens", "max_num_seqs", *FLEET_AXES)
"""Axes that do not change what a step costs, only which steps there are."""
POOLED = 3
"""Replicas that stand for a fleet where one is too few for a percentile, and all take too long."""
STICKY = ("prefix_aware", "kv_aware")
"""Routers that bring the turns of a session to the replica that has its KV: one of n groups is then like the fleet."""

ShouldStop = Callable[[], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """`replicas` of the design number `design`, looked at by `level`.

    load: how many times the traffic.  steps: how many times as long all steps take.  bandwidth: share of the
    device's memory bandwidth.  seed: which draw of the traffic.
    """

    design: int
    replicas: int
    level: str
    load: float = 1.0
    steps: float = 1.0
    bandwidth: float = 1.0
    seed: int = 0

    @property
    def key(self) -> str:
        more = "".join(f" {n}={v:.6g}" for n in ("load", "steps", "bandwidth") if (v := getattr(self, n)) != 1)
        return f"{self.design:05d} {self.level} x{self.replicas}{more}" + (f" seed={self.seed}" if self.seed else "")


class Evaluator:
    """Answers trials of one question in one process; remembers the op times of the last designs.

    It is also the `Scope` of a search (`plan_search.py`): which level and how many looks a trial stands for.
    """

    def __init__(self, question: Question, registry: Registry | None = None) -> None:
        self.question = question
        self.registry = registry or default_registry()
        check_question(question, self.registry)
        self.devices = devices_of_question(question, self.registry)
        self.traffic = Traffic(question, self.registry)
        self.requests = self.traffic.requests
        self.designs = designs_of(question, STICKY[0] if self.traffic.sessions else ROUND_ROBIN)
        self.demand = demand_of(self.requests)
        self._longest = max(r.max_length for r in self.requests)
        self._worlds: OrderedDict[tuple[int, float], World] = OrderedDict()

    # --- what a search may ask for --------------------------------------------------------------

    @property
    def most_load(self) -> float:
        return self.traffic.most_load

    def level(self, level: str, replicas: int) -> str:
        """`level`, or `fleet` where the traffic is so little, or cannot be cut, that there is no difference."""
        if level == PROOF:
            return PROOF if self.traffic.cut and len(self.requests) > self.question.confirm else FLEET
        return FLEET if level != ASSESS and len(self.requests) <= self.question.screen else level

    def looks(self, level: str, design: Design, replicas: int) -> int:
        """How many seeds a trial at `level` is asked with: draws of the traffic, where it is drawn."""
        drawn = self.traffic.varies or design.guesses
        return self.question.seeds if drawn and level in (REPLICA, FLEET, PROOF) else 1

    def share(self, level: str, replicas: int) -> float:
        """How many times the replicas of a trial at `level` a fleet is."""
        return replicas / len(_shares(level, replicas))

    def snapped(self, load: float) -> float:
        """`load`, or the nearest at which there is a whole number of clients."""
        clients = self.traffic.clients
        return load if clients is None else max(1, round(clients * load)) / clients

    def mistake(self, design: Design) -> TwinferError | None:
        """Why `design` can never be built, on however large a device; None where it can, or is just too large for its own."""
        if design.config is None:
            return TwinferError(design.problem)
        try:
            self._world(design, 1.0)
        except DoesNotFit:
            return None
        except TwinferError as error:
            return error
        return None

    # --- answering ------------------------------------------------------------------------------

    def answer(self, trial: Trial, should_stop: ShouldStop | None = None) -> Outcome | None:
        """The outcome of `trial`; None when `should_stop` said so."""
        design = self.designs[trial.design]
        if design.config is None:
            return Outcome(problem=design.problem)
        try:
            world = self._world(design, trial.bandwidth)
            if trial.level == ASSESS:
                bound = bound_of(
                    world, self.demand, self.question.goals, self._peak_rate, design.pools, self.traffic.clients
                )
                return Outcome(fewest=bound.fewest, likely=bound.likely, problem=bound.problem)
            return self._settled(world, trial, should_stop)
        except PluginError:  # says nothing about the fleet
            raise
        except TwinferError as error:  # what does not fit, or techniques that refuse each other
            return Outcome(problem=str(error))

    def _world(self, design: Design, bandwidth: float) -> World:
        key = (design.index, bandwidth)
        world = self._worlds.pop(key, None)
        if world is None:
            assert design.config is not None
            config = self.traffic.fitted(design.config)
            slower = None if bandwidth == 1 else lambda chain: SlowMemory(chain, bandwidth)
            world = prepare(
                config, self.question.workload, self.registry, self.devices[design.device], requests=self.requests,
                wrap=slower, longest=self._longest,
            )  # fmt: skip
            twin = self._twin(design, bandwidth)
            if twin is not None:
                world = replace(world, timer=twin.timer, chain=twin.chain, ops_of=twin.ops_of)
        self._worlds[key] = world
        while len(self._worlds) > KEPT_WORLDS:
            self._worlds.popitem(last=False)
        return world

    def _twin(self, design: Design, bandwidth: float) -> World | None:
        """A world whose steps cost the same, as its design differs in limits alone: what it knows of steps is shared."""
        if design.guesses:
            return None
        changes = {n: v for n, v in design.changes.items() if n not in NOT_OF_STEPS}
        for (index, share), world in self._worlds.items():
            other = self.designs[index].changes
            if share == bandwidth and all(other[n] == v for n, v in changes.items()):
                return world
        return None

    @cached_property
    def _peak_rate(self) -> float:
        """Requests per s in the busiest part of the traffic."""
        if not self.traffic.cut:
            return self.demand.rate
        part = busiest(self.requests, max(self.question.screen, len(self.requests) // 8))
        return demand_of(part).rate if part[-1].arrival > part[0].arrival else self.demand.rate

    def _settled(self, world: World, trial: Trial, should_stop: ShouldStop | None) -> Outcome | None:
        """`trial` on so much of the traffic that it says how the fleet fares in the long run, or on all there is.

        What breaks a promise, even one 25 % weaker, on less traffic needs no more of it.
        """
        see = partial(
            self.traffic.seen, trial.replicas, whole=trial.level == PROOF, screen=trial.level == SCREEN, seed=trial.seed
        )
        weaker = [g.scaled(PATIENCE) for g in self.question.goals]
        times, requests = 1, see()
        while True:
            outcome = self._simulate(world, trial, requests, should_stop)
            if outcome is None or outcome.settled or not outcome.keeps(weaker):
                return outcome
            times *= 2 ** math.ceil(math.log2(outcome.backlog / BACKLOG))
            longer = see(times=times)
            if len(longer) <= len(requests):
                return outcome
            requests = longer

    def _simulate(
        self, world: World, trial: Trial, requests: Sequence[Request], should_stop: ShouldStop | None
    ) -> Outcome | None:
        design, traffic, n = self.designs[trial.design], self.traffic, trial.replicas
        scattered = traffic.sessions and design.router.partition(":")[0] not in STICKY
        together = trial.level in (FLEET, PROOF) or scattered  # else one replica stands for all
        apart = design.simple and (not together or n == 1 or traffic.cut)
        shares = range(n) if together else _shares(trial.level, n)
        dealt = traffic.dealt(requests, n, load=trial.load, shares=shares, merged=not apart)
        clients = traffic.clients_at(trial.load)
        if clients is not None:
            clients = max(1, round(clients * (1 if apart else len(shares)) / n))
        world = replace(world, concurrency=clients)
        if trial.seed and design.guesses:
            config = world.setup.config.model_copy(update={"seed": world.setup.config.seed + trial.seed})
            world = replace(world, setup=replace(world.setup, config=config))
        watch = Watch(self.question.goals, sum(map(len, dealt)))
        config = world.setup.config
        tally = TrialTally(-(-config.max_num_seqs // config.dp))
        gaps = any(g.metric == "itl" for g in self.question.goals)
        make: Callable[..., Recorder] = Recorder if gaps else partial(TrialRecorder, tally)
        groups = len(shares)
        for part in filter(None, dealt):
            here = replace(world, requests=part)
            if apart:
                record, sigma = run_world(here, trial.steps, _quiet, should_stop, False, watch, make_recorder=make)
            else:
                record, sigma = _run_fleet(design, groups, here, trial.steps, should_stop, watch)
            tally.add(record, sigma)
            if watch.broken:
                break
            if not record.complete:
                return None
        starts = (r.arrival for r in chain.from_iterable(dealt) if r.follows is None)
        last = max(starts, default=0.0) if clients is None else math.inf
        return tally.outcome(world, self.question.goals, groups * design.num_engines, watch.broken, last)


def _shares(level: str, replicas: int) -> Sequence[int]:
    """Numbers of the replicas that are simulated of a fleet."""
    count = replicas if level in (FLEET, PROOF) else min(POOLED, replicas) if level == REPLICA else 1
    return [i * replicas // count for i in range(count)]


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
        decode=config if decode else None, decode_replicas=groups * decode, host_tier_bytes=design.host_tier,
    )  # fmt: skip
    pools = {"engine": world, **({"decode": world} if decode else {})}
    run: FleetRun | None = None

    def stop() -> bool:
        if should_stop is not None and should_stop():
            return True
        fronts = [r for r in run.replicas if r.pool != "decode"] if run is not None else []
        return run is not None and any(watch(rank.recorder.record, run.env.now) for r in fronts for rank in r.ranks)

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


def outcome_of(plain: Mapping[str, Any]) -> Outcome:
    """The outcome that `Outcome.plain` described. Raises TypeError for unknown fields."""
    return Outcome(**plain)


def trial_of(plain: Mapping[str, Any]) -> Trial:
    return Trial(**plain)


def plain_trial(trial: Trial) -> dict[str, Any]:
    return asdict(trial)


__all__ = [
    "ASSESS", "FLEET", "PROOF", "REPLICA", "SCREEN", "STICKY", "Evaluator", "Outcome", "Trial", "outcome_of",
    "plain_trial", "trial_of",
]  # fmt: skip
