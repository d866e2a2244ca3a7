"""Recorded forward passes: bit for bit the pass as written, for other tokens, other rows and other pages."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from recorded_world import World

from twinfer.core.hf_config import spec_from_hf
from twinfer.core.plan import Need
from twinfer.core.registry import Registry
from twinfer.core.runtime.families import DecoderModel, load_model
from twinfer.core.runtime.linear import LinearFactory, dense
from twinfer.core.runtime.profile import Profile
from twinfer.core.runtime.quantized_linear import BF16Linears
from twinfer.core.runtime.replay import MOST_SHAPES, MOST_TOKENS


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def build(folder: Path, linear: LinearFactory) -> DecoderModel:
    spec = spec_from_hf(json.loads((folder / "config.json").read_text()), "tiny-llama")
    return load_model(spec, folder, Registry(entry_points=False), linear=linear)


@pytest.fixture(scope="module")
def model(tiny_llama_dir: Path, packed_products: None) -> DecoderModel:
    return build(tiny_llama_dir, BF16Linears())


def test_decode_of_changing_sequences(model: DecoderModel) -> None:
    world = World(model)
    world.check(world.batch({i: 3 + 4 * i for i in range(8)}))
    for step in range(30):
        world.check(world.batch({i: 1 for i in ([0, 1, 2] if step % 10 < 7 else [5, 3, 7])}))
    assert world.num_recorded == 1
    assert world.forward.why_not == ""
    for cache in (world.caches[0].keys, world.caches[0].values):
        assert cache[1].any()
    for mine, theirs in zip(world.caches[0].keys, world.caches[1].keys, strict=True):
        assert torch.equal(mine, theirs)


def test_rows_of_several_tokens_and_fewer_logits(model: DecoderModel) -> None:
    world = World(model)
    for _ in range(5):
        world.check(world.batch({0: 3, 4: 1, 2: 6}))
    for _ in range(4):
        world.check(world.batch({0: 2, 1: 2}, Need.ALL))
    assert world.num_recorded == 2


def test_shapes_that_differ_only_in_their_rows(model: DecoderModel) -> None:
    world = World(model)
    for shape in ({0: 2, 1: 1}, {0: 1, 1: 2}, {2: 1, 3: 2}, {2: 2, 3: 1}, {4: 1, 5: 2}):
        world.check(world.batch(shape))
    assert world.num_recorded == 1


def test_one_recording_per_number_of_threads(model: DecoderModel) -> None:
    world, before = World(model), torch.get_num_threads()
    try:
        for threads in (1, 1, 1, 2, 2, 2, 1):
            torch.set_num_threads(threads)
            world.check(world.batch({0: 1, 1: 1}))
    finally:
        torch.set_num_threads(before)
    assert world.num_recorded == 2


def test_long_steps_and_shapes_seen_once_are_not_recorded(model: DecoderModel) -> None:
    world = World(model)
    for count in (1, 2, 3, 4, MOST_TOKENS + 1, MOST_TOKENS + 1, MOST_TOKENS + 1):
        world.check(world.batch({0: count}))
    assert world.num_recorded == 0


def test_few_recordings_are_kept(model: DecoderModel) -> None:
    world = World(model)
    for count in range(1, MOST_SHAPES + 5):
        for _ in range(2):
            world.check(world.batch({0: count}))
    assert world.num_recorded == MOST_SHAPES
    world.check(world.batch({0: 1}))


def test_profile_knows_the_ops_of_a_recorded_pass(model: DecoderModel) -> None:
    world = World(model)
    found = []
    for _ in range(4):
        profile, begin = Profile(model.device), time.perf_counter()
        world.check(world.batch({0: 1}), profile)
        seconds = time.perf_counter() - begin
        found.append(profile.ops(seconds))
        assert sum(found[-1].values()) <= seconds * (1 + 1e-9)
    assert all(ops.keys() == found[0].keys() for ops in found)
    assert all(seconds > 0 for op, seconds in found[-1].items() if op != "host")


def test_a_model_with_products_of_torch_runs_as_written(tiny_llama_dir: Path) -> None:
    world = World(build(tiny_llama_dir, dense))
    for _ in range(4):
        world.check(world.batch({0: 1, 1: 1}))
    assert world.num_recorded == 0
    assert world.forward.why_not == "aten.mm.default is not a native kernel"
