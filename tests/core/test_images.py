"""Images in workloads: where their tokens stand, how many there are, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from twinfer.core.catalog import resolve_spec
from twinfer.core.errors import ConfigError
from twinfer.core.events import Finished
from twinfer.core.feeder import Feeder
from twinfer.core.request import Request
from twinfer.core.workload import generate, make_workload

QWEN, GEMMA, SCOUT = (resolve_spec(name).vision for name in ("qwen2.5-vl-7b", "gemma-3-27b", "llama-4-scout"))


def made(vision: Any = QWEN, **workload: Any) -> list[Request]:
    return generate(make_workload(**{"num_requests": 8, "input_len": 100, **workload}), 152_064, 32_768, vision=vision)


def test_images_stand_before_the_text_and_are_of_their_request_alone() -> None:
    requests, plain = made(images_per_request=2, image_size="640x480"), made()
    seen = set()
    for request, text in zip(requests, plain, strict=True):
        assert [(i.start, i.tokens, i.patches) for i in request.images] == [(0, 391, 1564), (391, 391, 1564)]
        assert len(request.prompt) == 782 + 100 and request.prompt[782:] == list(text.prompt)
        seen |= {tuple(request.prompt[start : start + 16]) for start in (0, 391)}
    assert len(seen) == 16, "no cache finds the image of another request"
    assert made(images_per_request=2, image_size="640x480") == requests


def test_a_shared_prefix_stays_in_front() -> None:
    requests = made(images_per_request=1, shared_prefix=40)
    assert {tuple(r.prompt[:40]) for r in requests} == {tuple(requests[0].prompt[:40])}
    assert all(r.images[0].start == 40 and len(r.prompt) == 100 + 1369 for r in requests)


def test_recorded_blocks_stay_in_front(tmp_path: Path) -> None:
    path = tmp_path / "mooncake.jsonl"
    row = {"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [1, 2]}
    path.write_text("\n".join([json.dumps(row)] * 2))
    first, second = made(num_requests=2, trace=str(path), images_per_request=1)
    assert first.prompt[:1000] == second.prompt[:1000] and first.images[0].start == 1000
    assert first.prompt[1000:1016] != second.prompt[1000:1016]


def test_sizes_tokens_and_compression() -> None:
    def tokens(vision: Any, **options: Any) -> tuple[int, int, int]:
        (image,) = made(vision, num_requests=1, images_per_request=1, **options)[0].images
        return image.tiles, image.patches, image.tokens

    assert tokens(QWEN) == (1, 5476, 1369) and tokens(QWEN, image_compression=8) == (1, 5476, 171)
    assert tokens(GEMMA, image_size="3000") == (1, 4096, 256)
    assert tokens(QWEN, image_tokens=500) == (1, 2000, 500)
    assert tokens(QWEN, image_tokens=500, image_compression=2) == (1, 4000, 500), "as many after compression"
    assert tokens(GEMMA, image_tokens=512) == (2, 4096, 512)
    assert tokens(SCOUT, image_size="1000x336") == (4, 576, 4 * 144)


def test_poisson_counts_have_their_mean_and_leave_the_rest_alone() -> None:
    options = {"num_requests": 4000, "lengths": "lognormal", "spread": 0.5, "rate": 3.0}
    requests, plain = made(images_per_request=1.5, image_counts="poisson", image_tokens=4, **options), made(**options)
    counts = [len(r.images) for r in requests]
    mean = sum(counts) / len(counts)
    variance = sum((c - mean) ** 2 for c in counts) / len(counts)
    assert mean == pytest.approx(1.5, abs=0.06) and variance == pytest.approx(1.5, abs=0.12)
    assert counts.count(0) / 4000 == pytest.approx(0.2231, abs=0.02)  # exp(-1.5)
    assert [(r.arrival, r.params.max_tokens) for r in requests] == [(r.arrival, r.params.max_tokens) for r in plain]
    assert [len(r.prompt) - 4 * len(r.images) for r in requests] == [len(r.prompt) for r in plain]


def test_a_later_turn_has_the_images_of_the_turns_before() -> None:
    requests = made(num_requests=2, turns=2, images_per_request=1, image_tokens=30, output_len=7)
    feeder = Feeder(requests, answer=0)
    (first,) = feeder.due(0.0)
    feeder.note([Finished(first.id, 0, "length", num_output_tokens=7)], 1.0)
    (second,) = feeder.due(1.0)
    assert [i.start for i in first.images] == [0] and [i.start for i in second.images] == [0, 137]
    image = second.images[1]
    assert second.prompt[image.start : image.start + 16] == requests[1].prompt[:16]


@pytest.mark.parametrize(
    ("given", "option"),
    [
        (dict(images_per_request=-1), "--images-per-request"), (dict(images_per_request=1e9), "--images-per-request"),
        (dict(images_per_request=0.5), "--images-per-request"), (dict(image_size="10"), "--image-size"),
        (dict(image_counts="poisson"), "--image-counts"), (dict(image_compression=2), "--image-compression"),
        (dict(images_per_request=1, image_size="1x"), "--image-size"),
        (dict(images_per_request=1, image_size="0x9"), "--image-size"),
        (dict(images_per_request=1, image_size="10", image_tokens=9), "--image-tokens"),
        (dict(images_per_request=1, image_tokens=0), "--image-tokens"),
        (dict(images_per_request=1, image_compression=0.5), "--image-compression"),
        (dict(images_per_request=float("nan")), "--images-per-request"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_its_option(given: dict[str, Any], option: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_workload(**given)
    assert caught.value.option == option


def test_a_model_without_an_encoder_is_refused_in_words() -> None:
    with pytest.raises(ConfigError, match="takes text alone, or its image encoder is not known"):
        made(None, images_per_request=1)
