"""Packed products against float64, on shapes that fill no tile."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize
from torch import Tensor

from twinfer.kernels import gemm, native

SHAPES = [(1, 1, 32), (1, 17, 64), (2, 16, 32), (3, 33, 96), (7, 40, 160), (8, 95, 64), (13, 31, 288), (16, 48, 32),
          (17, 65, 64), (33, 50, 96), (70, 129, 64), (200, 36, 32)]  # fmt: skip
FLOAT32 = 2e-6  # relative error of sums of a few hundred float32 products


@pytest.fixture(autouse=True)
def _native() -> None:
    if native.load() is None:
        pytest.skip(f"no native kernels: {native.why_not()}")
    if gemm.why_not():
        pytest.skip(gemm.why_not())


def _error(found: Tensor, wanted: Tensor) -> float:
    assert found.shape == wanted.shape and found.dtype is torch.float32
    return float((found.double() - wanted).norm() / wanted.norm().clamp_min(1e-30))


def _inputs(m: int, n: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(m * 1000 + n + k)
    x = torch.randn(m, k, generator=generator) * torch.logspace(-3, 2, m)[:, None]
    if k > 32:
        x[:, 32:64] *= 30.0  # a block of outliers must not spoil the others
    return x, torch.randn(n, k, generator=generator) * 0.05, torch.randn(n, generator=generator)


def _blocks(kind: str, n: int, k: int, fill: int | None = None) -> tuple[Tensor, Tensor]:
    """(blocks of random bytes, or of `fill`, as in a file, [n, k] the values they stand for in float64); k in whole blocks."""
    ggml = GGMLQuantizationType[kind]
    values, width = GGML_QUANT_SIZES[ggml]
    generator = np.random.default_rng(n + k)
    data = generator.integers(0, 256, (n, k // values, width), dtype=np.uint8)
    if fill is not None:
        data[:] = fill
    scales = generator.uniform(-0.01, 0.02, (n, k // values, 2)).astype(np.float16)
    if kind == "Q6_K":
        data[..., 208:] = scales[..., :1].copy().view(np.uint8)
    else:
        both = 4 if kind in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else 2
        data[..., :both] = scales[..., : both // 2].copy().view(np.uint8)
    dense = dequantize(data.reshape(n, -1), ggml).astype(np.float64)
    return torch.from_numpy(data), torch.from_numpy(dense)


@pytest.mark.parametrize("kind", sorted(gemm.BLOCK_FORMATS))
@pytest.mark.parametrize("m,n,k", SHAPES)
def test_blocks(kind: str, m: int, n: int, k: int) -> None:
    if kind.endswith("_K"):
        k = -(-k // 256) * 256
    x, _, bias = _inputs(m, n, k)
    data, values = _blocks(kind, n, k)
    packed = gemm.pack_blocks(kind, data, gemm.Arena())
    terms = x.abs().double() @ values.abs().T  # what the sums are made of: they may cancel
    assert ((packed(x) - gemm.blocks_reference(x.double(), values)).abs() <= FLOAT32 * terms).all()
    biased = gemm.pack_blocks(kind, data, gemm.Arena(), bias)
    terms = terms + bias.abs()
    assert ((biased(x) - gemm.blocks_reference(x.double(), values, bias)).abs() <= FLOAT32 * terms).all()
    # an activation moves by half a step of largest / 127 of its block at most
    error = (packed(x) - torch.nn.functional.linear(x.double(), values)).abs()
    half_step = x.double().view(m, -1, 32).abs().amax(-1) / 254.0
    bound = half_step @ values.view(n, -1, 32).abs().sum(-1).T
    assert (error <= 1.001 * bound + 1e-5 * bound.amax()).all()


def _one_sign(k: int) -> Tensor:
    """Rows whose values are all rounded to the largest int8: of one sign, of the other and of both."""
    x = torch.ones(3, k)
    x[1], x[2, ::2] = -1.0, -1.0
    return x


@pytest.mark.parametrize("kind", sorted(gemm.BLOCK_FORMATS))
@pytest.mark.parametrize("byte", [0x00, 0x7F, 0x80, 0xFF])
def test_blocks_of_the_largest_values(kind: str, byte: int) -> None:
    """Products are exact: what sums them in 16 bits must hold the largest of them."""
    x = _one_sign(512)
    data, values = _blocks(kind, 9, 512, byte)
    error = (gemm.pack_blocks(kind, data, gemm.Arena())(x) - gemm.blocks_reference(x.double(), values)).abs()
    assert (error <= FLOAT32 * (x.abs().double() @ values.abs().T)).all()


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_int8_of_the_largest_values(sign: float) -> None:
    x, weight = _one_sign(2048), torch.full((9, 2048), sign)
    assert torch.equal(
        gemm.pack_int8(weight, gemm.Arena())(x), gemm.int8_reference(x.double(), weight.double()).float()
    )


def test_both_instruction_sets_give_the_same_bits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if gemm.instructions() != "AVX-512 VNNI":
        pytest.skip("this CPU has no AVX-512 VNNI to compare AVX2 with")
    kinds = [(kind, _blocks(kind, 37, 256)[0]) for kind in sorted(gemm.BLOCK_FORMATS)]
    x, weight, bias = _inputs(19, 37, 256)

    def products() -> list[Tensor]:
        packed = [gemm.pack_blocks(kind, data, gemm.Arena(), bias) for kind, data in kinds]
        packed += [pack(weight, gemm.Arena(), bias) for pack in (gemm.pack_bf16, gemm.pack_int8)]
        return [one(x) for one in packed]

    wide = products()
    monkeypatch.setattr(native, "FLAGS", (*native.FLAGS, "-mno-avx512f"))
    narrow, why = native.build(tmp_path)
    assert narrow is not None, why
    monkeypatch.setattr(native, "_library", narrow)
    assert gemm.instructions() == "AVX2"
    for one, other in zip(wide, products(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("kind", sorted(gemm.BLOCK_FORMATS))
def test_rows_give_the_blocks_back(kind: str) -> None:
    data, values = _blocks(kind, 37, 512)
    ids = torch.tensor([36, 0, 15, 16, 0])
    assert torch.equal(gemm.pack_blocks(kind, data, gemm.Arena()).rows(ids), values[ids].float())


@pytest.mark.parametrize("m,n,k", [*SHAPES, (1, 5, 7), (14, 34, 33)])
def test_bf16(m: int, n: int, k: int) -> None:
    x, weight, bias = _inputs(m, n, k)
    packed = gemm.pack_bf16(weight, gemm.Arena(), bias)
    assert _error(packed(x), gemm.bf16_reference(x.double(), weight, bias)) < FLOAT32
    ids = torch.tensor([n - 1, 0, n // 2])
    assert torch.equal(packed.rows(ids), weight.bfloat16().float()[ids])


@pytest.mark.parametrize("m,n,k", [*SHAPES, (1, 5, 7), (14, 34, 33)])
def test_int8(m: int, n: int, k: int) -> None:
    x, weight, bias = _inputs(m, n, k)
    packed = gemm.pack_int8(weight, gemm.Arena(), bias)
    # float32 scales move a value that lies between two integers: compare with the roundings made in float32
    values, scale = gemm.quantize_int8(x)
    weights, weight_scale = gemm.quantize_int8(weight)
    exact = (values.double() @ weights.double().T) * scale.double()[:, None] * weight_scale.double() + bias
    assert _error(packed(x), exact) < FLOAT32
    ids = torch.tensor([n - 1, 0, n // 2])
    assert torch.equal(packed.rows(ids), weights.float()[ids] * weight_scale[ids, None])


@pytest.mark.parametrize("pack", ["Q4_1", "bf16", "int8"])
def test_any_thread_count_and_any_neighbours(pack: str) -> None:
    """A row has the same bits alone, among others, and with more threads."""
    x, weight, _ = _inputs(41, 70, 128)
    packed = _pack(pack, weight)
    whole = packed(x)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        assert torch.equal(packed(x), whole)
    finally:
        torch.set_num_threads(threads)
    for i in (0, 20, 40):
        assert torch.equal(packed(x[i : i + 1])[0], whole[i])


@pytest.mark.parametrize("pack", ["Q4_1", "bf16", "int8"])
def test_strided_rows_and_given_output(pack: str) -> None:
    x, weight, _ = _inputs(9, 20, 64)
    packed = _pack(pack, weight)
    wide, out = torch.full((9, 100), 7.0), torch.full((9, 30), 3.0)
    wide[:, 10:74] = x
    packed(wide[:, 10:74], out[:, 5:25])
    assert torch.equal(out[:, 5:25], packed(x))
    assert (out[:, :5] == 3.0).all() and (out[:, 25:] == 3.0).all()


@pytest.mark.parametrize("pack", ["Q4_1", "bf16", "int8"])
def test_zeros(pack: str) -> None:
    packed = _pack(pack, torch.zeros(18, 32))
    assert torch.equal(packed(torch.zeros(3, 32)), torch.zeros(3, 18))
    assert torch.equal(packed(torch.ones(3, 32)), torch.zeros(3, 18))
    assert packed(torch.ones(0, 32)).shape == (0, 18)


def _pack(pack: str, weight: Tensor) -> gemm.Packed:
    if pack == "bf16":
        return gemm.pack_bf16(weight, gemm.Arena())
    if pack == "int8":
        return gemm.pack_int8(weight, gemm.Arena())
    data = quantize(weight.numpy(), GGMLQuantizationType[pack])
    return gemm.pack_blocks(pack, torch.from_numpy(data).view(len(weight), weight.shape[1] // 32, -1), gemm.Arena())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("pack", ["Q4_1", "Q8_0", "bf16", "int8"])
def test_what_is_not_finite_reaches_its_row_and_no_other(pack: str, value: float) -> None:
    x, weight, _ = _inputs(5, 18, 64)
    packed = _pack(pack, weight)
    fine = packed(x)
    for column in (0, 17, 63):
        broken = x.clone()
        broken[3, column] = value
        found = packed(broken)
        assert not found[3].isfinite().any()
        assert torch.equal(found[[0, 1, 2, 4]], fine[[0, 1, 2, 4]])


def test_arena_hands_out_separate_zeroed_lines() -> None:
    arena = gemm.Arena()
    first, second = arena.take(100), arena.take(33 << 20)
    third = arena.take(1)
    for piece in (first, second, third):
        assert piece.data_ptr() % 64 == 0 and not piece.any()
    first.fill_(1)
    assert not second.any() and not third.any()
