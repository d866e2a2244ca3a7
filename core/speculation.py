"""What guesses tokens ahead, so that one step of the model checks several (Leviathan et al., arXiv:2211.17192).

    draft k tokens -> one step feeds the last token and the k guesses -> the first n that are right, and one more, stay

A speculator says how many tokens it guesses, how likely each is right, and what guessing costs. Slots of rejected guesses
and the token budget of a step are the core's business; which guesses are right is drawn by the simulator.

Invariants
* Guesses form a chain: the guess at depth d counts only if all before it were right.
* Zero guesses is no speculation at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import BaseModel, Field, model_validator

from twinfer.core.layout import Layout
from twinfer.core.technique import Needs, Options, Technique

if TYPE_CHECKING:
    from twinfer.core.spec import ModelSpec
    from twinfer.core.work import Op, StepShape

Chance = Annotated[float, Field(ge=0, le=1)]


class GuessOptions(Options):
    """How many guesses, and how likely they are right: `alpha` at every depth, or `profile` depth by depth."""

    num_tokens: int = Field(default=4, ge=0, le=64, description="tokens guessed per step; 0 is no speculation")
    alpha: Chance = Field(default=0.7, description="chance that a guess is right, those before it being right")
    profile: tuple[Chance, ...] = Field(default=(), description="that chance at depth 1, 2, ... instead of alpha")

    @model_validator(mode="after")
    def _one_per_depth(self) -> GuessOptions:
        if self.profile and len(self.profile) != self.num_tokens:
            raise ValueError(f"profile has {len(self.profile)} chances for {self.num_tokens} guessed tokens")
        return self


class Speculator(Technique):
    """Base of speculators. `passes` and `reads_prompt` say how often the work of `draft_ops` is done in a step."""

    Options: ClassVar[type[BaseModel]] = GuessOptions
    options: Any
    reads_prompt: ClassVar[bool] = False
    """Whether what drafts keeps a KV cache of its own, and so is fed prompts as well."""

    @classmethod
    def why_not(cls, needs: Needs) -> list[str]:
        if needs.world == "engine":
            return ["the engine has no speculative decoding yet; the simulator can say what it would bring"]
        return []

    @property
    def num_tokens(self) -> int:
        """Tokens guessed per step."""
        return int(self.options.num_tokens)

    @property
    def passes(self) -> int:
        """Passes of what drafts per step; each is fed one token of every sequence."""
        return self.num_tokens

    def chance(self, depth: int) -> float:
        """Probability that the guess at `depth` (from 1) is right when those before it are."""
        profile = self.options.profile
        return float(profile[depth - 1] if profile else self.options.alpha)

    @property
    def mean_tokens(self) -> float:
        """Expected tokens of a step in which all guesses are checked; (1 - a^(k+1)) / (1 - a) with one chance a."""
        total = likely = 1.0
        for depth in range(1, self.num_tokens + 1):
            likely *= self.chance(depth)
            total += likely
        return total

    def drafter(self, model: ModelSpec) -> ModelSpec | None:
        """The model that drafts for `model`; None where none does. Raises ConfigError when it cannot."""
        return None

    def draft_ops(self, model: ModelSpec, shape: StepShape, layout: Layout) -> Sequence[Op]:
        """Work on one rank of one pass over `shape`. model: the one that is drafted for."""
        return ()

    def weight_bytes(self, model: ModelSpec, layout: Layout) -> float:
        """Weights that a rank holds more than without speculation."""
        return 0.0

    def kv_bytes_per_token(self, model: ModelSpec, layout: Layout) -> float:
        """Bytes that a token takes on a rank in the KV cache of what drafts."""
        drafter = self.drafter(model) if self.reads_prompt else None
        return drafter.kv_bytes_per_token(tp=layout.tp) if drafter is not None else 0.0


__all__ = ["Chance", "GuessOptions", "Speculator"]
