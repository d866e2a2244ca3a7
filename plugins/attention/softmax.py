"""What multi-head, grouped-query and multi-query attention share: they differ only in the number of KV heads.

Invariants
* A variant serves its own checkpoints as they are and converts others at load: KV heads are repeated (exact) or
  mean-pooled in groups (lossy), in engine and simulator alike.
* `adapt_model` is the one truth of what a conversion stores; engine and simulator both go by it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from twinfer.core.errors import ConfigError
from twinfer.core.spec import ModelSpec
from twinfer.core.technique import Needs, Technique

if TYPE_CHECKING:
    from twinfer.core.runtime.attention_torch import TorchAttention
    from twinfer.core.runtime.convert import Checkpoint, Converted

ENGINE_DTYPES = {"cpu": ("float32", "bfloat16"), "cuda": ("float32", "bfloat16", "float16")}


class SoftmaxAttention(Technique):
    """Base of the variants; a subclass says how many KV heads it has."""

    def num_kv_heads(self, model: ModelSpec) -> int:
        """KV heads of `model` under this variant."""
        raise NotImplementedError

    @classmethod
    def why_not(cls, needs: Needs) -> list[str]:
        reasons = engine_dtype_reasons(needs)
        model = needs.model
        if model is None:
            return reasons
        if model.mla is not None:
            reasons.append(f"{model.name} stores latent vectors (MLA) instead of KV heads{trained_instead(needs)}")
        if model.attention_sinks and needs.world == "engine":
            reasons.append("attention sinks are not implemented")
        if model.v_dim != model.head_dim and model.mla is None:
            reasons.append(f"value heads are {model.v_dim} wide, query heads {model.head_dim}")
        return reasons

    def adapt_model(self, model: ModelSpec) -> ModelSpec:
        heads = self.num_kv_heads(model)
        if heads % model.num_kv_heads and model.num_kv_heads % heads:
            raise ConfigError(
                "--attention", self.name, f"{model.num_kv_heads} KV heads of {model.name} can be neither repeated nor "
                f"pooled into {heads}", f"use one of {_listed(_reachable(model))} KV heads",
            )  # fmt: skip
        return replace(model, num_kv_heads=heads, attention=self.name)

    def conversion(self, checkpoint: ModelSpec) -> str:
        """What becomes of the heads of `checkpoint`, in words; empty when they stay."""
        have, want = checkpoint.num_kv_heads, self.num_kv_heads(checkpoint)
        if want == have:
            return ""
        if want > have:
            return f"{self.name} from {have} KV heads, each repeated {want // have} times (exact)"
        return f"{self.name} from {have} KV heads, mean of each {have // want} (lossy: no training follows)"

    def convert(self, checkpoint: Checkpoint, model: ModelSpec) -> Converted:
        """The tensors of `checkpoint` with the KV heads of `model`."""
        from twinfer.core.runtime.convert import Converted, regrouped

        return Converted(regrouped(checkpoint.source, checkpoint.spec, model.num_kv_heads), model)

    def build(self, model: ModelSpec) -> TorchAttention:
        """The torch implementation for `model` (as adapted)."""
        from twinfer.core.runtime.attention_torch import attention_of

        return attention_of(model)


def trained_instead(needs: Needs) -> str:
    """Where to ask about a model that was trained otherwise; nothing for the engine, which needs its weights."""
    return " (`--attention trained` asks about one trained with them)" if needs.world == "simulator" else ""


def engine_dtype_reasons(needs: Needs) -> list[str]:
    """Why the engine's kernels do not serve the device or dtype of `needs`."""
    if needs.world != "engine":
        return []
    known = ENGINE_DTYPES.get(needs.device)
    if known is None:
        return [f"device {needs.device!r} has no attention kernel (known: {', '.join(ENGINE_DTYPES)})"]
    if needs.dtype not in known:
        return [f"dtype {needs.dtype} is not served on {needs.device} (known: {', '.join(known)})"]
    return []


def check_divides(option: str, value: int, model: ModelSpec) -> int:
    """`value` KV heads if they divide the query heads, else a ConfigError."""
    if model.num_heads % value:
        raise ConfigError(
            option, value, f"does not divide the {model.num_heads} query heads of {model.name}",
            f"use one of {_listed(_reachable(model))}",
        )  # fmt: skip
    return value


def _reachable(model: ModelSpec) -> list[int]:
    """Numbers of KV heads that the weights can be repeated or pooled into."""
    have = model.num_kv_heads
    return [n for n in range(1, model.num_heads + 1) if model.num_heads % n == 0 and (n % have == 0 or have % n == 0)]


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
