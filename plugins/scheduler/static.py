"""Static batching, as servers did before Orca: a batch is formed, run to its last token, then the next.

A batch is what the queue holds when the machine is free, up to `batch_size`; its prompts are fed over
as many steps as the token budget needs, then all decode together. Finished sequences leave holes that
nobody fills: that is the cost this scheduler exists to show.
"""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import Field

from twinfer.core import technique
from twinfer.core.policy import Defer, Shortage, Steady, View, Want
from twinfer.core.request import Sequence
from twinfer.core.technique import Technique


class Static(Technique):
    name = "static"
    summary = "Waits for the whole batch: no request joins before the last one of the batch has ended"
    reference = "request-level batching as described in Orca (OSDI'22), section 2"

    class Options(technique.Options):
        batch_size: int = Field(16, ge=1, description="most sequences in a batch")
        max_wait_s: float = Field(
            0.0, ge=0, allow_inf_nan=False, description="wait this long after the first arrival for a full batch"
        )

    options: Options

    def order(self, seq: Sequence) -> tuple[object, ...]:
        return ()

    def propose(self, view: View) -> Iterable[Want | Defer]:
        size = min(self.options.batch_size, view.limits.max_num_seqs)
        budget = view.limits.max_num_batched_tokens
        # The batch is open until one of its sequences has decoded: then it has begun to run.
        is_open = all(len(seq.output) <= 1 for seq in view.running)
        if not view.running and view.num_waiting < size and self.options.max_wait_s:
            first = next(iter(view.waiting), None)
            if first is not None and first.arrival + self.options.max_wait_s > view.now:
                yield Defer(first.arrival + self.options.max_wait_s)
                return
        prompts = [seq for seq in view.running if seq.remaining > 1]  # also what is recomputed after a preemption
        for seq in prompts:
            yield Want(seq, budget)
        if is_open:
            room = size - len(view.running)
            for seq in view.waiting:
                if room <= 0:
                    break
                room -= 1
                yield Want(seq, budget)
        if not prompts:
            for seq in view.running:
                yield Want(seq, 1)

    def victims(self, view: View, shortage: Shortage) -> Iterable[Sequence]:
        ranked = sorted(view.running, key=lambda s: s.number, reverse=True)
        return [s for s in ranked if s.number >= shortage.seq.number]

    def steady(self, view: View) -> Steady | None:
        """A batch whose prompts are all in and that has begun to decode stays as it is to its end."""
        begun = any(len(seq.output) > 1 for seq in view.running)
        return Steady(closed=True) if begun and all(seq.remaining == 1 for seq in view.running) else None
