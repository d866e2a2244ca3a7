"""Op times from published kernel measurements: the tables of the package `aiconfigurator-core` (Apache-2.0).

    pip install 'twinfer[silicon]'        then        --op-time silicon

The package holds kernel times of one GPU under several serving stacks. This file turns them into `KernelTable`s and
asks them for twinfer's ops; what they do not cover goes to the next model of the chain.

    gemm        by (n, k) over m                                    dtypes bfloat16, fp8 (scales per tensor or per block)
    attention   prefill rows by heads over length, decode rows by heads and batch over context
    comm        all-reduce of the stack by ranks over bytes; other collectives of NCCL

Invariants
* Nothing is read before the first question, each file once per process; torch and the network are never needed.
* Several rows in one launch: their times above the launch overhead add up, the overhead counts once.
"""

from __future__ import annotations

import importlib.util
import math
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from twinfer.core import technique
from twinfer.core.errors import ConfigError
from twinfer.core.op_time import OpTime
from twinfer.core.technique import Needs, Technique
from twinfer.core.work import Op, RowShape, visible_pairs
from twinfer.plugins.op_time.exchange_tables import ExchangeTables
from twinfer.plugins.op_time.expert_tables import ExpertTables
from twinfer.plugins.op_time.kernel_tables import Answer, KernelTable, Shape, median_rows
from twinfer.plugins.op_time.latent_tables import LatentTables
from twinfer.plugins.op_time.state_tables import StateTables

if TYPE_CHECKING:
    from twinfer.core.device import DeviceSpec

SYSTEMS = {
    "a100-sxm-40gb": "a100_sxm", "a100-sxm-80gb": "a100_sxm", "b200": "b200_sxm", "gb200": "gb200", "h100-sxm": "h100_sxm",
    "h100-pcie": "h100_pcie", "h200-sxm": "h200_sxm", "l4": "l4", "l40s": "l40s", "rtx-pro-6000": "rtx_pro_6000_server",
}  # fmt: skip
"""Device of twinfer -> system of the package."""

_GEMM_DTYPES = {"bfloat16": "bfloat16", "float16": "bfloat16"}
_KV_DTYPES = {"bfloat16": "bfloat16", "float16": "bfloat16", "fp8": "fp8"}


