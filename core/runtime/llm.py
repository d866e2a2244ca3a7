"""The public face of the engine: prompts in, texts out.

    with LLM("smollm2-135m") as llm:
        for result in llm.generate(["Hello", "Good morning"], SamplingParams(max_tokens=16)):
            print(result.outputs[0].text)
        for delta in llm.stream("Once upon a time"):
            print(delta.text, end="")

Invariants
* Threads may call at the same time: they take turns, one step each, and their requests run together. `abort`
  waits for nobody. Nothing computes unless a call is waiting for outputs.
* Everything that can be known to be wrong with a request is said before anything runs, for all prompts of a call.
* `text`, `token_ids` and `logprobs` of an output describe the same tokens (`text.py` has the rule for stops).
* Joined deltas of a stream are the output that `generate` gives for the same request.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

from pydantic import ValidationError

from twinfer.core.config import EngineConfig
from twinfer.core.errors import ConfigError, RequestError
from twinfer.core.events import Abort, Submit
from twinfer.core.intake import more_room
from twinfer.core.mistakes import first_mistake
from twinfer.core.params import SamplingParams
from twinfer.core.registry import Registry
from twinfer.core.request import Request
from twinfer.core.runtime.loading import Engine, load_engine
from twinfer.core.runtime.outputs import Collector, CompletionOutput, RequestOutput, StreamDelta
from twinfer.core.runtime.pull_driver import PullDriver

__all__ = ["LLM", "CompletionOutput", "Prompt", "RequestOutput", "Stream", "StreamDelta", "engine_config"]

Prompt = str | Sequence[int]


class LLM:
    """A model that answers prompts.

    model: spec name with weights here, directory, GGUF file or hub id.  registry: plugins to choose from.
    options: fields of `EngineConfig` (`scheduler="continuous:chunk_size=64"`, `kv_cache="paged"`, `dtype`,
    `max_model_len`, `max_num_seqs`, `num_kv_blocks`, `seed`, ...).
    Raises ConfigError and ModelError.
    """

    def __init__(self, model: str, *, registry: Registry | None = None, **options: Any) -> None:
        self._attach(load_engine(engine_config(str(model), options), registry))

    @classmethod
    def of(cls, engine: Engine) -> LLM:
        """An LLM on an engine that was loaded elsewhere; closing the LLM closes the engine."""
        llm = cls.__new__(cls)
        llm._attach(engine)
        return llm

    def _attach(self, engine: Engine) -> None:
        self._engine = engine
        self._driver = PullDriver(engine.build_core(), engine.executor, engine.observers)
        self._live: dict[str, Collector] = {}
        self._number = 0
        self._lock = threading.RLock()
        self._closed = False

    @property
    def config(self) -> EngineConfig:
        """The configuration with every "auto" decided; the reasons are in `reasons`."""
        return self._engine.setup.config

    @property
    def reasons(self) -> Mapping[str, str]:
        return self._engine.setup.reasons

    @property
    def tokenizer(self) -> Any:
        return self._engine.tokenizer

    # --- asking ---------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int = 0,
    ) -> list[RequestOutput]:
        """Answers in the order of the prompts, which run together.

        prompts: a text, a list of token ids, or a list of either.  params: for all prompts, or one each.
        Raises RequestError naming the prompt that cannot be served; then nothing has run.
        """
        with self._lock:
            asked = self._requests(_as_list(prompts), params, priority)
            collectors = [self._start(request, prompt) for request, prompt in asked]
        try:
            for collector in collectors:
                self._finish(collector)
        except BaseException:
            self._give_up(collectors)
            raise
        return [self._take(c) for c in collectors]

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int = 0,
    ) -> list[RequestOutput]:
        """Answers to conversations, written as the model's chat template says.

        messages: one conversation (mappings with "role" and "content") or a list of them.
        Raises RequestError for a model without a template and for messages it refuses.
        """
        if not isinstance(messages, Sequence | None):
            raise RequestError(f"messages is a {type(messages).__name__}; give [{{'role': 'user', 'content': ...}}]")
        one = not messages or isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = [messages] if one else messages
        return self.generate([self._engine.tokenizer.encode_chat(c) for c in conversations], params, priority=priority)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, *, priority: int = 0) -> Stream:
        """Deltas of one prompt as they come. Closing the stream (or dropping it) aborts the request."""
        return self.deltas(self.submit(prompt, params, priority=priority))

    def submit(self, prompt: Prompt, params: SamplingParams | None = None, *, priority: int = 0) -> str:
        """Queue one prompt and return its id, for `result`, `deltas` and `abort`. It runs while others wait."""
        with self._lock:
            ((request, text),) = self._requests([prompt], params, priority)
            self._start(request, text)
        return request.id

    def result(self, request_id: str) -> RequestOutput:
        """Wait for a submitted request. Its id is then forgotten. RequestError for an unknown id."""
        collector = self._find(request_id)
        self._finish(collector)
        return self._take(collector)

    def deltas(self, request_id: str) -> Stream:
        """What a submitted request has said and will say. Its id is forgotten when the stream ends."""
        return Stream(self, self._find(request_id))

    def abort(self, request_id: str) -> None:
        """End a request, from any thread: it finishes with reason "abort". Unknown and finished ids are no error."""
        if not isinstance(request_id, str):
            raise RequestError(f"request id {request_id!r} is a {type(request_id).__name__}; use one from submit()")
        if not self._closed:
            self._driver.put(Abort(request_id))

    def step(self) -> bool:
        """Run until something is said; False when there is nothing to do. For loops that wait for many requests."""
        with self._lock:
            return self._poll(must_progress=False)

    # --- life -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Free the model and the KV cache; calling it twice is harmless."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._live.clear()
                self._engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- inside ---------------------------------------------------------------------------------

    def _requests(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None, priority: int
    ) -> list[tuple[Request, str | None]]:
        self._check_open()
        if type(priority) is not int:
            raise RequestError(f"priority={priority!r} is not a whole number; give an integer, smaller runs first")
        if not isinstance(params, SamplingParams | Sequence | None):
            raise RequestError(f"params is a {type(params).__name__}; give SamplingParams, or a list with one a prompt")
        if params is None or isinstance(params, SamplingParams):
            each = [params or SamplingParams()] * len(prompts)
        else:
            each = list(params)
            if len(each) != len(prompts):
                raise RequestError(f"{len(each)} SamplingParams for {len(prompts)} prompts; give one, or one a prompt")
        asked: list[tuple[Request, str | None]] = []
        for i, (prompt, sampling) in enumerate(zip(prompts, each, strict=True)):
            where = "the prompt" if len(prompts) == 1 else f"prompt {i}"
            if not isinstance(sampling, SamplingParams):
                raise RequestError(f"params of {where}: {sampling!r} is no SamplingParams")
            ids = self._ids(prompt, where)
            vocab = self._engine.setup.model.vocab_size
            for stop_id in sampling.stop_token_ids:
                if stop_id >= vocab:
                    raise RequestError(
                        f"params of {where}: stop_token_ids has {stop_id}; ids of this model are 0 to {vocab - 1}"
                    )
            request = Request(
                id=f"req-{self._number + len(asked)}", prompt=ids, params=sampling, priority=priority,
                arrival=self._driver.clock(), eos_token_ids=self._engine.eos_token_ids,
            )  # fmt: skip
            asked.append((request, prompt if isinstance(prompt, str) else None))
        self._number += len(asked)
        return asked

    def _ids(self, prompt: Prompt, where: str) -> tuple[int, ...]:
        if isinstance(prompt, str):
            if not _is_unicode(prompt):
                raise RequestError(f"{where} holds half of a surrogate pair, which is no character; remove it")
            ids = tuple(self._engine.tokenizer.encode(prompt))
        elif (
            isinstance(prompt, Sequence)
            and not isinstance(prompt, bytes | bytearray)
            and all(type(i) is int for i in prompt)
        ):
            ids = tuple(int(i) for i in prompt)
        else:
            raise RequestError(f"{where} is a {type(prompt).__name__}; give a text or a list of token ids")
        limits = self._engine.setup.limits
        vocab = self._engine.setup.model.vocab_size
        if not ids:
            raise RequestError(f"{where} is empty; give at least one token")
        if min(ids) < 0 or max(ids) >= vocab:
            wrong = min(ids) if min(ids) < 0 else max(ids)
            raise RequestError(f"{where} has the token id {wrong}; ids of this model are 0 to {vocab - 1}")
        if len(ids) >= limits.max_model_len:
            raise RequestError(
                f"{where} has {len(ids)} tokens, which leaves no room for an answer in max_model_len="
                f"{limits.max_model_len}; shorten it or {more_room(limits)}"
            )
        return ids

    def _start(self, request: Request, prompt: str | None) -> Collector:
        collector = Collector(self._engine.tokenizer, request, prompt)
        self._live[request.id] = collector
        self._driver.put(Submit(request))
        return collector

    def _finish(self, collector: Collector) -> None:
        """Run until the request has ended, perhaps by the steps of another thread."""
        while True:
            with self._lock:
                if collector.done:
                    return
                self._poll()

    def _poll(self, must_progress: bool = True) -> bool:
        self._check_open()
        outputs = self._driver.poll()
        if outputs is None:
            if must_progress:
                raise RuntimeError("the engine has nothing to do but a request is not finished (a bug; please report)")
            return False
        for output in outputs:
            collector = self._live.get(output.request_id)
            if collector is not None:
                collector.add(output)
        return True

    def _find(self, request_id: str) -> Collector:
        self._check_open()
        collector = self._live.get(request_id) if isinstance(request_id, str) else None
        if collector is None:
            raise RequestError(
                f"request {request_id!r} is not known (or its result was taken); use an id from submit()"
            )
        return collector

    def _take(self, collector: Collector) -> RequestOutput:
        del self._live[collector.request.id]
        return collector.output()

    def _give_up(self, collectors: Sequence[Collector]) -> None:
        """Nobody waits for these any more: end those that are not done."""
        for collector in collectors:
            self._live.pop(collector.request.id, None)
            if not collector.done:
                self.abort(collector.request.id)

    def _check_open(self) -> None:
        if self._closed:
            raise RequestError("this LLM is closed; make a new one")


class Stream(Iterator[StreamDelta]):
    """Iterator over the deltas of one request; also a context manager. `request_id` is the name for `LLM.abort`."""

    def __init__(self, llm: LLM, collector: Collector) -> None:
        self._llm, self._collector = llm, collector
        self._ended = False
        self.request_id = collector.request.id

    def __next__(self) -> StreamDelta:
        collector = self._collector
        while not self._ended:
            with self._llm._lock:
                if collector.deltas:
                    return collector.deltas.popleft()
                if collector.done:
                    self.close()
                    if collector.rejected:
                        raise RequestError(collector.rejected)
                    break
                try:
                    self._llm._poll()
                except BaseException:
                    self.close()
                    raise
        raise StopIteration

    def close(self) -> None:
        """Abort the request unless it has ended; calling it twice is harmless."""
        if not self._ended:
            self._ended = True
            self._llm._give_up([self._collector])

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_collector"):
            self.close()


def _is_unicode(text: str) -> bool:
    """False where a lone surrogate stands, which no encoding has and no tokenizer takes."""
    return not any("\ud800" <= c <= "\udfff" for c in text)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """One prompt or several: a text or a list of ids is one."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, bytes | bytearray) or not isinstance(prompts, Sequence):
        raise RequestError(
            f"prompts is a {type(prompts).__name__}; give a text, a list of token ids or a list of either"
        )
    if prompts and all(type(p) is int for p in prompts):
        return [prompts]  # type: ignore[list-item]
    return prompts  # type: ignore[return-value]


def engine_config(model: str, options: Mapping[str, Any]) -> EngineConfig:
    """An EngineConfig from keyword options; the first mistake is a one-line ConfigError."""
    try:
        return EngineConfig(model=model, **options)
    except ValidationError as error:
        wrong = first_mistake(error)
        known = ", ".join(f for f in EngineConfig.model_fields if f != "model")
        if wrong.kind == "extra_forbidden":
            raise ConfigError(wrong.where, wrong.value, "no such option", f"known options: {known}") from None
        raise ConfigError(wrong.where or "options", wrong.value, wrong.problem, wrong.fix) from None
