"""Kit of KV caches: they are played, and asked about sizes and idle blocks."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

from twinfer.core.guard import block_size_of, whole
from twinfer.core.params import SamplingParams
from twinfer.core.policy import Limits
from twinfer.core.request import Request
from twinfer.plugins.conformance.kit import require
from twinfer.plugins.conformance.played import Player, Traffic
from twinfer.plugins.conformance.schedulers import PlayedKit


class KVCacheKit(PlayedKit):
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
            size = whole("kv_cache", cache, "block_size", 1, limits)
            require(size == cache.block_size(limits), f"{cache.name}: block_size differs from call to call")
            room = whole("kv_cache", cache, "headroom", 0, limits)
            require(room < limits.num_blocks, f"{cache.name}: headroom {room} of {limits.num_blocks} blocks")
            last = 0
            for num in (1, 2, 15, 16, 17, 99, 100, 4095, 4096):
                if num <= limits.max_model_len:
                    reserved = whole("kv_cache", cache, "reserve", num, num, limits)
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
        size = block_size_of(cache, limits)
        prompt = tuple(range(1, 33))
        requests = tuple(
            Request(id=f"r{i}", prompt=prompt, params=SamplingParams(max_tokens=2, ignore_eos=True), arrival=float(i))
            for i in range(2)
        )
        from twinfer.plugins.scheduler.continuous import Continuous

        traffic = Traffic(limits=limits, block_size=size, requests=requests, aborts={}, seed=0)
        plans = Player(traffic, Continuous(), cache, cache.name).play().plans
        fed = sum(len(row["tokens"]) for plan in map(json.loads, plans) for row in plan["rows"] if row["seq"] == "r1")
        hit = (len(prompt) - 1) // size * size if cache.shares_prefixes else 0
        expected = len(prompt) - hit + 1  # and the first output token
        require(fed == expected, f"{cache.name}: the second of two equal prompts fed {fed} tokens, expected {expected}")
