"""Logits of the Llama-family decoder against transformers, float32, over ragged packed batches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from logits_oracle import TOLERANCE, TinyModel, chunked, prompts, run, tables_for

from twinfer.core.errors import ModelError
from twinfer.core.plan import Need
from twinfer.core.registry import Registry
from twinfer.core.runtime.attention_torch import attention_of
from twinfer.core.runtime.batch import PackedRow, pack
from twinfer.core.runtime.families import load_model
from twinfer.core.runtime.kv_storage import KVStorage
from twinfer.core.runtime.profile import silent

LLAMA3 = dict(
    rope_type="llama3", rope_theta=10000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=32,
)  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gqa": ("Llama", {}),
    "mha": ("Llama", dict(num_key_value_heads=6)),
    "mqa": ("Llama", dict(num_key_value_heads=1)),
    "tied": ("Llama", dict(tie_word_embeddings=True)),
    "biases": ("Llama", dict(attention_bias=True, mlp_bias=True)),
    "wide-heads": ("Llama", dict(head_dim=24)),
    "rope-llama3": ("Llama", dict(rope_parameters=LLAMA3)),
    "rope-linear": ("Llama", dict(rope_parameters=dict(rope_type="linear", factor=4.0, rope_theta=10000.0))),
    "mistral": ("Mistral", dict(sliding_window=None)),
    "mistral-window": ("Mistral", dict(sliding_window=7)),
    "qwen2": ("Qwen2", {}),
    "qwen2-window": ("Qwen2", dict(use_sliding_window=True, sliding_window=5, max_window_layers=1)),
    "qwen3": ("Qwen3", dict(head_dim=16)),
}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyModel]:
    made: dict[str, TinyModel] = {}

    def get(case: str) -> TinyModel:
        if case not in made:
            made[case] = TinyModel(tmp_path_factory.mktemp(case), *CASES[case])
        return made[case]

    return get


@pytest.mark.parametrize("order", ["contiguous", "shuffled"])
@pytest.mark.parametrize("case", CASES)
def test_mixed_ragged_batch_equals_transformers(loaded: Callable[[str], TinyModel], case: str, order: str) -> None:
    """Prefill, chunks, verify-sized rows and decode rows together in one step."""
    model = loaded(case)
    sequences = prompts(33, 5, 21, 40, 17, 9, 30)
    chunks = [
        [20, *[1] * 13],  # prefill, then decode
        [1, 1, 1, 2],
        [10, 11],
        [9, 9, 9, 13],
        [16, 1],  # decode beside longer chunks
        [3, 3, 3],  # short rows of equal length
        [6, 3, 3, 3, 15],
    ]
    for sequence, got in zip(sequences, run(model, sequences, chunks, order), strict=True):
        difference = (got - model.expected(sequence)).abs().max().item()
        assert difference <= TOLERANCE


@pytest.mark.parametrize("case", ["gqa", "mistral-window"])
def test_edge_06_every_chunk_size_equals_unchunked(loaded: Callable[[str], TinyModel], case: str) -> None:
    model = loaded(case)
    sequence = prompts(23)[0]
    whole = run(model, [sequence], [[23]], "shuffled")[0]
    assert (whole - model.expected(sequence)).abs().max() <= TOLERANCE
    for size in range(1, 24):
        got = run(model, [sequence], [chunked(23, size)], "shuffled")[0]
        assert (got - whole).abs().max() <= TOLERANCE, f"chunks of {size}"


@pytest.mark.parametrize("block_size", [1, 3, 16, 64])
def test_block_size_does_not_matter(loaded: Callable[[str], TinyModel], block_size: int) -> None:
    model = loaded("gqa")
    sequences = prompts(19, 26)
    chunks = [chunked(19, 5), chunked(26, 1)]
    for sequence, got in zip(sequences, run(model, sequences, chunks, "shuffled", block_size), strict=True):
        assert (got - model.expected(sequence)).abs().max() <= TOLERANCE


def test_logits_only_where_wanted(loaded: Callable[[str], TinyModel]) -> None:
    """`logits_index` follows the needs, in row order."""
    model = loaded("gqa")
    spec = model.spec
    a, b, c = prompts(8, 6, 7)
    kv = KVStorage(spec.num_layers, 16, 4, spec.num_kv_heads, spec.head_dim)
    tables = tables_for(kv, [8, 6, 7], "shuffled")
    rows = [
        PackedRow(a, 0, Need.LAST, tables[0]),
        PackedRow(b, 0, Need.NONE, tables[1]),
        PackedRow(c, 0, Need.DRAFTS, tables[2], draft=2),
    ]
    batch = pack(rows)
    assert batch.logits_index.tolist() == [7, 18, 19, 20]
    with torch.inference_mode():
        step = attention_of(spec).step(batch, kv)
        logits = model.model.forward(batch.tokens, batch.positions, step, batch.logits_index, silent)
    expected = torch.cat((model.expected(a)[-1:], model.expected(c)[-3:]))
    assert (logits - expected).abs().max() <= TOLERANCE


def test_op_marks_are_those_of_the_work_model(loaded: Callable[[str], TinyModel]) -> None:
    from twinfer.core.work import StepShape, step_ops

    model = loaded("gqa")
    spec = model.spec
    kv = KVStorage(spec.num_layers, 4, 4, spec.num_kv_heads, spec.head_dim)
    batch = pack([PackedRow([5, 6, 7], 0, Need.LAST, tables_for(kv, [3], "contiguous")[0])])
    marks: list[str] = []
    with torch.inference_mode():
        step = attention_of(spec).step(batch, kv)
        model.model.forward(batch.tokens, batch.positions, step, batch.logits_index, marks.append)
    ops = step_ops(spec, StepShape.prefill(3))
    assert set(marks) == {op.name for op in ops} - {"sample"}
    for op in ops:
        if op.name not in ("sample", "norms"):
            assert marks.count(op.name) == op.count, op.name


def test_bfloat16_is_close(loaded: Callable[[str], TinyModel], tmp_path: Path) -> None:
    model = loaded("gqa")
    model.reference.save_pretrained(tmp_path)
    half = load_model(model.spec, tmp_path, Registry(entry_points=False), dtype=torch.bfloat16)
    spec, sequence = model.spec, prompts(20)[0]
    kv = KVStorage(spec.num_layers, 8, 4, spec.num_kv_heads, spec.head_dim, torch.bfloat16)
    table = tables_for(kv, [20], "shuffled")[0]
    outs = []
    with torch.inference_mode():
        for start, stop in ((0, 12), (12, 19), (19, 20)):
            batch = pack([PackedRow(sequence[start:stop], start, Need.ALL, table)])
            step = attention_of(spec).step(batch, kv)
            outs.append(half.forward(batch.tokens, batch.positions, step, batch.logits_index, silent))
    got, expected = torch.cat(outs), model.expected(sequence)
    assert got.dtype == torch.float32
    assert (got - expected).norm() / expected.norm() < 0.05


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(family="gpt2"), "no model family serves 'gpt2'"),
        (dict(rope_scaling={"rope_type": "axial", "factor": 4.0}), "rope scaling 'axial' is not implemented"),
        (dict(hidden_act="relu"), "activation 'relu'"),
        (dict(norms_per_layer=4), "Gemma's norms"),
    ],
)
def test_what_is_not_implemented_is_refused(
    loaded: Callable[[str], TinyModel], tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    from dataclasses import replace

    with pytest.raises(ModelError, match=words):
        load_model(replace(loaded("gqa").spec, **changes), tmp_path, Registry(entry_points=False))
