"""The image encoder that a Hugging Face `config.json` of a model of text and images describes.

Invariants
* Weights are counted exactly, and images cut as the model's own processor does (tests compare with transformers).
* A model of an unknown encoder has none: its text is described, images are refused.
* Limits that only a processor's file states (most pixels of an image) are not known here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from twinfer.core.errors import ModelError
from twinfer.core.hf_fields import Fields
from twinfer.core.spec import ModelSpec
from twinfer.core.vision import AnySize, Pinpoints, Projection, Tiles, Tower, VisionSpec

DYNAMIC_SIDE = 1024
"""Pixels a side of the image that is described where a model takes any size."""
LLAMA4_TILES, INTERNVL_TILES = 16, 12  # of the models' processors


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


# --- images of any size -----------------------------------------------------------------------------


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
    tower = Tower(
        depth=c.count("depth"), hidden=h, width=width, heads=c.count("num_heads", 16), inputs=patch,
        projections=(Projection(wide, wide, merge, 1 + deep), Projection(out, wide, merge, 1 + deep)),
    )  # fmt: skip
    return _any_size(params, tower, side, merge)


def _qwen2_5(outer: Fields, c: Fields, text: ModelSpec) -> VisionSpec:
    """Blocks with RMS norms and a gated MLP, most of which attend within windows; one merger."""
    h, width, depth = c.count("hidden_size", 1280), c.count("intermediate_size", 3420), c.count("depth", 32)
    merge = c.count("spatial_merge_size", 2) ** 2
    side, out = c.count("patch_size", 14), c.count("out_hidden_size", text.hidden_size)
    wide = h * merge
    patch = c.count("in_channels", c.count("in_chans", 3)) * side**2 * c.count("temporal_patch_size", 2)
    block = 2 * h + (h + 1) * 3 * h + (h + 1) * h + 2 * (h + 1) * width + (width + 1) * h
    params = patch * h + depth * block + h + (wide + 1) * wide + (wide + 1) * out
    tower = Tower(
        depth=depth, hidden=h, width=width, heads=c.count("num_heads", 16), inputs=patch, gated=True,
        window=(c.count("window_size", 112) // side) ** 2, whole=len(c.get("fullatt_block_indexes", [7, 15, 23, 31])),
        projections=(Projection(wide, wide, merge), Projection(out, wide, merge)),
    )  # fmt: skip
    return _any_size(params, tower, side, merge)


def _qwen2(outer: Fields, c: Fields, text: ModelSpec) -> VisionSpec:
    """Blocks with biases and layer norms, one merger; `hidden_size` is the text's."""
    h, depth, merge = c.count("embed_dim", 1280), c.count("depth", 32), c.count("spatial_merge_size", 2) ** 2
    side, out, width = c.count("patch_size", 14), c.count("hidden_size", text.hidden_size), c.count("mlp_ratio", 4) * h
    wide = h * merge
    patch = c.count("in_channels", c.count("in_chans", 3)) * side**2 * c.count("temporal_patch_size", 2)
    params = patch * h + depth * _block(h, width) + 2 * h + (wide + 1) * wide + (wide + 1) * out
    tower = Tower(
        depth=depth, hidden=h, width=width, heads=c.count("num_heads", 16), inputs=patch,
        projections=(Projection(wide, wide, merge), Projection(out, wide, merge)),
    )  # fmt: skip
    return _any_size(params, tower, side, merge)


def _moonvit(outer: Fields, c: Fields, text: ModelSpec) -> VisionSpec:
    """Kimi: positions of a grid, blocks with biases, a projector behind a square of patches."""
    h = c.count("vt_hidden_size", c.get("hidden_size"))
    width = c.count("vt_intermediate_size", c.get("intermediate_size"))
    depth = c.count("vt_num_hidden_layers", c.count("num_hidden_layers", 27))
    side, merge = c.count("patch_size", 14), 4
    wide = h * merge
    grid = c.count("init_pos_emb_height", 64) * c.count("init_pos_emb_width", 64)
    params = (3 * side**2 + 1) * h + grid * h + depth * _block(h, width) + 4 * h
    params += (wide + 1) * wide + (wide + 1) * text.hidden_size
    tower = Tower(
        depth=depth, hidden=h, width=width, heads=c.count("vt_num_attention_heads", c.count("num_attention_heads", 16)),
        inputs=3 * side**2, projections=(Projection(wide, wide, merge), Projection(text.hidden_size, wide, merge)),
    )  # fmt: skip
    return _any_size(params, tower, side, merge)


