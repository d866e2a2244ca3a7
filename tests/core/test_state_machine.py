"""Random lives of the core: every event order, tiny pools, every scheduler and cache, content checked.

`audit()` is empty after every event, each sample ends once with what it gives alone, and the core drains
in bounded steps. What runs here is the same every time; `live` with other seeds hunts further.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from content_oracle import NastyScheduler, World
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from twinfer.core.params import SamplingParams
from twinfer.core.plan import StepPlan
from twinfer.core.policy import KVCache, Limits, Scheduler
from twinfer.core.request import KVSource, Request
from twinfer.plugins.kv_cache.contiguous import Contiguous
from twinfer.plugins.kv_cache.paged import Paged
from twinfer.plugins.scheduler.continuous import Continuous
from twinfer.plugins.scheduler.static import Static

STEPS_WANTED = 10_000
_events_run = 0

SCHEDULERS = {
    "continuous": lambda: Continuous(),
    "priority": lambda: Continuous(Continuous.Options(policy="priority")),
    "chunk-2": lambda: Continuous(Continuous.Options(chunk_size=2)),
    "whole-prompts": lambda: Continuous(Continuous.Options(chunked_prefill=False)),
    "static": lambda: Static(Static.Options(batch_size=3)),
    "static-waits": lambda: Static(Static.Options(batch_size=3, max_wait_s=3.0)),
    "nasty": lambda: NastyScheduler(7),
}
SOUND = frozenset(SCHEDULERS) - {"nasty", "whole-prompts"}
"""Schedulers under which every request ends as it does alone (whole prompts may not fit the token budget)."""

WINDOWS = ((None, 4), (5,), (None, 3, 3), (2, None), (1,), (7, None, 3), (None, None, 9), (16, 8))
"""Attention windows of the cache groups."""

LENGTHS = (0, 1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 31, 32, 33, 40)


def make_prompt(length: int, family: int, divergence: int) -> tuple[int, ...] | range:
    """Families 0 and 1 share prefixes among themselves; `divergence` is where a member leaves its family."""
    if family == 2:
        return range(100, 100 + length)
    return tuple((i * 7 + family * 3) % 11 if i < divergence else 50 + divergence for i in range(length))


def make_cache(block_size: int, sharing: bool) -> KVCache:
    """Block size 0 stands for the contiguous cache."""
    if block_size == 0:
        return Contiguous()
    return Paged(Paged.Options(block_size=block_size, prefix_sharing=sharing))


class CoreLife(RuleBasedStateMachine):
    @initialize(
        scheduler=st.sampled_from(sorted(SCHEDULERS)),
        block_size=st.sampled_from([0, 1, 2, 3, 4, 8, 16, 64]),
        sharing=st.sampled_from([True, True, True, False]),
        num_blocks=st.integers(1, 8),
        max_num_seqs=st.sampled_from([1, 2, 4, 8]),
        budget=st.sampled_from([1, 3, 8, 64]),
        max_model_len=st.sampled_from([8, 24, 40]),
        depth=st.integers(1, 3),
        staged=st.booleans(),
        lazy=st.booleans(),
        max_drafts=st.sampled_from([0, 0, 1, 4]),
        host_blocks=st.sampled_from([0, 0, 2, 20]),
        windows=st.sampled_from([(None,)] * len(WINDOWS) + list(WINDOWS)),
    )
    def start(
        self,
        scheduler: str,
        block_size: int,
        sharing: bool,
        num_blocks: int,
        max_num_seqs: int,
        budget: int,
        max_model_len: int,
        depth: int,
        staged: bool,
        lazy: bool,
        max_drafts: int,
        host_blocks: int,
        windows: tuple[int | None, ...],
    ) -> None:
        limits = Limits(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=max_model_len,
            num_blocks=num_blocks * (len(windows) if num_blocks > 2 else 1),
            max_outstanding=depth,
            num_host_blocks=host_blocks,
            num_stages=depth if staged else 1,
        )
        policy: Scheduler = SCHEDULERS[scheduler]()
        cache = make_cache(block_size, sharing)
        self.world = World(
            policy, cache, limits, lazy=lazy, strict=scheduler in SOUND, max_drafts=max_drafts,
            windows=windows if block_size else (None,),
        )  # fmt: skip
        self.count = 0

    @rule(
        length=st.sampled_from(LENGTHS),
        family=st.integers(0, 2),
        divergence=st.sampled_from([2, 6, 100, 100]),
        max_tokens=st.integers(1, 12),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        seed=st.sampled_from([None, 3, 4]),
        priority=st.integers(0, 2),
        cache_prefix=st.sampled_from([True, True, True, False]),
        salt=st.sampled_from(["", "", "", "salt"]),
        stops=st.sampled_from(["", "", "id", "eos", "string", "both", "late"]),
        kv=st.sampled_from(["", "", "", "", "", "from", "from", "to"]),
        kv_tokens=st.integers(0, 40),
        logprobs=st.sampled_from([None, 0]),
        new_id=st.sampled_from([True, True, True, False]),
        beam_width=st.sampled_from([1, 1, 1, 2, 3]),
    )
    def submit(
        self,
        length: int,
        family: int,
        divergence: int,
        max_tokens: int,
        n: int,
        seed: int | None,
        priority: int,
        cache_prefix: bool,
        salt: str,
        stops: str,
        kv: str,
        kv_tokens: int,
        logprobs: int | None,
        new_id: bool,
        beam_width: int,
    ) -> None:
        self.count += new_id
        if beam_width > 1:
            n, seed, kv = 1, None, kv if kv == "from" else ""
            stops = {"string": "eos", "both": "id"}.get(stops, stops)
        if n > 1 and seed is None:
            seed = 5
        params = SamplingParams(
            max_tokens=max_tokens,
            min_tokens=min(3, max_tokens) if stops == "late" else 0,
            n=n,
            seed=seed,
            temperature=0.0 if seed is None else 1.0,
            stop=("end",) if stops in ("string", "both", "late") and beam_width == 1 else (),
            stop_token_ids=(7,) if stops in ("id", "both", "late") else (),
            logprobs=logprobs,
            beam_width=beam_width,
        )
        request = Request(
            id=f"r{self.count}",
            prompt=make_prompt(length, family, divergence),
            params=params,
            priority=priority,
            arrival=self.world.now,
            eos_token_ids=(4,) if stops == "eos" else (),
            cache_salt=salt,
            cache_prefix=cache_prefix,
            kv_from=KVSource(handle="prefiller", num_tokens=kv_tokens) if kv == "from" else None,
            kv_to="decoder" if kv == "to" else None,
        )
        self.world.submit(request)

    @rule(seconds=st.sampled_from([0.0, 0.5, 2.0]), times=st.integers(1, 3))
    def launch(self, seconds: float, times: int) -> None:
        self.world.now += seconds
        for _ in range(times):
            if not isinstance(self.world.launch(), StepPlan):
                break

    @precondition(lambda self: self.world.core.outstanding)
    @rule(fail_row=st.sampled_from([None] * 15 + [0, 1]))
    def finish_step(self, fail_row: int | None) -> None:
        self.world.finish_step(fail_row)

    @precondition(lambda self: self.world.core.has_work)
    @rule(times=st.integers(1, 6))
    def go_on(self, times: int) -> None:
        for _ in range(times):
            if self.world.core.has_work:
                self.world.advance()

    @precondition(lambda self: self.world.transfers())
    @rule(which=st.integers(0, 7), ok=st.sampled_from([True, True, False]))
    def end_transfer(self, which: int, ok: bool) -> None:
        transfers = self.world.transfers()
        self.world.end_transfer(transfers[which % len(transfers)], ok)

    @precondition(lambda self: self.count)
    @rule(back=st.integers(0, 4))
    def abort(self, back: int) -> None:
        self.world.abort(f"r{max(0, self.count - back)}")

    @rule()
    def restore(self) -> None:
        self.world.restore()

    def teardown(self) -> None:
        global _events_run
        if hasattr(self, "world"):
            self.world.drain()
            _events_run += len(self.world.events)


CoreLife.TestCase.settings = settings(
    max_examples=170,
    stateful_step_count=60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
TestCoreLife = CoreLife.TestCase


@pytest.mark.parametrize("scheduler", sorted(SCHEDULERS))
def test_long_lives(scheduler: str) -> None:
    """The same world without hypothesis' overhead: hundreds of events a life, 12 lives a scheduler."""
    global _events_run
    accepted = copies = swapped = forks = 0
    for life in range(12):
        windows = ((None,),) if life % 2 else WINDOWS
        world = live(scheduler, random.Random(f"{scheduler}-{life}"), 250, windows)
        _events_run += len(world.events)
        accepted += world.memory.drafts_accepted
        copies += world.memory.copies_made
        swapped += world.memory.blocks_swapped_in
        forks += world.memory.forks_made
    assert accepted > 20, "drafts must have been accepted, or the lives test nothing about them"
    assert copies > 2, "samples must have been forked"
    assert forks > 5, "beams must have been forked"
    assert swapped, "sequences must have come back from host memory"


