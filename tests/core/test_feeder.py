"""When requests are sent, in an open and in a closed loop."""

from __future__ import annotations

import pytest

from twinfer.core.events import Finished, Rejected, TokenDelta
from twinfer.core.feeder import Feeder
from twinfer.core.params import SamplingParams
from twinfer.core.request import Request
from twinfer.core.session import Follows, History


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


def session(number: int, arrival: float, turns: int, think_s: float = 0.0) -> list[Request]:
    params = SamplingParams(max_tokens=2)
    made: list[Request] = []
    for turn in range(turns):
        follows = Follows(made[-1].id, think_s, 5 * turn) if turn else None
        own = (100 * number + turn, 7, 8)
        made.append(Request(id=f"s{number}t{turn}", prompt=own, params=params, arrival=arrival, follows=follows))
    return made


def test_a_turn_comes_after_the_answer_and_begins_with_all_that_was_said() -> None:
    feeder = Feeder([*session(1, 0.0, 3, think_s=2.0), *session(2, 9.0, 1)])
    (first,) = feeder.due(0.0)
    assert first.id == "s1t0" and feeder.listens and not feeder.exhausted
    assert feeder.next_time() == 9.0 and feeder.due(5.0) == []
    assert feeder.note([TokenDelta("s1t0", 0, (41,)), TokenDelta("s1t0", 0, (42,))], 5.0) is False
    assert feeder.note([Finished("s1t0", 0, "length")], 6.0) is True
    assert feeder.next_time() == 8.0 and feeder.due(7.9) == []
    (second,) = feeder.due(8.5)
    assert (second.id, second.arrival, second.follows) == ("s1t1", 8.0, None)
    assert list(second.prompt) == [100, 7, 8, 41, 42, 101, 7, 8]
    assert [r.id for r in feeder.due(9.0)] == ["s2t0"]
    feeder.note([TokenDelta("s1t1", 0, (43, 44)), Finished("s1t1", 0, "length"), Finished("s2t0", 0, "length")], 10.0)
    (third,) = feeder.due(12.0)
    assert list(third.prompt) == [100, 7, 8, 41, 42, 101, 7, 8, 43, 44, 102, 7, 8]
    assert feeder.exhausted and not feeder.listens and feeder.note([Finished("s1t2", 0, "length")], 13.0) is False


def test_a_turn_is_sent_whatever_became_of_the_one_before() -> None:
    feeder = Feeder(session(1, 0.0, 2))
    feeder.due(0.0)
    assert feeder.note([Rejected("s1t0", "too long")], 1.0) is True
    (second,) = feeder.due(1.0)
    assert list(second.prompt) == [100, 7, 8, 101, 7, 8] and feeder.exhausted


def test_a_client_of_a_closed_loop_goes_through_its_session_first() -> None:
    feeder = Feeder([r for n in range(3) for r in session(n, 0.0, 2)], concurrency=2, answer=0)
    assert [r.id for r in feeder.due(0.0)] == ["s0t0", "s1t0"]
    assert feeder.note([Finished("s0t0", 0, "length")], 1.0) is True
    (turn,) = feeder.due(1.0)
    assert turn.id == "s0t1" and list(turn.prompt) == [0, 7, 8, 0, 0, 1, 7, 8], "made-up answers"
    assert feeder.due(1.5) == []
    assert feeder.note([Finished("s0t1", 0, "length")], 2.0) is True
    assert [r.id for r in feeder.due(2.0)] == ["s2t0"]
    for name in ("s1t0", "s2t0"):
        feeder.note([Finished(name, 0, "length")], 3.0)
    assert [r.id for r in feeder.due(3.0)] == ["s1t1", "s2t1"] and feeder.exhausted


def test_turns_that_are_due_together_keep_their_order_and_all_are_sent_once() -> None:
    feeder = Feeder([r for n in range(4) for r in session(n, float(n), 3)])
    sent: list[str] = []
    now = 0.0
    while not feeder.exhausted:
        found = feeder.due(now)
        sent += [r.id for r in found]
        feeder.note([Finished(r.id, 0, "length") for r in found], now)
        now = max(now, feeder.next_time() or now)
    assert sorted(sent) == sorted(f"s{n}t{t}" for n in range(4) for t in range(3))
    assert all(sent.index(f"s{n}t{t}") < sent.index(f"s{n}t{t + 1}") for n in range(4) for t in range(2))


def test_history_is_the_parts_one_after_the_other() -> None:
    history = History(History(range(3), ()), (9, 9), range(10, 14))
    assert list(history) == [0, 1, 2, 9, 9, 10, 11, 12, 13] and len(history) == 9 and len(history.parts) == 3
    whole = list(history)
    assert all(history[a:b] == whole[a:b] for a in range(-9, 10) for b in range(-9, 10))
    assert history[::2] == whole[::2] and history[-1] == 13 and history == tuple(whole)
    with pytest.raises(IndexError):
        history[9]
