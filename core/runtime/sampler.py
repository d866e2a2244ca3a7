"""From logits to tokens: penalties, filters, one draw per position, log probabilities.

Order for one position: min_tokens mask, repetition, frequency and presence penalties, temperature, then the
filters top_k -> top_p (of what top_k left) -> min_p (relative to the largest probability), then the draw.

Invariants
* The token of a row is a function of its own logits, its own history and (seed, position). Weights are
  64-bit integers, so sums are exact and no batch shape, thread count or neighbour can move a draw.
* Ties are broken towards the smaller id everywhere: argmax, the edge of top_k and of top_p.
* The draw is the inverse CDF, in id order, of one 53-bit uniform number made from (seed, position) (`core/seeds.py`).
* A row of a beam search yields its likeliest tokens instead of one (`RowResult.candidates`).
* `RowResult.logprobs` are of the raw logits: before penalties, temperature and filters.
* Logits that hold no finite maximum make a failure of their own row and of no other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from twinfer.core.beam import num_candidates
from twinfer.core.params import SamplingParams
from twinfer.core.plan import Candidates, RowResult
from twinfer.core.request import Request
from twinfer.core.seeds import draw
from twinfer.kernels import ops

_WEIGHT_BITS = 44  # 2**44 per token; a vocabulary of 2**18 still sums below 2**63
_HEAD = 1024  # top_p looks at this many largest tokens before it looks at the whole vocabulary


@dataclass(frozen=True, slots=True)
class SampleEntry:
    """One row that wants a token.

    seq, index: the sequence and its sample number.  position: of the token to be sampled, counted from the
    start of the prompt.  seed: the row's sampling key.  output_ids, prompt_ids: the tokens before it.
    num_drafts: how many of the last `output_ids` are guesses. Such an entry has `num_drafts + 1` rows of
    logits, the first of them for the position of the first guess, and `position` is that position.
    """

    seq: str
    request: Request
    index: int
    position: int
    seed: int
    output_ids: Sequence[int]
    prompt_ids: Sequence[int]
    num_drafts: int = 0


class Samples(Protocol):
    """What answers for the rows of a step; `Sampler` is the usual one, `perplexity.py` has one that only scores.

    serves_all: whether rows with `Need.ALL` may come: entries with all tokens but the first counted as drafts.
    """

    serves_all: bool

    def sample(self, logits: torch.Tensor, entries: Sequence[SampleEntry]) -> list[RowResult]: ...


class Sampler:
    """Samples for a whole batch at once; holds no state."""

    serves_all = False

    def __init__(self, vocab_size: int, device: str | torch.device = "cpu") -> None:
        self.vocab_size = vocab_size
        self.device = torch.device(device)

    def sample(self, logits: torch.Tensor, entries: Sequence[SampleEntry]) -> list[RowResult]:
        """Results in the order of `entries`.

        logits: [sum(num_drafts + 1), >= vocab_size], any float dtype; columns past the vocabulary are padding.
        An entry with drafts yields the accepted ones and one more token: a draft is accepted if it is the
        token that would have been sampled there anyway, so drafts never change the text.
        """
        if not torch.is_inference_mode_enabled():
            with torch.inference_mode():
                return self.sample(logits, entries)
        rows = [row for entry in entries for row in _rows(entry)]
        if logits.shape[0] != len(rows):
            raise ValueError(f"{logits.shape[0]} rows of logits for {len(rows)} positions")
        if not rows:
            return []
        if logits.shape[1] > self.vocab_size:
            logits = logits[:, : self.vocab_size]
        tokens, finite = self._tokens(logits, rows)
        logprobs = self._logprobs(logits, rows, tokens)
        results, at = [], 0
        for entry in entries:
            n = entry.num_drafts + 1
            results.append(_accept(entry, tokens[at : at + n], logprobs[at : at + n], finite[at : at + n]))
            at += n
        searching = [i for i, entry in enumerate(entries) if entry.request.params.beam_width > 1]
        if searching:
            self._candidates(logits, entries, searching, results)
        return results

    def _candidates(
        self, logits: torch.Tensor, entries: Sequence[SampleEntry], searching: Sequence[int], results: list[RowResult]
    ) -> None:
        """Put the likeliest tokens instead of the one token into the results of beam searches."""
        starts, at = [], 0
        for entry in entries:
            starts.append(at)
            at += entry.num_drafts + 1
        pick = torch.tensor([starts[i] for i in searching], device=logits.device)
        logp = torch.log_softmax(logits[pick].float(), dim=-1)
        counts = [min(num_candidates(entries[i].request), self.vocab_size) for i in searching]
        values, ids = logp.topk(max(counts), dim=-1)
        for place, (i, count) in enumerate(zip(searching, counts, strict=True)):
            if results[i].failure is None:
                best = _by_id(logp[place], values[place, :count], ids[place, :count])
                results[i] = RowResult(candidates=best)

    def _tokens(self, logits: torch.Tensor, rows: Sequence[_Position]) -> tuple[list[int], list[bool]]:
        if all(row.plain_greedy for row in rows):
            best_ids, tops = ops.largest(logits)
            return best_ids, [math.isfinite(top) for top in tops]
        x = logits.to(torch.float32, copy=True)
        for i, row in enumerate(rows):
            if row.changes_logits:
                _penalise(x[i], row)
        finite = torch.isfinite(x.amax(dim=-1))
        best = x.argmax(dim=-1)
        drawn = [i for i, row in enumerate(rows) if not row.params.greedy]
        if drawn:
            pick = torch.tensor(drawn, device=x.device)
            best[pick] = _draw(x[pick], [rows[i] for i in drawn])
        return best.tolist(), finite.tolist()

    def _logprobs(
        self, logits: torch.Tensor, rows: Sequence[_Position], tokens: Sequence[int]
    ) -> list[Mapping[int, float] | None]:
        out: list[Mapping[int, float] | None] = [None] * len(rows)
        wanted = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
        if not wanted:
            return out
        logp = torch.log_softmax(logits[torch.tensor(wanted, device=logits.device)].float(), dim=-1)
        most = min(max(rows[i].params.logprobs or 0 for i in wanted), self.vocab_size)
        values, ids = logp.topk(most, dim=-1)
        chosen = logp.gather(1, torch.tensor([[tokens[i]] for i in wanted], device=logp.device))[:, 0].tolist()
        for i, own, top_ids, top_values in zip(wanted, chosen, ids.tolist(), values.tolist(), strict=True):
            n = rows[i].params.logprobs or 0
            out[i] = {tokens[i]: own, **dict(zip(top_ids[:n], top_values[:n], strict=True))}
        return out


@dataclass(frozen=True, slots=True)
class _Position:
    """One row of logits: an entry seen after `len(output)` output tokens."""

    params: SamplingParams
    stop_ids: Sequence[int]
    prompt: Sequence[int]
    output: Sequence[int]
    seed: int
    position: int

    @property
    def masks_stops(self) -> bool:
        return bool(self.stop_ids) and len(self.output) < self.params.min_tokens

    @property
    def penalised(self) -> bool:
        p = self.params
        return p.repetition_penalty != 1.0 or p.presence_penalty != 0.0 or p.frequency_penalty != 0.0

    @property
    def changes_logits(self) -> bool:
        return self.masks_stops or self.penalised

    @property
    def plain_greedy(self) -> bool:
        return self.params.greedy and not self.changes_logits


def _rows(entry: SampleEntry) -> list[_Position]:
    params, request = entry.request.params, entry.request
    stop_ids: tuple[int, ...] = ()
    if params.min_tokens:
        stop_ids = params.stop_token_ids + (() if params.ignore_eos else request.eos_token_ids)
    if not entry.num_drafts:
        return [_Position(params, stop_ids, entry.prompt_ids, entry.output_ids, entry.seed, entry.position)]
    known = len(entry.output_ids) - entry.num_drafts
    return [
        _Position(params, stop_ids, entry.prompt_ids, entry.output_ids[: known + j], entry.seed, entry.position + j)
        for j in range(entry.num_drafts + 1)
    ]


def _accept(
    entry: SampleEntry,
    tokens: Sequence[int],
    logprobs: Sequence[Mapping[int, float] | None],
    finite: Sequence[bool],
) -> RowResult:
    drafts = entry.output_ids[len(entry.output_ids) - entry.num_drafts :] if entry.num_drafts else ()
    kept = 0
    while kept < entry.num_drafts and finite[kept] and tokens[kept] == drafts[kept]:
        kept += 1
    if not finite[kept]:
        return RowResult(failure=f"the model gave no finite logits for position {entry.position + kept}")
    return RowResult(
        tokens=tuple(tokens[: kept + 1]),
        logprobs=tuple(lp for lp in logprobs[: kept + 1] if lp is not None),
    )


def _by_id(logp: torch.Tensor, values: torch.Tensor, ids: torch.Tensor) -> Candidates:
    """The largest `logp` [vocab] with their ids, ties to the smaller id; `values` and `ids` break them somehow."""
    edge = values[-1]
    above = int((values > edge).sum())
    equal = (logp == edge).nonzero()[: len(values) - above, 0]
    found = [*zip(ids[:above].tolist(), values[:above].tolist(), strict=True)]
    found += [(i, float(edge)) for i in equal.tolist()]
    return tuple(sorted(found, key=lambda c: (-c[1], c[0])))


def _penalise(x: torch.Tensor, row: _Position) -> None:
    """Change one row of float32 logits [vocab] in place."""
    p = row.params
    if row.penalised:
        vocab = x.shape[0]
        output = np.fromiter(row.output, dtype=np.int64, count=len(row.output))
        ids, counts = np.unique(output[output < vocab], return_counts=True)
        if p.repetition_penalty != 1.0:
            prompt = np.fromiter(row.prompt, dtype=np.int64, count=len(row.prompt))
            seen = torch.from_numpy(np.union1d(ids, prompt[prompt < vocab])).to(x.device)
            values = x[seen]
            x[seen] = torch.where(values > 0, values / p.repetition_penalty, values * p.repetition_penalty)
        if len(ids) and (p.frequency_penalty or p.presence_penalty):
            cost = p.frequency_penalty * counts + p.presence_penalty
            x[torch.from_numpy(ids).to(x.device)] -= torch.from_numpy(cost).to(x)
    if row.masks_stops:
        x[torch.tensor([i for i in row.stop_ids if i < x.shape[0]], dtype=torch.long, device=x.device)] = -torch.inf


def _draw(x: torch.Tensor, rows: Sequence[_Position]) -> torch.Tensor:
    """One token id per row of penalised float32 logits [n, vocab]."""
    params = [row.params for row in rows]
    temperature = _column(x, [p.temperature for p in params])
    gap = x.double() - x.amax(dim=-1, keepdim=True).double()
    # A row that has failed (no finite maximum) is given weights that draw anything; its token is not used.
    gap = torch.nan_to_num(gap, nan=0.0, posinf=0.0, neginf=-torch.inf)
    weights = torch.exp(gap / temperature).mul_(float(2**_WEIGHT_BITS)).long()
    floor = [p.min_p * 2**_WEIGHT_BITS for p in params]
    weights = _keep_top(x, weights, params)
    if any(floor):
        weights.masked_fill_(weights.double() < _column(x, floor), 0)
    total = weights.sum(dim=-1, keepdim=True)
    target = (_column(x, [draw(row.seed, row.position) for row in rows]) * total.double()).long()
    target = torch.minimum(target, total - 1)
    return torch.searchsorted(weights.cumsum(dim=-1), target, right=True)[:, 0]


def _keep_top(x: torch.Tensor, weights: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Zero the weights [n, vocab] outside top_k and top_p.

    Both filters keep the first so many tokens by (logit descending, id ascending), so both come down to a
    count per row.
    """
    vocab = x.shape[1]
    limit = [p.top_k if 0 < p.top_k < vocab else vocab for p in params]
    cut = [i for i, p in enumerate(params) if limit[i] < vocab or p.top_p < 1]
    if not cut:
        return weights
    pick = torch.tensor(cut, device=x.device)
    logits, mass = x[pick], weights[pick]
    k = torch.tensor([[limit[i]] for i in cut], device=x.device)
    top_p = _column(x, [params[i].top_p for i in cut])
    nucleus = any(params[i].top_p < 1 for i in cut)
    head = min(vocab, max(_HEAD if nucleus else 1, *(limit[i] for i in cut if limit[i] < vocab), 1))
    threshold, count = _edge(logits, mass, k, top_p, head)
    if head < vocab and bool((count > head).any()):
        threshold, count = _edge(logits, mass, k, top_p, vocab)
    above, equal = logits > threshold, logits == threshold
    room = count - above.sum(dim=-1, keepdim=True)
    keep = above | (equal & (equal.cumsum(dim=-1) <= room))
    weights[pick] = mass.masked_fill_(~keep, 0)
    return weights


def _edge(
    logits: torch.Tensor, mass: torch.Tensor, k: torch.Tensor, top_p: torch.Tensor, head: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The smallest logit the filters keep and how many tokens they keep, both [n, 1].

    Looks at the `head` largest logits only; a count above `head` says that they did not tell.
    """
    vocab = logits.shape[1]
    values, ids = logits.topk(head, dim=-1)
    ranked = mass.gather(1, ids)  # equal logits have equal mass, so it does not matter which of them came first
    inside_k = torch.arange(head, device=logits.device)[None, :] < k
    total = torch.where(k < vocab, (ranked * inside_k).sum(dim=-1, keepdim=True), mass.sum(dim=-1, keepdim=True))
    before = ranked.cumsum(dim=-1) - ranked
    count = ((before.double() < top_p * total.double()) & inside_k).sum(dim=-1, keepdim=True).clamp(min=1)
    unsure = (count == head) & (k > head)
    count = torch.where(top_p >= 1, k, count.masked_fill(unsure, vocab))
    return values.gather(1, count.clamp(max=head) - 1), count


def _column(like: torch.Tensor, values: Sequence[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, device=like.device)[:, None]
