"""What the Roofline page shows of a scenario: ops of a prefill and of a decode step under the roofs of a device.

    attainable FLOP/s = min(peak of the dtype, FLOP per byte moved * bandwidth)

Invariants
* Ops are `core.work`'s as the scenario's techniques leave them, their times the op-time chain's: the simulator's.
* An op is bound by compute or by memory as its FLOPs and bytes say (by the link where it communicates), whatever
  share of the roof it reaches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import fsum

from twinfer.core.catalog import resolve_spec
from twinfer.core.device import DeviceSpec, load_device
from twinfer.core.guard import adapted_ops
from twinfer.core.images import cut_of
from twinfer.core.provision import place
from twinfer.core.registry import Registry
from twinfer.core.setup import adapt_model
from twinfer.core.spec import ModelSpec
from twinfer.core.vision import Image
from twinfer.core.vision_ops import vision_ops
from twinfer.core.work import Op, StepShape, step_ops
from twinfer.dashboard.scenario import Scenario
from twinfer.plugins.op_time.roofline import peak_flops
from twinfer.simulator.op_time import build_chain, host_op

LARGEST_BATCH = 16_384
Ops = Callable[[StepShape], Sequence[Op]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One op of a step: seconds of all its launches, and where it lies. bound: compute, memory, link or host."""

    name: str
    phase: str
    kind: str
    dtype: str
    seconds: float
    share: float
    flops: float
    intensity: float
    bound: str
    attainable: float
    source: str

    @property
    def achieved(self) -> float:
        """FLOP/s."""
        return self.flops / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineView:
    """batch: rows of the decode step, each `context` tokens long; prompt: tokens of the prefill, in which the images
    of a request are encoded, too.

    trail: (batch, FLOP per byte, FLOP/s) of all linears of a decode step as the batch doubles.
    crossover: rows from which those linears are bound by compute; None when they are not up to `LARGEST_BATCH`.
    """

    device: DeviceSpec
    dtypes: tuple[str, ...]
    batch: int
    context: int
    prompt: int
    points: Sequence[Point]
    trail: Sequence[tuple[int, float, float]]
    crossover: int | None

    def step(self, phase: str) -> list[Point]:
        """Ops of a phase, longest first."""
        return sorted((p for p in self.points if p.phase == phase), key=lambda p: -p.seconds)

    def seconds(self, phase: str) -> float:
        return fsum(p.seconds for p in self.step(phase))


def roofline_view(scenario: Scenario, registry: Registry, batch: int) -> RooflineView:
    """Raises TwinferError for what cannot be; memory is not asked."""
    config, spec = scenario.config(), resolve_spec(scenario.model)
    device = load_device(scenario.device, registry)
    placed = place(config, spec, registry, device, world="simulator")
    model, techniques = adapt_model(placed.config, spec, registry, placed.needs)
    layout = config.layout

    def ops_of(shape: StepShape) -> Sequence[Op]:
        return adapted_ops(techniques, step_ops(model, shape, layout), model, shape)

    chain = build_chain(config.op_time, device, registry, model)
    images = images_of(scenario, spec)
    length = scenario.input_len + sum(image.tokens for image in images)
    context = max(1, length + scenario.output_len // 2)
    prompt = min(length, scenario.max_num_batched_tokens)
    points: list[Point] = []
    for phase, shape in (("prefill", StepShape.prefill(prompt)), ("decode", StepShape.decode(*[context] * batch))):
        found = []
        seen = vision_ops(model, images, layout.tp) if phase == "prefill" else []
        for op in (*ops_of(shape), *seen, host_op(shape)):
            answer = chain.time(op)
            found.append((op, answer.seconds * op.count, answer.source))
        whole = fsum(seconds for _, seconds, _ in found)
        points += [_point(op, phase, seconds, seconds / whole, source, device) for op, seconds, source in found]
    trail = []
    for rows in _doublings(max(batch, 1)):
        linears = _linears(ops_of(StepShape.decode(*[context] * rows)))
        seconds = fsum(chain.time(op).seconds * op.count for op in linears)
        flops, moved = _sums(linears)
        trail.append((rows, flops / moved, flops / seconds if seconds else 0.0))
    dtypes = tuple(dict.fromkeys(p.dtype for p in points if p.kind == "gemm"))
    return RooflineView(
        device=device, dtypes=dtypes, batch=batch, context=context, prompt=prompt, points=points, trail=trail,
        crossover=crossover_batch(ops_of, device),
    )  # fmt: skip


def images_of(scenario: Scenario, spec: ModelSpec) -> list[Image]:
    """Images of a request, as many as there are in the mean. Raises ConfigError where the model takes none."""
    scenario.refuse_unseen(spec)
    if not scenario.images_per_request or spec.vision is None:
        return []
    cut = cut_of(scenario.workload(), spec.vision)
    return [Image(0, cut.tokens, cut.tiles, cut.patches)] * max(1, round(scenario.images_per_request))


def crossover_batch(ops_of: Ops, device: DeviceSpec) -> int | None:
    """Rows from which the linears of a decode step take longer to compute than to move, by the peaks alone."""

    def compute_bound(rows: int) -> bool:
        linears = _linears(ops_of(StepShape.decode(*[1] * rows)))
        computing = fsum(op.flops * op.count / peak_flops(device, op.dtype) for op in linears)
        moving = fsum(op.bytes * op.count for op in linears) / device.memory_bandwidth
        return computing >= moving

    if not compute_bound(LARGEST_BATCH):
        return None
    low, high = 0, LARGEST_BATCH  # at `high` it is
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if compute_bound(middle) else (middle, high)
    return high


def _point(op: Op, phase: str, seconds: float, share: float, source: str, device: DeviceSpec) -> Point:
    if op.kind in ("comm", "host_copy", "host"):
        bound = {"comm": "link", "host_copy": "link", "host": "host"}[op.kind]
        attainable = 0.0
    else:
        peak = peak_flops(device, op.dtype)
        attainable = min(peak, op.intensity * device.memory_bandwidth)
        bound = "compute" if attainable >= peak else "memory"
    return Point(
        name=op.name, phase=phase, kind=op.kind, dtype=op.dtype, seconds=seconds, share=share, flops=op.flops * op.count,
        intensity=op.intensity, bound=bound, attainable=attainable, source=source,
    )  # fmt: skip


def _linears(ops: Sequence[Op]) -> list[Op]:
    return [op for op in ops if op.kind == "gemm"]


def _sums(ops: Sequence[Op]) -> tuple[float, float]:
    return fsum(op.flops * op.count for op in ops), fsum(op.bytes * op.count for op in ops)


def _doublings(last: int) -> list[int]:
    found = [1]
    while found[-1] * 2 < last:
        found.append(found[-1] * 2)
    return [*found, last] if last > 1 else found
