"""Power and energy of a device from how busy it is.

    P = TDP * (0.3 + 0.4 compute + 0.2 memory + 0.1 network)

Each share is a utilisation in [0, 1] of the peak, over the time in question; an idle device draws 30 % of its TDP.
Source: GenZ (Bambhaniya et al. 2024, arXiv:2406.01698), whose split of the TDP this is. It is a split of the
accelerator's own rating: hosts, switches and cooling are not in it.

Invariants
* Between 30 % and 100 % of the TDP, and monotone in every share.
* A device whose TDP is not known has no power: None, never 0.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from twinfer.core.work import Op
from twinfer.simulator.op_time import OpTimeChain, host_op

if TYPE_CHECKING:
    from twinfer.core.device import DeviceSpec
    from twinfer.core.work import StepShape

IDLE, COMPUTE, MEMORY, NETWORK = 0.3, 0.4, 0.2, 0.1


@dataclass(frozen=True, slots=True)
class Utilisation:
    """Shares of the device's peaks in [0, 1]: FLOP/s, memory bandwidth, and the time that its link is in use."""

    compute: float = 0.0
    memory: float = 0.0
    network: float = 0.0

    def scaled(self, share: float) -> Utilisation:
        """The same work over a longer time, of which it fills `share`."""
        return Utilisation(self.compute * share, self.memory * share, self.network * share)


def power_watts(device: DeviceSpec, used: Utilisation) -> float | None:
    """Watts that one device draws on average; None when its TDP is not known."""
    if device.tdp_watts is None:
        return None
    share = IDLE
    for weight, value in ((COMPUTE, used.compute), (MEMORY, used.memory), (NETWORK, used.network)):
        share += weight * min(1.0, max(0.0, value))
    return device.tdp_watts * share


def joules_per_token(watts: float | None, devices: int, tokens_per_second: float) -> float | None:
    """Energy of one output token of a fleet of `devices`; None when power is not known or nothing was made."""
    if watts is None or tokens_per_second <= 0:
        return None
    return watts * devices / tokens_per_second


@dataclass(frozen=True, slots=True)
class StepParts:
    """Where a step's time goes: seconds by what bounds them, and the utilisation while it runs.

    compute, memory: ops nearer to that roof; network: collectives; host: the CPU's part.
    """

    seconds: float
    compute: float
    memory: float
    network: float
    host: float
    used: Utilisation

    def largest(self) -> str:
        parts = {"compute": self.compute, "memory": self.memory, "network": self.network, "host": self.host}
        return max(parts, key=lambda name: parts[name])


def step_parts(
    ops: Iterable[Op], shape: StepShape, chain: OpTimeChain, more: Iterable[tuple[OpTimeChain, Op]] = ()
) -> StepParts:
    """Take the step of `ops` apart on the chain's device; `seconds` is the sum of its parts.

    more: ops beside, with what knows their times (what a speculator drafts with).
    """
    device = chain.device
    sums = {"compute": 0.0, "memory": 0.0, "network": 0.0, "host": 0.0}
    busy_compute = busy_memory = 0.0
    for times, op in (*((chain, op) for op in (*ops, host_op(shape))), *more):
        seconds = times.time(op).seconds * op.count
        if op.kind == "host":
            sums["host"] += seconds
            continue
        if op.kind in ("comm", "host_copy"):
            sums["network"] += seconds
            continue
        peak = device.peak_flops.get(op.dtype) or device.peak_flops.get("bfloat16") or max(device.peak_flops.values())
        compute, memory = op.flops * op.count / peak, op.bytes * op.count / device.memory_bandwidth
        busy_compute += compute
        busy_memory += memory
        sums["compute" if compute > memory else "memory"] += seconds
    total = sum(sums.values())
    used = Utilisation(busy_compute / total, busy_memory / total, sums["network"] / total) if total else Utilisation()
    return StepParts(total, **sums, used=used)


__all__ = ["StepParts", "Utilisation", "joules_per_token", "power_watts", "step_parts"]
