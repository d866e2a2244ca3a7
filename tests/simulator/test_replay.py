"""The twin against a real server: 300 requests served by vLLM, replayed with that card's kernel times."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_replay_of_a_real_run_is_close(root: Path, shared_dir: Path) -> None:
    """Means within 5 %, 95th percentiles within 10 %, nothing fitted to the run."""
    folder = shared_dir / "data" / "vllm_replay" / "rtxpro6000_llama31_8b"
    done = subprocess.run(
        [sys.executable, str(root / "bench" / "replay.py"), str(folder), "--json"],
        capture_output=True, text=True, check=True, timeout=300,
    )  # fmt: skip
    found = json.loads(done.stdout)
    assert found["requests"] == 300
    errors = {(row["metric"], row["statistic"]): row["error"] for row in found["table"]}
    assert all(abs(errors[name, "mean"]) <= 0.05 for name in ("ttft", "tpot", "e2e")), errors
    assert all(abs(errors[name, "p95"]) <= 0.10 for name in ("ttft", "tpot", "e2e")), errors
    assert found["running"]["mean_gap"] <= 0.05 * found["running"]["mean_running"]
