"""A smaller model of the same vocabulary guesses one token after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydantic import Field

from twinfer.core.catalog import resolve_spec
from twinfer.core.errors import ConfigError
from twinfer.core.layout import Layout
from twinfer.core.speculation import GuessTreeOptions, Speculator
from twinfer.core.work import Op, StepShape, step_ops

if TYPE_CHECKING:
    from twinfer.core.spec import ModelSpec


class Draft(Speculator):
    name = "draft"
    summary = "a smaller model guesses a chain or a tree of tokens, with its own weights and passes"
    reference = (
        "Leviathan, Kalman, Matias: Fast Inference from Transformers via Speculative Decoding (arXiv:2211.17192)"
    )
    reads_prompt = True

    class Options(GuessTreeOptions):
        model: str = Field(default="", description="the draft model: spec name, config.json, directory or hub id")

    options: Options

    def drafter(self, model: ModelSpec) -> ModelSpec:
        if not self.options.model:
            raise ConfigError("--speculator", "draft", "no draft model was given", "give --speculator draft:model=NAME")
        spec = resolve_spec(self.options.model)
        if spec.vocab_size != model.vocab_size:
            raise ConfigError(
                "--speculator", f"draft:model={self.options.model}",
                f"its vocabulary has {spec.vocab_size} tokens, that of {model.name} {model.vocab_size}",
                "take a draft model with the same tokenizer",
            )  # fmt: skip
        return spec.with_dtypes(model.dtype)

    def draft_ops(self, model: ModelSpec, shape: StepShape, layout: Layout) -> Sequence[Op]:
        return step_ops(self._drafter(model), shape, layout)

    def weight_bytes(self, model: ModelSpec, layout: Layout) -> float:
        return self._drafter(model).weight_bytes(layout.tp)

    def _drafter(self, model: ModelSpec) -> ModelSpec:
        """Found once: timing asks for it again and again."""
        found = self.__dict__.get("_found")
        if found is None or found[0] is not model:
            found = self.__dict__["_found"] = (model, self.drafter(model))
        spec: ModelSpec = found[1]
        return spec
