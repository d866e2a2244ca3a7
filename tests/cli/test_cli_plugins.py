"""`twinfer plugins`: the list, a new package that works as written, and the conformance kits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from twinfer.cli.plugins import NEW
from twinfer.plugins.conformance import KITS


def test_list_describes_every_technique(cli: Callable) -> None:
    answer = cli("plugins", "--json").json
    rows = {(row["kind"], row["name"]): row for row in answer["techniques"]}
    for key in (("scheduler", "static"), ("scheduler", "continuous"), ("kv_cache", "paged"), ("kv_cache", "contiguous"),
                ("attention", "mha"), ("attention", "gqa"), ("attention", "mqa"), ("op_time_model", "roofline")):  # fmt: skip
        assert rows[key]["builtin"] and rows[key]["summary"]
    options = {o["name"]: o for o in rows["kv_cache", "paged"]["options"]}
    assert options["block_size"]["default"] == 16 and options["block_size"]["description"]
    assert answer == cli("plugins", "list", "--json").json
    assert {r["kind"] for r in cli("plugins", "list", "--kind", "kv-cache", "--json").json["techniques"]} == {
        "kv_cache"
    }
    table = cli("plugins").out
    assert "continuous" in table and "chunk_size" in table
    cli("plugins", "list", "--kind", "cake").is_error("--kind", "cake", "scheduler")


@pytest.mark.parametrize("bad", ["Upper", "1st", "a_b", "a--b", "-x", "a/b", "class", "../up"])
def test_new_refuses_names_that_cannot_be(cli: Callable, tmp_path: Path, bad: str) -> None:
    ran = cli("plugins", "new", "--dir", tmp_path, "--", bad)
    ran.is_error(bad)
    assert list(tmp_path.iterdir()) == []


def test_new_does_not_overwrite(cli: Callable, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    cli("plugins", "new", "mine", "--dir", tmp_path).is_error("mine", "exists")
    (tmp_path / "file").write_text("in the way")
    cli("plugins", "new", "other", "--dir", tmp_path / "file").is_error("--dir")


@pytest.mark.parametrize("kind", NEW)
def test_a_new_plugin_works_as_written(cli: Callable, tmp_path: Path, kind: str) -> None:
    written = cli("plugins", "new", "my-own", "--kind", kind, "--dir", tmp_path, "--json").json["files"]
    folder = tmp_path / "my-own"
    assert sorted(Path(f).name for f in written) == ["README.md", "my_own.py", "pyproject.toml", "test_my_own.py"]
    # its own tests, as its author would run them: the kit twice, with and without an option, and a prediction
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder)],
        cwd=folder, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout and "skipped" not in done.stdout
    # and the commands its README shows, from its folder, without installing it
    script = [sys.executable, "-m", "twinfer.cli.main", "-p", "my_own", "plugins"]
    done = subprocess.run([*script, "check", "my-own"], cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "FAILED" not in done.stdout, done.stdout + done.stderr
    assert "no further kit" not in done.stderr
    done = subprocess.run([*script, "--json"], cwd=folder, capture_output=True, text=True, timeout=300)
    [row] = [row for row in json.loads(done.stdout)["techniques"] if row["name"] == "my-own"]
    assert row["kind"] == kind and row["options"][0]["description"]


@pytest.mark.parametrize("kind", NEW)
def test_a_new_plugin_is_clean(tmp_path: Path, cli: Callable, kind: str) -> None:
    cli("plugins", "new", "my-own", "--kind", kind.replace("_", "-"), "--dir", tmp_path)
    ruff = Path(sys.executable).with_name("ruff")
    command = [ruff, "check", "--isolated", "--line-length=120", "--select=E,F,UP,B,SIM", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_every_kind_with_a_kit_can_be_begun_and_no_other(cli: Callable, tmp_path: Path) -> None:
    assert set(NEW) == set(KITS)
    cli("plugins", "new", "mine", "--kind", "device", "--dir", tmp_path).is_error("--kind", "device", "router")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["continuous:chunk_size=3", "static", "paged:block_size=4", "contiguous"])
def test_built_ins_pass_their_kit(cli: Callable, name: str) -> None:
    answer = cli("plugins", "check", name, "--json").json
    assert answer["passed"]
    [tests] = answer["results"].values()
    assert len(tests) >= 6


def test_check_tells_what_is_wrong(cli: Callable, tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(
        "from twinfer import Technique, hookimpl\n"
        "class Bad(Technique):\n"
        "    name, summary = 'bad', 'Runs nobody.'\n"
        "    def order(self, seq): return ()\n"
        "    def propose(self, view): return []\n"
        "    def victims(self, view, shortage): return []\n"
        "@hookimpl\n"
        "def register_scheduler(register): register(Bad)\n"
    )
    ran = cli("--plugins-dir", tmp_path, "plugins", "check", "bad")
    assert ran.code == 1 and "FAILED" in ran.out and "seed 0" in ran.out
    ran = cli("--plugins-dir", tmp_path, "plugins", "check", "bad", "--json")
    assert ran.code == 1 and '"passed": false' in ran.out
    cli("plugins", "check", "nothing").is_error("nothing", "known")
    cli("plugins", "check", "paged:block_sise=4").is_error("block_sise", "block_size")
    cli("plugins", "check", "scheduler:a=1").is_error("techniques", "--kind")


def test_broken_installed_plugins_are_told_and_the_rest_goes_on(cli: Callable, tmp_path: Path) -> None:
    info = tmp_path / "broken-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[twinfer]\nbroken = nothing_like_this\n")
    done = subprocess.run(
        [sys.executable, "-m", "twinfer.cli.main", "plugins", "--json"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True,
    )  # fmt: skip
    answer = json.loads(done.stdout)
    assert "nothing_like_this" in answer["broken"]["broken"] and len(answer["techniques"]) > 5
