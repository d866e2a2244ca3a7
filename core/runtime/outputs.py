"""What a caller gets: outputs of a request, gathered from what the engine says about it.

Invariants
* Ids, log probabilities and text of a sample describe the same tokens at any moment.
* Joined deltas of a sample are its output; its last delta, and no other, has a `finish_reason`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from twinfer.core.errors import RequestError
from twinfer.core.events import Finished, Output, Rejected, TokenDelta
from twinfer.core.request import Request
from twinfer.core.runtime.stop_strings import text_stream
from twinfer.core.runtime.tokenizer import Tokenizer

LogProbs = Mapping[int, float]


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One sample.

    finish_reason: stop | length | abort | capacity | error.  stop_reason: the stop string or the id that ended
    it.  detail: what to change, for the last two reasons.  logprobs: one table a token, when they were asked for.
    num_cached_tokens, num_hit_tokens: found in the prefix cache at the latest and at the first admission.
    cumulative_logprob: of all tokens, for beam search (samples are then its hypotheses, best first).
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[LogProbs, ...] | None
    finish_reason: str
    stop_reason: str | int | None = None
    detail: str = ""
    num_cached_tokens: int = 0
    num_hit_tokens: int = 0
    num_preemptions: int = 0
    cumulative_logprob: float | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """All samples of one prompt. `prompt` is None when it was given as ids."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]


@dataclass(frozen=True, slots=True)
class StreamDelta:
    """News of one sample: ids that came, text that has become certain (it may lag behind the ids).

    `finish_reason` is None until the last delta of the sample.
    """

    request_id: str
    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[LogProbs, ...]
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class _Sample:
    """One sample while it grows."""

    def __init__(self, tokenizer: Tokenizer, request: Request) -> None:
        self.stream = text_stream(tokenizer, request)
        self.tokens: list[int] = []
        self.logprobs: list[LogProbs] = []
        self.finished: Finished | None = None

    @property
    def stop_reason(self) -> str | int | None:
        if self.finished is None or self.finished.reason != "stop":
            return None
        return self.stream.stopped if self.stream.stopped is not None else self.tokens[-1]


class Collector:
    """Outputs of one request, as they come."""

    def __init__(self, tokenizer: Tokenizer, request: Request, prompt: str | None) -> None:
        self.request = request
        self.prompt = prompt
        self.samples = [_Sample(tokenizer, request) for _ in range(request.params.num_samples)]
        self.deltas: deque[StreamDelta] = deque()
        self.rejected = ""

    @property
    def done(self) -> bool:
        return bool(self.rejected) or all(s.finished is not None for s in self.samples)

    def add(self, output: Output) -> None:
        if isinstance(output, Rejected):
            self.rejected = output.why
            return
        sample = self.samples[output.index]
        if isinstance(output, TokenDelta):
            sample.tokens += output.tokens
            sample.logprobs += output.logprobs
            sample.stream.push(output.tokens)
            self._tell(output.index, sample.stream.delta(), output.tokens, output.logprobs)
        else:
            sample.finished = output
            self._tell(output.index, sample.stream.finish(), (), ())

    def _tell(self, index: int, text: str, tokens: tuple[int, ...], logprobs: tuple[LogProbs, ...]) -> None:
        sample = self.samples[index]
        reason = sample.finished.reason if sample.finished is not None else None
        if reason is not None and self.deltas and self.deltas[-1].index == index:  # not handed out yet: join the two
            last = self.deltas.pop()
            text, tokens, logprobs = last.text + text, last.token_ids, last.logprobs
        self.deltas.append(StreamDelta(self.request.id, index, text, tokens, logprobs, reason, sample.stop_reason))

    def output(self) -> RequestOutput:
        """The whole answer; RequestError if the engine refused it."""
        if self.rejected:
            raise RequestError(self.rejected)
        asked = self.request.params.logprobs is not None
        outputs = []
        for index, sample in enumerate(self.samples):
            end = sample.finished
            assert end is not None
            outputs.append(
                CompletionOutput(
                    index=index,
                    text=sample.stream.text,
                    token_ids=tuple(sample.tokens),
                    logprobs=tuple(sample.logprobs) if asked else None,
                    finish_reason=end.reason,
                    stop_reason=sample.stop_reason,
                    detail=end.detail if end.reason in ("capacity", "error") else "",
                    num_cached_tokens=end.num_cached_tokens,
                    num_hit_tokens=end.num_hit_tokens,
                    num_preemptions=end.num_preemptions,
                    cumulative_logprob=end.cumulative_logprob,
                )
            )
        return RequestOutput(self.request.id, self.prompt, tuple(self.request.prompt), tuple(outputs))
