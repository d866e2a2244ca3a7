"""Tells plugins what happens, without letting any of them stop the engine.

Invariants
* An observer that raises is warned about once and not told again; the run goes on.
* Order is that of registration; nothing is returned.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pluggy

from twinfer.core.guard import FAULTS, raised

if TYPE_CHECKING:
    from twinfer.core.events import Event, Output
    from twinfer.core.plan import StepPlan, StepResult


class Observers:
    """The observation hooks of `core/hookspecs.py`, for drivers. `dropped`: plugin -> what it raised."""

    def __init__(self, plugins: pluggy.PluginManager) -> None:
        self.on_step_hook: Any = plugins.hook.on_step
        self.on_request_hook: Any = plugins.hook.on_request
        self.dropped: dict[str, str] = {}

    def any(self) -> bool:
        """True when a plugin implements one of the hooks."""
        return bool(self.on_step_hook.get_hookimpls() or self.on_request_hook.get_hookimpls())

    def on_step(self, plan: StepPlan, result: StepResult) -> None:
        self._tell(self.on_step_hook, {"plan": plan, "result": result})

    def on_request(self, event: Event | Output) -> None:
        self._tell(self.on_request_hook, {"event": event})

    def _tell(self, hook: Any, facts: dict[str, Any]) -> None:
        for impl in hook.get_hookimpls():
            if impl.plugin_name in self.dropped:
                continue
            try:
                impl.function(*[facts[name] for name in impl.argnames])
            except FAULTS as error:
                why = raised(error)
                self.dropped[impl.plugin_name] = why
                warnings.warn(
                    f"plugin {impl.plugin_name!r} failed in {hook.name} and is not told any more: {why}",
                    RuntimeWarning,
                    stacklevel=3,
                )
