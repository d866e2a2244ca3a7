"""The collector of cyclic garbage while a simulation runs: it would find nothing and look at all records again and again.

Invariants
* Runs may overlap, in threads: what was set before the first of them holds again after the last.
* It is made rare, not turned off: what else a process does (a server) is still collected.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

RARELY = (100_000, 50, 100)
"""Objects made and kept between two looks at the youngest, and how many of these there are to one at the older ones."""

_lock = threading.Lock()
_running = 0
_before: tuple[int, int, int] = gc.get_threshold()


@contextmanager
def collected_rarely() -> Iterator[None]:
    """While a simulation runs; its objects go when nobody refers to them, as nearly all are in no cycle."""
    global _running, _before
    with _lock:
        if not _running:
            _before = gc.get_threshold()
            if _before[0]:  # else somebody has turned it off
                gc.set_threshold(*RARELY)
        _running += 1
    try:
        yield
    finally:
        with _lock:
            _running -= 1
            if not _running:
                gc.set_threshold(*_before)


__all__ = ["RARELY", "collected_rarely"]
