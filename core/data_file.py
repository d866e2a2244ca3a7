"""Files of numbers that users write by hand (devices, links): read strictly, and every mistake told by file, field and value.

Invariants
* A number is a number: text, true and infinity are refused where one is expected, though pydantic would convert them.
* A field that a file has twice is refused: the first value would be ignored.
* Sizes far below any hardware were written in another unit: that is an error which names the unit.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, TypeVar, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from twinfer.core.errors import ConfigError
from twinfer.core.mistakes import first_mistake

_NUMBERS = (int, float)
Spec = TypeVar("Spec", bound="NumbersOfAFile")


def _number(value: Any) -> Any:
    """`value`, unless pydantic would make a number of what is none."""
    if isinstance(value, bool | str):
        raise PydanticCustomError("float_type", "no number")
    if isinstance(value, float) and not math.isfinite(value):
        raise PydanticCustomError("finite_number", "not finite")
    return value


Number = Annotated[float, BeforeValidator(_number)]
"""One of the numbers in a mapping or list."""


class NumbersOfAFile(BaseModel):
    """Base of what such a file describes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @field_validator("*", mode="before")
    @classmethod
    def _is_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        kind = cls.model_fields[info.field_name or ""].annotation
        parts = get_args(kind) if isinstance(kind, UnionType) else (kind,)
        return _number(value) if any(part in _NUMBERS for part in parts) else value


def read_numbers(path: Path, spec: type[Spec], option: str, what: str, units: Mapping[str, tuple[float, str]]) -> Spec:
    """The JSON object in `path` as a `spec`; ConfigError naming the file and the first field that is wrong.

    units: field -> (a value that no hardware is below, what it is measured in); of a mapping, each of its values.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8-sig"), object_pairs_hook=_once)
    except OSError as error:
        raise ConfigError(option, str(path), f"cannot be read ({error.strerror})", "check the path") from None
    except _Twice as error:
        raise ConfigError(option, str(path), f"{error} is there twice", "keep one of them") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(option, str(path), f"is not a JSON file ({error})", f"give a {what} file") from None
    if not isinstance(found, dict):
        raise ConfigError(option, str(path), f"holds a JSON {type(found).__name__}, no object", f"give a {what} file")
    try:
        made = spec.model_validate(found)
    except ValidationError as error:
        wrong = first_mistake(error)
        fix = wrong.fix
        if wrong.kind in ("extra_forbidden", "missing") and len(wrong.path) == 1:
            fix = f"{fix}; fields: {', '.join(spec.model_fields)}"
        given = wrong.told if wrong.path else ""
        raise ConfigError(option, str(path), f"{given} {wrong.problem}".strip(), fix) from None
    for field, (least, unit) in units.items():
        value = getattr(made, field)
        for part, number in value.items() if isinstance(value, dict) else [("", value)]:
            if number is not None and number < least:
                raise ConfigError(
                    option, str(path), f"{f'{field} {part}'.strip()}={number:g} is less than any {what} has",
                    f"give it in {unit}",
                )  # fmt: skip
    return made


class _Twice(ValueError):
    """An object has a field twice; its text is the field's name."""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of a JSON file."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise _Twice(next(name for name in names if names.count(name) > 1))
    return found


__all__ = ["Number", "NumbersOfAFile", "read_numbers"]
