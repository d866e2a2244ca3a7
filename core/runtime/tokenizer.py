"""Text to token ids and back, with the model's own rules: special tokens, BOS, end-of-sequence, chat template.

Sources: a Hugging Face directory (`tokenizer.json`, else whatever transformers can convert) or a GGUF file.
What transformers has to convert (seconds to a minute) is kept under the user's cache folder, keyed by content.

Invariants
* `encode` adds BOS exactly where the checkpoint's own tokenizer does; a rendered chat is encoded without it,
  because templates write it themselves.
* `token_bytes` and `decode` agree: joined bytes of tokens are the UTF-8 of their text.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from twinfer.core.cache_folder import cache_dir
from twinfer.core.errors import ModelError, RequestError
from twinfer.core.runtime.chat_template import render_chat
from twinfer.core.runtime.gguf_tokenizer import build_tokenizer, metadata_digest, read_metadata

_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class Tokenizer:
    """A `tokenizers.Tokenizer` with the facts around it.

    eos_token_ids: ids that end a text, in ascending order.  special_tokens: "bos_token" -> its text, ...
    chat_template: Jinja source or None.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        name: str,
        eos_token_ids: Sequence[int] = (),
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | None = None,
    ) -> None:
        backend.no_padding()
        backend.no_truncation()
        self.backend = backend
        self.name = name
        self.eos_token_ids = tuple(sorted(set(eos_token_ids)))
        self.special_tokens = dict(special_tokens or {})
        self.chat_template = chat_template
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self._added = backend.get_added_tokens_decoder()
        self._spelling = _spelling(backend)
        self._bytes: dict[int, bytes] = {}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; with `add_special_tokens`, BOS where the checkpoint adds one."""
        return list(self.backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return str(self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def token_bytes(self, token: int) -> bytes | None:
        """UTF-8 bytes `token` adds to a text: none for a special or unknown one.

        None when tokens of this vocabulary have no bytes of their own (WordPiece and the like).
        """
        if self._spelling is None:
            return None
        found = self._bytes.get(token)
        if found is None:
            found = self._bytes[token] = self._spell(token)
        return found

    def _spell(self, token: int) -> bytes:
        added = self._added.get(token)
        if added is not None:
            return b"" if added.special else added.content.encode()
        text = self.backend.id_to_token(token)
        if text is None:
            return b""
        if self._spelling == "bytes":
            alphabet = byte_alphabet()
            try:
                return bytes(alphabet[char] for char in text)
            except KeyError:
                return text.encode()
        if self._spelling == "fallback" and len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
            return bytes([int(text[3:5], 16)])
        return (text if self._spelling == "literal" else text.replace("\u2581", " ")).encode()

    def render_chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """The prompt text of a conversation; RequestError without a template or for messages it refuses."""
        if self.chat_template is None:
            raise RequestError(f"{self.name} has no chat template; use generate() with a plain prompt")
        return render_chat(self.chat_template, messages, self.special_tokens, add_generation_prompt)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        return self.encode(self.render_chat(messages), add_special_tokens=False)


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a Hugging Face directory or a GGUF file; ModelError when there is none to be read."""
    path = Path(path)
    if path.is_dir():
        return _from_directory(path)
    if path.is_file():
        return _from_gguf(path)
    raise ModelError(f"{path}: no such file or directory; give a Hugging Face directory or a GGUF file")


def _from_directory(path: Path, converted: bool = False) -> Tokenizer:
    config = _read_json(path / "tokenizer_config.json")
    file = path / "tokenizer.json"
    if not file.is_file():
        if converted:
            raise ModelError(f"{path}: transformers wrote no tokenizer.json; give a model with a fast tokenizer")
        return _converted(path, _digest_of(path), lambda: _transformers(str(path)))
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the package raises plain Exception
        raise ModelError(f"{file}: not a readable tokenizer ({error}); download the file again") from error
    special = {k: _content(config[k]) for k in _SPECIAL if config.get(k)}
    ids = [backend.token_to_id(special["eos_token"])] if "eos_token" in special else []
    for name in ("generation_config.json", "config.json"):
        found = _read_json(path / name).get("eos_token_id")
        if found is not None:
            ids += found if isinstance(found, list) else [found]
            break
    template_file = path / "chat_template.jinja"
    template = template_file.read_text("utf-8") if template_file.is_file() else _template(config.get("chat_template"))
    return Tokenizer(
        backend,
        name=path.name,
        eos_token_ids=[i for i in ids if i is not None],
        special_tokens=special,
        chat_template=template,
    )


