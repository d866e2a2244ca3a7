"""Processes of a search: signals of the terminal are the parent's, from a child's first moment on."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from twinfer.simulator.plan_pool import _signals_held

BLOCKED = "print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('SigBlk')))"
PARENT = """
import time
from twinfer.core.goal import parse_goals
from twinfer.core.registry import Registry
from twinfer.core.workload import Workload
from twinfer.simulator.plan_pool import ProcessPool
from twinfer.simulator.plan_space import Question
from twinfer.simulator.plan_trial import ASSESS, Trial

asked = Question(
    base={"model": "smollm2-135m"}, axes={"device": ("l4",)}, goals=parse_goals(["ttft.p95<=1"]), seeds=1,
    workload=Workload(num_requests=10, rate=5.0, input_len=64, output_len=4),
)
pool = ProcessPool(asked, Registry(entry_points=False), 2)
pool.submit(Trial(design=0, replicas=1, level=ASSESS))
while not pool.collect():
    pass
print("busy", flush=True)
time.sleep(600)
"""


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


def test_children_end_when_their_parent_is_killed() -> None:
    """They hold its output, which ends when nobody holds it any more."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None and parent.stdout.readline() == "busy\n"
        parent.kill()
        assert parent.communicate(timeout=60)[0] == ""
    finally:
        parent.kill()
        parent.wait()


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
