"""Checkpoints served as other attention variants, through the engine: exact where it is said, refused in words."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from twinfer.core.catalog import resolve_spec
from twinfer.core.config import EngineConfig
from twinfer.core.errors import ConfigError, ModelError
from twinfer.core.params import SamplingParams
from twinfer.core.runtime.convert import regrouped
from twinfer.core.runtime.llm import LLM
from twinfer.core.runtime.loading import Engine, load_engine
from twinfer.core.runtime.perplexity import cut, perplexity, score, scoring_config
from twinfer.core.runtime.run import run_engine
from twinfer.core.runtime.weights import open_weights
from twinfer.core.workload import Workload
from twinfer.simulator.run import simulate

PROMPTS = ["The quick brown fox", "0123456789 " * 4, "a", "What is the answer to everything? Let me think"]


def config(folder: Path, attention: str | None = None, **fields: Any) -> EngineConfig:
    given = {"model": str(folder), "max_num_seqs": 4, "num_kv_blocks": 64, **fields}
    return EngineConfig.model_validate(given | ({"attention": attention} if attention else {}))


def logprobs(engine: Engine, num_tokens: int = 12) -> list[dict[int, float]]:
    """Log probabilities of the best tokens at every step of greedy answers: prefill in chunks, then decode."""
    with LLM.of(engine) as llm:
        results = llm.generate(
            [engine.tokenizer.encode(p) for p in PROMPTS],
            SamplingParams(max_tokens=num_tokens, logprobs=5, ignore_eos=True),
        )
    return [dict(step) for result in results for step in result.outputs[0].logprobs]


def assert_same(ours: Sequence[dict[int, float]], theirs: Sequence[dict[int, float]], tolerance: float) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert a.keys() == b.keys()
        assert all(abs(a[token] - b[token]) <= tolerance for token in a)


@pytest.fixture(scope="module")
def checkpoint(tiny_llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Random tiny checkpoints of 8 query heads: `checkpoint("Qwen3", num_key_value_heads=2)`."""
    made: dict[str, Path] = {}

    def make(architecture: str, **changes: Any) -> Path:
        import transformers

        key = f"{architecture}-{changes}"
        if key not in made:
            folder = tmp_path_factory.mktemp("checkpoint")
            options = dict(
                vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=8,
                num_key_value_heads=4, head_dim=16, max_position_embeddings=256, initializer_range=0.2,
                bos_token_id=0, eos_token_id=1, pad_token_id=2,
            )  # fmt: skip
            made_config = getattr(transformers, f"{architecture}Config")(**(options | changes))
            with torch.random.fork_rng():
                torch.manual_seed(3)
                model = getattr(transformers, f"{architecture}ForCausalLM")(made_config).float()
                for name, tensor in model.named_parameters():
                    if name.endswith(("bias", "norm.weight")):
                        tensor.data.add_(torch.randn_like(tensor) * 0.2)
            model.save_pretrained(folder)
            for name in ("tokenizer.json", "tokenizer_config.json"):
                shutil.copy(tiny_llama_dir / name, folder)
            made[key] = folder
        return made[key]

    return make


EXACT = [
    ("Llama", {}, "mha", 8),
    ("Llama", {"attention_bias": True}, "gqa:num_kv_heads=8", 8),
    ("Llama", {"num_key_value_heads": 1}, "gqa:num_kv_heads=2", 2),
    ("Qwen3", {"num_key_value_heads": 2}, "mha", 8),
    ("Qwen2", {"num_key_value_heads": 2}, "gqa:num_kv_heads=4", 4),
]
LATENT = [
    ("Llama", {}, "mla"),
    ("Llama", {"num_key_value_heads": 8}, "mla:rank=256"),
    ("Llama", {"num_key_value_heads": 1, "attention_bias": True}, "mla"),
    ("Qwen2", {"num_key_value_heads": 2}, "mla:mode=naive"),
]


@pytest.mark.parametrize(("architecture", "changes", "attention", "heads"), EXACT)
def test_repeated_heads_are_exact(
    checkpoint: Callable[..., Path], architecture: str, changes: dict[str, Any], attention: str, heads: int
) -> None:
    folder = checkpoint(architecture, **changes)
    native = load_engine(config(folder, scheduler="continuous:chunk_size=7"))
    other = load_engine(config(folder, attention, scheduler="continuous:chunk_size=7"))
    assert other.model.spec.num_kv_heads == heads
    assert "(exact)" in other.setup.reasons["attention"]
    assert_same(logprobs(other), logprobs(native), 1e-5)


