"""Images in the simulator: which of them a step encodes, and what that adds to it.

    step:  the encoder over the images whose last token the step feeds, then the model over its rows

Invariants
* An image is encoded each time its tokens are computed: not when a prefix cache or another replica has all of them, again
  when a preempted sequence is computed anew.
* Encoding is not cut into parts, and nothing else runs beside it; the CPU's part (decoding and scaling pictures) is not
  counted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from twinfer.core.plan import StepPlan
from twinfer.core.request import Request
from twinfer.core.vision import Image
from twinfer.core.vision_ops import vision_ops
from twinfer.simulator.step_parts import StepCost

if TYPE_CHECKING:
    from twinfer.core.spec import ModelSpec
    from twinfer.simulator.op_time import OpTimeChain

_KEPT = 1 << 12  # steps whose images were timed


class Encoding:
    """The encoder of `model` on `tp` ranks of one device; its images are those that were admitted."""

    def __init__(self, model: ModelSpec, chain: OpTimeChain, tp: int) -> None:
        self._model, self._chain, self._tp = model, chain, tp
        self._known: dict[tuple[Image, ...], StepCost] = {}
        self._images: dict[str, tuple[Image, ...]] = {}

    def fresh(self) -> Encoding:
        """The same encoder for another engine: what has been timed is shared, its sequences are not."""
        other = Encoding(self._model, self._chain, self._tp)
        other._known = self._known
        return other

    def admit(self, request: Request, seqs: Sequence[tuple[str, int]]) -> None:
        if request.images:
            self._images |= {seq: request.images for seq, _ in seqs}

    def forget(self, seqs: Sequence[str]) -> None:
        for seq in seqs if self._images else ():
            self._images.pop(seq, None)

    def added(self, plan: StepPlan, cost: StepCost, with_ops: bool) -> StepCost:
        """`cost` of `plan` and of the images that it encodes."""
        found: list[Image] = []
        for row in plan.rows if self._images else ():
            images = self._images.get(row.seq)
            if images and row.start < images[-1].start + images[-1].tokens:
                found += [i for i in images if row.start < i.start + i.tokens <= row.stop]
        if not found:
            return cost
        more = self.cost(found)
        ops = {**cost.ops, **more.ops} if with_ops else cost.ops
        return replace(cost, seconds=cost.seconds + more.seconds, sigma=cost.sigma + more.sigma, ops=ops)

    def cost(self, images: Sequence[Image]) -> StepCost:
        """Seconds of encoding `images` at once."""
        key = tuple(sorted(image._replace(start=0) for image in images))
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= _KEPT:
                self._known.clear()
            ops: dict[str, float] = {}
            sigma = 0.0
            for op in vision_ops(self._model, key, self._tp):
                answer = self._chain.time(op)
                ops[op.name] = ops.get(op.name, 0.0) + answer.seconds * op.count
                sigma += answer.sigma * op.count
            known = self._known[key] = StepCost(math.fsum(ops.values()), sigma, ops)
        return known


def encoding_of(model: ModelSpec, requests: Sequence[Request], chain: OpTimeChain, tp: int) -> Encoding | None:
    """What encodes the images of `requests`; None where there are none."""
    return Encoding(model, chain, tp) if any(request.images for request in requests) else None


__all__ = ["Encoding", "encoding_of"]
