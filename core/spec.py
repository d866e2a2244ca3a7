"""A model as numbers: shapes, formats and layer pattern, without weights.

Everything that memory, work and the torch model need to know about an architecture is here, read from
a Hugging Face `config.json` (`core/catalog.py` also reads GGUF headers into the same form). Parts that only some
models have (experts, latent or linear attention, an image encoder) are in `core/model_parts.py`.

Invariants
* Frozen; techniques return changed copies (`dataclasses.replace`).
* Sizes are in elements, bytes only where the name says so.
* A layer is a mixer (attention, or linear attention) and an MLP, which `bare_layers` lack.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from twinfer.core.dtypes import canonical_dtype, dtype_bits, dtype_bytes
from twinfer.core.errors import ConfigError, ModelError
from twinfer.core.model_parts import LinearAttentionSpec, MLASpec, MoESpec, SparseIndexSpec
from twinfer.core.vision import VisionSpec

__all__ = ["LinearAttentionSpec", "MLASpec", "MoESpec", "ModelSpec", "SparseIndexSpec", "VisionSpec"]


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

    layer_kinds: the mixer of each layer, "attention", "linear" (`linear_attention` says of what kind) or "both"
    side by side; empty means
    attention everywhere.  bare_layers: layers without an MLP.
    attention_gate: the attention output is multiplied by a sigmoid of as many numbers, projected with the queries.
    wide_qk_norm: with `qk_norm`, one norm over all heads instead of one per head (MiniMax-M2).
    sparse_index: queries attend to the keys it picks.
    expert_bits: stored bits per weight of routed experts where they differ from the other linears; `weight_bits` is
    then the average over all of them.  expert_dtype: what they compute in, "" for what the other linears do.
    vision: an encoder whose output enters the prompt; its weights are counted with `other_params`.
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
    linear_attention: LinearAttentionSpec | None = None
    layer_kinds: tuple[str, ...] = ()
    bare_layers: tuple[int, ...] = ()
    attention_gate: bool = False
    wide_qk_norm: bool = False
    sparse_index: SparseIndexSpec | None = None
    vision: VisionSpec | None = None
    dtype: str = "float16"
    kv_dtype: str = "float16"
    weight_bits: float | None = None
    expert_bits: float | None = None
    other_weight_bits: float | None = None
    linear_dtype: str = ""
    expert_dtype: str = ""
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
        if self.layer_kinds:
            self._check_kinds()

    def _check_kinds(self) -> None:
        if len(self.layer_kinds) != self.num_layers:
            raise ModelError(f"{self.name}: {len(self.layer_kinds)} layer_kinds for {self.num_layers} layers")
        if set(self.layer_kinds) - {"attention", "linear", "both"}:
            raise ModelError(
                f"{self.name}: layer_kinds are 'attention', 'linear' and 'both', not {sorted(set(self.layer_kinds))}"
            )
        if not self.num_attention_layers:
            raise ModelError(f"{self.name}: a model without any layer of attention is not known")
        if self.num_linear_layers and self.linear_attention is None:
            raise ModelError(f"{self.name}: linear layers need linear_attention to say of what kind")

    # --- layers ---------------------------------------------------------------------------------

    def window(self, layer: int) -> int | None:
        """Sliding window of `layer` in tokens, None for full attention."""
        return self.layer_windows[layer] if self.layer_windows else None

    def is_attention(self, layer: int) -> bool:
        """Whether `layer` attends to keys and values of earlier tokens (else it carries a state)."""
        return not self.layer_kinds or self.layer_kinds[layer] != "linear"

    def is_linear(self, layer: int) -> bool:
        """Whether `layer` carries a state; it may attend besides."""
        return bool(self.layer_kinds) and self.layer_kinds[layer] != "attention"

    @property
    def attention_windows(self) -> tuple[int | None, ...]:
        """Window of each layer that keeps keys and values, in their order."""
        return tuple(self.window(i) for i in range(self.num_layers) if self.is_attention(i))

    @property
    def num_attention_layers(self) -> int:
        """Layers that keep keys and values."""
        return self.num_layers - self.layer_kinds.count("linear")

    @property
    def num_linear_layers(self) -> int:
        """Layers that carry a state of fixed size."""
        return len(self.layer_kinds) - self.layer_kinds.count("attention")

    @property
    def num_dense_layers(self) -> int:
        """Layers with a dense MLP."""
        return self.num_layers - len(self.bare_layers) - self.num_moe_layers

    @property
    def num_norms(self) -> int:
        """Norms over the hidden state: of the layers, and the last one."""
        per_half = self.norms_per_layer // 2
        return self.num_layers * self.norms_per_layer - len(self.bare_layers) * per_half + 1

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

    def is_moe(self, layer: int) -> bool:
        moe = self.moe
        return (
            moe is not None
            and layer >= moe.first_dense_layers
            and layer not in moe.dense_layers
            and layer not in self.bare_layers
        )

    @property
    def num_moe_layers(self) -> int:
        return sum(self.is_moe(layer) for layer in range(self.num_layers)) if self.moe is not None else 0

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
