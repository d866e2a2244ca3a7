"""The tokenizer inside a GGUF file, straight from its metadata.

Byte-level BPE ("gpt2") with a known split rule is built here in under a second; every other kind goes through
transformers' converter once and is kept in the user's cache folder (`tokenizer.py`).

Layout of the metadata (GGUF v2 and v3, little endian): "GGUF", version u32, tensors u64, pairs u64, then per pair
key, type u32, value; strings are a u64 length and bytes; arrays are type u32, length u64 and items.

Invariants
* Only the metadata is read, never a tensor; a damaged file is a `ModelError` that names it.
"""

from __future__ import annotations

import hashlib
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from twinfer.core.errors import ModelError

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_CONTROL, _USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type


@dataclass(frozen=True, slots=True)
class GGUFMetadata:
    """Key-value pairs of a GGUF file; `digest` is the SHA-256 of the bytes that hold them."""

    values: Mapping[str, Any]
    digest: str


def read_gguf_metadata(path: Path) -> GGUFMetadata:
    """All pairs of the file; ModelError if it is not a readable GGUF."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(data, path)
    except (OSError, ValueError) as error:  # ValueError: mmap of an empty file
        raise ModelError(f"{path}: cannot be read ({error}); give a readable GGUF file") from error
    except (struct.error, IndexError, KeyError, UnicodeDecodeError, OverflowError, MemoryError) as error:
        raise ModelError(f"{path}: damaged GGUF metadata ({error}); download the file again") from error


def _parse(data: mmap.mmap, path: Path) -> GGUFMetadata:
    if data[:4] != b"GGUF":
        raise ModelError(f"{path}: not a GGUF file (it begins with {data[:4]!r}); give a .gguf file")
    version, _, num_pairs = struct.unpack_from("<IQQ", data, 4)
    if version not in (2, 3):
        raise ModelError(f"{path}: GGUF version {version} is not supported; convert the file to version 3")
    at = 24

    def scalar(kind: int) -> Any:
        nonlocal at
        form = _SCALARS[kind]
        (value,) = struct.unpack_from(form, data, at)
        at += struct.calcsize(form)
        return value

    def string() -> str:
        nonlocal at
        (length,) = struct.unpack_from("<Q", data, at)
        at += 8
        if length > len(data) - at:
            raise IndexError(f"a string of {length} bytes at {at}")
        raw = data[at : at + length]
        at += length
        return raw.decode("utf-8")

    def value(kind: int) -> Any:
        nonlocal at
        if kind == _STRING:
            return string()
        if kind != _ARRAY:
            return scalar(kind)
        item, length = scalar(4), scalar(10)
        if length > len(data) - at:
            raise IndexError(f"an array of {length} items at {at}")
        if item in _SCALARS:
            form = f"<{length}{_SCALARS[item][1]}"
            values = list(struct.unpack_from(form, data, at))
            at += struct.calcsize(form)
            return values
        return [value(item) for _ in range(length)]

    pairs: dict[str, Any] = {}
    for _ in range(num_pairs):
        key = string()
        pairs[key] = value(scalar(4))
    return GGUFMetadata(pairs, hashlib.sha256(data[:at]).hexdigest())


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
