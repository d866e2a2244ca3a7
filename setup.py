"""Finds the packages: the repository root is the package `twinfer`, every folder with an `__init__.py` a subpackage.

Everything else about the project is declared in `pyproject.toml`. Finding instead of listing means that nobody
can forget a new folder; `tests/test_packaging.py` builds the wheel and checks that each module and data file is in it.
"""

from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
NOT_SHIPPED = ("tests", "docs", "examples", "bench", "build", "dist")
DATA_SUFFIXES = {".json", ".jsonl", ".csv", ".toml", ".txt", ".md", ".css", ".js", ".html", ".svg", ".png", ".tmpl"}
SOURCE_SUFFIXES = {".cpp", ".h"}  # compiled on the user's machine

folders = find_packages(str(ROOT), exclude=[pattern for name in NOT_SHIPPED for pattern in (name, f"{name}.*")])
packages = {"twinfer": ROOT} | {f"twinfer.{name}": ROOT.joinpath(*name.split(".")) for name in sorted(folders)}
homes = {folder: name for name, folder in packages.items()}


def data_files() -> dict[str, list[str]]:
    """Data files by the nearest package above them, as paths relative to it."""
    found: dict[str, list[str]] = {"twinfer": ["py.typed"]}
    for top in sorted({name.split(".")[0] for name in folders}):
        for path in sorted((ROOT / top).rglob("*")):
            hidden = any(part.startswith(".") for part in path.relative_to(ROOT).parts)
            if path.suffix in DATA_SUFFIXES | SOURCE_SUFFIXES and path.is_file() and not hidden:
                home = next(folder for folder in path.parents if folder in homes)
                found.setdefault(homes[home], []).append(path.relative_to(home).as_posix())
    return found


class BuildModules(build_py):
    """Leaves this script out: it lies in the root folder, which is a package here."""

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        modules = super().find_package_modules(package, package_dir)
        return [module for module in modules if module[:2] != ("twinfer", "setup")]


setup(
    packages=list(packages),
    package_dir={"twinfer": "."},
    package_data=data_files(),
    cmdclass={"build_py": BuildModules},
)
