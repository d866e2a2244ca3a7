"""What guesses tokens ahead, so that one step of the model checks several (Leviathan et al., arXiv:2211.17192).

    draft k tokens -> one step feeds the last token and the k guesses -> the first n that are right, and one more, stay

A speculator says which tokens it guesses (a chain, or a tree of candidates), how likely each is right, and what guessing
costs. Slots of rejected guesses and the token budget of a step are the core's business; which guesses are right is drawn by the
simulator.

Invariants
* A guess counts only if its parent, the guess before it, was right; of several candidates for one position one at most is.
* Zero guesses is no speculation at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import BaseModel, Field, model_validator

from twinfer.core.acceptance import Acceptance, by_depth, measured
from twinfer.core.guess_tree import MOST_NODES, GuessTree, Node, chain, full, likeliest, parse
from twinfer.core.layout import Layout
from twinfer.core.technique import Needs, Options, Technique

if TYPE_CHECKING:
    from twinfer.core.spec import ModelSpec
    from twinfer.core.work import Op, StepShape

Chance = Annotated[float, Field(ge=0, le=1)]
Rank = Annotated[int, Field(ge=0, lt=MOST_NODES)]


class AcceptedOptions(Options):
    """How likely guesses are right: `alpha` at every depth, or `profile` depth by depth."""

    count: ClassVar[str] = "num_tokens"
    """The option that says how many tokens ahead of the last one guesses reach."""
    alpha: Chance = Field(default=0.7, description="chance that a guess is right, those before it being right")
    profile: tuple[Chance | tuple[Chance, ...], ...] | str = Field(
        default=(),
        description="that chance at depth 1, 2, ... instead of alpha (or at each, one for each rank); or a JSON file of a measurement",
    )

    @property
    def ahead(self) -> int:
        """How many tokens ahead of the last one guesses reach."""
        return int(getattr(self, self.count))

    @model_validator(mode="after")
    def _one_per_depth(self) -> AcceptedOptions:
        profile = self.profile
        if profile and not isinstance(profile, str):
            if len(profile) != self.ahead:
                raise ValueError(f"profile has {len(profile)} chances for {self.ahead} guessed tokens")
            by_depth(profile)
        return self


class TreeOptions(AcceptedOptions):
    """Guesses that may branch."""

    tree: Annotated[int, Field(ge=0, le=MOST_NODES)] | str | tuple[tuple[Rank, ...], ...] = Field(
        default=0,
        description="guesses that branch: candidates at each depth (4x2x1), guesses by their ranks (0 1 0.0 0.1), or how many "
        "in all, then the likeliest; 0 is a chain",
    )
    again: Chance = Field(
        default=0.16,
        description="chance that a further candidate is right when the better ones are wrong, where the profile does not say",
    )

    @model_validator(mode="after")
    def _tree_fits(self) -> TreeOptions:
        self.nodes(lambda depth, rank: 0.5**rank)
        return self

    def nodes(self, chance: Callable[[int, int], float]) -> tuple[Node, ...]:
        """The guesses of a step. Raises ValueError."""
        depth, tree = self.ahead, self.tree
        if isinstance(tree, int):
            if tree and tree < depth:
                raise ValueError(
                    f"a tree of {tree} guesses does not reach {depth} tokens ahead: give more, or a smaller {self.count}"
                )
            return likeliest(tree, depth, chance) if tree else chain(depth)
        given: tuple[Any, ...] = parse(tree) if isinstance(tree, str) else tree
        if given and isinstance(given[0], int):
            if len(given) > depth:
                raise ValueError(
                    f"the tree {tree} is {len(given)} deep, guesses reach {depth} tokens ahead: give {self.count}={len(given)}"
                )
            return full((*given, *(1,) * (depth - len(given))))
        deepest = max(map(len, given), default=0)
        if deepest != depth:
            raise ValueError(
                f"the tree is {deepest} deep, guesses reach {depth} tokens ahead: give {self.count}={deepest}"
            )
        return GuessTree(given, chance).nodes


class LengthOptions(Options):
    """How many guesses."""

    num_tokens: int = Field(default=4, ge=0, le=64, description="tokens guessed ahead per step; 0 is no speculation")


class GuessOptions(AcceptedOptions, LengthOptions):
    """A chain of guesses."""


class GuessTreeOptions(TreeOptions, LengthOptions):
    """Guesses that may branch, made one depth after the other."""


class Speculator(Technique):
    """Base of speculators. `drafting` and `reads_prompt` say how often the work of `draft_ops` is done in a step."""

    Options: ClassVar[type[BaseModel]] = GuessOptions
    options: Any
    reads_prompt: ClassVar[bool] = False
    """Whether what drafts keeps a KV cache of its own, and so is fed prompts as well."""

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self.acceptance = self._acceptance()
        nodes = self.options.nodes(self.chance) if isinstance(self.options, TreeOptions) else chain(self.options.ahead)
        self.tree = GuessTree(nodes, self.chance)

    @classmethod
    def why_not(cls, needs: Needs) -> list[str]:
        if needs.world == "engine":
            return ["the engine has no speculative decoding yet; the simulator can say what it would bring"]
        return []

    @property
    def num_tokens(self) -> int:
        """Guesses that a step checks of one sequence, those of all branches together."""
        return len(self.tree)

    @property
    def depth(self) -> int:
        """Most guesses that can be right in one step."""
        return self.tree.depth

    @property
    def drafting(self) -> tuple[int, ...]:
        """Tokens of each sequence that what drafts is fed, pass by pass: those that have guesses after them."""
        return self.tree.widths

    def chance(self, depth: int, rank: int = 0) -> float:
        """Probability that the guess of this rank at `depth` (from 1) is right when those before it are."""
        return self.acceptance.chance(depth, rank)

    @property
    def mean_tokens(self) -> float:
        """Expected tokens of a step in which all guesses are checked; (1 - a^(k+1)) / (1 - a) of a chain with one chance a."""
        return self.tree.mean_tokens()

    def accepted(self, checked: int, draw: Callable[[int], float]) -> int:
        """How many guesses are right when the first `checked` are checked; `draw(i)`: uniform, of the i-th token from 0."""
        return self.tree.accepted(checked, draw)

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

    def _acceptance(self) -> Acceptance:
        options, again = self.options, getattr(self.options, "again", 0.0)
        if isinstance(options.profile, str) and options.profile:
            return measured(options.profile, options.ahead, again)
        return by_depth(options.profile or (options.alpha,) * options.ahead, again)


__all__ = ["AcceptedOptions", "Chance", "GuessOptions", "GuessTreeOptions", "Speculator", "TreeOptions"]
