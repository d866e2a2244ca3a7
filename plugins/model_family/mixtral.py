"""Mixtral and Qwen3-MoE: the Llama decoder with experts (`core/runtime/families/moe.py`) in place of the dense MLP."""

from __future__ import annotations

from twinfer.plugins.model_family.llama import LlamaFamily


class MixtralFamily(LlamaFamily):
    name = "mixtral"
    summary = "Mixtral decoders: every MLP is eight experts, two of which a token passes through"
    reference = "Jiang et al. 2024, arXiv:2401.04088"
    families = ("mixtral",)


class Qwen3MoEFamily(LlamaFamily):
    name = "qwen3_moe"
    summary = "Qwen3 decoders with fine-grained experts, dense layers among them where the configuration says so"
    reference = "Yang et al. 2025, arXiv:2505.09388"
    families = ("qwen3_moe",)
