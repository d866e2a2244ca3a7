"""A scheduler for twinfer, in one file: the shortest waiting prompt is admitted first.

Short prompts see their first token sooner, at the expense of long ones. So that those do not wait for ever, a
request counts as `aging_tokens_per_s` tokens shorter for every second since its arrival:

    rank = prompt tokens - aging * (now - arrival)

Two requests age at the same pace, so their order never changes, and `prompt tokens + aging * arrival` gives the
same order without a clock.
"""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import Field

from twinfer import Options, Sequence, Technique, View, Want, hookimpl
from twinfer.core.policy import Shortage


class ShortestPromptFirst(Technique):
    name = "shortest-prompt-first"
    summary = "Admits the shortest waiting prompt first; waiting makes a request count as shorter"
    reference = "L. Schrage 1968, shortest remaining processing time first; aging against starvation"

    class Options(Options):
        aging_tokens_per_s: float = Field(
            100.0, ge=0, description="tokens by which a request counts as shorter per second of waiting; 0 for no aging"
        )

    options: Options

    def order(self, seq: Sequence) -> tuple[object, ...]:
        return (self._rank(seq),)

    def propose(self, view: View) -> Iterable[Want]:
        budget = view.limits.max_num_batched_tokens
        for seq in view.running:  # a sequence that has begun is never kept waiting by a new one
            yield Want(seq, budget)
        for seq in view.waiting:
            yield Want(seq, budget)

    def victims(self, view: View, shortage: Shortage) -> Iterable[Sequence]:
        """The longest prompt gives way, but never one that ranks before the sequence in need."""
        ranked = sorted(view.running, key=lambda seq: (self._rank(seq), seq.number), reverse=True)
        need = (self._rank(shortage.seq), shortage.seq.number)
        return [seq for seq in ranked if (self._rank(seq), seq.number) >= need]

    def _rank(self, seq: Sequence) -> float:
        return seq.prompt_len + self.options.aging_tokens_per_s * seq.arrival


@hookimpl
def register_scheduler(register):  # type: ignore[no-untyped-def]
    register(ShortestPromptFirst)
