"""Collectives from measured tables.

    all_reduce                               the stack's own kernel, in graphs       by ranks over bytes
    all_gather, reduce_scatter, all_to_all   NCCL                                    by ranks over bytes
    moe_dispatch, moe_combine                DeepEP kernels of the stack             by ranks and experts over tokens

Invariants
* Bytes are those of NCCL's convention: the whole buffer of a rank, that is all parts of a gather.
* Tables cover one node; more ranks than measured are another model's to answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from twinfer.core.work import COLLECTIVES, MoEShape, Op
from twinfer.plugins.op_time.expert_tables import Read
from twinfer.plugins.op_time.kernel_tables import Answer, KernelTable, Shape, median_rows
from twinfer.plugins.op_time.wires import sent_share, whole_buffer

if TYPE_CHECKING:
    from twinfer.core.device import DeviceSpec

LOW_LATENCY = 256  # tokens of a rank up to which stacks take the kernels of low latency
ELEMENT = (
    2.0  # bytes: messages are counted in elements of 16 bits (NCCL's rows in 8 bits take as long at twice the count)
)
_NCCL = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_to_all": "alltoall",
}


class ExchangeTables:
    """Tables of one system under one stack."""

    def __init__(self, read: Read, stack: str) -> None:
        self._read, self._stack = read, stack
        self._tables: dict[tuple[str, ...], KernelTable | None] = {}

    def time(self, op: Op, device: DeviceSpec) -> Answer | None:
        if op.kind != "comm" or op.comm_bytes <= 0:
            return None
        what, ranks = COLLECTIVES.get(op.name, op.name), float(op.shape[0])
        if isinstance(op.of, MoEShape):
            answer = self._experts(op, op.of, device)
            if answer is not None:
                return answer
        table = self.collective(what, device)
        if table is None or ranks > max(shape[0] for shape in table.curves):
            return None
        return table.time((ranks,), whole_buffer(what, op.shape[0], op.comm_bytes))

    def _experts(self, op: Op, s: MoEShape, device: DeviceSpec) -> Answer | None:
        table = self.experts(op.name.removeprefix("moe_"), device)
        if table is None or s.ep > max(shape[0] for shape in table.curves):
            return None
        return table.time((float(s.ep), float(s.hidden), float(s.top_k), float(s.num_experts)), float(s.tokens))

    def collective(self, what: str, device: DeviceSpec) -> KernelTable | None:
        """Shapes (ranks,) over bytes of the whole buffer."""
        if (what,) not in self._tables:
            rows = (self._custom() if what == "all_reduce" else {}) or self._nccl(what)
            self._tables[what,] = KernelTable(rows, wire_bound(what, device)) if rows else None
        return self._tables[what,]

    def _custom(self) -> dict[tuple[Shape, float], float]:
        columns = ["backend", "num_gpus", "message_size", "latency"]
        rows = self._read("comm", "custom_allreduce_perf", self._stack, columns) or {}
        keys, seconds = [], []
        for backend, ranks, size, ms in zip(*(rows.get(c, ()) for c in columns), strict=True):
            if not str(backend).endswith("eager"):
                keys.append(((float(ranks),), ELEMENT * size))
                seconds.append(ms * 1e-3)
        return median_rows(keys, seconds)

    def _nccl(self, what: str) -> dict[tuple[Shape, float], float]:
        columns = ["op_name", "nccl_dtype", "num_gpus", "message_size", "latency"]
        rows = self._read("comm/nccl", "nccl_perf", "", columns) or {}
        keys, seconds = [], []
        for kind, dtype, ranks, size, ms in zip(*(rows.get(c, ()) for c in columns), strict=True):
            if kind == _NCCL.get(what) and dtype == "half":
                keys.append(((float(ranks),), ELEMENT * size))
                seconds.append(ms * 1e-3)
        return median_rows(keys, seconds)

    def experts(self, phase: str, device: DeviceSpec) -> KernelTable | None:
        """Shapes (ranks, hidden, experts per token, experts) over tokens of a rank; phase: dispatch or combine."""
        if ("experts", phase) not in self._tables:
            rows = self._deepep(phase)
            self._tables["experts", phase] = KernelTable(rows, exchange_bound(phase, device)) if rows else None
        return self._tables["experts", phase]

    def _deepep(self, phase: str) -> dict[tuple[Shape, float], float]:
        """DeepEP's kernels: those of low latency up to `LOW_LATENCY` tokens, those of high throughput beyond.

        They are the same library under every stack; times of the kernels alone (measured beside sglang) are preferred to
        the stack's, which hold launches that a graph hides.
        """
        return self._kernels_alone(phase) or self._of_stack(phase)

    def _kernels_alone(self, phase: str) -> dict[tuple[Shape, float], float]:
        found: dict[tuple[Shape, float], float] = {}
        sizes = ["node_num", "hidden_size", "num_topk", "num_experts", "num_token"]
        for name, time, more in (
            ("wideep_deepep_ll_perf", f"{phase}_avg_t_us", []),
            ("wideep_deepep_normal_perf", f"{phase}_transmit_us", [f"{phase}_sms"]),
        ):
            columns = [*sizes, time, *more]
            rows = self._read("comm", name, "sglang", columns) or {}
            most_sms = max(rows.get(more[0], ())) if more and rows else 0
            for nodes, hidden, top_k, experts, tokens, us, *sms in zip(
                *(rows.get(c, ()) for c in columns), strict=True
            ):
                if nodes == 1 and (tokens > LOW_LATENCY) == bool(sms) and (not sms or sms[0] == most_sms):
                    found[(8.0, float(hidden), float(top_k), float(experts)), float(tokens)] = us * 1e-6
        return found

    def _of_stack(self, phase: str) -> dict[tuple[Shape, float], float]:
        columns = [
            "comm_backend",
            "phase",
            "ep_size",
            "node_num",
            "hidden_size",
            "topk",
            "num_experts",
            "num_tokens",
            "latency",
        ]
        rows = self._read("comm", "moe_a2a_perf", self._stack, columns) or {}
        found: dict[tuple[Shape, float], float] = {}
        for backend, kind, ranks, nodes, hidden, top_k, experts, tokens, us in zip(
            *(rows.get(c, ()) for c in columns), strict=True
        ):
            if (
                kind == phase
                and nodes == 1
                and "_v2" not in backend
                and (tokens > LOW_LATENCY) != backend.endswith("_ll")
            ):
                key = ((float(ranks), float(hidden), float(top_k), float(experts)), float(tokens))
                found[key] = min(us * 1e-6, found.get(key, math.inf))
        return found


def wire_bound(what: str, device: DeviceSpec) -> Callable[[Shape, float], float]:
    link = device.link_bandwidth or 1e11

    def bound(shape: Shape, size: float) -> float:
        return 4e-6 + sent_share(what, int(shape[0])) * size / (0.6 * link)

    return bound


def exchange_bound(phase: str, device: DeviceSpec) -> Callable[[Shape, float], float]:
    """Least seconds of sending tokens to their experts: in 8 bits there, in 16 bits back."""
    link, width = device.link_bandwidth or 1e11, 1.0 if phase == "dispatch" else 2.0

    def bound(shape: Shape, tokens: float) -> float:
        ranks, hidden, top_k, _ = shape
        return 10e-6 + tokens * min(top_k, ranks) * hidden * width / (0.6 * link)

    return bound


__all__ = ["ExchangeTables", "exchange_bound", "wire_bound"]
