"""What to change when a model does not fit: each suggestion is computed, none assumed, cheapest first.

Invariants
* A suggested change (or pair of changes) makes room for the request in question by the same arithmetic that found no
  room, or it is not suggested; what was tried and does not suffice is known with the bytes that are still missing.
* What the world that asks would refuse is not tried: `Adapt` answers None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import TYPE_CHECKING, Any

from twinfer.core.cache_groups import Paging, one_group
from twinfer.core.config import Choice, EngineConfig
from twinfer.core.dtypes import dtype_bits
from twinfer.core.errors import ConfigError, DoesNotFit
from twinfer.core.memory_parts import UNBOUNDED, RankMemory, Room, fullest, gib, heaviest_rank, ranks_of
from twinfer.core.spec import ModelSpec

if TYPE_CHECKING:
    from twinfer.core.device import DeviceSpec

Adapt = Callable[[Mapping[str, Any]], ModelSpec | None]
"""The model in the configuration with these fields changed; None where a technique or the world that asks refuses."""

Others = Callable[[], Sequence["DeviceSpec"]]
"""Devices that could be taken instead."""

INT4_BITS = 4 + 16 / 128  # a float16 scale per 128 weights
MOST_PAIRS = 4  # suggestions when no single change suffices
MOST_DEVICES = 2


@dataclass(frozen=True, slots=True)
class Fix:
    """A change that makes the model fit; `cost` orders them (0 costs nothing, 7 and more cost devices).

    updates: fields of the configuration.  spare: bytes left beside one request on the rank that has least; what is
    missing where negative, and then it is no fix.
    """

    change: str
    effect: str
    cost: float
    updates: Mapping[str, Any] = field(default_factory=dict)
    spare: float = 0.0

    @property
    def fits(self) -> bool:
        return self.spare >= 0

    def __str__(self) -> str:
        return f"{self.change} ({self.effect})"


@dataclass(frozen=True, slots=True)
class Question:
    """What is to fit where: one request of `wanted` tokens of a model in a configuration on a device."""

    spec: ModelSpec
    config: EngineConfig
    room: Room
    paging: Paging
    wanted: int
    adapt: Adapt | None = None
    device: DeviceSpec | None = None
    others: Others | None = None
    engine: bool = False  # only what the engine has

    def ranks(self) -> tuple[RankMemory, ...]:
        """As things are."""
        return ranks_of(self.spec, self.config, self.room, self.paging)

    def tried(self, change: _Change) -> Fix | None:
        """What `change` does, None when it is refused."""
        config = self.config.model_copy(update=dict(change.updates))
        spec = self._adapted(change, config)
        if spec is None:
            return None
        try:
            ranks = ranks_of(spec, config, self.room, self.paging)
            if change.device is not None:
                device = change.device.placed(heaviest_rank(spec, config.layout))
                ranks = ranks_of(spec, config, Room.of(device), self.paging)
            rank = fullest(ranks, self.paging.block_size)
        except ConfigError:  # groups that cannot share the model
            return None
        blocks = rank.blocks(self.paging.block_size)
        if config.num_kv_blocks is not None:
            blocks = min(blocks, config.num_kv_blocks // config.dp)
        held = self.paging.longest(blocks, max(self.wanted, spec.max_context))
        spare = rank.left - self.paging.pages(self.wanted) * self.paging.block_size * rank.per_slot
        if held >= self.wanted:  # whole blocks decide
            effect, spare = f"then {held} tokens fit{change.price}", max(spare, 0.0)
        else:
            spare = min(spare, -1.0)
            effect = f"{gib(-spare)} still missing"
        return Fix(change.text, effect, change.cost, change.updates, spare)

    def _adapted(self, change: _Change, config: EngineConfig) -> ModelSpec | None:
        formats = {"quantizer", "kv_dtype"} & change.updates.keys()
        if not formats:
            return self.spec
        if self.adapt is not None:
            return self.adapt(change.updates)
        spec = self.spec
        if "kv_dtype" in formats:
            spec = replace(spec, kv_dtype=config.kv_dtype, kv_scale_bytes=0.0)
        if "quantizer" in formats:
            bits = {"fp8": 8.0, "int4": INT4_BITS}.get(config.quantizer.name if config.quantizer else "")
            spec = replace(spec, weight_bits=bits)
        return spec


@dataclass(frozen=True, slots=True)
class _Change:
    text: str
    cost: float
    updates: Mapping[str, Any]
    device: DeviceSpec | None = None
    price: str = ""

    def __and__(self, other: _Change) -> _Change:
        return _Change(
            f"{self.text} {other.text}", self.cost + other.cost, {**self.updates, **other.updates},
            self.device or other.device, self.price or other.price,
        )  # fmt: skip


def does_not_fit(q: Question, rank: RankMemory, slots: int) -> ConfigError:
    """The error for a pool of `slots` tokens on `rank` that cannot hold one request, with what would help.

    `DoesNotFit`, or a plain ConfigError where the size of the pool was given, too small.
    """
    config, wanted = q.config, q.wanted
    pages = q.paging.pages(wanted)
    size = pages * q.paging.block_size * rank.per_slot
    request = f"one request of {wanted} tokens needs {gib(size)}"
    if config.num_kv_blocks is not None:
        return ConfigError(
            "--num-kv-blocks", config.num_kv_blocks, f"the pool holds {slots} tokens and {request}",
            f"use at least {pages * config.dp} or --max-model-len {max(slots, 2)}",
        )  # fmt: skip
    if config.kv_memory_bytes is not None:
        least = int(-(-size // 1))
        return ConfigError(
            "--kv-memory-bytes", config.kv_memory_bytes, f"the pool holds {slots} tokens and {request}",
            f"use at least {least}" + (f" or --max-model-len {slots}" if slots >= 2 else ""),
        )  # fmt: skip
    fixes = suggestions(q)
    states = f", states {gib(rank.states)}" if rank.states else ""
    where = f" on stage {rank.stage + 1}" if rank.num_stages > 1 else ""
    taken = (
        f"weights take {gib(rank.weights)}, activations {gib(rank.activations)}, libraries {gib(rank.libraries)}{states} of "
        f"{gib(rank.ceiling)}{where}"
    )
    option, value = ("--max-model-len", wanted) if config.max_model_len else ("--model", q.spec.name)
    problem = f"{request}, {gib(max(0.0, rank.left))} is left for KV ({taken})"
    if rank.kv_most < rank.free:
        problem = f"{request}, KV takes at most {gib(rank.kv_most)} on a CPU unless told otherwise"
    return DoesNotFit(
        option, value, problem,
        "try " + ", or ".join(map(str, fixes)) if fixes else "no single change makes it fit; use a device with more memory",
    )  # fmt: skip


def fixes_for(
    spec: ModelSpec,
    config: EngineConfig,
    device_memory_bytes: int,
    *,
    runtime_bytes: int = 0,
    graph_bytes: int = 0,
    paging: Paging | None = None,
    wanted: int | None = None,
    own_memory: bool = True,
) -> list[Fix]:
    """Single changes with which one request of `wanted` tokens fits, cheapest first; each is computed, none assumed.

    own_memory: every rank has memory of its own; where all share one machine's, more ranks make no room.
    """
    room = Room(device_memory_bytes, runtime_bytes, graph_bytes, own=own_memory)
    paging = paging or Paging(16, one_group(spec.num_layers))
    wanted = wanted or config.max_model_len or spec.max_context
    return suggestions(Question(spec, config, room, paging, wanted), pairs=False)


def suggestions(q: Question, pairs: bool = True) -> list[Fix]:
    """Changes that make room, cheapest first: single ones, or where none suffices the cheapest pairs."""
    fixes = [fix for fix in trials(q) if fix.fits]
    if fixes or not pairs:
        return fixes
    found = []
    for one, other in combinations(_changes(q), 2):
        if not one.updates.keys() & other.updates.keys():
            fix = q.tried(one & other)
            if fix is not None and fix.fits:
                found.append(fix)
    return sorted(found, key=lambda fix: fix.cost)[:MOST_PAIRS]


def trials(q: Question) -> list[Fix]:
    """Every single change that is not refused, cheapest first, with what it leaves or lacks.

    Of more ranks only the fewest that suffice, of larger devices the two that cost least.
    """
    found: list[Fix] = []
    for change in _changes(q):
        enough = [fix for fix in found if fix.fits]
        if {"tp", "pp"} & change.updates.keys() and any("tp" in fix.updates for fix in enough):
            continue
        if change.device is not None and sum("device" in fix.updates for fix in enough) == MOST_DEVICES:
            continue
        fix = q.tried(change)
        if fix is not None:
            found.append(fix)
    rank = fullest(q.ranks(), q.paging.block_size)
    shorter = q.paging.longest(rank.blocks(q.paging.block_size), max(q.wanted, q.spec.max_context))
    if 2 <= shorter < q.wanted:
        found.append(Fix(f"--max-model-len {shorter}", f"instead of {q.wanted}", 3, {"max_model_len": shorter}))
    return sorted(found, key=lambda fix: fix.cost)


def _changes(q: Question) -> Iterator[_Change]:
    """Changes worth a try, in the order of their cost; formats only where they are narrower than what is there."""
    spec, config = q.spec, q.config
    if q.room.kv_most < UNBOUNDED and config.num_kv_blocks is None and config.kv_memory_bytes is None:
        blocks = q.paging.pages(q.wanted) * config.dp
        yield _Change(f"--num-kv-blocks {blocks}", 0, {"num_kv_blocks": blocks})
    if config.memory_fraction < 0.95:
        yield _Change("--memory-fraction 0.95", 0, {"memory_fraction": 0.95})
    if config.max_num_batched_tokens > 512:
        yield _Change("--max-num-batched-tokens 512", 1, {"max_num_batched_tokens": 512})
    if config.max_num_seqs > 64:
        yield _Change("--max-num-seqs 64", 1, {"max_num_seqs": 64})
    if dtype_bits(spec.kv_dtype) > 8 and not q.engine:
        yield _Change("--kv-dtype fp8", 2, {"kv_dtype": "fp8"})
    if config.quantizer is None:
        for cost, name in ((4, "fp8"), (4.5, "int8"), (5, "int4")):
            if spec.block_bits > {"fp8": 8.0, "int8": 8.5, "int4": INT4_BITS}[name] and (q.adapt or name != "int8"):
                yield _Change(f"--quant {name}", cost, {"quantizer": Choice(name=name)})
    if q.device is not None and q.others is not None and not q.engine:
        here = q.device
        larger = (d for d in q.others() if d.kind == here.kind and d.usable_bytes > here.usable_bytes)
        for device in sorted(larger, key=lambda d: (d.price_per_hour is None, d.price_per_hour or 0, d.usable_bytes)):
            price = "" if device.price_per_hour is None else f", US$ {device.price_per_hour:.2f} per device and hour"
            yield _Change(f"--device {device.name}", 6, {"device": device.name}, device, price)
    if q.room.own:
        for factor, cost in ((2, 7), (4, 8), (8, 9)):
            more: dict[str, Any] = {"tp": config.tp * factor}
            if config.num_devices is not None:
                more["num_devices"] = config.num_devices * factor
            yield _Change(f"--tp {config.tp * factor}", cost, more)
        if not q.engine:
            more = {"pp": config.pp * 2}
            if config.num_devices is not None:
                more["num_devices"] = config.num_devices * 2
            yield _Change(f"--pp {config.pp * 2}", 7.5, more)
