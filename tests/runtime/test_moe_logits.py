"""Mixture-of-experts families against transformers on tiny random checkpoints: float32, largest difference 1e-4."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from logits_oracle import TOLERANCE, TinyModel, chunked, difference, marks_of, prompts, run

from twinfer.core.errors import ModelError
from twinfer.core.registry import Registry
from twinfer.core.runtime.families import load_model
from twinfer.core.runtime.families.moe import route
from twinfer.core.runtime.profile import silent
from twinfer.core.runtime.weights import SafetensorsWeights, open_weights
from twinfer.core.spec import MoESpec
from twinfer.core.work import StepShape, step_ops

ONE_EXPERT = [f"model.layers.0.mlp.experts.1.{part}_proj.weight" for part in ("gate", "up", "down")]
QWEN = dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=24, head_dim=16)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", dict(num_local_experts=4, num_experts_per_tok=2)),
    "mixtral-window": ("Mixtral", dict(num_local_experts=4, num_experts_per_tok=1, sliding_window=7)),
    "qwen3-moe": ("Qwen3Moe", QWEN | dict(norm_topk_prob=True)),
    "qwen3-moe-dense-layers": (
        "Qwen3Moe",
        QWEN | dict(num_hidden_layers=4, decoder_sparse_step=2, mlp_only_layers=[3]),
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


@pytest.mark.parametrize("case", ["mixtral", "qwen3-moe"])
def test_experts_stored_as_one_tensor(tiny: Callable[[str], TinyModel], case: str, tmp_path: Path) -> None:
    """What transformers 5 writes with save_original_format=False: the same model."""
    model = tiny(case)
    model.reference.save_pretrained(tmp_path, save_original_format=False)
    stored = set(SafetensorsWeights(tmp_path, [tmp_path / "model.safetensors"])._files[n][1] for n in ONE_EXPERT)
    assert stored == {"model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj"}
    ours, theirs = open_weights(tmp_path), open_weights(model.folder)
    assert sorted(ours.names()) == sorted(theirs.names())
    for name in theirs.names():
        assert ours.shape(name) == theirs.shape(name) == tuple(ours.get(name).shape)
        assert torch.equal(ours.get(name), theirs.get(name)), name


def test_missing_expert_is_named(tiny: Callable[[str], TinyModel], tmp_path: Path) -> None:
    spec = replace(tiny("mixtral").spec, moe=MoESpec(num_experts=5, top_k=2, intermediate_size=80))
    with pytest.raises(ModelError, match=r"missing model\.layers\.0\.mlp\.experts\.4\.gate_proj\.weight"):
        load_model(spec, tiny("mixtral").folder, Registry(entry_points=False))


def test_op_marks_are_those_of_the_work_model(tiny: Callable[[str], TinyModel]) -> None:
    model = tiny("qwen3-moe-dense-layers")
    marks = marks_of(model, [prompts(5)[0]])
    ops = step_ops(model.spec, StepShape.prefill(5))
    assert set(marks) == {op.name for op in ops} - {"sample"}
    assert marks.count("router") == model.spec.num_moe_layers == 1


# --- routing --------------------------------------------------------------------------------------


class Stub:
    """The fields of a configuration that a router of transformers reads."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)


def reference_router(kind: str, config: dict[str, Any]) -> tuple[Any, MoESpec]:
    """(router module of transformers, our routing)."""
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
    from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    c = Stub(**config)
    ours = dict(num_experts=c.num_experts, top_k=c.num_experts_per_tok, intermediate_size=1)
    if kind == "mixtral":
        return MixtralTopKRouter(c), MoESpec(**ours)
    if kind == "qwen3":
        return Qwen3MoeTopKRouter(c), MoESpec(**ours, renormalize=c.norm_topk_prob)
    grouped = dict(num_groups=c.n_group, top_groups=c.topk_group, scale=c.routed_scaling_factor)
    if kind == "v2":
        if c.topk_method == "greedy":
            grouped |= dict(num_groups=1, top_groups=1)
        return DeepseekV2TopkRouter(c), MoESpec(**ours, **grouped, renormalize=False)
    return DeepseekV3TopkRouter(c), MoESpec(
        **ours, **grouped, scoring="sigmoid", renormalize=c.norm_topk_prob, score_bias=True, group_score_top=2
    )


ROUTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {}),
    "qwen3": ("qwen3", dict(norm_topk_prob=False)),
    "qwen3-normed": ("qwen3", dict(norm_topk_prob=True)),
    "v2-greedy": ("v2", dict(topk_method="greedy")),
    "v2-groups": ("v2", dict(topk_method="group_limited_greedy")),
    "v3": ("v3", dict(norm_topk_prob=True)),
    "v3-not-normed": ("v3", dict(norm_topk_prob=False, routed_scaling_factor=1.0)),
}


@pytest.mark.parametrize("num_experts", [8, 16, 256])  # torch.topk sorts in two ways, by top_k / num_experts
@pytest.mark.parametrize("case", ROUTERS)
def test_moe_routing_ties(case: str, num_experts: int) -> None:
    """The experts that transformers chooses, with scores that are equal by twos, by groups and all of them.

    Inputs and weights are small whole numbers, so that equal products are equal to the last bit.
    """
    kind, changes = ROUTERS[case]
    config = dict(
        num_experts=num_experts, num_local_experts=num_experts, hidden_size=12, num_experts_per_tok=4, n_group=4,
        topk_group=2, routed_scaling_factor=2.5,
    )  # fmt: skip
    router, moe = reference_router(kind, config | changes)
    generator = torch.Generator().manual_seed(num_experts)

    def whole(*shape: int) -> torch.Tensor:
        return torch.randint(-1, 2, shape, generator=generator).float()

    weight = whole(num_experts, 12)
    copied = weight.clone()
    copied[1::2] = copied[::2]
    bias = torch.randint(0, 2, (num_experts,), generator=generator).float() / 8
    x = torch.cat((whole(60, 12), torch.zeros(2, 12)))
    num_tied = 0
    for rows in (weight, copied, weight[:1].expand_as(weight)):
        router.weight.data.copy_(rows)
        if kind == "v3":
            router.e_score_correction_bias.copy_(bias)
        with torch.inference_mode():
            logits, weights, indices = router(x)
            ours, chosen = route(torch.nn.functional.linear(x, rows), moe, bias if kind == "v3" else None)
        num_tied += int((logits.sort(dim=-1).values.diff(dim=-1) == 0).any(dim=-1).sum())
        order, theirs = chosen.sort(dim=-1), indices.sort(dim=-1)
        assert torch.equal(order.values, theirs.values)
        torch.testing.assert_close(ours.gather(1, order.indices), weights.gather(1, theirs.indices), rtol=1e-6, atol=0)
    assert num_tied > 120


def test_tied_router_rows_in_a_whole_model(tmp_path: Path) -> None:
    """A router of zeros: every token's experts are decided by ties alone."""
    model = TinyModel(tmp_path, *CASES["mixtral"])
    for layer in model.reference.model.layers:
        layer.mlp.gate.weight.data.zero_()
    model.reference.save_pretrained(tmp_path)
    tied = load_model(model.spec, tmp_path, Registry(entry_points=False))
    model.model = tied
    sequence = prompts(19)[0]
    assert difference(run(model, [sequence], [[7, 11, 1]], "shuffled")[0], model.expected(sequence)) <= TOLERANCE


def test_experts_against_a_loop_over_tokens(tiny: Callable[[str], TinyModel]) -> None:
    """Grouping by expert changes nothing; experts that no token chose do not run."""
    block = tiny("qwen3-moe").model.layers[0].mlp
    x = torch.randn(23, 48, generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        weights, chosen = route(torch.nn.functional.linear(x, block.router), block.moe)
        expected = torch.zeros_like(x)
        for t in range(23):
            for w, e in zip(weights[t], chosen[t].tolist(), strict=True):
                gate, up = block.gate_up_projs[e](x[t : t + 1]).chunk(2, dim=-1)
                expected[t] += w * block.down_projs[e](torch.nn.functional.silu(gate) * up)[0]
        assert (block(x, silent) - expected).abs().max() <= 1e-5
        one = block(x[:1], silent)
        assert (one - expected[:1]).abs().max() <= 1e-5


def test_bfloat16_is_close(tiny: Callable[[str], TinyModel]) -> None:
    from copy import copy

    model = tiny("qwen3-moe")
    half = copy(model)
    half.model = load_model(model.spec, model.folder, Registry(entry_points=False), dtype=torch.bfloat16)
    sequence = prompts(21)[0]
    got, expected = run(half, [sequence], [[13, 7, 1]], "shuffled")[0], model.expected(sequence)
    assert got.dtype == torch.float32
    per_token = (got - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert per_token.median() < 0.05  # a token whose experts were close to tied may go to others