def live(
    scheduler: str, rng: random.Random, num_events: int, windows: Sequence[tuple[int | None, ...]] = ((None,),)
) -> World:
    block_size = rng.choice([0, 1, 2, 3, 4, 8, 16, 64])
    groups = rng.choice(windows) if block_size else (None,)
    limits = Limits(
        max_num_seqs=rng.choice([1, 2, 4, 8]),
        max_num_batched_tokens=rng.choice([1, 3, 8, 64, 64]),
        max_model_len=rng.choice([8, 24, 40]),
        num_blocks=rng.choice([1, 2, 3, 4, 5, 6, 7, 8, 8, 20]) * rng.choice([1, 1, len(groups)]),
        max_outstanding=rng.choice([1, 1, 2, 3]),
        num_host_blocks=rng.choice([0, 3, 20, 20]),
    )
    if block_size % 2 == 0:  # steps go through a pipeline
        limits = replace(limits, num_stages=limits.max_outstanding)
    world = World(
        SCHEDULERS[scheduler](),
        make_cache(block_size, rng.random() < 0.8),
        limits,
        lazy=rng.random() < 0.5,
        strict=scheduler in SOUND,
        max_drafts=rng.choice([0, 1, 4]),
        windows=groups,
    )
    count = 0
    while len(world.events) < num_events:
        world.now += rng.random()
        luck = rng.random()
        if luck < 0.2 and (len(world.core.waiting) < 6 or luck < 0.02):
            count += rng.random() < 0.9
            seed = rng.choice([None, 3, 4])
            n = rng.choice([1, 1, 1, 2, 3]) if seed is not None else 1
            beam_width = rng.choice([1, 1, 2, 3]) if seed is None else 1
            params = SamplingParams(
                max_tokens=rng.randint(1, 12),
                n=n,
                seed=seed,
                temperature=0.0 if seed is None else 1.0,
                stop=rng.choice([(), (), ("end",)]) if beam_width == 1 else (),
                stop_token_ids=rng.choice([(), (), (7,)]),
                logprobs=rng.choice([None, 0]),
                beam_width=beam_width,
            )
            world.submit(
                Request(
                    id=f"r{count}",
                    prompt=make_prompt(rng.choice(LENGTHS), rng.randrange(3), rng.choice([2, 6, 100, 100])),
                    params=params,
                    priority=rng.randrange(3),
                    arrival=world.now,
                    cache_salt=rng.choice(["", "", "", "salt"]),
                    cache_prefix=rng.random() < 0.9,
                    kv_from=KVSource(handle="prefiller", num_tokens=rng.randint(0, 40)) if rng.random() < 0.2 else None,
                    kv_to="decoder" if rng.random() < 0.1 and beam_width == 1 else None,
                )
            )
        elif 0.2 <= luck < 0.24:
            world.abort(rng.choice(list(world.core.requests) or ["nobody"]))
        elif luck < 0.6 and world.core.outstanding:
            world.finish_step(0 if rng.random() < 0.01 else None)
        elif luck < 0.65 and world.transfers():
            world.end_transfer(rng.choice(world.transfers()), rng.random() < 0.7)
        elif 0.65 <= luck < 0.66:
            world.restore()
        else:
            world.launch()
    world.drain()
    return world


def test_enough_events_were_run() -> None:
    """Runs last in this file: the lives above were at least the promised number of steps."""
    if not _events_run:
        pytest.skip("run together with the rest of this file")
    assert _events_run >= STEPS_WANTED
