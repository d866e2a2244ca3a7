"""A device as numbers: memory, bandwidth, peaks, link, price. Everything comes from JSON files.

Invariants
* Peaks are dense (no structured sparsity) and per device; link bandwidth is per direction and device.
* Nothing about a device is written in code: a new one is a JSON file, shipped, in a plugin or the user's own.
* Every file says where its numbers come from and of when they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, field_validator, model_validator

from twinfer.core.data_file import Number, NumbersOfAFile, read_numbers
from twinfer.core.dtypes import canonical_dtype
from twinfer.core.errors import ConfigError, figure
from twinfer.core.link import load_link, load_link_if_known
from twinfer.core.replace_file import check_replaceable, replace_file

if TYPE_CHECKING:
    from twinfer.core.registry import Registry

LOCAL = "local"
"""Name of this machine's calibrated device."""
GENERIC = "cpu"
"""Name of the CPU that stands for this machine until it is calibrated."""
UNITS = {
    "memory_bytes": (1e6, "bytes, not GB"), "visible_bytes": (1e6, "bytes, not GB"),
    "memory_bandwidth": (1e6, "bytes per second, not GB/s"), "peak_flops": (1e6, "FLOP per second, not TFLOP/s"),
    "link_bandwidth": (1e5, "bytes per second, not GB/s"), "network_bandwidth": (1e5, "bytes per second, not GB/s"),
    "host_link_bandwidth": (1e5, "bytes per second, not GB/s"),
}  # fmt: skip
"""Numbers that no device is below, and their units."""
MOST = 10**24
"""Bytes, B/s and FLOP/s that no device has: beyond it answers are no numbers any more."""
MOST_PRICE = 1e6
"""US$ per device and hour."""


class MemoryTier(NumbersOfAFile):
    """One memory of a device: `bytes` of it at `bandwidth` B/s."""

    name: str
    bytes: int = Field(ge=10**6, le=MOST)
    bandwidth: float = Field(ge=1e6, le=MOST)


