"""`twinfer perplexity`."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

TEXT = "Forty-two is the answer to 6 x 9. " * 6


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def test_perplexity_as_json_and_as_text(cli: Callable, tiny_llama_dir: Path, text: Path) -> None:
    found = cli("perplexity", tiny_llama_dir, "--text", text, "--chunk", "50", "--json").json
    assert found["num_tokens"] == len(TEXT) - found["num_chunks"] == 199
    assert found["perplexity"] == pytest.approx(math.exp(found["nats_per_token"]))
    assert found["complete"] is True and found["standard_error"] > 0
    ran = cli("perplexity", tiny_llama_dir, "--text", text, "--max-tokens", "50")
    assert ran.code == 0 and "tokens scored: 49 in 1 chunks" in ran.out and "perplexity: " in ran.out


def test_a_conversion_is_told(cli: Callable, tiny_llama_dir: Path, text: Path) -> None:
    ran = cli("perplexity", tiny_llama_dir, "--text", text, "--attention", "mqa")
    assert "attention: mqa from 2 KV heads, mean of each 2 (lossy" in ran.out and "B after" in ran.out
    found = cli("perplexity", tiny_llama_dir, "--text", text, "--attention", "mha", "--json").json
    assert "(exact)" in found["reasons"]["attention"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--text", "nowhere.txt"), ("--text", "nowhere.txt")),
        (("--chunk", "1"), ("--chunk", "at least 2")),
        (("--chunk", "9999"), ("--chunk=9999", "use at most 512")),
        (("--max-tokens", "1"), ("--max-tokens", "at least 2")),
        (("--attention", "nope"), ("--attention", "nope")),
        (("--attention", "mqa:heads=2"), ("mqa", "heads")),
        (("--dtype", "fp17"), ("--dtype", "fp17")),
    ],
)
def test_mistakes(
    cli: Callable, tiny_llama_dir: Path, text: Path, args: tuple[str, ...], words: tuple[str, ...]
) -> None:
    given = args if args[0] == "--text" else ("--text", text, *args)
    cli("perplexity", tiny_llama_dir, *given).is_error(*words)


def test_text_must_be_text(cli: Callable, tiny_llama_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "binary"
    path.write_bytes(b"ab\xff\xfe")
    cli("perplexity", tiny_llama_dir, "--text", path).is_error("--text", "UTF-8")
    cli("perplexity", tiny_llama_dir).is_error("--text")


def test_a_stopped_run_says_so(
    cli: Callable, tiny_llama_dir: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from twinfer.cli import show
    from twinfer.core.runtime import perplexity

    monkeypatch.setattr(perplexity, "LOGIT_BYTES", 4 * 128 * 50)
    asked = iter([False, True])
    monkeypatch.setattr(show.Interrupt, "__call__", lambda self: next(asked))
    ran = cli("perplexity", tiny_llama_dir, "--text", text, "--chunk", "50", "--json")
    assert ran.code == show.STOPPED and '"complete": false' in ran.out and "in part" in ran.err
