"""Kits that show whether a scheduler, a KV cache or a router keeps its contract; `twinfer plugins check` runs them.

A third party subclasses a kit in a test file and pytest runs every `test_` method:

    from twinfer.plugins.conformance import SchedulerKit

    class TestMine(SchedulerKit):
        technique = MyScheduler
        options = {"patience": 2.0}

Those of schedulers and KV caches play random but repeatable traffic (shared prefixes, priorities, several samples,
aborts, pools from ample to a few blocks, one or two steps in flight) through a real `Core` and call `audit()` after
every event; that of routers asks about random fleets.

Invariants
* A kit has no expectations beyond `core/policy.py` and `core/routing.py`: any order of service is fine, if every request ends,
  equal views get equal answers and nothing but the answer changes.
* A failure is a `ConformanceError` that tells the seed, so that it can be played again.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from twinfer.core.config import Choice
from twinfer.core.core import Core
from twinfer.core.events import Abort, Blocked, Event, Finished, Idle, Rejected, StepDone, Submit, Tick
from twinfer.core.params import SamplingParams
from twinfer.core.plan import Need, RowResult, StepPlan, StepResult
from twinfer.core.policy import Defer, Limits, Shortage, Want
from twinfer.core.registry import validate_options
from twinfer.core.request import Request

MAX_IDLE = 1000  # answers in a row that run nothing


class ConformanceError(AssertionError):
    """A technique broke its contract; the text says where and how to see it again."""


def require(ok: object, message: str) -> None:
    """Raise ConformanceError(message) unless `ok`; unlike `assert` it also counts under `python -O`."""
    if not ok:
        raise ConformanceError(message)


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
            block_size = kv_cache.block_size(Limits(max_model_len=max_len))
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
    """What came of a script: plans as text, and how each sample ended."""

    plans: list[str]
    endings: dict[tuple[str, int], str]


class Player:
    """Drives one Core through a script in virtual time and checks it at every event."""

    def __init__(self, traffic: Traffic, scheduler: Any, kv_cache: Any, where: str) -> None:
        self.traffic, self.scheduler, self.where = traffic, scheduler, f"{where}, seed {traffic.seed}"
        self.core = Core(scheduler, kv_cache, traffic.limits)
        self.now = 0.0
        self.played = Played([], {})
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
            elif isinstance(output, Rejected):
                self.played.endings[output.request_id, 0] = "rejected"

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


class _Kit:
    """What the kits share."""

    technique: ClassVar[type[Any]]
    options: ClassVar[Mapping[str, Any]] = {}
    seeds: ClassVar[range] = range(16)

    def build(self) -> Any:
        """The technique with its options, as a run would build it."""
        cls = type(self).technique
        choice = Choice(name=cls.name, options=dict(self.options))
        return cls(validate_options(cls.name, choice, cls.Options))

    def test_declaration(self) -> None:
        """A name, a summary and options that have defaults and descriptions: what lists and controls are made of."""
        cls = type(self).technique
        require(cls.summary and "\n" not in cls.summary, f"{cls.name}: summary must be one line of text")
        cls.Options()  # raises when an option has no default
        for name, info in cls.Options.model_fields.items():
            require(info.description, f"{cls.name}: option {name} has no description")
        self.build()


class _PlayedKit(_Kit):
    """What the kits of schedulers and KV caches share."""

    def traffic(self, seed: int, tight: bool, prefix: str = "r") -> Traffic:
        """The script of `seed`."""
        return Traffic.random(seed, tight, prefix)

    def parts(self, traffic: Traffic) -> tuple[Any, Any]:
        """(scheduler, kv_cache) to play `traffic` with."""
        raise NotImplementedError

    def play(self, seed: int, tight: bool, prefix: str = "r", checks_policy: bool = False) -> Played:
        traffic = self.traffic(seed, tight, prefix)
        player = Player(traffic, *self.parts(traffic), where=type(self).technique.name)
        player.checks_policy = checks_policy
        return player.play()

    def test_every_request_is_served_when_memory_is_ample(self) -> None:
        for seed in self.seeds:
            traffic = self.traffic(seed, tight=False)
            endings = self.play(seed, tight=False).endings
            for request in traffic.requests:
                for index in range(request.params.num_samples):
                    reason = endings.get((request.id, index))
                    fine = reason == "length" or (reason == "abort" and request.id in traffic.aborts)
                    require(fine, f"{self.technique.name}, seed {seed}: {request.id}/{index} ended as {reason}")

    def test_every_request_ends_when_memory_is_short(self) -> None:
        for seed in self.seeds:
            traffic = self.traffic(seed, tight=True)
            endings = self.play(seed, tight=True).endings
            for request in traffic.requests:
                require((request.id, 0) in endings, f"{self.technique.name}, seed {seed}: {request.id} never ended")

    def test_equal_traffic_gives_equal_plans(self) -> None:
        """Also when ids, and so their hashes, differ: nothing may depend on the order of a set."""
        for seed in self.seeds:
            plans = self.play(seed, tight=seed % 2 == 0).plans
            require(
                plans == self.play(seed, tight=seed % 2 == 0).plans,
                f"{self.technique.name}, seed {seed}: the same events gave different plans",
            )
            renamed = [p.replace('"q', '"r') for p in self.play(seed, tight=seed % 2 == 0, prefix="q").plans]
            require(plans == renamed, f"{self.technique.name}, seed {seed}: plans depend on the names of requests")


class SchedulerKit(_PlayedKit):
    """Contract of `twinfer.core.policy.Scheduler`."""

    def parts(self, traffic: Traffic) -> tuple[Any, Any]:
        from twinfer.plugins.kv_cache.paged import Paged

        return self.build(), Paged(Paged.Options(block_size=traffic.block_size))

    def test_answers_are_a_pure_function_of_the_view(self) -> None:
        for seed in self.seeds:
            self.play(seed, tight=seed % 2 == 0, checks_policy=True)

    def test_it_serves_the_contiguous_cache_too(self) -> None:
        from twinfer.plugins.kv_cache.contiguous import Contiguous

        for seed in self.seeds:
            traffic = Traffic.random(seed, tight=True, kv_cache=Contiguous())
            played = Player(traffic, self.build(), Contiguous(), f"{self.technique.name} on contiguous").play()
            missing = [r.id for r in traffic.requests if (r.id, 0) not in played.endings]
            require(not missing, f"{self.technique.name} on contiguous, seed {seed}: {missing} never ended")


class KVCacheKit(_PlayedKit):
    """Contract of `twinfer.core.policy.KVCache`."""

    def traffic(self, seed: int, tight: bool, prefix: str = "r") -> Traffic:
        return Traffic.random(seed, tight, prefix, kv_cache=self.build())

    def parts(self, traffic: Traffic) -> tuple[Any, Any]:
        from twinfer.plugins.scheduler.continuous import Continuous

        return Continuous(), self.build()

    def limits(self) -> Iterator[Limits]:
        for max_len in (2, 16, 100, 4096):
            for num_blocks in (1, 7, 1000):
                yield Limits(max_model_len=max_len, num_blocks=num_blocks)

    def test_sizes(self) -> None:
        """Blocks hold a token or more; what is reserved is enough and does not shrink; headroom leaves a block."""
        cache = self.build()
        for flag in ("shares_prefixes", "copies_on_write"):
            require(isinstance(getattr(cache, flag, None), bool), f"{cache.name}: {flag} must be True or False")
        for limits in self.limits():
            size = cache.block_size(limits)
            require(isinstance(size, int) and size >= 1, f"{cache.name}: block_size gave {size!r}; give at least 1")
            require(size == cache.block_size(limits), f"{cache.name}: block_size differs from call to call")
            room = cache.headroom(limits)
            require(0 <= room < limits.num_blocks, f"{cache.name}: headroom {room} of {limits.num_blocks} blocks")
            last = 0
            for num in (1, 2, 15, 16, 17, 99, 100, 4095, 4096):
                if num <= limits.max_model_len:
                    reserved = cache.reserve(num, limits)
                    require(reserved >= num, f"{cache.name}: reserve({num}) gave {reserved}; give at least {num}")
                    exact = reserved == num or not getattr(cache, "frees_windows", False)
                    require(exact, f"{cache.name}: frees windows, so reserve({num}) must not ask for {reserved}")
                    require(reserved >= last, f"{cache.name}: reserve({num}) is less than for fewer tokens")
                    last = reserved

    def test_idle_order_is_a_container(self) -> None:
        """Checked against a set; two containers that saw the same calls pop the same blocks."""
        cache = self.build()
        for seed in self.seeds:
            rng = random.Random(seed)
            mine, twin = cache.idle_order(), cache.idle_order()
            known: set[int] = set()
            require(len(mine) == 0, f"{cache.name}: idle_order must start empty")
            for _ in range(200):
                kind = rng.random()
                if kind < 0.5 or not known:
                    block = rng.choice([b for b in range(300) if b not in known])
                    known.add(block)
                    mine.add(block), twin.add(block)
                elif kind < 0.75:
                    block = rng.choice(sorted(known))
                    known.remove(block)
                    mine.remove(block), twin.remove(block)
                else:
                    block = mine.pop()
                    require(block in known, f"{cache.name}, seed {seed}: idle_order popped {block}, which it had not")
                    require(block == twin.pop(), f"{cache.name}, seed {seed}: idle_order is not repeatable")
                    known.remove(block)
                inside = all(b in mine for b in known) and (block in mine) == (block in known)
                require(inside and len(mine) == len(known), f"{cache.name}, seed {seed}: idle_order lost count")

    def test_equal_prompts_share_blocks_when_it_says_so(self) -> None:
        """The second of two equal prompts finds the first one's blocks, but always feeds its last token."""
        limits = Limits(max_model_len=64, num_blocks=256)
        cache = self.build()
        size = cache.block_size(limits)
        prompt = tuple(range(1, 33))
        requests = tuple(
            Request(id=f"r{i}", prompt=prompt, params=SamplingParams(max_tokens=2, ignore_eos=True), arrival=float(i))
            for i in range(2)
        )
        from twinfer.plugins.scheduler.continuous import Continuous

        traffic = Traffic(limits=limits, block_size=size, requests=requests, aborts={}, seed=0)
        plans = Player(traffic, Continuous(), cache, cache.name).play().plans
        fed = sum(len(row["tokens"]) for plan in map(_parse, plans) for row in plan["rows"] if row["seq"] == "r1")
        hit = (len(prompt) - 1) // size * size if cache.shares_prefixes else 0
        expected = len(prompt) - hit + 1  # and the first output token
        require(fed == expected, f"{cache.name}: the second of two equal prompts fed {fed} tokens, expected {expected}")


