"""How likely guesses are right: given, or measured and read from a file.

A measurement is a JSON file with one of
    "acceptance"   share of the checked drafts whose guess 1, 2, ... stayed, as serving engines report it by position
    "chances"      chance that a guess is right, its parent being right: by depth, a number or one number a rank
    "metrics"      a run's record (`record.json`): what its speculation came to
and anything else, such as "source", beside it.

Invariants
* The chances of one depth add up to at most one: only one token can be right.
* Candidates of whose rank nothing is known share what is left: each is right with the chance `again`, those before it being wrong.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twinfer.core.errors import ConfigError
from twinfer.core.params import is_finite

_KEYS = ("acceptance", "chances", "metrics")


@dataclass(frozen=True, slots=True)
class Acceptance:
    """known: chance by depth (from 1), by rank (from the likeliest). again: of a further candidate, those before it being wrong."""

    known: tuple[tuple[float, ...], ...]
    again: float = 0.0

    def __post_init__(self) -> None:
        for depth, ranks in enumerate(self.known, 1):
            if not ranks or any(not 0 <= chance <= 1 for chance in ranks) or math.fsum(ranks) > 1 + 1e-9:
                raise ValueError(
                    f"at depth {depth} the chances are {', '.join(f'{c:g}' for c in ranks) or 'none'}: they lie in 0 to 1 and "
                    "add up to at most 1, as only one token can be right"
                )

    def __str__(self) -> str:
        tops = list(dict.fromkeys(ranks[0] for ranks in self.known))
        return (
            f"{tops[0]:.2f} at each depth" if len(tops) == 1 else ", ".join(f"{ranks[0]:.2f}" for ranks in self.known)
        )

    @property
    def depth(self) -> int:
        return len(self.known)

    def chance(self, depth: int, rank: int = 0) -> float:
        """That the candidate of this rank is right at `depth`, its parent being right."""
        ranks = self.known[depth - 1]
        if rank < len(ranks):
            return ranks[rank]
        return max(0.0, 1 - math.fsum(ranks)) * self.again * (1 - self.again) ** (rank - len(ranks))


def by_depth(given: Sequence[float | Sequence[float]], again: float = 0.0) -> Acceptance:
    """From one number, or one number a rank, for each depth. Raises ValueError."""
    return Acceptance(tuple(tuple(d) if isinstance(d, Sequence) else (float(d),) for d in given), again)


def measured(path: str, depth: int, again: float = 0.0) -> Acceptance:
    """The first `depth` depths of the file `path`. Raises ConfigError that names the file."""

    def wrong(why: str) -> ConfigError:
        return ConfigError(
            "--speculator", f"profile={path}", why,
            'give a JSON file such as {"acceptance": [0.7, 0.5, 0.3]}: the share of drafts whose guess 1, 2, ... stayed',
        )  # fmt: skip

    try:
        content = json.loads(Path(path).expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise wrong(f"cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise wrong(f"is not valid JSON ({error})") from None
    there = [key for key in _KEYS if isinstance(content, Mapping) and key in content]
    if len(there) != 1:
        raise wrong(f"has {' and '.join(there) or 'none'} of {', '.join(_KEYS)}, one belongs there")
    try:
        if there == ["chances"]:
            known = by_depth([_numbers(entry) for entry in _list(content["chances"])], again)
        else:
            stayed = content["acceptance"] if there == ["acceptance"] else _of_run(content["metrics"])
            known = by_depth(_conditional([float(_numbers(entry)) for entry in _list(stayed)]), again)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise wrong(str(error)) from None
    if known.depth < depth:
        raise wrong(f"knows {known.depth} depths, {depth} tokens are guessed")
    return Acceptance(known.known[:depth], again)


def _list(value: Any) -> Sequence[Any]:
    if not isinstance(value, list) or not value:
        raise ValueError("a list with one entry a depth belongs there")
    return value


def _numbers(value: Any) -> float | list[float]:
    if isinstance(value, list):
        return [float(_numbers(entry)) for entry in value]  # type: ignore[arg-type]
    if not is_finite(value):
        raise ValueError(f"{value!r} is no number")
    return float(value)


def _of_run(metrics: Any) -> list[Any]:
    """Shares by position from the metrics of a run."""
    found = metrics.get("speculation") if isinstance(metrics, Mapping) else None
    if not isinstance(found, Mapping):
        raise ValueError("that run checked no guesses")
    return [found[key] for key in (f"position_{i}" for i in range(1, len(found) + 1)) if key in found]


def _conditional(stayed: Sequence[float]) -> list[float]:
    """Chance at each depth, those before being right, from the share of drafts that came so far."""
    if any(not 0 <= share <= 1 for share in stayed) or any(a < b for a, b in itertools.pairwise(stayed)):
        raise ValueError(
            "shares by position lie in 0 to 1 and do not rise: a guess counts only where those before it were right"
        )
    return [now / before if before else 0.0 for before, now in itertools.pairwise((1.0, *stayed))]


__all__ = ["Acceptance", "by_depth", "measured"]
