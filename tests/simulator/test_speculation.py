"""Speculation: closed forms of the tokens of a step, draft costs summed by hand, and no speculation as the oracle of none."""

from __future__ import annotations

import math
from typing import Any

import pytest

from twinfer.core.catalog import resolve_spec
from twinfer.core.config import Choice, EngineConfig
from twinfer.core.device import load_device
from twinfer.core.errors import ConfigError
from twinfer.core.layout import Layout
from twinfer.core.plan import Need, Row, StepPlan
from twinfer.core.provision import provision
from twinfer.core.records import RunRecord
from twinfer.core.registry import Registry
from twinfer.core.seeds import sequence_seed
from twinfer.core.speculation import Speculator
from twinfer.core.work import RowShape, StepShape, step_ops
from twinfer.core.workload import Workload
from twinfer.simulator.op_time import build_chain
from twinfer.simulator.plan_space import Question, check_question
from twinfer.simulator.run import simulate, speculation_of
from twinfer.simulator.speculate import Speculation
from twinfer.simulator.step_time import StepCost

REGISTRY = Registry(entry_points=False)
ALONE = Layout(1)
H100 = load_device("h100-sxm", REGISTRY)


def predict(speculator: str | None, model: str = "llama-3.1-8b", **more: Any) -> RunRecord:
    given = {"input_len": 128, "output_len": 64, "num_requests": 8} | {
        k: more.pop(k) for k in ("input_len", "output_len", "num_requests", "rate") if k in more
    }
    config = EngineConfig.model_validate({"model": model, "device": "h100-sxm", "speculator": speculator, **more})
    return simulate(config, Workload(**given), REGISTRY)


def speculator(text: str) -> Speculator:
    made: Speculator = REGISTRY.build("speculator", Choice.model_validate(text))
    return made


@pytest.mark.parametrize(("alpha", "k"), [(0.0, 3), (0.3, 1), (0.7, 4), (0.9, 8), (1.0, 5)])
def test_tokens_of_a_step_follow_the_closed_form(alpha: float, k: int) -> None:
    spec = Speculation(speculator(f"ngram:num_tokens={k},alpha={alpha}"), None)
    counts, position = [], 100
    seed = sequence_seed(None, 7, 3, 0)
    for _ in range(20_000):
        row = Row("a", position, (0,) * (k + 1), k, Need.DRAFTS, seed)
        counts.append(len(spec.result(row).tokens))
        position += counts[-1]
    mean = sum(counts) / len(counts)
    error = math.sqrt(sum((n - mean) ** 2 for n in counts)) / len(counts)
    expected = k + 1 if alpha == 1 else (1 - alpha ** (k + 1)) / (1 - alpha)
    assert abs(mean - expected) <= 4 * error + 1e-12
    assert spec.speculator.mean_tokens == pytest.approx(expected)


def test_a_profile_gives_each_depth_its_chance() -> None:
    made = Speculation(REGISTRY.build("speculator", Choice(name="ngram", options={
        "num_tokens": 3, "profile": [0.9, 0.5, 0.0],
    })), None)  # fmt: skip
    rows = [Row("a", 4 * i, (0,) * 4, 3, Need.DRAFTS, 11) for i in range(20_000)]
    lengths = [len(made.result(row).tokens) - 1 for row in rows]
    for right, share in ((0, 0.1), (1, 0.45), (2, 0.45), (3, 0.0)):
        assert lengths.count(right) / len(lengths) == pytest.approx(share, abs=0.015)
    assert made.speculator.mean_tokens == pytest.approx(1 + 0.9 + 0.45)


def test_results_hang_on_sequence_and_position_alone() -> None:
    made = Speculation(speculator("ngram:num_tokens=4,alpha=0.5"), None)
    one = Row("a", 50, (0,) * 5, 4, Need.DRAFTS, 5)
    assert made.result(one) == made.result(one._replace(start=48, tokens=(0,) * 7))  # chunks before it do not matter
    same = [len(made.result(one._replace(seed=s)).tokens) for s in range(50)]
    named = [len(made.result(one._replace(seq=str(s))).tokens) for s in range(50)]
    assert len(set(same)) > 2 and len(set(named)) > 2


def test_no_guesses_is_no_speculation() -> None:
    plain = predict(None, rate=20.0)
    for none in ("ngram:num_tokens=0", "medusa:heads=0"):
        record = predict(none, rate=20.0)
        assert record.metrics == plain.metrics and record.intervals == plain.intervals
        assert record.requests == plain.requests


@pytest.mark.parametrize(("alpha", "steps"), [(0.0, 64), (1.0, 14)])
def test_a_run_takes_as_many_steps_as_its_chain_needs(alpha: float, steps: int) -> None:
    """One prefill (a token, guesses), then 63 tokens by one or by five: the last step has room for fewer guesses."""
    record = predict(f"ngram:num_tokens=4,alpha={alpha}", num_requests=1)
    assert len(record.steps) == steps
    assert record.requests[0].num_output_tokens == 64
    assert predict(f"ngram:num_tokens=4,alpha={alpha}", num_requests=1).metrics == record.metrics


def test_wrong_guesses_cost_and_right_ones_pay() -> None:
    plain, wrong, right = (
        predict(text, num_requests=1).metrics["duration"]
        for text in (None, "ngram:num_tokens=4,alpha=0", "ngram:num_tokens=4,alpha=1")
    )
    assert right < 0.3 * plain and right < wrong
    crowd: dict[str, Any] = {
        "num_requests": 200,
        "output_len": 8,
        "max_num_seqs": 200,
        "max_num_batched_tokens": 30_000,
    }
    plain, wrong = (predict(text, **crowd).metrics["duration"] for text in (None, "ngram:num_tokens=4,alpha=0"))
    assert plain < wrong


