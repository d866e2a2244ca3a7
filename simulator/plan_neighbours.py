"""Why nothing cheaper will do: the fleets just below the answer's price, and the limit that each of them meets.

    the answer's design with a replica less; every design that differs from it in one axis only; of every other device type
    the design that came out best, or was screened: each with the most replicas that cost less than the answer

Invariants
* A reason is a trial that failed with at least so many replicas (more replicas never break a promise), a bound, or what
  memory says. Without one nothing is said: what was not tried is not called too small.
* Fleets are compared by price; where the answer has none, by number of devices, on its own device type.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from twinfer.core.device import DeviceSpec
from twinfer.core.goal import Goal
from twinfer.simulator.plan_answer import next_limit
from twinfer.simulator.plan_designs import Design, label_of
from twinfer.simulator.plan_search import Found, missed, why_not
from twinfer.simulator.plan_trial import ASSESS, FLEET, SCREEN, Outcome, Trial

MOST = 12  # fleets that are told of


def cheaper_fleets(
    best: Found,
    found: Mapping[str, Found],
    designs: Sequence[Design],
    devices: Mapping[str, DeviceSpec],
    points: Iterable[tuple[Trial, Outcome]],
    goals: Sequence[Goal],
) -> list[dict[str, Any]]:
    """Rows `fleet`, `cost_per_hour`, `num_devices`, `why`: the dearest of those below the answer first, its own design
    before all others."""
    assert best.design is not None
    price = devices[best.design.device].price_per_hour
    limit = best.num_devices * (1.0 if price is None else price)
    failed: dict[int, list[tuple[Trial, Outcome]]] = {}
    bounds: dict[int, Outcome] = {}
    for trial, outcome in points:
        if trial.level == ASSESS:
            bounds[trial.design] = outcome
            continue
        as_asked = trial.level in (SCREEN, FLEET) and (trial.load, trial.steps, trial.bandwidth) == (1.0, 1.0, 1.0)
        if as_asked and not outcome.keeps(goals):
            failed.setdefault(trial.design, []).append((trial, outcome))
    own: list[dict[str, Any]] = []  # the answer's design with a replica less, if it has one to spare
    rows: list[dict[str, Any]] = []
    for design in _neighbours(best.design, found, designs):
        unit_price = devices[design.device].price_per_hour
        if (
            design.config is None
            or (price is None) != (unit_price is None)
            or (price is None and design.device != best.device)
        ):
            continue
        unit = design.num_devices * (1.0 if unit_price is None else unit_price)
        most = _below(limit, unit)
        why = "" if most < 1 else _why(design, most, failed.get(design.index, []), bounds.get(design.index), goals)
        if why:
            cost = None if unit_price is None else unit * most
            row = {
                "fleet": label_of(design, most),
                "num_devices": most * design.num_devices,
                "cost_per_hour": cost,
                "why": why,
            }
            (own if design is best.design else rows).append(row)
    return own + sorted(rows, key=lambda r: -(r["cost_per_hour"] or r["num_devices"]))[: MOST - len(own)]


def _below(limit: float, unit: float) -> int:
    """The most units that cost less than `limit`."""
    if unit <= 0:
        return 0
    most = int(limit / unit) + 1
    while most and most * unit > limit * (1 - 1e-9):
        most -= 1
    return most


def _neighbours(best: Design, found: Mapping[str, Found], designs: Sequence[Design]) -> list[Design]:
    chosen = [best]
    for design in designs:
        different = [name for name, value in design.changes.items() if str(value) != str(best.changes.get(name))]
        if different and len(different) == 1 and design.device == best.device:
            chosen.append(design)
    for name, item in found.items():
        if name != best.device:
            other = item.design or (item.screened[0].design if item.screened else None)
            chosen += [other] if other is not None else []
    return chosen


def _why(
    design: Design, most: int, failed: Sequence[tuple[Trial, Outcome]], bound: Outcome | None, goals: Sequence[Goal]
) -> str:
    """Why `most` replicas of `design` are too few, or why it does not work at all; "" when that is not known."""
    if bound is not None and bound.problem:
        return bound.problem
    known = [(t.level != FLEET, t.replicas, t.seed, o) for t, o in failed if t.replicas >= most]
    if known:
        _, replicas, _, outcome = min(known, key=lambda item: item[:3])
        words = why_not(outcome, goals, replicas)
        broken = "" if outcome.problem or outcome.failed else missed(outcome, goals)
        if broken and replicas > most:  # tried with more of them than the row has
            words = f"even with {replicas} replicas, which cost no less, {broken}"
        cause = next_limit(outcome, goals, design).partition(": ")[2] if broken else ""
        return f"{words}: {cause}" if cause else words
    if bound is not None and bound.fewest > most:
        return f"{bound.fewest} replicas are needed at least, however well they run"
    return ""


__all__ = ["cheaper_fleets"]
