"""What is searched: a question (model, traffic, promises) and the designs that could answer it.

A *design* is one replica: a device type, a layout over devices, techniques and limits, as an `EngineConfig`. A
*fleet* is so many replicas of a design. The space is the product of axes; any field of `EngineConfig` can be one.

Invariants
* Equal questions give equal designs in equal order; a design's key names what distinguishes it and nothing else.
* A question is plain data and back (`plain`, `from_plain`): a result file holds all that is needed to go on.
* Values that no design could have (an unknown field, a wrong type) are a ConfigError before anything is simulated.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ValidationError

from twinfer.core.config import Choice, EngineConfig
from twinfer.core.device import DeviceSpec, all_devices, load_device
from twinfer.core.errors import ConfigError
from twinfer.core.goal import Goal, parse_goals
from twinfer.core.mistakes import first_mistake
from twinfer.core.registry import Registry
from twinfer.core.workload import Workload, make_workload

DEFAULT_TP = (1, 2, 4, 8)
DEFAULT_TOKENS = (512, 1024, 2048)
DEFAULT_SEQS = (256,)
FLEET_AXES = ("router", "pools")
"""Axes beside the fields of `EngineConfig`: which replica gets a request; `P:D` prefill and decode replicas, or `colocated`."""
_SHORT = {"max_num_batched_tokens": "tokens", "max_num_seqs": "seqs", "quantizer": "quant"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked.

    base: fields of `EngineConfig` that all designs share, with "model".  axes: field -> values to try, with "device".
    workload: the traffic of the whole fleet.  prices: US$ per device and hour that replace those of device files.
    max_replicas: largest fleet.  screen: requests per replica of a first look; confirm: of the whole fleet, for
    the designs that could be the answer (of less traffic, all). The answer itself is proved on all of the traffic.  top: device types that are confirmed,
    those with a price first, cheapest first.
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
        }  # fmt: skip

    @classmethod
    def from_plain(cls, given: Mapping[str, Any]) -> Question:
        """The question that `plain` described. Raises ConfigError, KeyError or TypeError for what it did not."""
        return cls(
            base=dict(given["base"]), axes={name: tuple(values) for name, values in given["axes"].items()},
            workload=make_workload(**given["workload"]), goals=parse_goals(given["slo"]), prices=dict(given["prices"]),
            max_replicas=int(given["max_replicas"]), screen=int(given["screen"]), confirm=int(given["confirm"]),
            top=int(given["top"]),
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Design:
    """What could be bought n times. `key` is unique among the designs of a question; `changes` are its axes.

    pools: replicas for prefill and for decode in one such unit; (1, 0) is one replica that does both.
    """

    index: int
    key: str
    device: str
    changes: Mapping[str, Any]
    config: EngineConfig | None
    problem: str = ""
    router: str = "round_robin"
    pools: tuple[int, int] = (1, 0)

    @property
    def num_engines(self) -> int:
        return sum(self.pools)

    @property
    def num_devices(self) -> int:
        """Devices of one unit."""
        return self.num_engines * devices_of(self.config) if self.config is not None else 1

    @property
    def simple(self) -> bool:
        """Requests are dealt out in turn to replicas that do all of their work."""
        return self.router == "round_robin" and self.pools == (1, 0)


def devices_of(config: EngineConfig) -> int:
    """Devices of one replica of `config`."""
    layout = getattr(config, "layout", None)
    return int(layout.devices) if layout is not None else config.tp


def check_question(question: Question, registry: Registry) -> None:
    """Raise ConfigError for a question that has no answer whatever is tried."""
    if question.base.get("speculator") is not None:
        _alone(question, "speculator", question.base["speculator"])
    workload = question.workload
    if not workload.ignore_eos:
        raise ConfigError(
            "--stop-at-eos", True, "a prediction has no text that could end a request",
            "leave it out and give the --output-len you expect",
        )  # fmt: skip
    if workload.concurrency is not None:
        raise ConfigError(
            "--concurrency", workload.concurrency, "a closed loop sends less to a slow fleet, so every fleet keeps up",
            "give --rate or a trace with times",
        )  # fmt: skip
    for option, value in (("--max-replicas", question.max_replicas), ("--screen", question.screen),
                          ("--confirm", question.confirm), ("--top", question.top)):  # fmt: skip
        if value < 1:
            raise ConfigError(option, value, "out of range", "give at least 1")
    if not question.axes.get("device"):
        raise ConfigError("--device", None, "no device to choose from", "name some, or leave it out for all of them")
    for name, values in question.axes.items():
        if name not in EngineConfig.model_fields and name not in FLEET_AXES:
            known = ", ".join(n for n in (*EngineConfig.model_fields, *FLEET_AXES) if n != "model")
            raise ConfigError("--try", name, "no such field of a configuration", f"use one of {known}")
        if len(set(map(str, values))) < len(values):
            raise ConfigError(_option(name), ",".join(map(str, values)), "a value is given twice", "give each once")
    for router in question.axes.get("router", ()):
        registry.build("router", Choice.model_validate(router))
    names = {device.name for device in devices_of_question(question, registry).values()}
    for name, price in question.prices.items():
        if name not in names:
            raise ConfigError("--price", name, "no such device is searched", f"searched: {', '.join(sorted(names))}")
        if not 0 <= price < 1e6:
            raise ConfigError("--price", f"{name}={price:g}", "is no price", "give US$ per device and hour")


def devices_of_question(question: Question, registry: Registry) -> dict[str, DeviceSpec]:
    """The devices searched, by the word that names them in the axes, with the prices of the question."""
    found: dict[str, DeviceSpec] = {}
    for word in question.axes["device"]:
        spec = load_device(word, registry)
        price = question.prices.get(spec.name)
        if price is not None:
            spec = spec.model_copy(update={"price_per_hour": price, "price_source": "given with the question"})
        found[str(word)] = spec
    return found


def default_devices(registry: Registry) -> tuple[str, ...]:
    """All registered devices but CPUs."""
    return tuple(spec.name for spec in all_devices(registry) if spec.kind != "cpu")


def designs_of(question: Question) -> list[Design]:
    """Every combination of the axes, devices outermost. One that contradicts itself carries its `problem`.

    Raises ConfigError when a value fits no configuration at all.
    """
    # in an order of its own: one that comes back from a file must number its designs alike
    axes = {"device": question.axes["device"], **{k: v for k, v in sorted(question.axes.items()) if k != "device"}}
    for name, values in axes.items():
        for value in values:
            _alone(question, name, value)
    found: list[Design] = []
    for combination in itertools.product(*axes.values()):
        changes = dict(zip(axes, combination, strict=True))
        config, problem = None, ""
        engine = {name: value for name, value in changes.items() if name not in FLEET_AXES}
        try:
            config = EngineConfig(**{**question.base, **engine})
        except (ValidationError, ConfigError) as error:
            problem = _first_line(error)
        key = " ".join([str(changes["device"]), *(
            f"{_SHORT.get(name, name)}={_text(value)}"
            for name, value in changes.items() if name != "device" and (len(axes[name]) > 1 or name == "tp")
        )])  # fmt: skip
        found.append(
            Design(
                index=len(found),
                key=key,
                device=str(changes["device"]),
                changes=changes,
                config=config,
                problem=problem,
                router=str(changes.get("router", "round_robin")),
                pools=pools_of(changes.get("pools")),
            )
        )
    return found


def pools_of(text: Any) -> tuple[int, int]:
    """Prefill and decode replicas of `P:D`; (1, 0) for `colocated` or nothing. Raises ConfigError."""
    if text is None or text == "colocated":
        return (1, 0)
    left, colon, right = str(text).partition(":")
    if (
        not colon
        or not left.isdecimal()
        or not right.isdecimal()
        or not 1 <= int(left) <= 64
        or not 1 <= int(right) <= 64
    ):
        raise ConfigError("--pools", text, "is no ratio of replicas", "write colocated, or PREFILL:DECODE such as 1:2")
    return (int(left), int(right))


def _alone(question: Question, name: str, value: Any) -> None:
    """ConfigError when `value` is nothing that the field `name` could ever be."""
    if name == "speculator" and value is not None:
        raise ConfigError(
            "speculator", str(value), "the bounds of the search hold for one token per sequence and step",
            "plan without it, and `twinfer simulate --speculator` the plan that was found",
        )  # fmt: skip
    if name == "pools":
        pools_of(value)
    if name in FLEET_AXES:
        return
    try:
        EngineConfig(**{**question.base, "device": question.axes["device"][0], name: value})
    except ValidationError as error:
        wrong = first_mistake(error)
        if wrong.field == name:
            raise ConfigError(_option(name), value, wrong.problem, wrong.fix) from None


def _first_line(error: Exception) -> str:
    if isinstance(error, ValidationError):
        return str(error.errors()[0]["msg"])
    return str(error)


def _option(name: str) -> str:
    return {"quantizer": "--quant"}.get(name, "--" + name.replace("_", "-"))


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    return list(value) if isinstance(value, tuple) else value


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        value = Choice.model_validate(value)
    return "none" if value is None else str(value)


def label_of(design: Design, replicas: int) -> str:
    """A fleet in words: `4 x 2 h200-sxm (tp 2, 512 tokens a step)`."""
    config = design.config
    assert config is not None
    devices = devices_of(config)
    per = f"{devices} " if devices > 1 else ""
    layout = getattr(config, "layout", None)
    words = [f"tp {config.tp}"] if layout is None else [
        f"{name} {getattr(layout, name)}" for name in ("tp", "pp", "cp", "dp", "ep") if getattr(layout, name) > 1
    ]  # fmt: skip
    words = words if devices > 1 else []
    words += [_text(config.quantizer)] if config.quantizer is not None else []
    words += [f"{config.kv_dtype} KV"] if config.kv_dtype != "auto" else []
    words.append(f"{config.max_num_batched_tokens} tokens a step")
    words += [design.router] if design.router != "round_robin" else []
    prefill, decode = design.pools
    if decode:
        many = f"{replicas * prefill} prefill + {replicas * decode} decode"
        return f"{many} x {per}{design.device} ({', '.join(words)})"
    return f"{replicas} x {per}{design.device} ({', '.join(words)})"


def sorted_by_device(designs: Sequence[Design]) -> dict[str, list[Design]]:
    """Designs by device, in the order of the question."""
    found: dict[str, list[Design]] = {}
    for design in designs:
        found.setdefault(design.device, []).append(design)
    return found


__all__ = [
    "DEFAULT_SEQS", "DEFAULT_TOKENS", "DEFAULT_TP", "Design", "Question", "check_question", "default_devices",
    "designs_of", "devices_of", "devices_of_question", "label_of", "pools_of", "sorted_by_device",
]  # fmt: skip
