"""The recorder of a trial: of requests it keeps their times, of steps the sums that an outcome is made of (`plan_tally.py`).

Invariants
* The outcome is the one of a full record: the same requests, the same sums; seconds may differ by rounding.
* Gaps between tokens are not kept: where a promise is about them, a full record is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from twinfer.core.plan import StepPlan, StepResult
from twinfer.core.recorder import Recorder
from twinfer.core.records import RunRecord, Spread, Tally
from twinfer.simulator.plan_tally import TrialTally

if TYPE_CHECKING:
    from twinfer.core.flock import Stretch


class TrialRecorder(Recorder):
    """Tells `sums` of the steps; the record has neither steps nor metrics."""

    def __init__(self, sums: TrialTally, *given: Any, **more: Any) -> None:
        super().__init__(*given, **{**more, "detail": "requests"})
        self._sums = sums
        self._tally = Tally()
        self._tally.gaps = _Unkept()

    def step(self, plan: StepPlan, result: StepResult, start: float, end: float) -> None:
        num_rows = tokens = decodes = context = 0
        if plan.decoding is not None:
            num_rows = tokens = decodes = plan.decoding.count
            context = plan.decoding.keys
        for row in plan.rows:
            fed = len(row.tokens)
            tokens += fed
            decodes += fed == 1
            context += row.start + fed
        self._sums.step(end - start, plan.stats, num_rows + len(plan.rows), decodes, tokens, context)

    def run(self, stretch: Stretch, times: Sequence[float], results: Sequence[StepResult] = ()) -> None:
        ends = [at for at, _ in stretch.stats[1:]] + [stretch.steps]
        for (at, stats), till in zip(stretch.stats, ends, strict=True):
            if at < till:
                taken = stretch.taken if till == stretch.steps else ()
                keys = stretch.keys + stretch.count * at
                self._sums.run(times[at : till + 1], stats, stretch.count, keys, taken)

    def finish(self, complete: bool = True) -> RunRecord:
        if self.before_finish is not None:
            self.before_finish()
        self.record.complete = complete
        return self.record


class _Unkept(Spread):
    def add(self, value: float, times: int) -> None:
        """Nobody asks for gaps."""


__all__ = ["TrialRecorder"]
