"""Latent attention (MLA) against transformers on tiny random checkpoints: float32, largest difference 1e-4.

Both caches (absorbed: latents, naive: keys and values), absorbed and expanded rows, over ragged packed batches.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from logits_oracle import TOLERANCE, TinyModel, chunked, difference, marks_of, prompts, run

from twinfer.core.plan import Copy
from twinfer.core.registry import Registry
from twinfer.core.runtime.families import load_model
from twinfer.core.runtime.kv_storage import KVStorage
from twinfer.core.runtime.weights import open_weights
from twinfer.core.spec import MLASpec
from twinfer.core.work import StepShape, step_ops
from twinfer.kernels import native
from twinfer.plugins.model_family.llama import LlamaFamily

MLA = dict(
    num_key_value_heads=6, kv_lora_rank=16, q_lora_rank=20, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10,
    n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=24, n_shared_experts=2, first_k_dense_replace=1,
)  # fmt: skip
YARN = dict(
    rope_type="yarn", factor=8.0, original_max_position_embeddings=32, rope_theta=10000.0, beta_fast=8, beta_slow=1,
    mscale=0.7, mscale_all_dim=0.9,
)  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "v2-lite": ("DeepseekV2", MLA | dict(q_lora_rank=None, routed_scaling_factor=1.7)),
    "v2": (
        "DeepseekV2",
        MLA | dict(topk_method="group_limited_greedy", n_group=4, topk_group=2, routed_scaling_factor=3.0),
    ),
    "v2-yarn-biases": ("DeepseekV2", MLA | dict(rope_parameters=YARN, mlp_bias=True, attention_bias=True)),
    "v3": ("DeepseekV3", MLA | dict(n_group=4, topk_group=2)),
    "v3-yarn": ("DeepseekV3", MLA | dict(n_group=2, topk_group=1, num_experts_per_tok=2, rope_parameters=YARN)),
    # widths that the native kernels take, for both kinds of rows
    "v3-wide": (
        "DeepseekV3",
        MLA | dict(n_group=1, topk_group=1, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16),
    ),
    # latents of 48, a rank that is no whole number of vectors; keys of 22
    "v3-odd": (
        "DeepseekV3",
        MLA | dict(n_group=1, topk_group=1, kv_lora_rank=42, qk_nope_head_dim=16, qk_rope_head_dim=6, v_head_dim=16),
    ),
    "v3-halves-biases": (
        "DeepseekV3",
        MLA | dict(n_group=1, topk_group=1, norm_topk_prob=False, rope_interleave=False, attention_bias=True),
    ),
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyModel]:
    made: dict[str, TinyModel] = {}

    def get(case: str) -> TinyModel:
        if case not in made:
            made[case] = TinyModel(tmp_path_factory.mktemp(case), *CASES[case])
        return made[case]

    return get


@pytest.mark.parametrize("case", CASES)
def test_mixed_ragged_batch_equals_transformers(tiny: Callable[[str], TinyModel], case: str) -> None:
    model = tiny(case)
    sequences = prompts(33, 5, 21, 40, 17)
    chunks = [[20, *[1] * 13], [1, 1, 1, 2], [10, 11], chunked(40, 9), [16, 1]]
    for sequence, got in zip(sequences, run(model, sequences, chunks, "shuffled"), strict=True):
        assert difference(got, model.expected(sequence)) <= TOLERANCE


def converted(tiny: TinyModel, folder: Path, changes: dict[str, Any], tensors: dict[str, torch.Tensor]) -> TinyModel:
    """The checkpoint of `tiny` with other tensors and another `MLASpec`, served here."""
    from safetensors.torch import save_file

    source = open_weights(tiny.folder)
    kept = {name: source.get(name) for name in source.names()} | tensors
    spec = replace(tiny.spec, mla=replace(tiny.spec.mla, **changes))
    expected = LlamaFamily.expected_tensors(spec)
    save_file({name: t.contiguous() for name, t in kept.items() if name in expected}, folder / "model.safetensors")
    served = copy(tiny)
    served.spec, served.model = spec, load_model(spec, folder, Registry(entry_points=False))
    return served


@pytest.mark.parametrize("case", ["v2-lite", "v3-yarn"])
def test_naive_equals_absorbed(tiny: Callable[[str], TinyModel], case: str, tmp_path: Path) -> None:
    """The same weights over both caches, in steps with rows of every kind."""
    model = tiny(case)
    naive = converted(model, tmp_path, dict(absorbed=False), {})
    assert (model.spec.kv_shape(), naive.spec.kv_shape()) == ((1, 24, 0), (6, 20, 10))
    sequences = prompts(33, 5, 40, 17)
    chunks = [[20, *[1] * 13], [1, 1, 1, 2], chunked(40, 9), [16, 1]]
    for order in ("contiguous", "shuffled"):
        for absorbed, expanded in zip(
            run(model, sequences, chunks, order), run(naive, sequences, chunks, order), strict=True
        ):
            assert difference(absorbed, expanded) <= TOLERANCE


@pytest.mark.parametrize("case", ["v3", "v3-wide", "v3-odd"])
def test_both_ways_of_a_row_and_a_few_heads_at_a_time(
    tiny: Callable[[str], TinyModel], case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows forced to be absorbed or expanded give the same, also when heads are expanded a few at a time."""
    from twinfer.core.runtime import attention_latent

    model, sequences = tiny(case), prompts(33, 21)
    chunks = [[20, 1, 5, 1, 6], [7, 1, 1, 12]]
    for cheaper in (lambda m, queries, end: True, lambda m, queries, end: False, lambda m, queries, end: queries < 6):
        monkeypatch.setattr(attention_latent, "absorbing_is_cheaper", cheaper)
        monkeypatch.setattr(attention_latent, "EXPAND_BYTES", 4 * 33 * (20 + 10) * 4)
        for sequence, got in zip(sequences, run(model, sequences, chunks, "shuffled"), strict=True):
            assert difference(got, model.expected(sequence)) <= TOLERANCE


