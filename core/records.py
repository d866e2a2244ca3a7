"""One schema for every run, real or predicted, and the only place where metrics are defined.

Definitions (vLLM's)
* TTFT: arrival to first token.  TPOT: (last - first token) / (output tokens - 1), for more than one token that did
  not all come at once (as those of a beam search do).
* ITL: gap between successive deliveries of tokens of one request (of all that a step gave: with speculation longer than
  TPOT).  E2E: arrival to last token.
* throughput: tokens (or requests) completed / (last finish - first arrival).
* KV waste: 1 - used slots / reserved slots, averaged over steps, weighted by their duration.
* prefix cache hits: prompt tokens found in the cache when a request was first admitted / prompt tokens.

Invariants
* Engine and simulator fill the same fields; a field that was not measured is None, never 0.
* A record of a cancelled run is valid: `complete` is False and its metrics cover what finished.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from twinfer.core.plan import PlanStats

SCHEMA_VERSION = 1


@dataclass(slots=True, kw_only=True)
class StepRecord:
    """One step. Times in s from the run's start; blocks of cache group 0."""

    step: int
    start: float
    seconds: float
    sigma: float = 0.0
    num_rows: int = 0
    num_tokens: int = 0
    num_decode_rows: int = 0  # rows that feed one token
    num_context_tokens: int = 0  # KV tokens the rows attend to at the end of the step
    running: int = 0
    waiting: int = 0
    held_blocks: int = 0
    idle_blocks: int = 0
    total_blocks: int = 0
    used_slots: int = 0  # that hold a token when the step ends: those it writes are in use while it runs
    block_size: int = 1
    preempted: int = 0
    swapped_out_blocks: int = 0  # KV moved to host memory
    swapped_in_blocks: int = 0
    ops: Mapping[str, float] = field(default_factory=dict)  # seconds by op name
    replica: int = 0  # of a fleet
    rank: int = 0  # of the replica: its data-parallel group


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """One sample of a request. Times in s from the run's start, None when it did not happen."""

    request_id: str
    index: int = 0
    arrival: float
    first_scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    finished: float | None = None
    reason: str | None = None  # stop | length | abort | capacity | error | rejected
    detail: str = ""
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0  # found in the prefix cache at the latest admission: its own too, after a preemption
    num_hit_tokens: int = 0  # of the prompt, found at the first admission
    num_preemptions: int = 0
    num_swaps: int = 0  # preemptions that kept the KV in host memory
    itl: list[float] = field(default_factory=list)
    replica: int = 0  # of a fleet: the one that ended it

    @property
    def ttft(self) -> float | None:
        return None if self.first_token is None else self.first_token - self.arrival

    @property
    def e2e(self) -> float | None:
        return None if self.last_token is None else self.last_token - self.arrival

    @property
    def tpot(self) -> float | None:
        if self.first_token is None or self.last_token is None or self.last_token == self.first_token:
            return None
        if self.num_output_tokens < 2:  # logs of other engines may take the end of a request for its last token
            return None
        return (self.last_token - self.first_token) / (self.num_output_tokens - 1)


@dataclass(slots=True, kw_only=True)
class RunRecord:
    """A whole run.

    world: "engine" or "simulator".  config: the resolved EngineConfig as plain data.
    workload: what was asked for.  environment: versions, host, device, seed.
    kv_bytes_per_token: of a token slot in the KV pool; where windows make cache groups, a token takes one per group.
    reasons: what "auto" became, and why.  intervals: metric -> (low, high) of an 80 % band (predictions).
    """

    id: str
    world: str
    created: str  # ISO 8601, UTC
    config: dict[str, Any]
    workload: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    kv_bytes_per_token: float = 0.0
    steps: list[StepRecord] = field(default_factory=list)
    requests: list[RequestRecord] = field(default_factory=list)
    metrics: dict[str, Any] = field(default_factory=dict)
    intervals: dict[str, tuple[float, float]] = field(default_factory=dict)
    complete: bool = True
    schema_version: int = SCHEMA_VERSION
    name: str = ""

    @property
    def begun(self) -> bool:
        """Whether any request was in a step: a run that was stopped earlier has nothing to say."""
        return any(request.first_scheduled is not None for request in self.requests)


