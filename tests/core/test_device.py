"""Device files: public numbers, names, errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from twinfer.core.device import (
    DeviceSpec,
    all_devices,
    calibrated_path,
    device_files,
    load_device,
    read_device,
    write_device,
)
from twinfer.core.errors import ConfigError
from twinfer.core.registry import Registry

NAMES = [
    "a10",
    "a100-sxm-40gb",
    "a100-sxm-80gb",
    "b200",
    "cpu",
    "gb200",
    "groq-lpu",
    "h100-nvl",
    "h100-pcie",
    "h100-sxm",
    "h200-sxm",
    "h800-sxm",
    "l4",
    "l40s",
    "mi300x",
    "rtx-4090",
    "rtx-pro-6000",
    "sn40l",
    "wse-3",
]


def test_ridge_point_of_h100_in_bf16() -> None:
    assert round(load_device("h100-sxm").ridge("bfloat16")) == 295


def test_h100_numbers_are_dense() -> None:
    h100 = load_device("h100-sxm")
    assert (h100.memory_bytes, h100.memory_bandwidth) == (80 * 10**9, 3.35e12)
    assert h100.peak_flops["bfloat16"] == h100.peak_flops["float16"] == 989.4e12
    assert h100.peak_flops["fp8"] == h100.peak_flops["int8"] == 1979e12


def test_shipped_devices() -> None:
    assert sorted(device_files()) == NAMES
    for device in all_devices():
        assert device.source and device.date >= "2020", device.name
        assert device.name == next(name for name, path in device_files().items() if read_device(path) == device)
        if device.kind == "accelerator":  # nothing was measured: an upper bound of speed
            assert not device.efficiency and device.tiers
            continue
        assert device.efficiency and device.efficiency_source
        assert 0.9 < device.usable_bytes / device.memory_bytes < 1.08
        assert (device.price_per_hour is None) == (not device.price_source), "a price needs its source"
        assert (device.idle_watts is None) == (not device.idle_source), "so does idle power"
        assert bool(device.network) == bool(device.network_source), device.name
        assert device.peak_flops["bfloat16"] == device.peak_flops["float16"]
        assert 5 < device.ridge("bfloat16") < 500
    assert "fp8" not in load_device("a100").peak_flops and "fp8" not in load_device("a10").peak_flops


def test_names_and_aliases_are_unique() -> None:
    names = [name for device in all_devices() for name in (device.name, *device.aliases)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("alias", "name"), [("h100", "h100-sxm"), ("h200", "h200-sxm"), ("a100", "a100-sxm-80gb"), ("H100-SXM", "h100-sxm"), ("4090", "rtx-4090")]
)  # fmt: skip
def test_aliases(alias: str, name: str) -> None:
    assert load_device(alias).name == name


@pytest.mark.parametrize(
    ("typo", "meant"),
    [("h10", "h100-sxm"), ("a100-sxm-80", "a100-sxm-80gb"), ("mi30", "mi300x"), ("rtx4080", "rtx-4090")],
)
def test_unknown_device_suggests_close_names(typo: str, meant: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_device(typo)
    hint, _, known = caught.value.fix.partition("known: ")
    assert repr(meant) in hint and meant in known and "cpu" in caught.value.fix and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("typed", "hint"),
    [("2xA100-80", "did you mean 'a100-sxm-80gb'"), ("4x h100", "did you mean 'h100-sxm' with --tp 4? "), ("8xl40s", "'l40s' with --tp 8? ")],
)  # fmt: skip
def test_several_devices_are_ranks(typed: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_device(typed)
    assert hint in caught.value.fix and f" with --tp {typed[0]}? " in caught.value.fix


def test_dtype_without_a_peak() -> None:
    with pytest.raises(ConfigError, match="a100-sxm-80gb has no peak for it; it has float32, bfloat16"):
        load_device("a100").ridge("fp8")


def test_auto_is_this_machine_when_calibrated(tmp_path: Path) -> None:
    assert load_device("auto", root=tmp_path).name == "cpu"
    with pytest.raises(ConfigError, match="run `twinfer calibrate` first"):
        load_device("local", root=tmp_path)
    mine = load_device("cpu").model_copy(
        update={"name": "local", "memory_bandwidth": 1.5e10, "calibration": {"version": 1}}
    )
    path = write_device(mine, calibrated_path(tmp_path))
    assert path == tmp_path / "devices" / "local.json"
    assert load_device("auto", root=tmp_path) == load_device("local", root=tmp_path) == mine
    assert [p.name for p in path.parent.iterdir()] == ["local.json"], "no half-written file is left"


def test_user_file_by_path(tmp_path: Path) -> None:
    path = write_device(load_device("l4").model_copy(update={"name": "mine"}), tmp_path / "mine.json")
    assert load_device(path).name == load_device(str(path)).name == "mine"


def test_device_of_a_plugin(tmp_path: Path) -> None:
    write_device(
        load_device("l4").model_copy(update={"name": "tpu-x", "aliases": ("tx",)}), tmp_path / "specs" / "tpu-x.json"
    )
    (tmp_path / "more_devices.py").write_text(
        "from pathlib import Path\n"
        "import twinfer\n"
        "class More(twinfer.Technique):\n"
        "    name, summary = 'more', 'more devices'\n"
        "    path = Path(__file__).with_name('specs')\n"
        "@twinfer.hookimpl\n"
        "def register_device(register):\n"
        "    register(More)\n"
    )
    registry = Registry(plugin_dirs=[tmp_path], entry_points=False)
    assert load_device("tpu-x", registry).name == load_device("tx", registry).name == "tpu-x"
    assert {*NAMES, "tpu-x"} == set(device_files(registry))


GOOD = {
    "name": "x", "kind": "gpu", "memory_bytes": 10**10, "memory_bandwidth": 1e12, "peak_flops": {"float16": 1e14},
    "source": "me", "date": "2026",
}  # fmt: skip


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "is not a JSON file"), (json.dumps(GOOD | {"memory_bytes": -1}), "memory_bytes=-1 is too small"),
        (json.dumps(GOOD | {"bandwith": 1}), "bandwith=1 is not known"), (json.dumps(GOOD | {"kind": "tpu"}), "kind='tpu' is none"),
        (json.dumps(GOOD | {"peak_flops": {}}), "at least one dtype"),
        (json.dumps(GOOD | {"peak_flops": {"fp16": 1.0}}), "write 'float16' instead of 'fp16'"),
        (json.dumps(GOOD | {"peak_flops": {"nibble": 1.0}}), "no such number format"),
        (json.dumps(GOOD | {"peak_flops": {"fp8": 0}}), "fp8 must be positive"),
        (json.dumps({k: v for k, v in GOOD.items() if k != "source"}), "source is missing"),
        ("[]", "holds a JSON list"),
        (json.dumps(GOOD | {"memory_bytes": "48"}), "memory_bytes='48' is no number"),
        (json.dumps(GOOD | {"memory_bytes": True}), "memory_bytes=True is no number"),
        (json.dumps(GOOD | {"memory_bandwidth": float("inf")}), "memory_bandwidth=inf is not finite"),
        (json.dumps(GOOD | {"memory_bytes": 48}), "memory_bytes=48 is less than any device has; give it in bytes, not GB"),
        (json.dumps(GOOD | {"memory_bandwidth": 900}), "give it in bytes per second, not GB/s"),
        (json.dumps(GOOD | {"peak_flops": {"float16": 200}}), "peak_flops float16=200 is less"),
        (json.dumps(GOOD | {"devices_per_node": 2.5}), "devices_per_node=2.5 is no whole number"),
        (json.dumps(GOOD | {"name": ""}), "name='' is too short"),
        (json.dumps(GOOD | {"name": "a\nb"}), "name='a\\nb' has characters that cannot be printed"),
        (json.dumps(GOOD)[:-1] + ', "memory_bytes": 1}', "memory_bytes is there twice; keep one of them"),
        (json.dumps(GOOD | {"peak_flops": {"float16": "1e14"}}), "peak_flops.float16='1e14' is no number"),
        (json.dumps(GOOD | {"peak_flops": {"float16": True}}), "peak_flops.float16=True is no number"),
        (json.dumps(GOOD | {"memory_bytes": 10**400}), "is too large"), (json.dumps(GOOD | {"price_per_hour": 1e308}), "less than"),
        (json.dumps(GOOD | {"visible_bytes": 10**12}), "visible_bytes=1e+12 is more than memory_bytes=1e+10"),
        (json.dumps(GOOD | {"runtime_bytes": 10**10}), "runtime_bytes and graph_bytes take 1e+10 of the 1e+10 bytes"),
        (json.dumps(GOOD | {"idle_watts": 2, "tdp_watts": 1}), "idle_watts=2 is more than tdp_watts=1"),
        (json.dumps(GOOD | {"tiers": [{"name": "a", "bytes": 1, "bandwidth": 1e12}]}), "tiers.0.bytes=1 is too small"),
    ],
)  # fmt: skip
def test_bad_file_names_the_field(content: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        load_device(path)
    assert words in str(caught.value) and str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("missing", ["nowhere/x.json", "x.json"])
def test_missing_file(missing: str) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load_device(missing)


def test_a_gpu_counts_what_its_driver_reports() -> None:
    """GiB that public logs show as the total; makers' GB are less."""
    assert all(device.visible_bytes for device in all_devices() if device.kind == "gpu")
    for name, gib in (("b200", 178.35), ("h100-nvl", 93.09), ("h100-sxm", 79.1), ("mi300x", 191.98)):
        assert load_device(name).usable_bytes / 2**30 == pytest.approx(gib, abs=0.01)


