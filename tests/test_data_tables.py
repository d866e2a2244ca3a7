"""The tables of docs/devices-and-models.md are those of the files."""

from __future__ import annotations

from pathlib import Path

import pytest

from twinfer.core.catalog import resolve_spec, spec_names
from twinfer.core.device import DeviceSpec, all_devices, load_device
from twinfer.core.link import LinkSpec, link_files, read_link
from twinfer.core.registry import Registry
from twinfer.core.spec import ModelSpec

DOCUMENT = Path("docs") / "devices-and-models.md"
HEADS = {
    "devices": "| name | memory | GB/s | 16 bit | FP8 | link, GB/s | network | W | US$/h |\n|---|---|---|---|---|---|---|---|---|",
    "links": "| name | GB/s | source |\n|---|---|---|",
    "models": "| name | weights | active | layers | attention | KV per token | context |\n|---|---|---|---|---|---|---|",
}


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def device_row(d: DeviceSpec) -> str:
    wide = d.peak_flops.get("bfloat16", d.peak_flops.get("float16", 0.0))
    cells = [
        f"`{d.name}`", f"{d.memory_bytes / 1e9:,.4g} GB", f"{d.memory_bandwidth / 1e9:,.0f}", number(wide / 1e12),
        number(d.peak_flops["fp8"] / 1e12) if "fp8" in d.peak_flops else "",
        f"{d.link}, {d.link_bandwidth / 1e9:,.4g}" if d.link_bandwidth else "", d.network,
        f"{d.tdp_watts:,.0f}" if d.tdp_watts else "", f"{d.price_per_hour:.2f}" if d.price_per_hour else "",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def link_row(link: LinkSpec) -> str:
    return f"| `{link.name}` | {link.bandwidth / 1e9:,.4g} | {link.source} ({link.date}) |"


def model_row(m: ModelSpec) -> str:
    mixed = f"{m.variant} in {m.num_attention_layers}" if m.num_linear_layers else m.variant
    cells = [
        f"`{m.name}`", f"{m.num_params() / 1e9:.4g} B", f"{m.num_params(active=True) / 1e9:.3g} B", str(m.num_layers),
        mixed, f"{m.kv_bytes_per_token() / 1024:,.4g} KiB", f"{m.max_context:,}",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def tables() -> dict[str, list[str]]:
    registry = Registry(entry_points=False)
    return {
        "devices": [device_row(device) for device in all_devices(registry)],
        "links": [link_row(read_link(path)) for path in link_files(registry).values()],
        "models": [model_row(resolve_spec(name)) for name in spec_names()],
    }


@pytest.mark.parametrize("name", HEADS)
def test_table(root: Path, name: str) -> None:
    text = (root / DOCUMENT).read_text()
    _, _, rest = text.partition(HEADS[name] + "\n")
    rows = rest.split("\n\n")[0].splitlines()
    assert rows == tables()[name]


def test_the_device_of_the_document_is_one(root: Path, tmp_path: Path) -> None:
    source = (root / DOCUMENT).read_text().split("```json\n")[1].split("```")[0]
    path = tmp_path / "mine.json"
    path.write_text(source)
    mine = load_device(path)
    assert (mine.link_bandwidth, mine.network_bandwidth, mine.devices_per_node) == (64e9, 25e9, 4)


if __name__ == "__main__":  # writes them: python tests/test_data_tables.py, from the root of a checkout
    text = DOCUMENT.read_text()
    for key, found in tables().items():
        head, mark, rest = text.partition(HEADS[key] + "\n")
        tail = rest[rest.index("\n\n") :] if mark else ""
        if not mark:
            head, _, tail = text.partition(f"<!-- {key} -->")
        text = head + "\n".join([HEADS[key], *found]) + tail
    DOCUMENT.write_text(text)
