"""What each layer of a Hugging Face `config.json` is: attention or linear attention, windows of chunks, an index, an MLP.

Invariants
* Nemotron-H lists mixers and MLPs one after the other; a mixer and the MLP behind it are one layer here, and a mixer
  that another mixer follows is a layer without an MLP.
* Attention in chunks (Llama 4) counts as a sliding window of the chunk's length: its mean is half of that, its most
  is that, and the most is what memory must hold.
"""

from __future__ import annotations

from dataclasses import dataclass

from twinfer.core.errors import ModelError
from twinfer.core.hf_fields import Fields
from twinfer.core.model_parts import LinearAttentionSpec, SparseIndexSpec

GATED_DELTA = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
INDEXED = ("deepseek_v32", "glm_moe_dsa")

MIXERS = {"M": "linear", "*": "attention", "mamba": "linear", "linear_attention": "linear",
          "attention": "attention", "full_attention": "attention"}  # fmt: skip
MLPS = {"-": "dense", "E": "experts", "mlp": "dense", "moe": "experts"}


@dataclass(frozen=True, slots=True)
class Layers:
    """kinds: mixer of each of `count` layers, empty for attention everywhere.  bare: layers without an MLP.

    experts: layers whose MLP is of experts, None where other fields say so.
    """

    count: int
    kinds: tuple[str, ...] = ()
    bare: tuple[int, ...] = ()
    experts: tuple[int, ...] | None = None
    windows: tuple[int | None, ...] = ()
    linear: LinearAttentionSpec | None = None
    index: SparseIndexSpec | None = None


def read_layers(c: Fields, family: str) -> Layers:
    """The layers of a model of `family`."""
    if family == "nemotron_h":
        return _mixers_and_mlps(c)
    count = c.count("num_hidden_layers")
    if family == "jamba":
        return _jamba(c, count)
    if family == "falcon_h1":
        return _falcon_h1(c, count)
    if family == "granitemoehybrid":
        return _granite(c, count)
    if family in GATED_DELTA:
        return _gated_delta(c, count)
    if family == "llama4_text":
        return Layers(count, windows=_chunks(c, count))
    if family in INDEXED:
        return Layers(count, index=_index(c, count))
    return Layers(count)


def _gated_delta(c: Fields, count: int) -> Layers:
    types = c.kinds("layer_types", count)
    if types is None:
        every = c.count("full_attention_interval", 4, least=1)
        types = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(count)]
    unknown = sorted({*types} - {"linear_attention", "full_attention"})
    if unknown:
        raise ModelError(f"{c.name}: config.json has layer_types {', '.join(unknown)}, which are not known")
    linear = LinearAttentionSpec(
        kind="gated_delta_net",
        key_heads=c.count("linear_num_key_heads", 16),
        value_heads=c.count("linear_num_value_heads", 32),
        key_dim=c.count("linear_key_head_dim", 128),
        value_dim=c.count("linear_value_head_dim", 128),
        conv_width=c.count("linear_conv_kernel_dim", 4),
        state_dtype=str(c.get("mamba_ssm_dtype", "float32")),
    )
    return Layers(count, tuple("linear" if t == "linear_attention" else "attention" for t in types), linear=linear)


def _mixers_and_mlps(c: Fields) -> Layers:
    listed = c.get("layers_block_type") or c.get("layer_types") or c.get("hybrid_override_pattern")
    if listed is None:
        raise ModelError(f"{c.name}: config.json lacks 'hybrid_override_pattern'; give the whole file")
    kinds: list[str] = []
    bare: list[int] = []
    experts: list[int] = []
    open_mixer = False
    for block in listed:
        if block in MIXERS:
            if open_mixer:
                bare.append(len(kinds) - 1)
            kinds.append(MIXERS[block])
            open_mixer = True
        elif block in MLPS and open_mixer:
            if MLPS[block] == "experts":
                experts.append(len(kinds) - 1)
            open_mixer = False
        elif block in MLPS:
            raise ModelError(f"{c.name}: an MLP without a mixer before it is not supported")
        else:
            raise ModelError(f"{c.name}: block {block!r} is not known; known: {', '.join([*MIXERS, *MLPS])}")
    if open_mixer:
        bare.append(len(kinds) - 1)
    linear = LinearAttentionSpec(
        kind="mamba2",
        key_heads=c.count("n_groups", 8),
        value_heads=c.count("mamba_num_heads", 128),
        key_dim=c.count("ssm_state_size", 128),
        value_dim=c.count("mamba_head_dim", 64),
        conv_width=c.count("conv_kernel", 4),
        conv_bias=c.flag("use_conv_bias", True),
        proj_bias=c.flag("use_bias", False),
        state_dtype=str(c.get("mamba_ssm_cache_dtype", "float32")),
    )
    return Layers(len(kinds), tuple(kinds), tuple(bare), tuple(experts), linear=linear)