class Silicon(Technique):
    name = "silicon"
    summary = "op times from published kernel measurements of the same GPU (package aiconfigurator-core)"
    reference = "AIConfigurator: arXiv:2601.06288"

    class Options(technique.Options):
        """stack: serving stack whose kernels were measured.  version: of the stack, the newest by default.
        fp8: products with one scale a tensor, or per block of 128.  folder: `systems` folder of the tables, that of the installed package by default."""

        stack: str = Field(default="vllm", pattern="^(vllm|sglang|trtllm)$", description="vllm, sglang or trtllm")
        version: str | None = Field(default=None, description="version of the stack; None takes the newest measured")
        fp8: str = Field(
            default="tensor", pattern="^(tensor|block)$", description="scales of FP8 products: tensor or block"
        )
        folder: str | None = Field(default=None, description="folder of the tables; None takes the installed package")

    @classmethod
    def why_not(cls, needs: Needs) -> list[str]:
        if installed_folder() is None:
            return ["the package aiconfigurator-core is not installed; pip install 'twinfer[silicon]'"]
        return []

    def time(self, op: Op, device: DeviceSpec) -> OpTime | None:
        system = SYSTEMS.get(device.name)
        if system is None:
            return None
        tables = _tables(str(self._folder()), system, self.options.stack, self.options.version)
        answer = tables.time(op, device, fp8="fp8_block" if self.options.fp8 == "block" else "fp8")
        if answer is None:
            return None
        return OpTime(answer.seconds, answer.seconds * answer.spread, answer.source, f"{tables.label}: {answer.detail}")

    def _folder(self) -> Path:
        given = self.options.folder
        if given is not None:
            folder = Path(given)
            if not (folder / "data").is_dir():
                raise ConfigError(
                    "--op-time silicon:folder", given, "holds no folder `data` of kernel tables",
                    "give the `systems` folder of aiconfigurator-core",
                )  # fmt: skip
            return folder
        folder_or_none = installed_folder()
        if folder_or_none is None:
            raise ConfigError(
                "--op-time", "silicon", "the package aiconfigurator-core is not installed",
                "pip install 'twinfer[silicon]', or leave it out",
            )  # fmt: skip
        return folder_or_none


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
        self.experts = ExpertTables(self._read, stack)
        self.latent = LatentTables(self._read, stack, self._product_seconds)
        self.exchange = ExchangeTables(self._read, stack)
        self.state = StateTables(self._read, stack)

    def time(self, op: Op, device: DeviceSpec, fp8: str = "fp8") -> Answer | None:
        if op.of is not None and op.kind != "comm":
            return (
                self.experts.time(op, device, fp8) or self.latent.time(op, device, fp8) or self.state.time(op, device)
            )
        if op.kind == "gemm" and len(op.shape) == 3:
            dtype = fp8 if op.dtype == "fp8" else _GEMM_DTYPES.get(op.dtype)
            m, n, k = op.shape
            table = self.gemm(dtype, device) if dtype else None
            return table.time((n, k), m) if table is not None else None
        if op.kind == "attention" and len(op.shape) == 5 and op.shape[2] == op.shape[3]:
            return self._attention(op, device)
        if op.kind == "comm" and op.comm_bytes > 0:
            return self.exchange.time(op, device)
        return None

    def _product_seconds(self, m: int, n: int, k: int, dtype: str, device: DeviceSpec) -> float | None:
        table = self.gemm(dtype, device)
        answer = table.time((n, k), m) if table is not None else None
        return None if answer is None else answer.seconds

    # --- files ----------------------------------------------------------------------------------

    def _read(self, family: str, name: str, stack: str, columns: list[str]) -> Mapping[str, list[Any]] | None:
        """Columns of the newest (or the wanted) version of a table; None when the system has none."""
        import pyarrow.parquet as parquet

        home = self.folder / family / stack
        versions = sorted((p for p in home.glob("*") if (p / f"{name}.parquet").exists()), key=lambda p: _order(p.name))
        if self.version is not None and stack == self.stack:
            versions = [p for p in versions if p.name == self.version]
        if not versions:
            return None
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

    def gemm(self, dtype: str, device: DeviceSpec) -> KernelTable | None:
        """Shapes (n, k) over m, one dtype of the package."""

        def make() -> KernelTable | None:
            rows = self._read("gemm", "gemm_perf", self.stack, ["gemm_dtype", "m", "n", "k", "latency"])
            if rows is None or dtype not in rows["gemm_dtype"]:
                return None
            peak, bandwidth = _peak(device, dtype), device.memory_bandwidth
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

    # --- attention ------------------------------------------------------------------------------

    def prefill(self, device: DeviceSpec, head_dim: int, window: int, kv_dtype: str) -> KernelTable | None:
        """Shapes (query heads, KV heads) over the length of one prompt (batch 1 and up, see `_batched`)."""
        return self._attention_table("context", device, head_dim, window, kv_dtype)

    def decode(self, device: DeviceSpec, head_dim: int, window: int, kv_dtype: str) -> KernelTable | None:
        """Shapes (query heads, KV heads, batch) over the context."""
        return self._attention_table("generation", device, head_dim, window, kv_dtype)

    def _attention_table(
        self, kind: str, device: DeviceSpec, head_dim: int, window: int, kv_dtype: str
    ) -> KernelTable | None:
        def make() -> KernelTable | None:
            axis = "isl" if kind == "context" else "step"
            columns = [
                "batch_size", axis, "num_heads", "num_key_value_heads", "head_dim", "window_size", "kv_cache_dtype",
                "latency",
            ]  # fmt: skip
            rows = self._read("attention", f"{kind}_attention_perf", self.stack, columns)
            if rows is None:
                return None
            keys, seconds = [], []
            for batch, x, heads, kv_heads, dim, wide, kv, ms in zip(*(rows[c] for c in columns), strict=True):
                if dim == head_dim and wide == window and kv == kv_dtype:
                    keys.append(((heads, kv_heads, batch), x if kind == "context" else x + 1))
                    seconds.append(ms * 1e-3)
            if not keys:
                return None
            bound = attention_bound(kind, device, head_dim, window, 1.0 if kv_dtype == "fp8" else 2.0)
            return KernelTable(median_rows(keys, seconds), bound)

        return self._table((kind, head_dim, window, kv_dtype), make)

    def _attention(self, op: Op, device: DeviceSpec) -> Answer | None:
        heads, kv_heads, head_dim, _, window = op.shape
        kv_dtype = _KV_DTYPES.get(op.dtype)
        if kv_dtype is None:
            return None
        decode = [row for row in op.rows if row.queries == 1]
        prefill = [row for row in op.rows if row.queries > 1]
        parts: list[Answer] = []
        if decode:
            table = self.decode(device, head_dim, window, kv_dtype)
            answer = table and table.time(
                (heads, kv_heads, len(decode)), max(1.0, sum(r.keys for r in decode) / len(decode))
            )
            if not answer:
                return None
            parts.append(answer)
        if prefill:
            table = self.prefill(device, head_dim, window, kv_dtype)
            if table is None:
                return None
            parts += [_chunk(table, heads, kv_heads, row, n) for row, n in sorted(Counter(prefill).items())]
        floor = _LAUNCH * (len(parts) - 1)
        seconds = max(sum(p.seconds for p in parts) - floor, max(p.seconds for p in parts))
        most = max(parts, key=lambda p: p.seconds)
        return Answer(seconds, max(p.spread for p in parts), most.source, most.detail)

    # --- collectives ----------------------------------------------------------------------------

    def collective(self, name: str, device: DeviceSpec) -> KernelTable | None:
        """Shapes (ranks,) over bytes of one message."""
        return self.exchange.collective(name, device)


