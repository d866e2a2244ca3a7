"""Flows over shared links: closed forms, what max-min fairness means, and no byte lost or made."""

from __future__ import annotations

import math

import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st

from twinfer.simulator.links import Flow, Network, fair_rates


def test_known_rates() -> None:
    """Bertsekas and Gallager, figure 6.12: links of 1 in a row, one long flow and shorter ones."""
    capacity = {"a": 1.0, "b": 1.0, "c": 2.0}
    flows = [
        (("a", "b", "c"), math.inf),
        (("a",), math.inf),
        (("a",), math.inf),
        (("b",), math.inf),
        (("c",), math.inf),
    ]
    assert fair_rates(flows, capacity) == pytest.approx([1 / 3, 1 / 3, 1 / 3, 2 / 3, 5 / 3])


def test_caps_leave_room_for_others() -> None:
    assert fair_rates([(("a",), 1.0), (("a",), math.inf)], {"a": 10.0}) == [1.0, 9.0]
    assert fair_rates([((), 3.0)], {}) == [3.0]
    assert fair_rates([], {"a": 1.0}) == []


links = st.lists(st.floats(0.5, 50), min_size=1, max_size=5)


@given(
    links,
    st.lists(st.tuples(st.sets(st.integers(0, 4), min_size=1), st.floats(0.1, 40) | st.just(math.inf)), max_size=12),
)
@settings(max_examples=60)
def test_rates_are_max_min_fair(bandwidths: list[float], drawn: list[tuple[set[int], float]]) -> None:
    """The definition itself: no link is over capacity, and every flow is at its cap or is among the fastest of a full link."""
    capacity = {str(i): b for i, b in enumerate(bandwidths)}
    flows = [(tuple(sorted({str(i % len(bandwidths)) for i in path})), cap) for path, cap in drawn]
    rates = fair_rates(flows, capacity)
    load = {name: sum(r for (path, _), r in zip(flows, rates, strict=True) if name in path) for name in capacity}
    assert all(load[name] <= capacity[name] * (1 + 1e-9) for name in capacity)
    for (path, cap), rate in zip(flows, rates, strict=True):
        assert 0 < rate <= cap
        if rate < cap * (1 - 1e-9):
            assert any(
                load[name] >= capacity[name] * (1 - 1e-9)
                and all(r <= rate * (1 + 1e-9) for (p, _), r in zip(flows, rates, strict=True) if name in p)
                for name in path
            )


def finished(
    *sends: tuple[float, tuple[str, ...], float, float], latency: float = 0.0, **capacity: float
) -> list[float]:
    """When each (begin, path, bytes, cap) has arrived."""
    env = simpy.Environment()
    network = Network(env)
    for name, bandwidth in capacity.items():
        network.add_link(name, bandwidth)
    ends = [math.nan] * len(sends)

    def send(i: int, path: tuple[str, ...], num_bytes: float, cap: float) -> None:
        def done(flow: Flow) -> None:
            ends[i] = env.now

        network.send(path, num_bytes, done, latency, cap)

    for i, (begin, path, num_bytes, cap) in enumerate(sends):
        env.timeout(begin).callbacks.append(lambda _, i=i, a=(path, num_bytes, cap): send(i, *a))
    env.run()
    for name in capacity:
        assert network.carried[name] == pytest.approx(sum(s[2] for s in sends if name in s[1]))
    assert network.num_flows == 0
    return ends


def test_one_flow_takes_latency_and_bytes_over_bandwidth() -> None:
    assert finished((1.0, ("a",), 100.0, math.inf), latency=0.5, a=50.0) == [3.5]
    assert finished((0.0, ("a",), 100.0, 20.0), a=50.0) == [5.0]
    assert finished((0.0, ("a",), 0.0, math.inf), a=50.0) == [0.0]


def test_a_second_flow_halves_the_first_while_it_lasts() -> None:
    """Alone for 1 s (100 of 200 bytes), shared until the second's 50 are through (1 s), alone again for the last 50."""
    ends = finished((0.0, ("a",), 200.0, math.inf), (1.0, ("a",), 50.0, math.inf), a=100.0)
    assert ends == pytest.approx([2.5, 2.0])


def test_many_to_one_and_one_to_many_are_limited_by_the_shared_end() -> None:
    ends = finished(
        *((0.0, (f"o{i}", "in"), 100.0, math.inf) for i in range(4)), o0=100, o1=100, o2=100, o3=100, **{"in": 100}
    )
    assert ends == pytest.approx([4.0] * 4)


def test_a_cancelled_flow_gives_its_share_back() -> None:
    env = simpy.Environment()
    network = Network(env)
    network.add_link("a", 10.0)
    ended: list[float] = []
    keeps = network.send(("a",), 100.0, lambda flow: ended.append(env.now))
    goes = network.send(("a",), 100.0, lambda flow: pytest.fail("was cancelled"))
    env.timeout(4.0).callbacks.append(lambda _: network.cancel(goes))
    env.run()
    assert ended == [4 + 80 / 10] and keeps.left == 0 and goes.left == pytest.approx(80)
    assert network.carried["a"] == pytest.approx(120)
    network.cancel(goes)
    network.cancel(keeps)


@given(
    links,
    st.lists(st.tuples(st.floats(0, 5), st.sets(st.integers(0, 4), min_size=1), st.floats(0, 100)), max_size=10),
)
@settings(max_examples=40)
def test_bytes_are_conserved_and_no_flow_beats_its_links(
    bandwidths: list[float], drawn: list[tuple[float, set[int], float]]
) -> None:
    capacity = {f"l{i}": b for i, b in enumerate(bandwidths)}
    sends = [
        (begin, tuple(sorted({f"l{i % len(bandwidths)}" for i in path})), num_bytes, math.inf)
        for begin, path, num_bytes in drawn
    ]
    ends = finished(*sends, **capacity)  # checks what each link has carried
    for (begin, path, num_bytes, _), end in zip(sends, ends, strict=True):
        assert end >= begin + num_bytes / min(capacity[name] for name in path) - 1e-9
    for name, bandwidth in capacity.items():  # no link was faster than it is, over any whole run
        through = [(begin, end, size) for (begin, path, size, _), end in zip(sends, ends, strict=True) if name in path]
        if through:
            span = max(end for _, end, _ in through) - min(begin for begin, _, _ in through)
            assert sum(size for *_, size in through) <= bandwidth * span * (1 + 1e-9) + 1e-9
