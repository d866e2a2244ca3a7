"""From timings to the tables of a calibration: non-negative fits of what was measured, by plain numpy.

Invariants
* Fits minimise relative errors, so that small steps count as much as large ones.
* No coefficient is negative: more work never takes less time.
* Fitted only on timings of single ops and of the loop, never on a whole run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from twinfer.core.measured import Measured, StepTiming
from twinfer.core.spec import ModelSpec
from twinfer.core.work import Op, step_ops
from twinfer.plugins.op_time.calibrated import (
    ATTENTION_TERMS,
    HOST_TERMS,
    Calibration,
    Fit,
    GemmTable,
    attention_features,
)

_LAUNCH_TERMS = ("launch", "byte")


def non_negative_fit(
    terms: Sequence[str], features: Sequence[Mapping[str, float]], seconds: Sequence[float]
) -> Fit:  # fmt: skip
    """Coefficients >= 0 that minimise the squared relative errors (coordinate descent; it is convex).

    `spread` is the root of the mean squared relative residual over the degrees of freedom.
    """
    target = np.asarray(seconds, dtype=float)
    table = np.array([[f[t] for t in terms] for f in features], dtype=float) / target[:, None]
    scale = np.maximum(np.abs(table).max(axis=0), 1e-300)
    table = table / scale
    gram, right = table.T @ table, table.T @ np.ones(len(target))
    x = np.zeros(len(terms))
    for _ in range(20_000):
        before = x.copy()
        for i in range(len(terms)):
            if gram[i, i] > 0:
                x[i] = max(0.0, x[i] + (right[i] - gram[i] @ x) / gram[i, i])
        if np.abs(x - before).max() <= 1e-10 * max(1.0, x.max()):
            break
    residual = table @ x - 1
    freedom = max(1, len(target) - int((x > 0).sum()))
    spread = float(np.sqrt((residual**2).sum() / freedom))
    return Fit(
        terms={t: float(v) for t, v in zip(terms, x / scale, strict=True)}, spread=spread, num_points=len(target)
    )  # fmt: skip


def fit(found: Measured, spec: ModelSpec) -> Calibration:
    """The calibration that `found` supports; `spec` is the measured model in the measured dtype."""
    ops_of = [({op.name: op for op in step_ops(spec, step.shape)}, step) for step in found.steps]
    return Calibration(
        models=(found.model,),
        gemm=(*_model_gemms(ops_of), *_grid_gemms(found)),
        attention={spec.dtype: _attention(ops_of)},
        elementwise=_elementwise(ops_of),
        copy_bandwidth=found.copy_bandwidth,
        host=_host(found),
        drift=found.drift,
        fingerprint=dict(found.fingerprint),
    )


OpsOfStep = tuple[Mapping[str, Op], StepTiming]


def _per_launch(ops: Mapping[str, Op], step: StepTiming, kind: str) -> list[tuple[Op, float, float]]:
    """(op, seconds of one launch, spread) of the ops of `kind` that were timed in `step`."""
    return [
        (op, step.ops[name].seconds / op.count, step.ops[name].spread)
        for name, op in ops.items()
        if op.kind == kind and name in step.ops and step.ops[name].seconds > 0
    ]


def _model_gemms(steps: Sequence[OpsOfStep]) -> list[GemmTable]:
    found: dict[tuple[str, int, int], dict[int, list[tuple[float, float]]]] = {}
    for ops, step in steps:
        for op, seconds, spread in _per_launch(ops, step, "gemm"):
            m, n, k = op.shape
            found.setdefault((op.dtype, n, k), {}).setdefault(m, []).append((seconds, spread))
    return [_gemm_table(dtype, n, k, by_m) for (dtype, n, k), by_m in sorted(found.items())]


def _grid_gemms(found: Measured) -> list[GemmTable]:
    by_shape: dict[tuple[int, int], dict[int, list[tuple[float, float]]]] = {}
    for g in found.gemms:
        by_shape.setdefault((g.n, g.k), {}).setdefault(g.m, []).append((g.timing.seconds, g.timing.spread))
    return [_gemm_table(found.dtype, n, k, by_m) for (n, k), by_m in sorted(by_shape.items())]


def _gemm_table(dtype: str, n: int, k: int, by_m: Mapping[int, Sequence[tuple[float, float]]]) -> GemmTable:
    """Lower quartile where several steps had the same m; a larger m is never faster than a smaller one."""
    ms = sorted(by_m)
    seconds, deviations = [], []
    for m in ms:
        times = sorted(t for t, _ in by_m[m])
        seconds.append(float(np.quantile(times, 0.25)))
        deviations.append(min(s for _, s in by_m[m]))
    for i in range(len(ms) - 2, -1, -1):
        seconds[i] = min(seconds[i], seconds[i + 1])  # what is slower than a larger product was disturbed
    return GemmTable(
        dtype=dtype, n=n, k=k, m=tuple(ms), seconds=tuple(seconds), spread=float(np.median(deviations))
    )  # fmt: skip


def _attention(steps: Sequence[OpsOfStep]) -> Fit:
    timed = [entry for ops, step in steps for entry in _per_launch(ops, step, "attention")]
    return robust_fit(ATTENTION_TERMS, [attention_features(op) for op, _, _ in timed], [s for _, s, _ in timed])


def _elementwise(steps: Sequence[OpsOfStep]) -> dict[str, Fit]:
    by_name: dict[str, list[tuple[float, float]]] = {}
    for ops, step in steps:
        for kind in ("elementwise", "gather"):
            for op, seconds, _ in _per_launch(ops, step, kind):
                by_name.setdefault(f"{op.dtype}/{op.name}", []).append((op.bytes, seconds))
    return {
        name: robust_fit(_LAUNCH_TERMS, [{"launch": 1.0, "byte": b} for b, _ in points], [s for _, s in points])
        for name, points in sorted(by_name.items())
    }


def _host(found: Measured) -> Fit:
    """Host seconds inside the executor, plus what the loop around it takes per step and per row."""
    features, seconds = [], []
    for step in found.steps:
        shape = step.shape
        values = (1.0, len(shape.rows), shape.num_tokens, shape.num_logits)
        features.append(dict(zip(HOST_TERMS, values, strict=True)))
        seconds.append(max(step.ops["host"].seconds, 1e-7))
    inside = robust_fit(("step", "row", "token"), features, seconds)
    terms = {**inside.terms, "logit": 0.0}
    if found.loops:
        around = non_negative_fit(
            ("step", "row"), [{"step": 1.0, "row": float(p.rows)} for p in found.loops],
            [p.timing.seconds for p in found.loops],
        )  # fmt: skip
        for name, value in around.terms.items():
            terms[name] += value
    return Fit(terms=terms, spread=inside.spread, num_points=inside.num_points)


def robust_fit(
    terms: Sequence[str], features: Sequence[Mapping[str, float]], seconds: Sequence[float]
) -> Fit:  # fmt: skip
    """`non_negative_fit` without points that others show to be disturbed: slower than the fit by more than
    four times the middle residual (and by 60 %, so that what the terms cannot express is kept). At most a quarter of the points is left out."""
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