_LAUNCH = 8e-6  # s: attention's launch overhead within the bounds below


def attention_bound(
    kind: str, device: DeviceSpec, head_dim: int, window: int, kv_width: float
) -> Callable[[Shape, float], float]:
    """Least seconds of `batch` rows: prompts of `x` tokens, or one query each over `x` keys."""
    peak, bandwidth = _peak(device, "bfloat16"), device.memory_bandwidth

    def context(shape: Shape, x: float) -> float:
        heads, kv_heads, batch = shape
        inside = min(x, window) if window else x
        pairs = inside * (inside + 1) / 2 + (x - inside) * inside
        size = batch * x * (4 * heads * head_dim + 2 * kv_width * kv_heads * head_dim)
        return _LAUNCH + max(4 * batch * heads * head_dim * pairs / (0.6 * peak), size / (0.8 * bandwidth))

    def generation(shape: Shape, x: float) -> float:
        heads, kv_heads, batch = shape
        keys = batch * (min(x, window) if window else x)
        size = keys * 2 * kv_heads * head_dim * kv_width
        return _LAUNCH + max(size / (0.85 * bandwidth), 4 * keys * heads * head_dim / (0.4 * peak))

    return context if kind == "context" else generation


def _chunk(table: KernelTable, heads: int, kv_heads: int, row: RowShape, rows: int) -> Answer:
    """`rows` equal prompts, or chunks of prompts: a chunk takes what a whole prompt of as many pairs takes."""
    length = max(1.0, (math.sqrt(8 * visible_pairs(row.queries, row.keys) + 1) - 1) / 2)
    answer = table.time((heads, kv_heads, rows), length)
    assert answer is not None
    if row.queries < row.keys:
        return Answer(
            answer.seconds, answer.spread + 0.05, "transferred", f"{answer.detail}, as a prompt of {length:.0f}"
        )
    return answer


def _peak(device: DeviceSpec, dtype: str) -> float:
    peaks = device.peak_flops
    return peaks.get("fp8" if dtype.startswith("fp8") else "bfloat16") or peaks.get("float16") or max(peaks.values())


def _soft_max(a: float, b: float, power: float = 4.0) -> float:
    high, low = max(a, b), min(a, b)
    return high * (1 + (low / high) ** power) ** (1 / power)


def _order(version: str) -> tuple[tuple[int, str], ...]:
    """Versions in order: numbers as numbers, release candidates before releases by their text."""
    parts = version.replace("rc", ".rc.").split(".")
    return tuple((int(p), "") if p.isdigit() else (-1, p) for p in parts)


__all__ = ["SYSTEMS", "Silicon", "SystemTables", "attention_bound", "installed_folder"]
