"""Text streams against a character-level oracle, for any way of cutting tokens into steps."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from twinfer.core.runtime.text import StopMatcher, TextStream
from twinfer.core.runtime.tokenizer import Tokenizer, byte_alphabet, load_tokenizer


def byte_tokenizer() -> Tokenizer:
    """Byte-level: ids 0..255 are bytes, then tokens of several characters, then two special ones."""
    of_byte = {b: c for c, b in byte_alphabet().items()}
    words = [of_byte[b] for b in range(256)] + ["ab", "abc", "bca", "aa", "cab", "Ġb"]
    backend = Backend(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(backend, name="bytes", eos_token_ids=(263,))


def sentencepiece_tokenizer() -> Tokenizer:
    words = ["▁", "a", "b", "c", "▁ab", "▁b", "é", *(f"<0x{b:02X}>" for b in range(256))]
    backend = Backend(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[], byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens(["<s>"])
    return Tokenizer(backend, name="sp")


def wordpiece_tokenizer() -> Tokenizer:
    words = ["[UNK]", "he", "##llo", "world", ",", "##s"]
    backend = Backend(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece(cleanup=False)
    return Tokenizer(backend, name="wp")


BYTES, PIECES, WORDS = byte_tokenizer(), sentencepiece_tokenizer(), wordpiece_tokenizer()


def oracle(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """Read characters one by one; the first that completes a stop string ends the text, the longest stop wins."""
    for end in range(1, len(text) + 1):
        found = [s for s in stops if text[:end].endswith(s)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


def stream(
    tokens: Sequence[int], stops: Sequence[str], steps: Sequence[int], **options: object
) -> tuple[TextStream, list[int], str]:
    """Push tokens in steps of these sizes; returns the stream, the kept ids and the joined deltas."""
    s = TextStream(BYTES, stops, **options)  # type: ignore[arg-type]
    kept: list[int] = []
    shown, at = "", 0
    for size in [*steps, len(tokens)]:
        new, stopped = s.push(tokens[at : at + size])
        kept += new
        at += size
        delta = s.delta()
        shown += delta
        assert s.text.startswith(shown)
        if stopped is not None:
            break
    shown += s.finish()
    assert shown == s.text
    return s, kept, shown


TOKENS = st.lists(st.one_of(st.sampled_from([97, 98, 99, 32, *range(256, 264)]), st.integers(0, 255)), max_size=24)
STOPS = st.lists(st.text(alphabet="abc é", min_size=1, max_size=4), max_size=4)
STEPS = st.lists(st.integers(0, 5), max_size=24)


@given(TOKENS, STOPS, STEPS)
def test_edge_29_text_is_what_a_reader_of_characters_sees(
    tokens: list[int], stops: list[str], steps: list[int]
) -> None:
    expected, stop = oracle(BYTES.decode(tokens), stops)
    s, kept, shown = stream(tokens, stops, steps)
    assert (shown, s.stopped) == (expected, stop)
    if stop is None:
        assert kept == tokens
        return
    # The ids end with the token that completed the stop string: one fewer and it is not there.
    assert oracle(BYTES.decode(kept), stops)[1] == stop
    assert oracle(BYTES.decode(kept[:-1]), stops)[1] is None or BYTES.decode(kept[:-1]).endswith("\ufffd")
    assert BYTES.decode(kept).startswith(shown)


@given(TOKENS, STOPS, STEPS, STEPS)
def test_edge_29_multi_token_steps_give_the_same_ids_and_text(
    tokens: list[int], stops: list[str], one: list[int], other: list[int]
) -> None:
    a, kept_a, shown_a = stream(tokens, stops, one)
    b, kept_b, shown_b = stream(tokens, stops, other)
    assert (kept_a, shown_a, a.stopped) == (kept_b, shown_b, b.stopped)


@given(st.text(max_size=40), STEPS)
def test_no_broken_characters_whatever_the_cuts(text: str, steps: list[int]) -> None:
    tokens = list(text.encode())
    s = TextStream(BYTES)
    at = 0
    for size in [*steps, len(tokens)]:
        s.push(tokens[at : at + size])
        at += size
        assert text.startswith(s.text)
        assert "\ufffd" not in s.delta() or "\ufffd" in text
    s.finish()
    assert s.text == text


@pytest.mark.parametrize("raw", [b"\xf0\x9f\x99", b"ab\xff\xfec", b"\xe2\x82", b"\x80\x80\x80", b"\xc3(\xa0\xa1"])
def test_invalid_utf8_becomes_what_decode_writes(raw: bytes) -> None:
    s = TextStream(BYTES)
    for byte in raw:
        s.push([byte])
    s.finish()
    assert s.text == BYTES.decode(list(raw)) == raw.decode("utf-8", "replace")


def test_special_tokens_add_no_text_and_do_not_break_characters() -> None:
    e = "é".encode()
    s = TextStream(BYTES)
    assert s.push([e[0], 262, e[1]]) == ((e[0], 262, e[1]), None)
    assert s.delta() == "é"


def test_stop_characters_are_held_back_and_released() -> None:
    s = TextStream(BYTES, ["abc"])
    s.push([98, 97])
    assert (s.delta(), s.text) == ("b", "ba")
    s.push([98])
    assert s.delta() == ""
    s.push([98])
    assert s.delta() == "abb"
    assert s.push([257, 97, 97]) == ((257,), "abc")
    assert (s.finish(), s.text, s.ended) == ("", "babb", True)
    assert s.push([97]) == ((), "abc")


def test_first_completed_stop_wins_over_list_order_and_token_boundaries() -> None:
    for stops in (["bca", "b"], ["b", "bca"]):
        s = TextStream(BYTES, stops)
        assert s.push([97, 258]) == ((97, 258), "b")
        assert s.text == "a"
    s = TextStream(BYTES, ["c", "abc"])
    assert s.push([32, 257])[1] == "abc"
    assert s.text == " "


def test_min_tokens_cannot_complete_a_stop_string_but_may_begin_one() -> None:
    s = TextStream(BYTES, ["ab"], min_tokens=3)
    assert s.push([97, 98, 97]) == ((97, 98, 97), None)
    assert s.push([98, 99]) == ((98,), "ab")
    assert s.finish() == "ab"
    s = TextStream(BYTES, ["ab"], min_tokens=2)
    s.push([97, 98, 99])
    assert s.finish() == "abc"


def test_stop_ids_end_the_sample_without_text() -> None:
    s = TextStream(BYTES, stop_ids=frozenset({99}), min_tokens=1)
    assert s.push([99, 97]) == ((99, 97), None)
    assert s.push([99, 98]) == ((99,), None)
    assert (s.ended, s.finish()) == (True, "ca")


@given(STOPS, st.text(alphabet="abc é", max_size=30))
def test_matcher_pending_is_the_longest_suffix_that_starts_a_stop(stops: list[str], text: str) -> None:
    matcher = StopMatcher(stops)
    for end in range(1, len(text) + 1):
        found = matcher.feed(text[end - 1])
        whole = [s for s in stops if text[:end].endswith(s)]
        assert found == (max(whole, key=len) if whole else None)
        parts = [s[:n] for s in stops for n in range(len(s) + 1)]
        assert matcher.pending == max((len(p) for p in parts if text[:end].endswith(p)), default=0)


@given(st.lists(st.integers(0, 6), max_size=20), st.text(alphabet="aé漢🙂", max_size=6))
def test_sentencepiece_streams_equal_decode(ids: list[int], text: str) -> None:
    tokens = [*ids, *(7 + b for b in text.encode()), 1, 263]
    s = TextStream(PIECES)
    shown = ""
    for token in tokens:
        s.push([token])
        shown += s.delta()
    assert shown + s.finish() == PIECES.decode(tokens)


@given(st.lists(st.integers(1, 5), max_size=12))
def test_tokenizers_without_bytes_of_their_own_stream_too(ids: list[int]) -> None:
    s = TextStream(WORDS)
    shown = ""
    for token in ids:
        s.push([token])
        shown += s.delta()
    assert WORDS.token_bytes(1) is None
    assert shown + s.finish() == WORDS.decode(ids)


def test_cost_per_token_does_not_grow() -> None:
    """20,000 tokens: the parts are merged now and then, and what was shown is never shown again."""
    s = TextStream(BYTES, ["never"])
    shown = 0
    for i in range(20_000):
        s.push([97 + i % 3])
        shown += len(s.delta())
    assert shown == 20_000
    assert len(s.text) == 20_000


def test_literal_tokens(tmp_path: Path) -> None:
    backend = Backend(models.WordLevel({"<unk>": 0, "x": 1, "▁": 2}, unk_token="<unk>"))
    backend.decoder = decoders.Fuse()
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({}))
    s = TextStream(load_tokenizer(tmp_path))
    s.push([1, 2, 1, 99])
    assert s.finish() == "x▁x"
