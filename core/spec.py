"""A model as numbers: what describes it (`model_fields.py`), and the sizes of KV cache and weights that follow.

Everything that memory, work and the torch model need to know about an architecture is here, read from
a Hugging Face `config.json` (`core/catalog.py` also reads GGUF headers into the same form).

Invariants
* Frozen; techniques return changed copies (`dataclasses.replace`).
* Sizes are in elements, bytes only where the name says so.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from twinfer.core.dtypes import canonical_dtype, dtype_bits, dtype_bytes
from twinfer.core.errors import ConfigError
from twinfer.core.model_fields import ModelFields
from twinfer.core.model_parts import LinearAttentionSpec, MLASpec, MoESpec, SparseIndexSpec
from twinfer.core.vision import VisionSpec

__all__ = ["LinearAttentionSpec", "MLASpec", "MoESpec", "ModelSpec", "SparseIndexSpec", "VisionSpec"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec(ModelFields):
    """Shapes of a decoder-only transformer (`ModelFields`), and what its KV cache and its weights take."""

    def with_dtypes(self, dtype: str = "auto", kv_dtype: str = "auto") -> ModelSpec:
        """The spec in other formats; "auto" keeps what is there. KV follows `dtype` unless it was set apart."""
        new = self.dtype if dtype == "auto" else canonical_dtype(dtype, "--dtype")
        if dtype_bits(new) < 16:
            raise ConfigError("--dtype", new, "activations need at least 16 bits",
                              "use float32, bfloat16 or float16, and --quant for narrower weights")  # fmt: skip
        if kv_dtype == "auto":
            kv = new if self.kv_dtype == self.dtype else self.kv_dtype
            return replace(self, dtype=new, kv_dtype=kv)
        kv = canonical_dtype(kv_dtype, "--kv-dtype")
        return replace(self, dtype=new, kv_dtype=kv, kv_scale_bytes=self.kv_scale_bytes if kv == self.kv_dtype else 0.0)

    # --- KV cache -------------------------------------------------------------------------------

    def kv_shape(self, tp: int = 1) -> tuple[int, int, int]:
        """(KV heads, width of a key, width of a value) that one layer stores per token on one of `tp` ranks.

        KV heads are split, then replicated once ranks outnumber them. A value width of 0 says that values are the
        first `kv_lora_rank` elements of the keys: the latent of absorbed MLA, one head that every rank holds whole.
        """
        if self.mla is not None and self.mla.absorbed:
            return 1, self.mla.latent_dim, 0
        heads = self.num_kv_heads if self.mla is None else self.num_heads
        return max(1, -(-heads // tp)), self.head_dim, self.v_dim

    @property
    def kv_values_per_token_layer(self) -> int:
        """Elements one token adds to the KV cache of one layer (all KV heads, K and V)."""
        heads, key, value = self.kv_shape()
        return heads * (key + value)

    def kv_heads_per_rank(self, tp: int = 1) -> int:
        """KV heads that one of `tp` ranks stores; see `kv_shape`."""
        return self.kv_shape(tp)[0]

    def kv_bytes_per_token_layer(self, kv_dtype: str | None = None, tp: int = 1) -> float:
        """Bytes one token adds to the KV cache of one layer on one rank, scales of the KV format included.

        Independent of the number of query heads, linear in the KV heads of the rank.
        """
        kv = kv_dtype or self.kv_dtype
        scale = self.kv_scale_bytes if kv == self.kv_dtype else 0.0
        heads, key, value = self.kv_shape(tp)
        return heads * ((key + value) * dtype_bytes(kv) + (2 if value else 1) * scale)

    @property
    def index_bytes_per_token(self) -> int:
        """Bytes one token adds to the sparse indices of all layers; every rank holds them whole."""
        index = self.sparse_index
        return 0 if index is None else index.layers * index.bytes_per_token

    def kv_bytes_per_token(self, kv_dtype: str | None = None, tp: int = 1) -> float:
        """Bytes one token adds to the KV cache of one rank, all layers that keep tokens, their indices included."""
        return self.num_attention_layers * self.kv_bytes_per_token_layer(kv_dtype, tp) + self.index_bytes_per_token

    def state_bytes_per_seq(self, tp: int = 1) -> float:
        """Bytes that one sequence holds on one rank in layers of linear attention, however long it is."""
        if self.linear_attention is None:
            return 0.0
        return self.num_linear_layers * self.linear_attention.state_bytes(self.dtype, tp)

    # --- parameters -----------------------------------------------------------------------------

    def attention_params(self) -> int:
        """Weights of one layer's attention, its own norms included (a sparse index aside)."""
        h = self.hidden_size
        if self.mla is not None:
            m = self.mla
            qk = m.qk_nope_head_dim + m.qk_rope_head_dim
            q = h * self.num_heads * qk
            if m.q_lora_rank:
                q = h * m.q_lora_rank + m.q_lora_rank + m.q_lora_rank * self.num_heads * qk
            kv = h * m.latent_dim + (m.kv_lora_rank if m.latent_norm else 0)
            kv += m.kv_lora_rank * self.num_heads * (m.qk_nope_head_dim + m.v_head_dim)
            if self.attention_bias:
                kv += m.latent_dim + (m.q_lora_rank or 0)
            return q + kv + self.num_heads * m.v_head_dim * h + (h if self.attention_out_bias else 0)
        qkv_width = self.qkv_width()
        n = h * qkv_width + self.num_heads * self.v_dim * h
        if self.attention_bias:
            n += qkv_width
        if self.attention_out_bias:
            n += h
        if self.qk_norm:
            n += self.head_dim * (self.num_heads + self.num_kv_heads if self.wide_qk_norm else 2)
        if self.attention_sinks:
            n += self.num_heads
        return n

    def qkv_width(self) -> int:
        """Columns of the projection in of attention with KV heads: queries, their gate, keys and values."""
        gate = self.num_heads * self.v_dim if self.attention_gate else 0
        return self.num_heads * self.head_dim + gate + self.num_kv_heads * (self.head_dim + self.v_dim)

    def mixer_params(self) -> int:
        """Weights of attention, linear attention and sparse indices of all layers."""
        n = self.num_attention_layers * self.attention_params()
        if self.linear_attention is not None:
            n += self.num_linear_layers * self.linear_attention.params(self.hidden_size)
        return n + self.index_params()

    def index_params(self) -> int:
        """Weights of the sparse indices of all layers."""
        index, rank = self.sparse_index, (self.mla.q_lora_rank if self.mla else None) or self.hidden_size
        return 0 if index is None else index.layers * index.params(self.hidden_size, rank)

    def expert_params(self) -> int:
        """Weights of one routed expert."""
        m, matrices = self.moe, 3 if self.gated_mlp else 2
        if m is None:
            return 0
        width = m.latent_size or self.hidden_size
        return matrices * width * m.intermediate_size + ((matrices - 1) * m.intermediate_size + width if m.bias else 0)

    def router_params(self) -> int:
        """Weights of one MoE layer that no rank can halve: router, the shared experts' gate, projections to the latent."""
        m, h = self.moe, self.hidden_size
        if m is None:
            return 0
        latent = 2 * h * m.latent_size + (h + m.latent_size if m.latent_size and self.mlp_bias else 0)
        return m.num_experts * (h + m.bias + m.score_bias) + (h if m.shared_gate else 0) + latent

    def mlp_params(self, layer: int, active: bool = False) -> int:
        """Weights of one layer's MLP; with `active`, only those one token passes through."""
        matrices = 3 if self.gated_mlp else 2
        h = self.hidden_size
        if self.moe is not None and self.is_moe(layer):
            m = self.moe
            shared = matrices * h * m.shared_width
            shared += (matrices - 1) * m.shared_width + h if m.num_shared and self.mlp_bias else 0
            return (m.top_k if active else m.num_experts) * self.expert_params() + shared + self.router_params()
        if layer in self.bare_layers:
            return 0
        bias = (matrices - 1) * self.intermediate_size + h if self.mlp_bias else 0
        return matrices * h * self.intermediate_size + bias

    def block_params(self, active: bool = False) -> int:
        """Weights of all layers (what quantizers act on; layer norms count in `other_params`)."""
        return self.mixer_params() + sum(self.mlp_params(i, active) for i in range(self.num_layers))

    def other_params(self) -> int:
        """Embeddings, head (once when tied), norms, and the image encoder."""
        return self.rank_other_params(1)

    def num_params(self, active: bool = False) -> int:
        """All weights; with `active`, those that one token passes through (embedding table included, image encoder not)."""
        unseen = self.vision.params if active and self.vision else 0
        return self.block_params(active) + self.other_params() - unseen

    @property
    def block_bits(self) -> float:
        """Stored bits per weight of the block linears, routed experts included."""
        return dtype_bits(self.dtype) if self.weight_bits is None else self.weight_bits

    @property
    def routed_bits(self) -> float:
        """Stored bits per weight of routed experts."""
        return self.block_bits if self.expert_bits is None else self.expert_bits

    @property
    def linear_bits(self) -> float:
        """Stored bits per weight of the block linears that are no routed experts."""
        if self.expert_bits is None or self.moe is None:
            return self.block_bits
        whole = self.block_params()
        routed = self.num_moe_layers * self.moe.num_experts * self.expert_params()
        return (whole * self.block_bits - routed * self.expert_bits) / (whole - routed)

    @property
    def other_bits(self) -> float:
        """Stored bits per weight of embeddings, head and norms."""
        return dtype_bits(self.dtype) if self.other_weight_bits is None else self.other_weight_bits

    def replicated_params(self) -> int:
        """Block weights that a tensor-parallel rank holds whole: routers, MLA's down projections, sparse indices, norms
        of heads and the biases of projections back (only rank 0 has those, which is the rank that is counted)."""
        h, per_layer = self.hidden_size, 0
        if self.attention_out_bias:
            per_layer += h
        if self.mla is not None:
            m = self.mla
            per_layer += h * (m.latent_dim + (m.q_lora_rank or 0)) + (m.q_lora_rank or 0)
            per_layer += m.kv_lora_rank if m.latent_norm else 0
            if self.attention_bias:
                per_layer += m.latent_dim + (m.q_lora_rank or 0)
        elif self.qk_norm and not self.wide_qk_norm:
            per_layer += 2 * self.head_dim
        n = self.num_attention_layers * per_layer + self.index_params()
        if self.moe is not None:
            moe = self.moe
            n += self.num_moe_layers * (self.router_params() + (moe.num_experts * h if moe.bias else 0))
        if self.mlp_bias:
            n += self.num_dense_layers * h
        return n

    def rank_block_params(self, tp: int = 1) -> float:
        """Block weights held by one of `tp` ranks; KV projections are replicated once ranks outnumber KV heads."""
        whole = self.replicated_params()
        kv_copies = 0.0
        if self.mla is None:
            kv = (self.hidden_size + self.attention_bias) * (self.head_dim + self.v_dim)
            copies = self.kv_heads_per_rank(tp) - self.num_kv_heads / tp
            kv_copies = self.num_attention_layers * kv * copies
        return (self.block_params() - whole) / tp + whole + kv_copies

    def rank_other_params(self, tp: int = 1) -> int:
        """Embeddings and head of one of `tp` ranks, cut by vocabulary (padded to a multiple), norms and image encoder."""
        tables = (1 if self.tie_embeddings else 2) * -(-self.vocab_size // tp) * self.hidden_size
        return tables + self.num_norms * self.hidden_size + (self.vision.params if self.vision else 0)

    def weight_bytes(self, tp: int = 1) -> float:
        """Bytes of the weights one of `tp` ranks stores."""
        return (self.rank_block_params(tp) * self.block_bits + self.rank_other_params(tp) * self.other_bits) / 8
