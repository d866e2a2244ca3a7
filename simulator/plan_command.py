"""The `twinfer simulate` command that repeats the run whose times a plan tells of a fleet.

Invariants
* It has what differs from the defaults of `simulate`, which are not those of a search, and nothing else.
* Its seed is that of the draw that came nearest to a limit, its requests are as many as that was looked at with.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from twinfer.core.workload import DEFAULT_NUM_REQUESTS
from twinfer.simulator.plan_designs import ROUND_ROBIN, Design
from twinfer.simulator.plan_search import Found
from twinfer.simulator.plan_space import Question
from twinfer.simulator.plan_traffic import Traffic

_OPTIONS = {"quantizer": "--quant", "op_time": "--op-time-model", "num_requests": "--requests", "prompts": "--prompt", "source": "--workload"}  # fmt: skip
"""Options that are not named after their field."""


def command_of(found: Found, question: Question, traffic: Traffic) -> str:
    """The command for the fleet of `found`, which must have one; "" for prompts that were given as tokens, which no command takes.

    It runs all of the traffic, of which the plan may have seen the busiest part, and in a closed loop leaves clients free to
    be sent to another replica than before.
    """
    design, outcome, workload = found.design, found.outcome, question.workload
    assert design is not None and design.config is not None and outcome is not None
    if workload.prompt_tokens:
        return ""
    drawn = traffic.drawn(outcome.seed)
    shorter = max(r.max_length for r in drawn) < traffic.longest  # than another draw, for which the fleet had room, too
    config = traffic.fitted(design.config) if shorter else design.config
    changes: dict[str, Any] = {"seed": workload.seed + outcome.seed}
    times = math.ceil(outcome.num_requests / len(drawn))
    if times > 1:
        changes["num_requests"] = times * (workload.num_requests or DEFAULT_NUM_REQUESTS)
    words = ["twinfer", "simulate", *_changed(config, "seed"), *_fleet(design, found.replicas)]
    return shlex.join([*words, *_changed(workload.model_copy(update=changes))])


def _changed(model: BaseModel, *without: str) -> Iterator[str]:
    """Options and values of the fields of `model` that are not at their defaults."""
    for name, info in type(model).model_fields.items():
        value = getattr(model, name)
        if name in without or value == info.default:
            continue
        for each in value if isinstance(value, tuple) else (value,):
            yield _OPTIONS.get(name, "--" + name.replace("_", "-"))
            yield f"{each:.0f}" if isinstance(each, float) and each.is_integer() else str(each)


def _fleet(design: Design, replicas: int) -> Iterator[str]:
    prefill, decode = design.pools
    if decode:
        yield from ("--prefill-replicas", str(replicas * prefill), "--decode-replicas", str(replicas * decode))
    elif replicas > 1 or not design.simple:
        yield from ("--replicas", str(replicas))
    if design.router != ROUND_ROBIN:
        yield from ("--router", design.router)
    if design.host_tier is not None:
        yield from ("--host-tier-bytes", str(design.host_tier))


__all__ = ["command_of"]
