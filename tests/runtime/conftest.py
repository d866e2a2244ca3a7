"""Makes helper modules importable: `logits_oracle`, `prompts_of_human_eval` of this folder, `pairwise` of tests/core."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
for folder in (str(HERE.parent / "core"), str(HERE)):
    if folder not in sys.path:
        sys.path.insert(0, folder)