def test_own_frequencies_and_halves(tiny: Callable[[str], TinyModel], tmp_path: Path) -> None:
    """A checkpoint whose rotary pairs lie in halves, with frequencies given one by one."""
    model = tiny("v2-lite")
    m = model.spec.mla
    assert m is not None
    heads, nope, rope = model.spec.num_heads, m.qk_nope_head_dim, m.qk_rope_head_dim
    halves = [*range(0, rope, 2), *range(1, rope, 2)]
    tensors = {}
    source = open_weights(model.folder)
    for i in range(model.spec.num_layers):
        name = f"model.layers.{i}.self_attn."
        q = source.get(f"{name}q_proj.weight").view(heads, nope + rope, -1)
        tensors[f"{name}q_proj.weight"] = torch.cat((q[:, :nope], q[:, nope:][:, halves]), dim=1).flatten(0, 1)
        kv = source.get(f"{name}kv_a_proj_with_mqa.weight")
        tensors[f"{name}kv_a_proj_with_mqa.weight"] = torch.cat((kv[: m.kv_lora_rank], kv[m.kv_lora_rank :][halves]))
    frequencies = tuple(float(10000.0 ** (-i / rope)) for i in range(0, rope, 2))
    same = converted(model, tmp_path, dict(interleaved=False, rope_frequencies=frequencies), tensors)
    sequence = prompts(20)[0]
    assert difference(run(same, [sequence], [[13, 6, 1]], "shuffled")[0], model.expected(sequence)) <= TOLERANCE
    other = converted(model, tmp_path, dict(interleaved=False, rope_frequencies=frequencies[::-1]), tensors)
    assert difference(run(other, [sequence], [[13, 6, 1]], "shuffled")[0], model.expected(sequence)) > 0.1


