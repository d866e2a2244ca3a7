"""The search against brute force, on made-up fleets whose outcomes are known in closed form: nothing is simulated."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinfer.core.config import EngineConfig
from twinfer.core.goal import Goal
from twinfer.core.registry import default_registry
from twinfer.core.workload import Workload
from twinfer.simulator.plan_answer import SLOW_END, Fleet, front_of, next_limit, sentence_of
from twinfer.simulator.plan_command import command_of
from twinfer.simulator.plan_designs import Design, designs_of, label_of
from twinfer.simulator.plan_edge import HINTS, Search, smallest
from twinfer.simulator.plan_search import Found, confirm_device, finish_device, needed, screen_device
from twinfer.simulator.plan_space import Question
from twinfer.simulator.plan_traffic import Traffic
from twinfer.simulator.plan_trial import ASSESS, FLEET, SCREEN, Outcome, Trial

GOALS = (Goal("ttft", "p95", 1.0),)


def question(tps: tuple[int, ...] = (1, 2, 4), tokens: tuple[int, ...] = (512, 1024), most: int = 40) -> Question:
    return Question(
        base={"model": "llama-3.1-8b"}, axes={"device": ("h100-sxm",), "tp": tps, "max_num_batched_tokens": tokens},
        workload=Workload(rate=1.0), goals=GOALS, max_replicas=most,
    )  # fmt: skip


def ask(search: Search, answer: Callable[[Trial], Outcome]) -> tuple[object, list[Trial]]:
    """Drive one search to its end; what it found, and all it asked for."""
    asked: list[Trial] = []
    try:
        trials = next(search)
        while True:
            asked += trials
            trials = search.send([answer(t) for t in trials])
    except StopIteration as end:
        return end.value, asked


def search_device(designs: list[Design], asked_of: Question) -> Search[Found]:
    found = yield from screen_device("h100-sxm", designs, asked_of, Looks())
    yield from confirm_device(found, asked_of, Looks())
    return found if found.design is None else (yield from finish_device(found, asked_of, Looks()))


class Looks:
    """One look at each level, at any load."""

    most_load = float("inf")

    def level(self, level: str, replicas: int) -> str:
        return level

    def looks(self, level: str, design: Design, replicas: int) -> int:
        return 1

    def share(self, level: str, replicas: int) -> float:
        return 1.0

    def snapped(self, load: float) -> float:
        return load


class Made:
    """A world in which n replicas of design d carry n * capacity[d]; TTFT is load / what they carry."""

    def __init__(self, capacity: list[float], fewest: list[int], screen_bias: float = 1.0) -> None:
        self.capacity, self.fewest, self.bias = capacity, fewest, screen_bias

    def __call__(self, trial: Trial) -> Outcome:
        carried = self.capacity[trial.design]
        if trial.level == ASSESS:
            if not carried:
                return Outcome(problem="does not fit")
            return Outcome(fewest=self.fewest[trial.design], likely=self.fewest[trial.design] + 2)
        load = 10.0 * trial.load * trial.steps * (self.bias if trial.level == SCREEN else 1.0)
        return Outcome(values={"ttft.p95": load / (trial.replicas * carried)}, sigma=0.1)

    def cheapest(self, designs: list[Design], most: int) -> tuple[int, float] | None:
        """(devices, TTFT) of the best fleet, by trying all of them."""
        every = [
            (n * d.num_devices, 10 / (n * self.capacity[d.index]))
            for d in designs if self.capacity[d.index]
            for n in range(1, most + 1) if 10 / (n * self.capacity[d.index]) <= 1
        ]  # fmt: skip
        return min(every, default=None)


@given(st.integers(1, 30), st.integers(0, 30), st.integers(-5, 45), st.integers(1, 40))
def test_smallest_finds_the_edge_wherever_it_starts(low: int, more: int, start: int, edge: int) -> None:
    high = low + more

    def test(n: int) -> Search[bool]:
        assert low <= n <= high
        (outcome,) = yield [Trial(design=0, replicas=n, level=FLEET)]
        return not outcome.failed

    found, asked = ask(smallest(low, high, start, test), lambda t: Outcome(failed=int(t.replicas < edge)))
    assert found == (None if edge > high else max(low, edge))
    assert len(asked) == len({t.replicas for t in asked}) <= 2 * (more + 1).bit_length() + 2
    assert next(iter(smallest(5, 4, 4, test)), None) is None  # nothing to look at


@given(st.integers(1, 30), st.integers(0, 200), st.integers(1, 240), st.lists(st.one_of(st.none(), st.floats(-9, 300))))
def test_hints_change_the_way_and_not_the_answer(low: int, more: int, edge: int, hints: list[float | None]) -> None:
    high, rest = low + more, iter(hints)

    def test(n: int) -> Search[bool]:
        assert low <= n <= high
        (outcome,) = yield [Trial(design=0, replicas=n, level=FLEET)]
        return not outcome.failed

    search = smallest(low, high, low + more // 3, test, lambda n: next(rest, None))
    found, asked = ask(search, lambda t: Outcome(failed=int(t.replicas < edge)))
    assert found == (None if edge > high else max(low, edge))
    assert len(asked) == len({t.replicas for t in asked}) <= 2 * (more + 1).bit_length() + 2 + HINTS


def test_a_good_hint_saves_tests() -> None:
    def test(n: int) -> Search[bool]:
        (outcome,) = yield [Trial(design=0, replicas=n, level=FLEET)]
        return not outcome.failed

    def fails(t: Trial) -> Outcome:
        return Outcome(failed=int(t.replicas < 23))

    _, blind = ask(smallest(1, 64, 60, test), fails)
    _, led = ask(smallest(1, 64, 60, test, lambda n: 22.7), fails)
    assert [t.replicas for t in led] == [60, 22, 23] and len(blind) > 6


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(
    "change", [{"load": 1.2}, {"steps": 1.5}, {"bandwidth": 0.9}, {"scale": 0.8}, {"scale": 1.3, "easier": True}]
)
def test_a_change_needs_what_brute_force_says(seed: int, change: dict[str, float]) -> None:
    """A change for the worse is never asked of fewer replicas than are needed without it."""
    rng = random.Random(seed)
    asked_of = question(tps=(1,), tokens=(512,), most=50)
    made = Made([rng.uniform(0.3, 4.0)], [1])
    found, _ = ask(search_device(designs_of(asked_of), asked_of), made)
    assert isinstance(found, Found) and found.replicas
    given = dict(change)
    goals = tuple(g.scaled(given.pop("scale", 1.0)) for g in GOALS)

    def with_bandwidth(trial: Trial) -> Outcome:
        return made(replace(trial, steps=trial.steps / trial.bandwidth))

    n, asked = ask(needed(found, asked_of, goals, Looks(), **given), with_bandwidth)
    fields = {name: value for name, value in given.items() if name != "easier"}
    keep = [
        n for n in range(1, 51)
        if with_bandwidth(Trial(design=0, replicas=n, level=FLEET, **fields)).keeps(goals)
    ]  # fmt: skip
    assert n == min(keep, default=None)
    if "easier" not in change:
        assert all(t.replicas >= found.replicas for t in asked)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("bias", [1.0, 1.15, 0.9])
def test_search_equals_brute_force(seed: int, bias: float) -> None:
    """With the screen as good as the whole fleet the answer is exact; a biased one must still be kept and close."""
    rng = random.Random(seed)
    asked_of = question()
    designs = designs_of(asked_of)
    capacity = [rng.choice([0.0, rng.uniform(0.3, 4.0)]) for _ in designs]
    exact = [max(1, -(-10 // c)) if c else 1 for c in capacity]
    made = Made(capacity, [max(1, int(n * rng.uniform(0.4, 1.0))) for n in exact], bias)
    found, asked = ask(search_device(designs, asked_of), made)
    assert isinstance(found, Found)
    best = made.cheapest(designs, asked_of.max_replicas)
    if best is None:
        assert found.design is None and all(found.verdicts.values())
        return
    assert found.design is not None and found.outcome is not None
    trial = Trial(design=found.design.index, replicas=found.replicas, level=FLEET)
    assert trial in asked and made(trial).keeps(GOALS), "nothing that was not confirmed"
    if bias == 1.0:
        assert (found.num_devices, found.outcome.values["ttft.p95"]) == pytest.approx(best)
    assert found.num_devices <= best[0] * 1.5
    assert found.verdicts[found.design.key] == "" and sum(not v for v in found.verdicts.values()) == 1
    assert len(asked) == len(set(asked)) or len(asked) < 150


def test_goodput_is_the_load_at_which_the_promise_breaks() -> None:
    asked_of = question(tps=(1,), tokens=(512,))
    designs = designs_of(asked_of)
    made = Made([3.0], [1])
    found, _ = ask(search_device(designs, asked_of), made)
    assert isinstance(found, Found)
    assert found.replicas == 4  # 10 / 3
    assert found.load == pytest.approx(1.2, rel=0.02) and found.load <= 1.2  # 4 * 3 / 10
    assert found.breaks is not None and found.breaks.broken(GOALS) == list(GOALS)
    assert found.slow[0].values["ttft.p95"] > found.outcome.values["ttft.p95"] > found.fast[0].values["ttft.p95"]


def test_designs_are_the_product_of_the_axes_with_unique_keys() -> None:
    designs = designs_of(question())
    assert len(designs) == len({d.key for d in designs}) == 6
    assert [d.num_devices for d in designs] == [1, 2, 4, 1, 2, 4]
    assert designs[3].key == "h100-sxm tokens=1024 tp=1"
    turned = replace(question(), axes=dict(reversed(question().axes.items())))
    for same in (turned, Question.from_plain(turned.plain())):  # numbers and keys hang on nothing but the axes
        assert [(d.index, d.key) for d in designs_of(same)] == [(d.index, d.key) for d in designs]


def fleet(cost: float | None, goodput: float, ttft: float | None) -> Fleet:
    return Fleet(
        device="d", label="", design="", config={}, replicas=1, num_devices=1, price_per_hour=cost, price_source="",
        cost_per_hour=cost, cost_per_million=None, goodput=goodput, goodput_spread=(goodput, goodput), clients=None,
        headroom=0.0, values={"ttft.p95": ttft}, spread={}, seeds=1, band={},
        band_keeps=True, attained=1.0, busy=0.5, requests_per_second=1.0, tokens_per_second=1.0, watts=None,
        joules_per_token=None, next_limit="",
    )  # fmt: skip


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=8))
def test_the_front_is_what_nothing_beats(points: list[tuple[int, int, int]]) -> None:
    fleets = [fleet(float(c), float(g), float(t)) for c, g, t in points] + [fleet(None, 99.0, 0.1)]
    beaten = {
        i for i, (c, g, t) in enumerate(points)
        if any((a <= c and b >= g and s <= t) and (a, b, s) != (c, g, t) for a, b, s in points)
    }  # fmt: skip
    assert front_of(fleets, GOALS) == set(range(len(points))) - beaten


def test_a_label_names_every_technique() -> None:
    config = EngineConfig(model="llama-3.1-8b", quantizer="fp8", attention="mla", speculator="ngram", kv_dtype="int4")
    label = label_of(Design(index=0, key="k", device="d", changes={}, config=config), 2)
    assert label == "2 x d (fp8, mla, ngram, int4 KV, 2048 tokens a step)"


def test_a_band_beyond_a_promise_is_said_with_the_cheapest_fleet_that_is_safe() -> None:
    sure = replace(fleet(2.0, 9.0, 0.1), label="2 x d", band={"ttft.p95": (0.1, 0.2)})
    unsure = replace(fleet(1.0, 9.0, 0.1), label="1 x d", band={"ttft.p95": (0.1, None)}, band_keeps=False)

    def said(*fleets: Fleet) -> str:
        return sentence_of(fleets, question(), 4.0, complete=True)

    assert "80 % band" not in said(sure) and "is 2 x d, US$ 2.00 an hour: ttft.p95 100 ms" in said(sure)
    both = said(unsure, sure)
    assert (
        "is 1 x d, US$ 1.00 an hour, by its middle prediction, or 2 x d, US$ 2.00 an hour, to keep the promises at the slow "
        "end of its 80 % band too; the first has ttft.p95 100 ms (promised 1 s)" in both
    )
    assert both.count(". ") == 0 and len(both.split()) < 70
    for cost, name in ((1.5, "3 replicas of it, US$ 1.50 an hour"), (3.0, "2 x d, US$ 2.00 an hour")):
        row = {"case": f"steps 30 % slower ({SLOW_END})", "replicas": 3, "cost_per_hour": cost}
        assert f"or {name}, to keep" in sentence_of([unsure, sure], question(), 4.0, complete=True, changed=[row])
    slow = replace(unsure, band={"ttft.p95": (0.1, 90.0)})
    assert "no fleet here keeps the promises at the slow end" in said(slow)


def test_the_next_limit_is_what_requests_wait_for() -> None:
    design = Design(index=0, key="k", device="d", changes={}, config=EngineConfig(model="llama-3.1-8b"))
    late = {"ttft.p95": 2.0, "tpot.p95": 0.01}
    goals = (Goal("ttft", "p95", 1.0), Goal("tpot", "p95", 0.05))

    def limit(**outcome: object) -> str:
        return next_limit(
            Outcome(**{"values": late, "parts": {"compute": 0.9, "memory": 0.1}, **outcome}), goals, design
        )

    assert limit(kv_full=0.8, rows_full=0.8).startswith("TTFT p95: KV capacity")
    assert "--max-num-seqs" in limit(rows_full=0.8)
    assert "queueing on compute" in limit()
    assert limit(values={"ttft.p95": 0.5, "tpot.p95": 0.06}, parts={"memory": 0.9}).startswith(
        "TPOT p95: memory bandwidth"
    )
    assert "interconnect" in limit(values={"ttft.p95": 0.5, "tpot.p95": 0.06}, parts={"network": 0.9, "memory": 0.1})
    assert "up to 16 times" in next_limit(None, goals, design, 16.0)


def test_a_command_asks_for_as_many_requests_as_were_looked_at() -> None:
    design = Design(index=0, key="k", device="d", changes={}, config=EngineConfig(model="llama-3.1-8b", device="l4"))
    workload = Workload(num_requests=20, rate=2.5, seed=3)
    question = Question(base={"model": "llama-3.1-8b"}, axes={"device": ("l4",)}, workload=workload, goals=())
    found = Found(device="l4", design=design, replicas=2, outcome=Outcome(num_requests=80, seed=1))
    command = command_of(found, question, Traffic(question, default_registry()))
    assert command == "twinfer simulate --model llama-3.1-8b --device l4 --replicas 2 --requests 80 --rate 2.5 --seed 4"
    encoded = replace(question, workload=Workload(prompt_tokens=((1, 2),), rate=1.0))
    assert command_of(found, encoded, Traffic(encoded, default_registry())) == ""
