"""Native attention and rotary KV write against float64 written out, over shuffled pages full of NaN elsewhere."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import Tensor

from twinfer.kernels.cpu_attention import PagedAttention, rope_kv_write, serves

PAGE = 16
Row = tuple[int, int]  # queries, keys


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"], autouse=True)
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@contextmanager
def one_thread() -> Iterator[None]:
    """For what is not tested: on busy CPUs, torch's threads wait for each other most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Step:
    """Random rows over shuffled pages; memory that no row owns is NaN."""

    @one_thread()
    def __init__(
        self,
        rows: list[Row],
        heads: int,
        kv_heads: int,
        dim: int,
        value_dim: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        value_dim = value_dim or dim
        random = np.random.default_rng(len(rows) * 1000 + heads)
        pages = [-(-keys // PAGE) for _, keys in rows]
        order = iter(random.permutation(sum(pages) + 3).tolist())
        self.slots = [np.array([p * PAGE + i for p in itertools.islice(order, n) for i in range(PAGE)]) for n in pages]
        total = (sum(pages) + 3) * PAGE
        draw = torch.Generator().manual_seed(heads)
        self.keys = torch.full((total, kv_heads, dim), float("nan"), dtype=dtype)
        self.values = torch.full((total, kv_heads, value_dim), float("nan"), dtype=dtype)
        for (_, keys), slots in zip(rows, self.slots, strict=True):
            self.keys[slots[:keys]] = torch.randn(keys, kv_heads, dim, generator=draw).to(dtype)
            self.values[slots[:keys]] = torch.randn(keys, kv_heads, value_dim, generator=draw).to(dtype)
        self.q = torch.randn(sum(q for q, _ in rows), heads, dim, generator=draw)
        self.rows, self.scale = rows, dim**-0.5

    def run(self, window: int | None = None, softcap: float | None = None) -> Tensor:
        starts = np.cumsum([0] + [q for q, _ in self.rows])
        rows = [(int(at), q, keys - q, s) for at, (q, keys), s in zip(starts[:-1], self.rows, self.slots, strict=True)]
        return PagedAttention(rows, self.scale, softcap)(self.q, self.keys, self.values, window)

    @one_thread()
    def expected(self, window: int | None = None, softcap: float | None = None) -> Tensor:
        heads, kv_heads = self.q.shape[1], self.keys.shape[1]
        out, at = [], 0
        for (queries, count), slots in zip(self.rows, self.slots, strict=True):
            k = self.keys[slots[:count]].double().repeat_interleave(heads // kv_heads, 1)
            v = self.values[slots[:count]].double().repeat_interleave(heads // kv_heads, 1)
            scores = torch.einsum("qhd,khd->hqk", self.q[at : at + queries].double(), k) * self.scale
            if softcap is not None:
                scores = (scores / softcap).tanh() * softcap
            position = torch.arange(count - queries, count)[:, None]
            key = torch.arange(count)[None]
            seen = key <= position
            if window is not None:
                seen &= key > position - window
            weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
            out.append(torch.einsum("hqk,khd->qhd", weights, v).flatten(1))
            at += queries
        return torch.cat(out)


DECODE = [(1, 1), (1, 15), (1, 16), (1, 17), (1, 127), (1, 128), (1, 129), (1, 300), (1, 1000)]
VERIFY = [(2, 2), (3, 40), (5, 133), (8, 260), (8, 8)]
PREFILL = [(9, 9), (16, 16), (37, 37), (130, 130), (100, 300), (33, 129)]
SHAPES = [(9, 3, 64), (4, 4, 16), (8, 2, 32), (8, 1, 80), (6, 2, 128), (12, 1, 48)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    "rows", [DECODE, VERIFY, PREFILL, DECODE + PREFILL + VERIFY], ids=["decode", "verify", "prefill", "mixed"]
)
def test_attention(rows: list[Row], shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    step = Step(rows, *shape, dtype=dtype)
    torch.testing.assert_close(step.run().double(), step.expected(), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("softcap", [None, 20.0, 0.5])
@pytest.mark.parametrize("window", [None, 1, 7, 16, 128, 200, 5000])
def test_windows_and_softcap(window: int | None, softcap: float | None) -> None:
    step = Step(DECODE + VERIFY + PREFILL, 4, 2, 32)
    torch.testing.assert_close(step.run(window, softcap).double(), step.expected(window, softcap), rtol=1e-5, atol=2e-6)


def test_values_of_another_width() -> None:
    step = Step(DECODE + PREFILL, 8, 1, 80, 64)
    torch.testing.assert_close(step.run().double(), step.expected(), rtol=1e-5, atol=2e-6)


def test_values_as_a_view_of_keys() -> None:
    step = Step(DECODE + PREFILL, 8, 1, 80)
    step.values = step.keys[..., :64]
    torch.testing.assert_close(step.run().double(), step.expected(), rtol=1e-5, atol=2e-6)


def test_large_scores_do_not_overflow() -> None:
    step = Step(DECODE + PREFILL, 4, 2, 32)
    step.q *= 100
    torch.testing.assert_close(step.run().double(), step.expected(), rtol=1e-4, atol=1e-4)


def test_q_as_a_view_of_qkv() -> None:
    step = Step(DECODE, 9, 3, 64)
    qkv = torch.randn(len(DECODE), 15, 64)
    qkv[:, :9] = step.q
    expected = step.run()
    step.q = qkv[:, :9]
    assert torch.equal(step.run(), expected)


@pytest.mark.parametrize("window", [None, 50])
def test_a_row_depends_on_itself_alone(window: int | None) -> None:
    together = Step(DECODE + PREFILL + VERIFY, 9, 3, 64)
    out, at = together.run(window), 0
    for row, slots in zip(together.rows, together.slots, strict=True):
        alone = Step([row], 9, 3, 64)
        alone.slots, alone.keys, alone.values = [slots], together.keys, together.values
        alone.q = together.q[at : at + row[0]].clone()
        assert torch.equal(alone.run(window), out[at : at + row[0]])
        at += row[0]


def test_threads_change_nothing() -> None:
    step = Step(DECODE + PREFILL + VERIFY, 9, 3, 64)
    here = step.run()
    torch.set_num_threads(3 - torch.get_num_threads())
    assert torch.equal(step.run(), here)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_in_its_row_and_shows(bad: float) -> None:
    step = Step([(1, 200), (1, 40), (20, 150), (12, 12)], 4, 2, 32)
    step.keys[step.slots[0][150]] = bad
    step.values[step.slots[2][10]] = bad
    out = step.run()
    finite = out.isfinite().all(dim=1)
    assert not finite[0]
    assert not finite[2:22].any()
    assert finite[1]
    assert finite[22:].all()


def test_what_is_served() -> None:
    cache = torch.zeros(32, 2, 32)
    assert serves(cache, cache)
    assert serves(cache.bfloat16(), cache.bfloat16())
    assert not serves(cache, cache.bfloat16())
    assert not serves(cache.half(), cache.half())
    assert not serves(cache[..., :24], cache[..., :24])
    assert not serves(cache.transpose(1, 2), cache.transpose(1, 2))


# --- rotary embedding and KV write ----------------------------------------------------------------


@pytest.mark.parametrize("norm", [None, False, True], ids=["no norm", "norm", "norm + 1"])
@pytest.mark.parametrize("rotary", [64, 32, 20])
@pytest.mark.parametrize("tokens", [1, 5, 70])
def test_rope_kv_write(tokens: int, rotary: int, norm: bool | None) -> None:
    heads, kv_heads, dim = 6, 2, 64
    draw = torch.Generator().manual_seed(tokens)
    qkv = torch.randn(tokens, heads + 2 * kv_heads, dim, generator=draw)
    weights = None if norm is None else (torch.randn(dim, generator=draw), torch.randn(dim, generator=draw))
    angle = torch.rand(tokens, 1, rotary // 2, generator=draw, dtype=torch.float64) * 6
    cos = torch.cat((angle.cos(), angle.cos()), -1)
    sin = torch.cat((-angle.sin(), angle.sin()), -1)
    slots = torch.randperm(100, generator=draw)[:tokens]
    keys, values = torch.zeros(100, kv_heads, dim), torch.zeros(100, kv_heads, dim)

    wide = qkv.double()
    q, k, v = wide[:, :heads], wide[:, heads:-kv_heads], wide[:, -kv_heads:]
    if weights is not None:
        q, k = (
            x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * (w.double() + bool(norm))
            for x, w in zip((q, k), weights, strict=True)
        )
    half = rotary // 2
    turned = []
    for x in (q, k):
        a, b = x[..., :half], x[..., half:rotary]
        c, s = angle.cos(), angle.sin()
        turned.append(torch.cat((a * c - b * s, b * c + a * s, x[..., rotary:]), -1))

    q_norm, k_norm = weights if weights is not None else (None, None)
    done = rope_kv_write(qkv, cos.float(), sin.float(), slots, keys, values, q_norm, k_norm, 1e-5, bool(norm))
    assert done
    torch.testing.assert_close(qkv[:, :heads].double(), turned[0], rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(keys[slots].double(), turned[1], rtol=1e-5, atol=2e-6)
    assert torch.equal(values[slots], v.float())
    rest = torch.ones(100, dtype=torch.bool)
    rest[slots] = False
    assert not keys[rest].any()
    assert not values[rest].any()


def test_rope_kv_write_refuses_other_layouts() -> None:
    qkv, cos = torch.zeros(2, 4, 32), torch.zeros(2, 1, 32)
    slots, cache = torch.tensor([0, 1]), torch.zeros(8, 1, 32)
    assert rope_kv_write(qkv, cos, cos, slots, cache, cache)
    assert not rope_kv_write(qkv.bfloat16(), cos, cos, slots, cache, cache)
    assert not rope_kv_write(qkv.transpose(0, 1).contiguous().transpose(0, 1), cos, cos, slots, cache, cache)
    assert not rope_kv_write(qkv, cos, cos, slots, cache.half(), cache.half())


def test_bfloat16_cache_rounds_to_nearest_even() -> None:
    draw = torch.Generator().manual_seed(3)
    values = torch.randn(40, 4, 48, generator=draw) * 10.0 ** torch.randint(-30, 30, (40, 4, 48), generator=draw)
    values[0, 2, :4] = torch.tensor([float("nan"), float("inf"), float("-inf"), -0.0])
    values[1, 2, :4] = torch.tensor(
        [1.00390625, 1.01171875, 3.4e38, 1e-42]
    )  # halfway down, halfway up, over, subnormal
    qkv, still = values.clone(), torch.cat((torch.ones(40, 1, 24), torch.ones(40, 1, 24)), -1)
    keys, stored = torch.zeros(40, 1, 48, dtype=torch.bfloat16), torch.zeros(40, 1, 48, dtype=torch.bfloat16)
    assert rope_kv_write(qkv, still[..., :0], still[..., :0], torch.arange(40), keys, stored)
    assert torch.equal(qkv.nan_to_num(7), values.nan_to_num(7))
    for found, wanted in ((keys, values[:, 2:3].bfloat16()), (stored, values[:, 3:].bfloat16())):
        assert torch.equal(found.isnan(), wanted.isnan())
        assert torch.equal(found.nan_to_num(7), wanted.nan_to_num(7))


def test_queries_of_another_dtype_are_widened() -> None:
    step = Step(DECODE + PREFILL, 4, 2, 32, dtype=torch.bfloat16)
    step.q = step.q.bfloat16()
    expected = step.expected()
    found = step.run()
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found.double(), expected, rtol=1e-2, atol=1e-3)
