"""Conversations: which request follows which, and what a later turn begins with.

Invariants
* A turn's prompt is the prompt before it, the answer to that, and its own new tokens; nothing is copied, so that a
  long conversation costs its own length once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, overload

if TYPE_CHECKING:
    from twinfer.core.request import Request


@dataclass(frozen=True, slots=True)
class Follows:
    """The request is a later turn: due `think_s` seconds after `request_id` has ended.

    history_tokens: tokens of the session before this turn, if all answers have full length.
    """

    request_id: str
    think_s: float = 0.0
    history_tokens: int = 0


class History(Sequence[int]):
    """The tokens of several sequences, one after the other; slices are lists."""

    __slots__ = ("ends", "parts")
    parts: tuple[Sequence[int], ...]

    def __init__(self, *parts: Sequence[int]) -> None:
        flat: list[Sequence[int]] = []
        for part in parts:
            flat += part.parts if isinstance(part, History) else [part] if len(part) else []
        self.parts = tuple(flat)
        ends, end = [], 0
        for part in flat:
            end += len(part)
            ends.append(end)
        self.ends = tuple(ends)

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    @overload
    def __getitem__(self, key: int) -> int: ...
    @overload
    def __getitem__(self, key: slice) -> list[int]: ...
    def __getitem__(self, key: int | slice) -> int | list[int]:
        if isinstance(key, slice):
            start, stop, step = key.indices(len(self))
            if step != 1:
                return [self[i] for i in range(start, stop, step)]
            tokens: list[int] = []
            begin = 0
            for part, end in zip(self.parts, self.ends, strict=True):
                if start < end and stop > begin:
                    tokens.extend(part[max(0, start - begin) : min(len(part), stop - begin)])
                begin = end
            return tokens
        if key < 0:
            key += len(self)
        begin = 0
        for part, end in zip(self.parts, self.ends, strict=True):
            if begin <= key < end:
                return part[key - begin]
            begin = end
        raise IndexError(key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(other) == len(self) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


def whole_prompts(requests: Iterable[Request], answer: int = 0) -> dict[str, Sequence[int]]:
    """Request -> all tokens of its prompt, every answer before it made of the token `answer`, in full length."""
    found: dict[str, Sequence[int]] = {}
    outputs: dict[str, int] = {}
    for request in requests:
        prompt: Sequence[int] = request.prompt
        if request.follows is not None:
            before = request.follows.request_id
            prompt = History(found[before], (answer,) * outputs[before], prompt)
        found[request.id] = prompt
        outputs[request.id] = request.params.max_tokens
    return found


__all__ = ["Follows", "History", "whole_prompts"]
