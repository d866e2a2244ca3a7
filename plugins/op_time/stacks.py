"""What serving stacks do in one kernel that an op list counts as several, and what the measured tables hold.

    gemm in FP8       every table was measured from 16-bit inputs, so it holds the kernel that narrows them; a stack that
                      narrows inside the kernel before (a norm, an activation, attention) saves that kernel; TensorRT-LLM's
                      also holds one that finds the scale first, for its layers were made without one (`dynamic`)
    norms, ...        streaming kernels: bytes at the bandwidth, and per launch the least that a measured kernel takes
    host              1.5 ms for a step of few rows, 7 ms for one of 128
    rope_kv_write     two launches, or part of the measured attention; with norms of queries and keys two more, or one

Sources, read 2026-11: the collectors that made the tables (aiconfigurator, `collector/<stack>/collect_gemm.py`:
`RowParallelLinear.forward` and `Linear.forward` on bfloat16, in CUDA graphs; weights of `collector/trtllm` come without
`input_scale`, those of `collector/vllm` are `activation_scheme="static"`; `collect_computescale.py` timed it alone; `collect_attn.py`: queries, keys and
values come after rotation, TensorRT-LLM's with rotation and write inside); its models, which count no narrowing before
`o_proj` and `down_proj` under TensorRT-LLM; vLLM's compilation, which fuses norm or activation with static narrowing; TensorRT-LLM's Qwen3 (`_torch/models`), which
norms and rotates queries and keys in one kernel before its attention; one kernel for each of both norms elsewhere.
The CPU's part: 0.5 to 2 ms of planning and 1 to 5 ms of preparing inputs in a step of vLLM (inference-sim, issue 482),
taken to reach from few rows to 128, and to be the same for all stacks.

Invariants
* Only facts of stacks, nothing fitted; a stack that is not listed fuses nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Stack:
    """narrowed_before: linears whose FP8 input is narrowed (one scale a tensor) by the kernel before.

    dynamic: FP8 products with one scale a tensor were measured with the search for the scale of their input.
    launches: of elementwise ops that are not one; 0 where the measured attention does it.
    qk_norm: launches more of `rope_kv_write` where the model norms queries and keys.
    host_step, host_row: s of CPU work for a step and for each of its rows (planning, inputs, outputs).
    """

    narrowed_before: frozenset[str] = frozenset()
    launches: Mapping[str, int] = field(default_factory=dict)
    dynamic: bool = False
    qk_norm: int = 2
    host_step: float = 1.5e-3
    host_row: float = 4.3e-5


STACKS = {
    "vllm": Stack(frozenset({"qkv_proj", "gate_up_proj", "down_proj"}), {"rope_kv_write": 2}),
    "trtllm": Stack(frozenset({"o_proj", "down_proj"}), {"rope_kv_write": 0}, dynamic=True, qk_norm=1),
    "sglang": Stack(launches={"rope_kv_write": 2}),
}
STREAMING = frozenset({"norms", "rope_kv_write", "mlp_act", "embed", "sample"})
"""Ops that read their inputs once, in order, and write their outputs once."""

__all__ = ["STACKS", "STREAMING", "Stack"]
