"""What this machine is, told without torch and without building anything.

Invariants
* The measurement and the simulator ask the same functions, so equal answers mean the same machine on both sides.
"""

from __future__ import annotations

import platform
import shutil
from collections.abc import Mapping
from functools import cache
from itertools import takewhile

COMPILERS = ("c++", "g++", "clang++")
"""What builds the native CPU kernels: the first of them that is there."""

_NEEDED = {
    "AVX-512 VNNI": {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"},
    "AVX2": {"avx2", "fma", "f16c"},
}
"""Flags of the CPU that packed products are built on, best first; the compiler's names for them are in lanes.h."""


def cpu_name() -> str:
    return _cpu().get("model name") or platform.processor() or platform.machine()


def packed_products() -> str:
    """What `kernels.gemm.instructions` has to say here, "none" where there can be no packed products.

    Told by the CPU's flags and the presence of a compiler: a build that fails is not noticed.
    """
    if not any(map(shutil.which, COMPILERS)):
        return "none"
    flags = set(_cpu().get("flags", "").split())
    return next((name for name, needed in _NEEDED.items() if needed <= flags), "none")


@cache
def _cpu() -> Mapping[str, str]:
    """What Linux says of the first CPU; empty elsewhere."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            first = [line.partition(":") for line in takewhile(str.strip, file)]
    except OSError:
        return {}
    return {name.strip(): value.strip() for name, _, value in first}
