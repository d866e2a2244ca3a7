"""The wheel holds every module and data file of the house and nothing else, and works where there is no checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

HOUSE = ("core", "plugins", "kernels", "simulator", "dashboard", "cli")
"""Folders that are shipped; named here, not found, so that this test does not share setup.py's way of finding."""
TOP_FILES = ("__init__.py", "py.typed")


def checkout_files(root: Path) -> list[str]:
    """Files of the working tree that git knows or would add, as paths below the root."""
    command = ["git", "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout.split("\0")
    return sorted(name for name in names if name and (root / name).is_file())


@pytest.fixture(scope="module")
def wheel(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy (setuptools writes into the tree it builds) in a folder with another name."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in checkout_files(root):
        target = folder / "some-checkout" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root / name, target)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "-w", str(folder), str(folder / "some-checkout")], check=True)
    (path,) = folder.glob("twinfer-*-py3-none-any.whl")
    return path


def test_wheel_holds_every_module_and_data_file(root: Path, wheel: Path) -> None:
    shipped = {f"twinfer/{name}" for name in checkout_files(root) if name.split("/")[0] in HOUSE or name in TOP_FILES}
    assert len(shipped) > 20
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert held == shipped


def test_every_python_file_lies_in_a_package(root: Path) -> None:
    lost = [
        name
        for name in checkout_files(root)
        if name.endswith(".py") and name.split("/")[0] in HOUSE and not (root / name).with_name("__init__.py").exists()
    ]
    assert not lost, f"add an __init__.py beside: {', '.join(lost)}"


def test_no_top_level_folder_is_forgotten(root: Path) -> None:
    packages = {name.split("/")[0] for name in checkout_files(root) if name.count("/") and name.endswith("__init__.py")}
    assert packages - {"tests", "docs", "examples", "bench"} == set(HOUSE)
    assert not (root / "tests" / "__init__.py").exists(), "tests are collected in importlib mode, without packages"


def test_wheel_runs_without_the_checkout(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    code = (
        "import sys, twinfer; from twinfer.core.registry import default_registry; r = default_registry(); "
        "print(twinfer.__file__); print(*(f'{i.kind}/{i.name}' for i in r.all()), sep=chr(10)); "
        "assert 'torch' not in sys.modules"
    )
    env = os.environ | {"PYTHONPATH": str(site)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    where, *techniques = done.stdout.splitlines()
    assert Path(where).is_relative_to(site)
    assert {"scheduler/static", "scheduler/continuous", "kv_cache/contiguous", "kv_cache/paged"} <= set(techniques)


def test_console_script_and_entry_point_group(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith("dist-info/entry_points.txt")]
        lines = archive.read(name).decode().split()
    assert lines == ["[console_scripts]", "twinfer", "=", "twinfer.cli.entry:main"]