def _pixtral(outer: Fields, c: Fields, text: ModelSpec) -> VisionSpec:
    """Pixtral (LLaVA's projector) and Mistral 3 (a merger and norms besides): gated blocks without biases, a token at the
    end of each row of an image whose longer side is scaled down to `image_size`."""
    h, width, t = c.count("hidden_size", 1024), c.count("intermediate_size", 4096), text.hidden_size
    depth, side = c.count("num_hidden_layers", 24), c.count("patch_size", 16)
    merges = "Mistral3ForConditionalGeneration" in (outer.get("architectures") or ())
    merge = outer.count("spatial_merge_size", 2) if merges else 1
    params = 3 * side**2 * h + h + depth * (4 * h * h + 3 * h * width + 2 * h) + h * t + t * t
    params += 2 * t if outer.get("multimodal_projector_bias", not merges) else 0
    params += h + merge**2 * h * h if merges else 0
    first = (Projection(h, merge**2 * h, merge**2),) if merges else ()
    tower = Tower(
        depth=depth, hidden=h, width=width, heads=c.count("num_attention_heads", 16), inputs=3 * side**2, gated=True,
        projections=(*first, Projection(t, h, merge**2), Projection(t, t, merge**2)),
    )  # fmt: skip
    longest = _side(c, "image_size", 1024)
    layout = AnySize(side=side * merge, merge=merge**2, longest=longest, up=True, row_ends=True)
    return VisionSpec(params=params, image_size=min(longest, DYNAMIC_SIDE), layout=layout, tower=tower)


# --- images of one size, and tiles of one size ------------------------------------------------------


