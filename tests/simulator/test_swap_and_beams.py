"""The cost of swapping to host memory and of beam search in a prediction."""

from __future__ import annotations

from typing import Any

import pytest

from twinfer.core.catalog import resolve_spec
from twinfer.core.config import EngineConfig
from twinfer.core.device import load_device
from twinfer.core.errors import ConfigError
from twinfer.core.params import SamplingParams
from twinfer.core.plan import Need, PlanStats, Row, StepPlan, Swap
from twinfer.core.records import RunRecord
from twinfer.core.registry import Registry
from twinfer.core.request import Request
from twinfer.core.work import StepShape, step_ops
from twinfer.core.workload import Workload
from twinfer.simulator.executor import CostExecutor
from twinfer.simulator.op_time import build_chain
from twinfer.simulator.run import simulate
from twinfer.simulator.step_time import StepTimer

REGISTRY = Registry(entry_points=False)
H100 = load_device("h100-sxm", REGISTRY)
SPEC = resolve_spec("llama-3.1-8b")
TIGHT = {"max_model_len": 400, "num_kv_blocks": 60, "max_num_seqs": 16}
CROWD = Workload(num_requests=40, input_len=200, output_len=150, lengths="uniform", spread=0.9)


def predicted(workload: Workload, **config: Any) -> RunRecord:
    return simulate(EngineConfig(**({"model": "llama-3.1-8b", "device": "h100-sxm"} | config)), workload, REGISTRY)


def timer(device: Any = H100) -> StepTimer:
    return StepTimer(lambda shape: step_ops(SPEC, shape), build_chain((), device, REGISTRY))


def test_a_swap_takes_its_bytes_over_the_host_link() -> None:
    shape = StepShape.decode(100)
    moved = StepShape(shape.rows, shape.num_logits, 0, 1600)
    more = timer().exact(moved).seconds - timer().exact(shape).seconds
    assert H100.host_link_bandwidth is not None
    assert more == pytest.approx(1600 * SPEC.kv_bytes_per_token() / H100.host_link_bandwidth)
    assert timer().exact(moved).ops["kv_swap"] == pytest.approx(more)


def test_a_plan_is_charged_for_blocks_in_both_directions() -> None:
    row = Row("a", 99, (1,), 0, Need.LAST, 0)
    stats = PlanStats(1, 0, 0, 0, 9, 0, 16)
    plan = StepPlan(
        0, (row,), stats=stats, swap_outs=(Swap("b", 0, (1, 2), (0, 1)),), swap_ins=(Swap("a", 0, (3,), (2,)),)
    )
    assert StepShape.of(plan).swapped_slots == 48
    assert timer().cost(plan).ops["kv_swap"] == pytest.approx(timer().exact(StepShape.of(plan)).ops["kv_swap"])


def test_on_a_cpu_swapping_is_a_copy_within_memory() -> None:
    cpu = load_device("cpu", REGISTRY)
    shape = StepShape(StepShape.decode(100).rows, 1, 1600, 1600)
    ops = timer(cpu).exact(shape).ops
    assert ops["kv_swap"] == pytest.approx(ops["kv_copy"], rel=0.05)


def test_a_gpu_without_a_host_link_says_so() -> None:
    unknown = H100.model_copy(update={"host_link_bandwidth": None})
    with pytest.raises(ConfigError, match="host_link_bandwidth"):
        timer(unknown).exact(StepShape(StepShape.decode(9).rows, 1, 0, 16))


def test_every_gpu_of_the_catalogue_has_a_host_link_with_its_source() -> None:
    from twinfer.core.device import all_devices

    for device in all_devices(REGISTRY):
        if device.kind == "gpu":
            assert device.host_link_bandwidth and device.host_link and device.host_link_source, device.name


def test_swapping_saves_the_tokens_that_would_be_computed_again() -> None:
    recomputed = predicted(CROWD, **TIGHT)
    swapped = predicted(CROWD, **TIGHT, preemption="swap", host_kv_bytes=2**32)
    assert recomputed.metrics["num_swaps"] == 0 < recomputed.metrics["num_preemptions"]
    assert swapped.metrics["num_swaps"] == swapped.metrics["num_preemptions"] > 0
    assert sum(s.num_tokens for s in swapped.steps) < sum(s.num_tokens for s in recomputed.steps)
    out, back = (sum(getattr(s, name) for s in swapped.steps) for name in ("swapped_out_blocks", "swapped_in_blocks"))
    assert out >= back > 0
    assert any("kv_swap" in s.ops for s in swapped.steps) and not any("kv_swap" in s.ops for s in recomputed.steps)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"preemption": "swap"}, "host-kv-bytes"),
        ({"host_kv_bytes": 2**30}, "preemption swap"),
        ({"preemption": "swap", "host_kv_bytes": 1000}, "one KV block"),
    ],
)
def test_half_asked_swapping_is_refused_in_words(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        predicted(CROWD, **options)


def test_beams_cost_rows_and_copies() -> None:
    plain = predicted(Workload(num_requests=2, input_len=100, output_len=30))
    beams = predicted(Workload(num_requests=2, input_len=100, output_len=30, beam_width=4))
    assert max(s.num_rows for s in plain.steps) == 2 and max(s.num_rows for s in beams.steps) == 8
    assert len(beams.requests) == 8 and {r.num_output_tokens for r in beams.requests} == {30}
    assert any("kv_copy" in s.ops for s in beams.steps)
    assert beams.metrics["duration"] > plain.metrics["duration"]
    assert beams.metrics["tpot"] is None, "all tokens come at the end"
    peak = max(s.held_blocks for s in beams.steps)
    assert peak < 8 * 9, "the beams of a request share its prompt"


def test_beams_are_predicted_the_same_every_time() -> None:
    workload = Workload(num_requests=5, rate=5.0, input_len=60, output_len=20, beam_width=3)
    a, b = predicted(workload), predicted(workload)
    assert (a.steps, a.requests, a.metrics) == (b.steps, b.requests, b.metrics)


def test_stop_ids_among_the_made_up_candidates_are_refused() -> None:
    executor = CostExecutor(timer())
    params = SamplingParams(beam_width=2, stop_token_ids=(3,), ignore_eos=True)
    with pytest.raises(ConfigError, match="no text"):
        executor.admit(Request(id="a", prompt=(1,), params=params), (("a", 0), ("a/1", 1)))


@pytest.mark.parametrize("options", [{"beam_width": 0}, {"beam_width": 3, "temperature": 0.5}])
def test_a_workload_refuses_what_beams_cannot(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="beam-width"):
        Workload(num_requests=1, **options)
