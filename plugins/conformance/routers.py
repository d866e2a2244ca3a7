"""Kit of routers: they are asked about random fleets."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from twinfer.core.errors import short
from twinfer.core.guard import Blaming
from twinfer.core.request import Request
from twinfer.plugins.conformance.kit import Kit, require


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


def asked(router: Any, request: Request, replicas: list[ReplicaFacts]) -> Any:
    """What it picks; what it raises is told as a run would."""
    with Blaming("router", router, "pick"):
        return router.pick(request, replicas)


class RouterKit(Kit):
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
                picked, known = asked(router, request, replicas), [r.index for r in replicas]
                wanted = f"give the index of one of the views, {known}"
                require(picked in known, f"{name}, seed {seed}: pick gave {short(picked)}; {wanted}")

    def test_answers_are_a_pure_function_of_the_views(self) -> None:
        """Asked twice, asked by another instance, asked about others in between: always the same."""
        name = type(self).technique.name
        for seed, requests, replicas in self.fleets():
            router, twin = self.build(), self.build()
            before = copy.deepcopy(replicas), copy.deepcopy(vars(router))
            first = [asked(router, request, replicas) for request in requests]
            again = [asked(router, request, replicas) for request in reversed(requests)][::-1]
            other = [asked(twin, request, replicas) for request in requests]
            require(first == again == other, f"{name}, seed {seed}: equal views got different answers")
            require(before[0] == replicas, f"{name}, seed {seed}: the router changed a view")
            require(before[1] == vars(router), f"{name}, seed {seed}: the router keeps state between calls")

    def test_the_prefix_block_is_a_count(self) -> None:
        block = getattr(self.build(), "prefix_block", 0)
        ok = isinstance(block, int) and not isinstance(block, bool) and block >= 0
        require(ok, f"{type(self).technique.name}: prefix_block is {block!r}; give a number of tokens, 0 for none")
