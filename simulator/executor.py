"""The executor of the simulator: it computes nothing and says how long computing would take.

Invariants
* One result per row, in row order; every row that needs a token gets token 0, so answers run to
  their `max_tokens` (workloads of the simulator ignore end-of-sequence).
* Errors of op times are fully correlated: their sigmas add up over the run (`relative_sigma`) and do not
  average away with the number of steps.
"""

from __future__ import annotations

from twinfer.core.errors import ConfigError
from twinfer.core.plan import Need, RowResult, StepPlan, StepResult
from twinfer.core.request import Request
from twinfer.simulator.step_time import StepTimer

_SAMPLED = RowResult(tokens=(0,))
_FED = RowResult()


class CostExecutor:
    """`scale` multiplies every step (the slow and fast ends of a band)."""

    def __init__(self, timer: StepTimer, scale: float = 1.0) -> None:
        self._timer = timer
        self._scale = scale
        self._seconds = 0.0
        self._sigma = 0.0

    def admit(self, request: Request, seqs: tuple[tuple[str, int], ...]) -> None:
        if not request.params.ignore_eos or request.params.stop or 0 in request.params.stop_token_ids:
            raise ConfigError(
                "ignore_eos", request.params.ignore_eos, "a prediction has no text that could stop a request",
                "simulate with ignore_eos=true, no stop strings, and the output length you expect",
            )  # fmt: skip

    def execute(self, plan: StepPlan) -> StepResult:
        cost = self._timer.cost(plan)
        self._seconds += cost.seconds
        self._sigma += cost.sigma
        rows = tuple([_FED if row.need is Need.NONE else _SAMPLED for row in plan.rows])
        scale = self._scale
        ops = cost.ops if scale == 1 else {name: s * scale for name, s in cost.ops.items()}
        return StepResult(rows, cost.seconds * scale, cost.sigma, ops)

    def close(self) -> None:
        pass

    @property
    def relative_sigma(self) -> float:
        """Standard deviation of the run's summed step time over that sum."""
        return self._sigma / self._seconds if self._seconds else 0.0
