"""`twinfer calibrate`: from a measurement of this machine to the device file `local.json`.

The measuring itself runs the torch engine and is passed in (`core.runtime.measure.measure`), so that this
package stays free of torch.

Invariants
* The file is replaced in one move at the very end: a stopped or failed calibration leaves the old one.
* Tables of other formats are kept as long as the machine is the same; otherwise the file starts anew.
* Says how well its own tables reproduce the whole steps they came from (`Calibrated.error`) and the short runs that
  they did not come from (`Calibrated.runs`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from twinfer.core.catalog import resolve_spec
from twinfer.core.config import Choice, EngineConfig
from twinfer.core.device import DeviceSpec, calibrated_path, load_device, read_device, write_device
from twinfer.core.errors import ConfigError
from twinfer.core.guard import adapted_ops
from twinfer.core.measured import Measured, remedy
from twinfer.core.registry import Registry, default_registry
from twinfer.core.setup import adapt_model
from twinfer.core.spec import ModelSpec
from twinfer.core.technique import Needs
from twinfer.core.work import Op, StepShape, step_ops
from twinfer.plugins.op_time.calibrated import Calibrated as CalibratedModel
from twinfer.plugins.op_time.calibrated import calibration_of, dot, host_features
from twinfer.plugins.op_time.calibration import Calibration, Format, GemmTable, Tables
from twinfer.simulator.fit import OpsOf, fit, levelled
from twinfer.simulator.machine import differences, physical_memory
from twinfer.simulator.op_time import OpTimeChain
from twinfer.simulator.step_time import StepTimer

OnProgress = Callable[[float, str], None]
ShouldStop = Callable[[], bool]
Measure = Callable[..., Measured]

MAX_DRIFT = 0.25
"""Above this the machine is too busy for tables to mean anything."""
BUSY_DRIFT = 0.08
"""Above this bands are wide, and it is worth saying so."""


@dataclass(frozen=True, slots=True)
class Calibrated:
    """What a calibration left behind. `error`: (middle, largest) relative error of the measured steps.

    runs: how long each short run of the whole engine took over what its steps add up to, before `level`, the middle
    of them, was applied to every time.
    """

    device: DeviceSpec
    path: Path
    error: tuple[float, float]
    drift: float
    seconds: float
    level: float = 1.0
    runs: Mapping[str, float] = field(default_factory=dict)

    @property
    def busy(self) -> bool:
        """The machine's speed changed more than on a quiet one."""
        return self.drift > BUSY_DRIFT


def calibrate(
    measure: Measure,
    model: str = "smollm2-135m",
    dtype: str = "float32",
    budget_s: float = 55.0,
    on_progress: OnProgress | None = None,
    should_stop: ShouldStop | None = None,
    registry: Registry | None = None,
    root: str | Path | None = None,
    quantizer: Choice | None = None,
    kv_dtype: str = "auto",
) -> Calibrated:
    """Measure, fit and store one format of this machine as device `local`.

    measure: `twinfer.core.runtime.measure.measure`.  root: user's data folder, None for the default.
    quantizer, kv_dtype: the format, as of an engine.
    Raises what `measure` raises, and ConfigError when the machine is too busy to be measured.
    """
    registry = registry or default_registry()
    config = EngineConfig(model=model, device="cpu", dtype=dtype, quantizer=quantizer, kv_dtype=kv_dtype)
    adapted(config, registry)  # what cannot be is refused before anything is measured
    found = measure(
        model, dtype, budget_s=budget_s, on_progress=on_progress, should_stop=should_stop, registry=registry,
        quantizer=quantizer, kv_dtype=kv_dtype,
    )  # fmt: skip
    if found.drift > MAX_DRIFT:
        raise ConfigError(
            "calibrate", model, f"the machine's speed varied by {found.drift:.0%} between rounds",
            f"{remedy(found.fingerprint.get('threads', 1))}; then calibrate again",
        )  # fmt: skip
    spec, ops_of = adapted(config.model_copy(update={"dtype": found.dtype}), registry)
    path = calibrated_path(root)
    device = device_of(found, spec, registry, path, ops_of)
    write_device(device, path)
    tables = own_tables(device, spec)
    _, ratios = levelled(tables, found, _seconds_of(spec, device, ops_of, 1 / tables.level))
    return Calibrated(
        device, path, step_errors(found, spec, device, ops_of), found.drift, found.seconds, tables.level,
        dict(zip((run.label for run in found.runs), ratios, strict=True)),
    )  # fmt: skip


def adapted(config: EngineConfig, registry: Registry, device: str = "cpu") -> tuple[ModelSpec, OpsOf]:
    """The model of `config` as its techniques leave it, and the ops of a step on it."""
    plain = resolve_spec(config.model)
    dtype = config.dtype if config.dtype != "auto" else plain.dtype
    model, techniques = adapt_model(config, plain, registry, Needs(world="engine", device=device, dtype=dtype))

    def ops_of(shape: StepShape) -> Sequence[Op]:
        return adapted_ops(techniques, step_ops(model, shape), model, shape)

    return model, ops_of


