"""Experts under one set of names, however a checkpoint stores them.

    model.layers.L.mlp.gate.weight                          [experts, hidden]
    model.layers.L.mlp.experts.N.{gate,up}_proj.weight      [width, hidden]
    model.layers.L.mlp.experts.N.down_proj.weight           [hidden, width]

These are the names of Qwen3-MoE and DeepSeek. Mixtral has others for the same, and transformers 5 can write all experts
of a layer as one tensor.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

Index = tuple[int | slice, ...]
"""Part of a stored tensor; empty for all of it."""

_MIXTRAL = re.compile(r"(.*)\.block_sparse_moe\.(gate|experts\.\d+\.w[123])\.weight$")
_FUSED = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)$")
_OF_MIXTRAL = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def named_parts(stored: str, shape: tuple[int, ...]) -> Iterator[tuple[str, Index]]:
    """Names under which the tensor `stored` is known here, and which part of it each is."""
    if match := _MIXTRAL.match(stored):
        prefix, part = match.groups()
        head, _, last = part.rpartition(".")
        yield f"{prefix}.mlp.{head}.{_OF_MIXTRAL[last]}.weight" if head else f"{prefix}.mlp.gate.weight", ()
    elif (match := _FUSED.match(stored)) and len(shape) == 3:
        experts, part = match.groups()
        half = shape[1] // 2
        for e in range(shape[0]):
            if part == "down_proj":
                yield f"{experts}.{e}.down_proj.weight", (e,)
            else:
                yield f"{experts}.{e}.gate_proj.weight", (e, slice(0, half))
                yield f"{experts}.{e}.up_proj.weight", (e, slice(half, shape[1]))
    else:
        yield stored, ()


__all__ = ["Index", "named_parts"]
