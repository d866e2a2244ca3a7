"""Real runs from elsewhere as records of ours: a serving engine's log of requests, one JSON object a line.

    {"arrival": 0.0, "prompt_tokens": 812, "output_tokens": 96, "first_token": 0.21, "last_token": 2.9}

Other usual names of these fields are known (`FIELDS`). Times are seconds on one clock, from any origin.

Invariants
* A line that lacks a field or contradicts itself is an error that names the line and the field; none is left out.
* What the log does not say stays unset: there are no steps, so a replay of it attributes nothing to ops.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from twinfer.core.errors import ConfigError, figure, short
from twinfer.core.params import is_finite
from twinfer.core.records import RequestRecord, RunRecord, compute_metrics
from twinfer.core.workload import MAX_SPAN, MAX_TOKENS
from twinfer.plugins.workload.records import FIELDS


def read_log(path: str | Path) -> RunRecord:
    """The log at `path` as a measured run without steps; requests in order of arrival, the first arrives at 0.

    Raises ConfigError for a file that cannot be read or a line that cannot be used.
    """
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # a text may hold other ends of lines
    except OSError as error:
        raise ConfigError("RUN", str(path), f"cannot be read ({error.strerror})", "make it readable") from None
    except UnicodeDecodeError as error:
        packed = error.object[:2] == b"\x1f\x8b"
        problem, fix = ("is compressed (gzip)", "unpack it with gunzip") if packed else (
            f"is no UTF-8 text ({error.reason} at byte {error.start})", "give a stored run or a JSONL log"
        )  # fmt: skip
        raise ConfigError("RUN", str(path), problem, fix) from None
    rows = [_row(str(path), number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise ConfigError("RUN", str(path), "holds no requests", "give a log with one JSON object a line")
    rows.sort(key=lambda row: row["arrival"])
    begin = rows[0]["arrival"]
    span = max(row["last_token"] for row in rows) - begin
    if not 0 < span <= MAX_SPAN:
        raise ConfigError(
            "RUN", str(path), f"its last token comes {span:g} s after its first arrival",
            f"give times in seconds, more than 0 and at most {figure(MAX_SPAN)} apart",
        )  # fmt: skip
    requests = [
        RequestRecord(
            request_id=f"r{number}", arrival=row["arrival"] - begin, first_token=row["first_token"] - begin,
            last_token=row["last_token"] - begin, finished=row["last_token"] - begin, reason="length",
            num_prompt_tokens=int(row["prompt"]), num_output_tokens=int(row["output"]),
        )
        for number, row in enumerate(rows)
    ]  # fmt: skip
    record = RunRecord(id=path.name, world="engine", created="", config={}, requests=requests)
    record.metrics = compute_metrics(record)
    return record


def _row(path: str, number: int, line: str) -> dict[str, float]:
    def refuse(problem: str, fix: str) -> ConfigError:
        return ConfigError("RUN", path, f"line {number}: {problem}", fix)

    try:
        found: Any = json.loads(line)
    except (ValueError, RecursionError):
        raise refuse("is not JSON", "write one JSON object a line") from None
    if not isinstance(found, dict):
        raise refuse("is not a JSON object", "write one JSON object a line")
    row: dict[str, float] = {}
    for field, names in FIELDS.items():
        name = next((n for n in names if n in found), None)
        if name is None:
            raise refuse(f"has no {field}", f"name it one of {', '.join(names)}")
        value = found[name]
        if not is_finite(value):
            raise refuse(f"{name}={short(value)} is not a number", "repair that line")
        row[field] = value
    for field in ("prompt", "output"):
        if not 1 <= row[field] <= MAX_TOKENS or row[field] != int(row[field]):
            raise refuse(
                f"{field}={short(row[field])} is not a count of tokens from 1 to {figure(MAX_TOKENS)}",
                "repair that line",
            )
    if not row["arrival"] <= row["first_token"] <= row["last_token"]:
        raise refuse(
            f"arrival {row['arrival']}, first token {row['first_token']} and last token {row['last_token']} are not in "
            "order", "give times of one clock",
        )  # fmt: skip
    return row


__all__ = ["FIELDS", "read_log"]
