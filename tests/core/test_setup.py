"""From a configuration to a core: every "auto" has its reason, whatever cannot work is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from twinfer.core.catalog import resolve_spec
from twinfer.core.config import Choice, EngineConfig
from twinfer.core.errors import ConfigError
from twinfer.core.events import Submit
from twinfer.core.plan import StepPlan
from twinfer.core.registry import Registry
from twinfer.core.request import Request
from twinfer.core.setup import Setup, adapt_model, resolve
from twinfer.core.technique import Needs
from twinfer.plugins.kv_cache.contiguous import Contiguous
from twinfer.plugins.kv_cache.paged import Paged
from twinfer.plugins.scheduler.static import Static

MODEL = "smollm2-135m"  # 30 layers, 3 KV heads of 64: 2 * 30 * 3 * 64 * 4 bytes a token in float32
PER_TOKEN = 46080


@pytest.fixture(scope="module")
def registry() -> Registry:
    return Registry(entry_points=False)


def setup(registry: Registry, kv_bytes: float | None = None, tokens: int | None = None, **options: Any) -> Setup:
    config = EngineConfig(model=MODEL, **{"dtype": "float32", **options})
    return resolve(config, resolve_spec(MODEL), registry, kv_bytes, max_request_tokens=tokens)


def test_the_pool_is_what_memory_holds(registry: Registry) -> None:
    chosen = setup(registry, kv_bytes=100.5 * 16 * PER_TOKEN)
    assert (chosen.limits.num_blocks, chosen.block_size, chosen.kv_bytes_per_token) == (100, 16, PER_TOKEN)
    assert chosen.kv_pool_bytes == 100 * 16 * PER_TOKEN
    assert "100: " in chosen.reasons["num_kv_blocks"] and "16 tokens" in chosen.reasons["num_kv_blocks"]
    assert setup(registry, kv_bytes=9e9, kv_memory_bytes=10 * 16 * PER_TOKEN).limits.num_blocks == 10
    pinned = setup(registry, kv_bytes=9e9, num_kv_blocks=7)
    assert pinned.limits.num_blocks == 7 and "num_kv_blocks" not in pinned.reasons


def test_the_context_is_the_models_unless_the_workload_needs_less(registry: Registry) -> None:
    context = resolve_spec(MODEL).max_context
    assert setup(registry, num_kv_blocks=9).limits.max_model_len == context
    shorter = setup(registry, num_kv_blocks=9, tokens=300)
    assert shorter.limits.max_model_len == 300 and "longest request" in shorter.reasons["max_model_len"]
    assert setup(registry, num_kv_blocks=9, tokens=10**9).limits.max_model_len == context
    asked = setup(registry, num_kv_blocks=9, max_model_len=128)
    assert asked.limits.max_model_len == 128 and "max_model_len" not in asked.reasons


def test_techniques_are_built_with_their_options(registry: Registry) -> None:
    chosen = setup(registry, num_kv_blocks=9, scheduler="static:batch_size=3", kv_cache="contiguous", max_model_len=64)
    assert isinstance(chosen.scheduler, Static) and chosen.scheduler.options.batch_size == 3
    assert isinstance(chosen.kv_cache, Contiguous) and chosen.block_size == 64
    paged = setup(registry, num_kv_blocks=9, kv_cache="paged:block_size=8")
    assert isinstance(paged.kv_cache, Paged) and paged.block_size == 8


def test_dtypes_change_the_bytes_of_a_token(registry: Registry) -> None:
    assert setup(registry, num_kv_blocks=9, dtype="bfloat16").kv_bytes_per_token == PER_TOKEN / 2
    assert setup(registry, num_kv_blocks=9, kv_dtype="float16").kv_bytes_per_token == PER_TOKEN / 2


@pytest.mark.parametrize(
    ("options", "kv_bytes", "named"),
    [
        ({"max_model_len": 10**9}, 1e9, ["--max-model-len=1000000000", "use at most"]),
        ({}, None, ["--num-kv-blocks", "--kv-memory-bytes"]),
        ({}, 10.0, ["--kv-memory-bytes=10", "give more memory"]),
        ({"kv_memory_bytes": 1000}, None, ["--kv-memory-bytes=1000", "one KV block of 16 tokens"]),
        ({"scheduler": "fifo"}, 1e9, ["--scheduler='fifo'", "continuous"]),
        ({"kv_cache": "paged:block=3"}, 1e9, ["--kv-cache", "no option 'block'", "block_size"]),
        ({"quantizer": "magic"}, 1e9, ["--quant='magic'"]),
        ({"attention": "magic"}, 1e9, ["--attention='magic'"]),
        ({"dtype": "float99"}, 1e9, ["dtype", "float99"]),
        ({"kv_dtype": "float99"}, 1e9, ["--kv-dtype", "float99"]),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_cannot_work_is_refused_by_name(
    registry: Registry, options: dict[str, Any], kv_bytes: float | None, named: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        setup(registry, kv_bytes=kv_bytes, **options)
    assert all(word in str(caught.value) for word in named), str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_technique_may_say_why_not(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Static, "why_not", classmethod(lambda cls, needs: [f"not on {needs.model.name}", "nor here"]))
    with pytest.raises(ConfigError, match=r"--scheduler='static': not on .*; nor here"):
        setup(registry, num_kv_blocks=9, scheduler="static")


def test_the_core_it_builds_runs(registry: Registry) -> None:
    core = setup(registry, num_kv_blocks=9, seed=5, max_num_seqs=3).build_core()
    assert (core.seed, core.limits.max_num_seqs, core.ledger.namespace) == (5, 3, resolve_spec(MODEL).name)
    core.receive(Submit(Request(id="a", prompt=(1, 2, 3))), 0.0)
    assert isinstance(core.next_step(0.0), StepPlan)


@pytest.mark.parametrize(
    ("cache", "windows"),
    [("paged", (None, 4096)), ("paged:free_windows=false", (None,)), ("contiguous", (None,))],
)
def test_cache_groups_are_the_caches_decision_and_the_pool_stays_within_its_memory(
    cache: str, windows: tuple[int | None, ...]
) -> None:
    """Gemma 2 9B: 21 of 42 layers have a window of 4,096 tokens."""
    config = EngineConfig(model="gemma-2-9b", kv_cache=cache, kv_memory_bytes=2**33)
    setup = resolve(config, resolve_spec("gemma-2-9b"), Registry(entry_points=False))
    assert setup.build_core().ledger.windows == windows == tuple(group.window for group in setup.groups)
    assert setup.kv_bytes_per_slot * len(windows) == setup.kv_bytes_per_token == 42 * 8 * 512 * 2
    page = setup.block_size * setup.kv_bytes_per_slot
    assert setup.kv_pool_bytes == setup.limits.num_blocks * page <= 2**33 < setup.kv_pool_bytes + page


def test_a_dtype_that_no_attention_serves_is_blamed_on_the_dtype() -> None:
    """Not on the attention variant, which nobody chose."""
    with pytest.raises(ConfigError, match=r"--dtype='float16'.*use float32 or bfloat16"):
        adapt_model(
            EngineConfig(model="m", dtype="float16"), resolve_spec("smollm2-135m"), Registry(entry_points=False),
            Needs(world="engine", device="cpu", dtype="float16"),
        )  # fmt: skip


def test_a_calibration_text_that_is_not_needed_is_said_to_be_unread() -> None:
    choice = Choice.model_validate("mla:calibration=text.txt")
    config = EngineConfig(model="m", attention=choice, num_kv_blocks=8, max_model_len=64)
    setup = resolve(config, resolve_spec("smollm2-135m"), Registry(entry_points=False))
    assert "exact, so text.txt is not read" in setup.reasons["attention"]


def test_two_formats_of_the_kv_cache_contradict() -> None:
    config = EngineConfig(model="m", kv_dtype="int8", quantizer=Choice.model_validate("int8:kv=fp8"))
    with pytest.raises(ConfigError, match=r"--kv-dtype='int8': --quant int8:kv=\"fp8\" stores KV in fp8"):
        adapt_model(config, resolve_spec("smollm2-135m"), Registry(entry_points=False), Needs(world="simulator"))
    agreed = config.model_copy(update={"kv_dtype": "fp8"})
    model, _ = adapt_model(agreed, resolve_spec("smollm2-135m"), Registry(entry_points=False), Needs(world="simulator"))
    assert model.kv_dtype == "fp8"
