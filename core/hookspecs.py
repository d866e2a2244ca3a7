"""Every hook a plugin may implement, by phase.

Hooks hand over classes and observe; nothing here is called per layer or per token.

Registration (called once per process, when the plugin is loaded; must not block, must not import torch):
each receives a callback `register` to be called once for every technique class of that kind.
Observation (called by the drivers, real and simulated, in the driver's thread): must return quickly
and never raises into the engine: an observer that raises is reported once and dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from twinfer.core.events import Event, Output
    from twinfer.core.plan import StepPlan, StepResult

hookspec = pluggy.HookspecMarker("twinfer")
hookimpl = pluggy.HookimplMarker("twinfer")

Register = Callable[[type[Any]], None]


@hookspec
def register_attention(register: Register) -> None:
    """Attention variants (`twinfer.core.technique.Technique`). Phase: load; once; may not block."""


@hookspec
def register_kv_cache(register: Register) -> None:
    """KV caches (`twinfer.core.policy.KVCache`). Phase: load; once; may not block."""


@hookspec
def register_quantizer(register: Register) -> None:
    """Weight, activation or KV formats. Phase: load; once; may not block."""


@hookspec
def register_speculator(register: Register) -> None:
    """Drafters with their acceptance rule. Phase: load; once; may not block."""


@hookspec
def register_scheduler(register: Register) -> None:
    """Schedulers (`twinfer.core.policy.Scheduler`). Phase: load; once; may not block."""


@hookspec
def register_router(register: Register) -> None:
    """Routers over replicas of a fleet (`twinfer.core.routing.Router`). Phase: load; once; may not block."""


@hookspec
def register_model_family(register: Register) -> None:
    """Model families: a spec reader and a torch model file. Phase: load; once; may not block."""


@hookspec
def register_device(register: Register) -> None:
    """Device specs (class attributes `path`, `links`: folders of JSON files). Phase: load; once; may not block."""


@hookspec
def register_op_time_model(register: Register) -> None:
    """Op-time models (`twinfer.simulator.op_time.OpTimeModel`). Phase: load; once; may not block."""


@hookspec
def register_workload(register: Register) -> None:
    """Workloads: arrival processes, length distributions, trace readers. Phase: load; once; may not block."""


@hookspec
def register_dashboard_page(register: Register) -> None:
    """Dashboard pages. Phase: load, in the dashboard process; once; may not block."""


@hookspec
def register_cli_command(register: Register) -> None:
    """CLI commands (typer). Phase: load, in the CLI process; once; may not block."""


@hookspec
def register_http_route(register: Register) -> None:
    """HTTP routes of the server. Phase: load, in the server process; once; may not block."""


@hookspec
def on_step(plan: StepPlan, result: StepResult) -> None:
    """A step is done. Phase: run, driver's thread; once per step; may not block."""


@hookspec
def on_request(event: Event | Output) -> None:
    """A request was submitted, aborted, rejected or finished. Phase: run, driver's thread; may not block."""
