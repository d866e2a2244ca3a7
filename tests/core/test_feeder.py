"""When requests are sent, in an open and in a closed loop."""

from __future__ import annotations

import pytest

from twinfer.core.events import Finished, Rejected, TokenDelta
from twinfer.core.feeder import Feeder
from twinfer.core.params import SamplingParams
from twinfer.core.request import Request


def requests(*arrivals: float, n: int = 1) -> list[Request]:
    params = SamplingParams(n=n, temperature=1.0 if n > 1 else 0.0)
    return [Request(id=f"r{i}", prompt=(1, 2), params=params, arrival=a) for i, a in enumerate(arrivals)]


def test_open_loop_sends_at_the_times_of_the_requests() -> None:
    feeder = Feeder(requests(0.0, 1.0, 1.0, 3.0), start=10.0)
    assert [r.arrival for r in feeder.due(10.5)] == [10.0]
    assert feeder.next_time() == 11.0
    assert [r.id for r in feeder.due(12.0)] == ["r1", "r2"]
    assert feeder.note([Finished("r0", 0, "stop")], 12.0) is False
    assert [r.id for r in feeder.due(99.0)] == ["r3"]
    assert feeder.exhausted and feeder.next_time() is None and feeder.due(100.0) == []


def test_closed_loop_keeps_as_many_open_as_there_are_clients() -> None:
    feeder = Feeder(requests(*[0.0] * 5), concurrency=2, start=1.0)
    assert [r.id for r in feeder.due(1.0)] == ["r0", "r1"]
    assert feeder.due(2.0) == [] and feeder.next_time() is None
    assert feeder.note([TokenDelta("r1", 0, (3,)), Finished("r1", 0, "length")], 2.5) is True
    (sent,) = feeder.due(4.0)  # the engine looked again only after its step
    assert (sent.id, sent.arrival) == ("r2", 2.5)
    assert feeder.note([Rejected("r2", "too long"), Finished("r0", 0, "stop")], 5.0) is True
    assert [r.id for r in feeder.due(5.0)] == ["r3", "r4"] and feeder.exhausted
    assert feeder.note([Finished("r3", 0, "stop")], 6.0) is False, "nothing is left to send"


def test_a_client_waits_for_all_samples_of_its_request() -> None:
    feeder = Feeder(requests(0.0, 0.0, n=2), concurrency=1)
    assert [r.id for r in feeder.due(0.0)] == ["r0"]
    assert feeder.note([Finished("r0", 1, "stop")], 1.0) is False
    assert feeder.due(1.0) == []
    assert feeder.note([Finished("r0", 0, "stop"), Finished("unknown", 0, "stop")], 2.0) is True
    assert [r.arrival for r in feeder.due(3.0)] == [2.0]


@pytest.mark.parametrize("clients", [3, 1000])
def test_more_clients_than_requests_is_everything_at_once(clients: int) -> None:
    feeder = Feeder(requests(0.0, 0.0, 0.0), concurrency=clients)
    assert len(feeder.due(0.0)) == 3 and feeder.exhausted