def test_mha_as_latents_exactly(tmp_path: Path) -> None:
    """A Llama checkpoint as MLA of full rank: one rotated key part as wide as all keys, values as the latent.

    qk_nope_head_dim is 0, every query reads its own head's part, and the scale stays that of the head.
    """
    tiny = TinyModel(tmp_path, "Llama", {})
    spec, source = tiny.spec, open_weights(tmp_path)
    heads, kv_heads, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
    wide, pairs = kv_heads * dim, dim // 2
    mla = MLASpec(
        kv_lora_rank=wide, q_lora_rank=None, qk_nope_head_dim=0, qk_rope_head_dim=wide, v_head_dim=dim,
        interleaved=False, latent_norm=False,
        rope_frequencies=tuple(10000.0 ** (-2 * (i % pairs) / dim) for i in range(wide // 2)),
    )  # fmt: skip
    # pair p of KV head h lies at (h * pairs + p, the same in the second half)
    order = torch.cat([torch.arange(h * dim + half * pairs, h * dim + (half + 1) * pairs)
                       for half in (0, 1) for h in range(kv_heads)])  # fmt: skip
    tensors = {}
    for name in source.names():
        if ".self_attn." not in name or "o_proj" in name:
            tensors[name] = source.get(name)
    for i in range(spec.num_layers):
        name = f"model.layers.{i}.self_attn."
        q = source.get(f"{name}q_proj.weight").view(heads, dim, -1)
        placed = torch.zeros(heads, wide, spec.hidden_size)
        values = torch.zeros(heads, dim, wide)
        for h in range(heads):
            own = h // (heads // kv_heads)
            padded = torch.zeros(wide, spec.hidden_size)
            padded[own * dim : (own + 1) * dim] = q[h]
            placed[h] = padded[order]
            values[h, :, own * dim : (own + 1) * dim] = torch.eye(dim)
        tensors[f"{name}q_proj.weight"] = placed.flatten(0, 1)
        k, v = source.get(f"{name}k_proj.weight"), source.get(f"{name}v_proj.weight")
        tensors[f"{name}kv_a_proj_with_mqa.weight"] = torch.cat((v, k[order]))
        tensors[f"{name}kv_b_proj.weight"] = values.flatten(0, 1)
    latent = replace(
        spec, mla=mla, head_dim=wide, value_dim=dim, num_kv_heads=heads, query_scale=dim**-0.5
    )  # fmt: skip
    folder = tmp_path / "latent"
    folder.mkdir()
    from safetensors.torch import save_file

    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")
    sequence = prompts(26)[0]
    for absorbed in (True, False):
        served = copy(tiny)
        served.spec = replace(latent, mla=replace(mla, absorbed=absorbed))
        served.model = load_model(served.spec, folder, Registry(entry_points=False))
        got = run(served, [sequence], [[15, 9, 1, 1]], "shuffled")[0]
        assert difference(got, tiny.expected(sequence)) <= TOLERANCE


@pytest.mark.parametrize("absorbed", [True, False])
def test_op_marks_are_those_of_the_work_model(tiny: Callable[[str], TinyModel], absorbed: bool, tmp_path: Path) -> None:
    model = tiny("v3")
    if not absorbed:
        model = converted(model, tmp_path, dict(absorbed=False), {})
    for length in (2, 30):
        marks = marks_of(model, [prompts(length)[0]])
        ops = step_ops(model.spec, StepShape.prefill(length))
        assert set(marks) == {op.name for op in ops} - {"sample"}
        first = [m for m in dict.fromkeys(marks) if m in ("kv_down_proj", "rope_kv_write", "kv_up_proj", "attention")]
        assert first == list(
            dict.fromkeys(o.name for o in ops if o.name in ("kv_down_proj", "rope_kv_write", "kv_up_proj", "attention"))
        )


def test_a_second_copy_of_a_block_holds_the_latents(tiny: Callable[[str], TinyModel]) -> None:
    """Copy-on-write and cleaning up after a failed row act on the latents like on keys and values."""
    spec = tiny("v3").spec
    kv = KVStorage.of(spec, 6, 4)
    assert kv.nbytes == 6 * 4 * spec.num_layers * 24 * 4
    kv.keys[1].copy_(torch.arange(6 * 4 * 24, dtype=torch.float32).view(24, 1, 24))
    table = kv.new_table()
    table.append([2])
    kv.copy_blocks([Copy("s", 0, 0, 2, 5)])
    assert torch.equal(kv.keys[1][20:24], kv.keys[1][8:12])
    kv.keys[1][9] = float("nan")
    kv.clear_non_finite(table)
    assert bool(kv.keys[1].isfinite().all()) and kv.keys[1][8, 0, 3] == 8 * 24 + 3


@pytest.mark.parametrize("case", ["v3", "v3-wide"])
def test_bfloat16_is_close(tiny: Callable[[str], TinyModel], case: str) -> None:
    model = tiny(case)
    half = copy(model)
    half.model = load_model(model.spec, model.folder, Registry(entry_points=False), dtype=torch.bfloat16)
    sequence = prompts(21)[0]
    got, expected = run(half, [sequence], [[13, 7, 1]], "shuffled")[0], model.expected(sequence)
    per_token = (got - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert per_token.median() < 0.08  # a token whose experts were close to tied may go to others


@pytest.mark.parametrize("absorbed", [True, False])
def test_latents_in_bfloat16_beside_float32(tiny: Callable[[str], TinyModel], absorbed: bool, tmp_path: Path) -> None:
    """Latents, or keys and values made of them, are rounded when stored; how a row is fed hardly matters."""
    if native.load() is None:
        pytest.skip(f"needs the native kernels ({native.why_not()})")
    model = tiny("v3-wide")
    if not absorbed:
        model = converted(model, tmp_path, dict(absorbed=False), {})
    sequence = prompts(24)[0]
    expected = model.expected(sequence)
    for chunks in ([24], [13, 9, 1, 1]):
        got = run(model, [sequence], [chunks], "shuffled", kv_dtype=torch.bfloat16)[0]
        per_token = (got - expected).norm(dim=-1) / expected.norm(dim=-1)
        assert 1e-6 < per_token.median() < 0.03
