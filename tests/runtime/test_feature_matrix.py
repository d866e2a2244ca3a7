"""Features that cross in pairs, on the real engine: every pair of settings, on models of every kind of attention and MLP.

The oracle of a request is the same request alone on an engine that has all memory, feeds whole prompts and shares nothing.
(`tests/core/test_feature_matrix.py` crosses what needs no tensors: drafts, steps in flight, snapshots.)
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from logits_oracle import TinyModel
from pairwise import Case, pairs_of, pairwise, wanted_pairs

from twinfer.core.cache_groups import Paging
from twinfer.core.config import EngineConfig
from twinfer.core.params import SamplingParams
from twinfer.core.runtime.llm import LLM, CompletionOutput, RequestOutput
from twinfer.core.runtime.loading import Engine, load_engine

EXPERTS = dict(num_experts_per_tok=3, moe_intermediate_size=24)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("Llama", {}),
    "window": ("Mistral", dict(sliding_window=9)),
    "hybrid": ("Gemma3", dict(head_dim=16, sliding_window=9, sliding_window_pattern=3, query_pre_attn_scalar=16)),
    "experts": ("Mixtral", dict(num_local_experts=4, num_experts_per_tok=2)),
    "latent": (
        "DeepseekV3",
        EXPERTS
        | dict(
            num_key_value_heads=6, kv_lora_rank=16, q_lora_rank=20, qk_nope_head_dim=12, qk_rope_head_dim=8,
            v_head_dim=10, n_routed_experts=8, n_shared_experts=1, first_k_dense_replace=1, n_group=4, topk_group=2,
        ),
    ),
}  # fmt: skip
VOCAB, MAX_LEN, BLOCK, NEW = 128, 48, 4, 12
FACTORS: dict[str, tuple[Any, ...]] = {
    # of the engine
    "model": tuple(MODELS),
    "chunk": (None, 3),
    "prefix": (True, False),
    "memory": ("ample", "recompute", "swap"),
    # of a request
    "sampling": ("greedy", "seeded"),
    "n": (1, 3),
    "beams": (1, 3),
    "stop": ("", "id", "string"),
    "logprobs": (None, 2),
    "abort": (False, True),
}


def valid(case: Case) -> bool:
    """As in `tests/core/test_feature_matrix.py`: the rest is refused by `SamplingParams`."""
    if case.get("n", 1) > 1 and case.get("sampling") == "greedy":
        return False
    if case.get("beams", 1) == 1:
        return True
    return case.get("n", 1) == 1 and case.get("sampling") != "seeded" and case.get("stop") != "string"


CASES = pairwise(FACTORS, valid)
PLAIN: Case = {"sampling": "greedy", "n": 1, "beams": 1, "stop": "", "logprobs": None}
PROMPTS = [[3 + (i * 7) % 11 if i < 9 else 3 + (i * i + 31 * number) % 97 for i in range(15)] for number in range(6)]


class Quiet:
    """One model: an engine to be set up anew for each case, and what requests give alone."""

    def __init__(self, folder: Path) -> None:
        config = EngineConfig(
            model=str(folder), dtype="float32", max_model_len=MAX_LEN, num_kv_blocks=400, max_num_seqs=8,
            kv_cache=f"paged:block_size={BLOCK},prefix_sharing=false",
        )  # fmt: skip
        self.engine: Engine = load_engine(config)
        self.llm = LLM.of(self.engine)
        self.alone = functools.cache(self._alone)

    def _alone(self, number: int, params: SamplingParams) -> RequestOutput:
        return self.llm.generate(PROMPTS[number], params)[0]

    def params(self, number: int, case: Case) -> SamplingParams:
        """Sampling of `case`; stops are what this prompt would have said as its sixth token."""
        seeded = case["sampling"] == "seeded"
        params = dict(
            temperature=1.0 if seeded else 0.0, seed=11 if seeded else None, n=case["n"], beam_width=case["beams"],
            logprobs=case["logprobs"], max_tokens=NEW, ignore_eos=True,
        )  # fmt: skip
        if not case["stop"]:
            return SamplingParams(**params)
        sixth = self.alone(number, SamplingParams(**params)).outputs[0].token_ids[5]
        if case["stop"] == "id":
            return SamplingParams(**params, stop_token_ids=(sixth,))
        return SamplingParams(**params, stop=(self.engine.tokenizer.decode([sixth]) or "a",))

    def pressed(self, case: Case) -> LLM:
        scarce = Paging(BLOCK, self.engine.setup.groups).pages(MAX_LEN) + 2  # one request, hardly two
        options: dict[str, Any] = {
            "num_kv_blocks": 400 if case["memory"] == "ample" else scarce,
            "kv_cache": f"paged:block_size={BLOCK},headroom=0,prefix_sharing={str(case['prefix']).lower()}",
            "scheduler": "continuous" if case["chunk"] is None else f"continuous:chunk_size={case['chunk']}",
        }
        if case["memory"] == "swap":
            options |= {"preemption": "swap", "host_kv_bytes": 2**22}
        config = EngineConfig.model_validate(self.engine.setup.config.model_dump() | options)
        return LLM.of(self.engine.reconfigured(config))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, tiny_llama_dir: Path) -> Iterator[dict[str, Quiet]]:
    found = {}
    for name, (architecture, changes) in MODELS.items():
        folder = tmp_path_factory.mktemp(name)
        TinyModel(folder, architecture, changes | dict(vocab_size=VOCAB))
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(tiny_llama_dir / file, folder)
        found[name] = Quiet(folder)
    yield found
    for quiet in found.values():
        quiet.llm.close()


def check(got: CompletionOutput, alone: CompletionOutput, *, aborted: bool) -> None:
    if aborted and got.finish_reason == "abort":
        if got.cumulative_logprob is None:  # else the beams of the moment
            assert got.token_ids == alone.token_ids[: len(got.token_ids)]
        return
    assert (got.token_ids, got.text) == (alone.token_ids, alone.text)
    assert (got.finish_reason, got.stop_reason) == (alone.finish_reason, alone.stop_reason)
    assert (got.logprobs is None) == (alone.logprobs is None)
    for mine, quiet in zip(got.logprobs or (), alone.logprobs or (), strict=True):
        assert mine == pytest.approx(quiet, abs=1e-4)
    assert (got.cumulative_logprob is None) == (alone.cumulative_logprob is None)
    if alone.cumulative_logprob is not None:
        assert got.cumulative_logprob == pytest.approx(alone.cumulative_logprob, abs=1e-3)


def test_the_cases_cover_every_pair() -> None:
    covered = set().union(*(pairs_of(case) for case in CASES))
    assert covered >= set(wanted_pairs(FACTORS, valid))
    assert len(CASES) < 40, "pairs, not the whole cross"


_preemptions: dict[str, int] = {}


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda i: "-".join(str(v) for v in CASES[i].values()))
def test_a_pair_of_features(models: dict[str, Quiet], number: int) -> None:
    case = CASES[number]
    quiet = models[case["model"]]
    other = CASES[(number + 1) % len(CASES)]
    asked = [quiet.params(i, c) for i, c in enumerate((case, PLAIN, case, other, case, PLAIN))]
    expected = [quiet.alone(i, params) for i, params in enumerate(asked)]
    llm = quiet.pressed(case)
    core = llm._driver.core
    ids = [llm.submit(prompt, params) for prompt, params in zip(PROMPTS, asked, strict=True)]
    for _ in range(5):
        llm.step()
        assert core.audit() == []
    if case["abort"]:
        llm.abort(ids[2])
    while llm.step():
        assert core.audit() == []
    results = [llm.result(i) for i in ids]
    for i, (got, alone) in enumerate(zip(results, expected, strict=True)):
        assert len(got.outputs) == len(alone.outputs)
        if (
            i == 2
            and case["abort"]
            and any(o.finish_reason == "abort" for o in got.outputs)
            and asked[2].beam_width > 1
        ):
            continue  # hypotheses of a search that was cut short
        for mine, single in zip(got.outputs, alone.outputs, strict=True):
            check(mine, single, aborted=i == 2 and case["abort"])
    assert not core.has_work
    preempted = sum(o.num_preemptions for r in results for o in r.outputs)
    _preemptions[case["memory"]] = _preemptions.get(case["memory"], 0) + preempted
    assert preempted == 0 or case["memory"] != "ample"


def test_memory_was_short() -> None:
    """Runs last in this file."""
    if not _preemptions:
        pytest.skip("run together with the rest of this file")
    assert _preemptions["swap"] > 10 and _preemptions["recompute"] > 10
