"""Tokenizers from GGUF files and directories, against transformers reading the same files."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest

from twinfer.core.errors import ModelError, RequestError
from twinfer.core.runtime import tokenizer as tokenizer_module
from twinfer.core.runtime.chat_template import render_chat
from twinfer.core.runtime.gguf_tokenizer import build_tokenizer, metadata_digest, read_metadata
from twinfer.core.runtime.tokenizer import Tokenizer, byte_alphabet, load_tokenizer

TEXTS = [
    "def f(x):\n    return x + 1\n\n\n# a comment, isn't it?",
    "  leading and trailing spaces  ",
    "tabs\t\tand\r\nline ends\n \n",
    "naïve café 漢字 かな 🙂🙃 Ω ½",
    "a_b.c->d[0] == 'x' and \"y\" %s {z!r}",
    "<|im_start|>user\nhello<|im_end|>\n",
    "1234567890 x1y22z 3.14",
    "",
]
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Why is the sky blue? <b>&amp;</b>"},
    {"role": "assistant", "content": "Rayleigh."},
    {"role": "user", "content": "More."},
]


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf: Path) -> Tokenizer:
    return load_tokenizer(smollm2_gguf)


@pytest.fixture(scope="module")
def reference(smollm2_gguf: Path) -> Any:
    """transformers' own conversion of the GGUF (slow: seconds)."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(smollm2_gguf.parent), gguf_file=smollm2_gguf.name)


@pytest.mark.model
def test_smollm2_equals_transformers_conversion(smollm2: Tokenizer, reference: Any) -> None:
    """Same vocabulary, merges, special tokens and ids.

    One difference is known and intended: the file asks for the split rule "smollm", which sets every digit apart
    before anything else; transformers' conversion leaves that out, which shows where blanks precede a digit. It is
    added to the reference here.
    """
    from tokenizers import pre_tokenizers

    backend = reference.backend_tokenizer
    ours, theirs = json.loads(smollm2.backend.to_str()), json.loads(backend.to_str())
    assert ours["model"]["vocab"] == theirs["model"]["vocab"]
    assert ours["model"]["merges"] == theirs["model"]["merges"]
    assert ours["added_tokens"] == theirs["added_tokens"]
    for text in TEXTS:
        if not any(c.isnumeric() for c in text):
            assert smollm2.encode(text) == reference(text)["input_ids"], text
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), backend.pre_tokenizer])
    for text in TEXTS:
        ids = smollm2.encode(text)
        assert ids == reference(text)["input_ids"], text
        assert smollm2.decode(ids) == reference.decode(ids, skip_special_tokens=True)
        assert smollm2.decode(ids, skip_special_tokens=False) == text
    for messages in (MESSAGES, MESSAGES[1:2]):
        rendered = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert smollm2.render_chat(messages) == rendered
        assert smollm2.encode_chat(messages) == reference(rendered, add_special_tokens=False)["input_ids"]


@pytest.mark.model
def test_smollm2_facts(smollm2: Tokenizer) -> None:
    assert smollm2.vocab_size == 49152
    assert smollm2.eos_token_ids == (2,)
    assert smollm2.special_tokens["eos_token"] == "<|im_end|>"
    assert smollm2.encode(" 10  20") == [216, 33, 32, 256, 34, 32]  # every digit alone, blanks together
    assert smollm2.encode("hello")[0] != 1  # this checkpoint adds no BOS


@pytest.mark.model
def test_token_bytes_join_to_decode(smollm2: Tokenizer) -> None:
    for text in TEXTS:
        ids = smollm2.encode(text)
        joined = b"".join(smollm2.token_bytes(i) or b"" for i in ids)
        assert joined.decode() == smollm2.decode(ids)
    assert smollm2.token_bytes(2) == b""
    assert smollm2.token_bytes(10**6) == b""


