"""A link between devices, or between a device and its host, as numbers; everything comes from JSON files.

Invariants
* Bandwidth is of one direction and of one device's port: a link that is sold by the sum of both directions is halved.
* Nothing about a link is written in code: a new one is a JSON file, shipped, in a plugin or the user's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from twinfer.core.data_file import NumbersOfAFile, read_numbers
from twinfer.core.errors import ConfigError

if TYPE_CHECKING:
    from twinfer.core.registry import Registry


class LinkSpec(NumbersOfAFile):
    """One kind of link.

    bandwidth: B/s, one direction.  latency: s of an empty message, None where nobody publishes it.
    efficiency: share of `bandwidth` that large messages reach, None where it was not measured.
    """

    name: str
    title: str
    bandwidth: float = Field(gt=0, le=1e24)
    latency: float | None = Field(default=None, ge=0, le=60)
    efficiency: float | None = Field(default=None, gt=0, le=1)
    source: str
    date: str
    notes: str = ""


def link_files(registry: Registry | None = None) -> Mapping[str, Path]:
    """Link files by name (the file's stem): in the folder that a device plugin names as `links`; the first one wins."""
    if registry is None:
        from twinfer.core.registry import default_registry

        registry = default_registry()
    found: dict[str, Path] = {}
    for item in registry.all("device"):
        folder = getattr(item.cls, "links", None)
        for path in sorted(Path(folder).glob("*.json")) if folder else ():
            found.setdefault(path.stem, path)
    return found


def load_link(name_or_path: str | Path, registry: Registry | None = None, option: str = "link") -> LinkSpec:
    """A link by name or path of a JSON file. ConfigError naming `option` and close matches for an unknown one."""
    text = str(name_or_path).strip()
    files = link_files(registry)
    if text.lower() in files:
        return read_link(files[text.lower()])
    path = Path(text).expanduser()
    if path.is_file():
        return read_link(path)
    close = get_close_matches(text.lower(), files, n=2)
    hint = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
    raise ConfigError(option, text, "no such link", f"{hint}known: {', '.join(files)}; or give a JSON file")


def load_link_if_known(name: str, registry: Registry | None = None) -> LinkSpec | None:
    """The link of a name or path; None for an empty or unknown one."""
    known = link_files(registry).get(name.lower()) or Path(name).expanduser()
    return read_link(known) if name and known.is_file() else None


@cache
def read_link(path: Path) -> LinkSpec:
    """The link in a JSON file; ConfigError naming the file and the first field that is wrong."""
    return read_numbers(path, LinkSpec, "link", "link", {"bandwidth": (1e5, "bytes per second, not GB/s")})


__all__ = ["LinkSpec", "link_files", "load_link", "load_link_if_known", "read_link"]
