"""Traffic above capacity is told from when requests waited, for a queue whose waits are known."""

from __future__ import annotations

import pytest

from twinfer.core.overload import note_overload, overload
from twinfer.core.records import RequestRecord, RunRecord


def served(gap: float, takes: float, num: int = 100) -> list[RequestRecord]:
    """One server, one request at a time: one comes every `gap` s and takes `takes` s."""
    free, found = 0.0, []
    for i in range(num):
        begun = max(free, i * gap)
        free = begun + takes
        found.append(RequestRecord(request_id=str(i), arrival=i * gap, first_scheduled=begun, finished=free))
    return found


def test_a_queue_that_grows() -> None:
    over = overload(served(1.0, 2.0))
    assert over is not None
    assert (over.offered, over.served) == pytest.approx((1.0, 0.5))
    assert over.wait == pytest.approx(sum(range(75, 100)) / 25)


@pytest.mark.parametrize("requests", [served(1.0, 0.99), served(0.0, 2.0), served(1.0, 2.0, num=8), []])
def test_room_for_all_or_all_at_once_or_too_few_to_tell(requests: list[RequestRecord]) -> None:
    assert overload(requests) is None


def test_the_record_says_it() -> None:
    for takes, said in (
        (2.0, "above capacity: 1 requests/s arrive and 0.5 /s are served; the queue grows, the last quarter waited 87 s for a first step"),
        (0.99, None),
    ):  # fmt: skip
        record = RunRecord(id="a", world="engine", created="", config={}, requests=served(1.0, takes))
        note_overload(record)
        assert record.reasons.get("traffic") == said
