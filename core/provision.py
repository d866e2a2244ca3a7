"""From a configuration, a model and a device to a Setup: where every "auto" is decided, once for both worlds.

Invariants
* Engine and simulator call `provision` with the same arguments and get equal limits and pools.
* `Setup.config` comes back with the decisions filled in (dtype, KV dtype, context, blocks); `Setup.reasons` says why.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from twinfer.core.cache_groups import CacheGroup
from twinfer.core.config import EngineConfig
from twinfer.core.device import DeviceSpec
from twinfer.core.dtypes import canonical_dtype
from twinfer.core.errors import ConfigError
from twinfer.core.guard import block_size_of
from twinfer.core.memory import MemoryBudget, Others, budget_on, question_on
from twinfer.core.memory_fixes import Question
from twinfer.core.memory_parts import fullest, heaviest_rank
from twinfer.core.policy import Limits
from twinfer.core.registry import Registry
from twinfer.core.setup import Setup, adapt_model, groups_of, resolve, speculator_of
from twinfer.core.spec import ModelSpec
from twinfer.core.technique import Needs


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A model as techniques and dtypes leave it, and the device as one rank has it: all that memory depends on.

    config: with the activations' dtype decided.  device: of a CPU, the share of one rank.
    """

    config: EngineConfig
    checkpoint: ModelSpec
    model: ModelSpec
    device: DeviceSpec
    needs: Needs
    registry: Registry
    block_size: int
    groups: tuple[CacheGroup, ...]

    def adapt(self, updates: Mapping[str, Any]) -> ModelSpec | None:
        """The model under a changed configuration; None where a technique refuses it."""
        try:
            return adapt_model(
                self.config.model_copy(update=dict(updates)), self.checkpoint, self.registry, self.needs
            )[0]
        except ConfigError:
            return None

    def budget(
        self,
        *,
        max_request_tokens: int | None = None,
        expected_lengths: Sequence[int] = (),
        others: Others | None = None,
    ) -> MemoryBudget:
        """Raises ConfigError when it does not fit, with what would help (on one of the `others`, too)."""
        return budget_on(
            self.model, self.device, self._adapted(), block_size=self.block_size, groups=self.groups,
            expected_lengths=expected_lengths, max_request_tokens=max_request_tokens, adapt=self.adapt, others=others,
            engine=self.needs.world == "engine",
        )  # fmt: skip

    def question(self, wanted: int, others: Others | None = None) -> Question:
        """For what would make room for one request of `wanted` tokens."""
        return question_on(
            self.model, self.device, self._adapted(), block_size=self.block_size, groups=self.groups, wanted=wanted,
            adapt=self.adapt, others=others, engine=self.needs.world == "engine",
        )  # fmt: skip

    def _adapted(self) -> EngineConfig:
        return self.config.model_copy(update={"dtype": "auto", "kv_dtype": "auto"})  # `model` has them already