def device_of(
    found: Measured, spec: ModelSpec, registry: Registry | None, path: Path | None = None, ops_of: OpsOf | None = None
) -> DeviceSpec:
    """The device file that `found` supports, with what an older file at `path` knows of other formats."""
    created = datetime.now(UTC).isoformat(timespec="seconds")
    tables = fit(found, spec, ops_of).model_copy(update={"created": created})
    generic = load_device("cpu", registry)
    calibration = Calibration(
        created=created, tables=(tables,), copy_bandwidth=found.copy_bandwidth, fingerprint=dict(found.fingerprint)
    )
    peaks: dict[str, float] = {}
    if path is not None and path.is_file():
        old_device = read_device(path)
        old = calibration_of(old_device)
        if old is not None and not differences(old.fingerprint):
            calibration = merged(old, calibration)
            peaks = dict(old_device.peak_flops)
    for dtype in {t.dtype for t in tables.gemm}:
        peaks[dtype] = max(_flops(t) for t in tables.gemm if t.dtype == dtype)
    streaming = max((_bandwidth(t) for t in tables.gemm), default=0.0)
    how = f", {found.quantizer}" if found.quantizer else ""
    device = generic.model_copy(
        update={
            "name": "local", "aliases": (), "memory_bytes": physical_memory() or generic.memory_bytes,
            "visible_bytes": None, "memory_bandwidth": max(found.copy_bandwidth, streaming),
            "peak_flops": {**generic.peak_flops, **peaks}, "calibration": calibration.model_dump(mode="json"),
            "source": f"twinfer calibrate ({spec.name}, {found.dtype}{how})",
            "date": created[:10], "efficiency_source": "generic CPU, used only for ops that were not measured",
            "notes": str(calibration.fingerprint.get("cpu", "")), "tdp_watts": None, "price_per_hour": None,
        }
    )  # fmt: skip
    level, _ = levelled(tables, found, _seconds_of(spec, device, ops_of))
    calibration = merged(calibration, calibration.model_copy(update={"tables": (level,)}))
    return device.model_copy(update={"calibration": calibration.model_dump(mode="json")})


def merged(old: Calibration, new: Calibration) -> Calibration:
    """`new`, and what `old` has of other formats. A correction of what was measured anew has lost its base."""
    formats = {t.format for t in new.tables}
    kept = [t for t in old.tables if t.format not in formats]
    return new.model_copy(
        update={
            # plain formats first: they answer where no format is asked for
            "tables": tuple(sorted((*kept, *new.tables), key=lambda t: (t.quantizer != "", t.format.dtype != "float32"))),
            "corrections": tuple(c for c in old.corrections if c.format not in formats),
        }
    )  # fmt: skip


def own_tables(device: DeviceSpec, spec: ModelSpec) -> Tables:
    """The tables of the format of `spec`, which the device has."""
    calibration = calibration_of(device)
    assert calibration is not None
    return next(t for t in calibration.tables if t.format == Format.of(spec))


def _flops(table: GemmTable) -> float:
    """Largest FLOP/s seen."""
    return max(2.0 * m * table.n * table.k / s for m, s in zip(table.m, table.seconds, strict=True))


def _bandwidth(table: GemmTable) -> float:
    """Bytes per second at which the weight was read at the smallest m."""
    return table.n * table.k * table.bits / 8 / table.seconds[0]


def _seconds_of(
    spec: ModelSpec, device: DeviceSpec, ops_of: OpsOf | None, scale: float = 1.0
) -> Callable[[StepShape], float]:
    """Seconds of whole steps by the device's tables, times `scale`."""
    chain = OpTimeChain([CalibratedModel().for_model(spec)], device)
    timer = StepTimer(ops_of or (lambda shape: step_ops(spec, shape)), chain)
    return lambda shape: timer.exact(shape).seconds * scale


def step_errors(
    found: Measured, spec: ModelSpec, device: DeviceSpec, ops_of: OpsOf | None = None
) -> tuple[float, float]:
    """(middle, largest) absolute relative error of whole steps, against what was measured."""
    tables = own_tables(device, spec)
    seconds_of = _seconds_of(spec, device, ops_of, 1 / tables.level)
    errors = []
    for step in found.steps:
        shape = step.shape
        features = host_features(len(shape.rows), shape.num_tokens, shape.num_logits)
        around = dot(tables.around.terms, features) if tables.around else 0.0  # the executor's timings have none
        errors.append(abs(seconds_of(shape) / (step.total.seconds + around) - 1))
    errors.sort()
    return errors[len(errors) // 2], errors[-1]
