"""Given prompts: texts in the workload, token ids, or a JSON-lines file.

A line is `{"prompt": text or list of ids}`, with optional `output_len`, `arrival` (s), `temperature`;
`prompt_len` instead of `prompt` asks for a synthetic prompt of that many tokens.

Invariants
* Token ids must lie in the vocabulary; an empty prompt is an error that names its place.
* Without a tokenizer a text stands for one token per four bytes (`generate`'s docstring).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from twinfer.core.errors import ConfigError, RequestError
from twinfer.core.workload import Workload
from twinfer.core.workload_source import Draft, Setting
from twinfer.plugins.workload.synthetic import PoissonArrivals, _tokens
from twinfer.plugins.workload.traces import _count, _nonempty, json_lines

BYTES_PER_TOKEN = 4


class Prompts(PoissonArrivals):
    name = "prompts"
    summary = "given prompts: texts, token ids, or a JSON-lines file with a prompt per line"

    ignores = ("input_len", "lengths", "spread", "shared_prefix", "num_prefixes", "turns", "think_time")
    FIELDS = ("prompt", "prompt_len", "output_len", "arrival", "temperature")

    @classmethod
    def accepts(cls, workload: Workload) -> bool:
        if workload.prompts or workload.prompt_tokens:
            return True
        if workload.trace is None or not workload.trace.endswith((".jsonl", ".json")):
            return False
        first: dict[str, Any] = next(iter(json_lines(workload)), (0, {}))[1]
        return "prompt" in first or "prompt_len" in first

    def drafts(self, workload: Workload, setting: Setting) -> Sequence[Draft]:
        if workload.trace:
            return _nonempty(workload, [self._line(workload, setting, n, row) for n, row in self._rows(workload)])
        given: list[str | Sequence[int]] = [*workload.prompt_tokens] or [*workload.prompts]
        if not given:
            raise ConfigError("prompts", "[]", "no prompts were given", "give texts, token ids or --trace FILE")
        given = given[: workload.num_requests]
        return [
            Draft(encoded(prompt, f"prompt {i}", i, workload, setting), workload.output_len)
            for i, prompt in enumerate(given)
        ]

    def _rows(self, workload: Workload) -> list[tuple[int, dict[str, Any]]]:
        rows: list[tuple[int, dict[str, Any]]] = []
        for number, row in json_lines(workload):
            if len(rows) == workload.num_requests:
                break
            unknown = [k for k in row if k not in self.FIELDS and not k.startswith("_")]
            if unknown:
                raise ConfigError(
                    "--trace", workload.trace, f"line {number} has an unknown field {unknown[0]!r}",
                    f"known fields: {', '.join(self.FIELDS)} (names that begin with _ are comments)",
                )  # fmt: skip
            rows.append((number, row))
        return rows

    def _line(self, workload: Workload, setting: Setting, number: int, row: dict[str, Any]) -> Draft:
        where = f"line {number}"
        if "prompt" in row and "prompt_len" in row:
            raise ConfigError("--trace", workload.trace, f"{where} has prompt and prompt_len", "keep one of them")
        if "prompt" in row:
            prompt = encoded(row["prompt"], where, number, workload, setting)
        elif "prompt_len" in row:
            length = _count(workload, where, "prompt_len", row["prompt_len"])
            prompt = _tokens(setting.first + number, workload.seed, length, setting.vocab_size)
        else:
            raise ConfigError("--trace", workload.trace, f"{where} has no prompt", "add prompt or prompt_len")
        num_out = workload.output_len
        if "output_len" in row:
            num_out = _count(workload, where, "output_len", row["output_len"])
        numbers = {}
        for field in ("arrival", "temperature"):
            value = row.get(field)
            if value is not None and (
                isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf
            ):
                raise ConfigError(
                    "--trace", workload.trace, f"{where}: {field}={value!r} is not a number >= 0", "repair that line"
                )
            numbers[field] = value
        return Draft(prompt, num_out, numbers["arrival"], numbers["temperature"])


def encoded(prompt: Any, where: str, number: int, workload: Workload, setting: Setting) -> Sequence[int]:
    """Token ids of one given prompt."""
    if isinstance(prompt, str):
        if not prompt:
            raise RequestError(f"{where} is empty; give at least one character")
        if any("\ud800" <= c <= "\udfff" for c in prompt):
            raise RequestError(f"{where} holds half of a surrogate pair, which is no character; remove it")
        if setting.encode is not None:
            ids = tuple(setting.encode(prompt))
            if not ids:
                raise RequestError(f"{where} has no tokens; give a longer text")
            return ids
        length = max(1, -(-len(prompt.encode()) // BYTES_PER_TOKEN))
        return _tokens(number, workload.seed, length, setting.vocab_size)
    if not isinstance(prompt, (list, tuple)) or any(isinstance(t, bool) or not isinstance(t, int) for t in prompt):
        raise RequestError(f"{where} is neither a text nor a list of token ids")
    if not prompt:
        raise RequestError(f"{where} is empty; give at least one token")
    bad = [t for t in prompt if not 0 <= t < setting.vocab_size]
    if bad:
        raise RequestError(
            f"{where}: token id {bad[0]} is outside the vocabulary; use 0 to {setting.vocab_size - 1}"
        )  # fmt: skip
    return tuple(prompt)
