"""`cli(...)`: one command line in this process, with its exit code, stdout and stderr."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from twinfer.cli.main import main
from twinfer.core import registry


@dataclass
class Ran:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return self.json_with(0)

    def json_with(self, code: int) -> Any:
        """The JSON document that came with this exit code."""
        assert self.code == code, (self.code, self.err)
        return json.loads(self.out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))

    def is_error(self, *words: str) -> None:
        """One line that begins with `error: ` and holds all `words`; exit code 2; nothing on stdout; no traceback."""
        lines = self.err.splitlines()
        assert self.code == 2, (self.code, self.err)
        assert len(lines) == 1 and lines[0].startswith("error: "), self.err
        assert self.out == "" and "Traceback" not in self.err
        for word in words:
            assert word in self.err, (word, self.err)


@pytest.fixture
def cli(
    capsys: pytest.CaptureFixture[str], tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Ran]:
    """The user's data folder is an empty one, and plugins loaded by one command line do not outlive the test."""
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("XDG_DATA_HOME", str(home))
    monkeypatch.setattr(Path, "home", lambda: home)
    monkeypatch.setattr(registry, "_default", registry._default)
    monkeypatch.setenv("COLUMNS", "160")

    def run(*args: str | Path) -> Ran:
        capsys.readouterr()
        code = main([str(a) for a in args])
        captured = capsys.readouterr()
        return Ran(code, captured.out, captured.err)

    return run