@pytest.mark.parametrize(("architecture", "changes", "attention"), LATENT)
def test_full_rank_latents_are_exact(
    checkpoint: Callable[..., Path], architecture: str, changes: dict[str, Any], attention: str
) -> None:
    folder = checkpoint(architecture, **changes)
    native = load_engine(config(folder, scheduler="continuous:chunk_size=7"))
    other = load_engine(config(folder, attention, scheduler="continuous:chunk_size=7"))
    assert other.model.spec.variant == "mla"
    assert "(exact)" in other.setup.reasons["attention"]
    if "naive" not in attention:
        assert other.setup.kv_bytes_per_token == native.setup.kv_bytes_per_token
    assert_same(logprobs(other), logprobs(native), 1e-4)


def test_pooled_heads_are_the_mean_of_their_group(checkpoint: Callable[..., Path]) -> None:
    """Weights and biases by hand; norms of keys, shared by all heads, stay."""
    folder = checkpoint("Qwen2", num_key_value_heads=4)
    spec, source = resolve_spec(str(folder)), open_weights(folder)
    pooled = regrouped(source, spec, 2)
    for part, columns in (("k_proj.weight", 64), ("v_proj.weight", 64), ("k_proj.bias", None), ("v_proj.bias", None)):
        name = f"model.layers.1.self_attn.{part}"
        tensor, got = source.get(name), pooled.get(name)
        assert pooled.shape(name) == tuple(got.shape) == ((32, columns) if columns else (32,))
        for group in range(2):
            for row in range(16):
                mean = (tensor[32 * group + row] + tensor[32 * group + 16 + row]) / 2
                assert torch.allclose(got[16 * group + row], mean, atol=1e-7)
    untouched = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(pooled.get(untouched), source.get(untouched))
    assert set(pooled.names()) == set(source.names())
    with pytest.raises(ModelError, match="4 KV heads cannot become 3"):
        regrouped(source, spec, 3)


def test_pooling_equal_heads_is_exact(checkpoint: Callable[..., Path]) -> None:
    """What repetition made, pooling takes back."""
    folder = checkpoint("Qwen3", num_key_value_heads=2)
    spec, source = resolve_spec(str(folder)), open_weights(folder)
    there = regrouped(source, spec, 8)
    back = regrouped(there, replace(spec, num_kv_heads=8), 2)
    for name in source.names():
        assert torch.equal(back.get(name), source.get(name)), name


@pytest.mark.parametrize("attention", ["mqa", "gqa:num_kv_heads=2"])
def test_lossy_conversions_run_on_less_memory_in_both_worlds(checkpoint: Callable[..., Path], attention: str) -> None:
    folder = checkpoint("Llama", attention_bias=True)
    workload = Workload(num_requests=3, input_len=12, output_len=5, rate=math.inf)
    native = run_engine(config(folder), workload)
    real = run_engine(config(folder, attention), workload)
    predicted = simulate(config(folder, attention), workload)
    assert real.kv_bytes_per_token == predicted.kv_bytes_per_token < native.kv_bytes_per_token
    assert real.reasons["attention"] == predicted.reasons["attention"]
    assert "(lossy" in real.reasons["attention"]
    assert f"{real.kv_bytes_per_token:,.0f} B after" in real.reasons["attention"]
    assert "attention" not in native.reasons
    assert real.metrics["num_completed"] == 3


def test_weights_of_another_variant_than_loaded_are_refused(tiny_llama_dir: Path) -> None:
    engine = load_engine(config(tiny_llama_dir))
    with pytest.raises(ConfigError, match="the loaded model is gqa and caches 2 KV heads"):
        engine.reconfigured(config(tiny_llama_dir, "mqa"))


def test_a_variant_that_cannot_convert_is_refused(tiny_llama_dir: Path) -> None:
    from twinfer.core.registry import Registry
    from twinfer.core.runtime.families import load_model

    spec = resolve_spec(str(tiny_llama_dir))
    with pytest.raises(ModelError, match="cannot convert weights of variant gqa with 2 KV heads"):
        load_model(
            replace(spec, num_kv_heads=4, attention="odd"), tiny_llama_dir, Registry(entry_points=False),
            checkpoint=spec, attention=object(),
        )  # fmt: skip


