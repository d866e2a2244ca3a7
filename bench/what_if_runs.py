"""What the what-ifs share: one simulated run, and tables of markdown.

Nothing here prints but `table`, and what does not fit on stderr. Equal arguments give equal results.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Iterable
from typing import Any

from twinfer.core.config import EngineConfig
from twinfer.core.errors import ConfigError, ModelError
from twinfer.core.fleet import Fleet
from twinfer.core.records import RunRecord
from twinfer.core.workload import Workload
from twinfer.simulator.fleet_run import simulate_fleet

Engine = dict[str, Any]
REFUSED = "does not fit"
OP_TIME: list[str] = []  # models of op times that were asked for, in their order


def run(engine: Engine, **workload: Any) -> RunRecord | None:
    """One simulated run at `OP_TIME`; None where the engine cannot be set up (memory)."""
    try:
        config = EngineConfig.model_validate({"device": "h100-sxm", "op_time": tuple(OP_TIME), **engine})
        return simulate_fleet(Fleet(engine=config), Workload(seed=1, **workload), bands=False)
    except (ConfigError, ModelError) as error:
        print(f"{engine}: {error}", file=sys.stderr)
        return None


def closed(engine: Engine, batch: int, input_len: int, output_len: int, rounds: int = 2) -> RunRecord | None:
    """`batch` clients, each sending its next request when its last has ended."""
    return run(
        {"max_num_seqs": batch, **engine}, num_requests=batch * rounds, concurrency=batch, input_len=input_len,
        output_len=output_len,
    )  # fmt: skip


def metric(record: RunRecord | None, name: str, of: str = "", scale: float = 1.0, digits: int = 1) -> str:
    if record is None:
        return REFUSED
    found = record.metrics[name][of] if of else record.metrics[name]
    return f"{found * scale:,.{digits}f}"


def rate(record: RunRecord | None) -> str:
    return metric(record, "output_throughput", digits=0)


def ms(record: RunRecord | None, name: str, of: str = "p50", digits: int = 1) -> str:
    return metric(record, name, of, 1e3, digits)


def decode_s(engine: Engine, batch: int, input_len: int = 256, output_len: int = 256) -> float | str:
    """Median decode step of `batch` rows in s, or why there is none: prompts are in before the first answer ends."""
    budget = max(8192, -(-batch * input_len * 2 // output_len))
    record = run(
        {"max_num_seqs": batch, "max_num_batched_tokens": budget, **engine}, num_requests=batch, rate=math.inf,
        input_len=input_len, output_len=output_len,
    )  # fmt: skip
    if record is None:
        return REFUSED
    if engine.get("dp", 1) * engine.get("pp", 1) > 1:  # ranks and stages have a step each: between tokens of a request
        return float(record.metrics["itl"]["p50"])
    steps = [step.seconds for step in record.steps if step.num_decode_rows == step.num_tokens == batch]
    return statistics.median(steps) if steps else "never at once"


def decode_ms(engine: Engine, batch: int) -> str:
    found = decode_s(engine, batch)
    return found if isinstance(found, str) else f"{found * 1e3:,.2f}"


def busy(record: RunRecord | None) -> str:
    """Most sequences that held KV at once."""
    return REFUSED if record is None else str(max(step.running for step in record.steps))


def table(head: Iterable[str], rows: Iterable[Iterable[str]], title: str) -> None:
    """Prints each row as soon as it is known."""
    head = list(head)
    print(f"\n{title}\n\n| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    for row in rows:
        print("| " + " | ".join(row) + " |", flush=True)
