"""The traffic of a question as trials see it: all of it, its busiest part, one replica's share, another draw.

    open loop     may be cut to its busiest part; `load` times the traffic: it arrives so many times as fast
    sessions      never cut in time, since later turns come from earlier ones; dealt out whole; `load`: sessions begin
                  so many times as fast
    closed loop   never cut; `load`: so many times the clients

Traffic may be looked at `times` as long: synthetic traffic goes on, of what was recorded the busiest part grows up to all of it.

A *seed* beyond 0 is another draw of what is random: lengths and times of made-up requests, the guesses of a speculator.
A recorded trace has one draw.

Invariants
* Shares partition the requests, and the turns of a session stay together, right behind each other.
* Equal questions give equal traffic in every process.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain

from twinfer.core.catalog import resolve_spec
from twinfer.core.config import EngineConfig
from twinfer.core.errors import ConfigError
from twinfer.core.registry import Registry
from twinfer.core.request import Request
from twinfer.core.workload import DEFAULT_NUM_REQUESTS, generate
from twinfer.simulator.plan_space import Question

LEAST_PER_CLIENT = 10
"""Requests that each client of a closed loop must send: all begin at once, and that burst is to be a small part."""
MOST_REQUESTS = 100_000
"""Requests up to which synthetic traffic goes on."""
KEPT_DRAWS = 8
"""Longer draws, and parts of them, that are remembered."""


class Traffic:
    """requests: those of seed 0.  sessions: some request follows another.  clients: of a closed loop, else None.

    varies: another seed gives other requests.  longest: tokens of the longest request of any seed.
    """

    def __init__(self, question: Question, registry: Registry) -> None:
        self._question = question
        self._registry = registry
        draws = [_generate(question, registry, seed) for seed in range(min(question.seeds, 2))]
        self.varies = len(draws) > 1 and _shape(draws[0]) != _shape(draws[1])
        if self.varies:
            draws += [_generate(question, registry, seed) for seed in range(2, question.seeds)]
        self._draws = draws if self.varies else draws[:1]
        self.requests = draws[0]
        self.sessions = any(r.follows is not None for r in self.requests)
        self.clients = question.workload.concurrency
        self.longest = max(r.max_length for r in chain.from_iterable(self._draws))
        given = question.workload
        self._goes_on = not (given.trace or given.prompts or given.prompt_tokens or given.source or self.clients)
        self._longer: OrderedDict[tuple[int, int, bool], Sequence[Request]] = OrderedDict()
        if self.clients is not None and len(self.requests) < LEAST_PER_CLIENT * self.clients:
            raise ConfigError(
                "--requests", len(self.requests), f"{self.clients} clients begin at once, and that burst would be most of it",
                f"give at least {LEAST_PER_CLIENT * self.clients}, or fewer --concurrency",
            )  # fmt: skip

    @property
    def cut(self) -> bool:
        """Whether a part of it stands for all."""
        return not self.sessions and self.clients is None

    @property
    def most_load(self) -> float:
        """Times the traffic that can be asked about: of a closed loop, while each client sends several requests."""
        if self.clients is None:
            return float("inf")
        return len(self.requests) / (LEAST_PER_CLIENT * self.clients)

    def fitted(self, config: EngineConfig) -> EngineConfig:
        """`config`, with one length for all draws where it says none."""
        if not self.varies or config.max_model_len is not None:
            return config
        return config.model_copy(update={"max_model_len": max(2, self.longest)})

    def clients_at(self, load: float) -> int | None:
        """Clients of the whole fleet."""
        return None if self.clients is None else max(1, round(self.clients * load))

    def drawn(self, seed: int, times: int = 1) -> Sequence[Request]:
        """All of a draw, `times` as long if it goes on: what is then longer than any request of the first draws is left
        out, as designs were assessed without it."""
        seed %= len(self._draws)
        if times == 1 or not self._goes_on:
            return self._draws[seed]
        return self._kept((seed, times, False), lambda: self._going_on(seed, times))

    def _going_on(self, seed: int, times: int) -> Sequence[Request]:
        first = self._draws[seed]
        num = self._question.workload.num_requests or DEFAULT_NUM_REQUESTS
        times = min(times, max(1, MOST_REQUESTS // len(first)))
        if times == 1:
            return first
        units = sessions_of(_generate(self._question, self._registry, seed, num * times))
        return [r for unit in units if unit[-1].max_length <= self.longest for r in unit]

    def part(self, seed: int, times: int = 1) -> Sequence[Request]:
        """The busiest part of a draw that is used to confirm; all of it where it is not cut."""
        drawn = self.drawn(seed, times)
        if not self.cut:
            return drawn
        key = (seed % len(self._draws), times, True)
        return self._kept(key, lambda: busiest(drawn, self._question.confirm * times))

    def _kept(self, key: tuple[int, int, bool], make: Callable[[], Sequence[Request]]) -> Sequence[Request]:
        found = self._longer.pop(key, None)
        self._longer[key] = found = make() if found is None else found
        while len(self._longer) > KEPT_DRAWS:
            self._longer.popitem(last=False)
        return found

    def seen(self, replicas: int, *, whole: bool, screen: bool, seed: int, times: int = 1) -> Sequence[Request]:
        """What a trial of `replicas` sees of a draw, before it is dealt out.

        whole: all of it instead of the part that is used to confirm.  screen: its busiest `screen` per replica.
        """
        requests = self.drawn(seed, times) if whole else self.part(seed, times)
        return busiest(requests, self._question.screen * replicas * times) if screen and self.cut else requests

    def dealt(
        self, requests: Sequence[Request], replicas: int, *, shares: Sequence[int], merged: bool, load: float
    ) -> list[list[Request]]:
        """`requests` of each of `shares`, numbers of replicas among `replicas`; merged: all of these in one list."""
        units = sessions_of(requests) if self.sessions else [[r] for r in requests]
        speed = load if self.clients is None else 1.0
        chosen = [{i for i in shares}] if merged else [{i} for i in shares]
        lists = ([u for i, u in enumerate(units) if i % replicas in some] for some in chosen)
        return [retimed(list(chain.from_iterable(found)), speed, requests[0].arrival) for found in lists]


def _generate(question: Question, registry: Registry, seed: int, num: int | None = None) -> list[Request]:
    """All requests of a draw, or `num` of them, sorted by arrival of what opens a session."""
    spec = resolve_spec(question.model)
    context = int(question.base.get("max_model_len") or spec.max_context)
    changes = {"seed": question.workload.seed + seed, **({} if num is None else {"num_requests": num})}
    workload = question.workload.model_copy(update=changes)
    return generate(workload, spec.vocab_size, context, registry=registry, vision=spec.vision)


def _shape(requests: Sequence[Request]) -> list[tuple[float, int, int, float]]:
    """What differs between draws, if anything does: times and lengths."""
    return [
        (r.arrival, len(r.prompt), r.params.max_tokens or 1, 0.0 if r.follows is None else r.follows.think_s)
        for r in requests
    ]


def sessions_of(requests: Sequence[Request]) -> list[list[Request]]:
    """Requests that open a session (or are alone), each with its later turns."""
    found: list[list[Request]] = []
    for request in requests:
        if request.follows is None:
            found.append([request])
        else:
            found[-1].append(request)
    return found


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


__all__ = ["LEAST_PER_CLIENT", "MOST_REQUESTS", "Traffic", "busiest", "retimed", "sessions_of"]
