"""Real against predicted on this machine: four workloads and 200 mixed requests that calibration has not seen.

    python bench/fidelity_cpu.py [--model M] [--dtype D] [--quant gguf ...] [--repeats 3] [--calibrate] [--paced] [--json FILE]

Formats and workloads are interleaved within each repeat. `--quant` takes several formats ("none" is plain --dtype);
`--calibrate` measures the machine before and after each repeat of a format (one to two minutes each), as `twinfer calibrate` does; a
repeat is predicted by the mean of both, and the middle of the repeats is compared with the middle of the runs. `--paced`: a short run of other lengths before and after each
run says how fast the machine is at the moment. Ctrl-C or SIGTERM ends after the run and reports whole rounds.

Run it on a quiet machine: two-thread torch on shared cores is easily 10 times slower than alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from twinfer.core.config import Choice, EngineConfig
from twinfer.core.errors import ConfigError
from twinfer.core.records import RunRecord
from twinfer.core.registry import default_registry
from twinfer.core.runtime.loading import Engine, load_engine
from twinfer.core.runtime.measure import measure
from twinfer.core.runtime.run import serve, warm_up
from twinfer.core.workload import Workload, generate
from twinfer.simulator.calibrate import calibrate
from twinfer.simulator.fidelity import CASES, Line, fidelity, mixed, table


class Engines:
    """Real runs on engines that are loaded once a format."""

    def __init__(self) -> None:
        self._loaded: dict[tuple[str, str, str], Engine] = {}

    def __call__(self, config: EngineConfig, workload: Workload) -> RunRecord:
        """As `run_engine`, on weights that are there already."""
        key = (config.model, config.dtype, str(config.quantizer))
        registry = default_registry()
        longest = max(len(r.prompt) + r.params.max_tokens for r in generate(workload, 2**15, 2**20, registry=registry))
        engine = self._loaded.get(key)
        if engine is None:
            engine = self._loaded[key] = load_engine(config, registry, longest_request=lambda spec, tokenizer: longest)
        engine = engine.reconfigured(config, longest_request=lambda spec, tokenizer: longest)
        requests = generate(
            workload, engine.setup.model.vocab_size, engine.setup.limits.max_model_len, registry=registry
        )
        try:
            warm_up(engine, requests)
            return serve(engine, requests, workload, lambda done, total, info: None)
        finally:
            engine.close()


def measured_lines(
    model: str,
    dtype: str,
    quantizers: list[str],
    repeats: int,
    num_mixed: int = 200,
    calibrate: Callable[[str], None] | None = None,
    paced: bool = False,
) -> list[Line]:
    """The lines of the fidelity table, for other benches."""
    stop = [False]
    signals = (signal.SIGINT, signal.SIGTERM)
    previous = [signal.signal(each, lambda number, frame: stop.__setitem__(0, True)) for each in signals]
    try:
        with tempfile.TemporaryDirectory() as folder:
            cases = [*CASES] + ([mixed(Path(folder) / "mixed.jsonl", num_mixed)] if num_mixed else [])
            return fidelity(
                Engines(), model, dtype, repeats, cases, report=note, quantizers=quantizers, should_stop=lambda: stop[0],
                calibrate=calibrate, paced=paced,
            )  # fmt: skip
    finally:
        for each, handler in zip(signals, previous, strict=True):
            signal.signal(each, handler)


def note(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--quant", nargs="+", default=["none"], help="formats, each a quantizer or none")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--mixed", type=int, default=200, help="how many mixed requests; 0 leaves them out")
    parser.add_argument("--calibrate", action="store_true", help="measure this machine before and after each repeat")
    parser.add_argument("--paced", action="store_true", help="observe the machine's speed around each run")
    parser.add_argument("--budget", type=float, default=55.0, help="seconds of each of these measurements")
    parser.add_argument("--json", metavar="FILE", help="store the lines as JSON, too")
    given = parser.parse_args()
    quantizers = ["" if q == "none" else q for q in given.quant]
    begin = time.monotonic()
    note(f"load before: {os.getloadavg()[0]:.2f} on {os.cpu_count()} CPUs")

    def calibrated(quantizer: str) -> None:
        chosen = Choice.model_validate(quantizer) if quantizer else None
        try:
            result = calibrate(measure, given.model, given.dtype, budget_s=given.budget, quantizer=chosen)
        except ConfigError as error:  # the machine was too busy: what is known of it stands, and what has run is kept
            note(f"not calibrated: {error}")
            return
        runs = ", ".join(f"{name} {ratio - 1:+.1%}" for name, ratio in result.runs.items())
        note(
            f"calibrated {quantizer or given.dtype} in {result.seconds:.0f} s: own steps within {result.error[0]:.1%} "
            f"(middle), {result.error[1]:.1%} (largest); drift {result.drift:.1%}; runs over steps: {runs}"
        )

    lines = measured_lines(
        given.model,
        given.dtype,
        quantizers,
        given.repeats,
        given.mixed,
        calibrated if given.calibrate else None,
        given.paced,
    )
    note(f"load after: {os.getloadavg()[0]:.2f}; {time.monotonic() - begin:.0f} s")
    print(table(lines))
    if given.json:
        rows = [{**dataclasses.asdict(line), "error": line.error, "inside": line.inside} for line in lines]
        with open(given.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
