"""Made-up records of both worlds, whose numbers are known in closed form, and runs that last until they are stopped.

Makes the helper modules of this folder importable.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from twinfer.core.config import EngineConfig
from twinfer.core.records import RequestRecord, RunRecord, StepRecord, compute_metrics

HERE = str(Path(__file__).resolve().parent)
if HERE not in sys.path:
    sys.path.insert(0, HERE)

SLOW = '''
"""A scheduler that pauses before every step wherever a run is made: 60,000 requests take hours, however fast we are."""
import sys
import time

from twinfer.core.hookspecs import hookimpl
from twinfer.plugins.scheduler.continuous import Continuous

ON_A_PAGE = "twinfer.dashboard.server" in sys.orig_argv  # its quick estimates stay quick


class Slow(Continuous):
    name = "slow"
    summary = "continuous, with a pause before every step"

    def propose(self, view):
        if not ON_A_PAGE:
            time.sleep(0.02)
        yield from super().propose(view)

    def steady(self, view):
        return super().steady(view) if ON_A_PAGE else None


@hookimpl
def register_scheduler(register):
    register(Slow)
'''

BYTES_PER_TOKEN = 46_080.0  # SmolLM2-135M in float32


def make_record(
    world: str = "engine",
    *,
    run: str = "",
    decode: float = 0.05,
    prefill: float = 0.4,
    num_requests: int = 8,
    output: int = 24,
    rows: int = 4,
    prompt: int = 96,
    scheduler: str = "continuous",
    kv_cache: str = "paged",
    bands: bool = False,
    complete: bool = True,
    ops: bool = True,
    **config: Any,
) -> RunRecord:
    """Requests served `rows` at a time: one prefill step of all of them, then `output - 1` decode steps."""
    block = 16 if kv_cache == "paged" else 512
    steps: list[StepRecord] = []
    requests: list[RequestRecord] = []
    now = 0.0
    for first in range(0, num_requests, rows):
        group = range(first, min(first + rows, num_requests))
        began = now
        for position in range(output):
            seconds = (prefill if position == 0 else decode) * (1 + 0.002 * position)
            stored = len(group) * (prompt + position)
            blocks = len(group) * -(-(prompt + position) // block)
            steps.append(
                StepRecord(
                    step=len(steps), start=now, seconds=seconds, num_rows=len(group),
                    num_tokens=len(group) * (prompt if position == 0 else 1),
                    num_decode_rows=0 if position == 0 else len(group), num_context_tokens=stored,
                    running=len(group), waiting=num_requests - first - len(group), held_blocks=blocks,
                    total_blocks=10 * num_requests * 8192 // block, used_slots=stored, block_size=block,
                    ops={"mlp": 0.6 * seconds, "attention": 0.3 * seconds, "lm_head": 0.1 * seconds} if ops else {},
                )
            )  # fmt: skip
            now += seconds
            if position == 0:
                begun = now
        for number in group:
            requests.append(
                RequestRecord(
                    request_id=f"r{number}", arrival=0.0, first_scheduled=began, first_token=begun, last_token=now,
                    finished=now, reason="length", num_prompt_tokens=prompt, num_output_tokens=output,
                    itl=[s.seconds for s in steps[-output + 1 :]],
                )
            )  # fmt: skip
    asked = EngineConfig(model="smollm2-135m", scheduler=scheduler, kv_cache=kv_cache, max_num_seqs=rows, **config)
    record = RunRecord(
        id=run or f"{world}-{scheduler}-{kv_cache}", world=world, created="2026-11-29T12:00:00+00:00",
        config=asked.model_dump(mode="json"), workload={"num_requests": num_requests, "input_len": prompt},
        environment={"host": "test"}, kv_bytes_per_token=BYTES_PER_TOKEN, steps=steps, requests=requests,
        complete=complete,
    )  # fmt: skip
    record.metrics = compute_metrics(record)
    if bands:
        for name in ("output_throughput", "ttft.p50", "tpot.p50", "e2e.p50", "duration"):
            head, _, part = name.partition(".")
            value = record.metrics[head][part] if part else record.metrics[head]
            record.intervals[name] = (0.9 * value, 1.12 * value)
    return record


@pytest.fixture(scope="session")
def slow_plugins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the scheduler `slow`, for runs that certainly last until somebody stops them."""
    folder = tmp_path_factory.mktemp("slow-plugins")
    (folder / "slow.py").write_text(SLOW)
    return folder


@pytest.fixture
def no_cached_pages() -> Iterator[None]:
    """Pages of this test share nothing with those of another."""
    import streamlit as st

    st.cache_resource.clear()
    yield
    st.cache_resource.clear()


@pytest.fixture(scope="session")
def record() -> Callable[..., RunRecord]:
    return make_record


@pytest.fixture
def pair() -> tuple[RunRecord, RunRecord]:
    """A measured run and its prediction, 8 % fast in decode and 12 % slow in prefill."""
    return make_record("engine"), make_record("simulator", decode=0.046, prefill=0.45, bands=True)
