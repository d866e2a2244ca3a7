"""From the options of `twinfer plan` to the question that it asks.

Invariants
* Every value is checked here or by the question itself, before anything is simulated.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from twinfer.cli.values import make_config, parse_size, parse_technique

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from twinfer.cli.flags import Scenario
    from twinfer.cli.session import Session
    from twinfer.core.goal import Goal
    from twinfer.core.workload import Workload
    from twinfer.simulator.plan_space import Question

DEFAULT_REQUESTS = 2000
"""Synthetic requests: enough that one in twenty is a hundred."""
_LISTS = {
    "tp": int, "pp": int, "dp": int, "ep": int, "cp": int, "max_num_seqs": int, "max_num_batched_tokens": int, "kv_dtype": str, "pools": str,
}  # fmt: skip


def axes_of(
    session: Session, *, device: list[str] | None, tries: list[str] | None, **given: Any
) -> dict[str, tuple[Any, ...]]:
    """Field of `EngineConfig` -> values to try."""
    from twinfer.core.dtypes import canonical_dtype
    from twinfer.core.errors import ConfigError
    from twinfer.simulator.plan_space import DEFAULT_SEQS, DEFAULT_TOKENS, DEFAULT_TP, default_devices

    axes: dict[str, tuple[Any, ...]] = {"device": default_devices(session.registry)}
    if device:
        axes["device"] = tuple(_device_word(session, word) for word in device)
    axes |= {"tp": DEFAULT_TP, "max_num_seqs": DEFAULT_SEQS, "max_num_batched_tokens": DEFAULT_TOKENS}
    for name, kind in _LISTS.items():
        if given[name] is not None:
            axes[name] = _list("--" + name.replace("_", "-"), given[name], kind)
    if "kv_dtype" in axes:
        axes["kv_dtype"] = tuple(v if v == "auto" else canonical_dtype(v, "--kv-dtype") for v in axes["kv_dtype"])
    for name in ("quantizer", "attention", "scheduler", "kv_cache", "speculator"):
        if given[name]:
            choices = [parse_technique(session, name, text) for text in given[name]]
            axes[name] = tuple(None if choice is None else str(choice) for choice in choices)
    if given["router"]:
        axes["router"] = tuple(str(parse_technique(session, "router", text)) for text in given["router"])
    for name, field in (("host_kv", "host_kv_bytes"), ("host_tier", "host_tier")):
        if given[name] is not None:
            axes[field] = _sizes("--" + name.replace("_", "-"), given[name])
    tried = _tries(tries or ())
    for name in tried:
        if given.get({"host_kv_bytes": "host_kv"}.get(name, name)):
            option = {"quantizer": "--quant", "host_kv_bytes": "--host-kv"}.get(name, "--" + name.replace("_", "-"))
            raise ConfigError(
                "--try", f"{name}={tried[name][0]}", f"{option} says what to try, too", "give one of the two"
            )
    return {**axes, **tried}


def _device_word(session: Session, word: str) -> str:
    """The registered name of a device, or `word` itself where it is a file that no registered one is equal to."""
    from twinfer.core.device import device_files, load_device

    spec = load_device(word, session.registry)
    known = spec.name in device_files(session.registry) and load_device(spec.name, session.registry) == spec
    return spec.name if known else word


def _tries(texts: Sequence[str]) -> dict[str, tuple[Any, ...]]:
    """Values of the `--try` options, by field."""
    from twinfer.core.errors import ConfigError
    from twinfer.simulator.plan_space import NOT_TRIED

    found: dict[str, list[Any]] = {}
    for text in texts:
        name, eq, raw = text.partition("=")
        name = name.strip().replace("-", "_")
        if not eq:
            raise ConfigError("--try", text, "names no value", "write FIELD=VALUE, e.g. memory_fraction=0.95")
        if name in NOT_TRIED:
            raise ConfigError(
                "--try", text, f"{name} is not tried this way", "use the option of that name, if there is one"
            )
        try:
            value = json.loads(raw)
        except (ValueError, RecursionError):
            value = None if raw == "none" else raw
        found.setdefault(name, []).append(value)
    return {name: tuple(values) for name, values in found.items()}


def _sizes(option: str, text: str) -> tuple[int | None, ...]:
    """Bytes, or None, of `none,64GiB`."""
    return tuple(None if word == "none" else parse_size(option, word) for word in _list(option, text, str))


def _list(option: str, text: str, kind: type) -> tuple[Any, ...]:
    from twinfer.core.errors import ConfigError

    values = []
    for part in text.split(","):
        try:
            values.append(kind(part.strip()))
        except ValueError:
            raise ConfigError(
                option, text, f"{part.strip()!r} is not a number", "write numbers between commas"
            ) from None
        if part.strip() == "":
            raise ConfigError(option, text, "a value is missing", "write values between commas")
    return tuple(values)


def question_of(
    model: str, scenario: Scenario, slo: Sequence[str], axes: Mapping[str, tuple[Any, ...]], price: Sequence[str],
    op_time: Sequence[str], max_replicas: int, screen: int, confirm: int, top: int, seeds: int,
) -> Question:  # fmt: skip
    from twinfer.core.goal import parse_goals
    from twinfer.simulator.plan_space import Question

    goals = parse_goals(slo)
    base: dict[str, Any] = {"model": model}
    if op_time:
        base["op_time"] = list(op_time)
        make_config({"model": model, "op_time": tuple(op_time)})
    if scenario.seed is not None:
        base["seed"] = scenario.seed  # as of a run: of what is sampled, too
    workload = scenario.workload()
    if workload.num_requests is None and not (workload.trace or workload.prompts or workload.source):
        workload = workload.model_copy(update={"num_requests": _enough(workload, goals)})
    return Question(
        base=base, axes=axes, workload=workload, goals=goals, prices=_prices(scenario.session, price),
        max_replicas=max_replicas, screen=screen, confirm=confirm, top=top, seeds=seeds,
    )  # fmt: skip


def _enough(workload: Workload, goals: Sequence[Goal]) -> int:
    """Synthetic requests: of a closed loop so many that the burst of its start is less than half of what may be late."""
    if workload.concurrency is None:
        return DEFAULT_REQUESTS
    late = max(0.005, 1 - max(goal.share for goal in goals))
    return max(DEFAULT_REQUESTS, round(2 * workload.concurrency / late))


def _prices(session: Session, texts: Sequence[str]) -> dict[str, float]:
    """Device, as the axes name it -> US$ per hour of `NAME=PRICE`."""
    from twinfer.core.errors import ConfigError

    prices: dict[str, float] = {}
    for text in texts:
        name, eq, raw = text.rpartition("=")
        try:
            value = float(raw)
        except ValueError:
            eq = ""
        if not eq or not name:
            raise ConfigError("--price", text, "is no price of a device", "write DEVICE=USD, e.g. h100-sxm=2.5")
        try:
            device = _device_word(session, name)
        except ConfigError as error:
            raise ConfigError("--price", text, error.problem, error.fix) from None
        if device in prices:
            raise ConfigError("--price", text, f"{device} had a price before", "give each device one price")
        prices[device] = value
    return prices


__all__ = ["DEFAULT_REQUESTS", "axes_of", "question_of"]
