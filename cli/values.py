"""Words of the command line as checked values: configurations, techniques, sizes.

Invariants
* What cannot work is a ConfigError that names the option as it was typed, before a model is loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from twinfer.cli.session import Session
    from twinfer.core.config import Choice, EngineConfig

_CONFIG_FLAGS = {"quantizer": "--quant", "op_time": "--op-time-model"}


def parse_technique(session: Session, kind: str, text: str) -> Choice | None:
    """The technique `text` of `kind`, checked now, before a model is loaded; None for `none` where one may be absent."""
    from twinfer.core.config import choice_of
    from twinfer.core.registry import OPTION_OF_KIND

    choice = choice_of(kind, text, OPTION_OF_KIND[kind])
    if choice is not None:
        session.registry.build(kind, choice)
    return choice


def make_config(fields: dict[str, Any]) -> EngineConfig:
    """An EngineConfig; the first mistake becomes a ConfigError that names the flag."""
    from pydantic import ValidationError

    from twinfer.core.config import EngineConfig
    from twinfer.core.errors import ConfigError
    from twinfer.core.mistakes import first_mistake

    try:
        return EngineConfig(**fields)
    except ValidationError as error:
        wrong = first_mistake(error)
        raise ConfigError(flag_of(wrong.field or "configuration"), wrong.value, wrong.problem, wrong.fix) from None


def flag_of(field_name: str) -> str:
    return _CONFIG_FLAGS.get(field_name, "--" + field_name.replace("_", "-"))


def parse_size(option: str, text: str) -> int:
    """Bytes of `4GiB`, `512 MB`, `1e9`."""
    from twinfer.core.errors import ConfigError

    units = {"": 1, "b": 1, "k": 2**10, "kb": 10**3, "kib": 2**10, "m": 2**20, "mb": 10**6, "mib": 2**20,
             "g": 2**30, "gb": 10**9, "gib": 2**30, "t": 2**40, "tb": 10**12, "tib": 2**40}  # fmt: skip
    number = text.strip().lower()
    unit = number.lstrip("0123456789.")
    if unit.startswith("e"):  # 1e9
        unit = ""
    try:
        value = float(number[: len(number) - len(unit)]) * units[unit.strip()]
    except (ValueError, KeyError):
        raise ConfigError(option, text, "not a size", "write a number with a unit, such as 512MiB or 4GiB") from None
    if not 1 <= value < 2**63:
        raise ConfigError(option, text, "out of range", "give from one byte to 8,388,607 TiB")
    return int(value)


__all__ = ["flag_of", "make_config", "parse_size", "parse_technique"]
