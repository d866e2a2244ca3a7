"""Native pointwise ops against float64, on ragged shapes, one and two threads, and what falls back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from twinfer.kernels import native, ops, torch_ops

SHAPES = [(1, 1), (1, 15), (2, 16), (3, 17), (1, 576), (7, 576), (5, 1000), (64, 1536)]


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"], autouse=True)
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def norm64(x: Tensor, weight: Tensor, eps: float, plus_one: bool) -> Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * (weight.double() + plus_one)


@pytest.mark.parametrize("plus_one", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm(shape: tuple[int, int], plus_one: bool) -> None:
    x, weight = random(*shape) * 3, random(shape[1], seed=1)
    found = ops.rms_norm(x, weight, 1e-5, plus_one)
    torch.testing.assert_close(found.double(), norm64(x, weight, 1e-5, plus_one), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("plus_one", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_add_rms_norm(shape: tuple[int, int], plus_one: bool) -> None:
    residual, delta, weight = random(*shape), random(*shape, seed=2), random(shape[1], seed=1)
    total = residual + delta
    found = ops.add_rms_norm(residual, delta, weight, 1e-6, plus_one)
    assert torch.equal(residual, total)
    torch.testing.assert_close(found.double(), norm64(total, weight, 1e-6, plus_one), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("act", sorted(ops.ACTIVATIONS))
@pytest.mark.parametrize("shape", SHAPES)
def test_gated(shape: tuple[int, int], act: str) -> None:
    x = random(shape[0], 2 * shape[1]) * 4
    gate, up = x.double().chunk(2, dim=-1)
    expected = ops.ACTIVATIONS[act](gate) * up
    torch.testing.assert_close(ops.gated(x, act).double(), expected, rtol=2e-6, atol=4e-6)


@pytest.mark.parametrize("act", sorted(ops.ACTIVATIONS))
def test_gated_at_the_ends(act: str) -> None:
    gate = torch.tensor([-1e38, -200.0, -88.0, -20.0, -0.0, 1e-30, 20.0, 88.0, 200.0, 1e30])
    x = torch.cat((gate, torch.ones_like(gate)))[None]
    expected = ops.ACTIVATIONS[act](gate.double())[None]
    torch.testing.assert_close(ops.gated(x, act).double(), expected, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("act", sorted(ops.ACTIVATIONS))
def test_nan_and_infinity_show(act: str) -> None:
    x = torch.ones(2, 64)
    x[0, 5] = float("nan")
    x[0, 6] = float("inf")
    out = ops.gated(x, act)
    assert out[0, 5].isnan()
    assert out[0, 6].isinf()
    assert out[1].isfinite().all()
    normed = ops.rms_norm(x, torch.ones(64), 1e-5)
    assert normed[0].isnan().any()
    assert normed[1].isfinite().all()


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    x, delta, weight = random(65, 1536), random(65, 1536, seed=1), random(1536, seed=2)
    alone, all_alone = x[40:41].clone(), x.clone()
    assert torch.equal(ops.rms_norm(x, weight, 1e-5)[40:41], ops.rms_norm(alone, weight, 1e-5))
    assert torch.equal(ops.gated(x, "silu")[40:41], ops.gated(alone, "silu"))
    together = ops.add_rms_norm(all_alone, delta, weight, 1e-5)[40:41]
    assert torch.equal(together, ops.add_rms_norm(alone, delta[40:41].clone(), weight, 1e-5))


def test_rows_with_a_stride() -> None:
    wide = random(6, 100)
    assert torch.equal(
        ops.rms_norm(wide[:, :40], wide[0, :40], 1e-5), ops.rms_norm(wide[:, :40].clone(), wide[0, :40], 1e-5)
    )
    assert torch.equal(ops.gated(wide[:, :40], "silu"), ops.gated(wide[:, :40].clone(), "silu"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_run_on_the_twin(dtype: torch.dtype) -> None:
    x, weight = random(3, 40).to(dtype), random(40, seed=1).to(dtype)
    assert torch.equal(ops.rms_norm(x, weight, 1e-5), torch_ops.rms_norm(x, weight, 1e-5))
    assert torch.equal(ops.gated(x, "gelu"), torch_ops.gated(x, "gelu"))
    assert torch.equal(ops.add_rms_norm(x.clone(), x, weight, 1e-5), torch_ops.add_rms_norm(x.clone(), x, weight, 1e-5))


def test_other_layouts_run_on_the_twin() -> None:
    x, weight = random(40, 6).t(), random(40, seed=1)
    torch.testing.assert_close(ops.rms_norm(x, weight, 1e-5), torch_ops.rms_norm(x, weight, 1e-5))
    torch.testing.assert_close(ops.gated(x, "silu"), torch_ops.gated(x, "silu"))
    per_head = random(2, 3, 40)
    torch.testing.assert_close(ops.rms_norm(per_head, weight, 1e-5), torch_ops.rms_norm(per_head, weight, 1e-5))


def test_no_rows() -> None:
    assert native.load() is not None
    assert ops.rms_norm(torch.empty(0, 16), torch.ones(16), 1e-5).shape == (0, 16)
    assert ops.gated(torch.empty(0, 16), "silu").shape == (0, 8)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("count", [0, 1, 70])
def test_take_rows(count: int, transposed: bool) -> None:
    table = random(48, 30).t() if transposed else random(30, 48)
    ids = torch.randint(0, 30, (count,), generator=torch.Generator().manual_seed(1))
    for kind in (torch.float32, torch.bfloat16):
        found = ops.take_rows(table.to(kind), ids)
        assert torch.equal(found, table.to(kind)[ids])
        assert found.is_contiguous()


@pytest.mark.parametrize("scale", [1.0, 1.5])
@pytest.mark.parametrize("count", [1, 3, 200])
def test_rotations(count: int, scale: float) -> None:
    positions = torch.arange(count) * 37
    frequencies = 10000.0 ** (-torch.arange(0, 24, 2) / 24.0)
    cos, sin = ops.rotations(positions, frequencies, torch.float32, scale)
    angles = (positions.float()[:, None] * frequencies).double()
    assert cos.shape == sin.shape == (count, 1, 24)
    expected = torch.cat((angles.cos(), angles.cos()), -1), torch.cat((-angles.sin(), angles.sin()), -1)
    torch.testing.assert_close(cos[:, 0].double(), expected[0] * scale, rtol=0, atol=2e-7)
    torch.testing.assert_close(sin[:, 0].double(), expected[1] * scale, rtol=0, atol=2e-7)
    twin = torch_ops.rotations(positions.float()[:, None] * frequencies, torch.float32, scale)
    torch.testing.assert_close((cos, sin), twin, rtol=0, atol=2e-7)


@pytest.mark.parametrize("shape", SHAPES)
def test_scale_and_softcap(shape: tuple[int, int]) -> None:
    x = random(*shape) * 40
    scaled, capped = x.clone(), x.clone()
    assert ops.scale(scaled, 1.7) is scaled
    assert ops.softcap(capped, 30.0) is capped
    assert torch.equal(scaled, x * 1.7)
    torch.testing.assert_close(capped.double(), (x.double() / 30).tanh() * 30, rtol=2e-6, atol=4e-6)
    small = random(*shape) * 1e-3
    torch.testing.assert_close(ops.softcap(small.clone(), 30.0), small, rtol=1e-5, atol=0)
    twins = x.bfloat16()
    assert torch.equal(ops.scale(twins.clone(), 2.0), twins * 2)
    assert torch.equal(ops.softcap(twins.clone(), 30.0), twins.clone().div_(30.0).tanh_().mul_(30.0))


@pytest.mark.parametrize("width", [1, 15, 16, 33, 1000])
def test_largest(width: int) -> None:
    rows = random(40, width).round()  # many equals: the first counts
    if width > 1:
        rows[3, width // 2] = float("nan")
        rows[4, width - 1] = float("nan")
        rows[5, width - 1] = float("inf")
    rows[6] = float("-inf")
    rows[7] = float("nan")
    for x in (rows, random(40, width + 7)[:, :width], rows.bfloat16()):
        ids, tops = ops.largest(x)
        assert ids == x.argmax(-1).tolist()
        torch.testing.assert_close(
            torch.tensor(tops), x.gather(1, x.argmax(-1)[:, None])[:, 0].float(), rtol=0, atol=0, equal_nan=True
        )
