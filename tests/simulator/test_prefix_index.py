"""The tree of prompts against what it stands for: a list of prompts, read through by brute force."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from twinfer.core.request import Request
from twinfer.simulator.prefix_index import PrefixIndex

tokens = st.lists(st.integers(0, 1), max_size=12)


def ask(prompt: list[int], salt: str = "") -> Request:
    return Request(id="r", prompt=prompt, cache_salt=salt)


def common(a: list[int], b: list[int], block: int) -> int:
    """Tokens of whole blocks that two prompts begin with alike."""
    same = 0
    while same + block <= min(len(a), len(b)) and a[same : same + block] == b[same : same + block]:
        same += block
    return same


@given(st.integers(1, 4), st.lists(st.tuples(st.integers(0, 2), tokens), max_size=12), tokens)
@settings(max_examples=80)
def test_depths_are_the_longest_common_prefixes(
    block: int, noted: list[tuple[int, list[int]]], asked: list[int]
) -> None:
    index = PrefixIndex(block)
    for holder, prompt in noted:
        index.note(holder, ask(prompt), room=1000)
        assert index.audit() == []
    found = index.depths(ask(asked))
    for holder in range(3):
        longest = max((common(prompt, asked, block) for h, prompt in noted if h == holder), default=0)
        assert found.get(holder, 0) == longest


@given(st.integers(1, 3), st.integers(1, 5), st.lists(st.tuples(st.integers(0, 2), tokens), min_size=1, max_size=25))
@settings(max_examples=80)
def test_room_is_kept_and_the_latest_prompt_is_remembered(
    block: int, room: int, noted: list[tuple[int, list[int]]]
) -> None:
    index = PrefixIndex(block)
    for holder, prompt in noted:
        before = index.held(holder)
        new = index.note(holder, ask(prompt), room)
        assert index.audit() == [] and index.held(holder) == min(room, index.held(holder)) <= before + new
        assert index.depths(ask(prompt)).get(holder, 0) == min(len(prompt) // block, room) * block
    for holder in range(3):
        index.forget(holder)
        assert index.held(holder) == 0 and index.audit() == []
    assert index.depths(ask(noted[-1][1])) == {}


def test_roots_and_tails_are_told_apart() -> None:
    index = PrefixIndex(2)
    index.note("a", ask([1, 2, 3, 4]), room=9)
    assert index.depths(ask([1, 2, 3, 4], salt="x")) == {}
    assert index.note("a", ask([1, 2, 3]), room=9, tail=(4, 5, 6)) == 1, "two of three blocks were there"
    assert index.depths(ask([1, 2, 3, 4, 5, 6, 7])) == {"a": 6}
