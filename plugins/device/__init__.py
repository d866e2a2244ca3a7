"""Devices and links as JSON files: one file each, in `specs/` and `links/`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from twinfer.core.hookspecs import hookimpl
from twinfer.core.technique import Technique

if TYPE_CHECKING:
    from twinfer.core.hookspecs import Register


class ShippedDevices(Technique):
    name = "shipped"
    summary = "GPUs of data centres and desks, other accelerators, links, and a generic CPU, from public data sheets"
    path: ClassVar[Path] = Path(__file__).with_name("specs")
    links: ClassVar[Path] = Path(__file__).with_name("links")


@hookimpl
def register_device(register: Register) -> None:
    register(ShippedDevices)
