"""What a calibration holds for: this machine, told without importing torch.

Invariants
* Equal keys mean the same thing here and in the fingerprint that the measurement took.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any


def fingerprint() -> dict[str, Any]:
    """CPU, number of cores and torch version of this machine."""
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = ""
    return {"cpu": cpu_name(), "cores": os.cpu_count(), "torch": torch}


def differences(of: Mapping[str, Any]) -> str:
    """How this machine differs from the one `of` was taken on, in words; empty when it does not."""
    here = fingerprint()
    return ", ".join(f"{key} {of[key]} -> {value}" for key, value in here.items() if key in of and of[key] != value)


def cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def physical_memory() -> int:
    """Bytes of RAM, 0 where the system does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 0