PERCENTILES = (50, 90, 95, 99)


def percentile(ordered: Sequence[float], q: float) -> float:
    """Linear-interpolation percentile (numpy's default) of values already sorted."""
    if not ordered:
        raise ValueError("percentile of nothing")
    rank = (len(ordered) - 1) * q / 100
    low = int(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def summary(values: Sequence[float]) -> dict[str, float] | None:
    """mean, p50, p90, p95, p99 in the unit of `values`; None for no values."""
    if not values:
        return None
    ordered = sorted(values)
    return {"mean": sum(ordered) / len(ordered), **{f"p{q}": percentile(ordered, q) for q in PERCENTILES}}


def kv_waste(steps: Sequence[StepRecord]) -> float | None:
    """Share of reserved KV slots that hold no token, weighted by step duration; None when none was reserved."""
    reserved = sum(s.held_blocks * s.block_size * s.seconds for s in steps)
    used = sum(s.used_slots * s.seconds for s in steps)
    return None if reserved <= 0 else 1 - used / reserved


class Spread:
    """A distribution kept as a histogram: its mean is exact, its percentiles are within 0.3 % of the value."""

    PER_OCTAVE = 512  # bins

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        self._bins: dict[int, int] = {}

    def add(self, value: float, times: int) -> None:
        """`value`, `times` times."""
        self.count += times
        self.total += value * times
        place = int(math.log2(value) * self.PER_OCTAVE + (1 << 16)) if value > 0 else -1
        self._bins[place] = self._bins.get(place, 0) + times

    def merge(self, other: Spread) -> None:
        """All that `other` has been given, too."""
        self.count += other.count
        self.total += other.total
        for place, times in other._bins.items():
            self._bins[place] = self._bins.get(place, 0) + times

    def summary(self) -> dict[str, float] | None:
        """As `summary` of all values."""
        if not self.count:
            return None
        bins = sorted(self._bins.items())
        found = {"mean": self.total / self.count}
        for q in PERCENTILES:
            rank = (self.count - 1) * q / 100
            low = int(rank)
            below, above = self._at(bins, low), self._at(bins, min(low + 1, self.count - 1))
            found[f"p{q}"] = below + (above - below) * (rank - low)
        return found

    def _at(self, bins: Sequence[tuple[int, int]], rank: int) -> float:
        """The value that has `rank` smaller ones."""
        passed = place = 0
        for place, times in bins:  # noqa: B007
            passed += times
            if passed > rank:
                break
        return 2 ** ((place - (1 << 16) + 0.5) / self.PER_OCTAVE) if place >= 0 else 0.0


FLAT = 1.003
"""Steps in a row whose lengths differ by less than this are counted by their mean in the distribution of gaps."""


class Tally:
    """What the metrics need of steps and of gaps between tokens, where they are too many to be kept."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.busy = 0.0  # seconds of all steps
        self.reserved = 0.0  # slot-seconds
        self.used = 0.0
        self.peak = 0  # reserved slots
        self.gaps = Spread()

    def step(self, seconds: float, stats: PlanStats, used_slots: int) -> None:
        reserved = stats.held_blocks * stats.block_size
        self.num_steps += 1
        self.busy += seconds
        self.reserved += reserved * seconds
        self.used += used_slots * seconds
        self.peak = max(self.peak, reserved)

    def run(self, times: Sequence[float], stats: PlanStats, count: int, taken: Sequence[int] = ()) -> None:
        """Steps that began and ended at `times`, each with a token more of `count` sequences.

        stats: of the first.  taken: steps before which one more block was taken.
        """
        steps, end = len(times) - 1, times[-1]
        seconds = end - times[0]
        reserved = stats.held_blocks * stats.block_size
        self.num_steps += steps
        self.busy += seconds
        self.reserved += reserved * seconds
        # sum of (i + 1) * (times[i + 1] - times[i])
        self.used += stats.used_slots * seconds + count * ((steps + 1) * end - math.fsum(times))
        if taken:
            self.reserved += stats.block_size * math.fsum([end - times[step] for step in taken])
            reserved += stats.block_size * len(taken)
        self.peak = max(self.peak, reserved)
        self._gaps(times, 0, steps, count)

    def _gaps(self, times: Sequence[float], at: int, till: int, count: int) -> None:
        """Gaps of steps `at` to `till` (exclusive), together where the first, the last and their mean tell that all are alike."""
        steps = till - at
        first, last, mean = times[at + 1] - times[at], times[till] - times[till - 1], (times[till] - times[at]) / steps
        if steps == 1 or max(first, last, mean) <= min(first, last, mean) * FLAT:
            self.gaps.add(mean, count * steps)
        else:
            middle = (at + till) // 2
            self._gaps(times, at, middle, count)
            self._gaps(times, middle, till, count)

    def merge(self, other: Tally) -> None:
        """The steps of another replica, too."""
        self.num_steps += other.num_steps
        self.busy += other.busy
        self.reserved += other.reserved
        self.used += other.used
        self.peak += other.peak
        self.gaps.merge(other.gaps)


def compute_metrics(record: RunRecord, tally: Tally | None = None) -> dict[str, Any]:
    """All metrics of a run from its steps and requests (see the definitions above); steps and gaps from `tally` if given.

    Throughputs are per second, latencies in seconds, `peak_kv_bytes` in bytes.
    """
    done = [r for r in record.requests if r.reason in ("stop", "length")]
    seen = [r for r in record.requests if r.num_output_tokens]
    metrics: dict[str, Any] = {
        "num_requests": len(record.requests),
        "num_completed": len(done),
        "output_tokens": sum(r.num_output_tokens for r in seen),
        "prompt_tokens": sum(r.num_prompt_tokens for r in seen),
        "num_preemptions": sum(r.num_preemptions for r in record.requests),
        "num_swaps": sum(r.num_swaps for r in record.requests),
        "num_steps": len(record.steps) if tally is None else tally.num_steps,
    }
    duration = None
    if seen:
        end = max(r.last_token for r in seen if r.last_token is not None)
        duration = end - min(r.arrival for r in record.requests)
    metrics["duration"] = duration
    rate = None if not duration else 1 / duration
    out, prompt = metrics["output_tokens"], metrics["prompt_tokens"]
    metrics["output_throughput"] = None if rate is None else out * rate
    metrics["total_throughput"] = None if rate is None else (out + prompt) * rate
    metrics["request_throughput"] = None if rate is None else len(done) * rate
    metrics["ttft"] = summary([r.ttft for r in seen if r.ttft is not None])
    metrics["tpot"] = summary([r.tpot for r in seen if r.tpot is not None])
    metrics["itl"] = summary([gap for r in seen for gap in r.itl]) if tally is None else tally.gaps.summary()
    metrics["e2e"] = summary([r.e2e for r in done if r.e2e is not None])
    if tally is None:
        peak = max((s.held_blocks * s.block_size for s in record.steps), default=None)
    else:
        peak = tally.peak if tally.num_steps else None
    metrics["peak_kv_bytes"] = None if peak is None else peak * record.kv_bytes_per_token
    if tally is None:
        metrics["kv_waste"] = kv_waste(record.steps)
    else:
        metrics["kv_waste"] = 1 - tally.used / tally.reserved if tally.reserved > 0 else None
    hits = sum(r.num_hit_tokens for r in seen)
    metrics["prefix_cache_hit_rate"] = hits / prompt if prompt else None
    return metrics
