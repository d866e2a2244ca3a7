"""A speculator as the rest of twinfer asks it: what a plugin answers is looked at before anyone relies on it.

Invariants
* What it raises, or answers that cannot be used, is a PluginError that names it and what was asked.
* What it says of all steps alike (attributes and properties of `Speculator`) is asked once.
* Never more guesses are right than were checked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from twinfer.core.guard import Blaming, are_ops, is_amount, unusable, whole
from twinfer.core.spec import ModelSpec

if TYPE_CHECKING:
    from twinfer.core.layout import Layout
    from twinfer.core.speculation import Speculator
    from twinfer.core.work import Op, StepShape

MOST_GUESSES = 4096
"""Tokens guessed in a step: far beyond any use, and still a step that can be made."""
_COUNT = f"a whole number, 0 to {MOST_GUESSES}"


class CheckedSpeculator:
    """`own`, held to its contract. Names, units and errors are those of `Speculator`."""

    __slots__ = ("_own", "acceptance", "depth", "drafting", "mean_tokens", "num_tokens", "reads_prompt")

    def __init__(self, own: Speculator) -> None:
        self._own = own
        self.num_tokens: int = self._said("num_tokens", _is_count, _COUNT)
        self.depth: int = self._said("depth", _is_count, _COUNT)
        self.mean_tokens: float = self._said("mean_tokens", is_amount, "a number of tokens")
        widths = self._said(
            "drafting", _are_counts, f"the tokens that each pass is fed, whole numbers from 1 to {MOST_GUESSES}"
        )
        self.drafting: tuple[int, ...] = tuple(widths)
        self.reads_prompt: bool = self._said("reads_prompt", lambda answer: isinstance(answer, bool), "True or False")
        with self._blaming("acceptance"):
            self.acceptance = str(own.acceptance)

    def accepted(self, checked: int, draw: Callable[[int], float]) -> int:
        right = whole("speculator", self._own, "accepted", 0, checked, draw)
        if right > checked:
            raise unusable("speculator", self._own, "accepted", right, f"at most the {checked} that were checked")
        return right

    def drafter(self, model: ModelSpec) -> ModelSpec | None:
        with self._blaming("drafter"):
            found = self._own.drafter(model)
        if not isinstance(found, ModelSpec | None):
            raise unusable("speculator", self._own, "drafter", found, "a ModelSpec, or None where no model drafts")
        return found

    def draft_ops(self, model: ModelSpec, shape: StepShape, layout: Layout) -> Sequence[Op]:
        with self._blaming("draft_ops"):
            ops = self._own.draft_ops(model, shape, layout)
        if not are_ops(ops):
            raise unusable("speculator", self._own, "draft_ops", ops, "a list of Op")
        return ops

    def weight_bytes(self, model: ModelSpec, layout: Layout) -> float:
        return self._bytes("weight_bytes", model, layout)

    def kv_bytes_per_token(self, model: ModelSpec, layout: Layout) -> float:
        return self._bytes("kv_bytes_per_token", model, layout)

    def _bytes(self, method: str, model: ModelSpec, layout: Layout) -> float:
        with self._blaming(method):
            answer: float = getattr(self._own, method)(model, layout)
        if not is_amount(answer):
            raise unusable("speculator", self._own, method, answer, "a number of bytes, at least 0")
        return answer

    def _said(self, name: str, fits: Callable[[Any], bool], wanted: str) -> Any:
        """The answer to what is no method."""
        with self._blaming(name):
            answer = getattr(self._own, name)
        if not fits(answer):
            raise unusable("speculator", self._own, name, answer, wanted)
        return answer

    def _blaming(self, method: str) -> Blaming:
        return Blaming("speculator", self._own, method)


def _is_count(answer: object) -> bool:
    return type(answer) is int and 0 <= answer <= MOST_GUESSES


def _are_counts(answer: object) -> bool:
    return isinstance(answer, Sequence) and all(_is_count(count) and count >= 1 for count in answer)


__all__ = ["CheckedSpeculator"]
