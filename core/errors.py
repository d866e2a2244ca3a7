"""Typed errors: each names the option, the value it was given and what would work.

Invariants
* Everything a user can cause is a `TwinferError`; the CLI prints its one line and exits with 2, or 3 where it answers
  the question with no (`DoesNotFit`).
* `ProtocolError` is for drivers that break the event contract of `Core`, never for user input.
"""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

_SHOWN = 120
"""Characters of a value that a message repeats."""


class TwinferError(Exception):
    """Base of every error a user can cause; `str(error)` is one line that says what to change."""


class ConfigError(TwinferError):
    """An option has a value that cannot work.

    `option` is the name as the user typed it (`--rate`, `max_num_seqs`), `value` what was given (None: nothing),
    `fix` what would work. They are its `args`: who makes an error of another from its kind and its args (simpy does, and
    pickle) makes the same one.
    """

    def __init__(self, option: str, value: object, problem: str, fix: str) -> None:
        self.option, self.value, self.problem, self.fix = option, value, problem, fix
        super().__init__(option, value, problem, fix)

    def __str__(self) -> str:
        given = "" if self.value is None else f"={short(self.value)}"
        return f"{self.option}{given}: {self.problem}; {self.fix}"


class DoesNotFit(ConfigError):
    """All options are well formed, but the memory of the device is too small for them."""


def short(value: object) -> str:
    """`value` as a message repeats it."""
    if type(value) is float:
        text = _plain(f"{value:g}" if float(f"{value:g}") == value else repr(value).removesuffix(".0"))
    else:
        try:
            text = repr(str(value) if isinstance(value, PurePath) else value)
        except Exception:  # of others' objects, or a whole number of thousands of digits
            text = f"<{type(value).__name__}>"
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 4]}...{text[-1]}"


def rounded(value: float) -> str:
    """A quantity with three digits, from a thousand on to the next whole number: 0.0123, 999, 1,000, 12,345."""
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:,.0f}"


def figure(value: float) -> str:
    """A bound as people write it: 0, 0.01, 4096, 10,000,000, 1e9."""
    if float(f"{value:.3g}") == value and not abs(value) < 1e9:
        return _plain(f"{value:.3g}")
    if value != int(value):
        return _plain(f"{value:.12g}")
    return f"{int(value):,}" if abs(value) >= 10_000 else str(int(value))


def _plain(text: str) -> str:
    """`1e9` for `1e+09`."""
    mantissa, e, exponent = text.partition("e")
    return f"{mantissa}e{int(exponent)}" if e else text


class PluginError(TwinferError):
    """A plugin is unknown, broken, clashes with another or does not keep its contract."""


class ModelError(TwinferError):
    """A model cannot be found, read or does not match its own description."""


class RequestError(TwinferError):
    """A request cannot be served as asked (empty prompt, longer than the context, ...)."""


class EngineError(TwinferError):
    """A running engine broke: a rank died, or its memory ran out.

    `record` is what was done until then (an incomplete `RunRecord`), None where nothing had run.
    """

    record: Any = None


class ProtocolError(RuntimeError):
    """A driver handed `Core` an event that cannot follow the ones before it."""
