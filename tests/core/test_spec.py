"""Arithmetic of a model's shapes: KV bytes, weights, ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinfer.core.catalog import resolve_spec
from twinfer.core.errors import ConfigError, ModelError
from twinfer.core.hf_config import spec_from_hf
from twinfer.core.spec import MLASpec, ModelSpec, MoESpec

SIZES = st.integers(1, 64)


def spec(**changes: object) -> ModelSpec:
    fields: dict[str, object] = dict(
        name="tiny", family="llama", num_layers=2, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16,
        intermediate_size=128, vocab_size=100, max_context=512,
    )  # fmt: skip
    return ModelSpec(**(fields | changes))  # type: ignore[arg-type]


def test_llama_2_70b_kv_bytes_with_8_and_with_64_kv_heads() -> None:
    model = resolve_spec("llama-2-70b")
    assert model.kv_bytes_per_token("float16") == 327_680
    assert replace(model, num_kv_heads=64).kv_bytes_per_token("float16") == 2_621_440


def test_llama_2_7b_takes_one_gib_for_2048_tokens() -> None:
    assert resolve_spec("llama-2-7b").kv_bytes_per_token("float16") * 2048 == 2**30


def test_8b_takes_131072_bytes_a_token_in_bf16() -> None:
    """user-demands 2: a planner counted the attention heads instead of the KV heads."""
    for name in ("llama-3-8b", "llama-3.1-8b"):
        assert resolve_spec(name).kv_bytes_per_token("bfloat16") == 131_072


@pytest.mark.parametrize("name", ["deepseek-v3", "deepseek-v2-lite"])
def test_mla_caches_one_latent_and_one_rope_key(name: str) -> None:
    model = resolve_spec(name)
    assert model.kv_values_per_token_layer == 576
    assert model.kv_bytes_per_token("bfloat16") == 576 * 2 * model.num_layers
    assert model.kv_bytes_per_token("bfloat16", tp=8) == model.kv_bytes_per_token("bfloat16"), (
        "the latent is replicated"
    )


@given(kv=st.integers(1, 16), group=st.integers(1, 8), factor=st.integers(1, 8), head_dim=SIZES, layers=SIZES)
def test_kv_bytes_are_linear_in_kv_heads_and_blind_to_query_heads(
    kv: int, group: int, factor: int, head_dim: int, layers: int
) -> None:
    """user-demands 2 and 5."""
    one = spec(num_layers=layers, head_dim=head_dim, num_kv_heads=kv, num_heads=kv * group)
    more_queries = replace(one, num_heads=kv * group * factor)
    more_keys = replace(one, num_kv_heads=kv * factor, num_heads=kv * group * factor)
    assert more_queries.kv_bytes_per_token() == one.kv_bytes_per_token()
    assert more_keys.kv_bytes_per_token() == factor * one.kv_bytes_per_token()
    assert one.kv_bytes_per_token() == 2 * layers * kv * head_dim * 2


def test_kv_dtype_changes_kv_and_nothing_else() -> None:
    """user-demands 10."""
    model = resolve_spec("llama-3-8b")
    narrow = model.with_dtypes(kv_dtype="fp8")
    assert narrow.kv_bytes_per_token() * 2 == model.kv_bytes_per_token()
    assert narrow.weight_bytes() == model.weight_bytes()


def test_key_and_value_widths_count_separately() -> None:
    """user-demands 11."""
    model = spec(head_dim=24, value_dim=16)
    assert model.kv_values_per_token_layer == 2 * (24 + 16)
    assert model.kv_bytes_per_token() == 2 * 2 * (24 + 16) * 2


def test_block_format_counts_its_scales_once_per_block() -> None:
    """user-demands 12: q8_0 is 34 bytes per 32 values, not per value."""
    assert spec().kv_bytes_per_token("q8_0") == spec().kv_bytes_per_token("int8") * 34 / 32


def test_scales_of_a_kv_format_are_counted_per_head_and_vector() -> None:
    model = spec(kv_dtype="int8", kv_scale_bytes=2.0)
    assert model.kv_bytes_per_token_layer() == 2 * (32 * 1 + 2 * 2)
    assert model.kv_bytes_per_token_layer("int8", tp=2) == 1 * (32 * 1 + 2 * 2)
    assert model.kv_bytes_per_token_layer("float16") == 2 * 32 * 2, "another format has other scales"


@pytest.mark.parametrize(("tp", "heads"), [(1, 8), (2, 4), (4, 2), (8, 1), (16, 1), (64, 1)])
def test_kv_heads_are_split_then_replicated(tp: int, heads: int) -> None:
    model = resolve_spec("llama-2-70b")
    assert model.kv_heads_per_rank(tp) == heads
    assert model.kv_bytes_per_token(tp=tp) == 80 * heads * 2 * 128 * 2


def test_ranks_hold_the_whole_model_between_them() -> None:
    model = spec()
    norms = (2 * 2 + 1) * 64
    assert 2 * model.weight_bytes(tp=2) - model.weight_bytes() == norms * 2, "only norms are held twice"
    four = 4 * model.weight_bytes(tp=4) - model.weight_bytes()
    one_head = 2 * 2 * 64 * (16 + 16)  # bytes x layers x hidden x one KV head's K and V
    assert four == 3 * norms * 2 + 2 * one_head, "two KV heads on four ranks: each is held twice"


def test_what_no_rank_can_halve_is_counted_whole() -> None:
    """Norms of heads, biases of projections back (rank 0's), and a vocabulary that has to be padded."""
    plain = spec()
    odd = replace(plain, qk_norm=True, attention_out_bias=True, mlp_bias=True, vocab_size=plain.vocab_size + 1)
    per_layer = 2 * 16 + 64 + 64
    assert odd.replicated_params() == 2 * per_layer
    assert odd.rank_other_params(2) == plain.rank_other_params(2) + (1 if odd.tie_embeddings else 2) * 64
    cut = odd.rank_block_params(2) - plain.rank_block_params(2) - 2 * per_layer
    assert cut == 2 * 2 * odd.intermediate_size / 2, "biases of gate and up are cut with their columns"


def test_routers_and_latent_projections_are_replicated() -> None:
    model = resolve_spec("deepseek-v3")
    routers = 58 * 256 * (7168 + 1)  # and the bias of each expert's score
    down = 61 * (7168 * (512 + 64 + 1536) + 512 + 1536)  # and the norms of both latents
    assert model.replicated_params() == routers + down
    assert model.rank_block_params(8) == pytest.approx((model.block_params() - routers - down) / 8 + routers + down)


@pytest.mark.parametrize(("tokens", "touched"), [(0, 0.0), (1, 8.0), (10**6, 256.0)])
def test_experts_touched(tokens: int, touched: float) -> None:
    """N (1 - ((N - k) / N)^B): none, exactly top-k for one token, all in the end."""
    assert MoESpec(num_experts=256, top_k=8, intermediate_size=1).experts_touched(tokens) == pytest.approx(touched)


def test_experts_touched_between_the_ends() -> None:
    assert MoESpec(num_experts=8, top_k=2, intermediate_size=1).experts_touched(4) == pytest.approx(8 * (1 - 0.75**4))


def test_variants() -> None:
    assert spec(num_kv_heads=4).variant == "mha"
    assert spec().variant == "gqa"
    assert spec(num_kv_heads=1).variant == "mqa"
    mla = MLASpec(kv_lora_rank=8, q_lora_rank=None, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8)
    assert spec(mla=mla).variant == "mla"


def test_windows_by_layer() -> None:
    assert spec().window(1) is None
    assert spec(layer_windows=(4, None)).window(0) == 4
    assert spec(layer_windows=(4, None)).window(1) is None


def test_with_dtypes() -> None:
    model = spec(dtype="bfloat16", kv_dtype="bfloat16")
    assert model.with_dtypes() == model
    assert model.with_dtypes("fp32").kv_dtype == "float32", "KV follows the activations"
    assert model.with_dtypes("fp32", "bf16").kv_dtype == "bfloat16"
    assert model.with_dtypes(kv_dtype="fp8").with_dtypes("float32").kv_dtype == "fp8", "unless it was set apart"
    with pytest.raises(ConfigError, match=r"dtype='int4'.*--quant"):
        model.with_dtypes("int4")
    with pytest.raises(ConfigError, match=r"--kv-dtype='bf8'.*did you mean"):
        model.with_dtypes(kv_dtype="bf8")


@pytest.mark.parametrize("field", ["num_layers", "hidden_size", "num_heads", "vocab_size", "max_context"])
def test_sizes_must_be_positive(field: str) -> None:
    with pytest.raises(ModelError, match=field):
        spec(**{field: 0})


def test_kv_heads_must_divide_heads() -> None:
    with pytest.raises(ModelError, match="num_kv_heads=3 does not divide num_heads=4"):
        spec(num_kv_heads=3)


_LLAMA = {
    "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4,
    "intermediate_size": 128, "vocab_size": 100, "max_position_embeddings": 512,
}  # fmt: skip
_DEEPSEEK = _LLAMA | {
    "architectures": ["DeepseekV3ForCausalLM"], "kv_lora_rank": 32, "q_lora_rank": 32, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16, "v_head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 2,
    "topk_group": 1, "moe_intermediate_size": 64, "n_shared_experts": 2, "first_k_dense_replace": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("base", "key", "values"),
    [
        (_LLAMA, "intermediate_size", (0, -1)), (_LLAMA, "rms_norm_eps", (-1, float("nan"), float("inf"))),
        (_LLAMA, "rope_theta", (0, -5.0, float("nan"))), (_LLAMA, "eos_token_id", ([1, "a"], "2", -1, True)),
        (_LLAMA | {"architectures": ["Gemma2ForCausalLM"]}, "attn_logit_softcapping", (0, -1.0, "x")),
        (_LLAMA, "rope_scaling", ({"rope_type": "linear", "factor": -2}, {"rope_type": "yarn", "factor": 0})),
        (_DEEPSEEK, "q_lora_rank", ("x", 0, -1)), (_DEEPSEEK, "kv_lora_rank", (0, -1)), (_DEEPSEEK, "v_head_dim", (0,)),
        (_DEEPSEEK, "n_shared_experts", (-1, "x")), (_DEEPSEEK, "first_k_dense_replace", (-1,)),
        (_DEEPSEEK, "moe_intermediate_size", (0, -1)),
    ],
)  # fmt: skip
def test_a_config_with_an_impossible_value_is_refused_by_name(
    base: dict[str, object], key: str, values: tuple[object, ...]
) -> None:
    spec_from_hf(base, "m")
    for value in values:
        with pytest.raises(ModelError, match="should be") as caught:
            spec_from_hf(base | {key: value}, "m")
        assert key in str(caught.value) or "factor" in str(caught.value)
