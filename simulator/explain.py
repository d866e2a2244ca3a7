"""Where the time of one step goes, op by op, and who said so.

Invariants
* The same ops, chain and sums as a simulated run's steps; a step that was explained costs what `simulate` charges.
* A step that does not fit the device is timed all the same; `unfit` says why it cannot be, in the words of `twinfer memory`.
* Lines come in the order of execution within a layer, the CPU's part last.
"""

from __future__ import annotations

from dataclasses import dataclass

from twinfer.core.catalog import resolve_spec
from twinfer.core.config import EngineConfig
from twinfer.core.device import DeviceSpec, load_device
from twinfer.core.errors import DoesNotFit
from twinfer.core.guard import adapted_ops
from twinfer.core.memory_parts import refuse_indivisible
from twinfer.core.provision import place
from twinfer.core.registry import Registry, default_registry
from twinfer.core.setup import adapt_model
from twinfer.core.work import Op, StepShape, step_ops
from twinfer.simulator.op_time import build_chain, host_op


@dataclass(frozen=True, slots=True)
class Line:
    """One op of the step. seconds, sigma: of all its launches; waited: False where it is hidden behind the device.

    models: what each model of the chain says of one launch, in words; the first that answers is used.
    """

    op: Op
    seconds: float
    sigma: float
    source: str
    detail: str
    models: tuple[str, ...]
    waited: bool = True


def explain(
    config: EngineConfig, shape: StepShape, registry: Registry | None = None, device: DeviceSpec | None = None
) -> list[Line]:
    """The ops of a step of `shape` under `config`, timed. Raises ConfigError for what cannot be timed."""
    registry = registry or default_registry()
    device = device or load_device(config.device, registry)
    placed = place(config, resolve_spec(config.model), registry, device, world="simulator")
    device, config = placed.device, placed.config
    model, techniques = adapt_model(config, placed.checkpoint, registry, placed.needs)
    refuse_indivisible(model, config.layout)
    ops = adapted_ops(techniques, step_ops(model, shape, config.layout), model, shape)
    chain = build_chain(config.op_time, device, registry, model)
    lines = []
    for op in (*ops, host_op(shape)):
        answer = chain.time(op)
        lines.append(
            Line(op, answer.seconds * op.count, answer.sigma * op.count, answer.source, answer.detail,
                 tuple(chain.explain(op)))
        )  # fmt: skip
    if config.max_outstanding > 1:
        host = lines.pop()
        spent = sum(line.seconds for line in lines)
        left = max(0.0, host.seconds - spent)
        words = f"{host.seconds * 1e6:.0f} us beside {spent * 1e6:.0f} us of the device"
        lines.append(Line(host.op, left, host.sigma if left else 0.0, host.source, words, host.models, left > 0))
    return lines


def unfit(
    config: EngineConfig, shape: StepShape, registry: Registry | None = None, device: DeviceSpec | None = None
) -> str | None:
    """Why weights and the contexts of a step of `shape` are not on the device at once, in words; None where they are."""
    registry = registry or default_registry()
    device = device or load_device(config.device, registry)
    lengths = [row.keys for row in shape.rows]
    held = config.model_copy(update={
        "max_model_len": max(2, *lengths), "max_num_seqs": max(config.max_num_seqs, len(lengths)),
        "max_num_batched_tokens": max(config.max_num_batched_tokens, shape.num_tokens),
    })  # fmt: skip
    placed = place(held, resolve_spec(config.model), registry, device, world="simulator")
    try:
        fitting = placed.budget(expected_lengths=lengths).expected_concurrency
    except DoesNotFit as error:
        return f"{error.problem}; {error.fix}"
    if fitting is None or fitting >= len(lengths):
        return None
    return (
        f"{len(lengths)} sequences of {sum(lengths) / len(lengths):,.0f} tokens in the mean are in the step, {fitting:.1f} fit; "
        f"use {int(fitting)}, or raise --tp"
    )


__all__ = ["Line", "explain", "unfit"]
