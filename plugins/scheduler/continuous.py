"""Iteration-level scheduling: requests join and leave the batch at every step.

Running sequences come first (so decodes are never delayed by new prompts), then the waiting ones in
order; a long prompt is fed in chunks beside the decodes unless chunking is off. When memory is short
the least important, latest sequence is preempted and recomputed later.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, Self

from pydantic import Field, model_validator

from twinfer.core import technique
from twinfer.core.policy import Defer, Shortage, Steady, View, Want
from twinfer.core.request import Sequence
from twinfer.core.technique import Technique


class Continuous(Technique):
    name = "continuous"
    summary = "Iteration-level batching, chunked prefill mixed with decode, preemption by recompute"
    reference = "Orca (OSDI'22); chunked prefill: Sarathi-Serve (OSDI'24, arXiv:2403.02310)"

    class Options(technique.Options):
        chunked_prefill: bool = Field(True, description="cut prompts to the token budget; off feeds them whole")
        chunk_size: int | None = Field(
            None, ge=1, description="most prompt tokens of one request per step; None: what the budget leaves"
        )
        policy: Literal["fcfs", "priority"] = Field("fcfs", description="order of the queue")
        admission: Literal["grow", "whole"] = Field(
            "grow",
            description="grow: admit what fits now; whole: only what fits at its full length, so none is preempted",
        )
        gather_s: float = Field(
            0.0,
            ge=0,
            allow_inf_nan=False,
            description="s that new requests wait for more of them while others run; 0: they never wait",
        )
        gather_tokens: int = Field(
            0, ge=0, description="tokens of a step with which they stop waiting; 0: those of a full step"
        )

        @model_validator(mode="after")
        def _tokens_are_waited_for(self) -> Self:
            if self.gather_tokens and not self.gather_s:
                raise ValueError("gather_tokens has no effect while gather_s is 0; give gather_s, too, or leave it out")
            return self

    options: Options

    def order(self, seq: Sequence) -> tuple[object, ...]:
        return (seq.priority,) if self.options.policy == "priority" else ()

    def propose(self, view: View) -> Iterable[Want | Defer]:
        chunk = self.options.chunk_size if self.options.chunked_prefill else None
        partial = self.options.chunked_prefill
        most = chunk or view.limits.max_num_batched_tokens
        running: Iterable[Sequence] = view.running
        if self.options.policy == "priority":
            running = sorted(view.running, key=_rank)
        for seq in running:
            yield Want(seq, most if partial else seq.remaining, partial)
        if self.options.gather_s and self._gathers(view):
            return
        waiting = _fitting(view) if self.options.admission == "whole" else view.waiting
        for seq in waiting:
            yield Want(seq, most if partial else seq.known, partial)

    def _gathers(self, view: View) -> bool:
        """Whether those that wait go on waiting, so that prompts disturb less often those that run."""
        if not view.running or not view.num_waiting:
            return False
        budget = view.limits.max_num_batched_tokens
        enough = min(self.options.gather_tokens or budget, budget)
        tokens = sum(seq.remaining for seq in view.running)
        first = None
        for seq in view.waiting:
            first = seq.arrival if first is None else min(first, seq.arrival)
            if tokens + seq.known > budget:
                break
            tokens += seq.known
        return first is not None and tokens < enough and first + self.options.gather_s > view.now

    def victims(self, view: View, shortage: Shortage) -> Iterable[Sequence]:
        # Never preempts what ranks above the sequence in need: that sequence gives way itself.
        if self.options.policy == "priority":
            ranked = sorted(view.running, key=_rank, reverse=True)
            return [s for s in ranked if _rank(s) >= _rank(shortage.seq)]
        ranked = sorted(view.running, key=_age, reverse=True)
        return [s for s in ranked if s.number >= shortage.seq.number]

    def steady(self, view: View) -> Steady | None:
        if self.options.admission == "whole" or self.options.gather_s:  # who is admitted depends on all that run
            return None
        return Steady(rank=_rank) if self.options.policy == "priority" else Steady()


def _fitting(view: View) -> Iterable[Sequence]:
    """Waiting sequences whose full length fits beside the full lengths of all that run; alone, one may always try."""
    if not view.num_waiting:
        return
    size = view.block_size
    room = view.limits.num_blocks - sum(-(-seq.limit // size) for seq in view.running)
    alone = not view.running
    for seq in view.waiting:
        room -= -(-seq.limit // size)
        if room < 0 and not alone:
            return
        alone = False
        yield seq


def _rank(seq: Sequence) -> tuple[int, int]:
    return (seq.priority, seq.number)


def _age(seq: Sequence) -> int:
    return seq.number
