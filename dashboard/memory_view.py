"""What the Memory page shows of a scenario: ranks, pool, curves, changes that would help; no streamlit, no charts.

Invariants
* Every number is `core.memory`'s, the same that `twinfer memory`, the engine and the simulator use.
* What does not fit is measured all the same: `budget` is None, `problem` says why, `ranks` are there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from twinfer.core.cache_groups import Paging
from twinfer.core.catalog import resolve_spec
from twinfer.core.config import Choice, EngineConfig
from twinfer.core.device import all_devices, load_device
from twinfer.core.dtypes import dtype_bits
from twinfer.core.errors import DoesNotFit, TwinferError
from twinfer.core.memory import Fix, MemoryBudget, rank_equations, trials
from twinfer.core.memory_fixes import suggestions
from twinfer.core.memory_parts import RankMemory, fullest
from twinfer.core.provision import Placement, place
from twinfer.core.registry import Registry
from twinfer.core.spec import ModelSpec
from twinfer.core.workload import generate
from twinfer.dashboard.scenario import Scenario

SAMPLED = 256  # requests whose lengths stand for the workload's
POINTS_PER_OCTAVE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """KV of one sequence on one rank: `lengths` in tokens, `sizes` in bytes."""

    label: str
    lengths: Sequence[int]
    sizes: Sequence[float]
    chosen: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryView:
    """Memory of a scenario on its device. wanted: tokens of the longest request. fixes: single changes that were tried
    because it does not fit."""

    placed: Placement
    config: EngineConfig
    spec: ModelSpec
    paging: Paging
    ranks: tuple[RankMemory, ...]
    budget: MemoryBudget | None
    problem: str
    wanted: int
    fixes: Sequence[Fix] = ()
    curves: Sequence[Curve] = field(default_factory=tuple)

    @property
    def rank(self) -> RankMemory:
        """The rank that decides."""
        return fullest(self.ranks, self.paging.block_size)

    def request_bytes(self, rank: RankMemory) -> float:
        """KV of the longest request on a rank, whole blocks."""
        return self.paging.pages(self.wanted) * self.paging.block_size * rank.per_slot

    def segments(self, rank: RankMemory) -> dict[str, float]:
        """What a rank holds, bottom up; without a pool, the KV of one request stands for it."""
        if self.budget is not None:
            return dict(self.budget.segments(rank))
        parts = {
            "weights": float(rank.weights), "activations": float(rank.activations), "libraries": float(rank.libraries),
            "states": rank.states, "kv": self.request_bytes(rank), "runtime": float(rank.runtime), "graphs": float(rank.graphs),
        }  # fmt: skip
        return parts | {"unused": max(0.0, rank.memory - sum(parts.values()))}

    def pairs(self) -> Sequence[Fix]:
        """Two changes at once that make room, where no single one does."""
        question = self.placed.question(self.wanted, lambda: all_devices(self.placed.registry))
        return suggestions(question)

    def equations(self, rank: RankMemory) -> Mapping[str, tuple[str, Any]]:
        """Arithmetic and value of a rank's numbers."""
        texts = rank_equations(self.spec, self.config, rank, self.paging.block_size)
        values = {
            "kv_bytes_per_token": rank.per_token, "weight_bytes": rank.weights,
            "activation_bytes": rank.activations, "bytes_per_block": self.paging.block_size * rank.per_slot,
            "num_blocks": self.config.dp * rank.blocks(self.paging.block_size),
        }  # fmt: skip
        if self.budget is not None and (self.config.num_kv_blocks or self.config.kv_memory_bytes):
            values["num_blocks"] = self.budget.num_blocks
        return {name: (text, values[name]) for name, text in texts.items()}


def memory_view(scenario: Scenario, registry: Registry) -> MemoryView:
    """Raises TwinferError for a scenario that cannot be at all (not for one that does not fit)."""
    config, spec = scenario.config(), resolve_spec(scenario.model)
    device = load_device(scenario.device, registry)
    lengths = request_lengths(scenario, spec, registry)
    longest = max(lengths)
    placed = place(config, spec, registry, device, world="simulator", max_request_tokens=longest)
    wanted = config.max_model_len or min(longest, placed.model.max_context)
    question = placed.question(wanted, lambda: all_devices(registry))
    ranks = question.ranks()
    budget, problem, fixes = None, "", []
    try:
        budget = placed.budget(max_request_tokens=longest, expected_lengths=lengths)
    except DoesNotFit as error:
        problem = f"{error.problem}."
        fixes = trials(question)
    return MemoryView(
        placed=placed, config=question.config, spec=question.spec, paging=question.paging, ranks=ranks, budget=budget,
        problem=problem, wanted=wanted, fixes=fixes, curves=_curves(scenario, placed, registry, wanted),
    )  # fmt: skip


def request_lengths(scenario: Scenario, spec: ModelSpec, registry: Registry) -> tuple[int, ...]:
    """Prompt plus answer of the workload's requests, of a sample where there are many."""
    workload = scenario.edited(num_requests=min(scenario.num_requests, SAMPLED)).workload()
    requests = generate(
        workload, spec.vocab_size, scenario.max_model_len or spec.max_context, registry=registry, vision=spec.vision
    )
    return tuple(r.max_length for r in requests)


def _curves(scenario: Scenario, placed: Placement, registry: Registry, wanted: int) -> list[Curve]:
    """KV against context: as chosen, with another KV format, and as other attention variants."""
    top = max(placed.model.max_context, wanted, 1024)
    lengths = sorted({wanted, top, *_octaves(256, top)})
    model = placed.model
    found = [_curve(f"yours ({model.variant}, {model.kv_dtype})", scenario, registry, lengths, chosen=True)]
    other = "fp8" if dtype_bits(model.kv_dtype) > 8 else "bfloat16"
    found.append(_curve(f"KV in {other}", scenario.edited(kv_dtype=other, quantizer=None), registry, lengths))
    for name in registry.names("attention"):
        if name != model.variant:
            found.append(_curve(name, scenario.edited(attention=Choice(name=name)), registry, lengths))
    yours = found[0].sizes if found[0] is not None else ()
    return [curve for curve in found if curve is not None and (curve.chosen or curve.sizes != yours)]


def _curve(
    label: str, scenario: Scenario, registry: Registry, lengths: Sequence[int], chosen: bool = False
) -> Curve | None:
    """None where the scenario cannot be."""
    try:
        config, spec = scenario.config(), resolve_spec(scenario.model)
        placed = place(config, spec, registry, load_device(scenario.device, registry), world="simulator")
        question = placed.question(lengths[-1])
        ranks = question.ranks()
    except TwinferError:
        return None
    per_slot = max(rank.per_slot for rank in ranks)
    paging = question.paging
    # blocks of a token: a curve, not steps; windows are kept
    smooth = Paging(min(paging.block_size, 16), paging.groups)
    sizes = [smooth.pages(n) * smooth.block_size * per_slot for n in lengths]
    return Curve(label=label, lengths=lengths, sizes=sizes, chosen=chosen)


def _octaves(low: int, high: int) -> list[int]:
    found, value = [], float(low)
    while value < high:
        found.append(round(value))
        value *= 2 ** (1 / POINTS_PER_OCTAVE)
    return found
