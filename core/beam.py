"""Beam search: which continuations of a request live on, and how its beams share blocks.

    live beams (at most B) -- one row each --> candidates of each --> the best K of all, by cumulative log-probability
        the best B of those that do not end:  the live beams of the next step
        those that end, if among the best B:  hypotheses, of which the best B by score are kept

The field's definitions, those of transformers' `generate(num_beams=B)`:
* score of a hypothesis = its cumulative log-probability / (its output tokens ** length_penalty)
* K = B * (1 + number of ids that end a text), at least 2 B, so that B candidates remain that do not end
* early_stopping True: over at B hypotheses. False: over when the best live beam, were it to end now, scores no
  better than the worst of B hypotheses. "never": as False, but were it to end at the greatest length.
* at the greatest length all of the best B end

Invariants
* A request has B sequences from the start. Live ones hold text; the others are parked and hold nothing.
* All live beams are equally long; nothing is fed before all of them have answered (`answers`) and were reselected.
* A beam that lives on once keeps its sequence; further heirs take parked sequences as forks of it (`Fork` in the
  next plan) and share all its blocks, copied when written. An heir of a preempted beam starts preempted.
* Equal sums are ordered by the rank of the beam, then by token id: a selection is a function of its candidates.
* Beams that have answered need no KV until the others have: they give way when nothing else can run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from twinfer.core.errors import ProtocolError
from twinfer.core.events import Finished, TokenDelta
from twinfer.core.plan import Candidates, Fork, RowResult
from twinfer.core.request import Request, Sequence, Status

if TYPE_CHECKING:
    from twinfer.core.core import Core


def num_candidates(request: Request) -> int:
    """Continuations of one row that a selection may need; those it will not take are counted on top."""
    params = request.params
    ends = len(_stop_ids(request))
    needed = max(2, 1 + ends) * params.beam_width + (ends if params.min_tokens else 0)
    return max(needed, params.logprobs or 0)


def _stop_ids(request: Request) -> frozenset[int]:
    params = request.params
    return frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset(request.eos_token_ids))


class Hypothesis(NamedTuple):
    """A text that has ended. `logprobs`: per token, id -> log-probability, when they were asked for."""

    score: float
    logprob: float
    tokens: tuple[int, ...]
    logprobs: tuple[Mapping[int, float], ...]
    reason: str
    detail: str = ""


class Beam(NamedTuple):
    """A live beam: its text is `seq.output`, `logprob` the sum over it."""

    seq: Sequence
    logprob: float
    logprobs: tuple[Mapping[int, float], ...] = ()


class Heir(NamedTuple):
    """A selected continuation: `token` after the text of the live beam of rank `parent`."""

    parent: int
    token: int
    logprob: float
    logprobs: tuple[Mapping[int, float], ...]


class BeamGroup:
    """The beams of one request."""

    def __init__(self, seqs: list[Sequence]) -> None:
        self.seqs = seqs
        self.params = seqs[0].request.params
        self.live = [Beam(seqs[0], 0.0)]  # best first
        self.answers: dict[str, Candidates] = {}
        self.hypotheses: list[Hypothesis] = []  # best first
        self.hopeful = True  # a live beam may still become one of the best B

    @property
    def full(self) -> bool:
        return len(self.hypotheses) == len(self.seqs)

    def select(self) -> list[Heir]:
        """The next live beams, best first, from the answers of all live ones; none when the search is over."""
        params, width, stop_ids = self.params, len(self.seqs), self.seqs[0].stop_ids
        longest = self.seqs[0].limit - self.seqs[0].prompt_len
        length = len(self.live[0].seq.output) + 1
        heirs: list[Heir] = []
        ended: list[Hypothesis] = []
        closed = not self.hopeful or (self.full and params.early_stopping is True)
        most = max(2, 1 + len(stop_ids)) * width
        for place, (logprob, rank, token, own) in enumerate(self._ranked(length)[:most]):
            reason, detail = "", ""
            if token in stop_ids:
                reason, detail = "stop", f"token {token}"
            elif length >= longest:
                reason = "length"
                most_tokens = f"max_tokens={longest}"
                detail = most_tokens if longest == params.max_tokens else f"max_model_len={self.seqs[0].limit}"
            if reason and (place >= width or closed):
                continue
            if not reason and len(heirs) == width:
                continue
            beam = self.live[rank]
            logprobs = beam.logprobs
            if params.logprobs is not None:
                logprobs = (*logprobs, {token: own, **dict(self.answers[beam.seq.id][: params.logprobs])})
            if reason:
                tokens = (*beam.seq.output, token)
                ended.append(Hypothesis(self._score(logprob, length), logprob, tokens, logprobs, reason, detail))
            else:
                heirs.append(Heir(rank, token, logprob, logprobs))
        self._keep(ended)
        if heirs:
            never = params.early_stopping == "never" and params.length_penalty > 0
            best = self._score(heirs[0].logprob, longest if never else length)
            self.hopeful = self.hopeful and not (self.full and best <= self.hypotheses[-1].score)
        over = not self.hopeful or (self.full and params.early_stopping is True)
        return [] if over else heirs

    def _ranked(self, length: int) -> list[tuple[float, int, int, float]]:
        """(sum, rank of the beam, token, own log-probability) of all candidates that may be taken, best first."""
        barred = self.seqs[0].stop_ids if length <= self.params.min_tokens else frozenset()
        found = [
            (beam.logprob + logprob, rank, token, logprob)
            for rank, beam in enumerate(self.live)
            for token, logprob in self.answers[beam.seq.id]
            if token not in barred
        ]
        found.sort(key=lambda c: (-c[0], c[1], c[2]))
        return found

    def _score(self, logprob: float, length: int) -> float:
        scale: float = length**self.params.length_penalty
        return logprob / scale

    def _keep(self, ended: Iterable[Hypothesis]) -> None:
        self.hypotheses = sorted([*self.hypotheses, *ended], key=lambda h: -h.score)[: len(self.seqs)]

    def give_up(self, reason: str, detail: str) -> None:
        """The live beams end where they stand, for a reason that is none of theirs."""
        texts = [(beam, tuple(beam.seq.output)) for beam in self.live]
        self._keep(
            Hypothesis(self._score(beam.logprob, len(tokens)), beam.logprob, tokens, beam.logprobs, reason, detail)
            for beam, tokens in texts
            if tokens
        )


# --- what a Core does with it ---------------------------------------------------------------------


def beam_answered(core: Core, seq: Sequence, result: RowResult) -> None:
    """The row of a live beam is back; after the last of them the beams are selected anew."""
    group = seq.beams
    assert group is not None
    if not result.candidates:
        raise ProtocolError(f"row {seq.id} needed candidates and got none")
    group.answers[seq.id] = result.candidates
    if len(group.answers) < len(group.live):
        return
    heirs = group.select()
    if heirs:
        _reparent(core, group, heirs)
    else:
        end_beams(core, group)


def _reparent(core: Core, group: BeamGroup, heirs: list[Heir]) -> None:
    parents = [beam.seq for beam in group.live]
    first: dict[int, int] = {}  # rank of a parent -> place of the heir that keeps its sequence
    for place, heir in enumerate(heirs):
        first.setdefault(heir.parent, place)
    kept = {parents[rank].id for rank in first}
    spare = [seq for seq in group.seqs if seq.id not in kept]
    for seq in spare:
        _park(core, seq)
    live: list[Beam] = []
    for place, heir in enumerate(heirs):
        seq = parents[heir.parent]
        if first[heir.parent] != place:
            seq = spare.pop(0)
            _fork(core, seq, parents[heir.parent], heir.token)
        live.append(Beam(seq, heir.logprob, heir.logprobs))
    for rank, place in first.items():
        parents[rank].output.append(heirs[place].token)
    group.live = live
    group.answers = {}


def _park(core: Core, seq: Sequence) -> None:
    """Take all from a beam that does not live on; its rows are all back."""
    if seq.status is Status.WAITING:
        core.unqueue(seq)
        core.host.forget(seq)
    elif seq.status is Status.RUNNING:
        core.ledger.release(seq, None)
        core.preempted.append(seq.id)
        core.running.remove(seq)
    seq.status = Status.PARKED
    seq.computed = 0
    seq.output = []


def _fork(core: Core, seq: Sequence, parent: Sequence, token: int) -> None:
    """The parked `seq` becomes a copy of `parent` with one more token; `parent` has not got its own yet."""
    seq.output = [*parent.output, token]
    seq.num_cached, seq.num_hit = parent.num_cached, parent.num_hit
    if seq.id in core.preempted:  # the fork replaces its table
        core.preempted.remove(seq.id)
    core.forks = [fork for fork in core.forks if fork.seq != seq.id]
    core.forks.append(Fork(seq.id, parent.id))
    if parent.status is Status.RUNNING:
        seq.computed = core.ledger.fork(seq, parent)
        seq.status = Status.RUNNING
        core.admitted(seq)
        core.running.append(seq)
    else:
        core.preempted.append(seq.id)
        seq.status = Status.WAITING
        core.enqueue(seq)


def give_way(core: Core) -> bool:
    """Preempt the youngest running beam that only waits for others; False when there is none."""
    for seq in reversed(core.running):
        if seq.status is Status.RUNNING and seq.beams is not None and seq.id in seq.beams.answers:
            core.preempt(seq)
            core.running.remove(seq)
            core.enqueue(seq)
            return True
    return False


def end_beams(core: Core, group: BeamGroup, reason: str = "", detail: str = "") -> None:
    """Tell the hypotheses, best first as samples 0 to B-1, and release all beams.

    reason, detail: why the search ends before its time; the live beams then end where they stand.
    """
    request = group.seqs[0].request
    if reason:
        group.give_up(reason, detail)
    else:
        reason, detail = "error", f"there are no more than {len(group.hypotheses)} hypotheses"
    none = Hypothesis(0.0, 0.0, (), (), reason, detail)
    for index, seq in enumerate(group.seqs):
        found = group.hypotheses[index] if index < len(group.hypotheses) else none
        if found.tokens:
            core.tell(TokenDelta(request.id, index, found.tokens, found.logprobs))
        core.tell(
            Finished(
                request.id, index, found.reason, found.detail, seq.prompt_len, len(found.tokens), seq.num_cached,
                seq.num_preemptions, seq.num_swaps, found.logprob if found.tokens else None, seq.num_hit or 0,
            )
        )  # fmt: skip
    del core.requests[request.id]
    for seq in group.seqs:
        core.leave(seq, "beams")


def audit_beams(group: BeamGroup) -> list[str]:
    """Violated invariants of one living group."""
    wrong: list[str] = []
    live = [beam.seq for beam in group.live]
    if len({id(seq) for seq in live}) != len(live) or not live:
        wrong.append(f"{group.seqs[0].id}: live beams {live}")
    if len({len(seq.output) for seq in live}) > 1:
        wrong.append(f"{group.seqs[0].id}: live beams of different length {live}")
    if not {seq.id for seq in live} > set(group.answers):
        wrong.append(f"{group.seqs[0].id}: answers of {list(group.answers)}, live are {live}")
    for seq in group.seqs:
        if (seq.status is Status.PARKED) == (seq in live):
            wrong.append(f"{seq.id}: {seq.status.value}, live is {seq in live}")
        if seq.status is Status.PARKED and (seq.output or seq.computed or seq.inflight):
            wrong.append(f"{seq.id}: parked with {seq.output}, {seq.computed} computed")
        if seq.status is Status.RUNNING and seq.id in group.answers and seq.computed != seq.known:
            wrong.append(f"{seq.id}: has answered with {seq.computed} of {seq.known} tokens computed")
    return wrong
