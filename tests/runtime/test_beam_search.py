"""Beam search of the engine: the hypotheses and scores of transformers' `generate(num_beams=...)`, and itself under load."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from twinfer.core.config import EngineConfig
from twinfer.core.errors import ConfigError
from twinfer.core.params import SamplingParams
from twinfer.core.plan import RowResult
from twinfer.core.request import Request
from twinfer.core.runtime.llm import LLM
from twinfer.core.runtime.loading import Engine, load_engine
from twinfer.core.runtime.sampler import SampleEntry, Sampler

PROMPTS = ["Hello there", "a", "The quick brown fox jumps over the lazy dog.", "12345"]
EOS = 1


@pytest.fixture(scope="module")
def engine(tiny_llama_dir: Path) -> Iterator[Engine]:
    loaded = load_engine(EngineConfig(model=str(tiny_llama_dir), max_model_len=128, num_kv_blocks=200))
    yield loaded
    loaded.close()


@pytest.fixture(scope="module")
def reference(tiny_llama_dir: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(tiny_llama_dir).eval()


def make(engine: Engine, **options: Any) -> LLM:
    config = EngineConfig.model_validate(engine.setup.config.model_dump() | options)
    return LLM.of(engine.reconfigured(config))


def theirs(
    model: LlamaForCausalLM, prompt: list[int], width: int, max_tokens: int, ends: list[int], **options: Any
) -> list[tuple[tuple[int, ...], float]]:
    """transformers' hypotheses with their scores, best first."""
    given = torch.tensor([prompt])
    out = model.generate(
        given, attention_mask=torch.ones_like(given), num_beams=width, num_return_sequences=width, do_sample=False,
        max_new_tokens=max_tokens, eos_token_id=ends, pad_token_id=2, return_dict_in_generate=True, output_scores=True,
        **options,
    )  # fmt: skip
    found = []
    for row, score in zip(out.sequences[:, len(prompt) :].tolist(), out.sequences_scores.tolist(), strict=True):
        end = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
        found.append((tuple(row[:end]), score))
    return found


@pytest.mark.parametrize(
    ("width", "ends", "length_penalty", "early", "min_tokens"),
    [
        (2, [EOS], 1.0, False, 0),
        (4, [EOS], 1.0, False, 0),
        (4, [EOS, 40, 41, 70, 100], 1.0, False, 0),
        (4, [EOS, 40, 41, 70, 100], 0.0, "never", 0),
        (3, [EOS, 40, 41, 70, 100], 2.0, "never", 4),
        (3, [EOS, 40, 41, 70, 100], -1.0, True, 0),
        (5, [EOS, *range(60, 90)], 1.0, True, 3),
        (5, [EOS, *range(60, 90)], 0.6, False, 0),
    ],
)
def test_hypotheses_and_scores_are_those_of_transformers(
    engine: Engine, reference: LlamaForCausalLM, width: int, ends: list[int], length_penalty: float, early: Any,
    min_tokens: int,
) -> None:  # fmt: skip
    llm = make(engine)
    params = SamplingParams(
        beam_width=width, max_tokens=14, stop_token_ids=tuple(ends), length_penalty=length_penalty,
        early_stopping=early, min_tokens=min_tokens, logprobs=1,
    )  # fmt: skip
    reasons = set()
    for text, result in zip(PROMPTS, llm.generate(PROMPTS, params), strict=True):
        options = {"length_penalty": length_penalty, "early_stopping": early}
        if min_tokens:
            options["min_new_tokens"] = min_tokens
        expected = theirs(reference, engine.tokenizer.encode(text), width, 14, ends, **options)
        assert [o.token_ids for o in result.outputs] == [tokens for tokens, _ in expected]
        for output, (tokens, score) in zip(result.outputs, expected, strict=True):
            assert output.cumulative_logprob is not None and output.logprobs is not None
            assert output.cumulative_logprob / len(tokens) ** length_penalty == pytest.approx(score, rel=2e-6, abs=2e-5)
            own = [table[token] for table, token in zip(output.logprobs, output.token_ids, strict=True)]
            assert sum(own) == pytest.approx(output.cumulative_logprob, abs=1e-6)
            shown = output.token_ids[:-1] if output.finish_reason == "stop" else output.token_ids
            assert output.text == engine.tokenizer.decode(shown)
            reasons.add(output.finish_reason)
    assert "length" in reasons or len(ends) > 1
    assert "stop" in reasons or len(ends) < 10


