"""What a model would be in one of GGUF's block types, before anybody has written such a file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from twinfer.core.dtypes import dtype_bits
from twinfer.core.work import Op
from twinfer.plugins.quantizer.what_if import KVOption, WhatIf, quantized_inputs, with_kv, with_weights

if TYPE_CHECKING:
    from twinfer.core.spec import ModelSpec
    from twinfer.core.work import StepShape


class GGUFType(WhatIf):
    name = "gguf-type"
    summary = "Block linears in one GGUF type, activations rounded to int8 per block; `gguf` runs a real file's blocks"
    reference = "GGUF block formats (ggml-common.h)"

    class Options(KVOption):
        type: Literal["q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k"] = Field(
            default="q4_k", description="type of every block linear; published files mix two or three"
        )

    options: Options

    def adapt_model(self, model: ModelSpec) -> ModelSpec:
        return with_kv(with_weights(model, dtype_bits(self.options.type), "int8"), self.options.kv)

    def adapt_ops(self, ops: Sequence[Op], model: ModelSpec, shape: StepShape) -> Sequence[Op]:
        return quantized_inputs(ops, "int8", model.dtype)
