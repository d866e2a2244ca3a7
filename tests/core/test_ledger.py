"""Block tables of sequences: reservation, hits that leave a token, copy-on-write, publication on commit."""

from __future__ import annotations

import pytest

from twinfer.core.audit import audit_ledger
from twinfer.core.ledger import Ledger
from twinfer.core.params import SamplingParams
from twinfer.core.plan import Copy, Grant
from twinfer.core.policy import KVCache, Limits
from twinfer.core.request import Request, Sequence
from twinfer.plugins.kv_cache.contiguous import Contiguous
from twinfer.plugins.kv_cache.paged import Paged


def make_ledger(num_blocks: int = 16, block_size: int = 4, cache: KVCache | None = None) -> Ledger:
    cache = cache or Paged(Paged.Options(block_size=block_size))
    return Ledger(cache, Limits(num_blocks=num_blocks, max_model_len=64), "model")


def make_sequence(name: str, length: int, start: int = 0, **fields: object) -> Sequence:
    request = Request(id=name, prompt=tuple(range(start, start + length)), params=SamplingParams(), **fields)  # type: ignore[arg-type]
    return Sequence(request, 0, 0, 0, 64)


def admit_and_commit(ledger: Ledger, seq: Sequence) -> None:
    seq.computed = ledger.admit(seq, ledger.hits(seq))
    assert not isinstance(ledger.grow(seq, seq.computed, seq.known), int)
    ledger.commit(seq, seq.computed, seq.known)
    seq.computed = seq.known


