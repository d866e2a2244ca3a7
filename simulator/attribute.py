"""Why a prediction is off: the error of a run's duration by op, host, plans and waiting; and what would mend it.

    real duration      = ops + host of its steps            + waiting for requests
    predicted duration = ops + host of the same steps       (bound replay)
                       + (steps as planned - same steps)    (plans differ)
                       + waiting for requests

Invariants
* The parts add up to the two durations; nothing is attributed where the record has no steps.
* A correction is a factor per op, real over predicted time on the run's own steps, and one each for its small and its large
  launches where it has both: reading weights for one token and multiplying them by a prompt do not slow down alike. What it
  leaves unexplained, window by window of the run, becomes the interval of everything it corrects.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import NamedTuple

from twinfer.core.device import DeviceSpec
from twinfer.core.errors import ConfigError
from twinfer.core.measured import quantile
from twinfer.core.params import is_finite
from twinfer.core.records import RunRecord, percentile
from twinfer.plugins.op_time.calibrated import calibration_of
from twinfer.plugins.op_time.calibration import MIN_DRIFT, Calibration, Correction, Format, Sizes
from twinfer.simulator.replay import PricedStep, Replay

_CLASSES = {"gemm": "products", "attention": "attention", "host": "host", "comm": "communication"}
OTHER, PLANS, WAITING, STEPS, UNLIKE = "other ops", "plans", "waiting", "steps", "steps planned otherwise"
_WINDOWS = 10
_SHARE = 0.01  # of a run's time from which an op has a factor of its own, and of an op's from which a size has
_APART = 3.0  # ratio of the largest to the smallest launch from which these are told apart
_FARTHEST = 100.0  # times as fast or as slow as predicted: more is another model, device or unit
_FEW = 5  # requests from which their spread means something
_WIDTH80 = 2 * 1.2816  # the middle 80 % of a normal, in standard deviations


@dataclass(frozen=True, slots=True)
class Part:
    """Seconds of the run that one cause took, really and as predicted."""

    group: str
    name: str
    real: float
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted - self.real


@dataclass(frozen=True, slots=True)
class Attribution:
    """parts: largest error first.  counts: (real, predicted) of what the two schedulers did.  metrics: name ->
    (real, predicted).  same: share of the run's steps that the bound replay planned as the engine did."""

    real: float
    predicted: float
    parts: tuple[Part, ...]
    counts: Mapping[str, tuple[float, float]]
    metrics: Mapping[str, tuple[float, float]]
    same: float
    notes: tuple[str, ...] = ()

    def groups(self) -> list[Part]:
        """The parts summed by group, in order of their error."""
        sums: dict[str, tuple[float, float]] = {}
        for part in self.parts:
            real, predicted = sums.get(part.group, (0.0, 0.0))
            sums[part.group] = real + part.real, predicted + part.predicted
        found = [Part(group, "", *pair) for group, pair in sums.items()]
        return sorted(found, key=lambda p: -abs(p.error))


def attribute(replayed: Replay) -> Attribution:
    """The error of `replayed`, by cause."""
    real, predicted = replayed.real, replayed.predicted
    durations = real.metrics["duration"], predicted.metrics["duration"]
    parts: list[Part] = []
    if replayed.steps:
        parts += _op_parts(replayed)
        bound = math.fsum(s.predicted.seconds for s in replayed.steps)
        free = math.fsum(s.seconds for s in predicted.steps)
        parts.append(Part(PLANS, "", 0.0, free - bound))
        # what neither duration holds: the loop after the last step, and time between records of a step
        rest_real = durations[0] - math.fsum(p.real for p in parts)
        rest = durations[1] - math.fsum(p.predicted for p in parts)
        parts.append(Part(WAITING, "", rest_real, rest))
    parts.sort(key=lambda p: -abs(p.error))
    return Attribution(
        *durations, tuple(parts), _counts(real, predicted), _metrics(real, predicted),
        sum(s.same for s in replayed.steps) / len(replayed.steps) if replayed.steps else 0.0, replayed.notes,
    )  # fmt: skip


def _op_parts(replayed: Replay) -> list[Part]:
    sums: dict[tuple[str, str], list[float]] = {}

    def add(group: str, name: str, real: float, predicted: float) -> None:
        pair = sums.setdefault((group, name), [0.0, 0.0])
        pair[0] += real
        pair[1] += predicted

    for step in replayed.steps:
        if not step.same:
            add(UNLIKE, "", step.real.seconds + step.gap, step.predicted.seconds)
        elif not step.real.ops:
            add(STEPS, "", step.real.seconds + step.gap, step.predicted.seconds)
        else:
            for name, (real, predicted) in _of_step(step).items():
                add(_CLASSES.get(replayed.kinds.get(name, ""), OTHER), name, real, predicted)
    return [Part(group, name, *pair) for (group, name), pair in sums.items()]


