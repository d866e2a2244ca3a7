"""Wrong calls of `LLM` and `SamplingParams`: a typed error before anything runs, and the engine stays usable."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from twinfer.core.errors import ConfigError, RequestError, TwinferError
from twinfer.core.params import SamplingParams
from twinfer.core.runtime.llm import LLM

SHORT = SamplingParams(max_tokens=2)


@pytest.fixture(scope="module")
def llm(tiny_llama_dir: Path) -> Iterator[LLM]:
    with LLM(str(tiny_llama_dir), max_model_len=128, num_kv_blocks=200) as made:
        yield made


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda llm: llm.generate(None, SHORT), "NoneType"),
        (lambda llm: llm.generate(5, SHORT), "int"),
        (lambda llm: llm.generate({"a": 1}, SHORT), "dict"),
        (lambda llm: llm.generate(iter(["a"]), SHORT), "iterator"),
        (lambda llm: llm.generate(b"abc", SHORT), "bytes"),
        (lambda llm: llm.generate([b"abc"], SHORT), "bytes"),
        (lambda llm: llm.generate("\ud800", SHORT), "surrogate"),
        (lambda llm: llm.generate("a", 5), "SamplingParams"),
        (lambda llm: llm.generate("a", SHORT, priority="high"), "priority"),
        (lambda llm: llm.generate("a", SHORT, priority=float("nan")), "priority"),
        (lambda llm: llm.generate("a", SamplingParams(stop_token_ids=(10**9,))), "stop_token_ids"),
        (lambda llm: llm.abort(["a"]), "list"),
        (lambda llm: llm.result(["a"]), "not known"),
        (lambda llm: llm.chat(5), "int"),
        (lambda llm: llm.chat([5]), "int"),
    ],
)
def test_a_wrong_call_is_a_request_error_and_breaks_nothing(llm: LLM, call: Callable[[LLM], Any], word: str) -> None:
    before = llm.generate("ab", SHORT)[0].outputs[0].token_ids
    with pytest.raises(RequestError, match=word) as caught:
        call(llm)
    assert "\n" not in str(caught.value)
    assert llm.generate("ab", SHORT)[0].outputs[0].token_ids == before


@pytest.mark.parametrize(
    "given",
    [{"n": 10**9, "temperature": 1.0}, {"stop_token_ids": (-1,)}, {"stop_token_ids": ("a",)}, {"ignore_eos": "yes"}],
)
def test_sampling_options_that_cannot_be_honoured_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(given))):
        SamplingParams(**given)


def test_threads_take_turns_and_each_gets_its_own_answers(llm: LLM) -> None:
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    prompts = ["ab", "cde", "hello", "x"]
    alone = [o.outputs[0].token_ids for o in llm.generate(prompts, params)]
    found: dict[int, Any] = {}

    def work(number: int) -> None:
        try:
            if number:
                found[number] = [o.outputs[0].token_ids for o in llm.generate(prompts, params)]
            else:
                found[number] = [tuple(t for d in llm.stream(p, params) for t in d.token_ids) for p in prompts]
        except BaseException as error:
            found[number] = error

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    assert found == dict.fromkeys(range(4), alone)


def test_a_pool_sized_twice_is_refused(tiny_llama_dir: Path) -> None:
    with pytest.raises(TwinferError, match="give one of them"):
        LLM(str(tiny_llama_dir), num_kv_blocks=20, kv_memory_bytes=2**30)