def writable(ledger: Ledger, seq: Sequence, start: int, stop: int) -> bool:
    """By definition: there are blocks, nobody else refers to them, and none can be hit."""
    blocks = ledger.tables[seq.id].blocks[start // ledger.block_size : -(-stop // ledger.block_size)]
    free = [ledger.pool.refs[block] == 1 and ledger.pool.node[block] is None for block in blocks]
    if start >= seq.computed and stop <= ledger.tables[seq.id].open:
        assert all(free), "`open` must not promise more"
    return all(free) and stop <= len(ledger.tables[seq.id].blocks) * ledger.block_size


def test_blocks_of_known_lengths() -> None:
    """Lengths 100, 50 and 200 at block size 16: 7 + 4 + 13 = 24 blocks."""
    ledger = make_ledger(block_size=16)
    assert [ledger.blocks_for(n) for n in (100, 50, 200)] == [7, 4, 13]
    assert [ledger.blocks_for(n) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]
    contiguous = make_ledger(cache=Contiguous())
    assert (contiguous.block_size, contiguous.blocks_for(1), contiguous.blocks_for(64)) == (64, 1, 1)


def test_missing_counts_what_is_not_held_yet() -> None:
    ledger = make_ledger()
    seq = make_sequence("a", 9)
    assert ledger.missing(seq, 9) == 3
    ledger.admit(seq)
    ledger.grow(seq, 0, 5)
    assert (ledger.missing(seq, 9), ledger.missing(seq, 8), ledger.missing(seq, 1)) == (1, 0, 0)


@pytest.mark.parametrize("length", range(1, 14))
def test_hits_leave_at_least_one_token(length: int) -> None:
    ledger = make_ledger()
    admit_and_commit(ledger, make_sequence("a", 13))
    hits = ledger.hits(make_sequence("b", length))
    assert hits.length == len(hits.blocks) == (length - 1) // 4
    assert hits.blocks == ledger.tables["a"].blocks[: hits.length]


def test_hits_do_not_change_the_pool_and_need_a_whole_equal_prefix() -> None:
    ledger = make_ledger()
    admit_and_commit(ledger, make_sequence("a", 13))
    before = list(ledger.pool.refs)
    assert not ledger.hits(make_sequence("b", 13, start=1)).length
    other = Request(id="c", prompt=(0, 1, 2, 3, 9, 5, 6, 7, 8, 9, 10, 11, 12), params=SamplingParams())
    assert ledger.hits(Sequence(other, 0, 0, 0, 64)).length == 1
    assert not ledger.hits(make_sequence("d", 13, cache_prefix=False)).length
    assert not ledger.hits(make_sequence("e", 13, cache_salt="s")).length
    assert not ledger.hits(make_sequence("f", 13, adapter="lora")).length
    assert ledger.pool.refs == before


def test_without_sharing_nothing_is_published() -> None:
    ledger = make_ledger(cache=Paged(Paged.Options(block_size=4, prefix_sharing=False)))
    admit_and_commit(ledger, make_sequence("a", 13))
    assert not ledger.pool.index and not ledger.hits(make_sequence("b", 13)).length


def test_growing_grants_only_what_is_lacking_or_says_how_much_is() -> None:
    ledger = make_ledger(num_blocks=3)
    seq = make_sequence("a", 9)
    ledger.admit(seq)
    assert ledger.grow(seq, 0, 5) == ([Grant("a", 0, (0, 1))], [])
    assert ledger.grow(seq, 5, 8) == ([], [])
    assert ledger.grow(seq, 5, 17) == 2
    assert ledger.tables["a"].blocks == [0, 1] and ledger.pool.available == 1


def test_full_blocks_are_published_when_committed_and_not_before() -> None:
    ledger = make_ledger()
    seq = make_sequence("a", 9)
    ledger.admit(seq)
    ledger.grow(seq, 0, 9)
    assert not ledger.pool.index
    ledger.commit(seq, 0, 3)
    assert not ledger.pool.index and ledger.pool.used == 3
    ledger.commit(seq, 3, 9)
    assert len(ledger.pool.index) == 2 and ledger.pool.used == 9
    assert [ledger.pool.fill[b] for b in ledger.tables["a"].blocks] == [4, 4, 1]


@pytest.mark.parametrize("length", range(1, 13))
def test_a_fork_shares_the_prompt_and_copies_before_it_writes(length: int) -> None:
    ledger = make_ledger()
    leader = make_sequence("a", length)
    admit_and_commit(ledger, leader)
    fork = Sequence(leader.request, 1, 1, 0, 64)
    assert ledger.fork(fork, leader) == length - 1
    shared = -(-(length - 1) // 4)
    assert ledger.tables["a/1"].blocks == ledger.tables["a"].blocks[:shared]
    grown = ledger.grow(fork, length - 1, length)
    assert not isinstance(grown, int)
    grants, copies = grown
    index = (length - 1) // 4
    if (length - 1) % 4:
        (copy,) = copies
        assert isinstance(copy, Copy) and not grants
        assert (copy.slot, copy.source) == (index, ledger.tables["a"].blocks[index])
        assert ledger.tables["a/1"].blocks[index] == copy.target != copy.source
        assert ledger.pool.fill[copy.target] == (length - 1) % 4
    else:
        assert not copies and len(grants) == len(grants[0].blocks) == 1
    # After that neither holds a block the other may write.
    assert writable(ledger, fork, length - 1, length)
    assert ledger.tables["a/1"].open == (index + 1) * 4 and ledger.tables["a"].open == 0, "the leader looks again"
    assert set(ledger.tables["a"].blocks[index:]).isdisjoint(ledger.tables["a/1"].blocks)
    for seq in (leader, fork):
        ledger.release(seq, None)
    assert ledger.pool.held == 0 and audit_ledger(ledger, []) == []


def test_a_published_block_is_copied_even_by_its_only_holder() -> None:
    ledger = make_ledger()
    seq = make_sequence("a", 4)
    admit_and_commit(ledger, seq)
    assert not writable(ledger, seq, 3, 4)
    grown = ledger.grow(seq, 3, 4)
    assert not isinstance(grown, int) and grown[1] == [Copy("a", 0, 0, 0, 1)]
    assert ledger.hits(make_sequence("b", 5)).blocks == [0], "the published one stays as it was"


def test_a_copy_that_finds_no_block_changes_nothing() -> None:
    ledger = make_ledger(num_blocks=1)
    seq = make_sequence("a", 4)
    admit_and_commit(ledger, seq)
    assert ledger.grow(seq, 3, 4) == 1
    assert ledger.tables["a"].blocks == [0] and audit_ledger(ledger, [seq]) == []


def test_release_is_idempotent_and_can_wait_for_a_step() -> None:
    ledger = make_ledger()
    seq = make_sequence("a", 9, cache_prefix=False)
    admit_and_commit(ledger, seq)
    ledger.release(seq, 5)
    ledger.release(seq, None)
    ledger.release(seq, 5)
    assert ledger.pool.available == 13
    ledger.pool.step_ended(5)
    assert ledger.pool.available == 16 and audit_ledger(ledger, []) == []
