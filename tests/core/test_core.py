"""The core by hand: refusals, order of outputs, the progress law, errors of drivers and of policies."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import replace

import pytest
from content_oracle import World

from twinfer.core.core import Core
from twinfer.core.errors import PluginError, ProtocolError
from twinfer.core.events import (
    Abort,
    Blocked,
    Finished,
    Idle,
    Output,
    Rejected,
    StepDone,
    Submit,
    Tick,
    TokenDelta,
    TransferDone,
    TransferFailed,
)
from twinfer.core.params import SamplingParams
from twinfer.core.plan import Need, RowResult, StepPlan, StepResult
from twinfer.core.policy import Defer, Limits, Scheduler, Shortage, View, Want
from twinfer.core.request import KVSource, Request, Sequence
from twinfer.plugins.kv_cache.paged import Paged
from twinfer.plugins.scheduler.continuous import Continuous


def make_core(scheduler: Scheduler | None = None, block_size: int = 4, **limits: int) -> Core:
    numbers = {"num_blocks": 16, "max_model_len": 64, **limits}
    return Core(scheduler or Continuous(), Paged(Paged.Options(block_size=block_size)), Limits(**numbers))


def ask(request_id: str, length: int, max_tokens: int = 4, **fields: object) -> Request:
    prompt = tuple(range(100, 100 + length))
    return Request(id=request_id, prompt=prompt, params=SamplingParams(max_tokens=max_tokens), **fields)  # type: ignore[arg-type]


def give(core: Core, step: int, *results: RowResult) -> list[Output]:
    core.receive(StepDone(step, StepResult(results)), 0.0)
    assert core.audit() == []
    return core.outputs()


def plan_of(core: Core, now: float = 0.0) -> StepPlan:
    plan = core.next_step(now)
    assert isinstance(plan, StepPlan), plan
    return plan


# --- submitting -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "named"),
    [
        (ask("a", 0), "empty"),
        (ask("a", 64), "max_model_len is 64"),
        (ask("a", 33), "num_kv_blocks"),
        (ask("busy", 3), "already in use"),
        (ask("busy/1", 3), "already in use"),
    ],
)
def test_a_refused_request_is_told_what_to_change(request_: Request, named: str) -> None:
    core = make_core(num_blocks=8)
    busy = Request(id="busy", prompt=(1, 2), params=SamplingParams(n=2, temperature=1.0))
    core.receive(Submit(busy), 0.0)
    core.receive(Submit(request_), 0.0)
    (rejected,) = core.outputs()
    assert isinstance(rejected, Rejected) and rejected.request_id == request_.id
    assert named in rejected.why and ";" in rejected.why and "\n" not in rejected.why
    assert len(core.sequences) == 2 and core.audit() == []


def test_samples_must_not_clash_with_other_requests() -> None:
    core = make_core()
    core.receive(Submit(ask("a/1", 3)), 0.0)
    core.receive(Submit(Request(id="a", prompt=(1, 2), params=SamplingParams(n=2, temperature=1.0))), 0.0)
    (rejected,) = core.outputs()
    assert isinstance(rejected, Rejected) and "clashes" in rejected.why
    assert list(core.sequences) == ["a/1"]


def test_a_prompt_that_fits_exactly_is_accepted_when_no_more_room_is_needed() -> None:
    core = make_core(num_blocks=2)
    core.receive(Submit(ask("a", 8, max_tokens=1)), 0.0)
    plan_of(core)
    delta, end = give(core, 0, RowResult((5,)))
    assert delta == TokenDelta("a", 0, (5,))
    assert isinstance(end, Finished) and (end.reason, end.num_output_tokens) == ("length", 1)
    core.receive(Submit(ask("b", 8, max_tokens=2)), 0.0)
    assert isinstance(core.outputs()[0], Rejected)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_an_id_may_be_used_again_after_its_end_but_not_while_its_rows_run(depth: int) -> None:
    core = make_core(max_outstanding=depth)
    core.receive(Submit(ask("a", 3)), 0.0)
    plan_of(core)
    core.receive(Abort("a"), 0.0)
    core.receive(Submit(ask("a", 5)), 0.0)
    aborted, rejected = core.outputs()
    assert isinstance(aborted, Finished) and isinstance(rejected, Rejected) and "in use" in rejected.why
    give(core, 0, RowResult((5,)))
    core.receive(Submit(ask("a", 5)), 0.0)
    assert core.outputs() == []
    plan = plan_of(core)
    # The executor knows the new one already: it must empty the table, not forget the sequence.
    assert plan.forget == () and plan.preempted == ("a",)
    assert plan.rows[0].start == 0 and len(plan.rows[0].tokens) == 5


# --- the loop ---------------------------------------------------------------------------------------


def test_a_request_from_submission_to_its_end() -> None:
    core = make_core()
    assert core.next_step(0.0) == Idle(None) and not core.has_work
    core.receive(Tick(), 0.0)
    core.receive(Submit(ask("a", 5, max_tokens=2)), 0.0)
    plan = plan_of(core)
    (row,) = plan.rows
    assert (row.start, tuple(row.tokens), row.need, row.stop) == (0, (100, 101, 102, 103, 104), Need.LAST, 5)
    assert plan.grants[0].blocks == (0, 1) and plan.grants[0].shared == 0
    assert core.next_step(0.0) == Blocked((0,), ())
    assert give(core, 0, RowResult((7,))) == [TokenDelta("a", 0, (7,))]
    (row,) = plan_of(core).rows
    assert (row.start, tuple(row.tokens), row.need) == (5, (7,), Need.LAST)
    delta, end = give(core, 1, RowResult((8,)))
    assert delta == TokenDelta("a", 0, (8,))
    assert end == Finished("a", 0, "length", "max_tokens=2", 5, 2, 0, 0)
    assert not core.has_work and core.next_step(0.0) == Idle(None)
    core.receive(Submit(ask("b", 2)), 0.0)
    assert plan_of(core).forget == ("a",)


def test_stats_of_a_plan_count_blocks_and_slots() -> None:
    core = make_core()
    core.receive(Submit(ask("a", 6)), 0.0)
    assert plan_of(core).stats == (1, 0, 2, 0, 16, 0, 4)
    give(core, 0, RowResult((7,)))
    core.receive(Submit(ask("b", 6)), 0.0)
    # "b" hits the first block of "a" and takes one of its own; 6 slots of "a" are committed.
    assert plan_of(core).stats == (2, 0, 3, 0, 16, 6, 4)


def test_failed_rows_end_their_request_alone() -> None:
    core = make_core()
    for name in "ab":
        core.receive(Submit(ask(name, 3, cache_salt=name)), 0.0)
    plan_of(core)
    end, delta = give(core, 0, RowResult(failure="nan in the logits"), RowResult((1,)))
    assert isinstance(end, Finished) and (end.reason, end.detail) == ("error", "nan in the logits")
    assert delta == TokenDelta("b", 0, (1,)) and list(core.sequences) == ["b"]


def test_aborting_the_unknown_or_ended_is_no_error() -> None:
    core = make_core()
    core.receive(Abort("nobody"), 0.0)
    core.receive(Submit(ask("a", 3)), 0.0)
    core.receive(Abort("a"), 0.0)
    core.receive(Abort("a"), 0.0)
    (end,) = core.outputs()
    assert isinstance(end, Finished) and end.reason == "abort" and not core.has_work


@pytest.mark.parametrize("depth", [2, 3])
def test_steps_end_in_order(depth: int) -> None:
    core = make_core(max_outstanding=depth)
    core.receive(Submit(ask("a", 3, max_tokens=9)), 0.0)
    plans = [plan_of(core) for _ in range(depth)]
    assert [plan.step for plan in plans] == list(range(depth))
    assert core.next_step(0.0) == Blocked(tuple(range(depth)), ())
    with pytest.raises(ProtocolError, match="before step 0"):
        core.receive(StepDone(1, StepResult((RowResult((1,)),))), 0.0)
    with pytest.raises(ProtocolError, match="outstanding steps are"):
        core.receive(StepDone(9, StepResult(())), 0.0)


def test_transfers_that_never_began_cannot_end() -> None:
    core = make_core()
    for event in (TransferDone("a"), TransferFailed("a", "gone")):
        with pytest.raises(ProtocolError, match="'a'"):
            core.receive(event, 0.0)


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_a_load_of_nothing_is_computed(num_tokens: int) -> None:
    """A prompt of one token has nothing to load: the last token is always fed."""
    world = World(Continuous(), Paged(), Limits(num_blocks=8, max_model_len=64))
    source = KVSource(handle="h", num_tokens=num_tokens)
    world.submit(ask("a", 1 if num_tokens else 6, kv_from=source))
    assert isinstance(world.launch(), StepPlan) and not world.transfers()
    world.drain()
    assert world.current["a"].ends[0].reason == "length"


def test_a_load_longer_than_the_prompt_leaves_the_last_token() -> None:
    world = World(Continuous(), Paged(), Limits(num_blocks=8, max_model_len=64))
    world.submit(ask("a", 6, kv_from=KVSource(handle="h", num_tokens=40)))
    plan = world.launch()
    assert isinstance(plan, StepPlan) and plan.moves[0].num_tokens == 5 and plan.rows == ()
    world.drain()
    end = world.current["a"].ends[0]
    assert (end.reason, end.num_cached_tokens, end.num_hit_tokens) == ("length", 5, 5)


def test_hits_are_those_of_the_first_admission_whatever_is_preempted_later() -> None:
    """`b` shares 8 tokens with `a`, both outgrow the pool: who gives way finds more of its own when it comes back."""
    world = World(Continuous(), Paged(Paged.Options(block_size=4)), Limits(num_blocks=11, max_model_len=64))
    shared = list(range(8))
    for name, tail in (("a", [50, 51]), ("b", [60, 61])):
        request = replace(ask(name, 10), prompt=[*shared, *tail], params=SamplingParams(max_tokens=20, ignore_eos=True))
        world.submit(request)
        world.advance()
    world.drain()
    a, b = (world.current[name].ends[0] for name in "ab")
    assert (a.num_hit_tokens, b.num_hit_tokens) == (0, 8)
    assert b.num_preemptions > 0 and b.num_cached_tokens > 8, "its own blocks are no hits of the prompt"


def test_a_failed_load_falls_back_to_computing() -> None:
    world = World(Continuous(), Paged(), Limits(num_blocks=8, max_model_len=64))
    world.submit(ask("a", 6, kv_from=KVSource(handle="h", num_tokens=6)))
    world.launch()
    world.finish_step()
    world.end_transfer("a", ok=False)
    plan = world.launch()
    assert isinstance(plan, StepPlan) and plan.preempted == ("a",) and plan.rows[0].start == 0
    world.drain()


# --- the progress law ---------------------------------------------------------------------------------


class Scripted:
    """A scheduler made of two functions."""

    name = "scripted"

    def __init__(self, propose: object = None, victims: object = None, order: object = None) -> None:
        self._propose, self._victims, self._order = propose, victims, order

    def order(self, seq: Sequence) -> tuple[object, ...]:
        return self._order(seq) if callable(self._order) else ()

    def propose(self, view: View) -> Iterable[Want | Defer]:
        return self._propose(view) if callable(self._propose) else ()

    def victims(self, view: View, shortage: Shortage) -> Iterable[Sequence]:
        return self._victims(view, shortage) if callable(self._victims) else ()


def everyone(view: View) -> list[Want]:
    return [Want(seq, 8) for seq in [*view.running, *view.waiting]]


def test_a_scheduler_that_proposes_nothing_ends_its_requests_one_by_one() -> None:
    core = make_core(Scripted())
    for name in "abc":
        core.receive(Submit(ask(name, 3)), 0.0)
    assert core.next_step(0.0) == Idle(None)
    ends = core.outputs()
    assert [(e.request_id, e.reason) for e in ends if isinstance(e, Finished)] == [(n, "capacity") for n in "abc"]
    assert all("scheduler 'scripted' proposed nothing" in e.detail for e in ends if isinstance(e, Finished))


def test_deferring_is_idle_until_then_and_only_in_the_future() -> None:
    core = make_core(Scripted(lambda view: [Defer(9.0), Defer(5.0), Defer(1.0)]))
    core.receive(Submit(ask("a", 3)), 2.0)
    assert core.next_step(2.0) == Idle(5.0)
    assert core.outputs() == []
    assert core.next_step(9.0) == Idle(None), "a wait that is over is no reason to run nothing"
    (end,) = core.outputs()
    assert isinstance(end, Finished) and end.reason == "capacity"


def test_capacity_names_the_number_to_raise() -> None:
    core = make_core(Continuous(Continuous.Options(chunked_prefill=False)), max_num_batched_tokens=4)
    core.receive(Submit(ask("a", 6)), 0.0)
    assert core.next_step(0.0) == Idle(None)
    (end,) = core.outputs()
    assert isinstance(end, Finished) and end.reason == "capacity"
    assert "max_num_batched_tokens is 4; raise it" in end.detail
    core = make_core(Scripted(everyone), num_blocks=2, block_size=4)
    core.receive(Submit(ask("a", 7, max_tokens=9)), 0.0)
    for step in range(2):
        plan_of(core)
        give(core, step, RowResult((1,)))
    assert core.next_step(0.0) == Idle(None)
    (end,) = core.outputs()
    assert isinstance(end, Finished) and "9 tokens" in end.detail and "raise num_kv_blocks" in end.detail


def test_without_victims_a_sequence_waits_for_the_others() -> None:
    """Nothing may be preempted, yet all is served: those that fit go on and free their blocks."""
    world = World(Scripted(everyone), Paged(Paged.Options(block_size=2)), Limits(num_blocks=6, max_model_len=64))
    world.submit(ask("a", 3, 3))
    world.submit(Request(id="b", prompt=(1, 2, 3), params=SamplingParams(max_tokens=5)))
    world.drain()
    assert all(t.ends[0].num_preemptions == 0 for t in world.requests)


# --- bad policies -------------------------------------------------------------------------------------


def fail(*_: object) -> Iterable[Want]:
    raise ZeroDivisionError("policy bug")


def fail_later(view: View) -> Iterable[Want]:
    yield from everyone(view)
    raise ZeroDivisionError("policy bug")


@pytest.mark.parametrize("propose", [fail, fail_later, lambda view: 7, lambda view: [None], lambda view: [(1, 2)]])
def test_errors_of_a_policy_name_it(propose: object) -> None:
    core = make_core(Scripted(propose))
    core.receive(Submit(ask("a", 3)), 0.0)
    with pytest.raises(PluginError, match="scheduler"):
        core.next_step(0.0)


@pytest.mark.parametrize("victims", [fail, lambda view, shortage: [None], lambda view, shortage: 3])
def test_errors_in_victims_name_the_policy(victims: object) -> None:
    core = make_core(Scripted(everyone, victims), num_blocks=1)
    core.receive(Submit(ask("a", 3)), 0.0)
    plan_of(core)
    give(core, 0, RowResult((1,)))
    plan_of(core)
    give(core, 1, RowResult((1,)))
    with pytest.raises(PluginError, match=r"scheduler .*(victim|policy bug)"):
        core.next_step(0.0)


@pytest.mark.parametrize("order", [fail, lambda seq: (seq.id,) if seq.number else (1,)])
def test_errors_in_order_name_the_policy(order: object) -> None:
    core = make_core(Scripted(everyone, order=order))
    with pytest.raises(PluginError, match="'scripted' failed in order"):
        for name in "abc":
            core.receive(Submit(ask(name, 3)), 0.0)


def test_keys_that_do_not_compare_lose_nobody() -> None:
    nan = float("nan")
    core = make_core(Scripted(everyone, order=lambda seq: (nan if seq.number % 2 else float(-seq.number),)))
    for i in range(8):
        core.receive(Submit(ask(f"r{i}", 2, cache_salt=str(i))), 0.0)
    core.receive(Abort("r4"), 0.0)
    plan = plan_of(core)
    assert sorted(row.seq for row in plan.rows) == [f"r{i}" for i in range(8) if i != 4]
    assert not core.waiting


def test_sequences_of_others_are_passed_over() -> None:
    """A look-alike with a living id, one that has ended, and one of another core."""
    other = make_core()
    other.receive(Submit(ask("a", 3)), 0.0)
    other.receive(Submit(ask("x", 3)), 0.0)
    plan_of(other)
    strangers = list(other.sequences.values())
    core = make_core(
        Scripted(lambda view: [Want(s, 8) for s in strangers] + everyone(view), lambda view, shortage: strangers)
    )
    core.receive(Submit(ask("a", 5)), 0.0)
    plan = plan_of(core)
    assert [(row.seq, len(row.tokens)) for row in plan.rows] == [("a", 5)]
    ended = core.sequences["a"]
    give(core, 0, RowResult(failure="gone"))
    strangers.append(ended)
    core.receive(Submit(ask("b", 5)), 0.0)
    assert [row.seq for row in plan_of(core).rows] == ["b"]
    assert core.audit() == [] and other.audit() == []


# --- snapshots ----------------------------------------------------------------------------------------


def test_a_snapshot_is_independent_and_complete() -> None:
    core = make_core(max_outstanding=2)
    core.receive(Submit(ask("a", 5)), 0.0)
    core.receive(Submit(Request(id="b", prompt=(1, 2, 3), params=SamplingParams(n=2, temperature=1.0, seed=1))), 0.0)
    plan_of(core)
    snapshot = core.snapshot()
    untouched = copy.deepcopy(snapshot)
    answers = []
    for _ in range(2):
        core.restore(snapshot)
        lines = [repr(give(core, 0, RowResult((1,)), RowResult((2,))))]
        lines += [plan_of(core).to_json(), repr(core.next_step(0.0))]
        core.receive(Abort("a"), 0.0)
        lines.append(repr(core.outputs()))
        answers.append(lines)
    assert answers[0] == answers[1]
    assert repr(snapshot.keys()) == repr(untouched.keys())
    assert repr(snapshot["sequences"]) == repr(untouched["sequences"])


def test_deferred_outputs_survive_a_restore() -> None:
    core = make_core()
    core.receive(Submit(ask("a", 0)), 0.0)
    copy_of_it = make_core()
    copy_of_it.restore(core.snapshot())
    assert copy_of_it.outputs() == core.outputs() != []


@pytest.mark.parametrize(
    ("max_context", "cure"), [(None, "raise max_model_len"), (65, "raise max_model_len"), (64, "longer context")]
)
def test_only_a_length_below_the_models_context_can_be_raised(max_context: int | None, cure: str) -> None:
    core = Core(Continuous(), Paged(), Limits(num_blocks=16, max_model_len=64, max_context=max_context))
    core.receive(Submit(ask("a", 64)), 0.0)
    (rejected,) = core.outputs()
    assert isinstance(rejected, Rejected) and rejected.why.partition("shorten the prompt or ")[2].count(cure) == 1
    assert (cure == "longer context") == ("raise" not in rejected.why)