def test_error_falls_as_latents_grow(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Perplexity of random weights is no measure; the distance of the log probabilities is."""
    folder = checkpoint("Llama")
    text = "Calibration and scoring: 12 monkeys, 4 blind mice, (1 of each). " * 8
    calibration = tmp_path / "calibration.txt"
    calibration.write_text(text * 2)
    losses = []
    for rank in (1.0, 0.85, 0.6, 0.3):
        attention = f"mla:rank={rank},calibration={calibration}"
        engine = load_engine(scoring_config(config(folder, attention), 64))
        losses.append(score(engine, cut(engine.tokenizer, text, 64), 64))
    native = perplexity(config(folder), text, 64)
    errors = [
        sum(abs(ours - theirs) for (ours, _), (theirs, _) in zip(found.losses, native.losses, strict=True))
        for found in losses
    ]
    assert errors[0] < 1e-2 * errors[1]
    assert errors == sorted(errors)


def test_lossy_latents_are_the_same_for_both_worlds(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    text = tmp_path / "calibration.txt"
    text.write_text("What to keep and what to lose. " * 40)
    folder = checkpoint("Qwen2", num_key_value_heads=2)
    attention = f"mla:rank=0.5,rope_dim=8,calibration={text}"
    workload = Workload(num_requests=3, input_len=12, output_len=5, rate=math.inf)
    native = run_engine(config(folder), workload)
    real = run_engine(config(folder, attention), workload)
    predicted = simulate(config(folder, attention), workload)
    assert real.kv_bytes_per_token == predicted.kv_bytes_per_token == native.kv_bytes_per_token / 2
    assert real.reasons["attention"] == predicted.reasons["attention"]
    assert "2 KV heads, keys and values factored into 24 latent and 8 rotary values (lossy" in real.reasons["attention"]
    assert real.metrics["num_completed"] == 3


@pytest.mark.parametrize(
    ("architecture", "changes", "attention", "words"),
    [
        ("Qwen3", {}, "mla", "its keys are normed head by head"),
        ("Mistral", {"sliding_window": 8}, "mla", "a sliding window"),
        ("Llama", {}, "mla:rank=500", "has 128 keys and values per token and layer, 500 would be kept; keep 4 to 128"),
        ("Llama", {}, "mla:rank=1.5", "neither a share nor a number"),
        ("Llama", {}, "mla:rank=0.001", "keep 4 to 128"),
        ("Llama", {}, "mla:rank=32,rope_dim=33", "use an even number up to 31"),
        ("Llama", {}, "mla:rank=0.5,rope_dim=66", "64 key dimensions can be turned"),
        ("Llama", {}, "mla:rank=0.5,calibration=nowhere.txt", "--attention mla:calibration='nowhere.txt'"),
    ],
)
def test_what_cannot_become_latents_is_refused(
    checkpoint: Callable[..., Path], architecture: str, changes: dict[str, Any], attention: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        load_engine(config(checkpoint(architecture, **changes), attention))


@pytest.mark.parametrize("content", ["Too short.", ""])
def test_a_short_calibration_text_is_refused(checkpoint: Callable[..., Path], tmp_path: Path, content: str) -> None:
    text = tmp_path / "calibration.txt"
    text.write_text(content)
    with pytest.raises(ConfigError, match="says too little of 64 dimensions"):
        load_engine(config(checkpoint("Llama"), f"mla:rank=0.5,calibration={text}"))


def test_two_ranks_hold_a_converted_checkpoint(tiny_llama_dir: Path) -> None:
    """Conversion comes first, then each rank takes its heads."""

    def answers(**fields: Any) -> list[tuple[int, ...]]:
        engine = load_engine(config(tiny_llama_dir, **fields))
        with LLM.of(engine) as llm:
            ids = [engine.tokenizer.encode(p) for p in PROMPTS]
            results = llm.generate(ids, SamplingParams(max_tokens=8, ignore_eos=True))
        engine.close()
        return [tuple(result.outputs[0].token_ids) for result in results]

    assert answers(attention="mla", tp=2) == answers()
