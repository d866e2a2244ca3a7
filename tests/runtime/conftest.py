"""Makes the helper modules of this folder importable."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
for folder in (str(HERE.parent / "core"), str(HERE)):
    if folder not in sys.path:
        sys.path.insert(0, folder)