def test_visible_memory_falls_back_to_the_makers() -> None:
    assert DeviceSpec.model_validate(GOOD).usable_bytes == 10**10
    assert DeviceSpec.model_validate(GOOD | {"visible_bytes": 9}).usable_bytes == 9


def test_weights_live_in_the_fastest_tier_that_holds_them() -> None:
    sn40l = load_device("sn40l")
    hbm, ddr = sn40l.tiers
    assert (sn40l.memory_bytes, sn40l.memory_bandwidth) == (hbm.bytes, hbm.bandwidth)
    assert sn40l.placed(16e9) == sn40l, "8B in bf16"
    slow = sn40l.placed(140e9)
    assert (slow.memory_bytes, slow.memory_bandwidth) == (ddr.bytes, ddr.bandwidth), "70B in bf16"
    assert sn40l.placed(1e13).memory_bytes == ddr.bytes, "what fits nowhere is counted where most is"
    assert load_device("h100").placed(1e12) == load_device("h100"), "one memory is one memory"


@pytest.mark.parametrize(
    ("name", "size", "bandwidth"), [("groq-lpu", 230e6, 80e12), ("wse-3", 44e9, 21e15), ("sn40l", 64e9, 25.6e12 / 16)]
)
def test_on_chip_designs(name: str, size: float, bandwidth: float) -> None:
    device = load_device(name)
    assert (device.memory_bytes, device.memory_bandwidth) == (size, bandwidth)


def test_tiers_are_listed_from_the_fastest(tmp_path: Path) -> None:
    tiers = [{"name": "a", "bytes": 10**6, "bandwidth": 1e9}, {"name": "b", "bytes": 10**7, "bandwidth": 2e9}]
    path = tmp_path / "x.json"
    path.write_text(json.dumps(GOOD | {"tiers": tiers}))
    with pytest.raises(ConfigError, match=r"tiers=.*list the fastest first"):
        load_device(path)
    path.write_text(json.dumps(GOOD | {"tiers": tiers[::-1]}))
    assert [tier.name for tier in load_device(path).tiers] == ["b", "a"]
