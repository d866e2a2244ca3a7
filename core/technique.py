"""What every plugin technique declares, whatever its kind.

From a declaration alone the CLI flags, the dashboard controls, the docs table, the simulation and the
conformance tests are generated, so it must be complete: a name, one line of summary, a reference,
a pydantic `Options` model, reasons why it cannot serve a need, its real implementation and its work.

Invariants
* A declaration is a class; an instance is the technique with its options chosen.
* Importing the module of a technique imports no torch: real implementations import inside `build`.
* `why_not` returns *all* the reasons, in words a user can act on; an empty list means it can serve.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

if TYPE_CHECKING:
    from twinfer.core.spec import ModelSpec
    from twinfer.core.work import Op, StepShape

KINDS = (
    "attention", "kv_cache", "quantizer", "speculator", "scheduler", "router", "model_family",
    "device", "op_time_model", "workload", "dashboard_page", "cli_command", "http_route",
)  # fmt: skip


class Checked(BaseModel):
    """A model that takes no truth value for a number, where pydantic would read True as 1."""

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        kind = cls.model_fields[info.field_name or ""].annotation
        kinds = {kind, *get_args(kind)}
        if isinstance(value, bool) and kinds & {int, float} and bool not in kinds:
            raise ValueError("is a truth value, a number belongs there")
        return value


class Options(Checked):
    """Base of every technique's options: frozen, and unknown names are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """A situation a technique is asked about.

    world: "engine" (real weights) or "simulator".  device: "cpu", "cuda" or a device spec's name.
    dtype: activation dtype.  model: the spec, when one is chosen.
    """

    world: str = "engine"
    device: str = "cpu"
    dtype: str = "float32"
    model: ModelSpec | None = None


class Technique:
    """Base class of techniques; third parties may subclass it or provide the same attributes."""

    name: ClassVar[str]
    summary: ClassVar[str]
    reference: ClassVar[str] = ""
    Options: ClassVar[type[BaseModel]] = Options

    def __init__(self, options: Any = None) -> None:
        self.options: Any = options if options is not None else type(self).Options()

    @classmethod
    def why_not(cls, needs: Needs) -> list[str]:
        """Reasons why this technique cannot serve `needs`; empty when it can."""
        return []

    def adapt_model(self, model: ModelSpec) -> ModelSpec:
        """The model as this technique leaves it: shapes, KV heads, weight and KV formats."""
        return model

    def adapt_ops(self, ops: Sequence[Op], model: ModelSpec, shape: StepShape) -> Sequence[Op]:
        """The work of one step as this technique leaves it (added, removed or changed ops)."""
        return ops
