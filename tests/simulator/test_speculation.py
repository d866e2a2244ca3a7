"""Speculation: closed forms of the tokens of a step, draft costs summed by hand, and no speculation as the oracle of none."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from twinfer.core.catalog import resolve_spec
from twinfer.core.config import Choice, EngineConfig
from twinfer.core.device import load_device
from twinfer.core.errors import ConfigError
from twinfer.core.fleet import Fleet
from twinfer.core.layout import Layout
from twinfer.core.plan import Need, Row, StepPlan
from twinfer.core.provision import provision
from twinfer.core.records import RunRecord
from twinfer.core.registry import Registry
from twinfer.core.seeds import sequence_seed
from twinfer.core.speculation import Speculator
from twinfer.core.work import RowShape, StepShape, step_ops
from twinfer.core.workload import Workload
from twinfer.simulator.fleet_run import simulate_fleet
from twinfer.simulator.op_time import build_chain
from twinfer.simulator.run import prepare, simulate, speculation_of
from twinfer.simulator.speculate import Speculation, break_even_batch, tokens_per_second
from twinfer.simulator.step_parts import StepCost

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
        ({"speculator": "eagle:tree=4x2x1x1x1"}, "5 deep"),
        ({"speculator": "eagle:tree=0 1 0.0"}, "2 deep, guesses reach 4"),
        ({"speculator": "eagle:tree=0 1.0,num_tokens=2"}, "no parent"),
        ({"speculator": "eagle:tree=3"}, "does not reach 4"),
        ({"speculator": "eagle:tree=wide"}, "candidates at each depth"),
        ({"speculator": "medusa:tree=64x64"}, "at most 1024"),
        ({"speculator": "ngram:tree=4"}, "tree"),
        ({"speculator": "ngram:profile=nowhere.json"}, "cannot be read"),
        (
            {"speculator": Choice(name="eagle", options={"num_tokens": 1, "profile": [[0.7, 0.7]]})},
            "add up to at most 1",
        ),
    ],
)
def test_what_cannot_work_is_refused_in_words(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        predict(**given)


def test_the_engine_refuses() -> None:
    config = EngineConfig(model="llama-3.1-8b", speculator=Choice(name="ngram"))
    with pytest.raises(ConfigError, match="no speculative decoding yet"):
        provision(config, resolve_spec("llama-3.1-8b"), REGISTRY, H100, world="engine")


@pytest.mark.parametrize(
    "text", ["ngram", "medusa", "eagle:tree=3x2", "draft:model=llama-3.1-8b", "lookahead:window=2,guesses=2"]
)
def test_every_speculator_serves_crowded_pools(text: str) -> None:
    record = predict(text, num_kv_blocks=40, max_num_batched_tokens=64, output_len=40)
    assert record.complete and all(r.num_output_tokens == 40 for r in record.requests)


# --- trees, look-ahead, and what is counted of guesses ------------------------------------------------


def drawn(made: Speculator, draft: int, rounds: int = 8000) -> tuple[float, float]:
    """Mean tokens of a step that checks `draft` guesses, and its standard error, drawn as a run draws them."""
    spec = Speculation.of(made, None)
    counts, position = [], 100
    for _ in range(rounds):
        counts.append(len(spec.result(Row("a", position, range(draft + 1), draft, Need.DRAFTS, 77)).tokens))
        position += counts[-1]
    mean = sum(counts) / rounds
    return mean, math.sqrt(sum((n - mean) ** 2 for n in counts)) / rounds


def test_a_tree_of_candidates_yields_what_its_formula_says() -> None:
    """Two depths, by hand: 1 + a + b + (a + b) a with b = (1 - a) x `again` for the second candidate."""
    made = speculator("eagle:num_tokens=2,tree=2x1,alpha=0.5,again=0.4")
    assert made.num_tokens == 4 and made.depth == 2 and made.drafting == (1, 2)
    assert made.mean_tokens == pytest.approx(1 + 0.5 + 0.2 + (0.5 + 0.2) * 0.5)
    mean, error = drawn(made, 4)
    assert abs(mean - made.mean_tokens) < 4 * error
    chain = speculator("eagle:num_tokens=2,alpha=0.5")
    assert chain.mean_tokens < made.mean_tokens


def test_the_likeliest_tree_grows_with_its_size_to_what_depth_allows() -> None:
    means = [speculator(f"medusa:heads=4,tree={n}").mean_tokens for n in (4, 8, 16, 64)]
    assert means[0] == speculator("medusa:heads=4").mean_tokens == pytest.approx((1 - 0.6**5) / 0.4)
    assert means == sorted(means) and means[-1] > means[0] + 0.3
    assert speculator("medusa:heads=4,tree=64").drafting == (1,)


def test_a_tree_is_drafted_depth_by_depth_and_checked_at_once() -> None:
    """Oracle: the rows of each pass, timed op by op; and a run whose steps feed the last token and all guesses."""
    text = "draft:model=llama-3.1-8b,num_tokens=3,tree=4x2x1"
    setup = provision(
        EngineConfig(model="llama-3.1-70b", tp=4, speculator=Choice.model_validate(text)),
        resolve_spec("llama-3.1-70b"), REGISTRY, H100, world="simulator", max_request_tokens=4096,
    )  # fmt: skip
    made = speculation_of(setup, H100, ("roofline",), REGISTRY)
    assert made is not None and made.speculator.drafting == (1, 4, 8)
    row = Row("a", 1000, range(21), 20, Need.DRAFTS, 3)
    result = made.result(row)
    added = made.added(StepPlan(0, (row,)), [result], StepCost(0.0, 0.0, {}), True)
    draft = resolve_spec("llama-3.1-8b")
    chain = build_chain(("roofline",), H100, REGISTRY, draft)
    known, seconds = 1000 + len(result.tokens), 0.0
    for fed, before in ((1, 0), (4, 1), (8, 5)):
        shape = StepShape((RowShape(fed, known + before + fed),), fed)
        seconds += sum(chain.time(op).seconds * op.count for op in step_ops(draft, shape, Layout(4)))
    assert added.seconds == pytest.approx(seconds, rel=2e-3)
    record = predict("medusa:heads=3,tree=4x2x1", num_requests=1, max_num_batched_tokens=64, input_len=40)
    assert {step.num_tokens for step in record.steps[1:-8]} == {21}


def test_look_ahead_follows_the_papers_closed_form() -> None:
    """E = N - sum of (1 - a^i)^G over i < N; oracle of the draws: G n-grams guessed independently, the longest stays."""
    a, n, w, g = 0.6, 4, 3, 5
    made = speculator(f"lookahead:ngram={n},window={w},guesses={g},alpha={a}")
    assert made.num_tokens + 1 == (n - 1) * (w + g)  # the last token is one of them
    assert made.mean_tokens == pytest.approx(n - sum((1 - a**i) ** g for i in range(1, n)))
    mean, error = drawn(made, made.num_tokens)
    assert abs(mean - made.mean_tokens) < 4 * error
    rng = random.Random(3)

    def gram() -> int:
        return next((i for i in range(n - 1) if rng.random() >= a), n - 1)

    counts = [1 + max(gram() for _ in range(2)) for _ in range(8000)]
    mean, error = drawn(made, 2 * (n - 1))  # room for two n-grams
    assert abs(mean - sum(counts) / 8000) < 6 * error
    assert speculator("lookahead:guesses=1,alpha=0.5").mean_tokens == pytest.approx((1 - 0.5**5) / 0.5)
    assert speculator("lookahead:ngram=1").num_tokens == 0
    assert speculator("lookahead").mean_tokens == pytest.approx(1.6, abs=0.01)


@pytest.mark.parametrize("text", ["ngram:alpha=0.6", "medusa:tree=2x2", "lookahead:window=3,guesses=3"])
@pytest.mark.parametrize("detail", ["steps", "requests"])
def test_a_record_says_what_became_of_guesses(text: str, detail: Any) -> None:
    config = EngineConfig(model="llama-3.1-8b", device="h100-sxm", speculator=Choice.model_validate(text))
    work = Workload(num_requests=40, input_len=32, output_len=100)
    record = simulate(config, work, REGISTRY, detail=detail)
    found, made = record.metrics["speculation"], speculator(text)
    assert found["num_accepted_tokens"] + found["num_wasted_tokens"] == found["num_draft_tokens"]
    stayed = [found.get(f"position_{i}", 0.0) for i in range(1, made.depth + 1)]  # a depth never right is left out
    assert found["mean_acceptance_length"] == pytest.approx(1 + sum(stayed))
    assert found["mean_acceptance_length"] == pytest.approx(made.mean_tokens, rel=0.08)
    itl, tpot = (record.metrics[name]["mean"] for name in ("itl", "tpot"))  # tokens of a step are delivered at once
    assert itl / tpot == pytest.approx(found["mean_acceptance_length"], rel=0.05)
    if detail == "steps":  # tokens that the steps fed: prompts, guesses, and one token of each sequence and step
        fed = sum(step.num_tokens for step in record.steps)
        prompts, answered = 40 * 32, 40 * 100
        one_each = answered - found["num_accepted_tokens"] - 40
        assert fed == prompts + one_each + found["num_draft_tokens"]


def test_the_batch_up_to_which_guesses_pay() -> None:
    """Oracle: every batch tried in turn."""
    config = EngineConfig(
        model="llama-3.1-8b", device="h100-sxm", speculator=Choice.model_validate("ngram:num_tokens=16,alpha=0.3")
    )
    timer = prepare(config, Workload(num_requests=1, input_len=64, output_len=64), REGISTRY).timer
    pays = [
        b for b in range(1, 65)
        if tokens_per_second(timer, b, 96, True) > tokens_per_second(timer, b, 96, False)
    ]  # fmt: skip
    assert 1 < max(pays) < 60, "the example lies where it says something"
    assert break_even_batch(timer, 96, 64) == max(pays)
    assert break_even_batch(timer, 96, 5) == 5
    never = prepare(
        config.model_copy(update={"speculator": Choice.model_validate("ngram:alpha=0")}),
        Workload(num_requests=1),
        REGISTRY,
    )
    assert break_even_batch(never.timer, 96, 64) == 0


def test_a_measurement_of_one_run_is_the_profile_of_another(tmp_path: Path) -> None:
    first = predict("ngram:alpha=0.7", num_requests=40, output_len=100)
    path = tmp_path / "record.json"
    path.write_text(json.dumps({"metrics": first.metrics}))
    again = predict(f"eagle:profile={path}", num_requests=40, output_len=100)
    ours, theirs = (r.metrics["speculation"]["mean_acceptance_length"] for r in (again, first))
    assert ours == pytest.approx(theirs, rel=0.06)
    assert "acceptance that was given (0." in again.reasons["speculator"]


def test_a_fleet_counts_the_guesses_of_all_replicas() -> None:
    engine = EngineConfig(model="llama-3.1-8b", device="h100-sxm", speculator=Choice.model_validate("eagle:tree=2x2"))
    work = Workload(num_requests=12, rate=50.0, input_len=32, output_len=40)
    record = simulate_fleet(Fleet(engine=engine, replicas=2), work, REGISTRY, bands=False)
    found, parts = record.metrics["speculation"], [r["speculation"] for r in record.metrics["replicas"]]
    for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_wasted_tokens"):
        assert found[name] == sum(part[name] for part in parts) > 0
    assert found["break_even_batch"] > 1
