"""What was served once, as traffic: a stored run of ours, or the request log of any serving engine.

    twinfer simulate --trace RUN_FOLDER          arrivals and lengths of a stored run (real or predicted)
    twinfer simulate --trace served.jsonl        {"arrival": 0.0, "prompt_tokens": 812, "output_tokens": 96} a line

Invariants
* Only when requests came and how long they were is taken; prompts are made up and share nothing.
* Times are seconds from any origin. A line that lacks a field is an error that names it; none is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from twinfer.core.errors import ConfigError, short
from twinfer.core.params import is_finite
from twinfer.core.workload import Workload
from twinfer.core.workload_source import Draft, Setting
from twinfer.plugins.workload.synthetic import PoissonArrivals, _tokens
from twinfer.plugins.workload.traces import RECORDED, _count, _nonempty, json_lines

FIELDS: Mapping[str, tuple[str, ...]] = {
    "arrival": ("queued_ts", "arrival_ts", "arrival", "arrival_time", "start_time"),
    "prompt": ("num_prompt_tokens", "prompt_tokens", "input_toks", "input_tokens", "input_len"),
    "output": ("num_output_tokens", "output_tokens", "completion_tokens", "output_toks", "output_len"),
    "first_token": ("first_token_ts", "first_token", "first_token_time"),
    "last_token": ("last_token_ts", "last_token", "last_token_time", "end_time"),
}
"""Field of a request log -> its usual names; the first that a line has counts."""


def field_of(row: Mapping[str, Any], field: str) -> str | None:
    """The name under which `row` has `field`."""
    return next((name for name in FIELDS[field] if name in row), None)


class Log(PoissonArrivals):
    name = "log"
    summary = "request log of a serving engine: JSON lines with arrival (s), prompt and output tokens"
    reference = "the usual names of the fields in logs of serving engines"

    ignores = (*RECORDED, "turns", "think_time")

    @classmethod
    def accepts(cls, workload: Workload) -> bool:
        if workload.trace is None or not workload.trace.endswith(".jsonl"):
            return False
        first: dict[str, Any] = next(iter(json_lines(workload)), (0, {}))[1]
        return all(field_of(first, field) for field in ("arrival", "prompt", "output"))

    def drafts(self, workload: Workload, setting: Setting) -> Sequence[Draft]:
        drafts: list[Draft] = []
        for number, row in json_lines(workload):
            where = f"line {number}"
            values = {}
            for field in ("arrival", "prompt", "output"):
                name = field_of(row, field)
                if name is None:
                    raise ConfigError(
                        "--trace",
                        workload.trace,
                        f"{where} has no {field}",
                        f"name it one of {', '.join(FIELDS[field])}",
                    )
                values[field] = name
            when = row[values["arrival"]]
            if not is_finite(when):
                raise ConfigError(
                    "--trace", workload.trace, f"{where}: {values['arrival']}={short(when)} is not a number of seconds",
                    "repair that line",
                )  # fmt: skip
            num_in = _count(workload, where, values["prompt"], row[values["prompt"]])
            num_out = _count(workload, where, values["output"], row[values["output"]])
            prompt = _tokens(setting.first + len(drafts), workload.seed, num_in, setting.vocab_size)
            drafts.append(Draft(prompt, num_out, float(when)))
        drafts.sort(key=lambda draft: draft.arrival or 0.0)  # logs are often written as requests end
        return _nonempty(workload, drafts[: workload.num_requests])


class StoredRun(PoissonArrivals):
    name = "run"
    summary = "a stored run, real or predicted: its folder, with its arrivals and lengths"
    reference = "core/run_files.py"

    ignores = (*RECORDED, "turns", "think_time")

    @classmethod
    def accepts(cls, workload: Workload) -> bool:
        return workload.trace is not None and (Path(workload.trace) / "record.json").is_file()

    def drafts(self, workload: Workload, setting: Setting) -> Sequence[Draft]:
        from twinfer.core.run_files import read_run

        drafts: list[Draft] = []
        for row in sorted(read_run(Path(workload.trace or "")).requests, key=lambda r: r.arrival):
            if len(drafts) == workload.num_requests:
                break
            if row.index:  # another sample of a request
                continue
            where = f"request {row.request_id}"
            num_in = _count(workload, where, "num_prompt_tokens", row.num_prompt_tokens)
            num_out = _count(workload, where, "num_output_tokens", row.num_output_tokens)
            prompt = _tokens(setting.first + len(drafts), workload.seed, num_in, setting.vocab_size)
            drafts.append(Draft(prompt, num_out, row.arrival))
        return _nonempty(workload, drafts)


__all__ = ["FIELDS", "Log", "StoredRun", "field_of"]
