"""Makes the helper modules of this folder importable."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
for folder in (str(HERE.parent / "core"), str(HERE)):
    if folder not in sys.path:
        sys.path.insert(0, folder)


@pytest.fixture(scope="session")
def packed_products() -> None:
    """Skips where there are no packed matrix products: passes are recorded on these alone."""
    from twinfer.kernels import gemm, native

    reason = native.why_not() or gemm.why_not()
    if reason:
        pytest.skip(f"no pass is recorded here: {reason}")
