"""From which batch on speculation loses: output tokens/s of the simulator with and without, as one table.

    python bench/speculation.py [--model llama-3.1-70b] [--device h100-sxm] [--tp 4] [--draft llama-3.1-8b] [--op-time silicon]

As many clients as the batch ask again when they are answered: prompts of 512 tokens, answers of 128. Acceptance is an assumption, not a
measurement: one chance `--alpha` for all guesses, the same for every speculator, so lines differ in what drafting costs only.
"""

from __future__ import annotations

import argparse

from twinfer.core.config import Choice, EngineConfig
from twinfer.core.registry import default_registry
from twinfer.core.workload import Workload
from twinfer.simulator.run import simulate

BATCHES = (1, 4, 16, 64, 256)
PROMPT, ANSWER = 512, 128
PUBLISHED = (
    ("llama-3.1-8b", 1, "num_tokens=2", 1.89, 1.51), ("llama-3.1-8b", 1, "num_tokens=4", 2.08, 1.48),
    ("llama-3.1-70b", 8, "num_tokens=8,tree=63", 5.88, 2.65),
)  # fmt: skip
"""(model, H100s, guesses of eagle, tokens a step, speedup), batch 1, MT-bench. EAGLE-1 chains: vLLM pull requests 16035 (lengths) and
16937 (speed; 133, 201.7 and 198 tokens/s). EAGLE-3 tree of 64 with its root, 8 deep, Llama-3.3-70B in float16: SGLang pull request 4716
(88.61 and 234.54 tokens/s)."""


def speculators(draft: str, alpha: float, k: int) -> dict[str, Choice]:
    some = {"num_tokens": k, "alpha": alpha}
    return {
        f"draft, {draft}": Choice(name="draft", options={"model": draft, **some}),
        "eagle": Choice(name="eagle", options=some),
        "medusa": Choice(name="medusa", options={"heads": k, "alpha": alpha}),
        "ngram": Choice(name="ngram", options=some),
    }


def throughput(args: argparse.Namespace, batch: int, speculator: Choice | None) -> float:
    config = EngineConfig(
        model=args.model, device=args.device, tp=args.tp, op_time=tuple(args.op_time), speculator=speculator,
        max_num_seqs=batch, max_num_batched_tokens=8192,
    )  # fmt: skip
    workload = Workload(num_requests=max(16, 4 * batch), concurrency=batch, input_len=PROMPT, output_len=ANSWER)
    record = simulate(config, workload, default_registry(), detail="requests")
    return float(record.metrics["output_throughput"])


def alpha_of(guesses: str, mean: float) -> float:
    """The one chance with which `guesses` of eagle give `mean` tokens a step."""
    registry, low, high = default_registry(), 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        found = registry.build("speculator", Choice.model_validate(f"eagle:{guesses},alpha={middle!r}")).mean_tokens
        low, high = (middle, high) if found < mean else (low, middle)
    return low


def published(op_time: tuple[str, ...] = ()) -> list[tuple[str, float, float]]:
    """(guesses, speedup measured, speedup predicted) of `PUBLISHED`, printed as a table."""

    def speed(model: str, tp: int, speculator: str | None) -> float:
        config = EngineConfig.model_validate(
            {"model": model, "tp": tp, "device": "h100-sxm", "op_time": op_time, "speculator": speculator}
        )
        workload = Workload(num_requests=20, concurrency=1, input_len=128, output_len=512)
        return float(simulate(config, workload, default_registry(), detail="requests").metrics["output_throughput"])

    found = []
    print("| model | guesses | measured tokens a step | speedup measured | speedup predicted |\n|---|---|---|---|---|")
    for model, tp, guesses, mean, measured in PUBLISHED:
        plain = speed(model, tp, None)
        predicted = speed(model, tp, f"eagle:{guesses},alpha={alpha_of(guesses, mean)!r}") / plain
        print(
            f"| {model}, {tp} H100 | {guesses} | {mean} | {measured}x | {predicted:.2f}x ({plain:.0f} tok/s without) |",
            flush=True,
        )
        found.append((guesses, measured, predicted))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.1-70b")
    parser.add_argument("--device", default="h100-sxm")
    parser.add_argument("--tp", type=int, default=4)
    parser.add_argument("--draft", default="llama-3.1-8b")
    parser.add_argument("--alpha", type=float, default=0.7)
    parser.add_argument("--num-tokens", type=int, default=4)
    parser.add_argument("--op-time", action="append", default=[])
    parser.add_argument("--published", action="store_true", help="speedups beside measured ones instead")
    args = parser.parse_args()
    if args.published:
        published(tuple(args.op_time))
        return
    print("| output tokens/s at batch | " + " | ".join(map(str, BATCHES)) + " |")
    print("|---" * (len(BATCHES) + 1) + "|")
    plain = [throughput(args, batch, None) for batch in BATCHES]
    print("| without | " + " | ".join(f"{v:,.0f}" for v in plain) + " |", flush=True)
    for name, choice in speculators(args.draft, args.alpha, args.num_tokens).items():
        found = [throughput(args, batch, choice) for batch in BATCHES]
        cells = [f"{v:,.0f} ({v / p:.2f}x)" for v, p in zip(found, plain, strict=True)]
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
