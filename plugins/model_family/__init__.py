"""Built-in model families."""

from __future__ import annotations

from twinfer.core.hookspecs import Register, hookimpl
from twinfer.plugins.model_family.deepseek import DeepSeekV2Family, DeepSeekV3Family
from twinfer.plugins.model_family.gemma import GemmaFamily
from twinfer.plugins.model_family.llama import LlamaFamily
from twinfer.plugins.model_family.mixtral import MixtralFamily, Qwen3MoEFamily


@hookimpl
def register_model_family(register: Register) -> None:
    for family in (LlamaFamily, GemmaFamily, MixtralFamily, Qwen3MoEFamily, DeepSeekV2Family, DeepSeekV3Family):
        register(family)
