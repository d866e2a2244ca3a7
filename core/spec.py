"""A model as numbers: shapes, formats and layer pattern, without weights.

Everything that memory, work and the torch model need to know about an architecture is here, read from
a Hugging Face `config.json` (`core/catalog.py` also reads GGUF headers into the same form).

Invariants
* Frozen; techniques return changed copies (`dataclasses.replace`).
* Sizes are in elements, bytes only where the name says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from twinfer.core.dtypes import canonical_dtype, dtype_bits, dtype_bytes
from twinfer.core.errors import ConfigError, ModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class MoESpec:
    """Mixture of experts: `num_experts` routed, `top_k` active, `num_shared` always on.

    `intermediate_size`: of one routed expert; `shared_intermediate_size`: of one shared expert (0: the same).
    `dense_layers`: layers with a dense MLP besides the first `first_dense_layers`.
    `bias`: experts and router have biases (GPT-OSS).  `score_bias`: one more value per expert (DeepSeek-V3).
    `float32_router`: the router multiplies in float32 whatever the model's dtype (DeepSeek).

    Routing: `scoring` ("softmax" or "sigmoid") of the router's outputs; the experts lie in `num_groups` groups, of
    which `top_groups` stay, ranked by the sum of their best `group_score_top` scores; the weights of the chosen
    experts are divided by their sum when `renormalize`, then multiplied by `scale`.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    num_shared: int = 0
    shared_intermediate_size: int = 0
    first_dense_layers: int = 0
    dense_layers: tuple[int, ...] = ()
    bias: bool = False
    score_bias: bool = False
    float32_router: bool = False
    scoring: str = "softmax"
    renormalize: bool = True
    num_groups: int = 1
    top_groups: int = 1
    group_score_top: int = 1
    scale: float = 1.0

    def __post_init__(self) -> None:
        for name, least, most in (
            ("top_k", 1, self.num_experts),
            ("num_groups", 1, self.num_experts),
            ("top_groups", 1, self.num_groups),
            ("group_score_top", 1, self.num_experts // max(1, self.num_groups)),
        ):
            if not least <= getattr(self, name) <= most:
                raise ModelError(f"{name}={getattr(self, name)} of {self.num_experts} experts must be 1 to {most}")
        if self.num_experts % self.num_groups:
            raise ModelError(f"num_groups={self.num_groups} does not divide the {self.num_experts} experts")
        kept = self.num_experts // self.num_groups * self.top_groups
        if self.top_k > kept:
            raise ModelError(f"top_k={self.top_k} experts cannot be chosen from the {kept} of {self.top_groups} groups")
        if self.scoring not in ("softmax", "sigmoid"):
            raise ModelError(f"scoring={self.scoring!r} is not known; known: softmax, sigmoid")

    @property
    def shared_width(self) -> int:
        """Columns of all shared experts, which are one MLP."""
        return self.num_shared * (self.shared_intermediate_size or self.intermediate_size)

    def experts_touched(self, tokens: int) -> float:
        """Expected number of experts that at least one of `tokens` is routed to, routing uniform."""
        idle = 1.0 - self.top_k / self.num_experts
        return self.num_experts * (1.0 - idle**tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class MLASpec:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434).

    absorbed: the cache holds one latent `[kv_lora_rank + qk_rope_head_dim]` per token, whose first part is also the
    value; else it holds the keys and values of every head, as expanded from it.
    interleaved: the checkpoint turns dimensions (2i, 2i + 1) together, else (i, i + qk_rope_head_dim / 2).
    latent_norm: the latent is normed before it is stored.
    rope_frequencies: angle per position of each of the qk_rope_head_dim / 2 pairs, None for those of the model's base
    and scaling.  Queries are scaled by `ModelSpec.query_scale` as everywhere.
    """

    kv_lora_rank: int
    q_lora_rank: int | None
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    absorbed: bool = True
    interleaved: bool = True
    latent_norm: bool = True
    rope_frequencies: tuple[float, ...] | None = None

    @property
    def latent_dim(self) -> int:
        """Width of what is stored per token when absorbed."""
        return self.kv_lora_rank + self.qk_rope_head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Shapes of a decoder-only transformer.

    head_dim: of queries and keys; value_dim: of values, 0 for the same.
    layer_windows: sliding window of each layer, None for full attention; empty means all full.
    query_scale: what query-key products are multiplied by, None for head_dim ** -0.5.
    norm_plus_one: norms multiply by 1 + weight (Hugging Face layout; GGUF files store 1 + weight).
    dtype: of activations, embeddings, head and norms, and of linears unless `weight_bits` says otherwise.
    weight_bits: stored bits per weight of the block linears, scales included (4.125 for int4 with a float16
    scale per 128), None for `dtype`.  other_weight_bits: the same of embeddings, head and norms, which quantizers
    usually leave alone.
    linear_dtype: what the block linears compute in, "" for `dtype` (weight-only formats compute in `dtype`).
    kv_scale_bytes: bytes of scales that the KV format stores per token, KV head and K or V vector.
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
    value_dim: int = 0
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
    attention_sinks: bool = False
    embed_scale: float = 1.0
    norms_per_layer: int = 2
    norm_plus_one: bool = False
    moe: MoESpec | None = None
    mla: MLASpec | None = None
    dtype: str = "float16"
    kv_dtype: str = "float16"
    weight_bits: float | None = None
    other_weight_bits: float | None = None
    linear_dtype: str = ""
    kv_scale_bytes: float = 0.0
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

    @property
    def v_dim(self) -> int:
        """Width of one value head."""
        return self.value_dim or self.head_dim

    def with_dtypes(self, dtype: str = "auto", kv_dtype: str = "auto") -> ModelSpec:
        """The spec in other formats; "auto" keeps what is there. KV follows `dtype` unless it was set apart."""
        new = self.dtype if dtype == "auto" else canonical_dtype(dtype, "dtype")
        if dtype_bits(new) < 16:
            raise ConfigError("dtype", new, "activations need at least 16 bits",
                              "use float32, bfloat16 or float16, and --quant for narrower weights")  # fmt: skip
        if kv_dtype == "auto":
            kv = new if self.kv_dtype == self.dtype else self.kv_dtype
            return replace(self, dtype=new, kv_dtype=kv)
        kv = canonical_dtype(kv_dtype, "kv_dtype")
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

    def kv_bytes_per_token(self, kv_dtype: str | None = None, tp: int = 1) -> float:
        """Bytes one token adds to the KV cache of one rank, all layers."""
        return self.num_layers * self.kv_bytes_per_token_layer(kv_dtype, tp)

    # --- parameters -----------------------------------------------------------------------------

    def attention_params(self) -> int:
        """Weights of one layer's attention, its own norms included."""
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
        qkv_width = self.num_heads * self.head_dim + self.num_kv_heads * (self.head_dim + self.v_dim)
        n = h * qkv_width + self.num_heads * self.v_dim * h
        if self.attention_bias:
            n += qkv_width
        if self.attention_out_bias:
            n += h
        if self.qk_norm:
            n += 2 * self.head_dim
        if self.attention_sinks:
            n += self.num_heads
        return n

    def is_moe(self, layer: int) -> bool:
        moe = self.moe
        return moe is not None and layer >= moe.first_dense_layers and layer not in moe.dense_layers

    @property
    def num_moe_layers(self) -> int:
        return sum(self.is_moe(layer) for layer in range(self.num_layers))

    def mlp_params(self, layer: int, active: bool = False) -> int:
        """Weights of one layer's MLP; with `active`, only those one token passes through."""
        matrices = 3 if self.gated_mlp else 2
        h = self.hidden_size
        if self.moe is not None and self.is_moe(layer):
            m = self.moe
            expert = matrices * h * m.intermediate_size
            expert += (matrices - 1) * m.intermediate_size + h if m.bias else 0
            shared = matrices * h * m.shared_width
            shared += (matrices - 1) * m.shared_width + h if m.num_shared and self.mlp_bias else 0
            router = m.num_experts * (h + m.bias + m.score_bias)
            return (m.top_k if active else m.num_experts) * expert + shared + router
        bias = (matrices - 1) * self.intermediate_size + h if self.mlp_bias else 0
        return matrices * h * self.intermediate_size + bias

    def block_params(self, active: bool = False) -> int:
        """Weights of all layers (what quantizers act on; layer norms count in `other_params`)."""
        return sum(self.attention_params() + self.mlp_params(i, active) for i in range(self.num_layers))

    def other_params(self) -> int:
        """Embeddings, head (once when tied) and norms."""
        tables = 1 if self.tie_embeddings else 2
        norms = self.num_layers * self.norms_per_layer * self.hidden_size + self.hidden_size
        return tables * self.vocab_size * self.hidden_size + norms

    def num_params(self, active: bool = False) -> int:
        """All weights; with `active`, those that one token passes through (embedding table included)."""
        return self.block_params(active) + self.other_params()

    @property
    def block_bits(self) -> float:
        """Stored bits per weight of the block linears."""
        return dtype_bits(self.dtype) if self.weight_bits is None else self.weight_bits

    @property
    def other_bits(self) -> float:
        """Stored bits per weight of embeddings, head and norms."""
        return dtype_bits(self.dtype) if self.other_weight_bits is None else self.other_weight_bits

    def replicated_params(self) -> int:
        """Block weights that a tensor-parallel rank holds whole: routers, MLA's down projections, norms of heads and
        the biases of projections back (only rank 0 has those, which is the rank that is counted)."""
        h, per_layer = self.hidden_size, 0
        if self.attention_out_bias:
            per_layer += h
        if self.mla is not None:
            m = self.mla
            per_layer += h * (m.latent_dim + (m.q_lora_rank or 0)) + (m.q_lora_rank or 0)
            per_layer += m.kv_lora_rank if m.latent_norm else 0
            if self.attention_bias:
                per_layer += m.latent_dim + (m.q_lora_rank or 0)
        elif self.qk_norm:
            per_layer += 2 * self.head_dim
        n = self.num_layers * per_layer
        if self.moe is not None:
            moe = self.moe
            router = moe.num_experts * (h + moe.bias + moe.score_bias)
            n += self.num_moe_layers * (router + (moe.num_experts * h if moe.bias else 0))
        if self.mlp_bias:
            n += (self.num_layers - self.num_moe_layers) * h
        return n

    def rank_block_params(self, tp: int = 1) -> float:
        """Block weights held by one of `tp` ranks; KV projections are replicated once ranks outnumber KV heads."""
        whole = self.replicated_params()
        kv_copies = 0.0
        if self.mla is None:
            kv = self.num_layers * (self.hidden_size + self.attention_bias) * (self.head_dim + self.v_dim)
            kv_copies = kv * (self.kv_heads_per_rank(tp) - self.num_kv_heads / tp)
        return (self.block_params() - whole) / tp + whole + kv_copies

    def rank_other_params(self, tp: int = 1) -> int:
        """Embeddings and head of one of `tp` ranks, cut by vocabulary (padded to a multiple), and norms."""
        norms = (self.num_layers * self.norms_per_layer + 1) * self.hidden_size
        return (1 if self.tie_embeddings else 2) * -(-self.vocab_size // tp) * self.hidden_size + norms

    def weight_bytes(self, tp: int = 1) -> float:
        """Bytes of the weights one of `tp` ranks stores."""
        return (self.rank_block_params(tp) * self.block_bits + self.rank_other_params(tp) * self.other_bits) / 8
