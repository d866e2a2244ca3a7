"""The server's process: Streamlit, until the process that started it is gone.

Invariants
* Its stdin is a pipe that closes with the process that holds the other end, however that ends (also by SIGKILL).
"""

from __future__ import annotations

import os
import signal
import sys
import threading

PATIENCE = 10.0  # seconds that a server has to end by itself


def _end_with_stdin() -> None:
    while os.read(0, 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(PATIENCE)
    os._exit(1)


def main() -> None:
    """Words of the command line are those of `streamlit`."""
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    from streamlit.web.cli import main as streamlit

    streamlit(sys.argv[1:], prog_name="streamlit")


if __name__ == "__main__":
    main()
