"""Seconds by op name of one step.

Invariants
* The time between two marks belongs to the later one; what no mark claims is "host".
* On an accelerator a mark waits for the device, so a profiled step is slower than a plain one.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch


def silent(op: str) -> None:
    """A mark that measures nothing."""


class Profile:
    """Collects the times of one step; see `Mark`."""

    __slots__ = ("_last", "_seconds", "_wait")

    def __init__(self, device: torch.device) -> None:
        self._wait = torch.cuda.synchronize if device.type == "cuda" else None
        self._seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def mark(self, op: str) -> None:
        """Everything since the last mark was `op`."""
        if self._wait is not None:
            self._wait()
        now = time.perf_counter()
        self._seconds[op] = self._seconds.get(op, 0.0) + now - self._last
        self._last = now

    def add(self, seconds: Mapping[str, float]) -> None:
        """Times by op that a recorded pass took since the last mark (`replay.py`)."""
        for op, took in seconds.items():
            self._seconds[op] = self._seconds.get(op, 0.0) + took
        self._last = time.perf_counter()

    def ops(self, seconds: float) -> dict[str, float]:
        """Seconds by op of a step that took `seconds`."""
        ops = dict(self._seconds)
        ops["host"] = max(0.0, seconds - sum(s for op, s in ops.items() if op != "host"))
        return ops
