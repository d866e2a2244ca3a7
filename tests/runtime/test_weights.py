"""Checkpoints on disk: layouts, shards, tied weights, and what a wrong or damaged one says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from twinfer.core.errors import ModelError
from twinfer.core.hf_config import spec_from_hf
from twinfer.core.registry import Registry
from twinfer.core.runtime.families import load_model
from twinfer.core.runtime.families.llama import Llama, expected_tensors
from twinfer.core.runtime.weights import Loader, check_tensors, open_weights
from twinfer.core.spec import ModelSpec


@pytest.fixture(scope="module")
def spec(tiny_llama_dir: Path) -> ModelSpec:
    return spec_from_hf(json.loads((tiny_llama_dir / "config.json").read_text()), "tiny-llama")


@pytest.fixture(scope="module")
def tensors(tiny_llama_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(tiny_llama_dir / "model.safetensors")


def sharded(tensors: dict[str, torch.Tensor], folder: Path, num_shards: int = 3) -> Path:
    weight_map = {}
    for shard in range(num_shards):
        name = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        part = {key: value for i, (key, value) in enumerate(tensors.items()) if i % num_shards == shard}
        save_file(part, folder / name)
        weight_map |= dict.fromkeys(part, name)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return index


def same(source: object, tensors: dict[str, torch.Tensor]) -> bool:
    return set(source.names()) == set(tensors) and all(  # type: ignore[attr-defined]
        torch.equal(source.get(name), tensor) and source.shape(name) == tuple(tensor.shape)  # type: ignore[attr-defined]
        for name, tensor in tensors.items()
    )


def test_directory_file_and_shards_hold_the_same(
    tiny_llama_dir: Path, tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    index = sharded(tensors, tmp_path)
    for path in (tiny_llama_dir, tiny_llama_dir / "model.safetensors", tmp_path, index):
        assert same(open_weights(path), tensors), path


def test_backbone_without_prefix(tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    save_file({name.removeprefix("model."): t for name, t in tensors.items()}, tmp_path / "model.safetensors")
    assert same(open_weights(tmp_path), tensors)


def test_fused_projections_are_the_parts(
    tiny_llama_dir: Path, spec: ModelSpec, tensors: dict[str, torch.Tensor]
) -> None:
    model = load_model(spec, tiny_llama_dir, Registry(entry_points=False))
    assert isinstance(model, Llama)
    x = torch.randn(5, spec.hidden_size)
    prefix = "model.layers.1.self_attn."
    parts = [x @ tensors[f"{prefix}{name}_proj.weight"].T for name in "qkv"]
    assert torch.allclose(model.layers[1].attention.qkv_proj(x), torch.cat(parts, dim=1), atol=1e-5)
    assert torch.allclose(model.lm_head(x), x @ tensors["lm_head.weight"].T, atol=1e-5)


def test_tied_table_exists_once(tiny_llama_dir: Path, spec: ModelSpec, tensors: dict[str, torch.Tensor]) -> None:
    tied = load_model(replace(spec, tie_embeddings=True), tiny_llama_dir, Registry(entry_points=False))
    assert isinstance(tied, Llama)
    table = tensors["model.embed_tokens.weight"]
    ids = torch.tensor([3, 90, 3, 0])
    assert torch.equal(tied.table.embed(ids), table[ids])
    x = torch.randn(2, spec.hidden_size)
    assert torch.allclose(tied.lm_head(x), x @ table.T, atol=1e-5)
    assert tied.lm_head is tied.table.head
    assert tied.table.weight is None, "nothing is held beside the head"


def test_loader_casts(tiny_llama_dir: Path) -> None:
    load = Loader(open_weights(tiny_llama_dir), torch.bfloat16, "cpu")
    assert load("model.norm.weight").dtype == torch.bfloat16
    assert load.optional("model.layers.0.mlp.up_proj.bias") is None


def test_whole_numbers_are_no_weights(tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    """Formats that pack several weights into an integer must not be read as its value."""
    save_file(tensors | {"model.norm.weight": torch.ones(64, dtype=torch.int32)}, tmp_path / "model.safetensors")
    load = Loader(open_weights(tmp_path), torch.float32, "cpu")
    with pytest.raises(ModelError, match=r"model\.norm\.weight holds torch\.int32 values"):
        load("model.norm.weight")


def test_missing_tensors_are_listed(spec: ModelSpec, tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    broken = {name: t for name, t in tensors.items() if "layers.1.mlp.up_proj" not in name}
    save_file(broken | {"model.layers.1.mlp.strange.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError) as error:
        load_model(spec, tmp_path, Registry(entry_points=False))
    text = str(error.value)
    assert "missing model.layers.1.mlp.up_proj.weight" in text
    assert "found but not expected model.layers.1.mlp.strange.weight" in text
    assert "\n" not in text


def test_misshapen_tensors_are_listed(spec: ModelSpec, tiny_llama_dir: Path) -> None:
    wider = replace(spec, num_kv_heads=4)
    with pytest.raises(ModelError, match=r"k_proj.weight is \[32, 64\], expected \[64, 64\].* and \d+ more|v_proj"):
        check_tensors(open_weights(tiny_llama_dir), expected_tensors(wider), "llama")


def test_long_lists_are_cut(spec: ModelSpec, tiny_llama_dir: Path) -> None:
    deeper = replace(spec, num_layers=6)
    with pytest.raises(
        ModelError, match=r"\(21 tensors found, 57 expected\): missing .* and 30 more; 2 layers found, 6 in"
    ):
        check_tensors(open_weights(tiny_llama_dir), expected_tensors(deeper), "llama")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(num_layers=1), r"found but not expected model.layers.1.* and \d+ more; 2 layers found, 1 in the config"),
        (dict(num_layers=2), r"found but not expected model.layers.0.self_attn.q_proj.bias$"),
    ],
)
def test_more_than_the_configuration_says_is_refused(
    spec: ModelSpec, tensors: dict[str, torch.Tensor], tmp_path: Path, changes: dict[str, int], words: str
) -> None:
    stored = dict(tensors)
    if changes["num_layers"] == 2:
        stored["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(64)
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=words):
        load_model(replace(spec, **changes), tmp_path, Registry(entry_points=False))


def test_what_is_computed_or_tied_may_be_stored(
    spec: ModelSpec, tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    """Frequencies in old checkpoints, and a head that the configuration ties to the embedding."""
    save_file(
        tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}, tmp_path / "model.safetensors"
    )
    for tied in (False, True):
        load_model(replace(spec, tie_embeddings=tied), tmp_path, Registry(entry_points=False))


def test_weights_of_another_format_are_refused_in_words(tiny_llama_dir: Path) -> None:
    config = json.loads((tiny_llama_dir / "config.json").read_text())
    for method in ("gptq", "awq", "fp8"):
        stored = spec_from_hf(config | {"quantization_config": {"quant_method": method}}, "tiny")
        with pytest.raises(ModelError, match=f"stored as {method}, which the engine cannot read"):
            load_model(stored, tiny_llama_dir, Registry(entry_points=False))


def write_truncated(folder: Path, source: Path) -> Path:
    path = folder / "model.safetensors"
    path.write_bytes(source.read_bytes()[:5000])
    return path


def test_damaged_files(tiny_llama_dir: Path, tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    def fails(path: Path, words: str) -> None:
        with pytest.raises(ModelError, match=words):
            open_weights(path)

    fails(tmp_path / "absent", "no such file or directory")
    fails(tmp_path, "no weights found")
    fails(write_truncated(tmp_path, tiny_llama_dir / "model.safetensors"), "damaged or cut short")
    (tmp_path / "model.safetensors").write_bytes(b"garbage" * 100)
    fails(tmp_path, "damaged or cut short")
    index = sharded(tensors, tmp_path)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    fails(index, "missing shards model-00002-of-00003.safetensors of 3")
    index.write_text("[]")
    fails(tmp_path, "not a safetensors index")
    (tmp_path / "weights.txt").write_text("")
    fails(tmp_path / "weights.txt", "unknown weight format")
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    (pickled / "pytorch_model.bin").write_bytes(b"")
    fails(pickled, "only pickled weights")
