"""Cache groups in the engine: layers with and without a sliding window over one pool, against transformers.

A tiny Gemma 3 (four sliding layers, two full ones) and a tiny Mistral (all sliding) serve requests whose windows are
left behind many times; freed blocks are taken by others, so a read outside the window would be seen in the tokens.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from logits_oracle import TinyModel

from twinfer.core.cache_groups import CacheGroup, cache_groups, one_group
from twinfer.core.core import Core
from twinfer.core.events import Finished, StepDone, Submit, TokenDelta
from twinfer.core.params import SamplingParams
from twinfer.core.plan import HOLE, Copy, StepPlan
from twinfer.core.policy import Limits
from twinfer.core.registry import Registry
from twinfer.core.request import Request
from twinfer.core.runtime import attention_torch, replay
from twinfer.core.runtime.attention_torch import attention_of
from twinfer.core.runtime.executor import TorchExecutor
from twinfer.core.runtime.families import load_model
from twinfer.core.runtime.kv_storage import KVStorage
from twinfer.core.runtime.quantized_linear import BF16Linears
from twinfer.kernels.native.program import Program
from twinfer.plugins.kv_cache.paged import Paged
from twinfer.plugins.scheduler.continuous import Continuous

WINDOW = 7
BLOCK = 4
SLIDING = {"sliding_window": WINDOW}
MODELS = {
    "gemma3": ("Gemma3", {"num_hidden_layers": 6, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window_pattern": 3,
                          "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2, **SLIDING}),
    "mistral": ("Mistral", {"head_dim": 16, **SLIDING}),
}  # fmt: skip


@pytest.fixture(scope="module", params=sorted(MODELS))
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return TinyModel(Path(tmp_path_factory.mktemp(request.param)), *MODELS[request.param])


def groups_of(tiny: TinyModel) -> tuple[CacheGroup, ...]:
    return cache_groups([tiny.spec.window(layer) for layer in range(tiny.spec.num_layers)], tiny.spec.max_context)


def prompt(length: int, start: int = 0) -> tuple[int, ...]:
    return tuple(3 + (start * 31 + i * i * 7) % 90 for i in range(length))


def serve(
    tiny: TinyModel, requests: list[Request], groups: tuple[CacheGroup, ...], num_blocks: int, **limits: int
) -> tuple[dict[tuple[str, int], tuple[int, ...]], dict[str, int]]:
    """Tokens of each sample, and what happened on the way."""
    size = Limits(
        **({"max_num_seqs": 4, "max_num_batched_tokens": 24, "max_model_len": 96, "num_blocks": num_blocks} | limits)
    )
    core = Core(
        Continuous(), Paged(Paged.Options(block_size=BLOCK)), size, windows=tuple(group.window for group in groups)
    )
    executor = TorchExecutor(
        tiny.model, attention_of(tiny.spec), num_blocks, BLOCK, num_host_blocks=size.num_host_blocks, groups=groups
    )
    waiting = list(requests)
    tokens: dict[tuple[str, int], tuple[int, ...]] = {}
    seen = {"held": 0, "preemptions": 0, "hits": 0, "swaps": 0, "copies": 0, "steps": 0}
    while waiting or core.has_work:
        if waiting and seen["steps"] % 3 == 0:
            request = waiting.pop(0)
            core.receive(Submit(request), 0.0)
            executor.admit(
                request, tuple((request.id if i == 0 else f"{request.id}/{i}", i) for i in range(request.params.n))
            )
        plan = core.next_step(0.0)
        if isinstance(plan, StepPlan):
            core.receive(StepDone(plan.step, executor.execute(plan)), 0.0)
            seen["held"] = max(seen["held"], core.ledger.pool.held)
            seen["copies"] += len(plan.copies)
            seen["hits"] += sum(grant.shared for grant in plan.grants)  # of those that return after a preemption, too
        seen["steps"] += 1
        assert core.audit() == []
        for output in core.outputs():
            if isinstance(output, TokenDelta):
                key = (output.request_id, output.index)
                tokens[key] = tokens.get(key, ()) + output.tokens
            elif isinstance(output, Finished):
                assert output.reason == "length", output
                seen["preemptions"] += output.num_preemptions
                seen["swaps"] += output.num_swaps
    return tokens, seen


def greedy(tiny: TinyModel, tokens: tuple[int, ...], max_tokens: int) -> tuple[int, ...]:
    """transformers', one whole sequence at a time."""
    known = list(tokens)
    for _ in range(max_tokens):
        known.append(int(tiny.expected(known)[-1].argmax()))
    return tuple(known[len(tokens) :])


def asked(request_id: str, tokens: tuple[int, ...], max_tokens: int, **params: object) -> Request:
    return Request(id=request_id, prompt=tokens, params=SamplingParams(max_tokens=max_tokens, **params))


def test_groups_of_the_models(tiny: TinyModel) -> None:
    if tiny.spec.family.startswith("gemma"):
        assert groups_of(tiny) == (
            CacheGroup(None, (2, 5)), CacheGroup(WINDOW, (0, 1)), CacheGroup(WINDOW, (3, 4)),
        )  # fmt: skip
    else:
        assert groups_of(tiny) == (CacheGroup(WINDOW, (0, 1, 2)),)


