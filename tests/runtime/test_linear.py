"""Linears over quantized formats: blocks from the file to the product, and models that run on them."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from logits_oracle import TinyModel, prompts, run
from test_mla_logits import CASES
from torch import Tensor

from twinfer.core.catalog import resolve_spec
from twinfer.core.config import Choice, EngineConfig
from twinfer.core.errors import ConfigError
from twinfer.core.plan import Need
from twinfer.core.registry import Registry
from twinfer.core.runtime.attention_torch import attention_of
from twinfer.core.runtime.batch import PackedRow, pack
from twinfer.core.runtime.families import load_model
from twinfer.core.runtime.gguf_weights import _SCALES, GGUFWeights
from twinfer.core.runtime.kv_storage import KVStorage
from twinfer.core.runtime.linear import Dense, LinearFactory, TokenTable, fused
from twinfer.core.runtime.loading import load_engine
from twinfer.core.runtime.parallel import Parallel
from twinfer.core.runtime.profile import silent
from twinfer.core.runtime.quantized_linear import BF16Linears, GGUFLinears, Int8Linears
from twinfer.core.runtime.stored_blocks import VALUES_PER_BLOCK, Stacked, StoredBlocks
from twinfer.kernels import gemm, native
from twinfer.plugins.quantizer.gguf import HELD_BITS

FACTORIES = (GGUFLinears, BF16Linears, Int8Linears)


def blocks(rows: int, columns: int, kind: str = "Q4_1", seed: int = 0) -> StoredBlocks:
    from gguf import GGMLQuantizationType
    from gguf.quants import quantize

    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    data = torch.from_numpy(quantize(weight.numpy(), GGMLQuantizationType[kind]))
    return StoredBlocks(kind, data.view(rows, columns // 32, -1))


def close(found: Tensor, wanted: Tensor, relative: float) -> bool:
    return bool((found - wanted).norm() <= relative * wanted.norm())


def test_plugin_counts_what_the_kernels_hold() -> None:
    assert set(HELD_BITS) == set(gemm.BLOCK_FORMATS)
    if gemm.why_not():
        pytest.skip(gemm.why_not())
    for kind, bits in HELD_BITS.items():
        data = torch.zeros(32, 512 // VALUES_PER_BLOCK[kind], gemm._BLOCKS_OF_FILE[kind][1], dtype=torch.uint8)
        assert gemm.pack_blocks(kind, data, gemm.Arena()).nbytes * 8 == bits * 32 * 512


def test_blocks_are_cut_and_joined_like_the_tensor() -> None:
    whole = blocks(24, 128)
    values = whole.dense()
    assert whole.shape == (24, 128) == tuple(values.shape)
    assert torch.equal(whole.narrow(0, 5, 9).dense(), values[5:14])
    assert torch.equal(whole.narrow(1, 32, 64).dense(), values[:, 32:96])
    rank = Parallel(1, 2)
    assert torch.equal(Parallel(2, 3).cut_vocab(whole.narrow(0, 0, 22)).dense()[:6], values[16:22])
    assert not Parallel(2, 3).cut_vocab(whole.narrow(0, 0, 22)).dense()[6:].any()
    assert torch.equal(rank.cut(whole).dense(), values[12:])
    assert torch.equal(rank.cut_heads(whole, 4, 1).dense(), values[:, 64:])
    with pytest.raises(ConfigError, match="block of 32"):
        whole.narrow(1, 16, 64)
    joined = fused([whole, whole.narrow(0, 0, 3)])
    assert isinstance(joined, StoredBlocks) and torch.equal(joined.dense(), torch.cat([values, values[:3]]))
    mixed = fused([whole, blocks(8, 128, "Q8_0")])
    assert isinstance(mixed, Stacked) and torch.equal(mixed.dense()[:24], values)


@pytest.mark.parametrize(
    "kinds", [("Q4_1",), ("Q4_0", "Q8_0"), ("Q5_0",), ("Q4_1", "Q5_1"), ("MXFP4",), ("MXFP4", "Q4_0")]
)
def test_gguf_linears_multiply_every_type(kinds: tuple[str, ...]) -> None:
    parts = [blocks(10 + 7 * i, 64, kind, i) for i, kind in enumerate(kinds)]
    values = torch.cat([part.dense() for part in parts])
    bias, x = torch.randn(len(values)), torch.randn(5, 64)
    linear = GGUFLinears()
    assert close(linear("name", fused(parts), bias)(x), x @ values.T + bias, 0.01)
    if not linear.missing:
        assert all(
            (f"{kind} (" if kind in gemm.BLOCK_FORMATS else f"{kind} as float32") in linear.reason for kind in kinds
        )


@pytest.mark.parametrize("factory", FACTORIES)
def test_without_native_kernels_the_values_run_in_float32(factory: type[GGUFLinears]) -> None:
    weight = blocks(20, 64) if factory is GGUFLinears else torch.randn(20, 64)
    x = torch.randn(3, 64)
    packed = factory()("name", weight, None)(x)
    with native.disabled():
        plain = factory()
        assert "switched off" in plain.reason
        assert close(plain("name", weight, None)(x), packed, 0.01)


@pytest.mark.parametrize("tied", [True, False])
def test_token_table_of_blocks(tied: bool) -> None:
    table, linear = blocks(50, 64, "Q8_0"), GGUFLinears()
    values, ids = table.dense(), torch.tensor([3, 49, 3])
    found = TokenTable(table, tied, linear=linear)
    assert torch.equal(found.embed(ids), values[ids])
    assert (found.head is not None) == tied
    dense = TokenTable(values, tied)
    assert torch.equal(dense.embed(ids), values[ids]) and isinstance(dense.head, Dense) == tied


# --- whole models ---------------------------------------------------------------------------------


def test_blocks_of_the_file_are_its_weights(smollm2_gguf: Path) -> None:
    """Rows of q and k come in Hugging Face's order, as `get` has them."""
    source = GGUFWeights(smollm2_gguf)
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        full = f"model.layers.7.self_attn.{name}.weight"
        found = source.blocks(full)
        assert found is not None and found.kind == "Q4_1"
        assert torch.equal(found.dense(), source.get(full))
    assert source.blocks("model.norm.weight") is None
    assert set(_SCALES) == set(gemm.BLOCK_FORMATS)


