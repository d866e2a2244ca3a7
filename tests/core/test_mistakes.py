"""Mistakes in a user's words: no kind of value that pydantic tried, no dict, and the real reason."""

from __future__ import annotations

import pytest
from pydantic import BaseModel, Field, ValidationError

from twinfer.core.config import Choice
from twinfer.core.errors import ConfigError, figure
from twinfer.core.mistakes import first_mistake
from twinfer.core.registry import Registry


class Either(BaseModel):
    ranks: int | tuple[int, ...] = 0
    share: float = Field(default=0.5, lt=1)


def mistake(**values: object) -> tuple[str, str]:
    with pytest.raises(ValidationError) as caught:
        Either(**values)  # type: ignore[arg-type]  # mistakes are the point
    found = first_mistake(caught.value)
    return found.field, found.problem


def test_of_several_kinds_the_one_that_came_furthest_speaks() -> None:
    assert mistake(ranks=[1, 0.5]) == ("ranks", "is no whole number")
    assert mistake(ranks=object())[0] == "ranks"


@pytest.mark.parametrize("value", [float("nan"), "nan", " NaN", "-nan"])
def test_what_is_no_number_is_neither_small_nor_large(value: object) -> None:
    assert mistake(share=value) == ("share", "is no number")
    assert mistake(share=float("inf")) == ("share", "is too large")


@pytest.mark.parametrize(
    ("speculator", "options", "said"),
    [
        ("eagle", {"tree": -1}, "eagle: tree=-1 is too small; give at least 0"),
        ("eagle", {"tree": 10**8}, "eagle: tree=100000000 is too large; give at most 1024"),
        ("eagle", {"tree": "4x0x1"}, "eagle: each depth has at least one candidate"),
        ("eagle", {"alpha": "nan"}, "eagle: alpha='nan' is no number"),
        ("eagle", {"tree": "0.0 0.1"}, "give num_tokens=2"),
        ("medusa", {"tree": "4x2x1x1x1x1"}, "give heads=6"),
    ],
)
def test_options_of_a_technique(speculator: str, options: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Registry(entry_points=False).build("speculator", Choice(name=speculator, options=options))
    assert said in str(caught.value) and "constrained" not in str(caught.value) and "={" not in str(caught.value)


@pytest.mark.parametrize(
    ("value", "written"),
    [(0.0, "0"), (1, "1"), (0.01, "0.01"), (1e-9, "1e-9"), (4096, "4096"), (3600.0, "3600"), (10**7, "10,000,000"),
     (2**24, "16,777,216"), (1e6, "1,000,000"), (1e9, "1e9"), (10**12, "1e12"), (2**31 - 1, "2,147,483,647"),
     (-1.0, "-1"), (1234.5, "1234.5"), (1e300, "1e300"), (float("inf"), "inf")],
)  # fmt: skip
def test_bounds_are_written_as_people_write_numbers(value: float, written: str) -> None:
    assert figure(value) == written


@pytest.mark.parametrize(
    ("value", "shown"),
    [(-1.0, "-1"), (0.5, "0.5"), (1e99, "1e99"), (1e-9, "1e-9"), (1234567.0, "1234567"), (0.1 + 0.2, "0.30000000000000004"),
     (float("nan"), "nan"), (True, "True"), (7, "7"), ("1e+99", "'1e+99'")],
)  # fmt: skip
def test_values_are_repeated_as_they_were_typed(value: object, shown: str) -> None:
    assert str(ConfigError("--x", value, "no", "yes")) == f"--x={shown}: no; yes"


class Bounded(BaseModel):
    seconds: float = Field(default=1, ge=0.0, le=1e9)
    tokens: int = Field(default=1, gt=0, lt=10**7)


@pytest.mark.parametrize(
    ("given", "fix"),
    [({"seconds": -1}, "give at least 0"), ({"seconds": 1e99}, "give at most 1e9"), ({"tokens": 0}, "give more than 0"),
     ({"tokens": 10**9}, "give less than 10,000,000")],
)  # fmt: skip
def test_bounds_of_models_are_written_so(given: dict[str, float], fix: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Bounded(**given)
    assert first_mistake(caught.value).fix == fix
