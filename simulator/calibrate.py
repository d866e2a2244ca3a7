"""`twinfer calibrate`: from a measurement of this machine to the device file `local.json`.

The measuring itself runs the torch engine and is passed in (`core.runtime.measure.measure`), so that this
package stays free of torch.

Invariants
* The file is replaced in one move at the very end: a stopped or failed calibration leaves the old one.
* Tables of other dtypes are kept as long as the machine is the same; otherwise the file starts anew.
* Says how well its own tables reproduce the whole steps they came from (`Calibrated.error`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from twinfer.core.catalog import resolve_spec
from twinfer.core.device import DeviceSpec, calibrated_path, load_device, read_device, write_device
from twinfer.core.errors import ConfigError
from twinfer.core.measured import Measured
from twinfer.core.registry import Registry
from twinfer.core.spec import ModelSpec
from twinfer.core.work import dtype_bytes, step_ops
from twinfer.plugins.op_time.calibrated import Calibrated as CalibratedModel
from twinfer.plugins.op_time.calibrated import Calibration, GemmTable
from twinfer.simulator.fit import fit
from twinfer.simulator.machine import differences, physical_memory
from twinfer.simulator.op_time import OpTimeChain
from twinfer.simulator.step_time import StepTimer

OnProgress = Callable[[float, str], None]
ShouldStop = Callable[[], bool]
Measure = Callable[..., Measured]

MAX_DRIFT = 0.25
"""Above this the machine is too busy for tables to mean anything."""


@dataclass(frozen=True, slots=True)
class Calibrated:
    """What a calibration left behind. `error`: (middle, largest) relative error of the measured steps."""

    device: DeviceSpec
    path: Path
    error: tuple[float, float]
    drift: float
    seconds: float


def calibrate(
    measure: Measure,
    model: str = "smollm2-135m",
    dtype: str = "float32",
    budget_s: float = 55.0,
    on_progress: OnProgress | None = None,
    should_stop: ShouldStop | None = None,
    registry: Registry | None = None,
    root: str | Path | None = None,
) -> Calibrated:
    """Measure, fit and store this machine as device `local`.

    measure: `twinfer.core.runtime.measure.measure`.  root: user's data folder, None for the default.
    Raises what `measure` raises, and ConfigError when the machine is too busy to be measured.
    """
    found = measure(
        model, dtype, budget_s=budget_s, on_progress=on_progress, should_stop=should_stop, registry=registry
    )  # fmt: skip
    spec = replace(resolve_spec(model), dtype=found.dtype, kv_dtype=found.dtype)
    if found.drift > MAX_DRIFT:
        raise ConfigError(
            "calibrate", model, f"the machine's speed varied by {found.drift:.0%} between rounds",
            "close other programs and calibrate again",
        )  # fmt: skip
    path = calibrated_path(root)
    device = device_of(found, spec, registry, path)
    write_device(device, path)
    return Calibrated(device, path, step_errors(found, spec, device), found.drift, found.seconds)


def device_of(found: Measured, spec: ModelSpec, registry: Registry | None, path: Path | None = None) -> DeviceSpec:
    """The device file that `found` supports, with what an older file at `path` knows of other dtypes."""
    new = fit(found, spec)
    new = new.model_copy(update={"created": datetime.now(UTC).isoformat(timespec="seconds")})
    generic = load_device("cpu", registry)
    peaks: dict[str, float] = {}
    if path is not None and path.is_file():
        old_device = read_device(path)
        old = Calibration.model_validate(old_device.calibration) if old_device.calibration else None
        if old is not None and not differences(old.fingerprint):
            new = merged(old, new, found.dtype)
            peaks = dict(old_device.peak_flops)
    peaks = {**generic.peak_flops, **peaks, found.dtype: peak_of(new, found.dtype)}
    streaming = max((bandwidth_of(t) for t in new.gemm if t.dtype == found.dtype), default=0.0)
    return generic.model_copy(
        update={
            "name": "local", "aliases": (), "memory_bytes": physical_memory() or generic.memory_bytes,
            "visible_bytes": None, "memory_bandwidth": max(found.copy_bandwidth, streaming), "peak_flops": peaks,
            "calibration": new.model_dump(mode="json"), "source": f"twinfer calibrate ({spec.name}, {found.dtype})",
            "date": new.created[:10], "efficiency_source": "generic CPU, used only for ops that were not measured",
            "notes": str(new.fingerprint.get("cpu", "")), "tdp_watts": None, "price_per_hour": None,
        }
    )  # fmt: skip


def merged(old: Calibration, new: Calibration, dtype: str) -> Calibration:
    """`new`, and what `old` has of dtypes other than `dtype`."""
    kept = tuple(t for t in old.gemm if t.dtype != dtype)
    ours = f"{dtype}/"
    return new.model_copy(
        update={
            "models": tuple(dict.fromkeys((*old.models, *new.models))),
            "gemm": (*kept, *new.gemm),
            "attention": {**old.attention, **new.attention},
            "elementwise": {k: v for k, v in old.elementwise.items() if not k.startswith(ours)} | new.elementwise,
        }
    )  # fmt: skip


def peak_of(calibration: Calibration, dtype: str) -> float:
    """Largest FLOP/s seen in any product of `dtype`."""
    return max(
        2.0 * m * t.n * t.k / s
        for t in calibration.gemm
        if t.dtype == dtype
        for m, s in zip(t.m, t.seconds, strict=True)
    )


def bandwidth_of(table: GemmTable) -> float:
    """Bytes per second at which the weight was read at the smallest m."""
    return table.n * table.k * dtype_bytes(table.dtype) / table.seconds[0]


def step_errors(found: Measured, spec: ModelSpec, device: DeviceSpec) -> tuple[float, float]:
    """(middle, largest) absolute relative error of whole steps, against what was measured."""
    chain = OpTimeChain([CalibratedModel()], device)
    timer = StepTimer(lambda shape: step_ops(spec, shape), chain)
    errors = sorted(
        abs(timer.exact(s.shape).seconds / (s.total.seconds + _loop_seconds(found, len(s.shape.rows))) - 1)
        for s in found.steps
    )
    return errors[len(errors) // 2], errors[-1]


def _loop_seconds(found: Measured, rows: int) -> float:
    """Seconds of the loop around a step of `rows`: predictions contain them, executor timings do not."""
    near = min(found.loops, key=lambda p: abs(p.rows - rows), default=None)
    return near.timing.seconds * (rows / near.rows if rows > near.rows else 1.0) if near else 0.0
