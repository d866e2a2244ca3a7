"""Prompts before answers: a step feeds prompts or continues answers, never both.

    step:  prompts that wait, as many as fit | else | one token of every answer

A new prompt is fed at once, so first tokens come early; answers stand still meanwhile. Serving systems did this before
chunked prefill, and some still do by default.
"""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import Field

from twinfer.core import technique
from twinfer.core.policy import Defer, Shortage, View, Want
from twinfer.core.request import Sequence
from twinfer.core.technique import Technique


class PromptsFirst(Technique):
    name = "prompts-first"
    summary = "Steps of prompts alone, before any answer goes on; preemption by recompute"
    reference = "separate prefill and decode batches: Zheng et al., SGLang (arXiv:2312.07104)"

    class Options(technique.Options):
        chunked_prefill: bool = Field(True, description="cut prompts to the token budget; off feeds them whole")

    options: Options

    def order(self, seq: Sequence) -> tuple[object, ...]:
        return ()

    def propose(self, view: View) -> Iterable[Want | Defer]:
        partial = self.options.chunked_prefill
        fed = False
        for seq in (*(s for s in view.running if s.remaining > 1), *view.waiting):
            before = seq.inflight
            yield Want(seq, max(seq.remaining, 1) if partial else seq.known, partial)
            fed = fed or seq.inflight > before  # the core has given it a row
        if fed:
            return
        for seq in view.running:
            yield Want(seq, 1)

    def victims(self, view: View, shortage: Shortage) -> Iterable[Sequence]:
        return [
            s for s in sorted(view.running, key=lambda s: s.number, reverse=True) if s.number >= shortage.seq.number
        ]
