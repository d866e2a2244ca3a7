"""Frequencies and scales of every rotary scaling against transformers' own functions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from twinfer.core.errors import ModelError
from twinfer.core.hf_config import spec_from_hf
from twinfer.core.runtime.rope import DynamicRotary, rope_frequencies, rope_scale
from twinfer.core.spec import ModelSpec

SHORT, LONG = [1.0 + 0.05 * i for i in range(8)], [1.5 + i for i in range(8)]
YARN: dict[str, Any] = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64, rope_theta=5e5)
CASES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": dict(rope_type="linear", factor=3.0),
    "dynamic": dict(rope_type="dynamic", factor=3.0),
    "llama3": dict(
        rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
    ),
    "yarn": YARN,
    "yarn-betas": YARN | dict(beta_fast=12, beta_slow=2),
    "yarn-no-truncation": YARN | dict(truncate=False),
    "yarn-attention-factor": YARN | dict(attention_factor=1.25),
    "yarn-mscale": YARN | dict(mscale=1.0, mscale_all_dim=0.7),
    "yarn-equal-mscales": YARN | dict(mscale=1.0, mscale_all_dim=1.0),
    "yarn-flat": YARN | dict(beta_fast=1, beta_slow=1),
    "longrope": dict(rope_type="longrope", short_factor=SHORT, long_factor=LONG, original_max_position_embeddings=64),
    "longrope-factor": dict(
        rope_type="longrope", short_factor=SHORT, long_factor=LONG, original_max_position_embeddings=64, factor=9.0
    ),
}


def config_of(parameters: dict[str, Any]) -> Any:
    from transformers import LlamaConfig

    parameters = {"rope_theta": 10000.0, "rope_type": "default"} | parameters
    return LlamaConfig(
        hidden_size=64, num_attention_heads=4, num_hidden_layers=1, intermediate_size=8, vocab_size=9,
        max_position_embeddings=256, rope_parameters=parameters,
    )  # fmt: skip


def spec_of(config: Any) -> ModelSpec:
    return spec_from_hf(config.to_dict() | {"architectures": ["LlamaForCausalLM"]}, "tiny")


def theirs(config: Any, seq_len: int | None = None) -> tuple[torch.Tensor, float]:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    kind = config.rope_parameters["rope_type"]
    if kind == "default":
        return LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    return ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=seq_len)


@pytest.mark.parametrize("case", CASES)
def test_frequencies_and_scale_equal_transformers(case: str) -> None:
    config = config_of(CASES[case])
    spec = spec_of(config)
    lengths = [40, 200] if case.startswith("longrope") else [None]
    for length in lengths:
        expected, scale = theirs(config, length)
        got = rope_frequencies(replace(spec, max_context=length or spec.max_context))
        assert torch.allclose(got, expected, rtol=2e-6, atol=0)
        assert rope_scale(spec.rope_scaling or {}) == pytest.approx(scale, rel=1e-12)


@pytest.mark.parametrize("position", [0, 100, 255, 256, 300, 511])
def test_dynamic_base_follows_the_position(position: int) -> None:
    config = config_of(CASES["dynamic"])
    spec = spec_of(config)
    rotary = DynamicRotary(rope_frequencies(spec), torch.float32, 3.0, 256)
    expected, _ = theirs(config, position + 1)
    got = rotary.angles(torch.tensor([[float(position)]]))[0]
    assert torch.allclose(got, position * expected, rtol=1e-5, atol=0)


def test_context_reaches_as_far_as_the_scaling() -> None:
    assert spec_of(config_of(CASES["yarn"])).max_context == 256
    assert spec_of(config_of(YARN | dict(factor=16.0))).max_context == 1024
    assert spec_of(config_of(CASES["dynamic"])).max_context == 768
    assert spec_of(config_of(CASES["linear"])).max_context == 256


def test_old_and_new_spelling_are_one() -> None:
    plain = {k: v for k, v in config_of({}).to_dict().items() if k != "rope_parameters"}
    plain["architectures"] = ["LlamaForCausalLM"]
    old = spec_from_hf(
        plain | dict(rope_theta=5e5, rope_scaling=dict(type="yarn", factor=4.0, original_max_position_embeddings=64)),
        "m",
    )
    assert old == replace(spec_of(config_of(YARN)), name="m")
    phi = plain | dict(architectures=["Phi3ForCausalLM"], original_max_position_embeddings=64)
    for kind in ("su", "yarn", "longrope"):
        scaling = dict(type=kind, short_factor=SHORT, long_factor=LONG)
        found = spec_from_hf(phi | dict(rope_scaling=scaling), "m").rope_scaling
        assert found is not None and found["rope_type"] == "longrope" and found["factor"] == 4.0


@pytest.mark.parametrize(
    ("scaling", "words"),
    [
        (dict(rope_type="linear"), "lacks 'factor'"),
        (dict(rope_type="llama3", factor=2.0, low_freq_factor=1.0), "lacks 'high_freq_factor'"),
        (dict(rope_type="longrope", short_factor=SHORT), "lacks 'long_factor'"),
        (dict(rope_type="linear", factor="2"), "factor='2', which should be a number"),
        (dict(rope_type="longrope", short_factor=["a"], long_factor=LONG), "should be a number"),
        (dict(rope_type="linear", factor=2.0, mrope_section=[1]), "with mrope_section is not known"),
    ],
)
def test_damaged_scalings_are_named(scaling: dict[str, Any], words: str) -> None:
    config = {k: v for k, v in config_of({}).to_dict().items() if k != "rope_parameters"}
    with pytest.raises(ModelError, match=words):
        spec_from_hf(config | {"architectures": ["LlamaForCausalLM"], "rope_scaling": scaling}, "m")


def test_factors_of_another_model_are_refused() -> None:
    spec = spec_of(config_of(dict(CASES["longrope"], long_factor=LONG[:5])))
    with pytest.raises(ModelError, match="5 rope factors for 8 pairs"):
        rope_frequencies(spec)


def test_engine_chooses_the_factors_by_the_context_it_serves(tmp_path: Any) -> None:
    """`--max-model-len` within the trained length: the short factors; a loaded engine refuses the other side."""
    from logits_oracle import TinyModel

    from twinfer.core.config import EngineConfig
    from twinfer.core.errors import ConfigError
    from twinfer.core.runtime.loading import load_engine

    rope = dict(CASES["longrope"], rope_theta=10000.0, short_factor=SHORT[:4], long_factor=LONG[:4])
    rope.pop("original_max_position_embeddings")
    TinyModel(tmp_path, "Phi3", dict(original_max_position_embeddings=64, rope_parameters=rope))
    write_tokenizer(tmp_path)
    config = EngineConfig(model=str(tmp_path), dtype="float32", max_model_len=64, num_kv_blocks=8)
    engine = load_engine(config)
    kept = engine.model.rotary.inv_freq  # type: ignore[attr-defined]
    theta = 1 / 10000.0 ** (torch.arange(4) / 4)
    assert torch.allclose(kept, theta / torch.tensor(SHORT[:4]))
    engine.reconfigured(config.model_copy(update={"max_model_len": 32}))
    with pytest.raises(ConfigError, match=r"--max-model-len=65.*longrope"):
        engine.reconfigured(config.model_copy(update={"max_model_len": 65}))
    engine.close()
    engine = load_engine(config.model_copy(update={"max_model_len": 65}))
    assert torch.allclose(engine.model.rotary.inv_freq, theta / torch.tensor(LONG[:4]))  # type: ignore[attr-defined]
    engine.close()


def write_tokenizer(folder: Any) -> None:
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")).save(str(folder / "tokenizer.json"))
