"""Typed reads of a Hugging Face `config.json`: what is missing or of the wrong kind becomes one ModelError."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from twinfer.core.errors import ModelError, figure, short

_MOST = 10**12
"""Far beyond every size of a model: larger numbers are a mistake, and cannot be computed with."""


class Fields:
    """Typed reads of a config; a value that is missing or of the wrong kind becomes one ModelError."""

    def __init__(self, values: Mapping[str, Any], name: str) -> None:
        self.values, self.name = values, name

    def get(self, key: str, default: Any = None) -> Any:
        value = self.values.get(key)
        return default if value is None else value

    def count(self, key: str, default: int | None = None, least: int = 0) -> int:
        value = self.get(key, default)
        if value is None:
            raise ModelError(f"{self.name}: config.json lacks {key!r}; give the whole config.json of the model")
        if isinstance(value, bool) or not isinstance(value, int):
            raise ModelError(f"{self.name}: config.json has {key}={short(value)}, which should be a whole number")
        if value < least:
            raise ModelError(f"{self.name}: config.json has {key}={value}, which should be at least {least}")
        if value > _MOST:
            raise ModelError(
                f"{self.name}: config.json has {key}={short(value)}, which should be at most {figure(_MOST)}"
            )
        return value

    def number(self, key: str, default: float) -> float:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _MOST:
            raise ModelError(
                f"{self.name}: config.json has {key}={short(value)}, which should be a number from 0 to {figure(_MOST)}"
            )
        return float(value)

    def cap(self, key: str) -> float | None:
        """A positive number, or None where there is none."""
        value = self.get(key)
        if value is not None and self.number(key, 0.0) == 0:
            raise ModelError(f"{self.name}: config.json has {key}={short(value)}, which should be positive or null")
        return None if value is None else float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise ModelError(f"{self.name}: config.json has {key}={short(value)}, which should be true or false")
        return value

    def ids(self, key: str) -> tuple[int, ...]:
        """Token ids: one, a list of them, or none."""
        given = self.get(key, [])
        found = given if isinstance(given, list) else [given]
        if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in found):
            raise ModelError(f"{self.name}: config.json has {key}={short(given)}, which should be token ids")
        return tuple(found)

    def must_be(self, key: str, value: Any, *known: Any) -> None:
        if value not in known:
            names = " or ".join(repr(v) for v in known if v is not None)
            raise ModelError(
                f"{self.name}: config.json has {key}={short(value)}, which is not supported; it must be {names}"
            )

    def part(self, key: str) -> Fields:
        """The object under `key`."""
        value = self.values.get(key)
        if not isinstance(value, Mapping):
            raise ModelError(f"{self.name}: config.json lacks {key!r}; give the whole config.json of the model")
        return Fields(value, self.name)

    def kinds(self, key: str, length: int) -> list[str] | None:
        """A word for each of `length` layers, None where there are none."""
        found = self.values.get(key)
        if found is None:
            return None
        if not isinstance(found, list) or len(found) != length:
            count = len(found) if isinstance(found, list) else repr(found)
            raise ModelError(f"{self.name}: config.json has {count} {key} for {length} layers")
        return [str(kind) for kind in found]
