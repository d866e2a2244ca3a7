"""What each rank of a layout holds: weights, activations, libraries, states, and the room left for KV.

    of a stage's layers on one rank of tp x dp
    weights      linears / tp, KV projections copied once ranks outnumber KV heads, experts / ep / expert_tp;
                 the embedding on the first stage, the head on the last (a tied one on both), norms
    activations  experts' buffers + what stages hand on + max(the widest layer over all tokens, logits of all rows)
    libraries    kernels and their workspaces, buffers of collectives
    states       of linear attention, for every row
    KV           1 / cp of the tokens, the stage's layers

Invariants
* Bytes of one rank; functions of the spec and the configuration alone.
* Ranks of one stage hold equally much; where one holds more (padding, biases of rank 0), it is the one counted.
* `memory_fraction` bounds all of the above. The driver's context and captured graphs lie outside it, as in engines
  that size their pool before they capture, but never outside the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from twinfer.core.cache_groups import CacheGroup, Paging
from twinfer.core.config import EngineConfig
from twinfer.core.dtypes import dtype_bytes
from twinfer.core.errors import ConfigError
from twinfer.core.layout import ALONE, Layout
from twinfer.core.spec import ModelSpec

if TYPE_CHECKING:
    from twinfer.core.device import DeviceSpec

GIB = 2**30
UNBOUNDED = 2**62  # blocks of a rank without any layer that keeps tokens

# Read from the start-up logs of 60 runs of an engine (vLLM 0.19 on H100, llm-d-planner accuracy report, 2026-04);
# docs/memory.md has the table. Not one of them is fitted per model.
LOGIT_COPIES = 3  # float32: logits, their sorted values, probabilities; besides the logits in the model's dtype
LIBRARY_BYTES = 384 * 2**20  # "non-torch" 0.25 GiB, and 0.125 GiB that activations exceed their formula by
NVLINK_COLLECTIVES = 1856 * 2**20  # 1.8 GiB more "non-torch" with 2 or 4 ranks: NVLink multicast buffers
COLLECTIVES = 392 * 2**20  # without multicast: NCCL's buffers (aiconfigurator-core 0.12.0, `nccl_mem`)

CPU_KV_BYTES = 4 * 2**30
"""KV pool on a CPU unless asked otherwise: its memory belongs to everything else that runs there, too."""

Params = tuple[tuple[float, float], tuple[float, float], tuple[int, int, float]]
"""Weights with their bits, see `RankMemory`."""


@dataclass(frozen=True, slots=True)
class Room:
    """Memory of the device of one rank, in bytes.

    memory: all that a process sees.  runtime, graphs: the driver's context and captured graphs, outside the fraction.
    libraries: kernels and workspaces, inside it.  collectives: what they take more when ranks add up.
    own: every rank has memory of its own (not on a CPU).  kv_most: for the KV of all ranks, unless a size is asked for.
    """

    memory: int
    runtime: int = 0
    graphs: int = 0
    libraries: int = 0
    collectives: int = 0
    own: bool = True
    kv_most: float = UNBOUNDED

    @classmethod
    def of(cls, device: DeviceSpec) -> Room:
        if device.kind != "gpu":
            own = device.kind != "cpu"
            most = UNBOUNDED if own else CPU_KV_BYTES
            return cls(device.usable_bytes, device.runtime_bytes, device.graph_bytes, own=own, kv_most=most)
        multicast = device.link in ("nvlink-4", "nvlink-5")
        return cls(
            device.usable_bytes, device.runtime_bytes, device.graph_bytes, LIBRARY_BYTES,
            NVLINK_COLLECTIVES if multicast else COLLECTIVES,
        )  # fmt: skip

    def taken(self, layout: Layout) -> int:
        """By libraries, on one rank."""
        return self.libraries + (self.collectives if layout.devices > layout.pp else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """What every rank of one pipeline stage holds, in bytes.

    layers: of the whole model.  ranks: how many hold this.  weight_params: (weights of linears, their bits), (those of
    routed experts, their bits), (embedding, head and an image encoder; norms; their bits).
    per_token: KV that a token adds here; per_slot: in one page, which has the layers of one cache group.
    kv_most: what KV may take, whatever is there.  left: for KV, negative when even the rest does not fit.
    """

    stage: int
    num_stages: int
    layers: range
    ranks: int
    memory: int
    budget: float
    weights: int
    weight_params: Params
    activations: int
    libraries: int
    states: float
    runtime: int
    graphs: int
    num_kv_layers: int
    index_bytes: float
    per_token: float
    per_slot: float
    kv_most: float = UNBOUNDED

    @property
    def outside(self) -> int:
        """What the fraction does not cover."""
        return self.runtime + self.graphs

    @property
    def ceiling(self) -> float:
        """What weights, activations, libraries, states and KV may take together."""
        return min(self.budget, self.memory - self.outside)

    @property
    def held(self) -> float:
        """All that is inside the fraction, KV aside."""
        return self.weights + self.activations + self.libraries + self.states

    @property
    def free(self) -> float:
        """Of what the fraction covers, all that is not `held`."""
        return self.ceiling - self.held

    @property
    def left(self) -> float:
        return min(self.free, self.kv_most)

    @property
    def spare(self) -> float:
        """For a pool whose size is given: what is left of the device, whatever the fraction."""
        return self.memory - self.outside - self.held

    @property
    def name(self) -> str:
        """In words, for a chart: its stage, and how many ranks are alike."""
        ranks = "1 rank" if self.ranks == 1 else f"{self.ranks} ranks"
        return ranks if self.num_stages == 1 else f"stage {self.stage + 1} of {self.num_stages}, {ranks}"

    def blocks(self, block_size: int) -> int:
        """Whole blocks that fit here."""
        return int(max(0.0, self.left) // (block_size * self.per_slot)) if self.per_slot else UNBOUNDED


def ranks_of(spec: ModelSpec, config: EngineConfig, room: Room, paging: Paging) -> tuple[RankMemory, ...]:
    """One entry per pipeline stage. ConfigError when the layout does not go with the model."""
    layout = config.layout
    refuse_indivisible(spec, layout)
    stages = layout.stages(spec.num_layers)
    most: float = UNBOUNDED
    if room.kv_most < UNBOUNDED and config.num_kv_blocks is None:
        most = config.kv_memory_bytes or room.kv_most // layout.devices
    found = []
    for index, layers in enumerate(stages):
        part, last = cut(spec, layers), index == layout.pp - 1
        params = rank_params(spec, part, layout, first=index == 0, last=last)
        per_token, per_slot = _kv(part, layers, layout, paging.groups)
        found.append(
            RankMemory(
                stage=index, num_stages=layout.pp, layers=layers, ranks=layout.devices // layout.pp,
                memory=room.memory, budget=room.memory * config.memory_fraction,
                weights=_weights(params), weight_params=params,
                activations=activation_bytes(
                    part, config.max_num_batched_tokens, config.max_num_seqs, layout, logits=last
                ),
                libraries=room.taken(layout),
                states=-(-config.max_num_seqs // layout.dp) * part.state_bytes_per_seq(layout.tp),
                runtime=room.runtime, graphs=room.graphs,
                num_kv_layers=part.num_attention_layers, index_bytes=part.index_bytes_per_token,
                per_token=per_token, per_slot=per_slot, kv_most=most,
            )
        )  # fmt: skip
    return tuple(found)


def _kv(part: ModelSpec, layers: range, layout: Layout, groups: Sequence[CacheGroup]) -> tuple[float, float]:
    """Bytes that a token adds on one rank of the stage `part`: in all its layers, and in one page."""
    per_token = part.kv_bytes_per_token(tp=layout.tp) / layout.cp
    counts = [sum(layer in layers for layer in group.layers) for group in groups]
    return per_token, per_token * (max(counts) / sum(counts)) if sum(counts) else 0.0


def largest_kv(spec: ModelSpec, layout: Layout, groups: Sequence[CacheGroup]) -> tuple[float, float]:
    """(bytes per token, bytes per token and page) of the stage whose pages are largest."""
    stages = (_kv(cut(spec, layers), layers, layout, groups) for layers in layout.stages(spec.num_layers))
    return max(stages, key=lambda kv: kv[1])


def fullest(ranks: tuple[RankMemory, ...], block_size: int) -> RankMemory:
    """The rank that decides how many blocks all have."""
    return min(ranks, key=lambda rank: (rank.blocks(block_size), rank.left))


# --- weights ------------------------------------------------------------------------------------


def cut(spec: ModelSpec, layers: range) -> ModelSpec:
    """The model of some of its layers; embeddings, head and the formats of the whole stay."""
    if len(layers) == spec.num_layers:
        return spec
    moe, index = spec.moe, spec.sparse_index
    if moe is not None:
        dense = tuple(i - layers.start for i in moe.dense_layers if i in layers)
        first = min(max(0, moe.first_dense_layers - layers.start), len(layers))
        moe = replace(moe, first_dense_layers=first, dense_layers=dense)
    if index is not None:
        index = replace(index, layers=-(-index.layers * len(layers) // spec.num_layers))
    return replace(
        spec, num_layers=len(layers), moe=moe, sparse_index=index,
        layer_windows=spec.layer_windows[layers.start : layers.stop],
        layer_kinds=spec.layer_kinds[layers.start : layers.stop],
        bare_layers=tuple(i - layers.start for i in spec.bare_layers if i in layers),
    )  # fmt: skip


def rank_params(spec: ModelSpec, part: ModelSpec, layout: Layout, *, first: bool, last: bool) -> Params:
    """Weights on one rank of a stage with their bits; `part` is the stage's share of `spec` (see `RankMemory`)."""
    tp, linears, routed = layout.tp, part.rank_block_params(layout.tp), 0.0
    if part.moe is not None and part.num_moe_layers:
        bias = part.hidden_size if part.moe.bias else 0  # of the projection back, which no rank can halve
        expert, count = part.expert_params() - bias, part.num_moe_layers * part.moe.num_experts
        linears -= count * (expert / tp + bias)
        routed = count / layout.ep * (expert / layout.expert_tp + bias)
    whole = first and last
    num_tables = (1 if whole and part.tie_embeddings else 2) if whole else first + last
    tables = num_tables * -(-part.vocab_size // tp) * part.hidden_size
    tables += part.vision.params if part.vision is not None and first else 0
    norms = (part.num_norms - (not last)) * part.hidden_size
    return (linears, spec.linear_bits), (routed, spec.routed_bits), (tables, norms, spec.other_bits)


def _weights(params: Params) -> int:
    (linears, linear_bits), (routed, routed_bits), (tables, norms, other_bits) = params
    return int((linears * linear_bits + routed * routed_bits + (tables + norms) * other_bits) / 8)


def heaviest_rank(spec: ModelSpec, layout: Layout) -> int:
    """Bytes of weights on the rank that holds most."""
    stages = layout.stages(spec.num_layers)
    return max(
        _weights(rank_params(spec, cut(spec, layers), layout, first=i == 0, last=i == layout.pp - 1))
        for i, layers in enumerate(stages)
    )


# --- activations --------------------------------------------------------------------------------


def activation_bytes(
    spec: ModelSpec,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    layout: Layout | int = ALONE,
    *,
    logits: bool = True,
) -> int:
    """Peak of activations of one step on one rank.

    A layer at its widest: the residual and a normed copy, plus either q, k, v and the attention output or the two
    halves of the gated MLP and their product, over all tokens. Later, where there is a head, the hidden states and the
    logits of all rows, whole on every rank, with their copies. Buffers of routed experts (of every chosen pair of token
    and expert the two halves, and their product) and what stages hand on are kept all the while.
    With data-parallel attention one group may get all tokens of a step (a prompt is not divided), but no more rows
    than its share.
    """
    layout = Layout(layout) if isinstance(layout, int) else layout
    act, h = dtype_bytes(spec.dtype), spec.hidden_size
    tokens, rows = _of_step(max_num_batched_tokens, max_num_seqs, layout)
    kept = experts_width(spec, layout) * tokens * act
    if layout.pp > 1:
        kept += 2 * tokens * h * act
    widest = tokens * (2 * h + layer_width(spec, layout.tp)) * act
    if logits:
        widest = max(widest, tokens * h * act + rows * spec.vocab_size * (act + LOGIT_COPIES * dtype_bytes("float32")))
    return int(kept + widest)


def activation_equation(
    spec: ModelSpec, max_num_batched_tokens: int, max_num_seqs: int, layout: Layout, *, logits: bool
) -> str:
    """Arithmetic of `activation_bytes`; evaluates to it."""
    act, h = repr(dtype_bytes(spec.dtype)), spec.hidden_size
    tokens, rows = _of_step(max_num_batched_tokens, max_num_seqs, layout)
    kept = f"{width!r} * {tokens} * {act} + " if (width := experts_width(spec, layout)) else ""
    kept += f"2 * {tokens} * {h} * {act} + " if layout.pp > 1 else ""
    widest = f"{tokens} * (2 * {h} + {layer_width(spec, layout.tp)}) * {act}"
    if logits:
        copies = f"{LOGIT_COPIES} * {dtype_bytes('float32')!r}"
        widest = f"max({widest}, {tokens} * {h} * {act} + {rows} * {spec.vocab_size} * ({act} + {copies}))"
    return f"int({kept}{widest})"


def _of_step(max_num_batched_tokens: int, max_num_seqs: int, layout: Layout) -> tuple[int, int]:
    """(tokens, rows) of the largest step on one rank."""
    return -(-max_num_batched_tokens // layout.cp), -(-min(max_num_seqs, max_num_batched_tokens) // layout.dp)


def layer_width(spec: ModelSpec, tp: int) -> int:
    """Elements per token that the widest layer needs beside the residual and its normed copy, routed experts aside."""
    heads = -(-spec.num_heads // tp)
    attention = heads * (spec.head_dim + spec.v_dim) + spec.kv_heads_per_rank(tp) * (spec.head_dim + spec.v_dim)
    if spec.mla is not None and spec.mla.absorbed:  # queries, and queries and sums in the width of the latent
        attention = heads * (spec.head_dim + spec.mla.latent_dim + spec.mla.kv_lora_rank + spec.v_dim)
        attention += spec.mla.latent_dim
    elif spec.mla is not None:
        attention = heads * 2 * (spec.head_dim + spec.v_dim) + spec.mla.latent_dim
    matrices = 3 if spec.gated_mlp else 2
    widths = [attention]
    if spec.num_dense_layers:
        widths.append(matrices * -(-spec.intermediate_size // tp))
    if spec.moe is not None and spec.num_moe_layers:
        widths.append(spec.hidden_size + matrices * -(-spec.moe.shared_width // tp))
    if spec.linear_attention is not None:
        widths.append(-(-(spec.linear_attention.in_width + spec.linear_attention.inner) // tp))
    return max(widths)


def experts_width(spec: ModelSpec, layout: Layout) -> float:
    """Elements per token of a step that the buffers of routed experts take on one rank, load being even."""
    moe = spec.moe
    if moe is None or not spec.num_moe_layers:
        return 0.0
    columns = -(-moe.intermediate_size // layout.expert_tp)
    up = (2 if spec.gated_mlp else 1) * columns
    return moe.top_k / layout.ep * (max(up, moe.latent_size or spec.hidden_size) + columns)


# --- which ranks can share ----------------------------------------------------------------------


def gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB" if size >= 0.01 * GIB or not size else f"{size / 2**10:.1f} KiB"


def refuse_indivisible(model: ModelSpec, layout: Layout) -> None:
    """ConfigError naming the sizes that work when the groups of `layout` cannot share `model`."""
    wrong = why_indivisible(model, layout.tp, 1 if layout.ep > 1 or layout.dp > 1 else None)
    if wrong:
        fits = [str(n) for n in range(1, model.num_heads + 1) if not why_indivisible(model, n)]
        raise ConfigError("--tp", layout.tp, f"{model.name}: {wrong}", f"use {', '.join(fits)}")
    moe = model.moe
    if moe is None or not model.num_moe_layers:
        for name in ("ep", "dp"):
            if getattr(layout, name) > 1:
                raise ConfigError(
                    f"--{name}", getattr(layout, name), f"{model.name} has no experts to share",
                    "leave it out" + ("; replicas attend to different requests" if name == "dp" else ""),
                )  # fmt: skip
        return
    if moe.num_experts % layout.ep:
        fits = [str(n) for n in range(1, moe.num_experts + 1) if not moe.num_experts % n]
        raise ConfigError(
            "--ep", layout.ep, f"{model.name}: its {moe.num_experts} experts do not divide over {layout.ep} ranks",
            f"use {', '.join(fits)}",
        )  # fmt: skip
    if moe.intermediate_size % layout.expert_tp:
        raise ConfigError(
            "--ep", layout.ep,
            f"{model.name}: the {moe.intermediate_size} columns of an expert do not divide over the {layout.expert_tp} "
            "ranks that share one", f"use --ep {layout.tp * layout.dp}",
        )  # fmt: skip


def why_indivisible(model: ModelSpec, tp: int, expert_tp: int | None = None) -> str:
    """What of `model` does not divide over `tp` ranks (experts over `expert_tp`, None: as many), "" for nothing."""
    counts = {"attention heads": (model.num_heads, tp)}
    if model.num_dense_layers:
        counts["MLP columns"] = (model.intermediate_size, tp)
    if model.moe is not None:
        moe = model.moe
        counts["columns of an expert"] = (moe.intermediate_size, tp if expert_tp is None else expert_tp)
        if moe.num_shared:
            counts["columns of the shared experts"] = (moe.shared_width, tp)
    for what, (count, ranks) in counts.items():
        if count % ranks:
            return f"its {count} {what} do not divide over {ranks} ranks"
    heads = model.num_kv_heads
    if model.mla is None and heads % tp and tp % heads:
        return f"its {heads} KV heads can neither be divided over {tp} ranks nor copied equally often"
    return ""
