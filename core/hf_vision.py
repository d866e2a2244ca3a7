"""The image encoder that a Hugging Face `config.json` of a model of text and images describes.

Invariants
* Weights are counted exactly for the encoders known here (a test compares with transformers' own classes).
* A model of an unknown encoder has none: its text is described, images are not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from twinfer.core.hf_fields import Fields
from twinfer.core.model_parts import VisionSpec
from twinfer.core.spec import ModelSpec

DYNAMIC_SIDE = 1024
"""Pixels a side of the image that is described where a model takes any size."""


def read_vision(config: Mapping[str, Any], text: ModelSpec) -> VisionSpec | None:
    """The encoder of `config`, whose language model is `text`; None where there is none, or none that is known."""
    if not isinstance(config.get("vision_config"), Mapping):
        return None
    outer = Fields(config, text.name)
    c = outer.part("vision_config")
    for architecture in config.get("architectures") or ():
        if architecture in _READERS:
            return _READERS[architecture](outer, c, text)
    return None


def _qwen3(outer: Fields, c: Fields, text: ModelSpec) -> VisionSpec:
    """Blocks with biases and layer norms; each merger joins a square of patches; Qwen3-VL feeds some layers to the text directly."""
    h, width, merge = c.count("hidden_size"), c.count("intermediate_size"), c.count("spatial_merge_size", 2) ** 2
    side, out = c.count("patch_size", 16), c.count("out_hidden_size", text.hidden_size)
    wide = h * merge
    patch = c.count("in_channels", 3) * side**2 * c.count("temporal_patch_size", 2)
    merger = (wide + 1) * wide + (wide + 1) * out
    deep = len(c.get("deepstack_visual_indexes", [8, 16, 24])) if text.family in ("qwen3", "qwen3_moe") else 0
    params = (patch + 1) * h + c.count("num_position_embeddings", 2304) * h
    params += c.count("depth") * _block(h, width) + merger + 2 * h + deep * (merger + 2 * wide)
    return _any_size(params, side, merge)


def _qwen2_5(outer: Fields, c: Fields, text: ModelSpec) -> VisionSpec:
    """Blocks with RMS norms and a gated MLP; one merger."""
    h, width, merge = (
        c.count("hidden_size", 1280),
        c.count("intermediate_size", 3420),
        c.count("spatial_merge_size", 2) ** 2,
    )
    side, out = c.count("patch_size", 14), c.count("out_hidden_size", text.hidden_size)
    wide = h * merge
    patch = c.count("in_channels", c.count("in_chans", 3)) * side**2 * c.count("temporal_patch_size", 2)
    block = 2 * h + (h + 1) * 3 * h + (h + 1) * h + 2 * (h + 1) * width + (width + 1) * h
    params = patch * h + c.count("depth", 32) * block + h + (wide + 1) * wide + (wide + 1) * out
    return _any_size(params, side, merge)


def _siglip(outer: Fields, c: Fields, text: ModelSpec) -> VisionSpec:
    """Gemma 3: a SigLIP encoder of images of one size, pooled to a fixed number of tokens."""
    h, side, size = c.count("hidden_size"), c.count("patch_size"), c.count("image_size")
    patches = (size // side) ** 2
    params = (3 * side**2 + 1) * h + patches * h + 2 * h
    params += c.count("num_hidden_layers") * _block(h, c.count("intermediate_size"))
    params += h * text.hidden_size + h  # projection and its norm
    return VisionSpec(params=params, patches=patches, tokens=outer.count("mm_tokens_per_image", 256), image_size=size)


def _llama4(outer: Fields, c: Fields, text: ModelSpec) -> VisionSpec:
    """Llama 4: a class token, shuffled pixels, two linears without biases."""
    h, side, size = c.count("hidden_size"), c.count("patch_size", 14), c.count("image_size", 448)
    patches = (size // side) ** 2
    narrow, wide = c.count("projector_input_dim", 4096), c.count("projector_output_dim", 4096)
    params = 3 * side**2 * h + h + (patches + 1) * h + 4 * h
    params += c.count("num_hidden_layers") * _block(h, c.count("intermediate_size"))
    params += c.count("intermediate_size") * narrow + wide**2 + c.count("vision_output_dim", 4096) * text.hidden_size
    tokens = round(patches * float(c.get("pixel_shuffle_ratio", 0.5)) ** 2)
    return VisionSpec(params=params, patches=patches, tokens=tokens, image_size=size)


def _moonvit(outer: Fields, c: Fields, text: ModelSpec) -> VisionSpec:
    """Kimi: positions of a grid, blocks with biases, a projector behind a square of patches."""
    h = c.count("vt_hidden_size", c.get("hidden_size"))
    width, depth = c.count("vt_intermediate_size", c.get("intermediate_size")), c.count("vt_num_hidden_layers", 27)
    side, merge = c.count("patch_size", 14), 4
    wide = h * merge
    grid = c.count("init_pos_emb_height", 64) * c.count("init_pos_emb_width", 64)
    params = (3 * side**2 + 1) * h + grid * h + depth * _block(h, width) + 4 * h
    params += (wide + 1) * wide + (wide + 1) * text.hidden_size
    return _any_size(params, side, merge)


def _internvl(outer: Fields, c: Fields, text: ModelSpec) -> VisionSpec:
    """InternVL: tiles of one size, shuffled pixels, a projector of two linears."""
    h, width, side, size = (c.count(k) for k in ("hidden_size", "intermediate_size", "patch_size", "image_size"))
    patches, ratio = (size // side) ** 2, float(outer.get("downsample_ratio", 0.5))
    wide = round(h / ratio**2)
    params = (3 * side**2 + 1) * h + h + (patches + 1) * h + c.count("num_hidden_layers") * (_block(h, width) + 2 * h)
    params += 2 * wide + (wide + 1) * text.hidden_size + (text.hidden_size + 1) * text.hidden_size
    return VisionSpec(params=params, patches=patches, tokens=round(patches * ratio**2), image_size=size)


def _block(h: int, width: int) -> int:
    """A transformer block with biases everywhere: two layer norms, attention, an MLP without gate."""
    return 4 * h + 4 * (h + 1) * h + (h + 1) * width + (width + 1) * h


def _any_size(params: int, side: int, merge: int) -> VisionSpec:
    """An encoder of images of any size, whose squares of `merge` patches become a token each."""
    pixels = side * round(merge**0.5)
    tokens = (-(-DYNAMIC_SIDE // pixels)) ** 2
    return VisionSpec(
        params=params, patches=tokens * merge, tokens=tokens, image_size=DYNAMIC_SIDE, patch_pixels=pixels
    )


_READERS: Mapping[str, Callable[[Fields, Fields, ModelSpec], VisionSpec]] = {
    "Qwen3VLForConditionalGeneration": _qwen3, "Qwen3VLMoeForConditionalGeneration": _qwen3,
    "Qwen3_5ForConditionalGeneration": _qwen3, "Qwen3_5MoeForConditionalGeneration": _qwen3,
    "Qwen2_5_VLForConditionalGeneration": _qwen2_5, "Gemma3ForConditionalGeneration": _siglip,
    "Llama4ForConditionalGeneration": _llama4, "KimiK25ForConditionalGeneration": _moonvit,
    "InternVLChatModel": _internvl,
}  # fmt: skip
