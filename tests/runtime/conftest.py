"""Makes the helper modules of this folder importable: `logits_oracle` and `prompts_of_human_eval`."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = str(Path(__file__).resolve().parent)
if HERE not in sys.path:
    sys.path.insert(0, HERE)