@dataclass(slots=True)
class ReplicaFacts:
    """A replica as facts alone, for asking routers (`core/routing.py`, ReplicaView); prefixes by request id."""

    index: int
    num_requests: int = 0
    num_tokens: int = 0
    last_pick: int = -1
    num_blocks: int = 100
    free_blocks: int = 100
    block_size: int = 16
    routed: Mapping[str, int] = field(default_factory=dict)
    cached: Mapping[str, int] = field(default_factory=dict)

    def routed_tokens(self, request: Request) -> int:
        return self.routed.get(request.id, 0)

    def cached_tokens(self, request: Request) -> int:
        return self.cached.get(request.id, 0)


class RouterKit(_Kit):
    """Contract of `twinfer.core.routing.Router`."""

    def fleets(self) -> Iterator[tuple[int, list[Request], list[ReplicaFacts]]]:
        """(seed, requests, replicas): from one replica to many, idle to full, with gaps between their indices."""
        for seed in self.seeds:
            rng = random.Random(seed)
            requests = [Request(id=f"r{i}", prompt=range(i, i + rng.randint(1, 400))) for i in range(8)]
            indices = sorted(rng.sample(range(20), rng.choice((1, 2, 3, 8))))
            idle = rng.random() < 0.25
            replicas = [ReplicaFacts(index) for index in indices]
            for number, r in enumerate(replicas):
                if not idle:
                    r.num_requests, r.num_tokens = rng.randint(0, 30), rng.randint(0, 9000)
                    r.last_pick, r.free_blocks = rng.choice((-1, number)), rng.randint(0, 100)
                    r.routed = {q.id: rng.choice((0, 0, len(q.prompt) // 2)) for q in requests}
                    r.cached = {q.id: rng.choice((0, 0, len(q.prompt) - 1)) for q in requests}
            yield seed, requests, replicas

    def test_it_picks_one_of_the_views(self) -> None:
        name = type(self).technique.name
        for seed, requests, replicas in self.fleets():
            router = self.build()
            for request in requests:
                picked = router.pick(request, replicas)
                known = [r.index for r in replicas]
                require(picked in known, f"{name}, seed {seed}: picked {picked!r}, the views are {known}")

    def test_answers_are_a_pure_function_of_the_views(self) -> None:
        """Asked twice, asked by another instance, asked about others in between: always the same."""
        name = type(self).technique.name
        for seed, requests, replicas in self.fleets():
            router, twin = self.build(), self.build()
            before = copy.deepcopy(replicas), copy.deepcopy(vars(router))
            first = [router.pick(request, replicas) for request in requests]
            again = [router.pick(request, replicas) for request in reversed(requests)][::-1]
            other = [twin.pick(request, replicas) for request in requests]
            require(first == again == other, f"{name}, seed {seed}: equal views got different answers")
            require(before[0] == replicas, f"{name}, seed {seed}: the router changed a view")
            require(before[1] == vars(router), f"{name}, seed {seed}: the router keeps state between calls")

    def test_the_prefix_block_is_a_count(self) -> None:
        block = getattr(self.build(), "prefix_block", 0)
        ok = isinstance(block, int) and not isinstance(block, bool) and block >= 0
        require(ok, f"{type(self).technique.name}: prefix_block is {block!r}; give a number of tokens, 0 for none")


def _parse(plan: str) -> Any:
    import json

    return json.loads(plan)


KITS: Mapping[str, type[_Kit]] = {"scheduler": SchedulerKit, "kv_cache": KVCacheKit, "router": RouterKit}


def check(kind: str, technique: type[Any], options: Mapping[str, Any] | None = None) -> dict[str, str]:
    """Run the kit of `kind` on `technique`: test name -> "" or why it failed. KeyError when the kind has no kit."""
    kit = type("Check", (KITS[kind],), {"technique": technique, "options": dict(options or {})})()
    results: dict[str, str] = {}
    for name in sorted(n for n in dir(kit) if n.startswith("test_")):
        try:
            getattr(kit, name)()
            results[name] = ""
        except Exception as error:  # whatever a technique raises is its failure, not the checker's
            text = " ".join(str(error).split())
            results[name] = text if isinstance(error, ConformanceError) else f"{type(error).__name__}: {text}"
    return results


__all__ = [
    "KITS", "ConformanceError", "KVCacheKit", "Played", "Player", "ReplicaFacts", "RouterKit", "SchedulerKit", "Traffic", "check",
    "require",
]  # fmt: skip
