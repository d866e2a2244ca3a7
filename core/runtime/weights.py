"""Reading checkpoints: names, shapes and tensors, whatever the file format.

Invariants
* A source answers with Hugging Face names (`model.layers.0.self_attn.q_proj.weight`) and layouts (`[out, in]`).
* Nothing is read before it is asked for; a damaged or incomplete file is a `ModelError` that names the file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from twinfer.core.errors import ModelError
from twinfer.core.runtime.expert_names import Index, named_parts
from twinfer.core.runtime.stored_blocks import StoredBlocks

Packed = Mapping[str, Mapping[str, int]]
"""Last part of the name of a stored tensor to those of its rows: {"self_attn.qkv_proj": {"self_attn.q_proj": 64, ...}}."""

LISTED = 6  # names shown in an error before "and N more"


OnLayer = Callable[[int], None]
Cut = Callable[[Any], Any]
"""A tensor, or blocks of one, to what a rank takes of it."""


class WeightSource(Protocol):
    """Tensors of one checkpoint by name."""

    path: Path

    def names(self) -> Iterable[str]: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def get(self, name: str) -> Tensor:
        """The tensor on the CPU, in the dtype of the file (quantized blocks as float32)."""
        ...


def open_weights(path: str | Path) -> WeightSource:
    """The checkpoint at `path`: a directory, a `.safetensors` file, an index file or a `.gguf` file."""
    path = Path(path)
    if not path.exists():
        raise ModelError(f"{path}: no such file or directory; give a model directory, a .safetensors or a .gguf file")
    if path.is_dir():
        return _open_directory(path)
    if path.suffix == ".gguf":
        from twinfer.core.runtime.gguf_weights import GGUFWeights

        return GGUFWeights(path)
    if path.suffix == ".safetensors":
        return SafetensorsWeights(path, [path])
    if path.name.endswith(".safetensors.index.json"):
        return SafetensorsWeights(path, _shards_of(path))
    raise ModelError(f"{path}: unknown weight format; give a directory, a .safetensors or a .gguf file")


def _open_directory(folder: Path) -> WeightSource:
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    if index.exists():
        return SafetensorsWeights(folder, _shards_of(index))
    if single.exists():
        return SafetensorsWeights(folder, [single])
    others = sorted(folder.glob("*.safetensors"))
    if others:
        return SafetensorsWeights(folder, others)
    ggufs = sorted(folder.glob("*.gguf"))
    if len(ggufs) == 1:
        return open_weights(ggufs[0])
    if ggufs:
        raise ModelError(f"{folder}: holds {len(ggufs)} GGUF files; name one of them: {_some(p.name for p in ggufs)}")
    if any(folder.glob("*.bin")) or any(folder.glob("*.pth")):
        raise ModelError(f"{folder}: holds only pickled weights (.bin, .pth); convert them to safetensors")
    raise ModelError(f"{folder}: no weights found; expected model.safetensors, a sharded index or one .gguf file")


def _shards_of(index: Path) -> list[Path]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(weight_map.values()))
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise ModelError(f"{index}: not a safetensors index ({type(error).__name__}: {error})") from error
    shards = [index.parent / name for name in names]
    missing = [shard.name for shard in shards if not shard.exists()]
    if missing:
        raise ModelError(f"{index}: missing shards {_some(missing)} of {len(shards)}; download them again")
    return shards


_TEXT_HALF = re.compile(r"^language_model\.|(?<=^model\.)language_model\.")


class SafetensorsWeights:
    """One or more safetensors files.

    A checkpoint saved without the `model.` prefix (the backbone alone) is answered under the full names, experts
    under those of `expert_names.py`; of a checkpoint for text and images the language model is.
    """

    def __init__(self, path: Path, files: Iterable[Path]) -> None:
        from safetensors import SafetensorError, safe_open

        self.path = path
        self._files: dict[str, tuple[Any, str, Index]] = {}
        for file in files:
            try:
                handle = safe_open(str(file), framework="pt", device="cpu")
                for stored in handle.keys():  # noqa: SIM118 (not a dict)
                    for name, index in named_parts(stored, tuple(handle.get_slice(stored).get_shape())):
                        self._files[name] = (handle, stored, index)
            except (SafetensorError, OSError, ValueError) as error:
                raise ModelError(
                    f"{file}: cannot be read as safetensors ({error}); the file is damaged or cut short"
                ) from error
        self._files = {_TEXT_HALF.sub("", name): entry for name, entry in self._files.items()}
        if "embed_tokens.weight" in self._files:
            self._files = {
                name if name.startswith("lm_head.") else f"model.{name}": entry for name, entry in self._files.items()
            }

    def names(self) -> Iterable[str]:
        return self._files.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        handle, stored, index = self._files[name]
        shape = tuple(handle.get_slice(stored).get_shape())
        if not index:
            return shape
        kept = [len(range(*part.indices(n))) for part, n in zip(index, shape, strict=False) if isinstance(part, slice)]
        return (*kept, *shape[len(index) :])

    def get(self, name: str) -> Tensor:
        handle, stored, index = self._files[name]
        tensor: Tensor = handle.get_slice(stored)[index] if index else handle.get_tensor(stored)
        return tensor


class Unpacked:
    """A checkpoint that stores projections joined (Phi-3), answered one by one; only asked for rows are kept."""

    def __init__(self, source: WeightSource, packed: Packed) -> None:
        self.source, self.path = source, source.path
        self._parts: dict[str, tuple[str, int, int]] = {}  # name -> stored name, first row, row after the last
        self._names: list[str] = []
        self._last: tuple[str, Tensor] | None = None
        for name in source.names():
            stored, _, kind = name.rpartition(".")
            found = next((key for key in packed if stored.endswith(f".{key}")), None)
            if found is None:
                self._names.append(name)
                continue
            start, rows = 0, sum(packed[found].values())
            if source.shape(name)[0] != rows:
                raise ModelError(
                    f"{self.path}: {name} has {source.shape(name)[0]} rows, "
                    f"expected {rows} ({' + '.join(map(str, packed[found].values()))})"
                )
            for part, length in packed[found].items():
                full = f"{stored.removesuffix(found)}{part}.{kind}"
                self._parts[full] = (name, start, start + length)
                self._names.append(full)
                start += length

    def names(self) -> Iterable[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._parts:
            return self.source.shape(name)
        stored, start, stop = self._parts[name]
        return (stop - start, *self.source.shape(stored)[1:])

    def get(self, name: str) -> Tensor:
        if name not in self._parts:
            return self.source.get(name)
        stored, start, stop = self._parts[name]
        if self._last is None or self._last[0] != stored:  # parts are asked for one after another
            self._last = stored, self.source.get(stored)
        return self._last[1][start:stop]

    def blocks(self, name: str) -> StoredBlocks | None:
        found = getattr(self.source, "blocks", None)
        if found is None or name not in self._parts:
            return None if found is None else found(name)
        stored, start, stop = self._parts[name]
        whole: StoredBlocks | None = found(stored)
        return None if whole is None else whole.narrow(0, start, stop - start)


_HARMLESS = re.compile(
    r"(^rope_freqs|^rope_factors_(long|short)|\.inv_freq|\.attn_rot_embd|masked_bias|^lm_head)(\.weight)?$"
)
"""Tensors that may be there: what is computed from the configuration anyway, and the head of a tied table."""

_LAYER = re.compile(r"^model\.layers\.(\d+)\.")


def check_tensors(
    source: WeightSource,
    expected: Mapping[str, tuple[int, ...]],
    family: str,
    unused: Callable[[str], bool] = lambda name: False,
) -> None:
    """Raise a ModelError that lists what is missing, has another shape than `expected` or is not expected at all.

    unused: names that a checkpoint of the family may hold and this engine leaves alone.
    """
    found = {name for name in source.names() if name in expected or not (_HARMLESS.search(name) or unused(name))}
    missing = [name for name in expected if name not in found]
    misshapen = [
        f"{name} is {list(source.shape(name))}, expected {list(shape)}"
        for name, shape in expected.items()
        if name in found and source.shape(name) != tuple(shape)
    ]
    unknown = sorted(found - expected.keys())
    if not missing and not misshapen and not unknown:
        return
    parts = []
    if missing:
        parts.append(f"missing {_some(missing)}")
    if unknown:
        parts.append(f"found but not expected {_some(unknown)}")
    layers = [1 + max((int(m[1]) for m in map(_LAYER.match, names) if m), default=-1) for names in (found, expected)]
    if layers[0] != layers[1]:
        parts.append(f"{layers[0]} layers found, {layers[1]} in the configuration")
    if misshapen:
        parts.append(f"wrong shape: {_some(misshapen)}")
    raise ModelError(
        f"{source.path}: does not match the {family} architecture of its configuration "
        f"({len(found)} tensors found, {len(expected)} expected): {'; '.join(parts)}"
    )


class Loader:
    """Fetches tensors of a source in the dtype and on the device of the model.

    on_layer: told the number of a layer when its first tensor is asked for.
    cut: what a rank takes of a tensor; it is taken first, so that of a mapped file no more is read or converted.
    """

    def __init__(
        self, source: WeightSource, dtype: torch.dtype, device: torch.device | str, blocks: bool = False,
        on_layer: OnLayer | None = None,
    ) -> None:  # fmt: skip
        self.source, self.dtype, self.device = source, dtype, torch.device(device)
        self._names = frozenset(source.names())
        self._blocks = getattr(source, "blocks", None) if blocks else None
        self._on_layer, self._layer = on_layer, -1

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def __call__(self, name: str, cut: Cut | None = None) -> Tensor:
        self._tell(name)
        tensor = self.source.get(name)
        if not tensor.is_floating_point():
            raise ModelError(
                f"{self.source.path}: {name} holds {tensor.dtype} values, packed in a way that is not known; give weights "
                "in a floating-point format, or a GGUF file"
            )
        return (tensor if cut is None else cut(tensor)).to(device=self.device, dtype=self.dtype)

    def optional(self, name: str, cut: Cut | None = None) -> Tensor | None:
        return self(name, cut) if name in self._names else None

    def projection(self, name: str, cut: Cut | None = None) -> Tensor | StoredBlocks:
        """A weight `[out, in]` for a linear: in the blocks of the file where `blocks` asked for them."""
        self._tell(name)
        found = None if self._blocks is None else self._blocks(name)
        if found is None:
            return self(name, cut)
        return found if cut is None else cut(found)

    def _tell(self, name: str) -> None:
        layer = _LAYER.match(name)
        if self._on_layer is not None and layer is not None and int(layer[1]) != self._layer:
            self._layer = int(layer[1])
            self._on_layer(self._layer)


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    text = ", ".join(listed[:LISTED])
    return text if len(listed) <= LISTED else f"{text} and {len(listed) - LISTED} more"