def place(
    config: EngineConfig,
    spec: ModelSpec,
    registry: Registry,
    device: DeviceSpec,
    *,
    world: str,
    max_request_tokens: int | None = None,
) -> Placement:
    """`spec` on `device` as `config` asks; arguments as those of `provision`. Raises ConfigError."""
    dtype = canonical_dtype(config.dtype, "--dtype") if config.dtype != "auto" else spec.dtype
    if config.dtype == "auto" and device.kind == "cpu":
        dtype = "float32"
    if config.kv_dtype != "auto":
        config = config.model_copy(update={"kv_dtype": canonical_dtype(config.kv_dtype, "--kv-dtype")})
    config = config.model_copy(update={"dtype": dtype})
    ranks = config.layout.devices
    if device.kind == "cpu" and ranks > 1:  # they share the memory of the machine
        device = device.model_copy(update={"visible_bytes": device.usable_bytes // ranks})
    if world == "engine":  # it serves the text of a model
        spec = replace(spec, vision=None)
    needs = Needs(world=world, device="cpu" if device.kind == "cpu" else "cuda", dtype=dtype)
    model, _ = adapt_model(config, spec, registry, needs)
    length = config.max_model_len or min(model.max_context, max_request_tokens or model.max_context)
    limits = Limits(
        max_num_seqs=config.max_num_seqs, max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=max(2, length),
    )  # fmt: skip
    kv_cache = registry.build("kv_cache", config.kv_cache)
    return Placement(
        config=config, checkpoint=spec, model=model, device=device.placed(heaviest_rank(model, config.layout)), needs=needs,
        registry=registry,
        block_size=block_size_of(kv_cache, limits), groups=groups_of(model, kv_cache),
    )  # fmt: skip


def provision(
    config: EngineConfig,
    spec: ModelSpec,
    registry: Registry,
    device: DeviceSpec,
    *,
    world: str,
    max_request_tokens: int | None = None,
) -> Setup:
    """The Setup of `config` for `spec` on `device`.

    world: "engine" or "simulator" (techniques may refuse one of them).  max_request_tokens: longest prompt plus
    output of the workload, when it is known.  Raises ConfigError for what cannot work or does not fit.
    """
    placed = place(config, spec, registry, device, world=world, max_request_tokens=max_request_tokens)
    reasons: dict[str, str] = {}
    if world == "engine" and spec.vision is not None:
        reasons["vision"] = "the engine serves the text of the model; its image encoder is not loaded"
    if config.dtype == "auto":
        reasons["dtype"] = f"{placed.config.dtype}: the checkpoint's"
        if device.kind == "cpu":
            reasons["dtype"] = "float32: every CPU computes it natively"
    config = placed.config
    ranks = config.layout.devices
    budget = placed.budget(max_request_tokens=max_request_tokens)
    if device.kind == "cpu" and (config.host_kv_bytes or 0) > placed.device.usable_bytes:
        raise ConfigError(
            "--host-kv-bytes", config.host_kv_bytes,
            f"{device.name} has {placed.device.usable_bytes / 2**30:.1f} GiB of memory",
            f"give at most {placed.device.usable_bytes // 2**20}MiB",
        )  # fmt: skip
    num_blocks = budget.num_blocks
    pinned = config.num_kv_blocks is not None or config.kv_memory_bytes is not None
    speculator = speculator_of(config, placed.model, registry, placed.needs)
    if speculator is not None:
        weights = speculator.weight_bytes(placed.model, config.layout)
        more = speculator.kv_bytes_per_token(placed.model, config.layout) * placed.block_size / len(budget.groups)
        held = f"what guesses takes {weights / 2**30:.2f} GiB of weights a rank"
        if pinned:
            reasons["speculator_memory"] = f"{held}: not counted beside a KV pool whose size is given"
        elif weights or more:
            left = min(budget.kv_bytes, fullest(budget.ranks, budget.block_size).free - weights)
            num_blocks = int(max(0.0, left) // (budget.bytes_per_block + more))
            slots = num_blocks * placed.block_size // len(budget.groups)
            if slots < budget.max_model_len:
                raise ConfigError(
                    "--speculator", str(config.speculator),
                    f"{held}, and KV of its own: {slots} tokens of KV fit, not {budget.max_model_len}",
                    "take a smaller one, more devices (--tp), or lower --max-model-len",
                )  # fmt: skip
            reasons["num_kv_blocks"] = (
                f"{num_blocks}: {left / 2**30:.2f} GiB left for KV beside {weights / 2**30:.2f} GiB of drafting weights / "
                f"({budget.bytes_per_block:.0f} B + {more:.0f} B of drafting KV a block)"
            )
    decisions = {"max_model_len": budget.max_model_len, "num_kv_blocks": num_blocks, "kv_memory_bytes": None}
    setup = resolve(
        config.model_copy(update=decisions), placed.checkpoint, registry, needs=placed.needs,
        max_request_tokens=max_request_tokens,
    )  # fmt: skip
    reasons = {**setup.reasons, **budget.reasons, **reasons}
    if config.kv_dtype == "auto":
        reasons["kv_dtype"] = f"{setup.model.kv_dtype}: as the activations, or as the quantizer stores it"
    decided = setup.config.model_copy(update={"kv_dtype": setup.model.kv_dtype, "num_devices": ranks})
    return replace(setup, config=decided, reasons=reasons)
