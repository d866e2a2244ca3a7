"""What multi-head, grouped-query and multi-query attention share: they differ only in the number of KV heads.

Invariants
* In the engine a variant serves only a checkpoint that was trained with it; converting weights is refused.
* In the simulator it changes `num_kv_heads`, so that the what-if sees other KV memory and other work.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from twinfer.core.errors import ConfigError
from twinfer.core.spec import ModelSpec
from twinfer.core.technique import Needs, Technique

if TYPE_CHECKING:
    from twinfer.core.runtime.attention_torch import TorchAttention

ENGINE_DTYPES = {"cpu": ("float32", "bfloat16"), "cuda": ("float32", "bfloat16", "float16")}


class SoftmaxAttention(Technique):
    """Base of the variants; a subclass says how many KV heads it has."""

    def num_kv_heads(self, model: ModelSpec) -> int:
        """KV heads of `model` under this variant."""
        raise NotImplementedError

    @classmethod
    def why_not(cls, needs: Needs) -> list[str]:
        reasons = []
        if needs.world == "engine":
            known = ENGINE_DTYPES.get(needs.device)
            if known is None:
                reasons.append(f"device {needs.device!r} has no attention kernel (known: {', '.join(ENGINE_DTYPES)})")
            elif needs.dtype not in known:
                reasons.append(f"dtype {needs.dtype} is not served on {needs.device} (known: {', '.join(known)})")
        model = needs.model
        if model is None:
            return reasons
        if model.mla is not None:
            reasons.append(f"{model.name} stores latent vectors (MLA) instead of KV heads")
        if model.attention_sinks and needs.world == "engine":
            reasons.append("attention sinks are not implemented")
        if model.v_dim != model.head_dim and model.mla is None:
            reasons.append(f"value heads are {model.v_dim} wide, query heads {model.head_dim}")
        if needs.world == "engine" and model.mla is None and model.variant != cls.name:
            reasons.append(
                f"{model.name} was trained with {model.num_kv_heads} KV heads for {model.num_heads} query heads "
                f"({model.variant}) and converting its weights to {cls.name} is not implemented; "
                "the simulator can show what it would do"
            )
        return reasons

    def adapt_model(self, model: ModelSpec) -> ModelSpec:
        heads = self.num_kv_heads(model)
        extra = dict(model.extra)
        if heads != model.num_kv_heads:
            extra["checkpoint_kv_heads"] = model.num_kv_heads  # so that the engine can refuse a conversion by name
        return replace(model, num_kv_heads=heads, attention=self.name, extra=extra)

    def build(self, model: ModelSpec) -> TorchAttention:
        """The torch implementation for `model` (as adapted)."""
        from twinfer.core.runtime.attention_torch import attention_of

        return attention_of(model)


def check_divides(option: str, value: int, model: ModelSpec) -> int:
    """`value` KV heads if they divide the query heads, else a ConfigError."""
    if model.num_heads % value:
        divisors = [n for n in range(1, model.num_heads + 1) if model.num_heads % n == 0]
        raise ConfigError(
            option, value, f"does not divide the {model.num_heads} query heads of {model.name}",
            f"use one of {', '.join(map(str, divisors))}",
        )  # fmt: skip
    return value
