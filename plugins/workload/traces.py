"""Production traces: arrival time, prompt length, answer length, and shared prefixes where recorded.

Invariants
* The file's order and times are kept; `--rate` replaces the times, `--requests` takes the first rows.
* A damaged row is an error that names the file, the row and the field; no row is skipped in silence.
* Rows with no prompt or no answer (cancelled requests) cannot be asked for: they count as one token.
"""

from __future__ import annotations

import contextlib
import csv
import json
import math
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, overload

from pydantic import Field

from twinfer.core.errors import ConfigError, figure, short
from twinfer.core.technique import Options as TechniqueOptions
from twinfer.core.workload import MAX_TOKENS, Workload
from twinfer.core.workload_source import Draft, Setting
from twinfer.plugins.workload.synthetic import PoissonArrivals, _tokens

RECORDED = ("output_len", "input_len", "lengths", "spread", "shared_prefix", "num_prefixes")
"""What a trace says itself."""
_LOOP = 1_000_003  # more than the blocks of one trace: those of another round are others


def is_csv(workload: Workload) -> bool:
    return workload.trace is not None and workload.trace.endswith(".csv")


def csv_header(workload: Workload) -> Sequence[str]:
    """Names of the columns, none for an empty file."""
    with _reading(workload) as path, path.open(newline="", encoding="utf-8-sig") as file:
        return csv.DictReader(file).fieldnames or ()


def csv_rows(workload: Workload, columns: Sequence[str]) -> Iterator[tuple[int, dict[str, str]]]:
    """(line of the table, row) of every row; ConfigError when one of `columns` is missing in the file or in a row."""
    with _reading(workload) as path, path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        header = reader.fieldnames or []
        for column in columns:
            if list(header).count(column) > 1:
                raise ConfigError(
                    "--trace", workload.trace, f"column {column} is there twice", "name one of them otherwise"
                )
            if column not in header:
                other = next((mark for mark in (";", "\t", "|") if len(header) == 1 and mark in header[0]), None)
                hint = f"; commas must be between columns, not {other!r}" if other else ""
                raise ConfigError(
                    "--trace", workload.trace, f"column {column} is missing (it has: {', '.join(header) or 'none'}){hint}",
                    f"give a CSV with the columns {', '.join(columns)}",
                )  # fmt: skip
        for number, row in enumerate(reader, 2):
            short = next((c for c in columns if row[c] is None), None)
            if short is not None:
                raise ConfigError("--trace", workload.trace, f"row {number} has no {short}", "repair that row")
            if None in row:  # what the header has no names for
                raise ConfigError(
                    "--trace", workload.trace, f"row {number} has {len(row[None])} cells more than the header",
                    "repair that row, or name the columns",
                )  # fmt: skip
            yield number, row


class AzureTrace(PoissonArrivals):
    name = "azure"
    summary = "Azure LLM inference trace: CSV with TIMESTAMP, ContextTokens, GeneratedTokens"
    reference = "Patel et al., Splitwise, ISCA 2024; github.com/Azure/AzurePublicDataset"

    ignores = (*RECORDED, "turns", "think_time")
    COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")

    @classmethod
    def accepts(cls, workload: Workload) -> bool:
        """Any CSV file that is not of another kind: so that a column that is missing is told."""
        return is_csv(workload) and BurstGPTTrace.COLUMNS[0] not in csv_header(workload)

    def drafts(self, workload: Workload, setting: Setting) -> Sequence[Draft]:
        drafts: list[Draft] = []
        for number, row in csv_rows(workload, self.COLUMNS):
            if len(drafts) == workload.num_requests:
                break
            where = f"row {number}"
            num_in = _count(workload, where, "ContextTokens", row["ContextTokens"])
            num_out = _count(workload, where, "GeneratedTokens", row["GeneratedTokens"])
            when = _seconds(workload, where, row["TIMESTAMP"])
            prompt = _tokens(setting.first + len(drafts), workload.seed, num_in, setting.vocab_size)
            drafts.append(Draft(prompt, num_out, when))
        return _nonempty(workload, drafts)