def _of_step(step: PricedStep) -> dict[str, tuple[float, float]]:
    """Op name -> (real, predicted) seconds; the loop between steps counts as host, and so does what no op claims."""
    real = dict(step.real.ops)
    claimed = math.fsum(s for name, s in real.items() if name != "host")
    real["host"] = step.real.seconds - claimed + step.gap
    ours = step.predicted.ops
    return {name: (real.get(name, 0.0), ours.get(name, 0.0)) for name in {**real, **ours}}


def _counts(real: RunRecord, predicted: RunRecord) -> dict[str, tuple[float, float]]:
    if not real.steps:
        return {}

    def mean(record: RunRecord, what: Callable[..., float]) -> float:
        return math.fsum(what(s) for s in record.steps) / max(1, len(record.steps))

    def pair(what: Callable[..., float]) -> tuple[float, float]:
        return mean(real, what), mean(predicted, what)

    return {
        "steps": (len(real.steps), len(predicted.steps)),
        "rows per step": pair(lambda s: s.num_rows),
        "tokens per step": pair(lambda s: s.num_tokens),
        "preemptions": (real.metrics["num_preemptions"], predicted.metrics["num_preemptions"]),
        "most KV blocks held": (
            max(s.held_blocks for s in real.steps),
            max((s.held_blocks for s in predicted.steps), default=0),
        ),
    }


def _metrics(real: RunRecord, predicted: RunRecord) -> dict[str, tuple[float, float]]:
    found: dict[str, tuple[float, float]] = {}
    for name in ("ttft", "tpot", "e2e"):
        times, others = (sorted(v for r in record.requests if (v := getattr(r, name)) is not None)
                        for record in (real, predicted))  # fmt: skip
        if times and others:
            found[f"{name}.mean"] = math.fsum(times) / len(times), math.fsum(others) / len(others)
            for q in (50, 95):
                found[f"{name}.p{q}"] = percentile(times, q), percentile(others, q)
    name = "output_throughput"
    ours, theirs = real.metrics.get(name), predicted.metrics.get(name)
    if ours and theirs and is_finite(ours) and is_finite(theirs):  # a stored infinite one is text
        found[name] = ours, theirs
    return found


# --- corrections ----------------------------------------------------------------------------------


def correction(replayed: Replay) -> Correction:
    """Factors that bring the predicted ops of the run to the real ones. Needs a record with steps."""
    steps = [s for s in replayed.steps if s.same]
    if not steps:
        raise ConfigError("RUN", replayed.real.id, "has no step that its twin plans alike", "replay another run")
    seen: dict[str, list[_Seen]] = {}
    for step in steps:
        for name, (real, predicted) in _named(step).items():
            seen.setdefault(name, []).append(_Seen(predicted / replayed.launches.get(name, 1), real, predicted))
    sums = {name: _sums(pairs) for name, pairs in seen.items()}
    total = math.fsum(real for real, _ in sums.values())
    if total <= 0:
        raise ConfigError("RUN", replayed.real.id, "has steps that took no time", "give another run")
    own = {name for name, (real, predicted) in sums.items() if predicted > 0 and real >= _SHARE * total}
    factors = {name: sums[name][0] / sums[name][1] for name in sorted(own)}
    rest = [pair for name, pair in sums.items() if name not in own]
    predicted = math.fsum(p for _, p in rest)
    if predicted > 0 and "*" not in factors:
        factors["*"] = min(10.0, max(0.1, math.fsum(r for r, _ in rest) / predicted))
    # a whole step, "*", is no launch of an op
    by_size = {name: sizes for name in sorted(own - {"*"}) if (sizes := _by_size(seen[name])) is not None}
    plain = _correction(replayed, factors, {}, by_size)
    return plain.model_copy(
        update={"spreads": {name: _spread(steps, name, plain, replayed.launches) for name in factors}}
    )


class _Seen(NamedTuple):
    """An op in a step: predicted seconds of one launch, real and predicted seconds of all of them."""

    launch: float
    real: float
    predicted: float


def _sums(seen: Sequence[_Seen]) -> tuple[float, float]:
    """(real, predicted) of all."""
    return math.fsum(s.real for s in seen), math.fsum(s.predicted for s in seen)


