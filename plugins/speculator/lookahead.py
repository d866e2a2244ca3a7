"""The model itself guesses: beside the last token a step feeds a window of positions ahead, refined by Jacobi iteration, and
checks n-grams that earlier windows gave.

Of each sequence a step feeds (N - 1)(W + G) tokens, the last token among them: N - 1 levels of W positions, and G n-grams of
N - 1 guesses. Guesses of different n-grams are right independently of each other, as in the paper; then the chance that at least
i stay is 1 - (1 - a^i)^G, and a step yields N - sum over i of (1 - a^i)^G tokens on average.
Not counted: the copy of the KV of what was accepted, and the time until there are G n-grams that begin with the last token.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from pydantic import Field

from twinfer.core.speculation import AcceptedOptions, Chance, Speculator


class Lookahead(Speculator):
    name = "lookahead"
    summary = (
        "the model refines a window of positions ahead and checks n-grams of it: no drafter, many more rows a step"
    )
    reference = (
        "Fu et al.: Break the Sequential Dependency of LLM Inference Using Lookahead Decoding (arXiv:2402.02057)"
    )

    class Options(AcceptedOptions):
        window: int = Field(default=7, ge=1, le=64, description="W, positions ahead that are refined at once")
        ngram: int = Field(
            default=5, ge=1, le=16, description="N, length of an n-gram, the last token included; 1 is no speculation"
        )
        guesses: int = Field(default=7, ge=1, le=64, description="G, n-grams checked per step")
        alpha: Chance = Field(
            default=0.1,
            description="chance that a guess of one n-gram is right, those before it being right (0.1 with W = G = 7, N = 5 is the "
            "1.6 tokens a step of Vicuna-7B in Spec-Bench)",
        )

        @property
        def ahead(self) -> int:
            return self.ngram - 1

    options: Options

    @property
    def num_tokens(self) -> int:
        options = self.options
        return options.ahead * (options.window + options.guesses) - 1 if options.ahead else 0

    @property
    def drafting(self) -> tuple[int, ...]:
        return ()

    def stays(self, depth: int, checked: int | None = None) -> float:
        """Probability that at least `depth` guesses are right when the first `checked` tokens are fed (all of them)."""
        ahead, fed = self.options.ahead, self.num_tokens if checked is None else checked
        if depth > min(ahead, fed):
            return 0.0
        grams = max(1, min(self.options.guesses, fed // ahead))  # n-grams come before the window
        return 1 - (1 - math.prod(self.chance(d) for d in range(1, depth + 1))) ** grams

    @property
    def mean_tokens(self) -> float:
        return 1 + math.fsum(self.stays(depth) for depth in range(1, self.depth + 1))

    def accepted(self, checked: int, draw: Callable[[int], float]) -> int:
        right, likely = 0, 1.0
        while right < self.depth:
            more = self.stays(right + 1, checked)
            if not likely or draw(right) >= more / likely:
                break
            right, likely = right + 1, more
        return right
