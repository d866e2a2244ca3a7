"""Starts the dashboard's server: `launch(...)` is what `twinfer dashboard` and `make demo` call.

Invariants
* The server listens on 127.0.0.1 only and asks nothing of any other machine.
* Options go by flags, so that neither a config file of the user nor the working folder changes them.
* The server ends with the process that started it, however that ends: its stdin is a pipe that closes with it.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import webbrowser
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from twinfer.core.errors import ConfigError, TwinferError
from twinfer.dashboard.theme import streamlit_options

DEFAULT_PORT = 8501
HOST = "127.0.0.1"
APP = Path(__file__).parent / "entry" / "script.py"


def free_port(wanted: int = DEFAULT_PORT) -> int:
    """`wanted` if nobody listens there, else a free port the system chooses."""
    for port in (wanted, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise TwinferError("no free port on 127.0.0.1 for the dashboard; close a server or give --port")


def command(
    port: int, runs_dir: str | Path | None, plugins: Sequence[str] = (), plugin_dirs: Sequence[str | Path] = ()
) -> list[str]:
    """The command line of the server process."""
    words = [sys.executable, "-m", "twinfer.dashboard.server", "run", str(APP), f"--server.port={port}"]
    for name, value in streamlit_options().items():
        text = value if isinstance(value, str) else json.dumps(value)
        words.append(f"--{name}={text}")
    words.append("--")
    if runs_dir is not None:
        words += ["--runs-dir", str(Path(runs_dir).resolve())]
    for plugin in plugins:
        words += ["-p", plugin]
    for folder in plugin_dirs:
        words += ["--plugins-dir", str(Path(folder).resolve())]
    return words


class Server:
    """The running server process; a context manager that stops it."""

    def __init__(
        self,
        runs_dir: str | Path | None = None,
        port: int | None = None,
        plugins: Sequence[str] = (),
        plugin_dirs: Sequence[str | Path] = (),
        patience: float = 180.0,
    ) -> None:
        if port is not None and not 1 <= port <= 65535:
            raise ConfigError("--port", port, "not a port", "use 1 to 65535")
        self.port = free_port() if port is None else port
        if port is not None and free_port(port) != port:
            raise ConfigError("--port", port, "another program listens there", "give another port, or none")
        self.url = f"http://{HOST}:{self.port}"
        self.process = subprocess.Popen(
            command(self.port, runs_dir, plugins, plugin_dirs), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
        )
        try:
            self._wait(patience)
        except BaseException:
            self.stop()
            raise

    def _wait(self, patience: float) -> None:
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise TwinferError(f"the dashboard's server ended at once (exit code {self.process.returncode})")
            try:
                with urllib.request.urlopen(f"{self.url}/_stcore/health", timeout=2) as answer:
                    if answer.status == 200:
                        return
            except (urllib.error.URLError, OSError):
                time.sleep(0.1)
        raise TwinferError(f"the dashboard did not answer on {self.url} within {patience:.0f} s")

    def wait(self) -> int:
        """Until the server ends; its exit code."""
        return self.process.wait()

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        assert self.process.stdin is not None
        self.process.stdin.close()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()


def launch(
    runs_dir: str | Path | None = None,
    port: int | None = None,
    open_browser: bool = False,
    *,
    plugins: Sequence[str] = (),
    plugin_dirs: Sequence[str | Path] = (),
    page: str = "techniques",
    say: Callable[[str], None] = print,
) -> int:
    """Serve the dashboard until interrupted; returns the exit code (0 after Ctrl+C).

    runs_dir: root of the run store, None for the user's.  port: None takes 8501, or a free one when it is taken.
    page: path of the page to open, e.g. "compare".  Raises TwinferError when the server does not come up.
    """
    with Server(runs_dir, port, plugins, plugin_dirs) as server:
        address = f"{server.url}/{page or 'techniques'}"
        say(f"dashboard: {address}  (Ctrl+C stops it)")
        if open_browser:
            webbrowser.open(address)
        try:
            return server.wait()
        except KeyboardInterrupt:
            return 0
