"""Where the memory of a replica goes, rank by rank, and how many KV blocks that leaves.

    device memory
    |<------------------- memory_fraction ------------------->|        headroom         |
    | weights | activations | libraries | states | KV blocks   | runtime | graphs | unused |

The same function serves engine, simulator, CLI and dashboard, so that they cannot disagree.

Invariants
* Numbers are bytes of *one* rank; of several unlike ones (pipeline stages), of the one that has room for the fewest
  blocks. It decides how many blocks all have; data-parallel attention groups have as many each.
* Every number that is shown has an equation in `equations` that evaluates to it, for every rank.
* Without `groups` every layer keeps every token; with them, sequences hold what `Paging.pages` says.
* Concurrency is given twice and never mixed: all requests at `max_model_len`, and at expected lengths.
* What does not fit is a ConfigError with the changes that would make it fit, cheapest first, each computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from twinfer.core.cache_groups import CacheGroup, Paging, one_group
from twinfer.core.config import EngineConfig
from twinfer.core.dtypes import dtype_bytes
from twinfer.core.errors import ConfigError
from twinfer.core.layout import Layout
from twinfer.core.memory_fixes import Adapt, Fix, Others, Question, does_not_fit, fixes_for, trials
from twinfer.core.memory_parts import (
    UNBOUNDED,
    RankMemory,
    Room,
    activation_bytes,
    activation_equation,
    cut,
    fullest,
    gib,
    ranks_of,
)
from twinfer.core.spec import ModelSpec

if TYPE_CHECKING:
    from twinfer.core.device import DeviceSpec

__all__ = [
    "Adapt", "Fix", "MemoryBudget", "Others", "activation_bytes", "budget_on", "fixes_for", "memory_budget", "question_on",
    "rank_equations", "trials",
]  # fmt: skip

SHORTEST_CONTEXT = 2048  # tokens that a suggested change must make room for when no length was asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """Memory of the rank that decides, in bytes unless the name says otherwise; `ranks` has one of every kind.

    kv_bytes: left for KV on it; its pool takes whole blocks of it (`kv_pool_bytes`).
    num_blocks: of the replica, those of all data-parallel groups.
    worst_case_concurrency: requests that fit if all are `max_model_len` long.
    expected_concurrency: requests that fit at the lengths given, None when none were; both are what memory
    allows, whatever `max_num_seqs` says.
    """

    device_memory_bytes: int
    memory_fraction: float
    weight_bytes: int
    activation_bytes: int
    library_bytes: int
    state_bytes: float
    runtime_bytes: int
    graph_bytes: int
    kv_bytes: float
    kv_dtype: str
    kv_bytes_per_token: float
    kv_heads_per_rank: int
    block_size: int
    groups: tuple[CacheGroup, ...]
    bytes_per_block: float
    num_blocks: int
    max_model_len: int
    worst_case_concurrency: float
    expected_concurrency: float | None
    layout: Layout
    ranks: tuple[RankMemory, ...]
    equations: Mapping[str, str]
    reasons: Mapping[str, str] = field(default_factory=dict)

    @property
    def tp(self) -> int:
        return self.layout.tp

    @property
    def budget_bytes(self) -> float:
        """What the engine may use of the device."""
        return self.device_memory_bytes * self.memory_fraction

    @property
    def blocks_per_rank(self) -> int:
        """Blocks of one data-parallel group, which one request must fit in."""
        return self.num_blocks // self.layout.dp

    @property
    def kv_pool_bytes(self) -> float:
        """Of the rank that decides."""
        return self.blocks_per_rank * self.bytes_per_block

    @property
    def kv_tokens(self) -> int:
        """Tokens that the pools hold of sequences that have not outgrown any window."""
        return self.num_blocks * self.block_size // len(self.groups)

    @property
    def equation(self) -> str:
        """Arithmetic of `num_blocks`; evaluates to it."""
        return self.equations["num_blocks"]

    def segments(self, rank: RankMemory | None = None) -> list[tuple[str, float]]:
        """Device memory from the bottom up, for a stacked bar; sums to `device_memory_bytes`.

        rank: another one than that which decides; its pool has the same number of blocks.
        """
        r = rank or fullest(self.ranks, self.block_size)
        parts: list[tuple[str, float]] = [
            ("weights", r.weights), ("activations", r.activations), ("libraries", r.libraries), ("states", r.states),
            ("kv", self.blocks_per_rank * (self.block_size * r.per_slot)), ("runtime", r.runtime), ("graphs", r.graphs),
        ]  # fmt: skip
        return [*parts, ("unused", self.device_memory_bytes - sum(size for _, size in parts))]


def memory_budget(
    spec: ModelSpec,
    device_memory_bytes: int,
    config: EngineConfig,
    *,
    block_size: int = 16,
    groups: Sequence[CacheGroup] = (),
    runtime_bytes: int = 0,
    graph_bytes: int = 0,
    expected_lengths: Sequence[int] = (),
    max_request_tokens: int | None = None,
    own_memory: bool = True,
) -> MemoryBudget:
    """Budget of a replica laid out as `config.layout`, for a spec that techniques have already adapted.

    block_size: tokens per KV block.  groups: cache groups of the layers, none for one of all.  runtime_bytes, graph_bytes: of the device (`DeviceSpec`).
    expected_lengths: prompt plus output tokens of typical requests.  max_request_tokens: the longest request,
    when known; without `max_model_len` the context is the least of it, the model's and what the pool holds.
    own_memory: every rank has memory of its own (not on a CPU).
    Raises ConfigError when the pool would be smaller than one request, or a pinned size cannot exist.
    """
    room = Room(device_memory_bytes, runtime_bytes, graph_bytes, own=own_memory)
    q = _question(spec, room, config, block_size, groups)
    return _budget(q, expected_lengths, max_request_tokens)


def budget_on(
    spec: ModelSpec,
    device: DeviceSpec,
    config: EngineConfig,
    *,
    block_size: int = 16,
    groups: Sequence[CacheGroup] = (),
    expected_lengths: Sequence[int] = (),
    max_request_tokens: int | None = None,
    adapt: Adapt | None = None,
    others: Others | None = None,
    engine: bool = False,
) -> MemoryBudget:
    """`memory_budget` on a device: the memory a process can have there, its runtime, graphs and libraries.

    adapt, others, engine: for what is suggested when it does not fit, see `question_on`.
    """
    q = question_on(
        spec, device, config, block_size=block_size, groups=groups, adapt=adapt, others=others, engine=engine
    )
    return _budget(q, expected_lengths, max_request_tokens)


def question_on(
    spec: ModelSpec,
    device: DeviceSpec,
    config: EngineConfig,
    *,
    block_size: int = 16,
    groups: Sequence[CacheGroup] = (),
    wanted: int = 0,
    adapt: Adapt | None = None,
    others: Others | None = None,
    engine: bool = False,
) -> Question:
    """What is to fit on a device: `trials` says which changes would make room for a request of `wanted` tokens.

    adapt: the model under changed techniques.  others: gives the devices to consider instead.  engine: consider only what the
    engine has.
    """
    return _question(spec, Room.of(device), config, block_size, groups, wanted, adapt, device, others, engine)


def _question(
    spec: ModelSpec, room: Room, config: EngineConfig, block_size: int, groups: Sequence[CacheGroup], wanted: int = 0,
    adapt: Adapt | None = None, device: DeviceSpec | None = None, others: Others | None = None,
    engine: bool = False,
) -> Question:  # fmt: skip
    # a quantizer may have chosen the KV format; without one, an unadapted spec is fine too
    spec = spec.with_dtypes(config.dtype, "auto" if config.quantizer else config.kv_dtype)
    paging = Paging(block_size, tuple(groups or one_group(spec.num_layers)))
    return Question(spec, config, room, paging, wanted, adapt, device, others, engine)


def _budget(q: Question, expected_lengths: Sequence[int], max_request_tokens: int | None) -> MemoryBudget:
    spec, config, paging, room = q.spec, q.config, q.paging, q.room
    ranks = ranks_of(spec, config, room, paging)
    block_size, layout = paging.block_size, config.layout
    rank = fullest(ranks, block_size)
    reasons: dict[str, str] = {}
    if config.kv_memory_bytes is not None:  # equally much everywhere: the rank whose blocks are largest decides
        rank = max(ranks, key=lambda r: r.per_slot)
    per_block = block_size * rank.per_slot
    available, blocks = _pool(config, ranks, rank, block_size, reasons)
    slots = paging.longest(blocks, max(spec.max_context, config.max_model_len or 0))
    wanted = config.max_model_len
    if wanted is None:
        wanted = spec.max_context
        reasons["max_model_len"] = f"{wanted}: the model's context"
        if max_request_tokens is not None and max_request_tokens < wanted:
            wanted = max(2, max_request_tokens)
            reasons["max_model_len"] = f"{wanted}: the longest request"
        if 2 <= slots < wanted and max_request_tokens is None:
            wanted = slots
            reasons["max_model_len"] = (
                f"{slots}: all that the KV pool holds (the model's context is {spec.max_context})"
            )
    if blocks < 1 or slots < wanted:
        if config.max_model_len is None and max_request_tokens is None:
            wanted = min(spec.max_context, SHORTEST_CONTEXT)
        raise does_not_fit(replace(q, wanted=wanted), rank, slots)
    num_blocks = layout.dp * blocks
    per_request = paging.pages(wanted)
    expected = num_blocks * len(expected_lengths) / paging.pages_of(expected_lengths) if expected_lengths else None
    equations = rank_equations(spec, config, rank, block_size)
    equations["worst_case_concurrency"] = f"{num_blocks} / {paging.equation(wanted)}"
    if expected is not None:
        equations["expected_concurrency"] = (
            f"{num_blocks} * {len(expected_lengths)} / {paging.pages_of(expected_lengths)}"
        )
    return MemoryBudget(
        device_memory_bytes=room.memory, memory_fraction=config.memory_fraction, weight_bytes=rank.weights,
        activation_bytes=rank.activations, library_bytes=rank.libraries, state_bytes=rank.states,
        runtime_bytes=rank.runtime, graph_bytes=rank.graphs, kv_bytes=available, kv_dtype=spec.kv_dtype,
        kv_bytes_per_token=rank.per_token, kv_heads_per_rank=spec.kv_heads_per_rank(layout.tp), block_size=block_size,
        groups=paging.groups, bytes_per_block=per_block, num_blocks=num_blocks, max_model_len=wanted,
        worst_case_concurrency=num_blocks / per_request, expected_concurrency=expected, layout=layout, ranks=ranks,
        equations=equations, reasons=reasons,
    )  # fmt: skip


def _refuse_overfull(option: str, value: int, room: float) -> None:
    if room < 0:
        raise ConfigError(
            option, value, f"weights, activations and runtime alone are {gib(-room)} too large for the device",
            "lower --max-num-batched-tokens, raise --tp, or choose a larger device",
        )  # fmt: skip


def _pool(
    config: EngineConfig, ranks: Sequence[RankMemory], rank: RankMemory, block_size: int, reasons: dict[str, str]
) -> tuple[float, int]:
    """(bytes for KV on `rank`, blocks of one data-parallel group), pinned by the configuration or derived."""
    per_block = block_size * rank.per_slot
    least = min(ranks, key=lambda r: r.spare / r.per_slot if r.per_slot else UNBOUNDED)  # whatever the fraction
    room = least.spare
    if config.num_kv_blocks is not None:
        blocks = config.num_kv_blocks // config.dp
        if config.num_kv_blocks % config.dp:
            raise ConfigError(
                "--num-kv-blocks", config.num_kv_blocks, f"--dp {config.dp} groups have equally many blocks",
                f"give a multiple of {config.dp}",
            )  # fmt: skip
        size = blocks * block_size * least.per_slot
        _refuse_overfull("--num-kv-blocks", config.num_kv_blocks, room)
        if size > room:
            raise ConfigError(
                "--num-kv-blocks", config.num_kv_blocks,
                f"blocks of {block_size} tokens take {gib(size)}, weights, activations and runtime leave {gib(room)}",
                f"use at most {max(0, int(room // (block_size * least.per_slot))) * config.dp}",
            )  # fmt: skip
        reasons["num_kv_blocks"] = f"{config.num_kv_blocks}: pinned"
        return blocks * per_block, blocks
    if config.kv_memory_bytes is not None:
        room = min(r.spare for r in ranks)
        _refuse_overfull("--kv-memory-bytes", config.kv_memory_bytes, room)
        if config.kv_memory_bytes > room:
            raise ConfigError(
                "--kv-memory-bytes", config.kv_memory_bytes, f"weights, activations and runtime leave {gib(room)} of {gib(rank.memory)}",
                f"use at most {max(0, int(room))}",
            )  # fmt: skip
        reasons["num_kv_blocks"] = f"from kv_memory_bytes={config.kv_memory_bytes}"
        return float(config.kv_memory_bytes), int(config.kv_memory_bytes // per_block)
    left, blocks = max(0.0, rank.left), rank.blocks(block_size)
    if rank.kv_most < rank.free:
        reasons["num_kv_blocks"] = (
            f"{config.dp * blocks}: {rank.kv_most / 2**30:g} GiB{' a rank' if config.layout.devices > 1 else ''}, the "
            "default on a CPU (--kv-memory-bytes or --num-kv-blocks changes it)"
        )
        return left, blocks
    groups = f"{config.dp} groups x " if config.dp > 1 else ""
    stage = f" on {rank.name}" if rank.num_stages > 1 else ""
    reasons["num_kv_blocks"] = (
        f"{config.dp * blocks}: {groups}{gib(left)} left for KV{stage} / ({block_size} tokens x {rank.per_slot:g} B)"
    )
    return left, blocks


def rank_equations(spec: ModelSpec, config: EngineConfig, rank: RankMemory, block_size: int) -> dict[str, str]:
    """Arithmetic of a rank's numbers, by their names; kept free of names so that anyone can evaluate it.

    `num_blocks` is what all data-parallel groups had if every rank were like this one.
    """
    kv = dtype_bytes(spec.kv_dtype)
    heads, key, value = spec.kv_shape(config.tp)
    if spec.mla is not None and spec.mla.absorbed:
        values = f"({spec.mla.kv_lora_rank} + {spec.mla.qk_rope_head_dim}) * {kv!r}"
        scales = f" + {spec.kv_scale_bytes!r}" if spec.kv_scale_bytes else ""
    else:
        values = f"{heads} * ({key} + {value}) * {kv!r}"
        scales = f" + {heads} * 2 * {spec.kv_scale_bytes!r}" if spec.kv_scale_bytes else ""
    per_token = f"{rank.num_kv_layers} * ({values}{scales})"
    if rank.index_bytes:
        per_token += f" + {rank.index_bytes!r}"
    if config.cp > 1:
        per_token = f"({per_token}) / {config.cp}" if rank.index_bytes else f"{per_token} / {config.cp}"
    (linears, linear_bits), (routed, routed_bits), (tables, norms, other_bits) = rank.weight_params
    block = f"({block_size} * {rank.per_slot!r})"
    held = f"{rank.weights} + {rank.activations} + {rank.libraries}" + (f" + {rank.states!r}" if rank.states else "")
    ceiling = (
        f"{rank.memory} * {config.memory_fraction!r}"
        if rank.budget <= rank.memory - rank.outside
        else f"{rank.memory} - {rank.outside}"
    )
    groups = f"{config.dp} * " if config.dp > 1 else ""
    if config.num_kv_blocks is not None:
        blocks = f"{config.num_kv_blocks}"
    elif config.kv_memory_bytes is not None:
        blocks = f"{groups}int({config.kv_memory_bytes} // {block})"
    else:
        left = f"{ceiling} - ({held})"
        if rank.kv_most < rank.free:
            left = f"min({rank.kv_most}, {left})"
        blocks = f"{groups}int(max(0, {left}) // {block})"
    experts = f" + {routed!r} * {routed_bits!r}" if routed else ""
    last = rank.stage == rank.num_stages - 1
    return {
        "kv_bytes_per_token": per_token,
        "weight_bytes": f"int(({linears!r} * {linear_bits!r}{experts} + ({tables} + {norms}) * {other_bits!r}) / 8)",
        "activation_bytes": activation_equation(
            cut(spec, rank.layers), config.max_num_batched_tokens, config.max_num_seqs, config.layout, logits=last
        ),
        "bytes_per_block": f"{block_size} * {rank.per_slot!r}",
        "num_blocks": blocks,
    }
