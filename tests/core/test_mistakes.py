"""Mistakes in a user's words: no kind of value that pydantic tried, no dict, and the real reason."""

from __future__ import annotations

import pytest
from pydantic import BaseModel, Field, ValidationError

from twinfer.core.config import Choice
from twinfer.core.errors import ConfigError
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
