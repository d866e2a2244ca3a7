"""What the global options mean to every command: which plugins are loaded."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from twinfer.core.registry import Registry


class Session:
    """One command line. The registry is made when first asked for: most help pages need none."""

    def __init__(self, modules: Sequence[str] = (), plugin_dirs: Sequence[str | Path] = ()) -> None:
        self.modules = tuple(modules)
        self.plugin_dirs = tuple(plugin_dirs)
        self._registry: Registry | None = None

    @property
    def registry(self) -> Registry:
        """All techniques; raises PluginError when a plugin named on the command line does not load."""
        if self._registry is None:
            from twinfer.core.registry import Registry, default_registry, set_default_registry

            if self.modules or self.plugin_dirs:
                if self.modules and "" not in sys.path:
                    sys.path.append("")  # `-p my_plugin` finds my_plugin.py in the current folder
                self._registry = Registry(self.modules, self.plugin_dirs)
                set_default_registry(self._registry)
            else:
                self._registry = default_registry()
        return self._registry

    def command(self, name: str) -> Any:
        """The command that a plugin registered under `name`, as typer's command object; None if there is none.

        The class's `run` is a function with typer annotations (or a `typer.Typer`); its `summary` is the help.
        """
        if name not in self.registry.names("cli_command"):
            return None
        import typer

        technique = self.registry.get("cli_command", name)
        if isinstance(technique.run, typer.Typer):
            return typer.main.get_command(technique.run)
        app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        app.command(name, help=technique.summary)(technique.run)
        return typer.main.get_command(app)


__all__ = ["Session"]
