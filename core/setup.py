"""From a configuration to the parts of a Core: the same for engine and simulator.

Invariants
* Every "auto" becomes a choice with its reason in `Setup.reasons`.
* Whatever cannot work is a ConfigError here, before anything is allocated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from twinfer.core.cache_groups import CacheGroup, cache_groups
from twinfer.core.checked_speculator import CheckedSpeculator
from twinfer.core.config import Choice, EngineConfig
from twinfer.core.core import Core
from twinfer.core.dtypes import canonical_dtype
from twinfer.core.errors import ConfigError
from twinfer.core.guard import Blaming, adapted_model, block_size_of, flag, reasons_against, unusable
from twinfer.core.memory_parts import largest_kv, refuse_indivisible
from twinfer.core.policy import KVCache, Limits, Scheduler
from twinfer.core.registry import OPTION_OF_KIND, Registry
from twinfer.core.spec import ModelSpec
from twinfer.core.technique import Needs, Technique

_ACTIVATIONS = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Everything resolved. `model` is the spec as all chosen techniques leave it, `checkpoint` as it was trained.

    kv_bytes_per_token, kv_bytes_per_slot: bytes that a token takes on one rank, of the pipeline stage that takes most: in
    all layers, and in a page, which has the layers of one cache group.
    """

    config: EngineConfig
    model: ModelSpec
    checkpoint: ModelSpec
    limits: Limits
    scheduler: Scheduler
    kv_cache: KVCache
    techniques: tuple[Technique, ...]
    block_size: int
    groups: tuple[CacheGroup, ...]
    kv_bytes_per_token: float
    kv_bytes_per_slot: float
    speculator: CheckedSpeculator | None = None
    reasons: dict[str, str] = field(default_factory=dict)

    @property
    def kv_pool_bytes(self) -> float:
        return self.limits.num_blocks * self.block_size * self.kv_bytes_per_slot

    @property
    def rank_limits(self) -> Limits:
        """Of one data-parallel rank: its share of rows and blocks; tokens of a step are a rank's own."""
        dp, limits = self.config.dp, self.limits
        return replace(
            limits, max_num_seqs=-(-limits.max_num_seqs // dp), num_blocks=limits.num_blocks // dp,
            num_host_blocks=limits.num_host_blocks // dp,
        )  # fmt: skip

    def build_core(self) -> Core:
        """The Core of one data-parallel rank: of the whole replica, where there is no more than one."""
        return Core(
            self.scheduler, self.kv_cache, self.rank_limits, seed=self.config.seed, namespace=self.model.name,
            windows=tuple(group.window for group in self.groups),
        )  # fmt: skip


def groups_of(model: ModelSpec, kv_cache: KVCache) -> tuple[CacheGroup, ...]:
    """The cache groups of `model`: one of all layers when `kv_cache` keeps what has left a window."""
    keeping = [layer for layer in range(model.num_layers) if model.is_attention(layer)]
    if not flag("kv_cache", kv_cache, "frees_windows", False):
        return (CacheGroup(None, tuple(keeping)),)
    groups = cache_groups(model.attention_windows, model.max_context)
    return tuple(CacheGroup(group.window, tuple(keeping[i] for i in group.layers)) for group in groups)


def adapt_model(
    config: EngineConfig, spec: ModelSpec, registry: Registry, needs: Needs
) -> tuple[ModelSpec, tuple[Technique, ...]]:
    """`spec` as the chosen attention variant, quantizer and dtypes leave it, and those techniques."""
    changes: dict[str, Any] = {}
    if config.dtype != "auto":
        changes["dtype"] = canonical_dtype(config.dtype, "--dtype")
        if config.kv_dtype == "auto" and spec.kv_dtype == spec.dtype:  # else the checkpoint sets it apart
            changes["kv_dtype"] = changes["dtype"]
    if config.kv_dtype != "auto":
        changes["kv_dtype"] = canonical_dtype(config.kv_dtype, "--kv-dtype")
    model = replace(spec, **changes) if changes else spec
    techniques: list[Technique] = []
    for kind, choice in (("attention", config.attention), ("quantizer", config.quantizer)):
        if kind == "attention" and choice is None and spec.variant in registry.names("attention"):
            choice = Choice(name=spec.variant)  # the checkpoint's own
        if choice is None:
            continue
        technique = registry.build(kind, choice)
        reasons = reasons_against(kind, technique, replace(needs, model=model))
        if reasons:
            asked = {d: replace(needs, model=model, dtype=d) for d in _ACTIVATIONS}
            served = [dtype for dtype, other in asked.items() if not reasons_against(kind, technique, other)]
            if kind == "attention" and served and needs.dtype not in served:
                raise ConfigError("--dtype", needs.dtype, "; ".join(reasons), f"use {' or '.join(served)}")
            raise ConfigError(
                "--" + ("quant" if kind == "quantizer" else kind), str(choice), "; ".join(reasons),
                "choose another or leave it out",
            )  # fmt: skip
        model = adapted_model(kind, technique, model)
        if config.kv_dtype != "auto" and model.kv_dtype != changes["kv_dtype"]:
            raise ConfigError(
                "--kv-dtype", config.kv_dtype, f"--quant {choice} stores KV in {model.kv_dtype}", "give one of them"
            )
        techniques.append(technique)
    return model, tuple(techniques)


def speculator_of(config: EngineConfig, model: ModelSpec, registry: Registry, needs: Needs) -> CheckedSpeculator | None:
    """What guesses tokens ahead; None without one, and for one that guesses none. ConfigError for what cannot work."""
    if config.speculator is None:
        return None
    built = registry.build("speculator", config.speculator)
    reasons = reasons_against("speculator", built, replace(needs, model=model))
    layout = config.layout
    if layout.devices > layout.tp:
        reasons.append(f"drafting is modelled over tensor-parallel ranks only, not {layout.flags}")
    if model.linear_attention is not None:
        reasons.append(f"{model.name} has layers that carry a state, which cannot go back to the last right guess")
    if config.max_outstanding > 1:
        reasons.append("with --max-outstanding 2 the next step is planned before it is known which guesses are right")
    if reasons:
        raise ConfigError("--speculator", str(config.speculator), "; ".join(reasons), "leave it out")
    speculator = CheckedSpeculator(built)
    if not speculator.num_tokens:
        return None
    drafter = speculator.drafter(model)
    if drafter is not None:
        refuse_indivisible(drafter, layout)
    return speculator


def _conversion(spec: ModelSpec, model: ModelSpec, techniques: Sequence[Technique]) -> dict[str, str]:
    """What becomes of the checkpoint's attention, in words; nothing when it stays as it was trained."""
    for technique in techniques:
        describe = getattr(technique, "conversion", None)
        with Blaming("attention", technique, "conversion"):
            words = describe(spec) if describe is not None else ""
        if not isinstance(words, str):
            raise unusable("attention", technique, "conversion", words, "words, none where nothing is converted")
        if words:
            before, after = spec.kv_bytes_per_token(model.kv_dtype), model.kv_bytes_per_token()
            return {"attention": f"{words}; KV per token {before:,.0f} B before, {after:,.0f} B after"}
    return {}


def resolve(
    config: EngineConfig,
    spec: ModelSpec,
    registry: Registry,
    kv_bytes_available: float | None = None,
    needs: Needs | None = None,
    max_request_tokens: int | None = None,
) -> Setup:
    """Choose techniques, limits and the size of the KV pool.

    kv_bytes_available: what is left for KV after weights and activations; used when neither
    `num_kv_blocks` nor `kv_memory_bytes` is set.  max_request_tokens: longest prompt plus output of
    the workload when known; "auto" context never needs to be longer.
    """
    needs = needs or Needs()
    if config.max_outstanding > 1 and needs.world == "engine":
        raise ConfigError(
            "--max-outstanding", config.max_outstanding, "the engine launches a step when the one before is done",
            "leave it out; the simulator can say what it would bring",
        )  # fmt: skip
    model, techniques = adapt_model(config, spec, registry, needs)
    reasons = _conversion(spec, model, techniques)
    scheduler = registry.build("scheduler", config.scheduler)
    kv_cache = registry.build("kv_cache", config.kv_cache)
    for kind, technique in (("scheduler", scheduler), ("kv_cache", kv_cache)):
        why = reasons_against(kind, technique, replace(needs, model=model))
        if why:
            raise ConfigError(OPTION_OF_KIND[kind], technique.name, "; ".join(why), "choose another")
    speculator = speculator_of(config, model, registry, needs)
    if speculator is not None:
        reasons["speculator"] = (
            f"{config.speculator}: {speculator.num_tokens} guesses a step, up to {speculator.depth} right, {speculator.mean_tokens:.2f} tokens "
            f"expected of a step by the acceptance that was given ({speculator.acceptance}); "
            "work of the CPU for drafting is not counted"
        )
    max_len = config.max_model_len
    if max_len is None:
        max_len = model.max_context
        reasons["max_model_len"] = f"{max_len}: the model's context"
        if max_request_tokens is not None and max_request_tokens < max_len:
            max_len = max(2, max_request_tokens)
            reasons["max_model_len"] = f"{max_len}: the longest request of the workload"
    elif max_len > model.max_context:
        raise ConfigError(
            "--max-model-len", max_len, f"{model.name} was made for {model.max_context} tokens",
            f"use at most {model.max_context}",
        )  # fmt: skip
    limits = Limits(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=max_len,
        max_outstanding=config.max_outstanding + config.pp - 1,
        num_stages=config.pp,
        max_context=model.max_context,
    )
    block_size = block_size_of(kv_cache, limits)
    groups = groups_of(model, kv_cache)
    per_token, per_slot = largest_kv(model, config.layout, groups)
    per_block = block_size * per_slot
    num_blocks = config.num_kv_blocks
    if num_blocks is None:
        budget = config.kv_memory_bytes or kv_bytes_available
        if budget is None:
            raise ConfigError("--num-kv-blocks", None, "no size for the KV pool", "give it or --kv-memory-bytes")
        num_blocks = config.dp * int(budget // per_block)
        reasons["num_kv_blocks"] = (
            f"{num_blocks}: {budget / 2**30:.2f} GiB of KV memory / ({block_size} tokens x {per_slot:.0f} B)"
        )
        if num_blocks < 1:
            raise ConfigError(
                "--kv-memory-bytes", int(budget), f"one KV block of {block_size} tokens takes {per_block:.0f} B",
                "give more memory, or lower --max-model-len or the block size",
            )  # fmt: skip
    num_host_blocks = int((config.host_kv_bytes or 0) // per_block)
    if config.host_kv_bytes is not None and num_host_blocks < 1:
        raise ConfigError(
            "--host-kv-bytes", config.host_kv_bytes, f"one KV block of {block_size} tokens takes {per_block:.0f} B",
            "give more memory, or use --preemption recompute",
        )  # fmt: skip
    limits = replace(limits, num_blocks=num_blocks, num_host_blocks=num_host_blocks)
    return Setup(
        config=config, model=model, checkpoint=spec, limits=limits, scheduler=scheduler, kv_cache=kv_cache, techniques=techniques,
        block_size=block_size, groups=groups, kv_bytes_per_token=per_token, kv_bytes_per_slot=per_slot, speculator=speculator, reasons=reasons,
    )  # fmt: skip
