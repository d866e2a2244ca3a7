"""The model hub: which files of a repository are cached here, and fetching one.

Invariants
* What is cached is used without a network; without a network nothing waits or retries.
* Whatever the hub client raises becomes a ModelError that says what else would work.
"""

from __future__ import annotations

from pathlib import Path

from twinfer.core.errors import ModelError

WANTED = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]
"""Files of a repository that a model needs: weights, configuration, tokenizer."""


def is_hub_id(text: str) -> bool:
    """Whether `text` reads as owner/name."""
    owner, slash, name = text.partition("/")
    plain = owner + name
    return bool(
        slash and owner and name and "/" not in name and not text.startswith((".", "~"))
        and all(ch.isalnum() or ch in "-_." for ch in plain) and not name.endswith((".json", ".gguf"))
    )  # fmt: skip


def cached_file(repo: str, filename: str) -> Path | None:
    """`filename` of `repo` in the hub's cache on this machine, None when it is not there."""
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(repo, filename)
    except Exception:  # no hub client, or a name it refuses: simply nothing cached
        return None
    return Path(found) if isinstance(found, str) else None


def fetch_file(repo: str, filename: str) -> Path:
    """`filename` of `repo`, from the cache or the network; ModelError when neither has it."""
    cached = cached_file(repo, filename)
    if cached is not None:
        return cached
    try:
        _check_reachable()
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(repo, filename, etag_timeout=5))
    except Exception as error:  # the hub client raises many kinds, network ones among them
        raise ModelError(f"{repo}: {filename} cannot be fetched from the hub ({_first_line(error)})") from None


def fetch_repo(repo: str) -> Path:
    """A folder with all files of `repo` that a model needs; ModelError when they cannot be fetched."""
    try:
        _check_reachable()
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(repo, allow_patterns=WANTED))
    except Exception as error:  # as above
        raise ModelError(f"{repo} cannot be fetched from the hub ({_first_line(error)})") from None


def _check_reachable() -> None:
    """Raises OSError at once without a network: the hub client would retry for half a minute."""
    import socket
    from urllib.parse import urlsplit
    from urllib.request import getproxies

    from huggingface_hub.constants import ENDPOINT

    if getproxies():
        return  # the proxy resolves names, not this machine
    address = urlsplit(ENDPOINT)
    socket.create_connection((address.hostname or "", address.port or 443), timeout=5).close()


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:160]}" if text else type(error).__name__