@pytest.mark.parametrize("native", [True, False])
def test_a_crowd_gets_what_transformers_gives(tiny: TinyModel, native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunked prompts, decodes side by side, hits of a shared prefix, preemption: all over freed and reused blocks."""
    if not native:
        monkeypatch.setattr(attention_torch, "serves", lambda keys, values: False)
    shared = prompt(18)
    requests = [
        asked("a", prompt(40, 1), 8), asked("b", shared + prompt(5, 2), 12), asked("c", shared + prompt(3, 3), 9),
        asked("d", prompt(2, 4), 30), asked("e", shared, 6), asked("f", prompt(33, 5), 5),
    ]  # fmt: skip
    groups = groups_of(tiny)
    tokens, seen = serve(tiny, requests, groups, num_blocks=24 if len(groups) > 1 else 5)
    assert seen["hits"] and seen["preemptions"], seen
    for request in requests:
        assert tokens[request.id, 0] == greedy(tiny, request.prompt, request.params.max_tokens), request.id


def test_a_long_sequence_holds_little_more_than_its_window(tiny: TinyModel) -> None:
    groups, length, chunk = groups_of(tiny), 80, 8
    each = -(-(WINDOW - 1 + chunk) // BLOCK) + 1
    full = sum(group.window is None for group in groups) * (length // BLOCK)
    most = full + sum(group.window is not None for group in groups) * each
    tokens, seen = serve(tiny, [asked("a", prompt(70), 10)], groups, most, max_num_batched_tokens=chunk)
    assert tokens["a", 0] == greedy(tiny, prompt(70), 10)
    assert seen["held"] <= most < len(groups) * length // BLOCK and not seen["preemptions"]


@pytest.mark.parametrize("what", ["preemption", "swap", "forks"])
def test_freeing_changes_no_token(tiny: TinyModel, what: str) -> None:
    """The same requests with all layers in one group that keeps every token."""
    n = {"n": 3, "temperature": 1.0, "seed": 5} if what == "forks" else {}
    requests = [
        asked(name, prompt(length, i), 24, **n)
        for i, (name, length) in enumerate(zip("abc", (23, 11, 15), strict=True))
    ]
    groups = groups_of(tiny)
    host = {"num_host_blocks": 60} if what == "swap" else {}
    kept, _ = serve(tiny, requests, one_group(tiny.spec.num_layers), 200)
    tight = 60 if what == "forks" else 8 if len(groups) == 1 else 22
    freed, seen = serve(tiny, requests, groups, tight, **host)
    assert freed == kept
    assert seen["copies"] if what == "forks" else seen["preemptions"]
    assert bool(seen["swaps"]) == (what == "swap")


def test_layers_of_different_groups_share_memory_and_copies_stay_within_blocks() -> None:
    groups = (CacheGroup(None, (1, 3)), CacheGroup(5, (0, 2)), CacheGroup(5, (4,)))
    kv = KVStorage(5, 6, BLOCK, 2, 8, groups=groups)
    assert kv.nbytes == 2 * 2 * 6 * BLOCK * 2 * 8 * 4, "two layers a page, keys and values"
    assert kv.keys[1].data_ptr() == kv.keys[0].data_ptr() == kv.keys[4].data_ptr() != kv.keys[3].data_ptr()
    kv.keys[3][:BLOCK].fill_(1.0)
    kv.copy_blocks([Copy("a", 0, 0, 0, 4)])
    assert torch.equal(kv.keys[3][4 * BLOCK : 5 * BLOCK], torch.ones(BLOCK, 2, 8)) and not kv.keys[1].any()
    table = kv.new_table()
    table.append([2, 3])
    table.group(1).append([HOLE, 5])
    kv.values[0][5 * BLOCK] = float("nan")
    kv.values[0][1 * BLOCK] = float("nan")
    kv.clear_non_finite(table)
    assert kv.values[0][5 * BLOCK].eq(0).all() and kv.values[0][1 * BLOCK].isnan().all()
    twin = kv.new_table()
    twin.become(table)
    assert (twin.blocks, twin.group(1).blocks, twin.group(2).blocks) == ([2, 3], [HOLE, 5], [])
    table.clear()
    assert table.group(1).capacity == 0
    with pytest.raises(ValueError, match="not of 4 layers"):
        KVStorage(4, 6, BLOCK, 2, 8, groups=groups)


def test_recorded_passes_follow_the_tables_of_every_group(
    tiny: TinyModel, monkeypatch: pytest.MonkeyPatch, packed_products: None
) -> None:
    """On packed weights decode steps are repeated from a recording (`replay.py`): the same tokens as without."""
    packed = load_model(tiny.spec, tiny.folder, Registry(entry_points=False), linear=BF16Linears())
    model = SimpleNamespace(spec=tiny.spec, model=packed)
    requests = [asked(f"r{i}", prompt(5 + 9 * i, i), 30) for i in range(3)]
    repeated, run = [], Program.run
    monkeypatch.setattr(Program, "run", lambda self: repeated.append(run(self)))
    recorded, _ = serve(model, requests, groups_of(tiny), 60)
    assert len(repeated) > 10
    monkeypatch.setattr(replay, "MOST_TOKENS", 0)
    count = len(repeated)
    written, _ = serve(model, requests, groups_of(tiny), 60)
    assert len(repeated) == count
    assert recorded == written
