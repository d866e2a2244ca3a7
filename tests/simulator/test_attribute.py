"""Replay and attribution: with the simulator itself as the engine every cause is known, and is what comes out."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest

from twinfer.core.config import EngineConfig
from twinfer.core.device import DeviceSpec, load_device
from twinfer.core.errors import ConfigError
from twinfer.core.records import RunRecord
from twinfer.core.registry import Registry
from twinfer.core.work import StepShape
from twinfer.core.workload import Workload
from twinfer.plugins.op_time.calibration import Correction, Format
from twinfer.simulator.attribute import (
    PLANS,
    Attribution,
    attribute,
    correction,
    fitted_correction,
    with_correction,
    without_corrections,
)
from twinfer.simulator.explain import explain
from twinfer.simulator.observed import read_log
from twinfer.simulator.replay import PricedStep, ReplayStopped, replay
from twinfer.simulator.run import simulate

REGISTRY = Registry(entry_points=False)
CPU = load_device("cpu", REGISTRY)
CONFIG = EngineConfig(model="smollm2-135m", device="cpu", dtype="float32", max_num_seqs=6, num_kv_blocks=70)
ALL_AT_ONCE = Workload(num_requests=20, input_len=120, output_len=30, lengths="uniform", spread=0.5, seed=3)
OPEN = Workload(num_requests=20, rate=4.0, input_len=120, output_len=30, lengths="uniform", spread=0.5, seed=4)
CLOSED = Workload(num_requests=20, concurrency=3, input_len=120, output_len=30, seed=5)


def machine(**factors: float) -> DeviceSpec:
    """The generic CPU with some ops slower than its twin believes; `rest` is every other."""
    named = {"*" if name == "rest" else name: factor for name, factor in factors.items()}
    form = Format(dtype="float32", compute="float32", bits=32.0, kv="float32")
    made = Correction(format=form, model="SmolLM2-135M", factors=named, spreads={}, source="a test", date="2026-01-01")
    return with_correction(CPU, made)


def run(workload: Workload, **factors: float) -> RunRecord:
    record = simulate(CONFIG, workload, REGISTRY, machine(**factors) if factors else CPU)
    record.world = "engine"
    return record


def twin(record: RunRecord, device: DeviceSpec = CPU) -> Attribution:
    return attribute(replay(record, registry=REGISTRY, device=device))


@pytest.mark.parametrize("workload", [ALL_AT_ONCE, OPEN, CLOSED], ids=["all at once", "open", "closed"])
def test_a_perfect_prediction_has_no_error_anywhere(workload: Workload) -> None:
    found = twin(run(workload))
    assert found.same == 1 and found.notes == ()
    assert all(abs(part.error) < 1e-9 for part in found.parts)
    assert all(
        real == pytest.approx(predicted) for real, predicted in (*found.counts.values(), *found.metrics.values())
    )


@pytest.mark.parametrize("workload", [ALL_AT_ONCE, OPEN, CLOSED], ids=["all at once", "open", "closed"])
def test_the_cause_is_found_and_the_parts_add_up(workload: Workload) -> None:
    record = run(workload, attention=3.0)
    found = twin(record)
    assert found.same > 0.97  # an arrival may fall between the end of a step and the next plan
    assert found.real == record.metrics["duration"]
    assert sum(p.real for p in found.parts) == pytest.approx(found.real)
    assert sum(p.predicted for p in found.parts) == pytest.approx(found.predicted)
    by_name = {part.name: part for part in found.parts if part.name}
    worst = min(by_name.values(), key=lambda p: p.error)
    assert worst.name == "attention" and worst.real == pytest.approx(3 * worst.predicted, rel=1e-6)
    assert all(abs(p.error) < 1e-9 for p in by_name.values() if p.name != "attention")
    assert found.groups()[0].group == "attention" or workload is OPEN
    if workload is ALL_AT_ONCE:  # plans do not depend on how long steps take
        assert next(p for p in found.parts if p.group == PLANS).error == pytest.approx(0, abs=1e-9)
        assert found.counts["steps"][0] == found.counts["steps"][1]


def test_corrections_mend_the_prediction_and_carry_an_interval() -> None:
    record = run(ALL_AT_ONCE, attention=2.0, host=1.5, rest=1.2)
    made = correction(replay(record, registry=REGISTRY, device=CPU))
    assert made.factors["attention"] == pytest.approx(2.0)
    assert made.factors["down_proj"] == pytest.approx(1.2) and made.factors["*"] == pytest.approx(1.2)
    assert all(0.03 <= spread <= 0.5 for spread in made.spreads.values())
    device = with_correction(CPU, made)
    assert twin(record, device).predicted == pytest.approx(record.metrics["duration"], rel=0.005)
    other = run(OPEN, attention=2.0, host=1.5, rest=1.2)  # what was learnt holds for another run
    after = simulate(CONFIG, OPEN, REGISTRY, device)
    assert after.metrics["e2e"] == pytest.approx(other.metrics["e2e"], rel=0.01)
    assert "corrected by run" in after.reasons["device"]
    assert after.intervals["duration"][0] < other.metrics["duration"] < after.intervals["duration"][1]
    assert twin(record, without_corrections(device)).predicted == pytest.approx(twin(record).predicted)


def test_small_and_large_launches_are_corrected_apart() -> None:
    """Decode steps that are 1.2 times and prompts that are 2 times slower than predicted: a run of both teaches both."""
    one = CONFIG.model_copy(update={"max_num_seqs": 1})
    seen = replay(
        simulate(one, Workload(num_requests=2, input_len=100, output_len=30, seed=6), REGISTRY, CPU),
        registry=REGISTRY, device=CPU,
    )  # fmt: skip

    def slower(step: PricedStep) -> PricedStep:
        factor = 2.0 if step.real.num_tokens > 1 else 1.2
        real = step.predicted
        ops = {name: seconds * factor for name, seconds in real.ops.items()}
        return replace(step, gap=0.0, real=replace(step.real, seconds=factor * real.seconds, ops=ops))

    made = correction(replace(seen, steps=tuple(slower(step) for step in seen.steps)))
    assert made.factors["down_proj"] == pytest.approx(1.3, abs=0.1)  # of their time together
    assert [factor for _, factor in made.by_size["down_proj"]] == pytest.approx([1.2, 2.0])
    assert "lm_head" not in made.by_size  # one logit a sequence, whatever is fed
    device = with_correction(CPU, made)
    for length, answer in ((60, 40), (140, 20)):
        work = Workload(num_requests=1, input_len=length, output_len=answer, seed=7)
        plain, after = simulate(one, work, REGISTRY, CPU), simulate(one, work, REGISTRY, device)
        assert after.metrics["tpot"]["p50"] == pytest.approx(1.2 * plain.metrics["tpot"]["p50"], rel=0.03)
        assert after.metrics["ttft"]["p50"] == pytest.approx(2.0 * plain.metrics["ttft"]["p50"], rel=0.15)


def test_a_factor_lies_between_those_of_small_and_of_large_launches() -> None:
    form = Format(dtype="float32", compute="float32", bits=32.0, kv="float32")
    made = Correction(
        format=form, model="", factors={"a": 1.5, "*": 3.0}, by_size={"a": ((1e-4, 1.0), (1e-2, 2.0))}, spreads={},
        source="", date="",
    )  # fmt: skip
    assert [made.factor("a", seconds) for seconds in (0.0, 1e-6, 1e-4, 1e-2, 1.0)] == pytest.approx([1, 1, 1, 2, 2])
    middle = made.factor("a", 5.05e-3)
    assert middle == pytest.approx((1e-4 + 2e-2) / 2 / 5.05e-3)
    assert made.factor("b", 1e-3) == 3.0
    assert made.model_copy(update={"factors": {"a": 1.5}}).factor("b", 1e-3) is None


def test_a_step_that_is_explained_costs_what_a_run_is_charged() -> None:
    device = machine(attention=2.0, rest=1.5)
    step = simulate(CONFIG, Workload(num_requests=1, input_len=60, output_len=2), REGISTRY, device).steps[0]
    lines = explain(CONFIG, StepShape.prefill(60), REGISTRY, device)
    assert sum(line.seconds for line in lines) == pytest.approx(step.seconds, rel=1e-9)
    assert all("corrected" in line.source for line in lines)


def test_a_correction_is_of_one_format() -> None:
    device = machine(rest=2.0)
    half = CONFIG.model_copy(update={"dtype": "bfloat16"})
    plain, same = simulate(half, CLOSED, REGISTRY, CPU), simulate(half, CLOSED, REGISTRY, device)
    assert same.metrics == plain.metrics


def test_a_log_of_another_engine_gives_one_factor(tmp_path: Path) -> None:
    record = run(OPEN, rest=1.4)
    path = tmp_path / "served.jsonl"
    rows = [
        {"queued_ts": 1000 + r.arrival, "input_toks": r.num_prompt_tokens, "output_toks": r.num_output_tokens,
         "first_token_ts": 1000 + (r.first_token or 0), "last_token_ts": 1000 + (r.last_token or 0)}
        for r in record.requests
    ]  # fmt: skip
    path.write_text("\n".join(json.dumps(row) for row in reversed(rows)))
    log = read_log(path)
    assert log.metrics["ttft"]["p95"] == pytest.approx(record.metrics["ttft"]["p95"])
    first = replay(log, CONFIG, REGISTRY, CPU)
    assert attribute(first).parts == ()
    made = fitted_correction(first, lambda device: replay(log, CONFIG, REGISTRY, device))
    assert made.factors == {"*": pytest.approx(1.4, rel=0.02)} and made.spreads["*"] >= 0.03
    with pytest.raises(ConfigError, match="does not say how the engine was set up"):
        replay(log, registry=REGISTRY)


def served(tmp_path: Path, prompt: int, output: int, seconds: float) -> RunRecord:
    path = tmp_path / "served.jsonl"
    rows = [
        {"arrival": i, "prompt_tokens": prompt, "output_tokens": output, "first_token": i + seconds / 2, "last_token": i + seconds}
        for i in range(3)
    ]  # fmt: skip
    path.write_text("\n".join(map(json.dumps, rows)))
    return read_log(path)


def test_a_log_of_answers_of_one_token_has_no_time_per_token(tmp_path: Path) -> None:
    log = served(tmp_path, 20, 1, 0.2)
    assert [r.tpot for r in log.requests] == [None] * 3
    found = attribute(replay(log, CONFIG, REGISTRY, CPU))
    assert "tpot.mean" not in found.metrics and found.metrics["ttft.mean"][0] == pytest.approx(0.1)


def test_a_log_that_its_twin_cannot_answer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="3 of 3 requests that its twin does not answer: r0 of 9000 prompt tokens"):
        replay(served(tmp_path, 9000, 5, 0.2), CONFIG.model_copy(update={"num_kv_blocks": None}), REGISTRY, CPU)


@pytest.mark.parametrize("seconds", [0.0, 3e6])
def test_no_factor_mends_what_is_no_matter_of_speed(tmp_path: Path, seconds: float) -> None:
    log = served(tmp_path, 20, 5, seconds)
    first = replay(log, CONFIG, REGISTRY, CPU)
    with pytest.raises(ConfigError, match="no factor mends that; see that its times are seconds"):
        fitted_correction(first, lambda device: replay(log, CONFIG, REGISTRY, device))


def test_a_few_requests_say_little_of_their_spread(tmp_path: Path) -> None:
    log = served(tmp_path, 20, 5, 0.4)
    made = fitted_correction(replay(log, CONFIG, REGISTRY, CPU), lambda device: replay(log, CONFIG, REGISTRY, device))
    assert made.spreads["*"] >= 0.1


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 2: is not JSON"),
        ("[1]", "not a JSON object"),
        ('{"arrival": 1, "prompt_tokens": 5, "first_token": 2, "last_token": 3}', "has no output"),
        (
            '{"arrival": 1, "prompt_tokens": 5, "output_tokens": 0, "first_token": 2, "last_token": 3}',
            "count of tokens",
        ),
        (
            '{"arrival": 1, "prompt_tokens": true, "output_tokens": 2, "first_token": 2, "last_token": 3}',
            "not a number",
        ),
        ('{"arrival": 9, "prompt_tokens": 5, "output_tokens": 2, "first_token": 2, "last_token": 3}', "not in order"),
        (
            f'{{"arrival": 1, "prompt_tokens": 1{"0" * 400}, "output_tokens": 2, "first_token": 2, "last_token": 3}}',
            "not a number",
        ),
        (
            f'{{"arrival": 1, "prompt_tokens": 5, "output_tokens": 2, "first_token": 2, "last_token": 1{"0" * 400}}}',
            "not a number",
        ),
        (
            '{"arrival": 1, "prompt_tokens": 5, "output_tokens": 1e12, "first_token": 2, "last_token": 3}',
            "to 16,777,216",
        ),
        (
            '{"arrival": 1, "prompt_tokens": 5, "output_tokens": 2, "first_token": 2, "last_token": 1e300}',
            "comes 1e.300 s after",
        ),
    ],
)
def test_a_damaged_log_names_the_line(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "log.jsonl"
    good = '{"arrival": 1, "prompt_tokens": 5, "output_tokens": 2, "first_token": 2, "last_token": 3}'
    path.write_text(f"{good}\n{line}\n")
    with pytest.raises(ConfigError, match=words):
        read_log(path)


def test_a_log_may_hold_any_text_but_has_to_take_time(tmp_path: Path) -> None:
    row = {
        "arrival": 1,
        "prompt_tokens": 5,
        "output_tokens": 2,
        "first_token": 2,
        "last_token": 3,
        "text": "a\u2028b\x85",
    }
    path = tmp_path / "log.jsonl"
    path.write_text(json.dumps(row, ensure_ascii=False) + "\r\n", encoding="utf-8")
    assert len(read_log(path).requests) == 1
    path.write_text(json.dumps(row | {"first_token": 1, "last_token": 1}))
    with pytest.raises(ConfigError, match="its last token comes 0 s after its first arrival; give times in seconds"):
        read_log(path)
    path.write_bytes(gzip.compress(b"x"))
    with pytest.raises(ConfigError, match=r"is compressed .*gunzip"):
        read_log(path)


def test_what_cannot_be_replayed_is_refused_with_its_reason(tmp_path: Path) -> None:
    record = run(CLOSED)
    for changed, words in (
        ({"config": record.config | {"tp": "x"}}, "its config has tp='x', which is no whole number"),
        ({"config": record.config | {"moon": 1}}, "its config has moon=1, which is not known"),
        ({"config": {k: v for k, v in record.config.items() if k != "model"}}, "its config has model, which is missing"),
        ({"workload": {"rate": "x"}}, "its workload has rate='x', which is no number"),
        ({"workload": {"num_requests": -1}}, "its workload cannot be: --requests=-1"),
        ({"metrics": {}}, "does not say how long it took"), ({"metrics": {"duration": 0.0}}, "took no time"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=words):
            replay(replace(record, **changed), registry=REGISTRY, device=CPU)
    endless = {**record.metrics, "output_throughput": "inf"}  # as it is stored
    assert (
        "output_throughput"
        not in attribute(replay(replace(record, metrics=endless), registry=REGISTRY, device=CPU)).metrics
    )
    timeless = [replace(step, start=0.0, seconds=0.0, ops={}) for step in record.steps]
    with pytest.raises(ConfigError, match="has steps that took no time"):
        correction(replay(replace(record, steps=timeless), registry=REGISTRY, device=CPU))
    with pytest.raises(ConfigError, match="stopped early"):
        replay(replace(record, complete=False), registry=REGISTRY, device=CPU)
    with pytest.raises(ReplayStopped):
        replay(record, registry=REGISTRY, device=CPU, should_stop=lambda: True)
    with pytest.raises(ConfigError, match="several samples"):
        replay(replace(record, workload={**record.workload, "beam_width": 2}), registry=REGISTRY, device=CPU)
    with pytest.raises(ConfigError, match="holds no requests"):
        (tmp_path / "empty.jsonl").write_text("\n")
        read_log(tmp_path / "empty.jsonl")
