"""Sizes that a memory budget is made of: activations, KV blocks, what is fixed and what is left; and which ranks can share.

Invariants
* Bytes of one tensor-parallel rank; functions of the spec and the configuration alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from twinfer.core.cache_groups import Paging
from twinfer.core.config import EngineConfig
from twinfer.core.dtypes import dtype_bytes
from twinfer.core.errors import ConfigError
from twinfer.core.spec import ModelSpec

GIB = 2**30
LOGIT_COPIES = 2  # float32 logits and the probabilities made of them


def activation_bytes(spec: ModelSpec, max_num_batched_tokens: int, max_num_seqs: int, tp: int = 1) -> int:
    """Peak of activations of one step on one rank: the widest layer over all tokens, and the logits of all rows.

    Live at the widest point: the residual and a normed copy, plus either q, k, v and the attention output
    or the two halves of the gated MLP and their product (for MoE: those of every chosen expert and its output).
    """
    act = dtype_bytes(spec.dtype)
    heads = -(-spec.num_heads // tp)
    attention = heads * (spec.head_dim + spec.v_dim) + spec.kv_heads_per_rank(tp) * (spec.head_dim + spec.v_dim)
    if spec.mla is not None and spec.mla.absorbed:  # queries, and queries and sums in the width of the latent
        attention = heads * (spec.head_dim + spec.mla.latent_dim + spec.mla.kv_lora_rank + spec.v_dim)
        attention += spec.mla.latent_dim
    elif spec.mla is not None:
        attention = heads * 2 * (spec.head_dim + spec.v_dim) + spec.mla.latent_dim
    matrices = 3 if spec.gated_mlp else 2
    mlp = matrices * -(-spec.intermediate_size // tp)
    if spec.moe is not None:
        moe = spec.moe
        shared = moe.shared_width
        wide = moe.top_k * (matrices * -(-moe.intermediate_size // tp) + spec.hidden_size)
        mlp = max(mlp if spec.num_moe_layers < spec.num_layers else 0, wide + matrices * -(-shared // tp))
    per_token = (2 * spec.hidden_size + max(attention, mlp)) * act
    logits = max_num_seqs * -(-spec.vocab_size // tp) * dtype_bytes("float32") * LOGIT_COPIES
    return int(max_num_batched_tokens * per_token + logits)


@dataclass(frozen=True, slots=True)
class Sizes:
    """One rank's memory before the KV pool is cut into blocks, in bytes.

    per_token: KV of one token in all layers; per_slot: in one page, which has the layers of one cache group.
    """

    weights: int
    activations: int
    fixed: int  # runtime and graphs
    per_token: float
    per_slot: float
    left: float  # of the budget, for KV; negative when even the rest does not fit


def sizes_of(spec: ModelSpec, config: EngineConfig, memory: int, runtime: int, graphs: int, paging: Paging) -> Sizes:
    """Sizes of `spec` on one of `config.tp` ranks with `memory` bytes of device memory."""
    weights = int(spec.weight_bytes(config.tp))
    active = activation_bytes(spec, config.max_num_batched_tokens, config.max_num_seqs, config.tp)
    fixed = runtime + graphs
    left = memory * config.memory_fraction - weights - active - fixed
    per_token = spec.kv_bytes_per_token(tp=config.tp)
    return Sizes(weights, active, fixed, per_token, per_token * paging.share, left)


def gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB" if size >= 0.01 * GIB or not size else f"{size / 2**10:.1f} KiB"


def refuse_indivisible(model: ModelSpec, tp: int) -> None:
    """ConfigError naming the sizes that work when `tp` ranks cannot share the heads or columns of `model`."""
    wrong = why_indivisible(model, tp)
    if wrong:
        fits = [str(n) for n in range(1, model.num_heads + 1) if not why_indivisible(model, n)]
        raise ConfigError("--tp", tp, f"{model.name}: {wrong}", f"use {', '.join(fits)}")


def why_indivisible(model: ModelSpec, tp: int) -> str:
    """What of `model` does not divide over `tp` ranks, "" for nothing."""
    counts = {"attention heads": model.num_heads}
    if any(not model.is_moe(layer) for layer in range(model.num_layers)):
        counts["MLP columns"] = model.intermediate_size
    if model.moe is not None:
        moe = model.moe
        counts["columns of an expert"] = moe.intermediate_size
        if moe.num_shared:
            counts["columns of the shared experts"] = moe.shared_width
    for what, count in counts.items():
        if count % tp:
            return f"its {count} {what} do not divide over {tp} ranks"
    heads = model.num_kv_heads
    if model.mla is None and heads % tp and tp % heads:
        return f"its {heads} KV heads can neither be divided over {tp} ranks nor copied equally often"
    return ""
