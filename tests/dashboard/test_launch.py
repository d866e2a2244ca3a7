"""The launcher: flags that keep it local and offline, ports, a server that comes up and goes down."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from twinfer.core.errors import ConfigError, TwinferError
from twinfer.dashboard import launch as launcher
from twinfer.dashboard import theme


def test_the_server_is_local_offline_and_shows_no_traceback():
    words = launcher.command(8501, "runs", ["my_plugin"], ["plugins"])
    assert {
        "--server.address=127.0.0.1", "--browser.gatherUsageStats=false", "--server.fileWatcherType=none",
        "--client.showErrorDetails=none", "--server.headless=true", "--server.port=8501",
    } <= set(words)  # fmt: skip
    given = words[words.index("--") + 1 :]
    assert given[:2] == ["--runs-dir", str(Path("runs").resolve())]
    assert given[2:] == ["-p", "my_plugin", "--plugins-dir", str(Path("plugins").resolve())]
    assert launcher.command(1, None)[-1] == "--"


def test_both_themes_set_the_same_colours():
    options = theme.streamlit_options()
    light = {name.replace("theme.light.", "") for name in options if name.startswith("theme.light.")}
    dark = {name.replace("theme.dark.", "") for name in options if name.startswith("theme.dark.")}
    assert light == dark and "theme.base" not in options  # the browser's preference decides


def test_no_pages_folder_beside_the_script():
    """Streamlit would run its files as scripts on a cold deep link."""
    assert launcher.APP.is_file() and not (launcher.APP.parent / "pages").exists()


def test_a_taken_default_port_is_replaced_and_a_taken_wish_refused():
    with socket.socket() as taken:
        taken.bind((launcher.HOST, 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert launcher.free_port(port) != port
        with pytest.raises(ConfigError, match="another program listens there"):
            launcher.Server(port=port)
    with pytest.raises(ConfigError, match="--port"):
        launcher.Server(port=70_000)


def test_the_server_comes_up_and_goes_down(tmp_path: Path):
    with launcher.Server(tmp_path) as server:
        with urllib.request.urlopen(f"{server.url}/techniques", timeout=300) as answer:
            assert answer.status == 200 and "Streamlit" in answer.read().decode()
        assert server.process.poll() is None
    assert server.process.poll() is not None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_the_server_ends_with_the_command_however_that_ends(tmp_path: Path, number: signal.Signals):
    words = [sys.executable, "-m", "twinfer.cli.main", "dashboard", "--runs-dir", str(tmp_path), "--json"]
    words += ["--port", str(launcher.free_port(0))]

    def as_in_a_terminal() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # children of tests under nohup would ignore it, too

    with subprocess.Popen(words, stdout=subprocess.PIPE, preexec_fn=as_in_a_terminal) as command:
        assert command.stdout is not None
        url = json.loads("".join(line.decode() for line in iter(command.stdout.readline, b"}\n")) + "}")["url"]
        command.send_signal(number)
        assert command.wait(timeout=60) == -number
    deadline = time.monotonic() + 60
    with pytest.raises(urllib.error.URLError):
        while time.monotonic() < deadline:
            urllib.request.urlopen(url, timeout=60).close()
            time.sleep(0.1)


def test_a_server_that_dies_is_an_error(monkeypatch):
    monkeypatch.setattr(launcher, "command", lambda *given: ["/bin/false"])
    with pytest.raises(TwinferError, match="ended at once"):
        launcher.Server()


def test_launch_says_the_address_and_ends_quietly_on_ctrl_c(tmp_path: Path, monkeypatch):
    def interrupted(self: launcher.Server) -> int:
        raise KeyboardInterrupt

    said: list[str] = []
    monkeypatch.setattr(launcher.Server, "wait", interrupted)
    port = launcher.free_port(0)  # the default one may be that of a test that runs beside this one
    assert launcher.launch(tmp_path, port, page="compare", say=said.append) == 0
    assert said[0].startswith(f"dashboard: http://127.0.0.1:{port}/compare")
