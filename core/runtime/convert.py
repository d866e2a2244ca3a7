"""A checkpoint served as another attention variant: the tensors of its attention blocks made anew at load.

    Checkpoint    what a conversion starts from: spec, tensors, and the model itself where it must be seen at work
    Converted     what comes out: tensors under the usual names, and the spec they fit
    regrouped     other numbers of KV heads: repeated (exact), or mean-pooled as in GQA (arXiv:2305.13245)

An attention technique that serves other checkpoints than its own has `convert(checkpoint, model) -> Converted`.

Invariants
* A family sees names and shapes it knows; it cannot tell a converted checkpoint from a trained one.
* Nothing is read or computed before it is asked for; sums and means are in float64 and rounded once.
* What a technique raises while it converts, or while its tensors are made, is a PluginError that names it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from twinfer.core.errors import ModelError
from twinfer.core.guard import Blaming, unusable
from twinfer.core.runtime.stored_blocks import StoredBlocks
from twinfer.core.runtime.weights import WeightSource
from twinfer.core.spec import MLASpec, ModelSpec

if TYPE_CHECKING:
    from twinfer.core.runtime.families import DecoderModel
    from twinfer.core.runtime.linear import LinearFactory

_KV_PROJECTION = re.compile(r"model\.layers\.\d+\.self_attn\.[kv]_proj\.(weight|bias)$")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What is to be converted.

    build(linear): the checkpoint's own model in float32 on the device of the run, with linears made by `linear`.
    """

    spec: ModelSpec
    source: WeightSource
    device: torch.device
    build: Callable[[LinearFactory], DecoderModel]


class Converted(NamedTuple):
    """Tensors of the other variant. `spec`: the one asked for, with what only the weights could tell filled in."""

    source: WeightSource
    spec: ModelSpec


class ReplacedTensors:
    """A source with some tensors made anew, some new and some gone."""

    def __init__(
        self, inner: WeightSource, shapes: Mapping[str, tuple[int, ...]], make: Callable[[str], Tensor],
        gone: Iterable[str] = (),
    ) -> None:  # fmt: skip
        """shapes: of the tensors that `make(name)` answers for."""
        self.inner, self.path = inner, inner.path
        self._shapes, self._make, self._gone = dict(shapes), make, frozenset(gone)

    def names(self) -> Iterable[str]:
        kept = [name for name in self.inner.names() if name not in self._gone and name not in self._shapes]
        return [*kept, *self._shapes]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name] if name in self._shapes else self.inner.shape(name)

    def get(self, name: str) -> Tensor:
        return self._make(name) if name in self._shapes else self.inner.get(name)

    def blocks(self, name: str) -> StoredBlocks | None:
        """What the file holds in blocks, of the tensors that are as in the file."""
        blocks = getattr(self.inner, "blocks", None)
        return None if blocks is None or name in self._shapes else blocks(name)


def regrouped(source: WeightSource, spec: ModelSpec, num_kv_heads: int) -> WeightSource:
    """`source` of a model `spec` with `num_kv_heads` KV heads instead.

    More heads: each is repeated, so every query head finds the keys and values it had. Fewer: the mean of each group
    of neighbours, biases too; norms of keys are shared by all heads and stay. ModelError when heads do not group.
    """
    have = spec.num_kv_heads
    if num_kv_heads % have and have % num_kv_heads:
        raise ModelError(
            f"{spec.name}: {have} KV heads cannot become {num_kv_heads}; one must be a multiple of the other"
        )
    kv = [name for name in source.names() if _KV_PROJECTION.match(name)]

    def shape(name: str) -> tuple[int, ...]:
        rows, *rest = source.shape(name)
        if rows % have:
            raise ModelError(f"{source.path}: {name} has {rows} rows, which {have} KV heads cannot share")
        return rows // have * num_kv_heads, *rest

    def make(name: str) -> Tensor:
        tensor = source.get(name)
        heads = tensor.reshape(have, -1, *tensor.shape[1:])
        if num_kv_heads >= have:
            new = heads.repeat_interleave(num_kv_heads // have, dim=0)
        else:
            grouped = heads.reshape(num_kv_heads, have // num_kv_heads, *heads.shape[1:])
            new = grouped.double().mean(dim=1).to(tensor.dtype if tensor.is_floating_point() else torch.float32)
        return new.flatten(0, 1)

    return ReplacedTensors(source, {name: shape(name) for name in kv}, make)


class ConvertedTensors:
    """`inner`, which a technique has converted: what goes wrong in it is the fault of `blaming`."""

    def __init__(self, inner: WeightSource, blaming: Blaming) -> None:
        with blaming:
            self.inner, self.path = inner, inner.path
        self._blaming = blaming

    def names(self) -> Iterable[str]:
        with self._blaming:
            return list(self.inner.names())

    def shape(self, name: str) -> tuple[int, ...]:
        with self._blaming:
            return self.inner.shape(name)

    def get(self, name: str) -> Tensor:
        with self._blaming:
            return self.inner.get(name)

    def blocks(self, name: str) -> StoredBlocks | None:
        """As of `ReplacedTensors`."""
        with self._blaming:
            blocks = getattr(self.inner, "blocks", None)
            return None if blocks is None else blocks(name)


def converted(attention: Any, checkpoint: Checkpoint, model: ModelSpec) -> Converted:
    """`checkpoint` as `attention`, a technique, converts it to `model`."""
    blaming = Blaming("attention", attention, "convert")
    with blaming:
        answer = attention.convert(checkpoint, model)
    if not (isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[1], ModelSpec)):
        raise unusable("attention", attention, "convert", answer, "a Converted: the tensors and the spec that they fit")
    return Converted(ConvertedTensors(answer[0], blaming), answer[1])


def differs(checkpoint: ModelSpec, model: ModelSpec) -> bool:
    """Whether `model` needs other weights for keys and values than `checkpoint` was trained with."""

    def weights(spec: ModelSpec) -> tuple[int, MLASpec | None]:
        return spec.num_kv_heads, spec.mla and replace(spec.mla, absorbed=True)  # both modes run the same weights

    return weights(checkpoint) != weights(model)


__all__ = ["Checkpoint", "Converted", "ConvertedTensors", "ReplacedTensors", "converted", "differs", "regrouped"]