PRESSED = {
    "swap": {"num_kv_blocks": 16, "preemption": "swap", "host_kv_bytes": 2**22},
    "recompute": {"num_kv_blocks": 16},
    "chunks": {"scheduler": {"name": "continuous", "options": {"chunk_size": 3}}},
    "no sharing": {"kv_cache": {"name": "paged", "options": {"block_size": 8, "prefix_sharing": False}}},
    "contiguous": {"kv_cache": {"name": "contiguous"}, "num_kv_blocks": 9},
    "two rows a step": {"max_num_seqs": 2, "max_num_batched_tokens": 16},
}


@pytest.mark.parametrize("how", sorted(PRESSED))
def test_beams_under_pressure_are_those_of_a_quiet_engine(engine: Engine, how: str) -> None:
    options = {"kv_cache": {"name": "paged", "options": {"block_size": 8}}, "num_kv_blocks": 200} | PRESSED[how]
    params = [SamplingParams(beam_width=2 + i % 3, max_tokens=24, stop_token_ids=(40, 41)) for i in range(4)]
    quiet = [make(engine).generate(p, s)[0] for p, s in zip(PROMPTS, params, strict=True)]
    llm = make(engine, **options)
    crowd = llm.generate(
        [*PROMPTS, *PROMPTS], [*params, *[SamplingParams(max_tokens=30, ignore_eos=True)] * len(PROMPTS)]
    )
    for alone, together in zip(quiet, crowd[:4], strict=True):
        assert [o.token_ids for o in together.outputs] == [o.token_ids for o in alone.outputs]
        for a, b in zip(alone.outputs, together.outputs, strict=True):
            assert a.cumulative_logprob == pytest.approx(b.cumulative_logprob, abs=1e-4)
            assert (a.text, a.finish_reason, a.stop_reason) == (b.text, b.finish_reason, b.stop_reason)
    if how in ("swap", "recompute"):
        assert sum(o.num_preemptions for r in crowd for o in r.outputs)
    assert llm._driver.core.audit() == [] and not llm._driver.core.has_work


def test_streams_of_beams_tell_all_at_the_end(engine: Engine) -> None:
    llm = make(engine)
    params = SamplingParams(beam_width=3, max_tokens=6)
    (result,) = llm.generate("Hello", params)
    deltas = list(llm.stream("Hello", params))
    for output in result.outputs:
        mine = [d for d in deltas if d.index == output.index]
        assert "".join(d.text for d in mine) == output.text
        assert sum((d.token_ids for d in mine), ()) == output.token_ids
        assert mine[-1].finish_reason == output.finish_reason


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"n": 2, "temperature": 1.0}, "n"), ({"temperature": 0.5}, "temperature"), ({"top_k": 3}, "top_k"),
        ({"top_p": 0.5}, "top_p"), ({"min_p": 0.1}, "min_p"), ({"stop": ("x",)}, "stop"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"), ({"presence_penalty": 0.1}, "presence_penalty"),
        ({"frequency_penalty": 0.1}, "frequency_penalty"), ({"early_stopping": "soon"}, "early_stopping"),
        ({"length_penalty": 11.0}, "length_penalty"),
    ],
)  # fmt: skip
def test_what_does_not_go_with_beams_is_refused(options: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SamplingParams(beam_width=2, **options)
    assert caught.value.option == name


def test_ties_go_to_the_smaller_id() -> None:
    logits = torch.zeros(2, 50)
    logits[0, [7, 30]] = 1.0
    logits[1, 49] = 2.0
    entries = [
        SampleEntry("a", Request(id="a", prompt=(1,), params=SamplingParams(beam_width=w)), 0, 1, 0, (), (1,))
        for w in (3, 2)
    ]
    first, second = Sampler(50).sample(logits, entries)
    assert [t for t, _ in first.candidates] == [7, 30, 0, 1, 2, 3]
    assert [t for t, _ in second.candidates] == [49, 0, 1, 2]


def test_a_row_without_finite_logits_fails() -> None:
    request = Request(id="a", prompt=(1,), params=SamplingParams(beam_width=2))
    (found,) = Sampler(4).sample(torch.full((1, 4), torch.nan), [SampleEntry("a", request, 0, 1, 0, (), (1,))])
    assert isinstance(found, RowResult) and found.failure and not found.candidates
