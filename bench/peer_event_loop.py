"""Vidur's event loop in a process of its own, started by `bench/peer_simulator.py` with the Python it is installed in.

    python -P peer_event_loop.py < JOB

Reads one JSON object (a `Job` of `peer_simulator.py`), writes its answer as the last line. Imports the standard library
and the peer, nothing of this repository.

What is replaced, from outside: where requests come from (those of the job), what a step takes (the line of the job, in
place of random forests that learn from tables the wheel has not) and the files written at the end (plots and tables; left
out). Packages that only draw or upload need not be there. All of this makes the peer faster, none of it slower.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
import time
import types
from typing import Any

JOB: dict[str, Any] = {}
REQUESTS: list[Any] = []
NUM_STEPS = 0


class GivenRequests:
    """The requests of the job."""

    def __init__(self, settings: object) -> None:
        pass

    def generate(self) -> list[Any]:
        from vidur.entities import Request

        now = 0.0
        for prompt, answer, gap in JOB["rows"]:
            now += gap
            REQUESTS.append(Request(now, prompt, answer))
        return REQUESTS


class LinearTime:
    """Step time from the numbers of tokens and keys: a few additions a step."""

    def __init__(self, predictor_config: object, replica_config: Any, cache_config: object) -> None:
        from vidur._native.entities import ExecutionTime

        self.answer = ExecutionTime
        self.layers = replica_config.num_layers_per_pipeline_stage
        self.least, self.token, self.key = JOB["least"], JOB["per_token"], JOB["per_key"]

    def get_execution_time(self, batch: Any, pipeline_stage: int) -> Any:
        global NUM_STEPS
        NUM_STEPS += 1
        seconds = max(self.least, self.token * batch.total_num_q_tokens) + self.key * batch.total_num_kv_tokens
        return self.answer(self.layers, 0, 0, seconds * 1e3 / self.layers, *(0,) * 11)  # ms a layer


def settings_of(kept: bool, folder: str) -> Any:
    """kept: metrics and trace as it keeps them by default; else nothing."""
    from vidur import config

    scheduler = {
        "sarathi": lambda: config.SarathiSchedulerConfig(JOB["max_num_seqs"], JOB["max_num_batched_tokens"]),
        "vllm": lambda: config.VllmSchedulerConfig(JOB["max_num_seqs"], max_tokens_in_batch=JOB["max_model_len"]),
    }[JOB["scheduler"]]()
    replica = config.ReplicaConfig(
        JOB["peer_model"], num_pipeline_stages=1, tensor_parallel_size=1,
        device=JOB["peer_device"], network_device=JOB["peer_device"] + "_dgx",
    )  # fmt: skip
    cache = config.CacheConfig(block_size=JOB["block_size"], num_blocks=JOB["num_blocks"])
    metrics = config.MetricsConfig(
        write_metrics=kept, enable_chrome_trace=kept, store_plots=False, output_dir=folder
    )  # fmt: skip
    cluster = config.ClusterConfig(1, replica, cache, replica_scheduler_config=scheduler)
    return config.SimulationConfig(cluster_config=cluster, metrics_config=metrics)


def peak_mb() -> float:
    """Peak resident memory of this program alone (that of `getrusage` may be of who started it)."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) / 1024


def main() -> None:
    for absent in ("wandb", "plotly_express"):
        if importlib.util.find_spec(absent) is None:
            sys.modules[absent] = types.ModuleType(absent)
            sys.modules[absent].run = None  # type: ignore[attr-defined]  # no upload is under way
    from vidur.execution_time_predictor import ExecutionTimePredictorRegistry
    from vidur.request_generator import RequestGeneratorRegistry
    from vidur.simulator import Simulator

    JOB.update(json.load(sys.stdin))
    for registry, replacement in (
        (RequestGeneratorRegistry, GivenRequests), (ExecutionTimePredictorRegistry, LinearTime),
    ):  # fmt: skip
        for key in list(registry._registry):
            registry.unregister(key)
            registry.register(key, replacement)
    Simulator._write_output = lambda self: None
    with tempfile.TemporaryDirectory() as folder:
        settings = settings_of(JOB["kept"], folder)
        memory = peak_mb()
        begin = time.process_time()
        simulator = Simulator(settings)
        simulator.run()
        seconds = time.process_time() - begin
    done = [r for r in REQUESTS if r.completed]
    latencies = sorted(r.completed_at - r.arrived_at for r in done)
    answer = {
        "seconds": seconds, "memory_mb": peak_mb(), "start_mb": memory, "done": len(done),
        "steps": NUM_STEPS, "simulated_s": simulator._time, "e2e_p50": latencies[len(latencies) // 2],
    }  # fmt: skip
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
