"""Mixture-of-experts families against transformers on tiny random checkpoints: float32, largest difference 1e-4."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from logits_oracle import TOLERANCE, TinyModel, chunked, difference, prompts, run

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
