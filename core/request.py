"""A request as it was asked, and a sequence as it stands.

Invariants
* `Request` never changes after Submit.
* A `Sequence` is described by token counts alone; there are no phases:
      |<---- computed ---->|<-- inflight -->|<-- remaining -->|
      [ in the KV cache    | in a plan now  | known, not fed  ]
  and `awaiting` lists the outstanding steps that will return a sample.
* `computed + inflight <= known + len(awaiting)` always.
* Only `Core` writes to a `Sequence`; policies get it read-only by convention and by the audit.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from twinfer.core.params import SamplingParams
from twinfer.core.plan import Need
from twinfer.core.session import Follows
from twinfer.core.vision import Image

if TYPE_CHECKING:
    from twinfer.core.beam import BeamGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class KVSource:
    """KV computed elsewhere: `handle` is the transfer engine's name for it, `num_tokens` its length."""

    handle: str
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt to be continued.

    prompt: token ids; any integer sequence, also a `range` (the simulator's synthetic prompts).
    priority: lower runs earlier.  arrival: seconds on the driver's clock.
    cache_salt: requests share cached prefixes only within one salt.
    cache_prefix: False keeps this request's blocks out of the prefix cache (it still runs).
    kv_from: KV to load instead of computing it; kv_to: peer that takes the KV when it is done.
    images: those in `prompt`, in order.
    follows: a later turn of a session: `prompt` holds only its own tokens and `arrival` says nothing until the
    `Feeder` sends it.
    """

    id: str
    prompt: Seq[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0
    arrival: float = 0.0
    eos_token_ids: tuple[int, ...] = ()
    adapter: str = ""
    cache_salt: str = ""
    cache_prefix: bool = True
    kv_from: KVSource | None = None
    kv_to: str | None = None
    follows: Follows | None = None
    images: tuple[Image, ...] = ()

    @property
    def max_length(self) -> int:
        """Tokens of prompt and answer together at most, of a later turn with all that was said before."""
        history = 0 if self.follows is None else self.follows.history_tokens
        return history + len(self.prompt) + self.params.max_tokens


class Status(enum.Enum):
    """Where a sequence stands; stored, never inferred."""

    WAITING = "waiting"  # holds no blocks
    LOADING = "loading"  # holds blocks that a transfer is filling
    RUNNING = "running"  # holds blocks and a row
    PARKED = "parked"  # a beam without text: holds nothing
    SENDING = "sending"  # done, its blocks are being read by a peer
    DONE = "done"


class HostCopy(NamedTuple):
    """The first `num_tokens` tokens of a preempted sequence, in these host blocks: per cache group, with its holes."""

    blocks: tuple[tuple[int, ...], ...]
    num_tokens: int


class Sequence:
    """One sample of a request while it is alive."""

    __slots__ = (
        "admission",
        "awaiting",
        "beams",
        "computed",
        "drafts",
        "host",
        "id",
        "index",
        "inflight",
        "kv_load",
        "last_step",
        "leader",
        "limit",
        "need",
        "num_cached",
        "num_hit",
        "num_preemptions",
        "num_swaps",
        "number",
        "order",
        "output",
        "prompt",
        "prompt_len",
        "request",
        "seed",
        "status",
        "stop_ids",
    )  # fmt: skip

    def __init__(self, request: Request, index: int, number: int, seed: int, limit: int) -> None:
        self.id = request.id if index == 0 else f"{request.id}/{index}"
        self.request = request
        self.index = index
        self.number = number  # order of arrival, unique
        self.seed = seed
        self.status = Status.WAITING
        self.prompt = request.prompt
        self.prompt_len = len(request.prompt)
        self.output: list[int] = []
        self.computed = 0
        self.inflight = 0
        self.awaiting: list[int] = []  # outstanding steps that will each return a sample, oldest first
        self.drafts: tuple[int, ...] = ()
        self.limit = limit  # prompt plus output never exceeds this many tokens
        self.admission = 0  # order of its latest admission, the order in `Core.running`
        self.last_step: int | None = None  # newest outstanding step with a row of this sequence
        self.num_preemptions = 0
        self.num_swaps = 0  # preemptions that kept the KV in host memory
        self.beams: BeamGroup | None = None  # of a beam search
        self.need = Need.LAST if request.params.beam_width == 1 else Need.BEAM
        self.host: HostCopy | None = None  # KV kept there; only while waiting
        self.order: tuple[object, ...] = ()
        self.leader: Sequence | None = None  # sample 0 of the same request, for forks
        self.num_cached = 0  # tokens found in the prefix cache at the latest admission; its own, after a preemption
        self.num_hit: int | None = None  # at the first admission
        self.kv_load = request.kv_from
        params = request.params
        self.stop_ids = frozenset(params.stop_token_ids) | (
            frozenset() if params.ignore_eos else frozenset(request.eos_token_ids)
        )

    @property
    def known(self) -> int:
        """Tokens whose ids are known: prompt and committed output."""
        return self.prompt_len + len(self.output)

    @property
    def remaining(self) -> int:
        """Tokens that could be fed now (drafts not counted); the last allowed token is never fed."""
        known = self.prompt_len + len(self.output) + len(self.awaiting)
        if known >= self.limit:
            known = self.limit - 1
        return known - self.computed - self.inflight

    @property
    def priority(self) -> int:
        return self.request.priority

    @property
    def arrival(self) -> float:
        return self.request.arrival

    def tokens(self, start: int, stop: int) -> Seq[int]:
        """Known token ids of positions `start` to `stop` (exclusive)."""
        split = self.prompt_len
        if stop <= split:
            return self.prompt[start:stop]
        if start >= split:
            return self.output[start - split : stop - split]
        return [*self.prompt[start:split], *self.output[: stop - split]]

    def __repr__(self) -> str:
        return (
            f"Sequence({self.id} {self.status.value} prompt={self.prompt_len} out={len(self.output)} "
            f"computed={self.computed} inflight={self.inflight} awaiting={self.awaiting})"
        )
