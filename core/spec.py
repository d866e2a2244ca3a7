"""A model as numbers: shapes, formats and layer pattern, without weights.

Everything that memory, work and the torch model need to know about an architecture is here, read from
a Hugging Face `config.json` (`core/catalog.py` also reads GGUF headers into the same form).

Invariants
* Frozen; techniques return changed copies (`dataclasses.replace`).
* Sizes are in elements, bytes only where the name says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from twinfer.core.errors import ModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class MoESpec:
    """Mixture of experts: `num_experts` routed, `top_k` active, `num_shared` always on."""

    num_experts: int
    top_k: int
    intermediate_size: int
    num_shared: int = 0
    shared_intermediate_size: int = 0
    first_dense_layers: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MLASpec:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434)."""

    kv_lora_rank: int
    q_lora_rank: int | None
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Shapes of a decoder-only transformer.

    `layer_windows`: sliding window of each layer, None for full attention; empty means all full.
    `weight_bits`: average stored bits per weight of the block linears (16 for fp16, 4.5 for int4 g32, ...).
    `other_weight_bits`: bits of embeddings, head and norms, which quantizers usually leave alone.
    """

    name: str
    family: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_context: int
    tie_embeddings: bool = False
    attention_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    gated_mlp: bool = True
    qk_norm: bool = False
    hidden_act: str = "silu"
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_local_theta: float | None = None
    rope_scaling: Mapping[str, Any] | None = None
    partial_rotary: float = 1.0
    layer_windows: tuple[int | None, ...] = ()
    attn_softcap: float | None = None
    logit_softcap: float | None = None
    query_scale: float | None = None
    embed_scale: float = 1.0
    norms_per_layer: int = 2
    norm_plus_one: bool = False
    moe: MoESpec | None = None
    mla: MLASpec | None = None
    dtype: str = "float16"
    kv_dtype: str = "float16"
    weight_bits: float | None = None
    other_weight_bits: float | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    attention: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        for name in ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size", "max_context"):
            if getattr(self, name) < 1:
                raise ModelError(f"{self.name}: {name}={getattr(self, name)} must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"{self.name}: num_kv_heads={self.num_kv_heads} does not divide num_heads={self.num_heads}"
            )

    def window(self, layer: int) -> int | None:
        """Sliding window of `layer` in tokens, None for full attention."""
        return self.layer_windows[layer] if self.layer_windows else None

    @property
    def variant(self) -> str:
        """Attention variant of the checkpoint: mha, gqa, mqa or mla."""
        if self.mla is not None:
            return "mla"
        if self.num_kv_heads == self.num_heads:
            return "mha"
        return "mqa" if self.num_kv_heads == 1 else "gqa"

    # --- KV cache -------------------------------------------------------------------------------

    @property
    def kv_values_per_token_layer(self) -> int:
        """Elements one token adds to the KV cache of one layer."""
        if self.mla is not None:
            return self.mla.kv_lora_rank + self.mla.qk_rope_head_dim
        return 2 * self.num_kv_heads * self.head_dim

    def kv_bytes_per_token(self, kv_dtype: str | None = None, tp: int = 1) -> float:
        """Bytes one token adds to the KV cache of one rank.

        KV heads are split over ranks and replicated once `tp` exceeds them; MLA's latent is replicated.
        """
        from twinfer.core.work import dtype_bytes

        per_layer = self.kv_values_per_token_layer
        if self.mla is None:
            per_layer = 2 * self.head_dim * max(1, -(-self.num_kv_heads // tp))
        return per_layer * self.num_layers * dtype_bytes(kv_dtype or self.kv_dtype)

    # --- parameters -----------------------------------------------------------------------------

    def attention_params(self) -> int:
        """Weights of one layer's attention projections."""
        h = self.hidden_size
        if self.mla is not None:
            m = self.mla
            qk = m.qk_nope_head_dim + m.qk_rope_head_dim
            q = h * self.num_heads * qk
            if m.q_lora_rank:
                q = h * m.q_lora_rank + m.q_lora_rank + m.q_lora_rank * self.num_heads * qk
            kv = h * (m.kv_lora_rank + m.qk_rope_head_dim) + m.kv_lora_rank
            kv += m.kv_lora_rank * self.num_heads * (m.qk_nope_head_dim + m.v_head_dim)
            return q + kv + self.num_heads * m.v_head_dim * h
        q_width = self.num_heads * self.head_dim
        kv_width = self.num_kv_heads * self.head_dim
        n = h * (q_width + 2 * kv_width) + q_width * h
        if self.attention_bias:
            n += q_width + 2 * kv_width
        if self.attention_out_bias:
            n += h
        if self.qk_norm:
            n += 2 * self.head_dim
        return n

    def mlp_params(self, layer: int, active: bool = False) -> int:
        """Weights of one layer's MLP; with `active`, only those one token passes through."""
        matrices = 3 if self.gated_mlp else 2
        if self.moe is not None and layer >= self.moe.first_dense_layers:
            m = self.moe
            experts = m.top_k if active else m.num_experts
            shared = m.num_shared * (m.shared_intermediate_size or m.intermediate_size)
            router = self.hidden_size * m.num_experts
            return matrices * self.hidden_size * (experts * m.intermediate_size + shared) + router
        bias = (matrices - 1) * self.intermediate_size + self.hidden_size if self.mlp_bias else 0
        return matrices * self.hidden_size * self.intermediate_size + bias

    def block_params(self, active: bool = False) -> int:
        """Weights of all layers' linears (what quantizers act on)."""
        return sum(self.attention_params() + self.mlp_params(i, active) for i in range(self.num_layers))

    def other_params(self) -> int:
        """Embeddings, head (once when tied) and norms."""
        tables = 1 if self.tie_embeddings else 2
        norms = self.num_layers * self.norms_per_layer * self.hidden_size + self.hidden_size
        return tables * self.vocab_size * self.hidden_size + norms

    def num_params(self, active: bool = False) -> int:
        return self.block_params(active) + self.other_params()

    def weight_bytes(self) -> float:
        """Bytes of all weights as stored on the device."""
        from twinfer.core.work import dtype_bytes

        full = 8 * dtype_bytes(self.dtype)
        return (
            self.block_params() * (full if self.weight_bits is None else self.weight_bits)
            + self.other_params() * (full if self.other_weight_bits is None else self.other_weight_bits)
        ) / 8