class DeviceSpec(NumbersOfAFile):
    """One accelerator, or one CPU machine.

    memory_bytes: as the maker states it.  visible_bytes: what a process sees of it, where known.
    memory_bandwidth: B/s.  peak_flops: FLOP/s by dtype.
    tiers: memories of several speeds, fastest first; `memory_bytes` and `memory_bandwidth` are then those of the tier
    that weights usually live in, and `placed` takes the fastest that holds them.
    link, host_link, network: between devices of a node, to host memory, and between nodes: names of `core/link.py`
    files, whose bandwidth (B/s, one direction) and latency (s) hold where the device file gives none of its own.
    devices_per_node: devices that `link` joins.
    tdp_watts, idle_watts: W of one device, at most and with a model loaded but nothing to do.
    price_per_hour: US$ per device.
    runtime_bytes: taken by the driver context and libraries before a model is loaded.
    graph_bytes: captured device graphs of a typical engine.
    efficiency: what op-time models reach of the peaks (`plugins/op_time/roofline.py` names the fields).
    calibration: tables measured on this device (`twinfer calibrate`).
    """

    name: str = Field(min_length=1, max_length=255)
    aliases: tuple[str, ...] = ()
    kind: Literal["cpu", "gpu", "accelerator"]
    memory_bytes: int = Field(gt=0, le=MOST)
    visible_bytes: int | None = Field(default=None, gt=0)
    memory_bandwidth: float = Field(gt=0, le=MOST)
    tiers: tuple[MemoryTier, ...] = ()
    peak_flops: dict[str, Number]
    link: str = ""
    link_bandwidth: float | None = Field(default=None, gt=0, le=MOST)
    link_latency: float | None = Field(default=None, ge=0, le=60)
    devices_per_node: int | None = Field(default=None, ge=1)
    host_link: str = ""
    host_link_bandwidth: float | None = Field(default=None, gt=0, le=MOST)
    host_link_source: str = ""
    network: str = ""
    network_bandwidth: float | None = Field(default=None, gt=0, le=MOST)
    network_latency: float | None = Field(default=None, ge=0, le=60)
    network_source: str = ""
    tdp_watts: float | None = Field(default=None, gt=0, le=1e9)
    idle_watts: float | None = Field(default=None, ge=0)
    idle_source: str = ""
    price_per_hour: float | None = Field(default=None, ge=0, lt=MOST_PRICE)
    price_source: str = ""
    runtime_bytes: int = Field(default=0, ge=0)
    graph_bytes: int = Field(default=0, ge=0)
    efficiency: dict[str, Any] = Field(default_factory=dict)
    efficiency_source: str = ""
    calibration: dict[str, Any] = Field(default_factory=dict)
    source: str
    date: str
    notes: str = ""

    @field_validator("peak_flops")
    @classmethod
    def _peaks(cls, peaks: dict[str, float]) -> dict[str, float]:
        if not peaks:
            raise ValueError("needs the peak of at least one dtype")
        for dtype, peak in peaks.items():
            try:
                known = canonical_dtype(dtype)
            except ConfigError as error:
                raise ValueError(str(error)) from None
            if known != dtype:
                raise ValueError(f"write {known!r} instead of {dtype!r}")
            if not 0 < peak <= MOST:
                raise ValueError(f"{dtype} must be positive, at most {figure(MOST)}")
        return peaks

    @field_validator("name")
    @classmethod
    def _printable(cls, name: str) -> str:
        if not name.isprintable() or name != name.strip():
            raise ValueError("has characters that cannot be printed, or spaces around it")
        return name

    @field_validator("tiers")
    @classmethod
    def _fastest_first(cls, tiers: tuple[MemoryTier, ...]) -> tuple[MemoryTier, ...]:
        speeds = [tier.bandwidth for tier in tiers]
        if speeds != sorted(speeds, reverse=True):
            raise ValueError("list the fastest first")
        return tiers

    @model_validator(mode="after")
    def _parts_of_the_whole(self) -> DeviceSpec:
        # makers state GB where devices have GiB, 7 % more
        for field, of, most in (("visible_bytes", "memory_bytes", 1.1), ("idle_watts", "tdp_watts", 1.0)):
            part, whole = getattr(self, field), getattr(self, of)
            if part is not None and whole is not None and part > most * whole:
                raise ValueError(f"{field}={part:g} is more than {of}={whole:g}")
        if (taken := self.runtime_bytes + self.graph_bytes) >= self.usable_bytes:
            raise ValueError(
                f"runtime_bytes and graph_bytes take {taken:g} of the {self.usable_bytes:g} bytes that a process sees"
            )
        return self

    @property
    def usable_bytes(self) -> int:
        """Memory that a process can have: what it sees, or what the maker states."""
        return self.visible_bytes or self.memory_bytes

    def tier_for(self, size: float) -> MemoryTier | None:
        """The fastest tier that holds `size` bytes, the largest where none does; None without tiers."""
        if not self.tiers:
            return None
        holds = [tier for tier in self.tiers if tier.bytes >= size]
        return holds[0] if holds else max(self.tiers, key=lambda tier: tier.bytes)

    def placed(self, size: float) -> DeviceSpec:
        """This device with `size` bytes of weights in the fastest tier that holds them: that memory and its bandwidth.

        KV lives beside the weights.  A device without tiers is returned as it is.
        """
        tier = self.tier_for(size)
        if tier is None or (tier.bytes, tier.bandwidth) == (self.memory_bytes, self.memory_bandwidth):
            return self
        return self.model_copy(
            update={"memory_bytes": tier.bytes, "visible_bytes": None, "memory_bandwidth": tier.bandwidth}
        )

    def ridge(self, dtype: str = "bfloat16") -> float:
        """FLOP per byte at which compute and memory take equally long; ConfigError for a dtype without a peak."""
        if dtype not in self.peak_flops:
            raise ConfigError("dtype", dtype, f"{self.name} has no peak for it", f"it has {', '.join(self.peak_flops)}")
        return self.peak_flops[dtype] / self.memory_bandwidth


def calibrated_path(root: str | Path | None = None) -> Path:
    """Where `twinfer calibrate` stores this machine's device file (below the user's data folder)."""
    if root is None:
        from twinfer.core.run_store import default_root

        root = default_root()
    return Path(root) / "devices" / f"{LOCAL}.json"


def device_files(registry: Registry | None = None) -> Mapping[str, Path]:
    """Device files by name, in the order of registration; a name is the file's stem, the first one wins."""
    return dict(_files(registry))


def _files(registry: Registry | None) -> Iterator[tuple[str, Path]]:
    if registry is None:
        from twinfer.core.registry import default_registry

        registry = default_registry()
    seen: set[str] = set()
    for item in registry.all("device"):
        folder = getattr(item.cls, "path", None)
        for path in sorted(Path(folder).glob("*.json")) if folder else ():
            if path.stem not in seen:
                seen.add(path.stem)
                yield path.stem, path


