"""How a quantized checkpoint stores its weights, from `quantization_config` of a Hugging Face config.

    fp8                 one format for all block linears, per tensor or per block of weights
    gptq, awq, auto-round   integers in groups
    fbgemm_fp8          FP8 with a scale per row; bitsandbytes: 8 bits, or 4 with a scale per 64 weights
    mxfp4               routed experts only (GPT-OSS)
    compressed-tensors  groups of linears, each with its format; names or patterns of what stays wide
    modelopt            the same, or one algorithm and the modules it leaves out

Invariants
* What stays wide is counted wide: every linear of every layer is matched against the file's names and patterns.
* Routed experts that differ from the other linears are told apart (`ModelSpec.expert_bits`), the rest is averaged.
* A method that is not known is a ModelError.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from twinfer.core.dtypes import BYTES, dtype_bits
from twinfer.core.errors import ModelError
from twinfer.core.hf_fields import Fields
from twinfer.core.spec import ModelSpec

KNOWN = "fp8, fbgemm_fp8, gptq, awq, auto-round, bitsandbytes, mxfp4 (experts), compressed-tensors, modelopt"
SCALE_BITS = 16
COMPUTE = {("float", 4): "fp4", ("float", 8): "fp8", ("int", 8): "int8"}
ALGORITHMS: Mapping[str, tuple[float, str]] = {
    "FP8": (8.0, "fp8"), "NVFP4": (4 + 8 / 16, "fp4"), "MXFP4": (4 + 8 / 32, "fp4"), "W4A16_AWQ": (4 + 16 / 128, ""),
    "NVFP4_AWQ": (4 + 8 / 16, "fp4"), "W4A16_NVFP4": (4 + 8 / 16, ""), "MXFP8": (8 + 8 / 32, "fp8"),
}  # fmt: skip
"""modelopt's names: bits per weight with scales (NVFP4: one FP8 scale per 16 values), and what is computed in."""


class Format(NamedTuple):
    """bits: per weight, scales included.  computes: the dtype of the product, "" for the activations'."""

    bits: float
    computes: str


@dataclass(frozen=True, slots=True)
class Linear:
    """`size` weights under one of these names, without the prefix of the model."""

    names: tuple[str, ...]
    size: int
    routed: bool = False


def with_stored_format(spec: ModelSpec, c: Fields) -> ModelSpec:
    """`spec` with the bits of its weights, what its linears compute in, and the KV format the file asks for."""
    q = c.get("quantization_config")
    if q is None:
        return spec
    if not isinstance(q, Mapping):
        raise ModelError(f"{c.name}: config.json has quantization_config={q!r}, which should be an object")
    method = q.get("quant_method")
    if method is None and "quant_algo" in q:
        method = "modelopt"
    stored = replace(spec, extra={**spec.extra, "stored_as": method})
    if method == "fp8" and not q.get("config_groups"):
        block = q.get("weight_block_size")
        if block is not None and (
            not isinstance(block, list) or len(block) != 2 or not all(_is_count(b) for b in block)
        ):
            raise ModelError(f"{c.name}: config.json has weight_block_size={block!r}, which should be two sizes from 1")
        bits = 8 + 32 / (block[0] * block[1]) if block else 8.0
        left_out = _matcher([str(module) for module in q.get("modules_to_not_convert") or ()])
        if any(left_out(name) for linear in block_linears(spec) for name in linear.names):
            narrow = Format(bits, "fp8")
            return _averaged(stored, lambda linear: None if any(map(left_out, linear.names)) else narrow)
        return replace(stored, weight_bits=bits, linear_dtype="fp8")
    if method in ("fbgemm_fp8", "bitsandbytes"):
        names = q.get("modules_to_not_convert") or q.get("llm_int8_skip_modules") or ()
        left_out = _matcher([str(module) for module in names])
        narrow = Format(8.0, "fp8") if method == "fbgemm_fp8" else _bitsandbytes(c.name, q)
        return _averaged(stored, lambda linear: None if any(map(left_out, linear.names)) else narrow)
    if method in ("gptq", "awq", "auto-round"):
        fields = Fields(q, c.name)
        stored_bits, group = _bits(fields, "bits", 4), _group(fields, 128)
        # one fp16 scale and one packed zero point per group
        return replace(stored, weight_bits=stored_bits + ((SCALE_BITS + stored_bits) / group if group else 0.0))
    if method == "mxfp4" and spec.moe is not None:
        return _averaged(stored, lambda linear: Format(8 * BYTES["mxfp4"], "") if linear.routed else None)
    if method in ("compressed-tensors", "modelopt"):
        return _by_name(stored, q)
    raise ModelError(f"{c.name}: weights stored as {method!r} are not known; known: {KNOWN}")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _bits(fields: Fields, key: str, default: int) -> int:
    """Of an integer or a float in storage."""
    bits = fields.count(key, default, least=1)
    if bits > 16:
        raise ModelError(f"{fields.name}: config.json has {key}={bits}, which should be at most 16")
    return bits


