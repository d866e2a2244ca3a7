"""How requests come in: which are turned away at once, and the queue of those that wait.

Invariants
* A request is refused only for what can never work, in words that name the number or field to change.
* The queue is read-only and lazy for schedulers; only the Core changes the list behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from twinfer.core.request import Request, Sequence

if TYPE_CHECKING:
    from twinfer.core.core import Core
    from twinfer.core.policy import Limits

WaitingEntry = tuple[tuple[object, ...], int, Sequence]


class Queue:
    """The waiting sequences in order, as a scheduler sees them: read-only and lazy.

    Iteration ends when `closed()` says that nothing more is admitted in this step: a long queue costs
    nothing then.
    """

    __slots__ = ("_closed", "_entries")

    def __init__(self, entries: list[WaitingEntry], closed: Callable[[], bool]) -> None:
        self._entries = entries
        self._closed = closed

    def __iter__(self) -> Iterator[Sequence]:
        for entry in self._entries:
            if self._closed():
                return
            seq = entry[2]
            if seq.beams is None or seq.id not in seq.beams.answers:  # else it waits for its fellow beams
                yield seq

    def __len__(self) -> int:
        return len(self._entries)


def more_room(limits: Limits) -> str:
    """What a request that is longer than `max_model_len` can do, beside becoming shorter."""
    if limits.max_context is None or limits.max_model_len < limits.max_context:
        return "raise max_model_len"
    return "take a model of longer context (in a trace, --too-long filter leaves such requests out)"


def why_refused(core: Core, request: Request) -> str:
    """Why `request` can never be served, naming what to change; empty when it can."""
    length = len(request.prompt)
    limits = core.limits
    if request.id in core.requests or request.id in core.sequences or request.id in core.late:
        return f"request id {request.id!r} is already in use; give each request its own id"
    for index in range(1, request.params.num_samples):
        if f"{request.id}/{index}" in core.sequences or f"{request.id}/{index}" in core.late:
            return f"request id {request.id!r} clashes with a sample of another request; choose another id"
    if request.params.beam_width > 1 and request.kv_to is not None:
        return "beam search has no single KV to hand to a peer; leave out kv_to or set beam_width to 1"
    if length == 0:
        return "the prompt is empty; give at least one token"
    if length + 1 > limits.max_model_len:
        return (
            f"the prompt has {length} tokens and needs room for one more, but max_model_len is "
            f"{limits.max_model_len}; shorten the prompt or {more_room(limits)}"
        )
    # The last token of a request is never stored, so one that asks for a single token needs no more room.
    limit = min(length + request.params.max_tokens, limits.max_model_len)
    need = core.ledger.least(min(length + 1, limit - 1))
    if need > limits.num_blocks:
        return (
            f"the prompt of {length} tokens needs {need} KV blocks of {core.ledger.block_size} tokens, but the "
            f"pool has {limits.num_blocks}; raise num_kv_blocks (or KV memory) or shorten the prompt"
        )
    return ""
