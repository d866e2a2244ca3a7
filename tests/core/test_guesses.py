"""Counts of guessed tokens, by hand."""

from __future__ import annotations

import pytest

from twinfer.core.guesses import Guesses, in_words
from twinfer.core.plan import Need, Row, RowResult


def row(draft: int) -> Row:
    return Row("a", 9, (0,) * (draft + 1), draft, Need.DRAFTS if draft else Need.LAST, 1)


def test_counts_are_those_of_the_rows() -> None:
    guesses = Guesses()
    assert guesses.metrics() is None
    rows = [row(4), row(4), row(2), row(0), row(4)]
    results = [RowResult((1,) * n) for n in (5, 1, 3, 1)] + [RowResult(failure="out of order")]
    guesses.note(rows[:2], results[:2])
    more = Guesses()
    more.note(rows[2:], results[2:])
    guesses.merge(more)
    found = guesses.metrics()
    assert found == {
        "num_drafts": 3, "num_draft_tokens": 10, "num_accepted_tokens": 6, "num_wasted_tokens": 4,
        "acceptance_rate": 0.6, "mean_acceptance_length": 3.0,
        "position_1": pytest.approx(2 / 3), "position_2": pytest.approx(2 / 3),
        "position_3": pytest.approx(1 / 3), "position_4": pytest.approx(1 / 3),
    }  # fmt: skip


def test_words() -> None:
    found = {
        "num_draft_tokens": 1000, "num_accepted_tokens": 600, "num_wasted_tokens": 400, "acceptance_rate": 0.6,
        "mean_acceptance_length": 3.4, "position_1": 0.8, "position_2": 0.6,
    }  # fmt: skip
    words = in_words(found, 64)
    assert words["guessed tokens"] == "1,000 checked, 600 right (60.0%), 400 wasted"
    assert words["right at position 1, 2, ..."] == "80.0%, 60.0%"
    assert "pays" not in words
    for batch, said in (
        (0, "at no batch"),
        (20, "up to a batch of 20"),
        (64, "at every batch up to 64 (--max-num-seqs)"),
    ):
        assert in_words({**found, "break_even_batch": batch}, 64)["pays"] == said