def _by_size(seen: Sequence[_Seen]) -> Sizes | None:
    """Small and large launches, cut in the middle of the logarithms; None where they are alike or one side is too little."""
    seen = [s for s in seen if s.launch > 0]
    smallest, largest = min(s.launch for s in seen), max(s.launch for s in seen)
    if largest < _APART * smallest:
        return None
    cut = math.sqrt(smallest * largest)
    total = _sums(seen)
    points = []
    for side in ([s for s in seen if s.launch < cut], [s for s in seen if s.launch >= cut]):
        real, predicted = _sums(side)
        if min(real / total[0], predicted / total[1]) < _SHARE:
            return None
        middle = math.exp(math.fsum(s.predicted * math.log(s.launch) for s in side) / predicted)
        points.append((middle, real / predicted))
    return points[0], points[1]


def fitted_correction(replayed: Replay, again: Callable[[DeviceSpec], Replay]) -> Correction:
    """One factor on all op times that brings the mean E2E latency to the real one, for a record without steps.

    again: the replay on another device.  Its interval is what single requests are off by with it.
    Raises ConfigError for a run that takes no time, or one so far from its twin that this is no matter of speed.
    """
    factor, current = 1.0, replayed
    for _ in range(6):
        real, predicted = attribute(current).metrics["e2e.mean"]
        if not real or not predicted or not 1 / _FARTHEST < (found := factor * real / predicted) < _FARTHEST:
            raise ConfigError(
                "RUN", replayed.real.id,
                f"has a mean latency of {real:.3g} s where its twin predicts {predicted / factor:.3g} s: no factor mends that",
                "see that its times are seconds, and give the model and the device that served it",
            )  # fmt: skip
        if abs(real / predicted - 1) < 0.002:
            break
        factor = found
        current = again(with_correction(replayed.device, _correction(replayed, {"*": factor}, {"*": 0.1})))
    ours = {r.request_id: r.e2e for r in current.predicted.requests}
    ratios = sorted(
        math.log(r.e2e / ours[r.request_id])  # type: ignore[operator]
        for r in replayed.real.requests
        if r.e2e and ours.get(r.request_id)
    )
    spread = (quantile(ratios, 0.9) - quantile(ratios, 0.1)) / _WIDTH80 if ratios else 0.0
    few = 0.1 if len(ratios) < _FEW else MIN_DRIFT
    return _correction(replayed, {"*": factor}, {"*": max(few, spread)})


def _named(step: PricedStep) -> dict[str, tuple[float, float]]:
    """As `_of_step`; a step without ops is one op "*"."""
    if step.real.ops:
        return _of_step(step)
    return {"*": (step.real.seconds + step.gap, step.predicted.seconds)}


def _spread(steps: Sequence[PricedStep], name: str, made: Correction, launches: Mapping[str, int]) -> float:
    """Relative standard deviation of real over corrected time between windows of the run."""
    size = max(1, len(steps) // _WINDOWS)
    ratios = []
    for begin in range(0, len(steps), size):
        real = predicted = 0.0
        for step in steps[begin : begin + size]:
            for op, (ours, theirs) in _named(step).items():
                if (op if op in made.factors else "*") == name:
                    real += ours
                    predicted += theirs * (made.factor(op, theirs / launches.get(op, 1)) or 1.0)
        if predicted > 0:
            ratios.append(real / predicted)
    ratios.sort()
    if len(ratios) < 3:
        return 0.1
    return min(0.5, max(MIN_DRIFT, (quantile(ratios, 0.9) - quantile(ratios, 0.1)) / _WIDTH80))


def _correction(
    replayed: Replay, factors: Mapping[str, float], spreads: Mapping[str, float],
    by_size: Mapping[str, Sizes] | None = None,
) -> Correction:  # fmt: skip
    return Correction(
        format=Format.of(replayed.model), model=replayed.model.name, factors=dict(factors), by_size=dict(by_size or {}),
        spreads=dict(spreads), source=f"run {replayed.real.id}", date=datetime.now(UTC).isoformat(timespec="seconds"),
    )  # fmt: skip


def with_correction(device: DeviceSpec, new: Correction) -> DeviceSpec:
    """`device` with `new` in place of an older correction of the same format and model."""
    known = calibration_of(device) or Calibration()
    kept = tuple(c for c in known.corrections if (c.format, c.model) != (new.format, new.model))
    calibration = known.model_copy(update={"corrections": (*kept, new)})
    return device.model_copy(update={"calibration": calibration.model_dump(mode="json")})


def without_corrections(device: DeviceSpec) -> DeviceSpec:
    """`device` as it was measured or described."""
    known = calibration_of(device)
    if known is None or not known.corrections:
        return device
    plain = known.model_copy(update={"corrections": ()})
    return device.model_copy(update={"calibration": plain.model_dump(mode="json")})


__all__ = [
    "Attribution", "Part", "attribute", "correction", "fitted_correction", "with_correction", "without_corrections",
]  # fmt: skip
