"""The memory budget: what fits, its equations, and what is suggested when it does not."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinfer.core.cache_groups import CacheGroup, Paging
from twinfer.core.catalog import resolve_spec, spec_names
from twinfer.core.config import Choice, EngineConfig
from twinfer.core.device import all_devices, load_device
from twinfer.core.errors import ConfigError
from twinfer.core.layout import Layout
from twinfer.core.memory import (
    MemoryBudget,
    activation_bytes,
    budget_on,
    fixes_for,
    memory_budget,
    rank_equations,
    trials,
)
from twinfer.core.memory_fixes import INT4_BITS, suggestions
from twinfer.core.memory_parts import RankMemory, why_indivisible
from twinfer.core.provision import Placement, place
from twinfer.core.registry import Registry
from twinfer.core.setup import groups_of
from twinfer.plugins.kv_cache.contiguous import Contiguous
from twinfer.plugins.kv_cache.paged import Paged

H100 = load_device("h100-sxm")
REGISTRY = Registry(entry_points=False)
GIB = 2**30


def config(model: str = "llama-3-8b", **changes: object) -> EngineConfig:
    return EngineConfig(model=model, **changes)  # type: ignore[arg-type]


def budget(model: str = "llama-3-8b", memory: int = 80 * GIB, **changes: object) -> MemoryBudget:
    return memory_budget(resolve_spec(model), memory, config(model, **changes))


def paging(block_size: int, *windows: int | None) -> Paging:
    """One layer a group."""
    return Paging(block_size, tuple(CacheGroup(w, (i,)) for i, w in enumerate(windows or (None,))))


def test_24_blocks_for_lengths_100_50_200() -> None:
    assert paging(16).pages_of([100, 50, 200]) == 24


@given(
    st.lists(st.sampled_from([None, 1, 3, 16, 40]), min_size=1, max_size=3), st.sampled_from([1, 2, 4, 16]),
    st.integers(0, 40), st.integers(1, 120),
)  # fmt: skip
def test_pages_are_enough_for_a_decoding_sequence_and_no_more_than_needed(
    windows: list[int | None], size: int, num_pages: int, length: int
) -> None:
    """Against the blocks that positions lie in, one token after the other."""
    pages = paging(size, *windows)

    def at(position: int, window: int | None) -> int:
        first = 0 if window is None else max(0, position - window + 1)
        return position // size - first // size + 1

    exact = sum(max(at(p, w) for p in range(length)) for w in windows)
    saturated = all(w is None or length >= w + size for w in windows)
    assert exact <= pages.pages(length) <= exact + (0 if saturated else len(windows))
    assert eval(pages.equation(length), {"__builtins__": {}}) == pages.pages(length)
    longest = pages.longest(num_pages, 120)
    assert (not longest or pages.pages(longest) <= num_pages) and (
        longest == 120 or pages.pages(longest + 1) > num_pages
    )


def test_windows_multiply_the_requests_that_fit() -> None:
    """Gemma 2 9B: 21 layers of 42 see 4,096 tokens, so at 8,192 tokens a request takes 3/4 and a block."""
    spec = resolve_spec("gemma-2-9b")
    groups = groups_of(spec, Paged())
    assert [(g.window, len(g.layers)) for g in groups] == [(None, 21), (4096, 21)]
    assert groups_of(spec, Contiguous()) == groups_of(spec, Paged(Paged.Options(free_windows=False)))
    full, freed = (budget_on(spec, H100, config("gemma-2-9b"), groups=some) for some in ((), groups))
    assert freed.bytes_per_block * 2 == full.bytes_per_block and freed.num_blocks in (
        2 * full.num_blocks,
        2 * full.num_blocks + 1,
    )
    assert full.worst_case_concurrency == full.num_blocks / 512
    assert freed.worst_case_concurrency == freed.num_blocks / (512 + 257)
    assert freed.equations["worst_case_concurrency"] == f"{freed.num_blocks} / (512 + 257)"
    assert abs(freed.kv_tokens - full.kv_tokens) <= 16, "the pool is as large as before"


@given(st.lists(st.integers(1, 500), max_size=20), st.integers(1, 64))
def test_blocks_hold_their_tokens_with_less_than_a_block_to_spare_each(lengths: list[int], size: int) -> None:
    blocks = paging(size).pages_of(lengths)
    assert sum(lengths) <= blocks * size < sum(lengths) + size * max(1, len(lengths))


@pytest.mark.parametrize("name", spec_names())
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_shown_equations_evaluate_to_the_shown_numbers(name: str, tp: int) -> None:
    """user-demands 6."""
    spec = resolve_spec(name)
    if why_indivisible(spec, tp):
        pytest.skip("ranks cannot share the model")
    groups = groups_of(spec, Paged())
    for pinned in ({}, {"num_kv_blocks": 500 * len(groups)}, {"kv_memory_bytes": 3 * GIB}):
        found = memory_budget(
            spec, 2**41, config(name, tp=tp, **pinned), expected_lengths=[700, 90], max_request_tokens=1000,
            runtime_bytes=5 * 10**8, graph_bytes=10**8, groups=groups,
        )  # fmt: skip
        assert {"num_blocks", "kv_bytes_per_token", "bytes_per_block", "weight_bytes", "activation_bytes", "worst_case_concurrency",
                "expected_concurrency"} == set(found.equations)  # fmt: skip
        for number, text in found.equations.items():
            assert eval(text, {"__builtins__": {"int": int, "max": max}}) == getattr(found, number), number
        assert found.equation == found.equations["num_blocks"]


@pytest.mark.parametrize(("absorbed", "tp", "per_token"), [(True, 1, 31_104), (True, 2, 31_104), (False, 2, 138_240)])
def test_cache_of_latents_or_of_the_heads_made_of_them(absorbed: bool, tp: int, per_token: int) -> None:
    """27 layers, 2 bytes: 576 values on every rank, or 16 heads of 192 + 128 split over the ranks."""
    spec = resolve_spec("deepseek-v2-lite")
    assert spec.mla is not None
    spec = replace(spec, mla=replace(spec.mla, absorbed=absorbed))
    found = memory_budget(spec, 2**41, config("deepseek-v2-lite", tp=tp))
    assert found.kv_bytes_per_token == per_token
    for number in ("kv_bytes_per_token", "num_blocks"):
        assert eval(found.equations[number], {"__builtins__": {"int": int, "max": max}}) == getattr(found, number)


def test_budget_of_llama_3_8b_on_h100_by_hand() -> None:
    found = budget_on(resolve_spec("llama-3-8b"), H100, config())
    weights = 8_030_261_248 * 2
    widest, logits = 2048 * (2 * 4096 + 3 * 14336) * 2, 2048 * 4096 * 2 + 64 * 128256 * (2 + 3 * 4)
    left = H100.usable_bytes * 0.9 - weights - widest - 384 * 2**20
    assert logits < widest and (found.weight_bytes, found.activation_bytes) == (weights, widest)
    assert found.num_blocks == int(left // (16 * 131_072))
    assert found.worst_case_concurrency == found.num_blocks / (8192 / 16)


def test_segments_add_up_to_the_device() -> None:
    for laid in ({}, {"tp": 2}, {"pp": 3}, {"tp": 2, "pp": 2}):
        found = budget_on(resolve_spec("llama-3-8b"), H100, config(**laid))
        for rank in found.ranks:
            parts = dict(found.segments(rank))
            assert sum(parts.values()) == H100.usable_bytes
            assert min(size for name, size in parts.items() if name != "states") > 0
            assert [*parts][:1] == ["weights"] and [*parts][-1:] == ["unused"]
            inside = sum(parts[name] for name in ("weights", "activations", "libraries", "states", "kv"))
            assert inside <= found.budget_bytes == H100.usable_bytes * 0.9
            assert parts["runtime"] + parts["graphs"] == H100.runtime_bytes + H100.graph_bytes, "outside the fraction"
        assert found.kv_pool_bytes <= found.kv_bytes < found.kv_pool_bytes + found.bytes_per_block
        assert dict(found.segments())["kv"] == found.kv_pool_bytes


def test_context_and_graphs_never_lie_outside_the_device() -> None:
    """At a fraction of 1 nothing is left beside it for them, so the rest makes room."""
    found = budget_on(resolve_spec("llama-3-8b"), H100, config(memory_fraction=1.0))
    assert dict(found.segments())["unused"] >= 0
    assert eval(found.equation, {"__builtins__": {"int": int, "max": max}}) == found.num_blocks
    assert str(H100.runtime_bytes + H100.graph_bytes) in found.equation


# --- a real engine ------------------------------------------------------------------------------


def logged() -> list[dict[str, str]]:
    with Path(__file__).with_name("vllm_0_19_h100.csv").open() as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


def predicted(row: dict[str, str]) -> tuple[MemoryBudget, RankMemory]:
    """Our budget of a logged run, and its rank 0."""
    fields: dict[str, object] = {
        "dtype": row["dtype"], "kv_dtype": row["kv_dtype"], "tp": int(row["tp"]), "pp": int(row["pp"]),
        "memory_fraction": 0.95, "max_num_batched_tokens": 8192, "max_num_seqs": 1024, "max_model_len": 8192,
        "quantizer": row["quant"] or None,
    }  # fmt: skip
    device = H100.model_copy(update={"visible_bytes": int(79.19 * GIB)})
    placed = place(config(row["model"], **fields), resolve_spec(row["model"]), REGISTRY, device, world="simulator")
    found = placed.budget()
    return found, found.ranks[0]


def test_memory_of_a_real_engine_is_predicted() -> None:
    """No number here was fitted to one model: activations and libraries follow the same constants everywhere."""
    errors: dict[str, list[float]] = {"weights": [], "activations": [], "pool": [], "tokens": []}
    for row in logged():
        found, rank = predicted(row)
        # what the engine logs as activations exceeds its tensors by workspaces, which we count as libraries
        ours = {
            "weights": rank.weights / GIB, "activations": rank.activations / GIB + 0.125, "pool": rank.left / GIB,
            "tokens": float(found.kv_tokens),
        }  # fmt: skip
        for name, value in ours.items():
            if row[name]:
                errors[name].append(value / float(row[name]) - 1)
    assert {name: len(found) for name, found in errors.items()} == {
        "weights": 12, "activations": 21, "pool": 12, "tokens": 4,
    }  # fmt: skip
    means = {name: sum(map(abs, found)) / len(found) for name, found in errors.items()}
    assert means["pool"] < 0.002 and max(map(abs, errors["pool"])) < 0.005, errors["pool"]
    assert means["tokens"] < 0.001 and max(map(abs, errors["tokens"])) < 0.002, errors["tokens"]
    assert means["weights"] < 0.015, errors["weights"]
    assert means["activations"] < 0.04 and max(map(abs, errors["activations"])) < 0.14, errors["activations"]


def test_narrow_kv_doubles_tokens_and_leaves_weights_alone() -> None:
    """user-demands 10: the advice on length must change with the KV dtype."""
    wide, narrow = budget("llama-3.1-8b", 20 * GIB), budget("llama-3.1-8b", 20 * GIB, kv_dtype="fp8")
    assert narrow.weight_bytes == wide.weight_bytes
    assert narrow.kv_tokens // 32 == wide.kv_tokens // 16 or abs(narrow.kv_tokens - 2 * wide.kv_tokens) <= 16
    assert abs(narrow.max_model_len - 2 * wide.max_model_len) <= 32, "both contexts are what the pool holds"


def test_concurrency_at_full_length_and_at_expected_lengths_are_two_numbers() -> None:
    """user-demands 4 and 14."""
    spec = resolve_spec("llama-3-8b")
    found = memory_budget(spec, 40 * GIB, config(), expected_lengths=[100, 50, 200])
    assert found.worst_case_concurrency == found.num_blocks / 512
    assert found.expected_concurrency == found.num_blocks * 3 / 24
    assert memory_budget(spec, 40 * GIB, config()).expected_concurrency is None


def test_context_is_the_workloads_before_the_models() -> None:
    """user-demands 27: a long default context makes everything look too big."""
    spec = resolve_spec("llama-3.1-8b")
    assert memory_budget(spec, 20 * GIB, config(), max_request_tokens=700).max_model_len == 700
    found = memory_budget(spec, 20 * GIB, config())
    assert found.max_model_len == found.kv_tokens < 131_072
    assert "all that the KV pool holds" in found.reasons["max_model_len"]
    assert memory_budget(spec, 80 * GIB, config()).max_model_len == 131_072


def test_ranks_split_weights_and_kv_until_heads_run_out() -> None:
    one, two, sixteen = (budget("llama-3-70b", 400 * GIB, tp=tp) for tp in (1, 2, 16))
    assert two.kv_bytes_per_token * 2 == one.kv_bytes_per_token == 327_680
    assert sixteen.kv_heads_per_rank == 1 and sixteen.kv_bytes_per_token * 8 == one.kv_bytes_per_token
    assert one.weight_bytes / 2 == pytest.approx(two.weight_bytes, rel=0.001)


def test_quantized_weights_leave_room_for_kv() -> None:
    spec = resolve_spec("llama-3-8b")
    small = replace(spec, weight_bits=4.125)
    saved = spec.block_params() * (16 - 4.125) / 8
    gained = memory_budget(small, 40 * GIB, config()).kv_bytes - memory_budget(spec, 40 * GIB, config()).kv_bytes
    assert gained == pytest.approx(saved, abs=1)


def test_kv_format_of_a_quantizer_is_not_undone_by_the_configuration() -> None:
    adapted = replace(resolve_spec("llama-3-8b"), kv_dtype="fp8")
    chosen = config(quantizer=Choice(name="kv-fp8"), kv_dtype="float16")
    assert memory_budget(adapted, 40 * GIB, chosen).kv_dtype == "fp8"


@given(tokens=st.integers(1, 10_000), rows=st.integers(1, 512), tp=st.sampled_from([1, 2, 4, 8]))
def test_activations_grow_with_tokens_and_rows(tokens: int, rows: int, tp: int) -> None:
    for name in ("llama-3-8b", "mixtral-8x7b", "deepseek-v3"):
        spec = resolve_spec(name)
        here = activation_bytes(spec, tokens, rows, tp)
        more_tokens, more_rows = (activation_bytes(spec, tokens + a, rows + b, tp) for a, b in ((1, 0), (0, 1)))
        assert 0 < here < more_tokens and here <= more_rows
        assert here < max(more_rows, activation_bytes(spec, 16 * tokens, 16 * rows, tp))
        assert tp == 1 or here <= activation_bytes(spec, tokens, rows, 1)
        assert activation_bytes(spec, tokens, rows, tp, logits=False) <= here


def test_activations_of_each_kind_by_hand() -> None:
    """Granite-like small vocabulary: the layer; large vocabulary: the logits; experts: their buffers on top of either."""
    llama, mixtral = resolve_spec("llama-3-8b"), resolve_spec("mixtral-8x7b")
    layer = 8192 * (2 * 4096 + 3 * 14336) * 2
    assert activation_bytes(llama, 8192, 64) == layer
    assert activation_bytes(llama, 8192, 1024) == 8192 * 4096 * 2 + 1024 * 128256 * 14
    assert activation_bytes(llama, 8192, 1024, Layout(pp=2), logits=False) == layer + 2 * 8192 * 4096 * 2
    assert activation_bytes(llama, 8192, 64, Layout(cp=4)) == max(layer // 4, 2048 * 4096 * 2 + 64 * 128256 * 14)
    attention = 32 * 256 + 8 * 256
    buffers = 8192 * 2 * (2 * 14336 + 14336) * 2
    assert activation_bytes(mixtral, 8192, 1) == buffers + 8192 * (2 * 4096 + attention) * 2
    halved = activation_bytes(mixtral, 8192, 1, Layout(tp=2, ep=2))
    assert halved == buffers // 2 + 8192 * (2 * 4096 + attention // 2) * 2, "half the pairs, whole experts"


# --- ranks of a layout --------------------------------------------------------------------------

LAYOUTS = (
    Layout(), Layout(tp=2), Layout(pp=3), Layout(tp=4, pp=4), Layout(cp=2), Layout(tp=2, cp=4), Layout(tp=2, dp=2, ep=4),
    Layout(tp=8, ep=8), Layout(pp=2, dp=4, ep=2), Layout(tp=2, pp=2, cp=2, dp=2, ep=2),
)  # fmt: skip


@pytest.mark.parametrize("name", spec_names())
def test_every_rank_of_every_layout_evaluates_to_its_numbers(name: str) -> None:
    spec = resolve_spec(name)
    groups, seen = groups_of(spec, Paged()), 0
    for layout in LAYOUTS:
        chosen = config(name, **{n: getattr(layout, n) for n in ("tp", "pp", "cp", "dp", "ep")})
        try:
            found = memory_budget(spec, 2**41, chosen, groups=groups, runtime_bytes=5 * 10**8)
        except ConfigError as error:
            assert error.option in ("--tp", "--ep", "--dp", "--pp")
            continue
        seen += 1
        assert found.layout == layout and sum(rank.ranks for rank in found.ranks) == layout.devices
        assert [layer for rank in found.ranks for layer in rank.layers] == list(range(spec.num_layers))
        assert found.num_blocks == layout.dp * min(rank.blocks(16) for rank in found.ranks), "the fullest decides"
        for rank in found.ranks:
            numbers = {
                "kv_bytes_per_token": rank.per_token, "weight_bytes": rank.weights, "bytes_per_block": 16 * rank.per_slot,
                "num_blocks": layout.dp * rank.blocks(16), "activation_bytes": rank.activations,
            }  # fmt: skip
            for number, text in rank_equations(spec, chosen, rank, 16).items():
                assert eval(text, {"__builtins__": {"int": int, "max": max}}) == numbers[number], (layout, number)
    assert seen >= 2


@pytest.mark.parametrize("name", spec_names())
def test_stages_and_ranks_hold_the_model_once(name: str) -> None:
    """Against a count of the whole: what is split adds up, what is copied is counted as often as it is copied."""
    spec = resolve_spec(name)
    whole = memory_budget(spec, 2**43, config(name)).ranks[0]
    assert whole.weights == int(spec.weight_bytes())
    stages = memory_budget(spec, 2**43, config(name, pp=3)).ranks
    table = -(-spec.vocab_size * spec.hidden_size * spec.other_bits // 8)
    tied = table if spec.tie_embeddings else 0
    assert sum(rank.weights for rank in stages) == pytest.approx(whole.weights + tied, abs=3)
    assert sum(rank.per_token for rank in stages) == pytest.approx(whole.per_token)
    for tp in (2, 4):
        if why_indivisible(spec, tp):
            continue
        shared = memory_budget(spec, 2**43, config(name, tp=tp)).ranks[0]
        apart = spec.expert_bits is not None  # then what ranks copy is not stored as the average is
        assert shared.weights == pytest.approx(spec.weight_bytes(tp), rel=1e-3 if apart else 0, abs=1)
    moe = spec.moe
    if moe is not None and moe.num_experts % 4 == 0 and not why_indivisible(spec, 4):
        even, by_expert = (memory_budget(spec, 2**43, config(name, tp=4, ep=ep)).ranks[0] for ep in (1, 4))
        bias = spec.num_moe_layers * moe.num_experts * spec.hidden_size * 0.75 if moe.bias else 0
        assert even.weights - by_expert.weights == pytest.approx(bias * spec.routed_bits / 8, abs=1)


def test_first_and_last_stage_hold_embedding_and_head() -> None:
    spec = resolve_spec("llama-3.1-8b")
    first, middle, last = memory_budget(spec, 80 * GIB, config("llama-3.1-8b", pp=3)).ranks
    layer, table = 218_103_808 * 2 + 2 * 4096 * 2, 128256 * 4096 * 2
    assert [len(r.layers) for r in (first, middle, last)] == [11, 11, 10]
    assert (first.weights, middle.weights) == (11 * layer + table, 11 * layer)
    assert last.weights == 10 * layer + table + 4096 * 2
    assert first.per_token == 11 * 4096 and last.per_token == 10 * 4096


def test_attention_data_parallelism_multiplies_the_pool() -> None:
    """DeepSeek-V3 on 16 GPUs of 141 GB: latents are copied by tensor parallelism, divided by data parallelism."""
    spec, h200 = resolve_spec("deepseek-v3"), load_device("h200-sxm")
    fields = {"quantizer": Choice(name="fp8"), "max_model_len": 8192}
    spec = replace(spec, weight_bits=8.0)
    flat = budget_on(spec, h200, config("deepseek-v3", tp=16, **fields))
    wide = budget_on(spec, h200, config("deepseek-v3", tp=2, dp=8, ep=16, **fields))
    assert flat.kv_bytes_per_token == wide.kv_bytes_per_token == 61 * 576 * 2
    assert wide.num_blocks == 8 * wide.blocks_per_rank > 5 * flat.num_blocks
    assert wide.worst_case_concurrency == wide.num_blocks / 512
    assert wide.kv_pool_bytes <= wide.kv_bytes


def test_context_parallelism_divides_what_a_token_takes() -> None:
    one, four = (budget("llama-3.1-8b", 40 * GIB, cp=cp) for cp in (1, 4))
    assert four.kv_bytes_per_token * 4 == one.kv_bytes_per_token and four.weight_bytes == one.weight_bytes
    assert four.num_blocks > 4 * one.num_blocks


@pytest.mark.parametrize(
    ("model", "fields", "words"),
    [
        ("llama-3-8b", {"dp": 2}, "--dp=2: llama-3-8b has no experts to share; leave it out; replicas"),
        ("llama-3-8b", {"tp": 2, "ep": 2}, "--ep=2: llama-3-8b has no experts"),
        ("mixtral-8x7b", {"tp": 16, "ep": 16}, "--ep=16: mixtral-8x7b: its 8 experts do not divide over 16 ranks; use 1, 2, 4, 8"),
        ("llama-3-8b", {"pp": 33}, "--pp=33: there are 32 layers"),
        ("mixtral-8x7b", {"dp": 2, "num_kv_blocks": 501}, "--num-kv-blocks=501: --dp 2 groups have equally many blocks"),
    ],
)  # fmt: skip
def test_layouts_that_cannot_share_a_model(model: str, fields: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        budget(model, 2000 * GIB, **fields)


# --- what does not fit --------------------------------------------------------------------------


def test_pool_smaller_than_one_request_names_what_to_change() -> None:
    with pytest.raises(ConfigError) as caught:
        budget("llama-2-7b", 16 * GIB, max_model_len=4096)
    text = str(caught.value)
    assert text.startswith("--max-model-len=4096: one request of 4096 tokens needs 2.00 GiB")
    assert "weights take 12.55 GiB" in text and "--kv-dtype fp8" in text and "\n" not in text


def test_model_larger_than_the_device() -> None:
    with pytest.raises(ConfigError) as caught:
        budget_on(resolve_spec("llama-3-70b"), H100, config("llama-3-70b"))
    assert caught.value.option == "--model"
    assert "--quant int4" in caught.value.fix and "--tp 2" in caught.value.fix
    assert "--kv-dtype" not in caught.value.fix, "it would not help"


def test_fixes_are_sorted_by_cost_and_each_works_alone() -> None:
    spec, memory = resolve_spec("llama-2-7b"), 16 * GIB
    base = config("llama-2-7b", max_model_len=4096)
    fixes = fixes_for(spec, base, memory)
    assert [fix.cost for fix in fixes] == sorted(fix.cost for fix in fixes)
    changes = {fix.change: fix for fix in fixes}
    assert {"--kv-dtype fp8", "--quant fp8", "--quant int4", "--tp 2"} <= set(changes)
    for change in changes:
        option, value = change.split()
        if option == "--quant":
            bits = {"fp8": 8.0, "int4": INT4_BITS}[value]
            memory_budget(replace(spec, weight_bits=bits), memory, base)
        else:
            field = option.removeprefix("--").replace("-", "_")
            changed = EngineConfig.model_validate(
                base.model_dump() | {field: value if field == "kv_dtype" else float(value)}
            )
            memory_budget(spec, memory, changed)


def test_shorter_context_is_computed() -> None:
    with pytest.raises(ConfigError) as caught:
        budget("llama-2-7b", 16 * GIB, max_model_len=4096)
    shorter = int(caught.value.fix.split("--max-model-len ")[1].split()[0])
    assert budget("llama-2-7b", 16 * GIB, max_model_len=shorter).num_blocks * 16 == shorter
    with pytest.raises(ConfigError):
        budget("llama-2-7b", 16 * GIB, max_model_len=shorter + 1)


def test_nothing_helps() -> None:
    with pytest.raises(ConfigError, match="no single change makes it fit; use a device with more memory"):
        budget("llama-3.1-405b", 16 * GIB)


def test_pinned_pools() -> None:
    assert budget("llama-2-7b", num_kv_blocks=300).num_blocks == 300
    assert budget("llama-2-7b", kv_memory_bytes=GIB).kv_tokens == 2048, "1 GiB is 2,048 tokens of Llama-2-7B"
    assert budget("llama-2-7b", num_kv_blocks=100).max_model_len == 1600


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_kv_blocks": 10**6}, r"--num-kv-blocks=1000000: .*use at most 8\d{3}"),
        ({"kv_memory_bytes": 79 * GIB}, r"--kv-memory-bytes=\d+: weights, activations and runtime leave 67.29 GiB of 80.00 GiB"),
        ({"num_kv_blocks": 10, "max_model_len": 500}, "--num-kv-blocks=10: the pool holds 160 tokens .*at least 32 or --max-model-len 160"),
        ({"kv_memory_bytes": GIB, "max_model_len": 4096}, r"the pool holds 2048 tokens .*use at least 2147483648 or"),
        ({"kv_memory_bytes": 1000}, "the pool holds 0 tokens"),
    ],
)  # fmt: skip
def test_pinned_pools_that_cannot_be(changes: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        budget("llama-2-7b", **changes)


def test_ranks_that_do_not_divide_the_heads() -> None:
    with pytest.raises(
        ConfigError, match="--tp=3: llama-3-8b: its 32 attention heads do not divide over 3 ranks; use 1, 2, 4, 8"
    ):
        budget(tp=3)
    with pytest.raises(ConfigError, match=r"use 1, 3$"):
        budget("smollm2-135m", tp=2)
    with pytest.raises(ConfigError, match="its 1536 MLP columns do not divide over 9 ranks"):
        budget("smollm2-135m", tp=9)


@given(
    memory=st.integers(1, 200), fraction=st.floats(0.05, 1.0), block=st.sampled_from([1, 7, 16, 64]),
    length=st.integers(2, 8192), name=st.sampled_from(["llama-3-8b", "smollm2-135m", "deepseek-v2-lite"]),
)  # fmt: skip
def test_either_one_request_fits_or_it_is_refused(
    memory: int, fraction: float, block: int, length: int, name: str
) -> None:
    chosen = config(name, max_model_len=length, memory_fraction=fraction)
    try:
        found = memory_budget(resolve_spec(name), memory * GIB, chosen, block_size=block)
    except ConfigError as error:
        assert "\n" not in str(error)
        return
    assert found.worst_case_concurrency >= 1 and found.kv_tokens >= length
    used = found.weight_bytes + found.activation_bytes + found.kv_pool_bytes
    assert used <= memory * GIB * fraction
    assert used + found.bytes_per_block > memory * GIB * fraction, "no block is given away"


# --- suggestions for a device -------------------------------------------------------------------


def works(placed: Placement, updates: Mapping[str, object]) -> bool:
    """By the whole way from a configuration, not by the arithmetic of the suggestion."""
    changed = placed.config.model_copy(update={"num_devices": None, **updates})
    device = load_device(str(updates["device"])) if "device" in updates else placed.device
    try:
        place(changed, placed.checkpoint, REGISTRY, device, world="simulator").budget()
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize(
    ("model", "device", "fields"),
    [
        ("llama-3.1-70b", "l40s", {"tp": 2}),
        ("llama-3.1-70b", "h100-sxm", {}),
        ("qwen2.5-72b", "a100-sxm-80gb", {"tp": 2, "max_num_batched_tokens": 16384, "max_num_seqs": 1024}),
        ("mixtral-8x7b", "h100-sxm", {"max_model_len": 32768}),
        ("qwen3-235b-a22b", "h100-sxm", {"tp": 2, "dp": 2, "ep": 4}),
    ],
)
def test_every_suggestion_works_and_what_is_said_to_lack_memory_does(
    model: str, device: str, fields: dict[str, object]
) -> None:
    chosen = config(model, **{"max_model_len": 8192, **fields})
    placed = place(chosen, resolve_spec(model), REGISTRY, load_device(device), world="simulator")
    question = placed.question(chosen.max_model_len or 0, lambda: all_devices(REGISTRY))
    tried, offered = trials(question), suggestions(question)
    assert offered and [fix.cost for fix in offered] == sorted(fix.cost for fix in offered)
    for fix in tried:
        assert works(placed, fix.updates) == fix.fits, fix
        assert fix.fits or "still missing" in fix.effect
    for fix in offered:
        assert fix.fits and works(placed, fix.updates), fix
    with pytest.raises(ConfigError) as caught:
        placed.budget()
    assert all(fix.change in caught.value.fix for fix in suggestions(placed.question(chosen.max_model_len or 0)))


def test_pairs_are_offered_where_nothing_alone_suffices() -> None:
    """Llama-3.1-405B on two H100s: not even in 4 bits, nor on 16 of them in 16."""
    chosen = config("llama-3.1-405b", tp=2, max_model_len=8192)
    placed = place(chosen, resolve_spec("llama-3.1-405b"), REGISTRY, H100, world="simulator")
    question = placed.question(8192)
    assert not [fix for fix in trials(question) if fix.fits and "tp" not in fix.updates]
    alone = [fix for fix in trials(replace(question, config=question.config.model_copy(update={"tp": 1}))) if fix.fits]
    assert not alone
    pairs = suggestions(replace(question, config=question.config.model_copy(update={"tp": 1})))
    assert pairs and all(len(fix.updates) == 2 and fix.fits for fix in pairs)


def test_the_engine_is_not_offered_what_it_refuses() -> None:
    small = load_device("cpu").model_copy(update={"visible_bytes": 16 * GIB})
    placed = place(config(), resolve_spec("llama-3-8b"), REGISTRY, small, world="engine")
    with pytest.raises(ConfigError) as caught:
        placed.budget()
    for refused in ("--kv-dtype", "--quant fp8", "--quant int4", "--pp", "--tp", "--device"):
        assert refused not in caught.value.fix
    assert "--quant int8" in caught.value.fix
