"""Packed attention over the paged KV storage against a plain float64 loop."""

from __future__ import annotations

import random
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch

from twinfer.core.plan import Need
from twinfer.core.runtime.attention_cpu import NativeStep
from twinfer.core.runtime.attention_parts import AttentionShape, PaddedRows, SingleRow
from twinfer.core.runtime.attention_step import HeadNorms
from twinfer.core.runtime.attention_torch import TorchAttention, _Step
from twinfer.core.runtime.batch import PackedRow, pack
from twinfer.core.runtime.kv_storage import KVStorage, Table
from twinfer.kernels import native

SHAPE = AttentionShape(num_heads=6, num_kv_heads=2, head_dim=16, scale=0.3, windows=(None,))


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, shape: AttentionShape) -> torch.Tensor:
    """One row in float64: q of positions start.. over all keys of the sequence, query by query, head by head."""
    out = torch.zeros_like(q, dtype=torch.float64)
    window = shape.windows[0]
    for i in range(q.shape[0]):
        position = start + i
        first = 0 if window is None else max(0, position - window + 1)
        for head in range(shape.num_heads):
            group = head // shape.group
            keys, values = k[first : position + 1, group].double(), v[first : position + 1, group].double()
            scores = (keys @ q[i, head].double()) * shape.scale
            if shape.softcap is not None:
                scores = shape.softcap * torch.tanh(scores / shape.softcap)
            out[i, head] = scores.softmax(0) @ values
    return out.flatten(1)


