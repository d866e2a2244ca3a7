"""The Llama decoder (arXiv:2302.13971), written out. Mistral, Qwen2, Qwen3 and Phi-3 are the same with other options,
Mixtral and Qwen3-MoE with another MLP block, DeepSeek-V2 and V3 with another attention block, too.

    x = embed(tokens)
    each layer:  x += attention(norm(x));  x += mlp(norm(x))
    logits = lm_head(norm(x)) at the wanted positions

Invariants
* Activations are packed `[tokens, ...]`; a token meets others only inside `attention`.
* Norms and rotations are computed in float32 and rounded once, as Hugging Face's files do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from twinfer.core.runtime.attention_torch import AttentionStep
from twinfer.core.runtime.families import Mark
from twinfer.core.runtime.families.decoder import AttentionBlock, Decoder, MLPBlock, RankLoader, Shapes, end_shapes
from twinfer.core.runtime.families.gated_mlp import GatedMLP
from twinfer.core.runtime.families.latent_attention import LatentBlock
from twinfer.core.runtime.families.moe import MoE
from twinfer.core.runtime.families.qkv_attention import QKVAttention
from twinfer.core.spec import ModelSpec
from twinfer.kernels import ops

BlockOf = Callable[[ModelSpec, int], type[Any]]
"""(model, layer) to the class of the block there: built as `(RankLoader, prefix)`, with a static `shapes(spec, prefix)`."""


def attention_block(spec: ModelSpec, layer: int) -> type[Any]:
    return QKVAttention if spec.mla is None else LatentBlock


def mlp_block(spec: ModelSpec, layer: int) -> type[Any]:
    return MoE if spec.is_moe(layer) else GatedMLP


@dataclass(frozen=True, slots=True)
class Layer:
    """The two blocks of a layer and the norms before them, `[hidden]`."""

    input_norm: Tensor
    attention: AttentionBlock
    post_norm: Tensor
    mlp: MLPBlock


class Llama(Decoder):
    """A Llama-family model on one device."""

    def __init__(
        self, weights: RankLoader, attention_of: BlockOf = attention_block, mlp_of: BlockOf = mlp_block
    ) -> None:
        super().__init__(weights)
        spec, load = weights.spec, weights.load
        self.layers: list[Layer] = []
        for i in range(spec.num_layers):
            prefix = f"model.layers.{i}."
            self.layers.append(
                Layer(
                    load(f"{prefix}input_layernorm.weight"),
                    attention_of(spec, i)(weights, prefix),
                    load(f"{prefix}post_attention_layernorm.weight"),
                    mlp_of(spec, i)(weights, prefix),
                )
            )

    def forward(
        self, tokens: Tensor, positions: Tensor, attention: AttentionStep, logits_index: Tensor, mark: Mark
    ) -> Tensor:
        """Float32 logits `[len(logits_index), vocab]`; see `DecoderModel`."""
        eps = self.spec.norm_eps
        x = self.embed(tokens, mark)
        rotation = self.rotary(positions)
        mark("embed")
        h = ops.rms_norm(x, self.layers[0].input_norm, eps)
        for i, layer in enumerate(self.layers):
            if i:
                h = ops.add_rms_norm(x, h, layer.input_norm, eps)
            mark("norms")
            h = layer.attention(h, i, rotation, attention, mark)
            h = ops.add_rms_norm(x, h, layer.post_norm, eps)
            mark("norms")
            h = layer.mlp(h, mark)
        return self.logits(x, h, logits_index, mark)


def expected_tensors(spec: ModelSpec, attention_of: BlockOf = attention_block, mlp_of: BlockOf = mlp_block) -> Shapes:
    """Names and shapes that a checkpoint of `spec` holds."""
    shapes = end_shapes(spec)
    for i in range(spec.num_layers):
        prefix = f"model.layers.{i}."
        shapes |= {
            f"{prefix}{norm}.weight": (spec.hidden_size,) for norm in ("input_layernorm", "post_attention_layernorm")
        }
        shapes |= attention_of(spec, i).shapes(spec, prefix)
        shapes |= mlp_of(spec, i).shapes(spec, prefix)
    return shapes


__all__ = ["BlockOf", "Layer", "Llama", "attention_block", "expected_tensors", "mlp_block"]
