"""What is asked of an engine: how many requests, when they arrive, how long they are.

Engine and simulator call `generate` with the same `Workload` and get equal requests, so a real run and
its prediction answer the same questions.

Invariants
* Equal workload, vocabulary, context length and encoder give equal requests in equal order.
* Requests are sorted by arrival, the first arrives at 0; ids are `r0, r1, ...` in that order.
* Synthetic prompts share no block with each other but the `shared_prefix` that was asked for.
* Where requests come from is a plugin (kind `workload`, `workload_source.py`); this module describes, checks and asks it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError, field_serializer, field_validator, model_validator

from twinfer.core.config import Choice
from twinfer.core.errors import ConfigError, figure
from twinfer.core.images import check_images, with_images
from twinfer.core.mistakes import first_mistake
from twinfer.core.params import MAX_SAMPLES, SamplingParams
from twinfer.core.request import Request
from twinfer.core.session import Follows
from twinfer.core.vision import VisionSpec
from twinfer.core.workload_source import Draft, Encode, Setting, source_of

if TYPE_CHECKING:
    from twinfer.core.registry import Registry

DEFAULT_NUM_REQUESTS = 100
MAX_REQUESTS, MAX_TOKENS = 10**7, 2**24
"""Largest workload and length of a request: beyond any use, and still no wait without end."""
MAX_SPAN = 1e9
"""Seconds that requests come for at most: 31 years. Much later a step of a millisecond is no time any more."""


class Workload(BaseModel):
    """A traffic description.

    num_requests: None takes every row of a trace or every prompt, and 100 for synthetic requests.
    rate: mean arrivals per s (Poisson); inf sends everything at 0; None keeps a trace's own times
        and is inf elsewhere.
    burstiness: shape of the gamma distribution that gaps between arrivals have: 1 is a Poisson process, less comes in
        bursts, more is more even.  ramp_to: the rate goes in a straight line from `rate` to this one.
    rate_scale: arrivals come so many times as fast, whatever gave them: a trace at 4 times its rate.
    concurrency: so many clients, each sending its next request when its last has ended (closed loop), instead of `rate`.
    input_len, output_len: mean tokens of a synthetic prompt and of its answer; for prompts from a file
        `output_len` is the answer's length, unless the file gives one.
    lengths, spread: `fixed`; `uniform` on mean * [1 - spread, 1 + spread]; `lognormal` with the same
        mean and `spread` as the standard deviation of the logarithm.
    shared_prefix: first tokens that are the same in all prompts of one of `num_prefixes` groups.
    trace: path of a trace or prompts file.  prompts: texts.  prompt_tokens: prompts already encoded.
    too_long: `keep` hands prompts over that the engine must reject; `filter` leaves out requests whose
        prompt and answer exceed the context.
    trace_start, trace_end: only the part of a trace between these seconds (from its first row; the end is left out).
    repeat: what to do when more requests are asked for than a trace has: `none` is an error; `loop` begins again at its
        first row, with new prompts; `sample` draws rows at random and takes their lengths, for arrivals by `rate`.
    input_scale, output_scale: factors on the lengths of a trace.
    turns: turns of each session: a later turn's prompt is all that was said before and a new part, due `think_time` s
        (mean of an exponential distribution) after the answer before it. None: 1, and all turns of recorded sessions.
    source: workload plugin; None finds it from the other fields.
    beam_width: beams of a search, which needs temperature 0; 1 is none.
    ignore_eos: answers run to their full length whatever the model says.
    images_per_request: images of a request; `image_counts`: `fixed`, or `poisson` around that mean.
    image_size: pixels of each, `1024` or `1024x768`; None for what the model takes.  image_tokens: tokens of each in the
        prompt, instead of a size.  image_compression: images take that many times fewer tokens than the model's own.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    num_requests: int | None = None
    rate: float | None = None
    burstiness: float = 1.0
    ramp_to: float | None = None
    rate_scale: float = 1.0
    concurrency: int | None = None
    input_len: int = 512
    output_len: int = 128
    lengths: Literal["fixed", "uniform", "lognormal"] = "fixed"
    spread: float = 0.0
    shared_prefix: int = 0
    num_prefixes: int = 1
    trace: str | None = None
    prompts: tuple[str, ...] = ()
    prompt_tokens: tuple[tuple[int, ...], ...] = ()
    trace_start: float = 0.0
    trace_end: float | None = None
    repeat: Literal["none", "loop", "sample"] = "none"
    input_scale: float = 1.0
    output_scale: float = 1.0
    turns: int | None = None
    think_time: float = 0.0
    too_long: Literal["keep", "filter"] = "keep"
    source: Choice | None = None
    temperature: float = 0.0
    beam_width: int = 1
    ignore_eos: bool = True
    images_per_request: float = 0.0
    image_counts: Literal["fixed", "poisson"] = "fixed"
    image_size: str | None = None
    image_tokens: int | None = None
    image_compression: float = 1.0
    seed: int = 0

    @field_validator("trace", mode="before")
    @classmethod
    def _path_to_text(cls, value: Any) -> Any:
        return value if value is None or isinstance(value, str) else str(value)

    @field_serializer("rate")
    def _rate_to_json(self, rate: float | None) -> float | str | None:
        return "inf" if rate == math.inf else rate  # JSON has no infinity

    @model_validator(mode="after")
    def _check(self) -> Workload:
        for field, option in (("input_len", "--input-len"), ("output_len", "--output-len"),
                              ("num_prefixes", "--num-prefixes")):  # fmt: skip
            _within(option, getattr(self, field), MAX_TOKENS)
        if self.num_requests is not None:
            _within("--requests", self.num_requests, MAX_REQUESTS)
        if self.rate is not None:
            ok = 1e-9 <= self.rate <= 1e9 or self.rate == math.inf  # beyond, a float cannot tell times apart
            _require("--rate", self.rate, ok, "give requests per second from 1e-9 to 1e9, or inf for all at once")
            _require("--rate", self.rate, self.ramp_to is None or self.rate != math.inf, "give a number to ramp from")
        elif self.ramp_to is not None:
            raise ConfigError("--ramp-to", self.ramp_to, "no rate to start from was given", "give --rate too")
        if self.ramp_to is not None:
            _require(
                "--ramp-to", self.ramp_to, 1e-9 <= self.ramp_to <= 1e9, "give requests per second from 1e-9 to 1e9"
            )
        _require("--burstiness", self.burstiness, 0.01 <= self.burstiness <= 1e6, "use a value from 0.01 to 1e6")
        if self.burstiness != 1 and (self.rate is None or self.rate == math.inf):
            raise ConfigError("--burstiness", self.burstiness, "without a rate there are no gaps", "give --rate too")
        _require("--rate-scale", self.rate_scale, 1e-6 <= self.rate_scale <= 1e6, "use a value from 1e-6 to 1e6")
        if self.rate_scale != 1 and (self.concurrency is not None or self.rate == math.inf):
            raise ConfigError(
                "--rate-scale", self.rate_scale, "nothing has a time that could be scaled", "give --rate, or a trace with times"
            )  # fmt: skip
        if self.concurrency is not None:
            _within("--concurrency", self.concurrency, MAX_REQUESTS)
            if self.rate is not None and self.rate != math.inf:
                raise ConfigError(
                    "--concurrency", self.concurrency, f"--rate {self.rate:g} says when to send, too", "give one of them"
                )  # fmt: skip
        top = 1.0 if self.lengths == "uniform" else 3.0
        _require("--spread", self.spread, 0 <= self.spread <= top, f"use a value from 0 to {figure(top)}")
        if self.spread and self.lengths == "fixed":
            raise ConfigError(
                "--spread", self.spread, "fixed lengths have no spread", "choose --lengths uniform or lognormal"
            )
        ok = 0 <= self.temperature < math.inf
        _require("--temperature", self.temperature, ok, "use 0 for greedy or a positive number")
        ok = 1 <= self.beam_width <= MAX_SAMPLES
        _require("--beam-width", self.beam_width, ok, f"use 1 for no beam search, or 2 to {MAX_SAMPLES}")
        if self.beam_width > 1 and self.temperature:
            raise ConfigError("--beam-width", self.beam_width, "a beam search draws nothing", "leave --temperature out")
        ok = 0 <= self.shared_prefix < self.input_len
        _require("--shared-prefix", self.shared_prefix, ok, f"use 0 to input-len - 1 ({self.input_len - 1})")
        _require("--seed", self.seed, self.seed >= 0, "use 0 or a positive whole number")
        if self.trace == "":
            raise ConfigError("--trace", "", "no file is named", "give the path of a trace file")
        self._check_trace()
        if self.turns is not None:
            _within("--turns", self.turns, 10_000)
            _require("--turns", self.turns, self.beam_width == 1 or self.turns == 1, "leave --beam-width out")
        _require("--think-time", self.think_time, 0 <= self.think_time <= 1e9, "give seconds from 0 to 1e9")
        single = self.turns is None and self.trace is None and self.source is None  # others know turns of their own
        if self.think_time and (self.turns == 1 or single):
            raise ConfigError("--think-time", self.think_time, "no turn follows the first", "give --turns 2 or more")
        if self.trace and (self.prompts or self.prompt_tokens):
            raise ConfigError("--trace", self.trace, "prompts are given too", "give a trace or prompts, not both")
        check_images(self)
        return self

    def _check_trace(self) -> None:
        """The options that only a trace has."""
        _require("--trace-start", self.trace_start, 0 <= self.trace_start < math.inf, "give seconds from 0")
        end = self.trace_end
        if end is not None:
            _require(
                "--trace-end", end, self.trace_start < end < math.inf, f"give more than {figure(self.trace_start)} s"
            )
        for option, factor in (("--input-scale", self.input_scale), ("--output-scale", self.output_scale)):
            _require(option, factor, 1e-4 <= factor <= 1e4, "use a value from 1e-4 to 1e4")
        if self.trace is None:
            for field in ("trace_start", "trace_end", "repeat", "input_scale", "output_scale"):
                if getattr(self, field) != type(self).model_fields[field].default:
                    option = "--" + field.replace("_", "-")
                    raise ConfigError(option, getattr(self, field), "there is no trace", "give --trace FILE too")
        if self.repeat != "none" and self.num_requests is None:
            raise ConfigError("--repeat", self.repeat, "it is not said how often", "give --requests")
        if self.repeat == "sample" and self.rate is None and self.concurrency is None:
            raise ConfigError(
                "--repeat", "sample", "rows drawn at random have no order in time", "give --rate or --concurrency"
            )

    def plain(self) -> dict[str, Any]:
        """JSON-ready fields that differ from the defaults; `Workload(**plain)` gives the workload back."""
        return self.model_dump(mode="json", exclude_defaults=True)


