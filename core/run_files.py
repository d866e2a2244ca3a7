"""One run as files: `record.json` for the settings and metrics, Parquet for steps and requests.

Invariants
* JSON holds no NaN or Infinity: an infinite rate is the text "inf".
* Files are read back only in a schema this version knows; anything else is a `RunStoreError` that names the file.
* Columns follow the dataclasses of `core/records.py`; a column added later with a default can be absent.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from twinfer.core.errors import TwinferError
from twinfer.core.records import SCHEMA_VERSION, RequestRecord, RunRecord, StepRecord

_HEAD_FIELDS = tuple(f.name for f in fields(RunRecord) if f.name not in ("steps", "requests"))

_KINDS: Mapping[tuple[str, ...], type] = {
    ("id", "world", "created", "name"): str,
    ("config", "workload", "environment", "reasons", "metrics", "intervals"): dict,
    ("complete",): bool,
}


class RunStoreError(TwinferError):
    """A run cannot be written, read or found; the text names the run or file and what to do."""


def plain(value: Any) -> Any:
    """`value` as JSON data: tuples become lists, infinities text, NaN null."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | range):
        return [plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else ("inf" if value > 0 else "-inf")
    if value is None or isinstance(value, str | int | float):
        return value
    return str(value)


def record_head(record: RunRecord) -> dict[str, Any]:
    """A record as JSON data, without its steps and requests."""
    return {name: plain(getattr(record, name)) for name in _HEAD_FIELDS}


def write_run(folder: Path, record: RunRecord) -> None:
    """Write the three files of `record` into `folder`. Raises OSError as it comes."""
    _write_rows(folder / "steps.parquet", record.steps, StepRecord)
    _write_rows(folder / "requests.parquet", record.requests, RequestRecord)
    text = json.dumps(record_head(record), indent=1, allow_nan=False)
    (folder / "record.json").write_text(text + "\n", encoding="utf-8")


def read_run(folder: Path) -> RunRecord:
    """The record that `write_run` wrote into `folder`."""
    head = read_head(folder)
    bands = head.get("intervals", {})
    head["intervals"] = {k: tuple(float(end) if isinstance(end, str) else end for end in v) for k, v in bands.items()}
    steps = _read_rows(folder / "steps.parquet", StepRecord)
    requests = _read_rows(folder / "requests.parquet", RequestRecord)
    return RunRecord(**head, steps=steps, requests=requests)


def read_head(folder: Path) -> dict[str, Any]:
    """The checked content of `record.json`."""
    path = folder / "record.json"
    try:
        head = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RunStoreError(f"{path}: {error.strerror}; the run is damaged, delete or restore its folder") from error
    except (ValueError, RecursionError) as error:
        raise RunStoreError(f"{path}: not valid JSON ({error}); the run is damaged, delete or restore it") from error
    required = {f.name: f for f in fields(RunRecord) if f.default is MISSING and f.default_factory is MISSING}
    missing = [k for k in required if not isinstance(head, dict) or k not in head]
    if missing:
        raise RunStoreError(f"{path}: {', '.join(missing)} missing; the run is damaged, delete or restore it")
    version = head.get("schema_version")
    if not isinstance(version, int) or version > SCHEMA_VERSION:
        raise RunStoreError(
            f"{path}: schema version {version!r}, this twinfer reads up to {SCHEMA_VERSION}; update twinfer to read it"
        )
    for names, kind in _KINDS.items():
        for name in names:
            if not isinstance(head.get(name, kind()), kind):
                raise RunStoreError(
                    f"{path}: {name}={head[name]!r} is no {kind.__name__}; the run is damaged, delete or restore it"
                )
    for name, value in head.get("metrics", {}).items():
        for part in value.values() if isinstance(value, dict) else [value]:
            if isinstance(part, bool | str) and not _is_number(part):
                raise RunStoreError(
                    f"{path}: metrics: {name}={part!r} is no number; the run is damaged, delete or restore it"
                )
    for name, band in head.get("intervals", {}).items():
        if not isinstance(band, list) or len(band) != 2 or not all(_is_number(end) for end in band):
            raise RunStoreError(
                f"{path}: intervals: {name}={band!r} is no pair of numbers; the run is damaged, delete or restore it"
            )
    return {k: v for k, v in head.items() if k in _HEAD_FIELDS}


def _is_number(value: Any) -> bool:
    """As `plain` writes one."""
    return value in ("inf", "-inf") if isinstance(value, str) else type(value) in (int, float)


def _arrow_schema(cls: type[Any]) -> Any:
    import pyarrow as pa

    types = {
        "int": pa.int64(), "float": pa.float64(), "float | None": pa.float64(), "str": pa.string(),
        "str | None": pa.string(), "list[float]": pa.list_(pa.float64()),
        "Mapping[str, float]": pa.map_(pa.string(), pa.float64()),
    }  # fmt: skip
    return pa.schema([(f.name, types[str(f.type)]) for f in fields(cls)])


def _write_rows(path: Path, rows: list[Any], cls: type[Any]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = _arrow_schema(cls)
    columns: dict[str, list[Any]] = {}
    for name in schema.names:
        values = [getattr(row, name) for row in rows]
        columns[name] = [list(v.items()) for v in values] if name == "ops" else values
    try:
        table = pa.Table.from_pydict(columns, schema=schema)
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise RunStoreError(f"{path.name}: a {cls.__name__} holds a value of the wrong type ({error})") from error
    with path.open("wb") as file:  # of a name, a part before a colon would be taken for a protocol
        pq.write_table(table, file, compression="zstd")


def _read_rows(path: Path, cls: type[Any]) -> list[Any]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        # a plain read of the one file: the dataset reader would take folder names for columns
        with path.open("rb") as raw, pq.ParquetFile(raw) as file:
            table = file.read()
    except (OSError, pa.ArrowException) as error:
        reason = "missing" if isinstance(error, FileNotFoundError) else str(error).splitlines()[0]
        raise RunStoreError(f"{path}: {reason}; the run is damaged, delete or restore it") from error
    known = {f.name: f for f in fields(cls)}
    schema = _arrow_schema(cls)
    for name in table.column_names:
        if name in known and (wrong := _damage(table[name], schema.field(name).type, "None" in str(known[name].type))):
            raise RunStoreError(f"{path}: column {name} {wrong}; the run is damaged, delete or restore it")
    columns = table.to_pydict()
    if "ops" in columns:
        columns["ops"] = [dict(v) for v in columns["ops"]]
    missing = [
        n for n, f in known.items() if n not in columns and f.default is MISSING and f.default_factory is MISSING
    ]
    if missing:
        raise RunStoreError(f"{path}: column {missing[0]} missing; the run is damaged, delete or restore it")
    names = [n for n in columns if n in known]
    return [cls(**dict(zip(names, row, strict=True))) for row in zip(*(columns[n] for n in names), strict=True)]


def _damage(column: Any, kind: Any, optional: bool) -> str:
    """What a column of the Arrow type `kind` cannot hold, in words; empty where it holds none: numbers are finite, counts
    and times not negative, and only what is `optional` is missing."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if column.type != kind:
        return f"is of type {column.type}, not {kind}"
    if column.null_count and not optional:
        return "lacks values"
    if pa.types.is_map(kind):
        values = pa.chunked_array([chunk.items for chunk in column.chunks], type=kind.item_type)
        return "" if pc.all(pc.is_finite(values)).as_py() is not False else "has values that are not finite"
    if not (pa.types.is_floating(kind) or pa.types.is_integer(kind)):
        return ""
    if pc.all(pc.is_finite(column)).as_py() is False:
        return "has values that are not finite"
    least = pc.min(column).as_py()
    return f"has {least}, which is negative" if least is not None and least < 0 else ""
