"""How long a step takes on a design, without a simulation: the model's pass, and what a speculator adds to it.

    plain         the model over the rows of the step
    speculating   each decoding row also feeds its guesses; passes of what drafts over tokens of each such row, and its pass
                  over the prompts where it keeps a KV cache of its own

Invariants
* Device time alone: what the host does may be hidden behind it, so nothing is faster.
* Without a speculator `tokens` is 1 and both ways are the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from twinfer.core.work import Op, RowShape, StepShape
from twinfer.simulator.op_time import OpTimeChain
from twinfer.simulator.run import World
from twinfer.simulator.speculate import Pass

OpsOf = Callable[[StepShape], Sequence[Op]]


@dataclass(frozen=True, slots=True)
class Steps:
    """guesses: per row and step.  tokens: that a decoding row gains in a step, on average; 1 + depth at most.

    draft_ops: what drafts over rows of one token; draft_chain: its op times.
    """

    ops_of: OpsOf
    chain: OpTimeChain
    guesses: int = 0
    tokens: float = 1.0
    depth: int = 0
    passes: tuple[Pass, ...] = ()
    reads_prompt: bool = False
    draft_ops: OpsOf | None = None
    draft_chain: OpTimeChain | None = None

    @property
    def plain(self) -> Steps:
        """The same without speculation."""
        return Steps(self.ops_of, self.chain) if self.guesses else self

    def on(self, chain: OpTimeChain) -> Steps:
        """The same steps with the op times of `chain`."""
        return replace(self, chain=chain, draft_chain=None if self.draft_chain is None else chain)

    def row(self, context: int) -> RowShape:
        """A decoding row."""
        return RowShape(1 + self.guesses, max(1 + self.guesses, context))

    def decodes(self, output: float) -> float:
        """Mean decode steps of an answer of `output` tokens."""
        return max(output - 1, 0.0) / self.tokens

    def seconds(self, shape: StepShape) -> float:
        own = ((self.chain, op) for op in self.ops_of(shape))
        return math.fsum(chain.time(op).seconds * op.count for chain, op in (*own, *self.drafting(shape)))

    def drafting(self, shape: StepShape) -> list[tuple[OpTimeChain, Op]]:
        """Ops of what drafts beside the step, with what knows their times; `Op.count` has how often they run."""
        if self.draft_ops is None or self.draft_chain is None:
            return []
        verified = [row for row in shape.rows if row.queries == 1 + self.guesses]
        prompts = tuple(row for row in shape.rows if row.queries != 1 + self.guesses)
        work = []
        for p in self.passes if verified else ():
            rows = tuple(RowShape(p.tokens, row.keys + p.ahead + p.tokens) for row in verified)
            work.append((StepShape(rows, p.tokens * len(rows)), p.times))
        if prompts and self.reads_prompt:
            work.append((StepShape(prompts, 0), 1))
        return [
            (self.draft_chain, replace(op, count=op.count * times))
            for drafted, times in work for op in self.draft_ops(drafted)
        ]  # fmt: skip


def steps_of(world: World) -> Steps:
    """The steps of `world`'s design."""
    found = world.timer.speculation
    if found is None:
        return Steps(world.ops_of, world.chain)
    speculator, model, layout = found.speculator, world.setup.model, world.setup.config.layout
    timer = found.timer
    return Steps(
        world.ops_of, world.chain, guesses=speculator.num_tokens, tokens=speculator.mean_tokens, 
        depth=speculator.depth, passes=found.passes,
        reads_prompt=speculator.reads_prompt,
        draft_ops=None if timer is None else lambda shape: speculator.draft_ops(model, shape, layout),
        draft_chain=found.chain,
    )  # fmt: skip


__all__ = ["Steps", "steps_of"]
