"""The ops of a replica that is laid over several devices: which rank, which stage, which rows.

    dp    rows are dealt over the groups; the group with the most tokens counts, all wait for it at the experts
    pp    each stage has its layers, and hands the hidden state on
    tp, cp, ep    within the ops of a rank (`layer_ops`, `ring_ops`, `expert_ops`)

A simulated run knows which rank and which stage has which rows, and asks for the ops of each: `own_ops`, `experts_of`,
`sent_ahead`. `ops_of_step` is the step of a replica with so many rows at its best, for bounds and for looking at: rows are
spread evenly over ranks, and in a pipeline over `pp` parts (long prompts are cut), one in each stage. It takes as long
as the slowest stage needs for all parts: while it works on one of them, the others work on the others, and the next
step follows without a gap. Or, where that is longer (fewer parts than stages, or one that is far larger), as long as the
largest part takes on its way through all stages.

Invariants
* `step_ops` of `Layout()` is the step of one device.
* Ops of all stages and of all groups add up to those of one device: FLOPs exactly, weights once per stage and group.
* Deterministic, and a function of the multiset of rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from twinfer.core.dtypes import dtype_bytes
from twinfer.core.layer_ops import Stage, ops_of_stage, stage_of
from twinfer.core.layout import Layout
from twinfer.core.spec import ModelSpec
from twinfer.core.work import MoEShape, Op, RowShape, StepShape

LEAST_CHUNK = 512  # tokens below which a prompt is not cut over micro-batches: weights would be read twice for nothing
_RIDGE = 300.0  # FLOP per byte at which today's devices are as busy computing as reading: to tell the slowest stage


def ops_of_step(model: ModelSpec, shape: StepShape, layout: Layout) -> list[Op]:
    """Ops of one step on the rank that counts, in the order of execution; see the module's docstring."""
    if layout.pp == 1:
        return _slowest_group(stage_of(model, layout, 0, model.num_layers), shape)
    stages = stages_of(model, layout)
    batches = micro_batches(shape, layout.pp)
    if not batches:
        return []
    full: list[Op] = []
    for batch, times in _counted(batches):
        found = max((_slowest_group(stage, batch) for stage in stages), key=_weight)
        full += [replace(op, count=op.count * times) for op in found] if times > 1 else found
    way = [op for stage in stages for op in _slowest_group(stage, batches[0])]
    return [*max(full, way, key=_weight), hand_over(model, batches[0], layout, layout.pp - 1)]


def ops_by_stage(model: ModelSpec, shape: StepShape, layout: Layout) -> list[list[Op]]:
    """Ops of all rows of `shape` in each pipeline stage, on its slowest group; all but the last stage hand over."""
    stages = stages_of(model, layout)
    found = [_slowest_group(stage, shape) for stage in stages]
    if shape.rows:
        for ops in found[:-1]:
            ops.append(hand_over(model, shape, layout, 1))
    return found


def hand_over(model: ModelSpec, shape: StepShape, layout: Layout, count: int) -> Op:
    """Sending the hidden state of the largest group's tokens to the next stage."""
    rows = max(deal(shape.rows, layout.dp), key=_size)
    return sent_ahead(model, sum(q for q, _ in rows), layout, count)


