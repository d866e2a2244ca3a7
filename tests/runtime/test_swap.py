"""Swap to host with real tensors: blocks come back bit for bit, in the order that plans promise, and records say so."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from twinfer.core.config import EngineConfig
from twinfer.core.errors import ConfigError
from twinfer.core.plan import Copy, Fork, Grant, StepPlan, Swap
from twinfer.core.request import Request
from twinfer.core.runtime.executor import TorchExecutor
from twinfer.core.runtime.host_storage import HostStorage
from twinfer.core.runtime.kv_storage import KVStorage
from twinfer.core.runtime.loading import load_engine, torch_executor
from twinfer.core.runtime.run import run_engine
from twinfer.core.workload import Workload


@pytest.mark.parametrize("value_dim", [6, 4, 0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_come_back_bit_for_bit(dtype: torch.dtype, value_dim: int) -> None:
    kv = KVStorage(3, 8, 4, 2, 6, dtype, value_dim=value_dim)
    host = HostStorage(kv, 5)
    for tensor in kv.block_tensors:
        tensor.copy_(torch.randn(tensor.shape))
    before = [tensor.clone() for tensor in kv.block_tensors]
    host.swap_out([Swap("a", 0, (6, 1), (4, 0)), Swap("b", 0, (3,), (2,))])
    for tensor in kv.block_tensors:
        tensor.zero_()
    host.swap_in([Swap("b", 0, (0,), (2,)), Swap("a", 0, (7, 2), (4, 0))])
    for tensor, old in zip(kv.block_tensors, before, strict=True):
        for now, then in ((0, 3), (7, 6), (2, 1)):
            assert torch.equal(tensor[:, now], old[:, then])
        assert not tensor[:, [1, 3, 4, 5, 6]].any()
    assert host.nbytes == 5 * kv.nbytes // 8


def test_no_host_blocks_take_no_memory() -> None:
    assert HostStorage(KVStorage(1, 4, 4, 1, 4), 0).nbytes == 0


@pytest.fixture
def executor(tiny_llama_dir: Path) -> TorchExecutor:
    config = EngineConfig(
        model=str(tiny_llama_dir), max_model_len=32, num_kv_blocks=8, kv_cache="paged:block_size=4",
        preemption="swap", host_kv_bytes=2**16,
    )  # fmt: skip
    engine = load_engine(config)
    made = torch_executor(engine.setup, engine.registry, engine.model)
    for name in ("a", "b", "c"):
        made.admit(Request(id=name, prompt=(1, 2, 3)), ((name, 0),))
    return made


def contents(executor: TorchExecutor, block: int) -> float:
    return float(executor.kv.block_tensors[0][0, block, 0, 0, 0])


def test_a_plan_is_applied_in_its_order(executor: TorchExecutor) -> None:
    """Block 0 is swapped out, granted anew, copied to, and swapped into, all in one step: each sees what it should."""
    executor.execute(StepPlan(0, (), grants=(Grant("a", 0, (0, 1)), Grant("b", 0, (2,)))))
    for block in range(8):
        executor.kv.block_tensors[0][:, block] = 10.0 + block
    plan = StepPlan(
        1, (), preempted=("a",), forks=(Fork("c", "a"),), swap_outs=(Swap("a", 0, (0,), (1,)),),
        grants=(Grant("b", 0, (0, 3)),), copies=(Copy("b", 0, 0, 2, 0),), swap_ins=(Swap("b", 0, (3,), (1,)),),
    )  # fmt: skip
    executor.execute(plan)
    assert executor._states["c"].table.blocks == [0, 1], "forked before its parent's table was emptied"
    assert executor._states["a"].table.blocks == []
    assert executor._states["b"].table.blocks == [0, 0, 3]
    assert contents(executor, 0) == 12.0, "the copy came after the swap-out had read the block"
    assert contents(executor, 3) == 10.0, "the swap-in brought what block 0 held before the step"


def test_a_record_says_what_was_swapped(tiny_llama_dir: Path) -> None:
    config = EngineConfig(
        model=str(tiny_llama_dir), max_model_len=48, num_kv_blocks=14, preemption="swap", host_kv_bytes=2**20,
        kv_cache="paged:block_size=4,headroom=0,prefix_sharing=false",
    )  # fmt: skip
    record = run_engine(config, Workload(num_requests=6, input_len=16, output_len=24, beam_width=1))
    assert record.metrics["num_swaps"] == record.metrics["num_preemptions"] > 0
    out, back = (sum(getattr(s, name) for s in record.steps) for name in ("swapped_out_blocks", "swapped_in_blocks"))
    assert out == back > 0
    assert all(("kv_swap" in s.ops) == bool(s.swapped_out_blocks or s.swapped_in_blocks) for s in record.steps)
    assert record.metrics["num_completed"] == 6


def test_more_host_memory_than_the_machine_has_is_refused(tiny_llama_dir: Path) -> None:
    config = EngineConfig(model=str(tiny_llama_dir), preemption="swap", host_kv_bytes=2**50)
    with pytest.raises(ConfigError, match="host-kv-bytes"):
        load_engine(config)
