"""The KV cache in 8 or 4 bits, weights untouched."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from twinfer.plugins.quantizer.what_if import WhatIf, with_kv

if TYPE_CHECKING:
    from twinfer.core.spec import ModelSpec


class _KV(WhatIf):
    kv: ClassVar[str]

    def adapt_model(self, model: ModelSpec) -> ModelSpec:
        return with_kv(model, self.kv)


class KVFP8(_KV):
    name = "kv-fp8"
    summary = "KV cache in 8-bit float, one scale per tensor: twice the tokens in the same memory"
    reference = "Micikevicius et al.: FP8 Formats for Deep Learning (arXiv:2209.05433)"
    kv = "fp8"


class KVInt8(_KV):
    name = "kv-int8"
    summary = "KV cache in 8-bit integers, a float16 scale per token and head"
    reference = "Hooper et al.: KVQuant (arXiv:2401.18079)"
    kv = "int8"


class KVInt4(_KV):
    name = "kv-int4"
    summary = "KV cache in 4-bit integers, a float16 scale per 32 values"
    reference = "Liu et al.: KIVI (arXiv:2402.02750)"
    kv = "int4"