@pytest.mark.model
def test_gguf_with_an_unknown_split_rule_goes_through_transformers_once(
    smollm2_gguf: Path, smollm2: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The conversion is kept in the cache folder, keyed by the metadata; it equals the direct one but for digits."""
    monkeypatch.setattr(tokenizer_module, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(tokenizer_module, "build_tokenizer", lambda values: None)
    first = load_tokenizer(smollm2_gguf)
    assert len(list((tmp_path / "tokenizers").iterdir())) == 1
    monkeypatch.setattr(tokenizer_module, "_transformers", lambda *a, **k: pytest.fail("converted twice"))
    second = load_tokenizer(smollm2_gguf)
    for text in (t for t in TEXTS if not any(c.isnumeric() for c in t)):
        assert first.encode(text) == second.encode(text) == smollm2.encode(text)
    assert second.eos_token_ids == (2,) and second.chat_template == smollm2.chat_template


def test_directory_equals_transformers(tiny_llama_dir: Path) -> None:
    from transformers import AutoTokenizer

    ours, theirs = load_tokenizer(tiny_llama_dir), AutoTokenizer.from_pretrained(str(tiny_llama_dir))
    assert ours.eos_token_ids == (1,)
    assert ours.encode("Hello, you 42!") == theirs("Hello, you 42!")["input_ids"]
    assert ours.decode(ours.encode("Hello, you 42!")) == "Hello, you 42!"
    assert ours.render_chat(MESSAGES) == theirs.apply_chat_template(
        MESSAGES, tokenize=False, add_generation_prompt=True
    )


def test_directory_details(tiny_llama_dir: Path, tmp_path: Path) -> None:
    """BOS comes from the post-processor; eos ids from generation_config.json; a template file beats the config's."""
    import tokenizers
    from tokenizers import processors

    folder = tmp_path / "m"
    shutil.copytree(tiny_llama_dir, folder)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 1]}))
    (folder / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}")
    found = load_tokenizer(folder)
    assert found.encode("ab")[0] == 0 and found.encode("ab", add_special_tokens=False)[0] != 0
    assert found.eos_token_ids == (1, 7)
    assert found.render_chat([{"role": "user", "content": "hi"}]) == "<s>hi"
    assert found.encode_chat([{"role": "user", "content": "hi"}]).count(0) == 1  # BOS once, not twice


def test_directory_without_a_fast_tokenizer_is_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_module, "cache_dir", lambda: tmp_path / "cache")
    folder = tmp_path / "m"
    folder.mkdir()
    letters = [*byte_alphabet(), "ab", "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({c: i for i, c in enumerate(letters)}))
    (folder / "merges.txt").write_text("#version: 0.2\na b\n")
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    found = load_tokenizer(folder)
    assert found.encode("abc") == [256, letters.index("c")]
    monkeypatch.setattr(tokenizer_module, "_transformers", lambda *a, **k: pytest.fail("converted twice"))
    assert load_tokenizer(folder).encode("abc") == found.encode("abc")


# --- chat templates ---------------------------------------------------------------------------------


def test_chat_template_environment() -> None:
    template = (
        "{%- for m in messages %}\n"
        "    {%- if m.role == 'skip' %}{% continue %}{% endif %}\n"
        "    {% generation %}{{ m.content | tojson }}{% endgeneration %}\n"
        "{%- endfor %}{{ strftime_now('%Y')[:2] }}{{ tools is none }}"
    )
    messages = [{"role": "skip", "content": "no"}, {"role": "user", "content": "é<'\""}]
    assert render_chat(template, messages, {}) == '"é<\'\\""20True'


def test_chat_templates_match_transformers_on_blocks_and_filters() -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    template = (
        "{{ bos_token }}\n{% for m in messages %}\n  {% if loop.first %}\n[{{ m.role }}]\n  {% endif %}\n"
        "{{ m.content | trim }}{{ {'b': [1, 'é'], 'a': m.content} | tojson(indent=2) }}\n{% endfor %}\n"
        "{% if add_generation_prompt %}\n> {% endif %}"
    )
    expected, _ = render_jinja_template(
        conversations=[MESSAGES], chat_template=template, add_generation_prompt=True, bos_token="<s>"
    )
    assert render_chat(template, MESSAGES, {"bos_token": "<s>"}) == expected[0]


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([], "at least one message"),
        ([{"content": "x"}], r"messages\[0\]"),
        (["text"], r"messages\[0\]"),
        ([{"role": "user", "content": "x"}], "only assistants"),
    ],
)
def test_bad_messages_are_request_errors(messages: list[Any], says: str) -> None:
    with pytest.raises(RequestError, match=says):
        render_chat("{{ raise_exception('only assistants') }}", messages, {})


