"""Every dense family against transformers on tiny random checkpoints: float32, largest difference 1e-4.

Ragged packed batches, chunked prefill, a paged cache with scattered blocks, windows many times shorter than the text.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from logits_oracle import BASE, TOLERANCE, VOCAB, TinyModel, chunked, difference, prompts, run
from recorded_world import World

from twinfer.core.hf_config import spec_from_hf
from twinfer.core.registry import Registry
from twinfer.core.runtime.families import load_model
from twinfer.core.runtime.quantized_linear import BF16Linears
from twinfer.core.runtime.rope import DynamicRotary
from twinfer.kernels import gemm, native

SHORT, LONG = [1.0 + 0.1 * i for i in range(8)], [1.5 + i for i in range(8)]
WIDE = dict(hidden_size=96)  # heads of 16, which the native kernels take
GEMMA = dict(head_dim=16, query_pre_attn_scalar=20)
YARN = dict(
    rope_type="yarn", factor=8.0, original_max_position_embeddings=32, rope_theta=10000.0, beta_fast=8, beta_slow=1
)
LLAMA3 = dict(
    rope_type="llama3", rope_theta=10000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=32,
)  # fmt: skip

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-gqa": ("Llama", {}),
    "llama-narrow-heads": ("Llama", dict(hidden_size=48)),
    "llama-mha-tied": ("Llama", dict(num_key_value_heads=6, tie_word_embeddings=True)),
    "llama-mqa-biases-wide": ("Llama", dict(num_key_value_heads=1, attention_bias=True, mlp_bias=True, head_dim=32)),
    "llama-linear": ("Llama", dict(rope_parameters=dict(rope_type="linear", factor=4.0, rope_theta=10000.0))),
    "llama-llama3": ("Llama", dict(rope_parameters=LLAMA3)),
    "llama-dynamic": ("Llama", dict(rope_parameters=dict(rope_type="dynamic", factor=4.0, rope_theta=10000.0))),
    "llama-yarn": ("Llama", dict(rope_parameters=YARN)),
    "mistral-window": ("Mistral", dict(sliding_window=7)),
    "mistral-full": ("Mistral", dict(sliding_window=None)),
    "qwen2": ("Qwen2", dict(tie_word_embeddings=True)),
    "qwen2-window": ("Qwen2", dict(use_sliding_window=True, sliding_window=5, max_window_layers=1)),
    "qwen3": ("Qwen3", dict(head_dim=16)),
    "qwen3-window": ("Qwen3", dict(head_dim=16, use_sliding_window=True, sliding_window=9, max_window_layers=2)),
    "gemma2": ("Gemma2", GEMMA | dict(sliding_window=7)),
    "gemma2-mqa": ("Gemma2", GEMMA | dict(sliding_window=6, num_key_value_heads=1, attn_logit_softcapping=3.0)),
    "gemma3": ("Gemma3", GEMMA | dict(sliding_window=7, sliding_window_pattern=3, num_hidden_layers=4)),
    "gemma3-linear": (
        "Gemma3",
        GEMMA
        | dict(
            sliding_window=5,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            rope_parameters=dict(
                full_attention=dict(rope_type="linear", factor=8.0, rope_theta=1e6),
                sliding_attention=dict(rope_type="default", rope_theta=1e4),
            ),
        ),
    ),
    "phi3": ("Phi3", dict(sliding_window=None)),
    "phi3-window-partial": (
        "Phi3",
        dict(sliding_window=8, rope_parameters=dict(partial_rotary_factor=0.5, rope_type="default")),
    ),
    "phi3-longrope": (
        "Phi3",
        dict(
            original_max_position_embeddings=64,
            rope_parameters=dict(rope_type="longrope", short_factor=SHORT, long_factor=LONG, rope_theta=10000.0),
        ),
    ),
}
SHARDED = "gemma2"  # this one is stored in several files


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyModel]:
    """`(case) -> TinyModel`, each made once."""
    made: dict[str, TinyModel] = {}

    def get(case: str) -> TinyModel:
        if case not in made:
            architecture, changes = CASES[case]
            made[case] = TinyModel(
                tmp_path_factory.mktemp(case), architecture, WIDE | changes, shards=3 if case == SHARDED else 1,
                context=64 if case == "phi3-longrope" else None,
            )  # fmt: skip
        return made[case]

    return get


@pytest.mark.parametrize("on_native", [False, True], ids=["torch", "native"])
@pytest.mark.parametrize("case", CASES)
def test_ragged_packed_batch_in_scattered_blocks(tiny: Callable[[str], TinyModel], case: str, on_native: bool) -> None:
    """Prefill, chunks, verify-sized rows and decode rows in one step; windows wrap several times."""
    model = tiny(case)
    assert case == "llama-narrow-heads" or model.spec.head_dim % 16 == 0, "the native kernels would not serve it"
    sequences = prompts(33, 5, 21, 40, 17, 9)
    chunks = [[20, *[1] * 13], [1, 1, 1, 2], [10, 11], [9, 9, 9, 13], [16, 1], [3, 3, 3]]
    with nullcontext() if on_native else native.disabled():
        answers = run(model, sequences, chunks, "shuffled")
    for sequence, got in zip(sequences, answers, strict=True):
        assert difference(got, model.expected(sequence)) <= TOLERANCE


@pytest.mark.parametrize("case", ["gemma2", "gemma3", "phi3-window-partial", "qwen3-window", "llama-dynamic"])
def test_recorded_passes(tiny: Callable[[str], TinyModel], case: str) -> None:
    """Repeated as one native call, bit for bit; what torch computes (dynamic NTK) is not recorded."""
    model = tiny(case)
    with torch.inference_mode():
        packed = load_model(model.spec, model.folder, Registry(entry_points=False), linear=BF16Linears())
        world = World(packed)
        world.check(world.batch({i: 3 + 4 * i for i in range(8)}))
        for step in range(20):
            world.check(world.batch({i: 1 for i in ([0, 1, 2] if step % 10 < 7 else [5, 3, 7])}))
    recordable = native.load() is not None and gemm.why_not() == "" and case != "llama-dynamic"
    assert world.num_recorded == recordable


@pytest.mark.parametrize("case", ["gemma2", "gemma3"])
def test_embeddings_are_scaled_as_transformers_rounds(tiny: Callable[[str], TinyModel], case: str) -> None:
    """sqrt(96) is no bfloat16: the scale is rounded before it multiplies."""
    model = tiny(case)
    half = load_model(model.spec, model.folder, Registry(entry_points=False), dtype=torch.bfloat16)
    ids = torch.arange(VOCAB)
    embedding = copy.deepcopy(model.reference.model.embed_tokens).bfloat16()
    with torch.inference_mode():
        assert torch.equal(half.embed(ids), embedding(ids))  # type: ignore[attr-defined]
        assert not torch.equal(half.embed(ids), half.table.embed(ids) * 96**0.5)  # type: ignore[attr-defined]


@pytest.mark.parametrize("case", ["gemma2", "gemma3", "phi3-window-partial", "qwen3", "mistral-window"])
def test_edge_06_every_chunk_size(tiny: Callable[[str], TinyModel], case: str) -> None:
    model = tiny(case)
    sequence = prompts(23)[0]
    expected = model.expected(sequence)
    for size in range(1, 24):
        got = run(model, [sequence], [chunked(23, size)], "shuffled", block_size=3)[0]
        assert difference(got, expected) <= TOLERANCE, f"chunks of {size}"


def test_language_model_of_a_checkpoint_for_text_and_images(tmp_path: Path) -> None:
    """Gemma 3 as it is published from 4B on: the eyes are left alone, the text is the same model."""
    import transformers

    text = {k: v for k, v in BASE.items() if not k.endswith("token_id")}
    text |= GEMMA | dict(sliding_window=7, sliding_window_pattern=3)
    eyes = dict(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
    )
    config = transformers.Gemma3Config(
        text_config=text, vision_config=eyes, mm_tokens_per_image=4, image_token_index=96
    )
    with torch.random.fork_rng():
        torch.manual_seed(1)
        reference = transformers.Gemma3ForConditionalGeneration(config).float().eval()
    reference.save_pretrained(tmp_path)
    tiny = TinyModel.__new__(TinyModel)
    tiny.spec = spec_from_hf(json.loads((tmp_path / "config.json").read_text()), "tiny")
    tiny.model = load_model(tiny.spec, tmp_path, Registry(entry_points=False))
    sequence = [t for t in prompts(30)[0] if t != 96]
    with torch.inference_mode():
        expected = reference(torch.tensor([sequence])).logits[0]
    assert difference(run(tiny, [sequence], [[len(sequence)]], "shuffled")[0], expected) <= TOLERANCE


def test_shards_are_several_files(tiny: Callable[[str], TinyModel]) -> None:
    assert len(list(tiny(SHARDED).folder.glob("*.safetensors"))) >= 3


@pytest.mark.parametrize("sizes", [[90], [1] * 90, [70, 1, 1, 18], [63, 2, 25]])
def test_longrope_beyond_the_trained_length(tmp_path_factory: pytest.TempPathFactory, sizes: list[int]) -> None:
    """With a context beyond it the long factors serve: sequences past it equal transformers, however they are fed."""
    folder = tmp_path_factory.getbasetemp() / "longrope"
    folder.mkdir(exist_ok=True)
    architecture, changes = CASES["phi3-longrope"]
    model = TinyModel(folder, architecture, WIDE | changes)
    sequence = prompts(90)[0]
    assert difference(run(model, [sequence], [sizes], "shuffled")[0], model.expected(sequence)) <= TOLERANCE


def test_dynamic_ntk_is_transformers_token_by_token(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Beyond the trained length the base follows the position: any chunks here equal single tokens there."""
    from transformers import DynamicCache

    changes = dict(max_position_embeddings=16, rope_parameters=CASES["llama-dynamic"][1]["rope_parameters"])
    model = TinyModel(tmp_path_factory.mktemp("dynamic"), "Llama", changes)
    assert isinstance(model.model.rotary, DynamicRotary)  # type: ignore[attr-defined]
    assert model.spec.max_context == 64
    sequence, neighbour = prompts(40, 37)
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        expected = torch.cat([model.reference(torch.tensor([[t]]), cache=cache).logits[0] for t in sequence])
    for chunks in ([1] * 40, [40], [15, 2, 23]):
        got = run(model, [sequence, neighbour], [chunks, [37]], "shuffled")[0]
        assert difference(got, expected) <= TOLERANCE, chunks
    assert difference(expected, model.expected(sequence)) > 100 * TOLERANCE, "fed at once, transformers turns all alike"
