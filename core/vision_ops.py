"""The ops of encoding the images of a step, on one rank.

    vision_patch_embed, { vision_norms, vision_qkv_proj, vision_attention, vision_o_proj,
                          vision_up_proj, vision_act, vision_down_proj } x depth, vision_projector

Invariants
* All images of a step go through the encoder at once; patches see those of their own tile (or window) alone, in both
  directions.
* Every tensor-parallel rank holds the whole encoder. Images are dealt over the ranks, which then have all tokens: the rank
  with the most patches counts.
* Counting rules are those of `work`: 2 FLOPs per weight and patch, weights read once.
"""

from __future__ import annotations

from collections.abc import Sequence

from twinfer.core.dtypes import dtype_bytes
from twinfer.core.spec import ModelSpec
from twinfer.core.vision import Image, Tower
from twinfer.core.work import Linear, Op, RowShape

NORM_FLOPS, ACT_FLOPS = 4, 8  # per element


def vision_ops(model: ModelSpec, images: Sequence[Image], tp: int = 1) -> list[Op]:
    """Ops of encoding `images` for `model` on the busiest of `tp` ranks; none without images."""
    if not images or model.vision is None:
        return []
    mine = busiest_share(images, tp)
    tower, act, other = model.vision.tower, dtype_bytes(model.dtype), model.other_bits / 8
    tiles = [image.patches + tower.extra for image in mine for _ in range(image.tiles)]
    m, patches, h, w = sum(tiles), sum(i.tiles * i.patches for i in mine), tower.hidden, tower.width

    def product(name: str, rows: int, n: int, k: int, count: int) -> Op:
        return Linear(name, n, k, n * k * other, model.dtype, count).op(rows, act)

    def pointwise(name: str, flops: float, read: float, written: float, width: int, count: int) -> Op:
        return Op(name, "elementwise", flops, read * act, written * act, model.dtype, count, (m, width))

    up = 2 * w if tower.gated else w
    ops = [
        product("vision_patch_embed", patches, h, tower.inputs, 1),
        pointwise("vision_norms", float(NORM_FLOPS * m * h), 2.0 * m * h, 2.0 * m * h, h, 2 * tower.depth + 1),
        product("vision_qkv_proj", m, 3 * h, h, tower.depth),
        *_attention(tower, tiles, model.dtype, act),
        product("vision_o_proj", m, h, h, tower.depth),
        product("vision_up_proj", m, up, h, tower.depth),
        pointwise("vision_act", float(ACT_FLOPS * m * w), float(m * up), float(m * w), w, tower.depth),
        product("vision_down_proj", m, h, w, tower.depth),
    ]
    ops += [
        product("vision_projector", -(-patches // each.patches), each.n, each.k, each.copies) for each in tower.projections
    ]  # fmt: skip
    if tp > 1:
        tokens = sum(image.tokens for image in images)
        size = tokens * model.hidden_size * act / tp
        ops.append(Op("vision_gather", "comm", 0.0, size, size * tp, model.dtype, 1, (tp,), size))
    return ops


def _attention(tower: Tower, tiles: Sequence[int], dtype: str, act: float) -> list[Op]:
    """Blocks that see whole tiles, and those that see windows."""
    whole = tower.whole if tower.window else tower.depth
    found = []
    for count, rows in ((whole, tiles), (tower.depth - whole, _windows(tiles, tower.window))):
        if count:
            pairs, m, h = sum(n * n for n in rows), sum(rows), tower.hidden
            shape = (tower.heads, tower.heads, h // tower.heads, h // tower.heads, 0, 2)  # 2: both directions
            found.append(
                Op(
                    "vision_attention", "attention", 4.0 * pairs * h, 3 * m * h * act, m * h * act, dtype, count, shape,
                    0.0, tuple(RowShape(n, n) for n in rows),
                )
            )  # fmt: skip
    return found


def _windows(tiles: Sequence[int], window: int) -> list[int]:
    rows = []
    for patches in tiles if window else ():
        whole, rest = divmod(patches, window)
        rows += [window] * whole + ([rest] if rest else [])
    return rows


def busiest_share(images: Sequence[Image], ranks: int) -> list[Image]:
    """The images of the rank that gets most, dealt largest first to whom has the fewest patches."""
    if ranks == 1:
        return list(images)
    held: list[list[Image]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    for image in sorted(images, key=lambda i: (-i.tiles * i.patches, i.start)):
        rank = load.index(min(load))
        held[rank].append(image)
        load[rank] += image.tiles * image.patches
    return held[load.index(max(load))]


__all__ = ["busiest_share", "vision_ops"]
