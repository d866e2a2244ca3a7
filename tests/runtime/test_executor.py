"""The torch executor: plans by hand, then plans of a real Core, against transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from twinfer.core.core import Core
from twinfer.core.errors import ConfigError, RequestError
from twinfer.core.events import Finished, StepDone, Submit, TokenDelta
from twinfer.core.hf_config import spec_from_hf
from twinfer.core.params import SamplingParams
from twinfer.core.plan import Copy, FromStep, Grant, Move, Need, Row, RowResult, StepPlan
from twinfer.core.policy import Limits
from twinfer.core.registry import Registry
from twinfer.core.request import KVSource, Request
from twinfer.core.runtime.attention_torch import attention_of
from twinfer.core.runtime.executor import TorchExecutor
from twinfer.core.runtime.families import DecoderModel, load_model
from twinfer.core.work import StepShape, step_ops
from twinfer.plugins.kv_cache.contiguous import Contiguous
from twinfer.plugins.kv_cache.paged import Paged
from twinfer.plugins.scheduler.continuous import Continuous

BLOCK = 4


@pytest.fixture(scope="module")
def model(tiny_llama_dir: Path) -> DecoderModel:
    spec = spec_from_hf(json.loads((tiny_llama_dir / "config.json").read_text()), "tiny-llama")
    return load_model(spec, tiny_llama_dir, Registry(entry_points=False))


@pytest.fixture(scope="module")
def greedy(tiny_llama_dir: Path) -> object:
    """Greedy continuations by transformers."""
    from transformers import LlamaForCausalLM

    reference = LlamaForCausalLM.from_pretrained(tiny_llama_dir, dtype=torch.float32).eval()

    def continue_(prompt: Sequence[int], count: int) -> list[int]:
        with torch.inference_mode():
            ids = torch.tensor([list(prompt)])
            # generation_config of the fixture ends at 1; an id outside the vocabulary never comes
            out = reference.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, eos_token_id=-1
            )
        return out[0, len(prompt) :].tolist()

    return continue_


def executor(model: DecoderModel, num_blocks: int = 32, profile: bool = False) -> TorchExecutor:
    return TorchExecutor(model, attention_of(model.spec), num_blocks, BLOCK, profile=profile)


def admit(ex: TorchExecutor, prompt: Sequence[int], seq: str = "a", **params: object) -> None:
    request = Request(id=seq, prompt=prompt, params=SamplingParams(**params))  # type: ignore[arg-type]
    ex.admit(request, ((seq, 0),))


def row(start: int, tokens: Sequence[int | FromStep], need: Need = Need.LAST, seq: str = "a", draft: int = 0) -> Row:
    return Row(seq, start, tokens, draft, need, 7)


PROMPT = [17, 64, 5, 99, 23, 41, 80, 12, 33, 7]


def test_prefill_then_decode(model: DecoderModel, greedy) -> None:  # type: ignore[no-untyped-def]
    ex = executor(model)
    admit(ex, PROMPT)
    expected = greedy(PROMPT, 6)
    result = ex.execute(StepPlan(0, (row(0, PROMPT),), grants=(Grant("a", 0, (9, 3, 20)),)))
    tokens = list(result.rows[0].tokens)
    for step in range(1, 6):
        grants = (Grant("a", 0, (step + 24,)),) if (9 + step) % BLOCK == 0 else ()
        result = ex.execute(StepPlan(step, (row(9 + step, tokens[-1:]),), grants=grants))
        tokens += result.rows[0].tokens
    assert tokens == expected
    assert result.seconds > 0 and result.ops == {}


def test_chunks_without_logits_give_no_tokens(model: DecoderModel, greedy) -> None:  # type: ignore[no-untyped-def]
    ex = executor(model)
    admit(ex, PROMPT)
    first = ex.execute(StepPlan(0, (row(0, PROMPT[:6], Need.NONE),), grants=(Grant("a", 0, (1, 2, 3)),)))
    assert first.rows == (RowResult(),)
    second = ex.execute(StepPlan(1, (row(6, PROMPT[6:]),)))
    assert list(second.rows[0].tokens) == greedy(PROMPT, 1)


def test_tokens_still_on_the_device(model: DecoderModel, greedy) -> None:  # type: ignore[no-untyped-def]
    ex = executor(model)
    admit(ex, PROMPT)
    expected = greedy(PROMPT, 3)
    tokens = list(ex.execute(StepPlan(4, (row(0, PROMPT),), grants=(Grant("a", 0, (1, 2, 3, 4)),))).rows[0].tokens)
    for step, at in ((5, 10), (6, 11)):
        tokens += ex.execute(StepPlan(step, (row(at, [FromStep(step - 1, "a")]),))).rows[0].tokens
    assert tokens == expected
    (stale,) = ex.execute(StepPlan(7, (row(12, [FromStep(4, "a")]),))).rows
    assert stale.failure is not None and "not known" in stale.failure


def test_preempted_sequence_runs_again_elsewhere(model: DecoderModel, greedy) -> None:  # type: ignore[no-untyped-def]
    ex = executor(model, num_blocks=8)
    admit(ex, PROMPT)
    admit(ex, PROMPT[::-1], "b")
    expected = greedy(PROMPT, 3)
    (first,) = ex.execute(StepPlan(0, (row(0, PROMPT),), grants=(Grant("a", 0, (0, 1, 2)),))).rows
    # its blocks go to another sequence in the very step that preempts it
    ex.execute(StepPlan(1, (row(0, PROMPT[::-1], seq="b"),), grants=(Grant("b", 0, (2, 1, 0)),), preempted=("a",)))
    known = [*PROMPT, *first.tokens]
    (second,) = ex.execute(StepPlan(2, (row(0, known),), grants=(Grant("a", 0, (5, 7, 6)),))).rows
    (third,) = ex.execute(StepPlan(3, (row(11, second.tokens),))).rows
    assert [*first.tokens, *second.tokens, *third.tokens] == expected


def test_copy_on_write_leaves_the_shared_block_alone(model: DecoderModel, greedy) -> None:  # type: ignore[no-untyped-def]
    """Two samples share a half-filled block; the one that writes first gets a copy."""
    ex = executor(model)
    request = Request(id="a", prompt=PROMPT, params=SamplingParams(n=2, temperature=1.0))
    ex.admit(request, (("a", 0), ("a/1", 1)))
    ex.execute(StepPlan(0, (row(0, PROMPT, Need.NONE),), grants=(Grant("a", 0, (1, 2, 3)),)))
    plan = StepPlan(
        1,
        (row(10, [50]), row(10, [60], seq="a/1")),
        grants=(Grant("a/1", 0, (1, 2, 3), shared=3),),
        copies=(Copy("a/1", 0, 2, 3, 8),),
    )
    ex.execute(plan)
    kv, a, b = ex.kv, ex._states["a"].table, ex._states["a/1"].table
    assert a.blocks == [1, 2, 3] and b.blocks == [1, 2, 8]
    for layer in range(model.spec.num_layers):
        # positions 8 and 9 are copies, position 10 differs
        assert torch.equal(kv.keys[layer][[12, 13]], kv.keys[layer][[32, 33]])
        assert not torch.allclose(kv.keys[layer][14], kv.keys[layer][34])
    # and both go on as if they had never shared
    for seq, token in (("a", 50), ("a/1", 60)):
        alone = executor(model)
        admit(alone, PROMPT, "x")
        alone.execute(StepPlan(0, (row(0, [*PROMPT, token], Need.NONE, "x"),), grants=(Grant("x", 0, (5, 6, 7)),)))
        state, other = ex._states[seq].table, alone._states["x"].table
        for layer in range(model.spec.num_layers):
            assert torch.allclose(
                kv.values[layer][state.slots[:11]], alone.kv.values[layer][other.slots[:11]], atol=1e-5
            )


def test_forget_frees_the_name(model: DecoderModel) -> None:
    ex = executor(model)
    admit(ex, PROMPT)
    ex.execute(StepPlan(0, (row(0, PROMPT),), grants=(Grant("a", 0, (1, 2, 3)),)))
    ex.execute(StepPlan(1, (), forget=("a", "never-seen")))
    admit(ex, PROMPT[:3])
    (result,) = ex.execute(StepPlan(2, (row(0, PROMPT[:3]),), grants=(Grant("a", 0, (1,)),))).rows
    assert result.failure is None and ex._states["a"].table.blocks == [1]


def test_a_verify_row_returns_what_decoding_would(model: DecoderModel, greedy) -> None:  # type: ignore[no-untyped-def]
    expected = greedy(PROMPT, 5)
    grants = (Grant("a", 0, (1, 2, 3, 4, 5)),)
    for wrong_at in range(4):
        ex = executor(model)
        admit(ex, PROMPT)
        ex.execute(StepPlan(0, (row(0, PROMPT),), grants=grants))
        drafts = expected[1:4]
        if wrong_at < 3:
            drafts[wrong_at] = (drafts[wrong_at] + 1) % 128
        (verified,) = ex.execute(StepPlan(1, (row(10, [expected[0], *drafts], Need.DRAFTS, draft=3),))).rows
        kept = min(wrong_at, 3)
        assert list(verified.tokens) == expected[1 : kept + 2]
        # the next row overwrites rejected drafts
        if kept + 2 < 5:
            at = 10 + kept + 1
            (after,) = ex.execute(StepPlan(2, (row(at, [expected[kept + 1]]),))).rows
            assert list(after.tokens) == expected[kept + 2 : kept + 3]


def test_rows_that_cannot_be_computed_fail_alone(model: DecoderModel, greedy) -> None:  # type: ignore[no-untyped-def]
    ex = executor(model)
    for seq in "abcdef":
        admit(ex, PROMPT, seq)
    rows = (
        row(0, PROMPT, seq="nobody"),
        row(0, PROMPT, seq="a"),
        row(0, PROMPT, seq="b"),  # two blocks for ten tokens
        row(0, [1, 500], seq="c"),
        row(0, PROMPT, Need.ALL, seq="d"),
        row(0, PROMPT, seq="e"),
        row(0, [], seq="f"),
    )
    names = "acdef"
    grants = [Grant(seq, 0, (3 * i, 3 * i + 1, 3 * i + 2)) for i, seq in enumerate(names)]
    plan = StepPlan(
        0, rows, grants=(*grants, Grant("b", 0, (20, 21))), moves=(Move("e", "load", "peer", (12, 13, 14), 8),)
    )
    results = ex.execute(plan).rows
    assert list(results[1].tokens) == greedy(PROMPT, 1) and results[1].failure is None
    words = ["never admitted", None, "do not fit 8 KV slots", "token id 500 is outside the vocabulary of 128",
             "all positions are not served", "cannot transfer KV", "do not fit"]  # fmt: skip
    for result, word in zip(results, words, strict=True):
        if word is not None:
            assert result.failure is not None and word in result.failure and result.tokens == ()


def test_a_sequence_with_nan_fails_and_leaves_no_trace(model: DecoderModel, greedy) -> None:  # type: ignore[no-untyped-def]
    ex = executor(model, num_blocks=6)
    admit(ex, PROMPT, "bad")
    ex.execute(StepPlan(0, (row(0, PROMPT, seq="bad"),), grants=(Grant("bad", 0, (0, 1, 2)),)))
    ex.kv.values[0][5] = float("nan")
    admit(ex, PROMPT[:2], "good")
    grants = (Grant("good", 0, (3,)),)
    rows = (row(10, [4], seq="bad"), row(0, PROMPT[:2], seq="good"))
    bad, good = ex.execute(StepPlan(1, rows, grants=grants)).rows
    assert bad.failure is not None and bad.tokens == ()
    assert list(good.tokens) == greedy(PROMPT[:2], 1)
    assert all(tensor.isfinite().all() for tensor in (*ex.kv.keys, *ex.kv.values))


def test_running_out_of_memory_fails_the_rows(model: DecoderModel, monkeypatch: pytest.MonkeyPatch) -> None:
    ex = executor(model)
    admit(ex, PROMPT)
    plan = StepPlan(0, (row(0, PROMPT),), grants=(Grant("a", 0, (1, 2, 3)),))

    def raises(error: Exception) -> None:
        def forward(*_: object) -> torch.Tensor:
            raise error

        monkeypatch.setattr(type(model), "forward", forward)

    raises(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"))
    (result,) = ex.execute(plan).rows
    assert result.failure is not None and "lower --max-num-batched-tokens" in result.failure
    raises(RuntimeError("a bug"))
    with pytest.raises(RuntimeError, match="a bug"):
        ex.execute(replace(plan, grants=()))


def test_a_pool_that_cannot_be_allocated_names_the_option(model: DecoderModel) -> None:
    with pytest.raises(ConfigError, match=r"--num-kv-blocks=.* GiB of KV memory cannot be had on cpu"):
        executor(model, num_blocks=2**50)


def test_kv_transfers_are_refused_at_admission(model: DecoderModel) -> None:
    ex = executor(model)
    with pytest.raises(RequestError, match="kv_from"):
        ex.admit(Request(id="a", prompt=[1], kv_from=KVSource(handle="h", num_tokens=1)), (("a", 0),))


def test_close_twice(model: DecoderModel) -> None:
    ex = executor(model)
    ex.close()
    ex.close()


def test_profile_names_ops_and_adds_up(model: DecoderModel) -> None:
    ex = executor(model, profile=True)
    admit(ex, PROMPT)
    result = ex.execute(StepPlan(0, (row(0, PROMPT),), grants=(Grant("a", 0, (1, 2, 3)),)))
    names = {op.name for op in step_ops(model.spec, StepShape.prefill(len(PROMPT)))}
    assert set(result.ops) == names | {"host"}
    assert sum(result.ops.values()) == pytest.approx(result.seconds, rel=1e-6)
    copied = ex.execute(StepPlan(1, (row(10, [3]),), copies=(Copy("a", 0, 2, 3, 4),)))
    assert copied.ops["kv_copy"] > 0


def test_histories_reach_the_sampler(model: DecoderModel) -> None:
    """Penalties see the prompt and every sampled token, also after preemption."""

    class Spy:
        def __init__(self) -> None:
            self.seen: list[tuple[int, list[int], list[int]]] = []

        def sample(self, logits: torch.Tensor, entries) -> list[RowResult]:  # type: ignore[no-untyped-def]
            self.seen += [(e.position, list(e.prompt_ids), list(e.output_ids)) for e in entries]
            return [RowResult((70 + len(self.seen),)) for _ in entries]

    spy = Spy()
    ex = TorchExecutor(model, attention_of(model.spec), 16, BLOCK, sampler=spy)  # type: ignore[arg-type]
    admit(ex, PROMPT)
    ex.execute(StepPlan(0, (row(0, PROMPT),), grants=(Grant("a", 0, (1, 2, 3)),)))
    ex.execute(StepPlan(1, (row(10, [71]),)))
    ex.execute(StepPlan(2, (row(0, [*PROMPT, 71], Need.NONE),), grants=(Grant("a", 0, (4, 5, 6)),), preempted=("a",)))
    ex.execute(StepPlan(3, (row(11, [72]),)))
    assert spy.seen == [(10, PROMPT, []), (11, PROMPT, [71]), (12, PROMPT, [71, 72])]
    spy.seen.clear()
    # two drafts, both rejected: they are in the history of the verify row and gone from the next
    ex.execute(StepPlan(4, (row(12, [73, 1, 2], Need.DRAFTS, draft=2),), grants=(Grant("a", 0, (7,)),)))
    ex.execute(StepPlan(5, (row(13, [71]),)))
    assert spy.seen == [(13, PROMPT, [71, 72, 73, 1, 2]), (14, PROMPT, [71, 72, 73, 71])]


# --- with a real Core -----------------------------------------------------------------------------


def serve(
    model: DecoderModel, core: Core, limits: Limits, block_size: int, requests: Sequence[Request]
) -> tuple[dict[str, list[int]], int]:
    """Tokens by request, and how often sequences were preempted."""
    ex = TorchExecutor(model, attention_of(model.spec), limits.num_blocks, block_size)
    for request in requests:
        core.receive(Submit(request), 0.0)
        ex.admit(request, ((request.id, 0),))
    tokens: dict[str, list[int]] = {request.id: [] for request in requests}
    preemptions = 0
    while core.has_work:
        plan = core.next_step(0.0)
        if isinstance(plan, StepPlan):
            core.receive(StepDone(plan.step, ex.execute(plan)), 0.0)
        for output in core.outputs():
            if isinstance(output, TokenDelta):
                tokens[output.request_id] += output.tokens
            elif isinstance(output, Finished):
                assert output.reason == "length", output
                preemptions += output.num_preemptions
    assert core.audit() == []
    return tokens, preemptions


@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("cache", ["paged", "contiguous", "paged-tight"])
def test_core_and_executor_generate_what_transformers_does(  # type: ignore[no-untyped-def]
    model: DecoderModel, greedy, cache: str, chunk: int
) -> None:
    lengths = [3, 17, 9, 30, 1, 22, 12, 5]
    prompts = [[(7 * i + 11 * j + 5) % 128 for j in range(n)] for i, n in enumerate(lengths)]
    prompts[5][:8] = prompts[3][:8]  # a shared prefix
    limits = Limits(max_num_seqs=8, max_num_batched_tokens=chunk + 8, max_model_len=48)
    kv_cache = Contiguous() if cache == "contiguous" else Paged(Paged.Options(block_size=BLOCK))
    block_size = kv_cache.block_size(limits)
    blocks = {"paged": 120, "contiguous": 8, "paged-tight": 17}[cache]
    limits = replace(limits, num_blocks=blocks)
    core = Core(Continuous(Continuous.Options(chunk_size=chunk)), kv_cache, limits)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    requests = [Request(id=f"r{i}", prompt=prompt, params=params) for i, prompt in enumerate(prompts)]
    tokens, preemptions = serve(model, core, limits, block_size, requests)
    assert tokens == {request.id: greedy(request.prompt, 12) for request in requests}
    assert (preemptions > 0) == (cache == "paged-tight")
