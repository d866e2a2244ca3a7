"""Link files: public numbers, how devices name them, errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from twinfer.core.device import all_devices, load_device, read_device
from twinfer.core.errors import ConfigError
from twinfer.core.link import link_files, load_link
from twinfer.core.registry import Registry

GOOD = {"name": "mine", "title": "Mine", "bandwidth": 1e9, "source": "me", "date": "2026"}
DEVICE = {
    "name": "x", "kind": "gpu", "memory_bytes": 10**10, "memory_bandwidth": 1e12, "peak_flops": {"float16": 1e14},
    "source": "me", "date": "2026",
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "gigabits"),
    [
        ("infiniband-hdr", 200), ("infiniband-ndr", 400), ("infiniband-xdr", 800), ("roce-100", 100), ("roce-200", 200),
        ("roce-400", 400), ("nvlink-3", 300 * 8), ("nvlink-4", 450 * 8), ("nvlink-5", 900 * 8), ("nvlink-c2c", 450 * 8),
        ("infinity-fabric-3", 448 * 8), ("cerebras-io", 1200),
    ],
)  # fmt: skip
def test_rates_are_of_one_direction(name: str, gigabits: float) -> None:
    assert load_link(name).bandwidth == gigabits * 1e9 / 8


def test_every_link_says_where_it_is_from() -> None:
    for name in link_files():
        link = load_link(name)
        assert link.name == name and link.title and link.source and link.date >= "2010", name


def test_devices_take_the_numbers_of_their_links() -> None:
    h100 = load_device("h100-sxm")
    assert (h100.link, h100.link_bandwidth) == ("nvlink-4", load_link("nvlink-4").bandwidth)
    assert h100.network_bandwidth == load_link("infiniband-ndr").bandwidth
    assert h100.network_latency == load_link("infiniband-ndr").latency
    assert h100.host_link_source == load_link("pcie-5-x16").source
    assert load_device("h800").link_bandwidth == 200e9, "a device overrules its link"
    for device in all_devices():
        assert not device.link or device.link_bandwidth, device.name


def test_a_link_of_a_plugin_and_one_beside_the_device_file(tmp_path: Path) -> None:
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "optical.json").write_text(json.dumps(GOOD | {"name": "optical", "bandwidth": 3e12}))
    (tmp_path / "more_links.py").write_text(
        "from pathlib import Path\n"
        "import twinfer\n"
        "class More(twinfer.Technique):\n"
        "    name, summary = 'more', 'more links'\n"
        "    links = Path(__file__).with_name('links')\n"
        "@twinfer.hookimpl\n"
        "def register_device(register):\n"
        "    register(More)\n"
    )
    registry = Registry(plugin_dirs=[tmp_path], entry_points=False)
    file = tmp_path / "x.json"
    file.write_text(json.dumps(DEVICE | {"link": "optical"}))
    assert load_device(file, registry).link_bandwidth == 3e12
    (tmp_path / "mine.json").write_text(json.dumps(GOOD))
    file.write_text(json.dumps(DEVICE | {"network": "mine.json"}))
    assert read_device(file).network_bandwidth == 1e9


def test_an_unknown_link_names_the_field_and_close_ones(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    file.write_text(json.dumps(DEVICE | {"host_link": "pcie-5-x8"}))
    with pytest.raises(ConfigError) as caught:
        load_device(file)
    text = str(caught.value)
    assert "host_link" in text and "'pcie-5-x16'" in text and "\n" not in text
    file.write_text(json.dumps(DEVICE | {"link": "copper tape", "link_bandwidth": 1e9}))
    assert load_device(file).link_bandwidth == 1e9, "any name will do beside a number"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "is not a JSON file"), (json.dumps(GOOD | {"bandwidth": 0}), "bandwidth=0 is too small"),
        (json.dumps(GOOD | {"efficiency": 1.5}), "efficiency=1.5 is too large"), (json.dumps(GOOD | {"speed": 1}), "speed=1 is not known"),
        (json.dumps({k: v for k, v in GOOD.items() if k != "source"}), "source is missing"),
    ],
)  # fmt: skip
def test_bad_file_names_the_field(content: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        load_link(path)
    assert words in str(caught.value) and str(path) in str(caught.value) and "\n" not in str(caught.value)
