"""The KV cache in 8 or 4 bits, weights untouched."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from twinfer.core.technique import Options as Base
from twinfer.plugins.quantizer.what_if import WhatIf, with_kv

if TYPE_CHECKING:
    from twinfer.core.spec import ModelSpec


class KVFP8(WhatIf):
    name = "kv-fp8"
    summary = "KV cache in 8-bit float, one scale per tensor: twice the tokens in the same memory"
    reference = "Micikevicius et al.: FP8 Formats for Deep Learning (arXiv:2209.05433)"

    def adapt_model(self, model: ModelSpec) -> ModelSpec:
        return with_kv(model, "fp8")


class KVIntegers(WhatIf):
    """Integers with a float16 scale per group, in the format `stored`."""

    stored: ClassVar[str]

    class Options(Base):
        group_size: int = Field(
            default=0, ge=0, le=4096,
            description="values of a vector that share a scale; 0 is the whole vector of a head (int8) or 32 (int4)",
        )  # fmt: skip
        zero_point: bool = Field(default=False, description="an offset beside every scale")

    options: Options

    def adapt_model(self, model: ModelSpec) -> ModelSpec:
        return with_kv(model, self.stored, self.options.group_size, self.options.zero_point)


class KVInt8(KVIntegers):
    name, stored = "kv-int8", "int8"
    summary = "KV cache in 8-bit integers, a float16 scale per token and head"
    reference = "Hooper et al.: KVQuant (arXiv:2401.18079)"


class KVInt4(KVIntegers):
    name, stored = "kv-int4", "int4"
    summary = "KV cache in 4-bit integers, a float16 scale per 32 values"
    reference = "Liu et al.: KIVI (arXiv:2402.02750)"


class KVFP4(WhatIf):
    name = "kv-nvfp4"
    summary = "KV cache in 4-bit floats, an FP8 scale per 16 values"
    reference = "NVIDIA: Pretraining Large Language Models with NVFP4 (arXiv:2509.25149)"

    def adapt_model(self, model: ModelSpec) -> ModelSpec:
        return with_kv(model, "fp4")
