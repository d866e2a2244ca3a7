"""Traffic above capacity is told from when requests waited, for a queue whose waits are known."""

from __future__ import annotations

import pytest

from twinfer.core.overload import overload
from twinfer.core.records import RequestRecord


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
