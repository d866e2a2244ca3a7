"""The requests of the speed benches, and a fleet that serves them without anything that costs time beside (`simulator.py`)."""

from __future__ import annotations

import math
import random
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Any

import simpy

from twinfer.core.events import Submit
from twinfer.core.params import SamplingParams
from twinfer.core.recorder import Recorder
from twinfer.core.records import RunRecord
from twinfer.core.request import Request
from twinfer.core.setup import Setup
from twinfer.core.workload import Workload
from twinfer.core.workload_source import Setting
from twinfer.plugins.workload.synthetic import _tokens
from twinfer.plugins.workload.traces import AzureTrace
from twinfer.simulator.driver import SimInbox, engine
from twinfer.simulator.executor import CostExecutor
from twinfer.simulator.garbage import collected_rarely
from twinfer.simulator.step_time import StepTimer


def lengths(trace: str | None, context: int, vocabulary: int) -> list[tuple[int, int, float]]:
    """(prompt, answer, seconds since the one before) of each request; what exceeds the context is cut."""
    if trace is None:
        rng = random.Random(0)
        found = []
        for _ in range(20_000):
            prompt, answer = (max(1, round(mean * math.exp(rng.gauss(-0.5, 1.0)))) for mean in (1155, 211))
            found.append((prompt, answer, rng.expovariate(5.4)))
    else:
        drafts = AzureTrace().drafts(Workload(trace=trace), Setting(vocab_size=vocabulary, max_model_len=context))
        times = [d.arrival or 0.0 for d in drafts]
        found = [
            (len(d.prompt), d.output_len, max(0.0, t - s))
            for d, s, t in zip(drafts, [times[0], *times], times, strict=False)
        ]
    return [(min(p, context - 1), min(a, context - min(p, context - 1)), gap) for p, a, gap in found]


def stream(rows: Sequence[tuple[int, int, float]], num: int, rate: float | None, vocabulary: int) -> Iterator[Request]:
    """`num` requests, made as they are asked for."""
    rng, now = random.Random(1), 0.0
    params: dict[int, SamplingParams] = {}
    for number in range(num):
        prompt, answer, gap = rows[number % len(rows)]
        now += (gap if rate is None else rng.expovariate(rate)) if number else 0.0
        if answer not in params:
            params[answer] = SamplingParams(max_tokens=answer, ignore_eos=True)
        yield Request(
            id=f"r{number}", prompt=_tokens(number, 0, prompt, vocabulary), params=params[answer], arrival=now
        )  # fmt: skip


def served(
    setup: Setup, timer: StepTimer, arriving: Iterable[Request], replicas: int = 1, skip: bool = True
) -> tuple[list[RunRecord], float]:
    """`arriving` on `replicas` in turn: a record of each that keeps requests, and seconds of simulated time."""
    env = simpy.Environment()
    inboxes = [SimInbox(env) for _ in range(replicas)]
    recorders = [Recorder("simulator", {}, {}, 1.0, detail="requests") for _ in inboxes]
    executors = [CostExecutor(timer, ops=False) for _ in inboxes]

    def arrive() -> Generator[simpy.Event, Any, None]:
        for number, request in enumerate(arriving):
            if request.arrival > env.now:
                yield env.timeout(request.arrival - env.now)
            inboxes[number % len(inboxes)].put(Submit(request))
        for inbox in inboxes:
            inbox.close()

    env.process(arrive())
    engines = [
        env.process(engine(env, setup.build_core(), executor, inbox, recorder, skip=skip))
        for executor, inbox, recorder in zip(executors, inboxes, recorders, strict=True)
    ]
    with collected_rarely():
        env.run(env.all_of(engines))
    return [recorder.finish() for recorder in recorders], env.now
