"""`plan` end to end on tiny spaces: brute force, resume, cancel, processes, prices, memory, promises."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from twinfer.core.config import EngineConfig
from twinfer.core.device import load_device, write_device
from twinfer.core.errors import ConfigError
from twinfer.core.fleet import Fleet
from twinfer.core.goal import Goal, parse_goals
from twinfer.core.registry import Registry
from twinfer.core.workload import Workload
from twinfer.simulator.fleet_run import simulate_fleet
from twinfer.simulator.plan import Plan, plan, read_plan
from twinfer.simulator.plan_file import _digest, check_out
from twinfer.simulator.plan_space import Question
from twinfer.simulator.plan_traffic import busiest
from twinfer.simulator.plan_trial import ASSESS, FLEET, PROOF, REPLICA, SCREEN, Evaluator, Trial
from twinfer.simulator.run import simulate

REGISTRY = Registry(entry_points=False)
TRAFFIC = Workload(num_requests=48, rate=24.0, input_len=700, output_len=12, lengths="uniform", spread=0.5)


def question(workload: Workload = TRAFFIC, slo: tuple[str, ...] = ("ttft.p90<=0.4",), **more: Any) -> Question:
    axes: Mapping[str, tuple[Any, ...]] = {
        "device": ("l40s", "h100-sxm"), "max_num_batched_tokens": (512, 2048), **more.pop("axes", {})
    }  # fmt: skip
    given = {"base": {"model": "llama-3.1-8b"}, "prices": {"l40s": 1.0}, "max_replicas": 6, "screen": 100} | more
    return Question(axes=axes, workload=workload, goals=parse_goals(slo), **given)


@pytest.fixture(scope="module")
def whole() -> Plan:
    return plan(question(), REGISTRY)


# --- trials -----------------------------------------------------------------------------------------


def test_one_replica_is_the_run_that_simulate_predicts() -> None:
    asked = question()
    evaluator = Evaluator(asked, REGISTRY)
    trial = Trial(design=2, replicas=1, level=FLEET)
    outcome = evaluator.answer(trial)
    assert outcome is not None and evaluator.designs[2].key == "h100-sxm tokens=512"
    config = EngineConfig(model="llama-3.1-8b", device="h100-sxm", max_num_batched_tokens=512)
    metrics = simulate(config, TRAFFIC, REGISTRY).metrics
    for name in ("ttft.p50", "ttft.p95", "tpot.p95", "e2e.p95"):
        head, _, part = name.partition(".")
        assert outcome.values[name] == pytest.approx(metrics[head][part], rel=1e-9)
    assert outcome.tokens_per_second == pytest.approx(metrics["output_throughput"], rel=1e-9)
    assert outcome.num_requests == 48 and outcome.failed == 0
    assert evaluator.answer(trial) == outcome


@pytest.mark.parametrize(
    ("router", "pools"), [("round_robin", "colocated"), ("least_loaded", "colocated"), ("round_robin", "1:2")]
)
def test_a_fleet_is_the_one_that_simulate_predicts(router: str, pools: str) -> None:
    """Also where replicas are simulated one by one, because requests are dealt out in turn."""
    asked = question(axes={"device": ("h100-sxm",), "max_num_batched_tokens": (512,), "router": (router,), "pools": (pools,)},
                     prices={})  # fmt: skip
    evaluator = Evaluator(asked, REGISTRY)
    outcome = evaluator.answer(Trial(design=0, replicas=2, level=FLEET))
    assert outcome is not None and not outcome.problem
    config = EngineConfig(model="llama-3.1-8b", device="h100-sxm", max_num_batched_tokens=512)
    split = {"replicas": 2} if pools == "colocated" else {"replicas": 2, "decode": config, "decode_replicas": 4}
    record = simulate_fleet(Fleet(engine=config, router=router, **split), TRAFFIC, REGISTRY, bands=False)
    for name in ("ttft.p50", "ttft.p95", "tpot.p95", "e2e.p95"):
        head, _, part = name.partition(".")
        assert outcome.values[name] == pytest.approx(record.metrics[head][part], rel=1e-9)
    assert outcome.num_requests == 48
    assert evaluator.designs[0].num_devices == (1 if pools == "colocated" else 3)


def test_replicas_share_the_requests_and_more_of_them_are_never_later() -> None:
    evaluator = Evaluator(question(), REGISTRY)
    outcomes = [evaluator.answer(Trial(design=1, replicas=n, level=FLEET)) for n in range(1, 5)]
    assert all(o is not None and (o.hopeless or o.num_requests == 48) for o in outcomes)
    late = [math.inf if o.values["ttft.p95"] is None or o.hopeless else o.values["ttft.p95"] for o in outcomes if o]
    assert late == sorted(late, reverse=True)


def test_less_bandwidth_more_traffic_and_slower_steps_never_help() -> None:
    evaluator = Evaluator(question(), REGISTRY)
    base = Trial(design=2, replicas=2, level=FLEET)
    plain = evaluator.answer(base)
    assert plain is not None
    for worse in ({"bandwidth": 0.5}, {"steps": 1.5}, {"load": 2.0}):
        outcome = evaluator.answer(Trial(design=2, replicas=2, level=FLEET, **worse))
        assert outcome is not None and outcome.margin(evaluator.question.goals) > plain.margin(evaluator.question.goals)


def test_a_hopeless_run_ends_early_and_would_have_failed() -> None:
    """The watch ends a run only where the whole of it breaks even a promise 25 % weaker."""
    crowd = TRAFFIC.model_copy(update={"rate": 400.0})
    evaluator = Evaluator(question(crowd), REGISTRY)
    outcome = evaluator.answer(Trial(design=0, replicas=1, level=FLEET))
    assert outcome is not None and outcome.hopeless == "ttft.p90<=0.4" and not outcome.keeps(evaluator.question.goals)
    config = EngineConfig(model="llama-3.1-8b", device="l40s", max_num_batched_tokens=512)
    assert simulate(config, crowd, REGISTRY).metrics["ttft"]["p90"] > 1.25 * 0.4


def test_bounds_never_refuse_what_a_simulation_accepts() -> None:
    evaluator = Evaluator(question(), REGISTRY)
    for design in evaluator.designs:
        bound = evaluator.answer(Trial(design=design.index, replicas=1, level=ASSESS))
        assert bound is not None
        for n in range(1, 4):
            outcome = evaluator.answer(Trial(design=design.index, replicas=n, level=FLEET))
            if outcome is not None and outcome.keeps(evaluator.question.goals):
                assert not bound.problem and bound.fewest <= n


def test_screen_takes_the_busiest_part() -> None:
    evaluator = Evaluator(
        question(TRAFFIC.model_copy(update={"num_requests": 300, "rate": 5.0, "ramp_to": 50.0})), REGISTRY
    )
    assert evaluator.level(SCREEN, 2) == SCREEN and evaluator.level(REPLICA, 2) == REPLICA
    part = busiest(evaluator.requests, 100)
    assert len(part) == 100 and part[0].arrival > evaluator.requests[150].arrival
    assert busiest(evaluator.requests, 300) is evaluator.requests
    assert Evaluator(question(), REGISTRY).level(SCREEN, 2) == FLEET  # so little traffic is always used whole


# --- the answer -------------------------------------------------------------------------------------


def test_the_answer_is_the_one_of_brute_force(whole: Plan) -> None:
    evaluator = Evaluator(question(), REGISTRY)
    goals = evaluator.question.goals
    best: dict[str, tuple[float, float, str, int]] = {}
    for design in evaluator.designs:
        for n in range(1, 7):
            draws = [evaluator.answer(Trial(design=design.index, replicas=n, level=FLEET, seed=s)) for s in range(3)]
            if all(o is not None and o.keeps(goals) for o in draws):
                margin = max(o.margin(goals) for o in draws if o is not None)
                point = (float(n), margin, design.key, n)
                best[design.device] = min(best.get(design.device, point), point)
                break
    assert whole.complete and whole.answer is not None
    assert {f.device: (f.design, f.replicas) for f in whole.answer.fleets} == {d: b[2:] for d, b in best.items()}
    costs = [f.cost_per_hour for f in whole.answer.fleets]
    assert len(costs) == 2 and costs == sorted(costs)


def test_every_fleet_was_confirmed_and_keeps_its_promises(whole: Plan) -> None:
    assert whole.answer is not None
    for fleet in whole.answer.fleets:
        draws = [
            outcome for trial, outcome in whole.points.values()
            if whole.designs[trial.design] == fleet.design
            and trial == Trial(design=trial.design, replicas=fleet.replicas, level=FLEET, seed=trial.seed)
        ]  # fmt: skip
        assert len(draws) == fleet.seeds == 3 and all(found.keeps(whole.question.goals) for found in draws)
        found = max(draws, key=lambda o: o.margin(whole.question.goals))
        assert fleet.values == found.values
        values = [o.values["ttft.p90"] for o in draws]
        assert fleet.spread["ttft.p90"] == (min(values), max(values)) and min(values) < max(values)
        least, most = fleet.goodput_spread
        assert fleet.goodput == least <= most
        assert fleet.values["ttft.p90"] <= 0.4 and fleet.goodput >= 0.99 * 24 * 0.9
        low, high = fleet.band["ttft.p90"]
        assert (
            low is not None and low <= fleet.values["ttft.p90"] and (high is None or high >= fleet.values["ttft.p90"])
        )
        assert fleet.cost_per_hour == pytest.approx(fleet.num_devices * fleet.price_per_hour)
        assert fleet.watts and 0.3 * 300 < fleet.watts / fleet.num_devices < 700
        assert fleet.cost_per_million == pytest.approx(fleet.cost_per_hour / 3600 / found.good_tokens * 1e6)
    assert {k for k, v in whole.verdicts.items() if not v} == {f.design for f in whole.answer.fleets}


def test_the_sentence_names_fleet_price_promises_and_next_limit(whole: Plan) -> None:
    assert whole.answer is not None
    best, sentence = whole.answer.fleets[0], whole.answer.sentence
    for word in (
        best.label,
        f"US$ {best.cost_per_hour:.2f} an hour",
        "ttft.p90",
        "next limit",
        best.next_limit,
    ):
        assert word in sentence, word
    assert sentence.count(". ") == 0 and "\n" not in sentence
    cases = {row["case"]: row["replicas"] for row in whole.answer.changed}
    n = best.replicas
    assert cases["traffic +20 %"] >= n <= cases["memory bandwidth -10 %"]
    assert cases["promises 20 % looser"] <= n <= cases["promises 20 % tighter"]
    assert cases["one replica fails (N+1 to buy)"] == n + 1


def test_what_does_not_fit_is_refused_by_memory_and_never_simulated() -> None:
    asked = question(
        base={"model": "llama-3.1-70b"}, axes={"device": ("l4", "h200-sxm"), "tp": (1, 2)}, max_replicas=2, prices={}
    )
    found = plan(asked, REGISTRY)
    l4 = {k: v for k, v in found.verdicts.items() if k.startswith("l4")}
    assert len(l4) == 4 and all("GiB" in why for why in l4.values())
    assert all(t.level == ASSESS for t, _ in found.points.values() if found.designs[t.design].startswith("l4"))
    assert found.answer is not None and "l4" in found.answer.none
    assert all(f.device != "l4" for f in found.answer.fleets)


def test_a_promise_that_no_device_can_keep_is_said_to_be_one() -> None:
    found = plan(question(slo=("ttft.p50<=1us",)), REGISTRY)
    assert found.answer is not None and not found.answer.fleets
    assert found.answer.sentence.startswith("No fleet of up to 6 replicas keeps the promises")
    assert all("on an empty server" in why for why in found.verdicts.values())


def test_devices_without_a_price_are_ranked_apart(tmp_path: Path) -> None:
    spec = load_device("l40s", REGISTRY).model_copy(update={"name": "mine", "aliases": (), "price_per_hour": None})
    mine = str(write_device(spec, tmp_path / "mine.json"))
    found = plan(question(prices={}, axes={"device": (mine, "h100-sxm"), "max_num_batched_tokens": (2048,)}), REGISTRY)
    assert found.answer is not None
    assert [f.device for f in found.answer.fleets] == ["h100-sxm", mine]
    assert found.answer.fleets[1].cost_per_hour is None and not found.answer.fleets[1].on_front
    assert any("no price is known for" in note for note in found.answer.notes)


def test_of_equal_prices_the_one_with_the_most_room_is_the_answer(tmp_path: Path) -> None:
    """Also where its name comes last, and its goodput is known before it is proved."""
    spec = load_device("h100-sxm", REGISTRY)
    fast = {name: 1.1 * peak for name, peak in spec.peak_flops.items()}
    words = [
        str(write_device(spec.model_copy(update={"name": name, "aliases": (), "price_per_hour": 2.0, **more}), tmp_path / f"{name}.json"))
        for name, more in (("a-slow", {}), ("b-fast", {"peak_flops": fast, "memory_bandwidth": 1.1 * spec.memory_bandwidth}))
    ]  # fmt: skip
    found = plan(question(prices={}, axes={"device": tuple(words), "max_num_batched_tokens": (2048,)}), REGISTRY)
    assert found.answer is not None
    best, second = found.answer.fleets
    assert "b-fast" in best.device and best.cost_per_hour == second.cost_per_hour and best.goodput > second.goodput
    assert found.answer.changed and "next limit" in found.answer.sentence


def test_the_best_fleet_is_proved_on_all_of_the_traffic() -> None:
    """A quiet half behind a busy one: designs are confirmed on the busy one, the answer on both."""
    ramp = TRAFFIC.model_copy(update={"num_requests": 120, "rate": 30.0, "ramp_to": 3.0})
    found = plan(question(ramp, screen=20, confirm=60), REGISTRY)
    assert found.answer is not None
    best = found.answer.fleets[0]
    proofs = [(t, o) for t, o in found.points.values() if t.level == PROOF]
    (trial, outcome) = proofs[-1]
    assert (found.designs[trial.design], trial.replicas) == (best.design, best.replicas)
    assert outcome.num_requests == 120 and outcome.keeps(found.question.goals)
    assert any("on all 120" in note for note in found.answer.notes)


def test_cost_and_rates_are_of_all_the_traffic_whatever_part_confirms_it(tmp_path: Path) -> None:
    """Quiet for a long time, then busy for a moment: most of what is paid for is idle."""
    seconds = [5.0 * i for i in range(24)] + [120 + i / 20 for i in range(24)]
    rows = [f"2023-11-16 18:{int(t // 60):02d}:{t % 60:09.6f}0,300,6" for t in seconds]
    (tmp_path / "t.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(rows) + "\n")
    trace = Workload(trace=str(tmp_path / "t.csv"))
    axes = {"device": ("h100-sxm",), "max_num_batched_tokens": (512,)}
    asked = [question(trace, axes=axes, prices={}, screen=12, confirm=n, max_replicas=2) for n in (12, 100)]
    part, whole = (plan(one, REGISTRY).answer.fleets[0] for one in asked)
    assert part.replicas == whole.replicas == 1 and part.values != whole.values
    for name in ("cost_per_million", "requests_per_second", "tokens_per_second"):
        assert getattr(part, name) == pytest.approx(getattr(whole, name), rel=0.02), name
    config = EngineConfig(model="llama-3.1-8b", device="h100-sxm", max_num_batched_tokens=512)
    metrics = simulate(config, trace, REGISTRY).metrics
    assert part.cost_per_million == pytest.approx(
        part.cost_per_hour / 3600 / metrics["output_throughput"] * 1e6, rel=0.01
    )


# --- files, stops, processes ------------------------------------------------------------------------


def test_a_plan_is_read_back_and_equal_questions_give_equal_files(whole: Plan, tmp_path: Path) -> None:
    whole.write(tmp_path / "a.json")
    again = read_plan(tmp_path / "a.json")
    assert again.points == whole.points and again.question.plain() == whole.question.plain()
    plan(question(), REGISTRY, known=again, out=tmp_path / "b.json")
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


@pytest.mark.parametrize("after", [3, 20])
def test_a_stopped_search_leaves_a_valid_file_and_resumes_to_the_same_answer(
    whole: Plan, after: int, tmp_path: Path
) -> None:
    count = 0

    def on_progress(done: int, total: int, info: dict[str, Any]) -> None:
        nonlocal count
        count = info["points"]
        assert 0 <= done <= total

    file = tmp_path / "plan.json"
    part = plan(question(), REGISTRY, out=file, on_progress=on_progress, should_stop=lambda: count >= after)
    assert not part.complete and len(part.points) < len(whole.points)
    written = json.loads(file.read_text())
    assert written["complete"] is False and len(written["points"]) == len(part.points)
    known = read_plan(file)
    plan(known.question, REGISTRY, known=known, out=file)
    whole.write(tmp_path / "whole.json")
    assert file.read_bytes() == (tmp_path / "whole.json").read_bytes()


def test_processes_find_what_one_finds(whole: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the main module is a script that must not run again, as in a web framework."""
    main = ModuleType("__main__")
    main.__file__ = str(tmp_path / "page.py")
    Path(main.__file__).write_text("raise RuntimeError('was run again')\n")
    monkeypatch.setitem(sys.modules, "__main__", main)
    found = plan(question(), REGISTRY, workers=2)
    assert found.plain() == whole.plain()
    assert sys.modules["__main__"] is main


