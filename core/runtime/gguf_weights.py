"""GGUF checkpoints: names, layouts and quantized blocks turned into plain float32 tensors.

Invariants
* A source answers with Hugging Face names and layouts, as every `WeightSource`.
* Architecture `llama` stores the rows of q and k interleaved (pairs of one rotation side by side); they are put back
  into halves here. The other architectures keep the halves.
* Experts lie in one tensor per projection and layer; each is answered by itself. The up-projection of latents may lie
  in two, that of keys transposed.
* Gemma stores every norm as 1 + w; the 1 is taken off again, so that w means the same as in a Hugging Face file.
* A file that is damaged, cut short or of a block type that cannot be dequantized is a `ModelError`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from twinfer.core.errors import ModelError
from twinfer.core.gguf_header import TensorInfo, read_gguf_header
from twinfer.core.runtime.stored_blocks import VALUES_PER_BLOCK, StoredBlocks

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
}
_EXPERTS = {"ffn_gate": "gate_proj", "ffn_up": "up_proj", "ffn_down": "down_proj"}
_GEMMA = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_PHI3 = {"ffn_up": "mlp.gate_up_proj"}
_BLOCK = re.compile(r"blk\.(\d+)\.([a-z_]+)\.(weight|bias)$")
_EXPERT_STACK = re.compile(r"blk\.(\d+)\.(ffn_[a-z]+)_exps\.weight$")
_ONE_EXPERT = re.compile(r"blk\.(\d+)\.(ffn_[a-z]+)\.(\d+)\.weight$")  # of files from before April 2024
_SCORE_BIAS = re.compile(r"blk\.(\d+)\.exp_probs_b(\.bias)?$")
_UP_PROJECTION = re.compile(r"blk\.(\d+)\.attn_([kv])_b\.weight$")
_SCALES = {
    "Q4_0": slice(2), "Q4_1": slice(4), "Q8_0": slice(2), "Q5_0": slice(2), "Q5_1": slice(4), "Q4_K": slice(4),
    "Q5_K": slice(4), "Q6_K": slice(208, 210),
}  # fmt: skip
"""Where a block has its float16 scales, for the types that linears may keep in blocks."""

_CHUNK = 32768  # values per row handed to the dequantizer, which works on 16 rows at a time


class GGUFWeights:
    """Tensors of one GGUF file under Hugging Face names."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        header = read_gguf_header(self.path)
        self.architecture = str(header.metadata.get("general.architecture", ""))
        self._heads = self._count(header.metadata, "head_count", None)
        self._kv_heads = self._count(header.metadata, "head_count_kv", self._heads)
        self._tensors: dict[str, TensorInfo] = {}
        ups: dict[str, dict[str, TensorInfo]] = {}
        for info in header.tensors.values():
            if match := _UP_PROJECTION.match(info.name):
                ups.setdefault(f"model.layers.{match[1]}.self_attn.kv_b_proj.weight", {})[match[2]] = info
            else:
                self._tensors.update(self._named(info))
        # some files hold the same both ways
        self._ups = {name: parts for name, parts in ups.items() if name not in self._tensors and len(parts) == 2}
        for name, parts in self._ups.items():
            (heads, rank, nope), (_, width, _) = parts["k"].shape, parts["v"].shape
            self._tensors[name] = TensorInfo(name, (heads * (nope + width), rank), "F32", 0, 0)
        self._bytes = np.memmap(self.path, dtype=np.uint8, mode="r")

    def _count(self, metadata: Any, key: str, default: int | None) -> int:
        full = f"{self.architecture}.attention.{key}"
        value = metadata.get(full, default)
        if isinstance(value, list) and len(set(value)) == 1:  # some writers store one count per layer
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ModelError(f"{self.path}: GGUF header has {full}={value!r}, which should be one positive count")
        return value

    def _named(self, info: TensorInfo) -> Iterator[tuple[str, TensorInfo]]:
        """Names under which a stored tensor is known here, each with where it lies: a stack of experts has many."""
        if (match := _EXPERT_STACK.match(info.name)) and match[2] in _EXPERTS and len(info.shape) == 3:
            size = info.nbytes // info.shape[0]
            for e in range(info.shape[0]):
                name = f"model.layers.{match[1]}.mlp.experts.{e}.{_EXPERTS[match[2]]}.weight"
                yield name, TensorInfo(info.name, info.shape[1:], info.type, size, info.offset + e * size)
        else:
            yield self._name(info.name), info

    def _name(self, stored: str) -> str:
        if stored in _TOP:
            return _TOP[stored]
        if (match := _ONE_EXPERT.match(stored)) and match[2] in _EXPERTS:
            return f"model.layers.{match[1]}.mlp.experts.{match[3]}.{_EXPERTS[match[2]]}.weight"
        if match := _SCORE_BIAS.match(stored):
            return f"model.layers.{match[1]}.mlp.gate.e_score_correction_bias"
        match = _BLOCK.match(stored)
        if match is None:
            return stored
        layer, part, kind = match.groups()
        own = _GEMMA if self.architecture.startswith("gemma") else _PHI3 if self.architecture == "phi3" else {}
        names = _LAYER | own
        return f"model.layers.{layer}.{names[part]}.{kind}" if part in names else stored

    def names(self) -> Iterable[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def get(self, name: str) -> Tensor:
        if name in self._ups:
            k, v = (self._dequantized(self._ups[name][part]) for part in "kv")
            return torch.cat((k.transpose(1, 2), v), dim=1).flatten(0, 1)
        tensor = self._rows_in_order(name, self._dequantized(self._tensors[name]))
        if self.architecture.startswith("gemma") and name.endswith("norm.weight"):
            return tensor - 1.0
        return tensor

    def blocks(self, name: str) -> StoredBlocks | None:
        """The weight `[out, in]` as it is stored; None when it is not in blocks of a type that can be kept."""
        info = self._tensors[name]
        values = VALUES_PER_BLOCK[info.type]
        if info.type not in _SCALES or len(info.shape) != 2 or info.shape[1] % values:
            return None
        data = np.array(self._bytes[info.offset : info.offset + info.nbytes])
        blocks = torch.from_numpy(data).view(info.shape[0], info.shape[1] // values, -1)
        if not bool(blocks[..., _SCALES[info.type]].contiguous().view(torch.float16).isfinite().all()):
            raise ModelError(f"{self.path}: {info.name} holds values that are not finite; the file is damaged")
        return StoredBlocks(info.type, self._rows_in_order(name, blocks))

    def _rows_in_order(self, name: str, tensor: Tensor) -> Tensor:
        """`tensor [out, ...]` with rotary rows as Hugging Face has them."""
        if self.architecture == "llama" and name.endswith(("q_proj.weight", "q_proj.bias")):
            return self._halves(name, tensor, self._heads)
        if self.architecture == "llama" and name.endswith(("k_proj.weight", "k_proj.bias")):
            return self._halves(name, tensor, self._kv_heads)
        return tensor

    def _dequantized(self, info: TensorInfo) -> Tensor:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        data = np.asarray(self._bytes[info.offset : info.offset + info.nbytes])
        # blocks lie one after another whatever the shape: rows of a good size make the dequantizer 2x faster
        width = info.nbytes * min(_CHUNK, info.num_values) // info.num_values
        rows = data.reshape(-1, width) if info.num_values % _CHUNK == 0 else data.reshape(1, -1)
        try:
            values = dequantize(rows, GGMLQuantizationType[info.type])
        except (NotImplementedError, ValueError, KeyError) as error:
            raise ModelError(
                f"{self.path}: {info.name} of type {info.type} cannot be dequantized ({error}); use another quantization"
            ) from None
        if not np.isfinite(values).all():
            raise ModelError(f"{self.path}: {info.name} holds values that are not finite; the file is damaged")
        # unquantized types come back as views of the file, which is read-only
        own = np.asarray(values, dtype=np.float32) if values.flags.writeable else np.array(values, dtype=np.float32)
        return torch.from_numpy(own).view(info.shape)

    def _halves(self, name: str, tensor: Tensor, heads: int) -> Tensor:
        """Rows `[heads, pair, 2]` of a rotary projection back to `[heads, 2, pair]`."""
        rows = tensor.shape[0]
        if rows % (2 * heads):
            raise ModelError(f"{self.path}: {name} has {rows} rows, which {heads} heads cannot share in pairs")
        pairs = tensor.reshape(heads, rows // heads // 2, 2, *tensor.shape[1:])
        return pairs.transpose(1, 2).reshape(tensor.shape)
