"""A prefix cache with tiers behind it, as Mooncake's (arXiv:2407.00079): where the KV of a conversation waits for its next turn."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from what_if_runs import OP_TIME, metric, ms, table

from twinfer.core.config import Choice, EngineConfig
from twinfer.core.errors import ConfigError, ModelError
from twinfer.core.fleet import Fleet
from twinfer.core.records import RunRecord
from twinfer.core.workload import Workload
from twinfer.simulator.fleet_run import simulate_fleet

MODEL = "llama-3.1-8b"
TURNS: dict[str, Any] = {"num_requests": 2000, "turns": 8, "think_time": 10.0, "input_len": 1024, "output_len": 128}
RATE = 4.0
BLOCKS = 6000  # of 16 tokens on each replica: a pool that conversations outgrow
SHARED = 1_000_000_000_000


def served(rate: float = RATE, **fleet: Any) -> RunRecord | None:
    """Four replicas that answer conversations of eight turns; None where that cannot be set up."""
    engine = EngineConfig(
        model=MODEL, device="h100-sxm", op_time=tuple(OP_TIME), max_num_batched_tokens=8192, num_kv_blocks=BLOCKS
    )
    try:
        return simulate_fleet(
            Fleet(engine=engine, replicas=4, **fleet), Workload(rate=rate, seed=1, **TURNS), bands=False,
            detail="requests",
        )  # fmt: skip
    except (ConfigError, ModelError) as error:
        print(f"{fleet}: {error}", file=sys.stderr)
        return None


def cells(record: RunRecord | None) -> list[str]:
    loaded = None if record is None else record.metrics.get("tier_bytes", 0) / 1e9
    return [
        metric(record, "prefix_cache_hit_rate", "", 100), ms(record, "ttft", "p50", 0), ms(record, "ttft", "p95", 0),
        ms(record, "tpot", "p50"), "" if not loaded else f"{loaded:,.0f} GB",
    ]  # fmt: skip


def prefix_tiers() -> None:
    """A prefix cache with tiers: host memory, or a store for all replicas?"""
    options: dict[str, dict[str, Any]] = {
        "device memory, in turn": {}, "device memory, prefix-aware router": {"router": Choice(name="prefix_aware")},
        "and 64 GB of host memory": {"router": Choice(name="prefix_aware"), "host_tier_bytes": 64_000_000_000},
        "and 256 GB of host memory": {"router": Choice(name="prefix_aware"), "host_tier_bytes": 256_000_000_000},
        "a store for all, in turn": {"shared_tier_bytes": SHARED},
    }  # fmt: skip
    head = ["prefix hits, %", "TTFT p50 ms", "TTFT p95 ms", "TPOT p50 ms", "KV loaded"]
    table(
        ["where KV is kept", *head], ([name, *cells(served(**more))] for name, more in options.items()),
        f"Llama-3.1-8B, 4 H100 SXM with room for {BLOCKS * 16:,} tokens each; {TURNS['num_requests']:,} turns of conversations of "
        f"eight, each turn adds 1,024 tokens and is answered with 128, ten seconds after the answer before; {RATE:g} new conversations/s:",
    )  # fmt: skip

    speeds = (2e9, 4e9, 6e9, 8e9, 16e9)
    table(
        ["GB/s of a replica", *head],
        ([f"{speed / 1e9:g}", *cells(served(shared_tier_bytes=SHARED, kv_bandwidth=speed))] for speed in speeds),
        "A store for all replicas, by the speed at which a replica reaches it:",
    )  # fmt: skip

    def by_load() -> Iterable[list[str]]:
        for rate in (1.0, 2.0, 4.0, 6.0, 8.0):
            both = [served(rate), served(rate, shared_tier_bytes=SHARED)]
            yield [
                f"{rate:g}", *(metric(r, "prefix_cache_hit_rate", "", 100) for r in both),
                *(ms(r, "ttft", "p50", 0) for r in both), *(ms(r, "ttft", "p95", 0) for r in both),
            ]  # fmt: skip

    table(
        ["conversations/s", "hits, %: device alone", "with a store", "TTFT p50 ms: device alone", "with a store",
         "TTFT p95 ms: device alone", "with a store"], by_load(), "By load, replicas in turn:",
    )  # fmt: skip
