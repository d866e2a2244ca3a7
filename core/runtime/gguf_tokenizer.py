"""The tokenizer inside a GGUF file, straight from its metadata.

Byte-level BPE ("gpt2") with a known split rule is built here in under a second; every other kind goes through
transformers' converter once and is kept in the user's cache folder (`tokenizer.py`).

Invariants
* Only the metadata is read, never a tensor; a damaged file is a `ModelError` that names it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from twinfer.core.gguf_header import read_gguf_header

_CONTROL, _USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type
_VOCABULARY = 2**24  # entries; longer arrays are no vocabulary


def read_metadata(path: Path) -> Mapping[str, Any]:
    """The metadata of a GGUF file with its vocabulary; ModelError when it is damaged."""
    return read_gguf_header(path, kept_array=_VOCABULARY).metadata


def metadata_digest(path: Path) -> str:
    """SHA-256 of everything before the first weight."""
    header = read_gguf_header(path)
    size = min((t.offset for t in header.tensors.values()), default=path.stat().st_size)
    with path.open("rb") as file:
        return hashlib.sha256(file.read(size)).hexdigest()


def _gpt2_split() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm_split() -> pre_tokenizers.PreTokenizer:
    """GPT-2's rule after every digit has been set apart (SmolLM and StarCoder vocabularies)."""
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2_split()])


_SPLITS = {"gpt-2": _gpt2_split, "smollm": _smollm_split}


def build_bpe(values: Mapping[str, Any]) -> Tokenizer | None:
    """The byte-level BPE tokenizer the metadata describe, or None when the split rule is not known here."""
    split = _SPLITS.get(values.get("tokenizer.ggml.pre", ""))
    if values.get("tokenizer.ggml.model") != "gpt2" or split is None:
        return None
    tokens = values["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ")) for pair in values["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = split()
    tokenizer.decoder = decoders.ByteLevel()
    kinds = values.get("tokenizer.ggml.token_type", ())
    tokenizer.add_special_tokens(
        [AddedToken(t, normalized=False, special=True) for t, k in zip(tokens, kinds, strict=False) if k == _CONTROL]
    )
    tokenizer.add_tokens(
        [AddedToken(t, normalized=False) for t, k in zip(tokens, kinds, strict=False) if k == _USER_DEFINED]
    )
    bos = values.get("tokenizer.ggml.bos_token_id")
    if values.get("tokenizer.ggml.add_bos_token") and bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]} $A", special_tokens=[(tokens[bos], bos)]
        )
    return tokenizer