def _losses(path: Path, linear: LinearFactory | None, tokens: list[int]) -> Tensor:
    spec = replace(resolve_spec(path), dtype="float32")
    model = load_model(spec, path, Registry(entry_points=False), linear=linear)
    kv = KVStorage(spec.num_layers, 8, 16, spec.num_kv_heads, spec.head_dim)
    table = kv.new_table()
    table.append(list(range(8)))
    logits = []
    with torch.inference_mode():
        for start, stop in ((0, 96), (96, 127), (127, 128)):
            batch = pack([PackedRow(tokens[start:stop], start, Need.ALL, table)])
            step = attention_of(spec).step(batch, kv)
            logits.append(model.forward(batch.tokens, batch.positions, step, batch.logits_index, silent))
    return torch.nn.functional.cross_entropy(torch.cat(logits)[:-1], torch.tensor(tokens[1:]), reduction="none")


def test_model_on_its_blocks_predicts_like_its_values(smollm2_gguf: Path) -> None:
    from twinfer.core.runtime.tokenizer import load_tokenizer

    if gemm.why_not():
        pytest.skip(gemm.why_not())
    text = (Path(__file__).parents[2] / "README.md").read_text()
    tokens = list(load_tokenizer(smollm2_gguf).encode(text))[:128]
    exact = _losses(smollm2_gguf, None, tokens)
    on_blocks = _losses(smollm2_gguf, GGUFLinears(), tokens)
    assert abs(float((on_blocks - exact).mean())) < 0.03  # 127 tokens: the rounding of activations is noise here
    assert float((on_blocks - exact).abs().mean()) < 0.15


