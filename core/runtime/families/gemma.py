"""The Gemma decoders, 2 (arXiv:2408.00118) and 3 (arXiv:2503.19786).

    x = embed(tokens) * sqrt(hidden)
    each layer:  x += norm(attention(norm(x)));  x += norm(mlp(norm(x)))
    logits = lm_head(norm(x)) at the wanted positions

Gemma 2 caps the scores of attention and the logits; Gemma 3 norms q and k instead. Both alternate layers with a
sliding window and layers that see everything; Gemma 3 turns the sliding ones by a rotary base of their own.

Invariants
* Norms multiply by 1 + weight before rounding (`norm_plus_one`).
* The embedding scale is rounded to the dtype of the activations, as transformers does.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from twinfer.core.runtime.attention_torch import AttentionStep
from twinfer.core.runtime.families import Mark
from twinfer.core.runtime.families.decoder import AttentionBlock, Decoder, MLPBlock, RankLoader, Shapes, end_shapes
from twinfer.core.runtime.families.gated_mlp import GatedMLP
from twinfer.core.runtime.families.qkv_attention import QKVAttention
from twinfer.core.runtime.rope import local_rotary_of
from twinfer.core.spec import ModelSpec
from twinfer.kernels import ops

NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")


@dataclass(frozen=True, slots=True)
class Layer:
    """The two blocks of a layer, each between two norms `[hidden]`; `local`: turned by the local rotary base."""

    input_norm: Tensor
    attention: AttentionBlock
    post_attention_norm: Tensor
    pre_mlp_norm: Tensor
    mlp: MLPBlock
    post_mlp_norm: Tensor
    local: bool


class Gemma(Decoder):
    """A Gemma 2 or 3 model on one device."""

    def __init__(self, weights: RankLoader) -> None:
        super().__init__(weights)
        spec, load = weights.spec, weights.load
        self.local_rotary = local_rotary_of(spec, load)
        self.layers: list[Layer] = []
        for i in range(spec.num_layers):
            prefix = f"model.layers.{i}."
            norms = [load(f"{prefix}{name}.weight") for name in NORMS]
            local = self.local_rotary is not None and spec.window(i) is not None
            self.layers.append(
                Layer(
                    norms[0], QKVAttention(weights, prefix), norms[1],
                    norms[2], GatedMLP(weights, prefix), norms[3], local,
                )
            )  # fmt: skip

    def forward(
        self, tokens: Tensor, positions: Tensor, attention: AttentionStep, logits_index: Tensor, mark: Mark
    ) -> Tensor:
        """Float32 logits `[len(logits_index), vocab]`; see `DecoderModel`."""
        eps = self.spec.norm_eps
        x = self.embed(tokens)
        everywhere = self.rotary(positions)
        nearby = self.local_rotary(positions) if self.local_rotary is not None else everywhere
        mark("embed")
        h = ops.rms_norm(x, self.layers[0].input_norm, eps, plus_one=True)
        for i, layer in enumerate(self.layers):
            if i:
                h = ops.add_rms_norm(x, h, layer.input_norm, eps, plus_one=True)
            mark("norms")
            h = layer.attention(h, i, nearby if layer.local else everywhere, attention, mark)
            h = ops.rms_norm(h, layer.post_attention_norm, eps, plus_one=True)
            h = ops.add_rms_norm(x, h, layer.pre_mlp_norm, eps, plus_one=True)
            mark("norms")
            h = layer.mlp(h, mark)
            h = ops.rms_norm(h, layer.post_mlp_norm, eps, plus_one=True)
        return self.logits(x, h, logits_index, mark)


def expected_tensors(spec: ModelSpec) -> Shapes:
    """Names and shapes that a checkpoint of `spec` holds."""
    shapes = end_shapes(spec)
    for i in range(spec.num_layers):
        prefix = f"model.layers.{i}."
        shapes |= {f"{prefix}{norm}.weight": (spec.hidden_size,) for norm in NORMS}
        shapes |= QKVAttention.shapes(spec, prefix) | GatedMLP.shapes(spec, prefix)
    return shapes


__all__ = ["Gemma", "Layer", "expected_tensors"]
