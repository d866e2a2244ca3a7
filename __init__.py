"""twinfer: an LLM inference engine and its digital twin, built from one set of plugins.

Importing this package is cheap: names below are loaded when first used, so torch is imported only by
code that runs a real model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "LLM": "twinfer.core.runtime.llm",
    "SamplingParams": "twinfer.core.params",
    "EngineConfig": "twinfer.core.config",
    "Choice": "twinfer.core.config",
    "hookimpl": "twinfer.core.hookspecs",
    "Technique": "twinfer.core.technique",
    "Options": "twinfer.core.technique",
    "Needs": "twinfer.core.technique",
    "Want": "twinfer.core.policy",
    "Defer": "twinfer.core.policy",
    "View": "twinfer.core.policy",
    "Request": "twinfer.core.request",
    "Sequence": "twinfer.core.request",
    "RunRecord": "twinfer.core.records",
    "TwinferError": "twinfer.core.errors",
    "simulate": "twinfer.simulator.run",
}

__all__ = ["__version__", *_HOME]

if TYPE_CHECKING:
    from twinfer.core.config import Choice as Choice
    from twinfer.core.config import EngineConfig as EngineConfig
    from twinfer.core.errors import TwinferError as TwinferError
    from twinfer.core.hookspecs import hookimpl as hookimpl
    from twinfer.core.params import SamplingParams as SamplingParams
    from twinfer.core.policy import Defer as Defer
    from twinfer.core.policy import View as View
    from twinfer.core.policy import Want as Want
    from twinfer.core.records import RunRecord as RunRecord
    from twinfer.core.request import Request as Request
    from twinfer.core.request import Sequence as Sequence
    from twinfer.core.runtime.llm import LLM as LLM
    from twinfer.core.technique import Needs as Needs
    from twinfer.core.technique import Options as Options
    from twinfer.core.technique import Technique as Technique
    from twinfer.simulator.run import simulate as simulate


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'twinfer' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
