"""Tokenizers built from GGUF metadata: SentencePiece BPE against its definition, split rules against tiktoken's words."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from twinfer.core.runtime.gguf_tokenizer import build_tokenizer

NORMAL, UNKNOWN, CONTROL, USER, BYTE = 1, 2, 3, 4, 6
BYTES = [f"<0x{b:02X}>" for b in range(256)]


def vocabulary(seed: int, prefix: bool | None = None) -> dict[str, Any]:
    """Control and byte tokens, runs of newlines and spaces, letters and random pieces of pieces, worst score last."""
    rng = random.Random(seed)
    pieces = ["\u2581", *"abcd", "é"]
    while len(pieces) < 60:
        piece = rng.choice(pieces) + rng.choice(pieces)
        if piece not in pieces and len(piece) < 7:
            pieces.append(piece)
    order = pieces[6:] + pieces[:6]
    head = [("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL), *((b, BYTE) for b in BYTES)]
    given = [("\n", USER), ("\n\n", USER), ("  ", USER), ("   ", USER), ("<b>", USER)]
    tokens = [*head, *given, *((p, NORMAL) for p in order)]
    values: dict[str, Any] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [t for t, _ in tokens],
        "tokenizer.ggml.token_type": [k for _, k in tokens],
        "tokenizer.ggml.scores": [0.0] * 259 + [-1000.0] * 5 + [-float(i) for i in range(len(order))],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return values if prefix is None else values | {"tokenizer.ggml.add_space_prefix": prefix}


def by_definition(values: dict[str, Any], text: str) -> list[int]:
    """User-defined and control pieces first, longest first; then the best neighbours are joined, the leftmost first."""
    tokens: Sequence[str] = values["tokenizer.ggml.tokens"]
    kinds, scores = values["tokenizer.ggml.token_type"], values["tokenizer.ggml.scores"]
    marked = sorted(
        (t for t, k in zip(tokens, kinds, strict=True) if k in (UNKNOWN, CONTROL, USER)), key=lambda t: -len(t)
    )
    normal = {t: i for i, (t, k) in enumerate(zip(tokens, kinds, strict=True)) if k == NORMAL}
    ids: list[int] = []
    plain = ""

    def flush() -> None:
        if not plain:
            return
        prefix = "\u2581" if values.get("tokenizer.ggml.add_space_prefix", True) else ""
        parts = list(prefix + plain.replace(" ", "\u2581"))
        while True:
            joined = [
                (scores[normal[a + b]], -i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in normal
            ]
            if not joined:
                break
            at = -max(joined)[1]
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        for part in parts:
            ids.extend([normal[part]] if part in normal else [tokens.index(BYTES[b]) for b in part.encode()])

    at = 0
    while at < len(text):
        found = next((m for m in marked if text.startswith(m, at)), None)
        if found is None:
            plain += text[at]
            at += 1
            continue
        flush()
        plain = ""
        ids.append(tokens.index(found))
        at += len(found)
    flush()
    return ids


@pytest.mark.parametrize("prefix", [None, True, False])
@pytest.mark.parametrize("seed", range(4))
def test_sentencepiece_equals_its_definition(seed: int, prefix: bool | None) -> None:
    values = vocabulary(seed, prefix)
    tokenizer = build_tokenizer(values)
    assert tokenizer is not None
    rng = random.Random(seed)
    for _ in range(150):
        text = "".join(
            rng.choice(["a", "b", "c", "d", "é", " ", " ", "\n", "<b>", "</s>", "x", "☃"])
            for _ in range(rng.randrange(30))
        )
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert ids == by_definition(values, text), text
        if "</s>" not in text and "<b>" not in text and "\n" not in text and "  " not in text:
            assert tokenizer.decode(ids) == text


def test_bos_and_eos_as_the_file_says() -> None:
    values = vocabulary(0)
    for add_bos, add_eos, expected in ((None, None, [1]), (True, True, [1, 2]), (False, True, [2]), (False, False, [])):
        asked = {"tokenizer.ggml.add_bos_token": add_bos, "tokenizer.ggml.add_eos_token": add_eos}
        tokenizer = build_tokenizer(values | {k: v for k, v in asked.items() if v is not None})
        assert tokenizer is not None
        assert tokenizer.encode("").ids == expected


def test_sentencepiece_itself_agrees(tmp_path: Path) -> None:
    """A trained model of the package, stored the way GGUF files store it."""
    spm = pytest.importorskip("sentencepiece", reason="needs the package sentencepiece as oracle")
    rng = random.Random(3)
    words = ["".join(rng.choice("abcdefgh") for _ in range(rng.randrange(1, 7))) for _ in range(80)]
    text = tmp_path / "text.txt"
    text.write_text("\n".join(" ".join(rng.choice(words) for _ in range(9)) for _ in range(300)))
    spm.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(tmp_path / "m"), model_type="bpe", vocab_size=400, byte_fallback=True,
        normalization_rule_name="identity", remove_extra_whitespaces=False, minloglevel=2,
    )  # fmt: skip
    model = spm.SentencePieceProcessor(model_file=str(tmp_path / "m.model"))
    size = model.get_piece_size()

    def kind(i: int) -> int:
        return (
            UNKNOWN if model.is_unknown(i) else CONTROL if model.is_control(i) else BYTE if model.is_byte(i) else NORMAL
        )

    tokenizer = build_tokenizer(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": [model.id_to_piece(i) for i in range(size)],
            "tokenizer.ggml.scores": [model.get_score(i) for i in range(size)],
            "tokenizer.ggml.token_type": [kind(i) for i in range(size)],
            "tokenizer.ggml.unknown_token_id": model.unk_id(),
        }
    )
    assert tokenizer is not None
    for _ in range(300):
        sample = "".join(rng.choice([*words[:20], " ", " ", "  ", "é", "\n", "z"]) for _ in range(rng.randrange(12)))
        assert tokenizer.encode(sample).ids == model.encode(sample), sample


@pytest.mark.parametrize(
    ("rule", "text", "words"),
    [
        ("qwen2", "I've 123 é\n\n   do!!\r\n(x)  ", "I|'ve| |1|2|3| é|\n\n|  | do|!!\r\n|(x|)|  "),
        ("llama-bpe", "I've 1234 é\n\n   do!!\r\n(x)  ", "I|'ve| |123|4| é|\n\n|  | do|!!\r\n|(x|)|  "),
    ],
)
def test_split_rules(rule: str, text: str, words: str) -> None:
    """Spaces before digits stand alone, line ends stick to punctuation, digits come one by one or in threes."""
    tokenizer = build_tokenizer(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": rule,
            "tokenizer.ggml.tokens": ["a"],
            "tokenizer.ggml.merges": [],
        }
    )
    assert tokenizer is not None and tokenizer.pre_tokenizer is not None
    assert [text[a:b] for _, (a, b) in tokenizer.pre_tokenizer.pre_tokenize_str(text)] == words.split("|")


def test_other_kinds_are_left_to_the_converter() -> None:
    assert build_tokenizer({"tokenizer.ggml.model": "bert"}) is None
    assert build_tokenizer({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "other"}) is None
    assert build_tokenizer({"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": []}) is None
