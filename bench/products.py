"""Microseconds per matrix product of one model's shapes, by weight format and number of rows.

    python bench/products.py --threads 1 --rows 1 8 32 128 512

Every product of a pass comes with weights of its own, as many as one model's layers, so that they come from where they
do in a step: a single matrix would stay in the caches. With one thread CPU time is taken (other processes then cost
bandwidth only), with more wall time. The smallest of some rounds is shown. The head never gets more than 32 rows.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from twinfer.core.runtime.linear import Dense, Linear
from twinfer.kernels import gemm

# (op, outputs, inputs, how often a step has it): SmolLM2-135M
SHAPES = (
    ("qkv_proj", 960, 576, 30), ("o_proj", 576, 576, 30), ("gate_up_proj", 3072, 576, 30), ("down_proj", 576, 1536, 30),
    ("lm_head", 49152, 576, 1),
)  # fmt: skip
HEAD_ROWS = 32  # logits that a step asks for at most; more rows of the others are a prefill
ROUNDS = 3


Make = Callable[[gemm.Arena], Linear]


def blocks_of(kind: str) -> Callable[[torch.Tensor], Make]:
    from gguf import GGMLQuantizationType
    from gguf.quants import quantize

    def prepare(weight: torch.Tensor) -> Make:
        n, k = weight.shape
        data = torch.from_numpy(quantize(weight.numpy(), GGMLQuantizationType[kind])).view(n, k // gemm.BLOCK, -1)
        return lambda arena: gemm.pack_blocks(kind, data, arena)

    return prepare


FORMATS: dict[str, Callable[[torch.Tensor], Make]] = {
    "float32 (torch.mm)": lambda weight: lambda arena: Dense(weight.clone()),
    "bf16": lambda weight: lambda arena: gemm.pack_bf16(weight, arena),
    "int8": lambda weight: lambda arena: gemm.pack_int8(weight, arena),
    "Q8_0": blocks_of("Q8_0"),
    "Q4_1": blocks_of("Q4_1"),
}


def best(linears: list[Linear], x: torch.Tensor, clock: Callable[[], float]) -> float:
    """Microseconds per product."""
    least = float("inf")
    for _ in range(ROUNDS):
        start = clock()
        for linear in linears:
            linear(x)
        least = min(least, (clock() - start) / len(linears))
    return least * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 128, 512])
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=list(FORMATS))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    clock = time.process_time if args.threads == 1 else time.perf_counter
    if reason := gemm.why_not():
        raise SystemExit(f"no packed products here: {reason}")
    print(f"{args.threads} thread(s), us per product\n")
    print("| product | format | " + " | ".join(f"{m} rows" for m in args.rows) + " |")
    print("|---|---|" + "---|" * len(args.rows))
    steps = {name: [0.0] * len(args.rows) for name in args.formats}
    with torch.inference_mode():
        for op, n, k, count in SHAPES:
            most = HEAD_ROWS if op == "lm_head" else max(args.rows)
            weight = torch.randn(n, k)
            for name in args.formats:
                arena = gemm.Arena()
                make = FORMATS[name](weight)
                linears = [make(arena) for _ in range(max(2, count))]
                times = [best(linears, torch.randn(min(m, most), k), clock) for m in args.rows]
                steps[name] = [sum_ + count * t for sum_, t in zip(steps[name], times, strict=True)]
                print(f"| {op} [{n}, {k}] | {name} | " + " | ".join(f"{t:.0f}" for t in times) + " |", flush=True)
    print("\n| all products of a step, ms | " + " | ".join(f"{m} rows" for m in args.rows) + " |")
    print("|---|" + "---|" * len(args.rows))
    for name, sums in steps.items():
        print(f"| {name} | " + " | ".join(f"{t / 1e3:.1f}" for t in sums) + " |")


if __name__ == "__main__":
    main()
