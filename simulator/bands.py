"""The 80 % band of each metric of a prediction (`RunRecord.intervals`).

Op times        errors are calibration errors: the same op is wrong by the same share in every step. They are taken as
                fully correlated, so a run's time is uncertain by r = sum(sigma) / sum(seconds) over its steps, however
                many they are. The band of every metric is what it would be with all steps slower and faster by 1.2816 r
                (80 % of a normal). When everything arrives at once, or clients wait for answers before they send again,
                all times scale; else the run is simulated again with slow and with fast steps, so that queueing is part
                of the band.
First tokens    hang on steps with prompts, whose ops are others than those of the many steps of answers: their r is that
                of such steps, where it is the larger one.
Alike clients   of a closed loop meet in the same way again and again: whether a request makes a step or just misses it is
                decided by less than anyone knows, and repeated with every answer. Real ones do it otherwise: from a request
                that always comes alone to one that always waits for one more step with a prompt.
Jitter          a first token hangs on few steps, which are disturbed one by one: where the device says by how much
                (`jitter_of`), the band of TTFT is wider by that over the root of their number.

Invariants
* A band holds its prediction. What a record lacks (steps, where there are too many) widens nothing.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping
from typing import Any

from twinfer.core.records import RunRecord

Bands = dict[str, tuple[float, float]]
Z80 = 1.2816  # half width of the middle 80 % of a normal, in standard deviations
_FALLS = ("output_throughput", "total_throughput", "request_throughput")  # with slower steps
_RISES = ("ttft", "tpot", "itl", "e2e", "duration")
_STILL = (
    "kv_waste",
    "peak_kv_bytes",
    "num_preemptions",
    "num_swaps",
    "prefix_cache_hit_rate",
)  # unless arrivals are spread


def bands_of(
    record: RunRecord,
    sigma: float,
    again: Callable[[float], RunRecord],
    scales: bool,
    concurrency: int | None,
    jitter: float,
) -> Bands:
    """80 % bands by dotted metric name, by the rules above.

    sigma: relative, of step times.  again: the run with all steps so many times as long.  scales: times of this run
    simply scale with those of its steps.  concurrency: clients of a closed loop.  jitter: relative standard deviation of
    single steps.
    """
    bands = _speed_bands(record, Z80 * sigma, again, scales)
    slow = 1 + Z80 * max(sigma, prompt_sigma(record))
    pattern = in_step(record, concurrency) if scales and concurrency else None
    for name, value in flat(record.metrics).items():
        if not name.startswith("ttft.") or name not in bands:
            continue
        low, high = bands[name]
        low, high = min(low, value / slow), max(high, value * slow)
        if pattern is not None:
            alone, step = pattern
            low, high = min(low, alone / slow), high + step * slow
        bands[name] = (low, high)
    return _with_jitter(bands, record, jitter)


def prompt_sigma(record: RunRecord) -> float:
    """Relative standard deviation of the steps that feed prompts; 0 where the record keeps none."""
    steps = [step for step in record.steps if step.num_tokens > step.num_decode_rows]
    seconds = math.fsum(step.seconds for step in steps)
    return math.fsum(step.sigma for step in steps) / seconds if seconds else 0.0


def in_step(record: RunRecord, concurrency: int) -> tuple[float, float] | None:
    """Of `concurrency` clients whose requests are all alike: the least TTFT that follows an answer, and s of a step with a
    prompt; None for one client, where requests differ, or where none follows an answer."""
    later = [r.ttft for r in record.requests[concurrency:] if r.ttft is not None]
    steps = [step.seconds for step in record.steps if step.num_tokens > step.num_decode_rows]
    kinds = {(r.num_prompt_tokens, r.num_output_tokens, r.index) for r in record.requests}
    if concurrency < 2 or not later or not steps or len(kinds) > 1:
        return None
    return min(later), math.fsum(steps) / len(steps)


def _speed_bands(record: RunRecord, width: float, again: Callable[[float], RunRecord], scales: bool) -> Bands:
    """What slower and faster steps make of each metric."""
    slow, fast = 1 + width, 1 / (1 + width)  # a ratio: equally likely too slow and too fast
    middle = flat(record.metrics)
    if scales:
        bands = {}
        for name, value in middle.items():
            head = name.partition(".")[0]
            if head in _RISES:
                bands[name] = (value * fast, value * slow)
            elif head in _FALLS:
                bands[name] = (value / slow, value / fast)
            elif head in _STILL:
                bands[name] = (value, value)
        return bands
    ends = []
    for scale in (slow, fast):
        other = again(scale)
        if not other.complete:
            return {}
        ends.append(flat(other.metrics))
    return {
        name: (min(value, *(e[name] for e in ends)), max(value, *(e[name] for e in ends)))
        for name, value in middle.items()
        if name.partition(".")[0] in (*_RISES, *_FALLS, *_STILL) and all(name in e for e in ends)
    }


def _with_jitter(bands: Bands, record: RunRecord, jitter: float) -> Bands:
    """`bands`, those of TTFT widened by what single steps are disturbed by (relative standard deviation)."""
    if not jitter:
        return bands
    starts = [step.start for step in record.steps]
    counts = sorted(
        bisect_left(starts, r.first_token) - bisect_left(starts, r.arrival)
        for r in record.requests
        if r.first_token is not None
    )
    share = Z80 * jitter / max(1, counts[len(counts) // 2] if counts else 1) ** 0.5
    for name, value in flat(record.metrics).items():
        if name.startswith("ttft.") and name in bands:
            low, high = bands[name]
            bands[name] = (
                value - math.hypot(value - low, share * value),
                value + math.hypot(high - value, share * value),
            )
    return bands


def flat(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Numbers of a metrics tree by dotted name (`ttft.p50`); what is missing is left out."""
    found: dict[str, float] = {}
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            found |= {f"{name}.{key}": v for key, v in value.items()}
        elif isinstance(value, int | float):
            found[name] = value
    return found
