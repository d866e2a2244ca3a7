"""What letting a waiting sequence in would take: which of its tokens are in KV already, and the blocks it needs beside them.

    way_in(core, seq, ...) -> WayIn     a sample that shares the prompt of its leader (fork), a prefix hit, a load, or nothing

Invariants
* Asking changes nothing; the planner decides and does (`Planner._admit`).
* Beside others there must be room for a first step, or the sequence would be preempted at once; alone it may use the pool to
  its last slot. The last token of a sequence is never stored.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, NamedTuple

from twinfer.core.ledger import Hits
from twinfer.core.plan import Swap
from twinfer.core.request import Sequence, Status

if TYPE_CHECKING:
    from twinfer.core.core import Core


class WayIn(NamedTuple):
    """How a sequence would come in.

    leader: whose blocks of the prompt it shares, if it does.  hits: what the prefix cache has of it, None where it is not asked.
    tokens: in KV then.  need: blocks to take.  room: blocks that can be had.
    """

    leader: Sequence | None
    hits: Hits | None
    tokens: int
    need: int
    room: int

    @property
    def num_hits(self) -> int:
        """Blocks found in the prefix cache."""
        return 0 if self.hits is None else self.hits.length


def way_in(core: Core, seq: Sequence, swap_ins: Seq[Swap], others: bool) -> WayIn | None:
    """How `seq` would come in now; None while the prompt that it is about to share is not there yet.

    swap_ins: of the plan that is being made.  others: there are others in the batch.
    """
    ledger = core.ledger
    leader = seq.leader
    if leader is not None and (seq.output or seq.host is not None):
        leader = None  # with output of its own it shares no more than a hit
    if leader is not None:
        if leader.status is Status.RUNNING and leader.computed >= seq.known - 1:
            if any(swap.seq == leader.id for swap in swap_ins):
                return None  # copies come before swap-ins: next step
            if not ledger.can_fork(seq, leader):
                leader = None
        elif leader.num_preemptions == 0 and leader.status in (Status.WAITING, Status.RUNNING, Status.LOADING):
            return None  # its prompt is being computed: a gate, takes nothing
        else:
            leader = None  # it has ended or lost its KV
    stored = min(seq.known + others, seq.limit - 1)
    need = ledger.peak(stored) if others else ledger.least(stored)
    room = ledger.pool.available
    if leader is not None:
        tokens = seq.known - 1
        return WayIn(leader, None, tokens, need + ledger.copied(tokens) - ledger.read_at(tokens), room)
    hits, tokens = None, 0
    if seq.kv_load is None:
        hits = ledger.hits(seq)
        if hits.length:
            blocks, refs = hits.blocks, ledger.pool.refs
            need -= len(blocks)
            room -= sum([refs[block] == 0 for block in blocks])
            tokens = hits.length * ledger.block_size
    if seq.host is not None:
        tokens = max(tokens, seq.host.num_tokens)
    return WayIn(None, hits, tokens, need, room)


__all__ = ["WayIn", "way_in"]
