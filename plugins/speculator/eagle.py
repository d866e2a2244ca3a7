"""One or few layers on top of the model's own hidden states guess a chain or a tree of tokens.

A pass is fed the hidden state and the embedding of the token after it, joined by one product (2 x hidden to hidden), runs
decoder layers of the model's shape and reads the model's own LM head; of a tree it is fed all guesses of a depth that have
others after them. EAGLE-2 chooses its tree anew at each step (arXiv:2406.16858); here its shape is the same in all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydantic import Field

from twinfer.core.dtypes import dtype_bytes
from twinfer.core.errors import ConfigError
from twinfer.core.layout import Layout
from twinfer.core.memory_parts import cut
from twinfer.core.speculation import GuessTreeOptions, Speculator
from twinfer.core.work import Linear, Op, StepShape, step_ops

if TYPE_CHECKING:
    from twinfer.core.spec import ModelSpec


class Eagle(Speculator):
    name = "eagle"
    summary = (
        "a decoder layer on the model's hidden states guesses a chain or a tree of tokens, through the model's own head"
    )
    reference = "Li et al.: EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty (arXiv:2401.15077)"
    reads_prompt = True

    class Options(GuessTreeOptions):
        layers: int = Field(default=1, ge=1, description="decoder layers of the drafting head, of the model's shape")

    options: Options

    def drafter(self, model: ModelSpec) -> ModelSpec:
        layers = self.options.layers
        if layers >= model.num_layers:
            raise ConfigError(
                "--speculator", f"eagle:layers={layers}", f"{model.name} itself has {model.num_layers}",
                f"give at most {model.num_layers - 1}",
            )  # fmt: skip
        return cut(model, range(model.num_layers - layers, model.num_layers))

    def draft_ops(self, model: ModelSpec, shape: StepShape, layout: Layout) -> Sequence[Op]:
        act, n, k = dtype_bytes(model.dtype), -(-model.hidden_size // layout.tp), 2 * model.hidden_size
        joined = Linear("draft_join", n, k, n * k * act, model.dtype, 1).op(shape.num_tokens, act)
        return [joined, *step_ops(self.drafter(model), shape, layout)]

    def weight_bytes(self, model: ModelSpec, layout: Layout) -> float:
        layers = self.drafter(model)
        blocks = layers.rank_block_params(layout.tp) * layers.block_bits / 8
        return blocks + 2 * model.hidden_size**2 * dtype_bytes(model.dtype) / layout.tp
