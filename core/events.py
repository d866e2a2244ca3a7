"""Everything that can happen to a Core, and everything it can say.

Invariants
* Values only: an event carries facts, never callbacks, clocks or tensors.
* Times are seconds on the driver's clock and never go backwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from twinfer.core.plan import StepResult
from twinfer.core.request import Request


@dataclass(frozen=True, slots=True)
class Submit:
    request: Request


@dataclass(frozen=True, slots=True)
class Abort:
    """The client went away; `request_id` that is unknown or finished is not an error (it is a race)."""

    request_id: str


@dataclass(frozen=True, slots=True)
class StepDone:
    step: int
    result: StepResult


@dataclass(frozen=True, slots=True)
class TransferDone:
    """A `Move` of an earlier plan has ended; its blocks may be used."""

    seq: str


@dataclass(frozen=True, slots=True)
class TransferFailed:
    """A `Move` did not succeed; a load falls back to computing, a send only gives its blocks back."""

    seq: str
    why: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed and nothing else happened."""


Event = Submit | Abort | StepDone | TransferDone | TransferFailed | Tick


class TokenDelta(NamedTuple):  # a tuple, because there is one for every token: the cheapest to make
    """New tokens of sample `index`; `logprobs` has one entry a token when they were asked for."""

    request_id: str
    index: int  # type: ignore[assignment]  # not tuple.index, which nobody asks of a delta
    tokens: tuple[int, ...]
    logprobs: tuple[Mapping[int, float], ...] = ()


class Decoded(TokenDelta):
    """The tokens of several steps in one delta, one a step: what a simulated core tells of steps taken as one."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """Sample `index` has ended.

    reason: stop | length | abort | capacity | error.  `detail` says what to change for the last two,
    and for `stop` which stop string or id ended it.  num_cached_tokens: found in the cache at the latest admission, after a
    preemption among them its own.  num_hit_tokens: of the prompt, at the first admission.  cumulative_logprob: of the
    tokens, for beam search.
    """

    request_id: str
    index: int
    reason: str
    detail: str = ""
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_swaps: int = 0
    cumulative_logprob: float | None = None
    num_hit_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Rejected:
    """The request was never accepted; `why` names the number or field to change."""

    request_id: str
    why: str


Output = TokenDelta | Finished | Rejected


@dataclass(frozen=True, slots=True)
class Idle:
    """Nothing to do before `until` (None: before the next event)."""

    until: float | None = None


@dataclass(frozen=True, slots=True)
class Blocked:
    """Work exists but waits for these outstanding steps and transfers."""

    steps: tuple[int, ...] = ()
    transfers: tuple[str, ...] = ()
