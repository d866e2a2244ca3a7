"""A real run, lived through again by its twin: same requests, same limits, same number of KV blocks.

    bound   the Core plans as the record's clock goes: each of its steps takes what the real one took, so that plans are
            the real ones and every step can be priced op by op
    free    an ordinary prediction: steps take what the model of op times says, and plans follow from that

What the bound replay prices wrongly is the fault of op times; what the free one plans differently is scheduling.

Invariants
* Arrivals and lengths are the record's; prompts are made anew by its workload (or, where that cannot be, stand-ins
  that share no prefix, which `notes` says).
* A record without steps (a log of another engine) is replayed freely only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from pydantic import ValidationError

from twinfer.core.catalog import resolve_spec
from twinfer.core.config import EngineConfig
from twinfer.core.device import DeviceSpec, load_device
from twinfer.core.errors import ConfigError, TwinferError
from twinfer.core.events import Event, Output, Submit
from twinfer.core.feeder import Feeder
from twinfer.core.loop import drive
from twinfer.core.mistakes import first_mistake
from twinfer.core.params import SamplingParams, is_finite
from twinfer.core.plan import Need, RowResult, StepPlan, StepResult
from twinfer.core.records import RunRecord, StepRecord
from twinfer.core.registry import Registry, default_registry
from twinfer.core.request import Request
from twinfer.core.session import whole_prompts
from twinfer.core.spec import ModelSpec
from twinfer.core.work import StepShape
from twinfer.core.workload import Workload, generate
from twinfer.core.workload_source import Encode
from twinfer.plugins.workload.synthetic import _tokens
from twinfer.simulator.recorded_passes import RecordedPasses
from twinfer.simulator.run import OnProgress, ShouldStop, passes_of, prepare, run_world
from twinfer.simulator.step_parts import StepCost
from twinfer.simulator.step_time import StepTimer

_FED, _SAMPLED = RowResult(), RowResult(tokens=(0,))


class ReplayStopped(TwinferError):
    """The user stopped the replay."""


@dataclass(frozen=True, slots=True)
class PricedStep:
    """A real step beside its prediction.

    gap: s between the step before (or the arrival that was waited for) and this one.  same: the plan of the bound
    replay had as many rows and tokens.
    """

    real: StepRecord
    gap: float
    predicted: StepCost
    same: bool


@dataclass(frozen=True, slots=True)
class Replay:
    """steps: of the bound replay, empty where the record has none.
    kinds: op name -> kind.  launches: op name -> launches a step.  model: as the run's techniques leave it.
    """

    real: RunRecord
    predicted: RunRecord
    config: EngineConfig
    device: DeviceSpec
    model: ModelSpec
    steps: tuple[PricedStep, ...] = ()
    kinds: Mapping[str, str] = field(default_factory=dict)
    launches: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def replay(
    real: RunRecord,
    config: EngineConfig | None = None,
    registry: Registry | None = None,
    device: DeviceSpec | None = None,
    encode: Encode | None = None,
    on_progress: OnProgress | None = None,
    should_stop: ShouldStop | None = None,
) -> Replay:
    """Replay `real` on the model of `config` (None: the record's own) and the op times of `device`.

    Raises ConfigError for a run that cannot be replayed, ReplayStopped when `should_stop` answers True.
    """
    registry = registry or default_registry()
    config = config or config_of(real)
    device = device or load_device(config.device, registry)
    if not real.complete:
        raise ConfigError("RUN", real.id, "was stopped early", "replay a run that is complete")
    if not is_finite(real.metrics.get("duration")) or real.metrics["duration"] <= 0:
        raise ConfigError("RUN", real.id, "does not say how long it took, or took no time", "replay another run")
    workload, requests, notes = requests_of(real, config, registry, encode)
    world = prepare(config, workload, registry, device, None, requests)
    predicted, _ = run_world(world, 1.0, on_progress or (lambda done, total, info: None), should_stop, keep=True)
    if not predicted.complete:
        raise ReplayStopped("replay stopped")
    _check_answered(real, predicted)
    steps: list[PricedStep] = []
    if real.steps:
        feeder = Feeder(requests, workload.concurrency)
        bound = _Bound(real.steps, world.timer, passes_of(world), feeder, should_stop)
        drive(world.setup.build_core(), bound, bound, bound.clock, bound.emit)
        steps = bound.priced
        if len(steps) < len(real.steps) or bound.extra:
            notes.append(
                f"the bound replay took {len(steps) + bound.extra} steps, the run {len(real.steps)}: plans depended on "
                "what the record does not hold"
            )
    launches: Counter[str] = Counter({"host": 1})
    kinds = {"host": "host"}
    for op in world.timer.ops(StepShape.prefill(16)):
        launches[op.name] += op.count
        kinds[op.name] = op.kind
    return Replay(real, predicted, config, device, world.setup.model, tuple(steps), kinds, launches, tuple(notes))


def _check_answered(real: RunRecord, predicted: RunRecord) -> None:
    """ConfigError where the twin refuses what was served: it is not the twin of that engine."""
    refused = [r for r in predicted.requests if r.last_token is None]
    if refused:
        first = refused[0]
        raise ConfigError(
            "RUN", real.id,
            f"has {len(refused)} of {len(predicted.requests)} requests that its twin does not answer: {first.request_id} of "
            f"{first.num_prompt_tokens} prompt tokens ends by {first.reason}{f' ({first.detail})' if first.detail else ''}",
            "give the model and the limits that served it (--model, --num-kv-blocks, --max-num-batched-tokens)",
        )  # fmt: skip


def config_of(real: RunRecord) -> EngineConfig:
    """The configuration that `real` ran with, its KV pool pinned; ConfigError where the record has none."""
    if not real.config:
        raise ConfigError("RUN", real.id, "does not say how the engine was set up", "give --model and its limits")
    settings = dict(real.config)
    if settings.get("num_kv_blocks") is not None:
        settings["kv_memory_bytes"] = None  # the number of blocks says it already
    try:
        return EngineConfig.model_validate(settings)
    except (ValidationError, ConfigError) as error:
        raise _damaged(real, "config", error) from None


def _damaged(real: RunRecord, part: str, error: ValidationError | ConfigError) -> ConfigError:
    if isinstance(error, ConfigError):
        return ConfigError("RUN", real.id, f"its {part} cannot be: {error}", "replay another run")
    wrong = first_mistake(error)
    return ConfigError("RUN", real.id, f"its {part} has {wrong.told}, which {wrong.problem}", "replay another run")


def requests_of(
    real: RunRecord, config: EngineConfig, registry: Registry, encode: Encode | None = None
) -> tuple[Workload, list[Request], list[str]]:
    """(workload for the limits and clients, requests with the record's arrivals and lengths, notes)."""
    try:
        asked = Workload(**real.workload)
    except (ValidationError, ConfigError) as error:
        raise _damaged(real, "workload", error) from None
    if asked.beam_width > 1 or any(r.index for r in real.requests):
        raise ConfigError("RUN", real.id, "has several samples a request", "replay a run with one answer a request")
    served = [r for r in real.requests if r.num_output_tokens]
    if (asked.turns or 1) > 1:  # turns were sent when the one before had ended
        served.sort(key=lambda r: r.arrival)
    if not served:
        raise ConfigError("RUN", real.id, "has no answered request", "replay another run")
    notes = []
    if len(served) < len(real.requests):
        notes.append(f"{len(real.requests) - len(served)} requests without an answer are left out")
    spec = resolve_spec(config.model)
    prompts: Sequence[Sequence[int]] | None = None
    if real.workload:
        try:
            made = generate(asked, spec.vocab_size, config.max_model_len or spec.max_context, encode=encode,
                            registry=registry, vision=spec.vision)  # fmt: skip
            by_id = whole_prompts(made)
            prompts = [by_id[r.request_id] for r in served if r.request_id in by_id]
        except TwinferError as error:
            notes.append(f"prompts are stand-ins: {error}")
    lengths = [r.num_prompt_tokens for r in served]
    if prompts is None or [len(p) for p in prompts] != lengths:
        if prompts is not None:
            notes.append("prompts are stand-ins of the same lengths: the workload makes others here")
        prompts = [_tokens(number, 0, length, spec.vocab_size) for number, length in enumerate(lengths)]
    requests = [
        Request(
            id=record.request_id, prompt=prompt,
            params=SamplingParams(max_tokens=record.num_output_tokens, ignore_eos=True),
            arrival=0.0 if asked.concurrency else max(0.0, record.arrival),
        )
        for record, prompt in zip(served, prompts, strict=True)
    ]  # fmt: skip
    workload = Workload(num_requests=len(requests), concurrency=asked.concurrency, seed=asked.seed)
    return workload, requests, notes


class _Bound:
    """Executor, inbox and clock of the bound replay: time passes as it did in the record."""

    def __init__(
        self, steps: Sequence[StepRecord], timer: StepTimer, passes: RecordedPasses | None, feeder: Feeder,
        should_stop: Callable[[], bool] | None,
    ) -> None:  # fmt: skip
        self._real, self._timer, self._passes, self._feeder, self._should_stop = (
            steps,
            timer,
            passes,
            feeder,
            should_stop,
        )
        self._now = 0.0
        self.priced: list[PricedStep] = []
        self.extra = 0
        """Steps after the last of the record."""

    def clock(self) -> float:
        return self._now

    def emit(self, outputs: Sequence[Output], now: float) -> None:
        self._feeder.note(outputs, now)

    # --- inbox ------------------------------------------------------------------------------------

    def drain(self) -> list[Event] | None:
        arrived: list[Event] = [Submit(request) for request in self._feeder.due(self._now)]
        return None if not arrived and self._feeder.exhausted else arrived

    def wait(self, seconds: float | None) -> None:
        due = self._feeder.next_time()
        ends = ([due] if due is not None else []) + ([self._now + seconds] if seconds is not None else [])
        if ends:
            self._now = max(self._now, min(ends))

    # --- executor ---------------------------------------------------------------------------------

    def admit(self, request: Request, seqs: tuple[tuple[str, int], ...]) -> None: ...
    def close(self) -> None: ...

    def execute(self, plan: StepPlan) -> StepResult:
        if self._should_stop is not None and self._should_stop():
            raise ReplayStopped("replay stopped")
        cost = self._timer.cost(plan)
        if self._passes is not None:
            cost = self._passes.added(plan, cost)
        at = len(self.priced)
        if at < len(self._real):
            real = self._real[at]
            tokens = sum(len(row.tokens) for row in plan.rows)
            gap = max(0.0, real.start - self._now)
            self.priced.append(
                PricedStep(real, gap, cost, (len(plan.rows), tokens) == (real.num_rows, real.num_tokens))
            )
            self._now += gap + real.seconds
        else:
            self.extra += 1
            self._now += cost.seconds
        rows = tuple(_FED if row.need is Need.NONE else _SAMPLED for row in plan.rows)
        return StepResult(rows, cost.seconds or 1e-9)


__all__ = ["PricedStep", "Replay", "ReplayStopped", "config_of", "replay", "requests_of"]
