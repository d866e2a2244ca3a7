"""Devices as JSON files: one file a device, in `specs/`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from twinfer.core.hookspecs import hookimpl
from twinfer.core.technique import Technique

if TYPE_CHECKING:
    from twinfer.core.hookspecs import Register


class ShippedDevices(Technique):
    name = "shipped"
    summary = "GPUs of data centres and desks, and a generic CPU, from public data sheets"
    path: ClassVar[Path] = Path(__file__).with_name("specs")


@hookimpl
def register_device(register: Register) -> None:
    register(ShippedDevices)
