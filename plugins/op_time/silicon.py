"""Op times from published kernel measurements: the tables of the package `aiconfigurator-core` (Apache-2.0).

    pip install 'twinfer[silicon]'        then        --op-time-model silicon

The package holds kernel times of one GPU under several serving stacks. This file turns them into `KernelTable`s and
asks them for twinfer's ops; what they do not cover goes to the next model of the chain.

    gemm         by (n, k) over m                            dtypes bfloat16, fp8 (scales per tensor or per block)
    attention    by heads and rows: prompts over length, decode rows over context; bfloat16 or fp8 KV
    elementwise  streaming kernels by bytes; a launch as of the kernel that narrows activations (`stacks.py`)
    comm         all-reduce of the stack by ranks over bytes; other collectives of NCCL

Invariants
* Nothing is read before the first question, each file once per process; torch and the network are never needed.
* Several rows in one launch: their times above the launch overhead add up, the overhead counts once.
* A version that was not measured is answered by the next one that was, with the spread between versions added.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from twinfer.core import technique
from twinfer.core.errors import ConfigError
from twinfer.core.op_time import OpTime
from twinfer.core.technique import Needs, Technique
from twinfer.core.work import MoEShape, Op
from twinfer.plugins.op_time.attention_tables import AttentionTables
from twinfer.plugins.op_time.exchange_tables import ExchangeTables
from twinfer.plugins.op_time.expert_tables import ExpertTables
from twinfer.plugins.op_time.kernel_tables import Answer, KernelTable, Shape, median_rows, peak_of
from twinfer.plugins.op_time.latent_tables import LatentTables
from twinfer.plugins.op_time.stacks import STACKS, STREAMING, Stack
from twinfer.plugins.op_time.state_tables import StateTables

if TYPE_CHECKING:
    from twinfer.core.device import DeviceSpec
    from twinfer.core.spec import ModelSpec

SYSTEMS = {
    "a100-sxm-40gb": "a100_sxm", "a100-sxm-80gb": "a100_sxm", "b200": "b200_sxm", "gb200": "gb200", "h100-sxm": "h100_sxm",
    "h100-pcie": "h100_pcie", "h200-sxm": "h200_sxm", "l4": "l4", "l40s": "l40s", "rtx-pro-6000": "rtx_pro_6000_server",
}  # fmt: skip
"""Device of twinfer -> system of the package."""

PARTIAL = 0.2  # a version with fewer rows than this share of the fullest one's is an addition to it, not a table
NARROWER = 0.9
"""Weights of fewer than this share of a table's bytes are of another format (scales add a few per cent, never take)."""
_GEMM_DTYPES = {"bfloat16": "bfloat16", "float16": "bfloat16"}
_TABLES = {"gemm": "gemm_perf", "attention": "generation_attention_perf", "comm": "custom_allreduce_perf"}
VERSION_SPREAD = {"gemm": 0.13, "attention": 0.10, "comm": 0.25}
"""Between versions of a stack, same kernel and shape: "between versions" of `bench/fidelity_tables.py`, H100 and H200,
with the width that covers 80 %; attention was measured under one version, and is taken to differ less than products."""


