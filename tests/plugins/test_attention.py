"""Attention variants as declarations: what they refuse, and what they change."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from twinfer.core.config import Choice
from twinfer.core.errors import ConfigError
from twinfer.core.registry import Registry
from twinfer.core.spec import ModelSpec
from twinfer.core.technique import Needs
from twinfer.plugins.attention.gqa import GQA
from twinfer.plugins.attention.mha import MHA
from twinfer.plugins.attention.mla import MLA
from twinfer.plugins.attention.mqa import MQA

MODEL = ModelSpec(
    name="m", family="llama", num_layers=2, hidden_size=576, num_heads=9, num_kv_heads=3, head_dim=64,
    intermediate_size=128, vocab_size=100, max_context=64,
)  # fmt: skip
WIDE = replace(MODEL, num_heads=64, num_kv_heads=64)


def test_every_variant_serves_every_checkpoint_of_heads() -> None:
    for world in ("engine", "simulator"):
        for variant in (MHA, GQA, MQA):
            assert variant.why_not(Needs(world=world, model=MODEL)) == []


@pytest.mark.parametrize(
    ("technique", "words"),
    [
        (MHA(), "mha from 3 KV heads, each repeated 3 times (exact)"),
        (GQA(), ""),
        (GQA(GQA.Options(num_kv_heads=9)), "gqa from 3 KV heads, each repeated 3 times (exact)"),
        (MQA(), "mqa from 3 KV heads, mean of each 3 (lossy: no training follows)"),
    ],
)
def test_a_conversion_says_what_it_does(technique: Any, words: str) -> None:
    assert technique.conversion(MODEL) == words


def test_heads_that_neither_repeat_nor_pool_are_refused() -> None:
    model = replace(MODEL, num_heads=12, num_kv_heads=4)
    with pytest.raises(
        ConfigError, match="4 KV heads of m can be neither repeated nor pooled into 6; use one of 1, 2, 4, 12"
    ):
        GQA(GQA.Options(num_kv_heads=6)).adapt_model(model)


def test_all_reasons_are_listed() -> None:
    odd = replace(MODEL, value_dim=32, attention_sinks=True)
    reasons = MQA.why_not(Needs(model=odd, dtype="float16"))
    assert len(reasons) == 3
    assert any("float16 is not served on cpu (known: float32, bfloat16)" in r for r in reasons)
    assert any("no attention kernel" in r for r in MQA.why_not(Needs(device="abacus")))


def test_simulator_serves_every_variant() -> None:
    for variant, heads in ((MHA, 9), (GQA, 3), (MQA, 1)):
        assert variant.why_not(Needs(world="simulator", device="h100-sxm", dtype="float16", model=MODEL)) == []
        adapted = variant().adapt_model(MODEL)
        assert (adapted.num_kv_heads, adapted.variant, adapted.attention) == (heads, variant.name, variant.name)
        assert adapted.kv_bytes_per_token("float32") == 2 * 2 * heads * 64 * 4
        assert adapted.num_params() - MODEL.num_params() == 2 * 2 * (heads - 3) * 64 * 576


def test_gqa_chooses_the_usual_number_of_groups() -> None:
    assert GQA().adapt_model(WIDE).num_kv_heads == 8
    assert GQA(GQA.Options(num_kv_heads=16)).adapt_model(WIDE).num_kv_heads == 16
    assert GQA().adapt_model(MODEL).num_kv_heads == 3
    with pytest.raises(ConfigError, match="give gqa:num_kv_heads=N"):
        GQA().adapt_model(replace(MODEL, num_kv_heads=9))
    with pytest.raises(ConfigError, match="does not divide the 9 query heads of m; use one of 1, 3, 9"):
        GQA(GQA.Options(num_kv_heads=2)).adapt_model(MODEL)


def test_options_are_checked() -> None:
    registry = Registry(entry_points=False)
    assert isinstance(registry.build("attention", Choice(name="gqa", options={"num_kv_heads": 4})), GQA)
    with pytest.raises(ConfigError, match="num_kv_heads=0"):
        registry.build("attention", Choice(name="gqa", options={"num_kv_heads": 0}))
    with pytest.raises(ConfigError, match="no option 'heads'"):
        registry.build("attention", Choice(name="mqa", options={"heads": 1}))


def test_latent_attention_is_not_a_softmax_variant() -> None:
    from twinfer.core.catalog import resolve_spec

    (reason, *_) = MHA.why_not(Needs(world="simulator", model=resolve_spec("deepseek-v3")))
    assert "latent" in reason


def test_declarations_import_no_torch() -> None:
    code = "import sys, twinfer.plugins.attention, twinfer.plugins.model_family; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- latents ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "width", "rope"),
    [
        ({}, 384, 192),  # all there is: exact
        ({"rank": 0.5}, 192, 48),
        ({"rank": 96}, 96, 24),
        ({"rank": 0.75, "rope_dim": 64}, 288, 64),
        ({"rank": 0.5, "rope_dim": "auto"}, 192, 48),
        ({"rope_dim": 64}, 384, 64),
    ],
)
def test_latents_of_a_checkpoint_with_kv_heads(options: dict[str, Any], width: int, rope: int) -> None:
    technique = MLA(MLA.Options(**options))
    model = technique.adapt_model(MODEL)
    assert model.mla is not None and model.variant == model.attention == "mla"
    assert (model.mla.latent_dim, model.mla.qk_rope_head_dim) == (width, rope)
    assert model.kv_bytes_per_token("float32") == 2 * width * 4
    assert model.query_scale == 64**-0.5  # of the heads it was trained with
    exact = (width, rope) == (384, 192)
    assert ("exact" in technique.conversion(MODEL)) == exact
    assert model.attention_out_bias == (not exact)


def test_latents_need_no_conversion_where_they_were_trained() -> None:
    from twinfer.core.catalog import resolve_spec

    deepseek = resolve_spec("deepseek-v3")
    assert MLA.why_not(Needs(world="simulator", model=deepseek)) == []
    assert MLA().conversion(deepseek) == ""
    assert MLA().adapt_model(deepseek).mla == deepseek.mla
    with pytest.raises(ConfigError, match=r"mla:rank=0\.5: deepseek-v3 was trained with latents"):
        MLA(MLA.Options(rank=0.5)).adapt_model(deepseek)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(qk_norm=True), "its keys are normed head by head"),
        (dict(layer_windows=(4, None)), "some layers see a sliding window"),
        (dict(attn_softcap=50.0), "its scores are capped"),
        (dict(rope_scaling={"rope_type": "dynamic", "factor": 2.0}), "rotary positions depend on the length"),
    ],
)
def test_what_has_no_latents_is_refused_in_both_worlds(changes: dict[str, Any], words: str) -> None:
    for world in ("engine", "simulator"):
        reasons = MLA.why_not(Needs(world=world, model=replace(MODEL, **changes)))
        assert len(reasons) == 1 and words in reasons[0]


# --- as if trained so -------------------------------------------------------------------------------


def trained(**options: Any) -> Any:
    return Registry(entry_points=False).build("attention", Choice(name="trained", options=options))


@pytest.mark.parametrize(
    ("model", "variant", "values"),
    [
        ("llama-2-70b", "mha", 2 * 64 * 128), ("llama-2-70b", "gqa", 2 * 8 * 128), ("llama-2-70b", "mqa", 2 * 128),
        ("llama-2-70b", "mla", 512 + 64), ("deepseek-v3", "mha", 128 * (192 + 128)), ("deepseek-v3", "gqa", 8 * 320),
        ("qwen3-8b", "mla", 576), ("gemma-2-9b", "mqa", 2 * 256), ("gpt-oss-20b", "mla", 576),
    ],
)  # fmt: skip
def test_any_model_as_if_trained_with_any_variant(model: str, variant: str, values: int) -> None:
    from twinfer.core.catalog import resolve_spec
    from twinfer.core.work import StepShape, step_ops

    spec = trained(variant=variant).adapt_model(resolve_spec(model))
    assert spec.kv_values_per_token_layer == values and spec.variant == variant
    assert any(op.kind == "attention" for op in step_ops(spec, StepShape.decode(100)))


def test_trained_is_a_question_to_the_simulator() -> None:
    technique = trained()
    assert technique.why_not(Needs(world="simulator", model=MODEL)) == []
    (reason,) = technique.why_not(Needs(world="engine", model=MODEL))
    assert "does not exist" in reason and "simulate --attention trained" in reason
    with pytest.raises(ConfigError, match="num_kv_heads=2: does not divide the 9 query heads of m; use one of 1, 3, 9"):
        trained(num_kv_heads=2).adapt_model(MODEL)
