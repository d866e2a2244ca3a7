"""The strongest test of the core: KV memory whose content is known, and a model that reads it.

`MemoryModel` is an executor. Its KV memory is a list of slots per block; a slot holds (position, token,
digest, cache group), where the digest chains over everything that was readable before it when it was written. Block
tables are its own, changed only by what plans say, in the order plans promise. A sampled token is a pure
function of the digest at the last position, so

* a row that reads a wrong, stale, unwritten or half-written slot is caught when it reads it: in each cache group
  everything inside the group's window and nothing outside it, where memory may be anybody's, and
* what a request outputs cannot depend on batching, chunking, preemption, prefix hits, forks, drafts or
  depth: `reference` computes it alone, without any core.

`World` drives a Core and a MemoryModel through single events and checks after each of them: `audit()`,
block tables against the ledger's, every output against the reference, one end per sample.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from twinfer.core.beam import num_candidates
from twinfer.core.core import Core
from twinfer.core.events import (
    Abort,
    Blocked,
    Event,
    Finished,
    Idle,
    Rejected,
    StepDone,
    Submit,
    TokenDelta,
    TransferDone,
    TransferFailed,
)
from twinfer.core.plan import HOLE, Copy, FromStep, Move, Need, Row, RowResult, StepPlan, StepResult, Swap
from twinfer.core.policy import Defer, KVCache, Limits, Scheduler, Shortage, View, Want
from twinfer.core.request import Request, Sequence
from twinfer.core.seeds import sequence_seed

VOCABULARY = 11
STOP_STRING_TOKEN = 9  # in this model's text, the token that completes every stop string
_MASK = (1 << 64) - 1
Windows = tuple[int | None, ...]


class Violation(AssertionError):
    """The core broke a promise."""


class Slot(NamedTuple):
    position: int
    token: int
    digest: int
    group: int = 0


def entries(window: int | None, start: int, stop: int, block_size: int) -> range:
    """Table entries that queries at positions `start` to `stop` (exclusive) read or write, by definition."""
    first = 0 if window is None else max(0, start - window + 1)
    return range(first // block_size, (stop - 1) // block_size + 1)


def most_tokens(windows: Windows, num_blocks: int, block_size: int, enough: int) -> int:
    """Tokens that one sequence alone can have in KV, fed one by one; counted no further than `enough`."""
    for position in range(enough):
        if sum(len(entries(window, position, position + 1, block_size)) for window in windows) > num_blocks:
            return position
    return enough


def extend(digest: int, token: int) -> int:
    """FNV-1a style chain: the digest of a context and one more token."""
    return ((digest ^ (token + 0x9E37)) * 0x100000001B3) & _MASK


def digest_of(tokens: Iterable[int]) -> int:
    digest = 0xCBF29CE484222325
    for token in tokens:
        digest = extend(digest, token)
    return digest


EMPTY = digest_of(())


def next_token(digest: int, seed: int) -> int:
    """The model: a pure function of the whole context and the sampling seed (0 for greedy)."""
    x = (digest ^ (seed * 0x9E3779B97F4A7C15)) & _MASK
    x ^= x >> 31
    x = (x * 0xBF58476D1CE4E5B9) & _MASK
    x ^= x >> 29
    return x % VOCABULARY


def sampling_seed(request: Request, index: int) -> int:
    """0 for greedy; else the seed rows must carry. Sampled requests of these tests always name their seed."""
    if request.params.greedy:
        return 0
    assert request.params.seed is not None
    return sequence_seed(request.params.seed, 0, 0, index)


def log_probability(digest: int, token: int) -> float:
    """Of `token` after a context: what beam search adds up (it need not be normalised)."""
    x = (extend(digest, token) * 0xD6E8FEB86659FD93) & _MASK
    return -((x >> 40) % 800) / 100 - token / 1e6


def reference_beams(request: Request, limits: Limits, slots: int | None = None) -> list[tuple[list[int], str, float]]:
    """(tokens, reason, sum) of the samples of a beam search run alone: every continuation of every beam is looked at."""
    params, width = request.params, request.params.beam_width
    longest = min(params.max_tokens, limits.max_model_len - len(request.prompt))
    ids = stop_ids(request)
    digest = digest_of(request.prompt)
    beams: list[tuple[float, list[int], int]] = [(0.0, [], digest)]
    done: list[tuple[float, list[int], str, float]] = []  # penalised score, tokens, reason, sum

    def score(total: float, length: int) -> float:
        return total / length**params.length_penalty

    def full() -> bool:
        return len(done) == width

    while True:
        length = len(beams[0][1]) + 1
        if slots is not None and len(request.prompt) + length - 1 > slots:
            done += [(score(total, length - 1), tokens, "capacity", total) for total, tokens, _ in beams if tokens]
            done = sorted(done, key=lambda h: -h[0])[:width]
            return [(h[1], h[2], h[3]) for h in done] + [([], "capacity", 0.0)] * (width - len(done))
        grown = [
            (total + log_probability(digest, token), rank, token)
            for rank, (total, _, digest) in enumerate(beams)
            for token in range(VOCABULARY)
            if not (token in ids and length <= params.min_tokens)
        ]
        grown = sorted(grown, key=lambda g: (-g[0], g[1], g[2]))[: max(2, 1 + len(ids)) * width]
        was_full, following = full(), []
        for place, (total, rank, token) in enumerate(grown):
            text = [*beams[rank][1], token]
            if token in ids or length == longest:
                reason = "stop" if token in ids else "length"
                if place < width and not (was_full and params.early_stopping is True):
                    done.append((score(total, length), text, reason, total))
            else:
                following.append((total, text, extend(beams[rank][2], token)))
        done = sorted(done, key=lambda h: -h[0])[:width]
        beams = following[:width]
        if not beams or (full() and params.early_stopping is True):
            break
        reach = longest if params.early_stopping == "never" and params.length_penalty > 0 else length
        if full() and score(beams[0][0], reach) <= done[-1][0]:
            break
    return [(h[1], h[2], h[3]) for h in done] + [([], "error", 0.0)] * (width - len(done))


def completes_stop_string(request: Request, token: int, num_output: int) -> bool:
    return bool(request.params.stop) and token == STOP_STRING_TOKEN and num_output > request.params.min_tokens


def stop_ids(request: Request) -> set[int]:
    eos = () if request.params.ignore_eos else request.eos_token_ids
    return {*request.params.stop_token_ids, *eos}


def reference(request: Request, index: int, limits: Limits, slots: int | None = None) -> tuple[list[int], str, str]:
    """(tokens, reason, detail) of sample `index` run alone, by definition and without a core.

    slots: tokens that the whole pool can hold of it; the sequence ends with `capacity` when it does not fit (detail "").
    """
    params, seed, digest = request.params, sampling_seed(request, index), digest_of(request.prompt)
    length = len(request.prompt)
    output: list[int] = []
    while True:
        if slots is not None and length + len(output) > slots:
            return output, "capacity", ""
        token = next_token(digest, seed)
        digest = extend(digest, token)
        output.append(token)
        if token in stop_ids(request) and len(output) > params.min_tokens:
            return output, "stop", f"token {token}"
        if completes_stop_string(request, token, len(output)):
            return output, "stop", params.stop[0]
        if len(output) == params.max_tokens:
            return output, "length", f"max_tokens={params.max_tokens}"
        if length + len(output) == limits.max_model_len:
            return output, "length", f"max_model_len={limits.max_model_len}"


@dataclass
class Known:
    """What the executor knows of one sequence: its true tokens and their digests."""

    request: Request
    index: int
    seed: int
    tokens: list[int]
    digests: list[int]

    def append(self, token: int) -> None:
        self.digests.append(extend(self.digests[-1] if self.digests else EMPTY, token))
        self.tokens.append(token)


class MemoryModel:
    """An executor over simulated KV memory. `max_drafts` > 0 proposes that many partly right drafts."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_drafts: int = 0,
        num_host_blocks: int = 0,
        windows: Windows = (None,),
    ) -> None:
        self.windows = windows
        self.block_size = block_size
        self.max_drafts = max_drafts
        self.slots: list[list[Slot | None]] = [[None] * block_size for _ in range(num_blocks)]
        self.host: list[list[Slot | None]] = [[None] * block_size for _ in range(num_host_blocks)]
        self.tables: dict[str, list[list[int]]] = {}  # per cache group
        self.starts: dict[str, int] = {}  # no later row of the sequence starts before this position
        self.known: dict[str, Known] = {}
        self.moves: dict[str, Move] = {}
        self.sampled: dict[FromStep, int] = {}
        self.rows_checked = 0
        self.tokens_read = 0
        self.drafts_accepted = 0
        self.copies_made = 0
        self.blocks_swapped_in = 0
        self.forks_made = 0

    # --- executor interface ---------------------------------------------------------------------

    def admit(self, request: Request, seqs: tuple[tuple[str, int], ...]) -> None:
        for seq, index in seqs:
            known = Known(request, index, sampling_seed(request, index), [], [])
            for token in request.prompt:
                known.append(token)
            self.known[seq] = known

    def execute(self, plan: StepPlan) -> StepResult:
        self._change_tables(plan)
        for move in plan.moves:
            self._start_move(move)
        self._check_writers(plan.rows)
        return StepResult(tuple(self._run(plan.step, row) for row in plan.rows))

    def close(self) -> None:
        pass

    def end_move(self, seq: str, ok: bool) -> None:
        """A transfer ends: what a load brought is there now; what a send read must still have been there."""
        move = self.moves.pop(seq)
        known = self.known[seq]
        for group, blocks in enumerate(self._by_group(move)):
            needed = entries(self.windows[group], move.num_tokens, move.num_tokens + 1, self.block_size)
            for position in range(move.num_tokens):
                index, offset = divmod(position, self.block_size)
                if blocks[index] == HOLE:
                    if index in needed:
                        raise Violation(f"{move}: the next token reads block {index} of group {group}")
                    continue
                right = Slot(position, known.tokens[position], known.digests[position], group)
                if move.kind == "load":
                    self.slots[blocks[index]][offset] = right if ok else None
                elif (found := self.slots[blocks[index]][offset]) != right:
                    raise Violation(f"send of {seq}: position {position} holds {found}, not {right}")

    def _by_group(self, move: Move) -> list[tuple[int, ...]]:
        each, rest = divmod(len(move.blocks), len(self.windows))
        if rest:
            raise Violation(f"{move}: not equally many blocks for each group")
        return [move.blocks[group * each : (group + 1) * each] for group in range(len(self.windows))]

    # --- tables ---------------------------------------------------------------------------------

    def _change_tables(self, plan: StepPlan) -> None:
        """forget, forks, swap-outs, preempted, grants, copies, swap-ins: in this order and nothing else."""
        for seq in plan.forget:
            if self.known.pop(seq, None) is None:
                raise Violation(f"step {plan.step} forgets {seq}, which was never admitted")
            self.tables.pop(seq, None)
            self.sampled = {ref: token for ref, token in self.sampled.items() if ref.seq != seq}
            self.starts.pop(seq, None)
        for fork in plan.forks:
            known, parent = self.known[fork.seq], self.known[fork.parent]
            if known.request is not parent.request:
                raise Violation(f"{fork}: not of one request")
            known.tokens, known.digests = list(parent.tokens), list(parent.digests)
            self.tables.pop(fork.seq, None)
            if fork.parent in self.tables:
                self.tables[fork.seq] = [list(table) for table in self.tables[fork.parent]]
            self.starts[fork.seq] = self.starts.get(fork.parent, 0)
            self.forks_made += 1
        self._check_host(plan.swap_outs)
        for swap in plan.swap_outs:
            table = self.tables.get(swap.seq, [[] for _ in self.windows])[swap.group]
            if swap.seq not in plan.preempted or not swap.blocks or not set(swap.blocks) <= set(table):
                raise Violation(f"{swap}: the table is {table}")
            for block, host in zip(swap.blocks, swap.host_blocks, strict=True):
                self.host[host] = list(self.slots[block])
        for seq in plan.preempted:
            if seq not in self.known:
                raise Violation(f"step {plan.step} preempts {seq}, which is not known")
            self.tables.pop(seq, None)
            self.starts.pop(seq, None)
        fresh: list[tuple[str, int]] = []
        for grant in plan.grants:
            if grant.seq not in self.known:
                raise Violation(f"step {plan.step} grants blocks to {grant.seq}, which is not known")
            self.tables.setdefault(grant.seq, [[] for _ in self.windows])[grant.group].extend(grant.blocks)
            fresh += [(grant.seq, block) for block in grant.blocks[grant.shared :] if block != HOLE]
        written: set[int] = set()
        for copy in plan.copies:
            if copy.source in written:
                raise Violation(f"{copy}: an executor that reads all sources first would read what this step wrote")
            written.add(copy.target)
            self._copy(copy)
        for seq, block in fresh:
            self._require_sole_owner(seq, block, "is granted")
            self.slots[block] = [None] * self.block_size
        self._check_host(plan.swap_ins)
        for swap in plan.swap_ins:
            for block, host in zip(swap.blocks, swap.host_blocks, strict=True):
                if (swap.seq, block) not in fresh:
                    raise Violation(f"{swap}: block {block} was not granted in this step")
                self.slots[block] = list(self.host[host])
                self.host[host] = [None] * self.block_size
                self.blocks_swapped_in += 1

    def _check_host(self, swaps: tuple[Swap, ...]) -> None:
        blocks = [block for swap in swaps for block in swap.host_blocks]
        if len(set(blocks)) != len(blocks):
            raise Violation(f"a host block is named twice: {swaps}")

    def _copy(self, copy: Copy) -> None:
        table = self.tables[copy.seq][copy.group]
        if table[copy.slot] != copy.source:
            raise Violation(f"{copy}: the table holds {table[copy.slot]} at {copy.slot}")
        self._require_no_move(copy.seq, copy.source, "load")
        table[copy.slot] = copy.target
        self._require_sole_owner(copy.seq, copy.target, "is copied to")
        self.slots[copy.target] = list(self.slots[copy.source])
        self.copies_made += 1

    def _require_sole_owner(self, seq: str, block: int, what: str) -> None:
        for other in self.tables:
            if self._live(other).count(block) > (other == seq):
                raise Violation(f"block {block} {what} for {seq} while it stands in the table of {other}")
        self._require_no_move(seq, block, None)

    def _live(self, seq: str) -> list[int]:
        """Blocks in the tables of `seq` that a later row of it may read or write."""
        start = self.starts.get(seq, 0)
        found = []
        for window, table in zip(self.windows, self.tables[seq], strict=True):
            found += table[entries(window, start, start + 1, self.block_size).start :] if start else table
        return [block for block in found if block != HOLE]

    def _require_no_move(self, seq: str, block: int, kind: str | None) -> None:
        for move in self.moves.values():
            if block in move.blocks and (kind is None or move.kind == kind):
                raise Violation(f"{seq} uses block {block} while {move} is in progress")

    # --- transfers ------------------------------------------------------------------------------

    def _start_move(self, move: Move) -> None:
        if move.seq in self.moves:
            raise Violation(f"{move}: another transfer of this sequence is in progress")
        for blocks, table in zip(self._by_group(move), self.tables[move.seq], strict=True):
            if move.num_tokens > len(blocks) * self.block_size or move.num_tokens < 1:
                raise Violation(f"{move}: {move.num_tokens} tokens in {len(blocks)} blocks")
            if len(blocks) != len(table) or any(b not in (HOLE, t) for b, t in zip(blocks, table, strict=True)):
                raise Violation(f"{move}: the table is {table}")
        if move.kind == "load":
            for block in move.blocks:
                if block != HOLE:
                    self._require_sole_owner(move.seq, block, "is loaded")
        self.moves[move.seq] = move

    # --- rows -----------------------------------------------------------------------------------

    def _check_writers(self, rows: tuple[Row, ...]) -> None:
        """All rows of a step run at once: what one writes, nobody else may hold."""
        names = [row.seq for row in rows]
        if len(set(names)) != len(names):
            raise Violation(f"two rows of one sequence in a step: {names}")
        for row in rows:
            for table in self.tables.get(row.seq, [[]]):
                if row.stop > len(table) * self.block_size:
                    raise Violation(f"{row} writes past its {len(table)} blocks")
                for index in range(row.start // self.block_size, (row.stop - 1) // self.block_size + 1):
                    self._require_sole_owner(row.seq, table[index], "is written")

    def _resolve(self, row: Row) -> list[int]:
        tokens = []
        for token in row.tokens:
            if isinstance(token, FromStep):
                if token.seq != row.seq or token not in self.sampled:
                    raise Violation(f"{row}: {token} has not been sampled")
                token = self.sampled[token]
            if token < 0:
                raise Violation(f"{row}: {token} is not a token")
            tokens.append(token)
        return tokens

    def _run(self, step: int, row: Row) -> RowResult:
        known = self.known[row.seq]
        tokens = self._resolve(row)
        num_known = len(tokens) - row.draft
        end = row.start + num_known
        searching = known.request.params.beam_width > 1
        if searching:  # the core selects: what it feeds behind what is known is the text of this beam from here on
            for token in tokens[max(0, len(known.tokens) - row.start) :]:
                if row.start > len(known.tokens):
                    raise Violation(f"{row}: only {len(known.tokens)} tokens are known")
                known.append(token)
        if num_known < 1 or tokens[:num_known] != known.tokens[row.start : end]:
            raise Violation(f"{row} feeds {tokens[:num_known]}, true are {known.tokens[row.start : end]}")
        needs = row.need is not Need.NONE
        if searching:
            if row.need not in (Need.NONE, Need.BEAM) or row.draft:
                raise Violation(f"{row}: of a beam search")
        elif needs != (end == len(known.tokens)) or (row.need is Need.DRAFTS) != (row.draft > 0):
            raise Violation(f"{row}: {len(known.tokens)} tokens are known")
        if not known.request.params.greedy and row.seed != known.seed:
            raise Violation(f"{row}: the sampling seed should be {known.seed}")
        for group in range(len(self.windows)):
            self._write(row, known, tokens, group)
            self._read_back(row, known, tokens[num_known:], group)
        self.starts[row.seq] = end
        self.rows_checked += 1
        if not needs:
            return RowResult()
        if searching:
            return self._candidates(known)
        result = self._sample(step, row, known, tokens[num_known:])
        self.starts[row.seq] += max(0, len(result.tokens) - 1)  # accepted drafts are in KV too
        return result

    def _write(self, row: Row, known: Known, tokens: list[int], group: int) -> None:
        size, table = self.block_size, self.tables[row.seq][group]
        digest = known.digests[row.start - 1] if row.start else EMPTY
        if row.start and self.windows[group] != 1:
            before = self._slot(row, group, row.start - 1)
            if before is None:
                raise Violation(f"{row}: position {row.start - 1} was never written")
            digest = before.digest
        for position, token in enumerate(tokens, row.start):
            digest = extend(digest, token)
            self.slots[table[position // size]][position % size] = Slot(position, token, digest, group)

    def _read_back(self, row: Row, known: Known, drafts: list[int], group: int) -> None:
        """Everything this row attends to in one cache group, through its table."""
        window = self.windows[group]
        first = 0 if window is None else max(0, row.start - window + 1)
        digest = known.digests[first - 1] if first else EMPTY
        for position in range(first, row.stop):
            right = position - (row.stop - len(drafts))
            token = drafts[right] if right >= 0 else known.tokens[position]
            digest = extend(digest, token)
            slot = self._slot(row, group, position)
            if slot != (position, token, digest, group):
                raise Violation(f"{row}: position {position} of group {group} holds {slot}, should hold token {token}")
        self.tokens_read += row.stop - first

    def _slot(self, row: Row, group: int, position: int) -> Slot | None:
        block = self.tables[row.seq][group][position // self.block_size]
        if block == HOLE:
            raise Violation(f"{row} reads position {position} of group {group}, where there is a hole")
        return self.slots[block][position % self.block_size]

    def _sample(self, step: int, row: Row, known: Known, drafts: list[int]) -> RowResult:
        sampled: list[int] = []
        for guess in [*drafts, None]:
            token = next_token(known.digests[-1], known.seed)
            known.append(token)
            sampled.append(token)
            if token != guess:
                break
        self.drafts_accepted += len(sampled) - 1
        self.sampled[FromStep(step, row.seq)] = sampled[-1]
        request = known.request
        num_before = len(known.tokens) - len(sampled) - len(request.prompt)
        stopped = None
        for count, token in enumerate(sampled, 1):
            if completes_stop_string(request, token, num_before + count):
                sampled, stopped = sampled[:count], request.params.stop[0]
                break
        logprobs = () if request.params.logprobs is None else tuple({t: -float(t)} for t in sampled)
        return RowResult(tuple(sampled), logprobs, stopped, self._propose(known))

    def _candidates(self, known: Known) -> RowResult:
        digest = known.digests[-1]
        found = sorted(((t, log_probability(digest, t)) for t in range(VOCABULARY)), key=lambda c: (-c[1], c[0]))
        return RowResult(candidates=tuple(found[: num_candidates(known.request)]))

    def _propose(self, known: Known) -> tuple[int, ...]:
        """Drafts: how many, and which of them are wrong, are drawn from the context."""
        digest = known.digests[-1]
        if not self.max_drafts or digest % 5 == 0:
            return ()
        drafts = []
        for i in range(1 + digest % self.max_drafts):
            token = next_token(digest, known.seed)
            if (known.digests[-1] >> (8 + i)) % 4 == 0:
                token = (token + 1) % VOCABULARY
            drafts.append(token)
            digest = extend(digest, token)
        return tuple(drafts)


class NastyScheduler:
    """Breaks every convention a policy can break without raising or writing to what it was shown.

    It names sequences twice, sequences that ended long ago, sequences of other cores and look-alikes with
    living ids; asks for zero, negative and huge counts; proposes nothing, or to wait; names victims at
    random; and its order has ties and infinities and changes every time.
    """

    name = "nasty"

    def __init__(self, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.seen: list[Sequence] = []

    def order(self, seq: Sequence) -> tuple[object, ...]:
        return (self.random.choice([0, 1, -1.5, float("inf"), seq.number]),)

    def _anything(self, view: View) -> list[Sequence]:
        living = [*view.running, *view.waiting]
        self.seen = (self.seen + living)[-40:]
        impostors = []
        for seq in living[:2]:
            impostor = Sequence(seq.request, seq.index, seq.number, 1, seq.limit)
            impostor.status = seq.status
            impostors.append(impostor)
        everything = [*living, *living, *self.seen, *impostors]
        self.random.shuffle(everything)
        return everything

    def propose(self, view: View) -> Iterable[Want | Defer]:
        luck = self.random.random()
        if luck < 0.02:
            return
        if luck < 0.06:
            yield Defer(view.now + self.random.choice([-1.0, 0.0, 0.5]))
        for seq in self._anything(view):
            yield Want(seq, self.random.choice([-3, 0, 1, 2, 7, 10**9]), self.random.random() < 0.9)

    def victims(self, view: View, shortage: Shortage) -> Iterable[Sequence]:
        everything = [*self._anything(view), shortage.seq]
        return everything[: self.random.randint(0, len(everything))]


@dataclass
class Tracked:
    """One submitted request and all that was said about it."""

    request: Request
    tokens: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[object]] = field(default_factory=dict)
    ends: dict[int, Finished] = field(default_factory=dict)
    rejected: str | None = None

    @property
    def ended(self) -> bool:
        return self.rejected is not None or len(self.ends) == self.request.params.num_samples


class World:
    """A Core, its executor and everything that was asked of them; every method is one event.

    lazy: steps are executed when they are reported done, not when they are launched (the device is behind).
    strict: the scheduler is sound, so ends must be exactly those of each request alone.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        kv_cache: KVCache,
        limits: Limits,
        *,
        seed: int = 0,
        lazy: bool = False,
        strict: bool = True,
        max_drafts: int = 0,
        windows: Windows = (None,),
    ) -> None:
        self.core = Core(scheduler, kv_cache, limits, seed=seed, windows=windows)
        self.windows = windows
        self.limits = limits
        self.lazy = lazy
        self.strict = strict
        self.block_size = kv_cache.block_size(limits)
        self.memory = MemoryModel(limits.num_blocks, self.block_size, max_drafts, limits.num_host_blocks, windows)
        self.slots = most_tokens(windows, limits.num_blocks, self.block_size, limits.max_model_len)
        self.now = 0.0
        self.requests: list[Tracked] = []
        self.current: dict[str, Tracked] = {}  # the latest request of each id
        self.results: dict[int, StepResult] = {}  # of launched steps, when executed
        self.plans: list[StepPlan] = []
        self.touched: dict[int, dict[int, str]] = {}  # outstanding step -> block -> sequence whose row uses it
        self.events: list[tuple[float, Event | None]] = []  # None: next_step was asked
        self.steps_done = 0

    # --- events ---------------------------------------------------------------------------------

    def receive(self, event: Event) -> None:
        self.events.append((self.now, event))
        self.core.receive(event, self.now)

    def submit(self, request: Request) -> Tracked:
        tracked = Tracked(request)
        self.requests.append(tracked)
        before = self.current.get(request.id)
        self.receive(Submit(request))
        outputs = self.core.outputs()
        if any(isinstance(o, Rejected) for o in outputs):
            assert len(outputs) == 1 and outputs[0].request_id == request.id
            tracked.rejected = outputs[0].why
            self._check_rejection(request, tracked.rejected)
        else:
            assert not outputs, outputs
            if before is not None and not before.ended:
                raise Violation(f"{request.id} was accepted although it is alive")
            if not self._fits(request):
                raise Violation(f"{request.id} was accepted: {len(request.prompt)} tokens, {self.limits}")
            if request.id in self.memory.known:  # its `forget` may be in a plan the device has not reached
                self._catch_up()
            seqs = tuple((request.id if i == 0 else f"{request.id}/{i}", i) for i in range(request.params.num_samples))
            self.memory.admit(request, seqs)
            self.current[request.id] = tracked
        self.check()
        return tracked

    def abort(self, request_id: str) -> None:
        self.receive(Abort(request_id))
        self.check()

    def launch(self) -> StepPlan | Idle | Blocked:
        """Ask for the next step and start it."""
        self.events.append((self.now, None))
        action = self.core.next_step(self.now)
        if isinstance(action, StepPlan):
            self._check_plan(action)
            self._check_in_flight(action)
            self.plans.append(action)
            if not self.lazy:
                self._catch_up()
                self._check_tables()
        elif isinstance(action, Blocked):
            if not (action.steps or action.transfers):
                raise Violation("blocked on nothing")
        elif action.until is None and self.core.has_work:
            raise Violation("idle for ever with work left")
        self.check()
        return action

    def finish_step(self, fail_row: int | None = None) -> None:
        """Report the oldest outstanding step done; row `fail_row` of it (if any) could not be computed."""
        step = next(iter(self.core.outstanding))
        if step not in self.results:
            self.results[step] = self.memory.execute(self.core.outstanding[step])
        result = self.results.pop(step)
        del self.touched[step]
        if fail_row is not None and result.rows:
            rows = list(result.rows)
            rows[fail_row % len(rows)] = RowResult(failure="device lost")
            result = StepResult(tuple(rows))
        self.steps_done += 1
        self.receive(StepDone(step, result))
        self.check()

    def transfers(self) -> list[str]:
        """Transfers that have begun (on a device that is behind, a launched plan may not have got there)."""
        return [seq for seq in self.core.transfers if seq in self.memory.moves]

    def end_transfer(self, seq: str, ok: bool = True) -> None:
        self.memory.end_move(seq, ok)
        self.receive(TransferDone(seq) if ok else TransferFailed(seq, "link down"))
        self.check()

    def restore(self) -> None:
        """Go on with a new Core made from a snapshot; the old one must not matter any more."""
        old = self.core
        core = Core(old.scheduler, old.ledger.cache, old.limits, seed=old.seed, windows=self.windows)
        core.restore(old.snapshot())
        self.core = core
        self.check()

    def _catch_up(self) -> None:
        """Execute, in order, what was launched and not yet executed."""
        for step, plan in self.core.outstanding.items():
            if step not in self.results:
                self.results[step] = self.memory.execute(plan)

    # --- going on to the end --------------------------------------------------------------------

    def advance(self) -> None:
        """One event that a driver could bring next; prefers launching."""
        action = self.launch()
        if isinstance(action, StepPlan):
            return
        if isinstance(action, Idle) and action.until is not None:
            self.now = max(self.now, action.until)
            return
        if self.core.outstanding:
            self.finish_step()
        elif self.core.transfers:
            self.end_transfer(next(iter(self.core.transfers)))

    def drain(self, max_events: int = 20_000) -> None:
        """Run until nothing is left; every request must have ended, and no block may be held."""
        events = 0
        while self.core.has_work:
            self.advance()
            events += 1
            if events > max_events:
                raise Violation(f"not drained after {events} events: {self.core.sequences}")
        for tracked in self.requests:
            if not tracked.ended:
                raise Violation(f"{tracked.request.id} never ended: {tracked}")
        pool = self.core.ledger.pool
        if pool.held or pool.available != pool.num_blocks or pool.in_flight:
            raise Violation(f"{pool.held} blocks are held after everything has ended")

    # --- checks ---------------------------------------------------------------------------------

    def check(self) -> None:
        wrong = self.core.audit()
        if wrong:
            raise Violation("; ".join(wrong))
        for output in self.core.outputs():
            tracked = self.current[output.request_id]
            if isinstance(output, TokenDelta):
                if output.index in tracked.ends or not output.tokens:
                    raise Violation(f"{output} after its end, or empty")
                tracked.tokens.setdefault(output.index, []).extend(output.tokens)
                tracked.logprobs.setdefault(output.index, []).extend(output.logprobs)
            elif isinstance(output, Finished):
                if output.index in tracked.ends:
                    raise Violation(f"{output}: ended before with {tracked.ends[output.index]}")
                tracked.ends[output.index] = output
                self._check_end(tracked, output)
            else:
                raise Violation(f"unexpected {output}")

    def _fits(self, request: Request) -> bool:
        length = len(request.prompt)
        stored = min(length + 1, length + request.params.max_tokens - 1, self.limits.max_model_len - 1)
        return 0 < length < self.limits.max_model_len and stored <= self.slots

    def _check_rejection(self, request: Request, why: str) -> None:
        in_use = "in use" in why or "clashes" in why
        if in_use:
            rows = {row.seq for plan in self.core.outstanding.values() for row in plan.rows}
            ids = {request.id, *(f"{request.id}/{i}" for i in range(request.params.num_samples))}
            if not ids & {*self.core.sequences, *self.core.requests, *rows}:
                raise Violation(f"{request.id} was rejected: {why}")
        elif self._fits(request):
            raise Violation(f"{request.id} was rejected: {why}")

    def _check_plan(self, plan: StepPlan) -> None:
        limits = self.limits
        if len(plan.rows) > limits.max_num_seqs or plan.num_tokens > limits.max_num_batched_tokens:
            raise Violation(f"step {plan.step}: {len(plan.rows)} rows, {plan.num_tokens} tokens, {limits}")
        if not plan.rows and not plan.moves:
            raise Violation(f"step {plan.step} does nothing")
        for row in plan.rows:
            if row.stop > limits.max_model_len - 1:
                raise Violation(f"{row} is longer than max_model_len - 1")
            for token in row.tokens:
                if isinstance(token, FromStep) and (token.step not in self.core.outstanding or token.step == plan.step):
                    raise Violation(f"{row}: {token} is not outstanding")
        json_rows = plan.to_json().count('"need"')
        if json_rows != len(plan.rows):
            raise Violation("the plan's text lacks rows")

    def _check_in_flight(self, plan: StepPlan) -> None:
        """A block that an outstanding row uses is given to nobody else before that step is done."""
        fresh = [(g.seq, block) for g in plan.grants for block in g.blocks[g.shared :] if block != HOLE]
        fresh += [(copy.seq, copy.target) for copy in plan.copies]
        for seq, block in fresh:
            for step, users in self.touched.items():
                if block in users:
                    raise Violation(f"block {block} goes to {seq} while step {step} uses it for {users[block]}")
        self.touched[plan.step] = {
            table[index]: row.seq
            for row in plan.rows
            for window, table in zip(self.windows, self.core.ledger.tables[row.seq].groups, strict=True)
            for index in entries(window, row.start, row.stop, self.block_size)
        }

    def _check_tables(self) -> None:
        """The ledger's tables are those that plans gave the executor, but for what has left the windows."""
        tables = {seq: t.groups for seq, t in self.core.ledger.tables.items() if t.blocks}
        mine = {seq: t for seq, t in self.memory.tables.items() if any(t)}
        same = tables.keys() == mine.keys() and all(
            len(a) == len(b) and all(x in (HOLE, y) for x, y in zip(a, b, strict=True))
            for seq in tables
            for a, b in zip(tables[seq], mine[seq], strict=True)
        )
        if not same:
            raise Violation(f"the ledger has {tables}, plans gave {mine}")

    def _check_end(self, tracked: Tracked, end: Finished) -> None:
        request = tracked.request
        got = tracked.tokens.get(end.index, [])
        logprobs = tracked.logprobs.get(end.index, [])
        if end.num_output_tokens != len(got) or end.num_prompt_tokens != len(request.prompt):
            raise Violation(f"{end}: {len(got)} tokens were delivered")
        if request.params.beam_width > 1:
            self._check_hypothesis(tracked, end, got, logprobs)
            return
        if request.params.logprobs is not None and logprobs != [{t: -float(t)} for t in got]:
            raise Violation(f"{end}: log probabilities {logprobs} of tokens {got}")
        tokens, reason, detail = reference(request, end.index, self.limits, self.slots)
        if end.reason in ("abort", "error") or (end.reason == "capacity" and not self.strict):
            if got != tokens[: len(got)]:
                raise Violation(f"{end}: {got} is no beginning of {tokens}")
            return
        if got != tokens or end.reason != reason or (detail and end.detail != detail):
            raise Violation(f"{end}: {got}; alone it gives {tokens}, {reason}, {detail}")

    def _check_hypothesis(self, tracked: Tracked, end: Finished, got: list[int], logprobs: list[object]) -> None:
        request = tracked.request
        digest, total = digest_of(request.prompt), 0.0
        for place, token in enumerate(got):
            own = log_probability(digest, token)
            if request.params.logprobs is not None:
                best = sorted(range(VOCABULARY), key=lambda t: (-log_probability(digest, t), t))
                expected = {token: own} | {t: log_probability(digest, t) for t in best[: request.params.logprobs]}
                if logprobs[place] != expected:
                    raise Violation(f"{end}: log probabilities {logprobs[place]}, should be {expected}")
            total += own
            digest = extend(digest, token)
        if (end.cumulative_logprob is None) != (not got) or (got and abs(end.cumulative_logprob - total) > 1e-9):
            raise Violation(f"{end}: the tokens add up to {total}")
        if not tracked.ended:
            return
        reasons = {end.reason for end in tracked.ends.values()}
        if reasons & {"abort", "error"} or ("capacity" in reasons and not self.strict):
            return
        alone = [(tokens, reason) for tokens, reason, _ in reference_beams(request, self.limits, self.slots)]
        found = [(tracked.tokens.get(i, []), tracked.ends[i].reason) for i in range(len(alone))]
        if found != alone:
            raise Violation(f"{request.id} gives {found}; alone it gives {alone}")
