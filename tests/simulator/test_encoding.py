"""Images in predictions: each is encoded in one step, takes the time of its ops, and pages of its tokens."""

from __future__ import annotations

from typing import Any

import pytest

from twinfer.core.catalog import resolve_spec
from twinfer.core.config import Choice, EngineConfig
from twinfer.core.device import load_device
from twinfer.core.errors import ConfigError
from twinfer.core.fleet import Fleet
from twinfer.core.records import RunRecord
from twinfer.core.registry import Registry
from twinfer.core.vision import Image
from twinfer.core.vision_ops import vision_ops
from twinfer.core.workload import Workload
from twinfer.simulator.fleet_run import simulate_fleet
from twinfer.simulator.op_time import build_chain
from twinfer.simulator.run import simulate

REGISTRY = Registry(entry_points=False)
MODEL = resolve_spec("qwen2.5-vl-7b")
CHAIN = build_chain((), load_device("h100-sxm", REGISTRY), REGISTRY, MODEL)
IMAGE = Image(0, 400, 1, 1600)
ALONE = {"num_requests": 1, "input_len": 100, "output_len": 4, "images_per_request": 1, "image_tokens": 400}


def predicted(workload: dict[str, Any], **config: Any) -> RunRecord:
    given = {"model": "qwen2.5-vl-7b", "device": "h100-sxm"} | config
    return simulate(EngineConfig(**given), Workload(**workload), REGISTRY)


def seconds(*images: Image, tp: int = 1) -> float:
    return sum(CHAIN.time(op).seconds * op.count for op in vision_ops(MODEL, images, tp))


def encoded(record: RunRecord) -> list[float]:
    return [sum(s for name, s in step.ops.items() if name.startswith("vision_")) for step in record.steps]


def test_an_image_adds_its_tokens_and_the_time_of_its_ops() -> None:
    seen = predicted(ALONE)
    text = predicted({"num_requests": 1, "input_len": 500, "output_len": 4})
    assert seen.requests[0].num_prompt_tokens == 500
    assert encoded(seen) == pytest.approx([seconds(IMAGE), 0, 0, 0])
    (a, b) = seen.requests[0].ttft, text.requests[0].ttft
    assert a is not None and b is not None and a - b == pytest.approx(seconds(IMAGE))
    assert seen.requests[0].itl == pytest.approx(text.requests[0].itl)
    assert [s.held_blocks for s in seen.steps] == [s.held_blocks for s in text.steps]
    assert sum(s.seconds for s in seen.steps) == pytest.approx(sum(sum(s.ops.values()) for s in seen.steps))


def test_chunks_encode_an_image_once_in_the_step_of_its_last_token() -> None:
    record = predicted(ALONE | {"images_per_request": 2}, max_num_batched_tokens=300)
    assert encoded(record)[:3] == pytest.approx([0.0, seconds(IMAGE), seconds(IMAGE)])
    assert sum(encoded(record)) == pytest.approx(2 * seconds(IMAGE))


def test_images_of_one_step_are_encoded_together() -> None:
    record = predicted(ALONE | {"num_requests": 3})
    together = seconds(*[IMAGE] * 3)
    assert encoded(record)[0] == pytest.approx(together) and together < 3 * seconds(IMAGE)


def test_compression_costs_the_prompt_less_and_the_encoder_as_much() -> None:
    short = predicted(ALONE | {"image_tokens": 100, "image_compression": 4})
    assert short.requests[0].num_prompt_tokens == 200 and sum(encoded(short)) == pytest.approx(seconds(IMAGE))


def test_a_session_encodes_again_only_what_no_cache_has() -> None:
    workload = ALONE | {"num_requests": 2, "turns": 2}
    kept, lost = (
        predicted(workload, kv_cache=Choice(name="paged", options={"prefix_sharing": caching}))
        for caching in (True, False)
    )
    assert sum(encoded(kept)) == pytest.approx(2 * seconds(IMAGE))
    assert sum(encoded(lost)) == pytest.approx(seconds(IMAGE) + seconds(IMAGE, IMAGE))


def test_ranks_and_replicas() -> None:
    two = predicted(ALONE | {"num_requests": 2}, tp=2)
    assert encoded(two)[0] == pytest.approx(seconds(IMAGE, IMAGE, tp=2))
    config = EngineConfig(model="qwen2.5-vl-7b", device="h100-sxm")
    fleet = Fleet(engine=config, replicas=1, decode=config, decode_replicas=1)
    record = simulate_fleet(fleet, Workload(**ALONE), REGISTRY)
    assert sum(encoded(record)) == pytest.approx(seconds(IMAGE)), "the decode pool gets KV, not images"


def test_equal_arguments_give_equal_runs_and_skipping_changes_nothing() -> None:
    workload = Workload(
        num_requests=40, rate=30.0, input_len=80, output_len=30, images_per_request=1.0, image_counts="poisson",
        image_size="640x480", lengths="lognormal", spread=0.5,
    )  # fmt: skip
    config = EngineConfig(model="qwen2.5-vl-7b", device="h100-sxm", max_num_batched_tokens=512)
    a, b, stepped = (simulate(config, workload, REGISTRY, skip=skip) for skip in (True, True, False))
    assert (a.steps, a.requests, a.intervals) == (b.steps, b.requests, b.intervals)
    for one, other in zip(a.requests, stepped.requests, strict=True):
        assert one.finished == pytest.approx(other.finished, abs=1e-9)


def test_a_model_of_text_is_refused() -> None:
    with pytest.raises(ConfigError, match="takes text alone"):
        predicted(ALONE, model="llama-3.1-8b")
