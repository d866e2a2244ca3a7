"""What to change when a model does not fit: each suggestion is computed, none assumed, cheapest first.

Invariants
* A suggested change alone makes room for the request in question, or it is not suggested.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from twinfer.core.cache_groups import Paging, one_group
from twinfer.core.config import EngineConfig
from twinfer.core.dtypes import dtype_bits
from twinfer.core.errors import ConfigError
from twinfer.core.memory_parts import Sizes, gib, sizes_of, why_indivisible
from twinfer.core.spec import ModelSpec

INT4_BITS = 4 + 16 / 128  # a float16 scale per 128 weights


@dataclass(frozen=True, slots=True)
class Fix:
    """A change that makes the model fit; `cost` orders them (0 costs nothing, 9 costs devices)."""

    change: str
    effect: str
    cost: int

    def __str__(self) -> str:
        return f"{self.change} ({self.effect})"


def does_not_fit(
    spec: ModelSpec, config: EngineConfig, sizes: Sizes, memory: int, runtime: int, graphs: int, paging: Paging,
    slots: int, wanted: int, own_memory: bool = True,
) -> ConfigError:  # fmt: skip
    """The error for a pool of `slots` tokens that cannot hold one request of `wanted` tokens, with what would help."""
    pages = paging.pages(wanted)
    size = pages * paging.block_size * sizes.per_slot
    request = f"one request of {wanted} tokens needs {gib(size)}"
    if config.num_kv_blocks is not None:
        return ConfigError(
            "--num-kv-blocks", config.num_kv_blocks, f"the pool holds {slots} tokens and {request}",
            f"use at least {pages} or --max-model-len {max(slots, 2)}",
        )  # fmt: skip
    if config.kv_memory_bytes is not None:
        least = int(-(-size // 1))
        return ConfigError(
            "--kv-memory-bytes", config.kv_memory_bytes, f"the pool holds {slots} tokens and {request}",
            f"use at least {least}" + (f" or --max-model-len {slots}" if slots >= 2 else ""),
        )  # fmt: skip
    fixes = fixes_for(
        spec, config, memory, runtime_bytes=runtime, graph_bytes=graphs, paging=paging, wanted=wanted, own_memory=own_memory
    )  # fmt: skip
    taken = (
        f"weights take {gib(sizes.weights)}, activations {gib(sizes.activations)}, runtime and graphs "
        f"{gib(sizes.fixed)} of {gib(memory * config.memory_fraction)}"
    )
    option, value = ("--max-model-len", wanted) if config.max_model_len else ("--model", spec.name)
    problem = f"{request}, {gib(max(0.0, sizes.left))} is left for KV ({taken})"
    return ConfigError(
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
    wanted = wanted or config.max_model_len or spec.max_context
    paged = paging or Paging(16, one_group(spec.num_attention_layers))

    def slots(s: ModelSpec, c: EngineConfig) -> int:
        sizes = sizes_of(s, c, device_memory_bytes, runtime_bytes, graph_bytes, paged)
        pages = int(max(0.0, sizes.left) // (paged.block_size * sizes.per_slot))
        return paged.longest(pages, max(wanted, s.max_context))

    found: list[Fix] = []

    def consider(change: str, cost: int, s: ModelSpec, c: EngineConfig) -> None:
        held = slots(s, c)
        if held >= wanted:
            found.append(Fix(change, f"then {held} tokens fit", cost))

    if config.memory_fraction < 0.95:
        consider("--memory-fraction 0.95", 0, spec, config.model_copy(update={"memory_fraction": 0.95}))
    if config.max_num_batched_tokens > 512:
        consider("--max-num-batched-tokens 512", 1, spec, config.model_copy(update={"max_num_batched_tokens": 512}))
    if dtype_bits(spec.kv_dtype) > 8:
        consider("--kv-dtype fp8", 2, replace(spec, kv_dtype="fp8", kv_scale_bytes=0.0), config)
    shorter = slots(spec, config)
    if 2 <= shorter < wanted:
        found.append(Fix(f"--max-model-len {shorter}", f"instead of {wanted}", 3))
    if spec.block_bits > 8:
        consider("--quant fp8", 4, replace(spec, weight_bits=8.0), config)
    if spec.block_bits > INT4_BITS:
        consider("--quant int4", 5, replace(spec, weight_bits=INT4_BITS), config)
    for factor, cost in ((2, 7), (4, 8), (8, 9)) if own_memory else ():
        tp = config.tp * factor
        if not why_indivisible(spec, tp) and not any(fix.change.startswith("--tp") for fix in found):
            consider(f"--tp {tp}", cost, spec, config.model_copy(update={"tp": tp}))
    return sorted(found, key=lambda fix: fix.cost)
