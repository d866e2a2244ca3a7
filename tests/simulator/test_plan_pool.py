"""Processes of a search: signals of the terminal are the parent's, from a child's first moment on."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from twinfer.simulator.plan_pool import _signals_held

BLOCKED = "print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('SigBlk')))"


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="asks Linux what a process holds back")
def test_a_child_that_is_being_started_hears_of_no_signal() -> None:
    def blocked() -> int:
        return int(
            subprocess.run([sys.executable, "-c", BLOCKED], capture_output=True, check=True, text=True).stdout, 16
        )

    wanted = (1 << (signal.SIGINT - 1)) | (1 << (signal.SIGTERM - 1))
    before = blocked()
    with _signals_held():
        assert blocked() & wanted == wanted
    assert blocked() == before


def test_what_comes_meanwhile_is_not_lost() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    try:
        with _signals_held():
            signal.raise_signal(signal.SIGINT)
            assert heard == []
        assert heard == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)