def _from_gguf(path: Path) -> Tokenizer:
    values = read_metadata(path)
    tokens = values.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise ModelError(f"{path}: holds no tokenizer; give a GGUF file of a language model, with its vocabulary")
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    ids = {
        name: values[f"tokenizer.ggml.{key}_token_id"]
        for key, name in names.items()
        if f"tokenizer.ggml.{key}_token_id" in values
    }
    eos = [values[k] for k in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id") if k in values]
    if any(not 0 <= i < len(tokens) for i in [*ids.values(), *eos]):
        raise ModelError(f"{path}: a special token id lies outside the vocabulary of {len(tokens)}; download it again")
    try:
        backend = build_tokenizer(values)
    except Exception as error:  # the package raises plain Exception for merges it cannot use
        raise ModelError(f"{path}: damaged vocabulary ({error!r}); download the file again") from error
    if backend is None:
        key = f"gguf-{metadata_digest(path)}"
        backend = _converted(path, key, lambda: _transformers(str(path.parent), gguf_file=path.name)).backend
    return Tokenizer(
        backend,
        name=path.stem,
        eos_token_ids=eos,
        special_tokens={name: tokens[i] for name, i in ids.items()},
        chat_template=values.get("tokenizer.chat_template"),
    )


def _transformers(folder: str, **options: str) -> Any:
    from transformers import AutoTokenizer  # slow to import, and seldom needed

    return AutoTokenizer.from_pretrained(folder, **options)


def _converted(source: Path, key: str, convert: Any) -> Tokenizer:
    """The tokenizer `convert` makes, saved under the user's cache folder and read from there the next time."""
    folder = cache_dir() / "tokenizers" / key
    if not (folder / "tokenizer.json").is_file():
        try:
            made = convert()
        except Exception as error:
            raise ModelError(
                f"{source}: transformers cannot convert its tokenizer ({type(error).__name__}: {error}); "
                "give a directory with a tokenizer.json"
            ) from error
        partial = folder.with_name(f"{folder.name}.{os.getpid()}")
        made.save_pretrained(partial)
        try:
            partial.rename(folder)
        except OSError:  # another process was faster
            import shutil

            shutil.rmtree(partial)
    return _from_directory(folder, converted=True)


def _digest_of(folder: Path) -> str:
    digest = hashlib.sha256()
    for name in ("tokenizer.model", "vocab.json", "merges.txt", "vocab.txt", "spiece.model", "tokenizer_config.json"):
        if (folder / name).is_file():
            digest.update(name.encode() + (folder / name).read_bytes())
    return f"dir-{digest.hexdigest()}"


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not readable JSON ({error}); download the file again") from error
    if not isinstance(found, dict):
        raise ModelError(f"{path}: holds no JSON object; download the file again")
    return found


def _content(token: Any) -> str:
    return str(token["content"]) if isinstance(token, Mapping) else str(token)


def _template(found: Any) -> str | None:
    if isinstance(found, list):  # several named templates; "default" is the plain one
        named = {item["name"]: item["template"] for item in found}
        return named.get("default")
    return found


def _spelling(backend: tokenizers.Tokenizer) -> str | None:
    """How tokens spell their bytes, from the decoder; None when they have none of their own.

    "bytes": byte-level alphabet; "fallback", "plain": SentencePiece with and without byte tokens; "literal": as is.
    """
    decoder = backend.decoder
    if decoder is None:
        return None
    state = json.loads(decoder.__getstate__())
    parts = state["decoders"] if state["type"] == "Sequence" else [state]
    kinds = [part["type"] for part in parts]
    if kinds == ["ByteLevel"]:
        return "bytes"
    replaces = any(
        p["type"] == "Replace" and p["content"] == " " and p["pattern"] == {"String": "\u2581"} for p in parts
    )
    if "ByteFallback" in kinds and replaces and set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
        return "fallback"
    if kinds == ["Fuse"]:
        return "literal"
    if kinds == ["Metaspace"] and parts[0]["replacement"] == "\u2581":
        return "plain"
    return None


_alphabet: dict[str, int] = {}


def byte_alphabet() -> dict[str, int]:
    """Character -> byte of GPT-2's byte-level alphabet: printable bytes stand for themselves, others from U+0100 on."""
    if not _alphabet:
        extra = 0x100
        for byte in range(256):
            if 0x21 <= byte <= 0x7E or 0xA1 <= byte <= 0xAC or 0xAE <= byte <= 0xFF:
                _alphabet[chr(byte)] = byte
            else:
                _alphabet[chr(extra)] = byte
                extra += 1
    return _alphabet
