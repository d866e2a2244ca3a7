"""What the built-in schedulers promise, seen in the plans a core makes of their proposals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError

from twinfer.core.core import Core
from twinfer.core.events import Blocked, Event, Finished, Idle, StepDone, Submit
from twinfer.core.params import SamplingParams
from twinfer.core.plan import Need, RowResult, StepPlan, StepResult
from twinfer.core.policy import Limits, Scheduler
from twinfer.core.request import Request
from twinfer.plugins.kv_cache.paged import Paged
from twinfer.plugins.scheduler.continuous import Continuous
from twinfer.plugins.scheduler.prompts_first import PromptsFirst
from twinfer.plugins.scheduler.static import Static


class Bench:
    """A core whose steps are done at once with token 5; remembers what every step fed: {sequence: tokens}."""

    def __init__(self, scheduler: Scheduler, **limits: int) -> None:
        numbers = {"num_blocks": 256, "max_model_len": 512, "max_num_batched_tokens": 64, "max_num_seqs": 8, **limits}
        self.core = Core(scheduler, Paged(Paged.Options(block_size=4, headroom=0.0)), Limits(**numbers))
        self.now = 0.0
        self.steps: list[dict[str, int]] = []
        self.plans: list[StepPlan] = []
        self.ends: dict[str, Finished] = {}

    def submit(self, name: str, length: int, max_tokens: int = 3, priority: int = 0) -> None:
        prompt = tuple(1000 * ord(name[0]) + i for i in range(length))
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        self._receive(Submit(Request(id=name, prompt=prompt, params=params, priority=priority, arrival=self.now)))

    def step(self) -> StepPlan | Idle | Blocked:
        action = self.core.next_step(self.now)
        if isinstance(action, StepPlan):
            self.steps.append({row.seq: len(row.tokens) for row in action.rows})
            self.plans.append(action)
            rows = tuple(RowResult() if row.need is Need.NONE else RowResult((5,)) for row in action.rows)
            self._receive(StepDone(action.step, StepResult(rows)))
        self._collect()
        return action

    def run(self) -> list[dict[str, int]]:
        while self.core.has_work:
            action = self.step()
            if isinstance(action, Idle):
                assert action.until is not None
                self.now = action.until
        return self.steps

    def _receive(self, event: Event) -> None:
        self.core.receive(event, self.now)
        self._collect()

    def _collect(self) -> None:
        for output in self.core.outputs():
            if isinstance(output, Finished):
                self.ends[output.request_id] = output
        assert self.core.audit() == []


# --- continuous -------------------------------------------------------------------------------------


def test_prompts_are_cut_to_the_budget_and_mixed_with_decodes() -> None:
    bench = Bench(Continuous(), max_num_batched_tokens=16)
    bench.submit("a", 4, 6)
    bench.step()
    bench.submit("long", 40, 2)
    assert bench.run()[:5] == [
        {"a": 4},
        {"a": 1, "long": 15},
        {"a": 1, "long": 15},
        {"a": 1, "long": 10},
        {"a": 1, "long": 1},
    ]


def test_decodes_are_never_delayed_by_new_prompts() -> None:
    bench = Bench(Continuous(), max_num_batched_tokens=8)
    bench.submit("a", 3, 30)
    bench.submit("b", 3, 30)
    bench.step()
    bench.step()
    for name in "cdef":
        bench.submit(name, 20, 5)
    while "a" in bench.core.sequences:
        bench.step()
        assert bench.steps[-1]["a"] == 1 and bench.steps[-1]["b"] == 1
    bench.run()


def test_requests_join_and_leave_at_every_step() -> None:
    bench = Bench(Continuous(), max_num_seqs=2)
    for name, max_tokens in (("a", 2), ("b", 4), ("c", 2)):
        bench.submit(name, 4, max_tokens)
    assert [sorted(step) for step in bench.run()] == [["a", "b"], ["a", "b"], ["b", "c"], ["b", "c"]]


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
def test_a_chunk_size_bounds_what_one_prompt_takes_of_a_step(chunk: int) -> None:
    bench = Bench(Continuous(Continuous.Options(chunk_size=chunk)))
    bench.submit("a", 20, 2)
    bench.submit("b", 20, 2)
    steps = bench.run()
    assert max(max(step.values()) for step in steps) == min(chunk, 20)
    assert steps[0] == {"a": min(chunk, 20), "b": min(chunk, 20)}
    assert sum(step.get("a", 0) for step in steps) == 20 + 2 - 1


def test_whole_prompts_wait_until_the_budget_has_room() -> None:
    bench = Bench(Continuous(Continuous.Options(chunked_prefill=False, chunk_size=3)), max_num_batched_tokens=16)
    bench.submit("a", 10, 3)
    bench.submit("b", 10, 3)
    bench.submit("c", 2, 3)
    steps = bench.run()
    # "b" does not fit beside "a", and "c" does not overtake it.
    assert steps[:2] == [{"a": 10}, {"a": 1, "b": 10, "c": 2}]


def test_first_come_first_served_ignores_priorities() -> None:
    bench = Bench(Continuous(), max_num_seqs=1)
    bench.submit("a", 4, 1, priority=5)
    bench.submit("b", 4, 1, priority=1)
    assert bench.run() == [{"a": 4}, {"b": 4}]


def test_priorities_order_the_queue_and_equal_ones_go_by_arrival() -> None:
    bench = Bench(Continuous(Continuous.Options(policy="priority")), max_num_seqs=1)
    for name, priority in (("a", 2), ("b", 1), ("c", 2), ("d", 0), ("e", 1)):
        bench.submit(name, 4, 1, priority)
    assert [next(iter(step)) for step in bench.run()] == ["d", "b", "e", "a", "c"]


def test_priorities_share_the_budget_in_order() -> None:
    bench = Bench(Continuous(Continuous.Options(policy="priority", chunk_size=6)), max_num_batched_tokens=8)
    bench.submit("low", 20, 2, priority=9)
    bench.step()
    bench.submit("high", 12, 2, priority=1)
    bench.run()
    # What runs comes before what waits; among those that run the more important is served first.
    assert bench.steps[:4] == [{"low": 6}, {"low": 6, "high": 2}, {"high": 6, "low": 2}, {"high": 4, "low": 4}]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_the_latest_of_the_least_important_gives_way(policy: str) -> None:
    bench = Bench(Continuous(Continuous.Options(policy=policy)), num_blocks=6)
    bench.submit("a", 7, 8, priority=1)
    bench.submit("b", 7, 8, priority=0)
    bench.submit("c", 7, 8, priority=2)
    bench.run()
    preempted = [seq for plan in bench.plans for seq in plan.preempted]
    assert preempted and preempted[0] == "c"
    never = "a" if policy == "fcfs" else "b"
    assert never not in preempted
    assert {end.reason for end in bench.ends.values()} == {"length"}


# --- static -----------------------------------------------------------------------------------------


def test_nobody_joins_a_batch_before_its_last_one_has_ended() -> None:
    bench = Bench(Static(Static.Options(batch_size=2)))
    for name, max_tokens in (("a", 2), ("b", 6), ("c", 2), ("d", 2)):
        bench.submit(name, 4, max_tokens)
    steps = [sorted(step) for step in bench.run()]
    assert steps[:2] == [["a", "b"], ["a", "b"]]
    assert steps[2:6] == [["b"]] * 4, "the hole that a left is not filled"
    assert steps[6:] == [["c", "d"]] * 2


def test_prompts_of_a_batch_are_fed_before_it_decodes() -> None:
    bench = Bench(Static(Static.Options(batch_size=3)), max_num_batched_tokens=8)
    for name in "abc":
        bench.submit(name, 10, 3)
    steps = bench.run()
    fed = 0
    for step in steps:
        if fed < 30:
            fed += sum(step.values())
        else:
            assert step == {"a": 1, "b": 1, "c": 1}
    assert fed == 30 and len(steps) == 4 + 2


def test_a_batch_is_open_until_it_decodes() -> None:
    bench = Bench(Static(Static.Options(batch_size=3)), max_num_batched_tokens=8)
    bench.submit("a", 12, 5)
    bench.step()
    bench.submit("b", 4, 5)
    bench.step()
    assert bench.steps == [{"a": 8}, {"a": 4, "b": 4}]
    bench.step()
    bench.submit("c", 4, 5)
    bench.run()
    assert bench.steps[3:6] == [{"a": 1, "b": 1}] * 3
    assert bench.steps[6:] == [{"c": 4}, *[{"c": 1}] * 4]


def test_a_batch_waits_for_more_but_not_for_ever() -> None:
    bench = Bench(Static(Static.Options(batch_size=3, max_wait_s=2.0)))
    bench.now = 10.0
    bench.submit("a", 4, 2)
    assert bench.step() == Idle(12.0)
    bench.now = 11.0
    bench.submit("b", 4, 2)
    assert bench.step() == Idle(12.0), "counted from the first arrival"
    bench.now = 12.0
    bench.step()
    assert bench.steps == [{"a": 4, "b": 4}]
    bench.run()
    bench.now = 20.0
    for name in "cde":
        bench.submit(name, 4, 2)
    bench.step()
    assert len(bench.steps[-1]) == 3, "a full batch does not wait"


def test_a_batch_is_no_larger_than_the_rows_of_a_step() -> None:
    bench = Bench(Static(Static.Options(batch_size=16)), max_num_seqs=2)
    for name in "abcd":
        bench.submit(name, 4, 2)
    assert [sorted(step) for step in bench.run()] == [["a", "b"]] * 2 + [["c", "d"]] * 2


def test_a_static_batch_under_pressure_ends_all_the_same() -> None:
    bench = Bench(Static(Static.Options(batch_size=4)), num_blocks=8)
    for name in "abcd":
        bench.submit(name, 7, 8)
    bench.run()
    assert {name: end.num_output_tokens for name, end in bench.ends.items()} == dict.fromkeys("abcd", 8)
    assert any(plan.preempted for plan in bench.plans)


# --- options ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda: Continuous.Options(chunk_size=0),
        lambda: Continuous.Options(policy="lifo"),
        lambda: Continuous.Options(chunks=3),
        lambda: Static.Options(batch_size=0),
        lambda: Static.Options(max_wait_s=-1.0),
    ],
)
def test_options_that_cannot_work_are_refused(make: Callable[[], Any]) -> None:
    with pytest.raises(ValidationError):
        make()


@pytest.mark.parametrize("scheduler", [Continuous, Static])
def test_schedulers_keep_the_protocol(scheduler: type[Any]) -> None:
    assert isinstance(scheduler(), Scheduler)
    assert scheduler.summary and scheduler.reference and scheduler.name
    assert all(field.description for field in scheduler.Options.model_fields.values())


# --- prompts first ------------------------------------------------------------------------------------


def test_prompts_run_alone_before_any_answer_goes_on() -> None:
    bench = Bench(PromptsFirst(), max_num_batched_tokens=16)
    bench.submit("a", 4, 4)
    bench.step()
    bench.submit("b", 20, 2)
    steps = bench.run()
    assert steps == [{"a": 4}, {"b": 16}, {"b": 4}, {"a": 1, "b": 1}, {"a": 1}, {"a": 1}]


def test_a_prompt_that_does_not_fit_yet_stops_no_answer() -> None:
    bench = Bench(PromptsFirst(), max_num_seqs=1)
    bench.submit("a", 4, 3)
    bench.submit("b", 4, 1)
    assert bench.run() == [{"a": 4}, {"a": 1}, {"a": 1}, {"b": 4}]


# --- admission at full length ---------------------------------------------------------------------------


def test_whole_admission_takes_only_what_can_end_beside_the_others() -> None:
    for admission, waits in (("grow", False), ("whole", True)):
        bench = Bench(Continuous(Continuous.Options(admission=admission)), num_blocks=6)
        bench.submit("a", 7, 8)
        bench.submit("b", 7, 8)
        bench.submit("c", 7, 8)
        bench.run()
        assert ("b" not in bench.steps[0]) is waits
        assert bool([seq for plan in bench.plans for seq in plan.preempted]) is not waits
        assert {end.reason for end in bench.ends.values()} == {"length"}


# --- prompts that wait for each other -------------------------------------------------------------------


def test_prompts_wait_beside_answers_until_they_fill_a_step_or_the_first_has_waited_long_enough() -> None:
    options = Continuous.Options(chunked_prefill=False, gather_s=1.0, gather_tokens=12)
    bench = Bench(Continuous(options), max_num_batched_tokens=16)
    bench.submit("a", 12, 30)  # nobody runs: nothing to wait for
    bench.step()
    bench.submit("b", 4, 2)
    bench.step()
    bench.submit("c", 8, 2)  # 1 + 4 + 8 tokens are enough
    bench.step()
    bench.submit("d", 4, 2)
    bench.step()
    bench.now = 0.9
    bench.step()
    bench.now = 1.0
    bench.step()
    assert bench.steps == [
        {"a": 12},
        {"a": 1},
        {"a": 1, "b": 4, "c": 8},
        {"a": 1, "b": 1, "c": 1},
        {"a": 1},
        {"a": 1, "d": 4},
    ]


def test_prompts_that_wait_count_only_those_that_fit_into_the_step() -> None:
    options = Continuous.Options(chunked_prefill=False, gather_s=1.0, gather_tokens=15)
    bench = Bench(Continuous(options), max_num_batched_tokens=16)
    bench.submit("a", 12, 30)
    bench.step()
    bench.submit("b", 10, 2)
    bench.submit("c", 10, 2)
    bench.step()
    assert bench.steps[-1] == {"a": 1}
    bench.submit("d", 4, 2)  # stands behind c, which does not fit
    bench.step()
    assert bench.steps[-1] == {"a": 1}


def test_prompts_wait_for_nobody_by_default_and_for_nobody_while_nothing_runs() -> None:
    for options in (Continuous.Options(), Continuous.Options(gather_s=5.0)):
        bench = Bench(Continuous(options))
        bench.submit("a", 4, 1)
        assert bench.step() and bench.steps == [{"a": 4}]


@pytest.mark.parametrize("options", [{"gather_tokens": 100}, {"gather_s": float("inf")}, {"gather_s": -1}])
def test_waiting_that_says_nothing_or_never_ends_is_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValidationError, match="gather"):
        Continuous.Options.model_validate(options)
