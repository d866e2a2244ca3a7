"""Stop strings, beside whatever executor computes the tokens.

Core stops at ids by itself; strings need a tokenizer, which Core does not have. This executor wraps another one,
follows the text of the sequences that have stop strings, and cuts their results as `text.py` says.

Invariants
* Results without stop strings pass through untouched.
* A cut result ends with the token that completed the stop string; `RowResult.stopped` names the string.
"""

from __future__ import annotations

from dataclasses import replace

from twinfer.core.executor import Executor
from twinfer.core.plan import RowResult, StepPlan, StepResult
from twinfer.core.request import Request
from twinfer.core.runtime.text import TextStream
from twinfer.core.runtime.tokenizer import Tokenizer


def text_stream(tokenizer: Tokenizer, request: Request) -> TextStream:
    """The text of one sample of `request`, as executor and caller both see it."""
    params = request.params
    ids = params.stop_token_ids + (() if params.ignore_eos else request.eos_token_ids)
    return TextStream(tokenizer, params.stop, params.min_tokens, frozenset(ids))


class StoppingExecutor:
    """See `twinfer.core.executor.Executor`."""

    def __init__(self, inner: Executor, tokenizer: Tokenizer) -> None:
        self.inner = inner
        self._tokenizer = tokenizer
        self._streams: dict[str, TextStream] = {}

    def admit(self, request: Request, seqs: tuple[tuple[str, int], ...]) -> None:
        self.inner.admit(request, seqs)
        if request.params.stop:
            for seq, _ in seqs:
                self._streams[seq] = text_stream(self._tokenizer, request)

    def execute(self, plan: StepPlan) -> StepResult:
        for seq in plan.forget:
            self._streams.pop(seq, None)
        result = self.inner.execute(plan)
        if not self._streams:
            return result
        rows = [
            self._cut(stream, answer) if (stream := self._streams.get(row.seq)) is not None else answer
            for row, answer in zip(plan.rows, result.rows, strict=True)
        ]
        return replace(result, rows=tuple(rows))

    def close(self) -> None:
        self._streams.clear()
        self.inner.close()

    def _cut(self, stream: TextStream, answer: RowResult) -> RowResult:
        if answer.failure is not None or not answer.tokens:
            return answer
        kept, stopped = stream.push(answer.tokens)
        if stopped is None:
            return answer
        return replace(answer, tokens=kept, logprobs=answer.logprobs[: len(kept)], stopped=stopped, drafts=())
