"""The executor of the simulator: it computes nothing and says how long computing would take.

Invariants
* One result per row, in row order; every row that needs a token gets token 0, so answers run to
  their `max_tokens` (workloads of the simulator ignore end-of-sequence).
* Candidates of a beam search are made up, but always the same: beams fork, end and copy blocks as real ones do.
* Errors of op times are fully correlated: their sigmas add up over the run (`relative_sigma`) and do not
  average away with the number of steps.
"""

from __future__ import annotations

import math

from twinfer.core.beam import num_candidates
from twinfer.core.errors import ConfigError
from twinfer.core.flock import Run, Stretch
from twinfer.core.plan import Need, Row, RowResult, StepPlan, StepResult
from twinfer.core.request import Request
from twinfer.simulator.recorded_passes import RecordedPasses
from twinfer.simulator.step_parts import DecodeCost, StepCost
from twinfer.simulator.step_time import StepTimer

_SAMPLED = RowResult(tokens=(0,))
_FED = RowResult()
_PLAIN = {need: _FED if need is Need.NONE else _SAMPLED for need in Need}


class CostExecutor:
    """`scale` multiplies every step (the slow and fast ends of a band). `ops`: whether results say what each op took."""

    passes: RecordedPasses | None = None
    """Set where the engine records its passes: then a step costs more while its shape is new."""

    def __init__(self, timer: StepTimer, scale: float = 1.0, ops: bool = True) -> None:
        self._timer = timer
        self._speculation = timer.speculation
        self._encoding = timer.encoding.fresh() if timer.encoding is not None else None
        self._scale = scale
        self._ops = ops
        self._seconds = 0.0
        self._sigma = 0.0
        self._beside = 0.0  # seconds that steps spent in all but their slowest stage
        self._runs = DecodeCost([], [])
        self._beams: dict[str, tuple[int, int]] = {}  # of a beam: its number, candidates of a row

    def admit(self, request: Request, seqs: tuple[tuple[str, int], ...]) -> None:
        if self._encoding is not None:
            self._encoding.admit(request, seqs)
        params = request.params
        drawn = range(1)
        if params.beam_width > 1:
            drawn = range(num_candidates(request))
            self._beams |= {seq: (index, len(drawn)) for seq, index in seqs}
        if not params.ignore_eos or params.stop or any(i in drawn for i in params.stop_token_ids):
            raise ConfigError(
                "ignore_eos", request.params.ignore_eos, "a prediction has no text that could stop a request",
                "simulate with ignore_eos=true, no stop strings, and the output length you expect",
            )  # fmt: skip

    def execute(self, plan: StepPlan) -> StepResult:
        return self.charge(plan, self._timer.cost(plan, self._ops))

    def charge(self, plan: StepPlan, cost: StepCost) -> StepResult:
        """What `plan` gives when it takes `cost`."""
        if self.passes is not None:
            cost = self.passes.added(plan, cost)
        if self._encoding is not None:
            cost = self._encoding.added(plan, cost, self._ops)
            self._encoding.forget(plan.forget)
        rows = self._rows(plan)
        if self._speculation is not None:
            cost = self._speculation.added(plan, rows, cost, self._ops)
        self._seconds += cost.seconds
        self._sigma += cost.sigma
        scale = self._scale
        stages = cost.stages
        if stages:
            self._beside += cost.seconds - max(stages)
            stages = tuple([s * scale for s in stages])
        ops = cost.ops if scale == 1 else {name: s * scale for name, s in cost.ops.items()}
        return StepResult(rows, cost.seconds * scale, cost.sigma, ops, stages)

    def _rows(self, plan: StepPlan) -> tuple[RowResult, ...]:
        """What each row gave; sequences that are gone are forgotten."""
        if self._beams:
            rows = tuple([self._candidates(row) if row.need is Need.BEAM else _PLAIN[row.need] for row in plan.rows])
            for seq in plan.forget:
                self._beams.pop(seq, None)
            return rows
        if self._speculation is not None:
            guess = self._speculation.result
            return tuple([_FED if row.need is Need.NONE else guess(row) for row in plan.rows])
        return tuple([_FED if row.need is Need.NONE else _SAMPLED for row in plan.rows])

    @property
    def serves_runs(self) -> bool:
        """Whether decoding gives one token a row, at a cost that follows from the mean context of the sequences alone."""
        return not self._timer.windows and self.passes is None and self._speculation is None

    def decode(self, run: Run) -> list[float]:
        """Seconds of each step of `run`; `took` says how many of them were taken."""
        for seq in run.forget if self._beams else ():
            self._beams.pop(seq, None)
        if self._encoding is not None:
            self._encoding.forget(run.forget)
        cost = self._timer.decode(run.count, run.keys, run.most)
        self._runs = cost
        scale = self._scale
        return cost.seconds if scale == 1 else [seconds * scale for seconds in cost.seconds]

    def took(self, first: int, last: int) -> None:
        """Steps `first` to `last` (exclusive) of the latest run have been taken."""
        self._seconds += math.fsum(self._runs.seconds[first:last])
        self._sigma += self._runs.sigma(last) - (self._runs.sigma(first) if first else 0.0)

    def results(self, stretch: Stretch) -> list[StepResult]:
        """The steps of `stretch` one by one, without rows."""
        scale = self._scale
        return [
            StepResult((), cost.seconds * scale, cost.sigma, {name: s * scale for name, s in cost.ops.items()})
            for cost in self._timer.decode_costs(stretch.count, stretch.keys, stretch.steps, self._ops)
        ]

    def _candidates(self, row: Row) -> RowResult:
        """Made-up continuations: each is e times as likely as the next, and beams overtake each other on the way."""
        index, count = self._beams[row.seq]
        shift = (row.stop * 31 + index * 17) % 7 / 7
        return RowResult(candidates=tuple((token, -0.5 - shift - token) for token in range(count)))

    def close(self) -> None:
        pass

    @property
    def seconds(self) -> float:
        """Seconds of all steps so far (before scaling)."""
        return self._seconds

    @property
    def busy(self) -> float:
        """Seconds that the slowest stage has worked (before scaling); without a pipeline, those of all steps."""
        return self._seconds - self._beside

    @property
    def sigma(self) -> float:
        """Standard deviations of all steps so far, added up."""
        return self._sigma

    @property
    def relative_sigma(self) -> float:
        """Standard deviation of the run's summed step time over that sum."""
        return self._sigma / self._seconds if self._seconds else 0.0
