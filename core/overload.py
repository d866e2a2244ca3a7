"""What held requests up, told from when each waited: they came faster than they were served, or all rows were taken.

A driver notes it in the reasons of a whole run (`traffic`, `rows`), where the terminal, `--json`, the store and the
dashboard find it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from twinfer.core.errors import rounded
from twinfer.core.records import RequestRecord, RunRecord

_FEWEST = 16  # requests of which a trend can be told
_GROWING = 0.1
"""Wait of the last quarter of the requests, relative to the time over which all of them came, from which on a queue grows:
with room for all it stays what it is however long they come."""
_CROWDED = 0.1
"""Share of the time with all rows taken and requests waiting, from which on rows are said to be the limit."""


class Overload(NamedTuple):
    """offered, served: requests per s.  wait: mean s of the last quarter until their first step."""

    offered: float
    served: float
    wait: float


def overload(requests: Sequence[RequestRecord]) -> Overload | None:
    """None where the queue does not grow while requests come, or where all come at once (then it only shrinks)."""
    come = sorted((r.arrival, r.first_scheduled) for r in requests if r.first_scheduled is not None)
    ends = [r.finished for r in requests if r.finished is not None]
    if len(come) < _FEWEST or not ends:
        return None
    span = come[-1][0] - come[0][0]
    last = come[-(len(come) // 4) :]
    wait = sum(begun - arrival for arrival, begun in last) / len(last)
    if not span or wait < _GROWING * span:
        return None
    return Overload((len(come) - 1) / span, len(ends) / (max(ends) - come[0][0]), wait)


def note_overload(record: RunRecord) -> None:
    """Add to the reasons of `record` that traffic was above capacity, where it was; clients of a closed loop never are."""
    if record.workload.get("concurrency") is None and (over := overload(record.requests)) is not None:
        record.reasons["traffic"] = (
            f"above capacity: {rounded(over.offered)} requests/s arrive and {rounded(over.served)} /s are served; the queue "
            f"grows, the last quarter waited {rounded(over.wait)} s for a first step"
        )


def full_rows(requests: Sequence[RequestRecord], rows: int) -> tuple[float, int]:
    """Of one replica: share of the time in which `rows` sequences ran while others waited for a first step, and the most
    that were there at once, running or waiting."""
    seen = [r for r in requests if r.first_scheduled is not None or r.finished is None]
    if len(seen) <= rows:
        return 0.0, len(seen)
    come = sorted(r.arrival for r in seen)
    begun = [*sorted(r.first_scheduled for r in seen if r.first_scheduled is not None), math.inf]
    ended = [*sorted(r.finished for r in seen if r.finished is not None), math.inf]
    coming = [*come, math.inf]
    arrived = started = done = most = 0
    full, last = 0.0, come[0]
    while (now := min(coming[arrived], begun[started], ended[done])) < math.inf:
        if arrived > started and started - done >= rows:
            full += now - last
        last = now
        if ended[done] == now:  # first: its row may be taken at the same time
            done += 1
        elif coming[arrived] == now:
            arrived += 1
            most = max(most, arrived - done)
        else:
            started += 1
    return full / (last - come[0]) if last > come[0] else 0.0, most


def note_full_rows(record: RunRecord, pool_bytes: float) -> None:
    """Add to the reasons of `record` that rows were the limit, where they were and KV memory has room for more of them.

    pool_bytes: of the KV pool that `peak_kv_bytes` is of.
    """
    rows = record.config["max_num_seqs"]
    replicas: dict[int, list[RequestRecord]] = {}
    for request in record.requests:
        replicas.setdefault(request.replica, []).append(request)
    found = [full_rows(requests, rows) for requests in replicas.values()]
    share = max((share for share, _ in found), default=0.0)
    peak = record.metrics["peak_kv_bytes"]
    if share < _CROWDED or not peak:
        return
    fit = int(rows * pool_bytes / peak)
    better = min(max(most for _, most in found), fit)
    if better > rows * (1 + _CROWDED):  # else memory would be the next limit at once
        record.reasons["rows"] = (
            f"all {rows} were taken {100 * share:.0f} % of the time while requests waited for a first step, though KV memory "
            f"has room for about {fit:,}: --max-num-seqs {better} starts more of them at once, in longer steps"
        )


__all__ = ["Overload", "full_rows", "note_full_rows", "note_overload", "overload"]
