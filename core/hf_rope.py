"""The rotary embedding of a Hugging Face `config.json`, in either spelling, with every parameter spelt out.

Invariants
* `rope_scaling` (transformers 4) and `rope_parameters` (5) give the same; a plain rotary embedding has no scaling.
* Defaults are those of Hugging Face's configuration classes, filled in here: who computes frequencies finds
  `factor` and `original_max_position_embeddings` where the kind needs them.
* A parameter that is missing, of the wrong kind or unknown is a ModelError that names it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from twinfer.core.errors import ModelError

_THETA = {
    "mixtral": 1e6, "gemma3_text": 1e6, "gpt_oss": 150000.0, "llama4_text": 500000.0, "minimax_m2": 5e6,
}  # fmt: skip
"""Bases that are not 10000 when a config.json leaves them out."""

_NEEDED: Mapping[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings"),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "longrope": ("factor", "original_max_position_embeddings", "short_factor", "long_factor"),
}
_OPTIONAL: Mapping[str, tuple[str, ...]] = {
    "dynamic": ("original_max_position_embeddings",),
    "yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    "longrope": ("attention_factor",),
}
_HARMLESS = ("rope_type", "type", "rope_theta", "partial_rotary_factor", "finetuned", "short_mscale", "long_mscale")
"""Read elsewhere, or written by some and read by nobody."""

_LISTS = ("short_factor", "long_factor")
_POSITIVE = ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor", *_LISTS)


@dataclass(frozen=True, slots=True)
class Rope:
    """theta: base.  local_theta: of sliding layers where they have their own.  scaling: None for plain rotary.

    max_context: positions the scaling reaches to.
    """

    theta: float
    local_theta: float
    scaling: Mapping[str, Any] | None
    partial: float
    max_context: int


def read_rope(config: Mapping[str, Any], family: str, name: str, max_positions: int) -> Rope:
    """What `config` says of rotary positions. max_positions: its `max_position_embeddings`."""
    theta = _number(config, "rope_theta", _THETA.get(family, 10000.0), name)
    local = _number(config, "rope_local_base_freq", 10000.0, name)
    partial = _number(config, "partial_rotary_factor", 1.0, name)
    for key in ("rope_scaling", "rope_parameters"):
        if config.get(key) is not None and not isinstance(config[key], Mapping):
            raise ModelError(f"{name}: {key}={config[key]!r} is no JSON object; the file is damaged")
    found = config.get("rope_scaling")
    new = config.get("rope_parameters")
    if new:
        sliding, full = new.get("sliding_attention"), new.get("full_attention")
        if isinstance(sliding, Mapping):
            local = _number(sliding, "rope_theta", local, name)
            if _kind(sliding, family) != "default":
                raise ModelError(f"{name}: rope_parameters scale the sliding layers, which no known model does")
        found = full if isinstance(full, Mapping) else {} if isinstance(sliding, Mapping) else new
        theta = _number(found, "rope_theta", theta, name)
        partial = _number(found, "partial_rotary_factor", partial, name)
    for key, base in (("rope_theta", theta), ("rope_local_base_freq", local)):
        if not 0.0 < base < math.inf:
            raise ModelError(f"{name}: {key}={base} should be a positive number; the file is damaged")
    if not 0.0 < partial <= 1.0:
        raise ModelError(f"{name}: partial_rotary_factor={partial} should lie in (0, 1]; the file is damaged")
    scaling = _scaling(found or {}, family, name, config, max_positions)
    return Rope(theta, local, scaling, partial, _reach(scaling, max_positions))


def _kind(found: Mapping[str, Any], family: str) -> str:
    kind = str(found.get("rope_type") or found.get("type") or "default")
    if kind == "mrope":  # one position for text, which then turns as ever
        return "default"
    if kind == "su" or (family == "phi3" and kind == "yarn"):  # names of longrope in old Phi-3 files
        return "longrope"
    return kind


def _scaling(
    found: Mapping[str, Any], family: str, name: str, config: Mapping[str, Any], max_positions: int
) -> Mapping[str, Any] | None:
    kind = _kind(found, family)
    if kind == "default":
        return None
    if kind not in _NEEDED:  # the families refuse it; the simulator needs no frequencies
        return {key: v for key, v in found.items() if key not in ("type", "rope_theta")} | {"rope_type": kind}
    values = {key: value for key, value in found.items() if value is not None and key not in _HARMLESS}
    unknown = sorted(values.keys() - {*_NEEDED[kind], *_OPTIONAL.get(kind, ())} - {"original_max_position_embeddings"})
    if unknown:
        raise ModelError(f"{name}: rope scaling {kind!r} with {', '.join(unknown)} is not known")
    if kind == "dynamic":
        values["original_max_position_embeddings"] = max_positions
    elif "original_max_position_embeddings" in _NEEDED[kind]:
        outer = config.get("original_max_position_embeddings")
        values["original_max_position_embeddings"] = outer or values.get(
            "original_max_position_embeddings", max_positions
        )
    else:
        values.pop("original_max_position_embeddings", None)
    if kind in ("yarn", "longrope") and "factor" not in values:
        values["factor"] = max_positions / values["original_max_position_embeddings"]
    for key in _NEEDED[kind]:
        if key not in values:
            raise ModelError(f"{name}: rope scaling {kind!r} lacks {key!r}; give the whole config.json of the model")
    for key, value in values.items():
        numbers = value if key in _LISTS and isinstance(value, list) else [value]
        boolean = key == "truncate"
        if any(not isinstance(v, int | float) or isinstance(v, bool) != boolean for v in numbers):
            raise ModelError(f"{name}: rope scaling has {key}={value!r}, which should be a number")
        positive = key in _POSITIVE
        if any(not math.isfinite(v) or (positive and v <= 0) for v in numbers):
            raise ModelError(
                f"{name}: rope scaling has {key}={value!r}, which should be {'positive' if positive else 'finite'}"
            )
    return {**values, "rope_type": kind}


def _reach(scaling: Mapping[str, Any] | None, max_positions: int) -> int:
    """Tokens of context: dynamic and yarn are made to go beyond what the model was trained on."""
    if scaling is None or scaling["rope_type"] not in ("dynamic", "yarn"):
        return max_positions
    return max(max_positions, int(scaling["original_max_position_embeddings"] * scaling["factor"]))


def _number(values: Mapping[str, Any], key: str, default: float, name: str) -> float:
    value = values.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ModelError(f"{name}: config.json has {key}={value!r}, which should be a number")
    return float(value)


__all__ = ["Rope", "read_rope"]
