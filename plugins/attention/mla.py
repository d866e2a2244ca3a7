"""Multi-head latent attention: what all heads read of a token is kept as one short latent vector.

Checkpoints trained with it run as they are. One with KV heads is converted at load: keys and values are factored into
a latent of `rank` values per token and layer, `rope_dim` of them turned by position (`core/runtime/mla_convert.py`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, field_validator

from twinfer.core import technique
from twinfer.core.errors import ConfigError
from twinfer.core.spec import MLASpec, ModelSpec
from twinfer.core.technique import Needs, Technique
from twinfer.plugins.attention.softmax import engine_dtype_reasons, trained_instead

if TYPE_CHECKING:
    from twinfer.core.runtime.attention_latent import LatentAttention
    from twinfer.core.runtime.attention_torch import TorchAttention
    from twinfer.core.runtime.convert import Checkpoint, Converted

ROPE_SHARE = 0.25
"""Of the values kept, how many are turned by position when nobody says: perplexity is flat around it at every rank
tried (docs/attention-variants.md)."""

ROPE_KINDS = ("default", "linear", "llama3", "gguf_factors")


class MLA(Technique):
    name = "mla"
    summary = "Multi-head latent attention: caches one latent per token instead of KV heads (DeepSeek)"
    reference = "DeepSeek-AI 2024, arXiv:2405.04434"

    class Options(technique.Options):
        mode: Literal["absorbed", "naive"] = Field(
            default="absorbed",
            description="what the cache holds: the latent (absorbed), or the keys and values of every head (naive)",
        )
        rank: float = Field(
            default=1.0,
            gt=0,
            allow_inf_nan=False,
            description="converting a checkpoint with KV heads: how much of its keys and values a token keeps per layer, "
            "as a share (0.5) or as a number of values (192); 1 keeps all and is exact",
        )
        rope_dim: int | None = Field(
            default=None,
            ge=2,
            description="converting: how many of the values kept are turned by position, an even number; "
            "auto is all of the keys for rank=1, else a quarter",
        )
        calibration: str | None = Field(
            default=None,
            description="converting with loss: a text file whose statistics say what to keep; None takes the help texts "
            "that come with Python",
        )

        @field_validator("rope_dim", mode="before")
        @classmethod
        def _auto(cls, value: Any) -> Any:
            return None if value == "auto" else value

    @classmethod
    def why_not(cls, needs: Needs) -> list[str]:
        reasons, model = engine_dtype_reasons(needs), needs.model
        if model is None or model.mla is not None:
            return reasons
        asked = trained_instead(needs)
        convert = f"{model.name} has {model.variant} weights, which cannot be converted to latents{asked}: "
        kind = str((model.rope_scaling or {}).get("rope_type") or (model.rope_scaling or {}).get("type") or "default")
        if model.qk_norm:
            reasons.append(convert + "its keys are normed head by head")
        if any(window is not None for window in model.layer_windows):
            reasons.append(convert + "some layers see a sliding window")
        if model.attn_softcap is not None:
            reasons.append(convert + "its scores are capped")
        if model.attention_sinks:
            reasons.append(convert + "it has attention sinks")
        if kind not in ROPE_KINDS or model.rope_local_theta is not None:
            reasons.append(convert + "its rotary positions depend on the length or the layer")
        return reasons

    def adapt_model(self, model: ModelSpec) -> ModelSpec:
        absorbed = self.options.mode == "absorbed"
        if model.mla is not None:
            for name in ("rank", "rope_dim", "calibration"):
                if getattr(self.options, name) != type(self.options).model_fields[name].default:
                    raise ConfigError(
                        f"--attention mla:{name}", getattr(self.options, name), f"{model.name} was trained with latents",
                        "leave it out",
                    )  # fmt: skip
            return replace(model, attention=self.name, mla=replace(model.mla, absorbed=absorbed))
        width, rope = self._width(model)
        turned = model.num_kv_heads * _rotary_dim(model)
        exact = self._exact(model)
        nope = 0 if rope == turned and _rotary_dim(model) == model.head_dim else model.head_dim
        mla = MLASpec(
            kv_lora_rank=width - rope, q_lora_rank=None, qk_nope_head_dim=nope, qk_rope_head_dim=rope,
            v_head_dim=model.v_dim, absorbed=absorbed, interleaved=False, latent_norm=False,
        )  # fmt: skip
        return replace(
            model, attention=self.name, mla=mla, num_kv_heads=model.num_heads, head_dim=nope + rope,
            value_dim=model.v_dim, partial_rotary=1.0, query_scale=model.query_scale or model.head_dim**-0.5,
            attention_out_bias=model.attention_out_bias or model.attention_bias or not exact,
        )  # fmt: skip

    def conversion(self, checkpoint: ModelSpec) -> str:
        """What becomes of the heads of `checkpoint`, in words; empty when it has latents already."""
        if checkpoint.mla is not None:
            return ""
        width, rope = self._width(checkpoint)
        text = self.options.calibration or "Python's help texts"
        exact = "exact" if self.options.calibration is None else f"exact, so {text} is not read"
        loss = exact if self._exact(checkpoint) else f"lossy, weighed by calibration on {text}"
        return (
            f"mla from {checkpoint.num_kv_heads} KV heads, keys and values factored into {width - rope} latent and "
            f"{rope} rotary values ({loss})"
        )

    def convert(self, checkpoint: Checkpoint, model: ModelSpec) -> Converted:
        """The tensors of `checkpoint` with the latents of `model`; runs it over the calibration text unless exact."""
        from twinfer.core.runtime.calibration import Inputs, attention_inputs, read_calibration
        from twinfer.core.runtime.mla_convert import to_latent

        spec, path = checkpoint.spec, self.options.calibration
        if self._exact(spec):
            inputs = [Inputs.unknown(spec) for _ in range(spec.num_layers)]
        else:
            inputs = attention_inputs(checkpoint, None if path is None else read_calibration(path))
        return to_latent(checkpoint.source, spec, model, inputs)

    def build(self, model: ModelSpec) -> LatentAttention | TorchAttention:
        """The torch implementation for `model` (as adapted)."""
        from twinfer.core.runtime.attention_latent import LatentAttention
        from twinfer.core.runtime.attention_torch import attention_of

        assert model.mla is not None
        return LatentAttention(model) if model.mla.absorbed else attention_of(model)

    def _width(self, model: ModelSpec) -> tuple[int, int]:
        """(values a token keeps per layer, how many of them are turned) of a checkpoint with KV heads."""
        option, rank = "--attention mla:rank", self.options.rank
        most, turned = model.kv_values_per_token_layer, model.num_kv_heads * _rotary_dim(model)
        if rank > 1 and rank != int(rank):
            raise ConfigError(option, rank, "neither a share nor a number", "use a share up to 1, or a whole number")
        width = round(rank * most) if rank <= 1 else int(rank)
        if not 4 <= width <= most:
            raise ConfigError(
                option, rank, f"{model.name} has {most} keys and values per token and layer, {width} would be kept",
                f"keep 4 to {most}",
            )  # fmt: skip
        rope = self.options.rope_dim
        if rope is None:
            rope = turned if width == most else max(2, 2 * round(ROPE_SHARE * width / 2))
            rope = min(rope, turned)
        if rope % 2 or not 0 < rope <= turned or rope >= width:
            raise ConfigError(
                "--attention mla:rope_dim", rope, f"{turned} key dimensions can be turned, in pairs, {width} are kept",
                f"use an even number up to {min(turned, width - 1)}",
            )  # fmt: skip
        return width, rope

    def _exact(self, model: ModelSpec) -> bool:
        """Whether nothing is lost: all keys keep their rotation and all values have a dimension."""
        return self._width(model) == (model.kv_values_per_token_layer, model.num_kv_heads * _rotary_dim(model))


def _rotary_dim(model: ModelSpec) -> int:
    return int(model.head_dim * model.partial_rotary)
