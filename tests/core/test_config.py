"""Choices as text and back, and configurations that refuse what they do not know."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from twinfer.core.config import OPTIONAL, Choice, EngineConfig, choice_of, parse_choice
from twinfer.core.errors import ConfigError
from twinfer.core.registry import Registry


@pytest.mark.parametrize(
    ("text", "name", "options"),
    [
        ("paged", "paged", {}),
        ("paged:", "paged", {}),
        (" paged : block_size = 32 ", "paged", {"block_size": 32}),
        ("paged:block_size=32,prefix_sharing=false", "paged", {"block_size": 32, "prefix_sharing": False}),
        ("mine/paged:ratio=0.5", "mine/paged", {"ratio": 0.5}),
        ("x:a=null,b=text,c=", "x", {"a": None, "b": "text", "c": ""}),
        ("x:path=a=b", "x", {"path": "a=b"}),
    ],
)
def test_a_choice_from_text(text: str, name: str, options: dict[str, Any]) -> None:
    assert parse_choice(text) == {"name": name, "options": options}
    assert Choice.model_validate(text) == Choice(name=name, options=options)


@pytest.mark.parametrize("text", ["paged:block_size", "paged:=3", "paged:a=1,b"])
def test_an_option_without_name_or_value_is_an_error(text: str) -> None:
    with pytest.raises(ConfigError, match="write NAME:option=value") as caught:
        Choice.model_validate(text)
    assert repr(text) in str(caught.value)


words = st.text("abcdefgh_", min_size=1, max_size=8)


@settings(deadline=None, derandomize=True)
@given(words, st.dictionaries(words, st.one_of(st.integers(), st.booleans(), st.none(), words), max_size=4))
def test_a_choice_written_as_text_is_read_back(name: str, options: dict[str, Any]) -> None:
    choice = Choice(name=name, options=options)
    assert Choice.model_validate(str(choice)) == choice


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_model_len", 1),
        ("max_num_seqs", 0),
        ("max_num_batched_tokens", 0),
        ("num_kv_blocks", 0),
        ("kv_memory_bytes", 0),
        ("memory_fraction", 0.0),
        ("memory_fraction", 1.5),
        ("tp", 0),
        ("pp", 0),
        ("ep", -1),
        ("num_devices", 0),
        ("seed", -1),
        ("scheduler", 3),
        ("no_such_option", 1),
    ],
)
def test_values_that_cannot_work_are_refused(field: str, value: object) -> None:
    with pytest.raises(ValidationError) as caught:
        EngineConfig(model="m", **{field: value})  # type: ignore[arg-type]
    assert caught.value.errors()[0]["loc"][0] == field


def test_a_configuration_is_frozen_and_survives_json() -> None:
    config = EngineConfig(model="m", scheduler="static:batch_size=4", kv_cache={"name": "paged"}, quantizer="fp8")  # type: ignore[arg-type]
    assert config.scheduler == Choice(name="static", options={"batch_size": 4})
    assert EngineConfig.model_validate_json(config.model_dump_json()) == config
    with pytest.raises(ValidationError):
        config.seed = 3  # type: ignore[misc]


@pytest.mark.parametrize("field", ["tp", "dp", "max_num_seqs", "num_kv_blocks", "memory_fraction", "seed"])
def test_a_truth_value_is_no_number(field: str) -> None:
    with pytest.raises(ValidationError, match="truth value"):
        EngineConfig(model="m", **{field: True})  # type: ignore[arg-type]


def test_a_truth_value_is_no_number_of_a_technique() -> None:
    registry = Registry(entry_points=False)
    for kind, text in (("attention", "mla:rank=true"), ("kv_cache", "paged:block_size=true")):
        with pytest.raises(ConfigError, match="truth value"):
            registry.build(kind, Choice.model_validate(text))
    registry.build("kv_cache", Choice.model_validate("paged:prefix_sharing=true"))


def test_commas_within_lists_and_quotes_belong_to_the_value() -> None:
    text = 'eagle:profile=[0.7, [0.5,0.1]],tree="0 1,2",num_tokens=2'
    choice = Choice.model_validate(text)
    assert choice.options == {"profile": [0.7, [0.5, 0.1]], "tree": "0 1,2", "num_tokens": 2}
    assert Choice.model_validate(str(choice)) == choice
    with pytest.raises(ConfigError, match="has no value"):
        Choice.model_validate("eagle:profile=0.7,0.5")


@pytest.mark.parametrize("kind", OPTIONAL)
def test_none_is_no_technique_where_one_may_be_absent(kind: str) -> None:
    assert EngineConfig.model_fields[kind].default is None
    assert EngineConfig(model="m", **{kind: "none"}) == EngineConfig(model="m")
    assert choice_of(kind, "none") is None and choice_of("scheduler", "none") == Choice(name="none")