class BurstGPTTrace(PoissonArrivals):
    name = "burstgpt"
    summary = "BurstGPT trace: CSV with Timestamp (s), Model, Request tokens, Response tokens"
    reference = "Wang et al., BurstGPT, KDD 2025 (arXiv:2401.17644)"

    class Options(TechniqueOptions):
        """model: take only the rows of this model (column Model), e.g. ChatGPT or GPT-4; empty for all."""

        model: str = Field(default="", description="only the rows of this model; empty for all")

    ignores = (*RECORDED, "turns", "think_time")
    COLUMNS = ("Request tokens", "Response tokens", "Timestamp", "Model")

    @classmethod
    def accepts(cls, workload: Workload) -> bool:
        return is_csv(workload) and cls.COLUMNS[0] in csv_header(workload)

    def drafts(self, workload: Workload, setting: Setting) -> Sequence[Draft]:
        drafts: list[Draft] = []
        models: set[str] = set()
        for number, row in csv_rows(workload, self.COLUMNS):
            if len(drafts) == workload.num_requests:
                break
            models.add(row["Model"])
            if self.options.model and row["Model"] != self.options.model:
                continue
            where = f"row {number}"
            num_in = _count(workload, where, "Request tokens", row["Request tokens"])
            num_out = _count(workload, where, "Response tokens", row["Response tokens"])
            try:
                when = float(row["Timestamp"])
                if not math.isfinite(when):
                    raise ValueError
            except ValueError:
                raise ConfigError(
                    "--trace", workload.trace, f"{where}: Timestamp={short(row['Timestamp'])} is not a number of seconds",
                    "repair that row",
                ) from None  # fmt: skip
            prompt = _tokens(setting.first + len(drafts), workload.seed, num_in, setting.vocab_size)
            drafts.append(Draft(prompt, num_out, when))
        if not drafts and models:
            raise ConfigError(
                "model", self.options.model, f"{workload.trace} has no row of it", f"it has {', '.join(sorted(models))}"
            )
        return _nonempty(workload, drafts)


class MooncakeTrace(PoissonArrivals):
    name = "mooncake"
    summary = "Mooncake trace: JSON lines with timestamp (ms), input_length, output_length, hash_ids"
    reference = "Qin et al., Mooncake, FAST 2025 (arXiv:2407.00079)"

    ignores = (*RECORDED, "turns", "think_time")
    BLOCK = 512  # tokens that one hash id stands for

    @classmethod
    def accepts(cls, workload: Workload) -> bool:
        if workload.trace is None or not workload.trace.endswith(".jsonl"):
            return False
        first = next(iter(json_lines(workload)), (0, {}))[1]
        return "input_length" in first

    def drafts(self, workload: Workload, setting: Setting) -> Sequence[Draft]:
        drafts: list[Draft] = []
        for number, row in json_lines(workload):
            if len(drafts) == workload.num_requests:
                break
            where = f"line {number}"
            for field in ("timestamp", "input_length", "output_length"):
                if field not in row:
                    raise ConfigError(
                        "--trace", workload.trace, f"{where} has no {field!r}",
                        "each line needs timestamp (ms), input_length and output_length",
                    )  # fmt: skip
            num_in = _count(workload, where, "input_length", row["input_length"])
            num_out = _count(workload, where, "output_length", row["output_length"])
            when = _milliseconds(workload, where, row["timestamp"]) / 1000
            ids = _block_ids(workload, where, row.get("hash_ids"))
            if ids and len(ids) * self.BLOCK < num_in:
                raise ConfigError(
                    "--trace", workload.trace,
                    f"{where}: {len(ids)} hash_ids of {self.BLOCK} tokens do not cover input_length={num_in}",
                    "repair that line, or leave hash_ids out",
                )  # fmt: skip
            shared = num_in if ids else 0
            if ids:
                ids = tuple(i + setting.loop * _LOOP for i in ids)
                prompt: Sequence[int] = BlockPrompt(ids, num_in, workload.seed, setting.vocab_size, self.BLOCK)
            else:
                # Without ids the prompt is its own; numbers above all ids keep it apart from them.
                prompt = _tokens((1 << 24) + setting.first + number, workload.seed, num_in, setting.vocab_size)
            drafts.append(Draft(prompt, num_out, when, shared=shared))
        return _nonempty(workload, drafts)


