"""The installed command: Ctrl-C while the command line is still being imported ends it as Ctrl-C does later."""

from __future__ import annotations

import sys


def main() -> int:
    """As `twinfer.cli.main.main`, whose import takes a moment."""
    try:
        from twinfer.cli.main import main as command_line

        return command_line()
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130


__all__ = ["main"]
