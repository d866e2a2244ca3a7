"""Built-in model families."""

from __future__ import annotations

from twinfer.core.hookspecs import Register, hookimpl
from twinfer.plugins.model_family.gemma import GemmaFamily
from twinfer.plugins.model_family.llama import LlamaFamily


@hookimpl
def register_model_family(register: Register) -> None:
    register(LlamaFamily)
    register(GemmaFamily)