def _jamba(c: Fields, count: int) -> Layers:
    """Attention every few layers, Mamba in the others; experts every few layers, too."""
    hidden, every, offset = c.count("hidden_size"), c.count("attn_layer_period", 8, 1), c.count("attn_layer_offset", 4)
    sparse, first = c.count("expert_layer_period", 2, least=1), c.count("expert_layer_offset", 1)
    rank = c.get("mamba_dt_rank", "auto")
    linear = LinearAttentionSpec(
        kind="mamba",
        key_heads=1,
        value_heads=c.count("mamba_expand", 2) * hidden,
        key_dim=c.count("mamba_d_state", 16),
        value_dim=1,
        conv_width=c.count("mamba_d_conv", 4),
        conv_bias=c.flag("mamba_conv_bias", True),
        proj_bias=c.flag("mamba_proj_bias", False),
        step_rank=-(-hidden // 16) if rank == "auto" else c.count("mamba_dt_rank"),
    )
    kinds = tuple("attention" if i % every == offset else "linear" for i in range(count))
    experts = tuple(i for i in range(count) if i % sparse == first) if c.count("num_experts", 16) > 1 else ()
    return Layers(count, kinds, experts=experts, linear=linear)


def _falcon_h1(c: Fields, count: int) -> Layers:
    """Attention and Mamba-2 side by side in every layer."""
    heads, width = c.count("mamba_n_heads", 128, least=1), c.get("mamba_d_head", "auto")
    inner = c.count("mamba_d_ssm", c.count("mamba_expand", 2) * c.count("hidden_size"))
    c.must_be("projectors_bias", c.get("projectors_bias"), None, False)
    c.must_be("mamba_proj_bias", c.get("mamba_proj_bias"), None, False)
    linear = LinearAttentionSpec(
        kind="mamba2",
        key_heads=c.count("mamba_n_groups", 1),
        value_heads=heads,
        key_dim=c.count("mamba_d_state", 256),
        value_dim=inner // heads if width == "auto" else c.count("mamba_d_head"),
        conv_width=c.count("mamba_d_conv", 4),
        conv_bias=c.flag("mamba_conv_bias", True),
        normed=c.flag("mamba_rms_norm", False),
    )
    return Layers(count, ("both",) * count, linear=linear)


def _granite(c: Fields, count: int) -> Layers:
    """Granite 4: Mamba-2 or attention in each layer."""
    types = c.kinds("layer_types", count) or c.kinds("layers_block_type", count)
    if types is None:
        raise ModelError(f"{c.name}: config.json lacks 'layer_types'; give the whole file")
    unknown = sorted({*types} - MIXERS.keys())
    if unknown:
        raise ModelError(f"{c.name}: config.json has layer_types {', '.join(unknown)}, which are not known")
    heads, width = c.count("mamba_n_heads", 128, least=1), c.get("mamba_d_head", "auto")
    linear = LinearAttentionSpec(
        kind="mamba2",
        key_heads=c.count("mamba_n_groups", 1),
        value_heads=heads,
        key_dim=c.count("mamba_d_state", 256),
        value_dim=c.count("mamba_expand", 2) * c.count("hidden_size") // heads
        if width == "auto"
        else c.count("mamba_d_head"),
        conv_width=c.count("mamba_d_conv", 4),
        conv_bias=c.flag("mamba_conv_bias", True),
        proj_bias=c.flag("mamba_proj_bias", False),
    )
    return Layers(count, tuple(MIXERS[t] for t in types), linear=linear)


def _chunks(c: Fields, count: int) -> tuple[int | None, ...]:
    types = c.kinds("layer_types", count)
    if types is None:
        every = c.count("no_rope_layer_interval", 4, least=1)
        turned = c.get("no_rope_layers") or [(i + 1) % every != 0 for i in range(count)]
        types = ["chunked_attention" if turn else "full_attention" for turn in turned]
    size = c.count("attention_chunk_size", least=1)
    return tuple(size if t == "chunked_attention" else None for t in types)


def _index(c: Fields, count: int) -> SparseIndexSpec:
    types = c.kinds("indexer_types", count)
    if types is None:
        c.must_be("index_topk_freq", c.get("index_topk_freq"), None, 1)
    return SparseIndexSpec(
        heads=c.count("index_n_heads", least=1),
        dim=c.count("index_head_dim", least=1),
        top_k=c.count("index_topk", least=1),
        layers=count if types is None else types.count("full"),
    )
