"""Where the memory of one rank goes: weights, activations, runtime, graphs, and what is left for KV.

    device memory
    |<-------------- memory_fraction -------------->| headroom |
    | weights | activations | runtime | graphs | KV |

The same function serves engine, simulator, CLI and dashboard, so that they cannot disagree.

Invariants
* Numbers are bytes of *one* tensor-parallel rank. KV heads are split over ranks and replicated once ranks
  outnumber them.
* Every number that is shown has an equation in `equations` that evaluates to it.
* Without `groups` every layer keeps every token; with them, sequences hold what `Paging.pages` says.
* Concurrency is given twice and never mixed: all requests at `max_model_len`, and at expected lengths.
* What does not fit is a ConfigError with the changes that would make it fit, cheapest first, each computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from twinfer.core.cache_groups import CacheGroup, Paging, one_group
from twinfer.core.config import EngineConfig
from twinfer.core.dtypes import dtype_bytes
from twinfer.core.errors import ConfigError
from twinfer.core.memory_fixes import Fix, does_not_fit, fixes_for
from twinfer.core.memory_parts import Sizes, activation_bytes, gib, refuse_indivisible, sizes_of
from twinfer.core.spec import ModelSpec

if TYPE_CHECKING:
    from twinfer.core.device import DeviceSpec

__all__ = ["Fix", "MemoryBudget", "activation_bytes", "budget_on", "fixes_for", "memory_budget"]

SHORTEST_CONTEXT = 2048  # tokens that a suggested change must make room for when no length was asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """Memory of one rank, in bytes unless the name says otherwise.

    kv_bytes: left for KV; the pool takes `num_blocks` whole blocks of it (`kv_pool_bytes`).
    worst_case_concurrency: requests that fit if all are `max_model_len` long.
    expected_concurrency: requests that fit at the lengths given, None when none were; both are what memory
    allows, whatever `max_num_seqs` says.
    """

    device_memory_bytes: int
    memory_fraction: float
    weight_bytes: int
    activation_bytes: int
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
    tp: int
    equations: Mapping[str, str]
    reasons: Mapping[str, str] = field(default_factory=dict)

    @property
    def budget_bytes(self) -> float:
        """What the engine may use of the device."""
        return self.device_memory_bytes * self.memory_fraction

    @property
    def kv_pool_bytes(self) -> float:
        return self.num_blocks * self.bytes_per_block

    @property
    def kv_tokens(self) -> int:
        """Tokens that the pool holds of sequences that have not outgrown any window."""
        return self.num_blocks * self.block_size // len(self.groups)

    @property
    def equation(self) -> str:
        """Arithmetic of `num_blocks`; evaluates to it."""
        return self.equations["num_blocks"]

    def segments(self) -> list[tuple[str, float]]:
        """Device memory from the bottom up, for a stacked bar; sums to `device_memory_bytes`."""
        parts: list[tuple[str, float]] = [
            ("weights", self.weight_bytes), ("activations", self.activation_bytes), ("runtime", self.runtime_bytes),
            ("graphs", self.graph_bytes), ("kv", self.kv_pool_bytes),
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
    """Budget of one rank of `config.tp`, for a spec that techniques have already adapted.

    block_size: tokens per KV block.  groups: cache groups of the layers, none for one of all.  runtime_bytes, graph_bytes: of the device (`DeviceSpec`).
    expected_lengths: prompt plus output tokens of typical requests.  max_request_tokens: the longest request,
    when known; without `max_model_len` the context is the least of it, the model's and what the pool holds.
    own_memory: every rank has memory of its own (not on a CPU).
    Raises ConfigError when the pool would be smaller than one request, or a pinned size cannot exist.
    """
    # a quantizer may have chosen the KV format; without one, an unadapted spec is fine too
    spec = spec.with_dtypes(config.dtype, "auto" if config.quantizer else config.kv_dtype)
    refuse_indivisible(spec, config.tp)
    paging = Paging(block_size, tuple(groups or one_group(spec.num_attention_layers)))
    sizes = sizes_of(spec, config, device_memory_bytes, runtime_bytes, graph_bytes, paging)
    reasons: dict[str, str] = {}
    per_block = block_size * sizes.per_slot
    available, num_blocks = _pool(config, sizes, per_block, block_size, device_memory_bytes, reasons)
    slots = paging.longest(num_blocks, max(spec.max_context, config.max_model_len or 0))
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
    if num_blocks < 1 or slots < wanted:
        if config.max_model_len is None and max_request_tokens is None:
            wanted = min(spec.max_context, SHORTEST_CONTEXT)
        raise does_not_fit(
            spec, config, sizes, device_memory_bytes, runtime_bytes, graph_bytes, paging, slots, wanted, own_memory
        )
    per_request = paging.pages(wanted)
    expected = num_blocks * len(expected_lengths) / paging.pages_of(expected_lengths) if expected_lengths else None
    equations = _equations(spec, config, sizes, device_memory_bytes, block_size)
    equations["worst_case_concurrency"] = f"{num_blocks} / {paging.equation(wanted)}"
    if expected is not None:
        equations["expected_concurrency"] = (
            f"{num_blocks} * {len(expected_lengths)} / {paging.pages_of(expected_lengths)}"
        )
    return MemoryBudget(
        device_memory_bytes=device_memory_bytes, memory_fraction=config.memory_fraction, weight_bytes=sizes.weights,
        activation_bytes=sizes.activations, runtime_bytes=runtime_bytes, graph_bytes=graph_bytes, kv_bytes=available,
        kv_dtype=spec.kv_dtype, kv_bytes_per_token=sizes.per_token, kv_heads_per_rank=spec.kv_heads_per_rank(config.tp),
        block_size=block_size, groups=paging.groups, bytes_per_block=per_block, num_blocks=num_blocks, max_model_len=wanted,
        worst_case_concurrency=num_blocks / per_request, expected_concurrency=expected, tp=config.tp,
        equations=equations, reasons=reasons,
    )  # fmt: skip


def budget_on(
    spec: ModelSpec,
    device: DeviceSpec,
    config: EngineConfig,
    *,
    block_size: int = 16,
    groups: Sequence[CacheGroup] = (),
    expected_lengths: Sequence[int] = (),
    max_request_tokens: int | None = None,
) -> MemoryBudget:
    """`memory_budget` on a device: the memory a process can have there, its runtime and graphs."""
    return memory_budget(
        spec, device.usable_bytes, config, block_size=block_size, groups=groups,
        runtime_bytes=device.runtime_bytes, graph_bytes=device.graph_bytes, expected_lengths=expected_lengths, max_request_tokens=max_request_tokens,
        own_memory=device.kind != "cpu",
    )  # fmt: skip


def _pool(
    config: EngineConfig, sizes: Sizes, per_block: float, block_size: int, memory: int, reasons: dict[str, str]
) -> tuple[float, int]:
    """(bytes for KV, blocks), pinned by the configuration or derived."""
    room = memory - sizes.weights - sizes.fixed
    if config.num_kv_blocks is not None:
        size = config.num_kv_blocks * per_block
        if size > room:
            raise ConfigError(
                "--num-kv-blocks", config.num_kv_blocks,
                f"blocks of {block_size} tokens take {gib(size)}, weights and runtime leave {gib(room)}",
                f"use at most {max(0, int(room // per_block))}",
            )  # fmt: skip
        reasons["num_kv_blocks"] = f"{config.num_kv_blocks}: pinned"
        return size, config.num_kv_blocks
    if config.kv_memory_bytes is not None:
        if config.kv_memory_bytes > room:
            raise ConfigError(
                "--kv-memory-bytes", config.kv_memory_bytes, f"weights and runtime leave {gib(room)} of {gib(memory)}",
                f"use at most {max(0, int(room))}",
            )  # fmt: skip
        reasons["num_kv_blocks"] = f"from kv_memory_bytes={config.kv_memory_bytes}"
        return float(config.kv_memory_bytes), int(config.kv_memory_bytes // per_block)
    left = max(0.0, sizes.left)
    blocks = int(left // per_block)
    reasons["num_kv_blocks"] = f"{blocks}: {gib(left)} left for KV / ({block_size} tokens x {sizes.per_slot:g} B)"
    return left, blocks


def _equations(spec: ModelSpec, config: EngineConfig, sizes: Sizes, memory: int, block_size: int) -> dict[str, str]:
    """Arithmetic of the budget's numbers, by their names; kept free of names so that anyone can evaluate it."""
    kv = dtype_bytes(spec.kv_dtype)
    heads, key, value = spec.kv_shape(config.tp)
    if spec.mla is not None and spec.mla.absorbed:
        values = f"({spec.mla.kv_lora_rank} + {spec.mla.qk_rope_head_dim}) * {kv!r}"
        scales = f" + {spec.kv_scale_bytes!r}" if spec.kv_scale_bytes else ""
    else:
        values = f"{heads} * ({key} + {value}) * {kv!r}"
        scales = f" + {heads} * 2 * {spec.kv_scale_bytes!r}" if spec.kv_scale_bytes else ""
    index = f" + {spec.index_bytes_per_token}" if spec.index_bytes_per_token else ""
    norms = spec.num_norms * spec.hidden_size
    tables = spec.rank_other_params(config.tp) - norms
    blocks = (
        f"{config.num_kv_blocks}"
        if config.num_kv_blocks is not None
        else f"int({config.kv_memory_bytes} // ({block_size} * {sizes.per_slot!r}))"
        if config.kv_memory_bytes is not None
        else f"int(max(0, {memory} * {config.memory_fraction!r} - {sizes.weights} - {sizes.activations} - {sizes.fixed})"
        f" // ({block_size} * {sizes.per_slot!r}))"
    )
    return {
        "kv_bytes_per_token": f"{spec.num_attention_layers} * ({values}{scales}){index}",
        "weight_bytes": (
            f"int(({spec.rank_block_params(config.tp)!r} * {spec.block_bits!r}"
            f" + ({tables} + {norms}) * {spec.other_bits!r}) / 8)"
        ),
        "bytes_per_block": f"{block_size} * {sizes.per_slot!r}",
        "num_blocks": blocks,
    }