def test_templates_cannot_reach_python() -> None:
    for attack in ("{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ cycler.__init__.__globals__ }}"):
        with pytest.raises(RequestError):
            render_chat(attack, [{"role": "user", "content": "x"}], {})


def test_no_chat_template_is_a_request_error(tiny_llama_dir: Path) -> None:
    found = load_tokenizer(tiny_llama_dir)
    found.chat_template = None
    with pytest.raises(RequestError, match="no chat template"):
        found.render_chat(MESSAGES)


# --- GGUF metadata ----------------------------------------------------------------------------------


def gguf(pairs: dict[str, Any]) -> bytes:
    def text(s: str) -> bytes:
        return struct.pack("<Q", len(s.encode())) + s.encode()

    def value(v: Any) -> bytes:
        if isinstance(v, bool):
            return struct.pack("<I?", 7, v)
        if isinstance(v, int):
            return struct.pack("<II", 4, v)
        if isinstance(v, float):
            return struct.pack("<If", 6, v)
        if isinstance(v, str):
            return struct.pack("<I", 8) + text(v)
        if all(isinstance(i, int) for i in v):
            return struct.pack("<IIQ", 9, 5, len(v)) + struct.pack(f"<{len(v)}i", *v)
        return struct.pack("<IIQ", 9, 8, len(v)) + b"".join(text(i) for i in v)

    return b"GGUF" + struct.pack("<IQQ", 3, 0, len(pairs)) + b"".join(text(k) + value(v) for k, v in pairs.items())


TINY = {
    "general.architecture": "llama",
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": ["a", "b", "ab", "Ġ", "<s>", "</s>", "<think>"],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.token_type": [1, 1, 1, 1, 3, 3, 4],
    "tokenizer.ggml.bos_token_id": 4,
    "tokenizer.ggml.eos_token_id": 5,
    "tokenizer.ggml.add_bos_token": True,
}


def test_bpe_is_built_from_metadata(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(gguf(TINY) + b"\0" * 100)
    found = load_tokenizer(path)
    assert found.encode("ab <think>b</s>") == [4, 2, 3, 6, 1, 5]
    assert found.decode([4, 2, 3, 6, 1, 5]) == "ab <think>b"
    assert found.eos_token_ids == (5,)
    assert found.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert dict(read_metadata(path)) == TINY
    assert build_tokenizer({**TINY, "tokenizer.ggml.pre": "other"}) is None


@pytest.mark.model
def test_digest_is_of_the_metadata_and_not_of_the_weights(smollm2_gguf: Path, tmp_path: Path) -> None:
    path = tmp_path / "copy.gguf"
    data = bytearray(smollm2_gguf.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert metadata_digest(path) == metadata_digest(smollm2_gguf)
    at = data.index(b"You are a helpful")
    data[at] ^= 1
    path.write_bytes(data)
    assert metadata_digest(path) != metadata_digest(smollm2_gguf)


def test_damaged_files_are_model_errors_that_name_the_file(tmp_path: Path) -> None:
    whole = gguf(TINY)
    path = tmp_path / "x.gguf"
    for cut in range(0, len(whole), 7):
        path.write_bytes(whole[:cut])
        with pytest.raises(ModelError, match=r"x\.gguf"):
            load_tokenizer(path)
    for bad in (
        b"PK\3\4" + whole[4:],
        whole[:4] + struct.pack("<I", 9) + whole[8:],
        whole[:24] + b"\xff" * 8 + whole[32:],
        gguf({"general.architecture": "llama"}),
        gguf({**TINY, "tokenizer.ggml.eos_token_id": 99}),
    ):
        path.write_bytes(bad)
        with pytest.raises(ModelError, match=r"x\.gguf"):
            load_tokenizer(path)


def test_missing_and_broken_directories_are_model_errors(tmp_path: Path, tiny_llama_dir: Path) -> None:
    with pytest.raises(ModelError, match="no such file"):
        load_tokenizer(tmp_path / "nowhere")
    folder = tmp_path / "m"
    shutil.copytree(tiny_llama_dir, folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        load_tokenizer(folder)
    (folder / "tokenizer_config.json").write_text("[")
    with pytest.raises(ModelError, match=r"tokenizer_config\.json"):
        load_tokenizer(folder)
