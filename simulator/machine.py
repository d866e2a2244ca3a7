"""What a calibration holds for: this machine, told without importing torch.

Invariants
* Equal keys mean the same thing here and in the fingerprint that the measurement took.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from twinfer.core.host import cpu_name, packed_products


def fingerprint() -> dict[str, Any]:
    """CPU, number of cores, torch version and kind of packed products of this machine."""
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = ""
    return {"cpu": cpu_name(), "cores": os.cpu_count(), "torch": torch, "products": packed_products()}


def differences(of: Mapping[str, Any]) -> str:
    """How this machine differs from the one `of` was taken on, in words; empty when it does not."""
    here = fingerprint()
    if of:  # older ones do not say which products were timed
        of = {"products": "not noted", **of}
    return ", ".join(f"{key} {of[key]} -> {value}" for key, value in here.items() if key in of and of[key] != value)


def physical_memory() -> int:
    """Bytes of RAM, 0 where the system does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 0
