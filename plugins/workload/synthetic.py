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
from collections.abc import Iterator, Sequence
from typing import overload

from twinfer.core.technique import Technique
from twinfer.core.workload import DEFAULT_NUM_REQUESTS, MAX_TOKENS, Workload
from twinfer.core.workload_source import Draft, Setting

_STRIDE = 7919  # a prime: start tokens of neighbours lie far apart and do not repeat early
_LONG = 256  # tokens beyond which a prompt is made when it is sliced


class PoissonArrivals(Technique):
    """Base of sources: gaps from a gamma distribution of mean 1 / rate (a Poisson process at burstiness 1)."""

    ignores: tuple[str, ...] = ()

    def made_up(self, number: int, length: int, workload: Workload, setting: Setting) -> Sequence[int]:
        """A prompt of `length` tokens that no other `number` starts with."""
        return _tokens(number, workload.seed, length, setting.vocab_size)

    def chances(self, stream: str, workload: Workload) -> Iterator[float]:
        """Numbers in [0, 1) without end, of a stream of their own."""
        rng = random.Random(f"{stream}/{workload.seed}")
        while True:
            yield rng.random()

    def arrivals(self, workload: Workload, num: int) -> Sequence[float]:
        """`num` times in s, the first 0; with `ramp_to` the rate changes in a straight line over the requests' time."""
        assert workload.rate is not None
        rng = random.Random(f"arrivals/{workload.seed}")
        times, passed = [], 0.0  # `passed`: expected arrivals so far
        for _ in range(num):
            times.append(_when(passed, num, workload.rate, workload.ramp_to))
            passed += _gamma(rng, workload.burstiness)
        return times


def _when(passed: float, num: int, rate: float, ramp_to: float | None) -> float:
    """Time at which `passed` arrivals are expected, of `num` in all while the rate goes from `rate` to `ramp_to`."""
    if ramp_to is None or ramp_to == rate:
        return passed / rate
    slope = (ramp_to - rate) * (ramp_to + rate) / (2 * num)  # the ramp lasts 2 num / (rate + ramp_to) seconds
    root = rate * rate + 2 * slope * passed
    if passed >= num:  # behind the ramp its last rate holds
        return 2 * num / (rate + ramp_to) + (passed - num) / ramp_to
    return (math.sqrt(root) - rate) / slope


def _gamma(rng: random.Random, shape: float) -> float:
    """A gamma variate of mean 1 (Marsaglia and Tsang 2000); exponential at shape 1."""
    if shape == 1:
        return -math.log1p(-rng.random())
    boost = 1.0
    k = shape
    if k < 1:
        boost = (1 - rng.random()) ** (1 / k)
        k += 1
    d = k - 1 / 3
    c = 1 / math.sqrt(9 * d)
    while True:
        x = math.sqrt(-2 * math.log1p(-rng.random())) * math.cos(2 * math.pi * rng.random())
        v = (1 + c * x) ** 3
        if v > 0 and math.log1p(-rng.random()) < 0.5 * x * x + d - d * v + d * math.log(v):
            return boost * d * v / shape


class Synthetic(PoissonArrivals):
    name = "synthetic"
    summary = "prompts and answers of chosen lengths (fixed, uniform, lognormal), Poisson, bursty or ramped arrivals, or a closed loop"
    ignores = ("trace", "prompts")

    @classmethod
    def accepts(cls, workload: Workload) -> bool:
        return not (workload.trace or workload.prompts or workload.prompt_tokens)

    def drafts(self, workload: Workload, setting: Setting) -> Sequence[Draft]:
        rng = random.Random(f"lengths/{workload.seed}")
        prefixes = [
            _tokens(g, workload.seed, workload.shared_prefix, setting.vocab_size) for g in range(workload.num_prefixes)
        ]
        drafts = []
        asked = workload.num_requests or DEFAULT_NUM_REQUESTS
        turns = workload.turns or 1
        for i in range(asked):
            opens = i % turns == 0
            head = workload.shared_prefix if opens else 0  # later turns begin with all that was said before
            num_in = max(_length(workload, workload.input_len, rng), head + 1)
            num_out = _length(workload, workload.output_len, rng)
            prompt = _tokens(i + workload.num_prefixes, workload.seed, num_in - head, setting.vocab_size)
            if head:
                prompt = (*prefixes[i // turns % workload.num_prefixes], *prompt)
            drafts.append(Draft(prompt, num_out, session=f"s{i // turns}" if turns > 1 else None, shared=head))
        return drafts


def _length(workload: Workload, mean: int, rng: random.Random) -> int:
    """One length from 1 to MAX_TOKENS; the distribution's mean is `mean` (before rounding and cutting)."""
    if workload.lengths == "uniform":
        return max(1, round(mean * (1 + workload.spread * (2 * rng.random() - 1))))
    if workload.lengths == "lognormal":
        # Box-Muller; exp(s*z - s^2/2) has mean 1
        z = math.sqrt(-2 * math.log1p(-rng.random())) * math.cos(2 * math.pi * rng.random())
        return min(MAX_TOKENS, max(1, round(mean * math.exp(workload.spread * z - workload.spread**2 / 2))))
    return mean


def _tokens(number: int, seed: int, length: int, vocab_size: int) -> Sequence[int]:
    """`length` token ids below `vocab_size` that no other `number` of this seed starts with."""
    start = (number * _STRIDE + seed * 104729 + 1) % vocab_size
    step = 1 + (number // vocab_size) % max(1, vocab_size - 1)
    if start + (length - 1) * step < vocab_size:
        return range(start, start + length * step, step)
    if start - (length - 1) * step >= 0:
        return range(start, start - length * step, -step)
    if length > min(vocab_size, _LONG):
        return _Cycle(start, step, length, vocab_size)
    return tuple((start + j * step) % vocab_size for j in range(length))


class _Cycle(Sequence[int]):
    """Tokens of a prompt that goes round the vocabulary; they are made when sliced, so length costs no memory."""

    __slots__ = ("length", "start", "step", "vocab_size")

    def __init__(self, start: int, step: int, length: int, vocab_size: int) -> None:
        self.start, self.step, self.length, self.vocab_size = start, step, length, vocab_size

    def __len__(self) -> int:
        return self.length

    @overload
    def __getitem__(self, key: int) -> int: ...
    @overload
    def __getitem__(self, key: slice) -> list[int]: ...
    def __getitem__(self, key: int | slice) -> int | list[int]:
        places = range(self.length)[key]
        if isinstance(places, int):
            return (self.start + places * self.step) % self.vocab_size
        return [(self.start + j * self.step) % self.vocab_size for j in places]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(other) == self.length and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]
