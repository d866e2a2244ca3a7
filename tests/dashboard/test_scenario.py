"""The scenario: URL round trip, bad links, combinations against the baseline, forms from option schemas."""

from __future__ import annotations

import math
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, ValidationError

from twinfer.core.config import Choice
from twinfer.core.errors import ConfigError
from twinfer.core.layout import Layout
from twinfer.core.registry import Registry
from twinfer.core.technique import Options
from twinfer.dashboard.combinations import combinations, flags, interaction, switches
from twinfer.dashboard.forms import fields_of, with_option
from twinfer.dashboard.scenario import PRESETS, Scenario


@pytest.fixture(scope="module")
def registry() -> Registry:
    return Registry(entry_points=False)


# --- the URL ------------------------------------------------------------------------------------


def test_the_default_scenario_is_the_empty_url():
    assert Scenario().to_params() == {}
    assert Scenario.from_params({}) == (Scenario(), [])


@given(
    scenario=st.builds(
        Scenario,
        model=st.sampled_from(["smollm2-135m", "some/dir with space", "llama-3-8b"]),
        scheduler=st.sampled_from(["static", "continuous:chunk_size=64", "static:batch_size=4,max_wait_s=0.5"]),
        kv_cache=st.sampled_from(["paged", "paged:block_size=32,prefix_sharing=false", "contiguous"]),
        quantizer=st.sampled_from([None, Choice(name="int8")]),
        speculator=st.sampled_from(
            [
                None,
                "ngram",
                "eagle:tree=4x2x1,num_tokens=3",
                Choice(name="eagle", options={"profile": [0.7, [0.5, 0.1]]}),
            ]
        ),
        max_num_seqs=st.integers(1, 4096),
        rate=st.sampled_from([0.0, 0.25, 1e6]) | st.floats(0, 1000),
        spread=st.floats(0, 1),
        num_kv_blocks=st.integers(0, 1000),
        tp=st.sampled_from([1, 2, 8]),
        pp=st.integers(1, 1024),
        cp=st.sampled_from([1, 4]),
        dp=st.sampled_from([1, 2]),
        ep=st.sampled_from([1, 16]),
        dtype=st.sampled_from(["auto", "bfloat16"]),
        kv_dtype=st.sampled_from(["auto", "fp8", "int4"]),
        memory_fraction=st.sampled_from([0.5, 0.9, 0.95, 1.0]),
        base_max_num_seqs=st.integers(0, 4096),
    )
)
def test_url_round_trip(scenario: Scenario):
    back, problems = Scenario.from_params(scenario.to_params())
    assert problems == []
    assert back.to_params() == scenario.to_params()
    assert back.speculator == scenario.speculator
    assert back.scheduler == scenario.scheduler and back.kv_cache == scenario.kv_cache
    assert math.isclose(back.rate, scenario.rate, rel_tol=1e-4, abs_tol=1e-9)


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"max_num_seqs": "0"}, "max_num_seqs"),
        ({"max_num_seqs": "many"}, "max_num_seqs"),
        ({"rate": "-1"}, "rate"),
        ({"rate": "nan"}, "rate"),
        ({"rate": "inf"}, "rate"),
        ({"scheduler": "continuous:chunk_size"}, "scheduler"),
        ({"model": ""}, "model"),
        ({"pp": "0"}, "pp"),
        ({"kv_dtype": "fp9"}, "kv_dtype"),
        ({"memory_fraction": "1.5"}, "memory_fraction"),
        ({"input_len": "1e99"}, "input_len"),
    ],
)
def test_a_bad_parameter_is_dropped_with_a_message_and_the_rest_works(params, field):
    scenario, problems = Scenario.from_params({**params, "output_len": "7", "unknown": "x"})
    assert scenario == Scenario(output_len=7)
    assert len(problems) == 1 and problems[0].startswith(field)
    assert "give" in problems[0] or "write" in problems[0]
    assert not any(word in problems[0] for word in ("Input should", "String should", "valid integer"))


def test_several_bad_parameters():
    scenario, problems = Scenario.from_params(
        {"rate": "x", "seed": "-2", "kv_cache": "paged:oops", "num_requests": "5"}
    )
    assert scenario == Scenario(num_requests=5) and len(problems) == 3


