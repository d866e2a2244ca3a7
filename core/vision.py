"""Images as a model of text and images takes them: how one is cut, how many tokens it becomes, what encodes it.

    image -> tiles of patches -> tower (blocks over the patches of a tile) -> projector -> tokens of the prompt

Invariants
* Frozen numbers without weights; sizes are in elements.
* Tokens are those that carry the image (and the ends of its rows, where a model marks them); words around it are text.
* `compression` shortens what enters the prompt, after the projector: encoding costs the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from twinfer.core.errors import ModelError


class Image(NamedTuple):
    """An image of a request: its `tokens` begin at position `start` of the prompt; the encoder sees `tiles` of `patches`."""

    start: int
    tokens: int
    tiles: int
    patches: int


class Cut(NamedTuple):
    """An image in the encoder and in the prompt: `tiles` of `patches` each become `tokens`."""

    tiles: int
    patches: int
    tokens: int


class Projection(NamedTuple):
    """`copies` matrices [n, k] that work on squares of `patches` patches."""

    n: int
    k: int
    patches: int
    copies: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Tower:
    """Transformer blocks over the patches of a tile, which all see each other.

    inputs: numbers of a patch.  extra: tokens besides the patches of a tile (a class token).
    window: patches that see each other in blocks that are not among the `whole` ones; 0 for no such blocks.
    projections: what turns patches into tokens.
    """

    depth: int
    hidden: int
    width: int
    heads: int
    inputs: int
    gated: bool = False
    extra: int = 0
    window: int = 0
    whole: int = 0
    projections: tuple[Projection, ...] = ()

    def __post_init__(self) -> None:
        if self.depth < 1 or self.heads < 1 or self.hidden % self.heads:
            raise ModelError(
                f"an image encoder of {self.depth} layers and {self.hidden} / {self.heads} heads cannot be"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class AnySize:
    """Images of any size: a square of `side` pixels (`merge` patches) becomes a token.

    longest: pixels that the longer side is scaled down to, 0 for no limit.  up: parts of squares count as whole ones,
    else sides are rounded.  row_ends: a token more at the end of each row.
    """

    side: int
    merge: int
    longest: int = 0
    up: bool = False
    row_ends: bool = False

    def cut(self, width: int, height: int) -> Cut:
        if self.longest and max(width, height) > self.longest:
            width, height = (max(1, x * self.longest // max(width, height)) for x in (width, height))
        columns, rows = (
            -(-x // self.side) if self.up else max(1, round(x / self.side)) for x in (width, height)
        )  # fmt: skip
        return Cut(1, columns * rows * self.merge, (columns + self.row_ends) * rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """Images cut into at most `most` tiles of `side` x `side` pixels; each becomes `tokens`.

    overview: a tile more with the whole image, where there are several.  by_ratio: the grid is the one whose proportions
    are nearest to the image's (InternVL); else the one that scales the image up least, or down least (Llama).
    """

    side: int
    patches: int
    tokens: int
    most: int = 1
    overview: bool = False
    by_ratio: bool = False

    def cut(self, width: int, height: int) -> Cut:
        columns, rows = self.grid(width, height)
        tiles = columns * rows
        tiles += self.overview and tiles > 1
        return Cut(tiles, self.patches, tiles * self.tokens)

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """(columns, rows) of the tiles of an image."""
        sides = range(1, self.most + 1)
        grids = [(c, r) for c in sides for r in sides if c * r <= self.most]
        if not self.by_ratio:
            scales = {grid: min(grid[0] * self.side / width, grid[1] * self.side / height) for grid in grids}
            up = [s for s in scales.values() if s >= 1]
            scale = min(up) if up else max(scales.values())
            return min((g for g in grids if scales[g] == scale), key=lambda g: g[0] * g[1])
        best, nearest = (1, 1), math.inf
        for grid in sorted(grids, key=lambda g: g[0] * g[1]):
            off = abs(width / height - grid[0] / grid[1])
            larger = off == nearest and 2 * width * height > self.side**2 * grid[0] * grid[1]
            if off < nearest or larger:
                best, nearest = grid, off
        return best


@dataclass(frozen=True, slots=True, kw_only=True)
class Pinpoints:
    """Images scaled into one of several sizes (LLaVA-NeXT), cut into tiles of `side` x `side` pixels of `grid` x `grid`
    patches; what only pads an image is left out again, each row of patches ends with a token, and the whole image is a
    tile besides.

    sizes: (width, height) in pixels.
    """

    side: int
    grid: int
    sizes: tuple[tuple[int, int], ...]

    def cut(self, width: int, height: int) -> Cut:
        def fit(size: tuple[int, int]) -> tuple[int, int]:
            scale = min(size[0] / width, size[1] / height)
            kept = min(int(width * scale) * int(height * scale), width * height)
            return kept, kept - size[0] * size[1]

        best = max(self.sizes, key=fit)
        columns, rows = best[0] // self.side * self.grid, best[1] // self.side * self.grid
        tiles = columns * rows // self.grid**2 + 1
        if width / height > columns / rows:
            rows -= (rows - int(round(height * columns / width, 7))) // 2 * 2
        else:
            columns -= (columns - int(round(width * rows / height, 7))) // 2 * 2
        return Cut(tiles, self.grid**2, (columns + 1) * rows + self.grid**2)


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionSpec:
    """An image encoder whose output enters the prompt as a prefix of tokens.

    params: weights of encoder and projector.  image_size: side in pixels of the image that is described where none is
    given.  layout: how images are cut.  tower: what encodes them.
    compression: images take that many times fewer tokens (a what-if; 1 is the model's own).
    """

    params: int
    image_size: int
    layout: AnySize | Tiles | Pinpoints
    tower: Tower
    compression: float = 1.0

    def __post_init__(self) -> None:
        if not 1.0 <= self.compression < math.inf:
            raise ModelError(f"compression={self.compression} of image tokens must be at least 1")

    def cut(self, width: int, height: int) -> Cut:
        """An image of `width` x `height` pixels in the encoder and in the prompt."""
        found = self.layout.cut(width, height)
        return found._replace(tokens=max(1, round(found.tokens / self.compression)))

    def tokens_of(self, width: int, height: int) -> int:
        """Tokens that an image of `width` x `height` pixels takes in the prompt."""
        return self.cut(width, height).tokens

    @property
    def usual(self) -> Cut:
        """The image of `image_size` x `image_size` pixels."""
        return self.cut(self.image_size, self.image_size)

    @property
    def prefix_tokens(self) -> int:
        """Tokens of the prompt that one image of `image_size` takes."""
        return self.usual.tokens


__all__ = ["AnySize", "Cut", "Image", "Pinpoints", "Projection", "Tiles", "Tower", "VisionSpec"]