class Case:
    """Sequences with a cached past, and the rows of one step."""

    def __init__(
        self, shape: AttentionShape, rows: list[tuple[int, int]], layout: str, dtype: torch.dtype, seed: int = 0,
        on_native: bool = False,
    ) -> None:  # fmt: skip
        """rows: (start, queries). layout: shuffled | consecutive | contiguous (one region of max length each)."""
        torch.manual_seed(seed)
        longest = max(start + queries for start, queries in rows)
        block_size = longest + 3 if layout == "contiguous" else 4
        per_row = [-(-(start + queries) // block_size) for start, queries in rows]
        self.kv = KVStorage(1, sum(per_row) + 2, block_size, shape.num_kv_heads, shape.head_dim, dtype)
        blocks = list(range(self.kv.num_blocks))
        if layout == "shuffled":
            random.Random(seed).shuffle(blocks)
        tables: list[Table] = []
        for count in per_row:
            tables.append(self.kv.new_table())
            tables[-1].append([blocks.pop(0) for _ in range(count)])
        self.shape, self.rows = shape, rows
        self.k = [torch.randn(s + n, shape.num_kv_heads, shape.head_dim).to(dtype) for s, n in rows]
        self.v = [torch.randn(s + n, shape.num_kv_heads, shape.head_dim).to(dtype) for s, n in rows]
        self.q = [torch.randn(n, shape.num_heads, shape.head_dim).to(dtype) * 2 for _, n in rows]
        for (start, _), table, k, v in zip(rows, tables, self.k, self.v, strict=True):
            past = torch.from_numpy(table.slots[:start])
            self.kv.keys[0][past], self.kv.values[0][past] = k[:start], v[:start]
        packed = [PackedRow([0] * n, s, Need.LAST, t) for (s, n), t in zip(rows, tables, strict=True)]
        self.batch = pack(packed)
        with nullcontext() if on_native else native.disabled():
            self.step = TorchAttention(shape).step(self.batch, self.kv)

    def run(self) -> torch.Tensor:
        q = torch.cat(self.q)
        k = torch.cat([k[s:] for k, (s, _) in zip(self.k, self.rows, strict=True)])
        v = torch.cat([v[s:] for v, (s, _) in zip(self.v, self.rows, strict=True)])
        self.step.store(0, k, v)
        return self.step.attend(0, q, k, v)

    def expected(self) -> torch.Tensor:
        pairs = zip(self.q, self.k, self.v, self.rows, strict=True)
        return torch.cat([reference(q, k, v, start, self.shape) for q, k, v, (start, _) in pairs])

    def parts(self) -> list[object]:
        assert isinstance(self.step, _Step)
        return list(self.step.parts[0, self.shape.windows[0]])


ROWS = {
    "decode": [(7, 1), (30, 1), (12, 1), (0, 1)],
    "decode-equal": [(20, 1), (20, 1), (20, 1)],
    "decode-one": [(25, 1)],
    "prefill": [(0, 13), (0, 1), (0, 40)],
    "chunks": [(9, 11), (16, 9), (3, 30)],
    "short": [(5, 3), (40, 3), (11, 2), (0, 2), (17, 3)],
    "mixed": [(0, 20), (33, 1), (8, 12), (21, 4), (14, 1), (2, 4), (0, 3)],
}
VARIANTS = {
    "gqa": SHAPE,
    "mha": replace(SHAPE, num_kv_heads=6),
    "mqa": replace(SHAPE, num_kv_heads=1),
    "window": replace(SHAPE, windows=(6,)),
    "softcap": replace(SHAPE, softcap=1.5),
    "softcap-window": replace(SHAPE, softcap=1.5, windows=(9,)),
    "window-1": replace(SHAPE, windows=(1,)),
}


@pytest.mark.parametrize("on_native", [False, True], ids=["torch", "native"])
@pytest.mark.parametrize("layout", ["shuffled", "consecutive", "contiguous"])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("rows", ROWS)
def test_equals_float64(rows: str, variant: str, layout: str, on_native: bool) -> None:
    case = Case(VARIANTS[variant], ROWS[rows], layout, torch.float32, on_native=on_native)
    assert isinstance(case.step, NativeStep if on_native else _Step)
    assert (case.run().double() - case.expected()).abs().max() <= 2e-5


@pytest.mark.parametrize("variant", ["gqa", "softcap-window"])
@pytest.mark.parametrize("rows", ["decode", "mixed"])
def test_bfloat16_within_its_rounding(rows: str, variant: str) -> None:
    case = Case(VARIANTS[variant], ROWS[rows], "shuffled", torch.bfloat16)
    got, expected = case.run(), case.expected()
    assert got.dtype == torch.bfloat16
    assert (got.double() - expected).abs().max() <= 2e-2 * expected.abs().max()


@pytest.mark.parametrize("window", [None, 700])
def test_rows_longer_than_a_mask_block(window: int | None) -> None:
    """More than QUERY_BLOCK queries behind a cached past."""
    shape = AttentionShape(num_heads=2, num_kv_heads=1, head_dim=8, scale=0.4, windows=(window,))
    case = Case(shape, [(300, 1100)], "shuffled", torch.float32)
    got = case.run().double()
    q, k, v = case.q[0].double(), case.k[0].double(), case.v[0].double()
    position, key = torch.arange(300, 1400)[:, None], torch.arange(1400)[None, :]
    hidden = (key > position) if window is None else (key > position) | (key <= position - window)
    scores = torch.einsum("qhd,kd->hqk", q, k[:, 0]) * 0.4
    out = torch.einsum("hqk,kd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v[:, 0]).flatten(1)
    assert (got - out).abs().max() <= 2e-5


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_what_the_native_kernels_do_not_serve_runs_on_torch(dtype: torch.dtype) -> None:
    shape = SHAPE if dtype is torch.float16 else replace(SHAPE, head_dim=24)
    case = Case(shape, ROWS["mixed"], "shuffled", dtype, on_native=True)
    assert isinstance(case.step, _Step)
    assert (case.run().double() - case.expected()).abs().max() <= 0.1


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("rotary", [16, 8])
def test_rotate_store_of_both_paths_agrees(rotary: int, normed: bool) -> None:
    found = []
    for on_native in (False, True):
        case = Case(SHAPE, ROWS["mixed"], "shuffled", torch.float32, on_native=on_native)
        tokens = case.batch.num_tokens
        draw = torch.Generator().manual_seed(1)
        qkv = torch.randn(tokens, 6 + 2 * 2, 16, generator=draw)
        angle = torch.rand(tokens, 1, rotary // 2, generator=draw)
        rotation = (torch.cat((angle.cos(),) * 2, -1), torch.cat((-angle.sin(), angle.sin()), -1))
        norms = HeadNorms(torch.rand(16, generator=draw), torch.rand(16, generator=draw), 1e-5) if normed else None
        out = case.step.rotate_store(0, qkv, 2, rotation, norms)
        found.append((*out, case.kv.keys[0], case.kv.values[0]))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_contiguous_cache_is_read_without_a_gather() -> None:
    decode = Case(SHAPE, ROWS["decode"], "contiguous", torch.float32).parts()
    assert len(decode) == 1 and isinstance(decode[0], PaddedRows) and decode[0].index is None
    single = Case(SHAPE, [(9, 11)], "contiguous", torch.float32).parts()
    assert isinstance(single[0], SingleRow) and single[0].index is None
    shuffled = Case(SHAPE, ROWS["decode"], "shuffled", torch.float32).parts()
    assert isinstance(shuffled[0], PaddedRows) and shuffled[0].index is not None


def test_rows_in_another_order_than_their_memory() -> None:
    """A strided view sorts rows by slot; results must come back in row order."""
    case = Case(SHAPE, [(9, 1), (5, 1), (14, 1)], "contiguous", torch.float32)
    spans = list(reversed(case.batch.spans))
    offsets = [span._replace(offset=i) for i, span in enumerate(spans)]
    batch = replace(case.batch, spans=tuple(offsets), slots=case.batch.slots.flip(0))
    with native.disabled():
        step = TorchAttention(SHAPE).step(batch, case.kv)
    q, k, v = (torch.cat([x[-1:] for x in reversed(xs)]) for xs in (case.q, case.k, case.v))
    step.store(0, k, v)
    assert (step.attend(0, q, k, v).double() - case.expected().flip(0)).abs().max() <= 2e-5


def test_very_different_contexts_are_not_padded_to_the_longest() -> None:
    shape = AttentionShape(num_heads=8, num_kv_heads=8, head_dim=64, scale=0.125, windows=(None,))
    case = Case(shape, [(1500, 1), (3, 1), (1400, 1), (7, 1), (5, 1)], "shuffled", torch.float32)
    padded = [part for part in case.parts() if isinstance(part, PaddedRows)]
    assert sorted(part.longest for part in padded) == [8, 1501]
    assert (case.run().double() - case.expected()).abs().max() <= 2e-5


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("layout", ["shuffled", "contiguous"])
def test_nan_of_one_row_does_not_reach_another(layout: str, seed: int) -> None:
    case = Case(SHAPE, [(30, 1), (6, 1), (11, 1)], layout, torch.float32, seed)
    clean = case.run()
    case.k[0][:], case.v[0][:] = float("nan"), float("nan")
    # everything but the other rows' own memory is NaN
    others = torch.from_numpy(np.concatenate([span.table.slots for span in case.batch.spans[1:]]))
    for cache in (case.kv.keys[0], case.kv.values[0]):
        own = cache[others]
        cache[:] = float("nan")
        cache[others] = own
    broken = case.run()
    assert broken[0].isnan().all()
    assert torch.equal(broken[1:], clean[1:])
