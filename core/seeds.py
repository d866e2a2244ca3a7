"""Sampling keys: the same request draws the same numbers whatever runs beside it.

`sequence_seed` names a sample; `draw(seed, position)` is the random number of one position (the sampler
in the runtime uses it). splitmix64's finaliser (Steele, Lea, Flood 2014) mixes well and is ten lines.
"""

from __future__ import annotations

_MASK = (1 << 64) - 1


def mix(value: int) -> int:
    """splitmix64 finaliser: a 64-bit permutation."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def sequence_seed(request_seed: int | None, engine_seed: int, number: int, index: int) -> int:
    """63-bit seed of sample `index`; without a request seed it depends on the engine's seed and the arrival number."""
    if request_seed is not None:
        return mix(mix(request_seed) ^ index) >> 1
    return mix(mix(mix(engine_seed) ^ 0x5EED) ^ number) >> 1


def draw(seed: int, position: int) -> float:
    """Uniform in [0, 1) with 53 random bits, keyed by (seed, position)."""
    return (mix(mix(seed) ^ position) >> 11) * 2.0**-53
