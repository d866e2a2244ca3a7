"""Predictions beside figures that others have published: first-token times of one request, offline throughputs.

    python bench/fidelity_published.py [--folder SYSTEMS] [--quick] [--json]

Nothing is fitted to these figures. Kernel times are those of TensorRT-LLM 1.3 on the same card (`silicon`); the figures
are of older versions, so each prediction carries the spread between versions.

first token, batch 1    TensorRT-LLM 0.5, docs/source/performance.md, 2023-10: one forward pass over the prompt
served, 1 client        NVIDIA NIM 1.8.0 (TensorRT-LLM), docs.nvidia.com/nim/benchmarking/llm/1.0.0/performance, 2025:
                        2 x H100, Llama-3.3-70B fp8, mean TTFT and inter-token latency seen by the client
offline throughput      TensorRT-LLM 1.0, docs/source/performance/perf-overview.md, 2025-09: output tokens/s of one
                        replica; all requests at once, equal lengths, FP8 checkpoints with KV in fp8

Offline runs are simulated with at most 2,048 sequences and 8,192 tokens a step (the defaults of that stack; prompts are fed
whole, so with longer ones: one of them beside a token of every sequence) and with fewer requests than were run: what fits into
the KV pool three times over, at least 256.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twinfer.core.catalog import resolve_spec
from twinfer.core.config import Choice, EngineConfig
from twinfer.core.errors import TwinferError
from twinfer.core.workload import Workload
from twinfer.plugins.op_time.silicon import installed_folder
from twinfer.simulator.run import simulate

_SEQUENCES, _TOKENS = 2048, 8192
REQUEST = 0.013  # s, as in fidelity_served.py
MEMORY = {"h100-sxm": 84.9e9, "h200-sxm": 150.1e9, "a100-sxm-80gb": 85.1e9}
FP8 = Choice(name="fp8", options={"scales": "tensor", "kv": "fp8"})


@dataclass(frozen=True, slots=True)
class Figure:
    """value: s of a first token or between tokens, or output tokens/s of one replica."""

    kind: str
    device: str
    model: str
    tp: int
    isl: int
    osl: int
    value: float
    fp8: bool = True


def first_token(device: str, model: str, tp: int, isl: int, ms: float, fp8: bool = True) -> Figure:
    return Figure("first token, batch 1", device, model, tp, isl, 1, ms / 1e3, fp8)


def offline(device: str, model: str, tp: int, figures: dict[tuple[int, int], float]) -> list[Figure]:
    return [Figure("offline throughput", device, model, tp, isl, osl, rate) for (isl, osl), rate in figures.items()]


_LENGTHS = (
    (128, 128), (128, 2048), (128, 4096), (500, 2000), (1000, 1000), (1000, 2000), (2048, 128), (2048, 2048), (5000, 500),
    (20000, 2000),
)  # fmt: skip
FIGURES: tuple[Figure, ...] = (
    first_token("h100-sxm", "llama-2-7b", 1, 128, 7), first_token("h100-sxm", "llama-2-7b", 1, 2048, 36),
    first_token("h100-sxm", "llama-2-70b", 4, 128, 26), first_token("h100-sxm", "llama-2-70b", 4, 2048, 109),
    first_token("a100-sxm-80gb", "llama-2-7b", 1, 128, 16, False),
    first_token("a100-sxm-80gb", "llama-2-7b", 1, 2048, 133, False),
    first_token("a100-sxm-80gb", "llama-2-70b", 4, 128, 47, False),
    first_token("a100-sxm-80gb", "llama-2-70b", 4, 2048, 377, False),
    Figure("served TTFT, 1 client", "h100-sxm", "llama-3.1-70b", 2, 5000, 500, 0.40677),
    Figure("served ITL, 1 client", "h100-sxm", "llama-3.1-70b", 2, 5000, 500, 0.01858),
    Figure("served TTFT, 1 client", "h100-sxm", "llama-3.1-70b", 2, 500, 2000, 0.04777),
    Figure("served ITL, 1 client", "h100-sxm", "llama-3.1-70b", 2, 500, 2000, 0.01891),
    *offline("h200-sxm", "llama-3.1-70b", 1, dict(zip(
        _LENGTHS, (3803, 4336, 2872, 3666, 2909, 2994, 442, 2003, 566, 283), strict=True))),
    *offline("h100-sxm", "llama-3.1-70b", 2, dict(zip(
        _LENGTHS, (6378, 6651, 4199, 5222, 4205, 4146, 762, 3082, 898, 437), strict=True))),
    *offline("h200-sxm", "llama-3.1-8b", 1, dict(zip(
        _LENGTHS, (27911, 26221, 18027, 20770, 17744, 16828, 3538, 12194, 3902, 1804), strict=True))),
    *offline("h100-sxm", "llama-3.1-8b", 1, dict(zip(
        _LENGTHS, (28312, 22714, 14325, 17660, 15220, 13899, 3450, 9305, 3459, 1351), strict=True))),
)  # fmt: skip
QUICK = frozenset({(1000, 1000), (2048, 128), (5000, 500)})
"""Lengths of the offline figures that `--quick` keeps."""


def predict(figure: Figure, folder: Path) -> tuple[float, float, float]:
    """The figure as predicted, and the ends of its 80 % band."""
    weights = resolve_spec(figure.model).num_params() * (1 if figure.fp8 else 2) / figure.tp
    fraction = min(0.97, 0.9 + 0.1 * weights / MEMORY[figure.device])
    many = figure.kind.startswith("offline")
    budget = _TOKENS if figure.isl <= _TOKENS else figure.isl + _SEQUENCES
    options = f"folder={folder},stack=trtllm,version=unstated"
    if figure.tp > 1:
        options += ",fused_all_reduce=true"
    config = EngineConfig(
        model=figure.model, device=figure.device, dtype="bfloat16", tp=figure.tp, quantizer=FP8 if figure.fp8 else None,
        scheduler=Choice(name="continuous", options={"chunked_prefill": False, "admission": "whole"}),
        kv_cache=Choice(name="paged", options={"prefix_sharing": False}), memory_fraction=fraction,
        max_num_seqs=_SEQUENCES if many else 1, max_num_batched_tokens=budget if many else figure.isl,
        max_model_len=figure.isl + figure.osl + 1, max_outstanding=1 if figure.osl == 1 else 2,
        op_time=(f"silicon:{options}", "roofline"),
    )  # fmt: skip
    number, clients = 1, None
    if many:
        free = MEMORY[figure.device] * fraction - weights
        spec = resolve_spec(figure.model)
        fits = figure.tp * free / (spec.kv_bytes_per_token() / 2 * (figure.isl + figure.osl))
        number = max(256, 3 * int(min(float(_SEQUENCES), fits)))
    elif figure.osl > 1:
        number, clients = 3, 1
    record = simulate(
        config, Workload(num_requests=number, concurrency=clients, input_len=figure.isl, output_len=figure.osl)
    )
    if many:
        low, high = record.intervals["output_throughput"]
        return record.metrics["output_throughput"], low, high
    name = "tpot" if "ITL" in figure.kind else "ttft"
    beside = REQUEST if figure.kind.startswith("served TTFT") else 0.0
    low, high = record.intervals[f"{name}.mean"]
    return record.metrics[name]["mean"] + beside, low + beside, high + beside


def results(folder: Path, quick: bool = False) -> list[dict[str, Any]]:
    found = []
    for figure in FIGURES:
        if quick and figure.kind.startswith("offline") and (figure.isl, figure.osl) not in QUICK:
            continue
        line: dict[str, Any] = {name: getattr(figure, name) for name in figure.__slots__}
        try:
            value, low, high = predict(figure, folder)
        except TwinferError as error:
            found.append(line | {"refused": str(error)})
            continue
        found.append(
            line | {"predicted": value, "error": value / figure.value - 1, "inside": low <= figure.value <= high}
        )
    return found


def table(lines: list[dict[str, Any]]) -> str:
    out = []
    for r in lines:
        unit = 1.0 if r["kind"].startswith("offline") else 1e3
        what = f"{r['kind']:22} {r['device']:13} {r['model']:13} tp {r['tp']}  {r['isl']:5} + {r['osl']:4}"
        if "refused" in r:
            out.append(f"{what}  refused: {r['refused']}")
            continue
        words = "tok/s" if unit == 1 else "ms"
        out.append(
            f"{what}  published {r['value'] * unit:9,.1f}  predicted {r['predicted'] * unit:9,.1f} {words:5} "
            f"{r['error']:+6.1%}{'' if r['inside'] else '  outside the band'}"
        )
    for kind in sorted({r["kind"] for r in lines}):
        part = [r for r in lines if r["kind"] == kind and "error" in r]
        if part:
            sizes = [abs(r["error"]) for r in part]
            inside = sum(r["inside"] for r in part) / len(part)
            out.append(
                f"{kind}: {len(part)} figures, median {statistics.median(sizes):.1%}, largest {max(sizes):.1%}, "
                f"bias {statistics.median(r['error'] for r in part):+.1%}, 80 % band covers {inside:.0%}"
            )
    return "\n".join(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="`systems` folder; default: of the installed aiconfigurator-core")
    parser.add_argument("--quick", action="store_true", help="three of the ten lengths of each offline table")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    folder = args.folder or installed_folder()
    if folder is None:
        parser.error("aiconfigurator-core is not installed; pip install 'twinfer[silicon]' or give --folder")
    lines = results(folder, args.quick)
    if args.json:
        json.dump(lines, sys.stdout, indent=1)
        return
    print(table(lines))


if __name__ == "__main__":
    main()
