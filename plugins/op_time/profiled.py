"""Op times from a profile of a serving engine's own layers: CSV files in one folder.

    dense.csv          layer, tokens, time_us           layers over all tokens of a step
    per_sequence.csv   layer, sequences, time_us        layers over the rows that sample
    attention.csv      prefill_chunk, kv_prefill, n_decode, kv_decode, time_us     one launch of a mixed batch

Layers are named qkv_proj, o_proj, gate_up_proj, down_proj, act_fn, layernorm, rotary_emb, embedding; lm_head, sampler.

Invariants
* A profile belongs to one model on one card at one tensor-parallel degree: it is asked by op name, so using it for
  another model is the user's error, told apart by `shape` only where a layer's width is in its name.
* Between grid points times are linear in each axis; decode rows of unequal context cost a little more than their
  mean (`SKEW`, LLMServingSim's finding).
* Host work is not profiled: the next model of the chain answers for it.
"""

from __future__ import annotations

import csv
import itertools
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from twinfer.core import technique
from twinfer.core.errors import ConfigError
from twinfer.core.op_time import OpTime
from twinfer.core.technique import Needs, Technique
from twinfer.core.work import Op

if TYPE_CHECKING:
    from twinfer.core.device import DeviceSpec

LAYERS = {
    "qkv_proj": "qkv_proj", "o_proj": "o_proj", "gate_up_proj": "gate_up_proj", "down_proj": "down_proj",
    "mlp_act": "act_fn", "norms": "layernorm", "rope_kv_write": "rotary_emb", "embed": "embedding",
    "lm_head": "lm_head", "sample": "sampler",
}  # fmt: skip
"""Op of twinfer -> layer of the profile."""

SKEW = 0.054  # of the way from the time at the mean context to that at the longest (median fit of such profiles)
SPREAD = 0.05
ATTENTION = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")


class Profiled(Technique):
    name = "profiled"
    summary = "op times from a profile of a serving engine's layers (folder of CSV files)"
    reference = "profile layout of LLMServingSim, arXiv:2408.05499"

    class Options(technique.Options):
        folder: str = Field(default="", description="folder with dense.csv, per_sequence.csv and attention.csv")

    @classmethod
    def why_not(cls, needs: Needs) -> list[str]:
        return []

    def time(self, op: Op, device: DeviceSpec) -> OpTime | None:
        folder = self.options.folder
        if not folder:
            raise ConfigError("--op-time-model", "profiled", "no folder was given", "write profiled:folder=DIR")
        profile = read_profile(folder)
        if op.kind == "attention":
            seconds, source, detail = profile.attention(op)
        else:
            layer = LAYERS.get(op.name)
            if layer is None or layer not in profile.layers or op.kind == "host":
                return None
            seconds, source, detail = profile.layer(layer, op.shape[0])
        return OpTime(seconds, SPREAD * seconds, source, detail)


