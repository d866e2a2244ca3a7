"""Latent attention (MLA) against transformers on tiny random checkpoints: float32, largest difference 1e-4.

Both caches (absorbed: latents, naive: keys and values), absorbed and expanded rows, over ragged packed batches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from logits_oracle import TOLERANCE, TinyModel, chunked, difference, prompts, run

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
    "v2-yarn": ("DeepseekV2", MLA | dict(rope_parameters=YARN)),
    "v3": ("DeepseekV3", MLA | dict(n_group=4, topk_group=2)),
    "v3-yarn": ("DeepseekV3", MLA | dict(n_group=2, topk_group=1, num_experts_per_tok=2, rope_parameters=YARN)),
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