def make_workload(**given: Any) -> Workload:
    """A workload from user input; the first mistake is a one-line ConfigError."""
    try:
        return Workload(**given)
    except ValidationError as error:
        wrong = first_mistake(error)
        field = wrong.field or "workload"
        if wrong.kind == "extra_forbidden":
            known = ", ".join(Workload.model_fields)
            raise ConfigError(field, wrong.value, "no such workload option", f"known options: {known}") from None
        option = {"num_requests": "--requests"}.get(field, "--" + field.replace("_", "-"))
        raise ConfigError(option, wrong.value, wrong.problem, wrong.fix) from None


def _within(option: str, value: int, most: int) -> None:
    _require(option, value, value >= 1, "give at least 1")
    _require(option, value, value <= most, f"give at most {figure(most)}")


def _require(option: str, value: object, ok: bool, fix: str) -> None:
    if not ok:
        raise ConfigError(option, value, "out of range", fix)


def generate(
    workload: Workload,
    vocab_size: int,
    max_model_len: int,
    *,
    encode: Encode | None = None,
    eos_token_ids: tuple[int, ...] = (),
    registry: Registry | None = None,
    vision: VisionSpec | None = None,
) -> list[Request]:
    """The requests of `workload`, sorted by arrival.

    Without `encode`, texts stand for one token per four bytes (a usual ratio for English), so that a
    prediction needs no tokenizer; the engine passes its own encoder.
    vision: what encodes the images that requests have; None where they cannot have any.
    Raises ConfigError when a file is missing, malformed or holds nothing to ask.
    """
    from twinfer.core.trace_rows import chances_of, drafts_of, sessions_of  # kept apart: one concept a file

    source = source_of(workload, registry)
    setting = Setting(
        vocab_size=vocab_size, max_model_len=max_model_len, encode=encode, eos_token_ids=eos_token_ids
    )  # fmt: skip
    drafts = drafts_of(source, workload, setting)
    if workload.images_per_request:
        drafts = with_images(drafts, workload, vision, source, setting)
    sessions = sessions_of(drafts)
    timed = sum(d[0].arrival is not None for d in sessions)
    if workload.rate is None and 0 < timed < len(sessions):
        raise ConfigError(
            "--trace", workload.trace, f"{timed} of {len(sessions)} requests have an arrival time",
            "give one to each or to none, or give --rate",
        )  # fmt: skip
    if workload.too_long == "filter":
        sessions = [s for s in sessions if sum(len(d.prompt) + d.output_len for d in s) <= max_model_len]
        if not sessions:
            raise ConfigError(
                "--too-long", "filter", f"no request fits into a context of {max_model_len} tokens",
                "raise --max-model-len or shorten the requests",
            )  # fmt: skip
    if workload.rate is not None or any(s[0].arrival is None for s in sessions):
        times: Sequence[float] = [0.0] * len(sessions)
        if workload.rate is not None and workload.rate != math.inf:
            times = source.arrivals(workload, len(sessions))
    else:
        origin = min(s[0].arrival for s in sessions if s[0].arrival is not None)
        times = [s[0].arrival - origin for s in sessions if s[0].arrival is not None]
    if workload.rate_scale != 1:
        if not any(times):
            raise ConfigError(
                "--rate-scale", workload.rate_scale, "all requests arrive at once", "give --rate, or a trace with times"
            )
        times = [t / workload.rate_scale for t in times]
    if max(times, default=0.0) > MAX_SPAN:
        problem = f"the last request comes {max(times):g} s after the first"
        if workload.rate is not None:
            raise ConfigError("--rate", workload.rate, problem, "let more come in a second, or fewer requests in all")
        raise ConfigError(
            "--trace", workload.trace, problem, f"give times in seconds, at most {figure(MAX_SPAN)} apart"
        )
    order = sorted(range(len(sessions)), key=lambda i: times[i])  # stable: ties keep the file's order
    requests: list[Request] = []
    sampling: dict[
        tuple[int, float | None], SamplingParams
    ] = {}  # many requests are alike, and checking one takes long
    thinking = chances_of(source, "thinking", workload) if workload.think_time else None
    for i in order:
        history = 0
        for turn, draft in enumerate(sessions[i]):
            think_s = draft.think_s
            if think_s is None and turn and thinking is not None:
                think_s = -workload.think_time * math.log1p(-next(thinking))
            follows = Follows(requests[-1].id, think_s or 0.0, history) if turn else None
            params = sampling.get((draft.output_len, draft.temperature))
            if params is None:
                params = sampling[draft.output_len, draft.temperature] = _params(workload, draft)
            requests.append(
                Request(
                    id=f"r{len(requests)}",
                    prompt=draft.prompt,
                    params=params,
                    arrival=times[i],
                    eos_token_ids=eos_token_ids,
                    follows=follows,
                    images=draft.images,
                )
            )
            history += len(draft.prompt) + draft.output_len
    return requests


def _params(workload: Workload, draft: Draft) -> SamplingParams:
    temperature = workload.temperature if draft.temperature is None else draft.temperature
    return SamplingParams(
        max_tokens=draft.output_len, temperature=temperature, ignore_eos=workload.ignore_eos,
        beam_width=workload.beam_width,
    )  # fmt: skip


__all__ = ["DEFAULT_NUM_REQUESTS", "MAX_REQUESTS", "MAX_SPAN", "MAX_TOKENS", "Workload", "generate", "make_workload"]
