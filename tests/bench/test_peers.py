"""The comparison with peers, on a tiny model: what is asked, what is counted, and an engine that breaks."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def peers(root: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("peers_of_bench", root / "bench" / "peers.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_workloads_are_as_described(peers: ModuleType) -> None:
    assert [(len(ids), n) for ids, n in peers.requests_of("b8", 49152, 0)] == [(128, 64)] * 8
    mixed, again = peers.requests_of("mixed", 49152, 1), peers.requests_of("mixed", 49152, 2)
    lengths = [(len(ids), n) for ids, n in mixed]
    assert len(lengths) == 200 and lengths == [(len(ids), n) for ids, n in again]
    assert min(lengths)[0] >= 16 and max(lengths)[0] <= 512 and {n for _, n in lengths} <= set(range(8, 129))
    assert all(a[0][:16] != b[0][:16] for a, b in zip(mixed, again, strict=True)), "a prefix cache would find these"
    assert mixed == peers.requests_of("mixed", 49152, 1)


def test_ratios_say_when_they_are_undecided(peers: ModuleType) -> None:
    fast, slow = peers.Cell([30.0, 20.0, 40.0]), peers.Cell([10.0, 12.0, 11.0])
    assert peers.ratio(fast, slow) == "2.73"
    assert peers.ratio(fast, peers.Cell([25.0, 15.0, 25.0])) == "1.20~"
    assert peers.ratio(fast, peers.Cell()) == "-"


def test_one_run_from_end_to_end(root: Path, tiny_llama_dir: Path, tmp_path: Path) -> None:
    """twinfer beside a peer whose Python has no such engine: that one is said to have failed, the other measured."""
    out = tmp_path / "rates.json"
    command = [
        sys.executable, "bench/peers.py", "--model", str(tiny_llama_dir), "--hf", str(tiny_llama_dir), "--workloads", "b2",
        "--rounds", "2", "--threads", "1", "--transformers-dtype", "float32", "--vllm-python", sys.executable,
        "--json", str(out),
    ]  # fmt: skip
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    for name in ("twinfer float32", "transformers float32"):
        assert len(found["cells"][name]["b2"]["rates"]) == 2 and min(found["cells"][name]["b2"]["rates"]) > 0
    assert (
        list(found["failures"]) == ["vLLM bfloat16"] and "No module named 'vllm'" in found["failures"]["vLLM bfloat16"]
    )
    assert "twinfer float32 / transformers float32" in done.stdout
