"""`twinfer demo`."""

from __future__ import annotations

import typer


def add_commands(app: typer.Typer) -> None:
    pass
