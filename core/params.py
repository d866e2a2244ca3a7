"""What a user may ask of one request: sampling, limits and stopping.

Invariants
* Every field is honoured by the engine or refused here; nothing is accepted and ignored.
* Randomness depends only on (`seed`, sample index, position), never on batch neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, SupportsFloat

from twinfer.core.errors import ConfigError

_BEAM_DEFAULTS = {"length_penalty": 1.0, "early_stopping": False}
_NO_BEAMS: Mapping[str, object] = {
    "n": 1, "temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0,
    "presence_penalty": 0.0, "frequency_penalty": 0.0, "stop": (),
}  # fmt: skip
_NUMBERS: Mapping[str, str] = {
    "temperature": "use 0 for greedy or a positive number", "top_p": "use a value in (0, 1]",
    "min_p": "use a value in [0, 1]", "repetition_penalty": "use a positive number, 1.0 for none",
    "presence_penalty": "use a value in [-2, 2]", "frequency_penalty": "use a value in [-2, 2]",
    "length_penalty": "use a number in [-10, 10]",
}  # fmt: skip
"""Fields of any number, and what they take."""

MAX_SAMPLES = 1024
"""Of one prompt: each is a sequence of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling and stopping options of one request.

    temperature: 0 is greedy (argmax); otherwise logits are divided by it.
    top_k: keep the k largest logits; 0 keeps all.  top_p: nucleus mass in (0, 1].
    min_p: drop tokens below `min_p * max probability`, in [0, 1].
    repetition_penalty: > 0, over prompt and output tokens (CTRL, arXiv:1909.05858).
    presence_penalty, frequency_penalty: in [-2, 2], over output tokens (OpenAI's definition).
    seed: None derives one from the engine's seed and the request's number.
    n: samples per prompt.  logprobs: number of top alternatives to return per token, None for none.
    stop: strings that end the text (not included in it).  stop_token_ids: ids that end it.
    max_tokens, min_tokens: bounds on output tokens.  ignore_eos: go on past end-of-sequence.
    beam_width: at least 2 searches with so many beams and answers with their hypotheses, best first.
    length_penalty: a hypothesis scores its log-probability / its tokens ** length_penalty, in [-10, 10].
    early_stopping: True, False or "never": when a beam search is over (`core/beam.py` has the definitions).
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    max_tokens: int = 128
    min_tokens: int = 0
    ignore_eos: bool = False
    beam_width: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    _greedy: bool = field(init=False, repr=False, compare=False, default=True)
    _num_samples: int = field(init=False, repr=False, compare=False, default=1)

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name, what in (("stop", "strings"), ("stop_token_ids", "token ids")):
            given = getattr(self, name)
            if not isinstance(given, Iterable) or isinstance(given, str | bytes | bytearray | Mapping):
                raise ConfigError(name, given, f"not a list of {what}", "give a list, or leave it out")
            object.__setattr__(self, name, tuple(given))
        for name, fix in _NUMBERS.items():
            value = getattr(self, name)
            if not is_finite(value):
                raise ConfigError(name, value, "not a finite number", fix)
        for name in ("top_k", "n", "max_tokens", "min_tokens", "beam_width"):
            _whole(name, getattr(self, name))
        for name in ("seed", "logprobs"):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name))
        _require("temperature", self.temperature, self.temperature >= 0, _NUMBERS["temperature"])
        _require("top_k", self.top_k, self.top_k >= 0, "use 0 to keep all tokens or a positive count")
        _require("top_p", self.top_p, 0 < self.top_p <= 1, _NUMBERS["top_p"])
        _require("min_p", self.min_p, 0 <= self.min_p <= 1, _NUMBERS["min_p"])
        _require(
            "repetition_penalty",
            self.repetition_penalty,
            self.repetition_penalty > 0,
            _NUMBERS["repetition_penalty"],
        )
        for name in ("presence_penalty", "frequency_penalty"):
            _require(name, getattr(self, name), -2 <= getattr(self, name) <= 2, _NUMBERS[name])
        _require("n", self.n, self.n >= 1, "ask for at least one sample")
        _require("n", self.n, self.n <= MAX_SAMPLES, f"ask for at most {MAX_SAMPLES} samples")
        _require("max_tokens", self.max_tokens, self.max_tokens >= 1, "ask for at least one token")
        _require(
            "min_tokens",
            self.min_tokens,
            0 <= self.min_tokens <= self.max_tokens,
            f"use a value from 0 to max_tokens ({self.max_tokens})",
        )
        if self.seed is not None:
            _require("seed", self.seed, 0 <= self.seed < 2**63, "use a value from 0 to 2**63 - 1")
        if self.logprobs is not None:
            _require("logprobs", self.logprobs, 0 <= self.logprobs <= 20, "use a value from 0 to 20, or None")
        if not isinstance(self.ignore_eos, bool):
            raise ConfigError("ignore_eos", self.ignore_eos, "not a truth value", "give True or False")
        for stop_id in self.stop_token_ids:
            _whole("stop_token_ids", stop_id)
            _require("stop_token_ids", stop_id, stop_id >= 0, "give ids of the model's vocabulary")
        stop: tuple[object, ...] = self.stop  # users pass anything
        if any(not isinstance(s, str) or not s for s in stop):
            raise ConfigError(
                "stop",
                self.stop,
                "contains something that is not a non-empty string",
                "give strings of at least one character",
            )
        if self.n > 1 and self.temperature == 0:
            raise ConfigError(
                "n", self.n, "greedy sampling gives n identical samples", "use n=1 or a temperature above 0"
            )
        object.__setattr__(self, "_greedy", self.temperature == 0)
        object.__setattr__(self, "_num_samples", max(self.n, self.beam_width))
        self._check_beams()

    def _check_beams(self) -> None:
        """Beam search maximises the log-probability of whole texts: what changes single draws has no place in it."""
        width = self.beam_width
        _require("beam_width", width, 1 <= width <= MAX_SAMPLES, f"use 1 for no beam search, or 2 to {MAX_SAMPLES}")
        _require("length_penalty", self.length_penalty, -10 <= self.length_penalty <= 10, _NUMBERS["length_penalty"])
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise ConfigError(
                "early_stopping", self.early_stopping, "no such rule", "give True, False or 'never' (the text)"
            )
        if width == 1:
            for name in ("length_penalty", "early_stopping"):
                if getattr(self, name) != _BEAM_DEFAULTS[name]:
                    raise ConfigError(name, getattr(self, name), "is of beam search alone", "set beam_width above 1")
            return
        for name, neutral in _NO_BEAMS.items():
            if getattr(self, name) != neutral:
                raise ConfigError(
                    name, getattr(self, name), f"beam search (beam_width={width}) does not go with it",
                    f"leave it at {neutral!r}, or set beam_width to 1",
                )  # fmt: skip

    @property
    def num_samples(self) -> int:
        """Answers to one prompt: `n`, or as many as beams."""
        return self._num_samples

    @property
    def greedy(self) -> bool:
        """True when the next token is the argmax of the (penalised) logits."""
        return self._greedy

    @classmethod
    def from_mapping(cls, given: Mapping[str, Any]) -> SamplingParams:
        """Build from user input; an unknown field is an error that lists the known ones."""
        known = [f.name for f in fields(cls) if f.init]
        for key in given:
            if key not in known:
                raise ConfigError(key, given[key], "no such sampling option", f"known options: {', '.join(known)}")
        return cls(**given)


def _require(name: str, value: object, ok: bool, fix: str) -> None:
    if not ok:
        raise ConfigError(name, value, "out of range", fix)


def is_finite(value: Any) -> bool:
    """Whether `value` is a number (numpy's are, True is none) that a float can hold."""
    if isinstance(value, bool) or not isinstance(value, SupportsFloat) or isinstance(value, str | bytes):
        return False
    try:
        return math.isfinite(value)
    except (OverflowError, TypeError, ValueError):
        return False


def _whole(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(name, value, "not a whole number", "give an integer")
