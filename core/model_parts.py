"""Parts of a model's description: experts, latent attention, linear attention, a sparse index.

Invariants
* Frozen numbers without weights; sizes are in elements, bytes only where the name says so.
* A part checks itself: sizes that cannot be are a ModelError.
"""

from __future__ import annotations

from dataclasses import dataclass

from twinfer.core.dtypes import dtype_bytes
from twinfer.core.errors import ModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class MoESpec:
    """Mixture of experts: `num_experts` routed, `top_k` active, `num_shared` always on.

    `intermediate_size`: of one routed expert; `shared_intermediate_size`: of one shared expert (0: the same).
    `dense_layers`: layers with a dense MLP besides the first `first_dense_layers`.
    `bias`: experts and router have biases (GPT-OSS).  `score_bias`: one more value per expert (DeepSeek-V3).
    `float32_router`: the router multiplies in float32 whatever the model's dtype (DeepSeek).
    `shared_gate`: the shared experts' output is weighed by a sigmoid of the token (Qwen).
    `latent_size`: routed experts work on the token projected to that width, 0 for the token itself (Nemotron 3).
    `skew`: exponent of the power law that the loads of experts follow, 0 where tokens like all alike (a what-if).

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
    shared_gate: bool = False
    latent_size: int = 0
    skew: float = 0.0
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
        if not 0.0 <= self.skew <= 4.0:
            raise ModelError(f"skew={self.skew} of the experts' loads must be 0 to 4")
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


LINEAR_KINDS = {"gated_delta_net": 2, "mamba2": 1, "lightning": 0, "mamba": 0}
"""Kind of linear attention -> numbers per value head that are projected beside it (beta and alpha; dt; none)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearAttentionSpec:
    """A layer that carries a state of fixed size from token to token instead of keys and values of all of them.

    kind: "gated_delta_net" (arXiv:2412.06464; Qwen3-Next), "mamba2" (arXiv:2405.21060; Nemotron-H), "lightning"
    (arXiv:2501.08313; MiniMax-01) or "mamba" (arXiv:2312.00752; Jamba, where each channel is a head of width 1).
    key_heads, key_dim: heads and width of keys and queries (Mamba-2: groups and state size of B and C).
    value_heads, value_dim: heads and width of values (Mamba-2: heads and their width).
    conv_width: taps of the causal convolution over queries, keys and values (Mamba-2: x, B and C); 1 is none.
    step_rank: of Mamba's steps, which are projected with B and C from the convolved inputs.
    normed: Mamba-2 norms its output.
    conv_bias, proj_bias: whether the convolution, and both projections, have biases.
    state_dtype: of the recurrent state; what the convolution remembers has the activations' dtype.
    """

    kind: str
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    conv_bias: bool = False
    proj_bias: bool = False
    step_rank: int = 0
    normed: bool = True
    state_dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.kind not in LINEAR_KINDS:
            raise ModelError(f"linear attention {self.kind!r} is not known; known: {', '.join(LINEAR_KINDS)}")
        for name in ("key_heads", "value_heads", "key_dim", "value_dim", "conv_width"):
            if getattr(self, name) < 1:
                raise ModelError(f"{name}={getattr(self, name)} of a linear attention layer must be at least 1")
        if self.value_heads % self.key_heads:
            raise ModelError(f"key_heads={self.key_heads} does not divide value_heads={self.value_heads}")

    @property
    def inner(self) -> int:
        """Width of all values."""
        return self.value_heads * self.value_dim

    @property
    def conv_channels(self) -> int:
        """Channels that the convolution runs over: queries, keys and values (Mamba: values alone)."""
        return self.inner + (0 if self.kind == "mamba" else 2 * self.key_heads * self.key_dim)

    @property
    def step_width(self) -> int:
        """Columns of Mamba's projection of the convolved inputs: steps, B and C; 0 for other kinds."""
        return self.step_rank + 2 * self.key_dim if self.kind == "mamba" else 0

    @property
    def in_width(self) -> int:
        """Columns of the projection in: queries, keys and values, the gate, and the numbers per value head."""
        return self.conv_channels + self.inner + self.value_heads * LINEAR_KINDS[self.kind]

    def params(self, hidden: int) -> int:
        """Weights of one layer, its own norm included."""
        n = hidden * (self.in_width + self.inner)
        n += self.conv_channels * self.conv_width if self.conv_width > 1 else 0
        n += self.conv_channels if self.conv_bias else 0
        n += self.in_width + hidden if self.proj_bias else 0
        if self.kind == "lightning":
            return n + self.inner  # a norm over all values
        if self.kind == "mamba":  # and a norm each of steps, B and C; steps back to channels; A and D
            return n + (self.inner + 1) * self.step_width + self.inner * (self.step_rank + self.key_dim + 2)
        if self.kind == "mamba2":
            return n + 3 * self.value_heads + self.inner * self.normed  # A, D, dt's bias; a norm over all values
        return n + 2 * self.value_heads + self.value_dim  # A and dt's bias; one norm for all heads

    def state_values(self, tp: int = 1) -> int:
        """Elements of the recurrent state of one sequence on one of `tp` ranks: a [key_dim, value_dim] matrix a head."""
        return -(-self.value_heads // tp) * self.key_dim * self.value_dim

    def conv_values(self, tp: int = 1) -> int:
        """Elements of past inputs that the convolution of one sequence remembers on one of `tp` ranks."""
        keys, values = -(-self.key_heads // tp), -(-self.value_heads // tp)
        channels = values * self.value_dim + (0 if self.kind == "mamba" else 2 * keys * self.key_dim)
        return channels * (self.conv_width - 1)

    def state_bytes(self, dtype: str, tp: int = 1) -> float:
        """Bytes that one sequence holds in one such layer, however long it is; `dtype` is the activations'."""
        return self.state_values(tp) * dtype_bytes(self.state_dtype) + self.conv_values(tp) * dtype_bytes(dtype)


INDEX_KEY_BYTES = 1  # FP8, as published
INDEX_SCALE_BYTES = 4  # one float32 a key


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseIndexSpec:
    """An index that picks the keys a query attends to (DeepSeek sparse attention, arXiv:2512.02556).

    heads, dim: of the index's queries; its keys have one head.  top_k: keys that are kept per query.
    layers: how many layers have an index of their own; the others take the choice of the layer before.
    """

    heads: int
    dim: int
    top_k: int
    layers: int

    def params(self, hidden: int, q_rank: int) -> int:
        """Weights of one layer's index: queries from the latent query, keys, their norm, and a weight per head."""
        return q_rank * self.heads * self.dim + hidden * self.dim + 2 * self.dim + hidden * self.heads

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token adds to the index of one layer."""
        return self.dim * INDEX_KEY_BYTES + INDEX_SCALE_BYTES
