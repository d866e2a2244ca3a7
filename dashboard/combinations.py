"""What distinguishes a scenario from its baseline: techniques and limits one by one, all together, and their interaction.

Invariants
* A combination is a scenario like any other; no two of those that are shown have the same key.
* Options are compared as they are written: what stands at its default in both is no difference.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from twinfer.core.config import Choice
from twinfer.core.errors import TwinferError
from twinfer.core.registry import Registry
from twinfer.dashboard.scenario import KINDS, Scenario


@dataclass(frozen=True, slots=True)
class Combination:
    """The scenario with some of its techniques: the baseline, each alone, all together."""

    label: str
    scenario: Scenario
    role: str  # baseline | alone | without | all


@dataclass(frozen=True, slots=True)
class Switch:
    """One difference between the baseline and the scenario."""

    label: str
    changes: Mapping[str, Any]


_LIMIT_NAMES = {"max_num_seqs": "rows", "max_num_batched_tokens": "tokens per step"}


def switches(scenario: Scenario) -> list[Switch]:
    """What distinguishes the scenario from its baseline, one technique or limit at a time."""
    base = scenario.baseline()
    found = []
    for name in (*KINDS, *_LIMIT_NAMES):
        value, old = getattr(scenario, name), getattr(base, name)
        if value == old:
            continue
        if name in _LIMIT_NAMES:
            found.append(Switch(f"{value} {_LIMIT_NAMES[name]}", {name: value}))
        elif value is not None and (old is None or value.name != old.name):
            found.append(Switch(str(value), {name: value}))
        elif value is not None:
            changed = {k: v for k, v in value.options.items() if old.options.get(k) != v}
            label = ", ".join(f"{k}={_plain(v)}" for k, v in changed.items()) or f"{value.name} as shipped"
            found.append(Switch(label, {name: value}))
    return found


def flags(scenario: Scenario, registry: Registry) -> list[Switch]:
    """Each on/off option of the chosen techniques, turned the other way."""
    found = []
    for kind in KINDS:
        choice: Choice | None = getattr(scenario, kind)
        if choice is None:
            continue
        try:
            options = registry.get(kind, choice.name).Options
        except TwinferError:
            continue
        for name, info in options.model_fields.items():
            if info.annotation is not bool:
                continue
            now = choice.options.get(name, info.default)
            words = name.replace("_", " ")
            rest = {k: v for k, v in choice.options.items() if k != name}
            if (not now) != info.default:
                rest[name] = not now
            label = f"without {words}" if now else f"with {words}"
            found.append(Switch(label, {kind: Choice(name=choice.name, options=rest)}))
    return found


def combinations(scenario: Scenario, registry: Registry | None = None, limit: int = 8) -> list[Combination]:
    """Baseline, each technique alone on top of it, all of them, and all but each on/off option; no duplicates."""
    parts = switches(scenario)
    base = scenario.baseline()
    found = [Combination(f"Baseline: {base.techniques()}", base, "baseline")]
    if len(parts) > 1:
        found += [
            Combination(f"{part.label} alone", base.model_copy(update=dict(part.changes)), "alone") for part in parts
        ]
    if parts:
        together = "All: " if len(parts) > 1 else ""
        found.append(Combination(together + " + ".join(part.label for part in parts), scenario, "all"))
    if registry is not None:
        found += [
            Combination(f"Yours, {flag.label}", scenario.model_copy(update=dict(flag.changes)), "without")
            for flag in flags(scenario, registry)
        ]
    return _distinct(found)[:limit]


def _distinct(found: Iterable[Combination]) -> list[Combination]:
    seen: dict[str, Combination] = {}
    for combination in found:
        seen.setdefault(combination.scenario.key(), combination)
    return list(seen.values())


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def interaction(base: float | None, alone: Iterable[float | None], together: float | None) -> float | None:
    """Effect of all techniques beyond the product of their effects alone: together/base / prod(alone/base) - 1."""
    product = 1.0
    for value in alone:
        if value is None or not base:
            return None
        product *= value / base
    if together is None or not base or not product:
        return None
    return together / base / product - 1


__all__ = ["Combination", "Switch", "combinations", "flags", "interaction", "switches"]
