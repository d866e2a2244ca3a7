"""A fleet as configuration: replicas of one engine behind a router, and what may happen to them.

    requests -> router -> replica 0 .. n-1                                      one pool: prefill and decode together
    requests -> router -> prefill replicas -> KV over links -> decode replicas  two pools (`decode` is set)

Invariants
* Frozen, and checked as a whole: an option that would change nothing is an error, as everywhere.
* `Fleet(engine=config)` is one replica and nothing else (`alone`); its prediction is `simulate`'s of that engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import ConfigDict, Field, model_validator

from twinfer.core.config import Choice, EngineConfig
from twinfer.core.errors import ConfigError
from twinfer.core.layout import SIZES, Layout
from twinfer.core.technique import Checked

KV_SHARE = 0.87
"""Of the line rate of a device's network port that KV transfers reach, where no bandwidth is given: 87 GB/s over four
200 Gb/s ports were measured by Mooncake (FAST'25, arXiv:2407.00079)."""

LONGEST = 1e9
"""Seconds, about thirty years: what takes longer does not happen; it is left out."""
_OPTIONS = {"repair_s": "--repair", "boot_s": "--boot-time"}


class Autoscaler(Checked):
    """How many replicas there are, decided every `interval_s`.

    target_requests: open requests (waiting or running) that one replica should have.
    target_busy: share of the time that a replica should compute; one of the two.
    A step up is taken at once, a step down when `down_after_s` long no more were wanted; a replica that goes takes no
    new requests and ends those that it has.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    min_replicas: int = Field(default=1, ge=1)
    max_replicas: int = Field(ge=1, le=4096)
    target_requests: float | None = Field(default=None, gt=0)
    target_busy: float | None = Field(default=None, gt=0, le=1)
    interval_s: float = Field(default=15.0, ge=0.01, le=LONGEST)  # each look is a step of the simulation
    down_after_s: float = Field(default=300.0, ge=0, le=LONGEST)

    @model_validator(mode="after")
    def _check(self) -> Autoscaler:
        if self.min_replicas > self.max_replicas:
            raise ConfigError(
                "--max-replicas",
                self.max_replicas,
                f"is below --min-replicas {self.min_replicas}",
                "give at least that",
            )
        if (self.target_requests is None) == (self.target_busy is None):
            raise ConfigError(
                "--target-requests", self.target_requests, "the autoscaler needs one target to keep",
                "give --target-requests or --target-busy",
            )  # fmt: skip
        return self


class Failure(Checked):
    """Replica `replica` fails at `at` seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    replica: int = Field(ge=0)
    at: float = Field(ge=0, le=LONGEST)


class Fleet(Checked):
    """Everything about a fleet but its traffic.

    engine, replicas: of the one pool, or of the prefill pool when `decode` and `decode_replicas` describe another.
    router, decode_router: which replica of either pool gets a request.
    kv_bandwidth: B/s per device and direction, between replicas (and to `shared_tier_bytes`); None: `KV_SHARE` of
    the network that the device file names.  kv_latency: s before the first byte of a transfer; None: that network's.
     fabric_bandwidth: B/s that all transfers share, None: no limit.
    kv_overlap: layers are sent while the last step of a prompt computes the next ones.
    host_tier_bytes: host memory per replica that keeps KV of ended requests.  shared_tier_bytes: one such store for all
    replicas, reached over the network.  tier_block: tokens that are kept or lost together there.
    autoscaler: None keeps the number of replicas.
    failures: at given times.  mtbf: mean time between failures of a replica in s (exponential), None: none.
    repair_s: from a failure until a replica begins to start again.
    load_bandwidth: B/s per device at which a starting replica reads its weights.  boot_s: what else it takes to start.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)

    engine: EngineConfig
    replicas: int = Field(default=1, ge=1, le=4096)
    router: Choice = Choice(name="round_robin")
    decode: EngineConfig | None = None
    decode_replicas: int = Field(default=0, ge=0, le=4096)
    decode_router: Choice = Choice(name="least_loaded")
    kv_bandwidth: float | None = Field(default=None, gt=0)
    kv_latency: float | None = Field(default=None, ge=0, le=LONGEST)
    fabric_bandwidth: float | None = Field(default=None, gt=0)
    kv_overlap: bool = False
    host_tier_bytes: int | None = Field(default=None, ge=1)
    shared_tier_bytes: int | None = Field(default=None, ge=1)
    tier_block: int = Field(default=256, ge=1)
    autoscaler: Autoscaler | None = None
    failures: tuple[Failure, ...] = ()
    mtbf: float | None = Field(default=None, gt=0, le=LONGEST)
    repair_s: float = Field(default=0.0, ge=0, le=LONGEST)
    load_bandwidth: float = Field(default=2e9, gt=0)
    boot_s: float = Field(default=0.0, ge=0, le=LONGEST)

    @model_validator(mode="after")
    def _check(self) -> Fleet:
        if (self.decode is None) != (self.decode_replicas == 0):
            raise ConfigError(
                "--decode-replicas", self.decode_replicas, "a decode pool is an engine and how many of it",
                "give both or none",
            )  # fmt: skip
        self._refuse_ignored()
        if self.decode is not None:
            self._check_pools(self.decode)
        scaler = self.autoscaler
        if scaler is not None and not scaler.min_replicas <= self.replicas <= scaler.max_replicas:
            raise ConfigError(
                "--replicas", self.replicas, "is not between --min-replicas and --max-replicas",
                f"give {scaler.min_replicas} to {scaler.max_replicas}",
            )  # fmt: skip
        for failure in self.failures:
            if failure.replica >= self.replicas + self.decode_replicas:
                raise ConfigError(
                    "--fail", f"{failure.replica}@{failure.at:g}",
                    f"there are replicas 0 to {self.replicas + self.decode_replicas - 1}", "name one of them",
                )  # fmt: skip
        return self

    def _refuse_ignored(self) -> None:
        """An option that would change nothing is a mistake."""
        tiered = self.host_tier_bytes is not None or self.shared_tier_bytes is not None
        fails = bool(self.failures) or self.mtbf is not None
        starts = fails or self.autoscaler is not None
        rules = (
            (("kv_overlap", "decode_router"), self.disaggregated, "no replica hands KV on", "--decode-replicas"),
            (("kv_bandwidth", "kv_latency", "fabric_bandwidth"), self.networked, "no KV goes over a network",
             "--decode-replicas or --shared-tier-bytes"),
            (("tier_block",), tiered, "no tier keeps KV", "--host-tier-bytes or --shared-tier-bytes"),
            (("repair_s",), fails, "no replica fails", "--fail or --mtbf"),
            (("load_bandwidth", "boot_s"), starts, "no replica starts late", "--max-replicas, --fail or --mtbf"),
        )  # fmt: skip
        for names, used, why, needs in rules:
            for name in names:
                if not used and getattr(self, name) != type(self).model_fields[name].default:
                    option = _OPTIONS.get(name, "--" + name.replace("_", "-"))
                    raise ConfigError(option, str(getattr(self, name)), why, f"give {needs} too, or leave it out")

    def _check_pools(self, decode: EngineConfig) -> None:
        for name in ("model", "dtype", "kv_dtype", "attention", "quantizer"):
            ours, theirs = getattr(self.engine, name), getattr(decode, name)
            if ours != theirs:
                raise ConfigError(
                    f"--{name.replace('_', '-')}", str(ours), f"the decode pool has {theirs}: it could not read this KV",
                    "give both pools the same",
                )  # fmt: skip
        if self.autoscaler is not None:
            raise ConfigError(
                "--max-replicas", self.autoscaler.max_replicas, "an autoscaler of two pools is not modelled",
                "give fixed --prefill-replicas and --decode-replicas, or one pool",
            )  # fmt: skip

    @property
    def alone(self) -> bool:
        """One replica and nothing that only a fleet has: its router has nothing to choose."""
        return self == Fleet(engine=self.engine, router=self.router)

    @property
    def only_replicas(self) -> bool:
        """More replicas and their router, nothing that takes time of its own."""
        return self == Fleet(engine=self.engine, replicas=self.replicas, router=self.router)

    @property
    def disaggregated(self) -> bool:
        return self.decode is not None

    @property
    def networked(self) -> bool:
        """KV goes between replicas, or to and from the shared store."""
        return self.disaggregated or self.shared_tier_bytes is not None

    @property
    def moves_kv(self) -> bool:
        return self.disaggregated or self.host_tier_bytes is not None or self.shared_tier_bytes is not None

    def plain(self) -> dict[str, Any]:
        """JSON-ready fields that differ from the defaults, without the engines' own."""
        given = self.model_dump(mode="json", exclude_defaults=True, exclude={"engine", "decode"})
        if self.decode is not None:
            ours, theirs = self.engine.model_dump(mode="json"), self.decode.model_dump(mode="json")
            given["decode"] = {name: value for name, value in theirs.items() if ours[name] != value}
        return given


def in_words(device: str, engine: Mapping[str, Any], many: str = "", more: Sequence[str] = ()) -> str:
    """`4 x 2 h200-sxm (tp 2, fp8)`: an engine, as plain fields, on devices; what is a default goes without saying.

    many: how many of it, empty for one alone.  more: words beside its layout, techniques and KV format.
    """
    sizes = {name: engine.get(name, 1) for name in SIZES}
    words = [f"{name} {size}" for name, size in sizes.items() if size > 1]
    words += [str(Choice.model_validate(engine[k])) for k in ("quantizer", "attention", "speculator") if engine.get(k)]
    kv = engine.get("kv_dtype", "auto")
    words += [f"{kv} KV"] if kv not in ("auto", engine.get("dtype")) else []
    words += more
    devices = Layout(**sizes).devices
    place = f"{devices} {device}" if devices > 1 else device
    return (f"{many} x " if many else "") + place + (f" ({', '.join(words)})" if words else "")


def recorded_in_words(device: str, config: Mapping[str, Any]) -> str:
    """As `in_words`, of the configuration in the record of a run, with its fleet if it was one."""
    fleet = config.get("fleet", {})
    count, decode = fleet.get("replicas", 1), fleet.get("decode_replicas", 0)
    many = f"{count} prefill + {decode} decode" if decode else str(count) if count > 1 else ""
    more = [str(Choice.model_validate(fleet["router"]))] if "router" in fleet else []
    more += [f"decode {name} {size}" for name, size in fleet.get("decode", {}).items() if name in SIZES]
    for name in ("host", "shared"):
        if (size := fleet.get(f"{name}_tier_bytes")) is not None:
            more.append(f"{name} KV tier of {size / 2**30:.3g} GiB")
    scaler = fleet.get("autoscaler")
    more += [f"up to {scaler['max_replicas']} replicas"] if scaler else []
    return in_words(device, config, many, more)


Pool = Literal["engine", "prefill", "decode"]

__all__ = ["KV_SHARE", "Autoscaler", "Failure", "Fleet", "Pool", "in_words", "recorded_in_words"]
