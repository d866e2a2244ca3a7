"""What the first steps of a shape cost an engine that records its passes (`core/runtime/replay.py`).

    first step of a shape     its kernels are called one by one
    second in a row           the pass is recorded
    from then on              repeated as one call: what op times were measured on

Invariants
* Decides as the engine does: by tokens, rows and logits of up to RECORDED tokens, the last MOST_SHAPES kept.
* A prompt's step that is small enough to be recorded pays for its calls by `host_features` already.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from twinfer.core.plan import StepPlan
from twinfer.core.request import Request
from twinfer.core.work import StepShape
from twinfer.plugins.op_time.calibrated import RECORDED
from twinfer.simulator.step_parts import StepCost

MOST_SHAPES = 16
Shape = tuple[int, int, int]


class RecordedPasses:
    """One engine's recordings. written, recorded: seconds that the first and the second step of a shape take longer."""

    def __init__(self, written: float, recorded: float, warm: Sequence[Shape] = ()) -> None:
        self._written, self._recorded = written, recorded
        self._known: dict[Shape, None] = dict.fromkeys(warm)
        self._last: Shape | None = None

    def added(self, plan: StepPlan, cost: StepCost) -> StepCost:
        """`cost` of `plan` with what recording adds to it, which is the host's."""
        seconds = self._extra(StepShape.of(plan)) if plan.rows else 0.0
        if not seconds:
            return cost
        ops = {**cost.ops, "host": cost.ops.get("host", 0.0) + seconds}
        return replace(cost, seconds=cost.seconds + seconds, ops=ops)

    def _extra(self, step: StepShape) -> float:
        shape = (step.num_tokens, len(step.rows), step.num_logits)
        if shape in self._known:
            return 0.0
        again, self._last = shape == self._last, shape
        if shape[0] > RECORDED:
            return 0.0
        if not again:
            return self._written if shape[0] == shape[1] else 0.0
        if len(self._known) == MOST_SHAPES:
            del self._known[next(iter(self._known))]
        self._known[shape] = None
        return self._recorded


def warm_shape(requests: Sequence[Request], max_num_seqs: int, most_tokens: int = 256) -> Shape:
    """The decode step that an engine has recorded before its clock starts (`core/runtime/run.py`, `warm_up`)."""
    rows = 0
    for request in requests[: min(4, max_num_seqs)]:
        if most_tokens < 1:
            break
        most_tokens -= min(len(request.prompt), most_tokens)
        rows += 1
    return rows, rows, rows


__all__ = ["MOST_SHAPES", "RecordedPasses", "warm_shape"]
