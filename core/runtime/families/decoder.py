"""What every decoder model file shares: the two ends of the model, and weights as one rank holds them.

    RankLoader   projections of one tensor-parallel rank, joined where they read the same input
    Decoder      token table, final norm, LM head and rotary tables; a family adds its layers and its loop
    AttentionBlock, MLPBlock   what a layer is made of

Invariants
* Projections into heads or MLP columns are cut by rows, those back to the hidden size by columns, whole heads to a
  rank; a block returns the sum over the ranks. Norms are whole on every rank.
* A bias of a projection back counts once: rank 0 adds it.
* Token table and LM head are cut by vocabulary; activations and logits are whole on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from twinfer.core.runtime.attention_torch import AttentionStep
from twinfer.core.runtime.families import Mark
from twinfer.core.runtime.linear import Linear, LinearFactory, TokenTable, fused
from twinfer.core.runtime.parallel import ALONE, Parallel
from twinfer.core.runtime.rope import Rotation, rotary_of
from twinfer.core.runtime.weights import Cut, Loader
from twinfer.core.spec import ModelSpec
from twinfer.kernels import ops

Shapes = dict[str, tuple[int, ...]]
"""Name of a tensor in the checkpoint to its shape."""


class AttentionBlock(Protocol):
    """`x [tokens, hidden]`, already normed, to `[tokens, hidden]`, summed over the ranks."""

    def __call__(self, x: Tensor, layer: int, rotation: Rotation, step: AttentionStep, mark: Mark) -> Tensor: ...


class MLPBlock(Protocol):
    """`x [tokens, hidden]`, already normed, to `[tokens, hidden]`, summed over the ranks."""

    def __call__(self, x: Tensor, mark: Mark) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class RankLoader:
    """Weights of `spec` as one rank holds them."""

    spec: ModelSpec
    load: Loader
    linear: LinearFactory
    parallel: Parallel = ALONE

    def columns(self, op: str, names: Sequence[str], heads: Sequence[int] | None = None) -> Linear:
        """Projections `names` over one input as one linear `op`; a part without bias counts as zeros.

        heads: number of heads of each, which stay whole; without it, rows are cut evenly.
        """

        def cut(i: int) -> Cut:
            if heads is None:
                return lambda tensor: self.parallel.cut(tensor, 0, "MLP columns")
            return lambda tensor: self.parallel.cut_heads(tensor, heads[i])

        weights = [self.load.projection(f"{name}.weight", cut(i)) for i, name in enumerate(names)]
        found = [self.load.optional(f"{name}.bias", cut(i)) for i, name in enumerate(names)]
        bias = None
        if any(b is not None for b in found):
            bias = fused(
                [b if b is not None else torch.zeros(w.shape[0], dtype=self.load.dtype, device=self.load.device)
                 for b, w in zip(found, weights, strict=True)]
            )  # fmt: skip
        return self.linear(op, fused(weights), bias)

    def rows(self, op: str, name: str, num_heads: int | None = None) -> Linear:
        """The projection `name` back to the hidden size as linear `op`; its outputs are to be summed over the ranks."""

        def cut(tensor: Any) -> Any:
            if num_heads is None:
                return self.parallel.cut(tensor, 1, "MLP columns")
            return self.parallel.cut_heads(tensor, num_heads, 1)

        bias = self.load.optional(f"{name}.bias") if self.parallel.rank == 0 else None
        return self.linear(op, self.load.projection(f"{name}.weight", cut), bias)


class Decoder:
    """Ends of a decoder; a family sets `layers` and writes `forward`."""

    def __init__(self, weights: RankLoader) -> None:
        spec, load, parallel = weights.spec, weights.load, weights.parallel
        self.spec, self.dtype, self.device, self.parallel = spec, load.dtype, load.device, parallel
        self.table = TokenTable(
            load.projection("model.embed_tokens.weight", parallel.cut_vocab),
            spec.tie_embeddings,
            parallel,
            weights.linear,
        )
        if self.table.head is not None:
            self.lm_head: Linear = self.table.head
        else:
            self.lm_head = weights.linear("lm_head", load.projection("lm_head.weight", parallel.cut_vocab), None)
        self.norm = load("model.norm.weight")
        self.rotary = rotary_of(spec, load)
        # rounded to the dtype of the activations, as transformers does
        self.embed_scale = torch.tensor(spec.embed_scale, dtype=load.dtype).item()

    def embed(self, tokens: Tensor, mark: Mark | None = None) -> Tensor:
        """`tokens [tokens]` to `[tokens, hidden]`, scaled."""
        x = self.table.embed(tokens, mark)
        return x if self.embed_scale == 1.0 else ops.scale(x, self.embed_scale)

    def logits(self, x: Tensor, delta: Tensor, index: Tensor, mark: Mark) -> Tensor:
        """Float32 logits `[len(index), vocab]` of rows `index` of the last residual `x + delta`, `[tokens, hidden]`."""
        spec = self.spec
        if len(index) < len(x):
            x, delta = ops.take_rows(x, index), ops.take_rows(delta, index)
        x = ops.add_rms_norm(x, delta, self.norm, spec.norm_eps, spec.norm_plus_one)
        mark("norms")
        logits = self.lm_head(x)
        if self.parallel.size > 1:
            mark("lm_head")
            logits = self.parallel.all_gather(logits, mark)[:, : spec.vocab_size]
        logits = logits.float()
        if spec.logit_softcap is not None:
            logits = ops.softcap(logits, spec.logit_softcap)
        mark("lm_head")
        return logits


def end_shapes(spec: ModelSpec) -> Shapes:
    """Tensors of the two ends."""
    shapes: Shapes = {
        "model.embed_tokens.weight": (spec.vocab_size, spec.hidden_size),
        "model.norm.weight": (spec.hidden_size,),
    }
    if not spec.tie_embeddings:
        shapes["lm_head.weight"] = (spec.vocab_size, spec.hidden_size)
    return shapes


def linear_shapes(name: str, rows: int, columns: int, bias: bool = False) -> Shapes:
    """A projection `[rows, columns]` and its bias."""
    shapes: Shapes = {f"{name}.weight": (rows, columns)}
    return shapes | {f"{name}.bias": (rows,)} if bias else shapes


__all__ = ["AttentionBlock", "Decoder", "MLPBlock", "RankLoader", "Shapes", "end_shapes", "linear_shapes"]