def all_devices(registry: Registry | None = None) -> list[DeviceSpec]:
    """Every registered device, in order."""
    return [read_device(path, registry) for path in device_files(registry).values()]


def load_device(
    name_or_path: str | Path, registry: Registry | None = None, root: str | Path | None = None
) -> DeviceSpec:
    """A device by name, alias or path of a JSON file; "auto" is this machine.

    "auto" is the calibrated file of this machine when there is one, else the generic `cpu`;
    "local" insists on the calibrated one.  Raises ConfigError naming close matches for an unknown name.
    """
    text = str(name_or_path).strip()
    local = calibrated_path(root)
    if text in ("auto", LOCAL):
        if local.is_file():
            return read_device(local)
        if text == LOCAL:
            raise ConfigError("--device", text, "this machine is not calibrated", "run `twinfer calibrate` first")
        text = GENERIC
    files = device_files(registry)
    key = text.lower()
    if key in files:
        return read_device(files[key], registry)
    path = Path(text).expanduser()
    if path.is_file():
        return read_device(path, registry)
    if path.suffix == ".json" or "/" in text:
        raise ConfigError(
            "--device", text, "no such file", "give the path of a device file, or a name `twinfer devices` lists"
        )
    aliases: dict[str, str] = {}
    for name, file in files.items():
        spec = read_device(file, registry)
        if key in spec.aliases:
            return spec
        aliases |= {alias: name for alias in spec.aliases}
    several = re.fullmatch(r"([1-9]\d{0,3}) ?x ?(.+)", key)  # 2xh100: so many of them
    word = several[2] if several else key
    close = get_close_matches(word, [*files, *aliases], n=2) or [name for name in files if word and word in name][:2]
    meant = list(dict.fromkeys(aliases.get(name, name) for name in ([word] if word in close else close)))
    hint = (
        f"did you mean {' or '.join(map(repr, meant))}{f' with --tp {several[1]}' if several else ''}? "
        if meant
        else ""
    )
    raise ConfigError("--device", text, "no such device", f"{hint}known: auto, {', '.join(files)}; or give a JSON file")


def read_device(path: str | Path, registry: Registry | None = None) -> DeviceSpec:
    """The device in a JSON file; ConfigError naming the file and the first field that is wrong."""
    path = Path(path)
    return _with_links(read_numbers(path, DeviceSpec, "--device", "device", UNITS), path, registry)


def _with_links(spec: DeviceSpec, path: Path, registry: Registry | None) -> DeviceSpec:
    """`spec` with the numbers of the links it names, where it has none of its own; names relative to the file are read,
    too. ConfigError for a name without a number and without a file."""
    changes: dict[str, Any] = {}
    for field in ("link", "host_link", "network"):
        name, bandwidth = getattr(spec, field), getattr(spec, f"{field}_bandwidth")
        beside = path.parent / name
        known = load_link_if_known(str(beside) if name.endswith(".json") and beside.is_file() else name, registry)
        if known is None:
            if name and bandwidth is None:
                load_link(name, registry, f"{path}: {field}")  # raises, naming what is known
            continue
        if bandwidth is None:
            changes[f"{field}_bandwidth"] = known.bandwidth
        if field != "host_link" and getattr(spec, f"{field}_latency") is None:
            changes[f"{field}_latency"] = known.latency
        if field == "host_link" and not spec.host_link_source:
            changes["host_link_source"] = known.source
    return spec.model_copy(update=changes) if changes else spec


def write_device(spec: DeviceSpec, path: str | Path) -> Path:
    """Store `spec` as JSON (replacing an older file in one move), readable by `read_device`. Raises ConfigError."""
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, spec.model_dump_json(indent=1) + "\n")
    except OSError as error:
        raise ConfigError(
            "device file", str(path), f"cannot be written ({error.strerror})", "free the space or fix the permissions"
        ) from None
    return path


def check_device_out(option: str, path: Path) -> None:
    """Raise ConfigError unless a device file may be written to `path`, which a user named with `option`."""
    if not path.stem.isprintable() or path.stem != path.stem.strip():
        raise ConfigError(
            option, str(path), "is no name of a device: it has characters that cannot be printed, or spaces around it",
            "give another file",
        )  # fmt: skip
    check_replaceable(option, path, "a device file", lambda begin: re.match(r'\s*\{\s*"name"\s*:', begin) is not None)
