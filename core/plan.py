"""What one step does: the only thing that crosses from Core to an executor, and back.

    row:  request positions   start ............. start+len(tokens)
                              [known ... known][draft ... draft]      (draft = how many are guesses)

Invariants
* Rows keep the order in which they were granted; executors must not reorder results.
* An executor applies a plan in this order: `forget` (drop the sequence), `forks` (block table and token
  history become those of the parent), `swap_outs` (read device blocks into host blocks, before anything is
  written), `preempted` (empty its block table), `grants` (append to it), `copies` (copy the block, then put
  the copy into the table; no source is the target of an earlier one), `swap_ins` (write host blocks into
  device blocks), `moves`, `rows`. Nothing else changes a block table.
* Entries of a sliding-window group's table that no row can read any more may be holes: `HOLE` in grants of shared
  blocks and in moves, and silently stale in tables that executors keep. No row reads or writes them.
* A token still on the device is a `FromStep`, never a sentinel inside the ids.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from typing import Any, NamedTuple

HOLE = -1
"""Stands in a block table where there is no block: what lay there has left the group's attention window."""


class Need(enum.Enum):
    """Which positions of a row need logits."""

    NONE = "none"
    LAST = "last"
    DRAFTS = "drafts"  # the last known token and every draft: a verify step
    ALL = "all"
    BEAM = "beam"  # the last position: its best candidates instead of a token


class FromStep(NamedTuple):
    """The token that row `seq` of an outstanding `step` will sample."""

    step: int
    seq: str


Token = int | FromStep
Candidates = tuple[tuple[int, float], ...]


class Row(NamedTuple):
    """`tokens` of `seq` to be fed at positions `start...`; their KV goes into its block table."""

    seq: str
    start: int
    tokens: Sequence[Token]
    draft: int
    need: Need
    seed: int  # with the position this is the whole sampling key

    @property
    def stop(self) -> int:
        """Tokens in the KV cache once this row has run (drafts included)."""
        return self.start + len(self.tokens)


class Grant(NamedTuple):
    """Blocks appended to the table of `seq` in cache group `group`.

    `shared` of them (from the front) already hold committed KV. Any may be a `HOLE`.
    """

    seq: str
    group: int
    blocks: tuple[int, ...]
    shared: int = 0


class Copy(NamedTuple):
    """Copy-on-write: before the step, copy `source` to `target` and put it at entry `slot` of the table."""

    seq: str
    group: int
    slot: int
    source: int
    target: int


class Move(NamedTuple):
    """KV of `seq` to be read from (`kind` "load") or handed to (`kind` "send") `peer`.

    blocks: the tables of all cache groups, one group after the other, equally long, with holes.
    """

    seq: str
    kind: str
    peer: str
    blocks: tuple[int, ...]
    num_tokens: int


class Swap(NamedTuple):
    """KV of `seq` between device `blocks` and as many `host_blocks`, pair by pair; a whole block each."""

    seq: str
    group: int
    blocks: tuple[int, ...]
    host_blocks: tuple[int, ...]


class Fork(NamedTuple):
    """`seq` becomes a copy of `parent` as it stands before this step: the same blocks, the same tokens so far."""

    seq: str
    parent: str


class PlanStats(NamedTuple):
    """The Core's counts when the plan was made; blocks are those of the pool, whatever their cache group."""

    running: int
    waiting: int
    held_blocks: int
    idle_blocks: int
    total_blocks: int
    used_slots: int  # token slots of held blocks that hold committed KV
    block_size: int


class Decoding(NamedTuple):
    """Rows that a simulated plan leaves out because they all do the same: `count` sequences feed one token each.

    keys: their KV tokens once the step has run, all together.
    """

    count: int  # type: ignore[assignment]  # not tuple.count, which nobody asks of it
    keys: int


_NO_STATS = PlanStats(0, 0, 0, 0, 0, 0, 1)
_RARE = ("forks", "swap_outs", "swap_ins", "decoding")


@dataclass(frozen=True, slots=True)
class StepPlan:
    step: int
    rows: tuple[Row, ...]
    grants: tuple[Grant, ...] = ()
    copies: tuple[Copy, ...] = ()
    moves: tuple[Move, ...] = ()
    forget: tuple[str, ...] = ()
    preempted: tuple[str, ...] = ()
    stats: PlanStats = _NO_STATS
    extras: Mapping[str, Any] = field(default_factory=dict)
    forks: tuple[Fork, ...] = ()
    swap_outs: tuple[Swap, ...] = ()
    swap_ins: tuple[Swap, ...] = ()
    decoding: Decoding | None = None  # only in the simulator (`core/flock.py`)

    @property
    def num_tokens(self) -> int:
        return sum(len(row.tokens) for row in self.rows) + (self.decoding.count if self.decoding else 0)

    def to_json(self) -> str:
        """Canonical text: equal plans give equal bytes in every process; rare fields only when they say something."""
        fields = _plain(self)
        for name in _RARE:
            if not fields[name]:
                del fields[name]
        return json.dumps(fields, sort_keys=True, separators=(",", ":"))


@dataclass(frozen=True, slots=True)
class RowResult:
    """What a row gave.

    tokens: sampled ids; with drafts the accepted ones and one more; empty for `Need.NONE`.
    logprobs: per token, id -> log probability.
    stopped: the stop string that ended the text (`tokens` is already trimmed to it), else None.
    drafts: guesses for the next step.  candidates: for `Need.BEAM`, the likeliest tokens (id, log probability of
    the raw logits), best first, ties by id.  failure: why this row could not be computed, else None.
    """

    tokens: tuple[int, ...] = ()
    logprobs: tuple[Mapping[int, float], ...] = ()
    stopped: str | None = None
    drafts: tuple[int, ...] = ()
    failure: str | None = None
    candidates: Candidates = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """Results in row order.

    seconds: time the step took (measured or modelled); sigma: standard deviation of a modelled time;
    ops: seconds by op name when known.  stages: seconds in each stage of a pipeline that the step goes through, one after
    the other (`seconds` is their sum); empty where it has the whole engine for itself.
    """

    rows: tuple[RowResult, ...]
    seconds: float = 0.0
    sigma: float = 0.0
    ops: Mapping[str, float] = field(default_factory=dict)
    stages: tuple[float, ...] = ()


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, FromStep):
        return {"from_step": value.step, "seq": value.seq}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {k: _plain(v) for k, v in value._asdict().items()}
    if is_dataclass(value) and not isinstance(value, type):
        return {k: _plain(getattr(value, k)) for k in value.__dataclass_fields__}
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, range)):
        return [_plain(v) for v in value]
    return value


__all__ = [
    "HOLE", "Candidates", "Copy", "Decoding", "Fork", "FromStep", "Grant", "Move", "Need", "PlanStats", "Row", "RowResult", "StepPlan",
    "StepResult", "Swap", "Token",
]  # fmt: skip
