"""Real against predicted on this machine, for four workloads that calibration has not seen.

    python bench/fidelity_cpu.py [--model smollm2-135m] [--dtype float32] [--repeats 3] [--calibrate] [--json FILE]

Run it on a quiet machine: two-thread torch on shared cores is easily 10 times slower than alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys

from twinfer.core.config import EngineConfig
from twinfer.core.records import RunRecord
from twinfer.core.runtime.measure import measure
from twinfer.core.runtime.run import run_engine
from twinfer.core.workload import Workload
from twinfer.simulator.calibrate import calibrate
from twinfer.simulator.fidelity import fidelity, table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--calibrate", action="store_true", help="measure this machine first")
    parser.add_argument("--json", metavar="FILE", help="store the lines as JSON, too")
    given = parser.parse_args()

    def note(message: str) -> None:
        print(message, file=sys.stderr, flush=True)

    note(f"load before: {os.getloadavg()[0]:.2f} on {os.cpu_count()} CPUs")
    if given.calibrate:
        result = calibrate(measure, given.model, given.dtype)
        note(
            f"calibrated in {result.seconds:.0f} s: own steps within {result.error[0]:.1%} (middle), "
            f"{result.error[1]:.1%} (largest); drift {result.drift:.1%}"
        )

    def run_real(config: EngineConfig, workload: Workload) -> RunRecord:
        return run_engine(config, workload)

    lines = fidelity(run_real, given.model, given.dtype, given.repeats, report=note)
    note(f"load after: {os.getloadavg()[0]:.2f}")
    print(table(lines))
    if given.json:
        rows = [{**dataclasses.asdict(line), "error": line.error, "inside": line.inside} for line in lines]
        with open(given.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
