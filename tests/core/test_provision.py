"""Every "auto" is decided once, with its reason, and equally for both worlds."""

from __future__ import annotations

from typing import Any

import pytest

from twinfer.core.catalog import resolve_spec
from twinfer.core.config import Choice, EngineConfig
from twinfer.core.device import load_device
from twinfer.core.errors import ConfigError
from twinfer.core.memory_parts import CPU_KV_BYTES
from twinfer.core.provision import place, provision
from twinfer.core.registry import default_registry
from twinfer.core.setup import Setup


def decide(device: str = "cpu", world: str = "simulator", longest: int | None = None, **fields: Any) -> Setup:
    registry = default_registry()
    config = EngineConfig.model_validate({"model": "smollm2-135m", "device": device, **fields})
    spec = resolve_spec(config.model)
    return provision(config, spec, registry, load_device(device, registry), world=world, max_request_tokens=longest)


@pytest.mark.parametrize("kv_cache", ["paged", "paged:block_size=1", "contiguous"])
@pytest.mark.parametrize("longest", [None, 300])
def test_both_worlds_get_the_same_limits_and_pools(kv_cache: str, longest: int | None) -> None:
    real, predicted = (decide(world=w, kv_cache=kv_cache, longest=longest) for w in ("engine", "simulator"))
    assert real.limits == predicted.limits
    assert real.config == predicted.config and real.reasons == predicted.reasons
    assert real.limits.max_model_len == (longest or 8192)


@pytest.mark.parametrize("device", ["cpu", "h100-sxm"])
def test_a_decided_configuration_decides_the_same_again(device: str) -> None:
    once = decide(device)
    again = provision(
        once.config, resolve_spec("smollm2-135m"), default_registry(), load_device(device), world="simulator"
    )
    assert again.config == once.config and again.limits == once.limits


def test_dtype_is_the_checkpoints_and_float32_on_a_cpu() -> None:
    assert decide("h100-sxm").config.dtype == "bfloat16"
    assert decide("cpu").config.dtype == "float32"
    assert decide("cpu").config.kv_dtype == "float32"
    assert decide("cpu", dtype="bf16").config.dtype == "bfloat16"
    assert decide("h100-sxm", kv_dtype="fp16").config.kv_dtype == "float16"
    assert {"dtype", "kv_dtype", "max_model_len", "num_kv_blocks"} <= set(decide("cpu").reasons)


def test_a_cpu_keeps_most_of_its_memory_for_others_unless_told() -> None:
    setup = decide("cpu")
    assert setup.kv_pool_bytes <= CPU_KV_BYTES < setup.kv_pool_bytes + setup.block_size * setup.kv_bytes_per_token
    assert "default on a CPU" in setup.reasons["num_kv_blocks"]
    assert decide("cpu", kv_memory_bytes=6 * 2**30).kv_pool_bytes > CPU_KV_BYTES
    assert decide("cpu", num_kv_blocks=600).limits.num_blocks == 600
    assert decide("h100-sxm").kv_pool_bytes > 40e9


def test_a_cpus_pool_is_one_decision_for_every_question() -> None:
    registry, cpu = default_registry(), load_device("cpu").model_copy(update={"visible_bytes": 64 * 2**30})
    spec, config = resolve_spec("llama-3.1-8b"), EngineConfig(model="llama-3.1-8b", device="cpu")
    budget = place(config, spec, registry, cpu, world="simulator").budget()
    for world in ("engine", "simulator"):
        setup = provision(config, spec, registry, cpu, world=world)
        assert setup.limits.num_blocks == budget.num_blocks == eval(budget.equation) == CPU_KV_BYTES // (16 * 2**18)
        assert setup.limits.max_model_len == budget.max_model_len == budget.kv_tokens == 16384
    long = config.model_copy(update={"max_model_len": 65536})
    with pytest.raises(ConfigError, match=r"at most 4.00 GiB on a CPU.*--num-kv-blocks 4096 \(then 65536 tokens fit\)"):
        provision(long, spec, registry, cpu, world="engine")
    told = long.model_copy(update={"num_kv_blocks": 4096})
    assert provision(told, spec, registry, cpu, world="engine").limits.max_model_len == 65536


def test_what_drafts_shares_the_pool_of_a_cpu() -> None:
    cpu = load_device("cpu").model_copy(update={"visible_bytes": 64 * 2**30})
    config = EngineConfig(model="smollm2-135m", speculator=Choice(name="draft", options={"model": "smollm2-135m"}))
    setup = provision(config, resolve_spec("smollm2-135m"), default_registry(), cpu, world="simulator")
    assert setup.limits.num_blocks == decide("cpu").limits.num_blocks // 2


def test_a_quantizer_decides_the_kv_format() -> None:
    setup = decide("h100-sxm", quantizer="kv-int8")
    assert setup.config.kv_dtype == "int8"
    assert setup.limits.num_blocks > decide("h100-sxm").limits.num_blocks * 1.5


@pytest.mark.parametrize(
    ("fields", "option"),
    [
        ({"num_kv_blocks": 3, "max_model_len": 512}, "--num-kv-blocks"),
        ({"kv_memory_bytes": 10**6, "max_model_len": 512}, "--kv-memory-bytes"),
        ({"max_model_len": 9000}, "--max-model-len"),
        ({"dtype": "int3"}, "--dtype"),
        ({"kv_dtype": "nope"}, "--kv-dtype"),
    ],
    ids=str,
)
def test_what_cannot_work_names_its_option(fields: dict[str, Any], option: str) -> None:
    with pytest.raises(ConfigError) as caught:
        decide(**fields)
    assert caught.value.option == option


def test_ranks_that_share_a_machine_are_no_way_to_more_memory() -> None:
    small = load_device("cpu").model_copy(update={"visible_bytes": 16 * 2**30})
    config = EngineConfig(model="llama-3.1-8b")
    with pytest.raises(ConfigError, match="--quant int4") as caught:
        provision(config, resolve_spec("llama-3.1-8b"), default_registry(), small, world="simulator")
    assert "--tp" not in str(caught.value)
