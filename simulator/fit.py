"""From timings to the tables of one format: non-negative fits of what was measured, by plain numpy.

Invariants
* Fits minimise relative errors, so that small steps count as much as large ones.
* No coefficient is negative: more work never takes less time.
* Shapes come from single ops; short runs of the whole engine, kept apart from all of that, only set the level.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from twinfer.core.dtypes import dtype_bits
from twinfer.core.measured import Measured, StepTiming
from twinfer.core.spec import ModelSpec
from twinfer.core.work import Op, StepShape, step_ops
from twinfer.plugins.op_time.calibrated import (
    ATTENTION_TERMS,
    HOST_TERMS,
    RECORDED,
    Lookup,
    attention_features,
    dot,
    grouped_name,
    host_features,
)
from twinfer.plugins.op_time.calibration import Calibration, Curve, Fit, Format, GemmTable, Tables, rounded, weight_bits

OpsOf = Callable[[StepShape], Sequence[Op]]
OpsOfStep = tuple[Mapping[str, Sequence[Op]], StepTiming]
"""Ops of a timed step by name: a name may stand for several, as attention of layers with different windows."""

_LEVEL_RANGE = (0.67, 1.5)
"""Runs further than this from their steps are disturbed, not a level."""


def fit(found: Measured, spec: ModelSpec, ops_of: OpsOf | None = None) -> Tables:
    """The tables that `found` supports.

    spec: the measured model as its techniques leave it.  ops_of: the ops of a step on it (techniques applied).
    """
    ops_of = ops_of or (lambda shape: step_ops(spec, shape))
    steps: list[OpsOfStep] = []
    small: list[OpsOfStep] = []
    for step in found.steps:
        by_name: dict[str, list[Op]] = {}
        for op in ops_of(step.shape):
            by_name.setdefault(op.name, []).append(op)
        (small if found.records and _features(step.shape)["small"] else steps).append((by_name, step))
    usual = [entry for entry in steps if not _reads_far(entry[1].shape)]
    timed = {name for _, step in steps for name in step.ops}
    tables = Tables(
        format=Format.of(spec),
        quantizer=found.quantizer,
        model=found.model,
        gemm=(*_model_gemms(usual), *_grid_gemms(found, spec)),
        attention=_attention([*steps, *(entry for entry in small if _attends(entry[1]))]),
        curves=_curves(usual),
        inside=tuple(sorted({name for ops, _ in steps for name in ops} - timed)),
        around=_around(found),
        **_recording(found),
        drift=found.drift,
        jitter=found.jitter,
    )
    return tables.model_copy(update={"host": _host(steps, small, tables)})


def _recording(found: Measured) -> dict[str, float]:
    """What the first and the second step of a shape take longer than the later ones, which repeat a recording."""
    firsts = [(step.first, step.total.seconds) for step in found.steps if step.first is not None]
    if not found.records or not firsts:
        return {}
    more = [(first - usual, second - usual) for (first, second), usual in firsts]
    return {
        "written": max(0.0, float(np.median([a for a, _ in more]))),
        "recorded": max(0.0, float(np.median([b for _, b in more]))),
    }


def _reads_far(shape: StepShape) -> bool:
    """Whether a chunk reads a context far longer than itself: what comes after its attention finds cold caches."""
    return any(row.queries > 1 and row.keys > 3 * row.queries for row in shape.rows)


def levelled(tables: Tables, found: Measured, seconds_of: Callable[[StepShape], float]) -> tuple[Tables, list[float]]:
    """`tables` on the level of whole runs, and each run's time, at the usual pace, over its prediction before that.

    seconds_of: what a step takes by `tables`, the loop around it included.  Steps that are not from a recording, and would
    be in a longer run, are left out.
    """
    ratios = []
    for run in found.runs:
        real = predicted = 0.0
        seen: Counter[tuple[int, int]] = Counter()
        for step in run.steps:
            shape = (len(step.shape.rows), step.shape.num_tokens)
            seen[shape] += 1
            if shape[1] <= RECORDED and seen[shape] <= 2:
                continue  # not recorded yet, or just then: a longer run has few of them
            real += step.seconds + (step.gap or 0.0)
            predicted += seconds_of(step.shape)
        ratios.append(real / predicted / run.pace if predicted else 1.0)
    logs = [math.log(r) for r in ratios if _LEVEL_RANGE[0] < r < _LEVEL_RANGE[1]]
    if not logs:
        return tables, ratios
    middle = float(np.median(logs))
    spread = float(np.std(logs, ddof=1)) if len(logs) > 1 else 0.05
    return tables.model_copy(update={"level": math.exp(middle), "level_spread": spread}), ratios


# --- ops ------------------------------------------------------------------------------------------


def _launches(steps: Sequence[OpsOfStep], *kinds: str) -> list[tuple[Op, float, float]]:
    """(op, seconds of one launch, spread) of timed ops of `kinds`; ops of one name share its time by their work."""
    found = []
    for by_name, step in steps:
        for name, ops in by_name.items():
            timing = step.ops.get(name)
            if timing is None or timing.seconds <= 0:
                continue
            work = [op.count * (op.flops or op.bytes) for op in ops]
            found += [
                (op, timing.seconds * w / (sum(work) * op.count), timing.spread)
                for op, w in zip(ops, work, strict=True)
                if op.kind in kinds and w
            ]
    return found


def _model_gemms(steps: Sequence[OpsOfStep]) -> list[GemmTable]:
    found: dict[tuple[str, float, int, int], dict[int, list[tuple[float, float]]]] = {}
    for op, seconds, spread in _launches(steps, "gemm"):
        if len(op.shape) == 3:
            m, n, k = op.shape
            found.setdefault((op.dtype, weight_bits(op), n, k), {}).setdefault(m, []).append((seconds, spread))
    return [_gemm_table(*key, by_m) for key, by_m in sorted(found.items())]


def _grid_gemms(found: Measured, spec: ModelSpec) -> list[GemmTable]:
    """Products of the block linears' format in shapes that the model does not have."""
    bits = rounded(spec.weight_bits if spec.weight_bits is not None else dtype_bits(spec.dtype))
    by_shape: dict[tuple[int, int], dict[int, list[tuple[float, float]]]] = {}
    for g in found.gemms:
        by_shape.setdefault((g.n, g.k), {}).setdefault(g.m, []).append((g.timing.seconds, g.timing.spread))
    dtype = spec.linear_dtype or spec.dtype
    return [_gemm_table(dtype, bits, n, k, by_m) for (n, k), by_m in sorted(by_shape.items())]


