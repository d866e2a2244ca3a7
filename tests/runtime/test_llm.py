"""The public API on a tiny random model: answers, streams, aborts, and everything that can be asked wrongly."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from twinfer.core.config import EngineConfig
from twinfer.core.errors import ConfigError, ModelError, RequestError
from twinfer.core.params import SamplingParams
from twinfer.core.runtime.llm import LLM, RequestOutput, StreamDelta
from twinfer.core.runtime.loading import Engine, load_engine
from twinfer.kernels import native

PROMPTS = ["Hello there", "a", "The quick brown fox jumps over the lazy dog.", "12345"]
GREEDY = SamplingParams(max_tokens=20, ignore_eos=True)
RANDOM = SamplingParams(max_tokens=20, temperature=1.0, seed=3, ignore_eos=True)


@pytest.fixture(scope="module")
def engine(tiny_llama_dir: Path) -> Iterator[Engine]:
    loaded = load_engine(EngineConfig(model=str(tiny_llama_dir), max_model_len=128, num_kv_blocks=200))
    yield loaded
    loaded.close()


@pytest.fixture
def llm(engine: Engine) -> LLM:
    return LLM.of(engine.reconfigured(engine.setup.config))


def make(engine: Engine, **options: Any) -> LLM:
    fields = {"max_model_len": 128, "num_kv_blocks": None} | options
    config = EngineConfig.model_validate(engine.setup.config.model_dump() | fields)
    return LLM.of(engine.reconfigured(config))


def ids(results: list[RequestOutput]) -> list[tuple[int, ...]]:
    return [o.token_ids for r in results for o in r.outputs]


def idle(llm: LLM) -> bool:
    """Nothing left in the core after what was said is done."""
    while llm.step():
        pass
    core = llm._driver.core
    return not core.has_work and core.audit() == []


def test_answers_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    together = llm.generate(PROMPTS, GREEDY)
    assert [r.prompt for r in together] == PROMPTS
    assert [len(r.outputs[0].token_ids) for r in together] == [20] * 4
    assert [r.outputs[0].finish_reason for r in together] == ["length"] * 4
    alone = [llm.generate(p, GREEDY)[0] for p in PROMPTS]
    assert ids(together) == ids(alone)
    assert len(set(ids(together))) == 4
    for result in together:
        assert list(result.prompt_token_ids) == llm.tokenizer.encode(result.prompt or "")
        assert result.outputs[0].text == llm.tokenizer.decode(result.outputs[0].token_ids)
    assert idle(llm)


def test_prompts_may_be_texts_or_ids_one_or_many(llm: LLM) -> None:
    tokens = llm.tokenizer.encode("abc")
    expected = ids(llm.generate("abc", GREEDY))
    assert ids(llm.generate(["abc"], GREEDY)) == ids(llm.generate(tokens, GREEDY)) == expected
    assert ids(llm.generate([tokens, "abc"], GREEDY)) == expected * 2
    assert llm.generate(tokens, GREEDY)[0].prompt is None
    assert llm.generate([]) == []


def test_params_may_differ_by_prompt(llm: LLM) -> None:
    results = llm.generate(["x", "x", "x"], [SamplingParams(max_tokens=n, ignore_eos=True) for n in (1, 5, 9)])
    assert [len(t) for t in ids(results)] == [1, 5, 9]


@pytest.mark.parametrize("params", [GREEDY, RANDOM, SamplingParams(max_tokens=12, temperature=0.8, n=3, seed=1)])
def test_joined_deltas_are_the_answer(llm: LLM, params: SamplingParams) -> None:
    whole = llm.generate("Once upon", params)[0]
    deltas = list(llm.stream("Once upon", params))
    for output in whole.outputs:
        mine = [d for d in deltas if d.index == output.index]
        assert "".join(d.text for d in mine) == output.text
        assert tuple(t for d in mine for t in d.token_ids) == output.token_ids
        assert [d.finish_reason for d in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1].finish_reason == output.finish_reason
    assert idle(llm)


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_seqs": 1},
        {"scheduler": "continuous:chunk_size=3"},
        {"kv_cache": "contiguous"},
        {"scheduler": "static"},
        {"num_kv_blocks": 9, "kv_cache": "paged:block_size=16,headroom=0"},
        {"max_num_batched_tokens": 5},
    ],
    ids=str,
)
def test_edge_31_sampled_text_does_not_depend_on_how_it_was_computed(
    engine: Engine, llm: LLM, options: dict[str, Any]
) -> None:
    """Seeded samples (n > 1, mixed with greedy neighbours) under other batches, chunks, caches and preemption."""
    params = [
        RANDOM,
        GREEDY,
        SamplingParams(max_tokens=30, temperature=0.7, top_p=0.9, n=3, seed=8, ignore_eos=True),
        RANDOM,
    ]
    expected = ids(llm.generate(PROMPTS, params))
    other = make(engine, **options)
    results = other.generate(PROMPTS, params)
    assert ids(results) == expected
    if "num_kv_blocks" in options:
        assert sum(o.num_preemptions for r in results for o in r.outputs) > 0
    assert idle(other)


def test_seeds_and_samples_differ(llm: LLM) -> None:
    params = SamplingParams(max_tokens=16, temperature=1.0, n=4, seed=5, ignore_eos=True)
    (first,) = llm.generate("seed", params)
    assert len({o.token_ids for o in first.outputs}) == 4
    assert ids(llm.generate("seed", params)) == ids([first])
    assert ids(
        llm.generate("seed", SamplingParams(max_tokens=16, temperature=1.0, n=4, seed=6, ignore_eos=True))
    ) != ids([first])


def test_edge_29_stop_strings_trim_text_ids_and_logprobs_together(llm: LLM) -> None:
    (plain,) = llm.generate("stop me", SamplingParams(max_tokens=24, ignore_eos=True, logprobs=1))
    full = plain.outputs[0]
    text = full.text
    stop = text[6:9]
    at = text.find(stop)
    kept = next(k for k in range(25) if stop in llm.tokenizer.decode(full.token_ids[:k]))
    for params in (
        SamplingParams(max_tokens=24, ignore_eos=True, logprobs=1, stop=(stop,)),
        SamplingParams(max_tokens=24, ignore_eos=True, logprobs=1, stop=("never there", stop, "other")),
    ):
        out = llm.generate("stop me", params)[0].outputs[0]
        assert (out.text, out.finish_reason, out.stop_reason) == (text[:at], "stop", stop)
        assert out.token_ids == full.token_ids[:kept]
        assert out.logprobs == (full.logprobs or ())[:kept]
        deltas = list(llm.stream("stop me", params))
        assert "".join(d.text for d in deltas) == text[:at]
        assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", stop)
    assert idle(llm)


def test_stop_ids_end_the_sample_and_add_no_text(llm: LLM) -> None:
    full = llm.generate("ids", GREEDY)[0].outputs[0]
    wanted = full.token_ids[4]
    first = full.token_ids.index(wanted)
    out = llm.generate("ids", SamplingParams(max_tokens=20, ignore_eos=True, stop_token_ids=(wanted,)))[0].outputs[0]
    assert (out.token_ids, out.finish_reason, out.stop_reason) == (full.token_ids[: first + 1], "stop", wanted)
    assert out.text == full.text[:first]


def test_min_tokens_put_off_every_kind_of_stop(llm: LLM) -> None:
    full = llm.generate("ids", GREEDY)[0].outputs[0]
    params = SamplingParams(max_tokens=20, min_tokens=10, ignore_eos=True, stop_token_ids=full.token_ids[:1])
    out = llm.generate("ids", params)[0].outputs[0]
    assert full.token_ids[0] not in out.token_ids[:10]
    params = SamplingParams(max_tokens=20, min_tokens=10, ignore_eos=True, stop=(full.text[0],))
    out = llm.generate("ids", params)[0].outputs[0]
    assert len(out.token_ids) > 10 and out.token_ids == full.token_ids[: len(out.token_ids)]


def test_eos_ends_the_sample_unless_ignored(engine: Engine) -> None:
    llm = make(engine)
    favourite = llm.generate("eos", GREEDY)[0].outputs[0].token_ids[2]
    llm._engine.tokenizer.eos_token_ids = (favourite,)
    try:
        out = llm.generate("eos", SamplingParams(max_tokens=20))[0].outputs[0]
        assert (out.finish_reason, out.stop_reason, out.token_ids[-1]) == ("stop", favourite, favourite)
        assert len(llm.generate("eos", GREEDY)[0].outputs[0].token_ids) == 20
    finally:
        llm._engine.tokenizer.eos_token_ids = (1,)


def test_logprobs_are_one_table_a_token(llm: LLM) -> None:
    out = llm.generate("log", SamplingParams(max_tokens=6, logprobs=2, ignore_eos=True))[0].outputs[0]
    assert out.logprobs is not None and len(out.logprobs) == 6
    for token, table in zip(out.token_ids, out.logprobs, strict=True):
        assert len(table) == 2 and table[token] == max(table.values()) <= 0
    assert llm.generate("log", GREEDY)[0].outputs[0].logprobs is None


def test_max_model_len_ends_an_answer(engine: Engine) -> None:
    llm = make(engine, max_model_len=16)
    out = llm.generate("0123456789", SamplingParams(max_tokens=50, ignore_eos=True))[0].outputs[0]
    assert (len(out.token_ids), out.finish_reason) == (6, "length")
    llm.generate("0" * 15, GREEDY)


def test_prefix_cache_hits_are_reported_and_change_nothing(llm: LLM) -> None:
    prompt = "x" * 40
    first, second = (llm.generate(prompt, GREEDY)[0].outputs[0] for _ in range(2))
    assert first.num_cached_tokens == 0 and second.num_cached_tokens == 32
    assert (first.num_hit_tokens, second.num_hit_tokens) == (0, 32)
    assert first.token_ids == second.token_ids


def test_chat_renders_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi"}]
    (answer,) = llm.chat(messages, GREEDY)
    assert answer.outputs[0].token_ids == ids(llm.generate("user: hi\nassistant: ", GREEDY))[0]
    assert ids(llm.chat([messages, messages], GREEDY)) == [answer.outputs[0].token_ids] * 2
    with pytest.raises(RequestError, match="at least one message"):
        llm.chat([], GREEDY)
    with pytest.raises(RequestError, match=r"messages\[0\]"):
        llm.chat([{"role": "user"}], GREEDY)


# --- streams and aborts -----------------------------------------------------------------------------


def test_edge_36_closing_a_stream_aborts_it(llm: LLM) -> None:
    stream = llm.stream("abort me", SamplingParams(max_tokens=100, ignore_eos=True))
    assert isinstance(next(stream), StreamDelta)
    stream.close()
    core = llm._driver.core
    steps = core.num_steps
    assert idle(llm)
    assert core.num_steps <= steps + 1  # nobody computes for a client that went away


def test_edge_36_a_stream_nobody_reads_is_aborted_when_it_is_dropped(llm: LLM) -> None:
    stream = llm.stream("never read", SamplingParams(max_tokens=100, ignore_eos=True))
    request = stream.request_id
    del stream
    assert idle(llm)
    assert llm._driver.core.num_steps == 0
    with pytest.raises(RequestError, match=request):
        llm.result(request)
    with llm.stream("left early", SamplingParams(max_tokens=100, ignore_eos=True)) as early:
        next(early)
    assert list(early) == []
    assert idle(llm) and llm._driver.core.num_steps <= 2


@pytest.mark.parametrize("after", range(0, 9, 2))
def test_edge_36_abort_at_any_moment_leaves_nothing(engine: Engine, after: int) -> None:
    llm = make(engine, scheduler="continuous:chunk_size=4", max_num_seqs=2)
    victims = [llm.submit(p, SamplingParams(max_tokens=40, ignore_eos=True, temperature=1.0, n=2)) for p in PROMPTS]
    kept = llm.submit("keep", GREEDY)
    for _ in range(after):
        llm.step()
    for victim in victims:
        llm.abort(victim)
    llm.abort("never heard of")
    assert llm.result(kept).outputs[0].token_ids == ids(llm.generate("keep", GREEDY))[0]
    for victim in victims:
        outputs = llm.result(victim).outputs
        assert {o.finish_reason for o in outputs} <= {"abort", "length"}
        assert all(len(o.token_ids) <= 40 for o in outputs)
    assert idle(llm)


def test_abort_within_a_stream_and_from_another_thread(llm: LLM) -> None:
    request = llm.submit("loop", SamplingParams(max_tokens=110, ignore_eos=True))
    reasons = []
    for count, delta in enumerate(llm.deltas(request)):
        if count == 3:
            llm.abort(request)
        reasons.append(delta.finish_reason)
    assert reasons[-1] == "abort" and len(reasons) < 10

    request = llm.submit("loop", SamplingParams(max_tokens=110, ignore_eos=True))
    thread = threading.Thread(target=llm.abort, args=(request,))
    thread.start()
    thread.join()
    out = llm.result(request).outputs[0]
    assert out.finish_reason == "abort" and len(out.token_ids) < 110
    assert idle(llm)


def test_streams_and_generate_share_the_engine(llm: LLM) -> None:
    expected = llm.generate("first", GREEDY)[0].outputs[0]
    stream = llm.stream("first", GREEDY)
    seen = [next(stream)]
    assert len(ids(llm.generate("second", GREEDY))[0]) == 20
    other = llm.submit("third", GREEDY)
    seen += list(stream)
    assert "".join(d.text for d in seen) == expected.text
    assert len(llm.result(other).outputs[0].token_ids) == 20
    with pytest.raises(RequestError, match="not known"):
        llm.result(other)


def test_an_exception_during_generate_leaves_no_request_behind(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    poll, calls = llm._poll, iter(range(100))

    def interrupted(*args: Any, **options: Any) -> bool:
        if next(calls) == 2:
            raise KeyboardInterrupt
        return poll(*args, **options)

    monkeypatch.setattr(llm, "_poll", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, SamplingParams(max_tokens=100, ignore_eos=True))
    monkeypatch.undo()
    assert not llm._live
    assert idle(llm)


def test_a_failed_step_is_told_on_every_later_call(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make(engine)

    def broken(plan: object) -> None:
        raise OSError("the device fell off")

    monkeypatch.setattr(llm._driver.executor, "execute", broken)
    with pytest.raises(OSError, match="fell off"):
        llm.generate("x")
    with pytest.raises(RuntimeError, match="fell off"):
        llm.generate("x")


# --- what can be asked wrongly ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompts", "params", "says"),
    [
        ("", None, "the prompt is empty"),
        ([], None, None),
        (["ok", ""], None, "prompt 1 is empty"),
        (["ok", []], None, "prompt 1 is empty"),
        ([[1, 2, 128]], None, "token id 128"),
        ([[1, -1]], None, "token id -1"),
        ("x" * 128, None, "max_model_len=128"),
        ([None], None, "is a NoneType"),
        ([1.5], None, "is a float"),
        ([["a", "b"]], None, "is a list"),
        (["a", "b"], [GREEDY], "1 SamplingParams for 2 prompts"),
        ("a", [{"max_tokens": 3}], "no SamplingParams"),
    ],
    ids=str,
)
def test_edge_07_bad_requests_are_refused_before_anything_runs(
    llm: LLM, prompts: Any, params: Any, says: str | None
) -> None:
    if says is None:
        assert llm.generate(prompts, params) == []
        return
    with pytest.raises(RequestError, match=says) as caught:
        llm.generate(prompts, params)
    assert "\n" not in str(caught.value)
    assert not llm.step() and llm._driver.core.num_steps == 0


def test_edge_03_a_pool_too_small_ends_requests_with_a_reason(engine: Engine) -> None:
    """Two requests that grow beyond the pool: one waits or gives way, nothing hangs, both end."""
    llm = make(engine, num_kv_blocks=8, kv_cache="paged:block_size=16,headroom=0", max_model_len=128)
    results = llm.generate(["a" * 60, "b" * 60], SamplingParams(max_tokens=60, ignore_eos=True))
    assert [len(t) for t in ids(results)] == [60, 60]
    with pytest.raises(ConfigError, match="num-kv-blocks"):
        make(engine, num_kv_blocks=7, max_model_len=128)


def test_closed_llms_say_so(engine: Engine) -> None:
    with make(engine) as llm:
        llm.generate("x", GREEDY)
        stream = llm.stream("y", GREEDY)
        next(stream)
    llm.close()
    stream.close()
    for call in (lambda: llm.generate("x"), lambda: llm.submit("x"), lambda: list(llm.stream("x")), llm.step):
        with pytest.raises(RequestError, match="closed"):
            call()
    llm.abort("req-0")


def test_kv_in_bfloat16_beside_float32(tiny_llama_dir: Path, engine: Engine) -> None:
    """Half the memory; log probabilities that only rounding moves."""
    config = EngineConfig(model=str(tiny_llama_dir), dtype="float32", kv_dtype="bfloat16", max_model_len=128)
    half = load_engine(config)
    assert half.setup.kv_bytes_per_token * 2 == engine.setup.kv_bytes_per_token
    params = SamplingParams(max_tokens=1, ignore_eos=True, logprobs=20)
    prompt = "a longer prompt, " * 5
    first, other = (
        LLM.of(e).generate(prompt, params)[0].outputs[0].logprobs[0]
        for e in (half, engine.reconfigured(engine.setup.config))
    )
    assert max(abs(first[i] - other[i]) for i in first.keys() & other.keys()) < 0.05
    assert len(first.keys() & other.keys()) > 15


def test_kv_dtypes_that_cannot_be_stored(tiny_llama_dir: Path) -> None:
    for options in ({"dtype": "bfloat16", "kv_dtype": "float32"}, {"dtype": "float32", "kv_dtype": "float16"}):
        with pytest.raises(ConfigError, match="--kv-dtype"):
            LLM(str(tiny_llama_dir), **options)
    with native.disabled(), pytest.raises(ConfigError, match="switched off"):
        LLM(str(tiny_llama_dir), dtype="float32", kv_dtype="bfloat16")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"no_such_option": 1}, "no such option"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"scheduler": "nope"}, "no such scheduler"),
        ({"kv_cache": "paged:blocksize=3"}, "no option 'blocksize'"),
        ({"dtype": "float16"}, "float16"),
        ({"dtype": "flaot32"}, "did you mean 'float32'"),
        ({"kv_dtype": "int8"}, "KV"),
        ({"tp": 3}, "attention heads"),
        ({"quantizer": "int4"}, "quant"),
        ({"device": "h100-sxm"}, "no such device"),
        ({"attention": "gqa:num_kv_heads=3"}, "num_kv_heads"),
        ({"max_model_len": 100_000}, "made for 512"),
    ],
    ids=str,
)
def test_bad_options_are_one_line_config_errors(tiny_llama_dir: Path, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        LLM(str(tiny_llama_dir), **options)
    assert "\n" not in str(caught.value)


def test_missing_and_damaged_models_are_model_errors(tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        LLM(str(tmp_path / "nothing.gguf"))
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + b"\0" * 50)
    with pytest.raises(ModelError):
        LLM(str(tmp_path / "bad.gguf"))


def test_auto_is_decided_and_explained(llm: LLM, tiny_llama_dir: Path) -> None:
    auto = LLM(str(tiny_llama_dir))
    assert auto.config.dtype == "float32" and auto.config.max_model_len == 512
    assert auto.config.num_kv_blocks is not None
    assert set(auto.reasons) >= {"dtype", "kv_dtype", "max_model_len", "num_kv_blocks"}


def test_reconfigured_engines_share_weights_only(engine: Engine) -> None:
    one, other = make(engine, kv_cache="contiguous"), make(engine)
    assert one._engine.model is other._engine.model
    expected = ids(one.generate(PROMPTS, GREEDY))
    one.close()
    assert ids(other.generate(PROMPTS, GREEDY)) == expected
    with pytest.raises(ConfigError, match="dtype"):
        make(engine, dtype="bfloat16")
