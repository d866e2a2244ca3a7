"""Random but repeatable traffic played through a real `Core`, which is audited after every event.

Invariants
* Equal seeds give equal scripts; a failure tells the seed.
* Time is virtual; what a policy answers is compared with what it answers to the same view again.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from twinfer.core.core import Core
from twinfer.core.events import Abort, Blocked, Event, Finished, Idle, Rejected, StepDone, Submit, Tick
from twinfer.core.guard import block_size_of
from twinfer.core.params import SamplingParams
from twinfer.core.plan import Need, RowResult, StepPlan, StepResult
from twinfer.core.policy import Defer, Limits, Shortage, Want
from twinfer.core.request import Request
from twinfer.plugins.conformance.kit import require

MAX_IDLE = 1000  # answers in a row that run nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """A script: requests with arrival times and, for some, the moment of abort; the same for equal seeds."""

    limits: Limits
    block_size: int
    requests: tuple[Request, ...]
    aborts: Mapping[str, float]
    seed: int

    @classmethod
    def random(cls, seed: int, tight: bool, prefix: str = "r", kv_cache: Any = None) -> Traffic:
        """`tight` pools hold little more than one request; others hold all. Ids begin with `prefix`.

        Block size and pool suit `kv_cache`, or are random.
        """
        rng = random.Random(seed)
        block_size = rng.choice((1, 2, 4, 8, 16))
        max_len = rng.choice((12, 32, 64))
        if kv_cache is not None:
            block_size = block_size_of(kv_cache, Limits(max_model_len=max_len))
        num = rng.randint(1, 8)
        shared = [rng.randrange(1000) for _ in range(max_len // 2)]
        requests, aborts = [], {}
        now = 0.0
        for i in range(num):
            length = rng.randint(1, max_len - 4)
            own = [1000 * (i + 1) + j for j in range(length)]
            prompt = (shared[: rng.randint(0, len(shared))] + own)[:length] if rng.random() < 0.5 else own
            samples = rng.choice((1, 1, 1, 2, 3))
            params = SamplingParams(
                max_tokens=rng.randint(1, max_len - length),
                n=samples,
                beam_width=rng.choice((1, 1, 1, 3)) if samples == 1 else 1,
                temperature=0.0 if samples == 1 else 1.0,
                ignore_eos=True,
            )
            request = Request(
                id=f"{prefix}{i}", prompt=tuple(prompt), params=params, priority=rng.randint(0, 2), arrival=now
            )
            requests.append(request)
            if rng.random() < 0.15:
                aborts[request.id] = now + rng.random() * 0.2
            now += rng.choice((0.0, 0.0, 0.02, 0.3))
        blocks_each = -(-max_len // block_size)
        spare = rng.randint(0, blocks_each) if tight else blocks_each * sum(r.params.num_samples for r in requests)
        limits = Limits(
            max_num_seqs=rng.choice((1, 2, 4, 16)),
            max_num_batched_tokens=max_len if not tight else rng.choice((max_len, 2 * max_len)),
            max_model_len=max_len,
            num_blocks=2 + blocks_each + spare,
            max_outstanding=rng.choice((1, 1, 2)),
            num_host_blocks=rng.choice((0, 0, blocks_each, 4 * blocks_each)),
        )
        return cls(limits=limits, block_size=block_size, requests=tuple(requests), aborts=aborts, seed=seed)


@dataclass(slots=True)
class Played:
    """What came of a script: plans as text, how each sample ended, and why where the core says so."""

    plans: list[str]
    endings: dict[tuple[str, int], str]
    details: dict[tuple[str, int], str]


class Player:
    """Drives one Core through a script in virtual time and checks it at every event."""

    def __init__(self, traffic: Traffic, scheduler: Any, kv_cache: Any, where: str) -> None:
        self.traffic, self.scheduler, self.where = traffic, scheduler, f"{where}, seed {traffic.seed}"
        self.core = Core(scheduler, kv_cache, traffic.limits)
        self.now = 0.0
        self.played = Played([], {}, {})
        self.checks_policy = False

    def play(self) -> Played:
        core = self.core
        coming: list[tuple[float, int, Event]] = [(r.arrival, 0, Submit(r)) for r in self.traffic.requests]
        coming += [(at, 1, Abort(request_id)) for request_id, at in self.traffic.aborts.items()]
        coming.sort(key=lambda item: item[:2])
        out: list[StepPlan] = []  # launched, not done
        idle = 0
        while coming or core.has_work:
            while coming and coming[0][0] <= self.now:
                self._receive(coming.pop(0)[2])
            if self.checks_policy:
                self._check_policy()
            action = core.next_step(self.now)
            self._after()
            if isinstance(action, StepPlan):
                idle = 0
                self.played.plans.append(action.to_json())
                require(action.rows or action.moves, f"{self.where}: step {action.step} does nothing")
                out.append(action)
                continue
            if isinstance(action, Blocked):
                require(out, f"{self.where}: blocked with nothing outstanding")
                plan = out.pop(0)
                self.now += 0.01
                self._receive(StepDone(plan.step, StepResult(tuple(_sample(r) for r in plan.rows), 0.01)))
                continue
            idle += 1
            require(idle < MAX_IDLE, f"{self.where}: {MAX_IDLE} answers in a row run nothing")
            self._wait(action, coming)
        return self.played

    def _wait(self, action: Idle, coming: list[Any]) -> None:
        until = [t for t in (action.until, coming[0][0] if coming else None) if t is not None]
        require(until or not self.core.has_work, f"{self.where}: waits for nothing while requests are alive")
        if until:
            require(min(until) > self.now, f"{self.where}: asked to wait until a time that has passed ({min(until)})")
            self.now = min(until)
        self._receive(Tick())

    def _receive(self, event: Any) -> None:
        self.core.receive(event, self.now)
        self._after()

    def _after(self) -> None:
        wrong = self.core.audit()
        require(not wrong, f"{self.where}: {'; '.join(wrong[:3])}")
        for output in self.core.outputs():
            if isinstance(output, Finished):
                self.played.endings[output.request_id, output.index] = output.reason
                self.played.details[output.request_id, output.index] = output.detail
            elif isinstance(output, Rejected):
                self.played.endings[output.request_id, 0] = "rejected"
                self.played.details[output.request_id, 0] = output.why

    def _check_policy(self) -> None:
        """Ask twice, compare, and see that nothing but the answer came of it."""
        core, scheduler = self.core, self.scheduler
        before = _state(core), copy.deepcopy(vars(scheduler))
        first, second = (self._answers() for _ in range(2))
        require(first == second, f"{self.where}: equal views got different answers: {first[:3]} and {second[:3]}")
        require(before[0] == _state(core), f"{self.where}: the scheduler changed a sequence or the core")
        require(before[1] == vars(scheduler), f"{self.where}: the scheduler keeps state between calls")

    def _answers(self) -> list[tuple[Any, ...]]:
        core, scheduler = self.core, self.scheduler
        found: list[tuple[Any, ...]] = []
        most = 4 * len(core.sequences) + 64
        for number, want in enumerate(scheduler.propose(core.view(self.now, lambda: False))):
            require(number < most, f"{self.where}: propose answers without end; name each sequence once")
            require(
                isinstance(want, (Want, Defer)),
                f"{self.where}: propose yielded {want!r}; yield Want(sequence, num_tokens) or Defer(until)",
            )
            found.append(("defer", want.until) if isinstance(want, Defer) else (want.seq.id, *want[1:]))
        for seq in core.running:
            chosen = [v.id for v in scheduler.victims(core.view(self.now, lambda: False), Shortage(seq, 1))]
            running = {s.id for s in core.running}
            require(set(chosen) <= running, f"{self.where}: victims {chosen} include one that does not run")
            found.append(("victims", seq.id, *chosen))
        for seq in core.sequences.values():
            order = scheduler.order(seq)
            require(isinstance(order, tuple), f"{self.where}: order gave {order!r}; give a tuple")
            found.append(("order", seq.id, order))
        return found


def _sample(row: Any) -> RowResult:
    """Tokens that depend on sequence and position alone, as a model's would."""
    if row.need is Need.NONE:
        return RowResult()
    first = (row.seed + row.stop) % 50_000
    if row.need is Need.BEAM:
        return RowResult(candidates=tuple((first + i, -0.1 - i * (1 + first % 7)) for i in range(6)))
    return RowResult(tokens=(first,))


def _state(core: Core) -> list[tuple[Any, ...]]:
    return [
        (s.id, s.status, s.computed, s.inflight, tuple(s.output), s.drafts, s.num_preemptions, s.order)
        for s in core.sequences.values()
    ] + [(s.id,) for s in core.running]
