"""The shared language of real and predicted: what a step does, op by op.

`step_ops(model, shape, layout)` lists the ops of one forward pass. The simulator times these ops, the engine's
profiler measures the same names, and the comparison joins them on name.

Counting rules
* FLOPs: a multiply-add is 2. A linear of N weights over T tokens is 2*N*T. Attention of a query that
  sees c keys is 2*c*(qk_dim + v_dim) per head.
* Bytes: weights once per op, activations in and out once, KV read once per KV head and written once.
* `count` identical layers are one `Op`; all numbers are per launch, so totals multiply by `count`.
* Parallelism: numbers are those of the rank that takes longest (`parallel_ops`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from twinfer.core.dtypes import BYTES, dtype_bytes
from twinfer.core.layout import ALONE, Layout
from twinfer.core.plan import Need, StepPlan
from twinfer.core.spec import ModelSpec

__all__ = [
    "BYTES", "COLLECTIVES", "LatentShape", "Linear", "MoEShape", "Op", "RowShape", "StateShape", "StepShape",
    "counted", "dtype_bytes", "keys_read", "num_logits", "repeated", "scaled", "stage_ops", "step_ops", "swapped_slots", "total",
    "visible_pairs",
]  # fmt: skip

COLLECTIVES = {
    "all_reduce": "all_reduce", "all_gather": "all_gather", "hidden_gather": "all_gather", "kv_gather": "all_gather",
    "cp_queries": "all_gather", "moe_gather": "all_gather", "vision_gather": "all_gather", "reduce_scatter": "reduce_scatter",
    "cp_merge": "reduce_scatter", "moe_scatter": "reduce_scatter", "moe_dispatch": "all_to_all",
    "moe_combine": "all_to_all", "hand_over": "send", "kv_ring": "send",
}  # fmt: skip
"""Op of kind comm -> what its ranks do with the message (`Op.comm_bytes`): all of them hold and add up a tensor of that
size (all_reduce), each gives that part to all (all_gather), each gets one part of the sum of such tensors
(reduce_scatter), each sends that much, in all, to the others (all_to_all), or to one of them (send)."""


class MoEShape(NamedTuple):
    """What kernel tables of experts are keyed by, over all ranks: `inter` is one expert's width before `tp` ranks split
    it, `ep` ranks hold whole experts; `tokens` are those of all ranks (of one rank in what is sent). bits: stored per
    weight."""

    tokens: int
    top_k: int
    num_experts: int
    hidden: int
    inter: int
    tp: int
    ep: int
    skew: float
    gated: bool
    bits: float
    dtype: str


class LatentShape(NamedTuple):
    """Sizes of a block of latent attention on one rank; q_rank is 0 without query compression."""

    hidden: int
    heads: int
    q_rank: int
    kv_rank: int
    nope: int
    rope: int
    v: int
    linear_dtype: str


class StateShape(NamedTuple):
    """Sizes of a layer of linear attention on one rank."""

    kind: str
    hidden: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int


@dataclass(frozen=True, slots=True)
class Op:
    """One kernel-sized piece of work on one rank.

    kind: gemm | attention | scan (a state carried from token to token) | elementwise | gather | comm | host_copy
    (between device and host memory).
    shape: gemm (m, n, k), or (m over all groups, n, k, groups used) for grouped ones (experts); attention (query heads, KV heads,
    qk width, v width, window or 0) and `rows`; elementwise, gather and scan (rows, width); comm (ranks,), of a send those among which the two are.
    dtype: what the op computes in.
    rows: for attention and scan, (queries, keys at the end) per row.
    comm_bytes: size of the message of a collective; see `COLLECTIVES`.
    kv_dtype: for attention, the format in which keys and values are stored; "" where it is that of `dtype`.
    of: sizes of the whole that the op is part of, where kernel tables are keyed by them.
    beside: what runs at the same time on other units, launch by launch (a link): the longer of the two counts.
    """

    name: str
    kind: str
    flops: float
    bytes_read: float
    bytes_written: float
    dtype: str
    count: int = 1
    shape: tuple[int, ...] = ()
    comm_bytes: float = 0.0
    rows: tuple[RowShape, ...] = ()
    kv_dtype: str = ""
    of: MoEShape | LatentShape | StateShape | None = None
    beside: Op | None = None

    @property
    def bytes(self) -> float:
        return self.bytes_read + self.bytes_written

    @property
    def intensity(self) -> float:
        """FLOP per byte moved."""
        return self.flops / self.bytes if self.bytes else 0.0


@dataclass(frozen=True, slots=True)
class Linear:
    """A [n, k] weight on one rank, in `count` layers; `weight_bytes` as stored; `of`: as in `Op`."""

    name: str
    n: int
    k: int
    weight_bytes: float
    dtype: str
    count: int
    of: LatentShape | None = None

    def op(self, m: int, act: float) -> Op:
        """The product for `m` rows of activations of `act` bytes per element."""
        n, k = self.n, self.k
        return Op(
            self.name, "gemm", 2.0 * m * n * k, self.weight_bytes + m * k * act, m * n * act, self.dtype, self.count,
            (m, n, k), of=self.of,
        )  # fmt: skip


class RowShape(NamedTuple):
    """`queries` tokens fed at the end of a context that is `keys` long afterwards."""

    queries: int
    keys: int


@dataclass(frozen=True, slots=True)
class StepShape:
    """All that the cost of a step depends on.

    rows: one entry per plan row, in plan order.  num_logits: positions that go through the LM head.
    copied_slots: KV token slots copied by copy-on-write.  swapped_slots: moved from or to host memory.
    rows_only: no part of the step, but of the question: ops that would be the same however the tokens were spread over
    rows may be left out of the answer.
    """

    rows: tuple[RowShape, ...]
    num_logits: int
    copied_slots: int = 0
    swapped_slots: int = 0
    rows_only: bool = False

    @property
    def num_tokens(self) -> int:
        return sum(row.queries for row in self.rows)

    @classmethod
    def of(cls, plan: StepPlan) -> StepShape:
        rows = tuple(RowShape(len(r.tokens), r.start + len(r.tokens)) for r in plan.rows)
        return cls(rows, num_logits(plan), copied_slots(plan), swapped_slots(plan))

    @classmethod
    def prefill(cls, *lengths: int) -> StepShape:
        """Whole prompts of these lengths in one step."""
        return cls(tuple(RowShape(n, n) for n in lengths), len(lengths))

    @classmethod
    def decode(cls, *contexts: int) -> StepShape:
        """One token each after contexts of these lengths (the fed token included)."""
        return cls(tuple(RowShape(1, c) for c in contexts), len(contexts))


def num_logits(plan: StepPlan) -> int:
    """Positions of the rows of `plan` that go through the LM head."""
    logits = 0
    for r in plan.rows:
        if r.need is Need.LAST or r.need is Need.BEAM:
            logits += 1
        elif r.need is Need.DRAFTS:
            logits += r.draft + 1
        elif r.need is Need.ALL:
            logits += len(r.tokens)
    return logits


def copied_slots(plan: StepPlan) -> int:
    """Tokens whose KV `plan` copies, all layers: a fork copies a block in every cache group, so one group counts."""
    return sum(copy.group == 0 for copy in plan.copies) * plan.stats.block_size


def swapped_slots(plan: StepPlan) -> int:
    """Tokens whose KV `plan` moves from and to host memory, all layers; of several cache groups, their mean."""
    swaps = (*plan.swap_outs, *plan.swap_ins)
    num_groups = 1 + max((swap.group for swap in swaps), default=0)
    return -(-sum(len(swap.blocks) for swap in swaps) * plan.stats.block_size // num_groups)


def visible_pairs(queries: int, keys: int, window: int | None = None) -> int:
    """Query-key pairs under a causal mask, each query seeing at most `window` keys (itself included)."""
    first = keys - queries + 1  # keys seen by the first query
    if window is None or keys <= window:
        return (first + keys) * queries // 2
    if first >= window:
        return queries * window
    growing = window - first  # queries that see fewer than `window` keys
    return (first + window - 1) * growing // 2 + (queries - growing) * window


def counted(rows: tuple[RowShape, ...]) -> Mapping[RowShape, int]:
    """How often each row occurs: of many few differ. The same rows are mostly asked for again at once."""
    global _counted
    known = _counted
    if known[0] is not rows:
        known = _counted = (rows, Counter(rows))
    return known[1]


_counted: tuple[tuple[RowShape, ...], Mapping[RowShape, int]] = ((), {})


def repeated(counts: Mapping[RowShape, int]) -> tuple[RowShape, ...]:
    """Rows of which each occurs so often: what `counted` need not count when it is asked next."""
    global _counted
    rows = tuple([row for row, times in counts.items() for _ in range(times)])
    _counted = (rows, counts)
    return rows


def keys_read(queries: int, keys: int, window: int | None = None) -> int:
    """Keys that at least one query of the row sees."""
    return keys if window is None else min(keys, window + queries - 1)


def step_ops(model: ModelSpec, shape: StepShape, layout: Layout | int = 1) -> list[Op]:
    """The ops of one forward pass over `shape`, on the rank that takes longest.

    layout: sizes of the parallel groups, or just of the tensor-parallel one. With several pipeline stages these are the
    ops whose times add up to that of a step in a full pipeline (`parallel_ops`).
    """
    from twinfer.core.parallel_ops import ops_of_step  # kept apart: one concept a file

    if isinstance(layout, int):
        layout = ALONE if layout == 1 else Layout(layout)
    return ops_of_step(model, shape, layout)


def stage_ops(model: ModelSpec, shape: StepShape, layout: Layout) -> list[list[Op]]:
    """The ops of all rows of `shape` in each pipeline stage; all but the last hand the hidden state on."""
    from twinfer.core.parallel_ops import ops_by_stage

    return ops_by_stage(model, shape, layout)


def total(ops: Iterable[Op], what: str) -> float:
    """Sum of `what` (an attribute of Op such as "flops" or "bytes") over all launches."""
    return float(sum(getattr(op, what) * op.count for op in ops))


def scaled(op: Op, **changes: float) -> Op:
    """`op` with some fields replaced; for `Technique.adapt_ops`."""
    return replace(op, **changes)  # type: ignore[arg-type]