class Profile:
    """One folder: curves of layers and the grid of attention, times in seconds."""

    def __init__(
        self, layers: Mapping[str, tuple[Sequence[float], Sequence[float]]], grid: Mapping[tuple[float, ...], float]
    ) -> None:
        self.layers = layers
        self._grid = grid
        self._axes = [sorted({key[i] for key in grid}) for i in range(len(ATTENTION))]
        self._known: dict[tuple[float, ...], float | None] = {}

    def layer(self, name: str, rows: float) -> tuple[float, str, str]:
        at, seconds = self.layers[name]
        if rows > at[-1]:  # the last two points say how it goes on
            slope = (seconds[-1] - seconds[-2]) / (at[-1] - at[-2]) if len(at) > 1 else seconds[-1] / at[-1]
            return seconds[-1] + max(slope, 0.0) * (rows - at[-1]), "extrapolated", f"{name} beyond {at[-1]:g} rows"
        pairs = _around(at, rows)
        found = sum(weight * seconds[bisect_left(at, x)] for x, weight in pairs)
        return found, "measured" if len(pairs) == 1 else "interpolated", f"{name} at {rows:g} rows"

    def attention(self, op: Op) -> tuple[float, str, str]:
        contexts = [row.keys for row in op.rows if row.queries == 1]
        chunks = [row for row in op.rows if row.queries > 1]
        fed = sum(row.queries for row in chunks)
        before = sum(row.keys - row.queries for row in chunks) / len(chunks) if chunks else 0.0
        mean = sum(contexts) / len(contexts) if contexts else 0.0
        seconds = self._mixed(fed, before, len(contexts), mean)
        if contexts:
            longest = self._mixed(fed, before, len(contexts), max(contexts))
            seconds += SKEW * max(0.0, longest - seconds)
        return (
            seconds,
            "interpolated",
            f"{fed} prompt tokens after {before:.0f}, {len(contexts)} rows at {mean:.0f} keys",
        )

    def _mixed(self, fed: float, before: float, rows: float, keys: float) -> float:
        together = self._at(fed, before, rows, keys)
        if together is not None:
            return together
        # the grid has no such mix: both parts apart
        return (self._at(fed, before, 0, 0) or 0.0) + (self._at(0, 0, rows, keys) or 0.0)

    def _at(self, *point: float) -> float | None:
        """Multilinear between grid points that were measured; None when none of the corners was."""
        if point in self._known:
            return self._known[point]
        total = weights = 0.0
        for corner in itertools.product(*(_around(axis, x) for axis, x in zip(self._axes, point, strict=True))):
            value = self._grid.get(tuple(x for x, _ in corner))
            if value is not None:
                weight = 1.0
                for _, part in corner:
                    weight *= part
                total, weights = total + weight * value, weights + weight
        found = total / weights if weights else None
        self._known[point] = found
        return found


def _around(axis: Sequence[float], x: float) -> list[tuple[float, float]]:
    """Grid points around `x` with their weights; the end points hold beyond the grid."""
    at = bisect_left(axis, x)
    if at < len(axis) and axis[at] == x:
        return [(x, 1.0)]
    if at in (0, len(axis)):
        return [(axis[0 if at == 0 else -1], 1.0)]
    share = (x - axis[at - 1]) / (axis[at] - axis[at - 1])
    return [(axis[at - 1], 1 - share), (axis[at], share)]


@lru_cache(maxsize=8)
def read_profile(folder: str) -> Profile:
    """The profile in `folder`; ConfigError that names the file and what it lacks."""
    points: dict[str, list[tuple[float, float]]] = {}
    for name, axis in (("dense.csv", "tokens"), ("per_sequence.csv", "sequences")):
        for row in _rows(folder, name, ("layer", axis, "time_us")):
            points.setdefault(str(row["layer"]), []).append(
                (_number(folder, name, row, axis), _seconds(folder, name, row))
            )
    grid = {
        tuple(_number(folder, "attention.csv", row, a) for a in ATTENTION): _seconds(folder, "attention.csv", row)
        for row in _rows(folder, "attention.csv", (*ATTENTION, "time_us"))
    }
    curves = {}
    for layer, measured in points.items():
        measured.sort()
        curves[layer] = ([x for x, _ in measured], [s for _, s in measured])
    return Profile(curves, grid)


def _rows(folder: str, name: str, columns: Sequence[str]) -> list[dict[str, str]]:
    path = Path(folder) / name
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            missing = [c for c in columns if c not in (reader.fieldnames or ())]
            if not missing:
                return list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(
            "--op-time-model profiled:folder",
            folder,
            f"{name} cannot be read ({error})",
            "give the folder of a profile",
        ) from None
    raise ConfigError(
        "--op-time-model profiled:folder",
        folder,
        f"{name} has no column {missing[0]!r}",
        f"it needs {', '.join(columns)}",
    )


def _number(folder: str, name: str, row: Mapping[str, str], column: str) -> float:
    try:
        return float(row[column])
    except (TypeError, ValueError):
        raise ConfigError(
            "--op-time-model profiled:folder",
            folder,
            f"{name}: {column}={row[column]!r} is not a number",
            "repair that row",
        ) from None


def _seconds(folder: str, name: str, row: Mapping[str, str]) -> float:
    return _number(folder, name, row, "time_us") * 1e-6


__all__ = ["LAYERS", "Profile", "Profiled", "read_profile"]