def _group(fields: Fields, default: int) -> int:
    """Weights that share a scale, 0 where a whole row does (-1 in the file)."""
    size = fields.count("group_size", default, least=-1)
    if size == 0:
        raise ModelError(
            f"{fields.name}: config.json has group_size=0, which should be positive, or -1 for a whole row"
        )
    return max(0, size)


def _bitsandbytes(name: str, q: Mapping[str, Any]) -> Format:
    """8 bits with a scale per row, computed in int8; or 4 bits with a float32 scale per 64 weights, which may itself be 8 bits
    with a float32 per 256 of them (QLoRA, arXiv:2305.14314)."""
    if q.get("load_in_8bit"):
        return Format(8.0, "int8")
    if not q.get("load_in_4bit"):
        raise ModelError(f"{name}: bitsandbytes weights are neither load_in_8bit nor load_in_4bit; give the whole file")
    return Format(4 + (8 / 64 + 32 / (64 * 256) if q.get("bnb_4bit_use_double_quant") else 32 / 64), "")


def _by_name(spec: ModelSpec, q: Mapping[str, Any]) -> ModelSpec:
    """Formats of named linears."""
    if spec.family == "nemotron_h" and (q.get("exclude_modules") or q.get("ignore")):
        raise ModelError(f"{spec.name}: which of its blocks stay wide is named in a way that is not read")
    algorithm = str(q.get("quant_algo", ""))
    groups = list(_groups(spec.name, q, algorithm))
    wide = [str(p) for key in ("ignore", "exclude_modules") for p in q.get(key) or ()]
    kv = q.get("kv_cache_scheme") or q.get("kv_cache_quant_algo")
    narrow_kv = kv == "FP8" or (isinstance(kv, Mapping) and (kv.get("type"), kv.get("num_bits")) == ("float", 8))
    spec = replace(spec, kv_dtype="fp8") if narrow_kv else spec
    left_out, targeted = _matcher(wide), [(_matcher(targets), found) for targets, found in groups]

    def of(linear: Linear) -> Format | None:
        if any(left_out(name) for name in linear.names):
            return None
        for matches, found in targeted:
            if any(matches(name) for name in linear.names):
                return found
        return None

    return _averaged(spec, of)


def _groups(name: str, q: Mapping[str, Any], algorithm: str) -> Iterator[tuple[Sequence[str], Format]]:
    """(names or patterns, format), in the order they are tried."""
    named: dict[Format, list[str]] = {}
    for module, entry in (q.get("quantized_layers") or {}).items():
        named.setdefault(_algorithm(name, str(entry.get("quant_algo"))), []).append(str(module))
    for form, modules in named.items():
        yield modules, form
    if named:
        return
    groups = q.get("config_groups") or {}
    for group in groups.values():
        weights, inputs = group.get("weights") or {}, group.get("input_activations")
        fields = Fields(weights, name)
        bits, kind, size = _bits(fields, "num_bits", 8), str(weights.get("type", "int")), _group(fields, -1)
        scale = (8 if kind == "float" and bits == 4 else SCALE_BITS) + (0 if weights.get("symmetric", True) else bits)
        computes = COMPUTE.get((kind, int(inputs.get("num_bits", 16))), "") if inputs else ""
        yield group.get("targets") or ["Linear"], Format(bits + (scale / size if size else 0.0), computes)
    if not groups:
        yield ["Linear"], _algorithm(name, algorithm)


def _algorithm(name: str, algorithm: str) -> Format:
    if algorithm not in ALGORITHMS:
        raise ModelError(f"{name}: quant_algo {algorithm!r} is not known; known: {', '.join(ALGORITHMS)}")
    return Format(*ALGORITHMS[algorithm])


def _averaged(spec: ModelSpec, of: Callable[[Linear], Format | None]) -> ModelSpec:
    """`spec` with the formats `of` each linear (None: wide); routed experts are told apart from the others."""
    wide = Format(float(dtype_bits(spec.dtype)), "")
    sizes: dict[bool, Counter[Format]] = {True: Counter(), False: Counter()}
    for linear in block_linears(spec):
        sizes[linear.routed][of(linear) or wide] += linear.size
    for routed, whole in ((True, _routed_params(spec)), (False, spec.block_params() - _routed_params(spec))):
        rest = whole - sizes[routed].total()  # biases, norms and routers
        if rest:
            sizes[routed][wide] += rest
    everything = sizes[True] + sizes[False]
    bits = _mean_bits(everything)
    experts, others = sizes[True], sizes[False]
    same = not experts or _mean_bits(experts) == _mean_bits(others)
    computes = others.most_common(1)[0][0].computes
    routed_in = experts.most_common(1)[0][0].computes if experts else computes
    return replace(
        spec,
        weight_bits=bits,
        expert_bits=None if same else _mean_bits(experts),
        linear_dtype=computes,
        expert_dtype="" if routed_in == computes else routed_in or spec.dtype,
    )