class Silicon(Technique):
    name = "silicon"
    summary = "op times from published kernel measurements of the same GPU (package aiconfigurator-core)"
    reference = "AIConfigurator: arXiv:2601.06288"

    class Options(technique.Options):
        """stack: serving stack whose kernels were measured.  version: of the stack, the newest measured by default.
        fp8: products with one scale a tensor, or per block of 128.  dynamic: the scale of an input is found in every
        step; checkpoints for serving hold it.  fused_all_reduce: it takes the norm after it along.
        skew: exponent of the power law of the experts' loads where the model says nothing (trained routers are uneven;
        1.01 is what the package assumes).
        folder: `systems` folder of the tables, that of the installed package by default."""

        stack: str = Field(default="vllm", pattern="^(vllm|sglang|trtllm)$", description="vllm, sglang or trtllm")
        version: str | None = Field(default=None, description="version of the stack; None: the newest measured")
        fp8: str = Field(
            default="tensor", pattern="^(tensor|block)$", description="scales of FP8 products: tensor or block"
        )
        dynamic: bool = Field(default=False, description="scales of FP8 inputs are found in every step, not stored")
        skew: float = Field(default=1.01, ge=0, le=4, description="power law of the experts' loads; 0: all alike")
        fused_all_reduce: bool = Field(default=False, description="the norm after an all-reduce is done in its kernel")
        folder: str | None = Field(default=None, description="folder of the tables; None takes the installed package")

    qk_norm = False  # of the model whose ops are asked for

    def for_model(self, model: ModelSpec) -> Silicon:
        """The same tables for the ops of `model`."""
        own = type(self)(self.options)
        own.qk_norm = model.qk_norm
        return own

    @classmethod
    def why_not(cls, needs: Needs) -> list[str]:
        if installed_folder() is None:
            return ["the package aiconfigurator-core is not installed; pip install 'twinfer[silicon]'"]
        return []

    def time(self, op: Op, device: DeviceSpec) -> OpTime | None:
        system = SYSTEMS.get(device.name)
        if system is None:
            return None
        tables = _tables(self._folder, system, self.options.stack, self.options.version)
        fp8 = "fp8_block" if self.options.fp8 == "block" else "fp8"
        if isinstance(op.of, MoEShape) and not op.of.skew:
            op = replace(op, of=op.of._replace(skew=self.options.skew))
        if op.name == "rope_kv_write":
            answer = tables.rotation(op, device, self.qk_norm)
        else:
            answer = tables.time(op, device, fp8, self.options.fused_all_reduce, self.options.dynamic)
        if answer is None:
            return None
        return OpTime(answer.seconds, answer.seconds * answer.spread, answer.source, f"{tables.label}: {answer.detail}")

    @cached_property
    def _folder(self) -> str:
        given = self.options.folder
        if given is not None:
            folder = Path(given)
            if not (folder / "data").is_dir():
                raise ConfigError(
                    "--op-time-model silicon:folder", given, "holds no folder `data` of kernel tables",
                    "give the `systems` folder of aiconfigurator-core",
                )  # fmt: skip
            return str(folder)
        folder_or_none = installed_folder()
        if folder_or_none is None:
            raise ConfigError(
                "--op-time-model", "silicon", "the package aiconfigurator-core is not installed",
                "pip install 'twinfer[silicon]', or leave it out",
            )  # fmt: skip
        return str(folder_or_none)


@cache
def installed_folder() -> Path | None:
    """`systems` folder of the installed package, found without importing it."""
    spec = importlib.util.find_spec("aiconfigurator_core")
    for root in (spec.submodule_search_locations or ()) if spec else ():
        folder = Path(root) / "systems"
        if (folder / "data").is_dir():
            return folder
    return None


@lru_cache(maxsize=8)
def _tables(folder: str, system: str, stack: str, version: str | None) -> SystemTables:
    return SystemTables(Path(folder) / "data" / system, stack, version)


