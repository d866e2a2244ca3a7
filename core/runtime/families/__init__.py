"""Model files, one per family, and how the runtime finds the one that serves a spec.

A family is a technique of kind `model_family` (hook `register_model_family`); the built-in ones are declared in
`plugins/model_family`. Besides the attributes of every technique it has

    serves(model) -> bool                               by `ModelSpec.family`
    expected_tensors(model) -> {name: shape}            what a checkpoint must hold
    packed_tensors(model) -> {stored: {part: rows}}     optional: tensors that a checkpoint may hold joined
    unused_tensor(model, name) -> bool                  optional: whether a checkpoint may hold it for other uses
    build(model, load, linear, parallel) -> DecoderModel   `load` fetches tensors in the right dtype, on the device;
                                                        `parallel` says which share of the weights this rank holds

Invariants
* A built model knows tokens, positions and an `AttentionStep`; it knows no requests, blocks or scheduler.
* `mark(op)` is called right after each op, with the names of `core/layer_ops.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from twinfer.core.errors import ModelError
from twinfer.core.guard import Blaming, reasons_against
from twinfer.core.registry import Registry
from twinfer.core.spec import ModelSpec
from twinfer.core.technique import Needs

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from twinfer.core.runtime.attention_torch import AttentionStep
    from twinfer.core.runtime.linear import LinearFactory
    from twinfer.core.runtime.parallel import Parallel
    from twinfer.core.runtime.weights import OnLayer, WeightSource

Mark = Callable[[str], None]


class DecoderModel(Protocol):
    """A decoder-only transformer on one device, or one rank's share of it; `spec` is of the whole model."""

    spec: ModelSpec
    dtype: torch.dtype
    device: torch.device
    parallel: Parallel

    def forward(
        self, tokens: Tensor, positions: Tensor, attention: AttentionStep, logits_index: Tensor, mark: Mark
    ) -> Tensor:
        """`tokens, positions [tokens]` to float32 logits `[len(logits_index), vocab]`."""
        ...


def family_of(model: ModelSpec, registry: Registry) -> type[Any]:
    """The registered family that serves `model`; ModelError when there is none or it cannot."""
    families = registry.all("model_family")
    for item in families:
        with Blaming("model_family", item.cls, "serves"):
            serves = item.cls.serves(model)
        if serves:
            reasons = reasons_against("model_family", item.cls, Needs(model=model))
            if reasons:
                raise ModelError(f"{model.name}: family {item.name} cannot run it: {'; '.join(reasons)}")
            return item.cls
    known = ", ".join(item.name for item in families) or "none"
    raise ModelError(
        f"{model.name}: no model family serves {model.family!r} in the engine (known: {known}); "
        "it can still be simulated"
    )


def load_model(
    model: ModelSpec,
    path: str | Path,
    registry: Registry,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    linear: LinearFactory | None = None,
    parallel: Parallel | None = None,
    checkpoint: ModelSpec | None = None,
    attention: Any = None,
    on_layer: OnLayer | None = None,
) -> DecoderModel:
    """Weights at `path` as a runnable model of the shapes in `model`; with `parallel`, the share of one rank.

    checkpoint: what the weights are, when `attention`, a technique, is to turn them into another variant first.
    on_layer: told the number of every layer when its first tensor is read.
    Raises ModelError for a damaged file, missing or misshapen tensors, or a family that is not implemented.
    """
    import torch

    from twinfer.core.runtime.convert import Checkpoint, converted, differs
    from twinfer.core.runtime.linear import dense
    from twinfer.core.runtime.parallel import ALONE
    from twinfer.core.runtime.weights import Loader, Unpacked, check_tensors, open_weights

    family, source = family_of(model, registry), open_weights(path)
    original = checkpoint or model
    packed = family.packed_tensors(original) if hasattr(family, "packed_tensors") else {}
    if packed:
        source = Unpacked(source, packed)
    unused = partial(family.unused_tensor, original) if hasattr(family, "unused_tensor") else lambda name: False
    check_tensors(source, family.expected_tensors(original), family.name, unused)

    def build(
        spec: ModelSpec, source: WeightSource, dtype: torch.dtype, linear: LinearFactory, rank: Parallel = ALONE
    ) -> DecoderModel:
        with torch.inference_mode():
            load = Loader(source, dtype, device, getattr(linear, "takes_blocks", False), on_layer)
            built: DecoderModel = family(None).build(spec, load, linear, rank)
        return built

    if differs(original, model):
        if not hasattr(attention, "convert"):
            raise ModelError(
                f"{original.name}: attention {model.attention!r} cannot convert weights of variant {original.variant} "
                f"with {original.num_kv_heads} KV heads; leave --attention out or choose one that converts"
            )
        whole = Checkpoint(
            original, source, torch.device(device), lambda linear: build(original, source, torch.float32, linear)
        )
        source, model = converted(attention, whole, model)
    return build(model, source, dtype or torch.float32, linear or dense, parallel or ALONE)
