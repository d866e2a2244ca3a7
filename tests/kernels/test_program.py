"""Recorded programs: the same numbers as the calls they are made of, and nothing recorded that would be left out."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from ctypes import c_int64, c_void_p

import pytest
import torch
from torch import Tensor

from twinfer.kernels import native, ops
from twinfer.kernels.native.program import Program

Mark = Callable[[str], None]


def chain(x: Tensor, weight: Tensor, mark: Mark) -> Tensor:
    """A few kernels whose intermediate results die early, with views in between."""
    residual = ops.take_rows(x, IDS)
    h = ops.rms_norm(residual, weight, 1e-5)
    mark("norms")
    for _ in range(3):
        wide = ops.take_rows(h.view(-1, h.shape[1] // 2), PAIRS).view(h.shape[0], -1)
        h = ops.gated(wide, "silu")
        mark("mlp_act")
        h = ops.add_rms_norm(residual, h, weight, 1e-5)
        mark("norms")
    return h


IDS = torch.tensor([2, 0, 3])
PAIRS = torch.tensor([i for row in range(3) for i in (2 * row, 2 * row + 1) * 2])


def test_repeats_with_new_inputs() -> None:
    x, weight = torch.randn(4, 64), torch.randn(64)
    program, out = Program.record(lambda mark: chain(x, weight, mark))
    assert program.refusal == ""
    assert torch.equal(out, chain(x, weight, lambda op: None))
    for _ in range(3):
        x.copy_(torch.randn(4, 64))
        expected = chain(x, weight, lambda op: None)
        noise = [torch.full((3, 64), float("nan")) for _ in range(50)]  # whatever memory was freed is used again
        program.run()
        assert torch.equal(out, expected)
        del noise


def test_buffers_are_shared_by_results_that_never_meet() -> None:
    x, weight = torch.randn(4, 64), torch.randn(64)
    program, _ = Program.record(lambda mark: chain(x, weight, mark))
    gc.collect()
    assert sum(len(free) for free in program._buffers.values()) <= 5, "ten results, of which few live at a time"


def test_a_view_keeps_its_buffer() -> None:
    x, weight = torch.randn(4, 64), torch.randn(64)

    def function(mark: Mark) -> Tensor:
        view = ops.rms_norm(x, weight, 1e-5).view(8, 32)  # the whole dies here
        ops.rms_norm(x, weight, 1.0)  # must not take its memory
        return view

    program, out = Program.record(function)
    program.run()
    assert torch.equal(out.view(4, 64), ops.rms_norm(x, weight, 1e-5))


def test_marks_are_times() -> None:
    x, weight = torch.randn(4, 64), torch.randn(64)
    program, _ = Program.record(lambda mark: chain(x, weight, mark))
    program.run()
    assert program.marks == ["norms"] + ["mlp_act", "norms"] * 3
    seconds = program.seconds()
    assert list(seconds) == ["norms", "mlp_act"]
    assert all(0 < took < 1 for took in seconds.values())


@pytest.mark.parametrize(
    ("what", "op"),
    [
        (lambda x: x + 1, "aten.add.Tensor"),
        (lambda x: x.add_(1), "aten.add_.Tensor"),
        (lambda x: torch.empty(3), "aten.empty.memory_format"),
        (lambda x: x.double(), "aten.to.dtype"),
        (lambda x: x.t().reshape(-1), "aten.reshape.default"),
        (lambda x: x.sum().item(), "aten.sum.default"),
    ],
)
def test_what_torch_computes_refuses_the_recording(what: Callable[[Tensor], object], op: str) -> None:
    x, weight = torch.randn(4, 64), torch.randn(64)

    def function(mark: Mark) -> Tensor:
        what(x)
        return ops.rms_norm(x, weight, 1e-5)

    with torch.inference_mode():
        program, out = Program.record(function)
    assert program.refusal == op
    assert torch.equal(out, ops.rms_norm(x, weight, 1e-5)), "the pass itself is done"


def test_a_kernel_that_cannot_be_recorded_refuses() -> None:
    library = native.load()
    assert library is not None
    program, _ = Program.record(lambda mark: library.function("tw_run", (c_void_p, c_int64))(0, 0) or IDS)
    assert program.refusal == "tw_run"


def test_calls_of_another_thread_are_not_recorded() -> None:
    x, weight = torch.randn(4, 64), torch.randn(64)

    def function(mark: Mark) -> Tensor:
        out = ops.rms_norm(x, weight, 1e-5)
        other = threading.Thread(target=lambda: ops.rms_norm(x + 1, weight, 1e-5))
        other.start()
        other.join()
        return out

    program, _ = Program.record(function)
    assert program.refusal == ""
    assert len(program._table) == 2  # the first stamp and one kernel
