"""Whole runs of the families with experts and latent attention: greedy tokens equal transformers', preempted or not."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from logits_oracle import TinyModel

from twinfer.core.config import EngineConfig
from twinfer.core.errors import ConfigError
from twinfer.core.params import SamplingParams
from twinfer.core.runtime.llm import LLM
from twinfer.core.runtime.loading import load_engine

VOCAB, NEW = 128, 14
LENGTHS = (26, 9, 30, 17)
EXPERTS = dict(num_experts_per_tok=3, moe_intermediate_size=24)
MLA = EXPERTS | dict(
    num_key_value_heads=6, kv_lora_rank=16, q_lora_rank=20, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10,
    n_routed_experts=8, n_shared_experts=1, first_k_dense_replace=1,
)  # fmt: skip
FAMILIES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "Mixtral": (dict(num_local_experts=4, num_experts_per_tok=2), ("gqa",)),
    "Qwen3Moe": (EXPERTS | dict(num_experts=8, head_dim=16), ("gqa",)),
    "DeepseekV2": (MLA | dict(n_group=4, topk_group=2, topk_method="group_limited_greedy"), ("mla", "mla:mode=naive")),
    "DeepseekV3": (MLA | dict(n_group=4, topk_group=2), ("mla", "mla:mode=naive")),
}


@pytest.mark.parametrize("architecture", FAMILIES)
def test_greedy_tokens_with_preemption(architecture: str, tmp_path: Path, tiny_llama_dir: Path) -> None:
    changes, variants = FAMILIES[architecture]
    tiny = TinyModel(tmp_path, architecture, changes | dict(vocab_size=VOCAB))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_llama_dir / name, tmp_path)
    rng = random.Random(3)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(n)] for n in LENGTHS]
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = tiny.reference.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, eos_token_id=None
        )  # fmt: skip
        answers.append(tuple(out[0, len(prompt) :].tolist()))
    assert len({a[-4:] for a in answers}) > 1
    longest = max(LENGTHS) + NEW
    options = dict(
        model=str(tmp_path), dtype="float32", max_num_seqs=4, max_model_len=longest, scheduler="continuous:chunk_size=11",
        kv_cache="paged:block_size=4,headroom=0,prefix_sharing=false", num_kv_blocks=-(-longest // 4) + 3,
    )  # fmt: skip
    swap = dict(preemption="swap", host_kv_bytes=2**20)
    for variant, way in [*((v, {}) for v in variants), (variants[0], swap)]:
        engine = load_engine(EngineConfig.model_validate(options | way | dict(attention=variant)))
        with LLM.of(engine) as llm:
            results = llm.generate(prompts, SamplingParams(max_tokens=NEW, ignore_eos=True))
        assert [r.outputs[0].token_ids for r in results] == answers, variant
        assert sum(r.outputs[0].num_preemptions for r in results) >= 1
        per_token = {
            "gqa": 3 * 2 * 2 * tiny.spec.head_dim * 4,
            "mla": 3 * (16 + 8) * 4,
            "mla:mode=naive": 3 * 6 * (20 + 10) * 4,
        }
        assert engine.setup.kv_bytes_per_token == per_token[variant]


def test_another_cache_needs_another_engine(tmp_path: Path, tiny_llama_dir: Path) -> None:
    TinyModel(tmp_path, "DeepseekV2", MLA | dict(vocab_size=VOCAB))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_llama_dir / name, tmp_path)
    engine = load_engine(EngineConfig(model=str(tmp_path), max_model_len=64, num_kv_blocks=8))
    naive = EngineConfig.model_validate(engine.setup.config.model_dump() | dict(attention="mla:mode=naive"))
    with pytest.raises(ConfigError, match="caches 1 KV heads; load another engine"):
        engine.reconfigured(naive)
    with pytest.raises(ConfigError, match=r"gqa.*stores latent vectors"):
        engine.reconfigured(EngineConfig.model_validate(engine.setup.config.model_dump() | dict(attention="gqa")))
