"""INT4 weights in groups, computing in 16 bits: the storage of GPTQ and AWQ."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from twinfer.plugins.quantizer.what_if import KVOption, WhatIf, grouped_bits, with_kv, with_weights

if TYPE_CHECKING:
    from twinfer.core.spec import ModelSpec


class Int4(WhatIf):
    name = "int4"
    summary = "4-bit weights with a scale per group; the arithmetic stays in 16 bits, so only weight reads shrink"
    reference = "Frantar et al.: GPTQ (arXiv:2210.17323); Lin et al.: AWQ (arXiv:2306.00978)"

    class Options(KVOption):
        group_size: int = Field(default=128, ge=16, le=4096, description="weights of one input row that share a scale")
        zero_point: bool = Field(default=False, description="asymmetric: a 4-bit zero point per group too")

    options: Options

    def adapt_model(self, model: ModelSpec) -> ModelSpec:
        bits = grouped_bits(4, self.options.group_size, self.options.zero_point, model.hidden_size)
        return with_kv(with_weights(model, bits), self.options.kv)
