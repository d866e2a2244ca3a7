"""The designs that could answer a question: one replica each, bought so many times.

A *design* is a device type, a layout over devices, techniques and limits, as an `EngineConfig`, and what a fleet of it
is like beside: router, prefill and decode pools, a host-memory KV tier. The designs are the product of the axes.

Invariants
* Equal questions give equal designs in equal order; a design's key names what distinguishes it and nothing else.
* Values that no design could have (a wrong type) are a ConfigError before anything is simulated; values that do not go
  together are a `problem` of that design alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from twinfer.core.config import Choice, EngineConfig
from twinfer.core.errors import ConfigError
from twinfer.core.fleet import in_words
from twinfer.core.mistakes import first_mistake
from twinfer.simulator.plan_space import FLEET_AXES, Question, option_of

ROUND_ROBIN = "round_robin"
_SHORT = {
    "max_num_batched_tokens": "tokens", "max_num_seqs": "seqs", "quantizer": "quant", "host_kv_bytes": "host_kv",
}  # fmt: skip
_BYTES = ("host_kv_bytes", "host_tier", "kv_memory_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Design:
    """What could be bought n times. `key` is unique among the designs of a question; `changes` are its axes.

    pools: replicas for prefill and for decode in one such unit; (1, 0) is one replica that does both.
    host_tier: bytes of host memory of a replica that keep KV of ended requests; None: none.
    """

    index: int
    key: str
    device: str
    changes: Mapping[str, Any]
    config: EngineConfig | None
    problem: str = ""
    router: str = ROUND_ROBIN
    pools: tuple[int, int] = (1, 0)
    host_tier: int | None = None

    @property
    def num_engines(self) -> int:
        return sum(self.pools)

    @property
    def num_devices(self) -> int:
        """Devices of one unit."""
        return self.num_engines * self.config.layout.devices if self.config is not None else 1

    @property
    def simple(self) -> bool:
        """Requests are dealt out in turn to replicas that do all of their work."""
        return self.router == ROUND_ROBIN and self.pools == (1, 0) and self.host_tier is None

    @property
    def guesses(self) -> bool:
        """It speculates, so that what it answers in a step is drawn."""
        return self.config is not None and self.config.speculator is not None


def designs_of(question: Question, router: str = ROUND_ROBIN) -> list[Design]:
    """Every combination of the axes, devices outermost. One that contradicts itself carries its `problem`.

    router: of designs whose question names none.  Raises ConfigError when a value fits no configuration at all.
    """
    # in an order of its own: one that comes back from a file must number its designs alike
    axes = {"device": question.axes["device"], **{k: v for k, v in sorted(question.axes.items()) if k != "device"}}
    for name, values in axes.items():
        for value in values:
            _alone(question, name, value)
    found: list[Design] = []
    for combination in itertools.product(*axes.values()):
        changes = dict(zip(axes, combination, strict=True))
        engine = {name: value for name, value in changes.items() if name not in FLEET_AXES}
        fields = {**question.base, **engine}
        if fields.get("host_kv_bytes") is not None:
            fields.setdefault("preemption", "swap")
        config, problem = None, ""
        try:
            config = EngineConfig(**fields)
        except ValidationError as error:
            wrong = first_mistake(error)
            problem = f"{option_of(wrong.field)}={wrong.value!r} {wrong.problem}"
        except ConfigError as error:
            problem = str(error)
        named = [name for name in changes if name != "device" and (len(axes[name]) > 1 or name == "tp")]
        tier = changes.get("host_tier")
        found.append(Design(
            index=len(found), device=str(changes["device"]), changes=changes, config=config, problem=problem,
            key=" ".join([str(changes["device"]), *(f"{_SHORT.get(n, n)}={_text(n, changes[n])}" for n in named)]),
            router=str(changes.get("router", router)), pools=pools_of(changes.get("pools")),
            host_tier=None if tier is None else int(tier),
        ))  # fmt: skip
    return found


def pools_of(text: Any) -> tuple[int, int]:
    """Prefill and decode replicas of `P:D`; (1, 0) for `colocated` or nothing. Raises ConfigError."""
    if text is None or text == "colocated":
        return (1, 0)
    left, colon, right = str(text).partition(":")
    sizes = [int(part) if part.isascii() and part.isdecimal() and len(part) < 4 else 0 for part in (left, right)]
    if not colon or not all(1 <= size <= 64 for size in sizes):
        raise ConfigError("--pools", text, "is no ratio of replicas", "write colocated, or PREFILL:DECODE such as 1:2")
    return (sizes[0], sizes[1])


def _alone(question: Question, name: str, value: Any) -> None:
    """ConfigError when `value` is nothing that the field `name` could ever be."""
    if name == "pools":
        pools_of(value)
    if name in FLEET_AXES:
        return
    try:
        EngineConfig(**{**question.base, "device": question.axes["device"][0], name: value})
    except ConfigError:  # it may go with other values of the other axes
        return
    except ValidationError as error:
        wrong = first_mistake(error)
        if wrong.field == name:
            option = option_of(name)
            given = f"{name}={value}" if option == "--try" else value
            raise ConfigError(option, given, wrong.problem, wrong.fix) from None


def _text(name: str, value: Any) -> str:
    if isinstance(value, Mapping):
        value = Choice.model_validate(value)
    if value is not None and name in _BYTES:
        return f"{int(value) / 2**30:g}GiB"
    return "none" if value is None else str(value)


def label_of(design: Design, replicas: int) -> str:
    """A fleet in words: `4 x 2 h200-sxm (tp 2, 256 rows, 512 tokens a step)`; as many rows as `simulate` has go without saying."""
    config = design.config
    assert config is not None
    usual = EngineConfig.model_fields["max_num_seqs"].default
    words = [f"{config.max_num_seqs} rows"] if config.max_num_seqs != usual else []
    words += [f"{config.max_num_batched_tokens} tokens a step"]
    words += [design.router] if design.router != ROUND_ROBIN else []
    words += [f"swaps to {_text('host_kv_bytes', config.host_kv_bytes)}"] if config.host_kv_bytes is not None else []
    words += [f"KV tier of {_text('host_tier', design.host_tier)}"] if design.host_tier is not None else []
    prefill, decode = design.pools
    many = f"{replicas * prefill} prefill + {replicas * decode} decode" if decode else str(replicas)
    return in_words(design.device, config.model_dump(), many, words)


def sorted_by_device(designs: Sequence[Design]) -> dict[str, list[Design]]:
    """Designs by device, in the order of the question."""
    found: dict[str, list[Design]] = {}
    for design in designs:
        found.setdefault(design.device, []).append(design)
    return found


__all__ = ["ROUND_ROBIN", "Design", "designs_of", "label_of", "pools_of", "sorted_by_device"]
