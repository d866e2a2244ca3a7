"""Contracts of the two policies a Core is built from: the scheduler and the KV cache.

A policy proposes, the Core disposes. Policies are asked for an order of preference; budgets, blocks,
row caps, lengths and progress are enforced by the Core, so a policy can be unfair or slow but never
leak or corrupt.

Invariants
* A policy is a pure function of the view it is given: equal views give equal answers, in equal order.
  It must not keep state between calls, read a clock or draw random numbers.
* `Sequence` objects in a view are the Core's own: read them, never write them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from twinfer.core.request import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Numbers that the Core enforces whatever the policies say.

    max_num_seqs: rows in one step.  max_num_batched_tokens: tokens in one step.
    max_model_len: prompt plus output tokens of one sequence.  num_blocks: KV blocks in the pool.
    max_context: tokens that the model was made for, beyond which `max_model_len` cannot be raised; None where nobody says.
    max_outstanding: steps that may be launched before the first of them is done.
    num_stages: of the pipeline that steps go through one after the other. With several, a step feeds only tokens that are
        known (those of other stages are on their way), and takes no more than its share of `max_num_seqs` rows, so
        that there are rows for all stages.
    num_host_blocks: KV blocks in host memory, where preempted sequences are swapped to; 0: they are recomputed.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_model_len: int = 4096
    num_blocks: int = 1024
    max_outstanding: int = 1
    num_host_blocks: int = 0
    num_stages: int = 1
    max_context: int | None = None

    @property
    def max_rows(self) -> int:
        """Rows of one step at most."""
        return -(-self.max_num_seqs // self.num_stages)


class Want(NamedTuple):
    """Run `num_tokens` of `seq` in this step.

    The Core clips `num_tokens` to what is left of the sequence and of the budget. With
    `partial=False` the row is left out instead of being cut by the budget (no chunked prefill).
    """

    seq: Sequence
    num_tokens: int
    partial: bool = True


class Defer(NamedTuple):
    """Run nothing before `until` (seconds on the driver's clock) unless something arrives."""

    until: float


@dataclass(slots=True)
class View:
    """What a scheduler may look at.

    now: seconds on the driver's clock.
    running: sequences that hold a row, oldest admission first.
    waiting: sequences that hold nothing, in `Scheduler.order`; iterate lazily, it can be very long. It ends
        early once the core admits no more in this step. Beams that wait for their fellows have nothing `remaining`
        while they run, and are passed over here when they have lost their blocks.
    num_waiting: its length.
    free_blocks: blocks that can be handed out now (free and idle-cached).
    """

    now: float
    limits: Limits
    block_size: int
    running: Seq[Sequence]
    waiting: Iterable[Sequence]
    num_waiting: int
    free_blocks: int


class Shortage(NamedTuple):
    """`seq` needs `blocks` more blocks than can be handed out."""

    seq: Sequence
    blocks: int


class Steady(NamedTuple):
    """What a scheduler promises about sequences that decode (all of their tokens but the last are in KV).

    closed=False: each of them is fed its token in every step, as far as budget and blocks go; what is proposed for the
    others, running or waiting, is what would be proposed if those that decode were not there.
    closed=True: given only when all running sequences decode: until the last of them has ended, each is fed its token
    in every step and nobody is admitted.
    rank: rows of running sequences come in this order, then in that of their admission; None: in that of admission.
    """

    closed: bool = False
    rank: Callable[[Sequence], tuple[int, ...]] | None = None


@runtime_checkable
class Scheduler(Protocol):
    """Which sequences run in the next step, and which give way when memory is short."""

    def order(self, seq: Sequence) -> tuple[object, ...]:
        """Sort key of `seq` in the waiting queue; read once per enqueue. Ties go to the earlier arrival."""
        ...

    def propose(self, view: View) -> Iterable[Want | Defer]:
        """Wants in order of preference. Waiting sequences named here are admitted if they fit."""
        ...

    def victims(self, view: View, shortage: Shortage) -> Iterable[Sequence]:
        """Running sequences to preempt, first choice first; may include `shortage.seq` itself."""
        ...

    # steady(view) -> Steady | None, optional: a promise about sequences that decode, with which the simulator takes many
    # of their steps as one (`core/flock.py`). None or absent: it asks in every step. A class that overrides `propose`
    # must give its own `steady`, an inherited one is not believed.


class IdleOrder(Protocol):
    """Order in which idle cached blocks are given up; the Core adds and removes, the policy orders."""

    def add(self, block: int) -> None: ...
    def remove(self, block: int) -> None: ...
    def pop(self) -> int:
        """Remove and return the block to reuse first; called only when not empty."""
        ...

    def __len__(self) -> int: ...
    def __contains__(self, block: object) -> bool: ...


@runtime_checkable
class KVCache(Protocol):
    """How token slots are carved out of KV memory."""

    shares_prefixes: bool
    """Full committed blocks may be reused by other requests with the same prefix."""
    copies_on_write: bool
    """Samples of one prompt may share blocks and copy them when they diverge."""
    # frees_windows: bool = False, optional. True: layers with a sliding window form cache groups of their own, whose
    # blocks go back to the pool when no later token can read them; `reserve` must then ask for no more than it is
    # given. False or absent: all layers share one table that keeps every token.

    def block_size(self, limits: Limits) -> int:
        """Tokens per block; the smallest piece that can be given to a sequence."""
        ...

    def reserve(self, num_tokens: int, limits: Limits) -> int:
        """Tokens to back with blocks when `num_tokens` are to be stored; at least `num_tokens`."""
        ...

    def headroom(self, limits: Limits) -> int:
        """Blocks that admission leaves free for running sequences to grow into."""
        ...

    def idle_order(self) -> IdleOrder:
        """A fresh, empty container for one pool."""
        ...