def test_edits_are_validated():
    assert Scenario().edited(max_num_seqs=4).max_num_seqs == 4
    with pytest.raises(ValidationError):
        Scenario().edited(max_num_seqs=0)
    with pytest.raises(ValidationError):
        Scenario().edited(nonsense=1)


# --- what engine and simulator get --------------------------------------------------------------


def test_config_and_workload():
    scenario = Scenario(num_kv_blocks=0, max_model_len=0, rate=0, spread=0.5, scheduler="continuous:chunk_size=64")
    config, workload = scenario.config(), scenario.workload()
    assert config.num_kv_blocks is None and config.max_model_len is None
    assert config.scheduler == Choice(name="continuous", options={"chunk_size": 64})
    assert workload.rate == math.inf and workload.lengths == "uniform" and workload.spread == 0.5
    assert Scenario(spread=0).workload().lengths == "fixed"
    laid = Scenario(tp=4, dp=2, ep=8, pp=3, kv_dtype="fp8", memory_fraction=0.8)
    assert laid.config().layout == Layout(4, 3, 1, 2, 8) and laid.num_devices == 24
    assert (laid.config().kv_dtype, laid.config().memory_fraction) == ("fp8", 0.8)
    assert "×24 (tp4 pp3 dp2 ep8)" in laid.line()
    with pytest.raises(ConfigError, match="--ep"):
        Scenario(ep=2).config()
    with pytest.raises(ConfigError, match="shared-prefix"):
        Scenario(input_len=10, shared_prefix=10).workload()


def test_the_key_ignores_the_baseline_and_nothing_else():
    key = Scenario().key()
    assert Scenario(base_scheduler="continuous", base_max_num_seqs=3).key() == key
    for change in (
        {"seed": 1},
        {"pp": 2},
        {"kv_dtype": "fp8"},
        {"memory_fraction": 0.8},
        {"max_num_seqs": 9},
        {"scheduler": "static"},
        {"kv_cache": "paged:block_size=8"},
    ):
        assert Scenario(**change).key() != key


def test_presets_are_valid():
    for values in PRESETS.values():
        Scenario().edited(**values).workload()


SEES = {"model": "qwen2.5-vl-7b", "images_per_request": 2.0, "image_size": "640x480"}


def test_images_are_part_of_the_workload_and_of_the_key_only_where_there_are_some():
    seen = Scenario(**SEES)
    assert seen.workload().images_per_request == 2 and seen.workload().image_size == "640x480"
    assert "+ 2 images 640x480" in seen.line()
    assert Scenario(image_size="640x480").workload() == Scenario().workload()
    assert Scenario(image_size="640x480", image_compression=2).key() == Scenario().key()
    assert seen.key() != Scenario(model=SEES["model"]).key() != seen.edited(image_size="").key()
    assert seen.edited(image_size="", image_tokens=99).workload().image_tokens == 99
    back, problems = Scenario.from_params(seen.to_params())
    assert back == seen and not problems


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"image_size": "wide"}, "write 1024 or 1024x768"),
        ({"image_size": "0x9"}, "pixels a side"),
        ({"image_size": "1" * 30}, "give at most 20"),
        ({"images_per_request": "-1"}, "give at least 0"),
        ({"images_per_request": "nan"}, "give a number"),
        ({"image_counts": "many"}, "'fixed' or 'poisson'"),
        ({"image_compression": "0"}, "give at least 1"),
    ],
)
def test_images_of_a_link_that_cannot_be(params, words):
    found, problems = Scenario.from_params(params)
    assert found == Scenario() and len(problems) == 1
    assert problems[0].startswith(next(iter(params))) and words in problems[0]


# --- combinations -------------------------------------------------------------------------------


def test_combinations_are_the_baseline_each_alone_and_all(registry):
    found = combinations(Scenario())
    assert [(c.label, c.role) for c in found] == [
        ("Baseline: static + contiguous", "baseline"), ("continuous alone", "alone"), ("paged alone", "alone"),
        ("All: continuous + paged", "all"),
    ]  # fmt: skip
    assert found[1].scenario.kv_cache.name == "contiguous" and found[2].scenario.scheduler.name == "static"
    assert found[3].scenario.key() == Scenario().key()