def test_a_step_costs_what_the_draft_model_takes() -> None:
    """Oracle: ops of the draft model, timed one by one."""
    setup = provision(
        EngineConfig(model="llama-3.1-70b", tp=4, speculator=Choice.model_validate("draft:model=llama-3.1-8b,num_tokens=5")),
        resolve_spec("llama-3.1-70b"), REGISTRY, H100, world="simulator", max_request_tokens=4096,
    )  # fmt: skip
    made = speculation_of(setup, H100, ("roofline",), REGISTRY)
    assert made is not None
    rows = (Row("a", 1000, (0,) * 6, 5, Need.DRAFTS, 3), Row("b", 0, (0,) * 700, 0, Need.LAST, 4))
    results = [made.result(row) for row in rows]
    added = made.added(StepPlan(0, rows), results, StepCost(1.0, 0.0, {"x": 1.0}), True)
    draft = resolve_spec("llama-3.1-8b")
    chain = build_chain(("roofline",), H100, REGISTRY, draft)

    def seconds(shape: StepShape) -> float:
        return sum(chain.time(op).seconds * op.count for op in step_ops(draft, shape, Layout(4)))

    contexts = [1001 + len(results[0].tokens) + 2, 700 + 1 + 2]
    drafting = 5 * seconds(StepShape.decode(*contexts))
    prefill = seconds(StepShape((RowShape(700, 700),), 0))
    assert added.seconds - 1 == pytest.approx(prefill + drafting, rel=2e-3)
    assert sum(added.ops.values()) == pytest.approx(added.seconds)
    assert all(name == "x" or name.startswith("draft_") for name in added.ops)


def test_heads_and_layers_have_the_sizes_of_their_papers() -> None:
    model = resolve_spec("llama-2-7b")  # h 4096, V 32000, 2 bytes
    medusa = speculator("medusa:heads=3")
    assert medusa.weight_bytes(model, ALONE) == 3 * 2 * (4096 * 4096 + 4096 * 32000)
    eagle = speculator("eagle")
    layer = 4 * 4096**2 + 3 * 4096 * 11008
    assert eagle.weight_bytes(model, ALONE) == 2 * (layer + 2 * 4096**2)
    assert eagle.kv_bytes_per_token(model, ALONE) == 2 * 2 * 4096
    assert medusa.kv_bytes_per_token(model, ALONE) == 0


def test_what_drafts_takes_memory_from_the_pool() -> None:
    def blocks(text: str | None) -> int:
        chosen = None if text is None else Choice.model_validate(text)
        config = EngineConfig(model="llama-3.1-70b", tp=4, speculator=chosen, max_model_len=8192)
        return provision(config, resolve_spec("llama-3.1-70b"), REGISTRY, H100, world="simulator").limits.num_blocks

    plain, drafted = blocks(None), blocks("draft:model=llama-3.1-8b")
    draft = resolve_spec("llama-3.1-8b")
    per_block = 16 * 80 * 2 * 2 * 128 * 2  # two KV heads a rank
    of_draft = 16 * 32 * 2 * 2 * 128 * 2
    assert drafted == pytest.approx((plain * per_block - draft.weight_bytes(4)) / (per_block + of_draft), abs=1)
    assert blocks("ngram") == plain


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"speculator": "draft"}, "no draft model was given"),
        ({"speculator": "draft:model=smollm2-135m"}, "vocabulary"),
        ({"speculator": "eagle:layers=40"}, "itself has 32"),
        ({"speculator": "ngram", "max_outstanding": 2}, "which guesses are right"),
        ({"speculator": "ngram", "pp": 2}, "tensor-parallel"),
        ({"speculator": "ngram:alpha=2"}, "alpha"),
        ({"speculator": Choice(name="ngram", options={"profile": [0.5]})}, "1 chances for 4"),
        ({"speculator": Choice(name="medusa", options={"alpha": [0.5]})}, "1 chances for 4"),
        ({"speculator": "ngram", "model": "qwen3-next-80b", "tp": 4}, "last right guess"),
        ({"speculator": "oracle"}, "no such speculator"),
    ],
)
def test_what_cannot_work_is_refused_in_words(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        predict(**given)


def test_the_engine_refuses() -> None:
    config = EngineConfig(model="llama-3.1-8b", speculator=Choice(name="ngram"))
    with pytest.raises(ConfigError, match="no speculative decoding yet"):
        provision(config, resolve_spec("llama-3.1-8b"), REGISTRY, H100, world="engine")


@pytest.mark.parametrize("text", ["ngram", "medusa", "eagle", "draft:model=llama-3.1-8b"])
def test_every_speculator_serves_crowded_pools(text: str) -> None:
    record = predict(text, num_kv_blocks=40, max_num_batched_tokens=64, output_len=40)
    assert record.complete and all(r.num_output_tokens == 40 for r in record.requests)


def test_a_search_refuses_what_its_bounds_do_not_hold_for() -> None:
    question = Question(
        base={"model": "llama-3.1-8b", "speculator": "ngram"}, axes={"device": ("h100-sxm",)}, workload=Workload(rate=1.0),
        goals=(),
    )  # fmt: skip
    with pytest.raises(ConfigError, match="one token per sequence and step"):
        check_question(question, REGISTRY)
