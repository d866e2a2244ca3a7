"""The mixture-of-experts MLP block: a router sends every token to a few of many gated MLPs.

    weights, chosen = router(x)                          [tokens, top_k] each
    out = sum over k of weights[:, k] * expert[chosen[:, k]](x)  (+ shared experts, which see every token)

Routing as in Mixtral (arXiv:2401.04088) and Qwen3-MoE: softmax, top-k; DeepSeek-V2 (arXiv:2405.04434): the same
within the best groups of experts; DeepSeek-V3 (arXiv:2412.19437): sigmoid, chosen by score plus a bias per expert,
weighted by the score alone.

Invariants
* Equal scores are chosen among as `torch.topk` does, so that ties fall as in transformers.
* Tokens are sorted by expert once; each touched expert runs one product up and one down, whatever the number of
  tokens, and no Python runs per token.
* A token's experts are summed in the order the router chose them: nothing depends on the order of the sort.
* Every rank routes alike, holds a share of the columns of every expert and returns the sum over the ranks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from twinfer.core.runtime.families import Mark
from twinfer.core.runtime.families.decoder import RankLoader, Shapes, linear_shapes
from twinfer.core.runtime.families.gated_mlp import GatedMLP
from twinfer.core.runtime.linear import Linear
from twinfer.core.spec import ModelSpec, MoESpec
from twinfer.kernels import ops


def route(logits: Tensor, moe: MoESpec, score_bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Float32 weights and indices of the chosen experts, `[tokens, top_k]` each, from `logits [tokens, experts]`.

    score_bias: `[experts]`, added for the choice and not for the weight.
    """
    logits = logits.float()
    scores = logits.softmax(dim=-1) if moe.scoring == "softmax" else logits.sigmoid()
    choice = scores if score_bias is None else scores + score_bias
    if moe.num_groups > 1:
        groups = choice.view(len(choice), moe.num_groups, -1)
        best = groups.topk(moe.group_score_top, dim=-1).values.sum(dim=-1)
        kept = torch.topk(best, moe.top_groups, dim=-1, sorted=False).indices
        dropped = torch.ones_like(best, dtype=torch.bool).scatter_(1, kept, False)
        choice = groups.masked_fill(dropped[..., None], float("-inf")).flatten(1)
    chosen = torch.topk(choice, moe.top_k, dim=-1).indices
    weights = scores.gather(1, chosen)
    if moe.renormalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return (weights if moe.scale == 1.0 else weights * moe.scale), chosen


class MoE:
    """See `MLPBlock`. Tensors lie under `{prefix}mlp.` in the checkpoint: gate, experts.N, shared_experts."""

    def __init__(self, weights: RankLoader, prefix: str) -> None:
        spec, load = weights.spec, weights.load
        assert spec.moe is not None
        self.moe, self.act, self.parallel = spec.moe, spec.hidden_act, weights.parallel
        name = f"{prefix}mlp."
        router = load(f"{name}gate.weight")
        self.router = router.float() if self.moe.float32_router else router
        self.score_bias: Tensor | None = None
        if self.moe.score_bias:  # kept in float32: it decides between close scores
            self.score_bias = load.source.get(f"{name}gate.e_score_correction_bias").float().to(load.device)
        self.width = self.parallel.share(self.moe.intermediate_size, "columns of an expert")
        self.gate_up_projs: list[Linear] = []
        self.down_projs: list[Linear] = []
        for e in range(self.moe.num_experts):
            op, expert = f"{prefix}experts.{e}.", f"{name}experts.{e}."
            up = weights.columns(f"{op}gate_up_proj", [f"{expert}gate_proj", f"{expert}up_proj"])
            self.gate_up_projs.append(up)
            self.down_projs.append(weights.rows(f"{op}down_proj", f"{expert}down_proj"))
        self.shared = (
            GatedMLP(weights, prefix, "shared_experts.", "mlp.shared_experts.") if self.moe.num_shared else None
        )

    @staticmethod
    def shapes(spec: ModelSpec, prefix: str) -> Shapes:
        """What the checkpoint holds for one layer."""
        moe, name, h = spec.moe, f"{prefix}mlp.", spec.hidden_size
        assert moe is not None
        shapes = linear_shapes(f"{name}gate", moe.num_experts, h)
        if moe.score_bias:
            shapes[f"{name}gate.e_score_correction_bias"] = (moe.num_experts,)
        parts = [(f"experts.{e}", moe.intermediate_size, False) for e in range(moe.num_experts)]
        if moe.num_shared:
            parts.append(("shared_experts", moe.shared_width, spec.mlp_bias))
        for part, width, bias in parts:
            shapes |= linear_shapes(f"{name}{part}.gate_proj", width, h, bias)
            shapes |= linear_shapes(f"{name}{part}.up_proj", width, h, bias)
            shapes |= linear_shapes(f"{name}{part}.down_proj", h, width, bias)
        return shapes

    def __call__(self, x: Tensor, mark: Mark) -> Tensor:
        weights, chosen = route(F.linear(x.to(self.router.dtype), self.router), self.moe, self.score_bias)
        mark("router")
        out = self._experts(x, weights, chosen, mark)
        if self.shared is not None:
            out = out.add_(self.shared.partial(x, mark))
        return self.parallel.all_reduce(out, mark)

    def _experts(self, x: Tensor, weights: Tensor, chosen: Tensor, mark: Mark) -> Tensor:
        """This rank's part of the weighted sum of the chosen experts, `[tokens, hidden]`."""
        tokens, top_k = chosen.shape
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=self.moe.num_experts).tolist()
        touched = [(e, n) for e, n in enumerate(counts) if n]
        sizes = [n for _, n in touched]
        inputs = x.index_select(0, order.div(top_k, rounding_mode="floor"))
        up = x.new_empty(len(order), 2 * self.width)
        for (e, _), part, into in zip(touched, inputs.split(sizes), up.split(sizes), strict=True):
            into.copy_(self.gate_up_projs[e](part))
        del inputs, part
        mark("experts")
        up = ops.gated(up, self.act)
        mark("mlp_act")
        outputs = x.new_empty(len(order), x.shape[1])  # by token, then by choice
        for (e, _), part, places in zip(touched, up.split(sizes), order.split(sizes), strict=True):
            outputs.index_copy_(0, places, self.down_projs[e](part))
        out = torch.bmm(weights.to(x.dtype)[:, None], outputs.view(tokens, top_k, -1))[:, 0]
        mark("experts")
        return out


__all__ = ["MoE", "route"]
