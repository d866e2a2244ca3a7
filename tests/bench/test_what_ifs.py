"""The what-ifs: every one has its page, and bounds of machines are those of their numbers."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def what_ifs(root: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("what_ifs_of_bench", root / "bench" / "what_ifs.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    spec.loader.exec_module(module)  # it looks for its siblings
    sys.path[:] = before
    return module


def test_every_what_if_has_a_page_that_names_its_command_and_is_in_the_index(what_ifs: ModuleType, root: Path) -> None:
    pages = root / "docs" / "what-ifs"
    index = (pages / "README.md").read_text()
    for name in what_ifs.TABLES:
        text = (pages / f"{name}.md").read_text()
        assert f"python bench/what_ifs.py --only {name}`" in text
        assert "**Break-even" in text and re.search(r"\bloses?\b", text)
    for page in pages.glob("*.md"):
        assert page.name == "README.md" or f"({page.name})" in index


def test_one_users_bound_is_bytes_over_bandwidth(what_ifs: ModuleType) -> None:
    machines = sys.modules["what_if_accelerators"]
    by_hand = {  # parameters x bytes / (devices x B/s), or 2 FLOPs a parameter over the peak where that is longer
        ("sn40l", "llama-3.1-8b"): 8.03e9 * 2 / (16 * 1.6e12), ("groq-lpu", "llama-3.1-70b"): 70.6e9 / 80e12,
        ("wse-3", "llama-3.1-8b"): 2 * 8.03e9 / 15.625e15,
    }  # fmt: skip
    for (device, model), seconds in by_hand.items():
        service = next(s for s in machines.PUBLISHED if (s.device, s.model) == (device, model))
        assert machines.bound(service) == pytest.approx(1 / seconds, rel=2e-3)
    groq = next(s for s in machines.PUBLISHED if s.device == "groq-lpu" and s.model == "llama-3.1-70b")
    assert machines.num_devices(groq) == 307
