"""Speculation on or off, by batch: chains, trees and look-ahead beside each other.

Acceptance is an assumption (`ALPHA`), the same for all that guess from a draft, so lines differ in what guessing costs and in how
many guesses are checked; look-ahead has the chance that fits its published length.
"""

from __future__ import annotations

from collections.abc import Iterable

from what_if_runs import OP_TIME, Engine, closed, metric, table

from twinfer.core.config import EngineConfig
from twinfer.core.registry import default_registry
from twinfer.core.workload import Workload
from twinfer.simulator.run import prepare
from twinfer.simulator.speculate import break_even_batch, tokens_per_second
from twinfer.simulator.step_time import StepTimer

ALPHA = 0.7
DENSE: Engine = {"model": "llama-3.1-70b", "tp": 4, "max_num_batched_tokens": 32768, "max_model_len": 8192}
BATCHES = (1, 4, 16, 64, 256)
SPECULATORS = {
    "none": "",
    "draft llama-3.1-8b, chain of 4": f"draft:model=llama-3.1-8b,alpha={ALPHA}",
    "eagle, chain of 4": f"eagle:alpha={ALPHA}",
    "eagle, tree of 16, 6 deep": f"eagle:alpha={ALPHA},num_tokens=6,tree=16",
    "eagle, tree of 60, 6 deep": f"eagle:alpha={ALPHA},num_tokens=6,tree=60",
    "medusa, chain of 4": f"medusa:alpha={ALPHA}",
    "medusa, tree of 64, 4 deep": f"medusa:alpha={ALPHA},tree=64",
    "ngram, chain of 4": f"ngram:alpha={ALPHA}",
    "lookahead, W 7, N 5, G 7": "lookahead",
}


def timer_of(engine: Engine, batch: int = 1) -> StepTimer:
    """Times steps of `engine` on H100 SXM."""
    config = EngineConfig.model_validate(
        {"device": "h100-sxm", "op_time": tuple(OP_TIME), **engine, "max_num_seqs": batch}
    )
    return prepare(config, Workload(num_requests=1, input_len=512, output_len=512), default_registry()).timer


def speculation() -> None:
    """Speculation on or off, by batch?"""

    def by_batch() -> Iterable[list[str]]:
        plain: dict[int, float] = {}
        for name, text in SPECULATORS.items():
            cells, guesses = [], None
            for batch in BATCHES:
                engine = {**DENSE, "speculator": text or None}
                record = closed(engine, batch, 512, 512, rounds=2 if batch > 1 else 4)
                if record is None:
                    cells.append(metric(None, ""))
                    continue
                speed = record.metrics["output_throughput"]
                guesses = record.metrics.get("speculation", guesses)
                plain.setdefault(batch, speed)
                cells.append(f"{speed:,.0f}" + (f" ({speed / plain[batch]:.2f}x)" if text else ""))
            if guesses is None:
                yield [name, "1", "1.00", *cells, ""]
                continue
            rows = 1 + guesses["num_draft_tokens"] / guesses["num_drafts"]
            best = break_even_batch(timer_of({**DENSE, "speculator": text}), 768, 1024)
            yield [name, f"{rows:.0f}", f"{guesses['mean_acceptance_length']:.2f}", *cells, str(best)]

    table(
        ["guesses", "rows a sequence", "tokens a step", *(f"tok/s at batch {b}" for b in BATCHES), "pays up to"],
        by_batch(), "Llama-3.1-70B on 4 H100 SXM, prompts of 512 tokens, answers of 512, as many clients as the batch:",
    )  # fmt: skip

    shapes = {"chain of 2": "num_tokens=2", "chain of 4": "num_tokens=4", "chain of 8": "num_tokens=8",
              "tree of 16, 6 deep": "num_tokens=6,tree=16", "tree of 60, 6 deep": "num_tokens=6,tree=60"}  # fmt: skip

    def by_chance() -> Iterable[list[str]]:
        for alpha in (0.3, 0.5, 0.7, 0.8, 0.9):
            found = [
                break_even_batch(timer_of({**DENSE, "speculator": f"eagle:{shape},alpha={alpha}"}), 768, 1024)
                for shape in shapes.values()
            ]
            yield [f"{alpha:g}", *(str(n) if n else "never" for n in found)]

    table(
        ["chance that a guess is right", *shapes], by_chance(),
        "The largest batch with which eagle pays, decode steps at 768 tokens of context (of 1,024 at most):",
    )  # fmt: skip

    models: dict[str, Engine] = {
        "llama-3.1-70b, bf16": DENSE, "llama-3.1-70b, int4 weights": {**DENSE, "quantizer": "int4"},
        "mixtral-8x7b, bf16": {"model": "mixtral-8x7b", "tp": 4},
        "qwen3-235b-a22b, fp8": {"model": "qwen3-235b-a22b", "tp": 8, "quantizer": "fp8"},
    }  # fmt: skip

    def by_model() -> Iterable[list[str]]:
        for name, engine in models.items():
            timer = timer_of({**engine, "speculator": f"eagle:alpha={ALPHA}"})
            yield [name, *(
                f"{tokens_per_second(timer, b, 768, True) / tokens_per_second(timer, b, 768, False):.2f}x"
                for b in (1, 2, 4, 8, 16, 32, 64, 128, 256)
            )]  # fmt: skip

    table(
        ["model", *(f"batch {b}" for b in (1, 2, 4, 8, 16, 32, 64, 128, 256))], by_model(),
        f"Decode speed with eagle (chain of 4, chance {ALPHA:g}) over that without, at 768 tokens of context:",
    )  # fmt: skip
