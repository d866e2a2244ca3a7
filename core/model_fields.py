"""What an architecture is described by: its shapes and formats, and the pattern of its layers.

`ModelSpec` (`spec.py`) adds what follows from them: the sizes of KV and weights. Parts that only some models have
(experts, latent or linear attention, an image encoder) are in `model_parts.py` and `vision.py`.

Invariants
* Sizes are in elements, bytes only where the name says so.
* A layer is a mixer (attention, or linear attention) and an MLP, which `bare_layers` lack.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from twinfer.core.errors import ModelError
from twinfer.core.model_parts import LinearAttentionSpec, MLASpec, MoESpec, SparseIndexSpec
from twinfer.core.vision import VisionSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFields:
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


__all__ = ["ModelFields"]
