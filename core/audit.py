"""Everything that must hold of a Core between events, as a list of violations.

Tests call it after every event; it reads all state and changes none.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from twinfer.core.beam import audit_beams
from twinfer.core.plan import HOLE, FromStep
from twinfer.core.request import Sequence, Status

if TYPE_CHECKING:
    from twinfer.core.core import Core
    from twinfer.core.ledger import Ledger, Table


def _parked_with_table(core: Core, seq: Sequence) -> bool:
    return seq.status is Status.PARKED and (seq.id in core.ledger.tables or seq.host is not None)


def audit_core(core: Core) -> list[str]:
    wrong = list(audit_ledger(core.ledger, core.sequences.values()))
    wrong += core.host.audit(core.sequences.values())
    running = [s for s in core.running if s.status is Status.RUNNING]
    queued = [entry[2] for entry in core.waiting]
    if [(e[0], e[1]) for e in core.waiting] != sorted((e[0], e[1]) for e in core.waiting):
        wrong.append("the waiting queue is out of order")
    for seq in queued:
        if seq.status is not Status.WAITING:
            wrong.append(f"{seq.id}: queued but {seq.status.value}")
        if seq.id in core.ledger.tables or seq.computed or seq.inflight or seq.awaiting:
            wrong.append(f"{seq.id}: waiting but holds something")
    places: dict[str, int] = {}
    for seq in (*queued, *running):
        places[seq.id] = places.get(seq.id, 0) + 1
    steps: dict[str, list[int]] = {}
    fed: dict[str, int] = {}
    for step, plan in core.outstanding.items():
        for row in plan.rows:
            steps.setdefault(row.seq, []).append(step)
            fed[row.seq] = fed.get(row.seq, 0) + len(row.tokens)
    for seq in core.sequences.values():
        if seq.host is not None and (seq.status is not Status.WAITING or not 0 < seq.host.num_tokens <= seq.known):
            wrong.append(f"{seq.id}: {seq.status.value} with {seq.host.num_tokens} tokens in host memory")
        expected = 1 if seq.status in (Status.RUNNING, Status.WAITING) else 0
        if places.get(seq.id, 0) != expected:
            wrong.append(f"{seq.id}: {seq.status.value} but listed {places.get(seq.id, 0)} times")
        if seq.status is Status.RUNNING:
            if seq.inflight != fed.get(seq.id, 0):
                wrong.append(f"{seq.id}: inflight {seq.inflight}, outstanding rows feed {fed.get(seq.id, 0)}")
            if (seq.last_step is None) != (seq.id not in steps) or (
                seq.id in steps and seq.last_step != steps[seq.id][-1]
            ):
                wrong.append(f"{seq.id}: last_step {seq.last_step}, outstanding rows in {steps.get(seq.id)}")
            if not set(seq.awaiting) <= set(steps.get(seq.id, ())):
                wrong.append(f"{seq.id}: awaits {seq.awaiting}, outstanding rows in {steps.get(seq.id)}")
            if seq.id not in core.ledger.tables:
                wrong.append(f"{seq.id}: running without a block table")
        drafted = len(seq.drafts) if seq.inflight else 0
        if seq.computed + seq.inflight > seq.known + len(seq.awaiting) + drafted:
            wrong.append(f"{seq.id}: fed {seq.computed + seq.inflight} of {seq.known + len(seq.awaiting)} tokens")
        if seq.known > seq.limit:
            wrong.append(f"{seq.id}: {seq.known} tokens, limit {seq.limit}")
        if (seq.status in (Status.LOADING,)) != (
            core.transfers.get(seq.id) == "load" and seq.status is not Status.DONE
        ):
            wrong.append(f"{seq.id}: {seq.status.value} but transfer {core.transfers.get(seq.id)}")
    alive = {s.id for samples in core.requests.values() for s in samples}
    for seq in core.sequences.values():
        if (seq.id in alive) != (seq.status in (Status.RUNNING, Status.WAITING, Status.LOADING, Status.PARKED)):
            wrong.append(f"{seq.id}: {seq.status.value} but request alive is {seq.id in alive}")
    for samples in core.requests.values():
        if samples[0].beams is not None:
            wrong += audit_beams(samples[0].beams)
            wrong += [f"{s.id}: parked with a table" for s in samples if _parked_with_table(core, s)]
    for seq_id in core.transfers:
        if seq_id not in core.sequences:
            wrong.append(f"{seq_id}: a transfer without a sequence")
    for step in core.ledger.pool.in_flight:
        if step not in core.outstanding:
            wrong.append(f"blocks are kept for step {step}, which is not outstanding")
    for plan in core.outstanding.values():
        if len(plan.rows) > core.limits.max_rows:
            wrong.append(f"step {plan.step}: {len(plan.rows)} rows, cap {core.limits.max_rows}")
        if core.limits.num_stages > 1 and any(isinstance(t, FromStep) for row in plan.rows for t in row.tokens):
            wrong.append(f"step {plan.step}: feeds a token that is in another stage")
        if plan.num_tokens > core.limits.max_num_batched_tokens:
            wrong.append(f"step {plan.step}: {plan.num_tokens} tokens, budget {core.limits.max_num_batched_tokens}")
    if not core.has_work:
        pool = core.ledger.pool
        if pool.held or core.ledger.tables:
            wrong.append(f"idle, but {pool.held} blocks are held")
        if len(core.host.free) != core.host.num_blocks:
            wrong.append("idle, but host blocks are held")
    return wrong


def audit_ledger(ledger: Ledger, sequences: Iterable[Sequence]) -> list[str]:
    """Violated invariants of block tables and of the pool behind them."""
    for chain in list(ledger.pool.chains.values()):
        ledger.pool.unfold(chain)
    tables = ledger.tables.values()
    wrong = ledger.pool.audit(
        [[block for block in blocks if block != HOLE] for table in tables for blocks in table.groups],
        [table.node for table in tables],
    )
    by_id = {seq.id: seq for seq in sequences}
    for seq_id, table in ledger.tables.items():
        seq = by_id.get(seq_id)
        if seq is None:
            wrong.append(f"{seq_id}: holds blocks but does not live")
            continue
        granted = len(table.blocks) * ledger.block_size
        if seq.computed + seq.inflight > granted:
            wrong.append(f"{seq_id}: computed {seq.computed} + inflight {seq.inflight} > granted {granted}")
        if table.open > granted:
            wrong.append(f"{seq_id}: open to {table.open}, granted {granted}")
        for group, blocks in enumerate(table.groups):
            wrong += [f"{seq_id}: {problem}" for problem in _audit_group(ledger, seq, table, group, blocks)]
    return wrong


def _audit_group(ledger: Ledger, seq: Sequence, table: Table, group: int, blocks: list[int]) -> Iterable[str]:
    size, first = ledger.block_size, table.first[group]
    if len(blocks) != len(table.blocks):
        yield f"group {group} has {len(blocks)} entries, group 0 has {len(table.blocks)}"
    holes = [index for index, block in enumerate(blocks) if block == HOLE]
    if holes != list(range(first)):
        yield f"group {group} has holes at {holes}, should have {first} at the front"
    low = ledger.low(ledger.windows[group], seq.computed)
    if seq.computed and first != min(low, len(blocks)):
        yield f"group {group} begins at entry {first}, reads from {low} on"
    for index in range(first, len(blocks)):
        block = blocks[index]
        expected = min(size, max(0, seq.computed - index * size))
        if ledger.pool.refs[block] == 1 and ledger.pool.fill[block] < expected:
            yield f"block {index} of group {group} has {ledger.pool.fill[block]} slots, needs {expected}"
        is_open = seq.computed < (index + 1) * size and index * size < table.open
        if is_open and (ledger.pool.refs[block] > 1 or ledger.pool.node[block] is not None):
            yield f"block {index} of group {group} counts as open to writing, but others may read it"
