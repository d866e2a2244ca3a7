"""Time per output token of served sparse models on Hopper, from step times alone: no scheduler, no queue.

    python bench/fidelity_sparse.py [--folder SYSTEMS]

Rows are those of `silicon_sample.csv` of the package aiconfigurator-core: prompts and outputs served together, of models
with experts, on one node, where the groups of experts and of attention agree. Predicted is one decode step of all rows at
the middle of their outputs, plus each row's share of the prompts that are computed between them. Left out: Qwen3-235B under
vLLM, whose concurrency is that of many replicas. Known and kept: DeepSeek-R1 under TensorRT-LLM seems to draft tokens,
which is not modelled, so its rows come out slower than measured; rows whose batch does not fit their memory are queues.

Not held out: these rows were seen when `silicon:skew` got its default, which is the package's own (1.01), and when both
projections down of latent attention became one product. Nothing is fitted to them.
"""

from __future__ import annotations

import argparse
import csv
import statistics
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

from twinfer.core.catalog import resolve_spec
from twinfer.core.device import load_device
from twinfer.core.layout import Layout
from twinfer.core.registry import Registry
from twinfer.core.spec import ModelSpec
from twinfer.core.work import StepShape, step_ops
from twinfer.plugins.op_time.roofline import Roofline
from twinfer.plugins.op_time.silicon import Silicon, installed_folder
from twinfer.simulator.op_time import OpTimeChain

MODELS = {
    "deepseek-ai/DeepSeek-R1": "deepseek-v3", "deepseek-ai/DeepSeek-V3": "deepseek-v3",
    "Qwen/Qwen3-235B-A22B-FP8": "qwen3-235b-a22b", "openai/gpt-oss-120b": "gpt-oss-120b",
}  # fmt: skip
DEVICES = {"h100_sxm": "h100-sxm", "h200_sxm": "h200-sxm"}
BLOCK_SCALED = ("DeepSeek", "Qwen3")  # FP8 checkpoints with a scale per block, whatever the row says
MOST_TOKENS = 8192  # of prompts in a step


@cache
def model_of(path: str, dtype: str) -> ModelSpec:
    model = resolve_spec(MODELS[path])
    if dtype.startswith("fp8") and not model.linear_dtype:
        return replace(model, weight_bits=8.0, linear_dtype="fp8")
    return model


def step_seconds(model: ModelSpec, shape: StepShape, layout: Layout, chain: OpTimeChain) -> float:
    return sum(chain.time(op).seconds * op.count for op in step_ops(model, shape, layout))


def errors(folder: Path) -> dict[tuple[str, str, str], list[float]]:
    """Relative errors of the time per output token by (model, system, stack)."""
    chains: dict[tuple[str, str, str], OpTimeChain] = {}
    found: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    with (folder / "silicon_sample.csv").open() as file:
        for row in csv.DictReader(file):
            path, stack = row["model_path"], row["backend"]
            if path not in MODELS or row["system"] not in DEVICES or row["mode"] != "agg":
                continue
            if "Qwen3" in path and stack == "vllm":
                continue
            tp, pp, dp, expert_tp, ep, isl, osl, batch = (
                int(float(row[name] or 1)) for name in (
                    "tp_size", "pp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size", "isl", "osl", "batch_size"
                )
            )  # fmt: skip
            if tp * dp != expert_tp * ep or tp * dp > 8:
                continue
            fp8 = "block" if any(name in path for name in BLOCK_SCALED) else "tensor"
            key = (DEVICES[row["system"]], stack, fp8)
            if key not in chains:
                options = Silicon.Options(folder=str(folder), stack=stack, fp8=fp8)
                device = load_device(key[0], Registry(entry_points=False))
                chains[key] = OpTimeChain((Silicon(options), Roofline()), device)
            model, layout, rows = model_of(path, row["gemm_quant_mode"]), Layout(tp, pp, 1, dp, ep), batch * dp
            decode = step_seconds(model, StepShape.decode(*[isl + osl // 2] * rows), layout, chains[key])
            prompts = max(1, min(rows, MOST_TOKENS // isl))
            prefill = step_seconds(model, StepShape.prefill(*[isl] * prompts), layout, chains[key]) / prompts
            predicted = decode + rows * prefill / osl
            measured = float(row["silicon_tpot_ms"]) * 1e-3
            found[path.split("/")[1], row["system"], stack].append(predicted / measured - 1)
    return found


def tables(folder: Path) -> Iterator[tuple[str, str]]:
    """(title, text) for `fidelity.py`."""
    lines = []
    for (model, system, stack), found in sorted(errors(folder).items()):
        size = sorted(map(abs, found))
        lines.append(
            f"{model:24} {system:9} {stack:7} {len(found):4} rows   median {statistics.median(size):6.1%}  "
            f"mean {statistics.fmean(size):6.1%}  p90 {size[int(0.9 * (len(size) - 1))]:6.1%}  "
            f"bias (median) {statistics.median(found):+6.1%}"
        )
    yield "(b) sparse models on Hopper: time per output token from step times", "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="`systems` folder; default: of the installed aiconfigurator-core")
    folder = parser.parse_args().folder or installed_folder()
    if folder is None:
        parser.error("aiconfigurator-core is not installed; pip install 'twinfer[silicon]' or give --folder")
    for title, text in tables(folder):
        print(f"{title}\n{text}")


if __name__ == "__main__":
    main()