def sent_ahead(model: ModelSpec, tokens: int, layout: Layout, count: int) -> Op:
    """Sending the hidden state of `tokens` tokens of one data-parallel group to the next stage."""
    t = -(-tokens // layout.cp)
    size = t * model.hidden_size * dtype_bytes(model.dtype)
    return Op("hand_over", "comm", 0.0, size, size, model.dtype, count, (2 * layout.tp * layout.cp * layout.dp,), size)


def own_ops(stage: Stage, shape: StepShape, with_experts: bool) -> list[Op]:
    """Ops of `shape` on one rank of `stage`; without the routed experts where it shares them with other groups."""
    ops = ops_of_stage(stage, shape)
    return ops if with_experts else [op for op in ops if not _of_experts(op)]


def experts_of(stage: Stage, tokens: int, all_tokens: int) -> list[Op]:
    """Ops of the routed experts of `stage` for the `all_tokens` tokens of all groups, `tokens` of the fullest."""
    shape = StepShape((RowShape(tokens, tokens),), 0)
    return [op for op in ops_of_stage(stage, shape, all_tokens) if _of_experts(op)]


def _of_experts(op: Op) -> bool:
    return isinstance(op.of, MoEShape) or op.name in ("moe_gather", "moe_scatter")


def stages_of(model: ModelSpec, layout: Layout) -> list[Stage]:
    """Constants of the pipeline stages in their order; ConfigError when there are more stages than layers."""
    if layout.pp == 1:
        return [stage_of(model, layout, 0, model.num_layers)]
    return [stage_of(model, layout, part.start, part.stop) for part in layout.stages(model.num_layers)]


def deal(rows: Sequence[RowShape], groups: int) -> list[tuple[RowShape, ...]]:
    """Rows over `groups`, longest first to whom has the fewest tokens, then the fewest keys."""
    if groups == 1:
        return [tuple(rows)]
    held: list[list[RowShape]] = [[] for _ in range(groups)]
    load = [[0, 0] for _ in range(groups)]
    for row in sorted(rows, reverse=True):
        i = min(range(groups), key=load.__getitem__)
        held[i].append(row)
        load[i][0] += row[0]
        load[i][1] += row[1]
    return [tuple(part) for part in held]


def micro_batches(shape: StepShape, most: int) -> list[StepShape]:
    """At most `most` parts of a step with about equally many tokens each, largest first; none is empty."""
    tokens = shape.num_tokens
    chunk = max(LEAST_CHUNK, -(-tokens // most))
    pieces: list[RowShape] = []
    for queries, end in shape.rows:
        start = end - queries
        while start < end:
            stop = min(end, start + chunk)
            pieces.append(RowShape(stop - start, stop))
            start = stop
    parts = sorted((part for part in deal(pieces, most) if part), key=_size, reverse=True)
    n = len(parts)
    return [
        StepShape(part, -(-shape.num_logits // n), -(-shape.copied_slots // n), -(-shape.swapped_slots // n))
        for part in parts
    ]


def _slowest_group(stage: Stage, shape: StepShape) -> list[Op]:
    """Ops of the data-parallel group with the most tokens."""
    groups = stage.layout.dp
    if groups == 1:
        return ops_of_stage(stage, shape)
    return ops_of_stage(stage, largest_group(shape, groups), shape.num_tokens)


def largest_group(shape: StepShape, groups: int) -> StepShape:
    """The part of a step that the fullest of `groups` data-parallel groups gets."""
    rows = max(deal(shape.rows, groups), key=_size)
    logits = min(shape.num_logits, -(-shape.num_logits * len(rows) // max(1, len(shape.rows))))
    return StepShape(rows, logits, -(-shape.copied_slots // groups), -(-shape.swapped_slots // groups))


def _size(rows: Iterable[RowShape]) -> tuple[int, int]:
    tokens = keys = 0
    for queries, end in rows:
        tokens += queries
        keys += end
    return tokens, keys


def _counted(batches: Sequence[StepShape]) -> list[tuple[StepShape, int]]:
    """Equal micro-batches once, with how many there are."""
    found: dict[StepShape, int] = {}
    for batch in batches:
        key = replace(batch, rows=tuple(sorted(batch.rows)))
        found[key] = found.get(key, 0) + 1
    return list(found.items())


def _weight(ops: Sequence[Op]) -> float:
    """About how long ops take, in bytes."""
    return sum(max(op.bytes, op.flops / _RIDGE) * op.count for op in ops)


__all__ = [
    "deal", "experts_of", "hand_over", "largest_group", "micro_batches", "ops_by_stage", "ops_of_step", "own_ops", "sent_ahead",
    "stages_of",
]  # fmt: skip