@pytest.mark.parametrize("factory", [BF16Linears, Int8Linears])
def test_experts_and_latent_attention_on_packed_weights(factory: type[BF16Linears], tmp_path: Path) -> None:
    """As the same rounded weights in float32: every expert and every projection of MLA is a linear."""
    if gemm.why_not():
        pytest.skip(gemm.why_not())
    tiny = TinyModel(tmp_path, *CASES["v2-lite"])
    sequence = prompts(33)
    found = []
    for plain in (False, True):
        with native.disabled() if plain else nullcontext():
            tiny.model = load_model(tiny.spec, tmp_path, Registry(entry_points=False), linear=factory())
            found += run(tiny, sequence, [[20, *[1] * 13]], "shuffled")
    # int8 steps of the activations jump where sums differ in the last bit
    assert close(found[0], found[1], 1e-5 if factory is BF16Linears else 0.05)
    assert close(found[0], tiny.expected(sequence[0]), 0.05 if factory is BF16Linears else 0.2)


def test_ranks_add_up_to_the_whole(smollm2_gguf: Path) -> None:
    """Shares of a projection back, each over its blocks of the input, sum to the projection."""
    whole = GGUFWeights(smollm2_gguf).blocks("model.layers.3.self_attn.o_proj.weight")
    assert whole is not None
    x = torch.randn(5, 576)
    ranks = [Parallel(rank, 3) for rank in range(3)]
    parts = [GGUFLinears()("o_proj", rank.cut_heads(whole, 9, 1), None)(rank.cut(x, 1)) for rank in ranks]
    assert close(sum(parts), GGUFLinears()("o_proj", whole, None)(x), 1e-5)


def test_engine_counts_what_it_holds(smollm2_gguf: Path) -> None:
    """Bytes of the packed weights are those of `adapt_model`, which memory and simulator use."""
    if gemm.why_not():
        pytest.skip(gemm.why_not())
    config = EngineConfig(model=str(smollm2_gguf), quantizer=Choice(name="gguf"), max_model_len=64)
    engine = load_engine(config, Registry(entry_points=False))
    try:
        assert engine.setup.model.weight_bits == 5.0
        layer = engine.model.layers[0]
        linears = [layer.attention.qkv_proj, layer.attention.o_proj, layer.mlp.gate_up_proj, layer.mlp.down_proj]
        norms = (2 * 30 + 1) * 576 * 4
        held = 30 * sum(linear.nbytes for linear in linears) + engine.model.lm_head.nbytes + norms
        assert held == pytest.approx(engine.setup.model.weight_bytes(), rel=1e-6)
        assert (
            f"Q4_1 (120), Q8_0 (1) on the native kernels ({gemm.instructions()})" in engine.setup.reasons["quantizer"]
        )
        assert engine.environment()["packed_products"] == gemm.instructions() != ""
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("quantizer", "dtype", "said"),
    [("gguf", "bfloat16", "float32 activations"), ("int8:activations=false", "auto", "int8 activations only"),
     ("int4", "auto", "no real implementation")],
)  # fmt: skip
def test_refused_in_words(quantizer: str, dtype: str, said: str, smollm2_gguf: Path) -> None:
    config = EngineConfig(
        model=str(smollm2_gguf), quantizer=Choice.model_validate(quantizer), dtype=dtype, max_model_len=64
    )
    with pytest.raises(ConfigError, match=said):
        load_engine(config, Registry(entry_points=False))


def test_gguf_needs_a_gguf_file(tiny_llama_dir: Path) -> None:
    config = EngineConfig(model=str(tiny_llama_dir), quantizer=Choice(name="gguf"))
    with pytest.raises(ConfigError, match=r"give a \.gguf file"):
        load_engine(config, Registry(entry_points=False))