class SystemTables:
    """All tables of one system under one stack, read when first asked."""

    def __init__(self, folder: Path, stack: str, version: str | None) -> None:
        self.folder, self.stack, self.version = folder, stack, version
        self.label = f"{folder.name}, {stack} {version or 'newest'}"
        self._known: dict[tuple[Any, ...], KernelTable | None] = {}
        self.attention = AttentionTables(self._read, stack)
        self.experts = ExpertTables(self._read, stack)
        self.latent = LatentTables(self._read, stack, self._product_seconds)
        self.exchange = ExchangeTables(self._read, stack)
        self.state = StateTables(self._read, stack)
        self._facts = STACKS.get(stack, Stack())
        self._other_version: set[str] = set()  # tables that lack the version that was asked for

    def time(
        self, op: Op, device: DeviceSpec, fp8: str = "fp8", fused_all_reduce: bool = False, dynamic: bool = False
    ) -> Answer | None:
        answer = self._time(op, device, fp8, fused_all_reduce, dynamic)
        if answer is not None and answer.seconds and _TABLES.get(op.kind) in self._other_version:
            spread = math.hypot(answer.spread, VERSION_SPREAD[op.kind])
            return replace(answer, spread=spread, detail=f"{answer.detail}; another version than asked for")
        return answer

    def _time(self, op: Op, device: DeviceSpec, fp8: str, fused_all_reduce: bool, dynamic: bool) -> Answer | None:
        if op.of is not None and op.kind != "comm":
            return (
                self.experts.time(op, device, fp8) or self.latent.time(op, device, fp8) or self.state.time(op, device)
            )
        if op.kind == "gemm" and len(op.shape) == 3:
            return self._product(op, device, fp8, dynamic)
        if op.kind == "attention" and len(op.shape) == 5 and op.shape[2] == op.shape[3]:
            return self.attention.time(op, device)
        if op.kind == "comm" and op.comm_bytes > 0:
            answer = self.exchange.time(op, device)
            if answer is not None and fused_all_reduce and op.name == "all_reduce":
                return _less(answer, self.launch(device), "does the norm's launch")
            return answer
        if op.name == "quantize_input" and op.dtype == "fp8" and self.gemm(fp8, device) is not None:
            return Answer(0.0, 0.0, "measured", "part of the measured product")
        if op.kind == "host" and self.stack in STACKS:
            seconds = self._facts.host_step + self._facts.host_row * op.shape[0]
            words = f"{self._facts.host_step * 1e3:.1f} ms + {self._facts.host_row * 1e6:.0f} us x {op.shape[0]} rows"
            return Answer(seconds, HOST_SPREAD, "analytic", words)
        if op.kind in ("elementwise", "gather") and op.name in STREAMING:
            return self._stream(op, device)
        return None

    def _product_seconds(self, m: int, n: int, k: int, dtype: str, device: DeviceSpec) -> float | None:
        table = self.gemm(dtype, device)
        answer = table.time((n, k), m) if table is not None else None
        return None if answer is None else answer.seconds

    # --- streaming kernels ------------------------------------------------------------------------

    def narrowing(self, device: DeviceSpec) -> KernelTable | None:
        """Shapes (k,) over m: the kernel that narrows [m, k] activations to FP8 with a given scale."""
        return self._over_inputs("scale_matrix_perf", NARROWED, device)

    def scaling(self, device: DeviceSpec) -> KernelTable | None:
        """Shapes (k,) over m: the kernel that finds the scale of [m, k] activations."""
        return self._over_inputs("computescale_perf", 2.0, device)

    def _over_inputs(self, name: str, moved: float, device: DeviceSpec) -> KernelTable | None:
        """A kernel over [m, k] activations that moves `moved` bytes of each value."""

        def make() -> KernelTable | None:
            rows = self._read("quantize", name, self.stack, ["quant_dtype", "m", "k", "latency"])
            if rows is None:
                return None
            found = zip(*(rows[c] for c in ("quant_dtype", "m", "k", "latency")), strict=True)
            points = [(((float(k),), float(m)), ms * 1e-3) for kind, m, k, ms in found if kind == "fp8"]
            table = median_rows([key for key, _ in points], [s for _, s in points])
            rate = 0.9 * device.memory_bandwidth
            return KernelTable(table, lambda shape, m: 1.5e-6 + moved * m * shape[0] / rate) if table else None

        return self._table((name,), make)

    def launch(self, device: DeviceSpec) -> float | None:
        """s of a kernel with next to nothing to do: the least that the stack's narrowing kernel takes in a graph."""
        table = self.narrowing(device)
        return None if table is None else min(min(curve.seconds) for curve in table.curves.values())

    def rotation(self, op: Op, device: DeviceSpec, qk_norm: bool) -> Answer | None:
        """Queries and keys turned and, with `qk_norm`, normed before; keys and values written."""
        return self._stream(op, device, self._facts.qk_norm if qk_norm else 0)

    def _stream(self, op: Op, device: DeviceSpec, more: int = 0) -> Answer | None:
        """more: launches beside those of the stack."""
        launch = self.launch(device)
        if launch is None:
            return None
        launches = self._facts.launches.get(op.name, 1) + more
        if not launches:
            return Answer(0.0, 0.0, "measured", "part of the measured attention")
        seconds = launches * launch + op.bytes / (STREAMED * device.memory_bandwidth)
        words = f"{launches} x {launch * 1e6:.1f} us, {op.bytes / 1e6:.2f} MB at {STREAMED:.0%} of the bandwidth"
        return Answer(seconds, STREAM_SPREAD, "transferred", words)

    # --- files ----------------------------------------------------------------------------------

    def _read(self, family: str, name: str, stack: str, columns: list[str]) -> Mapping[str, list[Any]] | None:
        """Columns of the wanted version of a table, of the next one measured (else the newest); None without any."""
        import pyarrow.parquet as parquet

        home = self.folder / family / stack
        versions = sorted((p for p in home.glob("*") if (p / f"{name}.parquet").exists()), key=lambda p: _order(p.name))
        if not versions:
            return None
        rows = [parquet.read_metadata(p / f"{name}.parquet").num_rows for p in versions]
        versions = [p for p, n in zip(versions, rows, strict=True) if n >= PARTIAL * max(rows)]
        if self.version is not None and stack == self.stack:
            wanted = _order(self.version)
            since = [p for p in versions if _order(p.name) >= wanted]
            versions = since[:1] or versions
            if versions[-1].name != self.version:
                self._other_version.add(name)
        file = parquet.ParquetFile(versions[-1] / f"{name}.parquet")
        there = [column for column in columns if column in file.schema_arrow.names]
        found: dict[str, list[Any]] = file.read(columns=there).to_pydict()
        for column in set(columns) - set(there):  # older tables lack the window, which was 0 then
            found[column] = [0] * file.metadata.num_rows
        return found

    def _table(self, key: tuple[Any, ...], make: Callable[[], KernelTable | None]) -> KernelTable | None:
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]

    # --- gemm -----------------------------------------------------------------------------------

    def _product(self, op: Op, device: DeviceSpec, fp8: str, dynamic: bool) -> Answer | None:
        dtype = fp8 if op.dtype == "fp8" else _GEMM_DTYPES.get(op.dtype)
        m, n, k = op.shape
        width = 1.0 if op.dtype == "fp8" else 2.0  # bytes that the measured kernels read of a weight
        if op.bytes_read < NARROWER * width * n * k:
            return None  # weights are widened inside the product: another kernel, which nobody measured
        table = self.gemm(dtype, device) if dtype else None
        answer = table.time((n, k), m) if table is not None else None
        if answer is None or dtype != "fp8":
            return answer
        if self._facts.dynamic and not dynamic:
            answer = _less(answer, _at(self.scaling(device), k, m), "the scale of the input is stored")
        if op.name in self._facts.narrowed_before:
            answer = _less(answer, _at(self.narrowing(device), k, m), "narrowed by the kernel before")
        return answer

    def gemm(self, dtype: str, device: DeviceSpec) -> KernelTable | None:
        """Shapes (n, k) over m, one dtype of the package."""

        def make() -> KernelTable | None:
            rows = self._read("gemm", "gemm_perf", self.stack, ["gemm_dtype", "m", "n", "k", "latency"])
            if rows is None or dtype not in rows["gemm_dtype"]:
                return None
            peak, bandwidth = peak_of(device, dtype), device.memory_bandwidth
            width = 1.0 if dtype.startswith("fp8") else 2.0

            def bound(shape: Shape, m: float) -> float:
                n, k = shape
                compute = 2 * m * n * k / (0.8 * peak)
                memory = (width * (n * k + m * k) + 2 * m * n) / (0.9 * bandwidth)
                return 3e-6 + _soft_max(compute, memory)

            keys, seconds = [], []
            for kind, m, n, k, ms in zip(*(rows[c] for c in ("gemm_dtype", "m", "n", "k", "latency")), strict=True):
                if kind == dtype:
                    keys.append(((n, k), m))
                    seconds.append(ms * 1e-3)
            return KernelTable(median_rows(keys, seconds), bound)

        return self._table(("gemm", dtype), make)

    # --- collectives ----------------------------------------------------------------------------

    def collective(self, name: str, device: DeviceSpec) -> KernelTable | None:
        """Shapes (ranks,) over bytes of one message."""
        return self.exchange.collective(name, device)


