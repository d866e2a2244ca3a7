"""How long one op takes: the contract of op-time models.

Invariants
* Times are seconds of *one launch* of an op; `Op.count` launches are multiplied by the caller.
* `sigma` is the standard deviation of the prediction's error, not of the machine's jitter. Errors of
  one source are taken as fully correlated: they do not shrink by being summed over many steps.
* A model that does not know an op or a device answers None and the next one is asked. It never
  extrapolates in silence: `source` and `detail` say where a number comes from.
* Models are pure: equal op and device give equal answers, so the caller may remember them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from twinfer.core.work import Op, StepShape

if TYPE_CHECKING:
    from twinfer.core.device import DeviceSpec


@dataclass(frozen=True, slots=True)
class OpTime:
    """Seconds of one launch with their standard deviation.

    source: the rule that gave it (`measured`, `interpolated`, `transferred`, `fitted`, `analytic`,
    `upper bound`).  detail: words and numbers for a person who asks why.
    """

    seconds: float
    sigma: float
    source: str
    detail: str = ""


@runtime_checkable
class OpTimeModel(Protocol):
    """Contract of op-time plugins (beside `Technique`'s attributes).

    Besides the kinds that `core.work` lists, models are asked for one op of kind `host` per step.
    """

    @property
    def name(self) -> str: ...

    def time(self, op: Op, device: DeviceSpec) -> OpTime | None:
        """Time of one launch of `op` on `device`, None when this model cannot say."""
        ...


def host_op(shape: StepShape) -> Op:
    """The CPU's part of a step (scheduling, preparing, sampling) as an op: shape = (rows, tokens, logits)."""
    return host_op_of(len(shape.rows), shape.num_tokens, shape.num_logits)


def host_op_of(rows: int, tokens: int, logits: int) -> Op:
    """`host_op` of a step with so many of each."""
    return Op("host", "host", 0.0, 0.0, 0.0, "", shape=(rows, tokens, logits))
