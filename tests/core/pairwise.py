"""Cases that bring every pair of feature settings together at least once (all-pairs testing, Cohen et al., TSE 1997)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Case = dict[str, Any]
Pair = tuple[tuple[str, Any], tuple[str, Any]]
Valid = Callable[[Case], bool]
"""Whether a case, complete or not, breaks no rule among the features it has."""


def wanted_pairs(factors: Mapping[str, Sequence[Any]], valid: Valid) -> list[Pair]:
    """Every two settings of different features that may stand together, in a fixed order."""
    found: list[Pair] = []
    for a, b in itertools.combinations(factors, 2):
        found += [((a, x), (b, y)) for x in factors[a] for y in factors[b] if valid({a: x, b: y})]
    return found


def pairs_of(case: Case) -> set[Pair]:
    return set(itertools.combinations(case.items(), 2))


def pairwise(factors: Mapping[str, Sequence[Any]], valid: Valid) -> list[Case]:
    """Cases that cover `wanted_pairs`; greedy, the same for the same factors.

    Raises ValueError for a pair that is valid by itself but fits no complete case.
    """
    missing = dict.fromkeys(wanted_pairs(factors, valid))
    cases: list[Case] = []
    while missing:
        pair = next(iter(missing))
        case = _complete(dict(pair), factors, valid, missing)
        if case is None:
            raise ValueError(f"{pair} fits no case")
        for covered in pairs_of(case):
            missing.pop(covered, None)
        cases.append(case)
    return cases


def _complete(
    begun: Case, factors: Mapping[str, Sequence[Any]], valid: Valid, missing: Mapping[Pair, None]
) -> Case | None:
    """`begun` with all features, each set so that it covers what is missing; backs up where a rule forbids all."""
    open_factors = [name for name in factors if name not in begun]
    if not open_factors:
        return {name: begun[name] for name in factors}
    name = open_factors[0]

    def gain(value: Any) -> int:
        new = [
            ((a, x), (name, value)) if _before(a, name, factors) else ((name, value), (a, x)) for a, x in begun.items()
        ]
        return sum(pair in missing for pair in new)

    for value in sorted(factors[name], key=gain, reverse=True):
        grown = begun | {name: value}
        if valid(grown):
            case = _complete(grown, factors, valid, missing)
            if case is not None:
                return case
    return None


def _before(a: str, b: str, factors: Mapping[str, Sequence[Any]]) -> bool:
    names = list(factors)
    return names.index(a) < names.index(b)
