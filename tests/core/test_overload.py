"""Traffic above capacity is told from when requests waited, for a queue whose waits are known."""

from __future__ import annotations

import pytest

from twinfer.core.overload import full_rows, note_full_rows, note_overload, overload
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


def crowd(num: int, rows: int, replica: int = 0) -> list[RequestRecord]:
    """`num` requests at once on `rows` servers, each takes 1 s."""
    return [RequestRecord(request_id=str(i), arrival=0.0, first_scheduled=i // rows, finished=i // rows + 1.0, replica=replica)
            for i in range(num)]  # fmt: skip


def test_rows_are_full_while_others_wait() -> None:
    assert full_rows(crowd(10, 2), 2) == (pytest.approx(4 / 5), 10)  # in the last second nobody waits
    assert full_rows(crowd(10, 2), 3) == (0.0, 10)  # something else kept them from running
    assert full_rows(crowd(2, 2), 2) == (0.0, 2)
    assert full_rows([], 2) == (0.0, 0)
    one = served(1.0, 2.0)
    assert full_rows(one, 1) == (pytest.approx((198 - 1) / 200), 51)  # from the 2nd that comes to the start of the last


@pytest.mark.parametrize(
    ("requests", "peak", "value"),
    [
        (crowd(10, 2), 10.0, "--max-num-seqs 10 "),
        (crowd(10, 2), 40.0, "--max-num-seqs 5 "),  # as many as fit
        (crowd(10, 2), 90.0, None),  # the KV memory is full, too
        (crowd(2, 2), 10.0, None),
        ([*crowd(10, 2), *crowd(12, 2, replica=1)], 10.0, "--max-num-seqs 12 "),
        ([*crowd(2, 2), *crowd(2, 2, replica=1)], 10.0, None),
    ],
)
def test_full_rows_are_noted_where_memory_has_room(
    requests: list[RequestRecord], peak: float, value: str | None
) -> None:
    record = RunRecord(id="a", world="engine", created="", config={"max_num_seqs": 2}, requests=requests)
    record.metrics["peak_kv_bytes"] = peak
    note_full_rows(record, 100.0)
    assert (value in record.reasons["rows"]) if value else not record.reasons


def test_clients_that_wait_for_each_other_are_not_above_capacity() -> None:
    record = RunRecord(
        id="a", world="engine", created="", config={}, workload={"concurrency": 9}, requests=served(1.0, 2.0)
    )
    note_overload(record)
    assert not record.reasons
