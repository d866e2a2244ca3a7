"""GGUF checkpoints: names, layouts and quantized blocks turned into plain float32 tensors.

Invariants
* GGUF stores shapes reversed (fastest dimension first); data is row-major `[out, in]` as everywhere else.
* Architecture `llama` stores the rows of q and k interleaved (pairs of one rotation side by side); they are put back
  into halves here. The other architectures keep the halves.
* Gemma stores every norm as 1 + w; the 1 is taken off again, so that w means the same as in a Hugging Face file.
* A file that is damaged, cut short or of an unknown block type is a `ModelError`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from twinfer.core.errors import ModelError

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "rope_freqs.weight": "rope_freqs.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_BLOCK = re.compile(r"blk\.(\d+)\.([a-z_]+)\.(weight|bias)$")


class GGUFWeights:
    """Tensors of one GGUF file under Hugging Face names."""

    def __init__(self, path: str | Path) -> None:
        from gguf import GGUFReader

        self.path = Path(path)
        try:
            reader = GGUFReader(self.path)
            self.architecture = str(_field(reader, "general.architecture"))
            self._heads = int(_field(reader, f"{self.architecture}.attention.head_count"))
            kv = _field(reader, f"{self.architecture}.attention.head_count_kv", default=self._heads)
            self._kv_heads = int(kv)
            tensors = {self._name(t.name): t for t in reader.tensors}
            for tensor in tensors.values():
                if tensor.data.nbytes != int(tensor.n_bytes):
                    raise ValueError(f"{tensor.name} has {tensor.data.nbytes} of {int(tensor.n_bytes)} bytes")
        except ModelError:
            raise
        except Exception as error:  # the reader raises whatever numpy trips over first
            raise ModelError(
                f"{self.path}: cannot be read as GGUF ({type(error).__name__}: {error}); the file is damaged or cut short"
            ) from error
        self._tensors = tensors

    def _name(self, stored: str) -> str:
        if stored in _TOP:
            return _TOP[stored]
        match = _BLOCK.match(stored)
        if match is None:
            return stored
        layer, part, kind = match.groups()
        names = _LAYER | _GEMMA if self.architecture.startswith("gemma") else _LAYER
        return f"model.layers.{layer}.{names[part]}.{kind}" if part in names else stored

    def names(self) -> Iterable[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(int(n) for n in reversed(self._tensors[name].shape))

    def get(self, name: str) -> Tensor:
        from gguf.quants import dequantize

        stored = self._tensors[name]
        try:
            values = dequantize(stored.data, stored.tensor_type)
        except (NotImplementedError, ValueError, IndexError) as error:
            raise ModelError(
                f"{self.path}: {stored.name} of type {stored.tensor_type.name} cannot be dequantized ({error})"
            ) from error
        # a copy: the reader hands out read-only views of the mapped file for types that need no dequantizing
        tensor = torch.from_numpy(np.array(values, dtype=np.float32)).reshape(self.shape(name))
        if self.architecture == "llama" and name.endswith(("q_proj.weight", "q_proj.bias")):
            return _halves(tensor, self._heads)
        if self.architecture == "llama" and name.endswith(("k_proj.weight", "k_proj.bias")):
            return _halves(tensor, self._kv_heads)
        if self.architecture.startswith("gemma") and name.endswith("norm.weight"):
            return tensor - 1.0
        return tensor


def _halves(tensor: Tensor, heads: int) -> Tensor:
    """Rows `[heads, pair, 2]` of a rotary projection back to `[heads, 2, pair]`."""
    rows = tensor.shape[0]
    pairs = tensor.reshape(heads, rows // heads // 2, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)


def _field(reader: Any, key: str, default: Any = None) -> Any:
    field = reader.get_field(key)
    if field is None:
        if default is None:
            raise ModelError(f"{reader.data.filename}: GGUF header has no {key}")
        return default
    value = field.contents()
    if isinstance(value, list):  # per-layer head counts: only uniform ones are plain models
        if len(set(value)) != 1:
            raise ModelError(f"{reader.data.filename}: {key} differs between layers, which is not supported")
        return value[0]
    return value
