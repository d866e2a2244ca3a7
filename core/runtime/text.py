"""Token ids to text while they arrive: whole characters only, and stop strings that end the text.

The rule for stopping (one rule for text, ids and log probabilities)
* Text is judged character by character: the first character that completes a stop string ends the sample.
  If it completes several, the longest wins. So the text depends on the characters alone, not on how they were
  cut into tokens, nor on how many tokens a step brought.
* `text` ends just before the stop string. The ids (and log probabilities, one an id) end with the token that
  brought the completing character: those are the tokens that were generated and paid for. Later tokens of the
  same step are dropped. Hence the text of the ids always starts with `text`.
* The first `min_tokens` tokens never complete a stop string.
* An id that ends the sample (end-of-sequence, `stop_token_ids`) is kept as an id and adds no text.

Invariants
* What `delta` has handed out never changes: characters that may belong to a stop string are held back, and an
  unfinished UTF-8 sequence waits for its last byte (or becomes U+FFFD at the end, as `decode` writes it).
* Cost per token is constant: nothing re-reads the whole text.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from twinfer.core.runtime.tokenizer import Tokenizer


class Detokenizer:
    """Text of tokens fed one at a time; `push` returns the characters that token made certain.

    The text continues a prompt, so the space that SentencePiece writes before a first word stays.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._window: list[int] = []  # only for tokenizers whose tokens are not plain bytes
        self._stable = 0  # tokens of the window whose text has been handed out

    def push(self, token: int) -> str:
        piece = self._tokenizer.token_bytes(token)
        if piece is None:
            return self._push_window(token)
        return self._utf8.decode(piece)

    def flush(self) -> str:
        """What is left of an unfinished character."""
        if self._window:
            return self._decode(self._window)[len(self._decode(self._window[: self._stable])) :]
        return self._utf8.decode(b"", final=True)

    def _push_window(self, token: int) -> str:
        """Decode a short window with and without the new tokens; the difference is their text.

        One token of context is kept, because decoders of this kind join a token to the one before.
        """
        self._window.append(token)
        before = self._decode(self._window[: self._stable])
        after = self._decode(self._window)
        if after.endswith("\ufffd") and len(self._window) - self._stable < 4:
            return ""
        self._window = self._window[self._stable :] if self._stable else self._window
        self._stable = len(self._window)
        return after[len(before) :]

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids)


class TextStream:
    """Text of one sample as its tokens arrive, up to the first stop string.

    stop: stop strings.  min_tokens: tokens that cannot complete one.  stop_ids: ids that end the sample and
    add no text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        stop_ids: frozenset[int] = frozenset(),
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._matcher = StopMatcher(stop)
        self._min_tokens = min_tokens
        self._stop_ids = stop_ids
        self._parts: list[str] = []  # certain: can no longer become part of a stop string
        self._ready = 0  # parts already returned by `delta`
        self._held = ""  # certain as characters, but perhaps the start of a stop string
        self.num_tokens = 0
        self.stopped: str | None = None
        self.ended = False

    def push(self, tokens: Sequence[int]) -> tuple[tuple[int, ...], str | None]:
        """Add tokens; returns those that are kept and the stop string that ended the text, if one did.

        After the end nothing is kept: calling it again returns `((), stop)`.
        """
        kept = 0
        for token in tokens:
            if self.ended:
                break
            kept += 1
            self.num_tokens += 1
            if token in self._stop_ids and self.num_tokens > self._min_tokens:
                self._end()
            else:
                self._add(self._detokenizer.push(token))
        return tuple(tokens[:kept]), self.stopped

    def finish(self) -> str:
        """End the sample (its last token has come) and return the text that `delta` has not returned."""
        if not self.ended:
            self._add(self._detokenizer.flush())
            if not self.ended:
                self._end()
        return self.delta()

    def delta(self) -> str:
        """Text that has become certain since the last call."""
        new = "".join(self._parts[self._ready :])
        if self._ready and len(self._parts) > 64:
            self._parts = ["".join(self._parts)]
            self._ready = 1
        else:
            self._ready = len(self._parts)
        return new

    @property
    def text(self) -> str:
        """All text so far, held-back characters included, the stop string not."""
        return "".join(self._parts) + self._held

    def _end(self) -> None:
        self.ended = True
        self._release(len(self._held))

    def _release(self, count: int) -> None:
        if count:
            self._parts.append(self._held[:count])
            self._held = self._held[count:]

    def _add(self, text: str) -> None:
        if not text:
            return
        if not self._matcher.active:
            self._parts.append(text)
            return
        may_stop = self.num_tokens > self._min_tokens
        for char in text:
            self._held += char
            stop = self._matcher.feed(char)
            if stop is not None and may_stop:
                self.stopped = stop
                self._held = self._held[: len(self._held) - len(stop)]
                self._end()
                return
        # Everything but the longest suffix that may still grow into a stop string is certain.
        self._release(len(self._held) - self._matcher.pending)


class StopMatcher:
    """Finds the first character that completes a stop string (Aho-Corasick over the few stops)."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.active = bool(stops)
        self._next: list[dict[str, int]] = [{}]
        self._fail = [0]
        self._depth = [0]
        self._match: list[str | None] = [None]
        self._state = 0
        for stop in stops:
            state = 0
            for char in stop:
                if char not in self._next[state]:
                    self._next.append({})
                    self._fail.append(0)
                    self._depth.append(self._depth[state] + 1)
                    self._match.append(None)
                    self._next[state][char] = len(self._next) - 1
                state = self._next[state][char]
            self._match[state] = stop
        self._link()

    def _link(self) -> None:
        queue = list(self._next[0].values())
        for state in queue:  # grows while it is walked: breadth first
            for char, child in self._next[state].items():
                fallback = self._fail[state]
                while fallback and char not in self._next[fallback]:
                    fallback = self._fail[fallback]
                self._fail[child] = self._next[fallback].get(char, 0)
                # A state's own stop is longer than any that ends in its suffixes.
                if self._match[child] is None:
                    self._match[child] = self._match[self._fail[child]]
                queue.append(child)

    def feed(self, char: str) -> str | None:
        """The longest stop string that `char` completes, or None."""
        while self._state and char not in self._next[self._state]:
            self._state = self._fail[self._state]
        self._state = self._next[self._state].get(char, 0)
        return self._match[self._state]

    @property
    def pending(self) -> int:
        """Length of the longest suffix of what was fed that starts a stop string."""
        return self._depth[self._state]
