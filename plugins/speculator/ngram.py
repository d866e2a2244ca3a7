"""Guesses copied from the text so far, after the last place where its end has stood before."""

from __future__ import annotations

from twinfer.core.speculation import Speculator


class NGram(Speculator):
    name = "ngram"
    summary = "guesses looked up in the sequence's own text: drafting costs nothing, checking does"
    reference = "Saxena: Prompt Lookup Decoding (2023); Yang et al.: Inference with Reference (arXiv:2304.04487)"