class BlockPrompt(Sequence[int]):
    """A prompt made of named blocks: equal ids give equal tokens. Tokens are made when sliced.

    A slice is a list; the whole prompt of a long trace is never held in memory.
    """

    __slots__ = ("block", "ids", "length", "seed", "vocab_size")

    def __init__(self, ids: tuple[int, ...], length: int, seed: int, vocab_size: int, block: int) -> None:
        self.ids, self.length, self.seed, self.vocab_size, self.block = ids, length, seed, vocab_size, block

    def __len__(self) -> int:
        return self.length

    @overload
    def __getitem__(self, key: int) -> int: ...
    @overload
    def __getitem__(self, key: slice) -> list[int]: ...
    def __getitem__(self, key: int | slice) -> int | list[int]:
        if isinstance(key, slice):
            start, stop, step = key.indices(self.length)
            if step != 1:
                return [self[i] for i in range(start, stop, step)]
            tokens: list[int] = []
            while start < stop:
                block, offset = divmod(start, self.block)
                take = min(self.block - offset, stop - start)
                tokens.extend(self._block(block)[offset : offset + take])
                start += take
            return tokens
        if key < 0:
            key += self.length
        if not 0 <= key < self.length:
            raise IndexError(key)
        return self._block(key // self.block)[key % self.block]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(other) == self.length and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def _block(self, index: int) -> Sequence[int]:
        return _tokens(self.ids[index], self.seed, self.block, self.vocab_size)


def open_trace(workload: Workload) -> Path:
    """The trace's path; a missing or unreadable file is a ConfigError."""
    path = Path(workload.trace or "")
    if not workload.trace or not path.is_file():
        found = "is no regular file" if workload.trace and path.exists() else "no such file"
        raise ConfigError("--trace", workload.trace, found, "give the path of a trace file")
    return path


def json_lines(workload: Workload) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) of every non-empty line."""
    with _reading(workload) as path, path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:  # also a number or nesting beyond Python's limits
                reason = error.msg if isinstance(error, json.JSONDecodeError) else "a number or nesting without end"
                raise ConfigError(
                    "--trace", workload.trace, f"line {number} is not JSON ({reason})", "repair that line"
                ) from None
            if not isinstance(row, dict):
                raise ConfigError(
                    "--trace", workload.trace, f"line {number} is not a JSON object", "write one object per line"
                )
            yield number, row


@contextlib.contextmanager
def _reading(workload: Workload) -> Iterator[Path]:
    """The trace's path, while it is read: a file that cannot be read as text is a ConfigError."""
    path = open_trace(workload)
    try:
        yield path
    except UnicodeDecodeError:
        with path.open("rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
        if packed:
            raise ConfigError("--trace", workload.trace, "is compressed (gzip)", "unpack it with gunzip") from None
        raise ConfigError("--trace", workload.trace, "not a UTF-8 text file", "give a CSV or JSONL file") from None
    except csv.Error as error:
        raise ConfigError("--trace", workload.trace, f"not a CSV file ({error})", "repair the file") from None
    except OSError as error:
        raise ConfigError("--trace", workload.trace, f"cannot be read ({error.strerror})", "make it readable") from None


def _nonempty(workload: Workload, drafts: list[Draft]) -> list[Draft]:
    if not drafts:
        raise ConfigError("--trace", workload.trace, "holds no requests", "give a file with at least one row")
    return drafts


def _count(workload: Workload, where: str, field: str, value: Any) -> int:
    try:
        number = int(value)
        if isinstance(value, str) and not (value.strip().isascii() and value.strip().isdigit()):  # int() takes 1_0, too
            number = -1
        if isinstance(value, bool) or (isinstance(value, float) and number != value):
            number = -1
    except (TypeError, ValueError, OverflowError):
        number = -1
    if not 0 <= number <= MAX_TOKENS:
        raise ConfigError(
            "--trace",
            workload.trace,
            f"{where}: {field}={short(value)} is not a count of tokens up to {figure(MAX_TOKENS)}",
            "repair that row",
        )
    return max(1, number)


def _seconds(workload: Workload, where: str, value: Any) -> float:
    try:
        when = datetime.fromisoformat(str(value))
        return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()  # no zone of a machine shifts a trace
    except ValueError:
        raise ConfigError(
            "--trace", workload.trace, f"{where}: TIMESTAMP={short(value)} is not a date and time", "repair that row"
        ) from None


def _milliseconds(workload: Workload, where: str, value: Any) -> float:
    try:
        when = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        when = math.nan
    if not math.isfinite(when):
        raise ConfigError(
            "--trace",
            workload.trace,
            f"{where}: timestamp={short(value)} is not a number of milliseconds",
            "repair that line",
        )
    return when


def _block_ids(workload: Workload, where: str, value: Any) -> tuple[int, ...]:
    """Names of the blocks of a prompt; none where the line has none."""
    found = [] if value is None else value
    if not isinstance(found, list) or any(isinstance(i, bool) or not isinstance(i, int) for i in found):
        raise ConfigError(
            "--trace",
            workload.trace,
            f"{where}: hash_ids={short(value)} is not a list of whole numbers",
            "repair that line",
        )
    return tuple(found)
