"""Images in a workload: how many a request has, how large they are, and where their tokens stand in its prompt.

    prompt = what prompts share (`shared_prefix`) | images | the rest          (recorded blocks: all of the text | images)

Invariants
* Images are of their request alone: no two share a token, so that no prefix cache finds one (but a session's own).
* Numbers of images come from a stream of their own: they change neither lengths nor arrivals.
* A model without a known encoder is refused, and so is a size together with a number of tokens.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from twinfer.core.errors import ConfigError, figure
from twinfer.core.session import History
from twinfer.core.vision import AnySize, Cut, Image, VisionSpec

if TYPE_CHECKING:
    from twinfer.core.workload import Workload
    from twinfer.core.workload_source import CheckedSource, Draft, Setting

MOST_IMAGES = 256  # of a request in the mean
MOST_PIXELS = 2**16  # of a side
_NUMBERED = 1 << 20  # images are numbered from here, prompts mostly below
_SIZE = re.compile(r"([0-9]+)(?:x([0-9]+))?")


def check_images(workload: Workload) -> None:
    """ConfigError for options that cannot be, or mean nothing."""
    number, counts = workload.images_per_request, workload.image_counts
    if not 0 <= number <= MOST_IMAGES:
        raise ConfigError("--images-per-request", number, "out of range", f"use 0 to {figure(MOST_IMAGES)}")
    if counts == "fixed" and number != int(number):
        raise ConfigError(
            "--images-per-request", number, "a request has a whole number of images",
            "round it, or give --image-counts poisson for a mean",
        )  # fmt: skip
    if not number:
        for name in ("image_counts", "image_size", "image_tokens", "image_compression"):
            if getattr(workload, name) != type(workload).model_fields[name].default:
                option = "--" + name.replace("_", "-")
                raise ConfigError(option, getattr(workload, name), "there are no images", "give --images-per-request")
    if workload.image_size is not None:
        size_of(workload.image_size)
        if workload.image_tokens is not None:
            raise ConfigError(
                "--image-tokens", workload.image_tokens, f"--image-size {workload.image_size} says how many there are",
                "give one of them",
            )  # fmt: skip
    if workload.image_tokens is not None and not 1 <= workload.image_tokens <= 2**20:
        raise ConfigError("--image-tokens", workload.image_tokens, "out of range", f"use 1 to {2**20}")
    if not 1 <= workload.image_compression <= 1e4:
        raise ConfigError("--image-compression", workload.image_compression, "out of range", "use 1 (none) to 1e4")


def size_of(text: str) -> tuple[int, int]:
    """(width, height) in pixels of `1024x768`, or of `1024` for a square."""
    found = _SIZE.fullmatch(text.strip().lower())
    if found is None:
        raise ConfigError("--image-size", text, "no size in pixels", "write 1024 or 1024x768 (width x height)")
    width, height = int(found[1]), int(found[2] or found[1])
    if not (1 <= width <= MOST_PIXELS and 1 <= height <= MOST_PIXELS):
        raise ConfigError("--image-size", text, "out of range", f"use 1 to {figure(MOST_PIXELS)} pixels a side")
    return width, height


def cut_of(workload: Workload, vision: VisionSpec) -> Cut:
    """One image of `workload` in the encoder and the prompt of a model; of `image_tokens`, the patches that make as many."""
    if workload.image_tokens is None:
        vision = replace(vision, compression=vision.compression * workload.image_compression)
        return vision.cut(*size_of(workload.image_size)) if workload.image_size else vision.usual
    each = replace(vision, compression=1.0).usual
    made = workload.image_tokens * vision.compression * workload.image_compression  # before they were compressed
    patches = max(1, round(made * each.tiles * each.patches / each.tokens))
    if isinstance(vision.layout, AnySize):
        return Cut(1, patches, workload.image_tokens)
    return Cut(-(-patches // each.patches), each.patches, workload.image_tokens)


def with_images(
    drafts: Sequence[Draft], workload: Workload, vision: VisionSpec | None, source: CheckedSource, setting: Setting
) -> list[Draft]:
    """`drafts` with the images of `workload` in their prompts."""
    if vision is None:
        raise ConfigError(
            "--images-per-request", workload.images_per_request,
            "the model takes text alone, or its image encoder is not known; the engine serves the text of every model",
            "simulate a model with an encoder (`twinfer models` says which), or leave it out",
        )  # fmt: skip
    make = source.made_up
    if make is None:
        raise ConfigError(
            "--images-per-request", workload.images_per_request, f"requests of kind {source.name!r} make no tokens up",
            "leave it out",
        )  # fmt: skip
    cut = cut_of(workload, vision)
    counts = _counts(workload, source)
    number = _NUMBERED + len(drafts)
    found = []
    for draft in drafts:
        count = next(counts)
        if not count:
            found.append(draft)
            continue
        at, prompt = min(draft.shared, len(draft.prompt)), draft.prompt
        tokens = [make(number + i, cut.tokens, workload, setting) for i in range(count)]
        number += count
        images = tuple(Image(at + i * cut.tokens, cut.tokens, cut.tiles, cut.patches) for i in range(count))
        before, behind = (
            (prompt[:at], prompt[at:]) if 0 < at < len(prompt) else ((), prompt) if not at else (prompt, ())
        )
        found.append(replace(draft, prompt=History(before, *tokens, behind), images=images))
    return found


def _counts(workload: Workload, source: CheckedSource) -> Iterator[int]:
    """Images of each request: equally many, or of a Poisson distribution."""
    mean = workload.images_per_request
    if workload.image_counts == "fixed":
        while True:
            yield int(mean)
    from twinfer.core.trace_rows import chances_of

    chances = chances_of(source, "images", workload)
    while True:  # the count whose cumulative probability reaches a number in [0, 1)
        drawn, count, share = next(chances), 0, math.exp(-mean)
        while drawn >= share and share > 0 and count < 16 * MOST_IMAGES:
            drawn -= share
            count += 1
            share *= mean / count
        yield count


__all__ = ["check_images", "cut_of", "size_of", "with_images"]
