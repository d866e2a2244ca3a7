"""GPTQ and AWQ: integer weights fitted to calibration data, computing in 16 bits.

Both store what plain rounding stores (a scale and a zero point per group) and differ in how values are chosen, which
memory and time do not see. What they do see: the order of inputs (`desc_act`) and whether a kernel widens weights as it
multiplies (`fused`) or before (`expand_rows`), which pays off when many rows share the wide weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from pydantic import Field, field_validator

from twinfer.core.work import Op
from twinfer.plugins.quantizer.what_if import (
    SCALE_BITS,
    KVOption,
    WhatIf,
    dequantized_weights,
    grouped_bits,
    reordered_inputs,
    with_kv,
    with_weights,
)

if TYPE_CHECKING:
    from twinfer.core.spec import ModelSpec
    from twinfer.core.work import StepShape

CHANNEL = -1
"""group_size: one group per output channel."""


class _Grouped(KVOption):
    group_size: int = Field(
        default=128,
        ge=CHANNEL,
        le=4096,
        description="weights of one input row that share a scale; -1 is a whole channel",
    )
    zero_point: bool = Field(default=True, description="store a zero point per group beside the scale")
    expand_rows: int | None = Field(
        default=None,
        ge=1,
        description="widen weights to 16 bits before products of at least that many rows; None: kernels that do it as "
        "they multiply",
    )

    @field_validator("group_size")
    @classmethod
    def _whole(cls, value: int) -> int:
        if value != CHANNEL and value < 16:
            raise ValueError("is -1 for a whole channel, or at least 16")
        return value


def _bits(bits: int, options: _Grouped, model: ModelSpec) -> float:
    if options.group_size == CHANNEL:
        return bits + (SCALE_BITS + (bits if options.zero_point else 0)) / model.hidden_size
    return grouped_bits(bits, options.group_size, options.zero_point, model.hidden_size)


class GPTQ(WhatIf):
    name = "gptq"
    summary = "2- to 8-bit weights fitted column by column to calibration data; products in 16 bits"
    reference = "Frantar et al.: GPTQ (arXiv:2210.17323)"

    class Options(_Grouped):
        bits: Literal[2, 3, 4, 8] = Field(default=4, description="of one weight")
        desc_act: bool = Field(
            default=False, description="groups in the order of activation size: inputs are gathered before each product"
        )

    options: Options

    def adapt_model(self, model: ModelSpec) -> ModelSpec:
        bits = _bits(self.options.bits, self.options, model)
        if self.options.desc_act:
            bits += 32 / model.hidden_size  # the group of each input, an int32
        return with_kv(with_weights(model, bits), self.options.kv)

    def adapt_ops(self, ops: Sequence[Op], model: ModelSpec, shape: StepShape) -> Sequence[Op]:
        if self.options.desc_act:
            ops = reordered_inputs(ops, model)
        rows = self.options.expand_rows
        return ops if rows is None else dequantized_weights(ops, model, rows)


class AWQ(WhatIf):
    name = "awq"
    summary = "4-bit weights scaled so that the channels that matter lose least; products in 16 bits"
    reference = "Lin et al.: AWQ (arXiv:2306.00978)"

    class Options(_Grouped):
        bits: Literal[4, 8] = Field(default=4, description="of one weight")

    options: Options

    def adapt_model(self, model: ModelSpec) -> ModelSpec:
        return with_kv(with_weights(model, _bits(self.options.bits, self.options, model)), self.options.kv)

    def adapt_ops(self, ops: Sequence[Op], model: ModelSpec, shape: StepShape) -> Sequence[Op]:
        rows = self.options.expand_rows
        return ops if rows is None else dequantized_weights(ops, model, rows)
