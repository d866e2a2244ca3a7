"""Kits of what changes models and their ops (attention variants, quantizers), and of what times ops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import inf

from twinfer.core.catalog import resolve_spec
from twinfer.core.device import load_device
from twinfer.core.guard import Blaming, adapted_model, adapted_ops, reasons_against
from twinfer.core.op_time import OpTime, host_op
from twinfer.core.spec import ModelSpec
from twinfer.core.technique import Needs
from twinfer.core.work import StepShape, step_ops
from twinfer.plugins.conformance.kit import Kit, require

MODELS = ("smollm2-135m", "llama-3.1-8b", "mixtral-8x7b")
SHAPES = (StepShape.prefill(64), StepShape.decode(64, 65, 700))


class AdaptingKit(Kit):
    """Contract of `adapt_model` and `adapt_ops`, on the models that the technique serves."""

    def served(self) -> Iterator[ModelSpec]:
        """Each as the technique leaves it."""
        technique = self.build()
        for name in MODELS:
            spec = resolve_spec(name)
            if not reasons_against("technique", technique, Needs(world="simulator", device="cuda", model=spec)):
                yield adapted_model("technique", technique, spec)

    def test_models_stay_models(self) -> None:
        require([*self.served()] == [*self.served()], f"{self.technique.name}: equal models are left different")

    def test_steps_stay_steps(self) -> None:
        """A list of ops, the same for equal steps, in which no op that was given comes more often than it did."""
        name = self.technique.name
        for model in self.served():
            for shape in SHAPES:
                given = step_ops(model, shape)
                ops, again = (adapted_ops([self.build()], given, model, shape) for _ in range(2))
                require(list(ops) == list(again), f"{name}: equal steps of {model.name} get different ops")
                before = Counter(given)
                for op, number in Counter(op for op in ops if op in before).items():
                    many = f"{name}: {op.name} of {model.name} comes {number} times; launches are counted by `Op.count`"
                    require(number <= before[op], many)


class OpTimeKit(Kit):
    """Contract of `twinfer.core.op_time.OpTimeModel`."""

    def test_times_are_times(self) -> None:
        """An OpTime of finite seconds, or None; the same for equal ops."""
        name, device, model = self.technique.name, load_device("h100-sxm"), self.build()
        for spec in map(resolve_spec, MODELS):
            for shape in SHAPES:
                for op in (*step_ops(spec, shape), host_op(shape)):
                    what = f"{name}: {op.name} of {spec.name}"
                    with Blaming("op_time_model", model, "time"):
                        time = model.time(op, device)
                    require(time is None or isinstance(time, OpTime), f"{what} gave {time!r}; give an OpTime, or None")
                    require(time == model.time(op, device), f"{what} takes another time when asked again")
                    fine = time is None or (0 <= time.seconds < inf and 0 <= time.sigma < inf)
                    require(fine, f"{what} gave {time!r}; give finite seconds")


__all__ = ["AdaptingKit", "OpTimeKit"]