def test_on_off_options_of_the_choice_are_turned_the_other_way(registry):
    names = [flag.label for flag in flags(Scenario(), registry)]
    assert "without chunked prefill" in names and "without prefix sharing" in names
    with_registry = combinations(Scenario(), registry)
    off = next(c for c in with_registry if c.label == "Yours, without prefix sharing")
    assert off.scenario.kv_cache.options == {"prefix_sharing": False}
    again = next(f for f in flags(off.scenario, registry) if "prefix" in f.label)
    assert again.label == "with prefix sharing" and again.changes["kv_cache"].options == {}


def test_pinning_makes_the_scenario_its_own_baseline():
    pinned = Scenario(max_num_seqs=4).pinned()
    assert switches(pinned) == [] and len(combinations(pinned)) == 1
    moved = pinned.edited(max_num_seqs=16)
    assert [s.label for s in switches(moved)] == ["16 rows"]
    assert [c.role for c in combinations(moved)] == ["baseline", "all"]


def test_options_of_one_technique_are_a_switch_of_their_own():
    scenario = Scenario(base_scheduler="continuous", base_kv_cache="paged", kv_cache="paged:block_size=64")
    assert [s.label for s in switches(scenario)] == ["block_size=64"]


def test_no_combination_is_shown_twice(registry):
    found = combinations(Scenario(base_scheduler="continuous:chunked_prefill=false", base_kv_cache="paged"), registry)
    keys = [c.scenario.key() for c in found]
    assert len(keys) == len(set(keys))


def test_interaction():
    assert interaction(10, [15, 12], 18) == pytest.approx(0.0)
    assert interaction(10, [15, 12], 27) == pytest.approx(0.5)
    assert interaction(None, [1], 2) is None and interaction(10, [None], 2) is None and interaction(0, [1], 2) is None


# --- forms from option schemas ------------------------------------------------------------------


class Everything(Options):
    flag: bool = True
    size: int = Field(16, ge=1, le=1024, description="tokens per block", json_schema_extra={"unit": "tokens"})
    share: float = Field(0.5, gt=0, lt=1)
    maybe: int | None = Field(None, ge=1)
    policy: Literal["fcfs", "priority"] = "fcfs"
    bits: Literal[4, 8] = 8
    name: str = "x"
    sizes: list[int] = Field(default_factory=lambda: [1, 2])
    either: int | str = 3


def test_every_kind_of_option_becomes_a_field():
    found = {field.name: field for field in fields_of(Everything)}
    assert [f.kind for f in found.values()] == [
        "bool", "int", "float", "int", "choice", "choice", "text", "json", "json",
    ]  # fmt: skip
    assert (found["size"].minimum, found["size"].maximum, found["size"].label) == (1, 1024, "Size (tokens)")
    assert found["size"].help == "tokens per block" and found["maybe"].nullable and found["maybe"].default is None
    assert found["policy"].choices == ("fcfs", "priority") and found["bits"].choices == (4, 8)
    assert found["sizes"].default == [1, 2] and (found["share"].minimum, found["share"].maximum) == (0, 1)


def test_options_at_their_default_are_left_out():
    assert with_option(Everything, {}, "size", 32) == {"size": 32}
    assert with_option(Everything, {"size": 32}, "size", 16) == {}
    assert with_option(Everything, {"size": 32}, "flag", False) == {"size": 32, "flag": False}


def test_every_builtin_technique_can_be_drawn(registry):
    for item in registry.all():
        for field in fields_of(item.cls.Options):
            assert field.label and field.kind in ("bool", "int", "float", "choice", "text", "json"), (item.name, field)


def test_a_speculator_is_one_of_the_techniques_and_changes_no_older_key(registry):
    plain, guessing = Scenario(), Scenario(speculator=Choice(name="ngram", options={"num_tokens": 2}))
    assert plain.key() == "966926c022093b1e"  # as before there were any: stored results are found
    assert guessing.key() != plain.key()
    assert guessing.techniques() == "continuous + paged + ngram:num_tokens=2"
    assert guessing.config().speculator == guessing.speculator and guessing.baseline().speculator is None
    assert "ngram:num_tokens=2 alone" in [c.label for c in combinations(guessing, registry)]


def test_none_is_no_technique_in_a_link() -> None:
    assert Scenario.from_params({"quantizer": "none", "speculator": "none", "attention": "none"}) == (Scenario(), [])
