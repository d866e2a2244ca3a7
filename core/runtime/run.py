"""`run_engine`: one real run, from a configuration and a workload to a RunRecord.

The engine is loaded, warmed up and only then the clock starts; requests arrive at their times on the wall clock.

Invariants
* The same `Core`, policies, limits and requests as the prediction of this configuration (`simulator/run.py`).
* Loading, tokenizing and first-call costs are not part of any metric.
* A run that is stopped gives a valid record with `complete` False; steps are never cut short.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from twinfer.core.config import EngineConfig
from twinfer.core.errors import EngineError
from twinfer.core.events import Event, Finished, Output, Rejected, Submit, TokenDelta
from twinfer.core.feeder import Feeder
from twinfer.core.loop import LocalInbox, drive
from twinfer.core.overload import note_full_rows, note_overload
from twinfer.core.params import SamplingParams
from twinfer.core.recorder import Recorder
from twinfer.core.records import RunRecord
from twinfer.core.registry import Registry, default_registry
from twinfer.core.request import Request
from twinfer.core.runtime.loading import Engine, load_engine
from twinfer.core.runtime.tokenizer import Tokenizer
from twinfer.core.spec import ModelSpec
from twinfer.core.workload import Workload, generate

OnProgress = Callable[[int, int, dict[str, Any]], None]
ShouldStop = Callable[[], bool]
OnAnswer = Callable[[str, str], None]

PROGRESS_EVERY_S = 0.1
NAP_S = 0.05  # longest sleep without asking `should_stop`
WARM_UP_TOKENS = 256  # most prompt tokens fed before the clock starts


def run_engine(
    config: EngineConfig,
    workload: Workload,
    registry: Registry | None = None,
    on_progress: OnProgress | None = None,
    should_stop: ShouldStop | None = None,
    on_answer: OnAnswer | None = None,
) -> RunRecord:
    """Serve `workload` for real on an engine set up by `config`.

    on_progress(done requests, all requests, info) is called at most ten times a second while the run goes on, with
    `info["phase"]` "load", "warm up" or "run".  should_stop() is asked before each step and while waiting.
    on_answer(prompt, text) is called for each request after the run, in the order of arrival.
    Raises ConfigError, ModelError or RequestError for what cannot be run; nothing has run then. An engine that breaks
    while it runs is an EngineError, whose `record` is what was done until then.
    """
    registry = registry or default_registry()
    tell = on_progress or (lambda done, total, info: None)
    tell(0, 0, {"phase": "load", "doing": f"loading {config.model}"})
    requests: list[Request] = []

    def longest_request(spec: ModelSpec, tokenizer: Tokenizer) -> int:
        eos = tuple(sorted({*tokenizer.eos_token_ids, *spec.eos_token_ids}))
        requests[:] = generate(
            workload, spec.vocab_size, config.max_model_len or spec.max_context, encode=tokenizer.encode,
            eos_token_ids=eos, registry=registry,
        )  # fmt: skip
        return max(r.max_length for r in requests)

    engine = load_engine(
        config, registry, longest_request=longest_request,
        on_phase=lambda phase: tell(0, 0, {"phase": "load", "doing": phase}),
    )  # fmt: skip
    try:
        tell(0, len(requests), {"phase": "warm up", "doing": f"warming up {config.model}"})
        warm_up(engine, requests)
        return serve(engine, requests, workload, tell, should_stop, on_answer)
    finally:
        engine.close()


def warm_up(engine: Engine, requests: Sequence[Request]) -> None:
    """Run a few short requests on a Core of their own, so that first-call costs (threads, kernels, pages) are paid.

    Their prompts are of the workload's shape but of ids no request has (all zeros); the Core, and with it everything
    cached, is thrown away.
    """
    limits = engine.setup.limits
    left = min(WARM_UP_TOKENS, limits.max_num_batched_tokens)
    prompts = []
    for request in requests[: min(4, limits.max_num_seqs)]:
        length = min(len(request.prompt), left, limits.max_model_len - 4)
        if length < 1:
            break
        prompts.append((0,) * length)
        left -= length
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    events = [Submit(Request(id=f"warm-up-{i}", prompt=p, params=params)) for i, p in enumerate(prompts)]
    core = engine.build_core()
    _touch(engine, requests)
    drive(core, engine.executor, LocalInbox(events), time.perf_counter, lambda outputs, now: None)


def _touch(engine: Engine, requests: Sequence[Request]) -> None:
    """Write the part of a CPU's KV pool that `requests` will use: a page costs microseconds when it is first written."""
    kv = getattr(getattr(engine.executor, "inner", None), "kv", None)
    if kv is None or kv.device.type != "cpu":
        return
    tokens = sum((r.max_length + kv.block_size) * r.params.num_samples for r in requests)
    for tensor in kv.block_tensors:
        tensor[:, : -(-tokens // kv.block_size)].zero_()


def serve(
    engine: Engine,
    requests: Sequence[Request],
    workload: Workload,
    on_progress: OnProgress,
    should_stop: ShouldStop | None = None,
    on_answer: OnAnswer | None = None,
) -> RunRecord:
    """Drive `requests` (sorted by arrival, in s from now) through a loaded engine and record the run."""
    setup, clock = engine.setup, time.perf_counter
    core = engine.build_core()
    environment = engine.environment() | {"seed": setup.config.seed}  # milliseconds, before the clock starts
    start = clock()
    recorder = Recorder(
        "engine", setup.config.model_dump(mode="json"), workload.plain(), setup.kv_bytes_per_slot,
        environment=environment, reasons=setup.reasons, start=start,
    )  # fmt: skip
    feeder = Feeder(requests, workload.concurrency, start)
    inbox = _Arrivals(feeder, clock, should_stop)
    total, done, tokens, told = len(requests), 0, 0, 0.0
    open_samples = {r.id: r.params.num_samples for r in requests}
    answers: dict[str, list[int]] = {r.id: [] for r in requests}  # of the first sample

    def emit(outputs: Sequence[Output], now: float) -> None:
        nonlocal done, tokens, told
        feeder.note(outputs, now)
        for output in outputs:
            if isinstance(output, TokenDelta):
                tokens += len(output.tokens)
                if on_answer is not None and output.index == 0:
                    answers[output.request_id] += output.tokens
            elif isinstance(output, Rejected):
                done += 1
            elif isinstance(output, Finished):
                open_samples[output.request_id] -= 1
                done += open_samples[output.request_id] == 0
        if now - told >= PROGRESS_EVERY_S or done == total:
            told = now
            on_progress(
                done, total,
                {
                    "phase": "run", "elapsed_s": now - start, "steps": core.num_steps, "output_tokens": tokens,
                    "running": len(core.running), "waiting": len(core.waiting),
                },
            )  # fmt: skip

    complete = True
    try:
        drive(core, engine.executor, inbox, clock, emit, recorder, engine.observers)
    except _Stopped:
        complete = False
    except EngineError as error:
        error.record = recorder.finish(complete=False)
        raise
    if on_answer is not None:
        for request in requests:
            on_answer(engine.tokenizer.decode(request.prompt), engine.tokenizer.decode(answers[request.id]))
    record = recorder.finish(complete=complete)
    note_overload(record)
    note_full_rows(record, setup.kv_pool_bytes)
    return record


class _Stopped(Exception):
    """`should_stop` answered True."""


class _Arrivals:
    """Inbox of requests that come at their times; closed after the last."""

    def __init__(self, feeder: Feeder, clock: Callable[[], float], should_stop: ShouldStop | None) -> None:
        self._feeder = feeder
        self._clock = clock
        self._should_stop = should_stop

    def drain(self) -> list[Event] | None:
        self._ask()
        arrived: list[Event] = [Submit(request) for request in self._feeder.due(self._clock())]
        return None if not arrived and self._feeder.exhausted else arrived

    def wait(self, seconds: float | None) -> None:
        """Sleep until the next arrival, at most for `seconds`."""
        now = self._clock()
        due = self._feeder.next_time()
        ends = ([due] if due is not None else []) + ([now + seconds] if seconds is not None else [])
        end = min(ends, default=now)  # nothing more will come: `drain` says so
        while (left := end - self._clock()) > 0:
            self._ask()
            time.sleep(min(left, NAP_S))

    def _ask(self) -> None:
        if self._should_stop is not None and self._should_stop():
            raise _Stopped
