"""Whether requests came faster than they could be served, told from when each waited.

A driver notes it in the reasons of a whole run (`traffic`), where the terminal, `--json`, the store and the dashboard find it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from twinfer.core.records import RequestRecord, RunRecord

_FEWEST = 16  # requests of which a trend can be told
_GROWING = 0.1
"""Wait of the last quarter of the requests, relative to the time over which all of them came, from which on a queue grows:
with room for all it stays what it is however long they come."""


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
    """Add to the reasons of `record` that traffic was above capacity, where it was."""
    if (over := overload(record.requests)) is not None:
        record.reasons["traffic"] = (
            f"above capacity: {_figure(over.offered)} requests/s arrive and {_figure(over.served)} /s are served; the queue "
            f"grows, the last quarter waited {_figure(over.wait)} s for a first step"
        )


def _figure(value: float) -> str:
    return f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"


__all__ = ["Overload", "note_overload", "overload"]
