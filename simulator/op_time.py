"""The chain of op-time models: asks them in order, remembers answers, and says how each was found.

Invariants
* The first model that answers is used; when none does, the error names the op and what to add.
* An answer that is negative or not a number is the model's fault and is refused.
* What runs beside an op on other units (`Op.beside`) is hidden as far as the op takes: the longer of the two counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING

from twinfer.core.config import Choice
from twinfer.core.errors import ConfigError
from twinfer.core.guard import Blaming, unusable
from twinfer.core.op_time import OpTime, OpTimeModel, host_op, host_op_of
from twinfer.core.work import Op
from twinfer.plugins.op_time.calibrated import calibration_of
from twinfer.plugins.op_time.roofline import Roofline
from twinfer.plugins.op_time.stacks import Stack

if TYPE_CHECKING:
    from twinfer.core.config import EngineConfig
    from twinfer.core.device import DeviceSpec
    from twinfer.core.registry import Registry
    from twinfer.core.spec import ModelSpec

DEFAULT_MODELS = ("calibrated", "roofline")
_KEPT = 1 << 15  # answers


class OpTimeChain:
    """Asks models in order, remembers answers, and can say how each was found."""

    def __init__(self, models: Sequence[OpTimeModel], device: DeviceSpec, model: ModelSpec | None = None) -> None:
        """model: whose ops these are, as its techniques leave it; op-time models may have tables of its format."""
        self.models = tuple(_with_tables_of(model, m) if model else m for m in models)
        self.device = device
        calibration = calibration_of(device)
        self._correction = calibration.correction(model) if calibration is not None else None
        self._known: dict[Op, OpTime] = {}

    def time(self, op: Op) -> OpTime:
        """As `ask`, remembered."""
        known = self._known.get(op)
        if known is None:
            if len(self._known) >= _KEPT:
                self._known.clear()
            known = self._known[op] = self.ask(op)
        return known

    def ask(self, op: Op) -> OpTime:
        """The first answer of the chain; ConfigError when no model has one."""
        if op.beside is not None:
            return _longer(self.ask(replace(op, beside=None)), self.ask(op.beside), op)
        for model in self.models:
            answer = self._answer(model, op)
            if answer is not None:
                if not (0 <= answer.seconds < inf and 0 <= answer.sigma < inf):  # also catches nan
                    raise ConfigError(
                        "--op-time-model", model.name, f"gave {answer.seconds} s +- {answer.sigma} for {op.name}",
                        "report this to the author of the op-time model",
                    )  # fmt: skip
                return answer if self._correction is None else self._corrected(op, answer)
        names = ", ".join(m.name for m in self.models) or "none"
        raise ConfigError(
            "--op-time-model", names, f"no model can time {op.name} ({op.kind}, {op.dtype}) on {self.device.name}",
            "add roofline, or give the device file the missing numbers",
        )  # fmt: skip

    def answering(self, op: Op) -> str:
        """The model that answers, by name; empty when none does."""
        return next((model.name for model in self.models if self._answer(model, op) is not None), "")

    def _answer(self, model: OpTimeModel, op: Op) -> OpTime | None:
        with Blaming("op_time_model", model, "time"):
            answer = model.time(op, self.device)
        if not isinstance(answer, OpTime | None):
            raise unusable("op_time_model", model, "time", answer, "an OpTime, or None where it cannot say")
        return answer

    def _corrected(self, op: Op, answer: OpTime) -> OpTime:
        """`answer` as real runs of this format have corrected it (`twinfer calibrate --from`)."""
        found = self._correction
        factor = found.factor(op.name, answer.seconds) if found is not None else None
        if found is None or factor is None:
            return answer
        seconds = answer.seconds * factor
        spread = found.spreads.get(op.name if op.name in found.factors else "*", 0.1)
        detail = f"{answer.detail}; x {factor:.3f} by {found.source}"
        return OpTime(seconds, spread * seconds, f"{answer.source}, corrected", detail)

    def explain(self, op: Op) -> list[str]:
        """One line per model: its answer, or that it passed; the first answer is the one used."""
        lines = []
        for model in self.models:
            answer = self._answer(model, op)
            if answer is None:
                lines.append(f"{model.name}: cannot say")
                continue
            us, spread = answer.seconds * 1e6, answer.sigma * 1e6
            lines.append(f"{model.name}: {us:.1f} us +- {spread:.1f} us, {answer.source}; {answer.detail}")
        if self._correction is not None:
            answer = self.time(op)
            lines.append(f"used: {answer.seconds * 1e6:.1f} us +- {answer.sigma * 1e6:.1f} us, {answer.source}")
        if op.beside is not None:
            lines += [f"beside it, {op.beside.name}: {line}" for line in self.explain(op.beside)]
        return lines


def _with_tables_of(model: ModelSpec, asked: OpTimeModel) -> OpTimeModel:
    """`asked` with tables of the format of `model`, if it has such."""
    with Blaming("op_time_model", asked, "for_model"):
        found: OpTimeModel = asked.for_model(model) if hasattr(asked, "for_model") else asked
    return found


def _longer(a: OpTime, b: OpTime, op: Op) -> OpTime:
    """Time of `op`, which takes `a` while what is beside it takes `b`."""
    if a.seconds >= b.seconds:
        return replace(a, detail=f"{a.detail}; hides {op.beside.name if op.beside else ''}")
    return replace(b, detail=f"{b.detail}; {op.name} is hidden")


def build_chain(
    names: Sequence[str], device: DeviceSpec, registry: Registry, model: ModelSpec | None = None
) -> OpTimeChain:
    """The chain of op-time plugins `names` (with options, `name:option=value`), by default
    calibrated, then roofline. model: whose ops will be asked for."""
    models = [registry.build("op_time_model", Choice.model_validate(name)) for name in names or DEFAULT_MODELS]
    return OpTimeChain(models, device, model)


def host_words(config: EngineConfig, device: DeviceSpec, chain: OpTimeChain) -> str:
    """What the CPU's part of a step on a GPU is taken to be, where that rests on the device file alone; else empty.

    Engines differ more in it than GPUs differ from their files, so it has to be said (docs/fidelity.md has the figures).
    """
    if device.kind != "gpu" or device.calibration or not device.efficiency or config.max_outstanding > 1:
        return ""
    rows = min(64, config.max_num_seqs)
    op, stack = host_op_of(rows, rows, rows), Stack()
    if chain.answering(op) != Roofline.name:
        return ""
    answer = chain.time(op)
    return (
        f"a step of {rows} rows waits {answer.seconds * 1e3:.2g} ms for the CPU, as in a lean engine; a stack that plans and "
        f"prepares each step after the last takes about {(stack.host_step + stack.host_row * rows) * 1e3:.2g} ms "
        "(--op-time-model silicon --op-time-model roofline), one that overlaps them none (--max-outstanding 2)"
    )


__all__ = ["DEFAULT_MODELS", "OpTime", "OpTimeChain", "OpTimeModel", "build_chain", "host_op", "host_words"]
