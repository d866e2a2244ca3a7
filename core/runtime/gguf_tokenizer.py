"""The tokenizer inside a GGUF file, straight from its metadata.

Byte-level BPE ("gpt2") with a known split rule and SentencePiece BPE ("llama") are built here in seconds; every other
kind goes through transformers' converter once and is kept in the user's cache folder (`tokenizer.py`).

Invariants
* Only the metadata is read, never a tensor; a damaged file is a `ModelError` that names it.
* Control tokens are found in a text and are special; user-defined ones are found in it and are text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from twinfer.core.gguf_header import read_gguf_header

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6  # values of tokenizer.ggml.token_type
_VOCABULARY = 2**24  # entries; longer arrays are no vocabulary
_SPACE = "\u2581"  # how SentencePiece spells a space


def read_metadata(path: Path) -> Mapping[str, Any]:
    """The metadata of a GGUF file with its vocabulary; ModelError when it is damaged."""
    return read_gguf_header(path, kept_array=_VOCABULARY).metadata


def metadata_digest(path: Path) -> str:
    """SHA-256 of everything before the first weight."""
    header = read_gguf_header(path)
    size = min((t.offset for t in header.tensors.values()), default=path.stat().st_size)
    with path.open("rb") as file:
        return hashlib.sha256(file.read(size)).hexdigest()


def build_tokenizer(values: Mapping[str, Any]) -> Tokenizer | None:
    """The tokenizer that the metadata describe, or None when its kind is not known here."""
    kind = values.get("tokenizer.ggml.model")
    if kind == "llama" and isinstance(values.get("tokenizer.ggml.scores"), list):
        return _sentencepiece(values)
    split = _SPLITS.get(values.get("tokenizer.ggml.pre", ""))
    return _byte_level(values, split) if kind == "gpt2" and split is not None else None


# --- byte-level BPE -------------------------------------------------------------------------------

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _gpt2_split() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm_split() -> pre_tokenizers.PreTokenizer:
    """GPT-2's rule after every digit has been set apart (SmolLM and StarCoder vocabularies)."""
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2_split()])


def _pattern_split(numbers: str) -> Callable[[], pre_tokenizers.PreTokenizer]:
    """Words, `numbers`, punctuation and spaces (cl100k's rule, used by Llama 3 and Qwen)."""

    def make() -> pre_tokenizers.PreTokenizer:
        pattern = Regex(f"{_WORDS}|{numbers}{_REST}")
        return pre_tokenizers.Sequence([
            pre_tokenizers.Split(pattern, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ])  # fmt: skip

    return make


_LLAMA3_NAMES = ("llama3", "llama-v3", "llama-bpe")
_SPLITS: Mapping[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": _gpt2_split,
    "smollm": _smollm_split,
    "qwen2": _pattern_split(r"\p{N}"),
    **dict.fromkeys(_LLAMA3_NAMES, _pattern_split(r"\p{N}{1,3}")),
}


def _byte_level(values: Mapping[str, Any], split: Callable[[], pre_tokenizers.PreTokenizer]) -> Tokenizer:
    tokens, rule = values["tokenizer.ggml.tokens"], values["tokenizer.ggml.pre"]
    merges = [tuple(pair.split(" ")) for pair in values["tokenizer.ggml.merges"]]
    # Llama 3 takes a word that is a token as it is, even where its merges lead elsewhere
    whole_words = rule in _LLAMA3_NAMES
    tokenizer = Tokenizer(
        models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges, ignore_merges=whole_words)
    )
    if rule == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = split()
    tokenizer.decoder = decoders.ByteLevel()
    return _finished(tokenizer, values, add_bos=rule in _LLAMA3_NAMES)


# --- SentencePiece BPE ----------------------------------------------------------------------------


def _sentencepiece(values: Mapping[str, Any]) -> Tokenizer:
    """BPE whose merges follow from the scores of the pieces; bytes stand for what no piece spells."""
    tokens: Sequence[str] = values["tokenizer.ggml.tokens"]
    scores: Sequence[float] = values["tokenizer.ggml.scores"]
    kinds: Sequence[int] = values["tokenizer.ggml.token_type"]
    prefix = bool(values.get("tokenizer.ggml.add_space_prefix", True))
    unknown = values.get("tokenizer.ggml.unknown_token_id")
    tokenizer = Tokenizer(
        models.BPE(
            vocab={t: i for i, t in enumerate(tokens)}, merges=_merges(tokens, scores, kinds),
            unk_token=tokens[unknown] if unknown is not None else None, fuse_unk=True, byte_fallback=_BYTE in kinds,
        )
    )  # fmt: skip
    spaces = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefix else spaces
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return _finished(tokenizer, values, add_bos=True)


def _merges(tokens: Sequence[str], scores: Sequence[float], kinds: Sequence[int]) -> list[tuple[str, str]]:
    """Every way to make a piece of two others, best score first.

    SentencePiece joins the neighbours whose piece has the best score; as ranked merges that is the same.
    """
    pieces = {t: i for i, (t, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind in (_NORMAL, _UNUSED)}
    found: list[tuple[float, int, int, str, str]] = []
    for piece, i in pieces.items():
        for at in range(1, len(piece)):
            left = pieces.get(piece[:at])
            if left is not None and piece[at:] in pieces:
                found.append((-scores[i], i, left, piece[:at], piece[at:]))
    found.sort()
    return [(left, right) for _, _, _, left, right in found]


# --- both -----------------------------------------------------------------------------------------


def _finished(tokenizer: Tokenizer, values: Mapping[str, Any], add_bos: bool) -> Tokenizer:
    """With added tokens, and BOS and EOS where the file asks for them. add_bos: when it does not say."""
    tokens, kinds = values["tokenizer.ggml.tokens"], values.get("tokenizer.ggml.token_type", ())
    special = [t for t, kind in zip(tokens, kinds, strict=False) if kind in (_CONTROL, _UNKNOWN)]
    given = [t for t, kind in zip(tokens, kinds, strict=False) if kind == _USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in special])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in given])
    around = {}
    for key, default in (("bos", add_bos), ("eos", False)):
        token = values.get(f"tokenizer.ggml.{key}_token_id")
        if values.get(f"tokenizer.ggml.add_{key}_token", default) and token is not None:
            around[key] = token
    if around:
        text = " ".join(
            tokens[around[k]] if k in around else "$A" for k in ("bos", "text", "eos") if k in (*around, "text")
        )
        tokenizer.post_processor = processors.TemplateProcessing(
            single=text, special_tokens=[(tokens[i], i) for i in sorted(set(around.values()))]
        )
    return tokenizer
