"""Synthetic requests: lengths from a distribution, tokens from arithmetic.

Invariants
* Only `random.Random.random()` is drawn from (its sequence is fixed across Python versions); every
  distribution is made from it here.
* Lengths and arrivals use separate streams: changing the rate does not change the lengths.
* `range` prompts cost no memory and slice in O(1). The start differs for the first `vocab_size`
  requests, the step after that, so prompts share no prefix by accident.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from twinfer.core.technique import Technique
from twinfer.core.workload import DEFAULT_NUM_REQUESTS, Draft, Setting, Workload

_STRIDE = 7919  # a prime: start tokens of neighbours lie far apart and do not repeat early


class PoissonArrivals(Technique):
    """Base of sources: arrivals as a Poisson process of `workload.rate`."""

    def arrivals(self, workload: Workload, num: int) -> Sequence[float]:
        assert workload.rate is not None
        rng = random.Random(f"arrivals/{workload.seed}")
        times, now = [], 0.0
        for _ in range(num):
            times.append(now)
            now -= math.log1p(-rng.random()) / workload.rate
        return times


class Synthetic(PoissonArrivals):
    name = "synthetic"
    summary = "prompts and answers of chosen lengths (fixed, uniform, lognormal), Poisson arrivals"

    @classmethod
    def accepts(cls, workload: Workload) -> bool:
        return not (workload.trace or workload.prompts or workload.prompt_tokens)

    def drafts(self, workload: Workload, setting: Setting) -> Sequence[Draft]:
        rng = random.Random(f"lengths/{workload.seed}")
        prefixes = [
            _tokens(g, workload.seed, workload.shared_prefix, setting.vocab_size) for g in range(workload.num_prefixes)
        ]
        drafts = []
        for i in range(workload.num_requests or DEFAULT_NUM_REQUESTS):
            num_in = max(_length(workload, workload.input_len, rng), workload.shared_prefix + 1)
            num_out = _length(workload, workload.output_len, rng)
            own = _tokens(i + workload.num_prefixes, workload.seed, num_in - workload.shared_prefix, setting.vocab_size)
            prompt: Sequence[int] = own
            if workload.shared_prefix:
                prompt = (*prefixes[i % workload.num_prefixes], *own)
            drafts.append(Draft(prompt, num_out))
        return drafts


def _length(workload: Workload, mean: int, rng: random.Random) -> int:
    """One length of at least 1 token; the distribution's mean is `mean` (before rounding)."""
    if workload.lengths == "uniform":
        return max(1, round(mean * (1 + workload.spread * (2 * rng.random() - 1))))
    if workload.lengths == "lognormal":
        # Box-Muller; exp(s*z - s^2/2) has mean 1
        z = math.sqrt(-2 * math.log1p(-rng.random())) * math.cos(2 * math.pi * rng.random())
        return max(1, round(mean * math.exp(workload.spread * z - workload.spread**2 / 2)))
    return mean


def _tokens(number: int, seed: int, length: int, vocab_size: int) -> Sequence[int]:
    """`length` token ids below `vocab_size` that no other `number` of this seed starts with."""
    start = (number * _STRIDE + seed * 104729 + 1) % vocab_size
    step = 1 + (number // vocab_size) % max(1, vocab_size - 1)
    if start + (length - 1) * step < vocab_size:
        return range(start, start + length * step, step)
    if start - (length - 1) * step >= 0:
        return range(start, start - length * step, -step)
    return tuple((start + j * step) % vocab_size for j in range(length))