def _gemm_table(
    dtype: str, bits: float, n: int, k: int, by_m: Mapping[int, Sequence[tuple[float, float]]]
) -> GemmTable:
    x, seconds, spread = _rising(by_m)
    return GemmTable(
        dtype=dtype, bits=bits, n=n, k=k, m=tuple(int(m) for m in x), seconds=tuple(seconds), spread=spread
    )  # fmt: skip


def _curves(steps: Sequence[OpsOfStep]) -> dict[str, Curve]:
    points: dict[str, dict[float, list[tuple[float, float]]]] = {}
    for op, seconds, spread in _launches(steps, "elementwise", "gather"):
        points.setdefault(op.name, {}).setdefault(op.bytes, []).append((seconds, spread))
    for op, seconds, spread in _launches(steps, "gemm"):
        if len(op.shape) > 3:
            points.setdefault(grouped_name(op), {}).setdefault(op.shape[0], []).append((seconds, spread))
    curves = {}
    for name, by_x in sorted(points.items()):
        x, seconds_of_x, spread = _rising(by_x)
        curves[name] = Curve(x=tuple(x), seconds=tuple(seconds_of_x), spread=spread)
    return curves


def _rising(by_x: Mapping[int, Sequence[tuple[float, float]]] | Mapping[float, Sequence[tuple[float, float]]]) -> tuple[
    list[float], list[float], float
]:  # fmt: skip
    """Sorted x, seconds that never fall with x, and the middle of the spreads.

    Seconds are the median where several steps had the same x. What was much slower than a larger x was disturbed and
    counts as that one; neighbours that fall a little are pooled (isotonic regression of logarithms).
    """
    xs = sorted(by_x)
    middles = [float(np.median([s for s, _ in by_x[x]])) for x in xs]  # type: ignore[index]
    for i in range(len(xs) - 2, -1, -1):
        if middles[i] > 1.3 * middles[i + 1]:
            middles[i] = middles[i + 1]
    pools: list[tuple[float, int]] = []  # (mean logarithm, points)
    for seconds in middles:
        pools.append((math.log(seconds), 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (a, m), (b, n) = pools[-2:]
            pools[-2:] = [((a * m + b * n) / (m + n), m + n)]
    rising = [math.exp(mean) for mean, count in pools for _ in range(count)]
    spread = float(np.median([min(s for _, s in by_x[x]) for x in xs]))  # type: ignore[index]
    return [float(x) for x in xs], rising, spread


def _attends(step: StepTiming) -> bool:
    """Whether a step reads so many keys that how its kernels are called hardly shows."""
    return max(row.keys for row in step.shape.rows) >= 200


def _attention(steps: Sequence[OpsOfStep]) -> Fit | None:
    features, seconds = [], []
    for by_name, step in steps:
        ops = [op for ops in by_name.values() for op in ops if op.kind == "attention"]
        timing = step.ops.get(ops[0].name) if ops else None
        if timing is None or timing.seconds <= 0:
            continue
        total = dict.fromkeys(ATTENTION_TERMS, 0.0)
        for op in ops:
            for name, value in attention_features(op).items():
                total[name] += op.count * value
        features.append(total)
        seconds.append(timing.seconds)
    return robust_fit(ATTENTION_TERMS, features, seconds) if features else None


# --- host -----------------------------------------------------------------------------------------


def _features(shape: StepShape) -> dict[str, float]:
    return host_features(len(shape.rows), shape.num_tokens, shape.num_logits)


def _host(steps: Sequence[OpsOfStep], small: Sequence[OpsOfStep], tables: Tables) -> Fit | None:
    """Seconds inside the executor that no op claims; for `small` steps, also what their ops do not explain by the tables."""
    timed = [(step.shape, step.ops["host"].seconds) for _, step in steps if "host" in step.ops]
    if not timed:
        return None
    terms = [term for term in HOST_TERMS if term != "small"]
    plain = robust_fit(terms, [_features(shape) for shape, _ in timed], [max(s, 1e-7) for _, s in timed])
    known = Lookup(Calibration(tables=(tables.model_copy(update={"host": plain}),)), tables.format)
    more = []
    for by_name, step in small:
        answers = [(known.time(op), op.count) for ops in by_name.values() for op in ops]
        claimed = math.fsum(answer.seconds * count for answer, count in answers if answer is not None)
        more.append(step.total.seconds - claimed - dot(plain.terms, _features(step.shape)))
    extra = max(0.0, float(np.median(more))) if more else 0.0
    return plain.model_copy(update={"terms": {**plain.terms, "small": extra}})


def _around(found: Measured) -> Fit | None:
    """Seconds between two steps: scheduling, recording, handing tokens out."""
    timed = [(s.shape, s.gap) for run in found.runs for s in run.steps if s.gap is not None and s.gap > 0]
    if not timed:
        return None
    return robust_fit(("step", "row", "token"), [_features(shape) for shape, _ in timed], [gap for _, gap in timed])


# --- fits -----------------------------------------------------------------------------------------


def non_negative_fit(
    terms: Sequence[str], features: Sequence[Mapping[str, float]], seconds: Sequence[float]
) -> Fit:  # fmt: skip
    """Coefficients >= 0 that minimise the squared relative errors.

    `spread` is the root of the mean squared relative residual over the degrees of freedom.
    """
    target = np.asarray(seconds, dtype=float)
    table = np.array([[f[t] for t in terms] for f in features], dtype=float) / target[:, None]
    scale = np.maximum(np.abs(table).max(axis=0), 1e-300)
    table = table / scale
    x = _non_negative(table, np.ones(len(target)))
    residual = table @ x - 1
    freedom = max(1, len(target) - int((x > 0).sum()))
    spread = float(np.sqrt((residual**2).sum() / freedom))
    return Fit(
        terms={t: float(v) for t, v in zip(terms, x / scale, strict=True)}, spread=spread, num_points=len(target)
    )  # fmt: skip


def _non_negative(table: NDArray[np.float64], target: NDArray[np.float64]) -> NDArray[np.float64]:
    """x >= 0 with the least |table x - target| (Lawson and Hanson: Solving Least Squares Problems, 1974, chapter 23)."""
    x = np.zeros(table.shape[1])
    used = np.zeros(table.shape[1], dtype=bool)
    for _ in range(4 * len(x)):
        gain = np.where(used, -np.inf, table.T @ (target - table @ x))
        if gain.max() <= 1e-10:
            break
        used[int(gain.argmax())] = True
        while True:
            trial = np.zeros(len(x))
            trial[used] = np.linalg.lstsq(table[:, used], target, rcond=None)[0]
            negative = used & (trial <= 0)
            if not negative.any():
                break
            x = x + float((x[negative] / (x[negative] - trial[negative])).min()) * (trial - x)
            used &= x > 1e-12
        x = trial
    return x


def robust_fit(
    terms: Sequence[str], features: Sequence[Mapping[str, float]], seconds: Sequence[float]
) -> Fit:  # fmt: skip
    """`non_negative_fit` without points that others show to be disturbed: slower than the fit by more than
    four times the middle residual (and by 60 %, so that what the terms cannot express is kept). At most a quarter of
    the points is left out."""
    kept = list(range(len(seconds)))
    result = non_negative_fit(terms, features, seconds)
    for _ in range(4):
        ratio = [seconds[i] / max(_value(result, features[i]), 1e-300) for i in kept]
        middle = float(np.median([abs(r - 1) for r in ratio]))
        worst = max(range(len(kept)), key=lambda j: ratio[j])
        if ratio[worst] < 1 + max(0.6, 4 * middle) or len(kept) <= max(len(terms) + 1, math.ceil(0.75 * len(seconds))):
            break
        bad = {j for j in range(len(kept)) if ratio[j] >= 1 + max(0.6, 4 * middle)}
        room = len(kept) - math.ceil(0.75 * len(seconds))
        drop = set(sorted(bad, key=lambda j: -ratio[j])[: max(1, min(len(bad), room))])
        kept = [i for j, i in enumerate(kept) if j not in drop]
        result = non_negative_fit(terms, [features[i] for i in kept], [seconds[i] for i in kept])
    return result


def _value(fitted: Fit, features: Mapping[str, float]) -> float:
    return sum(weight * features[name] for name, weight in fitted.terms.items())