def test_ray_is_refused_in_words_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"--ray.*not installed.*twinfer\[ray\]"):
        plan(question(), REGISTRY, ray="auto")


def test_a_ray_cluster_is_asked_as_processes_are(whole: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for ray's client: actors in this process, references that are their results."""

    class Remote:
        def __init__(self, method: Any) -> None:
            self.method = method

        def remote(self, *given: Any) -> Any:
            made = self.method(*given)
            return Handle(made) if hasattr(made, "answer") else Reference(made)

    class Reference:
        def __init__(self, value: Any) -> None:
            self.value = value

    class Handle:
        def __init__(self, actor: Any) -> None:
            self.answer = Remote(actor.answer)

    given: dict[str, Any] = {}
    fake = SimpleNamespace(
        init=lambda **more: given.update(more), shutdown=lambda: given.update(over=True),
        cluster_resources=lambda: {"CPU": 3.0}, remote=lambda **more: Remote, kill=lambda actor: None,
        wait=lambda refs, num_returns, timeout: (refs[:1], refs[1:]), get=lambda ref: ref.value,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "ray", fake)
    assert plan(question(), REGISTRY, ray="ray://there:1").plain() == whole.plain()
    assert given["address"] == "ray://there:1" and given["over"]


@pytest.mark.parametrize(
    ("changes", "option"),
    [
        ({"workload": TRAFFIC.model_copy(update={"rate": None})}, "--rate"),
        ({"workload": TRAFFIC.model_copy(update={"rate": None, "concurrency": 9})}, "--requests"),
        ({"workload": TRAFFIC.model_copy(update={"output_len": 1}), "slo": ("tpot.p95<=1",)}, "--slo"),
        ({"axes": {"colour": (1,)}}, "--try"), ({"axes": {"tp": (0,)}}, "--tp"), ({"axes": {"tp": (1, 1)}}, "--tp"),
        ({"axes": {"device": ()}}, "--device"), ({"axes": {"device": ("h1000",)}}, "--device"),
        ({"axes": {"router": ("nobody",)}}, "--router"), ({"axes": {"pools": ("2",)}}, "--pools"),
        ({"prices": {"l4": 1.0}}, "--price"), ({"prices": {"l40s": -1.0}}, "--price"), ({"max_replicas": 0}, "--max-replicas"),
        ({"screen": 0}, "--screen"), ({"confirm": 0}, "--confirm"),
    ],
)  # fmt: skip
def test_questions_without_an_answer_are_refused(changes: dict[str, Any], option: str) -> None:
    with pytest.raises(ConfigError) as error:
        plan(question(**changes), REGISTRY)
    assert error.value.option == option


@pytest.mark.parametrize("text", ["", "{}", '{"kind": "plan", "schema": 1}', "[1]", '{"kind": "plan", "schema": 99}'])
def test_a_file_that_holds_no_plan_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ConfigError, match="--resume"):
        read_plan(tmp_path / "x.json")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_plan(tmp_path / "missing.json")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"rate": 24.0', '"rate": 2.4'), ("ttft.p90<=0.4", "ttft.p90<=4"), ('"seeds": 3', '"seeds": 3, "colour": 1'),
        ('"ttft.p90": 0', '"ttft.p90": -1'), ('"ttft.p90": ', '"ttft.p90": NaN, "x": '), ('"num_requests": 48', '"num_requests": "x"'),
    ],
)  # fmt: skip
def test_a_file_that_was_changed_is_not_believed(whole: Plan, old: str, new: str, tmp_path: Path) -> None:
    whole.write(tmp_path / "a.json")
    text = (tmp_path / "a.json").read_text()
    assert old in text
    (tmp_path / "a.json").write_text(text.replace(old, new))
    with pytest.raises(ConfigError, match=r"--resume.*was changed after it was written"):
        read_plan(tmp_path / "a.json")


