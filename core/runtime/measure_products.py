"""The format's linear on a generic grid of shapes, for models other than the measured one, and the bandwidth of memory."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from twinfer.core.registry import Registry
from twinfer.core.runtime.linear import Dense
from twinfer.core.runtime.loading import Engine, linears_of
from twinfer.core.runtime.stored_blocks import VALUES_PER_BLOCK, StoredBlocks
from twinfer.kernels.gemm import BLOCK_FORMATS

GEMM_GRID = ((512, 512), (2048, 2048), (6144, 2048), (4096, 4096))
GEMM_ROWS = (1, 8, 64, 256)
COLD_BYTES = 96 * 2**20  # weights cycled through so that none is found in the caches of a core


@dataclass(slots=True)
class GemmJob:
    """`copies` of one weight, more than the nearest caches hold, on rows `x`."""

    n: int
    k: int
    copies: Sequence[Callable[[torch.Tensor], torch.Tensor]]
    x: torch.Tensor
    samples: list[float] = field(default_factory=list)

    @property
    def label(self) -> str:
        return f"[{self.x.shape[0]}, {self.k}] x [{self.k}, {self.n}]"

    @property
    def weight(self) -> int:
        """As `StepJob.weight`: the copies are about an eighth of a small model."""
        return 2 + self.x.shape[0] // 8

    @property
    def seconds(self) -> float:
        return min(self.samples, default=0.0) * len(self.copies)

    def run(self) -> None:
        with torch.inference_mode():
            self.copies[0](self.x)
            begin = time.perf_counter()
            for copy in self.copies:
                copy(self.x)
            self.samples.append((time.perf_counter() - begin) / len(self.copies))


def grid_of(engine: Engine, registry: Registry) -> list[GemmJob]:
    """Products of the engine's own linears, in its own format; none where that takes blocks of no known type."""
    model = engine.setup.model
    dtype = engine.model.dtype
    factory = linears_of(engine.setup, registry, torch.device("cpu"))
    kind = ""
    if getattr(factory, "takes_blocks", False):
        stored: Counter[str] = Counter(dict(model.extra.get("stored_linears", {})))
        kind = next((name for name, _ in stored.most_common() if name in BLOCK_FORMATS), "")
        if not kind:
            return []
    jobs = []
    with torch.inference_mode():
        for n, k in GEMM_GRID:
            count = max(2, min(24, COLD_BYTES // (n * k * dtype.itemsize)))
            copies = [_linear(factory, kind, n, k, dtype) for _ in range(count)]
            jobs += [GemmJob(n, k, copies, torch.full((m, k), 0.5, dtype=dtype)) for m in GEMM_ROWS]
    return jobs


def _linear(factory: Any, kind: str, n: int, k: int, dtype: torch.dtype) -> Any:
    if kind:
        width = _block_bytes(kind)
        return factory(
            "grid", StoredBlocks(kind, torch.zeros(n, k // VALUES_PER_BLOCK[kind], width, dtype=torch.uint8)), None
        )
    weight = torch.full((n, k), 0.01, dtype=dtype)
    return Dense(weight) if factory is None else factory("grid", weight, None)


def _block_bytes(kind: str) -> int:
    """Bytes of one block of a GGUF type."""
    from twinfer.core.gguf_header import TYPES

    return next(num_bytes for name, _, num_bytes in TYPES.values() if name == kind)


def copy_bandwidth(size: int = 128 * 2**20) -> float:
    """Bytes per second, read plus written, of a copy that no cache holds."""
    source = torch.ones(size, dtype=torch.uint8)
    target = torch.empty_like(source)
    target.copy_(source)
    begin = time.perf_counter()
    target.copy_(source)
    return 2 * size / (time.perf_counter() - begin)


__all__ = ["GemmJob", "copy_bandwidth", "grid_of"]
