"""Sampling options: each mistake is one line that names the option, the value and what would work."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest

from twinfer.core.errors import ConfigError, short
from twinfer.core.params import SamplingParams

MISTAKES: list[tuple[str, Any, str]] = [
    ("temperature", -0.1, "0 for greedy"),
    ("temperature", math.nan, "number"),
    ("temperature", math.inf, "number"),
    ("top_k", -1, "0 to keep all"),
    ("top_k", 1.5, "integer"),
    ("top_k", True, "integer"),
    ("top_p", 0.0, "(0, 1]"),
    ("top_p", 1.1, "(0, 1]"),
    ("top_p", math.nan, "(0, 1]"),
    ("min_p", -0.1, "[0, 1]"),
    ("min_p", 1.1, "[0, 1]"),
    ("min_p", math.nan, "[0, 1]"),
    ("repetition_penalty", 0.0, "positive"),
    ("repetition_penalty", math.inf, "positive"),
    ("repetition_penalty", math.nan, "positive"),
    ("presence_penalty", 2.1, "[-2, 2]"),
    ("presence_penalty", math.nan, "[-2, 2]"),
    ("frequency_penalty", -2.1, "[-2, 2]"),
    ("n", 0, "at least one"),
    ("n", "2", "integer"),
    ("n", 2, "temperature above 0"),
    ("max_tokens", 0, "at least one"),
    ("max_tokens", None, "integer"),
    ("min_tokens", -1, "from 0 to max_tokens"),
    ("min_tokens", 129, "from 0 to max_tokens (128)"),
    ("seed", -1, "from 0 to 2**63 - 1"),
    ("seed", 2**63, "from 0 to 2**63 - 1"),
    ("seed", 0.5, "integer"),
    ("logprobs", -1, "from 0 to 20"),
    ("logprobs", 21, "from 0 to 20"),
    ("logprobs", 2.0, "integer"),
    ("stop", ("",), "at least one character"),
    ("stop", "", "at least one character"),
    ("stop", ("ok", 3), "at least one character"),
]


@pytest.mark.parametrize(("name", "value", "fix"), MISTAKES, ids=lambda v: repr(v)[:20])
def test_a_mistake_names_option_value_and_fix(name: str, value: Any, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SamplingParams(**{name: value})
    text = str(caught.value)
    assert caught.value.option == name and text.startswith((f"{name}=", f"{name}: "))
    assert fix in text and "\n" not in text
    shown = (value,) if name == "stop" and isinstance(value, str) else value
    assert value is None or short(shown) in text


@pytest.mark.parametrize(
    "good",
    [
        {"temperature": 0.0, "top_p": 1.0, "top_k": 0},
        {"temperature": 2.0, "top_p": 1e-6, "min_p": 1.0, "n": 8},
        {"seed": 0, "logprobs": 0},
        {"seed": 2**63 - 1, "logprobs": 20},
        {"max_tokens": 1, "min_tokens": 1},
        {"presence_penalty": -2.0, "frequency_penalty": 2.0, "repetition_penalty": 0.5},
    ],
)
def test_bounds_themselves_are_allowed(good: dict[str, Any]) -> None:
    params = SamplingParams(**good)
    assert {key: getattr(params, key) for key in good} == good


def test_stop_takes_one_string_or_several() -> None:
    assert SamplingParams(stop="end").stop == ("end",)  # type: ignore[arg-type]
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")  # type: ignore[arg-type]
    assert SamplingParams(stop_token_ids=[1, 2]).stop_token_ids == (1, 2)  # type: ignore[arg-type]


def test_unknown_options_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="best_of=2: no such sampling option; known options: temperature, top_k"):
        SamplingParams.from_mapping({"temperature": 0.5, "best_of": 2})
    with pytest.raises(ConfigError, match="_greedy"):
        SamplingParams.from_mapping({"_greedy": True})
    with pytest.raises(TypeError):
        SamplingParams(best_of=2)  # type: ignore[call-arg]
    assert SamplingParams.from_mapping({"seed": 3, "n": 2, "temperature": 1.0}).n == 2


def test_params_are_values() -> None:
    params = SamplingParams(temperature=0.7, seed=3, stop=("x",))
    assert params == SamplingParams(temperature=0.7, seed=3, stop=("x",))
    assert not params.greedy and SamplingParams().greedy
    for twin in (copy.deepcopy(params), pickle.loads(pickle.dumps(params))):
        assert twin == params and twin.greedy == params.greedy
    with pytest.raises(AttributeError):
        params.seed = 4  # type: ignore[misc]


def test_errors_survive_a_process_boundary() -> None:
    error = ConfigError("--rate", -1, "negative", "use a positive rate")
    twin = pickle.loads(pickle.dumps(error))
    assert str(twin) == str(error) == "--rate=-1: negative; use a positive rate"
    assert (twin.option, twin.value, twin.fix) == ("--rate", -1, "use a positive rate")


@pytest.mark.parametrize(
    "name", ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "length_penalty"]
)
@pytest.mark.parametrize("value", [None, "x", b"x", [1], True, float("nan"), float("inf"), 10**400, object()])
def test_what_is_no_number_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"^{name}.*not a finite number"):
        SamplingParams(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "value"), [("stop", 2), ("stop_token_ids", 2), ("stop_token_ids", b"x")])
def test_what_is_no_list_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"^{name}.*not a list of"):
        SamplingParams(**{name: value})  # type: ignore[arg-type]
