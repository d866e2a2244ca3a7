"""What became of guessed tokens over a run, counted as serving engines count it.

Invariants
* A draft is one sequence in one step that checked guesses; those of all its branches are drafted tokens.
* accepted + wasted = drafted; a step yields the accepted tokens and one more (mean acceptance length = 1 + accepted / drafts).
* Position i stayed in a draft when at least i guesses did: `position_i` falls with i, and their sum is accepted / drafts.
* Tokens that the model found right count as accepted, also where the answer ended before the last of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from twinfer.core.plan import Row, RowResult


class Guesses:
    """Counts; `lengths[n]` drafts had n right guesses."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.lengths: list[int] = []

    def note(self, rows: Sequence[Row], results: Sequence[RowResult]) -> None:
        """The rows of a step and what they gave."""
        for row, result in zip(rows, results, strict=False):  # the core has checked that there are as many
            if not row.draft or result.failure is not None:
                continue
            right = max(0, len(result.tokens) - 1)
            if right >= len(self.lengths):
                self.lengths += [0] * (right + 1 - len(self.lengths))
            self.lengths[right] += 1
            self.num_tokens += row.draft

    def merge(self, other: Guesses) -> None:
        """Those of another replica, too."""
        self.num_tokens += other.num_tokens
        self.lengths += [0] * (len(other.lengths) - len(self.lengths))
        for right, count in enumerate(other.lengths):
            self.lengths[right] += count

    def metrics(self) -> dict[str, Any] | None:
        """Numbers for a record; None when nothing was guessed."""
        drafts = sum(self.lengths)
        if not drafts:
            return None
        accepted = sum(right * count for right, count in enumerate(self.lengths))
        return {
            "num_drafts": drafts,
            "num_draft_tokens": self.num_tokens,
            "num_accepted_tokens": accepted,
            "num_wasted_tokens": self.num_tokens - accepted,
            "acceptance_rate": accepted / self.num_tokens,
            "mean_acceptance_length": 1 + accepted / drafts,
            **{f"position_{i}": sum(self.lengths[i:]) / drafts for i in range(1, len(self.lengths))},
        }


def in_words(metrics: Mapping[str, Any], most: int) -> dict[str, str]:
    """What a reader wants of the metrics "speculation" of a record. most: sequences that may run at once (`max_num_seqs`)."""
    stayed = [metrics[key] for key in (f"position_{i}" for i in range(1, len(metrics) + 1)) if key in metrics]
    found = {
        "tokens per step": f"{metrics['mean_acceptance_length']:.2f} (1 + right guesses), delivered in one ITL",
        "guessed tokens": (
            f"{metrics['num_draft_tokens']:,} checked, {metrics['num_accepted_tokens']:,} right "
            f"({metrics['acceptance_rate']:.1%}), {metrics['num_wasted_tokens']:,} wasted"
        ),
        "right at position 1, 2, ...": ", ".join(f"{share:.1%}" for share in stayed) or "none",
    }
    batch = metrics.get("break_even_batch")
    if batch is not None:
        found["pays"] = (
            "at no batch"
            if not batch
            else f"at every batch up to {most} (--max-num-seqs)"
            if batch >= most
            else f"up to a batch of {batch}"
        )
    return found


__all__ = ["Guesses", "in_words"]
