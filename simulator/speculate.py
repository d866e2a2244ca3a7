"""Speculation in the simulator: which guesses are right, and what drafting adds to a step.

    step:  the model over its rows, guesses included (`StepTimer`)
         + what drafts, over the prompt tokens of the step's rows (where it keeps a KV cache)
         + its passes over tokens of each row that got a token: one token a pass for a chain, all guesses of a depth for a tree

Invariants
* Whether a guess is right depends on its sequence's name and seed and its position alone, not on what runs beside it.
  No position is drawn twice: the position of a wrong guess is taken by the model's own token.
* Passes that are fed equally many tokens are timed at their mean context; attention is linear in it.
* Guesses of a tree are timed as if each saw all fed before it; it sees its ancestors only. KV of the accepted branch stays where
  it was written: moving it is not counted.
* Work of the CPU for drafting is not counted; kernel launches are where op times have them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from zlib import crc32

from twinfer.core.checked_speculator import CheckedSpeculator
from twinfer.core.plan import Need, Row, RowResult, StepPlan
from twinfer.core.seeds import draw, mix
from twinfer.simulator.op_time import OpTimeChain
from twinfer.simulator.step_parts import StepCost
from twinfer.simulator.step_time import StepTimer


@dataclass(frozen=True, slots=True)
class Pass:
    """Passes of what drafts that are fed equally many tokens of a sequence. ahead: fed before them, on average."""

    tokens: int
    times: int
    ahead: int


def passes_of(speculator: CheckedSpeculator) -> tuple[Pass, ...]:
    """The passes of one step, by how much they are fed."""
    widths = speculator.drafting
    before = [0, *itertools.accumulate(widths)]
    found = []
    for tokens in dict.fromkeys(widths):
        ahead = [before[i] for i, width in enumerate(widths) if width == tokens]
        found.append(Pass(tokens, len(ahead), sum(ahead) // len(ahead)))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Speculation:
    """A speculator with at least one guess. timer: of what drafts, without the CPU's part; None where that is free.

    chain: op times of what drafts.
    """

    speculator: CheckedSpeculator
    timer: StepTimer | None
    passes: tuple[Pass, ...] = ()
    chain: OpTimeChain | None = None

    @classmethod
    def of(
        cls, speculator: CheckedSpeculator, timer: StepTimer | None, chain: OpTimeChain | None = None
    ) -> Speculation:
        return cls(speculator, timer, passes_of(speculator), chain)

    def result(self, row: Row) -> RowResult:
        """What a row that needs tokens gave: made-up ones, and guesses for the next step."""
        right = 0
        if row.draft:
            first = row.stop - row.draft  # position of the first guess
            seed = mix(row.seed ^ crc32(row.seq.encode()))  # replicas number their sequences alike
            right = self.speculator.accepted(row.draft, lambda i: draw(seed, first + i))
        return RowResult(tokens=(0,) * (right + 1), drafts=(0,) * self.speculator.num_tokens)

    def added(self, plan: StepPlan, results: Sequence[RowResult], cost: StepCost, with_ops: bool) -> StepCost:
        """`cost` of `plan` and of drafting for the step after it."""
        if self.timer is None:
            return cost
        parts: list[tuple[list[Row], int]] = [([], 1), *(([], p.times) for p in self.passes)]
        for row, result in zip(plan.rows, results, strict=True):
            known = len(row.tokens) - row.draft
            if self.speculator.reads_prompt and (known > 1 or row.need is Need.NONE):
                parts[0][0].append(row._replace(tokens=range(known), draft=0, need=Need.NONE))
            if result.drafts:
                start = row.start + known + len(result.tokens) - 1
                for (rows, _), p in zip(parts[1:], self.passes, strict=True):
                    rows.append(row._replace(start=start + p.ahead, tokens=range(p.tokens), draft=0, need=Need.ALL))
        for rows, times in parts:
            if rows:
                more = self.timer.cost(StepPlan(plan.step, tuple(rows)), with_ops)
                ops = {f"draft_{name.removeprefix('draft_')}": s * times for name, s in more.ops.items() if s}
                both = {**cost.ops, **{name: cost.ops.get(name, 0.0) + s for name, s in ops.items()}}
                cost = replace(
                    cost, seconds=cost.seconds + more.seconds * times, sigma=cost.sigma + more.sigma * times, ops=both
                )
        return cost


def tokens_per_second(timer: StepTimer, batch: int, context: int, guess: bool) -> float:
    """Output tokens/s of `batch` sequences with `context` tokens of KV each, with guesses or without."""
    speculation = timer.speculation
    checked = speculation.speculator.num_tokens if guess and speculation is not None else 0
    need = Need.DRAFTS if checked else Need.LAST
    rows = tuple(Row(str(i), context - 1, range(1 + checked), checked, need, 0) for i in range(batch))
    plan = StepPlan(0, rows)
    cost = timer.cost(plan, False)
    if not checked or speculation is None:
        return batch / cost.seconds
    mean = speculation.speculator.mean_tokens
    right = RowResult(tokens=(0,) * round(mean), drafts=(0,) * checked)
    return batch * mean / speculation.added(plan, [right] * batch, cost, False).seconds


def break_even_batch(timer: StepTimer, context: int, most: int) -> int:
    """The largest batch of at most `most` with which guesses give more output tokens/s than none do; 0 where none does.

    Searched by doubling, then by halving between the last that pays and the next: with what is lost to the smallest batches
    (experts that guesses touch) it may be that smaller ones do not pay.
    """

    def pays(batch: int) -> bool:
        return tokens_per_second(timer, batch, context, True) > tokens_per_second(timer, batch, context, False)

    tried = [1 << i for i in range(most.bit_length()) if 1 << i < most] + [most]
    best = next((i for i in reversed(range(len(tried))) if pays(tried[i])), None)
    if best is None:
        return 0
    if best + 1 == len(tried):
        return tried[best]
    low, high = tried[best], tried[best + 1]
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if pays(middle) else (low, middle)
    return low


__all__ = ["Pass", "Speculation", "break_even_batch", "passes_of", "tokens_per_second"]
