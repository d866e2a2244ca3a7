"""One checkpoint under every attention variant: KV bytes per token, perplexity and decode speed, as one table.

    python bench/variants.py --text TEXTS/wiki.txt [--model smollm2-135m] [--max-tokens 52224] [--quick] [--json FILE]
    python bench/variants.py --no-speed ... | --no-quality ... | --only mqa,mla:rank=0.5

Perplexity is that of `twinfer perplexity` (chunks of 512 tokens, all but the first of each scored) in float32, its excess
over the checkpoint's own variant is paired over chunks. Decode speed is the median over interleaved rounds of 1 and 8
sequences (64 prompt tokens, 64 new ones), output tokens per second between the first and the last token of the batch.
MHA and full-rank MLA are exact, so their perplexity must be that of the checkpoint; the script fails when it is not.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from twinfer.core.config import EngineConfig
from twinfer.core.registry import default_registry
from twinfer.core.runtime.loading import Engine, load_engine
from twinfer.core.runtime.perplexity import CHUNK, Perplexity, cut, score, scoring_config
from twinfer.core.runtime.run import serve, warm_up
from twinfer.core.workload import Workload, generate

VARIANTS = ("native", "mha", "mqa", "mla", "mla:rank=0.75", "mla:rank=0.5", "mla:rank=0.25")
EXACT = ("mha", "mla")
SAME = 1e-3  # relative difference of perplexity allowed where a conversion is exact
BATCHES = (1, 8)
PROMPT, ANSWER, ROUNDS = 64, 64, 5


@dataclass
class Line:
    """What was found of one variant. decode: batch -> tokens/s of each round."""

    variant: str
    what: str = ""
    kv_bytes_per_token: float = 0.0
    perplexity: float | None = None
    excess_nats: float | None = None
    excess_error: float | None = None
    num_tokens: int = 0
    load_s: float = 0.0
    decode: dict[int, list[float]] = field(default_factory=dict)


def config_of(model: str, variant: str) -> EngineConfig:
    given = {} if variant == "native" else {"attention": variant}
    return EngineConfig.model_validate({"model": model, "dtype": "float32", **given})


def load(config: EngineConfig, line: Line) -> Engine:
    begin = time.perf_counter()
    engine = load_engine(scoring_config(config))
    line.load_s = time.perf_counter() - begin
    line.kv_bytes_per_token = engine.setup.kv_bytes_per_token
    line.what = engine.setup.reasons.get("attention", f"{engine.setup.model.variant}, as trained").partition(";")[0]
    return engine


def measure_quality(engine: Engine, text: str, max_tokens: int, label: str) -> Perplexity:
    def told(done: int, total: int, info: dict[str, object]) -> None:
        if sys.stderr.isatty():
            print(f"\r{label}: {done}/{total} chunks ", end="", file=sys.stderr, flush=True)

    return score(engine, cut(engine.tokenizer, text, CHUNK, max_tokens), CHUNK, told)


def decode_speed(engine: Engine, batch: int) -> float:
    """Output tokens/s of `batch` sequences that decode together."""
    workload = Workload(num_requests=batch, input_len=PROMPT, output_len=ANSWER, rate=math.inf)
    requests = generate(workload, engine.spec.vocab_size, engine.setup.limits.max_model_len, registry=engine.registry)
    record = serve(engine, requests, workload, lambda done, total, info: None)
    first = max(r.first_token for r in record.requests if r.first_token is not None)
    last = min(r.last_token for r in record.requests if r.last_token is not None)
    return batch * (ANSWER - 1) / (last - first)


def measure_speed(engines: list[tuple[Line, Engine]], rounds: int) -> None:
    for batch in BATCHES:
        ready = []
        for line, engine in engines:
            config = engine.setup.config.model_copy(
                update={"max_num_seqs": batch, "max_model_len": PROMPT + ANSWER, "num_kv_blocks": 16 * batch}
            )
            other = engine.reconfigured(config)
            warm_up(other, generate(Workload(num_requests=batch, input_len=PROMPT, output_len=4, rate=math.inf),
                                    other.spec.vocab_size, PROMPT + ANSWER, registry=other.registry))  # fmt: skip
            ready.append((line, other))
        for _ in range(rounds):
            for line, other in ready:
                line.decode.setdefault(batch, []).append(decode_speed(other, batch))


def table(lines: list[Line]) -> str:
    rows = ["| attention | what it is | KV bytes/token | perplexity | excess nats/token | decode b1, tok/s | b8, tok/s |",
            "|---|---|---|---|---|---|---|"]  # fmt: skip
    for line in lines:
        ppl = "" if line.perplexity is None else f"{line.perplexity:.3f}"
        excess = "" if line.excess_nats is None else f"{line.excess_nats:+.4f}"
        if excess and line.excess_error is not None:
            excess += f" ± {line.excess_error:.4f}"
        speeds = [f"{statistics.median(line.decode[batch]):.1f}" if line.decode.get(batch) else "" for batch in BATCHES]
        rows.append(
            f"| {line.variant} | {line.what} | {line.kv_bytes_per_token:,.0f} | {ppl} | {excess} | "
            + " | ".join(speeds) + " |"
        )  # fmt: skip
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="the text to score (bench/texts.py makes some)")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--max-tokens", type=int, default=102 * CHUNK, help="of the text (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="4 chunks of text, one round")
    parser.add_argument("--no-quality", action="store_true", help="no perplexity")
    parser.add_argument("--no-speed", action="store_true", help="no decode speed")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--only", help="variants, separated by semicolons; the native one is always measured")
    parser.add_argument("--json", type=Path, help="file for everything that was measured")
    given = parser.parse_args()
    if not given.no_quality and given.text is None:
        parser.error("--text is missing (or give --no-quality)")
    max_tokens, rounds = (4 * CHUNK, 1) if given.quick else (given.max_tokens, given.rounds)
    variants = VARIANTS if not given.only else ("native", *(v for v in given.only.split(";") if v != "native"))
    default_registry()
    lines: list[Line] = []
    engines: list[tuple[Line, Engine]] = []
    base: Perplexity | None = None
    for variant in variants:
        line = Line(variant)
        engine = load(config_of(given.model, variant), line)
        lines.append(line)
        if not given.no_quality:
            found = measure_quality(engine, given.text.read_text(encoding="utf-8"), max_tokens, variant)
            base = base or found
            line.perplexity, line.num_tokens = found.perplexity, found.num_tokens
            line.excess_nats, line.excess_error = found.excess(base)
            print(f"{variant}: perplexity {found.perplexity:.4f} over {found.num_tokens:,} tokens", file=sys.stderr)
        if given.no_speed:
            engine.close()
        else:
            engines.append((line, engine))
    if not given.no_speed:
        measure_speed(engines, rounds)
    print(table(lines))
    if given.json:
        given.json.write_text(json.dumps([asdict(line) for line in lines], indent=2))
    for line in lines:
        if line.variant in EXACT and line.excess_nats is not None and abs(math.expm1(line.excess_nats)) > SAME:
            sys.exit(f"{line.variant}: perplexity differs by {math.expm1(line.excess_nats):.1e}, more than {SAME}")


if __name__ == "__main__":
    main()
