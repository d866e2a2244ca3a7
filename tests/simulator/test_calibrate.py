"""Calibration without a machine: fits recover known costs, noise and disturbances are survived, files are whole or absent."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from twinfer.core.catalog import resolve_spec
from twinfer.core.config import Choice, EngineConfig
from twinfer.core.device import calibrated_path, load_device, read_device, write_device
from twinfer.core.errors import ConfigError, TwinferError
from twinfer.core.measured import GemmTiming, Measured, ServedRun, ServedStep, StepTiming, Timing, quantile
from twinfer.core.op_time import host_op
from twinfer.core.registry import Registry
from twinfer.core.work import Op, RowShape, StepShape, step_ops, visible_pairs
from twinfer.plugins.op_time.calibrated import Calibrated, Calibration, attention_features, coverage, on_curve
from twinfer.simulator.calibrate import adapted, calibrate, device_of, own_tables, step_errors
from twinfer.simulator.fit import fit, non_negative_fit, robust_fit
from twinfer.simulator.machine import fingerprint

REGISTRY = Registry(entry_points=False)
SPEC = replace(resolve_spec("smollm2-135m"), dtype="float32", kv_dtype="float32")
DESIGN = (
    *(((1, c),) * n for n, c in ((1, 40), (1, 2000), (2, 250), (4, 900), (8, 250), (16, 60), (32, 250), (64, 220))),
    *(((q, q),) for q in (4, 16, 64, 128, 256, 512)),
    ((64, 64),) * 4, ((128, 1000),), ((96, 96), *((1, 250),) * 8), ((200, 200), (56, 312)),
)  # fmt: skip


def true_seconds(op: Op) -> float:
    """The machine that is to be found out: 80 GFLOP/s, 20 GB/s, 20 us a launch."""
    if op.kind == "gemm":
        return 20e-6 + max(op.flops / 80e9, op.bytes / 20e9)
    if op.kind == "attention":
        pairs = sum(visible_pairs(r.queries, r.keys) for r in op.rows)
        return 30e-6 + 5e-6 * len(op.rows) + pairs * 20e-9
    return 15e-6 + op.bytes / 8e9


def served(rows: int, slower: float = 1.0) -> ServedRun:
    """30 decode steps through the whole engine, `slower` than the sum of their parts."""
    shape = StepShape.decode(*([200] * rows))
    seconds = sum(true_seconds(op) * op.count for op in step_ops(SPEC, shape)) + 200e-6 + 10e-6 * rows
    gap = 20e-6 + 6e-6 * rows
    return ServedRun(f"{rows} rows", (ServedStep(shape, seconds * slower, gap * slower),) * 30)


def measured(noise: float = 0.0, disturbed: float = 0.0, seed: int = 0, drift: float = 0.01) -> Measured:
    rng = random.Random(seed)

    def timing(seconds: float) -> Timing:
        samples = [seconds * (1 + abs(rng.gauss(0, noise))) for _ in range(6)]
        if rng.random() < disturbed:
            samples = [s * rng.uniform(2, 30) for s in samples]
        return Timing.of(samples)

    found = Measured("smollm2-135m", "float32", copy_bandwidth=9e9, drift=drift, fingerprint=fingerprint())
    for design in DESIGN:
        shape = StepShape(tuple(RowShape(q, k) for q, k in design), len(design))
        ops = {op.name: timing(true_seconds(op) * op.count) for op in step_ops(SPEC, shape)}
        ops["host"] = timing(200e-6 + 10e-6 * len(design))
        found.steps.append(StepTiming(shape, Timing(sum(t.seconds for t in ops.values()), noise, 6), ops))
    for n, k in ((512, 512), (2048, 2048), (4096, 4096)):
        for m in (1, 8, 64, 256):
            op = Op("grid", "gemm", 2.0 * m * n * k, 4.0 * (n * k + m * k), 4.0 * m * n, "float32", shape=(m, n, k))
            found.gemms.append(GemmTiming(n, k, m, timing(true_seconds(op))))
    found.runs = [served(rows) for rows in (1, 8, 32)]
    return found


def test_a_clean_machine_is_recovered_within_two_percent() -> None:
    found = measured()
    device = device_of(found, SPEC, REGISTRY)
    middle, largest = step_errors(found, SPEC, device)
    assert middle < 0.005 and largest < 0.02
    model = Calibrated()
    for shape in (StepShape.decode(*([300] * 12)), StepShape.prefill(300), StepShape.prefill(80, 90)):  # unseen
        for op in step_ops(SPEC, shape):
            answer = model.time(op, device)
            assert answer is not None and answer.sigma > 0
            # products between two measured m cut the knee of the roofline
            assert answer.seconds == pytest.approx(true_seconds(op), rel=0.12 if op.kind == "gemm" else 0.02), op.name
    host = model.time(host_op(StepShape.decode(*([100] * 20))), device)
    assert host is not None
    assert host.seconds == pytest.approx(200e-6 + 20 * 10e-6 + 20e-6 + 20 * 6e-6, rel=0.02)


def test_noise_widens_sigma_and_disturbances_do_not_bend_the_fit() -> None:
    clean, noisy = fit(measured(), SPEC), fit(measured(noise=0.08), SPEC)
    assert noisy.attention.spread > clean.attention.spread
    bent = fit(measured(noise=0.03, disturbed=0.1, seed=2), SPEC).attention
    op = next(o for o in step_ops(SPEC, StepShape.decode(*([500] * 8))) if o.kind == "attention")
    seconds = sum(w * attention_features(op)[t] for t, w in bent.terms.items())
    assert seconds == pytest.approx(true_seconds(op), rel=0.1)


def test_drift_of_the_machine_is_part_of_every_sigma() -> None:
    op = step_ops(SPEC, StepShape.decode(100))[2]
    steady, drifting = (
        Calibrated().time(op, device_of(measured(drift=d), SPEC, REGISTRY)) for d in (0.0, 0.2)
    )  # fmt: skip
    assert steady is not None and drifting is not None
    assert drifting.sigma / drifting.seconds == pytest.approx(0.2, abs=0.02)
    assert steady.sigma < 0.5 * drifting.sigma


def test_unmeasured_shapes_are_transferred_and_say_so() -> None:
    device = device_of(measured(), SPEC, REGISTRY)
    other = resolve_spec("llama-3.1-8b")
    other = replace(other, dtype="float32", kv_dtype="float32")
    for op in step_ops(other, StepShape.decode(*([300] * 8))):
        answer = Calibrated().time(op, device)
        assert answer is not None
        if op.kind == "gemm":
            if op.shape[1:] == (4096, 4096):
                continue  # in the generic grid
            assert answer.source == "transferred"
            assert answer.seconds == pytest.approx(true_seconds(op), rel=0.35), op.name
            assert answer.sigma > 0.07 * answer.seconds


def test_other_dtypes_and_devices_are_passed_on() -> None:
    device = device_of(measured(), SPEC, REGISTRY)
    half = replace(SPEC, dtype="bfloat16", kv_dtype="bfloat16")
    gemm = next(o for o in step_ops(half, StepShape.decode(10)) if o.kind == "gemm")
    assert Calibrated().time(gemm, device) is None
    assert Calibrated().time(step_ops(SPEC, StepShape.decode(10))[2], load_device("h100-sxm", REGISTRY)) is None


def test_tables_interpolate_between_points_and_say_when_they_leave_them() -> None:
    xs, seconds = (1, 4, 16), (1.0, 2.0, 6.0)
    assert on_curve(xs, seconds, 4) == (2.0, "measured")
    assert on_curve(xs, seconds, 10) == (4.0, "interpolated")
    assert on_curve(xs, seconds, 32) == (12.0, "extrapolated")


def test_larger_products_are_never_predicted_faster() -> None:
    calibration = fit(measured(noise=0.1, disturbed=0.2, seed=5), SPEC)
    for table in calibration.gemm:
        assert list(table.seconds) == sorted(table.seconds)


def test_fits_have_no_negative_coefficient_and_match_a_grid_search() -> None:
    features = [{"a": 1.0, "b": float(i)} for i in range(1, 9)]
    seconds = [3.0 - 0.2 * i for i in range(1, 9)]  # falls with b: only a non-negative b of 0 is allowed
    found = non_negative_fit(("a", "b"), features, seconds)
    assert found.terms["b"] == 0
    best = min((sum((a / s - 1) ** 2 for s in seconds), a) for a in (x / 1000 for x in range(1000, 3000)))[1]
    assert found.terms["a"] == pytest.approx(best, abs=2e-3)


def test_disturbed_points_are_left_out_but_never_more_than_a_quarter() -> None:
    features = [{"a": 1.0, "b": float(i)} for i in range(20)]
    seconds = [1.0 + 0.5 * i for i in range(20)]
    for i in (3, 11, 17):
        seconds[i] *= 8
    found = robust_fit(("a", "b"), features, seconds)
    assert found.terms == pytest.approx({"a": 1.0, "b": 0.5}, rel=1e-6)
    assert found.num_points == 17
    wild = [random.Random(1).uniform(1, 100) for _ in range(20)]
    assert robust_fit(("a", "b"), features, wild).num_points >= 15


def test_timings_are_medians_with_a_spread() -> None:
    assert Timing.of([1.0, 1.0, 1.0, 1.0, 9.0]).seconds == 1.0
    assert Timing.of([1.0, 3.0, 2.0]).seconds == 2.0
    assert Timing.of([2.0]) == Timing(2.0, 0.1, 1)
    assert Timing.of([1.0, 1.2]).spread == pytest.approx(0.2 / 2.2)
    assert quantile([1.0, 2.0, 3.0], 0.25) == 1.5
    assert Timing.of([1.0, 1.1, 1.2, 1.3]).spread > Timing.of([1.0, 1.01, 1.02, 1.03]).spread


# --- the device file ------------------------------------------------------------------------------


def fake_measure(found: Measured) -> Callable[..., Measured]:
    def measure(model: str, dtype: str, **given: Any) -> Measured:
        given["on_progress"](0.5, "half")
        if given["should_stop"] is not None and given["should_stop"]():
            raise TwinferError("calibration stopped")
        return found

    return measure


def test_calibrate_writes_a_device_that_auto_finds(tmp_path: Path) -> None:
    seen: list[float] = []
    result = calibrate(
        fake_measure(measured()), on_progress=lambda f, m: seen.append(f), registry=REGISTRY, root=tmp_path
    )  # fmt: skip
    assert seen == [0.5] and result.path == calibrated_path(tmp_path)
    device = load_device("auto", REGISTRY, tmp_path)
    assert device == read_device(result.path) and device.name == "local" and device.kind == "cpu"
    assert device.peak_flops["float32"] == pytest.approx(80e9, rel=0.05)
    assert Calibration.model_validate(device.calibration).fingerprint["cores"] == fingerprint()["cores"]
    assert json.loads(result.path.read_text())["calibration"]["tables"][0]["model"] == "smollm2-135m"
    assert list(result.runs) == ["1 rows", "8 rows", "32 rows"]
    assert all(ratio == pytest.approx(1, abs=0.01) for ratio in result.runs.values())


@pytest.mark.parametrize("change", [{"cpu": "another"}, {"products": "AVX-1024"}, {"products": None}])
def test_a_second_dtype_is_added_and_another_machine_starts_anew(change: dict[str, str | None], tmp_path: Path) -> None:
    calibrate(fake_measure(measured()), on_progress=lambda f, m: None, registry=REGISTRY, root=tmp_path)
    half = measured()
    half.dtype = "bfloat16"
    result = calibrate(
        fake_measure(half), dtype="bfloat16", on_progress=lambda f, m: None, registry=REGISTRY, root=tmp_path
    )  # fmt: skip
    both = Calibration.model_validate(result.device.calibration)
    assert {t.format.dtype for t in both.tables} == {"float32", "bfloat16"}
    assert {g.dtype for t in both.tables for g in t.gemm} == {"float32", "bfloat16"}
    stored = json.loads(result.path.read_text())
    taken_on = stored["calibration"]["fingerprint"] | change
    stored["calibration"]["fingerprint"] = {key: value for key, value in taken_on.items() if value is not None}
    result.path.write_text(json.dumps(stored))
    third = calibrate(fake_measure(half), on_progress=lambda f, m: None, registry=REGISTRY, root=tmp_path)
    third_tables = Calibration.model_validate(third.device.calibration).tables
    assert {t.format.dtype for t in third_tables} == {"bfloat16"}


def test_a_stopped_calibration_leaves_what_was_there(tmp_path: Path) -> None:
    quiet = {"on_progress": lambda f, m: None, "registry": REGISTRY, "root": tmp_path}
    with pytest.raises(TwinferError):
        calibrate(fake_measure(measured()), should_stop=lambda: True, **quiet)
    assert list(tmp_path.rglob("*")) == []
    calibrate(fake_measure(measured()), **quiet)
    before = calibrated_path(tmp_path).read_bytes()
    with pytest.raises(TwinferError):
        calibrate(fake_measure(measured(noise=0.1)), should_stop=lambda: True, **quiet)
    assert calibrated_path(tmp_path).read_bytes() == before
    assert [p.name for p in calibrated_path(tmp_path).parent.iterdir()] == ["local.json"]


def test_a_busy_machine_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"varied by 40%.*OMP_NUM_THREADS=2"):
        calibrate(
            fake_measure(replace(measured(drift=0.4), fingerprint={"threads": 4})), on_progress=lambda f, m: None, registry=REGISTRY, root=tmp_path
        )  # fmt: skip
    assert list(tmp_path.rglob("*")) == []


# --- formats --------------------------------------------------------------------------------------


def in_format(quantizer: str, model: str = "smollm2-135m", slower: float = 1.0) -> tuple[Measured, Any, Any]:
    """(a measurement in which every op takes `slower` than `true_seconds`, adapted model, its ops)."""
    chosen = Choice.model_validate(quantizer) if quantizer else None
    spec, ops_of = adapted(EngineConfig(model=model, dtype="float32", quantizer=chosen), REGISTRY)
    found = Measured(model, "float32", quantizer, copy_bandwidth=9e9, drift=0.01, fingerprint=fingerprint())
    for design in DESIGN:
        shape = StepShape(tuple(RowShape(q, k) for q, k in design), len(design))
        ops = {
            op.name: Timing(true_seconds(op) * op.count * slower, 0.01, 5)
            for op in ops_of(shape)
            if op.name != "quantize_input"  # the engine's products round their own inputs
        }
        ops["host"] = Timing(200e-6, 0.01, 5)
        found.steps.append(StepTiming(shape, Timing(sum(t.seconds for t in ops.values()), 0.01, 5), ops))
    return found, spec, ops_of


def test_each_format_is_answered_from_its_own_tables(tmp_path: Path) -> None:
    path = tmp_path / "local.json"
    formats = {name: in_format(name, slower=1 + i / 2) for i, name in enumerate(("", "bf16", "int8"))}
    for found, spec, ops_of in formats.values():
        write_device(device_of(found, spec, REGISTRY, path, ops_of), path)
    device = read_device(path)
    shape = StepShape.decode(*([250] * 8))
    for i, (_, spec, ops_of) in enumerate(formats.values()):
        model = Calibrated().for_model(spec)
        for op in ops_of(shape):
            answer = model.time(op, device)
            assert answer is not None, op.name
            if op.name == "quantize_input":
                assert answer.seconds == 0 and "ops around it" in answer.detail
            else:
                assert answer.seconds == pytest.approx(true_seconds(op) * (1 + i / 2), rel=0.03), (i, op.name)
        assert coverage(device, spec) == ""
    nothing = replace(SPEC, weight_bits=3.0, linear_dtype="int8")
    assert "was not calibrated" in coverage(device, nothing)


def test_products_of_a_format_without_tables_are_left_to_the_next_model() -> None:
    found, spec, ops_of = in_format("bf16")
    device = device_of(found, spec, REGISTRY, ops_of=ops_of)
    _, other, other_ops = in_format("int8")
    model = Calibrated().for_model(other)
    answers = {op.name: model.time(op, device) for op in other_ops(StepShape.decode(100))}
    assert answers["qkv_proj"] is None
    norms = answers["norms"]
    assert norms is not None and norms.source == "transferred" and norms.sigma > 0.14 * norms.seconds


def test_whole_runs_set_the_level_and_their_spread_is_part_of_sigma() -> None:
    found = measured()
    found.runs = [served(rows, slower) for rows, slower in ((1, 1.08), (8, 1.1), (32, 1.12))]
    device = device_of(found, SPEC, REGISTRY)
    plain = device_of(measured(), SPEC, REGISTRY)
    tables = own_tables(device, SPEC)
    assert tables.level == pytest.approx(1.1, abs=0.01) and tables.level_spread == pytest.approx(0.018, abs=0.005)
    op = step_ops(SPEC, StepShape.decode(100))[2]
    slow, usual = Calibrated().time(op, device), Calibrated().time(op, plain)
    assert slow is not None and usual is not None
    assert slow.seconds == pytest.approx(1.1 * usual.seconds, rel=0.02)
    assert slow.sigma / slow.seconds > usual.sigma / usual.seconds
    found.runs = [served(1, 5.0)]  # a disturbed run is not a level
    assert own_tables(device_of(found, SPEC, REGISTRY), SPEC).level == 1


def test_a_file_of_an_older_version_is_not_read_and_says_so() -> None:
    device = load_device("cpu", REGISTRY).model_copy(update={"calibration": {"version": 1, "gemm": []}})
    assert Calibrated().time(step_ops(SPEC, StepShape.decode(10))[2], device) is None
    assert "older version" in coverage(device, SPEC)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ({"version": "2"}, "calibration.version='2'"), ({"version": None}, "calibration.version=None"),
        ({"copy_bandwidth": float("nan")}, "copy_bandwidth=nan, which is not finite"),
        ({"tables": {"gemm": {"m": []}}}, "has 0 points and"), ({"tables": {"gemm": {"n": 0}}}, "n=0, which is too small"),
        ({"tables": {"gemm": {"bits": 0}}}, "bits=0, which is too small"), ({"tables": {"level": 0}}, "level=0, which is too small"),
        ({"tables": {"host": {"terms": {"moon": 1.0}}}}, "the term 'moon'"),
        ({"corrections": {"by_size": {"qkv_proj": [[2.0, 1.0], [1.0, 1.0]]}}}, "no small launch before a large one"),
        ({"corrections": {"factors": {"*": -1}}}, "factors.*=-1, which is too small"),
        ({"corrections": {"by_size": {"qkv_proj": [[1.0, 1.0]]}}}, "by_size.qkv_proj.1, which is missing"),
    ],
)  # fmt: skip
def test_a_damaged_calibration_is_told_by_field_and_value(damage: dict[str, Any], words: str) -> None:
    def damaged(whole: Any, part: Any) -> Any:
        """`whole` with the values of `part`; of a list, its first entry."""
        if isinstance(whole, list) and isinstance(part, dict):
            return [damaged(whole[0], part), *whole[1:]]
        if isinstance(whole, dict) and isinstance(part, dict):
            return whole | {name: damaged(whole.get(name), value) for name, value in part.items()}
        return part

    device = device_of(measured(), SPEC, REGISTRY)
    calibration = json.loads(json.dumps(device.calibration))
    form = calibration["tables"][0]["format"]
    calibration["corrections"] = [
        {
            "format": form,
            "model": SPEC.name,
            "factors": {"*": 1.0},
            "by_size": {},
            "spreads": {},
            "source": "me",
            "date": "2026",
        }
    ]
    assert coverage(device.model_copy(update={"calibration": calibration}), SPEC) == "corrected by me"
    with pytest.raises(ConfigError) as caught:
        coverage(device.model_copy(update={"calibration": damaged(calibration, damage)}), SPEC)
    assert words in str(caught.value) and "twinfer calibrate" in str(caught.value)
