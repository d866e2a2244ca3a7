"""What is asked: a model, traffic, promises, and the space to search (`plan_designs.py` makes its designs).

A *fleet* is so many replicas of one design. The space is the product of axes; any field of `EngineConfig` can be one.

Invariants
* A question is plain data and back (`plain`, `from_plain`): a result file holds all that is needed to go on.
* What has no answer whatever is tried is a ConfigError before anything is simulated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from twinfer.core.config import Choice, EngineConfig
from twinfer.core.device import MOST_PRICE, DeviceSpec, all_devices, load_device
from twinfer.core.errors import ConfigError, figure
from twinfer.core.goal import Goal, parse_goals
from twinfer.core.registry import Registry
from twinfer.core.workload import Workload, make_workload
from twinfer.plugins.op_time.calibrated import calibration_of
from twinfer.plugins.op_time.roofline import curves_of

DEFAULT_TP = (1, 2, 4, 8)
DEFAULT_TOKENS = (512, 1024, 2048)
DEFAULT_SEQS = (256,)
DEFAULT_SEEDS, MOST_SEEDS = 3, 32
FLEET_AXES = ("router", "pools", "host_tier")
"""Axes beside the fields of `EngineConfig`: which replica gets a request; `P:D` prefill and decode replicas, or
`colocated`; bytes of host memory that keep KV of ended requests, or None."""

NOT_TRIED = ("model", "device", "seed", "num_devices", "op_time")
"""Fields of `EngineConfig` that --try does not take: they have options of their own, or follow from the others."""
_OPTIONS = (
    "model", "device", "tp", "pp", "dp", "ep", "cp", "max_num_seqs", "max_num_batched_tokens", "kv_dtype", "quantizer", "attention",
    "scheduler", "kv_cache", "speculator", "host_kv_bytes", "op_time",
)  # fmt: skip
"""Those that have an option of their own; for all others there is --try."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked.

    base: fields of `EngineConfig` that all designs share, with "model".  axes: field -> values to try, with "device".
    workload: the traffic of the whole fleet.  prices: US$ per device and hour that replace those of device files.
    max_replicas: largest fleet.  screen: requests per replica of a first look; confirm: of the whole fleet, for
    the designs that could be the answer (of less traffic, all). The answer itself is proved on all of the traffic.
    top: device types that are confirmed, those with a price first, cheapest first.
    seeds: draws of the traffic, in each of which a fleet must keep its promises.
    """

    base: Mapping[str, Any]
    axes: Mapping[str, tuple[Any, ...]]
    workload: Workload
    goals: tuple[Goal, ...]
    prices: Mapping[str, float] = field(default_factory=dict)
    max_replicas: int = 64
    screen: int = 240
    confirm: int = 4000
    top: int = 8
    seeds: int = DEFAULT_SEEDS

    @property
    def model(self) -> str:
        return str(self.base["model"])

    def plain(self) -> dict[str, Any]:
        """JSON data; `from_plain` gives the question back."""
        return {
            "base": {name: _plain(value) for name, value in sorted(self.base.items())},
            "axes": {name: [_plain(v) for v in values] for name, values in sorted(self.axes.items())},
            "workload": self.workload.plain(),
            "slo": [str(goal) for goal in self.goals],
            "prices": dict(sorted(self.prices.items())),
            "max_replicas": self.max_replicas, "screen": self.screen, "confirm": self.confirm, "top": self.top,
            "seeds": self.seeds,
        }  # fmt: skip

    @classmethod
    def from_plain(cls, given: Mapping[str, Any]) -> Question:
        """The question that `plain` described. Raises ConfigError, KeyError or TypeError for what it did not."""
        return cls(
            base=dict(given["base"]), axes={name: tuple(values) for name, values in given["axes"].items()},
            workload=make_workload(**given["workload"]), goals=parse_goals(given["slo"]), prices=dict(given["prices"]),
            **{name: int(given[name]) for name in ("max_replicas", "screen", "confirm", "top", "seeds")},
        )  # fmt: skip


def check_question(question: Question, registry: Registry) -> None:
    """Raise ConfigError for a question that has no answer whatever is tried."""
    if not question.workload.ignore_eos:
        raise ConfigError(
            "--stop-at-eos", True, "a prediction has no text that could end a request",
            "leave it out and give the --output-len you expect",
        )  # fmt: skip
    for name, most in (
        ("max_replicas", 4096),
        ("screen", None),
        ("confirm", None),
        ("top", None),
        ("seeds", MOST_SEEDS),
    ):
        value = getattr(question, name)
        if value < 1 or (most is not None and value > most):
            fix = "give at least 1" if most is None else f"give 1 to {figure(most)}"
            raise ConfigError(option_of(name), value, "out of range", fix)
    if not question.axes.get("device"):
        raise ConfigError("--device", None, "no device to choose from", "name some, or leave it out for all of them")
    for name, values in question.axes.items():
        if name not in EngineConfig.model_fields and name not in FLEET_AXES:
            known = ", ".join(n for n in (*EngineConfig.model_fields, *FLEET_AXES) if n not in NOT_TRIED)
            raise ConfigError("--try", name, "no such field of a configuration", f"use one of {known}")
        if len(set(map(str, values))) < len(values):
            raise ConfigError(option_of(name), ",".join(map(str, values)), "a value is given twice", "give each once")
    for router in question.axes.get("router", ()):
        registry.build("router", Choice.model_validate(router))
    for tier in question.axes.get("host_tier", ()):
        if tier is not None and (isinstance(tier, bool) or not isinstance(tier, int) or tier < 1):
            raise ConfigError("--host-tier", tier, "is no number of bytes", "give a size such as 64GiB, or none")
    devices = devices_of_question(question, registry)
    names = {*devices, *(device.name for device in devices.values())}
    for device in devices.values():  # what is wrong there is wrong with every design
        curves_of(device)
        calibration_of(device)
    for name, price in question.prices.items():
        if name not in names:
            raise ConfigError("--price", name, "no such device is searched", f"searched: {', '.join(sorted(names))}")
        if not 0 <= price < MOST_PRICE:
            raise ConfigError(
                "--price",
                f"{name}={price:g}",
                "is no price",
                f"give US$ per device and hour, below {figure(MOST_PRICE)}",
            )


def devices_of_question(question: Question, registry: Registry) -> dict[str, DeviceSpec]:
    """The devices searched, by the word that names them in the axes, with the prices of the question.

    A price is of that word, or of the name in the device's file where no other word of the axes is that name.
    """
    found: dict[str, DeviceSpec] = {}
    words = set(map(str, question.axes["device"]))
    for word in question.axes["device"]:
        spec = load_device(word, registry)
        price = question.prices.get(str(word))
        if price is None and spec.name not in words:
            price = question.prices.get(spec.name)
        if price is not None:
            spec = spec.model_copy(update={"price_per_hour": price, "price_source": "given with the question"})
        found[str(word)] = spec
    return found


def default_devices(registry: Registry) -> tuple[str, ...]:
    """All registered devices but CPUs."""
    return tuple(spec.name for spec in all_devices(registry) if spec.kind != "cpu")


def option_of(name: str) -> str:
    """The option of `twinfer plan` that says what the axis or field `name` is."""
    if name in EngineConfig.model_fields and name not in _OPTIONS:
        return "--try"
    return {"quantizer": "--quant", "host_kv_bytes": "--host-kv"}.get(name, "--" + name.replace("_", "-"))


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    return list(value) if isinstance(value, tuple) else value


__all__ = [
    "DEFAULT_SEEDS", "DEFAULT_SEQS", "DEFAULT_TOKENS", "DEFAULT_TP", "FLEET_AXES", "NOT_TRIED", "Question", "check_question",
    "default_devices", "devices_of_question", "option_of",
]  # fmt: skip
