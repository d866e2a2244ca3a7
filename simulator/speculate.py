"""Speculation in the simulator: which guesses are right, and what drafting adds to a step.

    step:  the model over its rows, guesses included (`StepTimer`)
         + what drafts, over the prompt tokens of the step's rows (where it keeps a KV cache)
         + `passes` passes of it over one token of each row that got a token

Invariants
* Whether a guess is right depends on its sequence's name and seed and its position alone, not on what runs beside it.
  No position is drawn twice: the position of a wrong guess is taken by the model's own token.
* The passes of a step are timed at their mean context; attention is linear in it.
* Work of the CPU for drafting is not counted; kernel launches are where op times have them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from zlib import crc32

from twinfer.core.plan import Need, Row, RowResult, StepPlan
from twinfer.core.seeds import draw, mix
from twinfer.core.speculation import Speculator
from twinfer.simulator.step_time import StepCost, StepTimer


@dataclass(frozen=True, slots=True)
class Speculation:
    """A speculator with at least one guess. timer: of what drafts, without the CPU's part; None where that is free."""

    speculator: Speculator
    timer: StepTimer | None

    def result(self, row: Row) -> RowResult:
        """What a row that needs tokens gave: made-up ones, and guesses for the next step."""
        first = row.stop - row.draft  # position of the first guess
        seed = mix(row.seed ^ crc32(row.seq.encode()))  # replicas number their sequences alike
        right = 0
        while right < row.draft and draw(seed, first + right) < self.speculator.chance(right + 1):
            right += 1
        return RowResult(tokens=(0,) * (right + 1), drafts=(0,) * self.speculator.num_tokens)

    def added(self, plan: StepPlan, results: Sequence[RowResult], cost: StepCost, with_ops: bool) -> StepCost:
        """`cost` of `plan` and of drafting for the step after it."""
        if self.timer is None:
            return cost
        ahead = (self.speculator.passes - 1) // 2  # tokens of its own that the middle pass has before it
        fed, drafting = [], []
        for row, result in zip(plan.rows, results, strict=True):
            known = len(row.tokens) - row.draft
            if self.speculator.reads_prompt and (known > 1 or row.need is Need.NONE):
                fed.append(row._replace(tokens=range(known), draft=0, need=Need.NONE))
            if result.drafts:
                start = row.start + known + len(result.tokens) - 1 + ahead
                drafting.append(row._replace(start=start, tokens=(0,), draft=0, need=Need.LAST))
        for rows, times in ((fed, 1), (drafting, self.speculator.passes)):
            if rows:
                more = self.timer.cost(StepPlan(plan.step, tuple(rows)), with_ops)
                ops = {f"draft_{name.removeprefix('draft_')}": s * times for name, s in more.ops.items() if s}
                both = {**cost.ops, **{name: cost.ops.get(name, 0.0) + s for name, s in ops.items()}}
                cost = replace(
                    cost, seconds=cost.seconds + more.seconds * times, sigma=cost.sigma + more.sigma * times, ops=both
                )
        return cost


__all__ = ["Speculation"]