def _mean_bits(sizes: Counter[Format]) -> float:
    return sum(form.bits * size for form, size in sizes.items()) / sizes.total()


def _routed_params(spec: ModelSpec) -> int:
    return spec.num_moe_layers * spec.moe.num_experts * spec.expert_params() if spec.moe else 0


def block_linears(spec: ModelSpec) -> Iterator[Linear]:
    """The matrices that quantizers act on, layer by layer; routers stay wide everywhere and are left out."""
    h = spec.hidden_size
    for i in range(spec.num_layers):
        at = f"layers.{i}."
        if spec.is_attention(i):
            for names, size in _attention(spec):
                yield Linear(tuple(at + "self_attn." + name for name in names), size)
        if spec.is_linear(i) and spec.linear_attention is not None:
            lin = spec.linear_attention
            yield Linear(
                (at + "linear_attn.in_proj_qkv", at + "linear_attn.in_proj_qkvz"), h * (lin.conv_channels + lin.inner)
            )
            yield Linear((at + "linear_attn.out_proj",), lin.inner * h)
        if spec.is_moe(i) and spec.moe is not None:
            moe = spec.moe
            width = moe.latent_size or h
            one = (3 if spec.gated_mlp else 2) * width * moe.intermediate_size
            yield Linear((at + "mlp.experts.0.up_proj", at + "mlp.experts"), moe.num_experts * one, routed=True)
            if moe.num_shared:
                shared = (3 if spec.gated_mlp else 2) * h * moe.shared_width
                yield Linear((at + "mlp.shared_experts.up_proj", at + "mlp.shared_expert.up_proj"), shared)
        elif i not in spec.bare_layers:
            for name in ("gate_proj", "up_proj", "down_proj") if spec.gated_mlp else ("up_proj", "down_proj"):
                yield Linear((f"{at}mlp.{name}",), h * spec.intermediate_size)


def _attention(spec: ModelSpec) -> list[tuple[tuple[str, ...], int]]:
    h, heads = spec.hidden_size, spec.num_heads
    if spec.mla is not None:
        m = spec.mla
        qk = m.qk_nope_head_dim + m.qk_rope_head_dim
        query = (
            [(("q_a_proj",), h * m.q_lora_rank), (("q_b_proj",), m.q_lora_rank * heads * qk)]
            if m.q_lora_rank
            else [(("q_proj",), h * heads * qk)]
        )
        return [
            *query, (("kv_a_proj_with_mqa",), h * m.latent_dim),
            (("kv_b_proj",), m.kv_lora_rank * heads * (m.qk_nope_head_dim + m.v_head_dim)),
            (("o_proj",), heads * m.v_head_dim * h),
        ]  # fmt: skip
    kv = spec.num_kv_heads
    query_width = heads * (spec.head_dim + (spec.v_dim if spec.attention_gate else 0))
    return [
        (("q_proj", "qkv_proj"), h * query_width), (("k_proj", "qkv_proj"), h * kv * spec.head_dim),
        (("v_proj", "qkv_proj"), h * kv * spec.v_dim), (("o_proj",), heads * spec.v_dim * h),
    ]  # fmt: skip


def _matcher(patterns: Sequence[str]) -> Callable[[str], bool]:
    """A function that says whether a linear's name is meant by one of `patterns`: globs, `re:` expressions, the name of
    the linear or of a module around it, or `Linear` for all of them."""
    everything = "Linear" in patterns
    plain: set[str] = set()
    globs: list[str] = []
    expressions: list[re.Pattern[str]] = []
    for pattern in patterns:
        if pattern.startswith("re:"):
            expressions.append(re.compile(pattern[3:]))
        else:
            short = re.sub(r"^((language_)?model\.)+", "", pattern).replace("block_sparse_moe", "mlp")
            if "*" in short:
                globs.append(short)
            else:
                plain.add(short)

    def matches(name: str) -> bool:
        if everything or name in plain or any(module in plain for module in _around(name)):
            return True
        return any(fnmatchcase(name, g) for g in globs) or any(e.match("model." + name) for e in expressions)

    return matches


def _around(name: str) -> list[str]:
    """The modules around `name`, outermost first."""
    parts = name.split(".")
    return [".".join(parts[:n]) for n in range(1, len(parts))]
