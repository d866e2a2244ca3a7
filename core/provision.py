"""From a configuration, a model and a device to a Setup: where every "auto" is decided, once for both worlds.

Invariants
* Engine and simulator call `provision` with the same arguments and get equal limits and pools.
* `Setup.config` comes back with the decisions filled in (dtype, KV dtype, context, blocks); `Setup.reasons` says why.
"""

from __future__ import annotations

from dataclasses import replace

from twinfer.core.config import EngineConfig
from twinfer.core.device import DeviceSpec
from twinfer.core.dtypes import canonical_dtype
from twinfer.core.errors import ConfigError
from twinfer.core.memory import budget_on
from twinfer.core.policy import Limits
from twinfer.core.registry import Registry
from twinfer.core.setup import Setup, adapt_model, groups_of, resolve
from twinfer.core.spec import ModelSpec
from twinfer.core.technique import Needs

CPU_KV_BYTES = 4 * 2**30
"""KV pool on a CPU unless asked otherwise: its memory belongs to everything else that runs there, too."""


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
    reasons: dict[str, str] = {}
    dtype = canonical_dtype(config.dtype) if config.dtype != "auto" else spec.dtype
    if config.dtype == "auto":
        reasons["dtype"] = f"{dtype}: the checkpoint's"
        if device.kind == "cpu":
            dtype = "float32"
            reasons["dtype"] = "float32: every CPU computes it natively"
    if config.kv_dtype != "auto":
        config = config.model_copy(update={"kv_dtype": canonical_dtype(config.kv_dtype, "kv_dtype")})
    config = config.model_copy(update={"dtype": dtype})
    pool_bytes = CPU_KV_BYTES
    if device.kind == "cpu" and config.tp > 1:  # its ranks share the memory of the machine
        device = device.model_copy(update={"visible_bytes": device.usable_bytes // config.tp})
        pool_bytes //= config.tp
    if world == "engine" and spec.vision is not None:
        spec = replace(spec, vision=None)
        reasons["vision"] = "the engine serves the text of the model; its image encoder is not loaded"
    needs = Needs(world=world, device="cpu" if device.kind == "cpu" else "cuda", dtype=dtype)
    model, _ = adapt_model(config, spec, registry, needs)
    device = device.placed(model.weight_bytes(config.layout.tp) / config.layout.pp)

    length = config.max_model_len or min(model.max_context, max_request_tokens or model.max_context)
    limits = Limits(
        max_num_seqs=config.max_num_seqs, max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=max(2, length),
    )  # fmt: skip
    kv_cache = registry.build("kv_cache", config.kv_cache)
    block_size = kv_cache.block_size(limits)
    adapted = config.model_copy(update={"dtype": "auto", "kv_dtype": "auto"})  # `model` has them already
    budget = budget_on(
        model, device, adapted, block_size=block_size, groups=groups_of(model, kv_cache),
        max_request_tokens=max_request_tokens,
    )  # fmt: skip
    if device.kind == "cpu" and (config.host_kv_bytes or 0) > device.usable_bytes:
        raise ConfigError(
            "--host-kv-bytes", config.host_kv_bytes, f"{device.name} has {device.usable_bytes / 2**30:.1f} GiB of memory",
            f"give at most {device.usable_bytes // 2**20}MiB",
        )  # fmt: skip
    kv_bytes = budget.kv_bytes
    pinned = config.num_kv_blocks is not None or config.kv_memory_bytes is not None
    capped = device.kind == "cpu" and not pinned and kv_bytes > pool_bytes
    if capped and budget.bytes_per_block <= pool_bytes:
        kv_bytes = float(pool_bytes)
    setup = resolve(
        config.model_copy(update={"max_model_len": budget.max_model_len}),
        spec, registry, kv_bytes, needs, max_request_tokens,
    )  # fmt: skip
    reasons = {**setup.reasons, **budget.reasons, **reasons}
    if kv_bytes != budget.kv_bytes:
        reasons["num_kv_blocks"] = (
            f"{setup.limits.num_blocks}: {pool_bytes / 2**30:g} GiB{' a rank' if config.tp > 1 else ''}, the default on a CPU "
            "(--kv-memory-bytes changes it)"
        )
    if config.kv_dtype == "auto":
        reasons["kv_dtype"] = f"{setup.model.kv_dtype}: as the activations, or as the quantizer stores it"
    decided = setup.config.model_copy(
        update={
            "num_kv_blocks": setup.limits.num_blocks,
            "kv_dtype": setup.model.kv_dtype,
            "num_devices": config.layout.devices,
        }
    )
    return replace(setup, config=decided, reasons=reasons)
