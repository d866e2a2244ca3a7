"""Models of text and images: weights, and tokens of an image, as transformers 5.24 counts them; the work of encoding.

`vision_configs.json` holds the config.json files of these models, without fields that describe no shape. Totals are those
of transformers' classes built from them; tokens are what its image processors make of each size (without the most and
least pixels that only a processor's file states).
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from twinfer.core.catalog import resolve_spec, spec_from_hf
from twinfer.core.errors import ModelError
from twinfer.core.spec import ModelSpec
from twinfer.core.vision import AnySize, Image, Tiles
from twinfer.core.vision_ops import busiest_share, vision_ops
from twinfer.core.work import total

CONFIGS = json.loads(Path(__file__).with_name("vision_configs.json").read_text())

TOTALS = {
    "qwen2-vl-7b": 8_291_375_616, "llava-1.5-7b": 7_063_427_072, "llava-next-mistral": 7_566_747_648,
    "pixtral-12b": 12_682_739_712, "mistral-small-3.1": 24_011_361_280, "internvl3-8b-hf": 7_944_373_760,
    "qwen2.5-vl-7b": 8_292_166_656, "qwen3-vl-8b": 8_767_123_696, "gemma-3-27b": 27_432_406_640,
    "llama-4-scout": 108_641_793_536,
}  # fmt: skip

MODELS = (
    "qwen2-vl-7b",
    "qwen3-vl-8b",
    "internvl3-8b-hf",
    "llama-4-scout",
    "llava-next-mistral",
    "pixtral-12b",
    "mistral-small-3.1",
)
TOKENS = {
    (1024, 1024): (1369, 1024, 2560, 2448, 2928, 4160, 1406),
    (1920, 1080): (2691, 2040, 2304, 2304, 1948, 2340, 1736),
    (640, 480): (391, 300, 3328, 720, 2340, 1230, 432),
    (300, 2000): (781, 558, 2048, 1008, 1368, 704, 550),
    (336, 672): (288, 210, 768, 432, 1776, 924, 312),
    (448, 448): (256, 196, 256, 720, 2928, 812, 272),
    (3000, 2500): (9523, 7332, 3328, 2448, 2536, 3510, 2576),
    (56, 90): (6, 6, 1792, 144, 936, 30, 12),
}
"""(width, height) -> tokens of each of `MODELS`."""


def read(name: str) -> ModelSpec:
    return spec_from_hf(CONFIGS[name], name) if name in CONFIGS else resolve_spec(name)


@pytest.mark.parametrize(("name", "total_params"), TOTALS.items())
def test_weights_are_those_of_transformers(name: str, total_params: int) -> None:
    assert read(name).num_params() == total_params


@pytest.mark.parametrize("size", TOKENS)
def test_images_are_cut_as_the_models_own_processors_do(size: tuple[int, int]) -> None:
    found = []
    for name in MODELS:
        vision = read(name).vision
        assert vision is not None
        found.append(vision.tokens_of(*size))
    assert tuple(found) == TOKENS[size]


def test_images_of_one_size_and_none_at_all() -> None:
    gemma, llava = read("gemma-3-27b").vision, read("llava-1.5-7b").vision
    assert gemma is not None and gemma.tokens_of(100, 5000) == 256
    assert llava is not None and llava.tokens_of(2000, 10) == 576
    unknown = CONFIGS["llava-1.5-7b"] | {"vision_config": {"model_type": "siglip_vision_model"}}
    assert spec_from_hf(unknown, "m").vision is None, "its text is described, its images are not"


def test_compression_shortens_the_prompt_alone() -> None:
    model = read("qwen2.5-vl-7b")
    assert model.vision is not None
    short = replace(model.vision, compression=4.0)
    assert short.cut(1024, 1024) == (1, 37 * 37 * 4, round(37 * 37 / 4))
    assert short.params == model.vision.params


def test_grids_of_tiles_by_hand() -> None:
    """Canvases: of those that need no shrinking the one that stretches least, else the one that shrinks least."""
    llama = Tiles(side=560, patches=1600, tokens=1, most=4)
    assert llama.grid(560, 560) == (1, 1) and llama.grid(561, 560) == (2, 1) and llama.grid(1120, 1120) == (2, 2)
    assert llama.grid(5000, 1000) == (4, 1) and llama.grid(100, 90) == (1, 1)
    assert AnySize(side=28, merge=4).cut(14, 3000).tokens == 107, "no side is nothing"


# --- work -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TOTALS)
def test_products_pass_every_patch_through_every_weight(name: str) -> None:
    """2 FLOPs per weight and patch; positions, norms and biases aside, which are under 3 % of the weights."""
    model = read(name)
    vision = model.vision
    assert vision is not None
    cut, tower = vision.usual, vision.tower
    ops = vision_ops(model, [Image(0, cut.tokens, cut.tiles, cut.patches)])
    products = [op for op in ops if op.kind == "gemm"]
    weights = sum(op.shape[1] * op.shape[2] * op.count for op in products)
    block = tower.hidden * (4 * tower.hidden + (3 if tower.gated else 2) * tower.width)
    left_out = (24 - tower.depth) * block if name.startswith("llava") else 0  # the last block is not run
    assert 0.97 * vision.params <= weights + left_out <= vision.params
    patches = cut.tiles * (cut.patches + tower.extra)
    assert sum(2 * op.shape[1] * op.shape[2] * patches * op.count for op in products if "proj" not in op.name[-9:]) > 0
    blocks = [op for op in products if op.count == tower.depth and op.name != "vision_projector"]
    assert total(blocks, "flops") == 2 * patches * tower.depth * block


def test_patches_attend_to_those_of_their_tile_or_window() -> None:
    qwen, gemma = read("qwen2.5-vl-7b"), read("gemma-3-27b")
    image = Image(0, 1369, 1, 5476)
    whole, windows = [op for op in vision_ops(qwen, [image, image]) if op.name == "vision_attention"]
    assert (whole.count, windows.count) == (4, 28)
    assert whole.flops == 2 * 4 * 5476**2 * 1280, "both directions"
    assert windows.flops == 2 * 4 * (85 * 64**2 + 36**2) * 1280
    (one,) = [op for op in vision_ops(gemma, [Image(0, 256, 1, 4096)]) if op.name == "vision_attention"]
    assert one.flops == 4 * 4096**2 * 1152 and len(one.rows) == 1


def test_ranks_share_images_and_none_is_cut() -> None:
    model = read("qwen2.5-vl-7b")
    large, small = Image(0, 400, 1, 1600), Image(5, 100, 1, 400)
    assert sorted(busiest_share([small, large, small], 2)) == [large]
    alone, shared = (total(vision_ops(model, [large] * 4, tp), "flops") for tp in (1, 4))
    assert shared == pytest.approx(alone / 4)
    (gather,) = [op for op in vision_ops(model, [large], 4) if op.kind == "comm"]
    assert gather.comm_bytes == 400 * model.hidden_size * 2 / 4
    assert vision_ops(model, []) == [] == vision_ops(resolve_spec("llama-3.1-8b"), [large])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(num_attention_heads=0), "image encoder"), (dict(image_size=[448, 224]), "only squares"),
        (dict(patch_size=0), "patch_size"), (dict(hidden_size="wide"), "hidden_size"),
    ],
)  # fmt: skip
def test_damaged_encoders_are_refused_by_their_field(changes: dict[str, object], words: str) -> None:
    config = CONFIGS["internvl3-8b-hf"]
    with pytest.raises(ModelError, match=words):
        spec_from_hf(config | {"vision_config": config["vision_config"] | changes}, "m")