NARROWED = 3.0  # bytes a value moved by the kernel that narrows bfloat16 to FP8
STREAMED = 0.8  # of the bandwidth that a streaming kernel reaches (`elementwise_memory` of measured devices)
STREAM_SPREAD = 0.15
HOST_SPREAD = 0.5  # the range that is published


def _at(table: KernelTable | None, k: int, m: int) -> float | None:
    """s that a kernel over [m, k] activations takes; None where it was not measured."""
    answer = table.time((float(k),), m) if table is not None else None
    return None if answer is None else answer.seconds


def _less(answer: Answer, saved: float | None, why: str) -> Answer:
    """`answer` without a kernel of `saved` s that the stack does not launch."""
    if not saved:
        return answer
    seconds = max(answer.seconds - saved, 0.5 * answer.seconds)
    return replace(answer, seconds=seconds, detail=f"{answer.detail}; {why}: -{saved * 1e6:.1f} us")


def _soft_max(a: float, b: float, power: float = 4.0) -> float:
    high, low = max(a, b), min(a, b)
    return high * (1 + (low / high) ** power) ** (1 / power)


def _order(version: str) -> tuple[tuple[int, str], ...]:
    """Versions in order: numbers as numbers, release candidates before releases by their text."""
    parts = version.replace("rc", ".rc.").split(".")
    return tuple((int(p), "") if p.isdigit() else (-1, p) for p in parts)


__all__ = ["SYSTEMS", "Silicon", "SystemTables", "installed_folder"]
