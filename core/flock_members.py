"""The sequences of a flock (`flock.py`): what each step changes of them, told by one clock instead of row by row.

    position of a member = its `computed` when it was last looked at (`since`) + clock - since
    it takes a block before the step of every clock that is its `phase`, modulo the block size

The clock counts steps that are done; plans may be one step ahead of it. So blocks are counted, not named, until a member is
looked at: they are taken from the pool and lie aside. A member is looked at when it ends. One that publishes its blocks where
somebody may look for them (it is `watched`) is also looked at whenever it fills one; others publish in a `Chain`, and whoever
looks below that is preceded by `expose`.

Invariants
* Blocks held, used and cached are at any clock those of single steps; in a step, members and rows publish and end in the
  order that the rows would have had.
* Every member has its blocks for all steps up to that of clock `supplied`.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Any

from twinfer.core.events import Decoded
from twinfer.core.idle import LRU
from twinfer.core.request import Sequence

if TYPE_CHECKING:
    from twinfer.core.blocks import Chain
    from twinfer.core.core import Core
    from twinfer.core.ledger import Ledger, Table

Key = tuple[tuple[int, ...], int]
Order = tuple[int, Key]
"""Where a row stands in its step: 0 and the key of who ran before, 1 and anything for who was admitted with it."""
Entry = tuple[Order, Any, Any]
"""Of what is to be done in a step: a member, or a row and its result."""


class Member:
    """A sequence in the flock: `computed` and `output` are those of clock `since`; the last one told of, of `told`."""

    __slots__ = ("ends", "key", "phase", "seq", "since", "table", "told", "watched")

    def __init__(self, seq: Sequence, key: Key, clock: int, table: Table) -> None:
        self.seq = seq
        self.key = key
        self.table = table
        self.phase = 0
        self.watched = False
        self.since = self.told = clock
        self.ends = clock + seq.limit - seq.known


class Members:
    """All of them. token: what the executor samples, always."""

    def __init__(self, core: Core, token: int) -> None:
        self.core = core
        self.ledger = core.ledger
        self.token = token
        self.all: dict[str, Member] = {}
        self.clock = 0
        self.supplied = -1
        self.todo: list[Entry] = []  # what is still to be done of the step that is being done, a heap
        self.turn: Order | None = None  # whose turn it is in it
        self._from = 0  # sum of computed - since
        self._since = 0  # sum of since
        self._ends: list[tuple[int, Key, Member]] = []
        self._due: list[tuple[int, Key, Member]] = []  # when a watched member fills a block
        self._size = core.ledger.block_size
        self._shares = core.ledger.cache.shares_prefixes
        self._paged = _is_paged(core.ledger)
        self._phases: list[dict[str, Member]] = [{} for _ in range(self._size if self._paged else 1)]
        core.ledger.chained = isinstance(core.ledger.pool.idle, LRU)
        core.ledger.pool.on_unfold = self._expose

    @staticmethod
    def serves(ledger: Ledger, longest: int) -> bool:
        """Whether blocks are taken one by one as a sequence grows, or all at once when it is admitted."""
        return _is_paged(ledger) or ledger.blocks_for(1) == ledger.blocks_for(longest)

    # --- counts ---------------------------------------------------------------------------------

    @property
    def unseen(self) -> int:
        """Committed tokens of members that the pool does not know of yet."""
        return len(self.all) * self.clock - self._since

    @property
    def first_end(self) -> int:
        """The clock at which the next member ends."""
        return self._ends[0][0]

    def feeding(self, clock: int) -> tuple[int, int]:
        """Members that have a row in the step after `clock`, which may be one ahead; their KV tokens before it."""
        count, keys = len(self.all), self._from + len(self.all) * clock
        if self._ends[0][0] <= clock:
            for member in self.all.values():
                if member.ends <= clock:
                    count -= 1
                    keys -= member.seq.computed + clock - member.since
        return count, keys

    def published(self, member: Member) -> int:
        """Leading blocks that `member` has published, as of now."""
        if member.watched or member.table.chain is None:
            return member.table.published
        return (member.seq.computed + self.clock - member.since) // self._size

    # --- who comes and goes ---------------------------------------------------------------------

    def takes(self, seq: Sequence, ahead: int) -> bool:
        """Whether `seq`, that decodes and has rows in `ahead` outstanding steps, has just the blocks that it needs."""
        table, position = self.ledger.tables[seq.id], seq.computed + ahead
        held = len(table.blocks) * self._size
        return not self._paged or (table.open == held and position <= held < position + self._size)

    def join(self, seq: Sequence, key: Key) -> None:
        """Its rows in outstanding steps count as those of a member."""
        member = Member(seq, key, self.clock, self.ledger.tables[seq.id])
        if not self.all:
            self.supplied = -1
        self.all[seq.id] = member
        self._from += seq.computed - self.clock
        self._since += self.clock
        if seq.inflight:
            seq.inflight = 0
            seq.awaiting.clear()
            seq.last_step = None
        heappush(self._ends, (member.ends, key, member))
        if self._paged:
            member.phase = (member.since - seq.computed) % self._size
            self._phases[member.phase][seq.id] = member
        self._look_out(member)

    def _look_out(self, member: Member) -> None:
        """Watch `member`, unless nobody can find what it publishes."""
        member.watched = self._shares and member.seq.request.cache_prefix and member.table.chain is None
        if member.watched:
            self._wait(member)

    def _wait(self, member: Member) -> None:
        full = member.since + self._size - member.seq.computed % self._size
        if full < member.ends:
            heappush(self._due, (full, member.key, member))

    def _leave(self, member: Member) -> None:
        del self.all[member.seq.id]
        if self._paged:
            del self._phases[member.phase][member.seq.id]
        self._from -= member.seq.computed - member.since
        self._since -= member.since

    def tell(self) -> None:
        """Bring all up to the clock and tell of all tokens so far."""
        for member in self.all.values():
            self.settle(member)
            self.tell_of(member)

    def tell_of(self, member: Member) -> None:
        """Tell of the tokens that a settled member has had since it was told of last."""
        count = self.clock - member.told
        if count:
            self.core.tell(Decoded(member.seq.request.id, member.seq.index, (self.token,) * count))
            member.told = self.clock

    def disband(self) -> list[Member]:
        """All of them, settled and told of; they are members no more."""
        self.tell()
        assert not self.ledger.pool.aside
        members = list(self.all.values())
        for member in members:
            self._leave(member)
        self._due, self._ends = [], []
        return members

    # --- blocks ---------------------------------------------------------------------------------

    def takers(self, clock: int) -> dict[str, Member]:
        """Members that take a block before the step after `clock`, if they do not end before."""
        return self._phases[clock % len(self._phases)] if self._paged else _NOBODY

    def need(self, clock: int) -> int:
        """Blocks that must be taken before the step after `clock`."""
        if self.supplied >= clock:
            return 0
        takers = self.takers(clock)
        if takers and self._ends[0][0] <= clock:
            return sum([member.ends > clock for member in takers.values()])
        return len(takers)

    def supply(self, clock: int) -> None:
        """Take the blocks for the step after `clock`, when those of all steps before have been; there are enough."""
        if self.supplied < clock:
            if need := self.need(clock):
                self.ledger.pool.set_aside(need)
            self.supplied = clock

    def supply_at_once(self, first: int, stop: int) -> list[int]:
        """As `supply` of each clock from `first` to `stop` (not included); for each block, after how many of them."""
        taken: list[int] = []
        steps = stop - first
        if not self._paged or steps <= 0:
            return taken
        phases, cycle = self._phases, len(self._phases)
        if len(self.all) < cycle:
            for member in self.all.values():
                taken += range((member.phase - first) % cycle, steps, cycle)
        else:
            for at in range(min(steps, cycle)):
                taken += [*range(at, steps, cycle)] * len(phases[(first + at) % cycle])
        if taken:
            self.ledger.pool.set_aside(len(taken))
        self.supplied = stop - 1
        return taken

    def affordable(self, clock: int, most: int) -> int:
        """Of `most` steps from that after `clock` on those for which there are blocks; the first has them."""
        room = self.ledger.pool.available
        if not self._paged or len(self.all) * (most // self._size + 1) <= room:
            return most
        for step in range(1, most):
            room -= len(self.takers(clock + step))
            if room < 0:
                return step
        return most

    # --- looking at members ---------------------------------------------------------------------

    def is_due(self, clock: int) -> bool:
        """Whether a member must be looked at when `clock` steps are done; none was due before."""
        return self._ends[0][0] == clock or (bool(self._due) and self._due[0][0] == clock)

    def any_watched(self, stop: int) -> bool:
        """Whether a member fills a block before `stop` that somebody may look for."""
        return bool(self._due) and self._due[0][0] < stop

    def go_on(self, clock: int, rows: list[Entry]) -> None:
        """`clock` steps are done: begin `todo`, which holds `rows` and members that are due."""
        self.clock = clock
        for heap in (self._due, self._ends):
            while heap and heap[0][0] == clock:
                _, key, member = heappop(heap)
                rows.append(((0, key), member, None))
        heapify(rows)
        self.todo = rows

    def go_to(self, clock: int) -> list[Member]:
        """`clock` steps are done, the last without rows: look at who is due; those that have ended."""
        if not self.is_due(clock):
            self.clock = clock
            return []
        self.go_on(clock, [])
        ended = []
        while self.todo:
            self.turn, member, _ = heappop(self.todo)
            if self.has_ended(member):
                ended.append(member)
        self.turn = None
        return ended

    def has_ended(self, member: Member) -> bool:
        """Look at a member that is due; whether it is one no more."""
        self.settle(member)
        if member.ends == self.clock:
            self._leave(member)
            return True
        self._look_out(member)
        return False

    def settle(self, member: Member, clock: int | None = None) -> None:
        """Bring `member` up to the clock, or to an earlier one."""
        clock = self.clock if clock is None else clock
        count, seq, size = clock - member.since, member.seq, self._size
        computed = seq.computed + count
        if self._paged:
            ahead = min(self.supplied, member.ends - 1) - clock
            entries = (computed + ahead) // size + 1 if ahead >= 0 else -(-computed // size)
            more = entries - len(member.table.blocks)
            if more > 0:
                self.ledger.take_aside(member.table, more)
        if not count:
            return
        seq.output += (self.token,) * count
        if member.watched:
            self.ledger.commit(seq, seq.computed, computed)
        else:
            self.ledger.fill_up(member.table, seq.computed, computed)
        seq.computed = computed
        member.since = clock
        self._since += count

    def _expose(self, chain: Chain) -> None:
        """Somebody looks for blocks where a member has its own: from now on each is published when it is full."""
        member = self.all.get(chain.seq.id)
        if member is None or member.watched or member.table.chain is not chain:
            return
        later = self.turn is not None and (0, member.key) > self.turn  # its token of this step is still to come
        self.settle(member, self.clock - later)
        member.watched = True
        full = member.since + self._size - member.seq.computed % self._size
        if not later:
            self._wait(member)
        elif full == self.clock and member.ends != full:
            heappush(self.todo, ((0, member.key), member, None))
        elif member.ends != self.clock:
            self._wait(member)


_NOBODY: dict[str, Member] = {}


def _is_paged(ledger: Ledger) -> bool:
    """Whether each block is taken when the one before is full."""
    size, blocks_for = ledger.block_size, ledger.blocks_for
    return blocks_for(size) == 1 and blocks_for(size + 1) == 2 and blocks_for(9 * size + 1) == 10


__all__ = ["Entry", "Key", "Member", "Members", "Order"]