def _siglip(outer: Fields, c: Fields, text: ModelSpec) -> VisionSpec:
    """Gemma 3: a SigLIP encoder of images of one size, pooled to a fixed number of tokens."""
    h, side, size = c.count("hidden_size"), c.count("patch_size"), c.count("image_size")
    patches, tokens = (size // side) ** 2, outer.count("mm_tokens_per_image", 256, least=1)
    params = (3 * side**2 + 1) * h + patches * h + 2 * h
    params += c.count("num_hidden_layers") * _block(h, c.count("intermediate_size"))
    params += h * text.hidden_size + h  # projection and its norm
    tower = Tower(
        depth=c.count("num_hidden_layers"), hidden=h, width=c.count("intermediate_size"),
        heads=c.count("num_attention_heads"), inputs=3 * side**2,
        projections=(Projection(text.hidden_size, h, max(1, patches // tokens)),),
    )  # fmt: skip
    return VisionSpec(
        params=params, image_size=size, layout=Tiles(side=size, patches=patches, tokens=tokens), tower=tower
    )


def _llama4(outer: Fields, c: Fields, text: ModelSpec) -> VisionSpec:
    """Llama 4: tiles with a class token, shuffled pixels, two linears without biases."""
    h, side, size = c.count("hidden_size"), c.count("patch_size", 14), c.count("image_size", 448)
    patches, width = (size // side) ** 2, c.count("intermediate_size")
    narrow, wide = c.count("projector_input_dim", 4096), c.count("projector_output_dim", 4096)
    out = c.count("vision_output_dim", 4096)
    params = 3 * side**2 * h + h + (patches + 1) * h + 4 * h
    params += c.count("num_hidden_layers") * _block(h, width)
    params += width * narrow + wide**2 + out * text.hidden_size
    tokens = round(patches * float(c.get("pixel_shuffle_ratio", 0.5)) ** 2)
    merge = patches // max(1, tokens)
    tower = Tower(
        depth=c.count("num_hidden_layers"), hidden=h, width=width, heads=c.count("num_attention_heads", 16),
        inputs=3 * side**2, extra=1,
        projections=(Projection(narrow, width, merge), Projection(wide, wide, merge), Projection(text.hidden_size, out, merge)),
    )  # fmt: skip
    layout = Tiles(side=size, patches=patches, tokens=tokens, most=LLAMA4_TILES, overview=True)
    return VisionSpec(params=params, image_size=size, layout=layout, tower=tower)


def _internvl(outer: Fields, c: Fields, text: ModelSpec) -> VisionSpec:
    """InternVL: tiles of one size, shuffled pixels, a projector of two linears. The large encoder has RMS norms, norms of
    queries and keys, and no biases on them."""
    h, width, depth = (c.count(key) for key in ("hidden_size", "intermediate_size", "num_hidden_layers"))
    side, size = _side(c, "patch_size", 14), _side(c, "image_size", 448)
    patches, ratio, t = (size // side) ** 2, float(outer.get("downsample_ratio", 0.5)), text.hidden_size
    wide = round(h / ratio**2)
    block = _block(h, width) + 2 * h
    block -= 2 * h if c.get("norm_type", "layer_norm") == "rms_norm" else 0
    block -= 0 if c.get("qkv_bias", c.get("attention_bias", True)) else 3 * h
    block += 2 * h if c.get("qk_normalization", c.get("use_qk_norm", False)) else 0
    params = (3 * side**2 + 1) * h + h + (patches + 1) * h + depth * block
    params += 2 * wide + (wide + 1) * t + (t + 1) * t
    merge = round(1 / ratio**2)
    tower = Tower(
        depth=depth, hidden=h, width=width, heads=c.count("num_attention_heads"), inputs=3 * side**2, extra=1,
        projections=(Projection(t, wide, merge), Projection(t, t, merge)),
    )  # fmt: skip
    dynamic = outer.flag("dynamic_image_size", True)
    layout = Tiles(
        side=size, patches=patches, tokens=round(patches * ratio**2),
        most=outer.count("max_dynamic_patch", INTERNVL_TILES, least=1) if dynamic else 1,
        overview=outer.flag("use_thumbnail", True), by_ratio=True,
    )  # fmt: skip
    return VisionSpec(params=params, image_size=size, layout=layout, tower=tower)


def _llava(outer: Fields, c: Fields, text: ModelSpec) -> VisionSpec | None:
    """LLaVA and LLaVA-NeXT before a CLIP encoder, Pixtral before its own; other encoders are not known."""
    kind = c.get("model_type", "clip_vision_model")
    if kind == "pixtral":
        return _pixtral(outer, c, text)
    if kind != "clip_vision_model":
        return None
    h, width, t = c.count("hidden_size", 1024), c.count("intermediate_size", 4096), text.hidden_size
    depth, side, size = c.count("num_hidden_layers", 24), c.count("patch_size", 14), c.count("image_size", 336)
    grid = size // side
    params = 3 * side**2 * h + h + (grid**2 + 1) * h + 4 * h + depth * _block(h, width)
    params += h * t + t * t + (2 * t if outer.get("multimodal_projector_bias", True) else 0)
    layer = outer.get("vision_feature_layer", -2)  # what lies behind it is not run
    run = depth + 1 + layer if isinstance(layer, int) and layer < 0 else depth
    tower = Tower(
        depth=run, hidden=h, width=width, heads=c.count("num_attention_heads", 16), inputs=3 * side**2, extra=1,
        projections=(Projection(t, h, 1), Projection(t, t, 1)),
    )  # fmt: skip
    if "LlavaNextForConditionalGeneration" not in (outer.get("architectures") or ()):
        layout = Tiles(side=size, patches=grid**2, tokens=grid**2)
        return VisionSpec(params=params, image_size=size, layout=layout, tower=tower)
    sizes = outer.get("image_grid_pinpoints") or [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
    points = Pinpoints(side=size, grid=grid, sizes=tuple((int(width), int(height)) for height, width in sizes))
    return VisionSpec(params=params + t, image_size=2 * size, layout=points, tower=tower)


def _block(h: int, width: int) -> int:
    """A transformer block with biases everywhere: two layer norms, attention, an MLP without gate."""
    return 4 * h + 4 * (h + 1) * h + (h + 1) * width + (width + 1) * h


def _side(c: Fields, key: str, default: int) -> int:
    """Pixels of one side; some files give both, which must be alike."""
    found = c.get(key, default)
    if isinstance(found, list):
        if len(found) != 2 or found[0] != found[1]:
            raise ModelError(f"{c.name}: config.json has {key}={found}, and only squares are known")
        return Fields({key: found[0]}, c.name).count(key, least=1)
    return c.count(key, default, least=1)


def _any_size(params: int, tower: Tower, side: int, merge: int) -> VisionSpec:
    """An encoder of images of any size, whose squares of `merge` patches become a token each."""
    layout = AnySize(side=side * round(merge**0.5), merge=merge)
    return VisionSpec(params=params, image_size=DYNAMIC_SIDE, layout=layout, tower=tower)


_READERS: Mapping[str, Callable[[Fields, Fields, ModelSpec], VisionSpec | None]] = {
    "Qwen3VLForConditionalGeneration": _qwen3, "Qwen3VLMoeForConditionalGeneration": _qwen3,
    "Qwen3_5ForConditionalGeneration": _qwen3, "Qwen3_5MoeForConditionalGeneration": _qwen3,
    "Qwen2_5_VLForConditionalGeneration": _qwen2_5, "Qwen2VLForConditionalGeneration": _qwen2,
    "Gemma3ForConditionalGeneration": _siglip, "Llama4ForConditionalGeneration": _llama4,
    "KimiK25ForConditionalGeneration": _moonvit, "KimiVLForConditionalGeneration": _moonvit,
    "InternVLChatModel": _internvl, "InternVLForConditionalGeneration": _internvl,
    "LlavaForConditionalGeneration": _llava, "LlavaNextForConditionalGeneration": _llava,
    "Mistral3ForConditionalGeneration": _pixtral,
}  # fmt: skip
