"""Power: ends and monotony of the formula; the parts of a step sum to its time."""

from __future__ import annotations

import pytest

from twinfer.core.catalog import resolve_spec
from twinfer.core.device import load_device
from twinfer.core.registry import Registry
from twinfer.core.work import StepShape, step_ops
from twinfer.simulator.energy import Utilisation, joules_per_token, power_watts, step_parts
from twinfer.simulator.op_time import build_chain
from twinfer.simulator.step_time import StepTimer

REGISTRY = Registry(entry_points=False)
H100 = load_device("h100-sxm", REGISTRY)


def test_power_goes_from_idle_to_the_rating() -> None:
    assert H100.tdp_watts == 700
    assert power_watts(H100, Utilisation()) == pytest.approx(210)
    assert power_watts(H100, Utilisation(1, 1, 1)) == pytest.approx(700)
    assert power_watts(H100, Utilisation(9, 9, 9)) == pytest.approx(700)
    assert power_watts(H100, Utilisation(compute=0.5)) == pytest.approx(700 * 0.5)


def test_a_device_without_a_rating_has_no_power() -> None:
    unrated = H100.model_copy(update={"tdp_watts": None})
    assert power_watts(unrated, Utilisation(1, 1, 1)) is None
    assert joules_per_token(None, 8, 100.0) is None and joules_per_token(350.0, 8, 0.0) is None
    assert joules_per_token(350.0, 8, 100.0) == pytest.approx(28.0)


def test_a_step_is_taken_apart_without_loss_and_named_by_what_bounds_it() -> None:
    spec = resolve_spec("llama-3.1-8b")
    chain = build_chain(("roofline",), H100, REGISTRY)
    decode, prefill = StepShape.decode(*[2000] * 16), StepShape.prefill(4096)
    for shape, bound in ((decode, "memory"), (prefill, "compute")):
        parts = step_parts(step_ops(spec, shape), shape, chain)
        timed = StepTimer(lambda s: step_ops(spec, s), chain).exact(shape).seconds
        assert parts.seconds == pytest.approx(timed)
        assert parts.compute + parts.memory + parts.network + parts.host == pytest.approx(parts.seconds)
        assert parts.largest() == bound
        assert 0 < parts.used.compute <= 1 and 0 < parts.used.memory <= 1 and parts.used.network == 0
    assert step_parts(step_ops(spec, decode, 8), decode, chain).network > 0
