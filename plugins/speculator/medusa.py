"""Heads beside the model's own guess the next tokens at once, each its own position ahead.

A head is a residual block (hidden to hidden) and an LM head of its own. The best token of each head makes a chain, several
candidates a head make a tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field, model_validator

from twinfer.core.acceptance import Acceptance, by_depth
from twinfer.core.dtypes import dtype_bytes
from twinfer.core.layout import Layout
from twinfer.core.speculation import Chance, Speculator, TreeOptions
from twinfer.core.work import Linear, Op, StepShape

if TYPE_CHECKING:
    from twinfer.core.spec import ModelSpec


class Medusa(Speculator):
    name = "medusa"
    summary = "extra heads guess the next tokens at once from the last hidden state, one or several candidates a head"
    reference = "Cai et al.: Medusa: Simple LLM Inference Acceleration with Multiple Decoding Heads (arXiv:2401.10774)"

    class Options(TreeOptions):
        count: ClassVar[str] = "heads"
        heads: int = Field(default=4, ge=0, le=64, description="heads, each guesses one token; 0 is no speculation")
        alpha: Chance | tuple[Chance, ...] = Field(  # type: ignore[assignment]
            default=0.6, description="chance that a guess is right, those before it being right; or one a head"
        )

        @model_validator(mode="after")
        def _one_per_head(self) -> Medusa.Options:
            if isinstance(self.alpha, tuple) and len(self.alpha) != self.heads:
                raise ValueError(f"alpha has {len(self.alpha)} chances for {self.heads} heads")
            return self

    options: Options

    @property
    def drafting(self) -> tuple[int, ...]:
        return (1,)

    def draft_ops(self, model: ModelSpec, shape: StepShape, layout: Layout) -> Sequence[Op]:
        act, rows = dtype_bytes(model.dtype), shape.num_logits
        return [linear.op(rows, act) for linear in self._linears(model, layout)]

    def weight_bytes(self, model: ModelSpec, layout: Layout) -> float:
        return sum(linear.weight_bytes * linear.count for linear in self._linears(model, layout))

    def _acceptance(self) -> Acceptance:
        alpha = self.options.alpha
        if isinstance(alpha, tuple) and not self.options.profile:
            return by_depth(alpha, self.options.again)
        return super()._acceptance()

    def _linears(self, model: ModelSpec, layout: Layout) -> list[Linear]:
        act, h, heads = dtype_bytes(model.dtype), model.hidden_size, self.options.heads
        return [
            Linear(name, n, h, n * h * act, model.dtype, heads)
            for name, n in (("medusa_block", -(-h // layout.tp)), ("medusa_head", -(-model.vocab_size // layout.tp)))
        ]
