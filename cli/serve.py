"""`twinfer dashboard`: the web pages, on this machine only."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def add_commands(app: typer.Typer) -> None:
    app.command("dashboard")(dashboard)


def dashboard(
    ctx: typer.Context,
    port: Annotated[int | None, typer.Option(help="Port on 127.0.0.1; 8501, or a free one when that is taken.")] = None,
    runs_dir: Annotated[Path | None, typer.Option(metavar="DIR", help="Where runs are kept; your data folder.")] = None,
    open_browser: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in a browser.")] = False,
    page: Annotated[str, typer.Option(help="Page to show first, e.g. compare.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print the address as one JSON document.")] = False,
) -> None:
    """Serve the dashboard on 127.0.0.1 until Ctrl-C: toggle techniques, run them, compare real and predicted.

    Examples:

    twinfer dashboard --open

    twinfer --plugins-dir ./my-plugins dashboard --port 9000
    """
    from twinfer.cli import show
    from twinfer.cli.session import Session
    from twinfer.core.errors import ConfigError
    from twinfer.core.run_store import RunStore
    from twinfer.dashboard.launch import launch

    session: Session = ctx.obj
    plugin_pages = session.registry.names("dashboard_page")  # a plugin that does not load is told here, not by a page
    known = ("techniques", "compare", *(name.replace("/", "-") for name in plugin_pages))
    if page and page not in known:
        raise ConfigError("--page", page, "no such page", f"known: {', '.join(known)}")
    RunStore(runs_dir).check_writable()

    def say(text: str) -> None:
        if as_json:
            show.print_json({"url": next((word for word in text.split() if word.startswith("http")), text)})
        else:
            print(text, flush=True)

    code = launch(
        runs_dir, port, open_browser, plugins=session.modules, plugin_dirs=session.plugin_dirs, page=page, say=say
    )
    raise typer.Exit(code)