def test_a_file_of_another_maker_with_fields_of_other_kinds_is_no_plan(whole: Plan, tmp_path: Path) -> None:
    """Its digest is right, but no search wrote it."""
    found = json.loads(json.dumps(whole.plain()))
    for damage in ({"base": {}}, {"base": {"model": 5}}, {"design": None}, {"design": "x"}):
        changed = json.loads(json.dumps(found))
        changed["question" if "base" in damage else "points"] = (
            changed["question"] | damage if "base" in damage
            else [{**point, "trial": point["trial"] | damage} for point in changed["points"]]
        )  # fmt: skip
        changed["digest"] = _digest(changed["question"], changed["points"])
        (tmp_path / "a.json").write_text(json.dumps(changed))
        with pytest.raises(ConfigError, match=r"--resume.*holds no plan that this version can read"):
            read_plan(tmp_path / "a.json")


def test_nothing_but_a_plan_is_replaced_and_a_failed_write_leaves_nothing(
    whole: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.json").write_text('{"kind": "plan of mine"}')
    (tmp_path / "empty.json").touch()
    whole.write(tmp_path / "old.json")
    for fine in ("new.json", "empty.json", "old.json"):
        check_out(tmp_path / fine)
    for path, why in (
        (tmp_path / "mine.json", "is not a plan, and would be replaced"), (tmp_path, "no regular file"), (Path("/dev/null"), "no regular file"),
        (tmp_path / "no" / "x.json", "no folder"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=f"--out.*{why}"):
            plan(question(), REGISTRY, out=path)
    assert (tmp_path / "mine.json").read_text() == '{"kind": "plan of mine"}' and not (tmp_path / "no").exists()

    def full(*given: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(ConfigError, match=r"--out.*No space left"):
        whole.write(tmp_path / "k.json")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty.json", "mine.json", "old.json"]


def test_another_question_does_not_resume(whole: Plan) -> None:
    with pytest.raises(ConfigError, match="another question"):
        plan(question(slo=("ttft.p90<=0.5",)), REGISTRY, known=whole)


def test_goals_survive_the_file(whole: Plan) -> None:
    assert Question.from_plain(whole.question.plain()).goals == (Goal("ttft", "p90", 0.4),)
