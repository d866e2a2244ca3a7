"""Step costs: the fast path equals the exact one where attention is linear, and is close where it is not."""

from __future__ import annotations

import itertools
import math

import pytest

from twinfer.core.catalog import resolve_spec
from twinfer.core.device import DeviceSpec, load_device
from twinfer.core.errors import ConfigError
from twinfer.core.op_time import OpTime
from twinfer.core.plan import Decoding, Need, PlanStats, Row, StepPlan
from twinfer.core.registry import Registry
from twinfer.core.work import Op, StepShape, step_ops
from twinfer.simulator.op_time import OpTimeChain, build_chain
from twinfer.simulator.step_time import StepTimer

REGISTRY = Registry(entry_points=False)
SPEC = resolve_spec("llama-3.1-8b")
H100 = load_device("h100-sxm", REGISTRY)


def plan_of(*rows: tuple[int, int]) -> StepPlan:
    """Rows of (queries, keys), each with one logit."""
    made = tuple(Row(f"s{i}", keys - q, range(q), 0, Need.LAST, 0) for i, (q, keys) in enumerate(rows))
    return StepPlan(0, made, stats=PlanStats(len(made), 0, 0, 0, 0, 0, 16))


class PerPair:
    """Attention costs 1 ns a key of a decode row and 2 ns a visible pair otherwise; all else 1 us."""

    name = "per-pair"

    def time(self, op: Op, device: DeviceSpec) -> OpTime | None:
        if op.kind != "attention":
            return OpTime(1e-6, 1e-7, "test")
        keys = sum(r.keys if r.queries == 1 else 2 * r.queries * (2 * r.keys - r.queries + 1) // 2 for r in op.rows)
        return OpTime(keys * 1e-9, keys * 1e-10, "test")


def timer(*models: object, windows: tuple[int, ...] = ()) -> StepTimer:
    chain = OpTimeChain(models, H100) if models else build_chain((), H100, REGISTRY)  # type: ignore[arg-type]
    return StepTimer(lambda shape: step_ops(SPEC, shape), chain, windows)


MIXES = [
    [(1, 40)],
    [(1, 3001)],
    [(1, 517), (1, 1030), (1, 77)],
    [(1, c) for c in range(100, 3000, 61)],
    [(512, 512)],
    [(500, 500), (300, 900), *((1, 700 + i) for i in range(9))],
    [(33, 70), (33, 401)],
]


@pytest.mark.parametrize("mix", MIXES)
def test_fast_path_is_exact_for_linear_attention(mix: list[tuple[int, int]]) -> None:
    plan, fast = plan_of(*mix), timer(PerPair())
    got, want = fast.cost(plan), timer(PerPair()).exact(StepShape.of(plan))
    assert got.seconds == pytest.approx(want.seconds, rel=1e-9)
    assert got.sigma == pytest.approx(want.sigma, rel=1e-9)
    assert got.ops == pytest.approx(want.ops, rel=1e-9)
    assert math.fsum(got.ops.values()) == pytest.approx(got.seconds, rel=1e-9)


@pytest.mark.parametrize("mix", MIXES)
def test_fast_path_is_close_for_the_roofline(mix: list[tuple[int, int]]) -> None:
    plan = plan_of(*mix)
    assert timer().cost(plan).seconds == pytest.approx(timer().exact(StepShape.of(plan)).seconds, rel=0.01)


def test_cost_does_not_depend_on_row_order_or_on_what_was_asked_before() -> None:
    mix = MIXES[5]
    used = timer()
    for other in MIXES:
        used.cost(plan_of(*other))
    assert used.cost(plan_of(*reversed(mix))) == timer().cost(plan_of(*mix))


def test_longer_contexts_never_take_less_time() -> None:
    one = timer()
    costs = [one.cost(plan_of((1, c), (1, 2 * c))).seconds for c in range(1, 6000, 7)]
    assert all(b >= a for a, b in itertools.pairwise(costs))


def test_rows_on_two_sides_of_a_window_are_not_averaged() -> None:
    class Window:
        name = "window"

        def time(self, op: Op, device: DeviceSpec) -> OpTime | None:
            return OpTime(sum(min(r.keys, 128) for r in op.rows) * 1e-9 if op.kind == "attention" else 0.0, 0.0, "test")

    plan = plan_of(*((1, 10 + i) for i in range(8)), *((1, 5000 + i) for i in range(8)))
    got = timer(Window(), windows=(128,)).cost(plan).seconds
    assert got == pytest.approx(timer(Window()).exact(StepShape.of(plan)).seconds, rel=1e-9)


def test_first_answer_of_the_chain_wins_and_all_are_explained() -> None:
    class Passes:
        name = "passes"

        def time(self, op: Op, device: DeviceSpec) -> OpTime | None:
            return None

    chain = OpTimeChain([Passes(), PerPair()], H100)
    op = step_ops(SPEC, StepShape.decode(100))[0]
    assert chain.time(op).source == "test"
    assert [line.partition(":")[0] for line in chain.explain(op)] == ["passes", "per-pair"]
    assert "cannot say" in chain.explain(op)[0] and "1.0 us" in chain.explain(op)[1]
    with pytest.raises(ConfigError, match="no model can time"):
        OpTimeChain([Passes()], H100).time(op)


@pytest.mark.parametrize("seconds", [-1e-6, float("nan")])
def test_impossible_times_are_refused(seconds: float) -> None:
    class Broken:
        name = "broken"

        def time(self, op: Op, device: DeviceSpec) -> OpTime | None:
            return OpTime(seconds, 0.0, "test")

    with pytest.raises(ConfigError, match="broken"):
        timer(Broken()).cost(plan_of((1, 5)))


def test_an_empty_step_costs_only_the_host() -> None:
    cost = timer().cost(StepPlan(0, ()))
    assert set(cost.ops) == {"host"}


class Fixed:
    """`device` s for every op of the step together, `host` s for the CPU's part."""

    name = "fixed"

    def __init__(self, device: float, host: float) -> None:
        self._device, self._host = device, host

    def time(self, op: Op, device: DeviceSpec) -> OpTime | None:
        if op.kind == "host":
            return OpTime(self._host, self._host / 10, "test")
        return OpTime(self._device if op.name == "lm_head" else 0.0, 0.0, "test")


@pytest.mark.parametrize(("device", "host", "waited"), [(5e-3, 1e-3, 0.0), (1e-3, 5e-3, 4e-3)])
def test_overlapped_steps_last_as_long_as_the_longer_of_device_and_cpu(
    device: float, host: float, waited: float
) -> None:
    shape = StepShape.decode(100)
    chain = OpTimeChain((Fixed(device, host),), H100)
    apart, beside = (
        StepTimer(lambda s: step_ops(SPEC, s), chain, overlap=overlap).exact(shape) for overlap in (False, True)
    )
    assert apart.seconds == pytest.approx(device + host) and apart.sigma == pytest.approx(host / 10)
    assert beside.seconds == pytest.approx(max(device, host)) and beside.ops["host"] == pytest.approx(waited)
    assert beside.sigma == (pytest.approx(host / 10) if waited else 0.0)


@pytest.mark.parametrize(("count", "keys"), [(1, 2), (3, 40), (7, 7000), (40, 40 * 1023 + 11)])
def test_decoding_ahead_costs_what_its_steps_cost_to_the_last_bit(count: int, keys: int) -> None:
    """A flock's plan, the same rows one by one, and the step foretold are one number."""
    one = timer()
    ahead = one.decode(count, keys, 150)
    steps = one.decode_costs(count, keys, 150, True)
    assert len(ahead.seconds) == len(steps) == 150
    for step, cost in enumerate(steps):
        total = keys + count * step
        plan = StepPlan(0, (), stats=PlanStats(0, 0, 0, 0, 0, 0, 16), decoding=Decoding(count, total))
        each, more = divmod(total, count)
        rows = plan_of(*[(1, each + 1)] * more, *[(1, each)] * (count - more))
        assert ahead.seconds[step] == cost.seconds == one.cost(plan).seconds == one.cost(rows).seconds
        assert cost.ops == one.cost(rows).ops and cost.sigma == one.cost(rows).sigma
    for until in (0, 1, 77, 150):
        assert ahead.sigma(until) == pytest.approx(math.fsum(c.sigma for c in steps[:until]), rel=1e-12)


def test_prompts_beside_decodes_cost_what_they_cost_together() -> None:
    one = timer()
    for prompt, contexts in ((300, (900,)), (1155, (40, 3000)), (2000, tuple(range(200, 2200, 100)))):
        plan = plan_of((prompt, prompt), *((1, c) for c in contexts))
        assert one.cost(plan).seconds == pytest.approx(one.exact(StepShape.of(plan)).seconds, rel=1e-4)


def test_parts_are_forgotten_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twinfer.simulator.step_time._KEPT", 50)
    plans = [plan_of((1, context), (20, 20 + context)) for context in range(100, 9000, 50)]
    few = timer()
    found = [few.cost(plan) for plan in plans]
    monkeypatch.undo()
    many = timer()
    assert found == [many.cost(plan) for plan in plans]
