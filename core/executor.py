"""What a driver needs of the thing that computes: torch, a remote worker, or the simulator's cost model.

Invariants
* `execute` returns one result per row, in row order; a row that could not be computed says so in
  `RowResult.failure`, it does not raise.
* An executor learns everything from plans and `admit`; it keeps no policy of its own.
"""

from __future__ import annotations

from typing import Protocol

from twinfer.core.plan import StepPlan, StepResult
from twinfer.core.request import Request


class Executor(Protocol):
    def admit(self, request: Request, seqs: tuple[tuple[str, int], ...]) -> None:
        """Called once per accepted request before any plan names its sequences: (sequence id, sample index)."""
        ...

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step: copies, then rows; sequences in `plan.forget` may be dropped first."""
        ...

    def close(self) -> None:
        """Free memory and workers; calling it twice is harmless."""
        ...
