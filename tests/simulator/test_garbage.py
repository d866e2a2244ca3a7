"""The collector of cyclic garbage is as it was once no simulation runs any more, and finds nothing in one."""

from __future__ import annotations

import gc

import pytest
import simpy

from twinfer.core.catalog import resolve_spec
from twinfer.core.config import EngineConfig
from twinfer.core.device import load_device
from twinfer.core.provision import provision
from twinfer.core.recorder import Recorder
from twinfer.core.registry import default_registry
from twinfer.core.work import step_ops
from twinfer.core.workload import Workload, generate
from twinfer.simulator.driver import SimInbox, arrivals, engine
from twinfer.simulator.executor import CostExecutor
from twinfer.simulator.garbage import RARELY, collected_rarely
from twinfer.simulator.op_time import build_chain
from twinfer.simulator.step_time import StepTimer


def test_it_is_as_before_after_the_last_of_overlapping_runs() -> None:
    before = gc.get_threshold()
    with collected_rarely():
        assert gc.get_threshold() == RARELY
        with pytest.raises(RuntimeError), collected_rarely():
            raise RuntimeError
        assert gc.get_threshold() == RARELY
    assert gc.get_threshold() == before


def test_who_has_turned_it_off_finds_it_off() -> None:
    before = gc.get_threshold()
    gc.set_threshold(0)
    try:
        with collected_rarely():
            assert gc.get_threshold()[0] == 0
        assert gc.get_threshold()[0] == 0
    finally:
        gc.set_threshold(*before)


@pytest.mark.parametrize("skip", [True, False], ids=["skipping", "stepping"])
@pytest.mark.parametrize("num_kv_blocks", [1000, 12], ids=["room", "preemption"])
def test_steps_and_requests_leave_no_cycles_behind(skip: bool, num_kv_blocks: int) -> None:
    registry = default_registry()
    spec, device = resolve_spec("llama-3.1-8b"), load_device("h100-sxm", registry)
    config = EngineConfig(model="llama-3.1-8b", device="h100-sxm", num_kv_blocks=num_kv_blocks, max_model_len=128)
    setup = provision(config, spec, registry, device, world="simulator")
    timer = StepTimer(lambda shape: step_ops(spec, shape), build_chain((), device, registry))
    requests = generate(
        Workload(num_requests=200, input_len=40, output_len=30, rate=200.0), spec.vocab_size, 128, registry=registry
    )
    env, core, recorder = simpy.Environment(), setup.build_core(), Recorder("simulator", {}, {}, 1.0)
    inbox = SimInbox(env)
    env.process(arrivals(env, inbox, requests))
    env.process(engine(env, core, CostExecutor(timer), inbox, recorder, skip=skip))
    env.run(0.1)
    gc.collect()
    gc.disable()
    try:
        env.run()
        left = gc.collect()
    finally:
        gc.enable()
    record = recorder.finish()
    assert record.metrics["num_completed"] == 200 and not core.has_work
    assert (record.metrics["num_preemptions"] > 0) == (num_kv_blocks == 12)
    assert left < 50, f"{left} objects in cycles"
