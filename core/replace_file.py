"""Files that a user names to be written: what may be replaced, and how.

Invariants
* Nothing but a file of the same kind is replaced, and no folder is made that was not there.
* A file is replaced in one move; a failure leaves the old one and nothing beside it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from twinfer.core.errors import ConfigError


def check_replaceable(option: str, path: Path, kind: str, begins: Callable[[str], bool]) -> None:
    """Raise ConfigError unless `path` may be written: its folder is there, and it is new, empty, or a `kind` ("a plan").

    begins: whether a file with these first 200 characters is one.
    """
    if not path.parent.is_dir():
        raise ConfigError(
            option, str(path), f"there is no folder {str(path.parent)!r}", "make it, or give another file"
        )
    if not (path.exists() or path.is_symlink()):
        return
    if not path.is_file():
        raise ConfigError(option, str(path), "is no regular file", "give another file")
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            begin = file.read(200)
    except OSError as error:
        raise ConfigError(option, str(path), f"cannot be read ({error.strerror})", "give another file") from None
    if begin and not begins(begin):
        raise ConfigError(
            option, str(path), f"is not {kind}, and would be replaced", "give another file, or move it away"
        )


def replace_file(path: Path, text: str) -> None:
    """Write `text` to `path`. Raises OSError."""
    part = path.with_name(path.name + ".part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink()
        raise


__all__ = ["check_replaceable", "replace_file"]
