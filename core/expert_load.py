"""Which experts tokens go to, in expectation: how many are touched, and how much the busiest rank gets.

    uniform      each token picks `top_k` of `num_experts`, all alike
    power law    loads of experts are drawn from a density ~ x^-skew on [1, 0.8 tokens], as the published kernel tables
                 draw them (AIConfigurator, arXiv:2601.06288); here its quantiles stand for the draw

    experts touched   sum over experts of 1 - (1 - p)^tokens        p = top_k / num_experts when uniform
    busiest of n      mean + z(n) * deviation                       z(n): expected maximum of n standard normals

Invariants
* Never more than all experts, never more pairs on a rank than tokens * min(top_k, its experts).
* Deterministic: expectations, no draws.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple


class RankLoad(NamedTuple):
    """What the busiest of the expert-parallel ranks is expected to get: pairs of token and expert, experts touched."""

    pairs: float
    touched: float


@lru_cache(maxsize=4096)
def experts_touched(num_experts: int, top_k: int, tokens: int, skew: float = 0.0) -> float:
    """Expected number of experts that at least one of `tokens` is routed to."""
    if not skew:
        return num_experts * (1.0 - (1.0 - top_k / num_experts) ** tokens)
    return math.fsum(1.0 - (1.0 - p) ** tokens for p in popularity(num_experts, top_k, tokens, skew))


@lru_cache(maxsize=4096)
def rank_load(num_experts: int, top_k: int, tokens: int, ranks: int, skew: float = 0.0) -> RankLoad:
    """Expected load of the busiest of `ranks` ranks that hold num_experts / ranks experts each.

    A token's experts fall on ranks without replacement, so that the pairs of a rank have the variance
    tokens * (top_k / ranks) * (1 - 1 / ranks) * (num_experts - top_k) / (num_experts - 1); the ranks' sum is fixed,
    which spreads the maximum by another 1 / sqrt(1 - 1 / ranks).
    """
    if ranks == 1:
        return RankLoad(float(tokens * top_k), experts_touched(num_experts, top_k, tokens, skew))
    here, mean = num_experts / ranks, tokens * top_k / ranks
    most = tokens * min(top_k, here)
    z = expected_maximum(ranks)
    drawn = mean * (num_experts - top_k) / max(1, num_experts - 1)
    if not skew:
        p = 1.0 - (1.0 - top_k / num_experts) ** tokens
        pairs = mean + z * math.sqrt(drawn)
        touched = here * p + z * math.sqrt(here * p * (1.0 - p))
    else:
        chosen = popularity(num_experts, top_k, tokens, skew)
        loads = [tokens * p for p in chosen]
        hit = [1.0 - (1.0 - p) ** tokens for p in chosen]
        pairs = max(mean + z * math.sqrt(here * _variance(loads) + drawn), loads[0])
        spread = here * (_variance(hit) + math.fsum(p * (1.0 - p) for p in hit) / num_experts)
        touched = math.fsum(hit) / ranks + z * math.sqrt(spread)
    pairs = min(pairs, most)
    return RankLoad(pairs, min(touched, here, pairs))


@lru_cache(maxsize=512)
def popularity(num_experts: int, top_k: int, tokens: int, skew: float) -> tuple[float, ...]:
    """Probability that a token goes to each expert, largest first; they sum to `top_k` and none exceeds 1."""
    low, high = (1.0, 0.8 * tokens) if tokens * top_k > num_experts else (0.01, 2.0)
    high = max(high, low * 1.001)
    power = 1.0 - skew
    shares = []
    for i in reversed(range(num_experts)):
        u = (i + 0.5) / num_experts
        if abs(power) < 1e-9:
            shares.append(low * (high / low) ** u)
        else:
            shares.append((low**power + (high**power - low**power) * u) ** (1.0 / power))
    capped, left = 0, math.fsum(shares)
    while True:  # the most wanted experts cannot get more than every token
        scale = (top_k - capped) / left if left > 0 else 0.0
        if capped >= num_experts or shares[capped] * scale <= 1.0:
            break
        left -= shares[capped]
        capped += 1
    return tuple(1.0 if i < capped else share * scale for i, share in enumerate(shares))


@lru_cache(maxsize=256)
def expected_maximum(n: int) -> float:
    """Expected largest of `n` independent standard normals."""
    step, total = 0.01, 0.0
    for i in range(1000):  # E max = integral over x > 0 of (1 - F(x)^n) - F(-x)^n
        x = (i + 0.5) * step
        below = 0.5 * math.erfc(x / math.sqrt(2))
        total += 1.0 - (1.0 - below) ** n - below**n
    return total * step


def _variance(values: list[float]) -> float:
    mean = math.fsum(values) / len(values)
    return math.fsum((v - mean) ** 2 for v in values) / max(1, len(values) - 1)


__all__ = ["RankLoad", "expected_maximum", "experts_touched", "popularity", "rank_load"]
