"""Perplexity of a text under a model as the engine runs it: packed rows over paged KV, whatever the techniques.

Protocol (one for all numbers of this project): the text is tokenized once and cut into chunks of `chunk` tokens that
do not overlap; every token but the first of each chunk is scored given the tokens before it in its chunk. A
tokenizer that adds BOS has it at the head of every chunk, as the token that is not scored.

Invariants
* A step feeds pieces of one or several chunks, no more tokens than their logits may take (`LOGIT_BYTES`).
* Losses are summed in float64. A run that is stopped answers for the chunks that were finished, and says so.
* Perplexities compare only between models of one tokenizer, on one text, with one chunk length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from twinfer.core.config import Choice, EngineConfig
from twinfer.core.errors import ConfigError, RequestError
from twinfer.core.plan import Grant, Need, Row, RowResult, StepPlan
from twinfer.core.registry import Registry
from twinfer.core.request import Request
from twinfer.core.runtime.executor import TorchExecutor
from twinfer.core.runtime.loading import Engine, load_engine, torch_executor
from twinfer.core.runtime.sampler import SampleEntry
from twinfer.core.runtime.tokenizer import Tokenizer

OnProgress = Callable[[int, int, dict[str, object]], None]
ShouldStop = Callable[[], bool]

CHUNK = 512
BLOCK_SIZE = 16
LOGIT_BYTES = 192 * 2**20  # of one step; a copy or two of them is held for a moment
MAX_STEP_TOKENS = 2048
SLICE = 64  # rows of logits normalised at a time


@dataclass(frozen=True, slots=True)
class Perplexity:
    """What was measured.

    losses: (sum of -ln p, scored tokens) of each chunk, in the order of the text.  complete: False when the run was
    stopped before the end of the text.  reasons: what was decided for the engine, as in a run's record.
    """

    losses: tuple[tuple[float, int], ...]
    chunk: int
    complete: bool = True
    reasons: Mapping[str, str] = field(default_factory=dict, compare=False)

    @property
    def num_tokens(self) -> int:
        """Tokens scored."""
        return sum(count for _, count in self.losses)

    @property
    def nats_per_token(self) -> float:
        """Mean of -ln p(token | tokens before it in the chunk)."""
        return math.fsum(loss for loss, _ in self.losses) / self.num_tokens

    @property
    def perplexity(self) -> float:
        return math.exp(self.nats_per_token)

    @property
    def standard_error(self) -> float | None:
        """Of `nats_per_token`, from the spread between chunks (tokens of one chunk depend on each other)."""
        return _standard_error([(loss, count, self.nats_per_token) for loss, count in self.losses])

    def excess(self, base: Perplexity) -> tuple[float, float | None]:
        """(nats per token above `base`, its standard error) on the same chunks: far sharper than the two errors."""
        if [c for _, c in self.losses] != [c for _, c in base.losses]:
            raise ConfigError("text", self.num_tokens, "the two did not score the same chunks", "give the same text")
        more = self.nats_per_token - base.nats_per_token
        pairs = zip(self.losses, base.losses, strict=True)
        return more, _standard_error([(ours - theirs, count, more) for (ours, count), (theirs, _) in pairs])


def _standard_error(chunks: Sequence[tuple[float, int, float]]) -> float | None:
    """Of a ratio of sums over clusters: (sum, count, mean of all) of each; None for a single one."""
    n, total = len(chunks), sum(count for _, count, _ in chunks)
    if n < 2:
        return None
    spread = math.fsum((loss - mean * count) ** 2 for loss, count, mean in chunks)
    return math.sqrt(n / (n - 1) * spread) / total


def perplexity(
    config: EngineConfig,
    text: str,
    chunk: int = CHUNK,
    max_tokens: int | None = None,
    registry: Registry | None = None,
    on_progress: OnProgress | None = None,
    should_stop: ShouldStop | None = None,
) -> Perplexity:
    """Load `config` and score `text` (at most its first `max_tokens` tokens).

    on_progress(chunks done, chunks, {"nats_per_token": so far}), while the model is loaded (0, 0, {"phase": "load",
    "doing": words}).  Raises ConfigError and ModelError as
    `load_engine` does, RequestError for a text without two tokens or a run stopped before the first chunk was done.
    """
    try:
        engine = load_engine(
            scoring_config(config, chunk), registry,
            on_phase=lambda phase: None if on_progress is None else on_progress(0, 0, {"phase": "load", "doing": phase}),
        )  # fmt: skip
    except ConfigError as error:
        if error.option != "--max-model-len":
            raise
        raise ConfigError("--chunk", chunk, error.problem, error.fix) from None
    try:
        chunks = cut(engine.tokenizer, text, chunk, max_tokens)
        return score(engine, chunks, chunk, on_progress, should_stop)
    finally:
        engine.close()


def scoring_config(config: EngineConfig, chunk: int = CHUNK) -> EngineConfig:
    """`config` with paged KV for the chunks of one step and nothing else."""
    if chunk < 2:
        raise ConfigError("--chunk", chunk, "a chunk scores all its tokens but the first", "give at least 2")
    if config.tp > 1:
        raise ConfigError("--tp", config.tp, "perplexity is measured on one rank", "leave it out")
    rows = max(1, MAX_STEP_TOKENS // chunk)
    return config.model_copy(
        update={
            "kv_cache": Choice(name="paged", options={"block_size": BLOCK_SIZE, "free_windows": False}),
            "max_model_len": chunk,
            "max_num_seqs": rows,
            "num_kv_blocks": rows * _blocks(chunk),
            "kv_memory_bytes": None,
        }
    )


def cut(tokenizer: Tokenizer, text: str, chunk: int = CHUNK, max_tokens: int | None = None) -> list[list[int]]:
    """`text` as chunks of at least two token ids; RequestError when there is none."""
    ids = tokenizer.encode(text, add_special_tokens=False)[:max_tokens]
    with_bos, plain = tokenizer.encode("a"), tokenizer.encode("a", add_special_tokens=False)
    at = next((i for i in range(len(with_bos)) if with_bos[i : i + len(plain)] == plain), 0)
    bos = with_bos[:at]
    step = chunk - len(bos)
    chunks = [[*bos, *ids[i : i + step]] for i in range(0, len(ids), max(1, step))] if step > 0 else []
    chunks = [ids for ids in chunks if len(ids) > max(1, len(bos))]
    if not chunks:
        raise RequestError(f"--text: {len(ids)} tokens in chunks of {chunk} leave nothing to score; give a longer text")
    return chunks


def score(
    engine: Engine,
    chunks: Sequence[Sequence[int]],
    chunk: int = CHUNK,
    on_progress: OnProgress | None = None,
    should_stop: ShouldStop | None = None,
) -> Perplexity:
    """Score `chunks` (at most `chunk` ids each) on an engine set up with `scoring_config`."""
    budget = max(1, min(MAX_STEP_TOKENS, LOGIT_BYTES // (4 * engine.spec.vocab_size)))
    scorer = _Scorer(chunks, engine.spec.vocab_size)
    executor = torch_executor(engine.setup, engine.registry, engine.model, scorer)
    together = max(1, min(budget // chunk, engine.setup.limits.num_blocks // _blocks(chunk)))
    complete = True
    try:
        for done, plan in enumerate(plans(executor, chunks, together, budget, Need.ALL), 1):
            if should_stop is not None and should_stop():
                complete = False
                break
            for row, result in zip(plan.rows, executor.execute(plan).rows, strict=True):
                if result.failure is not None:
                    raise RequestError(f"chunk {row.seq} cannot be scored: {result.failure}")
            if on_progress is not None:
                sums = scorer.finished()
                so_far = {"nats_per_token": _mean(sums)} if sums else {}
                on_progress(len(sums), len(chunks), {**so_far, "steps": done})
    finally:
        executor.close()
    losses = scorer.finished()
    if not losses:
        raise RequestError("stopped before the first chunk was done; there is no result")
    return Perplexity(tuple(losses), chunk, complete, engine.setup.reasons)


def _mean(sums: Sequence[tuple[float, int]]) -> float:
    return math.fsum(loss for loss, _ in sums) / sum(count for _, count in sums)


def _blocks(chunk: int) -> int:
    return -(-chunk // BLOCK_SIZE)


def plans(
    executor: TorchExecutor, chunks: Sequence[Sequence[int]], together: int, budget: int, need: Need
) -> Iterator[StepPlan]:
    """Steps that feed `together` chunks side by side, in pieces of `budget` tokens in all, each row with `need`."""
    step = 0
    forget: tuple[str, ...] = ()
    for first in range(0, len(chunks), together):
        group = range(first, min(first + together, len(chunks)))
        grants = []
        for place, number in enumerate(group):
            seq = str(number)
            executor.admit(Request(id=seq, prompt=chunks[number]), ((seq, 0),))
            size = _blocks(max(len(c) for c in chunks))
            grants.append(Grant(seq, 0, tuple(range(place * size, (place + 1) * size))))
        piece = max(1, budget // len(group))
        for start in range(0, max(len(chunks[number]) for number in group), piece):
            rows = tuple(
                Row(str(number), start, chunks[number][start : start + piece], 0, need, 0)
                for number in group
                if start < len(chunks[number])
            )
            yield StepPlan(step, rows, tuple(grants), forget=forget)
            step, grants, forget = step + 1, [], ()
        forget = tuple(str(number) for number in group)


class _Scorer:
    """Stands where the sampler does: instead of a token, the loss of the tokens that are already known."""

    serves_all = True

    def __init__(self, chunks: Sequence[Sequence[int]], vocab_size: int) -> None:
        self.chunks, self.vocab_size = chunks, vocab_size
        self.sums = [0.0] * len(chunks)
        self.counts = [0] * len(chunks)

    def finished(self) -> list[tuple[float, int]]:
        """(loss, tokens) of the leading chunks that are done."""
        done = []
        for loss, count, ids in zip(self.sums, self.counts, self.chunks, strict=True):
            if count < len(ids) - 1:
                break
            done.append((loss, count))
        return done

    def sample(self, logits: Tensor, entries: Sequence[SampleEntry]) -> list[RowResult]:
        """logits: of every token of each entry, which is a piece of a chunk."""
        answers, at = [], 0
        for entry in entries:
            number, length = int(entry.seq), entry.num_drafts + 1
            targets = self.chunks[number][entry.position : entry.position + length]
            failure = None
            if len(targets):
                loss = _loss(logits[at : at + len(targets), : self.vocab_size], targets)
                if math.isfinite(loss):
                    self.sums[number] += loss
                    self.counts[number] += len(targets)
                else:
                    failure = "its logits are not finite"
            answers.append(RowResult(failure=failure))
            at += length
        return answers


def _loss(logits: Tensor, targets: Sequence[int]) -> float:
    """Sum of -ln p of `targets [n]` under `logits [n, vocab]`."""
    wanted = torch.tensor(list(targets), device=logits.device)
    total = 0.0
    for part, ids in zip(logits.split(SLICE), wanted.split(SLICE), strict=True):
        loss = torch.logsumexp(part.float(), -1) - part.gather(1, ids[:, None])[:, 0].float()
        total += float(loss.double().sum())
    return total


__all__ = ["BLOCK_SIZE", "Perplexity", "cut", "perplexity", "plans", "score", "scoring_config"]
