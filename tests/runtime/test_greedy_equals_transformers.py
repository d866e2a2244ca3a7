"""Greedy tokens of the engine equal transformers' `generate` in float32, token for token, on HumanEval prompts.

The reference is `LlamaForCausalLM` with the weights of the same GGUF (that they equal transformers' own conversion
is another test), run on one prompt at a time. What runs where:

* always: all 20 prompts with batch 8 over both KV caches with chunks of 7, 64 and off, with batch 1 over paged KV with
  chunks of 64, and under forced preemption (a pool that hardly holds the longest) with chunks of 64; fewer prompts
  with batch 1 over contiguous KV and with preemption of whole prompts; the rest of the cross of KV cache, batch and
  chunk (all of batch 1, chunks of one token) on the shortest prompts;
* with TWINFER_FULL_EQUALITY=1 (about 20 minutes): the whole cross on all 20 prompts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from prompts_of_human_eval import human_eval_prompts

from twinfer.core.config import EngineConfig
from twinfer.core.params import SamplingParams
from twinfer.core.runtime.llm import LLM
from twinfer.core.runtime.loading import Engine, load_engine

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

    from twinfer.core.spec import ModelSpec

pytestmark = pytest.mark.model

NUM_PROMPTS, NUM_TOKENS = 20, 24
FULL = bool(os.environ.get("TWINFER_FULL_EQUALITY"))
MAX_LEN = 512
KV_CACHES = {"paged": "paged:block_size=16", "contiguous": "contiguous"}
CHUNKS = {
    "chunk-1": "continuous:chunk_size=1",
    "chunk-7": "continuous:chunk_size=7",
    "chunk-64": "continuous:chunk_size=64",
    "unchunked": "continuous:chunked_prefill=false",
}


@dataclass(frozen=True)
class Case:
    prompt: tuple[int, ...]
    answer: tuple[int, ...]


@pytest.fixture(scope="module")
def engine(smollm2_gguf: Path) -> Iterator[Engine]:
    loaded = load_engine(EngineConfig(model=str(smollm2_gguf), dtype="float32", max_model_len=MAX_LEN))
    yield loaded
    loaded.close()


@pytest.fixture(scope="module")
def cases(
    engine: Engine, smollm2_gguf: Path, transformers_llama: Callable[[ModelSpec, Path], LlamaForCausalLM]
) -> list[Case]:
    """Prompts and transformers' answers, longest wait of this file (a token at a time, a prompt at a time)."""
    import torch

    model = transformers_llama(engine.spec, smollm2_gguf)
    found = []
    with torch.inference_mode():
        for text in human_eval_prompts(NUM_PROMPTS):
            prompt = engine.tokenizer.encode(text)
            ids = torch.tensor([prompt])
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, do_sample=False
            )  # fmt: skip
            found.append(Case(tuple(prompt), tuple(out[0, len(prompt) :].tolist())))
    return found


def check(
    engine: Engine, cases: list[Case], *, kv_cache: str, scheduler: str, batch: int, num_tokens: int = NUM_TOKENS,
    num_kv_blocks: int | None = None, max_len: int = MAX_LEN,
) -> int:  # fmt: skip
    """Run all cases and compare; returns how often sequences were preempted."""
    config = EngineConfig(
        model=engine.setup.config.model, dtype="float32", kv_cache=kv_cache, scheduler=scheduler,  # type: ignore[arg-type]
        max_num_seqs=batch, max_model_len=max_len, num_kv_blocks=num_kv_blocks,
    )  # fmt: skip
    with LLM.of(engine.reconfigured(config)) as llm:
        results = llm.generate([c.prompt for c in cases], SamplingParams(max_tokens=num_tokens))
    for case, result in zip(cases, results, strict=True):
        expected = case.answer[:num_tokens]
        assert result.outputs[0].token_ids == expected, f"prompt of {len(case.prompt)} tokens"
        assert result.outputs[0].finish_reason == ("stop" if expected[-1] == 2 else "length")
    return sum(r.outputs[0].num_preemptions for r in results)


def test_prompts_are_of_mixed_lengths(cases: list[Case]) -> None:
    lengths = [len(c.prompt) for c in cases]
    assert len(cases) == NUM_PROMPTS
    assert min(lengths) < 80 and max(lengths) > 200
    assert len({c.answer for c in cases}) > NUM_PROMPTS // 2


@pytest.mark.parametrize(("kv_cache", "chunk"), [("paged", "chunk-64"), ("contiguous", "unchunked")])
def test_batch_1(engine: Engine, cases: list[Case], kv_cache: str, chunk: str) -> None:
    some = cases if FULL or kv_cache == "paged" else cases[:8]
    check(engine, some, kv_cache=KV_CACHES[kv_cache], scheduler=CHUNKS[chunk], batch=1)


@pytest.mark.parametrize("chunk", ["chunk-64", "unchunked"])
def test_forced_preemption(engine: Engine, cases: list[Case], chunk: str) -> None:
    """Eight sequences over a pool for hardly more than the longest one: several are thrown out and computed again."""
    some = cases if FULL or chunk == "chunk-64" else cases[:10]
    longest = max(len(c.prompt) for c in some) + NUM_TOKENS
    preempted = check(
        engine, some, kv_cache="paged:block_size=16,headroom=0,prefix_sharing=false", scheduler=CHUNKS[chunk],
        batch=8, num_kv_blocks=-(-longest // 16), max_len=longest,
    )  # fmt: skip
    assert preempted >= 2


def test_static_batches(engine: Engine, cases: list[Case]) -> None:
    check(engine, cases[:8], kv_cache="contiguous", scheduler="static", batch=4)


@pytest.mark.parametrize("kv_cache", KV_CACHES)
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("chunk", CHUNKS)
def test_cross(engine: Engine, cases: list[Case], kv_cache: str, batch: int, chunk: str) -> None:
    some, num_tokens = cases, NUM_TOKENS
    if not FULL and (batch == 1 or chunk == "chunk-1"):
        some, num_tokens = sorted(cases, key=lambda c: len(c.prompt))[: 2 if batch == 1 else 3], 8
    check(
        engine, some, kv_cache=KV_CACHES[kv_cache], scheduler=CHUNKS[chunk], batch=batch, num_tokens=num_tokens
    )  # fmt: skip


def test_chat_gives_a_sensible_answer(engine: Engine) -> None:
    with LLM.of(engine.reconfigured(engine.setup.config)) as llm:
        messages = [{"role": "user", "content": "What is the capital of France?"}]
        out = llm.chat(messages, SamplingParams(max_tokens=20))[0].outputs[0]
    assert (out.text, out.finish_reason, out.stop_reason) == ("The capital of France is Paris.", "stop", 2)
